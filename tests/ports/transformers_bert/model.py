"""A small BERT for text classification from transformers, its optimizer and its metrics."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BatchEncoding, BertConfig, BertForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutput

NO_DECAY = ("bias", "LayerNorm.weight")


def build_model(config: Any, train_set: Any) -> nn.Module:
    """A BERT with random weights. For trained ones: BertForSequenceClassification.from_pretrained."""
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=train_set.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            intermediate_size=4 * config.hidden_size,
            max_position_embeddings=train_set.max_length,
            num_labels=2,
        )
    )


def build_optimizer(model: nn.Module, config: Any) -> torch.optim.Optimizer:
    """AdamW, without weight decay for biases and LayerNorms."""
    named = list(model.named_parameters())
    groups = [
        {
            "params": [weight for name, weight in named if not name.endswith(NO_DECAY)],
            "weight_decay": config.weight_decay,
        },
        {"params": [weight for name, weight in named if name.endswith(NO_DECAY)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr)


def forward(model: nn.Module, inputs: BatchEncoding, targets: Tensor) -> SequenceClassifierOutput:
    """Loss and logits."""
    return model(**inputs)


def compute_loss(outputs: SequenceClassifierOutput, targets: Tensor, config: Any) -> Tensor:
    """The mean cross-entropy, which the model has computed from its argument `labels`."""
    return outputs.loss


def batch_totals(loss: Tensor, outputs: SequenceClassifierOutput, targets: Tensor) -> dict[str, Any]:
    """The sum of the loss, and lists of all predictions and labels."""
    return {
        "loss": loss.detach() * len(targets),
        "predictions": outputs.logits.argmax(-1).tolist(),
        "labels": targets.tolist(),
    }


def compute_metrics(totals: Mapping[str, Any]) -> dict[str, float]:
    """The mean loss, the accuracy, and the F1 score of class 1."""
    predictions, labels = torch.tensor(totals["predictions"]), torch.tensor(totals["labels"])
    hits = ((predictions == 1) & (labels == 1)).sum().item()
    positives = (predictions == 1).sum().item() + (labels == 1).sum().item()
    return {
        "loss": totals["loss"].item() / len(labels),
        "accuracy": (predictions == labels).float().mean().item(),
        "f1": 2 * hits / max(positives, 1),
    }


def metric_for_best_model(metrics: Mapping[str, float]) -> float:
    """The value that decides which checkpoint becomes best.pt; higher is better."""
    return metrics["f1"]
