"""Write files atomically, and turn failures to write into one line."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from ddp.core.errors import StorageError

TMP_PATTERN = "*.tmp"  # what a killed run leaves; the next run in this directory deletes it


@contextmanager
def atomic_write(path: Path, mode: str = "wb", *, durable: bool = False) -> Iterator[IO[Any]]:
    """A file that replaces `path` when the block ends without an error. Readers see the old file or the new one.

    durable=True also survives a power cut: the file is synced before the rename, the directory after it.
    """
    tmp_path = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with tmp_path.open(mode) as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        tmp_path.replace(path)
        if durable:
            sync_directory(path.parent)
    finally:
        tmp_path.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Replace `path` with `value` as JSON."""
    with atomic_write(path, "w") as file:
        file.write(json.dumps(value, indent=2) + "\n")


def sync_directory(path: Path) -> None:
    """Make a rename in this directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def storage_errors(path: Path, needed: int | None = None) -> Iterator[None]:
    """Turn an OSError of the block into a StorageError that names `path` and the bytes that it needs."""
    try:
        yield
    except OSError as error:
        reason, remedy = error.strerror or str(error), "fix that"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "free some space"
            with suppress(OSError):
                wanted = f"{needed / 1e6:,.1f} MB needed, " if needed else ""
                reason += f" ({wanted}{shutil.disk_usage(path.parent).free / 1e6:,.1f} MB free)"
        where = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else path
        raise StorageError(
            f"cannot write {where}: {reason}: {remedy}, then run the same command again; earlier checkpoints are intact"
        ) from error
