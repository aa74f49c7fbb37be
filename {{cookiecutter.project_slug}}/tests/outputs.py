"""Read what a run has written to its output directory; and find a free port."""

import json
import socket
from pathlib import Path
from typing import Any

from compare import differences, metrics_lines, newest
from ddp.checkpoint import storage as checkpoint
from ddp.distributed.tensors import digest, whole_tree

__all__ = ["assert_same_run", "checkpoints", "free_port", "lines", "newest", "status", "weights_and_momentum"]


def checkpoints(output_dir: Path) -> list[str]:
    """The names of all files in the directory of checkpoints."""
    return sorted(path.name for path in (output_dir / "checkpoints").iterdir() if path.is_file())


def status(output_dir: Path) -> dict[str, Any]:
    """The content of status.json."""
    return json.loads((output_dir / "status.json").read_text())


def weights_and_momentum(path: Path) -> str:
    """SHA-256 of all model and optimizer tensors of a checkpoint, or of the newest one in an output directory."""
    content = whole_tree(checkpoint.read(newest(path) if path.is_dir() else path))
    return digest([content["model"], content["optimizer"]])


def lines(output_dir: Path, split: str | None = None) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; with `split` (train, train_epoch, val or test), only those of that split."""
    return [line for line in metrics_lines(output_dir) if split in (None, line["split"])]


def assert_same_run(whole: Path, other: Path) -> None:
    """Both runs have ended with the same checkpoint and the same metrics, bit for bit."""
    assert differences(whole, other) == []
    options = [checkpoint.read(newest(output_dir))["config"] for output_dir in (whole, other)]
    assert [{**each, "output_dir": ""} for each in options] == [{**options[0], "output_dir": ""}] * 2


def free_port() -> int:
    """A port on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
