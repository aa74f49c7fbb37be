"""A checkpoint with --shard: each rank writes its own rows, in the background; then rank 0 writes the rest.

So no process needs memory for more than its part, and a save sends nothing. All ranks must see OUTPUT_DIR for that.
Where they do not, as on machines without a shared file system, and where a part needs single files, rank 0 collects all
rows in its memory and writes one file, like that of a run without --shard.
"""

import logging
import os
import pickle
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ddp.checkpoint.storage import FILES
from ddp.core.errors import UserError
from ddp.core.files import TMP_PATTERN, storage_errors, sync_directory
from ddp.core.parts import Callback, WriteRest
from ddp.distributed.failure_monitor import RESPONSE_TIMEOUT_S
from ddp.distributed.tensors import Copy, Mark, is_split, map_named
from ddp.parts.fsdp.rows_folder import RowsFolder
from ddp.parts.fsdp.sharding import check_optimizers

log = logging.getLogger(__name__)
POLL_INTERVAL_S = 0.05
Rows = dict[tuple[Any, ...], torch.Tensor]


class RankFiles(Callback):
    """The files of the rows of all ranks. `used`: whether saves write them; the same on all ranks."""

    def __init__(self, run: Any) -> None:
        self.config, self.ctx, self.checkpoints = run.config, run.ctx, run.checkpoints
        self.folder = RowsFolder(self.checkpoints.directory)
        self.used = False
        self.saves = 0  # so far; the same on all ranks

    def resumed(self, content: Mapping[str, Any]) -> None:
        if self.ctx.work.sharded:
            check_optimizers(self.checkpoints.fields)

    def started(self) -> None:
        """Find out whether all ranks can write what rank 0 can read."""
        ctx, folder = self.ctx, self.folder.path
        alone = ctx.world_size == 1 or any(each.needs_one_file for each in ctx.callbacks)
        if alone or not ctx.work.sharded:
            return
        token = ctx.on_main(self._create)

        def probe(rank: int) -> Path:
            return folder / f".probe-{token}-{rank}{TMP_PATTERN[1:]}"

        def can_read(rank: int) -> bool:
            with suppress(OSError):
                return probe(rank).read_text() == token
            return False

        with suppress(OSError):
            probe(ctx.rank).write_text(token)
        ctx.gather(None)
        self.used = ctx.on_main(lambda: all(map(can_read, range(ctx.world_size))))
        with suppress(OSError):
            probe(ctx.rank).unlink()
        if not self.used:
            log.info(f"not all processes see {folder.parent}: rank 0 collects each checkpoint in its memory")

    def _create(self) -> str:
        """Create the folder. Returns what no other run has in the names of its files."""
        with storage_errors(self.folder.path):
            self.folder.path.mkdir(exist_ok=True)
            sync_directory(self.folder.path.parent)
        return os.urandom(4).hex()

    def split(self, content: dict[str, Any]) -> tuple[dict[str, Any], WriteRest | None]:
        if not self.used:
            return content, None
        rows: Rows = {}
        rest, copied = self.ctx.streams.download(lambda copy: map_named(content, partial(_take_rows, rows, {}, copy)))
        self.saves += 1
        return rest, partial(self._write_rest, content["step"], self.saves, rows, copied)

    def _write_rest(self, step: int, number: int, rows: Rows, copied: Mark) -> dict[str, Any]:
        """Write the rows of this rank. On rank 0, return the files of all ranks, or raise what any rank has raised.

        It raises why the run ends, if a rank is lost, whose file will not come. One that only fails still answers.
        """
        monitor, store, rank = self.ctx.monitor, self.ctx.monitor.store, self.ctx.rank
        keys = [f"rows/{number}/{other}" for other in range(1, self.ctx.world_size)]
        try:
            copied.wait()
            self.checkpoints.check_finite(rows.items())
            found: Any = self.folder.write(step, rank, rows)
        except Exception as error:
            if rank == 0:
                raise
            found = error if isinstance(error, UserError) else RuntimeError(f"rank {rank} cannot save: {error!r}")
        if rank:
            answer: Any = pickle.dumps(found)
            store.set(keys[rank - 1], answer)
            return {}
        ends_since = time.monotonic()  # when the run was not known to end
        while not store.check(keys):
            if (cause := monitor.cause or monitor.found) is None:
                ends_since = time.monotonic()
            elif time.monotonic() > ends_since + RESPONSE_TIMEOUT_S:  # a rank has had time to learn why
                missing = [other for other, key in enumerate(keys, 1) if not store.check([key])]
                if not all(store.check([f"done/{other}"]) for other in missing):
                    raise cause
            time.sleep(POLL_INTERVAL_S)
        everyone = [found, *(pickle.loads(store.get(key)) for key in keys)]
        for key in keys:
            store.delete_key(key)
        for theirs in everyone:
            if isinstance(theirs, Exception):
                raise theirs
        return {FILES: dict(everyone)}

    def saved(self, step: int) -> None:
        self.folder.delete_unlisted()

    def summary(self) -> str:
        if not self.used:
            return ""
        return f"a checkpoint needs {self.folder.path}; python -m ddp.parts.fsdp.merge makes one file of it"


def _take_rows(rows: Rows, copies: dict[Any, Any], copy: Copy, keys: tuple[Any, ...], tensor: torch.Tensor) -> Any:
    """Copy this rank's rows of a split tensor, and return an empty one in its place; another tensor as it is."""
    # Not a sum of weights, which is no part of the whole.
    if not (is_split(tensor) and all(place.is_shard(0) for place in tensor.placements)):  # type: ignore[attr-defined]
        return tensor
    own = tensor.detach().to_local()  # type: ignore[attr-defined]
    # Tied weights stay one tensor. The data_ptr of a DTensor is always 0, as is that of a rank without rows.
    place = own.data_ptr() or own.untyped_storage().data_ptr() or id(tensor)
    key = (place, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    if key not in copies:
        copies[key] = copy(own)
    rows[keys] = copies[key]
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
