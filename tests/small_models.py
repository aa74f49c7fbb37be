"""Models without ReLU and max-pooling, where the last digit may decide which way a gradient goes: runs that differ in
rounding alone stay close, on any processor.
"""

from __future__ import annotations

import random
import time
from typing import Any

import numpy
import torch
from torch import nn


class Awkward(nn.Module):
    """Everything that makes an exact resume hard: dropout, BatchNorm, and noise from Python's and numpy's generators.

    A forward pass sleeps for `pause` seconds, so that a test can kill the run in the middle of an epoch.
    """

    def __init__(self, classes: int, pause: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.Tanh(), nn.Dropout2d(0.2)),
            *(nn.Conv2d(8, 8, 3, stride=2), nn.BatchNorm2d(8), nn.Tanh(), nn.Flatten()),
            *(nn.Linear(8 * 7 * 7, 32), nn.Tanh(), nn.Dropout(0.5), nn.Linear(32, classes)),
        )
        self.pause = pause

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        time.sleep(self.pause)
        if self.training:
            images = images * (0.9 + 0.2 * random.random()) + 0.1 * numpy.random.rand()
        return self.layers(images)


def build_smooth(config: Any, train_set: Any) -> nn.Module:
    """Replaces main.task.build_model: the ToyModel, but with Tanh and average pooling."""
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh()),
        nn.Linear(84, len(train_set.classes)),
    )


def build_awkward(config: Any, train_set: Any) -> nn.Module:
    """Replaces main.task.build_model."""
    return Awkward(len(train_set.classes))


def build_slow_awkward(config: Any, train_set: Any) -> nn.Module:
    """Replaces main.task.build_model; each forward pass takes 20 ms longer."""
    return Awkward(len(train_set.classes), pause=0.02)
