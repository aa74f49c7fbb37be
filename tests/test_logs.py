"""OUT/logs: under launch_node.sh each rank's words are kept in a file of its own, and the console stays rank 0's."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from faults import fault

pytestmark = pytest.mark.slow
TEMPLATE = Path(__file__).resolve().parent.parent / "{{cookiecutter.project_slug}}"
SPEAK = """

import os, sys

calculate, said = compute_loss, 0


def compute_loss(outputs, targets, config):
    global said
    said += 1
    rank = os.environ["RANK"]
    if said == 2:
        print(f"printed by {rank}")
        print(f"printed as an error by {rank}", file=sys.stderr)
        os.write(2, f"past Python by {rank}\\n".encode())
    if said == 5 and rank == os.environ.get("ABORTS"):
        os.abort()
    return calculate(outputs, targets, config)
"""
OPTIONS = ["--dataset", "synthetic", "--device", "cpu", "--epochs", "1", "--warmup-epochs", "0", "--max-steps", "6"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project whose loss speaks in its second step, and may crash in its fifth."""
    copy = tmp_path / "my project"
    shutil.copytree(TEMPLATE, copy, ignore=shutil.ignore_patterns("runs", "data", "__pycache__", ".*_cache"))
    with (copy / "model.py").open("a") as model:
        model.write(SPEAK)
    return copy


def run(project: Path, *options: Any, **environ: str) -> tuple[int, str]:
    """launch_node.sh with 2 processes on a terminal: its exit code, and what the terminal shows."""
    ours, theirs = pty.openpty()
    command = ["bash", str(project / "launch_node.sh"), "--nproc-per-node", "2", "--", *OPTIONS, *map(str, options)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "TERM": "xterm", **environ}
    started = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    try:
        while data := os.read(ours, 65536):
            shown += data
    except OSError:  # so a terminal ends
        pass
    os.close(ours)
    return started.wait(), shown.decode()


@fault(1)
def test_each_rank_has_a_log_with_what_is_said_past_python_too_and_the_console_stays_readable(project: Path) -> None:
    out = project / "out"
    code, shown = run(project, "--output-dir", out)
    assert code == 0, shown
    assert sorted(path.name for path in (out / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]
    for rank in (0, 1):
        kept = (out / "logs" / f"rank_{rank}.log").read_text()
        assert f"rank {rank} of 2 on " in kept.splitlines()[0]
        assert "accuracy" in kept and f"[rank {rank}]" not in kept
        for words in ("printed by", "printed as an error by", "past Python by"):
            assert f"{words} {rank}\n" in kept and f"{words} {1 - rank}" not in kept
        assert f"printed as an error by {rank}" in shown
        assert "step/s" not in kept, "the bar belongs on the terminal"
    assert "printed by 0" in shown and "printed by 1" not in shown
    assert "past Python" not in shown
    assert shown.count("a new run, in") == 1 and "[rank 1]" not in shown, "the other rank has a file to talk to"
    assert "epoch 1/1:" in shown, "the bar"

    # Of a crash, the console says where to look. A second start writes on behind the first one.
    options = ["--epochs", "2", "--max-steps", "20", "--output-dir", out]
    code, shown = run(project, *options, ABORTS="1")
    assert code == 8, shown
    log = out / "logs" / "rank_1.log"
    assert f"was killed by SIGABRT; what it said last is in {log}" in shown
    assert "Fatal Python error: Aborted" not in shown
    kept = log.read_text()
    assert "Fatal Python error: Aborted" in kept and "model.py" in kept.partition("Fatal")[2]
    assert kept.count("rank 1 of 2 on ") == 2


def test_where_no_log_can_be_written_the_run_goes_on_without(project: Path) -> None:
    """The disk is full, for one rank; the other's log is a folder."""
    logs = project / "out" / "logs"
    (logs / "rank_1.log").mkdir(parents=True)
    (logs / "rank_0.log").symlink_to("/dev/full")
    code, shown = run(project, "--output-dir", project / "out")
    assert code == 0 and "done in" in shown, shown
    assert f"warning: no log of this rank: cannot write {logs}/rank_0.log: No space left on device" in shown
    assert f"[rank 1] warning: no log of this rank: cannot write {logs}/rank_1.log: Is a directory" in shown
    assert "past Python by 0" in shown and "past Python by 1" in shown
