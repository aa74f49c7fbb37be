"""DCGAN: a generator, a discriminator, their optimizer, their losses and their metrics. Edit me.

Radford, Metz and Chintala, 2015, https://arxiv.org/abs/1511.06434; the layers of pytorch/examples/dcgan, for 32 x 32.
main.py trains the two networks in turn. `forward` passes through both: for evaluations, benchmark.py and the tests.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# What the discriminator judges, and the answer that lowers the loss: real images and generated ones, for its own loss;
# and generated ones again, for the loss of the generator, which tries to make it answer `real`.
LABELS = {"real": 1.0, "fake": 0.0, "fooled": 1.0}
GROUPS = 8  # of channels, in the discriminator's GroupNorm


class Generator(nn.Sequential):
    """noise [b, noise] -> images [b, 3, 32, 32] in -1 to 1."""

    def __init__(self, noise: int, width: int) -> None:
        super().__init__(
            nn.Unflatten(1, (noise, 1, 1)),
            *_up(noise, 4 * width, stride=1, padding=0),  # [b, 4 width, 4, 4]
            *_up(4 * width, 2 * width),  # [b, 2 width, 8, 8]
            *_up(2 * width, width),  # [b, width, 16, 16]
            nn.ConvTranspose2d(width, 3, 4, stride=2, padding=1, bias=False),
            nn.Tanh(),
        )


class Discriminator(nn.Sequential):
    """images [b, 3, 32, 32] -> logits [b]: positive for images that look real."""

    def __init__(self, width: int) -> None:
        super().__init__(
            nn.Conv2d(3, width, 4, stride=2, padding=1, bias=False),  # [b, width, 16, 16]
            nn.LeakyReLU(0.2),
            *_down(width, 2 * width),  # [b, 2 width, 8, 8]
            *_down(2 * width, 4 * width),  # [b, 4 width, 4, 4]
            nn.Conv2d(4 * width, 1, 4, bias=False),
            nn.Flatten(0),
        )


class DCGAN(nn.Module):
    """Both networks. main.py gives each one a DDP wrapper and an optimizer of its own."""

    def __init__(self, noise: int, width: int) -> None:
        super().__init__()
        self.generator, self.discriminator = Generator(noise, width), Discriminator(width)
        for part in self.modules():
            if isinstance(part, nn.Conv2d | nn.ConvTranspose2d):
                nn.init.normal_(part.weight, 0.0, 0.02)
            elif isinstance(part, nn.BatchNorm2d | nn.GroupNorm):
                nn.init.normal_(part.weight, 1.0, 0.02)

    def forward(self, images: Tensor, noise: Tensor) -> dict[str, Tensor]:
        """One pass through everything: the logits of LABELS, each [b], and the images."""
        generated = self.generator(noise)
        return {
            "real": self.discriminator(images),
            "fake": self.discriminator(generated.detach()),
            "fooled": judge(self.discriminator, generated),
            "images": images,
            "generated": generated.detach(),
        }


def judge(discriminator: nn.Module, images: Tensor) -> Tensor:
    """The discriminator's logits, with its weights held constant: a gradient reaches only what made the images."""
    constants = {name: weight.detach() for name, weight in discriminator.named_parameters()}
    return torch.func.functional_call(discriminator, constants, images)


def build_model(config: Any, train_set: Any) -> DCGAN:
    """Both networks, on the CPU."""
    return DCGAN(train_set.targets.shape[1], config.width)


def build_optimizer(model: nn.Module, config: Any) -> torch.optim.Optimizer:
    """Adam, for one of the networks or for both. ddp/training/schedule.py then sets the learning rate of each step."""
    return torch.optim.Adam(model.parameters(), lr=config.lr, betas=(config.beta1, config.beta2))


def forward(model: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """The outputs of the DCGAN, or of a wrapper around it, for images `inputs` and noise `targets`."""
    return model(inputs, targets)


def compute_loss(outputs: Mapping[str, Tensor], targets: Tensor, config: Any) -> Tensor:
    """The sum of the losses of those logits that are in `outputs` -> [].

    If all are, a backward pass gives each network the gradient of its own losses, because the others hold it constant.
    """
    return torch.stack([_loss(name, outputs[name]) for name in LABELS if name in outputs]).sum()


def batch_totals(loss: Tensor, outputs: Mapping[str, Tensor], targets: Tensor) -> dict[str, Any]:
    """Sums over the samples of a batch, which are added up over batches and ranks; for the logits in `outputs`.

    The total `loss` is not logged. It is that of both networks: a run ends when either is no longer finite.
    """
    totals: dict[str, Any] = {"loss": loss.detach() * len(targets)}
    for name in (name for name in LABELS if name in outputs):
        logits = outputs[name].detach()
        right = (logits > 0) == (LABELS[name] > 0)
        totals[name] = torch.stack([_loss(name, logits) * len(logits), right.sum(), logits.new_full((), len(logits))])
    for name in (name for name in ("images", "generated") if name in outputs):
        pixels = F.adaptive_avg_pool2d(outputs[name].float(), 4).flatten(1)  # 4 x 4 colours
        totals[name] = torch.stack([pixels.sum(0), pixels.square().sum(0)])
    return totals


def compute_metrics(totals: Mapping[str, Tensor]) -> dict[str, float]:
    """The metrics to log.

    loss, loss_g: the losses of the discriminator and of the generator. Each rises when the other one falls.
    accuracy: the part of the real and of the generated images that the discriminator tells apart; 0.5 is a guess.
    distance: how far the means and deviations of the colours in 4 x 4 places of the generated images are from those of
    the real ones. It is the Wasserstein distance of the two normal distributions. Only in evaluations.
    """
    (real, real_right), (fake, fake_right), (fooled, _) = (
        (totals[name][:2] / totals[name][2]).tolist() for name in LABELS
    )
    metrics = {"loss": real + fake, "loss_g": fooled, "accuracy": (real_right + fake_right) / 2}
    if "generated" in totals:
        mean, mean_square = torch.stack([totals["images"], totals["generated"]], 1) / totals["real"][2]
        deviation = (mean_square - mean**2).clamp(min=0).sqrt()
        squares = [(part[0] - part[1]).square().sum() for part in (mean, deviation)]
        metrics["distance"] = sum(squares).sqrt().item()
    return metrics


def metric_for_best_model(metrics: Mapping[str, float]) -> float:
    """The value that decides which checkpoint becomes best.pt; higher is better. No loss of a GAN measures quality."""
    return -metrics["distance"]


def _loss(name: str, logits: Tensor) -> Tensor:
    logits = logits.float()
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, LABELS[name]))


def _up(inputs: int, outputs: int, stride: int = 2, padding: int = 1) -> tuple[nn.Module, ...]:
    """Twice the height and width."""
    convolution = nn.ConvTranspose2d(inputs, outputs, 4, stride, padding, bias=False)
    return convolution, nn.BatchNorm2d(outputs), nn.ReLU()


def _down(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    """Half the height and width."""
    # Not BatchNorm: real and generated images come in different batches, so in an evaluation its averages would fit
    # neither of them. GroupNorm looks at one image at a time.
    return nn.Conv2d(inputs, outputs, 4, 2, 1, bias=False), nn.GroupNorm(GROUPS, outputs), nn.LeakyReLU(0.2)
