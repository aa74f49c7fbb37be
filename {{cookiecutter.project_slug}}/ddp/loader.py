"""Which sample goes to which process, in which order, from which position."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, default_collate

from config import Config
from ddp.errors import UsageError
from ddp.group import Group, cores, plural
from ddp.state import map_tensors
from ddp.workers import started

ALIGNMENT = 64  # bytes, at which torch begins tensors


def derive_seed(*parts: int) -> int:
    """A 63-bit seed out of numbers such as (seed, epoch): the same everywhere, unrelated for neighbours."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@runtime_checkable
class Movable(Protocol):
    """A tensor, or whatever else in a batch can follow it to its device."""

    def to(self, device: torch.device, *, non_blocking: bool) -> Any: ...


class ResumableSampler(DistributedSampler):
    """torch's DistributedSampler that can start an epoch at a position, counted in samples of all ranks.

    The order of an epoch is one permutation of (seed, epoch), and rank r of w takes every w-th entry, so after any
    number of steps the entries used are the first `position` ones, whatever w is. What does not fill a global batch at
    the end of the epoch is dropped.
    """

    def __init__(self, dataset: Dataset, rank: int, world_size: int, global_batch: int, seed: int) -> None:
        super().__init__(dataset, world_size, rank, shuffle=True, seed=seed, drop_last=True)
        self.length = len(dataset)  # type: ignore[arg-type]
        self.first = rank
        self.global_batch = global_batch

    def steps_left(self, position: int) -> int:
        """Optimizer steps from `position` to the end of the epoch."""
        return (self.length - position) // self.global_batch

    def set_position(self, epoch: int, position: int) -> None:
        """Let the next iteration give this rank's part of order[position:]."""
        self.set_epoch(epoch)
        used = self.steps_left(position) * self.global_batch
        # DistributedSampler gives order[rank:total_size:num_replicas], and checks its length against num_samples.
        self.rank = position + self.first
        self.total_size = position + used
        self.num_samples = used // self.num_replicas


class TrainLoader:
    """Batches of this rank, on its device, in an order that depends on (seed, epoch) only.

    A dataset gives whole batches by `__getitems__(indices)`, or samples by `__getitem__`. What else it may have:
    augment(batch, epoch)  changes the samples of a training batch, on the device, whatever else is in the batch
    prepare(batch)         turns a batch, on the device, into (inputs, targets); either may be a dictionary of tensors
    in_memory              True: no DataLoader workers by default
    to(device)             moves the data to a GPU, or leaves them; called where there are no workers
    name                   what the first lines of a run call the data; by default --dataset
    at_once                how many samples to read, augment and prepare together, before their tensors are cut into
                           batches; an evaluation takes them as they are: it keeps nothing for a backward pass

    `wait_s` adds up the seconds in which the training waited for data.
    """

    def __init__(self, dataset: Dataset, config: Config, group: Group) -> None:
        self.global_batch = group.world_size * config.batch_size * config.grad_accum_steps
        seed = derive_seed(config.seed)  # the sampler adds the epoch: a plain seed 0 would become seed 1 in epoch 1
        self.sampler = ResumableSampler(dataset, group.rank, group.world_size, self.global_batch, seed)
        self.length = self.sampler.length
        self.steps_per_epoch = self.sampler.steps_left(0)
        # Else ranks would take different numbers of steps, and wait for each other.
        group.check_same({"the number of training samples": self.length})
        if self.steps_per_epoch == 0 and not config.evaluate:
            processes = plural(group.world_size, "process", "es")
            raise UsageError(
                f"{self.length:,} training samples do not fill one step of {self.global_batch:,} ({processes} x "
                f"--batch-size {config.batch_size} x --grad-accum-steps {config.grad_accum_steps}): lower one of them"
            )
        self.dataset = dataset
        self.name = _inner(dataset, "name") or config.dataset
        self.config = config
        self.group = group
        self.wait_s = 0.0
        _move(dataset, config, group)

    def steps(self, epoch: int, position: int = 0) -> Iterator[Iterator[Any]]:
        """For each optimizer step from `position`, counted in samples of all ranks: its --grad-accum-steps batches."""
        self.sampler.set_position(epoch, position)
        generator = torch.Generator().manual_seed(derive_seed(self.config.seed, epoch, self.group.rank))
        dataset = _seeded(self.dataset, self.config.seed, epoch)
        loader = _data_loader(dataset, self.sampler, self.config, self.group, generator)
        prepared = _prepared(loader, self.dataset, self.group, epoch)
        if loader.batch_size != self.config.batch_size:
            prepared = _cut(prepared, self.config.batch_size)
        batches = self._timed(prepared)
        for _ in range(self.sampler.steps_left(position)):
            yield islice(batches, self.config.grad_accum_steps)

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self.wait_s += time.perf_counter() - start
            if batch is None:
                return
            yield batch


class TestLoader:
    """Batches of this rank's part of the test data, on its device: each sample on one rank, once, in order.

    They are of --batch-size samples or, where the dataset makes more of them `at_once`, of so many.
    """

    __test__ = False  # not a test of pytest

    def __init__(self, dataset: Dataset, config: Config, group: Group) -> None:
        self.dataset = dataset
        self.length = len(dataset)  # type: ignore[arg-type]
        group.check_same({"the number of test samples": self.length})
        indices = range(group.rank, self.length, group.world_size)
        self.loader = _data_loader(_seeded(dataset, config.seed, -1), indices, config, group)
        _move(dataset, config, group)
        batch_size = self.loader.batch_size or 1
        self.common = self.length // group.world_size // batch_size  # batches that every rank has
        self.group = group

    def __iter__(self) -> Iterator[Any]:
        self.group.agreement.restart()
        for number, batch in enumerate(_prepared(self.loader, self.dataset, self.group)):
            yield batch
            if number < self.common:
                self.group.agreement.point()


class _Seeded(Dataset):
    """Samples drawn one by one, each with generators that are seeded by (seed, epoch, index).

    So a dataset with random transforms is the same for any number of processes and workers, and after any resume.
    """

    def __init__(self, dataset: Any, seed: int, epoch: int) -> None:
        self.dataset, self.seed, self.epoch = dataset, seed, epoch

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        before = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
        samples = []
        for index in indices:
            seed = derive_seed(self.seed, self.epoch, index)
            random.seed(seed)
            numpy.random.seed(seed % 2**32)
            torch.default_generator.manual_seed(seed)
            samples.append(self.dataset[index])
        random.setstate(before[0])
        numpy.random.set_state(before[1])
        torch.set_rng_state(before[2])
        return samples


def _seeded(dataset: Any, seed: int, epoch: int) -> Any:
    """`dataset`; wrapped if it gives samples, and not whole batches, which see to that themselves."""
    innermost = dataset
    while isinstance(innermost, Subset):
        innermost = innermost.dataset
    return dataset if hasattr(innermost, "__getitems__") else _Seeded(dataset, seed, epoch)


def _data_loader(
    dataset: Dataset, sampler: Any, config: Config, group: Group, generator: torch.Generator | None = None
) -> DataLoader:
    """torch's DataLoader, with a generator of its own: iter() would else draw from the global one."""
    at_once = _inner(dataset, "at_once") or 1
    return DataLoader(
        dataset,
        batch_size=config.batch_size * max(1, at_once // config.batch_size),
        sampler=sampler,
        num_workers=_workers(dataset, config, group),
        collate_fn=_collate,
        pin_memory=group.device.type == "cuda" and not _inner(dataset, "in_memory"),
        generator=generator or torch.Generator(),
        persistent_workers=False,  # True would keep the order of an earlier epoch after a resume
    )


def _prepared(loader: DataLoader, dataset: Dataset, group: Group, epoch: int | None = None) -> Iterator[Any]:
    """Batches on the device; augmented if an `epoch` is given."""
    augment = _inner(dataset, "augment") if epoch is not None else None
    prepare = _inner(dataset, "prepare")
    for samples in started(loader):
        samples = map_tensors(samples, lambda part: part.to(group.device, non_blocking=True), kind=Movable)
        samples = augment(samples, epoch) if augment else samples
        yield prepare(samples) if prepare else samples


def _cut(batches: Iterable[Any], batch_size: int) -> Iterator[Any]:
    """Smaller batches, each where a tensor of its own would be: at another place, sums may round differently."""
    for samples in batches:
        tensors: list[torch.Tensor] = []
        map_tensors(samples, tensors.append)
        for first in range(0, len(tensors[0]), batch_size):
            yield map_tensors(samples, lambda part, first=first: _aligned(part[first : first + batch_size]))


def _aligned(part: torch.Tensor) -> torch.Tensor:
    return part if part.data_ptr() % ALIGNMENT == 0 else part.clone()


def _move(dataset: Dataset, config: Config, group: Group) -> None:
    """Let data held in memory go to the GPU, where that makes the batches; DataLoader workers could not reach it."""
    to = _inner(dataset, "to")
    if to and group.device.type == "cuda" and _workers(dataset, config, group) == 0:
        to(group.device)


def _workers(dataset: Dataset, config: Config, group: Group) -> int:
    if config.workers is not None:
        return config.workers
    if _inner(dataset, "in_memory"):
        return 0
    return max(1, min(8, cores() // group.local_world_size))


def _collate(batch: Any) -> Any:
    """A whole batch, as `__getitems__` gives it, is a tuple or a dictionary; a list holds samples."""
    return batch if isinstance(batch, tuple | Mapping) else default_collate(batch)


def _inner(dataset: Any, name: str) -> Any:
    """The attribute `name` of a dataset, also through torch's Subset; None if it has none."""
    while not hasattr(dataset, name) and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    return getattr(dataset, name, None)
