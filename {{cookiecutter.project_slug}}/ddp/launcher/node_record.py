"""What the nodes tell node 0 before each round: what they are about to run, and how their workers have ended.

`Meeting` is node 0's side of a rendezvous: it compares these records, and answers all nodes. node_rendezvous.py lists
the keys of the store.
"""

import json
import math
import os
import platform
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from importlib import metadata
from typing import Any

from ddp.core.errors import (
    ExitCode,
    PeerLost,
    SetupError,
    Stopped,
    UserError,
    differences,
    first_few,
    numbered,
    one_line,
    print_line,
)
from ddp.core.files import hash_source_files
from ddp.core.host import is_loopback
from ddp.core.options import flag_of
from ddp.core.parts import of_parts
from ddp.core.run_config import RunConfig

POLL_INTERVAL_S, BEAT_INTERVAL_S = 0.1, 0.5
FRESH_S, DEAD_S = 1.5, 3.0  # a launcher is there if its count has changed so recently; it is gone if it stands still
NOTICE_AFTER_S = 3.0  # a node that waits longer prints for whom
LATE_NODES_GRACE_S = 5.0  # for nodes that connect later: they hear of a mismatch as well, or explain a loss
LEAVE_TIMEOUT_S = 45.0  # torchrun may need 30 s to end workers; until then node 0 keeps its answer for that node
SAME_RANK = "{} have the same --node-rank: give each machine its own, from 0 to {}"
FINAL, LOST, STOPPED = "final", "lost", "stopped"


@dataclass
class RoundEnd:
    """How the workers of one node ended.

    outcome: FINAL: a restart would not help, or is not wanted. LOST: a process was lost, so a restart helps. STOPPED:
    all exited with 75, and nobody asked this node for that: another node was asked to stop, or has lost a process.
    """

    exit_code: int
    message: str = ""
    outcome: str = FINAL
    reported: bool = True  # whether a worker has printed the reason
    saved_step: int = -1  # of the last checkpoint; -1 if no worker has recorded one


@dataclass
class NodeRecord:
    """What a node tells node 0 before a round."""

    node_rank: int
    host: str
    launcher: str  # unique per process
    shared: dict[str, Any]  # must be equal on all nodes: options, versions, hashes of the source files
    address: str = ""  # on the route to node 0
    address_of_0: str = ""  # the address of node 0, as this node sees it
    last: RoundEnd | None = None  # how its workers ended in the round before; None if it has just started

    def __str__(self) -> str:
        return f"node {self.node_rank} ({self.host}, {self.address})"

    @classmethod
    def from_json(cls, text: str) -> "NodeRecord":
        """Raises ValueError for anything that another program has written."""
        with suppress(ValueError, TypeError, AttributeError, RecursionError):
            known = {item.name for item in fields(cls)}  # another version of this project may send more
            record = cls(**{name: value for name, value in json.loads(text).items() if name in known})
            record.last = RoundEnd(**record.last) if isinstance(record.last, dict) else None
            if type(record.node_rank) is int and isinstance(record.shared, dict):
                return record
        raise ValueError("not a node")

    def disagreement(self, other: "NodeRecord") -> str:
        """What another node would run that this one would not, and what to do; empty if there is nothing."""
        found = differences(self.shared, other.shared, "{name} is {first} and {second}")
        found = [re.sub("^(the file .*) is .*", r"\1 differs", text) for text in found]  # without the hashes
        remedy = "Start all nodes with the same options, code and versions"
        return f"{self} and {other} do not agree: {first_few(found, limit=3)}. {remedy}" if found else ""


def this_node(options: Any, nproc: int, config: RunConfig) -> NodeRecord:
    """The record of this node, which has just started. options: the LaunchOptions."""
    shared: dict[str, Any] = {"--nnodes": options.nnodes, "--nproc-per-node": nproc}
    names = (item.name for part in of_parts("LaunchOptions") for item in fields(part))
    shared |= {flag_of(name): getattr(options, name) for name in names}
    if options.trains:  # what runs in place of main.py compares the rest itself
        shared |= {"--max-restarts": options.max_restarts, **shared_facts(config)}
    return NodeRecord(options.node_rank, platform.node(), os.urandom(8).hex(), shared)


def shared_facts(config: RunConfig) -> dict[str, Any]:
    """What the nodes of a training must have in common: options, versions, source files."""
    nccl = next((found for cuda in range(20, 10, -1) if (found := _version_of(f"nvidia-nccl-cu{cuda}")) != "-"), "-")
    versions = {"torch": _version_of("torch"), "NCCL": nccl}  # NCCL: of the package that comes with torch
    python = platform.python_version().rpartition(".")[0]
    return {**config.shared_options(), **versions, "Python": python, **hash_source_files()}


def _version_of(package: str) -> str:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return "-"


def round_end(files: Mapping[str, Sequence[str]], nproc: int, stop_requested: bool, lost: bool) -> RoundEnd:
    """How the workers ended, by the files that they have written: see tell_launcher in core/process_exit.py.

    files: the contents by name, of each worker that has written one. lost: whether a process was killed.
    A restart helps only after the loss of a process: exit code 8, a signal, or a failure that no worker explains. An
    error that main.py reports (1 to 7) would occur again, and 75 was asked for.
    """
    reports = []
    for text in files["error.json"]:
        with suppress(ValueError, KeyError, TypeError):  # torch's own, if the owner puts its @record on main
            error = json.loads(text)["message"]
            info = error["extraInfo"]
            reports.append((not info["cause"], int(info["timestamp"]), int(error["errorCode"]), error["message"]))
    *_, code, why = min(reports, default=(0, ""))  # the root cause
    only_stops = all(report[2] == ExitCode.STOPPED for report in reports)
    if len(files["done"]) == nproc:  # whatever they were asked meanwhile
        end = RoundEnd(ExitCode.SUCCESS)
    elif not stop_requested and only_stops and (lost or 0 < len(reports) < nproc):
        end = RoundEnd(ExitCode.PEER_LOST, "a process was lost", LOST)  # torchrun has stopped the others
    elif reports:
        outcome = STOPPED if only_stops else LOST if code == ExitCode.PEER_LOST else FINAL
        end = RoundEnd(code, why, FINAL if stop_requested else outcome)
    elif stop_requested and len(files["pid"]) < nproc:
        end = RoundEnd(ExitCode.STOPPED, "stopped before training began: nothing to save", reported=False)
    elif stop_requested:
        end = RoundEnd(ExitCode.PEER_LOST, "the processes were killed before they had stopped", reported=False)
    else:
        end = RoundEnd(ExitCode.BUG, "a process failed", LOST, reported=False)
    end.saved_step = max(map(int, files["saved"]), default=-1)
    return end


def end_of_run(ends: Sequence[RoundEnd | None], complete: bool, restart_left: bool = True) -> RoundEnd | None:
    """How the run ends, by the ends of the last round on all nodes, or on some (not `complete`); None if it goes on."""
    known = [end for end in ends if end]
    if final := [end for end in known if end.outcome == FINAL]:
        return min(final, key=lambda end: end.exit_code in (ExitCode.STOPPED, ExitCode.SUCCESS))  # an error, if any
    if complete and known and all(end and end.outcome == STOPPED for end in ends):
        return known[0]
    if known and not restart_left:
        lost = RoundEnd(ExitCode.PEER_LOST, "a process was lost")
        return next((end for end in known if end.outcome == LOST), lost)
    return None


class RunEnded(UserError):
    """The run ends as `end` says."""

    def __init__(self, end: RoundEnd) -> None:
        super().__init__(end.message)
        self.end, self.exit_code = end, end.exit_code


class Meeting:
    """Node 0's side of one rendezvous. Its store is in the same process, so no call blocks."""

    def __init__(self, number: int, store: Any, own: NodeRecord, agent: Any, members: Mapping[int, str]) -> None:
        """number: of the round. agent: a NodeAgent. members: rank and launcher of the nodes of the round before."""
        self.number, self.store, self.own, self.agent, self.members = number, store, own, agent, members
        self.options, self.grace, self.start = agent.options, agent.grace(own.last is not None), time.monotonic()
        self.records: dict[int, NodeRecord] = {}  # by registration
        self.arrived: dict[int, float] = {}  # registrations whose rank is taken, and when they were read
        self.nodes: dict[int, NodeRecord] = {}  # the others, by rank
        self.counts: dict[str, tuple[int, float]] = {}  # of launchers, and when they have changed
        self.mismatch, self.mismatch_at, self.announced = "", math.inf, False

    def run(self) -> dict[str, Any]:
        """Wait for the other nodes, and answer all. Returns the answer. Raises UserError if the run ends."""
        self.store.set("round", f"{self.number} {self.own.launcher}")
        try:
            while not self._is_complete():
                self.agent.wait(POLL_INTERVAL_S, self.own.last)
                self._receive()
            self._print_nodes()
        except UserError as error:
            answer = {"exit_code": error.exit_code, "message": one_line(error), "ended": isinstance(error, RunEnded)}
            self._leave({**answer, "reported": isinstance(error, RunEnded) and error.end.reported})
            raise
        nodes = {record.node_rank: record.launcher for record in self._records()}
        answer = {"nodes": nodes, "restarts": self.agent.restarts}
        self.store.set(f"{self.number}/answer", json.dumps(answer))
        return answer

    def _is_complete(self) -> bool:
        """Whether the round can start. Raises UserError if the run ends."""
        now, records = time.monotonic(), self._records()
        waited, missing = now - self.start, {*range(self.options.max_nodes)} - {each.node_rank for each in records}
        lost = missing & {*self.members}  # they have the whole grace time, others less
        self.agent.count_saved(max((each.last.saved_step for each in records if each.last), default=-1))
        known = not lost or waited > LATE_NODES_GRACE_S
        restart_left = not self.own.last or not self.agent.exhausted or not known
        if end := end_of_run([record.last for record in records], not lost, restart_left):
            raise RunEnded(end)
        if stopped := self.store.text(f"{self.number}/stopped"):
            raise Stopped(stopped)
        if self.mismatch and (not missing or now - self.mismatch_at > LATE_NODES_GRACE_S):
            raise SetupError(self.mismatch)
        if len(records) >= self.options.min_nodes and waited > (self.grace if lost else LATE_NODES_GRACE_S):
            missing = set()
        who, host, port = numbered("node", missing), self.options.master_addr, self.options.master_port
        if missing and waited > self.grace:
            joined = f"only {len(records)} of {self.options.max_nodes} nodes joined at {host}:{port}"
            there = f"{joined} within {self.grace:g} s: {', '.join(map(str, records))}; missing: {who}"
            remedy = f"Run launch_node.sh there with --master-addr {host} --master-port {port}"
            raise (PeerLost if self.own.last else SetupError)(f"{there}. {remedy}")  # in a run, it was lost
        if missing and waited > NOTICE_AFTER_S and not self.announced:
            self.announced = True
            print_line(f"node 0: waiting for {who} at port {port} (up to {self.grace:g} s)")
        fresh = all(self._is_there(record, FRESH_S) for record in records)
        decided = self.records.keys() >= self.arrived.keys()  # which of two launchers has a rank
        return fresh and decided and not missing and not self.mismatch and waited >= self.agent.pause

    def _print_nodes(self) -> None:
        """Print which nodes are new or missing."""
        ranks = {record.node_rank for record in self._records()}
        here = f"{len(ranks)} of {self.options.max_nodes} nodes"
        if lost := {*self.members} - ranks:
            line = f"{numbered('node', lost)} did not join within {self.grace:g} s: training with {here}"
            print_line(f"node 0: {line}; a node that comes back joins at the next restart")
        if back := ranks - {*self.members}:
            print_line(f"node 0: {numbered('node', back)} joined again: {here}")

    def _receive(self) -> None:
        """Read new registrations, and which launchers are still there."""
        for slot in {*range(1, self.store.add(f"{self.number}/count", 0) + 1)} - {*self.records}:
            with suppress(ValueError):  # not written yet, or by another program
                record = NodeRecord.from_json(self.store.text(f"{self.number}/record/{slot}"))
                if not is_loopback(record.address_of_0):
                    self.own.address = record.address_of_0
                if self._accept(slot, record):
                    self.records[slot] = record
        launchers = [record.launcher for record in self.nodes.values()]
        counts = self.store.multi_get([f"beat/{launcher}" for launcher in launchers]) if launchers else []
        for launcher, count in zip(launchers, map(int, counts), strict=True):
            if count != self.counts[launcher][0]:
                self.counts[launcher] = count, time.monotonic()

    def _is_there(self, record: NodeRecord, seconds: float) -> bool:
        """Whether the count of that launcher has changed in the last `seconds`."""
        return record is self.own or time.monotonic() - self.counts[record.launcher][1] < seconds

    def _records(self) -> list[NodeRecord]:
        """Those of the nodes that are there, by rank."""
        others = [self.nodes[rank] for rank in sorted(self.nodes)]
        return [self.own, *(record for record in others if self._is_there(record, DEAD_S))]

    def _accept(self, slot: int, record: NodeRecord) -> bool:
        """Add a node that belongs to this run. Otherwise all are refused, or one alone if the run goes on without it.

        False: another launcher has its rank, and may be gone; ask again.
        """
        own, rank, conflict, now = self.own, record.node_rank, "", time.monotonic()
        elastic = self.options.min_nodes < self.options.max_nodes
        alone, stray = bool(own.last and (elastic or rank not in self.members)), record
        other = own if rank == 0 else self.nodes.get(rank, record)
        if not (other is record or self._is_there(other, DEAD_S)):
            other = record  # it takes the place of one that is gone
        if other.launcher != record.launcher:
            if rank and self.counts[other.launcher][1] < self.arrived.setdefault(slot, now) + FRESH_S:
                return False
            conflict = SAME_RANK.format(f"{other} and {record}", self.options.max_nodes - 1)
            stray = record if other.last or not record.last else other  # which does not belong to this run
            alone |= bool(own.last and not stray.last)
        else:
            conflict = own.disagreement(record)
        if conflict and alone:
            self.store.set(f"{self.number}/refused/{stray.launcher}", conflict)
        elif conflict and not self.mismatch:
            self.mismatch, self.mismatch_at = conflict, now
        if rank and not (alone and conflict and stray is record):
            self.nodes[rank] = record
            self.counts[record.launcher] = self.store.add(f"beat/{record.launcher}", 0), now - FRESH_S
        return True

    def _leave(self, answer: dict[str, Any]) -> None:
        """Give the last answer, and stay until no other launcher counts any more: all have read it, or are gone."""
        end, counts = time.monotonic() + LEAVE_TIMEOUT_S, None
        self.store.set(f"{self.number}/answer", json.dumps(answer))
        self.store.set(f"{self.number}/wanted", "")
        launchers = {record.launcher for record in self.records.values()}
        launchers |= {launcher for rank, launcher in self.members.items() if rank and launcher}
        while launchers and time.monotonic() < end:
            now = [self.store.add(f"beat/{launcher}", 0) for launcher in launchers]
            if now == counts:
                return
            counts = now
            time.sleep(DEAD_S)
