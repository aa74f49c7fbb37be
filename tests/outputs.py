"""Read what a run has written to its output directory; and find a free port."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from ddp.checkpoint import storage as checkpoint
from ddp.checkpoint.state import digest


def newest(output_dir: Path) -> Path:
    """The newest checkpoint."""
    return max((output_dir / "checkpoints").glob("step_*.pt"))


def weights_and_momentum(path: Path) -> str:
    """SHA-256 of all model and optimizer tensors of a checkpoint, or of the newest one in an output directory."""
    content = checkpoint.read(newest(path) if path.is_dir() else path)
    return digest([content["model"], content["optimizer"]])


def lines(output_dir: Path, split: str | None = None) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; with `split`, only those of that split."""
    every = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in every if split in (None, line["split"])]


def free_port() -> int:
    """A port on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
