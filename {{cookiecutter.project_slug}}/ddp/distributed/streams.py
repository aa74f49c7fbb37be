"""Asynchronous work on a GPU: events, and copies on a stream of their own. On a CPU, everything is done at once."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import torch

from ddp.distributed.tree import map_tensors

Copy = Callable[[torch.Tensor], torch.Tensor]


@runtime_checkable
class Movable(Protocol):
    """A tensor, or anything else in a batch that can follow it to its device."""

    def to(self, device: torch.device, *, non_blocking: bool) -> Any: ...


class Mark:
    """A point in the work that was given to the CPU: it is reached at once."""

    def reached(self) -> bool:
        return True

    def wait(self) -> None:
        """Return once this point is reached."""


class CpuStreams:
    """The twin of CudaStreams for a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Mark:
        """A point after all work that was given to the device so far."""
        return _REACHED

    def upload(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Each of `batches` on the device: its tensors, and everything else that has a method `to`."""
        for batch in batches:
            yield self._move(batch, Movable)

    def download(self, copy_all: Callable[[Copy], Any]) -> tuple[Any, Mark]:
        """What `copy_all(copy)` returns, and when it is complete. `copy` copies a tensor to host memory."""
        return copy_all(_copy_to_host), _REACHED

    def _move(self, batch: Any, kind: Any) -> Any:
        return map_tensors(batch, lambda part: part.to(self.device, non_blocking=True), kind)


class CudaMark(Mark):
    """A point in the work of a stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()
        self.event.record(stream)

    def reached(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()


class CudaStreams(CpuStreams):
    """One stream copies, another one computes. Copies need pinned host memory, which a GPU can read by itself."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.copies: torch.cuda.Stream = torch.cuda.Stream(device)

    def mark(self) -> Mark:
        return CudaMark(torch.cuda.current_stream(self.device))

    def upload(self, batches: Iterable[Any]) -> Iterator[Any]:
        """One batch ahead: the next one is copied while the device computes with this one."""
        ahead: tuple[Any, CudaMark] | None = None
        for batch in batches:
            with torch.cuda.stream(self.copies):
                copied = self._move(batch, torch.Tensor), CudaMark(self.copies)
            if ahead is not None:
                yield self._receive(*ahead)
            ahead = copied
        if ahead is not None:
            yield self._receive(*ahead)

    def _receive(self, batch: Any, copied: CudaMark) -> Any:
        """`batch` for the stream that computes, which waits for the copy; the program does not."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(copied.event)
        # Otherwise the memory could be given to a later copy while this stream still reads it.
        map_tensors(batch, lambda tensor: tensor.record_stream(current))
        return self._move(batch, Movable)  # tensors are there already

    def download(self, copy_all: Callable[[Copy], Any]) -> tuple[Any, Mark]:
        """The program does not wait for the copies. The stream that computes does: it may change the tensors."""
        current = torch.cuda.current_stream(self.device)
        self.copies.wait_stream(current)
        with torch.cuda.stream(self.copies):
            result = copy_all(_copy_to_pinned)
        copied = CudaMark(self.copies)
        current.wait_event(copied.event)
        return result, copied


def _copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _copy_to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "cpu":
        return _copy_to_host(tensor)
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor.detach(), non_blocking=True)


_REACHED = Mark()


def streams_of(device: torch.device) -> CpuStreams:
    """The streams of `device`."""
    return CudaStreams(device) if device.type == "cuda" else CpuStreams(device)
