"""Model FLOPs utilization (MFU): the FLOPs that the model needs, as a part of what the GPU could do meanwhile.

Chowdhery et al., PaLM, 2022, https://arxiv.org/abs/2204.02311, appendix B.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch

from ddp.core.parts import Callback
from ddp.distributed.seeds import keep_random_state
from ddp.distributed.tensors import leaves, map_tensors

# Dense bf16 products per second, of fp16 where a GPU has no bf16, by a part of its name: the vendor's data sheets.
PEAKS = {
    **{"B200": 2250e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12},
    **{"A100": 312e12, "A800": 312e12, "A40": 150e12, "A30": 165e12, "A10G": 70e12, "A10": 125e12, "A6000": 155e12},
    **{"L40S": 362e12, "L40": 181e12, "L4": 121e12, "V100": 125e12, "T4": 65e12, "RTX 4090": 165e12},
}
PASSES = 3  # the backward pass takes twice the FLOPs of the forward pass


def peak_flops(device: torch.device) -> float | None:
    """The FLOP/s of a GPU; None if it is not known, and for a CPU."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    known = (peak for part, peak in PEAKS.items() if re.search(rf"\b{part}\b", name) and "MIG" not in name)
    return next(known, None)


def flops_of(model: torch.nn.Module, arguments: Any, keywords: Any) -> float:
    """The FLOPs of a forward pass, per sample: of a copy of `model` that computes shapes alone, and changes nothing."""
    from torch.utils.flop_counter import FlopCounterMode  # slow to import

    def shape_of(tensor: torch.Tensor) -> torch.Tensor:
        shape = tensor.detach().to("meta")
        return torch.nn.Parameter(shape, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else shape

    batch = next(part for part in leaves([arguments, keywords]) if isinstance(part, torch.Tensor))
    inputs, named = map_tensors([arguments, keywords], shape_of)
    shapes: dict[int, Any] = {id(tensor): shape_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
    twin = deepcopy(model, shapes)
    for part in twin.modules():
        for hooks in (part._forward_hooks, part._forward_pre_hooks):
            hooks.clear()
    with keep_random_state(), torch.no_grad(), torch.device("meta"), FlopCounterMode(display=False) as counter:
        twin(*inputs, **named)
    return counter.get_total_flops() / len(batch)


class Flops(Callback):
    """Adds tokens_per_s and mfu to the figures of training, as far as they are known."""

    def __init__(self, run: Any) -> None:
        self.config, self.ctx = run.config, run.ctx
        self.models = 0  # that were wrapped
        self.per_sample: float | None = None  # of the forward and backward pass; on rank 0, None if it is not known

    def wrapped(self, model: Any, task: Any) -> None:
        """Learn how many FLOPs a sample takes: from model.py, or else from the first batch, on rank 0."""
        self.models += 1
        config = self.config
        changes = self.ctx.work.sharded or config.compile or config.sync_bn
        if hasattr(task, "flops_per_sample"):
            self.per_sample = float(task.flops_per_sample(model))
        elif self.ctx.rank == 0 and peak_flops(self.ctx.device) and not changes:

            def count(_: Any, arguments: Any, keywords: Any, outputs: Any) -> None:
                hook.remove()
                with suppress(Exception):  # what computes with values, and not with shapes alone
                    self.per_sample = PASSES * flops_of(model, arguments, keywords)

            hook = model.register_forward_hook(count, with_kwargs=True)

    def figures(
        self, rates: Mapping[str, float], totals: Mapping[str, Any], seconds: float
    ) -> tuple[dict[str, float], str]:
        tokens, found, shown = totals.get("tokens"), {}, ""
        if isinstance(tokens, int | float) or (isinstance(tokens, torch.Tensor) and tokens.numel() == 1):
            found["tokens_per_s"] = round(float(tokens) / seconds, 1)
            shown = f"{found['tokens_per_s']:,.0f} tokens/s"
        peak = peak_flops(self.ctx.device)
        if self.per_sample and peak and self.models == 1:
            found["mfu"] = round(rates["samples_per_s"] * self.per_sample / (self.ctx.world_size * peak), 4)
            shown = "  ".join(filter(None, [shown, f"{found['mfu']:.1%} MFU"]))
        return found, shown
