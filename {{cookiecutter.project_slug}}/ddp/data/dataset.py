"""BatchDataset: what a dataset may do to whole batches. Any other torch Dataset works as it is."""

import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset, Subset, default_collate

from ddp.core.errors import UsageError
from ddp.distributed.seeds import derive_seed

HOOKS = ("augment", "prepare", "chunk_size", "in_memory", "to")


class BatchDataset(Dataset):
    """A dataset that works on whole batches. Override what you need: by default, nothing happens to a batch.

    A batch goes through five steps, in this order:
    read      __getitems__(indices), in a DataLoader worker, or in this process if there are none
    move      its tensors, and everything else in it that has a method `to`, go to the device
    augment   augment(batch, epoch), for training only
    prepare   prepare(batch) -> (inputs, targets)
    split     into batches of --batch-size, if more samples were read together (chunk_size), for training only
    """

    name: str | None = None  # what the log calls the data; by default --dataset
    in_memory: bool = False  # True: no DataLoader workers, unless --workers asks for them
    chunk_size: int = 1  # read, augment and prepare about this many samples together; never less than one batch

    def __getitems__(self, indices: list[int]) -> Any:
        """The samples `indices` as one batch: a tuple or a dictionary of tensors.

        By default a list of samples from __getitem__, which the loader collates. Random numbers that __getitem__ draws
        (from random, numpy or torch) are then seeded by (seed, epoch, index).
        """
        return [self[index] for index in indices]

    def augment(self, batch: Any, epoch: int) -> Any:
        """Change the samples of a training batch, on the device.

        Random numbers should depend on (seed, epoch, sample) only, so that a sample looks the same for any number of
        processes, and after any resume: see derive_seed in ddp/distributed/seeds.py.
        """
        return batch

    def prepare(self, batch: Any) -> Any:
        """Turn a batch, on the device, into (inputs, targets). Each is a tensor or a dictionary of tensors."""
        return batch

    def to(self, device: torch.device) -> None:
        """Move data held in memory to a GPU, if they fit. Not called if DataLoader workers need to reach the data."""


def hooks_of(dataset: Any) -> BatchDataset:
    """The BatchDataset that `dataset` is or wraps, as torch's Subset does. For any other, hooks that do nothing.

    Raises UsageError if another class defines a hook: it would be ignored.
    """
    while not isinstance(dataset, BatchDataset):
        ignored = ", ".join(name for name in HOOKS if hasattr(dataset, name))
        if ignored:
            raise UsageError(f"dataset {type(dataset).__name__} has {ignored}: subclass ddp.data.dataset.BatchDataset")
        dataset = getattr(dataset, "dataset", None)
        if not isinstance(dataset, Dataset):
            return BatchDataset()
    return dataset


class SeededSamples(Dataset):
    """Reads samples one by one, each with generators seeded by (seed, epoch, index).

    So a dataset with random transforms is the same for any number of processes and workers, and after any resume.
    """

    def __init__(self, dataset: Any, seed: int, epoch: int) -> None:
        self.dataset, self.seed, self.epoch = dataset, seed, epoch

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


def seeded(dataset: Any, seed: int, epoch: int) -> Any:
    """`dataset`, with seeded samples unless it reads whole batches: those take care of random numbers themselves."""
    innermost = dataset
    while isinstance(innermost, Subset):  # which passes __getitems__ on
        innermost = innermost.dataset
    inherited = getattr(type(innermost), "__getitems__", None) is BatchDataset.__getitems__
    return dataset if hasattr(innermost, "__getitems__") and not inherited else SeededSamples(dataset, seed, epoch)


def collate(batch: Any) -> Any:
    """A whole batch from `__getitems__` is a tuple or a dictionary; a list holds samples."""
    return batch if isinstance(batch, tuple | Mapping) else default_collate(batch)
