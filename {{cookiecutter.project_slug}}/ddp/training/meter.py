"""Totals of metrics over batches and ranks."""

import logging
import math
from collections.abc import Callable, Mapping
from itertools import chain, zip_longest
from typing import Any, ClassVar

import numpy
import torch

from ddp.core.errors import Diverged, UsageError
from ddp.data.dataset import kind
from ddp.distributed.process_group import DistContext
from ddp.distributed.tensors import map_tensors, whole

log = logging.getLogger(__name__)

Totals = dict[str, Any]  # tensors; lists with one entry per sample
MAX_PENDING_NUMBERS = 200  # numbers on the device that are not added up yet: a loss, a count and a metric of 64 batches


class Meter:
    """Adds up a task's batch_totals over batches, on the device, and over ranks when asked. Lists are gathered.

    compute_metrics: makes metrics of totals over all ranks. By default the totals themselves are the metrics.
    """

    may_be_infinite = True  # a metric; the loss is checked here
    named: ClassVar[set[str]] = set()  # metrics that depend on the rank: one line for each in a process

    def __init__(self, ctx: DistContext, compute_metrics: Callable[[Totals], dict[str, Any]] = dict) -> None:
        self.ctx, self.compute_metrics = ctx, compute_metrics
        self.pending: list[Totals] = []  # of batches, on the device, that are not added up yet
        self.pending_numbers = 0  # a confusion matrix holds many
        self.shapes: dict[str, torch.Size] = {}  # of the totals that are tensors, of this rank
        self.batches = 0  # in `local`
        self.local: Totals = {}  # on the device, not reduced yet; a list of the lists of each batch
        self.total: Totals = {}  # over all ranks, in host memory, and the same on every rank
        self.zeros: Totals | None = None  # the totals that a task has, as zeros and empty lists
        self.taken: Totals = {}  # what was taken last
        self.epoch: Totals | None = {}  # all that was taken in this epoch; None with lists, which may need much memory

    def add(self, batch_totals: Mapping[str, Any]) -> None:
        """Add the totals of one batch: numbers, tensors or lists. Does not wait for the device."""
        if self.ctx.work.skip():
            return
        totals = {}
        for name, value in batch_totals.items():
            if isinstance(value, list):
                value = [entry.item() if isinstance(entry, numpy.generic) else entry for entry in value]
            elif isinstance(value, numpy.ndarray | numpy.generic):
                value = torch.tensor(value)  # a copy: the owner may use the array again
            elif not isinstance(value, torch.Tensor | int | float):
                raise UsageError(f"batch_totals in model.py: {name} is {kind(value)}: return numbers, tensors or lists")
            # Without its graph, which would keep the memory of its step. A norm of split gradients is split as well.
            totals[name] = map_tensors(value, lambda tensor: _own(whole(tensor), self.zeros is None))
            self.pending_numbers += value.numel() if isinstance(value, torch.Tensor) else 1
        self.pending.append(totals)
        if self.pending_numbers >= MAX_PENDING_NUMBERS:
            self._add_pending()

    def _add_pending(self) -> None:
        """Add many batches in one operation: one by one they would cost a small model a percent of its step."""
        batches, self.pending, self.pending_numbers = self.pending, [], 0
        before, self.batches = self.batches, self.batches + len(batches)
        for name in dict.fromkeys(chain.from_iterable(batches)):
            values = [batch[name] for batch in batches if name in batch]
            if isinstance(values[0], list):
                lists = self.local.setdefault(name, [])  # an empty one for a batch without it
                lists += [[]] * (before - len(lists)) + [batch.get(name, []) for batch in batches]
                continue
            tensors = [value for value in values if isinstance(value, torch.Tensor)]
            numbers = sum(value for value in values if not isinstance(value, torch.Tensor))
            before_them = self.local.get(name)
            different = any(each.shape != self.shapes.setdefault(name, each.shape) for each in tensors)
            if name in self.shapes and self.shapes[name].numel() > 1:  # a number would be added to each entry
                different |= bool(numbers) or (before_them is not None and before_them.dim() == 0 and bool(before_them))
            if different:
                raise UsageError(f"batch_totals in model.py: {name} has another shape in another batch: return a sum")
            if any(each._version for each in tensors if not each.is_inference()):
                raise UsageError(f"batch_totals in model.py: {name} was changed afterwards: return a clone()")
            total = torch.stack(tensors).double().sum(0) if tensors else torch.zeros((), dtype=torch.double)
            self.local[name] = (0 if before_them is None else before_them) + total + numbers

    def reduce(self) -> None:
        """Add this rank's batches to the totals of all. Call on every rank. Raises Diverged for an infinite loss."""
        self._add_pending()
        local, self.local, self.batches = map_tensors(self.local, torch.Tensor.cpu), {}, 0
        if self.zeros is None:  # a rank without a batch learns from rank 0 what there is to add
            self.zeros = self.ctx.on_main(_zeros, local) or None
        zeros = self.zeros or {}
        if unknown := sorted(local.keys() - zeros.keys()):
            names = ", ".join(unknown)
            raise UsageError(f"batch_totals: {names} missing until the first log line: return zeros from the start")
        tensors = {name: zero for name, zero in zeros.items() if isinstance(zero, torch.Tensor)}
        ours = [_as_in(zero, local.get(name, zero), name).flatten() for name, zero in tensors.items()]
        batches = torch.tensor([bool(local)], dtype=torch.double)  # whether this rank has had one
        everyone = self.ctx.sum(torch.cat([batches, *ours]))
        if not everyone[0]:
            return
        for (name, zero), sums in zip(tensors.items(), everyone[1:].split([*map(len, ours)]), strict=True):
            self.total[name] = self.total.get(name, 0) + sums.reshape(zero.shape)
        for name in [name for name in zeros if name not in tensors]:
            self.total[name] = self.total.get(name, []) + _in_order(self.ctx.gather(local.get(name, [])))
        if "loss" in self.total and not math.isfinite(self.total["loss"].item()):
            remedy = "start again in another --output-dir with a lower --lr, a longer --warmup-epochs or --clip-grad"
            raise Diverged(f"the loss is no longer finite: {remedy}")

    before_save = reduce  # `state_dict` has no collective

    def take(self) -> dict[str, Any]:
        """The metrics since the last call; empty if nothing was added. Call on every rank."""
        self.reduce()
        self.epoch, self.taken, self.total = self._epoch_so_far(), self.total, {}
        return self._metrics_of(self.taken)

    def take_epoch(self, complete: bool) -> dict[str, Any]:
        """The metrics of the epoch so far; restart from zero if it is complete. Call on every rank.

        Empty if nothing was added, or if batch_totals has lists.
        """
        self.reduce()
        epoch = self._epoch_so_far()
        if complete:
            self.total, self.epoch = {}, {}
        return self._metrics_of(epoch or {})

    def _metrics_of(self, totals: Totals) -> dict[str, Any]:
        """The owner's function gets copies, which it may change."""
        copies = {name: each.clone() if isinstance(each, torch.Tensor) else [*each] for name, each in totals.items()}
        metrics = self.compute_metrics(copies) if copies else {}
        first, *others = self.ctx.gather(metrics)
        others = [each for each in others if isinstance(each, Mapping) and isinstance(first, Mapping)]
        differ = {name for each in others for name in first if not close(first[name], each.get(name))}
        for name in sorted(differ - self.named) if self.ctx.rank == 0 else ():
            remedy = "use the totals alone, of which a list keeps a value of each sample, and draw with a fixed seed"
            log.warning(f"warning: compute_metrics in model.py returns another {name} on another rank: {remedy}")
            self.named.add(name)
        return first  # the ranks decide by the same numbers

    def _epoch_so_far(self) -> Totals | None:
        if self.epoch is None or any(isinstance(value, list) for value in self.total.values()):
            return None
        return self.epoch | {name: self.epoch.get(name, 0) + value for name, value in self.total.items()}

    def state_dict(self) -> dict[str, Any]:
        """The totals over all ranks as of the last `reduce`: since the last `take`, and of the epoch before it."""
        return {"total": dict(self.total), "epoch": None if self.epoch is None else dict(self.epoch)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.epoch = dict(state["total"]), state.get("epoch")  # an earlier version did not save the epoch


def close(one: Any, other: Any) -> bool:
    """Whether two numbers differ by rounding alone."""
    numbers = isinstance(one, int | float) and isinstance(other, int | float)
    return str(one) == str(other) or (numbers and math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-6))  # unlike NaN


def _own(tensor: torch.Tensor, at_first: bool) -> torch.Tensor:
    """`tensor` without its graph; a copy of a weight, or of another tensor that is changed in place.

    at_first: before the first log line. A new weight was never changed, and detach() hides that it is one: copy it.
    """
    is_weight = tensor.requires_grad and tensor.is_leaf
    changes = at_first or is_weight or (not tensor.is_inference() and tensor._version > 0)
    return tensor.detach().clone() if changes else tensor.detach()


def _as_in(zero: torch.Tensor, total: torch.Tensor, name: str) -> torch.Tensor:
    """A total with the shape that it has on rank 0, and had before the first log line. A number may be nothing: 0."""
    if total.numel() == zero.numel() == 1 or (total.dim() == 0 and not total):
        return zero + total.sum()
    if total.shape != zero.shape:
        what = f"{name} has another shape than before the first log line, or than on rank 0"
        raise UsageError(f"batch_totals in model.py: {what}: return the same shape from the start")
    return total


def _zeros(totals: Totals) -> Totals:
    return {name: [] if isinstance(value, list) else torch.zeros_like(value) for name, value in totals.items()}


def _in_order(ranks: list[list[list[Any]]]) -> list[Any]:
    """The entries of all ranks' batches, in the order of the samples: the ranks take turns with batches."""
    turns = zip_longest(*ranks, fillvalue=())
    return [*chain.from_iterable(chain.from_iterable(turns))]
