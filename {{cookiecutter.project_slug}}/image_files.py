"""Where images come from: files in folders, a cache of decoded files, CIFAR-10 and other downloads."""

import hashlib
import inspect
import logging
import os
import re
import socket
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy
import torch
from filelock import FileLock
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader
from tqdm import tqdm

from ddp.core.errors import SetupError, UsageError, first_few
from ddp.core.files import TMP_PATTERN, atomic_write
from ddp.core.host import available_cores
from ddp.data.dataset import HOOKS
from ddp.data.reader import SeededReader
from file_list import FileList, digest_contents, list_files
from images import ImageDataset, ImagesInMemory, ImageTransforms, split_by_class

log = logging.getLogger("ddp")  # rank 0 prints it
warnings.filterwarnings("ignore", ".*[Cc]orrupt EXIF data")  # for each such image, in each epoch
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # as torchvision has them
IMAGES = (*EXTENSIONS, ".gif", ".jfif", ".jp2", ".heic", ".heif", ".avif", ".jxl")  # not to leave one out unnoticed
HIDDEN = re.compile(r"\.|(__MACOSX|@eaDir|\$RECYCLE\.BIN|lost\+found)$")  # what is no class and no image
SOCKET_TIMEOUT_S = 30.0  # for a download: torchvision sets none, so a dead network would hang


class ImageFiles(ImageDataset):
    """Images in folder/CLASS/**, sorted as by torchvision's ImageFolder, read by DataLoader workers.

    may_be_empty: whether a class may have no image here. A class to train must have one.

    samples: the path and the class of each image. You may put another sequence of such pairs in its place.
    """

    samples: Sequence[tuple[str, int]]
    whole: Any = None  # the fraction, the seed, 0 for training, and of what this is a part: see `split`

    def __init__(self, folder: Path, transforms: ImageTransforms, may_be_empty: bool = False) -> None:
        try:
            classes = find_classes(folder)
            samples = list_files(folder, classes, lambda name: find_images(folder / name, may_be_empty))
        except OSError as error:
            raise SetupError(f"--data-dir: {error}") from error
        read_size = transforms.image_size if type(self).read is ImageFiles.read else None
        super().__init__(len(samples), classes, transforms, read_size)
        self.folder, self.samples = folder, samples

    def __len__(self) -> int:
        return self._length_of(self.samples)

    def split(self, fraction: float, seed: int) -> tuple[Any, Any]:
        """As any ImageDataset, but by the names of the files: if one is removed, no other moves to the other part."""
        train, val = super().split(fraction, seed)
        if val is not None:
            train.whole, val.whole = (fraction, seed, 0, self), (fraction, seed, 1, self)
            counts = torch.bincount(val._all_targets(), minlength=len(self.classes)).tolist()
            if without := [name for name, count in zip(self.classes, counts, strict=True) if not count]:
                log.info(f"no image validates of {first_few(without)}")
        return train, val

    def keys(self) -> Tensor:
        files = FileList.of(self.samples, str(self.folder))
        return files.keys[files.rows]

    def keep(self) -> bool:
        """Split as the version before did."""
        if self.whole is None:
            return False
        fraction, seed, part, files = self.whole
        rows = split_by_class(files._all_targets(), fraction, seed)[part]
        self.samples, self.length, self.whole = FileList.of(files.samples).part(rows), len(rows), None
        return True

    def _all_targets(self) -> Tensor:
        files = FileList.of(self.samples)
        return files.targets[files.rows]

    def _part(self, indices: Tensor) -> Any:
        part = super()._part(indices)
        part.samples = FileList.of(self.samples).part(indices)
        return part

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        paths, targets = zip(*(self.samples[index] for index in indices), strict=True)
        return torch.tensor(targets), torch.tensor(indices), torch.stack([self.read(path) for path in paths])

    def read(self, path: str) -> Tensor:
        """An image: [3, image_size, image_size] uint8."""
        return read_square(path, self.transforms.image_size, self.transforms.value_range)


def find_classes(folder: Path) -> list[str]:
    """The names of the folders in `folder`, sorted. Raises OSError, and SetupError if there are none."""
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    classes = [name for name in names if not HIDDEN.match(name)]
    if left_out := sorted(set(names).difference(classes)):
        log.info("%s: left out are %s", folder, ", ".join(left_out))
    if not classes:
        raise SetupError(f"--data-dir: {folder} has no folders: it needs one for each class")
    if len(classes) == 1:
        log.warning(f"warning: with one class, every answer is right: {folder} has only {classes[0]}")
    return classes


def find_images(folder: Path, may_be_empty: bool = False) -> list[str]:
    """The images of a class: in its folder, and in folders there. Raises OSError, and SetupError if it has none."""

    def fail(error: OSError) -> None:
        raise error

    found = []
    for root, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        folders[:] = [name for name in folders if not HIDDEN.match(name)]
        found += [(root, name) for name in names if name.lower().endswith(IMAGES) and not HIDDEN.match(name)]
    if unread := sorted(os.path.join(*each) for each in found if not each[1].lower().endswith(EXTENSIONS)):
        raise SetupError(f"--data-dir: {unread[0]} would be left out: convert such files, or move them away")
    if not (found or may_be_empty):
        raise SetupError(f"--data-dir: {folder} has no file {', '.join(EXTENSIONS)}: add some, or remove the folder")
    if found and all(root != str(folder) for root, _ in found):
        deeper = f"only its folders have images, such as {min(found)[0]}"
        raise SetupError(f"--data-dir: {folder} is no class: {deeper}; move them one level up")
    return [os.path.join(*each) for each in sorted(found)]


def read_square(path: str | Path, size: int, value_range: tuple[float, float] | None = None) -> Tensor:
    """The square in the middle of an image file, upright, resized: [3, size, size] uint8. Raises SetupError."""
    try:
        with Image.open(path) as file:
            file.draft("RGB", (size, size))  # a JPEG of at least twice the size is decoded at a half, a quarter ...
            if file.format != "JPEG" or "exif" in file.info:
                with suppress(Exception):  # how a phone was held; that may be damaged where the picture is not
                    ImageOps.exif_transpose(file, in_place=True)
            image = _in_8_bits(file, value_range)
    except (SetupError, MemoryError):
        raise
    except Exception as error:  # Pillow raises whatever error a decoder has
        reason = "is not an image that can be read; replace or remove it"
        if isinstance(error, OSError) and error.errno:  # of the system
            remedies = {PermissionError: "let this user read it", FileNotFoundError: "restore or remove it"}
            remedy = remedies.get(type(error), "start again when its file system works")
            reason = f"cannot be read: {error.strerror}; {remedy}"
        if isinstance(error, Image.DecompressionBombError):
            reason = f"is too large: {error} Make it smaller, or raise PIL.Image.MAX_IMAGE_PIXELS"
        raise SetupError(f"{path} {reason}") from error
    image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)  # crops first: the rest need not be resized
    return torch.from_numpy(numpy.array(image)).permute(2, 0, 1).contiguous()


def _in_8_bits(file: Image.Image, value_range: tuple[float, float] | None) -> Image.Image:
    """An image in RGB. Pillow would clip values beyond 255."""
    has_16_bits = file.mode.startswith("I;") or (file.mode == "I" and file.format in ("PNG", "PPM"))
    if not has_16_bits and file.mode not in ("I", "F"):
        return file.convert("RGB")
    if not has_16_bits and value_range is None:
        remedy = "give their range to ImageTransforms in data.py, as value_range=(black, white)"
        raise SetupError(f"{getattr(file, 'filename', 'an image')} has pixels of 32 bits: {remedy}")
    low, high = value_range or (0, 65535)
    grey = numpy.nan_to_num((numpy.asarray(file, numpy.float32) - low) * (255 / (high - low)))
    return Image.fromarray(grey.clip(0, 255).round().astype(numpy.uint8)).convert("RGB")


class DecodedFiles(ImagesInMemory):
    """`files` as one array in `cache_dir`. The first process of this machine decodes them; all map the array."""

    def __init__(self, files: ImageFiles, cache_dir: Path) -> None:
        names, kind_of = (*HOOKS, "set_epoch", "__getitem__", "__getitems__"), type(files)
        own = [each for each in names if getattr(kind_of, each, None) is not getattr(ImageFiles, each, None)]
        own = [each for each in own if getattr(type(self), each, None) is getattr(DecodedFiles, each, None)]
        if own := [*own, *vars(files).keys() & set(names)]:
            remedy = "define it in a subclass of DecodedFiles, which data.py then uses in place of it"
            raise UsageError(f"--cache would ignore {own[0]} of {kind_of.__name__}: {remedy}")
        try:
            path = cache_dir / f"{files.folder.name}-{files.transforms.image_size}-{_cache_key(files)}.npy"
            cache_dir.mkdir(parents=True, exist_ok=True)
            if not path.exists():  # otherwise it may be on a file system that is read-only
                log.info("decoding %s images, once, into %s", f"{len(files):,}", path)
                with FileLock(cache_dir / ".lock"):
                    if not path.exists():
                        _decode(files, path)
            try:  # it is read when needed, and shared by all processes
                images = torch.from_numpy(numpy.load(path, mmap_mode="c"))
            except ValueError as error:
                raise SetupError(f"--cache: {path} is damaged ({error}): delete it") from error
        except OSError as error:
            raise SetupError(f"--cache {cache_dir}: {error}") from error
        super().__init__(images, files._all_targets(), files.classes, files.transforms)
        self.files, self.cache_dir, self.read_size = files, cache_dir, files.read_size

    def keys(self) -> Tensor:
        return self.files.keys()

    def keep(self) -> bool:
        if changed := self.files.keep():
            vars(self).update(vars(DecodedFiles(self.files, self.cache_dir)))
        return changed


def _cache_key(files: ImageFiles) -> str:
    """Changes with the images, their sizes and times, `value_range`, and the classes that read them.

    Of those it holds the source, and what `files` or its class has as a number, a string or a tuple, such as a size.
    """
    key = hashlib.blake2b(digest_size=8)
    for reader in type(files).__mro__:
        if issubclass(reader, ImageFiles):
            key.update(Path(inspect.getfile(reader)).read_bytes())
    plain = int | float | str
    values = {key: value for each in reversed(type(files).__mro__) for key, value in vars(each).items()} | vars(files)
    facts = {key: value if isinstance(value, tuple) else (value,) for key, value in values.items() if "__" not in key}
    given = sorted(item for item in facts.items() if all(isinstance(each, plain) for each in item[1]))
    name, files_read = type(files).__qualname__, digest_contents(FileList.of(files.samples))
    key.update(f"{files_read}{files.transforms.value_range or ''}{name}{given}".encode())
    return key.hexdigest()


def _decode(files: ImageFiles, path: Path) -> None:
    """Write all images as one array, uint8 [n, 3, image_size, image_size], on all cores. Call with the lock held."""
    for left_over in path.parent.glob(f"*.npy.{TMP_PATTERN}"):  # by a process that was killed
        left_over.unlink()
    size, batches = files.transforms.image_size, BatchSampler(range(len(files)), 64, drop_last=False)
    reader = SeededReader(files, tuple, seed=0, epoch=0)  # which refuses a read() that is random
    loader = DataLoader(reader, batch_sampler=batches, num_workers=available_cores(), collate_fn=tuple)
    with atomic_write(path, durable=True) as file:  # without durable, it could hold anything after a power cut
        header = {"descr": "|u1", "fortran_order": False, "shape": (len(files), 3, size, size)}
        numpy.lib.format.write_array_header_1_0(file, header)
        for _, _, images in tqdm(loader, desc="decoding", unit="batch", leave=False, disable=None):
            if images.dtype != torch.uint8 or images.shape[1:] != (3, size, size):
                found = f"{type(files).__name__}.read() returned {images.dtype} {list(images.shape[1:])}"
                raise UsageError(f"--cache holds images [3, {size}, {size}] uint8, but {found}: train without --cache")
            file.write(images.numpy())


LabelledImages = tuple[Tensor, Tensor, list[str]]  # images [n, 3, 32, 32] uint8, targets [n] int64, names of classes


def load_cifar10(folder: Path) -> tuple[LabelledImages, LabelledImages]:
    """The training part and the test part. They are downloaded into `folder` once per machine.

    Raises SetupError if they cannot be downloaded. https://www.cs.toronto.edu/~kriz/cifar.html
    """
    from torchvision.datasets import CIFAR10  # slow, and only needed here
    from torchvision.datasets.utils import download_and_extract_archive

    def read(train: bool) -> LabelledImages:
        part = CIFAR10(folder, train)  # verifies the MD5 of every file
        return torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(part.targets), part.classes

    with suppress(RuntimeError):  # a file is missing or damaged
        return read(True), read(False)
    with downloading(CIFAR10.url, folder, ", or use --dataset synthetic"):
        with suppress(RuntimeError):
            return read(True), read(False)  # another process of this machine may have been first
        # Not download=True, which ignores batches.meta. An intact archive is unpacked without a download.
        archive = {"filename": CIFAR10.filename, "md5": CIFAR10.tgz_md5}
        download_and_extract_archive(CIFAR10.url, folder, **archive)
        return read(True), read(False)


@contextmanager
def downloading(url: str, folder: Path, instead: str = "") -> Iterator[None]:
    """For a block that downloads `url` into `folder`. One process of this machine runs it at a time: look again first.

    Any failure to download becomes a SetupError. Its message ends with `instead`: what else the user can do.
    """
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SOCKET_TIMEOUT_S)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".download.lock"):
            yield
    except (OSError, RuntimeError, HTTPException) as error:
        by_hand = f"put {Path(url).name} into {folder.resolve()} by hand"
        raise SetupError(f"cannot download {url}: {error}; {by_hand}{instead}") from error
    finally:
        socket.setdefaulttimeout(before)
