"""PASCAL VOC 2012, each pixel with its class. Edit me: main.py needs load_datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from config import Config
from ddp.download import downloading

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
IGNORE = 255  # borders of objects, and what lies outside of an image
MOST_ZOOM = 1.5
CLASSES = (
    *("background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("dining table", "dog", "horse", "motorbike", "person", "potted plant", "sheep", "sofa", "train", "tv/monitor"),
)


class Pictures(Dataset):
    """Pictures of many sizes as squares. A sample is an image [3, size, size] uint8 and its classes [size, size] uint8.

    Its random numbers are torch's, which ddp/loader.py seeds for each sample: the same after any resume.
    """

    name = "voc 2012"
    classes = CLASSES

    def __init__(self, pairs: Any, size: int, training: bool) -> None:
        self.pairs, self.size, self.training = pairs, size, training

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, mask = self.pairs[index]
        image, mask = (self._cut if self.training else self._fit)(image.convert("RGB"), mask)
        return torch.from_numpy(numpy.array(image)).permute(2, 0, 1).contiguous(), torch.from_numpy(numpy.array(mask))

    def _cut(self, image: Image.Image, mask: Image.Image) -> tuple[Image.Image, Image.Image]:
        """Some square out of it, mirrored or not."""
        zoom, across, down, mirrored = torch.rand(4).tolist()
        side = min(image.size) / (1 + zoom * (MOST_ZOOM - 1))
        left, top = across * (image.width - side), down * (image.height - side)
        box, size = (left, top, left + side, top + side), (self.size, self.size)
        pair = image.resize(size, Image.Resampling.BILINEAR, box), mask.resize(size, Image.Resampling.NEAREST, box)
        if mirrored < 0.5:
            return pair
        return pair[0].transpose(Image.Transpose.FLIP_LEFT_RIGHT), pair[1].transpose(Image.Transpose.FLIP_LEFT_RIGHT)

    def _fit(self, image: Image.Image, mask: Image.Image) -> tuple[Image.Image, Image.Image]:
        """All of it; what is left of the square is black, and does not count."""
        scale = self.size / max(image.size)
        size = max(1, round(scale * image.width)), max(1, round(scale * image.height))
        whole, classes = Image.new("RGB", (self.size,) * 2), Image.new("L", (self.size,) * 2, IGNORE)
        whole.paste(image.resize(size, Image.Resampling.BILINEAR))
        classes.paste(Image.fromarray(numpy.array(mask.resize(size, Image.Resampling.NEAREST))))  # numbers, not colours
        return whole, classes

    def prepare(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """On the device: images [b, 3, size, size] float, normalised; classes [b, size, size] int64."""
        images, masks = batch
        mean, std = (255 * torch.tensor(part, device=images.device).view(1, 3, 1, 1) for part in (MEAN, STD))
        return (images.float() - mean) / std, masks.long()


def load_datasets(config: Config) -> tuple[Dataset, Dataset]:
    """The training and the validation set, from --data-dir, downloaded (2 GB) if they are not there.

    Raises EnvironmentFailure if they cannot be downloaded or read.
    """
    from torchvision.datasets import VOCSegmentation
    from torchvision.datasets.voc import DATASET_YEAR_DICT

    root = Path(config.data_dir)
    if not (root / "VOCdevkit/VOC2012/SegmentationClass").is_dir():
        with downloading(DATASET_YEAR_DICT["2012"]["url"], root):
            if not (root / "VOCdevkit/VOC2012/SegmentationClass").is_dir():  # another process was first
                VOCSegmentation(str(root), download=True)
    parts = [VOCSegmentation(str(root), image_set=part) for part in ("train", "val")]
    train, test = (Pictures(part, config.image_size, part is parts[0]) for part in parts)
    return train, test
