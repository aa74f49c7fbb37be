"""Two random crops of each image, the query and the key, with the augmentation of MoCo v2."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms import v2

from config import Config
from ddp.data.dataset import BatchDataset, Datasets

SYNTHETIC_SIZES = {"train": 2_000, "val": 200}


class TwoCrops(BatchDataset):
    """A sample is two crops [2, 3, h, w] of an image, and the number of the image.

    An evaluation draws crops too. The loader seeds them, so each evaluation draws the same ones.
    """

    name = "crops"
    in_memory = True

    def __init__(self, images: Tensor, image_size: int) -> None:
        self.images = images  # [n, 3, 32, 32], from 0 to 1
        self.crop = v2.Compose(
            [
                v2.RandomResizedCrop(image_size, scale=(0.2, 1), antialias=True),
                v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
                v2.RandomGrayscale(0.2),
                v2.RandomApply([v2.GaussianBlur(3, (0.1, 2.0))], p=0.5),
                v2.RandomHorizontalFlip(),
                v2.Normalize([0.5] * 3, [0.25] * 3),
            ]
        )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.stack([self.crop(self.images[index]) for _ in range(2)]), index


def load_datasets(config: Config) -> Datasets:
    """Each image repeats four random colours, so that a crop shows all of them. Made from the seed."""
    generator = torch.Generator().manual_seed(config.seed)
    parts = {}
    for part, size in SYNTHETIC_SIZES.items():
        tiles = torch.rand(size, 3, 2, 2, generator=generator)  # four colours
        parts[part] = TwoCrops(F.interpolate(tiles, scale_factor=4).repeat(1, 1, 4, 4), config.image_size)
    return Datasets(**parts)
