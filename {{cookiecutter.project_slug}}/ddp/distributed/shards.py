"""Tensors that are split over the ranks (--shard): each rank holds some rows of torch's DTensor."""

import zlib
from contextlib import suppress
from typing import Any, NamedTuple

import torch

BLOCK = 1 << 20  # bytes that are read at once
KEPT = "_kept_rows"  # the attribute of a weight that has KeptRows


def is_sharded(value: Any) -> bool:
    """Whether `value` is a DTensor. Its module is slow to import, and only needed with --shard."""
    return hasattr(value, "full_tensor")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of this rank; a tensor that is not sharded itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def is_split(tensor: torch.Tensor) -> bool:
    """Whether each rank holds some rows of `tensor`, in the order of the ranks: not so for a sum of weights."""
    return is_sharded(tensor) and all(place.is_shard(0) for place in tensor.placements)  # type: ignore[attr-defined]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All rows, on every rank; a tensor that is not sharded itself. Call on every rank."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def read_whole_numbers() -> None:
    """Let item(), float(), int() and bool() of a sum or maximum of weights be that of all rows. Call it on every rank.

    torch gives each rank the number of its own rows, without a word.
    """
    from torch.distributed.tensor import DTensor

    def of_all(read: Any) -> Any:
        return lambda tensor: read(tensor.full_tensor())

    for name in ("item", "__float__", "__int__", "__bool__"):
        setattr(DTensor, name, of_all(getattr(torch.Tensor, name)))


def own_rows(tensor: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """The rows that `rank` holds, as a view: as fully_shard splits a weight. The last ranks may have none."""
    parts = tensor.chunk(world_size)
    return parts[rank] if rank < len(parts) else tensor[:0]


def shard_like(example: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, which all ranks have, as a DTensor that is split like `example`: a copy of this rank's rows."""
    from torch.distributed.tensor import DTensor

    mesh: Any = example.device_mesh  # type: ignore[attr-defined]
    rows = own_rows(tensor, mesh.get_local_rank(), mesh.size()).to(example.device, copy=True)
    placements = example.placements  # type: ignore[attr-defined]
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


# ---- before a model is sharded --------------------------------------------------------------------------------------


class KeptRows(NamedTuple):
    """What a rank keeps of a weight whose memory was freed."""

    rows: torch.Tensor
    whole: int  # the checksum of the weight
    size: int  # of its memory, in bytes


def checksum(tensor: torch.Tensor) -> int:
    """Of a tensor that is not sharded; or of the whole weight, if its memory was freed."""
    if kept := kept_rows(tensor):
        return kept.whole
    result = 0
    for part in tensor.detach().flatten().view(torch.uint8).split(BLOCK):
        result = zlib.crc32(part.cpu().clone().numpy().data, result)  # not of the tensor: numpy() fixes its memory
    return result


def kept_rows(weight: torch.Tensor) -> KeptRows | None:
    return vars(weight).get(KEPT)


def keep_own_rows(model: torch.nn.Module, rank: int, world_size: int) -> None:
    """Free the memory of all weights, which keep their shapes; this rank's rows stay for `restore_rows`."""
    storages = {}
    for weight in model.parameters():
        storage, data = weight.untyped_storage(), weight.detach()
        rows = own_rows(data, rank, world_size).clone()
        vars(weight)[KEPT] = KeptRows(rows, checksum(data), storage.nbytes())
        storages[storage.data_ptr()] = storage  # two weights may be views of one
    for storage in storages.values():
        with suppress(RuntimeError):  # that of a mapped file keeps its size, and uses no memory
            storage.resize_(0)


def restore_rows(module: torch.nn.Module, rank: int, world_size: int) -> None:
    """Give the weights of `module` their memory and this rank's rows again; others are undefined."""
    for weight in module.parameters():
        if kept := vars(weight).pop(KEPT, None):
            storage = weight.untyped_storage()
            if storage.nbytes() < kept.size:
                storage.resize_(kept.size)
            own_rows(weight.detach(), rank, world_size).copy_(kept.rows)


def same_rows(weight: torch.Tensor, built: torch.Tensor) -> bool:
    """Whether this rank's rows of a weight are equal to those of one that was just built."""
    kept = kept_rows(built)
    return torch.equal(local(weight).cpu(), built if kept is None else kept.rows)
