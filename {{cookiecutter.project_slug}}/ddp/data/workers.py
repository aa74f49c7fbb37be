"""DataLoader workers: start them, hand over what they read, find at which line each is, and which files they share."""

import faulthandler
import logging
import multiprocessing
import os
import pickle
import re
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import takewhile
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from pathlib import Path
from traceback import FrameSummary
from typing import IO, Any

from torch.utils.data import DataLoader, get_worker_info

from ddp.core.errors import PeerLost, UsageError, one_line
from ddp.core.process_exit import kill_workers
from ddp.core.signals import STOP_SIGNALS, die_with_parent, send_signal
from ddp.core.stacks import call_site

log = logging.getLogger(__name__)
START_TIMEOUT_S = 10.0  # for a worker to start; six times as long at each further attempt
STACK_SIGNAL = signal.SIGURG  # asks a worker for its stack. By default it is ignored, so it does no harm too early
STACK_TIMEOUT_S = 1.0
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)  # of faulthandler


@dataclass
class Workers:
    """The workers of a DataLoader, which run. Without workers, this process reads."""

    batches: Iterator[Any]  # what they read, in order
    pids: list[int] = field(default_factory=list)
    stacks: IO[bytes] | None = None  # a file to which each worker writes its stack on STACK_SIGNAL
    positions: dict[str, int] = field(default_factory=dict)  # of the files that were open before they were forked

    def site(self, pid: int) -> str:
        """What a worker does: `is at data.py:26 (read)`, or `does not respond`; empty if it waits for work."""
        if self.stacks is None:
            return ""
        self.stacks.seek(0)
        self.stacks.truncate()
        send_signal(pid, STACK_SIGNAL)
        end, text = time.monotonic() + STACK_TIMEOUT_S, ""
        while not text.endswith("\n") and time.monotonic() < end:
            time.sleep(0.05)
            text = os.pread(self.stacks.fileno(), 1 << 16, 0).decode(errors="replace")
        frames = [FrameSummary(file, int(line), name) for file, line, name in FRAME.findall(text)]
        stack = list(takewhile(lambda frame: frame.name != "_worker_loop", frames))  # what comes before is this process
        if not stack:
            return "does not respond"
        if stack[-1].filename.endswith("multiprocessing/queues.py"):  # the outermost: not a queue of its owner
            return ""
        return f"is at {call_site(stack) or f'{Path(stack[0].filename).name}:{stack[0].lineno} ({stack[0].name})'}"

    def shared_file(self) -> str:
        """A file that was open before the workers were forked, if they have moved its position since."""
        now = _positions() if self.positions else {}
        return next((path for path, position in self.positions.items() if now.get(path, position) != position), "")


def _positions() -> dict[str, int]:
    """The position of each regular file that this process has opened to read, by its path and descriptor."""
    found: dict[str, int] = {}
    for number in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with suppress(OSError, ValueError):  # it was closed meanwhile
            facts = dict(line.split(":\t") for line in Path(f"/proc/self/fdinfo/{number}").read_text().splitlines()[:2])
            read_only = int(facts["flags"], 8) & os.O_ACCMODE == os.O_RDONLY
            if read_only and stat.S_ISREG(os.fstat(int(number)).st_mode):
                path = os.readlink(f"/proc/self/fd/{number}")
                found |= {} if path.startswith("/proc/") else {f"{path} (descriptor {number})": int(facts["pos"])}
    return found


class _Pickled:
    """A batch as bytes: if the thread of the worker's queue pickled it, an error would not reach the waiting rank."""

    def __init__(self, batch: Any) -> None:
        self.content = bytes(ForkingPickler.dumps(batch))

    def __reduce__(self) -> Any:
        return pickle.loads, (self.content,)


def hand_over(batch: Any) -> Any:
    """Pickle a batch in a worker. It is collated already. Raises PeerLost if memory ran out, for example."""
    try:
        return batch if get_worker_info() is None else _Pickled(batch)
    except (RuntimeError, OSError) as error:
        if "path too long" in str(error):
            where = tempfile.gettempdir()
            raise UsageError(f"DataLoader workers open sockets in {where}: set TMPDIR to a shorter path") from error
        reason = f"{one_line(error)}; if memory ran out: lower --workers, or enlarge /dev/shm"
        raise PeerLost(f"a DataLoader worker cannot hand over a batch: {reason}") from error


def start_workers(loader: DataLoader) -> Workers:
    """iter(loader), once all of its workers run.

    Python before 3.10.15 and 3.11.10 may fork while another thread, usually one of gloo's, holds a lock that the child
    then waits for and never gets (cpython issue 112275). Such workers are killed, and all are started again.
    """
    forks = multiprocessing.get_start_method() == "fork"
    timeout = START_TIMEOUT_S if forks else 3600.0  # others import torch first
    stacks = os.fdopen(os.memfd_create("stacks"), "w+b") if forks and hasattr(os, "memfd_create") else None
    positions = _positions() if forks and loader.num_workers else {}
    _kill_at_exit(os.getpid())
    while True:
        others, started = set(multiprocessing.active_children()), multiprocessing.Semaphore(0)
        loader.worker_init_fn = partial(_start_worker, os.getpid() if forks else None, started, stacks)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until _start_worker, in the workers
        try:
            batches = iter(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        workers = set(multiprocessing.active_children()) - others if loader.num_workers else set()
        if all(started.acquire(timeout=timeout) for _ in range(loader.num_workers)):
            return Workers(batches, [worker.pid for worker in workers if worker.pid], stacks, positions)
        log.warning("warning: a DataLoader worker did not start within %g s: starting all of them again", timeout)
        del batches  # otherwise torch would report the killed workers as a failure
        for worker in workers:
            worker.kill()
            worker.join()
        timeout *= 6


@cache
def _kill_at_exit(pid: int) -> None:
    """Once in each process, which may be another program than main.py and leave an epoch before its end."""
    Finalize(None, kill_workers, exitpriority=0)  # before multiprocessing waits for them


def _start_worker(parent: int | None, started: Any, stacks: IO[bytes] | None, _: int) -> None:
    """In a worker. Every process of a job may be asked to stop, but the last step needs its batches."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    # multiprocessing's thread that sends shared memory reports here, if the rank is killed before this process.
    show = sys.excepthook
    sys.excepthook = lambda kind, error, trace: isinstance(error, OSError | EOFError) or show(kind, error, trace)
    die_with_parent(signal.SIGKILL)
    if parent not in (None, os.getppid()):  # it is dead already; torch's own check would take another process for it
        os._exit(1)
    if stacks is not None:  # written by a handler in C, also while the worker waits for a lock
        faulthandler.register(STACK_SIGNAL, stacks, all_threads=False)
    started.release()
