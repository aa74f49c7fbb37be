"""Build a model of which no process keeps everything."""

import fcntl
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from ddp.core.errors import UsageError
from ddp.distributed.rank_env import RankEnv
from ddp.distributed.tensors import checksum, own_rows


class OwnRows:
    """What a rank keeps of a weight whose memory was freed. `local` finds the rows at the weight."""

    def __init__(self, weight: torch.Tensor, rank: int, world_size: int) -> None:
        self.rows, self.checksum = own_rows(weight.detach(), rank, world_size).clone(), checksum(weight)
        self.size = weight.untyped_storage().nbytes()

    def __call__(self) -> torch.Tensor:
        return self.rows


def build_in_turn(build_model: Callable[[], nn.Module], env: RankEnv) -> nn.Module:
    """What `build_model` returns: one process of this machine at a time calls it, and keeps its rows.

    So the machine needs memory for one whole model, and the weights are those of the same seed without --shard.
    """
    with (Path(tempfile.gettempdir()) / f"ddp-build-{os.getuid()}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        model = build_model()
        _check_weights(model)
        if env.world_size > 1:
            _keep_own_rows(model, env.rank, env.world_size)
    return model


def _check_weights(model: nn.Module) -> None:
    """Raise UsageError for weights that fully_shard cannot split."""
    types = {weight.dtype: name for name, weight in model.named_parameters()}
    if len(types) > 1:
        found = " and ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in types.items())
        raise UsageError(f"--shard: {found}: build all weights in one number format")
    if sparse := [name for name, part in model.named_modules() if getattr(part, "sparse", False) is True]:
        raise UsageError(f"--shard: the gradient of {sparse[0]} is sparse, and cannot be split: remove sparse=True")
    for name, weight in model.named_parameters():
        if not weight.is_contiguous():
            raise UsageError(f"--shard: {name} is not contiguous: remove --channels-last, or call contiguous()")
        if weight.dim() == 0:
            raise UsageError(f"--shard: {name} is a single number, which cannot be split: give it the shape [1]")


def _keep_own_rows(model: nn.Module, rank: int, world_size: int) -> None:
    """Free the memory of all weights, which keep their shapes; this rank's rows stay for `restore_rows`."""
    storages = {}
    for weight in model.parameters():
        storage = weight.untyped_storage()
        vars(weight)["to_local"] = OwnRows(weight, rank, world_size)
        storages[storage.data_ptr()] = storage  # two weights may be views of one
    for storage in storages.values():
        with suppress(RuntimeError):  # that of a mapped file keeps its size, and uses no memory
            storage.resize_(0)


def restore_rows(module: nn.Module, rank: int, world_size: int) -> None:
    """Give the weights of `module` their memory and this rank's rows again; others are undefined."""
    for weight in module.parameters():
        if kept := vars(weight).pop("to_local", None):
            storage = weight.untyped_storage()
            if storage.nbytes() < kept.size:
                storage.resize_(kept.size)
            own_rows(weight.detach(), rank, world_size).copy_(kept.rows)


def built_checksum(tensor: torch.Tensor) -> int:
    """The checksum of a tensor that was built, also if its memory was freed since."""
    kept = vars(tensor).get("to_local")
    return checksum(tensor) if kept is None else int(kept.checksum)
