"""Uses of a checkpoint other than resuming: its weights for --init-from, its options for --evaluate and predict.py."""

import dataclasses
import json
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp.checkpoint import storage
from ddp.checkpoint.state import FixedShapes
from ddp.checkpoint.storage import CheckpointDirectory, InvalidCheckpoint, read_on_main, verify
from ddp.core.errors import CheckpointError, SetupError, UsageError, first_few
from ddp.core.options import flag_of
from ddp.core.run_config import RESUME_WORDS, Config, RunConfig
from ddp.data.samples import changes
from ddp.distributed.process_group import DistContext
from ddp.distributed.rank_env import RankEnv
from ddp.distributed.seeds import keep_random_state, seed_everything
from ddp.distributed.tensors import local, split_like, whole_tree

log = logging.getLogger(__name__)
NAMES = ("state_dict", "model_state_dict", "model")  # under which files of other programs hold the weights of a model
PREFIXES = ("module.", "_orig_mod.", "module.")  # of DistributedDataParallel and torch.compile, in either order


# ---- options --------------------------------------------------------------------------------------------------------


def with_saved_options(config: Config, env: RankEnv) -> Config:
    """For --evaluate, `config` with the options of the checkpoint to evaluate; but those of the command line win.

    The machine of rank 0 must have the file; on one without it, the command line counts, and ranks that differ are
    refused. Raises CheckpointError, or UsageError if options contradict others.
    """
    if not config.evaluate:
        return config
    paths, saved = [Path(config.resume)], {}
    if config.resume in RESUME_WORDS:
        paths = CheckpointDirectory(config).paths()
    reasons = []
    for path in paths:
        try:
            saved = _saved_options(path) if env.rank == env.local_rank or os.path.exists(path) else {}
            break
        except CheckpointError as error:
            reasons.append(str(error))
    else:
        if reasons:
            raise CheckpointError("; ".join(reasons))
    taken = {name: saved[name] for name in saved_names(config) if name in saved}
    for name in sorted(config.given & taken.keys()):
        ours, theirs = getattr(config, name), taken.pop(name)
        if ours != theirs:
            log.info(f"{flag_of(name)} {ours}, although {path} was trained with {theirs}")
    config = dataclasses.replace(config, **taken)
    config.check()
    return config


def saved_names(config: RunConfig) -> list[str]:
    """The options that an evaluation takes from a checkpoint: those that loss and data depend on."""
    sections, more = ("data", "training"), ("seed", "precision", "matmul_precision")
    items = [item for item in dataclasses.fields(config) if item.name != "evaluate"]
    return [item.name for item in items if item.metadata["section"] in sections or item.name in more]


def _saved_options(path: Path) -> dict[str, Any]:
    """The options in a checkpoint. Its digest is verified when its weights are loaded."""
    try:
        return dict(storage.load(path)["config"])  # reads no weights where files can be mapped
    except Exception as error:
        cause = error.__cause__ if isinstance(error, InvalidCheckpoint) else error
        reason = cause.strerror if isinstance(cause, OSError) else "it is no checkpoint of this project, or damaged"
        raise CheckpointError(f"{path} cannot be used: {reason}") from error


def load_checkpoint(path: Path, config_class: type[Config]) -> tuple[dict[str, Any], Config]:
    """The content of a checkpoint, and all options that its run had. Raises CheckpointError."""
    content = storage.read(path)
    content |= whole_tree({name: content[name] for name in ("model", "ema") if name in content})  # not the optimizer
    if "dataset" not in content:
        raise CheckpointError(f"{path} is of an earlier version of this project, which did not store the classes")
    names = {item.name for item in dataclasses.fields(config_class)}
    return content, config_class(**{name: value for name, value in content["config"].items() if name in names})


# ---- weights --------------------------------------------------------------------------------------------------------


def init_weights(
    model: torch.nn.Module,
    config: RunConfig,
    ctx: DistContext,
    name: str = "model",
    build: Callable[[], torch.nn.Module] | None = None,
) -> None:
    """Load the weights of --init-from into `model`, unless the run resumes.

    name: the field of Training. build: makes another model like this one, with random weights of its own. Call on every
    rank, after the model was wrapped. Raises CheckpointError, UsageError or SetupError.
    """
    # Rank 0's option counts: the others may have another path.
    source = ctx.on_main(lambda: None if CheckpointDirectory(config).paths() else config.init_from)
    if source is None:
        return
    own = model.state_dict()

    def keep(keys: tuple[str, ...], tensor: Tensor) -> Tensor:
        like = own.get(keys[1], tensor)
        return split_like(like, tensor) if like.shape == tensor.shape else tensor

    content, _ = read_on_main(ctx, lambda: {"weights": read_weights(config, name, own)}, keep)
    loaded = load_weights(model, content["weights"], source)
    _refuse_random_constants(model, loaded, build, config, ctx)


def read_weights(config: RunConfig, name: str, own: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """The weights of --init-from, by their names in the model, whose state_dict is `own`.

    name: the part of a checkpoint that holds them. Raises UsageError, CheckpointError, or SetupError if they cannot be
    downloaded. Runs no code from the file.
    """
    if config.init_from == "torchvision":
        return _of_torchvision(getattr(config, "model", ""))
    path = Path(str(config.init_from))
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        if isinstance(content, dict) and isinstance(content.get("format"), int):  # a checkpoint
            verify(path)
            content = storage.read_files(path, content)
    except InvalidCheckpoint as error:
        raise CheckpointError(f"--init-from {error}") from error
    except OSError as error:
        raise CheckpointError(f"--init-from {path} cannot be used: {error.strerror or error}") from error
    except Exception as error:
        remedy = "save a state_dict() with torch.save, and nothing else"
        raise CheckpointError(f"--init-from {path} holds no weights that torch can load safely: {remedy}") from error
    content = content if isinstance(content, Mapping) else {}
    average = ("ema",) if name == "model" else ()  # it is what was evaluated
    found = next((key for key in (*average, name, *NAMES) if isinstance(content.get(key), Mapping)), None)
    content = content if found is None else whole_tree(content[found])
    weights = {key: value for key, value in content.items() if isinstance(key, str) and isinstance(value, Tensor)}
    if not weights:
        raise CheckpointError(f"--init-from {path} holds no weights: it needs a state_dict, or a checkpoint of a run")
    # Of the modules, by name: an older one may load otherwise. Without what else torch stores there.
    versions = {key: {"version": each["version"]} for key, each in (getattr(content, "_metadata", None) or {}).items()}
    theirs, ours = _prefix(weights), _prefix(own)
    renamed = {ours + key.removeprefix(theirs): value for key, value in weights.items()}
    if len(renamed.keys() & own.keys()) > len(weights.keys() & own.keys()):
        versions = {(ours + f"{key}.".removeprefix(theirs)).rstrip("."): value for key, value in versions.items()}
        return _with_versions(renamed, versions)
    return _with_versions(weights, versions)


def _prefix(names: Collection[str]) -> str:
    """What DistributedDataParallel or torch.compile have put before all of these names."""
    found = ""
    for prefix in PREFIXES:
        found += prefix * all(name.startswith(found + prefix) for name in names)
    return found


def _with_versions(weights: Mapping[str, Tensor], versions: Any) -> Mapping[str, Tensor]:
    state: Any = OrderedDict(weights)
    if versions:
        state._metadata = versions
    return state


def warn_of_other_split(config: RunConfig, ours: Mapping[str, Any]) -> None:
    """Warn if the weights of --init-from may have been trained on what validates here: the same data, another split.

    ours: what a checkpoint of this run holds about the data.
    """
    try:
        theirs = storage.load(Path(str(config.init_from)))  # reads no weights where files can be mapped
        seed, records = theirs["config"]["seed"], [json.loads(each["records"]) for each in (ours, theirs)]
        classes = [each["dataset"].get("classes") for each in (ours, theirs)]
        totals = [each["training"]["count"] + each["validation"]["count"] for each in records]
    except Exception:
        return  # no checkpoint with such a record
    one, other = (each["validation"] for each in records)
    is_other = one["keys"] != other["keys"]
    if not (one["keys"] and other["keys"]):  # with the same seed, a sample may be another one by its size
        is_other = one["count"] != other["count"] or (
            seed != config.seed and bool(changes({"validation": one}, {"validation": other})[0])
        )
    if is_other and classes[0] == classes[1] and totals[0] == totals[1]:
        told = f"{config.init_from} was trained with --seed {seed} (here {config.seed}) and other validation samples"
        log.warning(f"warning: {told}: the weights of --init-from may have been trained on those of this run")


def load_weights(model: torch.nn.Module, weights: Mapping[str, Tensor], source: str) -> list[str]:
    """Load what fits, log what does not; return what was loaded, by name. Raises CheckpointError if nothing fits."""
    own = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    common, fixed = [name for name in own if name in weights], FixedShapes({"model": model}).of({"model": own})
    fitting = {name: weights[name] for name in common if name not in fixed or weights[name].shape == own[name].shape}
    if not fitting:
        first = next(iter(weights))
        theirs = f"its first weight is {first} {list(weights[first].shape)}"
        raise CheckpointError(f"--init-from {source}: none of its weights fits this model; {theirs}")
    model.load_state_dict(_with_versions(fitting, getattr(weights, "_metadata", None)), strict=False)
    log.info(f"weights from {source}: {len(fitting)} of {len(own)}")
    resized = [f"{name} {list(weights[name].shape)}" for name in common if name not in fitting]
    unused = {
        "of another size, so initialised anew": resized,
        "missing, so initialised anew": [name for name in own if name not in weights],
        "not in this model": [name for name in weights if name not in own],
    }
    for title, names in unused.items():
        if names:
            log.info(f"  {title}: {first_few(names)}")
    if len(fitting) < len(own) / 2:
        log.warning(f"warning: most weights of this model are not from {source}: is that another model?")
    return list(fitting)


def _refuse_random_constants(
    model: torch.nn.Module, loaded: list[str], build: Any, config: RunConfig, ctx: DistContext
) -> None:
    """Raise CheckpointError for a weight that is neither loaded nor trained, unless it does not depend on the seed."""
    known = {id(weight) for name, weight in model.named_parameters(remove_duplicate=False) if name in loaded}
    frozen = {name: each for name, each in model.named_parameters() if not (each.requires_grad or id(each) in known)}
    others: dict[str, Tensor] = {}
    if frozen and build is not None:
        with keep_random_state():
            seed_everything(config.seed + 1)
            others = dict(build().named_parameters())
    same = [name for name in frozen.keys() & others if torch.equal(local(frozen[name]).cpu(), local(others[name]))]
    random = [name for name in frozen if name not in same]
    if random := list(dict.fromkeys(name for names in ctx.gather(random) for name in names)):
        remedy = "load it in build_model, train it, or take another file"
        weights = f"{first_few(random)}: frozen, and not in the file, so random"
        raise CheckpointError(f"--init-from {config.init_from}: {weights}: {remedy}")


def _of_torchvision(model: str) -> Mapping[str, Tensor]:
    """The weights that torchvision recommends for --model. They are downloaded once, into TORCH_HOME."""
    import torchvision  # slow to import, and only needed here

    if model not in torchvision.models.list_models(module=torchvision.models):
        raise UsageError(f"--init-from torchvision: it has no weights for {model or 'this model'}; pass a file")
    weights = torchvision.models.get_model_weights(model).DEFAULT
    try:
        return weights.get_state_dict(progress=False, check_hash=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: the hash is another one
        remedy = "download it, and pass its path to --init-from"
        raise SetupError(f"--init-from torchvision: cannot download {weights.url}: {error}; {remedy}") from error
