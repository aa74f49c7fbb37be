"""The worker processes of a DataLoader: how they begin, whom they obey, and that they end with their process."""

from __future__ import annotations

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

from ddp.ending import ending
from ddp.errors import one_line, say
from ddp.stop import SIGNALS, die_with_parent

log = logging.getLogger(__name__)
PATIENCE_S = (10.0, 60.0)  # so long workers may take to begin, at the first and at the second try


def started(loader: DataLoader) -> Iterator[Any]:
    """iter(loader), with all of its workers at work. The loader has a generator of its own.

    Python before 3.10.15 and 3.11.10 may fork while another thread, mostly one of gloo's, holds a lock that the child
    then waits for, for ever (cpython issue 112275). Such workers are killed, and all of them are started again.
    """
    if loader.num_workers == 0:
        return iter(loader)
    generator = loader.generator
    assert isinstance(generator, torch.Generator)
    before = generator.get_state()
    for patience in PATIENCE_S if multiprocessing.get_start_method() == "fork" else ():
        others = set(multiprocessing.active_children())
        batches, ready = _iterate(loader)
        if _all_have_begun(ready, loader.num_workers, patience):
            return batches
        log.warning("warning: a DataLoader worker did not begin within %g s: starting all of them again", patience)
        workers = set(multiprocessing.active_children()) - others
        del batches  # else torch would take what follows for a failure
        for worker in workers:
            worker.kill()
            worker.join()
        generator.set_state(before)
    return _iterate(loader)[0]


def _iterate(loader: DataLoader) -> tuple[Iterator[Any], Connection]:
    """iter(loader), and where its workers say that they have begun."""
    ready, tell = multiprocessing.Pipe(duplex=False)
    loader.worker_init_fn = partial(_begin, parent=os.getpid(), tell=tell)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until _begin, in the workers
    try:
        return iter(loader), ready
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        tell.close()


def _all_have_begun(ready: Connection, workers: int, patience: float) -> bool:
    """Whether each worker has sent its word. That one was killed meanwhile is for torch to notice."""
    end = time.monotonic() + patience
    with ready, suppress(EOFError):
        for _ in range(workers):
            if not ready.poll(max(0.0, end - time.monotonic())):
                return False
            ready.recv_bytes()
    return True


def _give_up(error: Exception, batch: Any) -> None:
    """In the thread of a worker that hands over batches."""
    say(f"a DataLoader worker cannot hand over a batch: {one_line(error)}", ending.rank)
    os._exit(1)


def _begin(_: int, parent: int, tell: Connection) -> None:
    """In a worker: every process of a job may be asked to stop, but the last step needs its batches."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    show = sys.excepthook
    # When its process is killed, a thread that hands over batches may see that first, and would print a traceback.
    sys.excepthook = lambda kind, error, trace: isinstance(error, ConnectionError) or show(kind, error, trace)
    # A batch that cannot be handed over, since /dev/shm is full, say, would be waited for for ever.
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(_give_up)  # type: ignore[attr-defined]
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it has died already; torch's own watch would take another process for it
        os._exit(1)
    with tell, suppress(OSError):
        tell.send_bytes(b".")
