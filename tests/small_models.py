"""A model that has all that makes resuming hard: dropout, BatchNorm, noise of every kind, and, if asked, slowness."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy
import torch
from torch import nn


class Awkward(nn.Module):
    """Dropout, BatchNorm, and noise drawn by Python and by numpy.

    It sleeps `pause` seconds per forward pass, so that a test can kill it in mid-epoch.
    """

    def __init__(self, classes: int, pause: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.2)),
            *(nn.Conv2d(8, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(8 * 7 * 7, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, classes)),
        )
        self.pause = pause

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        time.sleep(self.pause)
        if self.training:
            images = images * (0.9 + 0.2 * random.random()) + 0.1 * numpy.random.rand()
        return self.layers(images)


def build_awkward(config: Any, train_set: Any) -> nn.Module:
    """For monkeypatching main.build_model."""
    return Awkward(len(train_set.classes))


def build_slow_awkward(config: Any, train_set: Any) -> nn.Module:
    """The same, slow."""
    return Awkward(len(train_set.classes), pause=0.02)
