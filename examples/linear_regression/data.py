"""Points near the line y = 2 x + 3. Edit me: main.py needs load_datasets."""

import torch
from torch import Tensor

from config import Config
from ddp.data.dataset import BatchDataset, Datasets
from ddp.distributed.seeds import derive_seed

WEIGHT, BIAS, NOISE = 2.0, 3.0, 0.5
SYNTHETIC_SIZES = {"train": 10_000, "val": 2_000, "test": 2_000}


class Points(BatchDataset):
    """Points in memory. A batch is x [b, 1], y [b, 1]."""

    name = "points"
    in_memory = True

    def __init__(self, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.empty(length, 1).uniform_(-1, 1, generator=generator)
        self.y = WEIGHT * self.x + BIAS + NOISE * torch.randn(length, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self.x[indices], self.y[indices]


def load_datasets(config: Config) -> Datasets:
    """Made from the seed, and the same on every rank."""
    sizes = enumerate(SYNTHETIC_SIZES.items())
    return Datasets(**{part: Points(length, derive_seed(config.seed, number)) for number, (part, length) in sizes})
