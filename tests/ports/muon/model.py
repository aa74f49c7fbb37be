"""A small causal transformer, its optimizer, which is Muon and AdamW in one, its loss and its metrics.

Muon: Keller Jordan, 2024, https://kellerjordan.github.io/posts/muon; his code is https://github.com/KellerJordan/Muon.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Causal attention and an MLP, each of which is added to its input."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList(nn.RMSNorm(dim) for _ in range(2))
        # Three matrices, and not one of [3 dim, dim]: Muon orthogonalises each.
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [b, t, dim] -> [b, t, dim]."""
        first = self.norms[0](x)
        q, k, v = (part(first).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.norms[1](x))).square())


class Transformer(nn.Module):
    def __init__(self, vocab_size: int, length: int, dim: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, dim), nn.Embedding(length, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(layers)))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [b, t] -> logits [b, t, vocab_size] of the next tokens."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class Muon(torch.optim.Optimizer):
    """Momentum, whose updates are orthogonalised. For matrices only."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Each rank computes all updates. They are the same on all ranks, because the gradients are."""
        for group in self.param_groups:
            for weight in [each for each in group["params"] if each.grad is not None]:
                buffer = self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))
                buffer.lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonalize(weight.grad.lerp(buffer, group["momentum"]))  # Nesterov momentum
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-group["lr"] * max(1, weight.shape[0] / weight.shape[1]) ** 0.5)


def orthogonalize(matrix: Tensor) -> Tensor:
    """matrix [m, n] = U S V^T -> about U V^T, by five iterations of Newton and Schulz."""
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if is_tall else matrix).bfloat16() / (matrix.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if is_tall else x).to(matrix.dtype)


class MuonWithAdamW(torch.optim.Optimizer):
    """Two optimizers that the schedule, GradScaler and the checkpoints see as one."""

    def __init__(self, muon: Muon, adamw: torch.optim.AdamW) -> None:
        self.muon, self.adamw = muon, adamw
        # The dictionaries that the two read, and no copies: the schedule sets their learning rates.
        super().__init__([*muon.param_groups, *adamw.param_groups], {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.muon.step()
        self.adamw.step()

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.muon.load_state_dict(state["muon"])
        self.adamw.load_state_dict(state["adamw"])
        self.param_groups = [*self.muon.param_groups, *self.adamw.param_groups]  # torch has replaced the dictionaries


def build_model(config: Any, train_set: Any) -> nn.Module:
    """The transformer, on the CPU."""
    return Transformer(train_set.vocab_size, config.length, config.dim, config.layers, config.heads)


def build_optimizer(model: nn.Module, config: Any) -> torch.optim.Optimizer:
    """Muon for the matrices of the blocks; AdamW for the embeddings, the norms and the head."""
    matrices = [weight for weight in model.blocks.parameters() if weight.ndim == 2]
    others = [weight for weight in model.parameters() if all(weight is not each for each in matrices)]
    muon = Muon(matrices, config.lr, config.momentum, config.weight_decay)
    adamw = torch.optim.AdamW(others, config.adamw_lr, betas=(0.9, 0.95), weight_decay=config.weight_decay)
    return MuonWithAdamW(muon, adamw)


def forward(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """tokens [b, t] -> logits [b, t, vocab_size]."""
    return model(inputs)


def compute_loss(outputs: Tensor, targets: Tensor, config: Any) -> Tensor:
    """Mean cross-entropy of the next tokens. outputs [b, t, vocab_size], targets [b, t] -> []."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def batch_totals(loss: Tensor, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
    """Sums over the tokens of a batch."""
    return {"loss": loss.detach() * targets.numel(), "tokens": targets.numel()}


def compute_metrics(totals: Mapping[str, Tensor]) -> dict[str, float]:
    """The loss per token, in nats."""
    return {"loss": totals["loss"].item() / totals["tokens"].item()}


def metric_for_best_model(metrics: Mapping[str, float]) -> float:
    """The value that decides which checkpoint becomes best.pt; higher is better."""
    return -metrics["loss"]
