"""State in memory: the progress of a run; copy state for a checkpoint, reduce it to a digest."""

import hashlib
import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch

from ddp.core.errors import UsageError
from ddp.distributed.shards import is_split, local, whole
from ddp.distributed.tensors import Copy, CpuStreams, Mark, map_named, named_leaves

PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes, torch.dtype)


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
        if self.best is not None and not math.isnan(self.best) and not value > self.best:
            return False
        self.best, self.best_step, self.epochs_since_best = value, self.step, 0
        self.best_metrics = {name: float(each) for name, each in metrics.items()}
        return True


def check_parts(parts: Mapping[str, Any], reserved: Container[str]) -> None:
    """Raise UsageError for a field of Training that no checkpoint can hold, or that would have no effect."""
    for name, part in parts.items():
        what = f"Training.{name} in main.py ({type(part).__name__})"
        if name in reserved:
            raise UsageError(f"Training.{name} in main.py: checkpoints use that name; rename the field")
        if isinstance(part, torch.optim.lr_scheduler.LRScheduler):
            remedy = "subclass Schedule instead, as 'A schedule of your own' in docs/recipes.md does"
            raise UsageError(f"{what} would have no effect, because run.steps() sets the learning rate: {remedy}")
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise UsageError(f"{what} cannot be saved: give it state_dict() and load_state_dict(state), or remove it")


def check_state(state: Any) -> None:
    """Raise TypeError if a checkpoint cannot hold `state`, or torch.load(weights_only=True) would refuse it."""
    for keys, part in named_leaves(state):
        if part.is_meta if isinstance(part, torch.Tensor) else type(part) not in PLAIN_TYPES:
            name = "state" + "".join(f"[{key!r}]" for key in keys)
            what = "is on the device meta" if isinstance(part, torch.Tensor) else f"is of {type(part)}"
            raise TypeError(f"{name} {what}, which no checkpoint can hold: use a tensor or a plain number")


def snapshot(state: Any, streams: CpuStreams, keep: bool = True) -> tuple[Any, Mark]:
    """A copy of `state` in host memory, and when it is complete. Call on every rank: tensors may be split.

    keep: False on the ranks that only send their rows.
    """
    copies: dict[Any, torch.Tensor] = {}  # tied weights stay one tensor

    def copy_once(copy: Copy, keys: tuple[Any, ...], tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:  # a part writes what belongs there
            return tensor
        # Not the data_ptr of a DTensor, which is always 0, as is that of a rank without rows.
        own = local(tensor.detach())
        place = own.data_ptr() or own.untyped_storage().data_ptr() or id(tensor)
        key = (place, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if key not in copies:
            everything = whole(tensor.detach())
            copies[key] = copy(everything) if keep else torch.empty(0)
        return copies[key]

    return streams.download(lambda copy: map_named(state, partial(copy_once, copy)))


def digest(state: Any) -> str:
    """SHA-256 of everything in `state`, tensors by their bytes."""
    result = hashlib.sha256()
    for keys, part in named_leaves(state):
        if isinstance(part, torch.Tensor):
            result.update(f"{keys}{part.dtype}{tuple(part.shape)}".encode())
            if not is_split(part):  # the ranks have different rows
                result.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        else:
            result.update(f"{keys}{part!r}".encode())
    return result.hexdigest()
