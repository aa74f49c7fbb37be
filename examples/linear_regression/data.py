"""Points near the line y = 2 x + 3. main.py needs load_datasets."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

from config import Config
from ddp.errors import UsageError
from ddp.loader import derive_seed

WEIGHT, BIAS, NOISE = 2.0, 3.0, 0.5
SYNTHETIC_SIZES = {"train": 10_000, "test": 2_000}


class Points(Dataset):
    """Points in memory. A batch is x [b, 1], y [b, 1]."""

    in_memory = True
    name = "points"

    def __init__(self, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.empty(length, 1).uniform_(-1, 1, generator=generator)
        self.y = WEIGHT * self.x + BIAS + NOISE * torch.randn(length, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self.x[indices], self.y[indices]


def load_datasets(config: Config) -> tuple[Dataset, Dataset]:
    """The training and the test data: made from the seed, the same on every rank. Raises UsageError."""
    if config.dataset == "imagefolder":
        raise UsageError("--dataset imagefolder: there are points only; leave it out")
    seeds = (derive_seed(config.seed, number) for number in range(2))
    train, test = map(Points, SYNTHETIC_SIZES.values(), seeds)
    return train, test
