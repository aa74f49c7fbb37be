"""A convolutional speech recogniser with CTC, its optimizer, its loss and its character error rate.

Graves et al., Connectionist Temporal Classification, 2006: https://www.cs.toronto.edu/~graves/icml_2006.pdf
The network reads the waveform, as that of Collobert et al., Wav2Letter, 2016: https://arxiv.org/abs/1609.03193
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLANK = 0
WINDOW, STRIDE, KERNEL = 32, 8, 5  # of the first convolution, in samples; of the others, in frames


class Recogniser(nn.Module):
    """Convolutions over the waveform. The outputs of a sample do not depend on the padding of its batch."""

    def __init__(self, characters: int, width: int, layers: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, width, WINDOW, STRIDE, padding=(WINDOW - STRIDE) // 2)
        self.layers = nn.ModuleList(nn.Conv1d(width, width, KERNEL, padding=KERNEL // 2) for _ in range(layers))
        self.last = nn.Linear(width, 1 + characters)

    def forward(self, waveforms: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """waveforms [b, t], lengths [b] -> log_probs [b, frames, 1 + characters], lengths in frames [b]."""
        x = F.relu(self.first(waveforms[:, None]))  # [b, width, frames]
        frames = lengths // STRIDE
        mask = (torch.arange(x.shape[2], device=x.device) < frames[:, None])[:, None]  # [b, 1, frames]
        x = x * mask
        for layer in self.layers:
            x = x + F.relu(layer(x)) * mask
        return self.last(x.transpose(1, 2)).float().log_softmax(-1), frames


def build_model(config: Any, train_set: Any) -> nn.Module:
    """The recogniser of --width and --layers, for the characters of the data."""
    return Recogniser(len(train_set.characters), config.width, config.layers)


def build_optimizer(model: nn.Module, config: Any) -> torch.optim.Optimizer:
    """AdamW. ddp/training/schedule.py then sets the learning rate of each step."""
    return torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)


def forward(model: nn.Module, inputs: dict[str, Tensor], targets: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Log-probabilities, and the number of frames of each sample."""
    return model(**inputs)


def compute_loss(outputs: tuple[Tensor, Tensor], targets: dict[str, Tensor], config: Any) -> Tensor:
    """The mean over the samples of a batch. The loss of a sample is its CTC loss per character."""
    log_probs, frames = outputs
    texts, lengths = targets["texts"], targets["lengths"]
    return F.ctc_loss(log_probs.transpose(0, 1), texts, frames, lengths, BLANK, reduction="mean", zero_infinity=True)


def batch_totals(loss: Tensor, outputs: tuple[Tensor, Tensor], targets: dict[str, Tensor]) -> dict[str, Any]:
    """The sum of the loss over the samples. In an evaluation, also the number of errors and of characters."""
    count = len(targets["lengths"])
    totals = {"loss": loss.detach() * count, "count": count}
    if not outputs[0].requires_grad:  # in training, decoding would cost time
        padded, lengths = targets["texts"].tolist(), targets["lengths"].tolist()
        texts = [text[:length] for text, length in zip(padded, lengths, strict=True)]
        decoded = greedy_decode(*outputs)
        totals["errors"] = sum(edit_distance(*pair) for pair in zip(decoded, texts, strict=True))
        totals["characters"] = sum(map(len, texts))
    return totals


def compute_metrics(totals: Mapping[str, Tensor]) -> dict[str, float]:
    """The mean loss. In an evaluation, also the character error rate, over all characters of the set."""
    metrics = {"loss": totals["loss"].item() / totals["count"].item()}
    if "errors" in totals:
        metrics["character_error_rate"] = totals["errors"].item() / totals["characters"].item()
    return metrics


def metric_for_best_model(metrics: Mapping[str, float]) -> float:
    """The value that decides which checkpoint becomes best.pt; higher is better."""
    return -metrics["character_error_rate"]


def greedy_decode(log_probs: Tensor, frames: Tensor) -> list[list[int]]:
    """The best symbol of each frame, without repetitions, and then without blanks. One list for each sample."""
    rows = zip(log_probs.argmax(-1).cpu(), frames.tolist(), strict=True)
    best = [row[:length].unique_consecutive() for row, length in rows]
    return [row[row != BLANK].tolist() for row in best]


def edit_distance(found: list[int], text: list[int]) -> int:
    """The number of insertions, deletions and substitutions between two texts (Levenshtein distance)."""
    row = list(range(len(text) + 1))  # the distances of the beginnings of `text` to the characters of `found` so far
    for symbol in found:
        diagonal, row[0] = row[0], row[0] + 1
        for place, wanted in enumerate(text, start=1):
            substituted = diagonal + (symbol != wanted)
            diagonal, row[place] = row[place], min(substituted, row[place] + 1, row[place - 1] + 1)
    return row[-1]
