"""Datasets of images: in memory, in files, or in a cache of decoded files. data.py and predict.py use them.

If your data are not images, delete this file and predict.py, and write data.py without it: see docs/data.md.

An image is uint8 [c, h, w] until it is prepared. A batch is targets [b], sample numbers [b] and images [b, c, h, w].
The datasets augment and normalise whole batches on the device, many times faster than one image at a time.
"""

import hashlib
import inspect
import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy
import torch
import torch.nn.functional as F
from filelock import FileLock
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info
from tqdm import tqdm

from ddp.core.errors import SetupError
from ddp.core.files import TMP_PATTERN, atomic_write
from ddp.core.host import available_cores
from ddp.data.dataset import BatchDataset
from ddp.data.file_list import FileList, digest_contents, list_files
from ddp.distributed.seeds import derive_seed, random_bits

if TYPE_CHECKING:
    from torchvision.datasets import CIFAR10

log = logging.getLogger(__name__)
CHUNK_PIXELS = 256 * 32 * 32  # of images in memory that are prepared together: 3 MB of floats
MAX_COPIED_BYTES = 1 << 30  # of images in memory of which a process keeps padded and flipped copies
MAX_GPU_SHARE = 0.05  # of the free memory of a GPU, for images
SHOWN_IMAGES = 16  # of the first batch, in TensorBoard
SOCKET_TIMEOUT_S = 30.0  # for a download: torchvision sets none, so a dead network would hang


@dataclass(frozen=True)
class ImageTransforms:
    """What happens to a batch of images, on the device. In training they are padded, cropped, and flipped.

    padding: the part of the width that is added on each side. padding_mode: "constant" (black) or "reflect".
    flip: the probability of a flip from left to right.
    """

    mean: Sequence[float]  # of each channel, from 0 to 1
    std: Sequence[float]
    image_size: int  # of the model's inputs: height and width
    padding: float = 0.0
    padding_mode: Literal["constant", "reflect"] = "constant"
    flip: float = 0.0
    seed: int = 0  # crops and flips are a function of (seed, epoch, sample)
    memory_format: torch.memory_format = torch.contiguous_format


class ImageDataset(BatchDataset):
    """Images of one size, which subclasses read. To change what happens to a batch, override `augment` or `prepare`.

    read_size: the height and width at which predict.py reads an image file; None if only a subclass can read one.
    """

    def __init__(self, length: int, classes: Sequence[str], transforms: ImageTransforms, read_size: int | None) -> None:
        self.length, self.classes, self.transforms, self.read_size = length, classes, transforms, read_size
        self._mean = self._std = torch.empty(0)

    def __len__(self) -> int:
        return self.length

    def split(self, fraction: float, seed: int) -> tuple[Any, Any]:
        """Two datasets like this one: the rest, and `fraction` of each class, which the seed draws; None if it is 0.

        Raises SetupError if that is less than one sample.
        """
        if fraction == 0:
            return self, None
        train, val = split_by_class(self._all_targets(), fraction, seed)
        if len(val) == 0:
            remedy = "raise it, add data for validation, or pass --val-fraction 0 to train without"
            raise SetupError(f"--val-fraction {fraction:g} of each class is less than one sample: {remedy}")
        return self._part(train), self._part(val)

    def _all_targets(self) -> Tensor:
        raise NotImplementedError

    def _part(self, indices: Tensor) -> Any:
        part = copy(self)
        part.length = len(indices)
        return part

    def augment(self, batch: Sequence[Tensor], epoch: int) -> Sequence[Tensor]:
        """Crop and flip the images at random."""
        targets, samples, images = batch
        rows = torch.arange(len(images), device=images.device)
        return targets, samples, self._cropped(*self._padded_and_flipped(images), rows, samples, epoch)

    def prepare(self, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Normalise and resize: inputs [b, c, image_size, image_size] float, targets [b]."""
        targets, _, images = batch
        inputs = images.to(torch.float32, memory_format=self.transforms.memory_format)
        if self._mean.shape[1:] != inputs.shape[1:] or self._mean.device != inputs.device:
            # As large as an image: with channels last, [1, c, 1, 1] would be broadcast value by value.
            one, values = torch.ones_like(inputs[:1]), (self.transforms.mean, self.transforms.std)
            self._mean, self._std = (one * 255 * one.new_tensor(value).view(1, -1, 1, 1) for value in values)
        inputs = inputs.sub_(self._mean).div_(self._std)
        size = self.transforms.image_size
        if inputs.shape[-1] != size:
            inputs = F.interpolate(inputs, size=(size, size), mode="bilinear", antialias=True)
        return inputs, targets

    def describe(self) -> dict[str, Any]:
        """How images are prepared, for predict.py: {"images": ...}, or None if a subclass prepares or reads them."""
        if type(self).prepare not in (ImageDataset.prepare, ImagesInMemory.prepare) or self.read_size is None:
            return {"images": None}
        chosen = self.transforms
        known = {"mean": list(chosen.mean), "std": list(chosen.std), "image_size": chosen.image_size}
        return {"images": {**known, "read_size": self.read_size}}

    def example_images(self, inputs: Any) -> Tensor | None:
        """The first prepared images, from 0 to 1; None if a subclass prepares something else."""
        if not isinstance(inputs, Tensor) or inputs.dim() != 4 or inputs.shape[1] not in (1, 3):
            return None
        images = inputs[:SHOWN_IMAGES].detach().float()
        low, high = images.aminmax()
        return (images - low) / (high - low).clamp(min=1e-12)

    def _padded_and_flipped(self, images: Tensor) -> tuple[Tensor, int]:
        """All images, padded, then the same flipped: [2 b, c, h + 2 pad, w + 2 pad]; and `pad`."""
        pad = int(images.shape[-1] * self.transforms.padding)
        if self.transforms.padding_mode == "constant":
            padded = F.pad(images, (pad,) * 4)
        else:  # F.pad of older versions of torch cannot reflect uint8 on a GPU
            rows, columns = (_reflected(size, pad).to(images.device) for size in images.shape[2:])
            padded = images[:, :, rows][..., columns]
        return torch.cat([padded, padded.flip(3)]), pad

    def _cropped(self, copies: Tensor, pad: int, rows: Tensor, samples: Tensor, epoch: int) -> Tensor:
        """Images `rows` of those that `copies` show padded and flipped, drawn for `samples`: [b, c, h, w]."""
        n, c, h, w = copies.shape[0] // 2, copies.shape[1], copies.shape[2] - 2 * pad, copies.shape[3] - 2 * pad
        seed = derive_seed(self.transforms.seed, epoch)
        down, right, flips = draw_crops(seed, self.transforms.flip, samples.to(copies.device), pad)
        image, plane, row, pixel = copies.stride()
        # To crop an image is to read it from a later element on. So one copy of `length` elements moves a whole image,
        # where indexing would copy row by row.
        length = (c - 1) * plane + (h - 1) * row + (w - 1) * pixel + 1
        starts = (rows + n * flips) * image + down * row + right * pixel
        from_each_element = copies.as_strided((copies.numel(),), (1,)).unfold(0, length, 1)
        found = from_each_element.index_select(0, starts)
        return found.as_strided((len(rows), c, h, w), (length, plane, row, pixel))


def _reflected(size: int, pad: int) -> Tensor:
    """Which of `size` pixels is at each place of a padded row: pad, ..., 1, 0, 1, ..., size - 1, size - 2, ..."""
    last = size - 1
    return last - (last - torch.arange(-pad, size + pad).abs()).abs()


def draw_crops(seed: int, flip: float, samples: Tensor, pad: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each of `samples` [b]: how far it is moved down and right, 0 to 2 x pad, and whether it is flipped."""
    bits = random_bits(seed, samples)
    down, right, chance = (bits >> shift & 0xFFFF for shift in (0, 16, 32))
    return down * (2 * pad + 1) >> 16, right * (2 * pad + 1) >> 16, chance < flip * 0x10000


class ImagesInMemory(ImageDataset):
    """Images [n, c, h, w] uint8 and targets [n] in memory: batches are made on their device, without workers."""

    in_memory = True

    def __init__(self, images: Tensor, targets: Tensor, classes: Sequence[str], transforms: ImageTransforms) -> None:
        super().__init__(len(images), classes, transforms, read_size=images.shape[-1])
        # Small batches are made several at once: one by one, they would cost a small model some percent of its step.
        self.chunk_size = CHUNK_PIXELS // transforms.image_size**2
        self.images, self.targets = images, targets
        self.on_device = True  # False: the images are too many for the GPU on which batches are made
        self._copies: tuple[Tensor, int] | None = None

    def _all_targets(self) -> Tensor:
        return self.targets

    def _part(self, indices: Tensor) -> Any:
        part = super()._part(indices)
        part.images, part.targets = self.images[indices], self.targets[indices]
        return part

    def to(self, device: torch.device) -> None:
        if self.images.nbytes < MAX_GPU_SHARE * torch.cuda.mem_get_info(device)[0]:
            self.images = self.images.to(device)
        else:
            self.on_device = False

    def __getitems__(self, indices: list[int]) -> Sequence[Tensor]:
        """Targets and sample numbers, in host memory; and the images, unless they are where batches are made.

        `augment` or, in an evaluation, `prepare` selects the others, on the device.
        """
        samples = torch.tensor(indices)
        found = self.targets.index_select(0, samples), samples
        if self.on_device and get_worker_info() is None:
            return found
        return *found, self.images.index_select(0, samples)

    def augment(self, batch: Sequence[Tensor], epoch: int) -> Sequence[Tensor]:
        targets, samples, *images = batch
        if images or self.images.nbytes > MAX_COPIED_BYTES:
            return super().augment((targets, samples, images[0] if images else self._select(samples)), epoch)
        if self._copies is None:  # once, and only for training; takes 2.5 times the memory of the images
            copies, pad = self._padded_and_flipped(self.images)
            self._copies = copies.contiguous(memory_format=self.transforms.memory_format), pad
        return targets, samples, self._cropped(*self._copies, samples, samples, epoch)

    def prepare(self, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        targets, samples, *images = batch
        return super().prepare((targets, samples, images[0] if images else self._select(samples)))

    def _select(self, samples: Tensor) -> Tensor:
        return self.images.index_select(0, samples)


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


def split_by_class(targets: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of the training and of the validation samples, in order. targets: the class of each sample, [n].

    The seed draws `fraction` of each class, rounded to whole samples. At least one of each class remains for training.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed))
    chosen = torch.zeros(len(targets), dtype=torch.bool)
    for label in targets.unique():
        members = (targets == label).nonzero().flatten()
        count = min(round(fraction * len(members)), len(members) - 1)
        chosen[members[torch.randperm(len(members), generator=generator)[:count]]] = True
    return (~chosen).nonzero().flatten(), chosen.nonzero().flatten()


class SavedImages(ImagesInMemory):
    """The classes and the preparation of the training set of a checkpoint, for predict.py, with two black images.

    description: content["dataset"] of the checkpoint, with what `describe` above adds.
    """

    def __init__(self, description: dict[str, Any]) -> None:
        images = dict(description["images"])
        size = images.pop("read_size")
        black = torch.zeros(2, 3, size, size, dtype=torch.uint8)
        super().__init__(black, torch.zeros(2, dtype=torch.int64), description["classes"], ImageTransforms(**images))

    def read(self, paths: Sequence[Path]) -> Tensor:
        """Inputs of the model, prepared as in an evaluation: [b, 3, image_size, image_size]. Raises SetupError."""
        images = torch.stack([read_square(path, self.images.shape[-1]) for path in paths])
        inputs, _ = self.prepare((torch.zeros(len(images)), torch.arange(len(images)), images))
        return inputs
