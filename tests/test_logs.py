"""OUTPUT_DIR/logs: under launch_node.sh, each rank writes all its output to its own file; the console shows rank 0."""

from __future__ import annotations

import os
import pty
import re
import resource
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from template_copy import LEAN, copy_template, shrink

import main
from ddp.core.rank_logs import RANK_LOGS_VARIABLE, rank_log_path, start_rank_log
from ddp.distributed.rank_env import RankEnv
from faults import fault
from processes import Ranks, train

pytestmark = pytest.mark.slow
PRINTS = """

import os, sys

original, calls = compute_loss, 0


def compute_loss(outputs, targets, config):
    global calls
    calls += 1
    rank = os.environ["RANK"]
    if calls == 2:
        print(f"printed by {rank}")
        print(f"printed as an error by {rank}", file=sys.stderr)
        os.write(2, f"written without Python by {rank}\\n".encode())
    if calls == 5 and rank == os.environ.get("ABORTS"):
        os.abort()
    return original(outputs, targets, config)
"""
OPTIONS = ["--dataset", "synthetic", "--device", "cpu", "--epochs", "1", "--warmup-epochs", "0", "--max-steps", "6"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project whose loss function prints in the second step, and may crash in the fifth."""
    copy = shrink(copy_template(tmp_path / "my project"), train=1_280, val=64, test=64)
    with (copy / "model.py").open("a") as model:
        model.write(PRINTS)
    return copy


def run(project: Path, *options: Any, **environ: str) -> tuple[int, str]:
    """Run launch_node.sh with 2 processes on a terminal. Returns its exit code, and what the terminal shows."""
    ours, theirs = pty.openpty()
    command = ["bash", str(project / "launch_node.sh"), "--nproc-per-node", "2", "--", *OPTIONS, *map(str, options)]
    environment = {**os.environ, **LEAN, "PYTHONDONTWRITEBYTECODE": "1", "TERM": "xterm", **environ}
    started = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    try:
        while data := os.read(ours, 65536):
            shown += data
    except OSError:  # the end of a terminal
        pass
    os.close(ours)
    return started.wait(), shown.decode()


@fault(1)
def test_each_rank_has_a_log_of_its_output_with_that_of_c_code_and_the_console_shows_rank_0(project: Path) -> None:
    out = project / "out"
    code, shown = run(project, "--output-dir", out)
    assert code == 0, shown
    assert sorted(path.name for path in (out / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]
    for rank in (0, 1):
        log = (out / "logs" / f"rank_{rank}.log").read_text()
        assert f"rank {rank} of 2 on " in log.splitlines()[0]
        assert "accuracy" in log and f"[rank {rank}]" not in log
        for words in ("printed by", "printed as an error by", "written without Python by"):
            assert f"{words} {rank}\n" in log and f"{words} {1 - rank}" not in log
        assert f"printed as an error by {rank}" in shown
        assert "step/s" not in log, "the progress bar is for the terminal only"
    assert "printed by 0" in shown and "printed by 1" not in shown
    assert "written without Python" not in shown
    assert shown.count("a new run, in") == 1 and "[rank 1]" not in shown, "rank 1 logs to its file only"
    assert "epoch 1/1:" in shown, "the progress bar"

    # After a crash, the console names the log. A second start appends to it.
    options = ["--epochs", "2", "--max-steps", "20", "--output-dir", out]
    code, shown = run(project, *options, ABORTS="1")
    assert code == 8, shown
    path = out / "logs" / "rank_1.log"
    assert re.search(rf"was killed by SIGABRT; .*; its last output is in {re.escape(str(path))}", shown), shown
    assert "Fatal Python error: Aborted" not in shown
    log = path.read_text()
    assert "Fatal Python error: Aborted" in log and "model.py" in log.partition("Fatal")[2]
    assert log.count("rank 1 of 2 on ") == 2


def test_a_run_continues_if_its_logs_cannot_be_written(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full for one rank; the log of the other is a directory."""
    logs = tmp_path / "out" / "logs"
    (logs / "rank_1.log").mkdir(parents=True)
    (logs / "rank_0.log").symlink_to("/dev/full")
    monkeypatch.setenv(RANK_LOGS_VARIABLE, "1")  # as launch_node.sh does
    original = main.task.compute_loss

    def compute_loss(*tensors: Any) -> torch.Tensor:
        os.write(2, f"written without Python by {torch.distributed.get_rank()}\n".encode())
        return original(*tensors)

    monkeypatch.setattr(main.task, "compute_loss", compute_loss)
    shown = train(2, *OPTIONS, "--output-dir", tmp_path / "out")
    assert "done in" in shown
    assert f"warning: no log of this rank: cannot write {logs}/rank_0.log: No space left on device" in shown
    assert f"[rank 1] warning: no log of this rank: cannot write {logs}/rank_1.log: Is a directory" in shown
    assert "written without Python by 0" in shown and "written without Python by 1" in shown


@fault(7)
def test_a_disk_that_fills_up_does_not_fail_a_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rank that is not 0, whose output goes to its log alone. A limit of its size stands for the disk."""
    monkeypatch.setenv(RANK_LOGS_VARIABLE, "1")
    path = rank_log_path(tmp_path, 1)

    def target(_: RankEnv) -> int:
        start_rank_log(1, 2, str(tmp_path))
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size,) * 2)
        for _ in range(3):
            print("printed by hand", flush=True)
        return 0

    ranks = Ranks(1, target)
    assert ranks.wait() == [0], ranks.output()
    assert len(path.read_text().splitlines()) == 1 and not path.read_text().endswith("hand\n")
