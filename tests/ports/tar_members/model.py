"""A small convolutional network, its optimizer, its loss and its metrics. Edit me."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def build_model(config: Any, train_set: Any) -> nn.Module:
    """The model, sized to the classes, on the CPU. images [b, 3, h, w] -> logits [b, classes]."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Dropout(0.1), nn.Linear(32 * 9, len(train_set.classes))),
    )


def build_optimizer(model: nn.Module, config: Any) -> torch.optim.Optimizer:
    """SGD with momentum. ddp/training/schedule.py then sets the learning rate of each step."""
    return torch.optim.SGD(model.parameters(), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)


def forward(model: nn.Module, inputs: Tensor, targets: Tensor) -> Any:
    """The outputs of `model`, which is the DDP wrapper in training."""
    return model(inputs)


def compute_loss(outputs: Tensor, targets: Tensor, config: Any) -> Tensor:
    """Mean cross-entropy of a batch. outputs [b, classes], targets [b] -> []."""
    return F.cross_entropy(outputs, targets)


def batch_totals(loss: Tensor, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
    """Sums over the samples of a batch, which are added up over batches and ranks."""
    return {
        "loss": loss.detach() * len(targets),
        "correct": (outputs.argmax(1) == targets).count_nonzero(),
        "count": len(targets),
    }


def compute_metrics(totals: Mapping[str, Tensor]) -> dict[str, float]:
    """The metrics to log: the mean loss, and the accuracy in 0 to 1."""
    count = totals["count"].item()
    return {"loss": totals["loss"].item() / count, "accuracy": totals["correct"].item() / count}


def metric_for_best_model(metrics: Mapping[str, float]) -> float:
    """The value that decides which checkpoint becomes best.pt; higher is better."""
    return metrics["accuracy"]
