"""A vision transformer of timm, with its optimizer, its loss and its metrics."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from timm.loss import SoftTargetCrossEntropy
from timm.models import VisionTransformer
from timm.optim import create_optimizer_v2, param_groups_layer_decay
from torch import Tensor, nn


def build_model(config: Any, train_set: Any) -> nn.Module:
    """The model, sized to the dataset, on the CPU. For one of timm's own: timm.create_model."""
    return VisionTransformer(
        img_size=config.image_size,
        patch_size=config.patch_size,
        num_classes=len(train_set.classes),
        embed_dim=config.embed_dim,
        depth=config.depth,
        num_heads=config.num_heads,
        drop_path_rate=config.drop_path,
    )


def build_optimizer(model: nn.Module, config: Any) -> torch.optim.Optimizer:
    """LAMB. The learning rate of a layer is --layer-decay times that of the next one."""
    groups = param_groups_layer_decay(
        model, config.weight_decay, no_weight_decay_list=model.no_weight_decay(), layer_decay=config.layer_decay
    )
    return create_optimizer_v2(groups, opt="lamb", lr=config.lr)


def forward(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """images [b, 3, h, w] -> logits [b, classes]."""
    return model(inputs)


def compute_loss(outputs: Tensor, targets: Tensor, config: Any) -> Tensor:
    """Mean cross-entropy. targets: mixed classes [b, classes] in training, classes [b] in evaluation."""
    criterion = F.cross_entropy if targets.dim() == 1 else SoftTargetCrossEntropy()
    return criterion(outputs, targets)


def batch_totals(loss: Tensor, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
    """Sums over the samples of a batch. Mixed samples have no class that could be correct."""
    totals = {"loss": loss.detach() * len(targets), "count": len(targets)}
    if targets.dim() == 1:
        totals["correct"] = (outputs.argmax(1) == targets).count_nonzero()
    return totals


def compute_metrics(totals: Mapping[str, Tensor]) -> dict[str, float]:
    """The mean loss; in evaluation, also the accuracy."""
    count = totals["count"].item()
    metrics = {"loss": totals["loss"].item() / count}
    if "correct" in totals:
        metrics["accuracy"] = totals["correct"].item() / count
    return metrics


def metric_for_best_model(metrics: Mapping[str, float]) -> float:
    """The value that decides which checkpoint becomes best.pt; higher is better."""
    return metrics["accuracy"]
