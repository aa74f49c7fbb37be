"""Images of 32 x 32 pixels, each with a vector of noise. Edit me: main.py needs load_datasets."""

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from config import Config
from ddp.data.cifar10 import load_cifar10
from ddp.data.images import ImagesInMemory, ImageTransforms
from ddp.distributed.seeds import derive_seed

NOISE = 100  # numbers from which an image is generated
SYNTHETIC_SIZES = {"train": 10_000, "test": 2_000}


def load_datasets(config: Config) -> tuple[Dataset, Dataset]:
    """The training set and the test set. A batch is images [b, 3, 32, 32] in -1 to 1, and noise [b, NOISE].

    The noise of a sample never changes, so evaluations are comparable. In training, main.py draws new noise.
    """
    if config.dataset == "cifar10":
        parts = [part.images for part in load_cifar10(Path(config.data_dir))]
    else:
        parts = synthetic(config)
    transforms = ImageTransforms(mean=(0.5,) * 3, std=(0.5,) * 3, image_size=32, flip=0.5, seed=config.seed)
    datasets = []
    for number, images in enumerate(parts):
        generator = torch.Generator().manual_seed(derive_seed(config.seed, number))
        noise = torch.randn(len(images), NOISE, generator=generator)
        datasets.append(ImagesInMemory(images, noise, (), transforms))  # the noise takes the place of the targets
    train_set, test_set = datasets
    train_set.name = config.dataset  # for the log, and for the default --output-dir
    return train_set, test_set


def synthetic(config: Config) -> list[Tensor]:
    """A disc of a random colour and size at a random place of a dark square, [n, 3, 32, 32] uint8."""
    generator = torch.Generator().manual_seed(derive_seed(config.seed))
    grid = torch.stack(torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij"))  # [2, 32, 32]
    parts = []
    for length in SYNTHETIC_SIZES.values():
        centre, radius, colour = torch.rand(3, length, 3, 1, 1, generator=generator)
        inside = (grid - (8 + 16 * centre[:, :2])).norm(dim=1, keepdim=True) < 4 + 4 * radius[:, :1]
        parts.append((255 * inside * (0.2 + 0.8 * colour)).to(torch.uint8))
    return parts
