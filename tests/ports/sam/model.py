"""A small residual network, its optimizer, which is Sharpness-Aware Minimization (SAM), its loss and its metrics.

Foret et al., 2021, https://arxiv.org/abs/2010.01412; their code is https://github.com/google-research/sam. main.py
computes the two gradients of a step.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions with BatchNorm, which halve the image and are added to a third one."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """x [b, inputs, h, w] -> [b, outputs, h / 2, w / 2]."""
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


def build_model(config: Any, train_set: Any) -> nn.Module:
    """The network, on the CPU. images [b, 3, 16, 16] -> logits [b, classes]."""
    width = config.width
    return nn.Sequential(
        *(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), Block(width, 2 * width), Block(2 * width, 2 * width)),
        *(nn.Flatten(), nn.Dropout(config.dropout), nn.Linear(2 * width * 4 * 4, len(train_set.classes))),
    )


class SAM(torch.optim.SGD):
    """SGD with the gradient at perturbed weights. Its state is that of SGD, which state_dict() of this class holds."""

    def __init__(self, params: Any, *, rho: float, **options: Any) -> None:
        super().__init__(params, **options)
        self.rho = rho

    @contextmanager
    def perturbed(self) -> Iterator[None]:
        """Within the block, the weights are w + rho g / |g|, where g is their gradient. Clears the gradients."""
        weights = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        with torch.no_grad():
            before = [weight.clone() for weight in weights]
            # DDP has averaged g over the ranks. |g| is over all weights. The factor of GradScaler cancels out: if it
            # has made g infinite, the weights become NaN here, so does the second gradient, and no step is taken.
            norm = torch.stack([weight.grad.norm() for weight in weights]).norm()
            for weight in weights:
                weight.add_(weight.grad * (self.rho / (norm + 1e-12)))
        self.zero_grad()
        try:
            yield
        finally:
            with torch.no_grad():
                for weight, value in zip(weights, before, strict=True):
                    weight.copy_(value)


@contextmanager
def keep_statistics(model: nn.Module) -> Iterator[None]:
    """Within the block, BatchNorm layers do not update their running statistics, which belong to the weights."""
    layers = [each for each in model.modules() if getattr(each, "track_running_stats", False)]
    for layer in layers:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in layers:
            layer.track_running_stats = True


def build_optimizer(model: nn.Module, config: Any) -> torch.optim.Optimizer:
    """SAM. ddp/training/schedule.py then sets the learning rate of each step."""
    options = {"lr": config.lr, "momentum": config.momentum, "weight_decay": config.weight_decay}
    return SAM(model.parameters(), rho=config.rho, **options)


def forward(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """images [b, 3, 16, 16] -> logits [b, classes]."""
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
