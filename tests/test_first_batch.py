"""Mistakes in data.py and model.py that the first batch shows: one line that names what to change, before a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import Dataset, Subset

import main
from ddp.core.errors import UsageError
from ddp.data.dataset import BatchDataset, Datasets, check_batch, check_loss, check_outputs
from ddp.data.loader import watch_first_outputs
from faults import fault
from processes import train

pytestmark = pytest.mark.slow
CLASSES = [str(number) for number in range(10)]


class Samples(Dataset):
    """`make(index)` is a sample of it."""

    classes = CLASSES

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def image(*size: int) -> torch.Tensor:
    return torch.zeros(3, *(size or (32, 32)))


def outcome(monkeypatch: pytest.MonkeyPatch, folder: Path, dataset: Dataset, *options: Any, world_size: int = 1) -> str:
    """What a run with this training set prints. It exits with 2, in one line, before its first step."""
    test_set = Samples(lambda index: (image(), index % 10))
    monkeypatch.setattr(main, "load_datasets", lambda config: Datasets(dataset, test_set))
    common = ("--batch-size", 4, "--log-every", 1, "--epochs", 1, "--output-dir", folder)
    output = train(world_size, *common, *(options or ("--workers", 0)), code=2)
    found = [line for line in output.splitlines() if "error: " in line or "is exiting because" in line]
    assert "Traceback" not in output and " train  " not in output and found, output
    return found[0]


DATA: dict[str, tuple[Callable[[int], Any], list[str]]] = {
    "images of PIL": (
        lambda index: (Image.new("RGB", (32, 32)), index % 10),
        ["Samples returns images of PIL", "transforms.ToTensor()", "data.py"],
    ),
    "a label without a class": (
        lambda index: (image(), 10),
        ["a label is 10, but there are 10 classes, so labels are 0 to 9", "data.py"],
    ),
    "a negative label": (lambda index: (image(), -1), ["a label is -1, but there are 10 classes"]),
    "different sizes": (
        lambda index: (image(20 + index, 30), index % 10),
        ["samples of different sizes, [3, ", "transforms.Resize", "`collate`", "data.py"],
    ),
    "three parts": (
        lambda index: (image(), index % 10, index),
        ["a batch is a list with 3 parts, not (inputs, targets)", "data.py", "`prepare`"],
    ),
    "a dictionary": (
        lambda index: {"image": image(), "label": index % 10},
        ["a batch is a dictionary with 'image' and 'label'", "data.py", "`prepare`"],
    ),
    "no target": (lambda index: image(), ["a batch is a tensor of shape [4, 3, 32, 32], not (inputs, targets)"]),
    "a dictionary with three parts": (
        lambda index: {"image": image(), "label": index % 10, "file": "a.png"},
        ["a batch is a dictionary with 'image' and 'label' and 'file'"],
    ),
    "what cannot be joined": (lambda index: (image(), object()), ["cannot be joined to a batch (", "`collate`"]),
}


@fault(41)
@pytest.mark.sample(3)
@pytest.mark.parametrize("case", DATA)
def test_data_that_cannot_be_trained_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str) -> None:
    make, words = DATA[case]
    line = outcome(monkeypatch, tmp_path, Samples(make), "--workers", 1 if case == "images of PIL" else 0)
    assert all(word in line for word in words), line
    assert "dataset Samples" in line


LOSSES: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "one per sample": (
        lambda outputs, targets, config: F.cross_entropy(outputs, targets, reduction="none"),
        ["compute_loss in model.py returned a tensor of shape [4]: return one number"],
    ),
    "a tuple": (
        lambda outputs, targets, config: (outputs.sum(), 0),
        ["returned a tuple with 2 parts: return one number"],
    ),
    "None": (lambda outputs, targets, config: None, ["compute_loss in model.py returned None: return"]),
    "a number": (
        lambda outputs, targets, config: F.cross_entropy(outputs, targets).item(),
        ["compute_loss in model.py returned a float: return"],
    ),
    "without gradient": (
        lambda outputs, targets, config: (outputs.argmax(1) != targets).float().mean(),
        ["compute_loss in model.py returned depends on no weight", "argmax"],
    ),
}


@fault(41)
@pytest.mark.sample(2)
@pytest.mark.parametrize("case", LOSSES)
def test_a_loss_that_cannot_be_trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str) -> None:
    loss, words = LOSSES[case]
    monkeypatch.setattr(main.task, "compute_loss", loss)
    line = outcome(monkeypatch, tmp_path, Samples(lambda index: (image(), index % 10)))
    assert all(word in line for word in words), line


@fault(41)
@pytest.mark.sample(1)
@pytest.mark.parametrize(("outputs", "world_size"), [(1000, 2), (7, 1)])
def test_a_model_with_other_outputs_than_classes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outputs: int, world_size: int
) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, outputs))
    monkeypatch.setattr(main.task, "build_model", lambda config, train_set: model)
    labels = 7 if outputs == 7 else 10  # a label without an output has its own error
    dataset = Samples(lambda index: (image(), index % labels))
    line = outcome(monkeypatch, tmp_path, dataset, "--workers", 0, world_size=world_size)
    assert f"the model has {outputs} outputs for 10 classes" in line and "build_model in model.py" in line


@fault(41)
@pytest.mark.sample(1)
@pytest.mark.parametrize("part", ["train", "val", "test"])
def test_each_set_is_checked_for_pairs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, part: str) -> None:
    """A tensor of two images is no pair, although `inputs, targets = batch` would take it apart."""
    good = Samples(lambda index: (image(), index % 10))
    datasets = Datasets(**{"train": good, "val": good, "test": good, part: Samples(lambda index: image())})
    monkeypatch.setattr(main, "load_datasets", lambda config: datasets)
    output = train(1, "--batch-size", 2, "--workers", 0, "--max-steps", 1, "--output-dir", tmp_path, code=2)
    assert "error: dataset Samples: a batch is a tensor of shape [2, 3, 32, 32], not (inputs, targets): " in output


@fault(41)
def test_outputs_are_compared_before_the_loss_and_only_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The loss would raise an IndexError, or a device-side assert on a GPU."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 7))
    monkeypatch.setattr(main.task, "build_model", lambda config, train_set: model)
    line = outcome(monkeypatch, tmp_path, Samples(lambda index: (image(), 9)))
    assert "the model has 7 outputs for 10 classes" in line
    first_batch: Any = SimpleNamespace(classes=10)
    watch_first_outputs(first_batch, model, None)
    with pytest.raises(UsageError, match="the model has 7 outputs for 10 classes"):
        model(image()[None])
    assert model(image()[None]).shape == (1, 7) and not model._forward_hooks
    watch_first_outputs(first_batch, model, SimpleNamespace(OUTPUTS_ARE_CLASSES=False))
    assert model(image()[None]).shape == (1, 7), "an embedding"


@fault(41)
def test_a_label_without_an_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The line that computes the loss is named. Here the dataset has no classes, which could be compared."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 7))
    monkeypatch.setattr(main.task, "build_model", lambda config, train_set: model)
    monkeypatch.setattr(Samples, "classes", ())
    line = outcome(monkeypatch, tmp_path, Samples(lambda index: (image(), 9)))
    assert (
        "a label is 9, for which the model has no output (model.py, line " in line and "build_model in model.py" in line
    )


@fault(41)
def test_labels_of_one_rank_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All ranks exit with 2, and one line is printed."""
    with_wrong = Samples(lambda index: (image(), 10 if torch.distributed.get_rank() == 1 else 0))
    monkeypatch.setattr("ddp.checkpoint.manager.compare_ranks", lambda *_: {})  # which would find that earlier
    line = outcome(monkeypatch, tmp_path, with_wrong, "--workers", 0, world_size=2)
    assert "a label is 10, but there are 10 classes" in line


def test_what_is_right_is_not_refused() -> None:
    inputs, dataset = torch.zeros(4, 3), Samples(lambda index: None)
    for targets in (
        torch.tensor([0, 9, -100, 3]),  # the label that torch ignores
        torch.full((4,), 99.5),  # a regression
        torch.full((4, 8, 8), 255),  # a segmentation
        torch.ones(4, dtype=torch.bool),
        ["a", "b", "c", "d"],
        {"boxes": torch.zeros(4), "labels": torch.tensor([12])},
    ):
        check_batch((inputs, targets), dataset)
    with pytest.raises(UsageError, match="a label is 10, but there are 10 classes"):
        check_batch([inputs, torch.tensor([0, 1, 2, 10])], Subset(Subset(dataset, [0]), [0]))
    classes = check_batch([inputs, torch.tensor([0, 1])], dataset)
    for outputs in (torch.zeros(2, 10), torch.zeros(2, 1), torch.zeros(2, 3, 8), {"logits": torch.zeros(2, 3)}):
        check_outputs(outputs, classes)
    for targets, other in ((torch.zeros(2), dataset), (torch.tensor([0, 1, 2, 10_000]), BatchDataset())):
        check_outputs(torch.zeros(2, 3), check_batch(({"ids": inputs}, targets), other))
    for loss in (torch.ones(1, requires_grad=True), torch.ones((), requires_grad=True)):
        check_loss(loss)


def test_an_error_in_the_owners_collate_is_not_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Own(BatchDataset):
        classes = CLASSES

        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> Any:
            return image(), 0

        def collate(self, samples: list[Any]) -> Any:
            raise TypeError("a bug of the owner's")

    test_set = Samples(lambda index: (image(), 0))
    monkeypatch.setattr(main, "load_datasets", lambda config: Datasets(Own(), test_set))
    output = train(1, "--batch-size", 4, "--workers", 0, "--output-dir", tmp_path, code=1)
    assert "Traceback" in output and "TypeError: a bug of the owner's" in output
