"""DataLoader workers: start them, find at which line each is, and watch how long this rank waits for them.

A rank that waits for data which do not come prints where they are read, stops if it is asked to, and ends at --timeout.
"""

import faulthandler
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import takewhile
from multiprocessing.util import Finalize
from pathlib import Path
from traceback import FrameSummary
from typing import IO, Any

from torch.utils.data import DataLoader

from ddp.core.errors import RankHangs, SetupError, UsageError, numbered
from ddp.core.process_exit import kill_workers, process_exit
from ddp.core.run_config import RunConfig
from ddp.core.signals import STOP_SIGNALS, die_with_parent, send_signal, stop_signal, with_descendants
from ddp.core.threads import call_site, dump_stacks, main_stack
from ddp.data.inherited import SHARED_CONNECTION, connections, file_positions, leave_connections
from ddp.distributed.process_group import DistContext
from ddp.distributed.rank_reports import read_key
from ddp.distributed.stop_sync import StopDecision, StopRequested

log = logging.getLogger(__name__)
START_TIMEOUT_S = 10.0  # for a worker to start; six times as long at each further attempt
STACK_SIGNAL = signal.SIGURG  # asks a worker for its stack. By default it is ignored, so it does no harm too early
STACK_TIMEOUT_S = 1.0
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)  # of faulthandler
POLL_INTERVAL_S = 0.5
ASK_AFTER_S = ASK_INTERVAL_S = 4.0  # when a wait is so long, where the workers are is asked; and then again
STOPPED_S = 4 * POLL_INTERVAL_S  # so late, this process did not run
STOP_AFTER_S = 2.0  # without a sign of life of those that read: a stop need not wait for them
WARNING_INTERVAL_S = 180.0
END = object()


@dataclass
class Workers:
    """The workers of a DataLoader, which run. Without workers, this process reads."""

    batches: Iterator[Any]  # what they read, in order
    pids: list[int] = field(default_factory=list)
    stacks: IO[bytes] | None = None  # a file to which each worker writes its stack on STACK_SIGNAL
    positions: dict[str, Any] = field(default_factory=dict)  # of the files that were open before they were forked

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
        """A file that was open before the workers were forked, if its position has moved since, and not by a write."""
        now = file_positions() if self.positions else {}
        pairs = {path: (facts, now[path]) for path, facts in self.positions.items() if path in now}
        return next((path for path, (one, two) in pairs.items() if one[0] != two[0] and one[1:] == two[1:]), "")


def start_workers(loader: DataLoader) -> Workers:
    """iter(loader), once all of its workers run.

    Python before 3.10.15 and 3.11.10 may fork while another thread, usually one of gloo's, holds a lock that the child
    then waits for and never gets (cpython issue 112275). Such workers are killed, and all are started again.
    """
    forks = multiprocessing.get_start_method() == "fork"
    timeout = START_TIMEOUT_S if forks else 3600.0  # others import torch first
    stacks = os.fdopen(os.memfd_create("stacks"), "w+b") if forks and hasattr(os, "memfd_create") else None
    inherits = forks and loader.num_workers
    positions, sockets = (file_positions(), connections()) if inherits else ({}, {})
    _kill_at_exit(os.getpid())
    while True:
        others = set(multiprocessing.active_children())
        try:
            started: Any = multiprocessing.Semaphore(0) if loader.num_workers else None
        except OSError as error:
            raise SetupError(f"no DataLoader worker can start ({error.strerror}): is /dev/shm writable?") from error
        loader.worker_init_fn = partial(_start_worker, os.getpid() if forks else None, started, stacks, sockets)
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


def _start_worker(
    parent: int | None, started: Any, stacks: IO[bytes] | None, sockets: Mapping[int, str], _: int
) -> None:
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
    leave_connections(sockets)
    started.release()


class DataWait:
    """Iterates over the batches of `workers`, while a thread watches how long this rank waits for each.

    The clock restarts with each sign of life of a process that reads: slow data are no hang.
    """

    def __init__(self, config: RunConfig, ctx: DistContext, workers: Workers) -> None:
        self.config, self.ctx, self.workers, self.store = config, ctx, workers, ctx.monitor.store
        self.began: float | None = None  # when this rank began to wait
        self.ask_after_s = min(ASK_AFTER_S, config.warn_after / 2, config.timeout / 2)
        self.voted = False  # whether it has asked the others to stop where it waits
        self.decision: StopDecision | None = None  # of all ranks, which all wait for data
        self.lock, self.closed = threading.Lock(), threading.Event()

    def __iter__(self) -> Iterator[Any]:
        """Raises StopRequested on every rank if all are asked to stop while they wait for data that do not come."""
        if os.path.isdir("/proc/self/task"):  # otherwise nothing tells a slow dataset from one that hangs
            threading.Thread(target=self._watch, name="data wait", daemon=True).start()
        try:
            batch = self._next()
            self._refuse_shared_file(None)
            while batch is not END:
                yield batch
                batch = self._next()
        except Exception as error:
            if "DataLoader worker" in str(error):  # what it has read may be damaged
                self._refuse_shared_file(error)
            if self.workers.pids and SHARED_CONNECTION.search(str(error)):
                reason = "a connection was opened before the DataLoader workers, which cannot share it"
                raise UsageError(f"{reason}: open it in __getitem__, once per process: see docs/data.md") from error
            raise
        finally:
            self.closed.set()
            if signal.getsignal(STACK_SIGNAL) == self._interrupt:  # which would keep the workers' queues
                with suppress(ValueError):  # not in the main thread
                    signal.signal(STACK_SIGNAL, signal.SIG_DFL)

    def _refuse_shared_file(self, error: Exception | None) -> None:
        path = self.workers.shared_file()
        if path and not Path(path).is_relative_to(os.path.realpath(self.config.output_dir)):  # a thread may read those
            remedy = "open it in __getitem__, once per process, or read with os.pread: see docs/data.md"
            raise UsageError(f"{path} was opened before the DataLoader workers, which share it: {remedy}") from error

    def _next(self) -> Any:
        if threading.current_thread() is threading.main_thread():  # an evaluation between two steps has set its own
            signal.signal(STACK_SIGNAL, self._interrupt)
        self.began = time.monotonic()
        try:
            batch = next(self.workers.batches, END)
        finally:
            with self.lock:
                self.began = None
        if self.voted:
            self._vote(joins=False)
            if self.decision is not None:
                raise StopRequested(self.decision)
        return batch

    def _interrupt(self, *_: Any) -> None:
        """In the main thread: end its wait. A call that never returns to Python cannot be ended; --timeout does."""
        if self.began is not None and self.decision is not None:
            raise StopRequested(self.decision)

    def _watch(self) -> None:
        """In the thread, as all methods below, but `_vote`."""
        waiting = idle_since = asked_at = next_warning = 0.0
        now = time.monotonic()
        sites: dict[int, str] = {}
        signs: Any = None
        while not self.closed.wait(POLL_INTERVAL_S):
            began, before, now = self.began, now, time.monotonic()
            if began is None or now - began < self.ask_after_s:
                continue
            stood_still = now - before > STOPPED_S  # all of them, as after Ctrl-Z
            alive = began != waiting or stood_still or self._signs_of_life(sites) != signs
            if began != waiting:
                waiting, asked_at, next_warning = began, 0.0, self.config.warn_after
                idle_since = max(began, now - self.ask_after_s - STOPPED_S)
            elif alive:
                idle_since = now
            if alive and now - asked_at >= ASK_INTERVAL_S:
                asked_at = now  # not those that have nothing to do, which look for work now and then
                sites = {pid: site for pid in self.workers.pids if (site := self.workers.site(pid))}
            if alive:  # the question has woken the workers
                signs = self._signs_of_life(sites)
            idle = now - idle_since
            if idle >= self.config.timeout and self.began == began:
                self._exit(self._reader(sites))
            elif idle >= next_warning:
                next_warning = idle + WARNING_INTERVAL_S
                log.warning("warning: rank %d waits for %s", self.ctx.rank, self._reader(sites))
            if idle >= STOP_AFTER_S:
                with suppress(RuntimeError):  # the store is gone: the failure monitor notices that
                    self._stop()

    def _signs_of_life(self, pids: Collection[int]) -> Any:
        """Changes when a process that reads runs, or reads bytes. Of this process, when its main thread runs."""
        import psutil

        found: list[Any] = []
        with suppress(psutil.Error, OSError):  # one has ended: that is a sign as well
            for each in with_descendants(*map(psutil.Process, pids or self.workers.pids or [os.getpid()])):
                found.append([each.pid, sum(each.num_ctx_switches())])
                if each.pid != os.getpid():  # where gloo's threads run all the time
                    found.append([*each.cpu_times()[:2], each.io_counters().read_chars])
        return found

    def _reader(self, sites: Mapping[int, str]) -> str:
        """`DataLoader worker 4711, which is at data.py:26`: what this rank waits for."""
        if sites:
            return ", and ".join(f"DataLoader worker {pid}, which {site}" for pid, site in sites.items())
        if self.workers.pids:
            return numbered("DataLoader worker", self.workers.pids)
        stack = main_stack()
        return f"a sample, which it reads at {call_site(stack) or f'{stack[0].filename}:{stack[0].lineno}'}"

    def _exit(self, reader: str) -> None:
        """End this process, and with it the run."""
        monitor = self.ctx.monitor
        dump_stacks(self.ctx.rank)
        waited = f"rank {self.ctx.rank} has waited {self.config.timeout:g} s (--timeout) for {reader}"
        cause = monitor.resolve_root_cause(RankHangs(f"{waited}; nothing was read or computed meanwhile"))
        monitor.add_saved_step(cause)
        monitor.wait_for_others()
        process_exit.hard_exit(cause)

    def _stop(self) -> None:
        """If a stop was requested, and every rank waits for the first batch of the same step: all stop there."""
        asked = stop_signal.reason is not None or (self.ctx.world_size > 1 and read_key(self.store, self._key))
        if asked and not self.ctx.work.in_step:
            with self.lock:
                if self.began is not None:
                    self.voted = True
                    self._vote(joins=True)
            if self.decision is not None:
                signal.pthread_kill(threading.main_thread().ident or 0, STACK_SIGNAL)

    @property
    def _key(self) -> str:
        return f"waits/{self.ctx.work.step}"

    def _vote(self, *, joins: bool) -> None:
        """Add this rank to those that wait and would stop, or remove it; once all ranks are there, none can leave."""
        while self.decision is None:
            before = read_key(self.store, self._key)
            votes = json.loads(before or "{}")
            if len(votes) < self.ctx.world_size:
                votes.pop(str(self.ctx.rank), None)
                votes |= {str(self.ctx.rank): stop_signal.reason or 0} if joins else {}
                after = json.dumps(votes)
                if self.store.compare_set(self._key, before, after).decode() != after:
                    continue
            if len(votes) == self.ctx.world_size:
                self.decision = StopDecision(max(votes.values()), False)
                self.ctx.stop_sync.decided = True
            return
