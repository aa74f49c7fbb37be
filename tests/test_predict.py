"""predict.py: the classes of images, prepared as in an evaluation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import predict
import pytest
import torch
from outputs import newest
from PIL import Image
from project_runs import python
from template_copy import TEMPLATE
from torch.utils.data import Dataset, Subset

import data
from config import Config
from ddp.checkpoint import storage as checkpoint
from ddp.core.errors import CheckpointError, SetupError, UsageError
from ddp.data.dataset import describe
from image_files import DecodedFiles, ImageFiles
from images import ImagesInMemory, ImageTransforms
from model import build_model
from processes import train

pytestmark = pytest.mark.slow
TRAIN = ("--device", "cpu", "--batch-size", 8, "--epochs", 1, "--warmup-epochs", 0, "--lr", 0.1)


class Wrapper(Dataset):
    """It may return other samples."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: list[int]) -> Any:
        return self.dataset.__getitems__(indices)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Photographs of many sizes, in train/ and val/."""
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", 8), ("val", 3)):
        for name in ("cat", "dog", "bird"):
            (tmp_path / "images" / part / name).mkdir(parents=True)
            for number in range(count):
                w, h = torch.randint(20, 120, (2,), generator=generator).tolist()
                pixels = torch.randint(0, 256, (h, w, 3), generator=generator, dtype=torch.uint8)
                Image.fromarray(pixels.numpy()).save(tmp_path / "images" / part / name / f"{number}.png")
    return tmp_path / "images"


def expected(path: Path, config: Config, dataset: Any, files: list[Path]) -> list[str]:
    """What predict.py should print of these files, all samples of `dataset`, by the code of the evaluation."""
    content = checkpoint.read(path)
    model = build_model(config, dataset)
    model.load_state_dict(content.get("ema", content["model"]))
    inputs, _ = dataset.prepare(dataset.__getitems__(list(range(len(dataset)))))
    assert torch.equal(predict.SavedImages(content["dataset"]).read(files), inputs), "bit for bit"
    with torch.no_grad():
        rows = model.eval()(inputs).softmax(1).sort(dim=1, descending=True)
    return [
        ", ".join(f"{dataset.classes[place]} {value:.1%}" for value, place in zip(values[:3], places[:3], strict=True))
        for values, places in zip(rows.values.tolist(), rows.indices.tolist(), strict=True)
    ]


@pytest.mark.sample(1)
@pytest.mark.parametrize("more", [(), ("--ema", 0.5, "--image-size", 48), ("--cache", "decoded")])
def test_images_in_files_are_classified_as_in_an_evaluation(
    more: tuple[Any, ...], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = tuple(tmp_path / "decoded" if word == "decoded" else word for word in more)
    options = ("--dataset", "imagefolder", "--data-dir", folder, *more)
    train(2, *TRAIN, *options, "--output-dir", tmp_path / "run")
    config = Config.parse([str(word) for word in options])
    dataset = data.load_datasets(config).val
    paths = sorted(folder.glob("val/*/*.png"))
    capsys.readouterr()
    assert predict.main([str(tmp_path / "run/best.pt"), *map(str, paths)]) == 0
    printed = capsys.readouterr().out.splitlines()
    results = expected(tmp_path / "run/best.pt", config, dataset, paths)
    assert printed == [f"{path}: {result}" for path, result in zip(paths, results, strict=True)]
    assert len({line.partition(": ")[2] for line in printed}) > 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("more", [(), ("--image-size", "48", "--model", "squeezenet1_1")])
def test_images_in_memory_are_resized_as_in_an_evaluation(
    more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the command, as a user types it."""
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 64, "val": 5})
    options = ("--dataset", "synthetic", *more)
    train(1, *TRAIN, *options, "--output-dir", tmp_path / "run")
    config = Config.parse(list(options))
    dataset = data.load_datasets(config).val
    for number, image in enumerate(dataset.images):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / f"{number}.png")
    files = sorted(tmp_path.glob("*.png"))
    printed = python(TEMPLATE, "predict.py", newest(tmp_path / "run"), *files)
    results = expected(newest(tmp_path / "run"), config, dataset, files)
    assert [line.partition(": ")[2] for line in printed.splitlines()] == results


def test_how_many_classes_are_printed(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(1, *TRAIN, "--dataset", "imagefolder", "--data-dir", folder, "--output-dir", tmp_path / "run")
    image = str(next(folder.glob("val/*/*.png")))
    for top, count in (("1", 1), ("99", 3)):
        capsys.readouterr()
        predict.main([str(tmp_path / "run/best.pt"), image, "--top", top])
        assert capsys.readouterr().out.count("%") == count


def test_one_logit_is_that_of_the_second_of_two_classes_and_other_outputs_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(predict, "forward", lambda model, inputs, targets: inputs)
    probabilities = predict.predict(torch.nn.Identity(), torch.tensor([[-2.0], [3.0]]))
    assert torch.allclose(probabilities[:, 1], torch.tensor([-2.0, 3.0]).sigmoid())
    assert torch.allclose(probabilities.sum(1), torch.ones(2))
    for outputs in (torch.zeros(2, 10, 4, 4), (torch.zeros(2, 10), None)):
        with pytest.raises(UsageError, match="are no logits"):
            predict.predict(torch.nn.Identity(), outputs)


def test_what_cannot_be_classified_is_refused_with_one_line(folder: Path, tmp_path: Path) -> None:
    train(1, *TRAIN, "--dataset", "imagefolder", "--data-dir", folder, "--output-dir", tmp_path / "run")
    best, image = tmp_path / "run/best.pt", str(next(folder.glob("val/*/*.png")))
    with pytest.raises(SetupError, match=r"run/config\.json is not an image that can be read"):
        predict.main([str(best), image, str(tmp_path / "run/config.json")])
    with pytest.raises(CheckpointError, match=r"nowhere\.pt cannot be used: No such file"):
        predict.main([str(tmp_path / "nowhere.pt"), image])
    content = checkpoint.read(best)
    for part, value in (("images", None), ("classes", [])):
        checkpoint.write(tmp_path / "edited.pt", content | {"dataset": content["dataset"] | {part: value}})
        with pytest.raises(UsageError, match=r"edited\.pt holds no classes, or does not know how .*: edit predict\.py"):
            predict.main([str(tmp_path / "edited.pt"), image])
    del content["dataset"]
    checkpoint.write(tmp_path / "edited.pt", content)
    with pytest.raises(CheckpointError, match="of an earlier version of this project, which did not store the classes"):
        predict.main([str(tmp_path / "edited.pt"), image])
    refusal = "error: the following arguments are required: images; see --help\n"
    assert python(TEMPLATE, "predict.py", best, code=2) == refusal


class Darker(ImagesInMemory):
    def prepare(self, batch: Any) -> Any:
        inputs, targets = super().prepare(batch)
        return inputs / 2, targets


class Inverted(ImagesInMemory):
    def __getitems__(self, indices: list[int]) -> Any:
        return super().__getitems__(indices)


class Grey(ImageFiles):
    def read(self, path: str) -> torch.Tensor:
        return super().read(path) // 2


class Flipped(ImagesInMemory):
    def augment(self, batch: Any, epoch: int) -> Any:
        return super().augment(batch, epoch)


def test_only_a_preparation_that_is_known_is_stored(folder: Path) -> None:
    transforms = ImageTransforms(mean=(0.1, 0.2, 0.3), std=(1, 2, 3), image_size=24)
    known: Any = {name: value for name, value in vars(transforms).items() if name != "memory_format"}
    of_pixels = torch.zeros(4, 3, 32, 32, dtype=torch.uint8), torch.zeros(4, dtype=torch.long), ["a", "b"], transforms
    for kind, images in ((ImagesInMemory, known), (Flipped, known), (Darker, None), (Inverted, None)):
        images = images and images | {"read_size": 32}
        description = {"name": kind.__name__, "classes": ["a", "b"], "wrappers": [], "images": images}
        assert describe(Subset(kind(*of_pixels, 32), [0, 1])) == description
    of_instance = ImagesInMemory(*of_pixels, 32)
    of_instance.prepare = lambda batch: batch  # type: ignore[method-assign]
    assert describe(of_instance)["images"] is None
    assert describe(ImagesInMemory(*of_pixels))["images"] is None, "of an owner, who may have read them otherwise"
    assert describe(Wrapper(ImagesInMemory(*of_pixels, 32)))["wrappers"] == ["Wrapper"]
    assert describe(ImageFiles(folder / "val", transforms))["images"] == known | {"read_size": 24}
    assert describe(Grey(folder / "val", transforms))["images"] is None
    several = torch.zeros(4, 2)  # logits of several labels are no logits of classes
    grey, wide = torch.zeros(4, 1, 32, 32, dtype=torch.uint8), torch.zeros(4, 3, 32, 48, dtype=torch.uint8)
    one = replace(transforms, mean=(0.5,), std=(1,))
    for images, targets in ((of_pixels[0], several), (grey, of_pixels[1]), (wide, of_pixels[1])):
        given = None if images is wide else 32
        assert describe(ImagesInMemory(images, targets, ["a", "b"], one, given))["images"] is None
    plain = torch.utils.data.TensorDataset(torch.zeros(3))
    assert describe(plain) == {"name": "TensorDataset", "classes": [], "wrappers": []}
    for kind, images in ((ImageFiles, known | {"read_size": 24}), (Grey, None)):
        assert describe(DecodedFiles(kind(folder / "val", transforms), folder / "cache"))["images"] == images


def test_a_model_that_needs_the_training_images_is_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mean over them, for example, which a checkpoint does not hold."""
    train(1, *TRAIN, "--dataset", "imagefolder", "--data-dir", folder, "--output-dir", tmp_path / "run")
    picture = str(folder / "val/cat/0.png")
    monkeypatch.setattr(predict, "build_model", lambda config, train_set: train_set.images.float().mean())
    with pytest.raises(
        UsageError, match=r"build_model in model.py needs more of the training set \(.* 'images'\): a che"
    ):
        predict.main([str(tmp_path / "run/best.pt"), picture])
    with pytest.raises(UsageError, match=r"there is no file nowhere.png"):
        predict.main([str(tmp_path / "run/best.pt"), picture, "nowhere.png"])


def test_checkpoints_of_data_that_are_not_images_are_refused(folder: Path, tmp_path: Path) -> None:
    """Those of earlier versions have `images: None`, newer ones have no `images`."""
    train(1, *TRAIN, "--dataset", "imagefolder", "--data-dir", folder, "--output-dir", tmp_path / "run")
    content = checkpoint.read(tmp_path / "run/best.pt")
    for about in ({"images": None}, {}):
        checkpoint.write(tmp_path / "edited.pt", content | {"dataset": {"name": "a", "classes": ["b"], **about}})
        with pytest.raises(UsageError, match="does not know how its images were prepared"):
            predict.main([str(tmp_path / "edited.pt"), "cat.png"])
