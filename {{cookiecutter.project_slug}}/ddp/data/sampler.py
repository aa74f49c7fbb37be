"""Which training samples each rank gets, from any position in an epoch."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch.utils.data import Dataset, DistributedSampler

from ddp.core.errors import UsageError
from ddp.distributed.process_group import DistContext

BLOCK = 4096  # samples whose order is read together


class Shuffled:
    """The order without a sampler of yours: all samples, shuffled by (seed, epoch)."""

    def __init__(self, samples: int, seed: int) -> None:
        self.samples, self.seed = samples, seed
        self.epoch, self.order = -1, torch.empty(0)  # of the last epoch that was asked for

    def length(self, epoch: int) -> int:
        return self.samples

    def indices(self, epoch: int, start: int, stop: int) -> torch.Tensor:
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self.epoch, self.order = epoch, torch.randperm(self.samples, generator=generator)
        return self.order[start:stop]


class ResumableSampler(DistributedSampler):
    """torch's DistributedSampler that can start an epoch after any number of samples, counted over all ranks.

    order: a sampler as ddp.data.dataset.Datasets describes it. Rank r of w takes every w-th entry of an epoch's order.
    So after any number of steps the entries used are the first `samples_consumed` ones, whatever w is. Samples at the
    end of the epoch that do not fill a global batch are dropped.
    """

    def __init__(self, dataset: Dataset, rank: int, world_size: int, global_batch: int, order: Any) -> None:
        super().__init__(dataset, world_size, rank)
        self.order, self.global_batch, self.samples_consumed = order, global_batch, 0
        self.length = cache(order.length)  # of an epoch; asked for in each step

    def steps_left(self, epoch: int, samples_consumed: int = 0) -> int:
        """Optimizer steps until the end of the epoch."""
        return max(0, self.length(epoch) - samples_consumed) // self.global_batch

    def start_at(self, epoch: int, samples_consumed: int) -> None:
        """Let the next iteration return this rank's part of the order from `samples_consumed` on."""
        self.set_epoch(epoch)
        self.samples_consumed = samples_consumed

    def read(self, start: int, stop: int) -> list[int]:
        """The entries `start` to `stop` of this epoch's order, for all ranks. Raises UsageError for a wrong sampler."""
        order = self.order.indices(self.epoch, start, stop)
        found = order.tolist() if isinstance(order, torch.Tensor) else [int(index) for index in order]
        samples, name = len(self.dataset), type(self.order).__name__  # type: ignore[arg-type]
        if len(found) != stop - start:
            returned = f"returned {len(found):,} indices for the positions {start:,} to {stop:,}"
            raise UsageError(f"sampler {name} {returned}: return one for each, and let length(epoch) count them")
        if wrong := [index for index in (min(found), max(found)) if not 0 <= index < samples]:
            raise UsageError(f"sampler {name} returned the index {wrong[0]:,}, but there are {samples:,} samples")
        return found

    def __len__(self) -> int:
        return self.steps_left(self.epoch, self.samples_consumed) * self.global_batch // self.num_replicas

    def __iter__(self) -> Iterator[int]:
        end = self.samples_consumed + len(self) * self.num_replicas
        block = self.global_batch * max(1, BLOCK // self.global_batch)  # of which each rank gets the same number
        for start in range(self.samples_consumed, end, block):
            yield from self.read(start, min(start + block, end))[self.rank :: self.num_replicas]

    def check_order(self, ctx: DistContext) -> None:
        """Raise UsageError unless all ranks, asked twice, have the same samples next. Call on every rank."""
        start, order, name = self.samples_consumed, self.order, type(self.order).__name__
        remedy = "let it depend on (epoch, start, stop) only, and seed its generator with derive_seed(seed, epoch)"
        ours, again = ((order.length(self.epoch), self.read(start, start + self.global_batch)) for _ in range(2))
        if ours != again:
            raise UsageError(f"sampler {name} returned two different orders of one epoch: {remedy}")
        if any(theirs != ours for theirs in ctx.gather(ours)):
            raise UsageError(f"sampler {name} returned different orders on the ranks: {remedy}")
