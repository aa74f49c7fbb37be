"""How ranks tell each other that they fail: through the store at which they met, which works where collectives do not.

The first rank to fail writes down why. Another whose collective breaks then knows the cause from the collateral; if
nobody has written anything, it asks who is still there, and whoever does not answer was lost.
"""

from __future__ import annotations

import json
import re
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ddp.ending import ending, exit_code
from ddp.errors import Collateral, PeerLost, one_line
from ddp.stop import dump_stacks, requests

POLL_S = 0.5  # how often a rank looks whether another has failed
GRACE_S = 3.0  # how long an answer may take
FOLLOW_S = 5.0  # how long a rank may go on after another has failed, until it is ended
BROKEN = re.compile(
    r"gloo|Timed out waiting|pair closure|NCCL|Connection (closed|reset)|Broken pipe|[Ss]ocket [Tt]imeout"
)
COLLECTIVES = ("torch/distributed/", "torch/nn/parallel/", "torch/autograd/", "torchinductor")
TIMED_OUT = re.compile(r"[Tt]imed? ?out|pair closure")
Answer = TypeVar("Answer")


class Peers:
    """This rank's view of the others' failures. A thread looks for them; `settle` decides what one means."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: float, store_at_rank_0: bool) -> None:
        self.store, self.rank, self.timeout = store, rank, timeout
        self.store_at_rank_0, self.hosts_store = store_at_rank_0, store_at_rank_0 and rank == 0
        self.others = [other for other in range(world_size) if other != rank]
        self.closed = threading.Event()
        self.settled: BaseException | None = None
        self.learned: dict[str, Any] | None = None  # the failure of another rank that the thread has seen
        self.reachable = True  # the store; not any more once its host is gone

    def watch(self) -> None:
        """Look for failures of other ranks from now on, even while the main thread waits in a collective."""
        if self.others:
            threading.Thread(target=self._watch, name="peers", daemon=True).start()

    def close(self) -> None:
        """Leave in good order: from now on, this rank's silence is no failure."""
        self.closed.set()
        if self.others:
            self._ask(lambda: self.store.set(f"left/{self.rank}", ""))

    def tell_saved(self, step: int) -> None:
        """Rank 0: the checkpoint of `step` is on the disk."""
        self._ask(lambda: self.store.set("saved", str(step)))

    def saved(self) -> int | None:
        """The step of the last checkpoint that rank 0 told of."""
        told = self._ask(lambda: int(self.store.get("saved")) if self.store.check(["saved"]) else None)
        return told if told is not None else ending.saved

    def check(self) -> None:
        """Raise Collateral if another rank has failed."""
        if self.others and self.store.check(["failure"]):
            raise self._collateral(json.loads(self.store.get("failure")))

    def settle(self, error: BaseException) -> BaseException:
        """What `error` turns out to be: itself, if this rank is the first to fail; Collateral; or PeerLost.

        Every rank that is still there then ends with the same exit code.
        """
        agreed = ending.code is not None  # all ranks leave at the same point, and know it
        if not self.others or agreed or isinstance(error, Collateral) or error is self.settled:
            return error
        ending.settling = True
        self.closed.set()
        broken, self.timed_out = _is_broken(error), TIMED_OUT.search(str(error)) is not None
        if broken and self.timed_out:
            dump_stacks()
        if broken:
            why = None if self.learned else self._ask(self._why_broken, 2 * GRACE_S)
            if self.learned:
                why = self._collateral(self.learned)
            why = why or PeerLost("rank 0 was lost" if self.store_at_rank_0 else "the others cannot be reached")
            if isinstance(why, PeerLost):
                why.args = (f"{why} ({_reason(error)})",)
            error = why
        self.settled = error if isinstance(error, Collateral) else self._first(error) or error
        if not self.hosts_store:
            self._ask(lambda: self.store.set(f"knows/{self.rank}", ""))
        return self.settled

    def linger(self) -> None:
        """After a failure: if the store is in this process, stay until the others have read there why."""
        end = time.monotonic() + GRACE_S
        keys = [f"knows/{other}" for other in self.others]
        while self.hosts_store and not self.store.check(keys) and time.monotonic() < end:
            time.sleep(0.02)

    def _first(self, error: BaseException) -> Collateral | None:
        """Write down `error`, for all; if another rank was first with another one, what follows from that."""
        lost = isinstance(error, PeerLost)
        mine = {
            "rank": self.rank,
            "code": exit_code(error) or PeerLost.exit_code,
            "hang": getattr(error, "hang", False),
        }
        mine["message"] = one_line(error) if lost else f"rank {self.rank} failed: {_in_short(error)}"
        said = self._ask(lambda: self.store.compare_set("failure", "", json.dumps(mine)))
        first = json.loads(said) if said else mine
        if first["rank"] == self.rank or (getattr(error, "on_every_rank", False) and first["code"] == mine["code"]):
            return None
        return self._collateral(first)

    def _ask(self, ask: Callable[[], Answer], seconds: float = GRACE_S) -> Answer | None:
        """What `ask` learns from the store; None if that is out of reach."""
        if not self.reachable:
            return None
        start = time.monotonic()
        answer = within(seconds, ask)
        self.reachable = answer is not None or time.monotonic() - start < seconds  # else it would be waited for again
        return answer

    def _collateral(self, failure: dict[str, Any]) -> Collateral:
        return Collateral(f"rank {self.rank} ends too: {failure['message']}", failure["code"])

    def _why_broken(self) -> PeerLost | Collateral:
        """Called when a collective broke: wait for somebody to say why, or for who does not answer."""
        self.store.set(f"broke/{self.rank}", "")
        asks = self.store.add("trouble", 1) == 1  # one rank asks for all
        end = time.monotonic() + GRACE_S * (1 if asks else 1.5)
        silent, standing = self.others, self.others
        while time.monotonic() < end:
            if self.store.check(["failure"]):
                return self._collateral(json.loads(self.store.get("failure")))
            if asks:
                silent = [rank for rank in silent if not self._has(rank, "broke", "alive")]
                standing = [rank for rank in standing if not self._has(rank, "broke")]
            if requests.asked is not None and time.monotonic() > end - GRACE_S + 1:
                break  # mpirun leaves two seconds
            time.sleep(0.05)
        if not asks:
            return PeerLost("another process was lost, and the one that asked which")
        if silent:
            left = [rank for rank in silent if self._has(rank, "left")]
            return PeerLost(f"{_ranks(silent)} {'left early' if left == silent else 'was lost'}")
        if standing and self.timed_out:
            return PeerLost(f"{_ranks(standing)} hangs: waited {self.timeout:g} s (--timeout) in vain", hang=True)
        return PeerLost("the connections between the processes broke")

    def _has(self, rank: int, *names: str) -> bool:
        return any(self.store.check([f"{name}/{rank}"]) for name in names)

    def _watch(self) -> None:
        answered = False
        while not self.closed.wait(POLL_S):
            try:
                if not answered and self.store.check(["trouble"]):
                    answered = True
                    self.store.set(f"alive/{self.rank}", "")
                if self.store.check(["failure"]):
                    self.learned = json.loads(self.store.get("failure"))
                    self.store.set(f"knows/{self.rank}", "")
                    return self._follow(self.learned)
            except RuntimeError:  # the next collective will tell
                self.reachable = False
                return

    def _follow(self, failure: dict[str, Any]) -> None:
        """Another rank has failed: end too, unless the main thread notices by itself."""
        if failure["hang"]:
            dump_stacks()
        if not self.closed.wait(FOLLOW_S):
            self.linger()
            ending.abruptly(self._collateral(failure))


def _is_broken(error: BaseException) -> bool:
    """Whether a collective or the store has failed: by the message, and by where it was raised; others talk alike."""
    if not isinstance(error, RuntimeError) or not BROKEN.search(str(error)):
        return isinstance(error, dist.DistError)
    frames = traceback.extract_tb(error.__traceback__)
    raised_in = frames[-1].filename.replace("\\", "/") if frames else ""
    return isinstance(error, dist.DistError) or any(place in raised_in for place in COLLECTIVES)


def within(seconds: float, ask: Callable[[], Answer]) -> Answer | None:
    """What `ask` returns; None if it fails or takes too long: a store whose host is gone may block for ever."""
    answers: list[Answer] = []

    def run() -> None:
        try:
            answers.append(ask())
        except RuntimeError:
            return

    thread = threading.Thread(target=run, name="ask", daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def _ranks(ranks: list[int]) -> str:
    return " and ".join(f"rank {rank}" for rank in ranks)


def _in_short(error: BaseException) -> str:
    return one_line(error) if hasattr(error, "exit_code") else f"{type(error).__name__}: {one_line(error)}"


def _reason(error: BaseException) -> str:
    """The gist of a message of gloo or NCCL, without its source file and its advice."""
    text = re.sub(r"^\[[^\]]*\] ", "", str(error).strip().splitlines()[0])
    return re.split(r"\. |\.$", text)[0][:120]
