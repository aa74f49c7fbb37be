"""A diffusion model that predicts noise, on a small U-Net, its optimizer and its loss. --ema 0.99 is the default.

Ho et al., Denoising Diffusion Probabilistic Models, 2020: https://github.com/hojonathanho/diffusion
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FIRST_BETA, LAST_BETA = 1e-4, 0.02  # the share of noise that the first and the last of 1,000 steps add
GROUPS = 8  # of GroupNorm


class ResBlock(nn.Module):
    """Two convolutions and a shortcut. The embedding of the noise step is added between them."""

    def __init__(self, inputs: int, outputs: int, embedding: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(GROUPS, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(GROUPS, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.embed, self.shortcut = nn.Linear(embedding, outputs), nn.Conv2d(inputs, outputs, 1)
        nn.init.zeros_(self.conv2.weight)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        """x [b, inputs, h, w], embedding [b, e] -> [b, outputs, h, w]."""
        hidden = self.conv1(F.silu(self.norm1(x))) + self.embed(embedding)[:, :, None, None]
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(hidden)))


class UNet(nn.Module):
    """Two resolutions. The features of the full one skip the half one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, e = width, 4 * width
        self.embed = nn.Sequential(nn.Linear(width, e), nn.SiLU(), nn.Linear(e, e), nn.SiLU())
        self.first, self.encode = nn.Conv2d(1, width, 3, padding=1), ResBlock(width, width, e)
        self.down, self.widen = nn.Conv2d(width, width, 3, stride=2, padding=1), ResBlock(width, 2 * width, e)
        self.middle, self.up = ResBlock(2 * width, 2 * width, e), nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.decode, self.norm = ResBlock(2 * width, width, e), nn.GroupNorm(GROUPS, width)
        self.last = nn.Conv2d(width, 1, 3, padding=1)
        nn.init.zeros_(self.last.weight)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        """Noisy images x [b, 1, h, w], noise steps [b] -> the noise in them [b, 1, h, w]."""
        embedding = self.embed(sinusoids(step, self.width))
        full = self.encode(self.first(x), embedding)  # [b, width, h, w]
        half = self.middle(self.widen(self.down(full), embedding), embedding)  # [b, 2 * width, h / 2, w / 2]
        decoded = self.decode(torch.cat([full, self.up(half)], 1), embedding)
        return self.last(F.silu(self.norm(decoded)))


class Diffusion(nn.Module):
    """The noise of each step, and a network that predicts it."""

    betas: Tensor
    kept: Tensor

    def __init__(self, network: nn.Module, steps: int) -> None:
        super().__init__()
        self.network, self.steps = network, steps
        betas = (torch.linspace(FIRST_BETA, LAST_BETA, steps, dtype=torch.double) * 1000 / steps).clamp(max=0.999)
        self.register_buffer("betas", betas.float())
        self.register_buffer("kept", (1 - betas).cumprod(0).float())  # of the image, after each step

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """images [b, 1, h, w] -> predicted noise, true noise. Each image gets a random noise step.

        The run seeds torch's generator for each training step and rank, and for each batch of an evaluation.
        """
        step = torch.randint(self.steps, (len(images),), device=images.device)
        noise, kept = torch.randn_like(images), self.kept[step][:, None, None, None]
        return self.network(kept.sqrt() * images + (1 - kept).sqrt() * noise, step), noise

    @torch.no_grad()
    def sample(self, *shape: int) -> Tensor:
        """New images of `shape`, such as (b, 1, 16, 16): pure noise, from which each step removes a part."""
        x = torch.randn(shape, device=self.kept.device)
        for step in reversed(range(self.steps)):
            beta, kept = self.betas[step], self.kept[step]
            noise = self.network(x, torch.full(shape[:1], step, device=x.device))
            x = (x - beta / (1 - kept).sqrt() * noise) / (1 - beta).sqrt()
            x = x + (step > 0) * beta.sqrt() * torch.randn_like(x)  # no noise in the last step
        return x


def sinusoids(step: Tensor, width: int) -> Tensor:
    """Noise steps [b] -> sines and cosines of many frequencies [b, width]."""
    frequencies = torch.exp(-math.log(10_000) * torch.arange(width // 2, device=step.device) / (width // 2))
    angles = step[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], 1)


def build_model(config: Any, train_set: Any) -> nn.Module:
    """A U-Net of --width, and the noise of --noise-steps."""
    return Diffusion(UNet(config.width), config.noise_steps)


def build_optimizer(model: nn.Module, config: Any) -> torch.optim.Optimizer:
    """Adam. ddp/training/schedule.py then sets the learning rate of each step."""
    return torch.optim.Adam(model.parameters(), lr=config.lr)


def forward(model: nn.Module, inputs: Tensor, targets: None) -> tuple[Tensor, Tensor]:
    """Predicted noise and true noise."""
    return model(inputs)


def compute_loss(outputs: tuple[Tensor, Tensor], targets: None, config: Any) -> Tensor:
    """The mean squared error of the predicted noise."""
    return F.mse_loss(*outputs)


def batch_totals(loss: Tensor, outputs: tuple[Tensor, Tensor], targets: None) -> dict[str, Any]:
    """The sum of the loss over the images."""
    return {"loss": loss.detach() * len(outputs[0]), "count": len(outputs[0])}


def compute_metrics(totals: Mapping[str, Tensor]) -> dict[str, float]:
    """The mean loss."""
    return {"loss": totals["loss"].item() / totals["count"].item()}


def metric_for_best_model(metrics: Mapping[str, float]) -> float:
    """The value that decides which checkpoint becomes best.pt; higher is better."""
    return -metrics["loss"]
