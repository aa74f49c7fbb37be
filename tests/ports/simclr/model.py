"""SimCLR: a network that maps two views of an image to similar vectors, its optimizer, its loss and its metrics.

Chen et al., 2020, https://arxiv.org/abs/2002.05709; their code is https://github.com/google-research/simclr. Adam is
what https://github.com/sthalles/SimCLR uses.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

LOSS_COMPARES_SAMPLES = True  # so rehearse.py does not compare 1 pass with 2


class SimCLR(nn.Module):
    """An encoder, whose features are the result of the training, and the head that the loss needs."""

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            *_block(3, width // 2), *_block(width // 2, width), nn.AdaptiveAvgPool2d(2), nn.Flatten()
        )
        self.head = nn.Sequential(nn.Linear(4 * width, width), nn.ReLU(), nn.Linear(width, dim))

    def forward(self, views: Tensor) -> Tensor:
        """views [b, 2, 3, h, w] -> unit vectors [2 b, dim]: of all first views, then of all second views."""
        images = views.transpose(0, 1).flatten(0, 1)  # [2 b, 3, h, w]
        return F.normalize(self.head(self.encoder(images)), dim=1)


def _block(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


def build_model(config: Any, train_set: Any) -> nn.Module:
    """The network, on the CPU."""
    return SimCLR(config.width, config.dim)


def build_optimizer(model: nn.Module, config: Any) -> torch.optim.Optimizer:
    """Adam. ddp/training/schedule.py then sets the learning rate of each step."""
    return torch.optim.Adam(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)


def forward(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """views [b, 2, 3, h, w] -> unit vectors [2 b, dim]."""
    return model(inputs)


def compute_loss(outputs: Tensor, targets: Tensor, config: Any) -> Tensor:
    """NT-Xent: the cross-entropy of finding the other view of an image among all other views -> [].

    In training, these are the views of all ranks. In an evaluation, they are those of one batch, because the ranks have
    different numbers of batches: so the loss depends on the size of the batch. Call on every rank.
    """
    candidates, first = outputs, 0
    if torch.is_grad_enabled() and dist.is_initialized() and dist.get_world_size() > 1:
        candidates, first = AllGather.apply(outputs), dist.get_rank() * len(outputs)
    return F.cross_entropy(cosines(outputs, candidates, first) / config.temperature, first + other_view(outputs))


class AllGather(torch.autograd.Function):
    """rows [n, d] -> the rows of all ranks [ranks x n, d]. Its backward pass adds up the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size())[dist.get_rank()]


def cosines(rows: Tensor, candidates: Tensor, first: int = 0) -> Tensor:
    """rows [n, d] and candidates [m, d], which hold the rows from `first` on -> cosines [n, m].

    The cosine of a row with itself is -inf: a view is no candidate for itself.
    """
    itself = torch.eye(len(rows), len(candidates), dtype=torch.bool, device=rows.device).roll(first, dims=1)
    return (rows @ candidates.T).masked_fill(itself, -torch.inf)


def other_view(outputs: Tensor) -> Tensor:
    """For each row of the outputs [2 b, dim], the row of the other view of the same image -> [2 b]."""
    return torch.arange(len(outputs), device=outputs.device).roll(len(outputs) // 2)


def batch_totals(loss: Tensor, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
    """Sums over the views of a batch. A view is correct if, in this batch, the other view is the most similar one."""
    found = cosines(outputs.detach(), outputs.detach()).argmax(1)
    return {
        "loss": loss.detach() * len(outputs),
        "correct": (found == other_view(outputs)).count_nonzero(),
        "views": len(outputs),
        "count": len(targets),
    }


def compute_metrics(totals: Mapping[str, Tensor]) -> dict[str, float]:
    """The mean loss, and the contrastive accuracy in 0 to 1."""
    views = totals["views"].item()
    return {"loss": totals["loss"].item() / views, "accuracy": totals["correct"].item() / views}


def metric_for_best_model(metrics: Mapping[str, float]) -> float:
    """The value that decides which checkpoint becomes best.pt; higher is better."""
    return metrics["accuracy"]
