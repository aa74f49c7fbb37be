"""A rank that waits for data which do not come: print where they are read, stop if asked to, and end at --timeout."""

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
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
ASK_AFTER_S = 5.0  # from when on a process that wakes up counts as one that works, unless it waits for work
STOP_AFTER_S = 2.0  # without a sign of life of those that read: a stop need not wait for them
WARNING_INTERVAL_S = 180.0
TICK_INTERVAL_S = 30.0  # a process that only waits, and looks for work now and then, uses less than 10 ms in that time
SERVES = ("gloo", "pt_", "nccl", "cuda")  # the names of threads of torch and CUDA that poll
END = object()
Usage = dict[int, tuple[int, int, int]]  # by process: ticks of 10 ms that it has computed, bytes read, times it woke up


class DataWait:
    """Iterates over the batches of `workers`, while a thread watches how long this rank waits for each.

    The clock restarts whenever a process that reads uses the processor, or reads bytes: slow data are no hang.
    """

    def __init__(self, config: RunConfig, ctx: DistContext, workers: Workers) -> None:
        self.config, self.ctx, self.workers = config, ctx, workers
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

    def _refuse_shared_file(self, error: Exception | None) -> None:
        if (path := self.workers.shared_file()) and self.config.output_dir not in path:
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
        waiting = idle_since = next_warning = 0.0
        used: Usage = {}
        busy: list[int] | None = None  # the processes that read, once nothing has happened for a while
        while not self.closed.wait(POLL_INTERVAL_S):
            began, now = self.began, time.monotonic()
            if began is None or now - began < POLL_INTERVAL_S:
                continue
            if began != waiting:
                waiting = idle_since = began
                used, busy, next_warning = self._usage(), None, self.config.warn_after
            elif _works(used, self._usage(busy), now - idle_since, exact=bool(busy)):
                used, busy, idle_since = self._usage(), None, now
            idle = now - idle_since
            if idle >= self.config.timeout:
                self._exit()
            elif idle >= next_warning or (idle >= self.ask_after_s and busy is None):
                sites = self._sites()
                if idle >= next_warning:
                    next_warning = idle + WARNING_INTERVAL_S
                    log.warning("warning: rank %d waits for %s", self.ctx.rank, self._reader(sites))
                busy = list(sites) if self.workers.pids else [os.getpid()]
                used = self._usage(busy)  # the question has woken them
            if idle >= STOP_AFTER_S:
                self._stop()

    def _usage(self, pids: Sequence[int] | None = None) -> Usage:
        import psutil

        found: Usage = {}
        for pid in pids or self.workers.pids or [os.getpid()]:
            with suppress(OSError, psutil.Error):
                for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
                    found[process.pid] = _used(process.pid)
        return found

    def _sites(self) -> dict[int, str]:
        """Where the workers are, but those that have nothing to do."""
        return {pid: site for pid in self.workers.pids if (site := self.workers.site(pid))}

    def _reader(self, sites: Mapping[int, str]) -> str:
        """`DataLoader worker 4711, which is at data.py:26`: what this rank waits for."""
        if sites:
            return ", and ".join(f"DataLoader worker {pid}, which is at {site}" for pid, site in sites.items())
        if self.workers.pids:
            return numbered("DataLoader worker", self.workers.pids)
        stack = main_stack()
        return f"a sample, which it reads at {call_site(stack) or f'{stack[0].filename}:{stack[0].lineno}'}"

    def _exit(self) -> None:
        """End this process, and with it the run."""
        monitor, reader = self.ctx.monitor, self._reader(self._sites())
        dump_stacks(self.ctx.rank)
        waited = f"rank {self.ctx.rank} has waited {self.config.timeout:g} s (--timeout) for {reader}"
        cause = monitor.resolve_root_cause(RankHangs(f"{waited}; nothing was read or computed meanwhile"))
        monitor.add_saved_step(cause)
        monitor.wait_for_others()
        process_exit.hard_exit(cause)

    def _stop(self) -> None:
        """If a stop was requested, and every rank waits for the first batch of the same step: all stop there."""
        asked = stop_signal.reason is not None or (self.ctx.world_size > 1 and read_key(self._store, self._key))
        if asked and not self.ctx.work.in_step:
            with self.lock:
                if self.began is not None:
                    self.voted = True
                    self._vote(joins=True)
            if self.decision is not None:
                signal.pthread_kill(threading.main_thread().ident or 0, STACK_SIGNAL)

    @property
    def _store(self) -> Any:
        return self.ctx.monitor.store

    @property
    def _key(self) -> str:
        return f"waits/{self.ctx.work.step}"

    def _vote(self, *, joins: bool) -> None:
        """Add this rank to those that wait and would stop, or remove it; once all ranks are there, none can leave."""
        while self.decision is None:
            before = read_key(self._store, self._key)
            votes = json.loads(before or "{}")
            if len(votes) < self.ctx.world_size:
                votes.pop(str(self.ctx.rank), None)
                votes |= {str(self.ctx.rank): stop_signal.reason or 0} if joins else {}
                after = json.dumps(votes)
                if self._store.compare_set(self._key, before, after).decode() != after:
                    continue
            if len(votes) == self.ctx.world_size:
                self.decision = StopDecision(max(votes.values()), False)
                self.ctx.stop_sync.decided = True
            return


def _used(pid: int) -> tuple[int, int, int]:
    """What the threads of a process have used. Of this process, without those that serve the run in the background."""
    own = pid == os.getpid()
    daemons = {thread.native_id for thread in threading.enumerate() if thread.daemon} if own else set()
    ticks = read = woken = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        if int(task.name) in daemons or (own and (task / "comm").read_text().startswith(SERVES)):
            continue
        times = (task / "stat").read_text().rpartition(")")[2].split()
        ticks += int(times[11]) + int(times[12])
        read += int((task / "io").read_text().split()[1])
        woken += int((task / "status").read_text().partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return ticks, read, woken


def _works(before: Usage, now: Usage, seconds: float, *, exact: bool) -> bool:
    """Whether a process has done something in these seconds, or has started or ended. exact: or has woken up."""
    if before.keys() != now.keys():
        return True
    noise = 1 + seconds / TICK_INTERVAL_S
    return any(
        abs(now[pid][0] - ticks) > noise or now[pid][1] != read or (exact and now[pid][2] != woken)
        for pid, (ticks, read, woken) in before.items()
    )
