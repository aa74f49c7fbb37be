"""What a run has left in its output folder, as tests look at it; and a port for what they start."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from ddp import checkpoint
from ddp.state import digest


def newest(output: Path) -> Path:
    """The newest checkpoint."""
    return max((output / "checkpoints").glob("step_*.pt"))


def weights_and_momentum(path: Path) -> str:
    """SHA-256 of all model and optimizer tensors of a checkpoint, or of the newest one in an output folder."""
    content = checkpoint.read(newest(path) if path.is_dir() else path)
    return digest([content["model"], content["optimizer"]])


def lines(output: Path, split: str | None = None) -> list[dict[str, Any]]:
    """Those of metrics.jsonl; of `split` alone, if it is given."""
    every = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line for line in every if split in (None, line["split"])]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
