"""Images in tar files, in the layout of WebDataset, read by their place in them. Edit me: main.py needs load_datasets.

A stream would have to be read from its start after a resume, and could not give each process its samples. An index of
the members makes the same files a dataset like any other: in a random order, exact at a resume, for any number of
processes.
"""

import io
import os
import tarfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy
import torch
from filelock import FileLock
from PIL import Image
from torch import Tensor

from config import Config
from ddp.core.errors import SetupError
from ddp.core.files import atomic_write
from ddp.core.rank_logs import progress
from ddp.data.dataset import Datasets
from ddp.distributed.seeds import derive_seed
from file_list import FileList
from image_files import ImageFiles, read_square
from images import ImageDataset, ImageTransforms

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
IMAGES = ("jpg", "jpeg", "png", "webp")  # what comes after the first dot in the name of a member
SYNTHETIC_SIZES = {"train": 960, "val": 100, "test": 50}
PER_FILE = 300  # of the synthetic images


class TarShards(ImageFiles):
    """Images of folder/*.tar. 0001.jpg is the image of a sample, 0001.cls the number of its class, as a text.

    samples: for each image, FILE:START:SIZE and its class.
    """

    def __init__(self, folder: Path, samples: FileList, classes: list[str], transforms: ImageTransforms) -> None:
        self.folder, self.samples = folder, samples
        ImageDataset.__init__(self, len(self.samples), classes, transforms, transforms.image_size)

    def read(self, path: str) -> Tensor:
        """An image: [3, image_size, image_size] uint8. Raises SetupError."""
        name, start, size = path.rsplit(":", 2)
        data = os.pread(opened(self.folder / name), int(size), int(start))  # no position, which workers would share
        try:
            return read_square(io.BytesIO(data), self.transforms.image_size)
        except SetupError as error:
            raise SetupError(f"{self.folder / name}: byte {start} begins no image that can be read") from error


@lru_cache(maxsize=256)
def opened(path: Path) -> int:
    """The number of the file, which stays open in this process."""
    return os.open(path, os.O_RDONLY)


def list_members(folder: Path, index: Path) -> FileList:
    """The list in the file `index`. If the tar files have changed since, the first process of this machine makes it.

    Raises SetupError.
    """
    files = sorted(folder.glob("*.tar"))
    if not files:
        raise SetupError(f"--data-dir: {folder} has no *.tar")
    facts = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    try:
        index.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(index.with_suffix(".lock")):
            if read_index(index).get("files") != facts or "keys" not in read_index(index)["members"]:
                found = FileList.of(
                    pair for path in progress(files, f"indexing {folder}", "file") for pair in members(path)
                )
                with atomic_write(index) as file:
                    torch.save({"files": facts, "members": vars(found)}, file)
        return FileList(**read_index(index)["members"])
    except OSError as error:
        raise SetupError(f"cannot write {index}: {error}; choose another --index-dir") from error


def read_index(index: Path) -> dict[str, Any]:
    """Its content, which is mapped into memory; empty if there is none, or none that can be read."""
    try:
        return dict(torch.load(index, mmap=True, weights_only=True))
    except Exception:  # torch raises whatever error the bytes cause
        return {}


def members(path: Path) -> Iterator[tuple[str, int]]:
    """FILE:START:SIZE of each image of a tar file, and its class. Raises SetupError."""
    found: dict[str, dict[str, tarfile.TarInfo]] = {}
    try:
        with tarfile.open(path, "r:") as tar:  # reads the headers; refuses a compressed file, which has no places
            for member in filter(tarfile.TarInfo.isfile, tar):
                folder, _, name = member.name.rpartition("/")
                key, _, kind = name.partition(".")
                found.setdefault(f"{folder}/{key}", {})[kind.lower()] = member
    except tarfile.TarError as error:
        raise SetupError(f"{path} is no tar file that can be read by place, or is compressed: {error}") from error
    for key, kinds in found.items():
        image = next((kinds[kind] for kind in IMAGES if kind in kinds), None)
        if image is None or "cls" not in kinds:
            raise SetupError(f"{path}: {key} needs an image ({', '.join(IMAGES)}) and a class (cls)")
        label = kinds["cls"]
        text = os.pread(opened(path), label.size, label.offset_data)
        if not text.strip().isdigit():
            raise SetupError(f"{path}: {label.name} holds {text[:20]!r}, and not the number of a class")
        yield f"{path.name}:{image.offset_data}:{image.size}", int(text)


def load_datasets(config: Config) -> Datasets:
    """train/*.tar, and val/*.tar and test/*.tar if they exist. Raises SetupError."""
    root = Path(config.data_dir)
    if config.dataset == "synthetic":
        root = root / "synthetic-tar"
        make_files(root)
    transforms = ImageTransforms(
        mean=MEAN,
        std=STD,
        image_size=config.image_size,
        padding=1 / 16,
        flip=0.5,
        seed=config.seed,
        memory_format=torch.channels_last if config.channels_last else torch.contiguous_format,
    )
    place = Path(config.index_dir) if config.index_dir else root
    found = [part for part in ("train", "val", "test") if part == "train" or (root / part).is_dir()]
    indices = {part: place / f"{part}.index" for part in found}
    lists = {part: list_members(root / part, index) for part, index in indices.items()}
    counts = {part: int(found.targets.max()) + 1 for part, found in lists.items()}
    for part, count in counts.items():
        if count > counts["train"]:
            raise SetupError(
                f"{root / part} has a class {count - 1}, and {root}/train only up to {counts['train'] - 1}"
            )
    classes = [f"class {number}" for number in range(counts["train"])]
    parts: dict[str, Any] = {part: TarShards(root / part, found, classes, transforms) for part, found in lists.items()}
    parts["train"].name = config.dataset
    return Datasets(**parts)


def make_files(root: Path) -> None:
    """Tar files of small images, which are easy to learn: a class is a colour. Once per machine."""
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / ".lock"):
        for number, (part, length) in enumerate(SYNTHETIC_SIZES.items()):
            random = numpy.random.default_rng(derive_seed(0, number))
            for first in range(0, length, PER_FILE):
                path = root / part / f"{first // PER_FILE:06}.tar"
                if not path.exists():
                    path.parent.mkdir(exist_ok=True)
                    with atomic_write(path) as file, tarfile.open(fileobj=file, mode="w") as tar:
                        for sample in range(first, min(first + PER_FILE, length)):
                            _add(tar, f"{sample:06}", random)


def _add(tar: tarfile.TarFile, key: str, random: numpy.random.Generator) -> None:
    label = int(random.integers(10))
    colour = numpy.array([label * 25, (label * 75) % 250, (label * 175) % 250])
    pixels = (colour + random.normal(0, 40, (32, 32, 3))).clip(0, 255).astype(numpy.uint8)
    image = io.BytesIO()
    Image.fromarray(pixels).save(image, "png")
    for kind, data in (("png", image.getvalue()), ("cls", str(label).encode())):
        member = tarfile.TarInfo(f"{key}.{kind}")
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))
