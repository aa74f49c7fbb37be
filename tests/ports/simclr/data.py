"""Two random views of each image, with the crops and the colour changes of SimCLR."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms import v2

from config import Config
from ddp.data.dataset import BatchDataset, Datasets

SYNTHETIC_SIZES = {"train": 2_000, "val": 200}


class Views(BatchDataset):
    """A sample is two views [2, 3, h, w] of an image, and the number of the image.

    An evaluation draws views too. The loader seeds them, so each evaluation draws the same ones.
    """

    name = "views"
    in_memory = True

    def __init__(self, images: Tensor, config: Config) -> None:
        self.images = images  # [n, 3, 32, 32], from 0 to 1
        colors = [0.8 * config.jitter] * 3 + [0.2 * config.jitter]
        self.view = v2.Compose(
            [
                v2.RandomResizedCrop(config.image_size, scale=(0.2, 1), antialias=True),
                v2.RandomHorizontalFlip(),
                v2.RandomApply([v2.ColorJitter(*colors)], p=0.8),
                v2.RandomGrayscale(0.2),
                v2.Normalize([0.5] * 3, [0.25] * 3),
            ]
        )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.stack([self.view(self.images[index]) for _ in range(2)]), index


def load_datasets(config: Config) -> Datasets:
    """Each image repeats four random colours, so that a crop shows all of them. Made from the seed."""
    generator = torch.Generator().manual_seed(config.seed)
    parts = {}
    for part, size in SYNTHETIC_SIZES.items():
        tiles = torch.rand(size, 3, 2, 2, generator=generator)  # four colours
        parts[part] = Views(F.interpolate(tiles, scale_factor=4).repeat(1, 1, 4, 4), config)
    return Datasets(**parts)
