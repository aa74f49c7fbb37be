"""A rank that waits for data which do not come: print where they are read, stop if asked to, and end at --timeout."""

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp.core.errors import RankHangs, UsageError, numbered
from ddp.core.process_exit import process_exit
from ddp.core.run_config import RunConfig
from ddp.core.signals import stop_signal
from ddp.core.stacks import call_site, dump_stacks, main_stack
from ddp.data.workers import STACK_SIGNAL, Workers
from ddp.distributed.process_group import DistContext
from ddp.distributed.rank_reports import read_key
from ddp.distributed.stop_sync import StopDecision, StopRequested

log = logging.getLogger(__name__)
POLL_INTERVAL_S = 0.5
ASK_AFTER_S = ASK_INTERVAL_S = 4.0  # when a wait is so long, where the workers are is asked; and then again
STOPPED_S = 4 * POLL_INTERVAL_S  # so late, this process did not run
STOP_AFTER_S = 2.0  # without a sign of life of those that read: a stop need not wait for them
WARNING_INTERVAL_S = 180.0
END = object()


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
            if threading.current_thread() is threading.main_thread():
                signal.signal(STACK_SIGNAL, self._interrupt)
        try:
            batch, first = self._next(), True
            while batch is not END:
                if first:
                    self._refuse_shared_file(None)
                yield batch
                batch, first = self._next(), False
        except Exception as error:
            if "DataLoader worker" in str(error):  # what it has read may be damaged
                self._refuse_shared_file(error)
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
            for parent in map(psutil.Process, pids or self.workers.pids or [os.getpid()]):
                for each in (parent, *parent.children(recursive=True)):
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
