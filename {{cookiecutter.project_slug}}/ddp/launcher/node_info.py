"""What a node tells node 0 about itself, and the table of all nodes that `launch_node.sh --check` prints."""

import hashlib
import importlib.util
import json
import math
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp.core.errors import differences, first_few, print_line
from ddp.core.files import hash_source_files
from ddp.core.host import interface_of
from ddp.core.run_config import DEFAULT_PARENT, RunConfig

MAX_CLOCK_OFFSET_S = 5.0  # beyond that, times in logs cannot be compared, and certificates may be refused
LOW_DISK_GB = 5.0
GPU_TIMEOUT_S = 120.0  # for nvidia-smi, or for a process that imports torch, perhaps from a slow network disk
# Prints the names of the GPUs that the process sees. No module is imported from the working directory.
ASK_TORCH = """import sys; sys.path.remove(""); import json; from torch import cuda
print(json.dumps([cuda.get_device_name(index) for index in range(cuda.device_count())]))"""
DEVICE_FILES = Path("/dev")
NUMBERS = ("disk", "clock", "offset")  # facts; all others are text. Another version's node may lack some
COLUMNS = ("node", "host", "address", "Python", "torch", "NCCL", "GPUs", "disk", "dataset", "clock", "code")


@dataclass
class NodeInfo:
    """What a node tells node 0 about itself."""

    node_rank: int
    host: str
    shared: dict[str, Any]  # must be equal on all nodes: options, versions, hashes of the source files
    facts: dict[str, Any]  # for the table; empty without --check
    address: str = ""  # as node 0 sees it

    def __str__(self) -> str:
        return f"node {self.node_rank} ({self.host}, {self.address})"

    @classmethod
    def from_json(cls, line: bytes) -> "NodeInfo":
        """Raises ValueError for anything that another program sends. Facts that a table cannot show are left out."""
        with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
            sent = json.loads(line)
            rank, host, shared = sent["node_rank"], sent.get("host", "?"), sent["shared"]
            facts = {name: value for name, value in sent.get("facts", {}).items() if _can_be_shown(name, value)}
            if type(rank) is int and rank >= 0 and _can_be_shown("host", host) and isinstance(shared, dict):
                if "clock" in facts:
                    facts["offset"] = facts["clock"] - time.time()
                return cls(rank, host, shared, facts)
        raise ValueError("not a node")

    def differences(self, other: "NodeInfo") -> str:
        """What another node would run that this one would not, and what to do; empty if there is nothing."""
        found = differences(self.shared, other.shared, "{name} is {first} and {second}")
        found = [re.sub("^(the file .*) is .*", r"\1 differs", text) for text in found]  # without the hashes
        remedy = "Start all nodes with the same options, code and versions"
        return f"{self} and {other} do not agree: {first_few(found, limit=3)}. {remedy}" if found else ""

    def add_network_facts(self, address: str) -> None:
        """Add what only a connection shows: this node's own address there, and its clock."""
        self.facts |= {"address": f"{address} {interface_of(address) or '?'}", "clock": time.time(), "offset": 0.0}


def _can_be_shown(name: str, value: Any) -> bool:
    if name in NUMBERS:
        return isinstance(value, float)
    return isinstance(value, str) and value.isprintable()  # a lone surrogate, which json allows, is not


def describe_node(node_rank: int, launch: dict[str, Any], config: RunConfig) -> NodeInfo:
    """This node. `launch` has those options of launch_node.sh that must be the same on all nodes."""
    nccl = next((found for cuda in range(20, 10, -1) if (found := _version_of(f"nvidia-nccl-cu{cuda}")) != "-"), "-")
    versions = {"torch": _version_of("torch"), "NCCL": nccl}  # NCCL: of the package that comes with torch
    source, python = hash_source_files(), platform.python_version()
    shared = {**launch, **config.shared_options(), **versions, "Python": python.rpartition(".")[0], **source}
    facts: dict[str, Any] = {}
    if launch["--check"]:
        gpus = ", ".join(f"{count} x {name}" for name, count in Counter(gpu_names(hidden=True)).items()) or "none"
        code = hashlib.sha256(repr(sorted(source.items())).encode()).hexdigest()[:10]
        output_dir = Path(config.output_dir or DEFAULT_PARENT).absolute()  # need not exist
        disk = shutil.disk_usage(next(filter(os.path.exists, (output_dir, *output_dir.parents)))).free / 1e9
        facts = {**versions, "Python": python, "GPUs": gpus, "disk": disk, "code": code}
        facts["dataset"] = config.data_status()
    return NodeInfo(node_rank, platform.node(), shared, facts)


def _version_of(package: str) -> str:
    from importlib import metadata  # slow, and not needed to check a command line

    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return "-"


def gpu_names(hidden: bool = False) -> list[str]:
    """The names of the GPUs that a process here can use; with `hidden`, also of those that a variable hides from it."""
    environ = {name: value for name, value in os.environ.items() if not hidden or "VISIBLE_DEVICES" not in name}
    if "CUDA_VISIBLE_DEVICES" not in environ:  # nvidia-smi ignores it
        command = ["nvidia-smi", "--list-gpus"]
        with suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, text=True, timeout=GPU_TIMEOUT_S)
            names = re.findall(r"^GPU \d+: (.*?)(?: \(UUID.*)?$", done.stdout, re.MULTILINE)
            if names or done.returncode == 0:
                return names
    # Importing torch takes seconds: ask it only if a driver is loaded that this torch is built for.
    spec = importlib.util.find_spec("torch")
    built = runpy.run_path(str(Path(spec.origin).with_name("version.py"))) if spec and spec.origin else {}
    nvidia = shutil.which("nvidia-smi") or any(DEVICE_FILES.glob("nvidia[0-9]*"))  # WSL has no such files
    if not ((built.get("cuda") and nvidia) or (built.get("hip") and (DEVICE_FILES / "kfd").exists())):
        return []
    command = [sys.executable, "-c", ASK_TORCH]
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=GPU_TIMEOUT_S)
        return [str(name) for name in json.loads(done.stdout.splitlines()[-1])]
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        print_line("warning: neither nvidia-smi nor torch lists the GPUs of this machine: set --nproc-per-node")
        return []


def print_table(nodes: Sequence[NodeInfo]) -> None:
    """Print one line per node, and what is allowed but rarely intended."""
    rows, warnings, first = [COLUMNS], [], nodes[0]
    for node in nodes:
        facts = node.facts
        disk, offset = facts.get("disk", math.nan), facts.get("offset", math.nan)
        cells = {"node": str(node.node_rank), "host": node.host, **facts}
        cells["disk"] = "?" if math.isnan(disk) else f"{disk:,.0f} GB free"
        cells["clock"] = "0" if node is first else "?" if math.isnan(offset) else f"{round(offset, 2) + 0.0:+.2f} s"
        rows.append(tuple(cells.get(column, "?") for column in COLUMNS))
        if facts.get("GPUs", first.facts["GPUs"]) != first.facts["GPUs"]:
            both = f"{first.host} has {first.facts['GPUs']}, {node.host} has {facts['GPUs']}"
            warnings.append(f"warning: {both}: the slowest decides")
        if abs(offset) > MAX_CLOCK_OFFSET_S:
            warnings.append(f"warning: the clock of {node.host} is {offset:+.0f} s off that of {first.host}")
        if disk < LOW_DISK_GB:
            warnings.append(f"warning: {node.host} has only {disk:.1f} GB of disk left for --output-dir")
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    print(*lines, *warnings, sep="\n", flush=True)
