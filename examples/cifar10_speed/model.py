"""A small network that learns CIFAR-10 in ten epochs, its optimizer, its loss and its metrics. Edit me.

After airbench94: Keller Jordan, 94% on CIFAR-10 in 3.29 Seconds on a Single GPU, 2024,
https://arxiv.org/abs/2404.00498, https://github.com/KellerJordan/cifar10-airbench.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PATCH = 2  # height and width of the patches that the first layer whitens
PATCH_IMAGES = 2000  # training images from which they are taken
MIN_VARIANCE = 5e-4  # added to the variances of the patches: a smaller one is mostly noise
OUTPUT_SCALE = 1 / 9
BIAS_LR_SCALE = 64  # learning rate of the biases of BatchNorm, relative to all other weights


class Airbench(nn.Sequential):
    """images [b, 3, 32, 32], normalised -> logits [b, classes] float32; in evaluations averaged over `views`."""

    def __init__(self, filters: Tensor, classes: int, width: int, views: int) -> None:
        whitening = nn.Conv2d(3, len(filters), PATCH)
        super().__init__(
            whitening,
            nn.GELU(),  # [b, 24, 31, 31]
            *_block(len(filters), width),  # [b, width, 15, 15]
            *_block(width, 4 * width),  # [b, 4 width, 7, 7]
            *_block(4 * width, 4 * width),  # [b, 4 width, 3, 3]
            nn.MaxPool2d(3),
            nn.Flatten(),
            nn.Linear(4 * width, classes, bias=False),
        )
        self.views = views
        whitening.weight = nn.Parameter(filters, requires_grad=False)
        whitening.bias = nn.Parameter(torch.zeros(len(filters)))

    def forward(self, images: Tensor) -> Tensor:
        return self.logits(images) if self.training or self.views == 1 else self.mean_logits(images)

    def logits(self, images: Tensor) -> Tensor:
        return super().forward(images).float() * OUTPUT_SCALE

    def mean_logits(self, images: Tensor) -> Tensor:
        """Averaged over the images and the flipped images; with 6 views, half of it comes from shifted ones."""
        mean = (self.logits(images) + self.logits(images.flip(3))) / 2
        if self.views == 2:
            return mean
        padded = F.pad(images, (1,) * 4, mode="reflect")
        corners = padded[..., :-2, :-2], padded[..., 2:, 2:]  # shifted by a pixel along the diagonal
        return mean / 2 + sum(self.logits(view) + self.logits(view.flip(3)) for view in corners) / 8


def _block(inputs: int, outputs: int) -> list[nn.Module]:
    """Half the height and width."""
    first, second = _convolution(inputs, outputs), _convolution(outputs, outputs)
    return [first, nn.MaxPool2d(2), _batch_norm(outputs), nn.GELU(), second, _batch_norm(outputs), nn.GELU()]


def _convolution(inputs: int, outputs: int) -> nn.Conv2d:
    """3 x 3. Its first outputs are the inputs, until it is trained."""
    layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    nn.init.dirac_(layer.weight.detach()[:inputs])
    return layer


def _batch_norm(channels: int) -> nn.BatchNorm2d:
    """Its averages follow the last few batches, because the weights change fast."""
    layer = nn.BatchNorm2d(channels, eps=1e-12, momentum=0.4)
    layer.weight.requires_grad_(False)  # 1: the next convolution can scale as well
    return layer


def whitening_filters(images: Tensor) -> Tensor:
    """Filters [2 n, c, PATCH, PATCH] for images [b, c, h, w]: n = c PATCH^2 uncorrelated ones, and their negatives.

    They are the eigenvectors of the patches' covariance, divided by the standard deviations of their outputs.
    """
    patches = F.unfold(images, PATCH).double()  # [b, n, patches of an image]
    covariance = (patches @ patches.mT).mean(0) / patches.shape[2]
    variances, directions = torch.linalg.eigh(covariance)  # a direction is a column
    filters = (directions / (variances + MIN_VARIANCE).sqrt()).T.reshape(-1, images.shape[1], PATCH, PATCH)
    return torch.cat([filters, -filters]).to(images.dtype)


def build_model(config: Any, train_set: Any) -> Airbench:
    """The network, with a first layer for these training images, on the CPU."""
    if hasattr(train_set, "images"):
        samples = train_set.__getitems__(list(range(min(PATCH_IMAGES, len(train_set)))))
        images, _ = train_set.prepare(samples)
    else:
        images = torch.zeros(1, 3, PATCH, PATCH)  # for predict.py, which then loads the filters of a checkpoint
    model = Airbench(whitening_filters(images), len(train_set.classes), config.width, config.test_views)
    return model.to(memory_format=torch.channels_last) if config.channels_last else model


def build_optimizer(model: nn.Module, config: Any) -> torch.optim.Optimizer:
    """SGD with Nesterov momentum. ddp/training/schedule.py then sets the learning rate of each step.

    --lr, --momentum and --weight-decay are independent: you can change one without adapting the others.
    """
    lr = config.lr * (1 - config.momentum)  # momentum multiplies a gradient that stays the same by 1 / (1 - momentum)
    weight_decay = config.weight_decay / config.lr  # SGD multiplies it by the learning rate
    norms = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d | nn.SyncBatchNorm)]
    biases = [layer.bias for layer in norms]
    known = {id(bias) for bias in biases}
    others = [weight for weight in model.parameters() if weight.requires_grad and id(weight) not in known]
    groups: list[dict[str, Any]] = [
        {"params": others, "lr": lr, "weight_decay": weight_decay},
        {"params": biases, "lr": lr * BIAS_LR_SCALE, "weight_decay": weight_decay / BIAS_LR_SCALE},
    ]
    return torch.optim.SGD(groups, momentum=config.momentum, nesterov=True)


def forward(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The outputs of `model`, which is the DDP wrapper in training."""
    return model(inputs)


def compute_loss(outputs: Tensor, targets: Tensor, config: Any) -> Tensor:
    """Mean cross-entropy of a batch, in training with smoothed labels. outputs [b, classes], targets [b] -> []."""
    smoothing = config.label_smoothing if torch.is_grad_enabled() else 0.0
    return F.cross_entropy(outputs, targets, label_smoothing=smoothing)


def batch_totals(loss: Tensor, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
    """Sums over the samples of a batch, which are added up over batches and ranks."""
    correct = (outputs.argmax(1) == targets).sum()
    return {"loss": loss.detach() * len(targets), "correct": correct, "count": len(targets)}


def compute_metrics(totals: Mapping[str, Tensor]) -> dict[str, float]:
    """The metrics to log, from the totals over all samples: the mean loss, and the accuracy in 0 to 1."""
    count = totals["count"].item()
    return {"loss": totals["loss"].item() / count, "accuracy": totals["correct"].item() / count}


def metric_for_best_model(metrics: Mapping[str, float]) -> float:
    """The value that decides which checkpoint becomes best.pt; higher is better."""
    return metrics["accuracy"]
