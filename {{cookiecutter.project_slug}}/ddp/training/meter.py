"""Totals of metrics over batches and ranks, and the speed of the training."""

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any

import numpy
import torch

from ddp.core.errors import Diverged, UsageError
from ddp.distributed.process_group import DistContext
from ddp.distributed.tree import map_tensors

Totals = dict[str, Any]  # tensors; lists of one entry per sample
MAX_PENDING_NUMBERS = 200  # numbers that wait to be added, on the device: 64 batches of a loss, a count and a metric


class Meter:
    """Adds up a task's batch_totals over batches, on the device, and over ranks when asked. Lists are gathered."""

    may_be_infinite = True  # a metric; the loss is checked here

    def __init__(self, ctx: DistContext) -> None:
        self.ctx = ctx
        self.pending: list[dict[str, Any]] = []  # batches that are not added yet; on the device
        self.pending_numbers = 0  # a confusion matrix holds many
        self.local: dict[str, torch.Tensor] = {}  # not reduced yet; on the device
        self.lists: dict[str, list[list[Any]]] = {}  # not gathered yet: those of each batch
        self.total: Totals = {}  # over all ranks; on the host, and the same on every rank
        self.zeros: Totals | None = None  # what there is to add: zeros and empty lists
        self.epoch: Totals | None = {}  # all that was taken in this epoch, without lists; None if that is not known

    def add(self, batch_totals: Mapping[str, Any]) -> None:
        """Add the totals of one batch: numbers, tensors or lists. Does not synchronise with the device."""
        # A graph would keep the memory of every step that is not added yet.
        freed = {name: value.detach() for name, value in batch_totals.items() if getattr(value, "requires_grad", False)}
        lists = {name: value for name, value in batch_totals.items() if isinstance(value, list)}
        for name, value in lists.items():
            plain = [entry.item() if isinstance(entry, numpy.generic) else entry for entry in value]  # for a checkpoint
            self.lists.setdefault(name, []).append(map_tensors(plain, torch.Tensor.detach))
        totals = {name: value for name, value in {**batch_totals, **freed}.items() if name not in lists}
        self.pending.append(totals)
        self.pending_numbers += sum(getattr(value, "numel", lambda: 1)() for value in totals.values())
        if self.pending_numbers >= MAX_PENDING_NUMBERS:
            self._add_pending()

    def _add_pending(self) -> None:
        """Add many batches in one operation: one by one they would cost a small model a percent of its step."""
        batches, self.pending, self.pending_numbers = self.pending, [], 0
        for name in dict.fromkeys(name for batch in batches for name in batch):
            values = [batch[name] for batch in batches if name in batch]
            if isinstance(values[0], torch.Tensor):
                total = torch.stack(values).double().sum(0)
            else:
                total = torch.tensor(sum(values), dtype=torch.double)
            self.local[name] = self.local[name] + total if name in self.local else total

    def reduce(self) -> Totals:
        """The totals so far, over all ranks. Raises Diverged if the loss is not finite. Call on every rank."""
        self._add_pending()
        local: Totals = {name: value.cpu() for name, value in self.local.items()}
        local |= {name: map_tensors(batches, torch.Tensor.cpu) for name, batches in self.lists.items()}
        if self.zeros is None:  # a rank without a batch learns from rank 0 what there is to add
            self.zeros = self.ctx.on_main(lambda: {name: _zero(value) for name, value in local.items()})
        if unknown := sorted(local.keys() - self.zeros.keys()):
            names = ", ".join(unknown)
            raise UsageError(f"batch_totals: {names} missing until the first log line: return zeros from the start")
        tensors = {name: zero for name, zero in self.zeros.items() if isinstance(zero, torch.Tensor)}
        if tensors:
            flat = self.ctx.sum(torch.cat([local.get(name, zero).flatten() for name, zero in tensors.items()]))
            parts = flat.split([zero.numel() for zero in tensors.values()])
            for (name, zero), part in zip(tensors.items(), parts, strict=True):
                self.total[name] = self.total.get(name, zero) + part.reshape(zero.shape)
        for name in (name for name in self.zeros if name not in tensors):
            self.total[name] = [*self.total.get(name, []), *_in_order(self.ctx.gather(local.get(name, [])))]
        self.local, self.lists = {}, {}
        if "loss" in self.total and not math.isfinite(self.total["loss"].item()):
            remedy = "start again in another --output-dir with a lower --lr, a longer --warmup-epochs or --clip-grad"
            raise Diverged(f"the loss is no longer finite: {remedy}")
        return self.total

    def take(self) -> Totals:
        """`reduce`, and restart from zero. Call on every rank."""
        total, self.total = self.reduce(), {}
        self.epoch = self._with_epoch(total)
        return total

    def take_epoch(self, compute_metrics: Callable[[Totals], dict[str, float]], complete: bool) -> dict[str, float]:
        """The metrics of the whole epoch so far; if it is complete, restart from zero. Call on every rank.

        Empty if nothing was added, or if batch_totals has lists: those of an epoch may need too much memory.
        """
        epoch = self._with_epoch(self._so_far())
        if complete:
            self.total, self.epoch = {}, {}
        return compute_metrics(epoch) if epoch else {}

    def _with_epoch(self, total: Totals) -> Totals | None:
        if self.epoch is None or any(isinstance(value, list) for value in total.values()):
            return None
        return self.epoch | {name: self.epoch.get(name, 0) + value for name, value in total.items()}

    def _so_far(self) -> Totals:
        return self.reduce() if self.pending or self.local or self.lists else self.total

    def state_dict(self) -> dict[str, Any]:
        """The totals since the last logged step, and of the epoch before it. Call on every rank."""
        return {"total": dict(self._so_far()), "epoch": None if self.epoch is None else dict(self.epoch)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.epoch = dict(state["total"]), state.get("epoch")  # an earlier version did not save the epoch


def _zero(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else []


def _in_order(ranks: list[list[list[Any]]]) -> Iterator[Any]:
    """The entries of all ranks' batches, in the order of the samples: the ranks take turns with batches."""
    for turn in zip_longest(*ranks, fillvalue=()):
        yield from chain.from_iterable(turn)


@dataclass
class Throughput:
    """The speed of the training since `step`, when the loader had waited `wait_s`; without evaluation and saving."""

    step: int = 0
    wait_s: float = 0.0
    start: float = field(default_factory=time.perf_counter)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The time of the block does not count."""
        start = time.perf_counter()
        yield
        self.start += time.perf_counter() - start

    def rates(self, step: int, wait_s: float, global_batch: int) -> dict[str, float]:
        """Samples/s of all ranks, ms per step, and ms of it spent waiting for data."""
        steps, elapsed = step - self.step, time.perf_counter() - self.start
        return {
            "samples_per_s": round(steps * global_batch / elapsed, 1),
            "step_ms": round(1000 * elapsed / steps, 3),
            "data_ms": round(1000 * (wait_s - self.wait_s) / steps, 3),
        }


@dataclass
class RemainingTime:
    """Estimates when the run will have taken `total` steps, from the steps since `first`, evaluations and all."""

    total: int = 0
    first: int = 0
    start: float = field(default_factory=time.perf_counter)

    def seconds(self, step: int) -> float | None:
        """None before the first step."""
        done = step - self.first
        return (self.total - step) * (time.perf_counter() - self.start) / done if done > 0 else None


def memory_mb(device: torch.device) -> float:
    """The peak memory of this process in megabytes: of its GPU, or of the host if it has none."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 1e6, 1)
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6, 1)
