"""Which training samples each rank gets, from any position in an epoch."""

import operator
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset, DistributedSampler

from ddp.core.errors import UsageError
from ddp.distributed.process_group import DistContext
from ddp.distributed.seeds import derive_seed, random_bits

BLOCK = 4096  # samples whose order is read together
MANY = 100_000  # samples; the order of fewer is stored: ROUNDS would not shuffle a handful evenly
ROUNDS = 8


class Shuffled:
    """The order without a sampler of yours: all samples, shuffled by (seed, epoch).

    version: 2 computes the order of MANY samples or more, and stores nothing; 1 stores the order of any number.
    """

    def __init__(self, samples: int, seed: int, version: int = 2) -> None:
        self.samples, self.seed, self.version = samples, seed, version
        self.epoch, self.order = -1, torch.empty(0)  # of the last epoch that was asked for, if it is stored

    def length(self, epoch: int) -> int:
        return self.samples

    def indices(self, epoch: int, start: int, stop: int) -> torch.Tensor:
        if self.version > 1 and self.samples >= MANY:
            positions = numpy.arange(start, stop, dtype=numpy.int64)
            return torch.from_numpy(permute(positions, self.samples, derive_seed(self.seed, epoch)))
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self.epoch, self.order = epoch, torch.randperm(self.samples, generator=generator)
        return self.order[start:stop]


def permute(positions: numpy.ndarray, length: int, seed: int) -> numpy.ndarray:
    """What a permutation of 0 to length - 1, which `seed` chooses, has at `positions`, int64. It is computed from them.

    A Feistel network permutes all numbers of so many bits. What it maps beyond `length` is mapped again, until it is
    inside. Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002, https://doi.org/10.1007/3-540-45760-7_9.
    """
    low = (length - 1).bit_length() // 2  # bits of the right half
    masks = ((1 << (length - 1).bit_length() - low) - 1, (1 << low) - 1)
    seeds = [derive_seed(seed, number) for number in range(ROUNDS)]

    def encrypt(numbers: numpy.ndarray) -> numpy.ndarray:
        halves = [numbers >> low, numbers & masks[1]]
        for number, round_seed in enumerate(seeds):
            changed = number % 2
            halves[changed] ^= random_bits(round_seed, halves[1 - changed]) & masks[changed]
        return halves[0] << low | halves[1]

    found = encrypt(positions)
    while len(outside := numpy.flatnonzero(found >= length)):
        found[outside] = encrypt(found[outside])
    return found


class ResumableSampler(DistributedSampler):
    """torch's DistributedSampler that can start an epoch after any number of samples, counted over all ranks.

    order: a sampler as ddp.data.dataset.Datasets describes it. Rank r of w takes every w-th entry of an epoch's order.
    So after any number of steps the entries used are the first `samples_consumed` ones, whatever w is. Samples at the
    end of the epoch that do not fill a global batch are dropped.
    """

    def __init__(self, dataset: Dataset, rank: int, world_size: int, global_batch: int, order: Any) -> None:
        super().__init__(dataset, world_size, rank)
        self.order, self.global_batch, self.samples_consumed = order, global_batch, 0
        self.length = self.first_length = cache(self._length)  # of an epoch; asked for in each step

    def _length(self, epoch: int) -> int:
        length = self.order.length(epoch)
        try:
            return operator.index(length)
        except TypeError as error:
            what = f"sampler {type(self.order).__name__}.length({epoch}) is {length!r}, and no whole number"
            raise UsageError(what) from error

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
        remedy = "let a sample depend on (epoch, position) only, and seed its generator with derive_seed(seed, epoch)"
        end, half = start + self.global_batch, start + max(1, self.global_batch // 2)
        ours, again = (order.length(self.epoch), self.read(start, end)), order.length(self.epoch)
        if ours[0] != (first := self.first_length(self.epoch)):
            found = f"{name}.length({self.epoch}) was {first:,}, is {ours[0]:,}"
            raise UsageError(f"sampler {found}: let it depend on the epoch only, and not on a dataset that grows")
        # A resumed run asks for other parts of the order.
        if ours != (again, [*self.read(start, half), *(self.read(half, end) if half < end else [])]):
            raise UsageError(f"sampler {name} returned two different orders of one epoch: {remedy}")
        if any(theirs != ours for theirs in ctx.gather(ours)):
            raise UsageError(f"sampler {name} returned different orders on the ranks: {remedy}")
