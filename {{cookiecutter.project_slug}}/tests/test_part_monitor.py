"""The part monitor: the times of a run add up over a kill; a flipped bit and a slow rank are found."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from outputs import lines, status
from processes import start, train

from ddp.parts.monitor import rank_speeds
from ddp.training.run import Run

OPTIONS = ["--dataset", "synthetic", "--batch-size", 16, "--log-every", 1, "--checkpoint-every", 2, "--output-dir"]


def test_the_times_add_up_over_a_kill(tmp_path: Path) -> None:
    def kill(run: Run) -> None:
        if run.state.step == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    start(2, *OPTIONS, tmp_path, after_step=kill).wait()
    assert "recovered: lost at" in train(2, *OPTIONS, tmp_path, "--max-steps", 8)
    record = status(tmp_path)["time"]
    assert sum(record["seconds"].values()) == pytest.approx(record["until"] - record["since"], rel=0.01)
    assert record["seconds"]["productive"] > 0 < record["seconds"]["start-up"]


def test_a_flipped_bit_is_found_at_the_next_save(tmp_path: Path) -> None:
    def flip(run: Run) -> None:
        if run.state.step == 3 and run.ctx.rank == 1:
            weight: Any = next(run.checkpoints.fields["model"].parameters())
            with torch.no_grad():
                weight.view(-1)[0] += 1

    assert "no longer have the same weights" in train(2, *OPTIONS, tmp_path, code=6, after_step=flip)


def test_gradients_are_computed_twice(tmp_path: Path) -> None:
    train(2, *OPTIONS, tmp_path, "--max-steps", 4, "--deterministic", "--guard", 2)


def test_the_ranks_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_speeds, "INTERVAL_S", 0.0)
    train(2, *OPTIONS, tmp_path, "--epochs", 2)
    assert any("rank_ms_slowest" in line for line in lines(tmp_path, "train"))
