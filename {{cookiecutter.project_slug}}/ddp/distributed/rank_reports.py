"""Ask all ranks where they are. They respond through the store, which works when collectives do not.

A report has the last collectives that a rank has called: where those of the ranks first differ is the mistake. torch's
flight recorder costs some microseconds per collective. TORCH_DISTRIBUTED_DEBUG=DETAIL would compare every collective
before it runs, at several times its cost; torch.distributed.debug needs a web server on each rank.

Keys of the store: `question` the last one, as NUMBER:RANK; `report/NUMBER:RANK/R` the Report of rank R, its response.
"""

import json
import os
import pickle
import time
from collections.abc import Callable
from contextlib import suppress
from traceback import FrameSummary
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ddp.core.errors import numbered
from ddp.core.threads import call_site, main_stack

# Functions of torch, with the backend that they are for. Since torch 2.15, NCCL's is nccl2, with a recorder of its own.
RECORDERS = (("_dump_fr_trace",), ("_dump_nccl_trace",), ("_dump_fr_trace", "nccl2"))
QUESTION_INTERVAL_S = 5.0  # one rank at a time asks: a question is not replaced earlier
MISMATCH_ADVICE = (
    "all ranks must make the same collective calls, in the same order, with tensors of the same shapes; check code "
    "that depends on the rank or its data: a condition, a continue, an exception that only one rank catches"
)


class Collective(NamedTuple):
    """A collective that a rank has called. `key` names it on all ranks; `waited_s` is 0 once it has completed."""

    key: str
    operation: str
    tensors: str  # their types and shapes, where they must be the same on all ranks
    site: str
    waited_s: float


class Report(NamedTuple):
    """Where a rank is, how long it has waited there for a collective, or 0, and the last ones that it has called."""

    site: str
    waited_s: float
    collectives: list[Collective]  # oldest first


Reports = dict[int, Report]  # by rank, in this order


def own_report(waited_s: float = 0.0) -> Report:
    """Of this process, now: the line of the first collective that has not completed, or that of the main thread.

    waited_s: how long that has waited for a message, which is no collective.
    """
    collectives = recorded_collectives()
    site, waited_s = next(((each.site, each.waited_s) for each in collectives if each.waited_s), ("", waited_s))
    return Report(site or call_site(main_stack()), waited_s, collectives)


def read_key(store: dist.Store, key: str) -> str:
    """Empty if there is no such key: `get` would wait for it."""
    return store.get(key).decode() if store.check([key]) else ""


class RankReports:
    """This rank's part in questions to all ranks. Only the thread of FailureMonitor asks and responds."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, waited_s: Callable[[], float]) -> None:
        self.store, self.rank, self.world_size, self.waited_s = store, rank, world_size, waited_s
        self.question, self.asked_at = "", float("-inf")  # the last one that this rank has seen
        self.error: Report | None = None  # where a collective of this rank broke
        self.response: tuple[str, Report | None] = ("", None)

    def respond(self) -> None:
        """Respond to the last question, and once more if a collective has broken since."""
        question = read_key(self.store, "question")
        if question != self.question:
            self.question, self.asked_at = question, time.monotonic()
        if question and (question, self.error) != self.response:
            self.response = question, self.error
            self.store.set(self._key(self.rank), json.dumps(self.error or own_report(self.waited_s())))

    def ask(self) -> bool:
        """Ask all ranks. False if a question is too recent to be replaced: the rank that asked it uses the reports."""
        if time.monotonic() - self.asked_at < QUESTION_INTERVAL_S:
            return False
        question = f"{int(self.question.partition(':')[0] or 0) + 1}:{self.rank}"
        asked = self.store.compare_set("question", self.question, question).decode() == question
        self.respond()
        return asked

    def complete(self) -> bool:
        return self.store.check([self._key(rank) for rank in range(self.world_size)])

    def received(self) -> Reports:
        """Of the ranks that have responded."""
        found = {}
        for rank in range(self.world_size):
            if response := read_key(self.store, self._key(rank)):
                site, waited_s, collectives = json.loads(response)
                found[rank] = Report(site, waited_s, [Collective(*each) for each in collectives])
        return found

    def _key(self, rank: int) -> str:
        return f"report/{self.question}/{rank}"


def record_collectives() -> None:
    """Keep the last 64. Call before the process group is created. The environment may set another number, or 0."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "64")


def recorded_collectives() -> list[Collective]:
    """Oldest first; empty if torch records none."""
    found: list[Collective] = []
    with suppress(Exception):  # the names and the format are torch's own: another version may have others
        for name, *backend in RECORDERS:
            with suppress(TypeError):  # before torch 2.15, a recorder takes no name of a backend
                entries = pickle.loads(_recorder(name)(True, True, False, *backend)).get("entries", ())
                found += [_read(entry) for entry in entries if not entry["is_p2p"]]
    return found


def _recorder(name: str) -> Any:
    return getattr(getattr(torch._C, "_distributed_c10d", None), name, None)


def _read(entry: dict[str, Any]) -> Collective:
    backend, _, operation = entry["profiling_name"].rpartition(":")
    shapes = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    tensors = " and ".join(f"{dtype.lower()} {size or 'scalar'}" for dtype, size in shapes)
    if operation.endswith(("scatter", "gather", "to_all", "to_allv", "alltoall")):
        tensors = ""  # the ranks may pass tensors of different shapes to these
    frames = ((frame["filename"], frame["line"], frame["name"]) for frame in entry["frames"])
    site = call_site(FrameSummary(*frame, lookup_line=False) for frame in frames)
    done = entry["retired"] or entry["state"] == "completed"
    waited_s = 0.0 if done else max(0.001, (time.time_ns() - entry["time_created_ns"]) / 1e9)
    key = f"{backend} {entry['process_group'][0]} {entry['collective_seq_id']}"
    return Collective(key, operation, tensors, site, waited_s)


def backend_of(device: torch.device) -> Any:
    """torch's object for collectives on tensors of `device`; None without one, or if torch has renamed the method."""
    with suppress(AttributeError, RuntimeError, ValueError):
        return dist.group.WORLD._get_backend(device)  # type: ignore[union-attr]
    return None


def collective_count(*devices: torch.device) -> int:
    """How many collectives this rank has called, on tensors of `devices` or on all: at the same line, the same number.

    0 for a backend that does not count, or if torch has renamed the method.
    """
    backends = {backend_of(device) for device in devices or (torch.device("cpu"), torch.device("cuda"))}
    with suppress(RuntimeError):
        return sum(getattr(backend, "_get_sequence_number_for_group", int)() for backend in backends)
    return 0


def find_mismatch(reports: Reports, *, in_number: bool = False) -> str:
    """`rank 0 called barrier at main.py:109, but rank 1 called all_reduce at main.py:110`; empty if they are alike.

    Begins with alike calls from different lines. They are a mistake only if a later call differs, or the number of
    calls: `in_number`.
    """
    calls: dict[str, dict[int, Collective]] = {}
    for rank, report in reports.items():
        for each in report.collectives:
            calls.setdefault(each.key, {})[rank] = each
    parted = ""
    for ranks in calls.values():
        if len({(each.operation, each.tensors) for each in ranks.values()}) > 1:
            return (parted and f"{parted}; then ") + _list_calls(ranks)
        if not parted and len({each.site for each in ranks.values()}) > 1:
            parted = _list_calls(ranks)
    return parted if in_number else ""


def certain_mismatch(reports: Reports) -> str:
    """The result of `find_mismatch`, if ranks wait in different calls of the same number; otherwise empty."""
    waiting = {
        rank: each._replace(collectives=[one for one in each.collectives if one.waited_s])
        for rank, each in reports.items()
    }
    return find_mismatch(waiting) and find_mismatch(reports)


def _list_calls(calls: dict[int, Collective]) -> str:
    alike = len({each.operation for each in calls.values()}) == 1
    texts = {}
    for rank, (_, operation, tensors, site, _) in calls.items():
        what = f"{operation} of {tensors}" if alike and tensors else operation
        texts[rank] = f"{what} at {site.replace(f' ({operation})', '') or '?'}"
    return ", but ".join(f"{numbered('rank', ranks)} called {text}" for text, ranks in _group(texts).items())


def where_ranks_are(reports: Reports) -> str:
    """`rank 0 has waited 30 s at main.py:109 (barrier); rank 1 is at main.py:107`."""
    parts = []
    groups = _group({rank: (report.waited_s == 0, report.site or "?") for rank, report in reports.items()})
    for (busy, site), ranks in sorted(groups.items(), key=lambda group: group[0][0]):  # those that wait come first
        one, waited_s = len(ranks) == 1, max(reports[rank].waited_s for rank in ranks)
        waited = f"{'has' if one else 'have'} waited {waited_s:.0f} s"
        parts.append(f"{numbered('rank', ranks)} {('is' if one else 'are') if busy else waited} at {site}")
    return "; ".join(parts)


def describe_wait(reports: Reports, after_s: float) -> str:
    """Where the ranks are, if one has waited for `after_s`, and why that may be; otherwise empty."""
    if max(report.waited_s for report in reports.values()) < after_s:
        return ""
    reasons = [where_ranks_are(reports)]
    if different := find_mismatch(reports):
        reasons.append(f"these are different collectives: {different}")
    elif all(report.waited_s for report in reports.values()):
        if any(each.waited_s and not each.key.startswith("gloo") for each in reports[0].collectives):
            return ""  # a GPU that has much to do before it: NCCL does not report when the wait began
        reasons.append("the network between them may be down")
    return "; ".join(reasons)


def _group(values: dict[int, Any]) -> dict[Any, list[int]]:
    """The ranks that have the same value."""
    found: dict[Any, list[int]] = {}
    for rank, value in values.items():
        found.setdefault(value, []).append(rank)
    return found
