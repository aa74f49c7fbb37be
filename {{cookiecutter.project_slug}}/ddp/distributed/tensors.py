"""Trees of tensors, such as batches and state_dicts; tensors that are split over the ranks; copies to host memory.

A split tensor, such as torch's DTensor, has two methods: to_local() returns the rows of this rank, and full_tensor()
the whole.
"""

import hashlib
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import partial
from typing import Any

import torch

from ddp.core.errors import UsageError

Copy = Callable[[torch.Tensor], torch.Tensor]
BLOCK = 1 << 20  # bytes that are read at once
PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
CONTAINERS = (dict, OrderedDict, Counter, list, tuple, torch.Size)  # torch.load refuses their subclasses


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
    """Everything in the dictionaries, lists and tuples of `tree`, whatever it is, with the keys that lead to it."""
    if isinstance(tree, Mapping | list | tuple):
        for key, part in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from named_leaves(part, (*keys, key))
    else:
        yield keys, tree


def map_named(tree: Any, function: Callable[[tuple[Any, ...], torch.Tensor], Any]) -> Any:
    """A copy of a state with `function(keys, tensor)` in the place of each tensor; `keys` lead to it."""
    names = (keys for keys, part in named_leaves(tree) if isinstance(part, torch.Tensor))
    return map_tensors(tree, lambda tensor: function(next(names), tensor))


def leaves(tree: Any) -> Iterator[Any]:
    """Everything in the dictionaries, lists and tuples of `tree`."""
    return (part for _, part in named_leaves(tree))


def strided(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that make up a nested or a sparse one."""
    if tensor.is_nested:
        return [*tensor.unbind()]
    if tensor.layout == torch.sparse_coo:
        ordered = tensor.coalesce()
        return [ordered.indices(), ordered.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor.to_dense()]


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of the bytes of `tensor`."""
    result = 0
    for part in tensor.detach().flatten().view(torch.uint8).split(BLOCK):
        result = zlib.crc32(part.cpu().clone().numpy().data, result)  # not of the tensor: numpy() fixes its memory
    return result


def digest(state: Any) -> str:
    """SHA-256 of everything in `state`, tensors by their bytes."""
    result = hashlib.sha256()
    for keys, part in named_leaves(state):
        if isinstance(part, torch.Tensor):
            result.update(f"{keys}{part.dtype}{tuple(part.shape)}".encode())
            if not is_split(part):  # the ranks have different rows
                result.update(part.detach().resolve_conj().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        else:
            result.update(f"{keys}{part!r}".encode())
    return result.hexdigest()


def check_state(state: Any, name: str = "state") -> None:
    """Raise UsageError if a checkpoint cannot hold `state`, or torch.load(weights_only=True) would refuse it."""
    if type(state) in CONTAINERS:
        for key, part in state.items() if isinstance(state, dict) else enumerate(state):
            if type(key) not in PLAIN_TYPES:
                check_state(key, f"the key {key!r} of {name}")
            if type(part) not in PLAIN_TYPES:
                check_state(part, f"{name}[{key!r}]")
        return
    loads = (torch.Tensor, torch.nn.Parameter, *PLAIN_TYPES, *torch.serialization.get_safe_globals())
    on_meta = isinstance(state, torch.Tensor) and state.is_meta
    if on_meta or not (type(state) in loads or is_split(state)):
        what = "is on the device meta" if on_meta else f"is of {type(state)}"
        raise UsageError(f"{name} {what}, which no checkpoint can hold: use a tensor, a plain value, a dict or a list")


# ---- tensors that are split over the ranks ---------------------------------------------------------------------------


def is_split(value: Any) -> bool:
    """Whether no rank has all of `value`."""
    return hasattr(value, "full_tensor")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of this rank; a tensor that is not split itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All rows; a tensor that is not split itself. Call on every rank."""
    return tensor.full_tensor() if is_split(tensor) else tensor  # type: ignore[attr-defined]


def whole_tree(tree: Any) -> Any:
    """`tree` with the whole of each tensor. A tensor that is in it twice stays one. Call on every rank."""
    joined: dict[int, torch.Tensor] = {}

    def join(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in joined:
            joined[id(tensor)] = whole(tensor)
        return joined[id(tensor)]

    return map_tensors(tree, join)


def own_rows(tensor: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """The rows that `rank` holds, as a view: as torch splits a tensor. The last ranks may have none."""
    parts = tensor.chunk(world_size)
    return parts[rank] if rank < len(parts) else tensor[:0]


def split_like(example: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, which this rank has whole, split as `example` is: a copy of this rank's rows. Or `tensor` itself."""
    if not is_split(example):
        return tensor
    from torch.distributed.tensor import DTensor  # slow to import

    mesh: Any = example.device_mesh  # type: ignore[attr-defined]
    rows = own_rows(tensor, mesh.get_local_rank(), mesh.size()).to(example.device, copy=True)
    placements = example.placements  # type: ignore[attr-defined]
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


# ---- copies to host memory -------------------------------------------------------------------------------------------


class Mark:
    """A point in the work of a GPU's stream, or of the CPU, which reaches it at once."""

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self.event, self.created_at = event, time.monotonic()

    def reached(self) -> bool:
        with self._on_its_gpu():
            return self.event is None or self.event.query()

    def wait(self) -> None:
        """Return once this point is reached."""
        with self._on_its_gpu():
            if self.event is not None:
                self.event.synchronize()

    def _on_its_gpu(self) -> AbstractContextManager[None]:
        """A new thread begins on GPU 0, where a call of CUDA takes memory for this process."""
        return nullcontext() if self.event is None else torch.cuda.device(self.event.device)


class Streams:
    """The streams of a GPU: one computes, `copies` copies. A CPU has none, and does everything at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copies: torch.cuda.Stream | None = torch.cuda.Stream(device) if device.type == "cuda" else None

    def mark(self) -> Mark:
        """A point after all work that was given to the device so far."""
        return Mark(torch.cuda.current_stream(self.device).record_event() if self.copies is not None else None)

    def download(self, copy_all: Callable[[Copy], Any]) -> tuple[Any, Mark]:
        """What `copy_all(copy)` returns, and when it is complete. `copy` copies a tensor to host memory.

        The program does not wait for the copies. The stream that computes does: it may change the tensors.
        """
        if self.copies is None:
            return copy_all(_copy_to_host), Mark()
        current = torch.cuda.current_stream(self.device)
        self.copies.wait_stream(current)
        with torch.cuda.stream(self.copies):
            result = copy_all(_copy_to_pinned)
        copied = self.copies.record_event()
        current.wait_event(copied)
        return result, Mark(copied)


def snapshot(state: Any, streams: Streams, keep: bool = True) -> tuple[Any, Mark]:
    """A copy of `state` in host memory, and when it is complete. Call on every rank: tensors may be split.

    keep: False on the ranks that only send their rows.
    """
    copies: dict[Any, torch.Tensor] = {}  # tied weights stay one tensor

    def copy_once(copy: Copy, keys: tuple[Any, ...], tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:  # a part writes what belongs there
            return tensor
        # Not the data_ptr of a DTensor, which is always 0, as is that of a rank without rows.
        own = local(tensor.detach())
        place = own.data_ptr() or own.untyped_storage().data_ptr() or id(tensor)
        key = (place, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if key not in copies:
            everything = whole(tensor.detach())
            copies[key] = copy(everything) if keep else torch.empty(0)
        return copies[key]

    return streams.download(lambda copy: map_named(state, partial(copy_once, copy)))


def _copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _copy_to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "cpu":
        return _copy_to_host(tensor)
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor.detach(), non_blocking=True)
