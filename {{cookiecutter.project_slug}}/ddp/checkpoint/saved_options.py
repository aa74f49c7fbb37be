"""The options in a checkpoint: for --evaluate those that loss and data depend on, for predict.py all."""

import dataclasses
import logging
from pathlib import Path
from typing import Any, TypeVar

import torch

from ddp.checkpoint import checkpoint_file
from ddp.checkpoint.directory import CheckpointDirectory
from ddp.core.errors import CheckpointError
from ddp.core.options import flag_of
from ddp.core.run_config import RunConfig
from ddp.distributed.rank_env import RankEnv

log = logging.getLogger(__name__)
Config = TypeVar("Config", bound=RunConfig)
SECTIONS = ("data", "training")  # of --help
MORE = ("seed", "precision", "matmul_precision")


def with_saved_options(config: Config, env: RankEnv) -> Config:
    """For --evaluate, `config` with the options of the checkpoint to evaluate; but those of the command line win.

    Only if --resume or --output-dir names it. The machine of rank 0 must have the file; on one without it, the command
    line counts, and ranks that differ are refused. Raises CheckpointError, or UsageError if options contradict others.
    """
    if not config.evaluate:
        return config
    path = _path(config)
    saved = {} if path is None else _read(path, on_first_machine=env.rank == env.local_rank)
    taken = {name: saved[name] for name in saved_names(config) if name in saved}
    for name in sorted(config.given & taken.keys()):
        ours, theirs = getattr(config, name), taken.pop(name)
        if ours != theirs:
            log.info(f"{flag_of(name)} {ours}, although {path} was trained with {theirs}")
    config = dataclasses.replace(config, **taken)
    config.check()
    return config


def load_checkpoint(path: Path, config_class: type[Config]) -> tuple[dict[str, Any], Config]:
    """The content of a checkpoint, and all options that its run had. Raises CheckpointError."""
    try:
        content = checkpoint_file.read(path)
    except checkpoint_file.InvalidCheckpoint as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from error
    if "dataset" not in content:
        raise CheckpointError(f"{path} is of an earlier version of this project, which did not store the classes")
    names = {item.name for item in dataclasses.fields(config_class)}
    return content, config_class(**{name: value for name, value in content["config"].items() if name in names})


def saved_names(config: RunConfig) -> list[str]:
    """The options that an evaluation takes from a checkpoint."""
    fields = dataclasses.fields(config)
    found = [item.name for item in fields if item.metadata["section"] in SECTIONS or item.name in MORE]
    return [name for name in found if name != "evaluate"]


def _path(config: RunConfig) -> Path | None:
    if config.resume != "auto":
        return Path(config.resume)
    paths = CheckpointDirectory(Path(config.output_dir), config.keep_checkpoints).paths() if config.output_dir else []
    return paths[0] if paths else None


def _read(path: Path, *, on_first_machine: bool) -> dict[str, Any]:
    """The options in a checkpoint. Its digest is verified when its weights are loaded."""
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)  # reads no weights
        return dict(content["config"])
    except Exception as error:
        if isinstance(error, FileNotFoundError) and not on_first_machine:
            return {}
        reason = error.strerror if isinstance(error, OSError) else "it is no checkpoint of this project, or damaged"
        raise CheckpointError(f"{path} cannot be used: {reason}") from error
