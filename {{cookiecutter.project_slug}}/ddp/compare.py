"""Whether a checkpoint belongs to this run: how it differs, in words for the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import torch

from config import Config


def model_differences(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> list[str]:
    """How the names and shapes of our weights differ from those in a checkpoint."""
    differences = [f"{name} is not in the checkpoint" for name in ours if name not in theirs]
    differences += [f"{name} is in the checkpoint only" for name in theirs if name not in ours]
    for name in ours:
        # Not every entry is a tensor: a module may have an extra state.
        if name in theirs and getattr(ours[name], "shape", None) != getattr(theirs[name], "shape", None):
            differences.append(f"{name} was {list(theirs[name].shape)}, is {list(ours[name].shape)}")
    return differences


def class_differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Where what main.py makes is of another class than in a checkpoint: another optimizer, say."""
    return [
        f"the {name} was {theirs.get(name, 'not there')}, is {ours[name]}"
        for name in ours
        if ours[name] != theirs.get(name)
    ]


def code_differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """The files of the project that are not what they were."""
    return sorted(name.removeprefix("the file ") for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))


def in_short(differences: list[str], most: int = 6) -> str:
    """The first of many differences, and how many more there are."""
    more = len(differences) - most
    return "; ".join(differences[:most]) + (f"; and {more} more" if more > 0 else "")


def run_differences(config: Config, content: Mapping[str, Any], global_batch: int, samples: int) -> list[str]:
    """How our options and data differ from those in the checkpoint `content`, where that makes it another run."""
    defaults = {item.name: item.default for item in fields(Config)}  # of options that are newer than the checkpoint
    then, now = {**defaults, **content["config"]}, asdict(config)
    names = [item.name for item in fields(Config) if not item.metadata["free"]]
    if content["global_batch"] != global_batch:
        names += ["batch_size", "grad_accum_steps"]  # they may change as long as the global batch stays
    differences = [
        f"--{name.replace('_', '-')} was {then.get(name)}, is {now[name]}"
        for name in names
        if then.get(name) != now[name]
    ]
    if content["samples"] != samples:
        differences.append(f"training samples were {content['samples']:,}, are {samples:,}")
    return differences
