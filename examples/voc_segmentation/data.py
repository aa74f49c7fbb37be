"""PASCAL VOC 2012, in which each pixel has a class. Edit me: main.py needs load_datasets."""

from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image
from torch import Tensor

from config import Config
from ddp.data.dataset import BatchDataset, Datasets
from ddp.distributed.seeds import derive_seed
from image_files import downloading

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
IGNORE = 255  # borders of objects, and everything outside of an image
MAX_ZOOM = 1.5
SYNTHETIC_SIZES = {"train": 400, "val": 100}
CLASSES = (
    *("background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("dining table", "dog", "horse", "motorbike", "person", "potted plant", "sheep", "sofa", "train", "tv/monitor"),
)


class Pictures(BatchDataset):
    """Pictures of many sizes as squares. A sample is an image [3, size, size] uint8 and its classes [size, size] uint8.

    Its random numbers are torch's, which the loader seeds by sample and epoch: a resumed run draws the same ones.
    """

    classes = CLASSES

    def __init__(self, name: str, pairs: Any, size: int, training: bool) -> None:
        self.name, self.pairs, self.size, self.training = name, pairs, size, training

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, mask = self.pairs[index]
        image, mask = (self._crop if self.training else self._fit)(image.convert("RGB"), mask)
        return torch.from_numpy(numpy.array(image)).permute(2, 0, 1).contiguous(), torch.from_numpy(numpy.array(mask))

    def _crop(self, image: Image.Image, mask: Image.Image) -> tuple[Image.Image, Image.Image]:
        """A random square, flipped or not."""
        zoom, across, down, flip = torch.rand(4).tolist()
        side = min(image.size) / (1 + zoom * (MAX_ZOOM - 1))
        left, top = across * (image.width - side), down * (image.height - side)
        box, size = (left, top, left + side, top + side), (self.size, self.size)
        pair = image.resize(size, Image.Resampling.BILINEAR, box), mask.resize(size, Image.Resampling.NEAREST, box)
        if flip < 0.5:
            return pair
        return pair[0].transpose(Image.Transpose.FLIP_LEFT_RIGHT), pair[1].transpose(Image.Transpose.FLIP_LEFT_RIGHT)

    def _fit(self, image: Image.Image, mask: Image.Image) -> tuple[Image.Image, Image.Image]:
        """The whole picture. The rest of the square is black and does not count."""
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


def load_datasets(config: Config) -> Datasets:
    """The training set and the validation set, from --data-dir. They are downloaded (2 GB) if they are missing.

    With --dataset synthetic, generated pictures. Raises SetupError if VOC cannot be downloaded or read.
    """
    if config.dataset == "synthetic":
        name, sizes = "synthetic", enumerate(SYNTHETIC_SIZES.items())
        parts = {part: _synthetic(length, derive_seed(config.seed, number)) for number, (part, length) in sizes}
    else:
        name, parts = "voc 2012", _voc(Path(config.data_dir))
    assert config.image_size is not None  # Config.check has set it
    size = config.image_size
    return Datasets(**{part: Pictures(name, pairs, size, part == "train") for part, pairs in parts.items()})


def _voc(root: Path) -> dict[str, Any]:
    """Training and validation part: pairs of an image and its mask, each read when it is needed."""
    from torchvision.datasets import VOCSegmentation
    from torchvision.datasets.voc import DATASET_YEAR_DICT

    if not _is_complete(root / "VOCdevkit/VOC2012"):
        with downloading(DATASET_YEAR_DICT["2012"]["url"], root, ", or try --dataset synthetic"):
            if not _is_complete(root / "VOCdevkit/VOC2012"):  # another process may have been first
                VOCSegmentation(str(root), download=True)
    return {part: VOCSegmentation(str(root), image_set=part) for part in ("train", "val")}


def _is_complete(folder: Path) -> bool:
    """Whether every listed file exists: the process that unpacked them may have been killed."""
    lists = [folder / "ImageSets/Segmentation" / f"{part}.txt" for part in ("train", "val")]
    names = [name for path in lists if path.exists() for name in path.read_text().split()]
    files = [folder / file for name in names for file in (f"JPEGImages/{name}.jpg", f"SegmentationClass/{name}.png")]
    return all(path.exists() for path in (*lists, *files))


def _synthetic(length: int, seed: int) -> list[tuple[Image.Image, Image.Image]]:
    """Pictures of many sizes with a box whose colour depends on its class, below a line that does not count."""
    random, pairs = numpy.random.default_rng(seed), []
    for _ in range(length):
        (height, width), what = random.integers(60, 110, 2), random.integers(1, len(CLASSES))
        image, mask = random.integers(0, 80, (height, width, 3)), numpy.zeros((height, width))
        box = slice(height // 4, height // 2 + 10), slice(width // 4, width // 2 + 10)
        image[box] += (80 * what % 171, 40 * what % 171, 20 * what % 171)
        mask[box], mask[height // 4 - 2 : height // 4] = what, IGNORE
        pairs.append((Image.fromarray(image.astype(numpy.uint8)), Image.fromarray(mask.astype(numpy.uint8))))
    return pairs
