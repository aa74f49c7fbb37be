"""State in memory: send it to every rank, reduce it to a digest; and the states of the random generators."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from ddp.group import Group

PLAIN = (bool, int, float, complex, str, bytes, torch.Size, torch.dtype)


@dataclass
class _Slot:
    """Stands where a tensor was."""

    shape: torch.Size
    dtype: torch.dtype


def broadcast_state(state: Any, group: Group) -> Any:
    """Rank 0's `state` (dicts, lists, tuples, tensors, plain values) on every rank, in host memory. Call on every rank.

    Tensors travel one by one, so that no rank needs room for two states.
    """
    tensors: list[torch.Tensor] = []
    skeleton = group.on_main(lambda: map_tensors(state, lambda tensor: _take_out(tensor, tensors)))
    return _fill(skeleton, iter(tensors), group)


def _take_out(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> _Slot:
    tensors.append(tensor)
    return _Slot(tensor.shape, tensor.dtype)


def _fill(skeleton: Any, tensors: Any, group: Group) -> Any:
    def receive(slot: _Slot) -> torch.Tensor:
        tensor = next(tensors, None)
        return group.broadcast(torch.empty(slot.shape, dtype=slot.dtype) if tensor is None else tensor.contiguous())

    return map_tensors(skeleton, receive, kind=_Slot)


def map_tensors(value: Any, change: Any, kind: Any = torch.Tensor) -> Any:
    """`value` with `change` applied to whatever in it is of `kind`, in dictionaries, lists and tuples, too."""
    same: Any = type(value)
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, Mapping):
        mapped = same((key, map_tensors(part, change, kind)) for key, part in value.items())
        if hasattr(value, "_metadata"):  # versions of the modules, which some look at when they load
            mapped._metadata = value._metadata
        return mapped
    if hasattr(value, "_fields"):  # a named tuple
        return same(*(map_tensors(part, change, kind) for part in value))
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return same(map_tensors(part, change, kind) for part in value)
    return value


def snapshot(state: Any) -> Any:
    """A copy of `state` in host memory. Raises TypeError if torch.load(weights_only=True) would refuse it."""
    _check_plain(state, "state")
    copies: dict[Any, torch.Tensor] = {}  # tied weights stay one tensor

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if key not in copies:
            copies[key] = tensor.detach().to("cpu", copy=True)
        return copies[key]

    return map_tensors(state, copy)


def not_finite(state: Any, name: str) -> str | None:
    """The name of a tensor in `state` with a value that is not finite; None if all are."""
    if isinstance(state, torch.Tensor):
        return None if not state.is_floating_point() or torch.isfinite(state).all() else name
    parts = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list | tuple) else ()
    return next((found for key, part in parts if (found := not_finite(part, f"{name}.{key}"))), None)


def _check_plain(state: Any, name: str) -> None:
    if isinstance(state, dict):
        for key, part in state.items():
            _check_plain(part, f"{name}[{key!r}]")
    elif isinstance(state, list | tuple):
        for index, part in enumerate(state):
            _check_plain(part, f"{name}[{index}]")
    elif not (state is None or isinstance(state, torch.Tensor) or type(state) in PLAIN):
        raise TypeError(f"{name} is of {type(state)}, which no checkpoint can hold: make it a tensor or a plain number")


def size_of(state: Any) -> int:
    """The bytes of all tensors in `state`."""
    sizes: list[int] = []
    map_tensors(state, lambda tensor: sizes.append(tensor.numel() * tensor.element_size()))
    return sum(sizes)


def digest(state: Any) -> str:
    """SHA-256 of all that is in `state`, tensors by their bytes."""
    result = hashlib.sha256()

    def add(tensor: torch.Tensor) -> None:
        result.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        result.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)

    result.update(repr(map_tensors(state, add)).encode())
    return result.hexdigest()


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of this process's random generators, in types that torch.load(weights_only=True) accepts."""
    version, numbers, next_gauss = random.getstate()
    name, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    state = {
        "torch": torch.get_rng_state(),
        # Tensors: number by number, these would take longer to copy and to send than the weights of a small model.
        "python": (version, torch.tensor(numbers), next_gauss),
        "numpy": (
            str(name),
            torch.tensor(numpy.asarray(keys, numpy.int64)),
            int(position),
            int(has_gauss),
            float(gauss),
        ),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Set them as `random_state` has found them; that of a GPU only if there was one, and is."""
    version, numbers, next_gauss = state["python"]
    name, keys, *others = state["numpy"]
    torch.set_rng_state(state["torch"])
    random.setstate((version, tuple(numbers.tolist()), next_gauss))
    numpy.random.set_state((name, keys.numpy(), *others))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
