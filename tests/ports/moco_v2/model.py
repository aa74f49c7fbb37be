"""MoCo v2: a query encoder, a key encoder that follows it, a queue of keys, the optimizer, the loss and the metrics.

Chen et al., 2020, https://arxiv.org/abs/2003.04297; their code is https://github.com/facebookresearch/moco.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

LOSS_COMPARES_SAMPLES = True  # so rehearse.py does not compare 1 pass with 2


class MoCo(nn.Module):
    """The loss pulls a query to the key of the same image, and pushes it from the keys in the queue."""

    queue: Tensor
    pointer: Tensor

    def __init__(self, width: int, dim: int, queue_size: int, key_momentum: float, temperature: float) -> None:
        super().__init__()
        self.key_momentum, self.temperature = key_momentum, temperature
        self.query_encoder = nn.Sequential(
            *_block(3, width // 2),
            *_block(width // 2, width),
            *(nn.AdaptiveAvgPool2d(2), nn.Flatten()),
            *(nn.Linear(4 * width, width), nn.ReLU(), nn.Linear(width, dim)),  # the MLP head of version 2
        )
        self.key_encoder = copy.deepcopy(self.query_encoder).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(queue_size, dim), dim=1))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))  # the next place in the queue

    def forward(self, crops: Tensor) -> Tensor:
        """crops [b, 2, 3, h, w] -> logits [b, 1 + queue size], of which the first is that of the own key.

        An evaluation changes neither the key encoder nor the queue. In training, call it on every rank.
        """
        training = torch.is_grad_enabled()
        queries = F.normalize(self.query_encoder(crops[:, 0]), dim=1)
        with torch.no_grad():
            if training:
                self.update_key_encoder()
                keys, keys_of_all_ranks = self.shuffled_keys(crops[:, 1])
            else:
                keys = F.normalize(self.key_encoder(crops[:, 1]), dim=1)
        own = (queries * keys).sum(1, keepdim=True)  # [b, 1]
        others = queries @ self.queue.clone().T  # [b, queue size]; a copy, because the queue changes before backward
        if training:
            self.enqueue(keys_of_all_ranks)
        return torch.cat([own, others], dim=1) / self.temperature

    def update_key_encoder(self) -> None:
        """key = momentum x key + (1 - momentum) x query, for each weight."""
        for key, query in zip(self.key_encoder.parameters(), self.query_encoder.parameters(), strict=True):
            key.lerp_(query, 1 - self.key_momentum)

    def shuffled_keys(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """images [b, 3, h, w] -> the keys of this rank [b, dim], and those of all ranks [ranks x b, dim].

        Each rank encodes a random part of all images, so that BatchNorm's statistics do not tell which key belongs to
        a query. Call on every rank.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            keys = F.normalize(self.key_encoder(images), dim=1)
            return keys, keys
        ranks, rank = dist.get_world_size(), dist.get_rank()
        everything = all_gather(images)
        order = torch.randperm(len(everything), device=images.device)
        dist.broadcast(order, src=0)
        shuffled = F.normalize(self.key_encoder(everything[order.chunk(ranks)[rank]]), dim=1)
        keys = all_gather(shuffled)[order.argsort()]
        return keys.chunk(ranks)[rank], keys

    def enqueue(self, keys: Tensor) -> None:
        """Replace the oldest keys in the queue."""
        size = len(self.queue)
        places = self.pointer + torch.arange(len(keys), device=keys.device)
        self.queue[places[-size:] % size] = keys[-size:].to(self.queue.dtype)
        self.pointer.copy_((self.pointer + len(keys)) % size)


def all_gather(rows: Tensor) -> Tensor:
    """rows [n, ...] -> the rows of all ranks [ranks x n, ...], without a gradient. Call on every rank."""
    parts = [torch.empty_like(rows, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows.contiguous())
    return torch.cat(parts)


def _block(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


def build_model(config: Any, train_set: Any) -> nn.Module:
    """Both encoders and the queue, on the CPU."""
    return MoCo(config.width, config.dim, config.queue_size, config.key_momentum, config.temperature)


def build_optimizer(model: nn.Module, config: Any) -> torch.optim.Optimizer:
    """SGD with momentum, for the query encoder."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return torch.optim.SGD(trained, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)


def forward(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """crops [b, 2, 3, h, w] -> logits [b, 1 + queue size]."""
    return model(inputs)


def compute_loss(outputs: Tensor, targets: Tensor, config: Any) -> Tensor:
    """InfoNCE: the cross-entropy of finding the own key among those of the queue -> []."""
    return F.cross_entropy(outputs, torch.zeros_like(targets))


def batch_totals(loss: Tensor, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
    """Sums over the samples of a batch. A query is correct if its own key is more similar than all others."""
    correct = (outputs[:, :1] > outputs[:, 1:]).all(1).count_nonzero()
    return {"loss": loss.detach() * len(targets), "correct": correct, "count": len(targets)}


def compute_metrics(totals: Mapping[str, Tensor]) -> dict[str, float]:
    """The mean loss, and the contrastive accuracy in 0 to 1."""
    count = totals["count"].item()
    return {"loss": totals["loss"].item() / count, "accuracy": totals["correct"].item() / count}


def metric_for_best_model(metrics: Mapping[str, float]) -> float:
    """The value that decides which checkpoint becomes best.pt; higher is better."""
    return metrics["accuracy"]
