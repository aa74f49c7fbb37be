"""BatchDataset: what a dataset may do to whole batches. Any other torch Dataset works as it is."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import numpy
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, default_collate

from ddp.core.errors import SetupError, UsageError
from ddp.core.run_config import RunConfig
from ddp.data.first_batch import explain_collate_error
from ddp.distributed.seeds import derive_seed
from ddp.distributed.tree import map_tensors

HOOKS = ("collate", "augment", "prepare", "mix", "chunk_size", "in_memory", "to")


class Datasets(NamedTuple):
    """What load_datasets returns.

    train: the training set. val: the validation set, evaluated after each epoch; it chooses best.pt, so without it
    there is none. test: the test set, evaluated once, at the end of the run, and by --evaluate.
    """

    train: Any
    val: Any = None
    test: Any = None


class BatchDataset(Dataset):
    """A dataset that works on whole batches. Override what you need: by default, nothing happens to a batch.

    A batch goes through these steps, in this order:
    read      __getitems__(indices), in a DataLoader worker, or in this process if there are none
    collate   collate(samples), in the same process, if `read` returns a list
    move      its tensors, and everything else in it that has a method `to`, go to the device
    augment   augment(batch, epoch), for training only
    prepare   prepare(batch) -> (inputs, targets)
    split     into batches of --batch-size, if more samples were read together (chunk_size), for training only
    mix       mix(inputs, targets) -> (inputs, targets), for training only

    Random numbers that `read` and `mix` draw from random, numpy.random or torch are the same after any resume.
    """

    name: str | None = None  # what the log calls the data; by default the class
    in_memory: bool = False  # True: no DataLoader workers, unless --workers asks for them
    chunk_size: int = 1  # read, augment and prepare about this many samples together; never less than one batch

    def __getitems__(self, indices: list[int]) -> Any:
        """The samples `indices`, as a list or as one batch: a tuple or a dictionary of tensors.

        By default a list of samples from __getitem__.
        """
        return [self[index] for index in indices]

    def collate(self, samples: list[Any]) -> Any:
        """One batch of these samples. Override it for samples of different sizes: pad them, or keep lists."""
        return default_collate(samples)

    def augment(self, batch: Any, epoch: int) -> Any:
        """Change the samples of a training batch, on the device.

        Random numbers should depend on (seed, epoch, sample) only, so that a sample looks the same for any number of
        processes, and after any resume: see derive_seed in ddp/distributed/seeds.py.
        """
        return batch

    def prepare(self, batch: Any) -> Any:
        """Turn a batch, on the device, into (inputs, targets): tensors, or dictionaries and lists of them."""
        return batch

    def mix(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """Combine the samples of a training batch of --batch-size, such as Mixup. Seeded for each batch and rank."""
        return inputs, targets

    def to(self, device: torch.device) -> None:
        """Move data held in memory to a GPU, if they fit. Not called if DataLoader workers need to reach the data."""


def check_datasets(found: Any, config: RunConfig) -> Datasets:
    """Check what load_datasets returned: no set is empty or a stream. Raises UsageError or SetupError."""
    if not isinstance(found, Datasets) or found.train is None:
        remedy = "return Datasets(train, val, test), from ddp.data.dataset; val and test may be None"
        raise UsageError(f"load_datasets in data.py returned {_describe(found)}: {remedy}")
    if config.evaluate and found.val is None and found.test is None:
        raise UsageError("--evaluate: there is neither a validation set nor a test set")
    if config.patience is not None and found.val is None and not config.evaluate:
        raise UsageError("--patience needs a validation set: add one in data.py, or remove --patience")
    for part, dataset in (("training", found.train), ("validation", found.val), ("test", found.test)):
        if dataset is None:
            continue
        by_index = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        if isinstance(dataset, IterableDataset) or not by_index:
            stream = f"the {part} data ({type(dataset).__name__}) are a stream, which cannot be read by index"
            raise UsageError(f"{stream}: give them __len__ and __getitem__, as docs/data.md does for tar files")
        if len(dataset) == 0:
            raise SetupError(f"there are no {part} samples: check --data-dir")
    return found


def _describe(found: Any) -> str:
    if isinstance(found, Datasets):
        return "no training set"
    return f"{len(found)} values" if isinstance(found, tuple | list) else f"a {type(found).__name__}"


def data_name(dataset: Any) -> str:
    """What the log calls the data: the dataset's `name`, or its class; through wrappers such as torch's Subset."""
    while not getattr(dataset, "name", None) and isinstance(getattr(dataset, "dataset", None), Dataset):
        dataset = dataset.dataset
    return getattr(dataset, "name", None) or type(dataset).__name__


def hooks_of(dataset: Any) -> BatchDataset:
    """The BatchDataset that `dataset` is or wraps, as torch's Subset does. For any other, hooks that do nothing.

    Raises UsageError if another class defines a hook: it would be ignored.
    """
    while not isinstance(dataset, BatchDataset):
        ignored = ", ".join(name for name in HOOKS if hasattr(dataset, name))
        if ignored:
            remedy = "subclass ddp.data.dataset.BatchDataset, or give it another name if it is no hook"
            raise UsageError(f"dataset {type(dataset).__name__} has {ignored}: {remedy}")
        if any(isinstance(part, BatchDataset) for part in getattr(dataset, "datasets", ())):  # torch's ConcatDataset
            remedy = "whose hooks would be ignored: join the data within one BatchDataset"
            raise UsageError(f"dataset {type(dataset).__name__} holds a BatchDataset, {remedy}")
        dataset = getattr(dataset, "dataset", None)
        if not isinstance(dataset, Dataset):
            return BatchDataset()
    return dataset


class SeededReader(Dataset):
    """Reads and collates batches of `dataset` in which each sample is a function of (seed, epoch, index) alone.

    So a dataset that draws random numbers is the same for any number of processes, workers and samples that are read
    together, and after any resume. The first sample is read twice: UsageError, if it differs.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], seed: int, epoch: int) -> None:
        self.dataset, self.collate, self.seed, self.epoch = dataset, collate, seed, epoch
        innermost = dataset
        while isinstance(innermost, Subset):  # which passes __getitems__ on
            innermost = innermost.dataset
        inherited = getattr(type(innermost), "__getitems__", None) is BatchDataset.__getitems__
        self.one_by_one = inherited or not hasattr(innermost, "__getitems__")
        self.checked = False
        self.reads_seed = False  # whether __getitems__ makes generators from torch.initial_seed()

    def __getitems__(self, indices: list[int]) -> Any:
        with keep_random_state():
            if not self.checked:  # in each worker
                self.checked = True
                self._check(indices[0])
            batch = self.read(indices)
        if not isinstance(batch, list):
            return batch
        try:
            return self.collate(batch)
        except (RuntimeError, TypeError) as error:
            if getattr(self.collate, "__func__", None) is not BatchDataset.collate:
                raise  # the owner's own
            raise explain_collate_error(error, batch, type(self.dataset).__name__) from error

    def read(self, indices: list[int]) -> Any:
        """The samples as a list; or as one batch, if that is what the dataset's own __getitems__ returns."""
        parts = (self._read_alone(index) for index in indices)
        if self.one_by_one:
            return list(parts)
        before = _states()
        batch = self.dataset.__getitems__(indices)
        if _equal_states(before, _states()) and not self.reads_seed:
            return batch  # no sample of it depends on a random number
        joined = _join(list(parts), type(self.dataset).__name__)
        if _shapes(joined) != _shapes(batch):  # the samples are not along the first dimension
            raise _not_joined(type(self.dataset).__name__, "it has another shape")
        return joined

    def _read_alone(self, index: int, *salt: int) -> Any:
        seed = derive_seed(self.seed, self.epoch, index, *salt)
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        return self.dataset[index] if self.one_by_one else self.dataset.__getitems__([index])

    def _check(self, index: int) -> None:
        """Raise UsageError if the dataset ignores its index or the seed: the run could not be resumed exactly."""
        sample = self._read_alone(index)
        self.reads_seed = not self.one_by_one and not same(sample, self._read_alone(index, 1))
        if not same(sample, self._read_alone(index)):
            raise UsageError(
                f"dataset {type(self.dataset).__name__} returned two different samples for index {index}: draw random "
                "numbers from random, numpy.random or torch, or seed a generator of your own in each call of "
                "__getitem__ with torch.initial_seed(); let a stream read by index, as docs/data.md does"
            )


def _join(parts: Sequence[Any], name: str) -> Any:
    """One batch from those of one sample each."""
    first = parts[0]
    if isinstance(first, list):
        return [sample for part in parts for sample in part]
    if isinstance(first, Mapping):
        return {key: _join([part[key] for part in parts], name) for key in first}
    if isinstance(first, tuple):
        joined = [_join(column, name) for column in zip(*parts, strict=True)]
        return type(first)(*joined) if hasattr(first, "_fields") else tuple(joined)
    try:
        return torch.cat(list(parts))
    except (RuntimeError, TypeError) as error:
        raise _not_joined(name, error) from error


def _not_joined(name: str, reason: Any) -> UsageError:
    return UsageError(
        f"dataset {name} draws random numbers in __getitems__, so its samples are read one by one, but they cannot "
        f"be joined to a batch ({reason}): return a list of samples, and override collate"
    )


def _shapes(batch: Any) -> list[torch.Size]:
    found: list[torch.Size] = []
    map_tensors(batch, lambda tensor: found.append(tensor.shape))
    return found


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, with their tensors and arrays. Objects that cannot be compared count as equal."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    if type(one).__eq__ is object.__eq__ or is_dataclass(one):  # which compare identities, or tensors as booleans
        return same(vars(one), vars(other)) if hasattr(one, "__dict__") else True
    try:
        if any(getattr(one, name, None) != getattr(other, name, None) for name in ("shape", "dtype")):
            return False
        equal = (one == other) | ((one != one) & (other != other))  # NaN is equal to NaN
        return bool(equal.all() if hasattr(equal, "all") else equal)
    except Exception:
        return True


@contextmanager
def keep_random_state() -> Iterator[None]:
    """Restore the generators of Python, numpy and torch when the block ends."""
    python, of_numpy, of_torch = _states()
    try:
        yield
    finally:
        random.setstate(python)
        numpy.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)


def _states() -> tuple[Any, ...]:
    return random.getstate(), numpy.random.get_state(), torch.get_rng_state()


def _equal_states(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    numpy_equal = numpy.array_equal(one[1][1], other[1][1]) and one[1][2:] == other[1][2:]
    return one[0] == other[0] and numpy_equal and torch.equal(one[2], other[2])
