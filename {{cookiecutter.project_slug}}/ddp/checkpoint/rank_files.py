"""A checkpoint with --shard: each rank writes its own rows, in the background; then rank 0 writes the rest.

So no process needs memory for more than its part, and a save sends nothing. All ranks must see OUTPUT_DIR for that.
Where they do not, as on machines without a shared file system, and where a part needs single files, rank 0 collects all
rows in its memory and writes one file, like that of a run without --shard.
"""

import logging
import os
import pickle
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp.checkpoint.storage import CheckpointDirectory
from ddp.core.errors import UserError
from ddp.core.files import storage_errors, sync_directory
from ddp.core.run_config import RunConfig
from ddp.distributed.process_group import DistContext

log = logging.getLogger(__name__)
POLL_INTERVAL_S = 0.05
Written = tuple[str, str]  # the name of a file, and its digest


class RankFiles:
    """The files of the rows of all ranks. `used`: whether saves write them; the same on all ranks."""

    def __init__(self, config: RunConfig, ctx: DistContext, directory: CheckpointDirectory) -> None:
        self.config, self.ctx, self.directory = config, ctx, directory
        self.used = False
        self.saves = 0  # so far; the same on all ranks

    def open(self) -> None:
        """Find out whether all ranks can write what rank 0 can read. Call on every rank."""
        ctx, folder = self.ctx, self.directory.rows
        if not self.config.shard or ctx.world_size == 1 or any(each.needs_one_file for each in ctx.callbacks):
            return
        token = ctx.on_main(self._create)

        def probe(rank: int) -> Path:
            return folder / f".probe-{token}-{rank}.tmp"

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
        with storage_errors(self.directory.rows):
            self.directory.rows.mkdir(exist_ok=True)
            sync_directory(self.directory.rows.parent)
        return os.urandom(4).hex()

    def collect(self, write: Callable[[], Written | None]) -> dict[str, str]:
        """Call `write` in the background: on rank 0, and on all others if files are `used`.

        Returns what it returned on all ranks, on rank 0, where it raises what any rank has raised; or why the run ends,
        if a rank is lost, whose file will not come. One that only fails still writes its file.
        """
        if not self.used:
            write()
            return {}
        self.saves += 1
        monitor, store, rank = self.ctx.monitor, self.ctx.monitor.store, self.ctx.rank
        keys = [f"rows/{self.saves}/{other}" for other in range(1, self.ctx.world_size)]
        try:
            found: Any = write()
        except Exception as error:
            if rank == 0:
                raise
            found = error if isinstance(error, UserError) else RuntimeError(f"rank {rank} cannot save: {error!r}")
        if rank:
            answer: Any = pickle.dumps(found)
            store.set(keys[rank - 1], answer)
            return {}
        while not store.check(keys):
            monitor.raise_if_lost(lambda: [other for other, key in enumerate(keys, 1) if not store.check([key])])
            time.sleep(POLL_INTERVAL_S)
        everyone = [found, *(pickle.loads(store.get(key)) for key in keys)]
        for key in keys:
            store.delete_key(key)
        for theirs in everyone:
            if isinstance(theirs, Exception):
                raise theirs
        return dict(everyone)
