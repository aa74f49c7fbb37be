"""The datasets. Edit me: main.py needs load_datasets.

A dataset gives whole batches, as `__getitems__(indices)`, or samples, as `__getitem__(index)`; ddp/loader.py
decides which process gets which. If it has `augment(batch, epoch)`, that changes the samples of a training batch; if it
has `prepare(batch)`, that turns a batch into (inputs, targets). Both get batches that are on the device already.
Inputs go to the model, targets to its loss; a dictionary of tensors will do for either.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
from filelock import FileLock
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from config import Config
from ddp.download import downloading
from ddp.errors import EnvironmentFailure
from ddp.group import cores
from ddp.loader import derive_seed

log = logging.getLogger("ddp.data")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, and near enough of CIFAR-10
PIXELS_AT_ONCE = 256 * 32 * 32  # 3 MB of floats
MOST_FRAMED = 1 << 30  # bytes of images of which a process keeps a second form, ready to be shifted and mirrored
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

    A batch is targets [b], indices [b], images [b, 3, h, w] uint8.
    """

    classes: Sequence[str]

    def __init__(self, config: Config, length: int) -> None:
        self.config = config
        self.length = length
        self._epoch: int | None = None
        self._mean = self._std = torch.empty(0)

    def __len__(self) -> int:
        return self.length

    def prepare(self, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """inputs [b, 3, image_size, image_size] float, normalised; targets [b]."""
        targets, _, images = batch
        inputs = images.to(torch.float32, memory_format=self._layout())
        if self._mean.shape[1:] != inputs.shape[1:] or self._mean.device != inputs.device:
            # As large as an image: where channels come last, [1, 3, 1, 1] would be spread value by value.
            one = torch.ones_like(inputs[:1])
            self._mean, self._std = (one * 255 * one.new_tensor(part).view(1, 3, 1, 1) for part in (MEAN, STD))
        inputs = inputs.sub_(self._mean).div_(self._std)
        size = self.config.image_size
        if inputs.shape[-1] != size:
            inputs = F.interpolate(inputs, size=(size, size), mode="bilinear", antialias=True)
        return inputs, targets

    def augment(self, batch: Sequence[Tensor], epoch: int) -> Sequence[Tensor]:
        """Mirror every other image, and shift all by up to 1/16 of their size, with black behind."""
        targets, indices, images = batch
        rows, pad = torch.arange(len(images), device=images.device), images.shape[-1] // 16
        return targets, indices, self._moved(_framed_and_mirrored(images, pad), pad, rows, indices, epoch)

    def _moved(self, both: Tensor, pad: int, rows: Tensor, indices: Tensor, epoch: int) -> Tensor:
        """Images `rows` of `both`, which `_framed_and_mirrored` has made, as samples `indices` look: [b, 3, h, w]."""
        n, c, h, w = both.shape[0], both.shape[1], both.shape[2] - 2 * pad, both.shape[3] - 2 * pad
        shifts, mirrored = self._table(epoch, pad, both.device)
        image, plane, row, pixel = both.stride()
        # To shift an image is to begin to read it later: so one copy moves an image, where indexing copies row by row.
        length = (c - 1) * plane + (h - 1) * row + (w - 1) * pixel + 1
        down, right = shifts[indices].unbind(1)
        starts = (rows + n // 2 * mirrored[indices]) * image + down * row + right * pixel
        from_anywhere = both.as_strided((both.numel(),), (1,)).unfold(0, length, 1)
        found = from_anywhere.index_select(0, starts)
        return found.as_strided((len(rows), c, h, w), (length, plane, row, pixel))

    def _layout(self) -> torch.memory_format:
        return torch.channels_last if self.config.channels_last else torch.contiguous_format

    def _table(self, epoch: int, pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Shift [n, 2] and mirroring [n] of each sample: a function of (seed, epoch, sample), whoever asks."""
        if self._epoch != epoch:
            generator = torch.Generator().manual_seed(derive_seed(self.config.seed, epoch))
            self._shifts = torch.randint(0, 2 * pad + 1, (self.length, 2), generator=generator).to(device)
            self._mirrored = (torch.rand(self.length, generator=generator) < 0.5).to(device)
            self._epoch = epoch
        return self._shifts, self._mirrored


def _framed_and_mirrored(images: Tensor, pad: int) -> Tensor:
    """[2 b, 3, h + 2 pad, w + 2 pad]: all images with a black frame, and all again, mirrored."""
    framed = F.pad(images, (pad,) * 4)
    return torch.cat([framed, framed.flip(3)])


class ImagesInMemory(Images):
    """Images that fit in memory: images [n, 3, h, w] uint8, targets [n]. A batch is made of them on their device."""

    in_memory = True

    def __init__(self, config: Config, images: Tensor, targets: Tensor, classes: Sequence[str]) -> None:
        super().__init__(config, len(images))
        # Small batches are made several at once: one by one they would cost a small model percents of its step.
        self.at_once = PIXELS_AT_ONCE // config.image_size**2
        self.images, self.targets, self.classes = images, targets, classes
        self._both: Tensor | None = None

    def to(self, device: torch.device) -> None:
        """Move the images to a GPU, if they take little of its memory: batches are then made there."""
        if self.images.nbytes < 0.05 * torch.cuda.mem_get_info(device)[0]:
            self.images, self.targets = self.images.to(device), self.targets.to(device)

    def __getitems__(self, indices: list[int]) -> Sequence[Tensor]:
        chosen = torch.tensor(indices, device=self.targets.device)
        return self.targets.index_select(0, chosen), chosen

    def augment(self, batch: Sequence[Tensor], epoch: int) -> Sequence[Tensor]:
        targets, indices = batch
        if self.images.nbytes > MOST_FRAMED:
            return super().augment((targets, indices, self.images.index_select(0, indices)), epoch)
        pad = self.images.shape[-1] // 16
        if self._both is None:  # once, and only for training; takes 2.5 times the memory of the images
            self._both = _framed_and_mirrored(self.images, pad).contiguous(memory_format=self._layout())
        return targets, indices, self._moved(self._both, pad, indices, indices, epoch)

    def prepare(self, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        targets, indices, *augmented = batch
        images = augmented[0] if augmented else self.images.index_select(0, indices)
        return super().prepare((targets, indices, images))


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

    def __getitems__(self, indices: list[int]) -> Sequence[Tensor]:
        images = torch.stack([self._read(self.samples[index][0]) for index in indices])
        return torch.tensor([self.samples[index][1] for index in indices]), torch.tensor(indices), images

    def _read(self, path: str) -> Tensor:
        """[3, image_size, image_size] uint8: the square in the middle, resized."""
        from PIL import Image

        size = self.config.image_size
        try:
            with Image.open(path) as file:
                file.draft("RGB", (size, size))  # a JPEG of twice the size or more is decoded at a half, a quarter ...
                image = file.convert("RGB")
        except Exception as error:  # Pillow raises whatever a decoder trips over
            raise EnvironmentFailure(f"{path} is not an image that can be read; replace or remove it") from error
        if image.size != (size, size):
            w, h = image.size
            left, top, side = (w - min(w, h)) / 2, (h - min(w, h)) / 2, min(w, h)
            box = (left, top, left + side, top + side)  # cut out first: what is cut away need not be resized
            image = image.resize((size, size), Image.Resampling.BILINEAR, box)
        return torch.from_numpy(numpy.array(image)).permute(2, 0, 1).contiguous()


# ---- where they come from -------------------------------------------------------------------------------------------


def _cifar10(config: Config) -> tuple[Images, Images]:
    from torchvision.datasets import CIFAR10
    from torchvision.datasets.utils import download_and_extract_archive

    root = Path(config.data_dir)
    try:
        parts = [CIFAR10(str(root), train=train) for train in (True, False)]  # verifies the MD5 of every file
    except RuntimeError:  # not there, or not whole
        with downloading(CIFAR10.url, root, ", or use --dataset synthetic"):
            try:
                CIFAR10(str(root))  # another process of this machine may have been first
            except RuntimeError:
                # An archive that is there and whole is unpacked again, without a download.
                download_and_extract_archive(CIFAR10.url, str(root), filename=CIFAR10.filename, md5=CIFAR10.tgz_md5)
        parts = [CIFAR10(str(root), train=train) for train in (True, False)]
    images = [torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous() for part in parts]
    targets = [torch.tensor(part.targets) for part in parts]
    train, test = (ImagesInMemory(config, *pair, parts[0].classes) for pair in zip(images, targets, strict=True))
    return train, test


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
    if config.cache is None:
        return train, test
    return _cached(train, Path(config.cache), "train"), _cached(test, Path(config.cache), tests[0].name)


def _cached(files: ImageFiles, folder: Path, part: str) -> ImagesInMemory:
    """`files`, decoded: by the process of this machine that comes first, into a file that all of them share.

    Its name changes with the list of the images, their sizes and times, and with how this file reads them.
    """
    key = hashlib.blake2b(Path(__file__).read_bytes(), digest_size=8)
    try:
        for name, _ in files.samples:
            about = os.stat(name)
            key.update(f"{name} {about.st_size} {about.st_mtime_ns}\n".encode(errors="surrogateescape"))
        path = folder / f"{part}-{files.config.image_size}-{key.hexdigest()}.npy"
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            log.info("decoding %s images, once, into %s", f"{len(files):,}", path)
        with FileLock(folder / ".lock"):
            if not path.exists():
                _decode(files, path)
        images = torch.from_numpy(numpy.load(path, mmap_mode="c"))  # mapped: read when needed, by all from one place
    except OSError as error:
        raise EnvironmentFailure(f"--cache {folder}: {error}") from error
    return ImagesInMemory(files.config, images, torch.tensor([label for _, label in files.samples]), files.classes)


def _decode(files: ImageFiles, path: Path) -> None:
    """Write all images as one array, uint8 [n, 3, image_size, image_size], on all cores."""
    shape, beside = (len(files), 3, files.config.image_size, files.config.image_size), path.with_suffix(".tmp")
    loader = DataLoader(files, batch_size=64, num_workers=cores(), collate_fn=tuple)
    try:
        with beside.open("wb") as file:
            header = {"descr": "|u1", "fortran_order": False, "shape": shape}
            numpy.lib.format.write_array_header_1_0(file, header)
            for _, _, images in tqdm(loader, desc="decoding", unit="batch", leave=False, disable=None):
                file.write(images.numpy())
            file.flush()
            os.fsync(file.fileno())  # after a power cut, else, a file of this name could hold anything
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
