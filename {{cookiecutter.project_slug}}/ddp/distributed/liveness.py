"""Which ranks are alive, and where each of them is. They answer through the store, which works when collectives do not.

Keys of the store: `ping` the last question, as NUMBER:RANK; `pong/PING/R` the Report of rank R, its answer.
"""

import json
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist

from ddp.core.call_site import by_site, call_site, names, stack_of
from ddp.core.errors import CollectiveMismatch, PeerLost, RankHangs
from ddp.distributed.collective_log import Collective, explain_mismatch, recorded_collectives

ANSWER_TIMEOUT_S = 3.0
PING_INTERVAL_S = 5.0  # one rank at a time asks who is alive


class Report(NamedTuple):
    """Where the main thread of a rank is, and the last collectives that the rank has called."""

    site: str
    collectives: list[Collective]

    @classmethod
    def now(cls) -> "Report":
        """Of this process."""
        return cls(call_site(stack_of(threading.main_thread().ident or 0)), recorded_collectives())

    @classmethod
    def load(cls, text: bytes) -> "Report":
        """From the store."""
        site, collectives = json.loads(text)
        return cls(site, [Collective(*each) for each in collectives])

    def dump(self) -> str:
        """For the store."""
        return json.dumps(self)


class Liveness:
    """This rank's part in questions who is alive. One thread at a time uses it."""

    def __init__(self, store: dist.Store, rank: int, others: list[int]) -> None:
        self.store, self.rank, self.others = store, rank, others
        self.ping, self.pinged_at = "", 0.0  # the last one that this rank has seen, and when

    def answer(self) -> None:
        """Tell who asks that this rank is alive."""
        if self.store.check(["ping"]) and (ping := self.store.get("ping").decode()) != self.ping:
            self.ping, self.pinged_at = ping, time.monotonic()
            self.store.set(f"pong/{ping}/{self.rank}", Report.now().dump())

    def ask(self) -> bool:
        """Ask all ranks. False if another rank has asked at the same time."""
        ping = f"{int(self.ping.partition(':')[0] or 0) + 1}:{self.rank}"
        if self.store.compare_set("ping", self.ping, ping).decode() != ping:
            return False
        self.ping, self.pinged_at = ping, time.monotonic()
        return True

    def is_busy(self) -> bool:
        """Whether another rank has asked so recently that its question should not be replaced."""
        return time.monotonic() - self.pinged_at < PING_INTERVAL_S

    def silent(self) -> list[int]:
        """The ranks that have not answered yet."""
        if not self.others or self.store.check([f"pong/{self.ping}/{rank}" for rank in self.others]):
            return []
        return [rank for rank in self.others if not self.store.check([f"pong/{self.ping}/{rank}"])]

    def reports(self) -> dict[int, Report]:
        """Of the ranks that have answered, and of this one."""
        silent = self.silent()
        answers = {rank: f"pong/{self.ping}/{rank}" for rank in self.others if rank not in silent}
        return {self.rank: Report.now(), **{rank: Report.load(self.store.get(key)) for rank, key in answers.items()}}

    def wait_for_answers(self, wait: Callable[[], bool]) -> bool:
        """Wait until all have answered, or for ANSWER_TIMEOUT_S. False if `wait`, a short wait, returns False."""
        end = time.monotonic() + ANSWER_TIMEOUT_S
        while time.monotonic() < end and not self.store.check([f"pong/{self.ping}/{rank}" for rank in self.others]):
            if not wait():
                return False
        return True


def explain(reports: dict[int, Report], busy: list[int], timeout: float) -> PeerLost:
    """Why a collective broke although all ranks are alive. `busy`: those that did not take part in it for `timeout`."""
    if mismatch := explain_mismatch({rank: report.collectives for rank, report in reports.items()}):
        return CollectiveMismatch(mismatch)
    waited = {rank: report.site for rank, report in reports.items() if rank not in busy}
    where = " and ".join(f"{names(ranks)} waited at {site}" for site, ranks in by_site(waited).items() if site)
    if not busy:
        return PeerLost(f"the connections between the processes broke{f': {where}' if where else ''}")
    sites = by_site({rank: reports[rank].site for rank in busy if rank in reports})
    places = " and ".join(f"{names(ranks)} at {site}" for site, ranks in sites.items() if site)
    details = ", while ".join(part for part in (places, where) if part)
    late = f"{names(busy)} did not respond for {timeout:g} s (--timeout)"
    stacks = f"the {'stack' if len(busy) == 1 else 'stacks'} of {names(busy)}"
    return RankHangs(f"{late}{f': {details}' if details else ''}; see {stacks}")
