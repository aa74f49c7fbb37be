"""State in memory: copy it for a checkpoint, check it, reduce it to a digest."""

import hashlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ddp.distributed.streams import Copy, CpuStreams, Mark
from ddp.distributed.tree import map_tensors

PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes, torch.dtype)


def snapshot(state: Any, streams: CpuStreams) -> tuple[Any, Mark]:
    """A copy of `state` in host memory, and when it is complete.

    Raises TypeError if torch.load(weights_only=True) would refuse it.
    """
    for keys, part in _leaves(state):
        if not isinstance(part, torch.Tensor) and type(part) not in PLAIN_TYPES:
            place = "".join(f"[{key!r}]" for key in keys)
            reason = f"state{place} is of {type(part)}, which no checkpoint can hold"
            raise TypeError(f"{reason}: make it a tensor or a plain number")
    copies: dict[Any, torch.Tensor] = {}  # tied weights stay one tensor

    def copy_all(copy: Copy) -> Any:
        def copy_once(tensor: torch.Tensor) -> torch.Tensor:
            key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            if key not in copies:
                copies[key] = copy(tensor)
            return copies[key]

        return map_tensors(state, copy_once)

    return streams.download(copy_all)


def find_non_finite(state: Any) -> list[str]:
    """The names of the tensors in `state` with a value that is not finite."""
    tensors = ((keys, part) for keys, part in _leaves(state) if isinstance(part, torch.Tensor))
    return [
        ".".join(map(str, keys))
        for keys, part in tensors
        if part.is_floating_point() and not torch.isfinite(part).all()
    ]


def size_of(state: Any) -> int:
    """The bytes of all tensors in `state`."""
    return sum(part.nbytes for _, part in _leaves(state) if isinstance(part, torch.Tensor))


class UnsavedState:
    """Finds objects whose state changes during the training, and which no checkpoint holds.

    variables: where to look, such as the local variables of main. saved: the parts that checkpoints hold.
    """

    def __init__(self, variables: Mapping[str, Any], saved: Collection[Any]) -> None:
        held = {identity for part in saved for identity in _held_by(part)}
        ours = {tensor.data_ptr() for part in saved for tensor in _tensors(part)}
        stateful = {
            name: value
            for name, value in variables.items()
            if not isinstance(value, type)
            if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
            if id(value) not in held
            if not any(tensor.data_ptr() in ours for tensor in _tensors(value))  # a wrapper of the model
        }
        self.found = {name: (value, _sample(value)) for name, value in stateful.items()}

    def changed(self) -> list[str]:
        """The names of those that have changed."""
        return [name for name, (value, before) in self.found.items() if _sample(value) != before]


def _held_by(part: Any, depth: int = 4) -> Iterator[int]:
    """The identities of `part` and of what it holds: SequentialLR saves its schedulers, a Lookahead its optimizer."""
    yield id(part)
    inner = part.values() if isinstance(part, dict) else part if isinstance(part, list | tuple) else ()
    if depth and not isinstance(part, torch.Tensor | torch.nn.Module):
        for held in (*inner, *getattr(part, "__dict__", {}).values()):
            if isinstance(part, Optimizer) or not isinstance(held, Optimizer):  # a scheduler does not save its own
                yield from _held_by(held, depth - 1)


def _tensors(part: Any) -> list[torch.Tensor]:
    return [leaf for _, leaf in _leaves(part.state_dict()) if isinstance(leaf, torch.Tensor)]


def _sample(part: Any) -> list[Any]:
    """All plain values of an object's state, and the first numbers of each tensor."""
    leaves = [leaf for _, leaf in _leaves(part.state_dict())]
    return [leaf.flatten()[:8].tolist() if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves]


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
