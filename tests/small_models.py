"""A model with everything that makes an exact resume hard: dropout, BatchNorm, random numbers of every kind."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy
import torch
from torch import nn


class Awkward(nn.Module):
    """Dropout, BatchNorm, and noise from the generators of Python and numpy.

    A forward pass sleeps for `pause` seconds, so that a test can kill the run in the middle of an epoch.
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
    """Replaces main.task.build_model."""
    return Awkward(len(train_set.classes))


def build_slow_awkward(config: Any, train_set: Any) -> nn.Module:
    """Replaces main.task.build_model; each forward pass takes 20 ms longer."""
    return Awkward(len(train_set.classes), pause=0.02)
