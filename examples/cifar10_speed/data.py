"""Images of 32 x 32 pixels, shifted at random, flipped in every other epoch. Edit me: main.py needs load_datasets."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from config import Config
from ddp.data.dataset import Datasets
from ddp.distributed.seeds import derive_seed
from image_files import LabelledImages, load_cifar10
from images import ImagesInMemory, ImageTransforms

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of CIFAR-10
SYNTHETIC_SIZES = {"train": 10_000, "test": 2_000}


class AlternatingFlips(ImagesInMemory):
    """Images that are flipped in every other epoch: half of them in the first, the others in the second, and so on.

    So two epochs show each image both ways. Random flips would show half of the images twice the same way.
    """

    def augment(self, batch: Sequence[Tensor], epoch: int) -> Sequence[Tensor]:
        targets, samples, images = super().augment(batch, epoch)
        flipped = draw_flips(self.transforms.seed, len(self), samples.device)[samples] ^ (epoch % 2 == 1)
        return targets, samples, torch.where(flipped.view(-1, 1, 1, 1), images.flip(3), images)


@lru_cache(maxsize=1)
def draw_flips(seed: int, length: int, device: torch.device) -> Tensor:
    """Whether each sample is flipped in epoch 0: [length] bool, the same in every process."""
    generator = torch.Generator().manual_seed(derive_seed(seed))
    return torch.randint(2, (length,), generator=generator).bool().to(device)


def load_datasets(config: Config) -> Datasets:
    """Of CIFAR-10, all training images and no validation set: the weights of the last step count.

    Raises SetupError if it cannot be downloaded or read.
    """
    if config.dataset == "cifar10":
        parts = dict(zip(("train", "test"), load_cifar10(Path(config.data_dir)), strict=True))
    else:
        parts = synthetic(config)
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    transforms = ImageTransforms(
        mean=MEAN,
        std=STD,
        image_size=32,
        padding=1 / 16,  # shift by up to 2 of 32 pixels
        padding_mode="reflect",
        seed=config.seed,
        memory_format=layout,
    )
    datasets = Datasets(**{name: AlternatingFlips(*part, transforms, read_size=32) for name, part in parts.items()})
    datasets.train.name = config.dataset  # for the log, and for the default --output-dir
    return datasets


def synthetic(config: Config) -> dict[str, LabelledImages]:
    """Made from the seed, shaped like CIFAR-10, and easy to learn: each class is a smooth picture, with noise."""
    generator = torch.Generator().manual_seed(derive_seed(config.seed))
    pictures = F.interpolate(torch.randn(10, 3, 6, 6, generator=generator), size=(32, 32), mode="bicubic")
    parts, classes = {}, [f"class {number}" for number in range(10)]
    for name, length in SYNTHETIC_SIZES.items():
        targets = torch.randint(0, 10, (length,), generator=generator)
        noise = torch.randn(length, 3, 32, 32, generator=generator)
        images = (128 + 30 * pictures[targets] + 40 * noise).clamp(0, 255).to(torch.uint8)
        parts[name] = images, targets, classes
    return parts
