"""Reads batches, in a DataLoader worker or in this process: each sample depends on (seed, epoch, index) only."""

import pickle
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import is_dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset, Subset, get_worker_info

from ddp.core.errors import PeerLost, UsageError, one_line
from ddp.data.dataset import BatchDataset, attributes, explain_collate_error, hooks_of
from ddp.distributed.seeds import derive_seed, keep_random_state
from ddp.distributed.tensors import leaves, strided


class SeededReader(Dataset):
    """Reads and collates batches of `dataset`, with the generators of Python, numpy and torch seeded for each sample.

    So random numbers in __getitem__ are the same for any number of processes, workers and samples that are read
    together, and after any resume. Raises UsageError for a dataset whose samples depend on anything else, or whose
    own __getitems__ draws some.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], seed: int, epoch: int) -> None:
        self.dataset, self.collate, self.seed, self.epoch = dataset, collate, seed, epoch
        layers = [dataset]
        while isinstance(layers[-1], Subset):  # which passes __getitems__ on
            layers.append(layers[-1].dataset)
        self.name = type(layers[-1]).__name__
        self.one_by_one = getattr(type(layers[-1]), "__getitems__", None) in (None, BatchDataset.__getitems__)
        for layer in layers if not self.one_by_one else ():
            one, several = (_definer(type(layer), name) for name in ("__getitem__", "__getitems__"))
            if several not in (None, BatchDataset, one) and one and issubclass(one, several):
                remedy = "override __getitems__, which is called in its place"
                raise UsageError(f"dataset {self.name}: __getitem__ of {one.__name__} would be ignored: {remedy}")
        self.on_one_thread = self.one_by_one or not hooks_of(dataset).in_memory
        self.drawn_at_first: int | None = 0  # samples that were drawn when first read; None: the checks are done

    def __getitems__(self, indices: Sequence[int]) -> Any:
        indices = list(indices)
        # As in a worker: the number of threads changes the last digit of a sum.
        alone = self.on_one_thread and get_worker_info() is None
        with keep_random_state(), one_thread() if alone else nullcontext():
            read: list[Any] = []
            is_first = self.drawn_at_first is not None
            for index in indices:  # in each worker
                if self.drawn_at_first is None:
                    break
                self.drawn_at_first = self.drawn_at_first + 1 if self._check(index, read) else None
                if self.drawn_at_first == (2 if len(indices) > 1 else 3):  # the first of all may set up something
                    reason = "draws random numbers for a sample only when it is first read"
                    raise UsageError(f"dataset {self.name} {reason}: keep it as it is before its augmentation")
            batch = self._read(indices)
            if self.one_by_one and not all(same(*pair) for pair in read) and len(indices) > 1:
                remedy = "return a copy of what you use again"
                raise UsageError(f"dataset {self.name} changes a sample when it reads the next one: {remedy}")
            if is_first and self.one_by_one and not same(batch[:1], self._read(indices[:1])):
                raise self._two_samples(indices[0])  # it depends on those that were read before
            return self._collate(batch, indices) if isinstance(batch, list) else batch

    def _check(self, index: int, read: list[Any]) -> bool:
        """Read a sample several times. Raises UsageError if the results differ: the run could not be resumed exactly.

        Returns whether only the first call has drawn random numbers. Adds its tensors, and copies of them, to `read`.
        """
        first, next_numbers = self._read([index]), _draw()
        tensors = [each for each in leaves(first) if isinstance(each, torch.Tensor | numpy.ndarray)]
        copies = [each.clone() if isinstance(each, torch.Tensor) else each.copy() for each in tensors]
        # Other random numbers in between: an augmentation in place changes what the data set keeps.
        again = [self._read([index], seed) for seed in ((0, 1, 0) if self.one_by_one else (1,))][::2]
        if not (all(same(first, each) for each in again) and same(tensors, copies)):
            raise self._two_samples(index)
        read += zip(tensors, copies, strict=True)
        return self.one_by_one and next_numbers != _draw()

    def _two_samples(self, index: int) -> UsageError:
        return UsageError(
            f"dataset {self.name} returned two different samples for index {index}: draw random numbers in "
            "__getitem__, from random, numpy.random or torch, or from a generator that each call seeds with "
            "torch.initial_seed(); change a copy of what you keep; let a stream read by index, and each worker "
            "open its own connection, as docs/data.md does"
        )

    def _read(self, indices: list[int], seed: int = 0) -> Any:
        """A list of samples, each with its own seed; or what __getitems__ returns, which must not depend on `seed`.

        Another `seed` gives each sample other random numbers.
        """
        if self.one_by_one:
            samples = []
            for index in indices:
                _seed(derive_seed(self.seed + seed, self.epoch, index))
                samples.append(self.dataset[index])
            return samples
        batch, draws = _call(self.dataset.__getitems__, indices, seed)
        if draws:
            remedy = "draw them in __getitem__, augment or mix, as docs/data.md shows"
            raise UsageError(f"dataset {self.name} draws random numbers in __getitems__: {remedy}")
        return batch

    def _collate(self, samples: list[Any], indices: list[int]) -> Any:
        if getattr(self.collate, "__func__", None) is not BatchDataset.collate:  # the owner's own
            batch, draws = _call(self.collate, samples, derive_seed(self.seed, self.epoch, *indices))
            hooks = hooks_of(self.dataset) if draws else None
            if hooks and max(hooks.chunk_size, hooks.train_chunk_size) > 1:  # a resume may read others together
                raise UsageError(f"dataset {self.name} draws random numbers in collate: leave chunk_size at 1")
            return batch
        try:
            return self.collate(samples)
        except (RuntimeError, TypeError, ValueError) as error:
            raise explain_collate_error(error, samples, self.dataset) from error


class _Pickled:
    """A batch as bytes: if the thread of the worker's queue pickled it, an error would not reach the waiting rank."""

    def __init__(self, batch: Any) -> None:
        self.content = bytes(ForkingPickler.dumps(batch))

    def __reduce__(self) -> Any:
        return pickle.loads, (self.content,)


def hand_over(batch: Any) -> Any:
    """Pickle a batch in a worker. It is collated already. Raises PeerLost if memory ran out, for example."""
    try:
        return batch if get_worker_info() is None else _Pickled(batch)
    except (RuntimeError, OSError) as error:
        if "path too long" in str(error):
            where = tempfile.gettempdir()
            raise UsageError(f"DataLoader workers open sockets in {where}: set TMPDIR to a shorter path") from error
        reason = f"{one_line(error)}; if memory ran out: lower --workers, or enlarge /dev/shm"
        raise PeerLost(f"a DataLoader worker cannot hand over a batch: {reason}") from error


def same(one: Any, other: Any, compared: set[tuple[int, int]] | None = None) -> bool:
    """Whether two values are equal, with their tensors and arrays. Objects that cannot be compared count as equal.

    compared: ids of pairs of objects whose attributes were compared: they may lead back to each other.
    """
    compared = set() if compared is None else compared
    if type(one) is not type(other):
        return False
    if one is other:  # such as a member of an Enum, whose attributes lead back to it
        return True
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(value, other[key], compared) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(*pair, compared) for pair in zip(one, other, strict=True))
    if type(one).__eq__ is object.__eq__ or is_dataclass(one):  # which compare identities, or tensors as booleans
        known = (pair := (id(one), id(other))) in compared
        compared.add(pair)
        return known or same(attributes(one), attributes(other), compared)
    if isinstance(one, torch.Tensor) and (one.layout != torch.strided or one.is_nested):
        return (one.is_nested or one.shape == other.shape) and same(strided(one), strided(other))
    try:
        if any(getattr(one, name, None) != getattr(other, name, None) for name in ("shape", "dtype")):
            return False
        equal = (one == other) | ((one != one) & (other != other))  # NaN is equal to NaN
        return bool(equal.all() if hasattr(equal, "all") else equal)
    except Exception:
        return True


def _seed(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # not those of GPUs, as torch.manual_seed does


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes with one thread in the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _draw() -> tuple[float, float, float]:
    return random.random(), numpy.random.random(), torch.rand(()).item()


def _call(function: Callable[[Any], Any], argument: Any, seed: int) -> tuple[Any, bool]:
    """What the function returns, seeded, and whether it draws random numbers."""
    draws = []
    for step in (lambda _: None, function):
        _seed(seed)
        result = step(argument)
        draws.append(_draw())
    return result, draws[0] != draws[1]


def _definer(owner: type, name: str) -> type | None:
    """The class that defines `name` for `owner`."""
    return next((each for each in owner.__mro__ if name in vars(each)), None)
