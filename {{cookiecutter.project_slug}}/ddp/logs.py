"""OUT/logs/rank_N.log: all that a rank says, under launch_node.sh; also what only libraries written in C say.

The console shows rank 0, and of the others warnings and errors. The file has every rank's lines, with the time; what
is printed by hand; and what NCCL (NCCL_DEBUG=INFO), CUDA or a crash print past Python: on the console that would be a
tangle of all ranks.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import platform
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

log = logging.getLogger(__name__)
VARIABLE = "DDP_RANK_LOGS"  # the folder; launch_node.sh sets it


def keep(rank: int, world_size: int) -> None:
    """From now on, write down what this rank says, if its launcher wants that: on each machine, for its own ranks."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    path = path_of(folder, rank)
    where = f"rank {rank} of {world_size} on {platform.node()}, process {os.getpid()}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", buffering=1, encoding="utf-8", errors="backslashreplace")
        file.write(f"---- {time.strftime('%Y-%m-%d %H:%M:%S')}  {where} ----\n")
    except OSError as error:
        log.warning("warning: no log of this rank: cannot write %s: %s", path, error.strerror)
        return
    streams = [_past_python(stream, file) for stream in (sys.stdout, sys.stderr)]
    for handler in logging.getLogger("ddp").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(streams[0])
    to_file = _Quiet(file)
    to_file.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    logger = logging.getLogger("ddp")
    logger.addHandler(to_file)
    logger.setLevel(logging.INFO)
    # Of what is printed by hand, the console shows rank 0's.
    sys.stdout = file if rank else _Both(streams[0], file)  # type: ignore[assignment]
    sys.stderr = _Both(streams[1], file)  # type: ignore[assignment]
    faulthandler.enable(file)


def path_of(folder: str | Path, rank: int) -> Path:
    """Of the log of a rank."""
    return Path(folder) / f"rank_{rank}.log"


def console(stream: Any) -> Any:
    """`stream` without the file behind it: for a progress bar."""
    return stream.console if isinstance(stream, _Both) else stream


def places(stream: Any) -> tuple[Any, ...]:
    """Where `stream` goes, as streams with a descriptor each."""
    return (stream.console, stream.file) if isinstance(stream, _Both) else (stream,)


def _past_python(stream: TextIO, file: TextIO) -> TextIO:
    """Send what goes to the stream's descriptor past Python to `file`. Returns a stream to where it went before."""
    stream.flush()
    number = stream.fileno()
    before = os.fdopen(os.dup(number), "w", buffering=1, encoding=stream.encoding, errors=stream.errors)
    os.dup2(file.fileno(), number)
    return before


class _Both:
    """A stream to the console, and to the file."""

    def __init__(self, console: TextIO, file: TextIO) -> None:
        self.console, self.file = console, file

    def write(self, text: str) -> int:
        with suppress(OSError):  # the disk may be full, and that is not the fault of who prints
            self.file.write(text)
        return self.console.write(text)

    def flush(self) -> None:
        self.console.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.console, name)


class _Quiet(logging.StreamHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """As above: the run goes on."""
