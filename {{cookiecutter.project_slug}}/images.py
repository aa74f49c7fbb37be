"""Images: what happens to a batch of them on the device; and datasets in memory. image_files.py reads them.

If your data are not images, delete this file, image_files.py, file_list.py and predict.py; docs/data.md: a new data.py.

An image is uint8 [c, h, w] until it is prepared. A batch is targets [b], sample numbers [b] and images [b, c, h, w].
The datasets augment and normalise whole batches on the device, many times faster than one image at a time.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import get_worker_info

from ddp.core.errors import SetupError, UsageError
from ddp.data.dataset import BatchDataset
from ddp.distributed.seeds import derive_seed, random_bits

CHUNK_PIXELS = 256 * 32 * 32  # of images in memory that are prepared together: 3 MB of floats
GPU_CHUNK_PIXELS = 16 * CHUNK_PIXELS  # in training, on a GPU: starting the 40 kernels of a chunk takes longest there
MAX_COPIED_BYTES = 1 << 30  # of images in memory of which a process keeps padded and flipped copies
MAX_GPU_SHARE = 0.05  # of the free memory of a GPU, for images
SHOWN_IMAGES = 16  # of the first batch, in TensorBoard


@dataclass(frozen=True)
class ImageTransforms:
    """What happens to a batch of images, on the device. In training they are padded, cropped, and flipped.

    padding: the part of the width that is added on each side. padding_mode: "constant" (black) or "reflect".
    flip: the probability of a flip from left to right. value_range: which pixels are black and white in files of more
    than 8 bits, such as (0, 4095) of a scanner; None is the range of 16 bits, and refuses files of 32 bits.
    """

    mean: Sequence[float]  # of each channel, from 0 to 1
    std: Sequence[float]
    image_size: int  # of the model's inputs: height and width
    padding: float = 0.0
    padding_mode: Literal["constant", "reflect"] = "constant"
    flip: float = 0.0
    value_range: tuple[float, float] | None = None
    seed: int = 0  # crops and flips are a function of (seed, epoch, sample)
    memory_format: torch.memory_format = torch.contiguous_format


class ImageDataset(BatchDataset):
    """Images of one size, which subclasses read. To change what happens to a batch, override `augment` or `prepare`.

    read_size: the height and width at which predict.py reads an image file; None if only a subclass can read one.
    """

    def __init__(self, length: int, classes: Sequence[str], transforms: ImageTransforms, read_size: int | None) -> None:
        self.length, self.classes, self.transforms, self.read_size = length, classes, transforms, read_size
        self._held = length  # samples that a subclass holds
        self._scale = self._shift = torch.empty(0)  # a pixel is multiplied by the one, then the other is added
        self._scaled_for: Any = None  # the transforms from which they were made

    def __len__(self) -> int:
        return self.length

    def _length_of(self, held: Any) -> int:
        """`length`, which an owner may set; that of `held`, if samples were added or removed."""
        if len(held) != self._held:
            self.length = self._held = len(held)
        return self.length

    def split(self, fraction: float, seed: int) -> tuple[Any, Any]:
        """Two datasets like this one: the rest, and `fraction` of each class, which the seed draws; None if it is 0.

        Raises SetupError if no sample is drawn.
        """
        if fraction == 0:
            return self, None
        targets = self._all_targets()
        if targets.dim() > 1 or targets.is_floating_point():  # no classes: `fraction` of all
            targets = torch.zeros(len(targets))
        train, val = split_by_class(targets, fraction, seed, self.keys())
        if len(val) == 0:
            remedy = "raise it, add data for validation, or pass --val-fraction 0 to train without"
            raise SetupError(f"--val-fraction {fraction:g} leaves no sample for validation: {remedy}")
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
        _check_targets(targets, images, self.transforms)
        rows = torch.arange(len(images), device=images.device)
        return targets, samples, self._cropped(*self._padded_and_flipped(images), rows, samples, epoch)

    def prepare(self, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Normalise and resize: inputs [b, c, image_size, image_size] float, targets [b]."""
        targets, _, images = batch
        inputs = images.to(torch.float32, memory_format=self.transforms.memory_format)
        fits = self._scale.shape[1:] == inputs.shape[1:] and self._scale.device == inputs.device
        if not fits or self._scaled_for is not self.transforms:
            self._scaled_for = self.transforms
            # As large as an image: with channels last, [1, c, 1, 1] would be broadcast value by value.
            one = torch.ones_like(inputs[:1])
            values = [one.new_tensor(value).view(1, -1, 1, 1) for value in (self.transforms.mean, self.transforms.std)]
            if any(each.shape[1] not in (1, one.shape[1]) for each in values):
                found = f"`mean` has {values[0].shape[1]} numbers, and `std` {values[1].shape[1]}"
                raise UsageError(f"images have {one.shape[1]} channels, but {found}: see build_transforms in data.py")
            mean, std = (one * value for value in values)
            self._scale, self._shift = 1 / (255 * std), -mean / std
        inputs = torch.addcmul(self._shift, inputs, self._scale, out=inputs)
        size = self.transforms.image_size
        if inputs.shape[-1] != size:
            inputs = F.interpolate(inputs, size=(size, size), mode="bilinear", antialias=inputs.shape[-1] > size)
        return inputs, targets

    def describe(self) -> dict[str, Any]:
        """How images are prepared, for predict.py: {"images": ...}, or None if a subclass prepares or reads them."""
        methods = type(self).prepare, type(self).__getitems__
        own = vars(self).keys() & {"prepare", "read", "__getitems__"}
        if self.read_size is None or own or any(each.__module__ not in (__name__, "image_files") for each in methods):
            return {"images": None}
        names = [each.name for each in fields(ImageTransforms) if each.name != "memory_format"]
        known = {name: getattr(self.transforms, name) for name in names}
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
            places = (numpy.pad(numpy.arange(size), pad, "reflect") for size in images.shape[2:])
            rows, columns = (torch.from_numpy(each).to(images.device) for each in places)
            padded = images[:, :, rows][..., columns]
        return torch.cat([padded, padded.flip(3)]), pad

    def _cropped(self, copies: Tensor, pad: int, rows: Tensor, samples: Tensor, epoch: int) -> Tensor:
        """For each of `rows`, its image in `copies` (of _padded_and_flipped), as drawn for its sample: [b, c, h, w]."""
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


def _check_targets(targets: Tensor, images: Tensor, transforms: ImageTransforms) -> None:
    are_masks = getattr(targets, "ndim", 0) > 2 and targets.shape[-2:] == images.shape[-2:]
    if are_masks and (transforms.padding or transforms.flip):
        remedy = "set padding=0 and flip=0 in data.py, and crop and flip both in an `augment` of your own"
        raise UsageError(
            f"targets of shape {list(targets.shape)} would stay as they are, unlike their images: {remedy}"
        )


def draw_crops(seed: int, flip: float, samples: Tensor, pad: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each of `samples` [b]: how far it is moved down and right, 0 to 2 x pad, and whether it is flipped."""
    bits = random_bits(seed, samples)
    down, right, chance = (bits >> shift & 0xFFFF for shift in (0, 16, 32))
    return down * (2 * pad + 1) >> 16, right * (2 * pad + 1) >> 16, chance < flip * 0x10000


class ImagesInMemory(ImageDataset):
    """Images [n, c, h, w] uint8 and targets [n] in memory: batches are made on their device, without workers.

    read_size: if predict.py shall read files as these images were read: upright, cut to a square, RGB, of this size.
    """

    in_memory = True

    def __init__(
        self,
        images: Tensor,
        targets: Tensor,
        classes: Sequence[str],
        transforms: ImageTransforms,
        read_size: int | None = None,
    ) -> None:
        if images.dtype != torch.uint8 or images.dim() != 4 or len(images) != len(targets):
            found = f"{images.dtype} {list(images.shape)} and {len(targets):,} targets"
            raise UsageError(f"ImagesInMemory needs images [n, c, h, w] uint8, and a target for each; it has {found}")
        are_classes = targets.dim() == 1 and images.shape[1] == 3
        super().__init__(len(images), classes, transforms, read_size if are_classes else None)
        self.images, self.targets = images, targets
        self.chunk_size = CHUNK_PIXELS // transforms.image_size**2
        self.on_device = True  # False: the images are too many for the GPU on which batches are made
        self._copies: tuple[Tensor, int] | None = None
        self._copied_from: tuple[Any, Any, int] = None, None, 0  # images, transforms, and the version of the images

    def __len__(self) -> int:
        if len(self.images) != len(self.targets):
            found = f"{len(self.images):,} images and {len(self.targets):,} targets"
            raise UsageError(f"ImagesInMemory has {found}: replace both")
        return self._length_of(self.targets)

    def _all_targets(self) -> Tensor:
        return self.targets

    def _part(self, indices: Tensor) -> Any:
        part = super()._part(indices)
        part.images, part.targets = self.images[indices], self.targets[indices]
        return part

    def to(self, device: torch.device) -> None:
        free = torch.cuda.mem_get_info(device)[0]  # two loaders may share this object
        self.on_device = self.images.is_cuda or self.images.nbytes < MAX_GPU_SHARE * free
        if self.on_device:
            self.images = self.images.to(device)
            self.train_chunk_size = GPU_CHUNK_PIXELS // self.transforms.image_size**2

    def __getitems__(self, indices: list[int]) -> Sequence[Tensor]:
        """Targets and sample numbers, in host memory; and the images, unless they are where batches are made.

        `augment` or, in an evaluation, `prepare` selects the others, on the device.
        """
        samples = torch.from_numpy(numpy.fromiter(indices, numpy.int64, len(indices)))  # faster than torch.tensor
        found = self.targets.index_select(0, samples), samples
        if self.on_device and get_worker_info() is None:
            return found
        return *found, self.images.index_select(0, samples)

    def augment(self, batch: Sequence[Tensor], epoch: int) -> Sequence[Tensor]:
        if len(batch) == 3 or self.images.nbytes > MAX_COPIED_BYTES:
            return super().augment(self._with_images(batch), epoch)
        targets, samples = batch
        _check_targets(targets, self.images, self.transforms)
        version = 0 if self.images.is_inference() else self.images._version  # a set_epoch may change them
        images, transforms, then = self._copied_from
        same = images is self.images and transforms is self.transforms and then == version
        if self._copies is None or not same:  # only for training; takes 2.5 times the memory of the images
            self._copied_from = self.images, self.transforms, version
            copies, pad = self._padded_and_flipped(self.images)
            self._copies = copies.contiguous(memory_format=self.transforms.memory_format), pad
        return targets, samples, self._cropped(*self._copies, samples, samples, epoch)

    def prepare(self, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return super().prepare(self._with_images(batch))

    def _with_images(self, batch: Sequence[Tensor]) -> Sequence[Tensor]:
        return batch if len(batch) == 3 else (*batch, self.images.index_select(0, batch[1]))


def split_by_class(targets: Tensor, fraction: float, seed: int, keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Indices of the training and of the validation samples, in order. targets: the class of each sample, [n].

    The seed draws `fraction` of each class, rounded to whole samples; or with keys, int64 [n], about as many: then it
    depends on no other sample whether one validates. At least one of each class remains for training.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed))
    chosen = torch.zeros(len(targets), dtype=torch.bool)
    for label in targets.unique():
        members = (targets == label).nonzero().flatten()
        if keys is None:
            order, count = torch.randperm(len(members), generator=generator), round(fraction * len(members))
        else:
            chances = random_bits(derive_seed(seed), keys[members]).double() / 2.0**64 + 0.5  # from 0 to 1
            order, count = chances.argsort(), int((chances < fraction).sum())
        chosen[members[order[: min(count, len(members) - 1)]]] = True
    return (~chosen).nonzero().flatten(), chosen.nonzero().flatten()
