"""Small images of ten classes, made from the seed."""

import torch
import torch.nn.functional as F
from torch import Tensor

from config import Config
from ddp.data.dataset import BatchDataset, Datasets
from ddp.distributed.seeds import derive_seed

SYNTHETIC_SIZES = {"train": 4_000, "val": 400}


class Images(BatchDataset):
    """A sample is an image [3, 16, 16], and its class."""

    name = "images"
    in_memory = True
    classes = range(10)

    def __init__(self, images: Tensor, targets: Tensor, training: bool) -> None:
        self.images, self.targets, self.training = images, targets, training

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """In training, every other image is mirrored: the loader seeds torch for each sample and epoch."""
        image = self.images[index]
        return image.flip(2) if self.training and torch.rand(()) < 0.5 else image, self.targets[index]


def load_datasets(config: Config) -> Datasets:
    """A class is a smooth random picture. An image is the picture of its class, with noise."""
    generator = torch.Generator().manual_seed(derive_seed(config.seed))
    pictures = F.interpolate(torch.randn(10, 3, 4, 4, generator=generator), size=(16, 16), mode="bicubic")
    parts = {}
    for part, size in SYNTHETIC_SIZES.items():
        targets = torch.randint(10, (size,), generator=generator)
        images = pictures[targets] + 3 * torch.randn(size, 3, 16, 16, generator=generator)
        parts[part] = Images(images, targets, part == "train")
    return Datasets(**parts)
