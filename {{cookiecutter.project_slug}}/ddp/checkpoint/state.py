"""State in memory: copy it for a checkpoint, check it, reduce it to a digest."""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from ddp.distributed.tree import map_tensors

PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes, torch.dtype)


def snapshot(state: Any) -> Any:
    """A copy of `state` in host memory. Raises TypeError if torch.load(weights_only=True) would refuse it."""
    for keys, part in _leaves(state):
        if not isinstance(part, torch.Tensor) and type(part) not in PLAIN_TYPES:
            place = "".join(f"[{key!r}]" for key in keys)
            reason = f"state{place} is of {type(part)}, which no checkpoint can hold"
            raise TypeError(f"{reason}: make it a tensor or a plain number")
    copies: dict[Any, torch.Tensor] = {}  # tied weights stay one tensor

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if key not in copies:
            copies[key] = tensor.detach().to("cpu", copy=True)
        return copies[key]

    return map_tensors(state, copy)


def find_non_finite(state: Any) -> str | None:
    """The name of a tensor in `state` with a value that is not finite; None if all values are finite."""
    for keys, part in _leaves(state):
        if isinstance(part, torch.Tensor) and part.is_floating_point() and not torch.isfinite(part).all():
            return ".".join(map(str, keys))
    return None


def size_of(state: Any) -> int:
    """The bytes of all tensors in `state`."""
    return sum(part.nbytes for _, part in _leaves(state) if isinstance(part, torch.Tensor))


def digest(state: Any) -> str:
    """SHA-256 of everything in `state`, tensors by their bytes."""
    result = hashlib.sha256()

    def add(tensor: torch.Tensor) -> None:
        result.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        result.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)

    result.update(repr(map_tensors(state, add)).encode())
    return result.hexdigest()


def _leaves(state: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Everything in `state` that is not a container, with the keys that lead to it."""
    if isinstance(state, dict | list | tuple):
        for key, part in state.items() if isinstance(state, dict) else enumerate(state):
            yield from _leaves(part, (*keys, key))
    else:
        yield keys, state
