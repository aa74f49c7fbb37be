"""How the ranks share a failure: through the store, which works when collectives do not.

The first rank to fail writes the cause. A rank whose collective breaks reads it there, or asks which ranks are alive.
A main thread that waits for a GPU notices nothing, so the monitor's thread asks as well: see `_find_lost_rank`.
Keys of the store: `failure` the cause; `diagnose`, `comm_error/R` a collective broke, on rank R, and its Report;
`left/R` rank R finished; `ack/R` rank R has read the cause; `saved` the step of the last checkpoint on disk; and those
of liveness.py and wait_notice.py.
"""

import json
import os
import re
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from ddp.core.call_site import by_site, call_site, names, stack_of, stack_of_error
from ddp.core.errors import (
    FAILURE_KEY,
    CollectiveMismatch,
    ExitCode,
    PeerFailed,
    PeerLost,
    RankHangs,
    exit_code_of,
    failure_record,
    one_line,
)
from ddp.core.process_exit import process_exit
from ddp.core.rank_logs import dump_stacks
from ddp.core.run_config import RESTARTS_VARIABLE
from ddp.core.stop_signal import stop_signal
from ddp.distributed.collective_log import explain_mismatch, recorded_collectives
from ddp.distributed.liveness import ANSWER_TIMEOUT_S, Liveness, Report, explain
from ddp.distributed.rank_env import RankEnv
from ddp.distributed.stop_sync import StopSync
from ddp.distributed.streams import Mark
from ddp.distributed.terminate_handler import on_gloo_error
from ddp.distributed.wait_notice import WaitNotice

Answer = TypeVar("Answer")
POLL_INTERVAL_S = 0.5  # how often a rank checks whether another one failed
MPIRUN_GRACE_S = 2.0  # mpirun kills the ranks this long after it has signalled them
FOLLOW_TIMEOUT_S = 5.0  # how long the main thread may take to notice that another rank failed
STOP_PATIENCE_S = 3.0  # after a request to stop, all ranks agree within this time, unless their steps take longer
STORE_PATIENCE_S = 10.0  # the same, for a rank that can ask no other because the store is gone
COMM_ERROR = re.compile(
    r"gloo|Timed out waiting|pair closure|NCCL|Connection (closed|reset)|Broken pipe|[Ss]ocket [Tt]imeout"
)
COLLECTIVE_SOURCES = ("torch/distributed/", "torch/nn/parallel/", "torch/autograd/", "torchinductor")
OWN_GPU_ERROR = re.compile(r"CUDA error|Cuda failure")  # CUDA reports it in any later call, perhaps in one of NCCL
TIMED_OUT = re.compile(r"[Tt]imed? ?out|pair closure")


class FailureMonitor:
    """This rank's view of failures. A thread watches the other ranks; `resolve_root_cause` explains an error."""

    def __init__(self, store: dist.Store, env: RankEnv, timeout: float, warn_after: float = 30.0) -> None:
        self.store, self.env, self.rank, self.timeout = store, env, env.rank, timeout
        self.others = [other for other in range(env.world_size) if other != env.rank]
        self.closed = threading.Event()
        self.cause: BaseException | None = None  # once it is resolved
        self.seen_failure: dict[str, Any] | None = None  # what the thread has found
        self.reachable = True  # the store; False once its host is gone
        self.stop_sync: StopSync | None = None  # once the ranks are connected
        self.liveness = Liveness(store, env.rank, self.others)
        self.wait_notice = WaitNotice(store, env.rank, self.liveness, warn_after)
        self.mark, self.marked_at = Mark(), 0.0  # the newest of stop_sync, and when the thread first saw it

    def start(self) -> None:
        """Watch the other ranks from now on, even while the main thread waits in a collective."""
        if self.others:
            on_gloo_error(self._end_after_gloo_error)
            threading.Thread(target=self._watch, name="failure monitor", daemon=True).start()

    def close(self) -> None:
        """This rank finished: from now on, its silence is not a failure."""
        self.closed.set()
        if self.others:
            self._call_store(lambda: self.store.set(f"left/{self.rank}", ""))
        self._wait_for_keys([f"left/{other}" for other in self.others], STORE_PATIENCE_S)

    def share_saved(self, step: int) -> None:
        """On rank 0: tell all ranks that the checkpoint of `step` is on disk."""
        self._call_store(lambda: self.store.set("saved", str(step)))

    def saved_step(self) -> int | None:
        """The step of the last checkpoint on disk, as far as this rank can know."""
        shared = self._call_store(lambda: int(self.store.get("saved")) if self.store.check(["saved"]) else None)
        return shared if shared is not None else process_exit.saved_step

    def add_saved_step(self, error: BaseException) -> None:
        """Add to a PeerLost from which step the run can be resumed."""
        if isinstance(error, PeerLost) and not isinstance(error, CollectiveMismatch) and not error.on_every_rank:
            process_exit.saved_step = saved = self.saved_step()
            resumable = "nothing was saved yet" if saved is None else f"resumable from step {saved:,}"
            if not self.reachable and self.rank != 0:  # then rank 0 may have saved since
                resumable = "resumable from the newest checkpoint, if there is one"
            restarts = error.hang or RESTARTS_VARIABLE in os.environ
            advice = "" if restarts else ": start all ranks again with the same command"
            error.args = (f"{error}; {resumable}{advice}",)

    def check(self) -> None:
        """Raise PeerFailed if another rank has failed."""
        if self.others and self.store.check([FAILURE_KEY]):
            raise self._peer_failed(json.loads(self.store.get(FAILURE_KEY)))

    def resolve_root_cause(self, error: BaseException) -> BaseException:
        """`error` if this rank failed first, otherwise PeerFailed or PeerLost: all ranks get the same exit code."""
        together = process_exit.exiting_with is not None  # all ranks exit at the same point, and know it
        if not self.others or together or isinstance(error, PeerFailed) or error is self.cause:
            return error
        process_exit.resolving = True
        self.closed.set()
        if _is_comm_error(error):
            error = self._explain_comm_error(error)
        self.cause = error if isinstance(error, PeerFailed) else self._share_failure(error)
        if not self.env.hosts_store:
            self._call_store(lambda: self.store.set(f"ack/{self.rank}", ""))
        return self.cause

    def wait_for_acks(self) -> None:
        """After a failure, if the store is in this process: wait until the others have read the cause."""
        self._wait_for_keys([f"ack/{other}" for other in self.others], ANSWER_TIMEOUT_S)

    def _wait_for_keys(self, keys: list[str], seconds: float) -> None:
        """If the store is in this process: keep it until the others have written `keys`."""
        end = time.monotonic() + seconds
        while self.env.hosts_store and not self.store.check(keys) and time.monotonic() < end:
            time.sleep(0.02)

    def _explain_comm_error(self, error: BaseException) -> BaseException:
        """PeerFailed or PeerLost, for an error of a collective or of the store."""
        timed_out = TIMED_OUT.search(str(error)) is not None
        stack = stack_of_error(error.__traceback__) or stack_of(threading.main_thread().ident or 0)
        if timed_out:
            dump_stacks(stack)
        own = Report(call_site(stack), recorded_collectives())
        ask = partial(self._diagnose, own, timed_out)
        cause = None if self.seen_failure else self._call_store(ask, 2 * ANSWER_TIMEOUT_S)
        if self.seen_failure:  # perhaps by the thread in the meantime, before the store was gone
            return self._peer_failed(self.seen_failure)
        at_rank_0 = self.env.store_in == "rank 0"
        cause = cause or PeerLost("rank 0 was lost" if at_rank_0 else "the other ranks cannot be reached")
        if (
            isinstance(cause, PeerLost) and not cause.hang
        ):  # add the core of gloo's or NCCL's message, without its source file and advice
            reason = re.sub(r"^\[[^\]]*\] ", "", str(error).strip().splitlines()[0])
            cause.args = (f"{cause} ({re.split(r'[.] |[.]$', reason)[0][:120]})",)
        return cause

    def _diagnose(self, own: Report, timed_out: bool) -> PeerLost | PeerFailed:
        """A collective broke: wait until a rank writes the cause, or until it is clear which ranks do not answer."""
        self.store.set(f"comm_error/{self.rank}", own.dump())
        asks = self.store.add("diagnose", 1) == 1  # one rank asks for all
        while asks and not self.liveness.ask():
            self.liveness.answer()
        end = time.monotonic() + ANSWER_TIMEOUT_S * (1 if asks else 1.5)
        silent = busy = self.others
        while time.monotonic() < end:
            if self.store.check([FAILURE_KEY]):
                return self._peer_failed(json.loads(self.store.get(FAILURE_KEY)))
            if asks:
                busy = [rank for rank in busy if not self.store.check([f"comm_error/{rank}"])]
                silent = [rank for rank in self.liveness.silent() if rank in busy]
            if stop_signal.reason is not None and time.monotonic() > end - MPIRUN_GRACE_S:
                break
            time.sleep(0.05)
        if not asks:
            return PeerLost("another process was lost, and so was the one that was finding out which")
        if silent:
            return self._lost(silent)
        broken = [rank for rank in self.others if rank not in busy]
        errors = {rank: Report.load(self.store.get(f"comm_error/{rank}")) for rank in broken}
        return explain({**self.liveness.reports(), **errors, self.rank: own}, busy if timed_out else [], self.timeout)

    def _lost(self, silent: list[int]) -> PeerLost:
        left = self.store.check([f"left/{rank}" for rank in silent])
        return PeerLost(f"{names(silent)} {'left early' if left else 'was lost'}")

    def _share_failure(self, error: BaseException) -> BaseException:
        """Write `error` for all ranks. Returns it, or PeerFailed if another rank wrote another cause first."""
        text = one_line(error) if hasattr(error, "exit_code") else f"{type(error).__name__}: {one_line(error)}"
        text = text if isinstance(error, PeerLost) else f"rank {self.rank} failed: {text}"
        code = exit_code_of(error) or int(ExitCode.PEER_LOST)
        ours = failure_record(self.rank, code, text, getattr(error, "hang", False))
        first = json.loads(self._call_store(lambda: self.store.compare_set(FAILURE_KEY, "", ours)) or ours)
        same = getattr(error, "on_every_rank", False) and first["code"] == code
        return error if same or first["rank"] == self.rank else self._peer_failed(first)

    def _peer_failed(self, failure: dict[str, Any]) -> PeerFailed:
        return PeerFailed(f"rank {self.rank} is exiting because {failure['message']}", failure["code"])

    def _call_store(self, call: Callable[[], Answer], timeout: float = ANSWER_TIMEOUT_S) -> Answer | None:
        """What `call` returns from the store; None if the store is out of reach."""
        if not self.reachable:
            return None
        start = time.monotonic()
        answer = call_with_timeout(timeout, call)
        self.reachable = answer is not None or time.monotonic() - start < timeout  # do not wait for it again
        return answer

    def _watch(self) -> None:
        """In the thread. When another rank failed: exit as well, unless the main thread notices by itself."""
        while self.seen_failure is None:
            if self.closed.wait(POLL_INTERVAL_S):
                return
            try:
                self._look()
                self.wait_notice.check(self._wait_for_answer)
                lost = self._find_lost_rank()
            except RuntimeError:
                self.reachable = False
                return self._end_without_store()
            if lost is not None and not self.closed.is_set():
                self._end(self._share_failure(lost))
        if self.seen_failure["hang"]:
            dump_stacks()
        if not self.closed.wait(0 if self._stop_is_overdue(self.stop_sync) else FOLLOW_TIMEOUT_S):
            self._end(self._peer_failed(self.seen_failure))

    def _end_after_gloo_error(self) -> None:
        """In gloo's thread: it received a message that does not belong to the collective that this rank called."""
        error = dist.DistBackendError("gloo received a message of another size than it expected")
        process_exit.hard_exit(self.resolve_root_cause(error))

    def _end(self, cause: BaseException) -> None:
        """Exit now: the main thread is blocked."""
        self.add_saved_step(cause)
        self.wait_for_acks()
        process_exit.hard_exit(cause)

    def _look(self) -> None:
        """Answer who asks whether this rank is alive; notice a failure that another rank has written."""
        self.liveness.answer()
        if self.store.check([FAILURE_KEY]):
            self.seen_failure = json.loads(self.store.get(FAILURE_KEY))
            self.store.set(f"ack/{self.rank}", "")

    def _find_lost_rank(self) -> PeerLost | None:
        """Another rank that is gone, if this one waits for something that takes longer than it should.

        Over NCCL, the main thread waits for a GPU without end, where gloo's connections would break. A launcher asks
        the survivors to stop; if they do not agree to, one of the ranks may be gone.
        """
        sync = self.stop_sync
        if sync is None or sync.decided or self.seen_failure:
            return None
        stuck = self._gpu_is_stuck(sync)
        silent = self._silent_ranks() if stuck or self._stop_is_overdue(sync) else None
        if silent:
            return self._lost(silent)
        if silent is None or not stuck:
            return None
        dump_stacks()
        reports = self.liveness.reports()
        if mismatch := explain_mismatch({rank: report.collectives for rank, report in reports.items()}):
            return CollectiveMismatch(mismatch)
        waited = f"the GPU of rank {self.rank} waited {self.timeout:g} s (--timeout) for another rank"
        sites = by_site({rank: report.site for rank, report in reports.items()})
        places = "; ".join(f"{names(ranks)} at {site}" for site, ranks in sites.items() if site)
        return RankHangs(f"{waited}: {places}; see the stacks above")

    def _stop_is_overdue(self, sync: StopSync | None) -> bool:
        """Whether the ranks should have agreed on a stop that was requested here."""
        if stop_signal.reason is None or sync is None or sync.decided:
            return False
        return time.monotonic() - stop_signal.requested_at > max(STOP_PATIENCE_S, 3 * sync.step_s)

    def _gpu_is_stuck(self, sync: StopSync) -> bool:
        """Whether the GPU has worked on one step for --timeout."""
        if sync.mark is not self.mark:
            self.mark, self.marked_at = sync.mark, time.monotonic()
        if time.monotonic() - self.marked_at < self.timeout:
            return False
        if call_with_timeout(ANSWER_TIMEOUT_S, self.mark.reached):  # the driver may block, too
            self.marked_at = time.monotonic()  # the program takes its time, perhaps to save
            return False
        return True

    def _silent_ranks(self) -> list[int] | None:
        """The ranks that do not answer in time; None if another rank asks for all, or if this one ends."""
        if (
            self.liveness.is_busy()
            or not self.liveness.ask()
            or not self.liveness.wait_for_answers(self._wait_for_answer)
        ):
            return None
        # A rank that has finished, or that is finding out what has happened, answers no more.
        silent, absent = self.liveness.silent(), ("left/{}", "comm_error/{}")
        return [rank for rank in silent if not any(self.store.check([key.format(rank)]) for key in absent)]

    def _wait_for_answer(self) -> bool:
        """Wait a little. False if this rank ends."""
        self._look()  # another rank whose collective broke may ask
        return self.seen_failure is None and not self.closed.wait(POLL_INTERVAL_S / 2)

    def _end_without_store(self) -> None:
        """The store is gone, and with it its host: exit, unless the main thread does, or can still save."""
        lost_at = time.monotonic()
        while not self.closed.wait(POLL_INTERVAL_S):
            sync = self.stop_sync
            if sync is not None and sync.decided:  # all ranks agreed to stop, and may be saving
                continue
            if time.monotonic() - lost_at > max(STORE_PATIENCE_S, 3 * (sync.step_s if sync else 0)):
                host = "the store" if self.env.store_in == "file" else self.env.store_in
                self._end(PeerLost(f"{host} was lost"))


def call_with_timeout(seconds: float, call: Callable[[], Answer]) -> Answer | None:
    """What `call` returns; None if it fails or takes longer: a store whose host is gone may block without end."""
    answers: list[Answer] = []

    def run() -> None:
        with suppress(RuntimeError):
            answers.append(call())

    thread = threading.Thread(target=run, name="store call", daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def _is_comm_error(error: BaseException) -> bool:
    """Whether a collective or the store failed: by message and by source, since others have such messages."""
    if OWN_GPU_ERROR.search(str(error)):
        return False
    source = next((frame.filename for frame in reversed(traceback.extract_tb(error.__traceback__))), "")
    matches = isinstance(error, RuntimeError) and COMM_ERROR.search(str(error)) is not None
    return isinstance(error, dist.DistError) or (matches and any(part in source for part in COLLECTIVE_SOURCES))
