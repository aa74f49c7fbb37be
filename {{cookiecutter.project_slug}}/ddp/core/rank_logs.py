"""OUTPUT_DIR/logs/rank_N.log: everything that a rank prints under launch_node.sh, including output of C libraries.

The console shows rank 0, and warnings and errors of the other ranks. The file holds every line of its rank with the
time, what is printed by hand, and what NCCL (NCCL_DEBUG=INFO), CUDA or a crash write without Python.
"""

import faulthandler
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

log = logging.getLogger(__name__)
PROGRESS_AFTER_S = 2.0
RANK_LOGS_VARIABLE = "DDP_RANK_LOGS"  # launch_node.sh sets it


def set_up_logging(rank: int) -> None:
    """One logger that every rank may call: rank 0 prints everything, the others warnings, with their rank."""
    from tqdm import tqdm  # not needed to check a command line

    tqdm.set_lock(threading.RLock())  # tqdm's default is a system-wide semaphore, which outlives a killed process
    handler = _ConsoleHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s" if rank == 0 else f"[rank {rank}] %(message)s"))
    handler.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger = logging.getLogger("ddp")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO)


class _ConsoleHandler(logging.StreamHandler):
    """Prints lines above a progress bar, if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        with tqdm.external_write_mode(console(sys.stderr)):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # the reader may be gone, as in `| head`: the run continues
            super().handleError(record)


def start_rank_log(rank: int, world_size: int, output_dir: str) -> None:
    """Write what this rank prints to its own file from now on, if its launcher asks for that."""
    if RANK_LOGS_VARIABLE not in os.environ:
        return
    path = rank_log_path(output_dir, rank)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", buffering=1, encoding="utf-8", errors="backslashreplace")
        when, where = time.strftime("%Y-%m-%d %H:%M:%S"), f"{platform.node()}, process {os.getpid()}"
        file.write(f"---- {when}  rank {rank} of {world_size} on {where} ----\n")
    except OSError as error:
        log.warning("warning: no log of this rank: cannot write %s: %s", path, error.strerror)
        return
    consoles = []
    for stream in (sys.stdout, sys.stderr):  # what C code writes to their descriptors goes to the file
        stream.flush()
        copy = os.dup(stream.fileno())
        consoles.append(os.fdopen(copy, "w", buffering=1, encoding=stream.encoding, errors=stream.errors))
        os.dup2(file.fileno(), stream.fileno())
    logger = logging.getLogger("ddp")
    for handler in logger.handlers:
        if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
            handler.setStream(consoles[0])
    to_file = logging.StreamHandler(file)
    to_file.handleError = lambda record: None  # type: ignore[method-assign]  # a full disk must not stop the run
    to_file.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    logger.addHandler(to_file)
    # Of what is printed by hand, the console shows only rank 0's.
    sys.stdout = _Tee(file if rank else consoles[0], file)  # type: ignore[assignment]
    sys.stderr = _Tee(consoles[1], file)  # type: ignore[assignment]
    faulthandler.enable(file)


def rank_log_path(output_dir: str | Path, rank: int) -> Path:
    return Path(output_dir) / "logs" / f"rank_{rank}.log"


def console(stream: Any) -> Any:
    """`stream` without the log file: for a progress bar."""
    return stream.console if isinstance(stream, _Tee) else stream


def progress(items: Sequence[Any], title: str, unit: str = "block") -> Iterator[Any]:
    """`items`, with a bar on a terminal once they have taken a while."""
    from tqdm import tqdm  # not needed to check a command line

    about: dict[str, Any] = {"unit": unit, "leave": False, "disable": None, "file": console(sys.stderr)}
    yield from tqdm(items, desc=title, delay=PROGRESS_AFTER_S, **about)


class _Tee:
    """A stream to the console, which may be the log file itself, and to the log file."""

    def __init__(self, console: TextIO, file: TextIO) -> None:
        self.console, self.file = console, file

    def write(self, text: str) -> int:
        with suppress(OSError):  # a full disk must not fail the caller's print
            self.file.write(text)
        return self.console.write(text) if self.console is not self.file else len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self.file.flush()
        if self.console is not self.file:
            self.console.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.console, name)
