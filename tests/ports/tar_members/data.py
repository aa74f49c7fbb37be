"""Images and classes in tar files, which are read by index. Edit me: main.py needs load_datasets."""

import io
import os
import random
import tarfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy
import torch
from filelock import FileLock
from PIL import Image
from torch import Tensor

from config import Config
from ddp.core.errors import SetupError
from ddp.core.files import atomic_write
from ddp.data.dataset import BatchDataset, Datasets
from ddp.distributed.seeds import derive_seed

SYNTHETIC_SIZES = {"train": 2_000, "val": 400}
SHARD_SIZE = 100  # samples in a tar file of --dataset synthetic
Place = tuple[str, int, int]  # of a member: tar file, offset, bytes


class TarMembers(BatchDataset):
    """Samples in tar files, as WebDataset writes them: KEY.png is the image, KEY.cls the number of its class.

    The places of all members are read once. Then each sample can be read alone, by any process, in any order.
    """

    def __init__(self, paths: list[Path], training: bool) -> None:
        self.name, self.training = "tar members", training
        self.samples = [sample for path in sorted(paths) for sample in _samples(path)]
        self.targets = [int(read(sample["cls"])) for sample in self.samples]
        self.classes = range(max(self.targets) + 1)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with Image.open(io.BytesIO(read(self.samples[index]["png"]))) as file:
            image = file.convert("RGB")
        if self.training and random.random() < 0.5:
            image = image.transpose(Image.Transpose.ROTATE_180)
        return torch.from_numpy(numpy.array(image)).permute(2, 0, 1), self.targets[index]

    def prepare(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """On the device: images [b, 3, h, w] float, targets [b]."""
        images, targets = batch
        return (images.float() - 128) / 64, targets


def _samples(path: Path) -> list[dict[str, Place]]:
    """The members of each sample in a tar file, by their suffix, in the order of the keys."""
    samples: dict[str, dict[str, Place]] = {}
    try:
        with tarfile.open(path, "r:") as tar:  # reads the headers; refuses a compressed file
            for member in tar:
                folder, _, file = member.name.rpartition("/")
                key, _, suffix = file.partition(".")
                if member.isfile():
                    samples.setdefault(f"{folder}/{key}", {})[suffix] = (str(path), member.offset_data, member.size)
    except (OSError, tarfile.TarError) as error:
        raise SetupError(f"cannot read {path}: {error}") from error
    if incomplete := [key for key, sample in samples.items() if not {"png", "cls"} <= sample.keys()]:
        raise SetupError(f"{path}: {incomplete[0]} has no .png or no .cls")
    return [samples[key] for key in sorted(samples)]


@lru_cache(maxsize=64)
def _opened(path: str) -> BinaryIO:
    return open(path, "rb", buffering=0)


def read(place: Place) -> bytes:
    """The content of a member. pread has no position in the file, which forked processes would share."""
    path, offset, size = place
    return os.pread(_opened(path).fileno(), size, offset)


def load_datasets(config: Config) -> Datasets:
    """DATA_DIR/train*.tar and val*.tar, and test*.tar if there are such. Raises SetupError if they cannot be read."""
    folder = Path(config.data_dir)
    if config.dataset == "synthetic":
        folder = synthetic(folder, config.seed)
    found = {part: sorted(folder.glob(f"{part}*.tar")) for part in ("train", "val", "test")}
    if not found["train"] or not found["val"]:
        raise SetupError(f"--data-dir {folder}: needs train*.tar and val*.tar in it")
    return Datasets(**{part: TarMembers(paths, part == "train") for part, paths in found.items() if paths})


def synthetic(root: Path, seed: int) -> Path:
    """A folder of tar files made from the seed. The first process of this machine writes them, the others wait."""
    folder = root / "-".join(map(str, ("synthetic", seed, *SYNTHETIC_SIZES.values())))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            for part, length in SYNTHETIC_SIZES.items():
                for first in range(0, length, SHARD_SIZE):
                    path = folder / f"{part}-{first:06d}.tar"
                    if not path.exists():
                        with atomic_write(path) as file, tarfile.open(fileobj=file, mode="w") as tar:
                            for name, content in _made(seed, part, range(first, min(first + SHARD_SIZE, length))):
                                member = tarfile.TarInfo(name)
                                member.size = len(content)
                                tar.addfile(member, io.BytesIO(content))
    except OSError as error:
        raise SetupError(f"cannot write {folder}: {error}") from error
    return folder


def _made(seed: int, part: str, numbers: range) -> Iterator[tuple[str, bytes]]:
    """The members of some samples: stripes in one of ten directions, with noise."""
    down, right = numpy.mgrid[:24, :24]
    for number in numbers:
        generator = numpy.random.default_rng(derive_seed(seed, len(part), number))
        target = int(generator.integers(10))
        wave = numpy.sin((target % 5 - 2) * down / 3 + (0.5 + target // 5) * right + generator.random())
        pixels = 128 + 60 * wave[:, :, None] + generator.normal(0, 25, (24, 24, 3))
        png = io.BytesIO()
        Image.fromarray(pixels.clip(0, 255).astype(numpy.uint8)).save(png, "png")
        yield f"{number:06d}.png", png.getvalue()
        yield f"{number:06d}.cls", str(target).encode()
