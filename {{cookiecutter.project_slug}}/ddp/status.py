"""status.json: how far a run is, or how it ended. Rank 0 writes it; if that was killed, its launcher corrects it."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Replace `path`: whoever reads it sees the old or the new one."""
    beside = path.with_name(f"{path.stem}.{os.getpid()}.json.tmp")
    try:
        beside.write_text(json.dumps(value, indent=2) + "\n")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_status(folder: Path, **status: Any) -> None:
    """Replace status.json; adds the process that writes it."""
    write_json(folder / "status.json", {**status, "pid": os.getpid(), "host": platform.node()})


def write_last_status(folder: Path, **status: Any) -> None:
    """The same, at the end of a run that failed: on a full disk into the room that the old one has, or not at all."""
    try:
        write_status(folder, **status)
    except OSError:
        with suppress(OSError):
            said = {**status, "pid": os.getpid(), "host": platform.node()}
            (folder / "status.json").write_text(json.dumps(said, indent=2) + "\n")


def read_status(folder: Path) -> dict[str, Any]:
    """What status.json of an output folder says; empty if there is none on this machine."""
    with suppress(OSError, ValueError):
        status = json.loads((folder / "status.json").read_text())
        return status if isinstance(status, dict) else {}
    return {}


def correct_status(folder: Path, gone: Collection[int], exit_code: int, message: str) -> None:
    """If status.json says that one of the processes in `gone` runs, let it say how that ended."""
    status = read_status(folder)
    if status.get("state") == "running" and status.get("host") == platform.node() and status.get("pid") in gone:
        state = "stopped" if exit_code == 75 else "failed"
        with suppress(OSError):
            write_json(folder / "status.json", {**status, "state": state, "exit_code": exit_code, "message": message})
