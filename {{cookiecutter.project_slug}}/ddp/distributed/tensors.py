"""Trees of tensors, such as batches and state_dicts, and asynchronous copies between host and GPU."""

import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from copy import copy
from typing import Any, Protocol, runtime_checkable

import torch

Copy = Callable[[torch.Tensor], torch.Tensor]
BLOCK = 1 << 20  # bytes that are read at once


def map_tensors(tree: Any, function: Any, kind: Any = torch.Tensor) -> Any:
    """A copy of `tree` with `function` applied to everything of `kind` in its dictionaries, lists and tuples."""
    container: Any = type(tree)
    if isinstance(tree, kind):
        return function(tree)
    if isinstance(tree, Mapping):
        # With its attributes, such as a state_dict's _metadata, and a defaultdict's function.
        mapped = copy(tree) if isinstance(tree, MutableMapping) else dict(tree)
        for key, part in tree.items():
            mapped[key] = map_tensors(part, function, kind)
        return mapped
    if hasattr(tree, "_fields"):  # a named tuple
        return container(*(map_tensors(part, function, kind) for part in tree))
    if isinstance(tree, list | tuple) and not isinstance(tree, torch.Size):
        return container(map_tensors(part, function, kind) for part in tree)
    return tree


def named_leaves(tree: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Everything in a state that is no dict, list or tuple, with the keys that lead to it."""
    if isinstance(tree, dict | list | tuple):  # a checkpoint can hold no other Mapping
        for key, part in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from named_leaves(part, (*keys, key))
    else:
        yield keys, tree


def map_named(tree: Any, function: Callable[[tuple[Any, ...], torch.Tensor], Any]) -> Any:
    """A copy of a state with `function(keys, tensor)` in the place of each tensor; `keys` lead to it."""
    names = (keys for keys, part in named_leaves(tree) if isinstance(part, torch.Tensor))
    return map_tensors(tree, lambda tensor: function(next(names), tensor))


def leaves(tree: Any) -> Iterator[Any]:
    """Everything in the dictionaries, lists and tuples of `tree`, whatever it is."""
    if isinstance(tree, Mapping | list | tuple):
        for part in tree.values() if isinstance(tree, Mapping) else tree:
            yield from leaves(part)
    else:
        yield tree


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of the bytes of `tensor`."""
    result = 0
    for part in tensor.detach().flatten().view(torch.uint8).split(BLOCK):
        result = zlib.crc32(part.cpu().clone().numpy().data, result)  # not of the tensor: numpy() fixes its memory
    return result


@runtime_checkable
class Movable(Protocol):
    """A tensor, or anything else in a batch that can follow it to its device."""

    def to(self, device: torch.device, *, non_blocking: bool) -> Any: ...


class Mark:
    """A point in the work of a GPU's stream, or of the CPU, which reaches it at once."""

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self.event, self.created_at = event, time.monotonic()

    def reached(self) -> bool:
        return self.event is None or self.event.query()

    def wait(self) -> None:
        """Return once this point is reached."""
        if self.event is not None:
            self.event.synchronize()


class CpuStreams:
    """The twin of CudaStreams for a CPU: everything is done at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Mark:
        """A point after all work that was given to the device so far."""
        return Mark()

    def upload(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Each of `batches` on the device: its tensors, and everything else that has a method `to`."""
        for batch in batches:
            yield self._move(batch, Movable)

    def download(self, copy_all: Callable[[Copy], Any]) -> tuple[Any, Mark]:
        """What `copy_all(copy)` returns, and when it is complete. `copy` copies a tensor to host memory."""
        return copy_all(_copy_to_host), Mark()

    def _move(self, batch: Any, kind: Any) -> Any:
        return map_tensors(batch, lambda part: part.to(self.device, non_blocking=True), kind)


class CudaStreams(CpuStreams):
    """One stream copies, another one computes. Copies need pinned host memory, which a GPU can read by itself."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.copies: torch.cuda.Stream = torch.cuda.Stream(device)

    def mark(self) -> Mark:
        return Mark(torch.cuda.current_stream(self.device).record_event())

    def upload(self, batches: Iterable[Any]) -> Iterator[Any]:
        """One batch ahead: the next one is copied while the device computes with this one."""
        ahead: list[tuple[Any, torch.cuda.Event]] = []
        for batch in batches:
            with torch.cuda.stream(self.copies):
                ahead.append((self._move(batch, torch.Tensor), self.copies.record_event()))
            if len(ahead) > 1:
                yield self._receive(*ahead.pop(0))
        for last in ahead:
            yield self._receive(*last)

    def _receive(self, batch: Any, copied: torch.cuda.Event) -> Any:
        """`batch` for the stream that computes, which waits for the copy; the program does not."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(copied)
        # Otherwise the memory could be given to a later copy while this stream still reads it.
        map_tensors(batch, lambda tensor: tensor.record_stream(current))
        return self._move(batch, Movable)  # tensors are there already

    def download(self, copy_all: Callable[[Copy], Any]) -> tuple[Any, Mark]:
        """The program does not wait for the copies. The stream that computes does: it may change the tensors."""
        current = torch.cuda.current_stream(self.device)
        self.copies.wait_stream(current)
        with torch.cuda.stream(self.copies):
            result = copy_all(_copy_to_pinned)
        copied = self.copies.record_event()
        current.wait_event(copied)
        return result, Mark(copied)


def _copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _copy_to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "cpu":
        return _copy_to_host(tensor)
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor.detach(), non_blocking=True)


def streams_of(device: torch.device) -> CpuStreams:
    """The streams of `device`."""
    return CudaStreams(device) if device.type == "cuda" else CpuStreams(device)
