"""The progress of a run; whether a checkpoint belongs to it."""

import json
import logging
import math
import os
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from ddp.core.errors import UsageError, differences, first_few
from ddp.core.options import REMOVED, flag_of
from ddp.core.run_config import ELASTIC_VARIABLE, RunConfig
from ddp.data.samples import Records, changes

log = logging.getLogger(__name__)


@dataclass
class TrainState:
    """The progress of a run. `samples_consumed`: samples of the current epoch that all ranks together have used."""

    step: int = 0
    epoch: int = 0
    samples_consumed: int = 0
    best: float | None = None  # the highest value of the metric for the best model
    best_step: int = 0
    best_metrics: dict[str, float] = field(default_factory=dict)
    evaluated_step: int | None = None  # the step of the last evaluation
    epochs_since_best: int = 0
    logged_step: int = 0  # the last step that a logged training figure covers
    epoch_start: int = 0  # the last step before this epoch

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "TrainState":
        """The progress that a checkpoint holds. One of an earlier version may lack a field."""
        return cls(**{item.name: content[item.name] for item in fields(cls) if item.name in content})

    def update_best(self, value: float, metrics: Mapping[str, float]) -> bool:
        """Record `value` if it is the highest so far, and return whether it is. Any number is better than a NaN."""
        if self.best is not None and not (value > self.best or math.isnan(value) < math.isnan(self.best)):
            return False
        self.best, self.best_step, self.epochs_since_best = value, self.step, 0
        self.best_metrics = {name: float(each) for name, each in metrics.items()}
        return True


def check_parts(parts: Mapping[str, Any], reserved: Container[str]) -> None:
    """Raise UsageError for a field of Training that no checkpoint can hold, or that would have no effect."""
    scheduled = [getattr(part, "optimizer", None) for part in parts.values() if hasattr(part, "start_step")]
    for name, part in parts.items():
        what = f"Training.{name} in main.py ({type(part).__name__})"
        if name in reserved:
            raise UsageError(f"Training.{name} in main.py: checkpoints use that name; rename the field")
        is_of_torch = isinstance(part, torch.optim.lr_scheduler.LRScheduler)
        if is_of_torch and any(each is part.optimizer for each in scheduled):
            remedy = "subclass Schedule instead, as 'A schedule of your own' in docs/recipes.md does"
            raise UsageError(f"{what} would have no effect, because run.steps() sets the learning rate: {remedy}")
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise UsageError(f"{what} cannot be saved: give it state_dict() and load_state_dict(state), or remove it")


def check_weights(parts: Mapping[str, Any]) -> None:
    """Raise UsageError for an optimizer of torch with a weight, or with a scheduler, that no field of Training saves.

    Another optimizer, or a field of the owner, may save them itself.
    """
    others = [part for part in parts.values() if not isinstance(part, torch.nn.Module | torch.optim.Optimizer)]
    if all(type(part).__module__.partition(".")[0] in ("torch", "ddp") for part in others):
        for name, weights in weights_of_optimizers(parts).items():
            if None in dict(weights) and type(parts[name]).__module__.startswith("torch."):
                remedy = "add the model that has it as a field, or make it an nn.Parameter of one"
                raise UsageError(f"Training.{name} in main.py trains a weight that no checkpoint would hold: {remedy}")
            followed = any(getattr(part, "optimizer", None) is parts[name] for part in others)
            of_torch = type(parts[name]).__module__.startswith("torch.")
            if of_torch and hasattr(parts[name].step, "_wrapped_by_lr_sched") and not followed:  # torch marks it
                what = f"a scheduler of torch sets the rate of Training.{name} in main.py"
                raise UsageError(f"{what}, and no checkpoint would hold it: add it as a field of Training")
        _warn_of_untrained_weights(parts)


def _warn_of_untrained_weights(parts: Mapping[str, Any]) -> None:
    """Warn of weights that no optimizer has, of a model that is trained otherwise."""
    groups = [group for part in parts.values() for group in getattr(part, "param_groups", ())]
    trained = {id(weight) for group in groups for weight in group["params"]}
    for model in [part for part in parts.values() if isinstance(part, torch.nn.Module)]:
        weights = {name: id(weight) for name, weight in model.named_parameters() if weight.requires_grad}
        names = [name for name, key in weights.items() if key not in trained]
        if names and len(names) < len(weights):
            remedy = "add them in build_optimizer, or freeze them with requires_grad_(False)"
            log.info(f"warning: no optimizer trains {first_few(names)}: {remedy}")  # on rank 0


def check_fields(training: Any, parts: Mapping[str, Any]) -> None:
    """Raise UsageError if a field of `training` is no longer the one in `parts`, which checkpoints hold."""
    for name in (each.name for each in fields(training)):
        if getattr(training, name) is not parts.get(name):
            remedy = "make it before, or change it in place"
            raise UsageError(f"Training.{name} in main.py was replaced after run.resume(), and not saved: {remedy}")


def weights_of_optimizers(fields: Mapping[str, Any]) -> dict[str, list[tuple[str | None, str]]]:
    """The name and the dtype of each weight of the optimizers in `fields`, in the order that their states follow."""
    models = {key: part for key, part in fields.items() if isinstance(part, torch.nn.Module)}
    names = {id(each): f"{key}.{name}" for key, part in models.items() for name, each in part.named_parameters()}
    groups = {key: part.param_groups for key, part in fields.items() if hasattr(part, "param_groups")}
    weights = {key: [each for group in groups[key] for each in group["params"]] for key in groups}
    return {key: [(names.get(id(each)), str(each.dtype)) for each in weights[key]] for key in weights}


def group_sizes(fields: Mapping[str, Any]) -> dict[str, list[int]]:
    """The number of weights in each group of the optimizers that load no other ones."""
    load = torch.optim.Optimizer.load_state_dict
    plain = {name: part for name, part in fields.items() if getattr(type(part), "load_state_dict", None) is load}
    return {name: [len(group["params"]) for group in part.param_groups] for name, part in plain.items()}


def keep_dtypes(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Undo that torch has cast what `optimizer` loaded from `state` to the dtypes of its weights: sums may be wider.

    For weights that have the dtypes that they had then. An optimizer that consists of others has another state.
    """
    numbers = [number for group in state.get("param_groups", ()) for number in group["params"]]
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for number, weight in zip(numbers, weights, strict=False):
        saved, loaded = state.get("state", {}).get(number), optimizer.state.get(weight)
        if isinstance(saved, Mapping) and isinstance(loaded, dict):
            for key, value in saved.items():
                if isinstance(value, torch.Tensor) and isinstance(now := loaded.get(key), torch.Tensor):
                    loaded[key] = now if now.dtype == value.dtype else value.to(now.device, copy=True)


class FixedShapes:
    """The shapes that load_state_dict expects as they are: those of the weights and buffers of the models in `fields`.

    Not those of buffers that a module loads in its own way, such as the ranges that fake quantisation has observed.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.models = {name: part for name, part in fields.items() if isinstance(part, torch.nn.Module)}
        self.own = {  # by model, what loads in its own way; a first pass may add such a hook to other modules
            name: tuple(
                prefix and f"{prefix}."
                for prefix, module in model.named_modules()
                if _loads_in_its_own_way(module, is_root=module is model)
            )
            for name, model in self.models.items()
        }

    def of(self, states: Mapping[str, Any]) -> dict[str, list[int]]:
        """Those in `states`, which are states by field."""
        shapes = {}
        for name, model in self.models.items():
            weights = {key for key, _ in model.named_parameters(remove_duplicate=False)}
            for key, value in states.get(name, {}).items():
                extra = key.endswith("_extra_state")  # of get_extra_state: a module loads it in its own way
                if key in weights or not (extra or key.startswith(self.own[name])):
                    shapes[key if name == "model" else f"{name}.{key}"] = list(getattr(value, "shape", ()))
        return shapes


def _loads_in_its_own_way(module: torch.nn.Module, is_root: bool) -> bool:
    """Or what is in it. torch calls `load_state_dict` of the root only."""
    names = ("load_state_dict", "_load_from_state_dict")[not is_root :]
    methods = (getattr(type(module), name) for name in names)
    replaced = any(not method.__module__.startswith("torch.nn.modules.") for method in methods)  # BatchNorm has one
    return replaced or bool(getattr(module, "_load_state_dict_pre_hooks", ()))


def run_differences(config: RunConfig, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """How a checkpoint differs from this run, as texts for the user: options, data, parts, names and sizes of weights.

    Both mappings hold the facts of a checkpoint; `parts`: states by name; and `shapes`: those that must be the same. An
    evaluation may have other options.
    """
    options = [] if config.evaluate else [item.name for item in fields(config) if not item.metadata["may_change"]]
    found = []
    # They may be unknown. An evaluation of other samples is fine, but not of other classes.
    labels, their_labels = (facts.get("dataset", {}).get("classes") for facts in (ours, theirs))
    if labels and their_labels:
        if len(labels) != len(their_labels):
            found.append(f"the data had {len(their_labels):,} classes, have {len(labels):,}")
        else:
            pairs = enumerate(zip(labels, their_labels, strict=True))
            found += [f"class {number} of the data was {b}, is {a}" for number, (a, b) in pairs if a != b]
    if not config.evaluate:
        sampler, before = (facts.get("dataset", {}).get("sampler", "Shuffled") for facts in (ours, theirs))
        if sampler != before:
            found.append(f"the sampler was {before}, is {sampler}")
        if theirs["global_batch"] != ours["global_batch"]:  # they may change while the global batch stays the same
            chosen = ELASTIC_VARIABLE in os.environ and theirs["world_size"] != ours["world_size"]
            options += ["batch_size"] if chosen else ["batch_size", "grad_accum_steps"]

    def outline(facts: Mapping[str, Any]) -> dict[str, Any]:
        values = {**vars(type(config)()), **facts["config"]}  # the default of one that a checkpoint does not know
        lines = {flag_of(name): values[name] for name in options}
        for name, (default, instead) in REMOVED.items() if not config.evaluate else ():
            lines[f"{flag_of(name)} ({instead})"] = values.get(name, default)
        if not config.evaluate:
            lines["--strict-resume: the number of processes"] = config.strict_resume and facts["world_size"]
        for name in facts["parts"]:
            lines[f"the {name}"] = None if config.evaluate else facts["classes"].get(name)
        return lines | facts["shapes"]

    texts = "{name} was {second}, is {first}", "{name} is not in the checkpoint", "{name} is in the checkpoint only"
    found += differences(outline(ours), outline(theirs), *texts)
    weights = {} if config.evaluate else theirs.get("weights_of", {})  # an earlier version did not save them
    for name, before in weights.items():
        for (now, _), (then, _) in zip(ours["weights_of"].get(name, before), before, strict=False):
            found += [f"the {name} has {now} in the place of {then}, whose state it would get"] * (now != then)
    return found


def scale_change(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """What another number of processes changes. The arguments are those of run_differences."""
    rates = [facts["parts"].get("schedule", {}).get("peak_lr") for facts in (ours, theirs)]
    pairs = {"global batch": (ours["global_batch"], theirs["global_batch"]), "learning rate": rates}
    known = {name: (now, before) for name, (now, before) in pairs.items() if None not in (now, before)}
    return ", ".join(
        f"the {name} was {before:.9g}, is {now:.9g}" if now != before else f"the {name} is still {now:.9g}"
        for name, (now, before) in known.items()
    )


def data_differences(config: RunConfig, ours: Records, samples: int, content: Mapping[str, Any]) -> list[str]:
    """How the data differ from those of a checkpoint, unless that is accepted, or samples were only removed.

    ours: the records of this run, and `samples` the number of its training samples.
    """
    theirs, path = json.loads(content.get("records", "{}")), Path(content["path"])
    if config.evaluate:  # of other samples, if its user likes
        if texts := changes(ours, theirs)[0]:
            log.info(f"since {path.name} was written: {first_few(texts)}")
        return []
    if not (ours and theirs):
        log.warning(f"warning: {path.name} has no record of the samples: only their number was compared")
        numbers = (samples, content["samples"])
        ours, theirs = ({"training": {"count": count, "keys": "", "samples": {}}} for count in numbers)
    changed, removed = changes(ours, theirs)
    accepted = changed if config.accept_changed_data else []
    for texts, how in ((removed, "were removed"), (accepted, "(--accept-changed-data)")):
        if texts:
            order = "the rest of this epoch is drawn anew"
            log.warning(f"warning: since {path.name} was written: {first_few(texts)} {how}: {order}")
    return [] if accepted else [f"{text} (--accept-changed-data continues with them)" for text in changed]
