"""Tensors that may be split over the ranks, such as torch's DTensor: the rows of this rank, and the whole.

A split tensor has two methods: to_local() returns the rows of this rank, and full_tensor() the whole.
"""

from typing import Any

import torch

from ddp.distributed.tensors import map_tensors


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
