"""A line, its optimizer, its loss and its metrics. Edit me: main.py imports all public functions."""

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
    """The model, on the CPU."""
    return Line()


def build_optimizer(model: nn.Module, config: Any) -> torch.optim.Optimizer:
    """SGD with momentum. ddp/training/schedule.py then sets the learning rate of each step."""
    return torch.optim.SGD(model.parameters(), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)


def forward(model: nn.Module, inputs: Tensor, targets: Tensor) -> Any:
    """The outputs of `model`, which is the DDP wrapper in training."""
    return model(inputs)


def compute_loss(outputs: Tensor, targets: Tensor, config: Any) -> Tensor:
    """Mean squared error of a batch. outputs [b, 1], targets [b, 1] -> []."""
    return F.mse_loss(outputs, targets)


def batch_totals(loss: Tensor, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
    """Sums over the points of a batch, which are added up over batches and ranks. `loss` and `count` are required."""
    return {"loss": loss.detach() * len(targets), "count": len(targets)}


def compute_metrics(totals: Mapping[str, Tensor]) -> dict[str, float]:
    """The metric to log: the mean squared error."""
    return {"loss": totals["loss"].item() / totals["count"].item()}


def metric_for_best_model(metrics: Mapping[str, float]) -> float:
    """The value that decides which checkpoint becomes best.pt; higher is better."""
    return -metrics["loss"]
