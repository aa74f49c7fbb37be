"""Many processes of this machine connect over gloo, agree to stop, save, resume, and notice that one is lost."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from outputs import checkpoints, lines

import data
from ddp.distributed import process_group, stop_sync
from processes import Ranks, start


def start_training(count: int, output_dir: Path) -> Ranks:
    given = ["--dataset", "synthetic", "--batch-size", 1, "--epochs", 50, "--log-every", 1, "--output-dir", output_dir]
    return start(count, *given, "--timeout", 300)


def wait_for_steps(ranks: Ranks, output_dir: Path, count: int) -> None:
    """Until that many steps are logged."""

    def done() -> Any:
        return (output_dir / "metrics.jsonl").exists() and len(lines(output_dir, "train")) >= count

    ranks.until(done, 400)


def connections(ranks: Ranks) -> int:
    """How many one rank in the middle has, without those of this process, from which it was forked."""

    def pairs(pid: int | None) -> set[Any]:
        found = psutil.Process(pid).net_connections("tcp")
        return {(each.laddr, each.raddr) for each in found if each.status == psutil.CONN_ESTABLISHED}

    return len(pairs(ranks.pids[len(ranks.pids) // 2]) - pairs(None))


def test_a_rank_that_hangs_in_the_tree_is_noticed(tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "MANY_RANKS", 2)
    count = stop_sync.collective_count

    def hang(*devices: torch.device) -> int:
        found = count(*devices)
        if dist.get_rank() == 2 and found > 20:  # in a later step
            time.sleep(3600)
        return found

    monkeypatch.setattr(stop_sync, "collective_count", hang)
    options = ["--dataset", "synthetic", "--epochs", 50, "--timeout", 3, "--output-dir", tmp_path]
    ranks = start(3, *options)
    assert ranks.wait(90) == [8] * 3, ranks.output()
    assert "rank 2 did not respond for 3 s (--timeout)" in ranks.output(0), ranks.output()


@pytest.mark.slow
@pytest.mark.sample(0)
@pytest.mark.parametrize("count", [16, 64])
def test_many_processes_stop_together_and_resume_and_notice_a_lost_one(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 100 * count, "val": count})
    ranks = start_training(count, tmp_path)
    wait_for_steps(ranks, tmp_path, 2)
    connected = connections(ranks)
    assert connected >= count - 1
    os.kill(ranks.pids[-1], signal.SIGTERM)
    assert ranks.wait(200) == [75] * count, ranks.output(0)
    (saved,) = checkpoints(tmp_path)
    step = int(saved.removeprefix("step_").removesuffix(".pt"))

    monkeypatch.setattr(process_group, "MANY_RANKS", count)
    ranks = start_training(count, tmp_path)
    wait_for_steps(ranks, tmp_path, step + 2)
    assert [line["step"] for line in lines(tmp_path, "train")] == [*range(1, len(lines(tmp_path, "train")) + 1)]
    assert f"{saved}, at step {step}" in ranks.output(0)
    assert connections(ranks) < connected / 2, "a pair of ranks connects when it has something to send"
    lost = 5 * count // 8
    os.kill(ranks.pids[lost], signal.SIGKILL)
    codes = ranks.wait(200)
    assert codes == [-9 if rank == lost else 8 for rank in range(count)], ranks.output(0)
    assert "was lost" in ranks.output(0) or "were lost" in ranks.output(0)  # others may respond too late, on two cores
