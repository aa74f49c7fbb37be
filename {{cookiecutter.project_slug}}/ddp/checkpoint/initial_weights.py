"""--init-from: a new run begins with given weights: of a checkpoint, of a file, or of torchvision."""

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ddp.checkpoint import checkpoint_file
from ddp.checkpoint.compatibility import first_few
from ddp.checkpoint.directory import CheckpointDirectory
from ddp.core.errors import CheckpointError, SetupError, UsageError
from ddp.core.run_config import RunConfig
from ddp.distributed.process_group import DistContext

log = logging.getLogger(__name__)
TORCHVISION = "torchvision"
NAMES = ("state_dict", "model_state_dict", "model")  # under which files hold the weights of a model
PREFIXES = ("module.", "_orig_mod.")  # of DistributedDataParallel and torch.compile


def init_weights(model: torch.nn.Module, config: RunConfig, ctx: DistContext, name: str = "model") -> None:
    """Load the weights of --init-from into `model`, unless the run resumes. `name`: as passed to run.resume.

    Call on every rank, before the model is moved or wrapped. Raises CheckpointError, UsageError or SetupError.
    """
    directory = CheckpointDirectory(Path(config.output_dir), config.keep_checkpoints)
    if config.init_from is None or ctx.on_main(lambda: bool(directory.paths())):
        return
    weights: dict[str, Tensor] = {}
    ctx.on_main(lambda: weights.update(read_weights(config, name)))
    load_weights(model, ctx.broadcast_tree(weights), config.init_from)


def read_weights(config: RunConfig, name: str) -> dict[str, Tensor]:
    """The weights of --init-from, by their names in the model. `name`: the part of a checkpoint that holds them.

    Raises UsageError, CheckpointError, or SetupError if they cannot be downloaded. Runs no code from the file.
    """
    source = config.init_from
    if source == TORCHVISION:
        return _of_torchvision(getattr(config, "model", ""))
    path = Path(str(source))
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        if isinstance(content, dict) and "format" in content:
            content = checkpoint_file.read(path)  # verifies the digest
    except (OSError, checkpoint_file.InvalidCheckpoint) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CheckpointError(f"--init-from {path} cannot be used: {reason}") from error
    except Exception as error:
        remedy = "save a state_dict() with torch.save, and nothing else"
        raise CheckpointError(f"--init-from {path} holds no weights that torch can load safely: {remedy}") from error
    for key in (*(("ema",) if name == "model" else ()), name, *NAMES):  # the average is what was evaluated
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
            break
    weights = content if isinstance(content, Mapping) else {}
    weights = {key: value for key, value in weights.items() if isinstance(key, str) and isinstance(value, Tensor)}
    if not weights:
        raise CheckpointError(f"--init-from {path} holds no weights: it needs a state_dict, or a checkpoint of a run")
    for prefix in PREFIXES:
        if all(key.startswith(prefix) for key in weights):
            weights = {key.removeprefix(prefix): value for key, value in weights.items()}
    return weights


def load_weights(model: torch.nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Load what fits, and log what does not. Raises CheckpointError if nothing fits."""
    own = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    common = [name for name in own if name in weights]
    fitting = [name for name in common if weights[name].shape == own[name].shape]
    if not fitting:
        first = next(iter(weights))
        theirs = f"its first weight is {first} {list(weights[first].shape)}"
        raise CheckpointError(f"--init-from {source}: none of its weights fits this model; {theirs}")
    model.load_state_dict({name: weights[name] for name in fitting}, strict=False)
    log.info(f"weights from {source}: {len(fitting)} of {len(own)}")
    resized = [f"{name} {list(weights[name].shape)}" for name in common if name not in fitting]
    _log_names("of another size, so initialised anew", resized)
    _log_names("missing, so initialised anew", [name for name in own if name not in weights])
    _log_names("not in this model", [name for name in weights if name not in own])
    if len(fitting) < len(own) / 2:
        log.warning(f"warning: most weights of this model are not from {source}: is that another model?")


def _log_names(title: str, names: list[str]) -> None:
    if names:
        log.info(f"  {title}: {first_few(names)}")


def _of_torchvision(model: str) -> dict[str, Tensor]:
    """The weights that torchvision recommends for --model. They are downloaded once, into TORCH_HOME."""
    import torchvision  # slow to import, and only needed here

    if model not in torchvision.models.list_models(module=torchvision.models):
        raise UsageError(f"--init-from torchvision: it has no weights for {model or 'this model'}; pass a file")
    weights = torchvision.models.get_model_weights(model).DEFAULT
    try:
        return dict(weights.get_state_dict(progress=False, check_hash=True))
    except (OSError, RuntimeError) as error:  # RuntimeError: the hash is another one
        remedy = "download it, and pass its path to --init-from"
        raise SetupError(f"--init-from torchvision: cannot download {weights.url}: {error}; {remedy}") from error
