"""What an image file means, and which folders are classes."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from outputs import newest
from PIL import ExifTags, Image
from predict import SavedImages
from project_runs import python
from template_copy import TEMPLATE

import data
import image_files
from config import Config
from ddp.checkpoint import storage
from ddp.core.errors import SetupError
from ddp.data.dataset import describe
from image_files import DecodedFiles, ImageFiles, read_square
from images import ImageTransforms
from processes import train

ORIENTATION = ExifTags.Base.Orientation
# What a camera that was held so stores, and what undoes it.
HELD = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
TRANSFORMS = ImageTransforms(mean=(0.5,) * 3, std=(0.5,) * 3, image_size=32)
RAMP = numpy.linspace(0, 65535, 32 * 32).reshape(32, 32)


def options(folder: Path, *more: Any) -> list[Any]:
    return ["--dataset", "imagefolder", "--data-dir", folder, "--device", "cpu", "--image-size", 32, *more]


def loaded(folder: Path, *more: Any) -> Any:
    return data.load_datasets(Config.parse([str(word) for word in options(folder, *more)])).train


def photo(seed: int, width: int = 60, height: int = 40) -> Image.Image:
    small = numpy.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=numpy.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def save(image: Image.Image, path: Path, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


# ---- pixels ---------------------------------------------------------------------------------------------------------


def big_endian(path: Path) -> None:
    """A PGM of 16 bits, as microscopes write it."""
    path.write_bytes(b"P5 32 32 65535\n" + RAMP.astype(">u2").tobytes())


@pytest.mark.parametrize("ending", ["png", "tif", "pgm"])
def test_16_bits_are_scaled_to_8(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"deep.{ending}"
    big_endian(path) if ending == "pgm" else Image.fromarray(RAMP.astype(numpy.uint16)).save(path)
    found = read_square(path, 32)
    assert (found - torch.from_numpy(RAMP / 257)).abs().max() <= 1 and found.unique().numel() > 200
    half = read_square(path, 32, (0, 131070))
    assert (half - torch.from_numpy(RAMP / 514)).abs().max() <= 1, "the range of its owner"


@pytest.mark.parametrize("kind", [numpy.int32, numpy.float32])
def test_32_bits_need_a_range(kind: type, tmp_path: Path) -> None:
    path = tmp_path / "cat" / "deep.tif"
    save(Image.fromarray((RAMP - 1000).astype(kind)), path)
    with pytest.raises(SetupError) as raised:
        ImageFiles(tmp_path, TRANSFORMS).__getitems__([0])
    assert str(raised.value).startswith(f"{path} has pixels of 32 bits: ") and "value_range=" in str(raised.value)
    _, _, images = ImageFiles(tmp_path, replace(TRANSFORMS, value_range=(-1000, 64535))).__getitems__([0])
    assert (images[0] - torch.from_numpy(RAMP / 257)).abs().max() <= 1


def test_a_float_that_is_no_number_is_black(tmp_path: Path) -> None:
    pixels = numpy.full((8, 8), 100, numpy.float32)
    pixels[0, 0], pixels[1, 1] = numpy.nan, numpy.inf
    found = read_square(save(Image.fromarray(pixels), tmp_path / "a.tif"), 8, (0, 200))
    assert found[0, 0, 0] == 0 and found[0, 1, 1] == 255 and found[0, 2, 2] in (127, 128)


@pytest.mark.parametrize("ending", ["jpg", "png", "tif", "webp"])
def test_a_photo_is_read_as_it_was_held(ending: str, tmp_path: Path) -> None:
    upright = read_square(save(photo(0), tmp_path / f"upright.{ending}", quality=95), 32).int()
    for value, transpose in HELD.items():
        exif = Image.Exif()
        exif[ORIENTATION] = value
        stored = photo(0) if transpose is None else photo(0).transpose(transpose)
        found = read_square(save(stored, tmp_path / f"{value}.{ending}", exif=exif, quality=95), 32).int()
        assert (found - upright).abs().float().mean() < 4, value


@pytest.mark.parametrize("exif", [b"Exif\0\0garbage", b"Exif\0\0II*\0\x08\0\0\0\x05\0\x12\x01"])
def test_damaged_exif_does_not_matter(exif: bytes, tmp_path: Path) -> None:
    paths = [save(photo(0), tmp_path / "plain.jpg"), save(photo(0), tmp_path / "damaged.jpg", exif=exif)]
    read = "import sys, image_files; print([image_files.read_square(path, 32).sum() for path in sys.argv[1:]])"
    sums = python(TEMPLATE, "-c", read, *paths)  # with the warnings that an owner sees
    assert re.fullmatch(r"\[(tensor\(\d+\)), \1\]\n", sums), sums


def test_training_cache_and_prediction_read_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    for name, seed in (("cat", 0), ("dog", 1)):
        turned = photo(seed).transpose(Image.Transpose.ROTATE_90)
        save(turned, tmp_path / "train" / name / "a.jpg", exif=exif)
        save(Image.fromarray(RAMP.astype(numpy.uint16)), tmp_path / "train" / name / "b.tif")
    build = data.build_transforms
    chosen = lambda config: replace(build(config), value_range=(0, 131070), padding=0, flip=0)  # noqa: E731
    monkeypatch.setattr(data, "build_transforms", chosen)
    files = loaded(tmp_path, "--val-fraction", 0)
    batch = files.__getitems__([0, 1, 2, 3])
    cached = DecodedFiles(files, tmp_path / "cache")
    assert torch.equal(cached.prepare(cached.__getitems__([0, 1, 2, 3]))[0], files.prepare(batch)[0])
    run = options(tmp_path, "--val-fraction", 0, "--batch-size", 4, "--max-steps", 1, "--output-dir", tmp_path / "run")
    train(1, *run)
    saved = SavedImages(storage.read(newest(tmp_path / "run"))["dataset"])
    paths = [Path(path) for path, _ in files.samples]
    assert torch.equal(saved.read(paths), files.prepare(batch)[0])
    assert describe(files)["images"]["value_range"] == (0, 131070)


def test_a_checkpoint_of_before_has_no_range(tmp_path: Path) -> None:
    description = {"classes": ["cat"], "images": {"mean": [0.5], "std": [0.5], "image_size": 32, "read_size": 32}}
    assert SavedImages(description).transforms.value_range is None


# ---- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EACCES, errno.EIO])
def test_an_error_of_the_file_system_is_not_blamed_on_the_picture(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(photo(0), tmp_path / "a.jpg")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Image.Image, "load", fail)
    monkeypatch.setattr(image_files.ImageOps, "exif_transpose", fail)
    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(SetupError) as raised:
        read_square(path, 32)
    remedy = "let this user read it" if number == errno.EACCES else "start again when its file system works"
    assert str(raised.value) == f"{path} cannot be read: {os.strerror(number)}; {remedy}"


# ---- folders --------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """train/ with two images of each of two classes."""
    for name in ("cat", "dog"):
        for number in range(2):
            save(photo(number), tmp_path / "data/train" / name / f"{number}.jpg")
    return tmp_path / "data"


def refusal(folder: Path) -> str:
    with pytest.raises(SetupError) as raised:
        loaded(folder)
    return str(raised.value)


def test_folders_of_tools_are_no_classes_and_are_named_once(folder: Path, tmp_path: Path) -> None:
    for name in (".ipynb_checkpoints", "__MACOSX", "@eaDir"):
        save(photo(5), folder / "train" / name / "0.jpg")
        save(photo(5), folder / "train/cat" / name / "0.jpg")
    (folder / "train/dog/._0.jpg").write_bytes(b"\0\5\x16\7 of a Mac")
    train_set = loaded(folder, "--val-fraction", 0)
    assert train_set.classes == ["cat", "dog"]
    names = [Path(path).relative_to(folder / "train").as_posix() for path, _ in train_set.samples]
    assert names == ["cat/0.jpg", "cat/1.jpg", "dog/0.jpg", "dog/1.jpg"]
    output = train(2, *options(folder, "--val-fraction", 0, "--batch-size", 2, "--output-dir", tmp_path / "run"))
    assert output.count(f"{folder / 'train'}: left out are .ipynb_checkpoints, @eaDir, __MACOSX\n") == 1
    assert output.count("ipynb") == 1 and "2 classes: cat, dog\n" in output and "warning" not in output


def test_a_folder_that_is_one_level_too_deep_is_refused(folder: Path) -> None:
    (folder / "train").rename(folder / "images")
    (folder / "train").mkdir()
    (folder / "images").rename(folder / "train/images")
    text = refusal(folder)
    assert text.startswith(f"--data-dir: {folder}/train/images is no class: only its folders have images, such as ")
    assert f"{folder}/train/images/cat; move them one level up" in text


def test_images_below_those_of_a_class_belong_to_it(folder: Path) -> None:
    save(photo(0), folder / "train/cat/more/2.jpg")
    names = [Path(path).name for path, target in loaded(folder, "--val-fraction", 0).samples if target == 0]
    assert names == ["0.jpg", "1.jpg", "2.jpg"]


def test_a_class_may_have_no_image_to_validate(folder: Path) -> None:
    save(photo(0), folder / "val/dog/0.jpg")
    (folder / "val/cat").mkdir()
    config = Config.parse(["--dataset=imagefolder", f"--data-dir={folder}"])
    datasets, transforms = data.load_datasets(config), data.build_transforms(config)
    assert datasets.val.classes == ["cat", "dog"] and [target for _, target in datasets.val.samples] == [1]
    with pytest.raises(SetupError, match="val/cat has no file"):
        ImageFiles(folder / "val", transforms)


def test_a_class_without_images_and_a_folder_without_classes_are_refused(folder: Path) -> None:
    (folder / "train/owl").mkdir()
    (folder / "train/owl/notes.txt").touch()
    assert refusal(folder).startswith(f"--data-dir: {folder}/train/owl has no file .jpg, .jpeg, ")
    for path in (folder / "train").glob("*/*"):
        path.unlink()
    for path in (folder / "train").iterdir():
        path.rmdir()
    assert refusal(folder) == f"--data-dir: {folder}/train has no folders: it needs one for each class"


@pytest.mark.parametrize("name", ["IMG_1.HEIC", "more/a.avif", "a.gif", "a.JFIF"])
def test_images_that_are_not_read_are_refused(name: str, folder: Path) -> None:
    """A phone may have stored most of its photos so: the others would train a worse model without a word."""
    (folder / "train/cat/more").mkdir()
    (folder / "train/cat" / name).touch()
    text = f"--data-dir: {folder}/train/cat/{name} would be left out: convert such files, or move them away"
    assert refusal(folder) == text
    (folder / "train/cat" / name).rename(folder / "train/cat/more/._1.heic")
    assert loaded(folder, "--val-fraction", 0).classes == ["cat", "dog"]


def test_the_order_is_that_of_torchvision(folder: Path) -> None:
    """A checkpoint of before counts its samples so."""
    from torchvision.datasets import ImageFolder

    for name in ("b/0.jpg", "b-c/0.jpg", "B/1.JPG", "a.jpg", "b/z/0.jpg"):
        save(photo(0), folder / "train/cat" / name)
    assert list(loaded(folder, "--val-fraction", 0).samples) == ImageFolder(str(folder / "train")).samples


def test_one_class_is_worth_a_warning(tmp_path: Path) -> None:
    for number in range(4):
        save(photo(number), tmp_path / "data/train/all" / f"{number}.jpg")
    output = train(
        1, *options(tmp_path / "data", "--val-fraction", 0, "--batch-size", 2, "--output-dir", tmp_path / "r")
    )
    assert f"warning: with one class, every answer is right: {tmp_path / 'data/train'} has only all\n" in output
    assert "1 class: all\n" in output
