"""The files of a run: atomic writes, status.json, and hashes of the source files. A failed write is one line."""

import errno
import hashlib
import json
import os
import platform
import shutil
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from ddp.core.errors import ExitCode, SetupError, StorageError

PROJECT_DIR = Path(__file__).resolve().parents[2]
TMP_PATTERN = "*.ddp.tmp"  # what a killed run leaves; the next run in this directory deletes it


@contextmanager
def atomic_write(path: Path, mode: str = "wb", *, durable: bool = False) -> Iterator[IO[Any]]:
    """A file that replaces `path` when the block ends without an error. Readers see the old file or the new one.

    durable=True also survives a power cut: the file is synced before the rename, the directory after it.
    """
    tmp_path = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_native_id()}{TMP_PATTERN[1:]}")
    with temporary(tmp_path, path):
        with tmp_path.open(mode) as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        tmp_path.replace(path)
        if durable:
            sync_directory(path.parent)


def temporary_directory(prefix: str) -> TemporaryDirectory[str]:
    """A new directory for temporary files. Raises SetupError if they have no place."""
    try:
        return TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
    except OSError as error:
        raise SetupError(f"{error.strerror}: set TMPDIR to a directory in which one can write") from error


@contextmanager
def temporary(tmp_path: Path, path: Path) -> Iterator[None]:
    """Delete `tmp_path` if the block, in which it becomes `path`, fails. An OSError then names `path`."""
    try:
        yield
    except BaseException as error:
        with suppress(OSError):  # there is none after a rename; on a failing disk, the next start deletes it
            tmp_path.unlink()
        if isinstance(error, OSError):
            error.filename = str(path)
        raise


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


def write_status(output_dir: Path, **status: Any) -> None:
    """Replace status.json, and record the process that wrote it."""
    path = output_dir / "status.json"
    status = {"pid": os.getpid(), "host": platform.node()} | status
    try:
        write_json(path, status)
    except OSError:
        if not status.get("exit_code"):
            raise
        # At the end of a failed run the disk may be full: overwrite the old file in place, or leave it as it is.
        with suppress(OSError):
            path.write_text(json.dumps(status))


def read_status(output_dir: Path) -> dict[str, Any]:
    """The content of status.json; empty if there is none on this machine."""
    with suppress(OSError, ValueError, TypeError):
        return dict(json.loads((output_dir / "status.json").read_text()))
    return {}


def correct_status(output_dir: Path, dead_pids: Collection[int], exit_code: int, message: str) -> None:
    """If status.json reports one of `dead_pids` as running, record how the run ended instead."""
    status = read_status(output_dir)
    ours = status.get("host") == platform.node() and status.get("pid") in dead_pids
    if ours and status.get("state") == "running":
        state = "stopped" if exit_code == ExitCode.STOPPED else "failed"
        with suppress(OSError):
            write_status(output_dir, **status | {"state": state, "exit_code": exit_code, "message": message})


def hash_source_files(project: Path = PROJECT_DIR) -> dict[str, str]:
    """`the file NAME` -> the first 12 digits of its SHA-256, for launch_node.sh and every Python file of `project`."""
    files = [project / "launch_node.sh", *project.glob("*.py")]
    for folder in project.iterdir():  # those with Python files at their top level
        with suppress(OSError):
            if folder.name[0] != "." and folder.name != "tests" and any(folder.glob("*.py")):
                files += folder.rglob("*.py")
    return {
        f"the file {file.relative_to(project)}": hashlib.sha256(file.read_bytes()).hexdigest()[:12]
        for file in sorted(files)
        if file.is_file()  # an editor's lock, .#main.py, is a link to nothing
    }
