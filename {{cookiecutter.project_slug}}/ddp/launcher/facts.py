"""launch_node.sh --check: what each node says about itself, side by side, and where they disagree. No torch in here."""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from config import Config
from ddp.fingerprint import code_of
from ddp.launcher.network import interface_of

CLOCKS_S = 5.0  # further apart than that, times in logs cannot be compared, and certificates may fail
LOW_DISK_GB = 5.0
Facts = dict[str, Any]
TITLES = ("node", "host", "address", "Python", "torch", "NCCL", "GPUs", "disk", "dataset", "clock", "code")


def facts_of(config: Config) -> Facts:
    """What this node can say before anybody talks to it."""
    return {
        "Python": platform.python_version(),
        "torch": version_of("torch"),
        "NCCL": nccl_version(),
        "GPUs": _gpus(),
        "disk": _free_gb(Path(config.output_dir)),
        "dataset": _dataset(config),
        "code": hashlib.sha256(repr(sorted(code_of().items())).encode()).hexdigest()[:10],
    }


def seen_from(address: str) -> Facts:
    """What shows only on the way to the others: this node's own address there, and its clock."""
    return {"address": address, "interface": interface_of(address) or "?", "clock": time.time()}


def show(cards: Sequence[dict[str, Any]]) -> None:
    """Print the nodes of `cards`, by rank, and what is odd about them."""
    for line in (*_table(cards), *(f"warning: {line}" for line in _oddities(cards))):
        print(line, flush=True)


def _table(cards: Sequence[dict[str, Any]]) -> list[str]:
    """A column a fact, a line a node."""
    rows = [TITLES, *(_row(card) for card in cards)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(TITLES))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _row(card: dict[str, Any]) -> tuple[str, ...]:
    facts, disk = card["facts"], card["facts"].get("disk")
    shown = {
        "node": str(card["node_rank"]),
        "host": card["host"],
        "address": f"{facts['address']} {facts['interface']}",
        "disk": f"{disk:,.0f} GB free" if disk is not None else "?",
        "clock": f"{round(facts['offset'], 2) + 0.0:+.2f} s" if card["node_rank"] else "0",
    }
    return tuple(shown.get(title) or str(facts.get(title, "?")) for title in TITLES)  # another version may lack some


def _oddities(cards: Sequence[dict[str, Any]]) -> list[str]:
    """What may be meant so, and mostly is not."""
    first, found = cards[0], []
    for card in cards:
        ours, theirs = first["facts"], card["facts"]
        gpus, others = ours.get("GPUs"), theirs.get("GPUs")
        if gpus != others:
            found.append(f"{first['host']} has {gpus}, {card['host']} has {others}: the slowest decides")
        if abs(theirs["offset"]) > CLOCKS_S:
            found.append(f"the clock of {card['host']} is {theirs['offset']:+.0f} s off that of {first['host']}")
        disk = theirs.get("disk")
        if disk is not None and disk < LOW_DISK_GB:
            found.append(f"{card['host']} has only {disk:.1f} GB of disk left for --output-dir")
    return found


def version_of(package: str) -> str:
    """Of an installed package; `-` where there is none."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return "-"


def nccl_version() -> str:
    """Of the package that comes with torch; `-` where torch was built otherwise."""
    return next((found for cuda in range(20, 10, -1) if (found := version_of(f"nvidia-nccl-cu{cuda}")) != "-"), "-")


def _gpus() -> str:
    """`8 x NVIDIA H200`, from the driver."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "none"
    names = Counter(line.strip() for line in done.stdout.splitlines() if line.strip()) if done.returncode == 0 else {}
    return ", ".join(f"{count} x {name}" for name, count in names.items()) or "none"


def _free_gb(folder: Path) -> float | None:
    """Of the disk on which `folder` is, or will be made."""
    for existing in (folder.absolute(), *folder.absolute().parents):
        with suppress(OSError):
            return shutil.disk_usage(existing).free / 1e9
    return None


def _dataset(config: Config) -> str:
    if config.dataset == "synthetic":
        return "synthetic"
    parts = {"cifar10": "cifar-10-batches-py", "imagefolder": "train"}
    if (Path(config.data_dir) / parts.get(config.dataset, "")).is_dir():
        return f"{config.dataset} in {config.data_dir}"
    fetched = ", will be downloaded" if config.dataset == "cifar10" else ""
    return f"{config.dataset}: not in {config.data_dir}{fetched}"
