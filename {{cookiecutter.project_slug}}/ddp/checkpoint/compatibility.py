"""Whether a checkpoint belongs to this run: the differences, as text for the user."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from ddp.core.options import flag_of
from ddp.core.run_config import RunConfig


def weight_differences(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> list[str]:
    """Differences in the names and shapes of the weights."""
    differences = [f"{name} is not in the checkpoint" for name in ours if name not in theirs]
    differences += [f"{name} is in the checkpoint only" for name in theirs if name not in ours]
    for name in ours:
        # Not every entry is a tensor: a module may have an extra state.
        if name in theirs and getattr(ours[name], "shape", None) != getattr(theirs[name], "shape", None):
            differences.append(f"{name} was {list(theirs[name].shape)}, is {list(ours[name].shape)}")
    return differences


def part_differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """What only one of the two has, and weights that differ. `ours`: objects; `theirs`: states. Both by name."""
    differences = [f"{name} is not in the checkpoint" for name in ours if name not in theirs]
    differences += [f"{name} is in the checkpoint only" for name in theirs if name not in ours]
    for name, part in ours.items():
        if isinstance(part, torch.nn.Module) and name in theirs:
            prefix = "" if name == "model" else f"{name}."
            differences += [prefix + text for text in weight_differences(part.state_dict(), theirs[name])]
    return differences


def class_differences(ours: Sequence[str], theirs: Sequence[str]) -> list[str]:
    """Why the targets of a dataset mean other classes than before; no reason, if one of them does not name any."""
    if not ours or not theirs:
        return []
    if len(ours) != len(theirs):
        return [f"the data had {len(theirs):,} classes, have {len(ours):,}"]
    changed = [number for number, name in enumerate(ours) if name != theirs[number]]
    return [f"class {number} of the data was {theirs[number]}, is {ours[number]}" for number in changed]


def source_differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """The project's files that have changed."""
    return sorted(name.removeprefix("the file ") for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))


def run_differences(config: RunConfig, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Differences in options, data, and classes such as the optimizer's that make this a different run."""
    defaults = {item.name: item.default for item in fields(config)}  # for options that the checkpoint does not know
    then, now = {**defaults, **theirs["config"]}, ours["config"]
    names = [item.name for item in fields(config) if not item.metadata["may_change_on_resume"]]
    if theirs["global_batch"] != ours["global_batch"]:
        names += ["batch_size", "grad_accum_steps"]  # they may change while the global batch stays the same
    differences = [f"{flag_of(name)} was {then[name]}, is {now[name]}" for name in names if then[name] != now[name]]
    if theirs["samples"] != ours["samples"]:
        differences.append(f"training samples were {theirs['samples']:,}, are {ours['samples']:,}")
    for name, kind in ours["classes"].items():
        if name in theirs["classes"] and theirs["classes"][name] != kind:
            differences.append(f"the {name} was {theirs['classes'][name]}, is {kind}")
    return differences


def first_few(differences: list[str], limit: int = 6) -> str:
    """The first of many differences, and the number of the others."""
    more = len(differences) - limit
    return "; ".join(differences[:limit]) + (f"; and {more} more" if more > 0 else "")
