"""The datasets. Edit me: main.py needs load_datasets.

A dataset gives whole batches, as `__getitems__(indices)`, or samples, as `__getitem__(index)`; ddp/loader.py
decides which process gets which. If it has `prepare(batch, epoch)`, that turns a batch, already on the device, into
(inputs, targets).
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path

import torch
import torch.nn.functional as F
from filelock import FileLock
from torch import Tensor
from torch.utils.data import Dataset

from config import Config
from ddp.errors import EnvironmentFailure
from ddp.loader import derive_seed

log = logging.getLogger("ddp.data")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, and near enough of CIFAR-10
SYNTHETIC_SIZES = {"train": 10_000, "test": 2_000}


def load_datasets(config: Config) -> tuple[Dataset, Dataset]:
    """The training and the test data. Runs before the process group exists, so that what fails here fails at once.

    Raises EnvironmentFailure if data are missing or cannot be read.
    """
    load = {"cifar10": _cifar10, "synthetic": _synthetic, "imagefolder": _image_folder}[config.dataset]
    train_set, test_set = load(config)
    for name, dataset in (("training", train_set), ("test", test_set)):
        if len(dataset) == 0:
            raise EnvironmentFailure(f"there are no {name} images in {config.data_dir}")
    return train_set, test_set


class Images(Dataset):
    """Images of one size, as uint8; a batch is normalised and, in training, augmented on the device.

    A batch is images [b, 3, h, w] uint8, targets [b], indices [b].
    """

    in_memory = False
    classes: Sequence[str]

    def __init__(self, config: Config, length: int) -> None:
        self.config = config
        self.length = length
        self._epoch: int | None = None
        self._mean, self._std = (torch.tensor(part).view(1, 3, 1, 1) * 255 for part in (MEAN, STD))

    def __len__(self) -> int:
        return self.length

    def prepare(self, batch: tuple[Tensor, Tensor, Tensor], epoch: int | None) -> tuple[Tensor, Tensor]:
        """inputs [b, 3, image_size, image_size] float, targets [b]. `epoch` is None in evaluation: no augmentation."""
        images, targets, indices = batch
        if epoch is not None:
            images = self._augment(images, indices, epoch)
        layout = torch.channels_last if self.config.channels_last else torch.contiguous_format
        inputs = images.to(torch.float32, memory_format=layout)
        if self._mean.device != images.device:
            self._mean, self._std = self._mean.to(images.device), self._std.to(images.device)
        inputs = inputs.sub_(self._mean).div_(self._std)
        size = self.config.image_size
        if inputs.shape[-1] != size:
            inputs = F.interpolate(inputs, size=(size, size), mode="bilinear", antialias=True)
        return inputs, targets

    def _augment(self, images: Tensor, indices: Tensor, epoch: int) -> Tensor:
        """Shift by up to 1/16 of the size, and mirror every other image."""
        size = images.shape[-1]
        pad = size // 16
        shifts, mirrored = self._table(epoch, pad, images.device)
        shifts, mirrored = shifts[indices], mirrored[indices]
        windows = F.pad(images, (pad,) * 4).unfold(2, size, 1).unfold(3, size, 1)  # [b, 3, 2 pad + 1, 2 pad + 1, h, w]
        rows = torch.arange(len(images), device=images.device)
        images = windows[rows, :, shifts[:, 0], shifts[:, 1]]
        return torch.where(mirrored.view(-1, 1, 1, 1), images.flip(3), images)

    def _table(self, epoch: int, pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Shift [n, 2] and mirroring [n] of each sample: a function of (seed, epoch, sample), whoever asks."""
        if self._epoch != epoch:
            generator = torch.Generator().manual_seed(derive_seed(self.config.seed, epoch))
            self._shifts = torch.randint(0, 2 * pad + 1, (self.length, 2), generator=generator).to(device)
            self._mirrored = (torch.rand(self.length, generator=generator) < 0.5).to(device)
            self._epoch = epoch
        return self._shifts, self._mirrored


class ImagesInMemory(Images):
    """Images that fit in memory: images [n, 3, h, w] uint8, targets [n]. Read a batch at a time."""

    in_memory = True

    def __init__(self, config: Config, images: Tensor, targets: Tensor, classes: Sequence[str]) -> None:
        super().__init__(config, len(images))
        self.images, self.targets, self.classes = images, targets, classes

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        chosen = torch.tensor(indices)
        return self.images[chosen], self.targets[chosen], chosen


class ImageFiles(Images):
    """Images in folder/CLASS/*, as torchvision's ImageFolder finds them; decoded by the DataLoader's workers."""

    def __init__(self, config: Config, folder: Path) -> None:
        from torchvision.datasets import ImageFolder

        try:
            found = ImageFolder(str(folder))
        except OSError as error:
            raise EnvironmentFailure(f"--data-dir: {error}") from error
        super().__init__(config, len(found.samples))
        self.samples, self.classes = found.samples, found.classes

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        images = torch.stack([self._read(self.samples[index][0]) for index in indices])
        return images, torch.tensor([self.samples[index][1] for index in indices]), torch.tensor(indices)

    def _read(self, path: str) -> Tensor:
        """[3, image_size, image_size] uint8: the shorter side resized, the middle cut out."""
        from PIL import Image
        from torchvision.transforms import functional as transforms

        size = self.config.image_size
        try:
            with Image.open(path) as file:
                image = file.convert("RGB")
        except Exception as error:  # Pillow raises whatever a decoder trips over
            raise EnvironmentFailure(f"{path} is not an image that can be read; replace or remove it") from error
        if image.size != (size, size):
            image = transforms.center_crop(transforms.resize(image, size), [size, size])
        return transforms.pil_to_tensor(image)


# ---- where they come from -------------------------------------------------------------------------------------------


def _cifar10(config: Config) -> tuple[Images, Images]:
    from torchvision.datasets import CIFAR10
    from torchvision.datasets.utils import download_and_extract_archive

    root = Path(config.data_dir)
    try:
        parts = [CIFAR10(str(root), train=train) for train in (True, False)]  # verifies the MD5 of every file
    except RuntimeError:  # not there, or not whole
        with _download_errors(CIFAR10.url, root):
            root.mkdir(parents=True, exist_ok=True)
            with FileLock(root / ".download.lock"):  # one process of this machine downloads, the others find it done
                try:
                    CIFAR10(str(root))
                except RuntimeError:
                    # An archive that is there and whole is unpacked again, without a download.
                    download_and_extract_archive(CIFAR10.url, str(root), filename=CIFAR10.filename, md5=CIFAR10.tgz_md5)
        parts = [CIFAR10(str(root), train=train) for train in (True, False)]
    images = [torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous() for part in parts]
    targets = [torch.tensor(part.targets) for part in parts]
    train, test = (ImagesInMemory(config, *pair, parts[0].classes) for pair in zip(images, targets, strict=True))
    return train, test


@contextmanager
def _download_errors(url: str, root: Path):
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(30)  # torchvision sets none: a dead network would hang
    try:
        yield
    except (OSError, RuntimeError, HTTPException) as error:
        raise EnvironmentFailure(
            f"cannot download {url}: {error}; put {Path(url).name} into {root.resolve()} by hand, "
            "or use --dataset synthetic"
        ) from error
    finally:
        socket.setdefaulttimeout(before)


def _synthetic(config: Config) -> tuple[Images, Images]:
    """CIFAR-10-shaped: a class is a smooth random picture, a sample that picture, fainter or stronger, in noise."""
    generator = torch.Generator().manual_seed(derive_seed(config.seed))
    pictures = F.interpolate(torch.randn(10, 3, 6, 6, generator=generator), size=(32, 32), mode="bicubic")
    parts = []
    for length in SYNTHETIC_SIZES.values():
        targets = torch.randint(0, 10, (length,), generator=generator)
        images = torch.empty(length, 3, 32, 32, dtype=torch.uint8)
        for rows in torch.arange(length).split(1000):
            strength = 15 + 30 * torch.rand(len(rows), 1, 1, 1, generator=generator)
            noise = 40 * torch.randn(len(rows), 3, 32, 32, generator=generator)
            images[rows] = (128 + strength * pictures[targets[rows]] + noise).clamp_(0, 255).to(torch.uint8)
        parts.append(ImagesInMemory(config, images, targets, [f"class {number}" for number in range(10)]))
    return parts[0], parts[1]


def _image_folder(config: Config) -> tuple[Images, Images]:
    root = Path(config.data_dir)
    tests = [folder for folder in (root / "val", root / "test") if folder.is_dir()]
    if not (root / "train").is_dir() or not tests:
        raise EnvironmentFailure(f"--data-dir {root}: needs train/CLASS/* and val/CLASS/* or test/CLASS/* in it")
    train, test = ImageFiles(config, root / "train"), ImageFiles(config, tests[0])
    if train.classes != test.classes:
        odd = sorted(set(train.classes) ^ set(test.classes))
        raise EnvironmentFailure(
            f"--data-dir {root}: train and {tests[0].name} differ in their classes: {', '.join(odd)}"
        )
    return train, test
