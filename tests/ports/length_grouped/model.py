"""A GRU that classifies padded texts, its optimizer, its loss and its metrics.

The order of the samples, in data.py, is that of LengthGroupedSampler of https://github.com/huggingface/transformers.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data import PAD


class Outputs(NamedTuple):
    """logits [b, classes], and the number of places and of tokens in the padded batch."""

    logits: Tensor
    places: int
    tokens: Tensor


class Classifier(nn.Module):
    """The mean of a GRU's outputs over the tokens of a text, and a linear layer."""

    def __init__(self, vocab_size: int, width: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width, padding_idx=PAD)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [b, t] -> logits [b, classes]. Padding follows the text, so the GRU reads it last."""
        is_token = (tokens != PAD).unsqueeze(2)  # [b, t, 1]
        outputs, _ = self.gru(self.embedding(tokens))  # [b, t, width]
        return self.head((outputs * is_token).sum(1) / is_token.sum(1))


def build_model(config: Any, train_set: Any) -> nn.Module:
    """The classifier, on the CPU."""
    return Classifier(train_set.vocab_size, config.width, len(train_set.classes))


def build_optimizer(model: nn.Module, config: Any) -> torch.optim.Optimizer:
    """AdamW. ddp/training/schedule.py then sets the learning rate of each step."""
    return torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)


def forward(model: nn.Module, inputs: Tensor, targets: Tensor) -> Outputs:
    """tokens [b, t] -> logits [b, classes], and what batch_totals needs to measure the padding."""
    return Outputs(model(inputs), inputs.numel(), (inputs != PAD).count_nonzero())


def compute_loss(outputs: Outputs, targets: Tensor, config: Any) -> Tensor:
    """Mean cross-entropy of a batch. logits [b, classes], targets [b] -> []."""
    return F.cross_entropy(outputs.logits, targets)


def batch_totals(loss: Tensor, outputs: Outputs, targets: Tensor) -> dict[str, Any]:
    """Sums over the samples of a batch."""
    return {
        "loss": loss.detach() * len(targets),
        "correct": (outputs.logits.argmax(1) == targets).count_nonzero(),
        "count": len(targets),
        "places": outputs.places,
        "tokens": outputs.tokens,
    }


def compute_metrics(totals: Mapping[str, Tensor]) -> dict[str, float]:
    """The mean loss, the accuracy, and the part of the places that is padding, both in 0 to 1."""
    count = totals["count"].item()
    return {
        "loss": totals["loss"].item() / count,
        "accuracy": totals["correct"].item() / count,
        "padding": 1 - totals["tokens"].item() / totals["places"].item(),
    }


def metric_for_best_model(metrics: Mapping[str, float]) -> float:
    """The value that decides which checkpoint becomes best.pt; higher is better."""
    return metrics["accuracy"]
