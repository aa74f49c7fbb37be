"""--ema: an exponential moving average of the weights, which is evaluated in place of the model.

Its state_dict has the model's own names, so `model.load_state_dict(checkpoint["ema"])` loads it for use.
"""

import copy
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch


class ModelEma:
    """The average of a model's weights and floating-point buffers over steps; `module` is a model that holds it."""

    def __init__(self, model: torch.nn.Module, decay: float) -> None:
        self.module, self.decay = copy.deepcopy(model).requires_grad_(False), decay

    @torch.no_grad()
    def update(self, model: torch.nn.Module) -> None:
        """After an optimizer step: average = decay x average + (1 - decay) x weights. Other buffers are copied."""
        ours, theirs = ([*chain(each.parameters(), each.buffers())] for each in (self.module, model))
        pairs = list(zip(ours, theirs, strict=True))
        averaged = [pair for pair in pairs if pair[0].is_floating_point() or pair[0].is_complex()]
        torch._foreach_lerp_([own for own, _ in averaged], [other.detach() for _, other in averaged], 1 - self.decay)
        for own, other in pairs:
            if not (own.is_floating_point() or own.is_complex()):
                own.copy_(other)

    def state_dict(self) -> dict[str, Any]:
        return self.module.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.module.load_state_dict(state)
