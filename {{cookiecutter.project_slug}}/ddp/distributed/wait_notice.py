"""Print where each rank is when one of them has waited long in a collective, which is not an error yet.

The key `waits` of the store holds the rank that waits. Rank 0 asks all ranks, and prints what they answer.
"""

import logging
import time
from collections.abc import Callable

import torch.distributed as dist

from ddp.core.call_site import by_site, names
from ddp.distributed.collective_log import (
    collective_count,
    first_difference,
    recorded_collectives,
    waiting,
    where_ranks_parted,
)
from ddp.distributed.liveness import Liveness, Report

log = logging.getLogger(__name__)
REPEAT_S = 180.0


class WaitNotice:
    """This rank's part in it. The thread of FailureMonitor calls `check` about twice a second."""

    def __init__(self, store: dist.Store, rank: int, liveness: Liveness, after_s: float) -> None:
        self.store, self.rank, self.liveness, self.after_s = store, rank, liveness, after_s
        self.count, self.since = 0, time.monotonic()  # of collectives, and when it changed
        self.next_notice = 0.0  # at the earliest

    def check(self, wait: Callable[[], bool]) -> None:
        """`wait` waits a little, and returns False if this rank ends. Raises RuntimeError without the store."""
        now, count = time.monotonic(), collective_count()
        if count != self.count:
            self.count, self.since, self.next_notice = count, now, 0.0
        if now - self.since >= self.after_s and now >= self.next_notice:
            self.next_notice = now + min(REPEAT_S, self.after_s)
            pending = waiting(recorded_collectives())
            if pending is not None and pending.waited_s >= self.after_s:
                self.store.compare_set("waits", "", str(self.rank))
                self.next_notice = now + REPEAT_S
        if self.rank == 0 and self.store.check(["waits"]) and self.store.get("waits") and not self.liveness.is_busy():
            self._report(wait)

    def _report(self, wait: Callable[[], bool]) -> None:
        if self.liveness.ask() and self.liveness.wait_for_answers(wait):
            self.store.set("waits", "")
            if line := describe_wait(self.liveness.reports(), self.after_s):
                log.warning("warning: %s", line)


def describe_wait(reports: dict[int, Report], after_s: float) -> str:
    """`rank 0 has waited 30 s at main.py:79 (barrier); rank 1 is at main.py:65`; empty if none has waited."""
    pending = {rank: waiting(report.collectives) for rank, report in reports.items()}
    waits = {rank: each for rank, each in pending.items() if each is not None and each.waited_s >= after_s}
    if not waits:
        return ""
    different = first_difference({rank: report.collectives for rank, report in reports.items()})
    if not different and len(waits) == len(reports) and len({each.key for each in waits.values()}) == 1:
        if not waits[0].key.startswith("gloo"):
            return ""  # a GPU that has much to do before it: NCCL does not report when the wait began
        seconds = max(each.waited_s for each in waits.values())
        return f"all ranks have waited {seconds:.0f} s at {waits[0].site}: the network between them may be down"
    parts = []
    for site, ranks in by_site({rank: each.site for rank, each in waits.items()}).items():
        seconds = max(waits[rank].waited_s for rank in ranks)
        parts.append(f"{names(ranks)} {'has' if len(ranks) == 1 else 'have'} waited {seconds:.0f} s at {site or '?'}")
    for site, ranks in by_site({rank: each.site for rank, each in reports.items() if rank not in waits}).items():
        parts.append(f"{names(ranks)} {'is' if len(ranks) == 1 else 'are'} at {site or '?'}")
    if different:
        operations = dict.fromkeys(each.operation for _, each in sorted(different.items()))
        parts.append(f"these are different collectives ({', '.join(operations)})")
        if parted := where_ranks_parted({rank: report.collectives for rank, report in reports.items()}):
            parts.append(f"before, {parted}")
    return "; ".join(parts)
