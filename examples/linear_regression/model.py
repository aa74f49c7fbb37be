"""A line, its loss and its scores. Edit me: main.py needs all public functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Line(nn.Module):
    """y = weight x + bias."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """x [b, 1] -> y [b, 1]."""
        return self.line(x)


def build_model(config: Any, train_set: Any) -> nn.Module:
    """The model, on the CPU. Raises BadModel for a --model: there is one only."""
    if config.model != "ToyModel":
        raise BadModel(f"--model {config.model}: there is a line only; leave it out")
    return Line()


def build_optimizer(model: nn.Module, config: Any) -> torch.optim.Optimizer:
    """SGD with momentum. The learning rate is then set for each step, by ddp/schedule.py."""
    return torch.optim.SGD(model.parameters(), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)


def compute_loss(outputs: Tensor, targets: Tensor, config: Any) -> Tensor:
    """Mean squared error of a batch. outputs [b, 1], targets [b, 1] -> []."""
    return F.mse_loss(outputs, targets)


def sums(loss: Tensor, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
    """What is added up over batches and ranks, so that every point counts the same. `loss` and `count` are needed."""
    return {"loss": loss.detach() * len(targets), "count": len(targets)}


def scores(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """The score that is logged: the mean squared error."""
    return {"loss": sums["loss"].item() / sums["count"].item()}


def figure_of_merit(scores: Mapping[str, float]) -> float:
    """What best.pt is chosen by; higher is better."""
    return -scores["loss"]


class BadModel(ValueError):
    """A model that cannot be built. Its exit_code makes it one line without a traceback; see ddp/errors.py."""

    exit_code = 2
    on_every_rank = True
