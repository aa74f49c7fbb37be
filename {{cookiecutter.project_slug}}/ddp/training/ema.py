"""--ema: a moving average of the weights, for evaluations."""

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ddp.distributed.tensors import local
from ddp.training.wrapping import is_batch_norm

log = logging.getLogger(__name__)
OF_TORCH = {*vars(torch.nn.Module()), "_compiled_call_impl"} - {"_forward_hooks", "_forward_pre_hooks"}


class ModelEma:
    """--ema: the average of a model's weights and BatchNorm statistics over steps. `module` has it, for evaluations.

    It is kept in float32 or complex64 at least: bfloat16 would round small changes away. Its state_dict has the model's
    own names, so `model.load_state_dict(checkpoint["ema"])` loads it for use. Plain attributes stay as they were.
    """

    def __init__(self, model: torch.nn.Module, decay: float) -> None:
        _warn_of_functions_over(model)
        self.module, self.average = copy.deepcopy(model).requires_grad_(False), get_ema_multi_avg_fn(decay)
        tensors = dict(self.module.named_parameters())
        for prefix, part in self.module.named_modules():
            if is_batch_norm(part):
                tensors |= dict(part.named_buffers(prefix, recurse=False))
        numbers = {name: own for name, own in tensors.items() if own.is_floating_point() or own.is_complex()}
        # The tensors of `module`, or wider copies. Not the -inf of an attention mask: its average with itself is NaN.
        finite = {name: own for name, own in numbers.items() if local(own).isfinite().all()}
        self.averages = {name: own.to(torch.promote_types(own.dtype, torch.float32)) for name, own in finite.items()}
        self.rounded = [name for name, average in self.averages.items() if average is not tensors[name]]
        base = torch.nn.Module.get_extra_state
        self.with_extra_state = [name for name, part in model.named_modules() if type(part).get_extra_state != base]
        self.model, self.plain = model, _plain_attributes(model)

    @torch.no_grad()
    def update(self, model: torch.nn.Module) -> None:
        """After an optimizer step: average = decay x average + (1 - decay) x weights. Everything else is copied."""
        ours, theirs = _tensors_of(self.module), _tensors_of(model)
        if self.averages:
            weights = [theirs[name].to(average.dtype) for name, average in self.averages.items()]
            self.average(list(self.averages.values()), weights, 0)
        for name in self.rounded:
            ours[name].copy_(self.averages[name])
        for name in (ours.keys() & theirs.keys()).difference(self.averages):  # a first pass may register buffers
            if ours[name].shape != theirs[name].shape:  # that of a range which fake quantisation observes
                part, _, buffer = name.rpartition(".")
                setattr(self.module.get_submodule(part), buffer, torch.empty_like(theirs[name]))
                ours[name] = getattr(self.module.get_submodule(part), buffer)
            ours[name].copy_(theirs[name])
        for name in self.with_extra_state:
            state = model.get_submodule(name).get_extra_state()
            self.module.get_submodule(name).set_extra_state(copy.deepcopy(state))

    def state_dict(self) -> dict[str, Any]:
        now = _plain_attributes(self.model)
        for name in [name for name, value in self.plain.items() if now.get(name, value) != value][:1]:
            change = f"{name} of the model was {self.plain[name]}, is {now[name]}; its average keeps the first value"
            log.info(f"warning: --ema: {change}: make it a buffer, if it is used in an evaluation")  # on rank 0
            self.plain = {}  # once
        state, tensors = self.module.state_dict(keep_vars=True), _tensors_of(self.module)
        averages = {id(tensors[name]): self.averages[name] for name in self.rounded}  # also for tied weights
        for key, value in state.items():
            state[key] = averages.get(id(value), value.detach() if isinstance(value, torch.Tensor) else value)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.module.load_state_dict(state)
        for name in self.rounded:
            self.averages[name].copy_(state[name])


def _warn_of_functions_over(model: torch.nn.Module) -> None:
    """Warn of a function, as an attribute or hook, that holds a part of `model`, as does a copy of it by deepcopy."""
    averaged = [each for each in model.modules() if is_batch_norm(each) or _trained(each)]
    parts = {id(part) for part in [*averaged, *_trained(model)]}
    for prefix, module in model.named_modules():
        for name, value in vars(module).items() if not hasattr(module, "_orig_mod") else ():  # it compiles anew
            values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else (value,)
            held = chain.from_iterable(_held_by(each, set()) for each in values if name not in OF_TORCH)
            if any(id(part) in parts for part in held):
                what = f"{f'{prefix}.{name}'.strip('.')} of the model is a function that holds a part of the model"
                remedy = "make it a method, or compile with --compile"
                log.info(f"warning: --ema: {what}, so the average may use its weights: {remedy}")  # on rank 0


def _trained(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [weight for weight in module.parameters() if weight.requires_grad]


def _held_by(function: Any, seen: set[int]) -> Iterator[Any]:
    """What copy.deepcopy does not copy of a function: what it closes over, and its defaults."""
    function = function.func if isinstance(function, partial) else function
    if isinstance(function, FunctionType) and id(function) not in seen:
        seen.add(id(function))
        held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # it may be empty
                held.append(cell.cell_contents)
        for each in held:
            is_method = isinstance(each, MethodType)
            yield each.__self__ if is_method else each
            yield from _held_by(each.__func__ if is_method else each, seen)


def _plain_attributes(model: torch.nn.Module) -> dict[str, Any]:
    """Numbers and strings that no checkpoint holds, by name."""
    return {
        f"{prefix}.{name}".strip("."): value
        for prefix, part in model.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, bool | int | float | str) and name != "training"
    }


def _tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(chain(model.named_parameters(), model.named_buffers()))
