"""A small transformer over characters, its optimizer, its loss and its metrics. Edit me."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp.data.dataset import IGNORED_LABEL

HEAD_WIDTH, DROPOUT = 32, 0.1


class Block(nn.Module):
    """Attention to earlier characters, then a small network per character; both with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        """x [b, t, width] -> [b, t, width]."""
        b, t, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, t, 3, width // HEAD_WIDTH, HEAD_WIDTH)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [b, heads, t, HEAD_WIDTH]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(b, t, width)))
        return x + self.dropout(self.network(self.norm2(x)))


class Transformer(nn.Module):
    """Predicts the next character at each place of a text. Vaswani et al., 2017, https://arxiv.org/abs/1706.03762."""

    def __init__(self, characters: int, context: int, width: int = 128, layers: int = 3) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(characters, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)

    def forward(self, text: Tensor) -> Tensor:
        """text [b, t] of character numbers -> logits of the next ones [b, t, characters]."""
        x = self.embed(text) + self.place.weight[: text.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def build_model(config: Any, train_set: Any) -> nn.Module:
    """The model, sized to the text, on the CPU."""
    return Transformer(train_set.characters, train_set.context, config.width, config.layers)


def build_optimizer(model: nn.Module, config: Any) -> torch.optim.Optimizer:
    """AdamW. ddp/training/schedule.py then sets the learning rate of each step."""
    betas = config.beta1, config.beta2
    return torch.optim.AdamW(model.parameters(), lr=config.lr, betas=betas, weight_decay=config.weight_decay)


def forward(model: nn.Module, inputs: Tensor, targets: Tensor) -> Any:
    """The outputs of `model`, which is the DDP wrapper in training."""
    return model(inputs)


def compute_loss(outputs: Tensor, targets: Tensor, config: Any) -> Tensor:
    """Mean cross-entropy of the next character, in nats. outputs [b, t, characters], targets [b, t] -> []."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_LABEL)


def loss_terms(outputs: Tensor, targets: Tensor) -> Tensor:
    """How many terms the loss of a batch is a mean of: its characters that are not padding.

    main.py weights the loss of each process and pass with it. So a step has the mean of its whole global batch.
    """
    return (targets != IGNORED_LABEL).sum()


def batch_totals(loss: Tensor, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
    """Sums over the characters of a batch, which are added up over batches and ranks."""
    terms = loss_terms(outputs, targets)
    total = torch.where(terms > 0, loss.detach(), 0) * terms  # without terms, loss is 0 / 0
    return {"loss": total, "count": terms, "tokens": terms}


def compute_metrics(totals: Mapping[str, Tensor]) -> dict[str, float]:
    """The metrics to log: the loss in nats and in bits per character, and the perplexity."""
    loss = totals["loss"].item() / totals["count"].item()
    return {"loss": loss, "bits": loss / math.log(2), "perplexity": math.exp(loss)}


def metric_for_best_model(metrics: Mapping[str, float]) -> float:
    """The value that decides which checkpoint becomes best.pt; higher is better."""
    return -metrics["loss"]
