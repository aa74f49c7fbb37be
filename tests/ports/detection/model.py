"""Faster R-CNN on a small backbone, its optimizer, its losses and the average precision. Edit me."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.ops import MultiScaleRoIAlign, box_iou

WIDTH, POOLED, FEATURES = 32, 4, 64
STRIDE = 8  # of the backbone
MIN_IOU = 0.5  # of a detection with the box that it finds


def build_model(config: Any, train_set: Any) -> nn.Module:
    """The model, sized to the classes, on the CPU."""
    backbone = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, WIDTH, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1), nn.ReLU()),
    )
    backbone.out_channels = WIDTH  # type: ignore[assignment]
    return FasterRCNN(
        backbone,
        # Otherwise images would be padded to the largest one of their batch, and would depend on it. MultiScaleRoIAlign
        # would also derive its stride from the first batch, and not save it: a resumed run could derive another one.
        fixed_size=(config.image_size, config.image_size),
        size_divisible=STRIDE,
        rpn_anchor_generator=AnchorGenerator(sizes=((10, 16, 24),), aspect_ratios=((0.5, 1.0, 2.0),)),
        rpn_pre_nms_top_n_train=100,
        rpn_pre_nms_top_n_test=100,
        rpn_post_nms_top_n_train=30,
        rpn_post_nms_top_n_test=30,
        rpn_batch_size_per_image=64,  # so many that each image has them: then a mean over them is one over images
        box_roi_pool=MultiScaleRoIAlign(featmap_names=["0"], output_size=POOLED, sampling_ratio=2),
        box_head=TwoMLPHead(WIDTH * POOLED**2, FEATURES),
        box_predictor=FastRCNNPredictor(FEATURES, len(train_set.classes)),
        box_batch_size_per_image=8,  # likewise
        box_detections_per_img=10,
    )


def build_optimizer(model: nn.Module, config: Any) -> torch.optim.Optimizer:
    """AdamW. ddp/training/schedule.py then sets the learning rate of each step."""
    return torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)


def forward(model: nn.Module, inputs: list[Tensor], targets: list[dict[str, Tensor]]) -> Any:
    """In training the losses, as a dictionary. In an evaluation the detections in each image, without a loss."""
    return model(inputs, targets) if model.training else model(inputs)


def compute_loss(outputs: Any, targets: list[dict[str, Tensor]], config: Any) -> Tensor | None:
    """The sum of the four losses. None in an evaluation."""
    return sum(outputs.values()) if isinstance(outputs, dict) else None  # type: ignore[return-value]


def batch_totals(loss: Tensor | None, outputs: Any, targets: list[dict[str, Tensor]]) -> dict[str, Any]:
    """In training the loss. In an evaluation the detections and the true boxes of each image."""
    if loss is not None:
        return {"loss": loss.detach() * len(targets), "count": len(targets)}
    return {"count": len(targets), "detections": outputs, "truths": targets}


def compute_metrics(totals: Mapping[str, Any]) -> dict[str, float]:
    """In training the mean loss. In an evaluation the mean over classes of recall and average precision, in 0 to 1.

    And the mean score of the detections.
    """
    if "loss" in totals:
        return {"loss": totals["loss"].item() / totals["count"].item()}
    detections, truths = totals["detections"], totals["truths"]
    classes = sorted({label for truth in truths for label in truth["labels"].tolist()})
    found = torch.tensor([recall_and_precision(detections, truths, label) for label in classes]).mean(0)
    score = torch.cat([detected["scores"] for detected in detections]).double().mean().nan_to_num()
    return {"recall": found[0].item(), "average_precision": found[1].item(), "score": score.item()}


def metric_for_best_model(metrics: Mapping[str, float]) -> float:
    """The value that decides which checkpoint becomes best.pt; higher is better."""
    return metrics["average_precision"]


def recall_and_precision(
    detections: list[dict[str, Tensor]], truths: list[dict[str, Tensor]], label: int
) -> tuple[float, float]:
    """The recall and the average precision of one class, over all images.

    Everingham et al., The PASCAL VOC Challenge, 2010: the area under the precision at each recall.
    """
    scores, hits, boxes = [], [], 0
    for detected, truth in zip(detections, truths, strict=True):
        wanted, chosen = truth["boxes"][truth["labels"] == label], detected["labels"] == label
        iou = box_iou(detected["boxes"][chosen], wanted)  # sorted by score already
        boxes += len(wanted)
        for score, row in zip(detected["scores"][chosen].tolist(), iou, strict=True):
            best = int(row.argmax()) if len(wanted) else 0
            hit = len(wanted) > 0 and row[best].item() >= MIN_IOU
            if hit:
                iou[:, best] = 0  # a box counts once
            scores.append(score)
            hits.append(hit)
    order = torch.tensor(scores).argsort(descending=True, stable=True)
    right = torch.tensor(hits, dtype=torch.double)[order]
    precision = right.cumsum(0) / torch.arange(1, len(right) + 1)
    envelope = precision.flip(0).cummax(0).values.flip(0)  # the best precision at this recall or a higher one
    return right.sum().item() / boxes, (envelope * right).sum().item() / boxes
