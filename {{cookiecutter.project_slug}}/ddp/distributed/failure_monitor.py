"""How the ranks share a failure: through the store, which works when collectives do not.

The first rank to fail writes the cause. A rank whose collective breaks reads it there, or asks which ranks are alive.
Over NCCL no collective breaks: the main thread waits for a GPU, and only the monitor's thread can notice.
Keys of the store: `failure` the cause; `done/R` rank R finished, or has read the cause; `waits` a rank that has waited
long; `saved` the step of the last checkpoint on disk; and those of rank_reports.py.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from traceback import extract_tb
from typing import Any

import torch.distributed as dist

from ddp.core.errors import CollectiveMismatch, PeerFailed, PeerLost, RankHangs, exit_code_of, numbered, one_line
from ddp.core.process_exit import FAILURE_KEY, failure_record, process_exit, translate_exception
from ddp.core.run_config import RESTARTS_VARIABLE
from ddp.core.signals import stop_signal
from ddp.core.threads import Result, call_site, call_with_timeout, dump_stacks, main_stack
from ddp.distributed import rank_reports
from ddp.distributed.rank_env import RankEnv
from ddp.distributed.rank_reports import RankReports, Report, Reports, collective_count, read_key
from ddp.distributed.stop_sync import StopSync

log = logging.getLogger(__name__)
POLL_INTERVAL_S = 0.5  # how often a rank checks whether another one failed
FAST_POLL_INTERVAL_S = 0.05  # while it waits for an answer of the others
RESPONSE_TIMEOUT_S = 3.0  # of the store, and of a rank that is alive; to agree on a stop, unless steps take longer
OFTEN = 256  # ranks: more of them read the saved step more rarely, so that the store can answer all
HURRIED_TIMEOUT_S = 1.0  # of a rank after a signal: mpirun kills the ranks 2 s later
FOLLOW_TIMEOUT_S = 5.0  # how long the main thread may take to notice that another rank failed
EXIT_TIMEOUT_S = 10.0  # to finish without the store or the group; to explain an error if the rank that asks is lost too
WARNING_INTERVAL_S = 180.0


class State(Enum):
    """What the main thread does. It passes through these in this order."""

    RUNNING = "works, or waits in a collective"
    BROKEN = "waits for the monitor's thread, which asks the other ranks why a collective broke"
    LEAVING = "has finished, or knows why it fails: from now on, its silence is not a failure"


class FailureMonitor:
    """This rank's view of failures. A thread watches the other ranks; `resolve_root_cause` explains an error."""

    def __init__(self, store: dist.Store, env: RankEnv, timeout: float, warn_after: float = 30.0) -> None:
        self.store, self.env, self.rank, self.timeout, self.warn_after = store, env, env.rank, timeout, warn_after
        self.others = [other for other in range(env.world_size) if other != env.rank]
        self.reports = RankReports(store, env.rank, env.world_size, lambda: self.stop_sync.waited_s())
        self.thread = threading.Thread(target=self._watch, name="failure monitor", daemon=True)
        self.state, self.not_running = State.RUNNING, threading.Event()
        self.found: PeerFailed | PeerLost | None = None  # by the thread: why this rank must exit although it is fine
        self.cause: BaseException | None = None  # of the exit, once it is resolved
        self.reason = ""  # gloo's or NCCL's message, once a collective broke
        self.reachable = True  # the store; False once its host is gone
        self.stop_sync = StopSync()  # until the ranks are connected: then that of their device
        now = time.monotonic()
        self.count, self.counted_at, self.next_warning = 0, now, now + warn_after  # collectives; when that changed

    @contextmanager
    def report_errors(self, on_failure: Sequence[Callable[[BaseException], None]]) -> Iterator[None]:
        """Around all that this rank does: an error is replaced by its root cause, which `on_failure` are called with.

        In the end the process group is destroyed.
        """
        try:
            yield
            self._enter(State.LEAVING)
            self._call_store(self._set_done)
            self.wait_for_others(EXIT_TIMEOUT_S)
            _destroy_group()
        except BaseException as error:
            cause = self.resolve_root_cause(translate_exception(error))
            for callback in on_failure:
                callback(cause)
            _destroy_group()
            self.wait_for_others()
            if cause is error:
                raise
            raise cause from None

    def share_saved(self, step: int) -> None:
        """On rank 0: tell all ranks that the checkpoint of `step` is on disk."""
        self._call_store(lambda: self.store.set("saved", str(step)))

    def _learn_saved_step(self) -> None:
        """Record what rank 0 has shared: its store may be out of reach when this rank has to know it."""
        saved = read_key(self.store, "saved")
        known = -1 if process_exit.saved_step is None else process_exit.saved_step
        if saved and int(saved) > known:  # rank 0 itself may be about to share a newer one
            process_exit.record_saved(int(saved))

    def add_saved_step(self, error: BaseException) -> None:
        """Add from which step the run can be resumed, if a process was lost, here or on the rank that failed first."""
        if not isinstance(error, PeerLost | PeerFailed) or error.exit_code != PeerLost.exit_code:
            return
        if error.on_every_rank or "resumable from" in str(error):
            return
        self._call_store(self._learn_saved_step)
        saved = process_exit.saved_step
        resumable = "nothing was saved yet" if saved is None else f"resumable from step {saved:,}"
        if not self.reachable and self.rank != 0:  # then rank 0 may have saved since
            resumable = "resumable from the newest checkpoint, if there is one"
        restarts = isinstance(error, RankHangs | PeerFailed) or RESTARTS_VARIABLE in os.environ
        advice = "" if restarts else ": start all ranks again with the same command"
        error.args = (f"{one_line(error)}; {resumable}{advice}",)

    def other_failed(self) -> PeerFailed | None:
        """PeerFailed, if another rank has written why it failed."""
        record = json.loads(read_key(self.store, FAILURE_KEY) or "null")
        if record is None:
            return None
        self._set_done()
        if record["hang"] and self.state == State.RUNNING:  # otherwise the main thread has printed where it waited
            dump_stacks(self.rank)
        return self._peer_failed(record)

    def resolve_root_cause(self, error: BaseException) -> BaseException:
        """`error` if this rank failed first, otherwise PeerFailed or PeerLost: all ranks get the same exit code."""
        if not self.others or isinstance(error, PeerFailed) or error is self.cause:
            return error
        if process_exit.agreed:  # no rank asks another one
            self._enter(State.LEAVING)
            self._call_store(self._set_done)
            self.cause = error
            return error
        stop_signal.announced = True  # no step will follow
        if _is_comm_error(error):
            error = self._explain_comm_error(error)
        self._enter(State.LEAVING)
        self.cause = error if isinstance(error, PeerFailed) else self._share_failure(error)
        return self.cause

    def wait_for_others(self, seconds: float = RESPONSE_TIMEOUT_S) -> None:
        """If the store is in this process: keep it until the others have finished, or have read the cause."""
        end, keys = time.monotonic() + seconds, [f"done/{other}" for other in self.others]
        while self.env.hosts_store and not self.store.check(keys) and time.monotonic() < end:
            time.sleep(FAST_POLL_INTERVAL_S)

    def _enter(self, state: State) -> None:
        self.state = state
        self.not_running.set()

    def _set_done(self) -> None:
        self.store.set(f"done/{self.rank}", "")

    def _explain_comm_error(self, error: BaseException) -> PeerFailed | PeerLost:
        """PeerFailed or PeerLost, for an error of a collective or of the store. The thread asks the other ranks."""
        # The core of gloo's or NCCL's message: without the source file before it, and the advice after it.
        self.reason = str(error).strip().splitlines()[0].split("] ", 1)[-1].split(". ")[0].rstrip(". ")[:120]
        waited_s = time.monotonic() - self.counted_at if collective_count() == self.count else 0.0
        stack = extract_tb(error.__traceback__)[::-1] or main_stack()
        if self._timed_out(waited_s):
            dump_stacks(self.rank, error)
        self.reports.error = Report(call_site(stack), max(0.001, waited_s), rank_reports.recorded_collectives())
        self._enter(State.BROKEN)
        if self.thread.is_alive():  # otherwise it is the store that failed
            self.thread.join(EXIT_TIMEOUT_S)
            self.reachable &= not self.thread.is_alive()
        return self._explanation()

    def _timed_out(self, waited_s: float) -> bool:
        """Whether a collective broke because it reached --timeout: the thread measures the time of a wait roughly."""
        return waited_s > self.timeout - 2 * POLL_INTERVAL_S

    def _explanation(self) -> PeerFailed | PeerLost:
        """What the thread has found; if it could not, the store is gone, and with it its host."""
        return self.found or self._lost("the store" if self.env.store_in == "file" else self.env.store_in)

    def _lost(self, who: str) -> PeerLost:
        details = ""
        if self.reports.error is not None:
            at = f" while rank {self.rank} was at {self.reports.error.site}" if self.reports.error.site else ""
            advice = "; if it aborted, TORCH_DISTRIBUTED_DEBUG=DETAIL names tensors of different sizes"
            details = f" ({self.reason}){at}{advice}"
        return PeerLost(f"{who} {'were' if who.startswith('ranks') else 'was'} lost{details}")

    def _share_failure(self, error: BaseException) -> BaseException:
        """Write `error` for all ranks. Returns it, or PeerFailed if another rank wrote another cause first."""
        text = one_line(error) if hasattr(error, "exit_code") else f"{type(error).__name__}: {one_line(error)}"
        text = text if isinstance(error, PeerLost) else f"rank {self.rank} failed: {text}"
        code = exit_code_of(error) or int(PeerLost.exit_code)
        ours = failure_record(self.rank, code, text, isinstance(error, RankHangs))
        first = json.loads(self._call_store(lambda: self.store.compare_set(FAILURE_KEY, "", ours)) or ours)
        self._call_store(self._set_done)
        same = getattr(error, "on_every_rank", False) and first["code"] == code
        return error if same or first["rank"] == self.rank else self._peer_failed(first)

    def _peer_failed(self, record: dict[str, Any]) -> PeerFailed:
        return PeerFailed(f"rank {self.rank} is exiting because {record['message']}", exit_code=record["code"])

    def _call_store(self, call: Callable[[], Result]) -> Result | None:
        """What `call` returns; None if the store is out of reach. It is not called again then: each call may block."""
        returned = call_with_timeout(RESPONSE_TIMEOUT_S, lambda: [call()]) if self.reachable else None
        self.reachable = returned is not None
        return returned[0] if returned else None

    def _watch(self) -> None:
        """In the thread, as the methods below: watch the ranks. If one fails: exit, unless the main thread notices."""
        polls = 0
        try:
            while self.found is None and self.state != State.LEAVING:
                self.reports.respond()
                polls += 1
                if polls % (1 + self.env.world_size // OFTEN) == 0:
                    self._learn_saved_step()
                self.found = self.other_failed() or self._explain_wait() or self._find_cause()
                if self.not_running.wait(POLL_INTERVAL_S):
                    time.sleep(FAST_POLL_INTERVAL_S)
        except RuntimeError:  # of the store
            self.reachable = False
        grace_s = 0.0
        if self.found is None:
            grace_s = max(EXIT_TIMEOUT_S, 3 * self.stop_sync.step_s)
        elif isinstance(self.found, PeerFailed) and not self._stop_is_overdue():
            grace_s = FOLLOW_TIMEOUT_S
        while not self.not_running.wait(grace_s):
            if self.found or not self.stop_sync.decided:  # after a decision to stop, ranks may be saving
                cause = self._share_failure(self._explanation())
                self.add_saved_step(cause)
                self.wait_for_others()
                process_exit.hard_exit(cause)

    def _ask(self) -> Reports | None:
        """Of the ranks that respond in time. None if another rank asks, or if this one knows why it exits."""
        if not self.reports.ask():
            return None
        start = time.monotonic()
        # After a collective broke, the reports of ranks that notice it later count, and the cause if one writes it.
        while self.state == State.BROKEN or not self.reports.complete():
            if self.state == State.LEAVING or self.store.check([FAILURE_KEY]):
                return None
            hurries = self.state == State.BROKEN and stop_signal.reason is not None
            if time.monotonic() - start > (HURRIED_TIMEOUT_S if hurries else RESPONSE_TIMEOUT_S):
                break
            time.sleep(FAST_POLL_INTERVAL_S)
        return self.reports.received()

    def _find_cause(self) -> PeerLost | None:
        """Why this rank cannot continue, if a collective broke, or if it waits longer than it should.

        Over NCCL, the main thread waits for a GPU without end, where gloo's connections would break. A launcher asks
        the survivors to stop; if they do not agree to, one of the ranks may be gone.
        """
        broken = self.state == State.BROKEN
        stuck = not broken and self._gpu_is_stuck()
        reports = self._ask() if broken or stuck or self._stop_is_overdue() else None
        if reports is None:
            return None
        silent = [rank for rank in self.others if rank not in reports]
        lost = numbered("rank", [rank for rank in silent if not self.store.check([f"done/{rank}"])])
        if not (broken or stuck):
            return self._lost(lost) if lost and self._stop_is_overdue() else None  # the ranks may have agreed meanwhile
        if stuck and not lost:
            dump_stacks(self.rank)
        if mismatch := rank_reports.find_mismatch(reports):
            return CollectiveMismatch(f"{mismatch}: {rank_reports.MISMATCH_ADVICE}")
        if lost:
            return self._lost(lost)
        limit, where = f"{self.timeout:g} s (--timeout)", rank_reports.where_ranks_are(reports)
        if stuck:
            waited = f"the GPU of rank {self.rank} waited {limit} for another rank"
            return RankHangs(f"{waited}: {where}; see the stacks above")
        if silent:
            return PeerLost(f"{numbered('rank', silent)} left early")
        late = numbered("rank", [rank for rank, report in reports.items() if not report.waited_s])
        if late and self._timed_out(max(report.waited_s for report in reports.values())):
            return RankHangs(f"{late} did not respond for {limit}: {where}; see the stacks of {late}")
        return PeerLost(f"the connections between the processes broke ({self.reason}): {where}")

    def _explain_wait(self) -> CollectiveMismatch | None:
        """If a rank has waited long in a collective, print on rank 0 where each one is: it is not an error yet.

        But it is one, if two of them are in different calls of the same number: they would wait for each other.
        """
        now, count = time.monotonic(), collective_count()
        if count != self.count:
            self.count, self.counted_at, self.next_warning = count, now, now + self.warn_after
        if now >= self.next_warning:
            self.next_warning = now + WARNING_INTERVAL_S
            if rank_reports.own_report(self.stop_sync.waited_s()).waited_s >= self.warn_after:
                self.store.set("waits", "yes")
        if self.rank == 0 and read_key(self.store, "waits") and (reports := self._ask()):
            self.store.set("waits", "")
            if mismatch := rank_reports.certain_mismatch(reports):
                dump_stacks(self.rank)
                return CollectiveMismatch(f"{mismatch}: {rank_reports.MISMATCH_ADVICE}")
            if line := rank_reports.describe_wait(reports, self.warn_after):
                log.warning("warning: %s", line)
        return None

    def _stop_is_overdue(self) -> bool:
        """Whether the ranks should have agreed on a stop that was requested here."""
        if stop_signal.reason is None or self.stop_sync.decided:
            return False
        longest_s = max(RESPONSE_TIMEOUT_S, 3 * self.stop_sync.step_s, 2 * self.stop_sync.interval_s)
        return time.monotonic() - stop_signal.requested_at > longest_s

    def _gpu_is_stuck(self) -> bool:
        """Whether the GPU has worked on one step for --timeout. It has not if only the program is slow: it may save."""
        mark = self.stop_sync.mark
        if self.stop_sync.decided or time.monotonic() - mark.created_at < self.timeout:
            return False
        return not call_with_timeout(RESPONSE_TIMEOUT_S, mark.reached)  # the driver may block, too


def _destroy_group() -> None:
    """It may hang without a peer, or raise what a GPU has raised before: neither changes how the run ends."""
    if dist.is_initialized():
        call_with_timeout(EXIT_TIMEOUT_S, dist.destroy_process_group)


def _is_comm_error(error: BaseException) -> bool:
    """Whether a collective or the store failed.

    gloo and nccl2, which is torch's NCCL since 2.15, have no class of errors, but each of their texts says whose it is.
    Of NCCL's errors, one has another cause: CUDA reports a failure of this rank's GPU in any later call, perhaps there.
    """
    text = str(error)
    if "ncclUnhandledCudaError" in text or "unhandled cuda error" in text:
        return False
    named = isinstance(error, RuntimeError) and ("/gloo/" in text or text.startswith("NCCL "))
    return named or isinstance(error, dist.DistError)
