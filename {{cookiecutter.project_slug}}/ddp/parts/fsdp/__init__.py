"""--shard: each rank holds a part of every weight, of its gradient and of its optimizer state (torch's FSDP2)."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp.core.errors import UsageError
from ddp.core.options import option

INSTEAD_OF_DDP = "shard"  # the option
# torch's DTensor raises errors of several types.
ERRORS = re.compile(
    "mixed torch.Tensor and DTensor|not have a sharding strategy|found no DeviceMesh|placement changes|"
    "Sharding propagation failed|Cannot flatten unevenly sharded|would remove or reshape sharded|"
    "FSDP does not support deepcopy|its data is not allocated yet|out of bounds for storage of size 0"
)


@dataclass
class Options:
    """The options of this part."""

    shard: bool = option(
        False, "split weights, gradients, optimizer state over the processes", section="speed", may_change=True
    )
    checkpoint_activations: bool = option(
        False, "compute blocks again in the backward pass", section="speed", may_change=True
    )

    def check(self) -> None:
        """Refuse options that contradict each other. Raises UsageError."""
        if self.shard and getattr(self, "ema", None) is not None:
            raise UsageError("--ema with --shard: torch cannot copy a sharded model; remove one of them")


def callbacks(run: Any) -> list[Any]:
    """One: a run without --shard may go on from files of one with it."""
    from ddp.parts.fsdp.rank_files import RankFiles  # imports torch

    return [RankFiles(run)]


def build_model(build: Callable[[], Any], config: Any, env: Any) -> Any:
    """What `build` returns. With --shard this rank keeps its rows of it only."""
    from ddp.parts.fsdp.building import build_in_turn

    return build_in_turn(build, env) if config.shard else build()


def wrap_model(model: Any, config: Any, ctx: Any, task: Any) -> Any:
    """`model`, sharded, with --shard; otherwise None. With --checkpoint-activations, its blocks keep less."""
    from ddp.parts.fsdp.blocks import checkpoint_activations, find_blocks
    from ddp.parts.fsdp.sharding import shard_model

    if not (config.shard or config.checkpoint_activations):
        return None
    blocks = getattr(task, "blocks", find_blocks)(model)
    if config.checkpoint_activations:
        checkpoint_activations(blocks)
    return shard_model(model, config, ctx, blocks) if config.shard else None


def read_files(path: Path, content: dict[str, Any], files: Mapping[str, str]) -> dict[str, Any]:
    """`content` of a checkpoint, with tensors that are in these files."""
    from ddp.parts.fsdp.rows_folder import read_rows

    return read_rows(path, content, files)


def clean(directory: Any) -> None:
    """Delete the files that no checkpoint in `directory` lists."""
    from ddp.parts.fsdp.rows_folder import RowsFolder

    RowsFolder(directory).delete_unlisted()


def explain(text: str, where: str) -> str:
    """What the user can do about an error with this text; empty for one of another kind."""
    if not ERRORS.search(text):
        return ""
    use = "use each weight only in forward() of its block, and an optimizer such as SGD (not fused), AdamW or Muon"
    use = "compute no gradient of a gradient" if "allocated" in text or "of size 0" in text else use
    return f"--shard: torch cannot compute this with the rows of a weight{where}: {use} ({text[:80]})"
