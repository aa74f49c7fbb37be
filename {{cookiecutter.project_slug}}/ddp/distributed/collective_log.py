"""The last collectives that this rank has called, and the lines that called them, from torch's flight recorder.

It costs some microseconds per collective, and knows those of NCCL as well. TORCH_DISTRIBUTED_DEBUG=DETAIL would compare
every collective before it runs, at several times its cost. torch.distributed.debug needs a web server on each rank.
"""

import os
import pickle
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ddp.core.call_site import Frame, by_site, call_site, names

RECORDED = 64  # collectives that are kept
DIFFERENT_SHAPES = ("scatter", "gather")  # the ranks may pass tensors of different shapes to these
MISMATCH_ADVICE = (
    "all ranks must make the same collective calls, in the same order; check code that depends on the rank: "
    "a condition, a continue, an exception that only one rank catches"
)
SAME_LINE_ADVICE = (
    "all ranks must pass tensors of the same shape, in the same order; check what depends on the rank, or on its data"
)


class Collective(NamedTuple):
    """A collective that a rank has called. `key` names it on all ranks; `waited_s` is 0 once it has completed."""

    key: str
    operation: str
    tensors: str  # their types and shapes
    site: str
    waited_s: float


def record_collectives() -> None:
    """Call before the process group is created. The environment may set another number, or 0."""
    name = "TORCH_FR_BUFFER_SIZE" if hasattr(c10d, "_dump_fr_trace") else "TORCH_NCCL_TRACE_BUFFER_SIZE"
    os.environ.setdefault(name, str(RECORDED))


def recorded_collectives() -> list[Collective]:
    """Oldest first; empty if torch records none, as torch 2.6 over gloo."""
    found = []
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        if (dump := getattr(c10d, name, None)) is not None:
            found += [entry for entry in pickle.loads(dump(True, True, False)).get("entries", ())]
    return [_read(entry) for entry in found if not entry["is_p2p"]]


def _read(entry: dict[str, Any]) -> Collective:
    backend, _, operation = entry["profiling_name"].rpartition(":")
    group, _ = entry["process_group"]
    shapes = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    tensors = " and ".join(f"{dtype.lower()} {size or 'scalar'}" for dtype, size in shapes)
    frames = [Frame(frame["filename"], frame["line"], frame["name"]) for frame in entry["frames"]]
    done = entry["retired"] or entry["state"] == "completed"
    waited_s = 0.0 if done else max(0.001, (time.time_ns() - entry["time_created_ns"]) / 1e9)
    return Collective(
        f"{backend} {group} {entry['collective_seq_id']}", operation, tensors, call_site(frames), waited_s
    )


def waiting(collectives: list[Collective]) -> Collective | None:
    """The first collective that has not completed."""
    return next((collective for collective in collectives if collective.waited_s), None)


def first_difference(logs: dict[int, list[Collective]], *, compare_sites: bool = False) -> dict[int, Collective]:
    """What each rank called where they first called different collectives; empty if their logs are alike.

    compare_sites: the same collective at different lines differs as well.
    """
    calls: dict[str, dict[int, Collective]] = {}
    for rank, log in logs.items():
        for collective in log:
            calls.setdefault(collective.key, {})[rank] = collective
    for ranks in calls.values():
        tensors = {each.tensors for each in ranks.values() if not each.operation.endswith(DIFFERENT_SHAPES)}
        sites = {each.site for each in ranks.values() if compare_sites}
        if any(len(values) > 1 for values in ({each.operation for each in ranks.values()}, tensors, sites)):
            return ranks
    return {}


def explain_mismatch(logs: dict[int, list[Collective]]) -> str:
    """`rank 0 called barrier at main.py:79, but rank 1 called all_reduce at main.py:89`, and what to do; or empty.

    Different calls that look alike may have passed before: their lines come first, because the mistake is there.
    """
    different = first_difference(logs)
    if not different:
        return ""
    before = f"{parted}; then " if (parted := where_ranks_parted(logs)) else ""
    same_operation = len({each.operation for each in different.values()}) == 1
    calls = {}
    for rank, each in different.items():
        tensors = f" of {each.tensors}" if same_operation and each.tensors else ""
        calls[rank] = f"{each.operation}{tensors} at {each.site.replace(f' ({each.operation})', '') or '?'}"
    called = ", but ".join(f"{names(ranks)} called {call}" for call, ranks in by_site(calls).items())
    same_line = same_operation and len({each.site for each in different.values()} | {""}) == 2
    return f"{before}{called}: {SAME_LINE_ADVICE if same_line and not before else MISMATCH_ADVICE}"


def where_ranks_parted(logs: dict[int, list[Collective]]) -> str:
    """Where ranks made a call that only looked alike, before the first that differs; or empty."""
    earlier = first_difference(logs, compare_sites=True)
    return _same_call(earlier) if earlier != first_difference(logs) else ""


def explain_other_number(logs: dict[int, list[Collective]]) -> str:
    """The same, if ranks have called different numbers of collectives."""
    earlier = first_difference(logs, compare_sites=True)
    found = _same_call(earlier) if earlier else "the ranks are at different steps"
    return explain_mismatch(logs) or f"{found}: {MISMATCH_ADVICE}"


def _same_call(calls: dict[int, Collective]) -> str:
    places = by_site({rank: each.site or "?" for rank, each in calls.items()})
    at_each = " and ".join(f"{names(ranks)} at {place}" for place, ranks in places.items())
    return f"{at_each} made the same {next(iter(calls.values())).operation} call from different lines"


def collective_count(device: torch.device | None = None) -> int:
    """How many collectives this rank has called, on tensors of `device` or on all: at the same line, the same number.

    0 without a process group, and for a backend that does not count.
    """
    try:
        group: Any = dist.distributed_c10d._get_default_group()
        backends = {group._get_backend(each) for each in ([device] if device else group._device_types)}
        return sum(backend._get_sequence_number_for_group() for backend in backends)
    except (RuntimeError, ValueError):
        return 0
