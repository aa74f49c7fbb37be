"""Images of 32 x 32 pixels, each with a vector of noise. Edit me: main.py needs load_datasets."""

from pathlib import Path

import torch
from torch import Tensor

from config import Config
from ddp.data.dataset import Datasets
from ddp.distributed.seeds import derive_seed
from image_files import load_cifar10
from images import ImagesInMemory, ImageTransforms

NOISE = 100  # numbers from which an image is generated
VALIDATION = 5_000  # images of CIFAR-10, the last of the training images
SYNTHETIC_SIZES = {"train": 10_000, "val": 2_000, "test": 2_000}


def load_datasets(config: Config) -> Datasets:
    """A batch is images [b, 3, 32, 32] in -1 to 1, and noise [b, NOISE].

    The noise of a sample never changes, so evaluations are comparable. In training, main.py draws new noise.
    """
    if config.dataset == "cifar10":
        train, test = (part.images for part in load_cifar10(Path(config.data_dir)))
        parts = {"train": train[:-VALIDATION], "val": train[-VALIDATION:], "test": test}
    else:
        parts = synthetic(config)
    transforms = ImageTransforms(mean=(0.5,) * 3, std=(0.5,) * 3, image_size=32, flip=0.5, seed=config.seed)
    datasets = {}
    for number, (part, images) in enumerate(parts.items()):
        generator = torch.Generator().manual_seed(derive_seed(config.seed, number))
        noise = torch.randn(len(images), NOISE, generator=generator)
        datasets[part] = ImagesInMemory(images, noise, (), transforms)  # the noise takes the place of the targets
    datasets["train"].name = config.dataset  # for the log, and for the default --output-dir
    return Datasets(**datasets)


def synthetic(config: Config) -> dict[str, Tensor]:
    """A disc of a random colour and size at a random place of a dark square, [n, 3, 32, 32] uint8."""
    generator = torch.Generator().manual_seed(derive_seed(config.seed))
    grid = torch.stack(torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij"))  # [2, 32, 32]
    parts = {}
    for part, length in SYNTHETIC_SIZES.items():
        centre, radius, colour = torch.rand(3, length, 3, 1, 1, generator=generator)
        inside = (grid - (8 + 16 * centre[:, :2])).norm(dim=1, keepdim=True) < 4 + 4 * radius[:, :1]
        parts[part] = (255 * inside * (0.2 + 0.8 * colour)).to(torch.uint8)
    return parts
