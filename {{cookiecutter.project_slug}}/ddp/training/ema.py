"""--ema: a moving average of the weights, for evaluations."""

import copy
import logging
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from types import FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ddp.data.dataset import attributes
from ddp.distributed.tensors import digest, leaves, local
from ddp.training.wrapping import is_batch_norm

log = logging.getLogger(__name__)
MANY = 10_000  # numbers in an attribute, which would take long to compare
PLAIN = (int, float, str, bytes, NoneType, type, ModuleType)
OF_TORCH = {*vars(torch.nn.Module()), "_compiled_call_impl"} - {"_forward_hooks", "_forward_pre_hooks"}


class ModelEma:
    """--ema: the average of a model's weights and BatchNorm statistics over steps. `module` has it, for evaluations.

    It is kept in float32 or complex64 at least: bfloat16 would round small changes away. Its state_dict has the model's
    own names, so `model.load_state_dict(checkpoint["ema"])` loads it for use. Plain attributes stay as they were.
    """

    def __init__(self, model: torch.nn.Module, decay: float) -> None:
        self.module, self.average = copy.deepcopy(model).requires_grad_(False), get_ema_multi_avg_fn(decay)
        _warn_of_parts_of(model, self.module)
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
        self.model, self.plain = model, plain_attributes(model)

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
        now = plain_attributes(self.model)
        for name in [name for name, value in self.plain.items() if now.get(name, value) != value][:1]:
            change = f"{name} of the model has changed; its average keeps the first value"
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


def _warn_of_parts_of(model: torch.nn.Module, average: torch.nn.Module) -> None:
    """Warn of an attribute or hook of the copy `average` that leads to `model`: deepcopy copies no function."""
    averaged = [each for each in model.modules() if is_batch_norm(each) or _trained(each)]
    parts = {id(part) for part in [*averaged, *_trained(model)]}
    seen: set[int] = set()
    for prefix, module in average.named_modules():
        for name, value in vars(module).items() if not hasattr(module, "_orig_mod") else ():  # it compiles anew
            if name not in OF_TORCH and any(id(each) in parts for each in _reached(value, seen)):
                what = f"{f'{prefix}.{name}'.strip('.')} of the model leads to a part of the model"
                remedy = "make a function a method, or compile with --compile; register what a reference is for"
                log.info(f"warning: --ema: {what}, so the average may use its weights: {remedy}")  # on rank 0


def _trained(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [weight for weight in module.parameters() if weight.requires_grad]


def _reached(value: Any, seen: set[int]) -> Iterator[Any]:
    """Everything that `value` leads to: containers, attributes, weak references, and what functions close over."""
    left = [value]
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, PLAIN):
            continue
        seen.add(id(each))
        yield each
        if isinstance(each, Mapping):
            left += each.values()
        elif isinstance(each, list | tuple | set):
            left += each
        elif isinstance(each, weakref.ref):
            left.append(each())
        elif isinstance(each, partial):
            left += [each.func, *each.args, *each.keywords.values()]
        elif isinstance(each, MethodType):
            left += [each.__self__, each.__func__]
        elif isinstance(each, FunctionType):
            left += [each.__defaults__, each.__kwdefaults__]
            for cell in each.__closure__ or ():
                with suppress(ValueError):  # it may be empty
                    left.append(cell.cell_contents)
        left += attributes(each).values()


def plain_attributes(owner: Any) -> dict[str, str]:
    """Digests of the attributes that no checkpoint holds, by name: numbers, strings, tensors, and lists of them."""
    found = {}
    for prefix, part in owner.named_modules() if isinstance(owner, torch.nn.Module) else [("", owner)]:
        for name, value in attributes(part).items():
            with suppress(Exception):  # it leads back to itself, for example
                few = name not in OF_TORCH and [*islice(leaves(value), MANY)]
                if few and len(few) < MANY and all(map(_is_plain, few)):
                    found[f"{prefix}.{name}".strip(".")] = digest(value)
    return found


def _is_plain(value: Any) -> bool:
    if type(value) is torch.Tensor:  # a loss of the last batch is no state
        return value.layout == torch.strided and not (value.is_nested or value.is_meta or value.requires_grad)
    return isinstance(value, bool | int | float | str)


def _tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(chain(model.named_parameters(), model.named_buffers()))
