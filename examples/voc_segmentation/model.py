"""DeepLabV3, its optimizer, its loss and its metrics. Edit me: main.py imports all public functions."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

IGNORE = 255  # the borders of objects, and what is outside the image


def build_model(config: Any, train_set: Any) -> nn.Module:
    """The segmentation model of torchvision for --model, on the CPU. Raises ModelError if there is no such model."""
    names = torchvision.models.list_models(module=torchvision.models.segmentation)
    if config.model not in names:
        raise ModelError(f"--model {config.model}: not one of torchvision's segmentation models: {', '.join(names)}")
    model = torchvision.models.get_model(
        config.model, weights=None, weights_backbone=None, num_classes=len(train_set.classes), aux_loss=False
    )
    for part in model.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            part.momentum = 0.1  # MobileNetV3 has 0.01: its statistics would lag by hundreds of steps
    return model.to(memory_format=torch.channels_last) if config.channels_last else model


def build_optimizer(model: nn.Module, config: Any) -> torch.optim.Optimizer:
    """SGD; the head learns ten times as fast as the backbone."""
    parts = [
        {"params": model.backbone.parameters(), "lr": 0.1 * config.lr},  # type: ignore[union-attr]
        {"params": model.classifier.parameters(), "lr": config.lr},  # type: ignore[union-attr]
    ]
    return torch.optim.SGD(parts, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)


def forward(model: nn.Module, inputs: Tensor, targets: Tensor) -> Any:
    """The outputs of `model`, which is the DDP wrapper in training."""
    return model(inputs)


def compute_loss(outputs: dict[str, Tensor], targets: Tensor, config: Any) -> Tensor:
    """Mean cross-entropy of the pixels that count. outputs["out"] [b, classes, h, w], targets [b, h, w] -> []."""
    total = F.cross_entropy(outputs["out"], targets, ignore_index=IGNORE, reduction="sum")
    return total / loss_terms(outputs, targets).clamp(min=1)  # a batch without any such pixel: 0, not 0 / 0


def loss_terms(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    """The pixels that count: the loss of a step is the mean over those of the global batch."""
    return (targets != IGNORE).sum()


def batch_totals(loss: Tensor, outputs: dict[str, Tensor], targets: Tensor) -> dict[str, Any]:
    """Totals to add up over batches and ranks: loss, pixels, and the confusion matrix [classes, classes]."""
    classes, valid = outputs["out"].shape[1], targets != IGNORE
    pairs = targets * classes + outputs["out"].argmax(1)  # row: true class; column: predicted class
    # Not targets[valid] and bincount: to know a size, they would wait for the GPU.
    pairs = torch.where(valid, pairs, classes**2).flatten()
    pixels = torch.zeros(classes**2 + 1, dtype=torch.long, device=pairs.device)
    pixels.scatter_add_(0, pairs, torch.ones_like(pairs))
    count = valid.sum()
    return {
        "loss": loss.detach() * count,
        "count": count,
        "confusion": pixels[:-1].view(classes, classes),
    }


def compute_metrics(totals: Mapping[str, Tensor]) -> dict[str, float]:
    """The metrics to log: the loss, the accuracy over pixels, and the mean IoU over classes, in 0 to 1.

    IoU of a class: the pixels that are it and are predicted as it, over those that are it or are predicted as it.
    Everingham et al., The PASCAL VOC Challenge, 2010.
    """
    confusion, count = totals["confusion"], max(totals["count"].item(), 1)
    found, union = confusion.diag(), confusion.sum(0) + confusion.sum(1) - confusion.diag()
    there = union > 0  # an absent class has no IoU
    iou = (found[there] / union[there]).mean().item() if there.any() else 0.0
    return {"loss": totals["loss"].item() / count, "accuracy": found.sum().item() / count, "mean_iou": iou}


def metric_for_best_model(metrics: Mapping[str, float]) -> float:
    """The value that decides which checkpoint becomes best.pt; higher is better."""
    return metrics["mean_iou"]


class ModelError(ValueError):
    """A model that cannot be built. Its exit_code makes it one line without a traceback: see ddp/core/errors.py."""

    exit_code = 2
    on_every_rank = True
