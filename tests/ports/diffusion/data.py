"""Small images: one bright disc or square on a dark ground."""

import torch
from torch import Tensor

from config import Config
from ddp.data.dataset import BatchDataset, Datasets
from ddp.distributed.seeds import derive_seed

SYNTHETIC_SIZES = {"train": 4_000, "val": 400}
SIZE = 16  # pixels
SMALLEST, LARGEST = 2.0, 5.0  # pixels from the centre of a shape to its edge


class Images(BatchDataset):
    """A sample is an image [1, 16, 16] from -1 to 1. There are no targets."""

    name = "shapes"
    in_memory = True

    def __init__(self, images: Tensor) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        return self.images[index]

    def prepare(self, batch: Tensor) -> tuple[Tensor, None]:
        """The inputs are the images. The model makes the targets: the noise."""
        return batch, None

    def example_images(self, inputs: Tensor) -> Tensor:
        return (inputs + 1) / 2


def load_datasets(config: Config) -> Datasets:
    """Made from the seed, and the same on every rank."""
    parts = {}
    for number, (part, size) in enumerate(SYNTHETIC_SIZES.items()):
        parts[part] = Images(_shapes(size, torch.Generator().manual_seed(derive_seed(config.seed, number))))
    return Datasets(**parts)


def _shapes(count: int, generator: torch.Generator) -> Tensor:
    """Images [count, 1, 16, 16]. Each has a random shape, size and place, and lies within its borders."""
    radius = SMALLEST + (LARGEST - SMALLEST) * torch.rand(count, 1, 1, generator=generator)
    y, x = (radius + (SIZE - 1 - 2 * radius) * torch.rand(count, 1, 1, generator=generator) for _ in range(2))
    places = torch.arange(SIZE)
    down, right = places[:, None] - y, places - x  # [count, 16, 1], [count, 1, 16]
    disc = torch.rand(count, 1, 1, generator=generator) < 0.5
    distance = torch.where(disc, torch.hypot(down, right), torch.maximum(down.abs(), right.abs()))
    return (2 * (radius + 0.5 - distance).clamp(0, 1) - 1)[:, None]
