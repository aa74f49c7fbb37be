"""The worker processes of a DataLoader: they all start, ignore requests to stop, and exit with their rank."""

import logging
import multiprocessing.queues
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.utils.data import DataLoader

from ddp.core.errors import one_line, print_line
from ddp.core.process_exit import process_exit
from ddp.core.signals import STOP_SIGNALS, die_with_parent

log = logging.getLogger(__name__)
START_TIMEOUT_S = (10.0, 60.0)  # for all workers to start, at the first and at the second attempt


def start_workers(loader: DataLoader) -> Iterator[Any]:
    """iter(loader), once all of its workers run. The loader needs a generator of its own.

    Python before 3.10.15 and 3.11.10 may fork while another thread, usually one of gloo's, holds a lock that the child
    then waits for and never gets (cpython issue 112275). Such workers are killed, and all are started again.
    """
    if loader.num_workers == 0:
        return iter(loader)
    generator = loader.generator
    assert isinstance(generator, torch.Generator)
    before = generator.get_state()
    for timeout in START_TIMEOUT_S if multiprocessing.get_start_method() == "fork" else ():
        others = set(multiprocessing.active_children())
        batches, ready = _iterate(loader)
        if _all_started(ready, loader.num_workers, timeout):
            return batches
        log.warning("warning: a DataLoader worker did not start within %g s: starting all of them again", timeout)
        workers = set(multiprocessing.active_children()) - others
        del batches  # otherwise torch would report the killed workers as a failure
        for worker in workers:
            worker.kill()
            worker.join()
        generator.set_state(before)
    return _iterate(loader)[0]


def _iterate(loader: DataLoader) -> tuple[Iterator[Any], Connection]:
    """iter(loader), and the connection on which each worker reports that it started."""
    ready, report = multiprocessing.Pipe(duplex=False)
    loader.worker_init_fn = partial(_start, parent=os.getpid(), report=report)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until _start, in the workers
    try:
        return iter(loader), ready
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        report.close()


def _all_started(ready: Connection, workers: int, timeout: float) -> bool:
    """Whether each worker has reported in time. torch itself notices a worker that was killed meanwhile."""
    end = time.monotonic() + timeout
    with ready, suppress(EOFError):
        for _ in range(workers):
            if not ready.poll(max(0.0, end - time.monotonic())):
                return False
            ready.recv_bytes()
    return True


def _start(_: int, parent: int, report: Connection) -> None:
    """In a worker. Every process of a job may be asked to stop, but the last step needs its batches."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    show = sys.excepthook
    # When the rank is killed, the thread that hands over batches may notice first, and would print a traceback.
    sys.excepthook = lambda kind, error, trace: isinstance(error, ConnectionError) or show(kind, error, trace)
    # By default, a rank waits without end for a batch that cannot be handed over, for example because /dev/shm is full.
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(_exit_on_error)  # type: ignore[attr-defined]
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it is dead already; torch's own check would take another process for it
        os._exit(1)
    with report, suppress(OSError):
        report.send_bytes(b".")


def _exit_on_error(error: Exception, batch: Any) -> None:
    """In the thread of a worker that hands over batches."""
    print_line(f"a DataLoader worker cannot hand over a batch: {one_line(error)}", process_exit.rank)
    os._exit(1)
