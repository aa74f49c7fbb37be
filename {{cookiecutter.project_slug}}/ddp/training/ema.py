"""--ema: an exponential moving average of the weights, which is evaluated in place of the model.

Its state_dict has the model's own names, so `model.load_state_dict(checkpoint["ema"])` loads it for use.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch


class ModelEma:
    """The average of a model's weights and floating-point buffers over steps; `module` is a model that holds it."""

    def __init__(self, model: torch.nn.Module, decay: float) -> None:
        self.module, self.decay = copy.deepcopy(model).requires_grad_(False), decay
        tensors = _tensors_of(self.module).items()
        # Not the -inf of an attention mask, whose average with itself would be NaN.
        self.averaged = {name for name, own in tensors if own.is_floating_point() and own.isfinite().all()}

    @torch.no_grad()
    def update(self, model: torch.nn.Module) -> None:
        """After an optimizer step: average = decay x average + (1 - decay) x weights. Other buffers are copied."""
        ours, theirs = _tensors_of(self.module), _tensors_of(model)
        averaged = [name for name in ours if name in self.averaged]
        others = [theirs[name].detach() for name in averaged]
        torch._foreach_lerp_([ours[name] for name in averaged], others, 1 - self.decay)
        for name in ours.keys() & theirs.keys() - self.averaged:  # a model may register buffers in its first pass
            ours[name].copy_(theirs[name])

    def state_dict(self) -> dict[str, Any]:
        return self.module.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.module.load_state_dict(state)


def _tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
