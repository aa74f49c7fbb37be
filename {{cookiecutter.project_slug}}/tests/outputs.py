"""Read what a run has written to its output directory; and find a free port."""

import json
import socket
from pathlib import Path
from typing import Any

from ddp.checkpoint import storage as checkpoint
from ddp.checkpoint.state import digest

SPEEDS = ("samples_per_s", "step_ms", "data_ms", "memory_mb")


def newest(output_dir: Path) -> Path:
    """The newest checkpoint."""
    return max((output_dir / "checkpoints").glob("step_*.pt"))


def checkpoints(output_dir: Path) -> list[str]:
    """The names of all files in the directory of checkpoints."""
    return sorted(path.name for path in (output_dir / "checkpoints").iterdir())


def status(output_dir: Path) -> dict[str, Any]:
    """The content of status.json."""
    return json.loads((output_dir / "status.json").read_text())


def weights_and_momentum(path: Path) -> str:
    """SHA-256 of all model and optimizer tensors of a checkpoint, or of the newest one in an output directory."""
    content = checkpoint.read(newest(path) if path.is_dir() else path)
    return digest([content["model"], content["optimizer"]])


def lines(output_dir: Path, split: str | None = None) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; with `split` (train, train_epoch, val or test), only those of that split."""
    every = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in every if split in (None, line["split"])]


def assert_same_run(whole: Path, other: Path) -> None:
    """Both runs have ended with the same checkpoint and the same metrics, bit for bit."""
    contents = [checkpoint.read(newest(output_dir)) for output_dir in (whole, other)]
    for content in contents:
        del content["path"], content["config"]["output_dir"]
    first, second = contents
    assert first.keys() == second.keys()
    assert [name for name in first if digest(first[name]) != digest(second[name])] == []
    logged = [
        [{name: value for name, value in line.items() if name not in SPEEDS} for line in lines(output_dir)]
        for output_dir in (whole, other)
    ]
    assert logged[0] == logged[1]


def free_port() -> int:
    """A port on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
