"""BatchDataset: what a dataset may do to whole batches, and what a batch must be. Any other torch Dataset works too."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch
from torch.utils.data import Dataset, Subset, default_collate

from ddp.core.errors import UsageError
from ddp.distributed.tensors import leaves

MANY = 1000  # a container with so many entries holds samples, or data sets alone
DEPTH = 4  # containers within each other that are searched for data sets
WITHOUT_DATASETS = (int, float, str, bytes, type(None), torch.Tensor, type)
HOOKS = ("collate", "collate_fn", "augment", "prepare", "mix", "chunk_size", "train_chunk_size", "in_memory", "to")
IGNORED_LABEL = -100  # torch's default for ignore_index
SAMPLER_REMEDY = "return Datasets(train, val, test, sampler) from load_datasets, as docs/data.md shows"
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass
class Datasets:
    """What load_datasets returns. It unpacks to the three sets.

    train: the training set. val: the validation set, evaluated after each epoch; it chooses best.pt, so without it
    there is none. test: the test set, evaluated once, at the end of the run, and by --evaluate.

    sampler: which training samples each epoch reads; by default all of them, shuffled. An object with two methods:
    indices(epoch, start, stop) -> list[int] or Tensor: the samples at those positions of the epoch's order, all ranks
        together. The sample at a position depends on (epoch, position) only: a resumed run asks for other parts.
    length(epoch) -> int: how many positions the epoch has.
    """

    train: Any
    val: Any = None
    test: Any = None
    sampler: Any = None
    records: Any = field(default=None, repr=False)  # of some samples, which check_datasets reads in the background

    def __getitem__(self, index: Any) -> Any:
        return (self.train, self.val, self.test)[index]


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

    docs/data.md lists which of them may draw random numbers.
    """

    name: str | None = None  # what the log calls the data; by default the class
    in_memory: bool = False  # True: no DataLoader workers, unless --workers asks for them
    chunk_size: int = 1  # read, augment and prepare about this many samples together; never less than one batch
    train_chunk_size: int = 0  # for training, unless it is 0: an evaluation must not depend on a GPU's memory

    def __getitems__(self, indices: list[int]) -> Any:
        """The samples `indices`, as a list or as one batch: a tuple or a dictionary of tensors.

        By default a list of samples from __getitem__. Only __getitem__ may draw random numbers.
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

    def describe(self) -> dict[str, Any]:
        """Numbers, strings, lists and dictionaries that checkpoints should hold about the data, in `dataset`."""
        return {}

    def keys(self) -> Any:
        """A number for each sample, int64 [n], that it keeps if others are removed, such as a hash of its file's name.

        None: only its place in the dataset tells a sample from others.
        """
        return None

    def keep(self) -> bool:
        """Continue with the data of an earlier version, which may have split them otherwise.

        Returns whether that changes them. Called on every rank, before the loaders are made.
        """
        return False

    def example_images(self, inputs: Any) -> torch.Tensor | None:
        """What TensorBoard shows of the first batch: images [n, 1 or 3, h, w] from 0 to 1, or None."""
        return None


def with_wrapped(dataset: Any) -> Iterator[Any]:
    """A dataset, and the one that it wraps, as torch's Subset does, and so on."""
    yield dataset
    while isinstance(inner := getattr(dataset, "dataset", None), Dataset) or (
        isinstance(dataset, Subset) and _is_dataset(inner)
    ):
        yield (dataset := inner)


def set_epoch(dataset: Any, epoch: int) -> None:
    """Call set_epoch(epoch) of a dataset that has it, and of those that it holds."""
    if callable(getattr(dataset, "set_epoch", None)):
        dataset.set_epoch(epoch)
    for inner in held_by(dataset):
        if callable(getattr(inner, "set_epoch", None)):
            inner.set_epoch(epoch)


def data_name(dataset: Any) -> str:
    """What the log calls the data: the dataset's `name`, or its class."""
    found = list(with_wrapped(dataset))
    return next((each.name for each in found if getattr(each, "name", None)), type(found[-1]).__name__)


def classes_of(dataset: Any) -> Sequence[Any]:
    """The `classes` of a dataset; empty if it has none."""
    classes = next((each.classes for each in with_wrapped(dataset) if hasattr(each, "classes")), ())
    return classes if isinstance(classes, Sequence) else ()


def hooks_of(dataset: Any) -> BatchDataset:
    """The BatchDataset that `dataset` is or wraps. For any other, hooks that do nothing.

    Raises UsageError if another class defines a hook: it would be ignored.
    """
    for each in with_wrapped(dataset):
        for name in ("sampler", "batch_sampler"):
            if hasattr(each, name):
                raise UsageError(f"{type(each).__name__}.{name} would be ignored: {SAMPLER_REMEDY}")
        if isinstance(each, BatchDataset):
            for name in ("collate", "augment", "prepare", "mix", "to", "keys", "keep", "describe"):
                if not callable(getattr(each, name) or str):  # None: an evaluation calls no `augment`, for example
                    raise UsageError(f"{type(each).__name__}.{name} is a hook of BatchDataset: give it another name")
            return each
        if ignored := ", ".join(name for name in HOOKS if hasattr(each, name)):
            remedy = "subclass ddp.data.dataset.BatchDataset, or give it another name if it is no hook"
            raise UsageError(f"dataset {type(each).__name__} has {ignored}: {remedy}")
        if any(map(_has_hooks, _held(each, {id(part) for part in with_wrapped(each)}))):
            remedy = "whose hooks would be ignored: name what it wraps `dataset`, or join the data in one BatchDataset"
            raise UsageError(f"dataset {type(each).__name__} holds a BatchDataset, {remedy}")
    return BatchDataset()


def held_by(dataset: Any) -> list[Any]:
    """The data sets that `dataset` holds in any attribute, as torch's Subset and ConcatDataset do."""
    return [*_held(dataset, {id(dataset)})]


def _held(dataset: Any, seen: set[Any]) -> Iterator[Any]:
    """The data sets in the attributes of `dataset`, and in theirs, unless their ids are in `seen`; they are added."""
    for part in _datasets_in(attributes(dataset).values(), DEPTH, seen):
        if id(part) not in seen:
            seen.add(id(part))
            yield part
            yield from _held(part, seen)


def _datasets_in(values: Iterable[Any], depth: int, seen: set[Any]) -> Iterator[Any]:
    """The data sets among `values`, and in their lists, as in torch's ConcatDataset, dictionaries and dataclasses."""
    for value in values:
        if isinstance(value, WITHOUT_DATASETS):
            continue
        if _is_dataset(value):
            yield value
        elif (inside := _inside(value)) and depth and (id(value), depth) not in seen:
            seen.add((id(value), depth))
            first = [next(iter(inside))]
            if len(inside) < MANY or next(_datasets_in(first, depth - 1, set()), None) is not None:
                yield from _datasets_in(inside, depth - 1, seen)


def _inside(value: Any) -> Collection[Any]:
    if isinstance(value, dict):
        return value.values()
    if is_dataclass(value):
        return attributes(value).values()
    return value if isinstance(value, list | tuple | set) else ()


def attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object, also of one with __slots__."""
    found = {}
    for each in type(value).__mro__:
        names = vars(each).get("__slots__", ())
        for name in [names] if isinstance(names, str) else names:
            with suppress(AttributeError):  # it may be unset
                found[name] = vars(each)[name].__get__(value) if name in vars(each) else None
    with suppress(AttributeError):
        found |= object.__getattribute__(value, "__dict__")
    return found


def _is_dataset(part: Any) -> bool:
    """Of torch, or of a class that has samples, and set_epoch() or a hook."""
    names = [name for name in ("set_epoch", "collate", "augment", "prepare", "mix") if hasattr(type(part), name)]
    return isinstance(part, Dataset) or bool(names and hasattr(type(part), "__getitem__"))


def _has_hooks(part: Any) -> bool:
    kind_of, base = type(part), BatchDataset
    own = (getattr(kind_of, name, None) is not getattr(base, name, None) or name in vars(part) for name in HOOKS)
    return isinstance(part, BatchDataset) and any(own)


def describe(dataset: Any) -> dict[str, Any]:
    """What checkpoints hold about the data: name, classes, wrappers that may change samples, what the dataset adds."""
    hooks, classes = hooks_of(dataset), [str(name) for name in classes_of(dataset)]
    layers = [*with_wrapped(dataset)]
    outside = layers[: next((number for number, each in enumerate(layers) if each is hooks), 0)]
    wrappers = [type(each).__name__ for each in outside if type(each) is not Subset]
    return {"name": data_name(dataset), "classes": classes, "wrappers": wrappers, **hooks.describe()}


def check_batch(batch: Any, dataset: Any) -> int:
    """Raise UsageError for a batch that is not (inputs, targets), for images of PIL, and for labels without a class.

    Returns the number of classes, if the targets are labels and the dataset has `classes`; otherwise 0.
    """
    name, count = data_name(dataset), len(classes_of(dataset))
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        remedy = "return two values from __getitem__ in data.py, or make them in `prepare`"
        raise UsageError(f"dataset {name}: a batch is {kind(batch)}, not (inputs, targets): {remedy}")
    _refuse_pil(batch, name)
    labels = batch[1]
    if not (count and isinstance(labels, torch.Tensor) and labels.dim() == 1) or labels.dtype not in INTEGERS:
        return 0
    wrong = labels[((labels < 0) & (labels != IGNORED_LABEL)) | (labels >= count)]
    if len(wrong):
        valid = f"{count} classes, so labels are 0 to {count - 1}"
        remedy = "change the labels, or the list `classes` of the dataset, in data.py"
        raise UsageError(f"dataset {name}: a label is {wrong[0].item()}, but there are {valid}: {remedy}")
    return count


def check_outputs(outputs: Any, classes: int) -> None:
    """Raise UsageError if outputs for labels do not fit the number of classes. A single logit is for two classes."""
    if classes and isinstance(outputs, torch.Tensor) and outputs.dim() == 2 and outputs.shape[1] not in (1, classes):
        remedy = "build the last layer with len(train_set.classes), in build_model in model.py"
        remedy += "; if outputs are embeddings, for example, write OUTPUTS_ARE_CLASSES = False there"
        raise UsageError(f"the model has {outputs.shape[1]} outputs for {classes} classes: {remedy}")


def check_loss(loss: Any) -> None:
    """Raise UsageError for a loss that cannot be trained. Cheap enough for each step."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise UsageError(f"compute_loss in model.py returned {kind(loss)}: return one number, such as the mean")
    if not loss.requires_grad:
        remedy = "compute it from the outputs without detach(), item(), argmax() or torch.no_grad()"
        raise UsageError(f"the loss that compute_loss in model.py returned depends on no weight: {remedy}")


def explain_collate_error(error: Exception, samples: list[Any], dataset: Any) -> UsageError:
    """Why torch cannot join `samples` to a batch."""
    name = data_name(dataset)
    _refuse_pil(samples, name)
    for parts in zip(*map(leaves, samples), strict=False):
        sizes = list(dict.fromkeys(str(list(part.shape)) for part in parts if hasattr(part, "shape")))
        if len(sizes) > 1:
            remedy = "resize them in data.py, for example with transforms.Resize and CenterCrop, or override `collate`"
            return UsageError(f"dataset {name}: samples of different sizes, {sizes[0]} and {sizes[1]}: {remedy}")
    return UsageError(f"dataset {name}: its samples cannot be joined to a batch ({error}): override `collate`")


def _refuse_pil(tree: Any, name: str) -> None:
    if any(type(part).__module__.startswith("PIL.") for part in leaves(tree)):
        remedy = "add torchvision's transforms.ToTensor() to its transform in data.py"
        raise UsageError(f"dataset {name} returns images of PIL, and no tensors: {remedy}")


def kind(value: Any) -> str:
    """`a tensor of shape [16]`, `a dictionary with 'image' and 'label'`, `a tuple with 2 parts`, `a float`."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, Mapping):
        return f"a dictionary with {' and '.join(map(repr, value))}"
    parts = f" with {len(value)} parts" if isinstance(value, tuple | list) else ""
    return f"a {type(value).__name__}{parts}" if value is not None else "None"
