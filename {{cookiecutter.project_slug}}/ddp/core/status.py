"""status.json: the progress of a run, or how it ended. Rank 0 writes it; if rank 0 was killed, its launcher does."""

import json
import os
import platform
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp.core.errors import ExitCode
from ddp.core.files import write_json
from ddp.core.run_config import DEFAULT_PARENT


def write_status(output_dir: Path, **status: Any) -> None:
    """Replace status.json, and record the process that wrote it."""
    status |= {"pid": os.getpid(), "host": platform.node()}
    try:
        write_json(output_dir / "status.json", status)
    except OSError:
        if not status.get("exit_code"):
            raise
        # At the end of a failed run the disk may be full: overwrite the old file in place, or leave it as it is.
        with suppress(OSError):
            (output_dir / "status.json").write_text(json.dumps(status, indent=2) + "\n")


def read_status(output_dir: Path) -> dict[str, Any]:
    """The content of status.json; empty if there is none on this machine."""
    with suppress(OSError, ValueError):
        if isinstance(status := json.loads((output_dir / "status.json").read_text()), dict):
            return status
    return {}


def output_dirs(output_dir: str) -> list[Path]:
    """`output_dir`, of --output-dir; or every directory that may be the default one, which only the workers know."""
    return [Path(output_dir)] if output_dir else sorted(Path(DEFAULT_PARENT).glob("*"))


def correct_status(output_dir: Path, dead_pids: Collection[int], exit_code: int, message: str) -> None:
    """If status.json reports one of `dead_pids` as running, record how the run ended instead."""
    status = read_status(output_dir)
    ours = status.get("host") == platform.node() and status.get("pid") in dead_pids
    if status.get("state") == "running" and ours:
        status |= {"state": "stopped" if exit_code == ExitCode.STOPPED else "failed"}
        with suppress(OSError):
            write_json(output_dir / "status.json", status | {"exit_code": exit_code, "message": message})
