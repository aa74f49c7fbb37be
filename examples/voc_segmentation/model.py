"""DeepLabV3, its loss and its scores. Edit me: main.py needs all public functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

IGNORE = 255  # borders of objects, and what lies outside of an image


def build_model(config: Any, train_set: Any) -> nn.Module:
    """The segmentation model of torchvision that --model names, on the CPU; by default deeplabv3_resnet101.

    For made-up pictures it is a small one, since on a CPU a step of the large one takes minutes.
    """
    default = "lraspp_mobilenet_v3_large" if config.dataset == "synthetic" else "deeplabv3_resnet101"
    name = default if config.model == "ToyModel" else config.model
    names = torchvision.models.list_models(module=torchvision.models.segmentation)
    if name not in names:
        raise BadModel(f"--model {name}: not one of torchvision's segmentation models: {', '.join(names)}")
    model = torchvision.models.get_model(
        name, weights=None, weights_backbone=None, num_classes=len(train_set.classes), aux_loss=False
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


def compute_loss(outputs: dict[str, Tensor], targets: Tensor, config: Any) -> Tensor:
    """Mean cross-entropy of the pixels that count. outputs["out"] [b, classes, h, w], targets [b, h, w] -> [].

    DDP takes the mean of the ranks' means: where fewer pixels of a rank's batch count, each of those weighs more.
    """
    total = F.cross_entropy(outputs["out"], targets, ignore_index=IGNORE, reduction="sum")
    return total / (targets != IGNORE).sum().clamp(min=1)  # a batch without any such pixel: 0, not 0 / 0


def sums(loss: Tensor, outputs: dict[str, Tensor], targets: Tensor) -> dict[str, Any]:
    """What is added up over batches and ranks: the loss, the pixels, and the confusion matrix [classes, classes]."""
    classes, valid = outputs["out"].shape[1], targets != IGNORE
    pairs = targets[valid] * classes + outputs["out"].argmax(1)[valid]  # row: what is there; column: what is found
    count = valid.sum()
    return {
        "loss": loss.detach() * count,
        "count": count,
        "confusion": torch.bincount(pairs, minlength=classes**2).view(classes, classes),
    }


def scores(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """The scores that are logged: the loss, the accuracy over pixels, and the mean IoU over classes, in 0 to 1.

    IoU of a class: pixels that are it and are found, over those that are it or are found. Everingham et al., 2010.
    """
    confusion, count = sums["confusion"], max(sums["count"].item(), 1)
    found, union = confusion.diag(), confusion.sum(0) + confusion.sum(1) - confusion.diag()
    there = union > 0  # a class that is nowhere has no IoU
    iou = (found[there] / union[there]).mean().item() if there.any() else 0.0
    return {"loss": sums["loss"].item() / count, "accuracy": found.sum().item() / count, "mean_iou": iou}


def figure_of_merit(scores: Mapping[str, float]) -> float:
    """What best.pt is chosen by; higher is better."""
    return scores["mean_iou"]


class BadModel(ValueError):
    """A model that cannot be built. Its exit_code makes it one line without a traceback; see ddp/errors.py."""

    exit_code = 2
    on_every_rank = True
