"""The table of the nodes, one line each, and what they must have in common."""

import hashlib
import json
import os
import platform
import shutil
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddp.core.errors import SetupError, numbered, print_line
from ddp.core.host import interface_of, is_loopback, own_address
from ddp.core.run_config import DEFAULT_PARENT, RunConfig
from ddp.distributed.rank_env import RankEnv
from ddp.distributed.store import create_store
from ddp.launcher.node_record import NodeRecord, shared_facts
from ddp.parts.preflight import data_status

POLL_INTERVAL_S = 0.05
TIMEOUT_S = 60.0  # for the facts of all nodes: torch is imported by now
MAX_CLOCK_OFFSET_S = 5.0  # beyond that, times in logs cannot be compared, and certificates may be refused
LOW_DISK_GB = 5.0
COLUMNS = ("node", "host", "address", "Python", "torch", "NCCL", "GPUs", "disk", "dataset", "clock", "code")


class NodesDiffer(SetupError, on_every_rank=True):
    """The nodes would not run the same training."""


@dataclass
class NodeFacts:
    """A line of the table. disk: free GB. clock: seconds since 1970, when node 0 has asked. shared: must be equal."""

    node: int
    host: str
    address: str  # of this node on the route to node 0, and its interface
    address_of_0: str
    python: str
    gpus: str
    disk: float
    dataset: str
    clock: float
    shared: dict[str, Any]
    offset: float = 0.0  # of the clock, in seconds; node 0 measures it

    @classmethod
    def collect(cls, node: int, config: RunConfig) -> "NodeFacts":
        """Those of this node."""
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        gpus = ", ".join(f"{count} x {name}" for name, count in Counter(names).items()) or "none"
        output_dir = Path(config.output_dir or DEFAULT_PARENT).absolute()  # need not exist
        disk = shutil.disk_usage(next(filter(os.path.exists, (output_dir, *output_dir.parents)))).free / 1e9
        host_of_0 = os.environ.get("MASTER_ADDR", "127.0.0.1")
        return cls(
            node,
            platform.node(),
            _with_interface(own_address(host_of_0, 1) or "?"),
            str(socket.getaddrinfo(host_of_0, None)[0][4][0]) if node else "?",
            platform.python_version(),
            gpus,
            disk,
            data_status(config),
            0.0,
            shared_facts(config),
        )

    def record(self) -> NodeRecord:
        """As the launcher knows a node."""
        return NodeRecord(self.node, self.host, "", self.shared, self.address.split()[0])

    def cells(self) -> tuple[str, ...]:
        """As in COLUMNS."""
        sources = sorted(pair for pair in self.shared.items() if pair[0].startswith("the file "))
        code = hashlib.sha256(repr(sources).encode()).hexdigest()[:10]
        clock = f"{round(self.offset, 2) + 0.0:+.2f} s" if self.node else "0"
        versions = (self.python, str(self.shared["torch"]), str(self.shared["NCCL"]))
        about = (self.host, self.address, *versions, self.gpus, f"{self.disk:,.0f} GB free", self.dataset, clock, code)
        return str(self.node), *about


def compare_nodes(config: RunConfig, env: RankEnv) -> dist.Store:
    """Print a table of all nodes. Raises NodesDiffer if they would not run the same training. Call on every rank."""
    store, node = create_store(env, 2 * TIMEOUT_S), int(os.environ.get("GROUP_RANK", 0))
    if not env.local_rank:
        own = NodeFacts.collect(node, config)
        if node:
            store.get("asked")  # waits: node 0 compares the clocks at once
            own.clock = time.time()
            store.set(f"facts/{node}", json.dumps(asdict(own)))
        else:
            store.set("asked", "")
            facts, missing = _receive(store)
            silent = f"{numbered('node', missing)} sent no facts within {TIMEOUT_S:g} s" if missing else ""
            store.set("problem", compare([own, *facts]) or silent)
    if problem := store.get("problem").decode():
        if not env.local_rank and env.rank:
            print_line(f"error: {problem}")  # rank 0 prints it on node 0
        raise NodesDiffer(problem)
    return store


def _receive(store: dist.Store) -> tuple[list[NodeFacts], list[int]]:
    """The facts of the other nodes, and which nodes have sent none."""
    end, found = time.monotonic() + TIMEOUT_S, []
    missing = [*range(1, int(os.environ.get("GROUP_WORLD_SIZE", 1)))]
    while missing and time.monotonic() < end:
        for node in [each for each in missing if store.check([f"facts/{each}"])]:
            facts = NodeFacts(**json.loads(store.get(f"facts/{node}")))
            facts.offset = facts.clock - time.time()
            missing.remove(node)
            found.append(facts)
        time.sleep(POLL_INTERVAL_S)
    return found, missing


def compare(nodes: list[NodeFacts]) -> str:
    """Print the table. Returns what differs between two nodes, and may not; empty if nothing does."""
    nodes.sort(key=lambda facts: facts.node)
    first = nodes[0]
    if is_loopback(first.address.split()[0]) and len(nodes) > 1:  # to itself, its name may lead there
        first.address = _with_interface(nodes[1].address_of_0)
    print(table(nodes), flush=True)
    return next(filter(None, (first.record().disagreement(facts.record()) for facts in nodes[1:])), "")


def _with_interface(address: str) -> str:
    return f"{address} {interface_of(address) or '?'}"


def table(nodes: Sequence[NodeFacts]) -> str:
    """One line per node, and what is allowed but rarely intended."""
    rows, warnings, first = [COLUMNS, *(facts.cells() for facts in nodes)], [], nodes[0]
    for facts in nodes:
        if facts.gpus != first.gpus:
            both = f"{first.host} has {first.gpus}, {facts.host} has {facts.gpus}"
            warnings.append(f"warning: {both}: the slowest decides")
        if abs(facts.offset) > MAX_CLOCK_OFFSET_S:
            warnings.append(f"warning: the clock of {facts.host} is {facts.offset:+.0f} s off that of {first.host}")
        if facts.disk < LOW_DISK_GB:
            warnings.append(f"warning: {facts.host} has only {facts.disk:.1f} GB of disk left for --output-dir")
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, *warnings])
