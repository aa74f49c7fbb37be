"""A frozen Transformer with LoRA adapters, its optimizer, its loss and its metrics. A checkpoint holds what is trained.

Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021: https://github.com/microsoft/LoRA
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, LAYERS, HEADS = 64, 2, 4  # of the pretrained model
PRETRAINED_SEED = 2021


class LoRALinear(nn.Linear):
    """A linear layer that adds the product of two small matrices to its frozen matrix: W + scale * B A."""

    def __init__(self, inputs: int, outputs: int, rank: int, alpha: float) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.scale = alpha / rank
        self.lora_A = nn.Parameter(torch.empty(rank, inputs))
        self.lora_B = nn.Parameter(torch.zeros(outputs, rank))  # so the first outputs are those of W alone
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] -> [..., outputs]."""
        return super().forward(x) + self.scale * F.linear(F.linear(x, self.lora_A), self.lora_B)


class Block(nn.Module):
    """Attention and two linear layers. `linear` makes each linear layer."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """x [b, t, WIDTH] -> the same shape."""
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(2, (HEADS, -1)).transpose(1, 2) for part in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Classifier(nn.Module):
    """Tokens and their places, blocks, the mean over the text, and a head."""

    def __init__(self, vocab_size: int, length: int, classes: int, linear: Any) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab_size, WIDTH), nn.Embedding(length, WIDTH)
        self.blocks = nn.Sequential(*(Block(linear) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, classes)

    def forward(self, texts: Tensor) -> Tensor:
        """texts [b, t] -> logits [b, classes]."""
        x = self.tokens(texts) + self.places.weight[: texts.shape[1]]
        return self.head(self.norm(self.blocks(x)).mean(1))


def build_model(config: Any, train_set: Any) -> nn.Module:
    """The pretrained model, frozen, with adapters of --lora-rank and a new head, which are trained."""
    linear = partial(LoRALinear, rank=config.lora_rank, alpha=config.lora_alpha)
    model = Classifier(train_set.vocab_size, train_set.length, len(train_set.classes), linear)
    for name, weight in model.named_parameters():
        weight.requires_grad_("lora_" in name or name.startswith("head."))
    model.load_state_dict(pretrained_weights(model), strict=False)
    save_trained_only(model)
    return model


def pretrained_weights(model: nn.Module) -> dict[str, Tensor]:
    """The frozen matrices. In your project: torch.load of a file. Here: random, and the same for each --seed."""
    generator = torch.Generator().manual_seed(PRETRAINED_SEED)
    frozen = ((name, weight.shape) for name, weight in model.named_parameters() if not weight.requires_grad)
    return {name: torch.randn(shape, generator=generator) / shape[1] ** 0.5 for name, shape in frozen if len(shape) > 1}


def save_trained_only(model: nn.Module) -> None:
    """Leave the frozen weights out of the model's state_dict. load_state_dict then does not ask for them."""
    # By name: in the copy that --ema makes, all weights are frozen.
    frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]

    def leave_out(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in frozen:
            del state[prefix + name]

    def fill_in(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state.update({prefix + name: module.get_parameter(name) for name in frozen})

    model.register_state_dict_post_hook(leave_out)
    model.register_load_state_dict_pre_hook(fill_in)


def build_optimizer(model: nn.Module, config: Any) -> torch.optim.Optimizer:
    """AdamW of the adapters and the head. ddp/training/schedule.py then sets the learning rate of each step."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return torch.optim.AdamW(trained, lr=config.lr, weight_decay=config.weight_decay)


def forward(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Logits."""
    return model(inputs)


def compute_loss(outputs: Tensor, targets: Tensor, config: Any) -> Tensor:
    """The mean cross-entropy. outputs [b, classes], targets [b] -> []."""
    return F.cross_entropy(outputs, targets)


def batch_totals(loss: Tensor, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
    """Sums over the samples of a batch."""
    correct = (outputs.argmax(1) == targets).count_nonzero()
    return {"loss": loss.detach() * len(targets), "correct": correct, "count": len(targets)}


def compute_metrics(totals: Mapping[str, Tensor]) -> dict[str, float]:
    """The mean loss, and the accuracy in 0 to 1."""
    count = totals["count"].item()
    return {"loss": totals["loss"].item() / count, "accuracy": totals["correct"].item() / count}


def metric_for_best_model(metrics: Mapping[str, float]) -> float:
    """The value that decides which checkpoint becomes best.pt; higher is better."""
    return metrics["accuracy"]
