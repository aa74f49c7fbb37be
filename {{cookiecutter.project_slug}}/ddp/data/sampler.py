"""Which sample goes to which rank, in which order, from which sample on."""

from collections.abc import Iterator

import torch
from torch.utils.data import Dataset, DistributedSampler


class ResumableSampler(DistributedSampler):
    """torch's DistributedSampler that can start an epoch after any number of samples, counted over all ranks.

    The order of an epoch is one permutation of (seed, epoch), and rank r of w takes every w-th entry. So after any
    number of steps the entries used are the first `samples_consumed` ones, whatever w is. Samples at the end of the
    epoch that do not fill a global batch are dropped.
    """

    def __init__(self, dataset: Dataset, rank: int, world_size: int, global_batch: int, seed: int) -> None:
        super().__init__(dataset, world_size, rank, shuffle=True, seed=seed, drop_last=True)
        self.length, self.global_batch, self.samples_consumed = len(dataset), global_batch, 0  # type: ignore[arg-type]

    def steps_left(self, samples_consumed: int) -> int:
        """Optimizer steps until the end of the epoch."""
        return (self.length - samples_consumed) // self.global_batch

    def start_at(self, epoch: int, samples_consumed: int) -> None:
        """Let the next iteration return this rank's part of order[samples_consumed:]."""
        self.set_epoch(epoch)
        self.samples_consumed = samples_consumed

    def __len__(self) -> int:
        return self.steps_left(self.samples_consumed) * self.global_batch // self.num_replicas

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.length, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        rest = order[self.samples_consumed + self.rank :: self.num_replicas]
        return iter(rest[: len(self)].tolist())
