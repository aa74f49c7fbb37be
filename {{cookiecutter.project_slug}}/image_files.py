"""Where images come from: files in folders, a cache of decoded files, CIFAR-10 and other downloads."""

import hashlib
import inspect
import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import torch
from filelock import FileLock
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from ddp.core.errors import SetupError
from ddp.core.files import TMP_PATTERN, atomic_write
from ddp.core.host import available_cores
from ddp.data.file_list import FileList, digest_contents, list_files
from images import ImageDataset, ImagesInMemory, ImageTransforms

if TYPE_CHECKING:
    from torchvision.datasets import CIFAR10

log = logging.getLogger(__name__)
SOCKET_TIMEOUT_S = 30.0  # for a download: torchvision sets none, so a dead network would hang


class ImageFiles(ImageDataset):
    """Images in folder/CLASS/*, as torchvision's ImageFolder finds them, read by DataLoader workers.

    samples: the path and the class of each image. You may put another sequence of such pairs in its place.
    """

    samples: Sequence[tuple[str, int]]

    def __init__(self, folder: Path, transforms: ImageTransforms) -> None:
        from torchvision.datasets.folder import IMG_EXTENSIONS  # slow, and only needed here

        try:
            classes, samples = list_files(folder, IMG_EXTENSIONS)
        except OSError as error:
            raise SetupError(f"--data-dir: {error}") from error
        read_size = transforms.image_size if type(self).read is ImageFiles.read else None
        super().__init__(len(samples), classes, transforms, read_size)
        self.folder, self.samples = folder, samples

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
        return read_square(path, self.transforms.image_size)


def read_square(path: str | Path, size: int) -> Tensor:
    """The square in the middle of an image file, resized: [3, size, size] uint8. Raises SetupError."""
    try:
        with Image.open(path) as file:
            file.draft("RGB", (size, size))  # a JPEG of at least twice the size is decoded at a half, a quarter ...
            image = file.convert("RGB")
    except Exception as error:  # Pillow raises whatever error a decoder has
        raise SetupError(f"{path} is not an image that can be read; replace or remove it") from error
    if image.size != (size, size):
        w, h = image.size
        left, top, side = (w - min(w, h)) / 2, (h - min(w, h)) / 2, min(w, h)
        box = (left, top, left + side, top + side)  # crop first: the rest need not be resized
        image = image.resize((size, size), Image.Resampling.BILINEAR, box)
    return torch.from_numpy(numpy.array(image)).permute(2, 0, 1).contiguous()


def decode_once(files: ImageFiles, cache_dir: Path) -> ImagesInMemory:
    """`files` as one array in `cache_dir`. The first process of this machine decodes them; all map the array."""
    try:
        path = cache_dir / f"{files.folder.name}-{files.transforms.image_size}-{_cache_key(files)}.npy"
        cache_dir.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            log.info("decoding %s images, once, into %s", f"{len(files):,}", path)
        with FileLock(cache_dir / ".lock"):
            if not path.exists():
                _decode(files, path)
        images = torch.from_numpy(numpy.load(path, mmap_mode="c"))  # read when needed, and shared by all processes
    except OSError as error:
        raise SetupError(f"--cache {cache_dir}: {error}") from error
    targets = files._all_targets()
    decoded = ImagesInMemory(images, targets, files.classes, files.transforms)
    decoded.read_size = files.read_size
    return decoded


def _cache_key(files: ImageFiles) -> str:
    """Changes with the list of the images, their sizes and times, and the source of the classes that read them."""
    key = hashlib.blake2b(digest_size=8)
    for reader in type(files).__mro__:
        if issubclass(reader, ImageFiles):
            key.update(Path(inspect.getfile(reader)).read_bytes())
    key.update(digest_contents(FileList.of(files.samples)).encode())
    return key.hexdigest()


def _decode(files: ImageFiles, path: Path) -> None:
    """Write all images as one array, uint8 [n, 3, image_size, image_size], on all cores. Call with the lock held."""
    for left_over in path.parent.glob(f"*.npy.{TMP_PATTERN}"):  # by a process that was killed
        left_over.unlink()
    size = files.transforms.image_size
    loader = DataLoader(files, batch_size=64, num_workers=available_cores(), collate_fn=tuple)
    with atomic_write(path, durable=True) as file:  # without durable, it could hold anything after a power cut
        header = {"descr": "|u1", "fortran_order": False, "shape": (len(files), 3, size, size)}
        numpy.lib.format.write_array_header_1_0(file, header)
        for _, _, images in tqdm(loader, desc="decoding", unit="batch", leave=False, disable=None):
            file.write(images.numpy())


class LabelledImages(NamedTuple):
    """images [n, 3, 32, 32] uint8, targets [n] int64, and the names of the classes."""

    images: Tensor
    targets: Tensor
    classes: list[str]


def load_cifar10(folder: Path) -> tuple[LabelledImages, LabelledImages]:
    """The training part and the test part. They are downloaded into `folder` once per machine.

    Raises SetupError if they cannot be downloaded. https://www.cs.toronto.edu/~kriz/cifar.html
    """
    from torchvision.datasets import CIFAR10  # slow, and only needed here
    from torchvision.datasets.utils import download_and_extract_archive

    def read() -> tuple[LabelledImages, LabelledImages]:
        train, test = (CIFAR10(folder, train) for train in (True, False))  # verifies the MD5 of every file
        return _to_tensors(train), _to_tensors(test)

    try:
        return read()
    except RuntimeError:  # a file is missing or damaged
        with downloading(CIFAR10.url, folder, ", or use --dataset synthetic"):
            try:
                return read()  # another process of this machine may have been first
            except RuntimeError:
                # Not download=True, which ignores batches.meta. An intact archive is unpacked without a download.
                archive = {"filename": CIFAR10.filename, "md5": CIFAR10.tgz_md5}
                download_and_extract_archive(CIFAR10.url, folder, **archive)
                return read()


def _to_tensors(part: "CIFAR10") -> LabelledImages:
    images = torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous()
    return LabelledImages(images, torch.tensor(part.targets), part.classes)


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
