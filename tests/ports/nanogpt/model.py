"""A GPT in the form of nanoGPT (https://github.com/karpathy/nanoGPT), its optimizer, its loss and its metrics."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True  # of the Linear and LayerNorm layers


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        assert config.n_embd % config.n_head == 0
        self.n_head, self.dropout = config.n_head, config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = (part.view(B, T, self.n_head, -1).transpose(1, 2) for part in self.c_attn(x).split(C, dim=2))
        dropout = self.dropout if self.training else 0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(config.vocab_size, config.n_embd),
                wpe=nn.Embedding(config.block_size, config.n_embd),
                drop=nn.Dropout(config.dropout),
                h=nn.ModuleList(Block(config) for _ in range(config.n_layer)),
                ln_f=nn.LayerNorm(config.n_embd, bias=config.bias),
            )
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight  # weight tying
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():  # scaled for the residual connections, as in GPT-2
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """idx [b, t], targets [b, t] -> logits [b, t, vocab_size] and their loss; without targets, the last logits."""
        pos = torch.arange(idx.size(1), dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)

    def configure_optimizers(
        self, weight_decay: float, learning_rate: float, betas: tuple[float, float], device_type: str
    ) -> torch.optim.Optimizer:
        """AdamW. The weights of matrix products and embeddings decay; biases and LayerNorms do not."""
        param_dict = {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}
        decay_params = [parameter for parameter in param_dict.values() if parameter.dim() >= 2]
        nodecay_params = [parameter for parameter in param_dict.values() if parameter.dim() < 2]
        optim_groups = [
            {"params": decay_params, "weight_decay": weight_decay},
            {"params": nodecay_params, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(optim_groups, lr=learning_rate, betas=betas, fused=device_type == "cuda")


def build_model(config: Any, train_set: Any) -> nn.Module:
    """The GPT of --n-layer, --n-head and --n-embd, for the tokens of the data."""
    names = ("block_size", "n_layer", "n_head", "n_embd", "dropout", "bias")
    return GPT(GPTConfig(vocab_size=train_set.vocab_size, **{name: getattr(config, name) for name in names}))


def build_optimizer(model: nn.Module, config: Any) -> torch.optim.Optimizer:
    """The optimizer that the model configures."""
    device_type = next(model.parameters()).device.type
    return model.configure_optimizers(config.weight_decay, config.lr, (config.beta1, config.beta2), device_type)


def forward(model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and loss."""
    return model(inputs, targets)


def compute_loss(outputs: tuple[Tensor, Tensor], targets: Tensor, config: Any) -> Tensor:
    """The mean cross-entropy of the next token, in nats, which the model has computed."""
    return outputs[1]


def batch_totals(loss: Tensor, outputs: tuple[Tensor, Tensor], targets: Tensor) -> dict[str, Any]:
    """Sums over the tokens of a batch."""
    return {"loss": loss.detach() * targets.numel(), "tokens": targets.numel()}


def compute_metrics(totals: Mapping[str, Tensor]) -> dict[str, float]:
    """The loss per token, and the perplexity."""
    loss = totals["loss"].item() / totals["tokens"].item()
    return {"loss": loss, "perplexity": math.exp(loss)}


def metric_for_best_model(metrics: Mapping[str, float]) -> float:
    """The value that decides which checkpoint becomes best.pt; higher is better."""
    return -metrics["loss"]
