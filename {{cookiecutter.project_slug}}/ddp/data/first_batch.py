"""Checks of the first batch: mistakes in data.py and model.py that torch reports late, unclearly or not at all."""

from collections.abc import Sequence, Sized
from typing import Any

import torch
from torch.utils.data import Dataset

from ddp.core.errors import UsageError
from ddp.distributed.tree import leaves

IGNORED_LABEL = -100  # torch's default for ignore_index


def check_batch(inputs: Any, targets: Any, dataset: Any, name: str) -> None:
    """Refuse images of PIL, labels without a class, and a dictionary, whose names main.py took apart. UsageError."""
    if isinstance(inputs, str):
        remedy = "return (inputs, targets) from __getitem__ in data.py, or make them in `prepare`"
        raise UsageError(f"dataset {name}: a batch is a dictionary with {inputs!r} and {targets!r}: {remedy}")
    _refuse_pil((inputs, targets), name)
    classes = classes_of(dataset)
    if classes and _are_labels(targets):
        wrong = targets[((targets < 0) & (targets != IGNORED_LABEL)) | (targets >= len(classes))]
        if len(wrong):
            valid = f"{len(classes)} classes, so labels are 0 to {len(classes) - 1}"
            remedy = "change the labels, or the list `classes` of the dataset, in data.py"
            raise UsageError(f"dataset {name}: a label is {wrong[0].item()}, but there are {valid}: {remedy}")


def check_outputs(outputs: Any, targets: Any, loss: Any, dataset: Any) -> None:
    """Refuse a loss that cannot be trained, and outputs that do not fit the classes. Raises UsageError."""
    classes = classes_of(dataset)
    if classes and _are_labels(targets) and isinstance(outputs, torch.Tensor) and outputs.dim() == 2:
        found = outputs.shape[1]
        if found not in (1, len(classes)):  # 1: a single logit for two classes
            remedy = "build the last layer with len(train_set.classes), in build_model in model.py"
            raise UsageError(f"the model has {found} outputs for {len(classes)} classes: {remedy}")
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise UsageError(f"compute_loss in model.py returned {_describe(loss)}: return one number, such as the mean")
    if not loss.requires_grad:
        remedy = "compute it from the outputs without detach(), item(), argmax() or torch.no_grad()"
        raise UsageError(f"the loss that compute_loss in model.py returned depends on no weight: {remedy}")


def classes_of(dataset: Any) -> Sequence[Any]:
    """The `classes` of a dataset, through wrappers such as torch's Subset; empty if it has none."""
    while not hasattr(dataset, "classes") and isinstance(getattr(dataset, "dataset", None), Dataset):
        dataset = dataset.dataset
    classes = getattr(dataset, "classes", ())
    return classes if isinstance(classes, Sequence) else ()


def explain_collate_error(error: Exception, samples: list[Any], name: str) -> UsageError:
    """Why torch cannot join `samples` to a batch."""
    _refuse_pil(samples, name)
    first, *others = ([part.shape for part in leaves(sample) if hasattr(part, "shape")] for sample in samples)
    for shapes in others:
        if shapes != first:
            one, other = next(
                (pair for pair in zip(first, shapes, strict=False) if pair[0] != pair[1]), (first, shapes)
            )
            remedy = "resize them in data.py, for example with transforms.Resize and CenterCrop, or override `collate`"
            return UsageError(f"dataset {name}: samples of different sizes, {list(one)} and {list(other)}: {remedy}")
    return UsageError(f"dataset {name}: its samples cannot be joined to a batch ({error}): override `collate`")


def _refuse_pil(tree: Any, name: str) -> None:
    if any(type(part).__module__.startswith("PIL.") for part in leaves(tree)):
        remedy = "add torchvision's transforms.ToTensor() to its transform in data.py"
        raise UsageError(f"dataset {name} returns images of PIL, and no tensors: {remedy}")


def _are_labels(targets: Any) -> bool:
    """Whether these are one whole number per sample."""
    kind = torch.float if not isinstance(targets, torch.Tensor) or targets.dim() != 1 else targets.dtype
    return not (kind.is_floating_point or kind.is_complex or kind == torch.bool)


def _describe(value: Any) -> str:
    """`a tensor of shape [16]`, `a dict with 2 parts`, `a float`."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    parts = f" with {len(value)} parts" if isinstance(value, Sized) and not isinstance(value, str) else ""
    return f"a {type(value).__name__}{parts}" if value is not None else "None"
