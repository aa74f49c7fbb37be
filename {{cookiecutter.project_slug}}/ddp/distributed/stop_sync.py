"""All ranks decide together, between two steps, whether to stop. They sync twice a second, not after every step.

With many ranks a sync is slow, so they sync less often: it takes at most MAX_COST of the time.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from ddp.core.errors import CollectiveMismatch
from ddp.core.signals import stop_signal
from ddp.distributed.rank_reports import MISMATCH_ADVICE, collective_count, find_mismatch, own_report
from ddp.distributed.tensors import Streams

SYNC_INTERVAL_S = 0.5
MAX_COST = 0.005
MAX_STEPS_BETWEEN_SYNCS = 64  # in case steps suddenly take much longer


class StopDecision(NamedTuple):
    """What all ranks know after a sync: why to stop, as in StopSignal.reason, and whether a rank failed to save."""

    reason: int | None
    save_failed: bool


class SyncFacts(NamedTuple):
    """What the ranks share in one all-reduce: the largest number of each, or the smallest."""

    reason: float  # to stop, the largest of all ranks: LAUNCHER_GONE is larger than all signals
    save_failed: float  # 1 on any rank
    step_s: float  # of the slowest rank
    most: float  # collectives that a rank has called
    fewest: float
    least_s: float  # that a rank needed for the last sync


class StopRequested(Exception):
    """Raised on every rank at the same point, where a loop other than the training loop must stop."""

    def __init__(self, decision: StopDecision) -> None:
        super().__init__("stop requested")
        self.decision = decision


class StopSync:
    """Shares requests to stop. A request on any rank becomes the decision of all ranks."""

    def __init__(self, streams: Streams | None = None, tree: dist.ProcessGroup | None = None) -> None:
        self.streams, self.tree = streams or Streams(torch.device("cpu")), tree
        self.save_failed: Callable[[], bool] = lambda: False  # whether writing a checkpoint failed here
        self.decided = False  # to stop: what follows, such as a save, may take long
        self.step_s = 0.0  # of the slowest rank
        self.asked_at: float | None = None  # while this rank asks the others
        self.took_s = 0.0  # the last sync, on this rank, which may have waited for others
        self.cost_s = 0.0  # of a sync, on the rank that waits least; the same on all ranks
        self.interval_s = SYNC_INTERVAL_S  # between two of them
        self.trained_s = 0.0  # in all steps of the training so far; the same on all ranks, as is step_s
        self.restart()

    def restart(self, *, training: bool = False) -> None:
        """Another loop begins: sync after its first step, since nothing is known about their duration."""
        self.training = training
        self.steps_left = self.interval = 1
        self.since = time.perf_counter()
        self.mark = self.streams.mark()

    def waited_s(self) -> float:
        """How long this rank has waited for an answer; 0 if it does not wait."""
        asked_at = self.asked_at
        return 0.0 if asked_at is None else time.perf_counter() - asked_at

    def maybe_sync(self) -> StopDecision | None:
        """The decision of all ranks, or None to continue. Call on every rank, after the same step."""
        self.steps_left -= 1
        before, self.mark = self.mark, self.streams.mark()
        if self.steps_left > 0:
            return None
        before.wait()  # a GPU may have many steps to do; after this, only the last one
        step_s = (time.perf_counter() - self.since) / self.interval
        count = collective_count(self.streams.device)
        ours = SyncFacts(stop_signal.reason or 0, self.save_failed(), step_s, count, count, self.took_s)
        self.asked_at = time.perf_counter()
        signs = torch.tensor([1, 1, 1, 1, -1, -1], dtype=torch.double)  # a maximum with its sign changed is a minimum
        everyone = SyncFacts(*(signs * largest(signs * torch.tensor(ours, dtype=torch.double), self.tree)).tolist())
        self.took_s, self.asked_at = time.perf_counter() - self.asked_at, None
        self.step_s, usual = everyone.step_s, self.cost_s or everyone.least_s
        self.cost_s = usual + (min(everyone.least_s, 2 * usual) - usual) / 8  # one slow answer adds little
        self.trained_s += self.step_s * self.interval * self.training
        if everyone.most != everyone.fewest:  # NCCL would add up gradients of different steps, without an error
            reports = [own_report()] * dist.get_world_size()
            dist.all_gather_object(reports, reports[0])
            found = find_mismatch(dict(enumerate(reports)), in_number=True) or "the ranks are at different steps"
            raise CollectiveMismatch(f"{found}: {MISMATCH_ADVICE}")
        # The slowest rank determines when to sync next: over gloo, an all-reduce takes 0.1 to 0.3 ms, a percent or more
        # of a small model's step.
        self.interval_s = max(SYNC_INTERVAL_S, self.cost_s / MAX_COST)
        # At most twice as many as were measured: a GPU has not done the first step yet when its time is taken.
        longest = min(max(MAX_STEPS_BETWEEN_SYNCS, self.cost_s / MAX_COST / self.step_s), 2 * self.interval)
        self.steps_left = self.interval = int(min(longest, max(1.0, self.interval_s / self.step_s)))
        self.since = time.perf_counter()
        self.decided = bool(everyone.reason or everyone.save_failed)
        return StopDecision(int(everyone.reason) or None, bool(everyone.save_failed)) if self.decided else None


def largest(values: torch.Tensor, tree: dist.ProcessGroup | None) -> torch.Tensor:
    """The largest number of all ranks at each place of `values`, in host memory. Call on every rank.

    gloo's all-reduce takes 2 (N - 1) messages, one after the other; that over a tree of many ranks takes 2 log N.
    tree: a group of all ranks for its messages: the default group would count them as collectives.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if tree is None:
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values
    received, distance = torch.empty_like(values), 1
    while distance < world_size and not rank & distance:
        if rank + distance < world_size:
            dist.recv(received, rank + distance, group=tree)
            values = torch.maximum(values, received)
        distance *= 2
    if rank:
        dist.send(values, rank - distance, group=tree)
    dist.broadcast(values, 0)
    return values
