"""Where the time of a run went, over its restarts; what a lost process and a save cost."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp.core.run_config import NOTICED_VARIABLE
from ddp.parts.monitor import save_cost
from ddp.parts.monitor.ledger import PARTS, Ledger
from ddp.parts.monitor.save_cost import SaveCost
from ddp.training import run
from ddp.training.run import Run
from faults import fault
from processes import start, train


def status(output: Path) -> dict[str, Any]:
    return json.loads((output / "status.json").read_text())


def sleep_and_kill(at: int | None, seconds: float, each: Run) -> None:
    time.sleep(seconds)
    if each.state.step == at:
        os.kill(os.getpid(), signal.SIGKILL)


@fault(1)
def test_the_ledger_adds_up_over_a_kill_a_stop_and_a_longer_run(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "HEARTBEAT_S", 0.0)
    options = ["--dataset", "synthetic", "--epochs", 1, "--batch-size", 16, "--checkpoint-every", 4]
    options += ["--output-dir", tmp_path]
    began = time.time()
    killed = start(2, *options, after_step=partial(sleep_and_kill, 7, 0.2))
    killed.until((tmp_path / "metrics.jsonl").exists)
    started = time.time()
    assert -signal.SIGKILL in killed.wait()
    last_sign_of_life = status(tmp_path)["time"]["until"]
    time.sleep(1.5)
    output = train(2, *options, "--max-steps", 9, after_step=partial(sleep_and_kill, None, 0.05))
    recovered = (
        r"recovered: lost at \d\d:\d\d:\d\d, training again after ([\d.]+) s; (\d) steps or a few more computed again"
    )
    (line,) = re.findall(recovered, output)
    recovered_s = time.time() - last_sign_of_life
    assert 1.5 < float(line[0]) < recovered_s and line[1] == "2", "killed after step 7, which nobody has recorded"
    continued = time.time()
    output = train(2, *options)
    assert "recovered" not in output, "that run had reached its end"
    record = status(tmp_path)["time"]
    seconds = record["seconds"]
    assert list(seconds) == list(PARTS)
    assert sum(seconds.values()) == pytest.approx(record["until"] - record["since"], rel=0.001)
    assert began - 1 < record["since"] < started and continued < record["until"] < time.time()
    assert 0.4 < seconds["down"] < time.time() - last_sign_of_life  # 1.5 s; a process knows its start to a second
    assert 0.35 < seconds["repeated"] < last_sign_of_life - began, "two steps of 0.2 s"
    assert all(seconds[part] > 0 for part in PARTS)
    percent = {part: float(value) for value, part in re.findall(r"([\d.]+) % ([\w-]+)", output.splitlines()[-3])}
    assert 99 < sum(percent.values()) < 101 and percent["repeated"] > 0, output
    assert status(tmp_path)["saving"]["saves"] >= 2 and status(tmp_path)["saving"]["pause_ms"] > 0


def test_what_was_written_after_the_last_checkpoint_counts_as_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NOTICED_VARIABLE, "1130.5")

    def record(until: float, **seconds: float) -> dict[str, Any]:
        return {"since": 1000.0, "until": until, "stepped": until - 1, "seconds": dict.fromkeys(PARTS, 0.0) | seconds}

    saved, later = record(1060, productive=40, data=10), record(1120, productive=90, data=15, saving=5)
    saved["seconds"]["start-up"] = later["seconds"]["start-up"] = 10

    def resumed(saved: dict[str, Any], **of_status: Any) -> Ledger:
        found = Ledger()
        found.since = 1150.0
        found.resume(saved, 400, {"state": "running", "exit_code": None, "step": 450, **of_status})
        return found

    found = resumed(saved, time=later)
    assert found.seconds == record(0, productive=40, data=10, saving=5, repeated=55, down=30)["seconds"] | {
        "start-up": 10
    }
    assert (found.lost_at, found.noticed_at, found.lost_steps, found.first_start) == (1119.0, 1130.5, 50, 1000.0)
    failed = resumed(saved, time=later, state="failed", exit_code=8)
    assert failed.noticed_at == 1120.0, "rank 0 noticed it before the launcher"
    assert resumed(saved, time=later, state="failed", exit_code=7).lost_at == 0.0, "no process was lost"
    old = {**later, "until": 900.0}
    assert resumed(saved, time=old).seconds["down"] == 90, "status.json is from before the run has moved"
    assert resumed(saved, time=later, state="stopped").lost_at == 0.0
    for lost in ({}, {"time": {**later, "since": 900.0}}):  # status.json is not there, or of another run
        found = resumed(saved, **lost)
        assert found.seconds["down"] == 90 and found.seconds["repeated"] == found.lost_at == 0
    assert resumed({}, time=later).seconds["repeated"] == 105, "nothing was saved"
    assert resumed({}).seconds == dict.fromkeys(PARTS, 0.0)
    found.seconds |= {"productive": 41 * 3600.0, "down": 720.0}
    assert str(found).startswith("41 h 12 min: 99.5 % productive, 0.5 % down")


def test_the_speed_while_a_checkpoint_is_written_is_compared_with_the_usual_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(save_cost.time, "perf_counter", lambda: now)
    monkeypatch.setattr(save_cost, "add_scalars", lambda *_: None)
    done = threading.Event()
    cost = SaveCost(SimpleNamespace(checkpoints=SimpleNamespace(writer=SimpleNamespace(done=done))))

    def step(writing: bool) -> None:
        done.clear() if writing else done.set()
        cost.stepped()

    assert cost.status() == {"saving": {}}
    for writing, took in [(False, 1.0), (False, 0.1), (False, 0.1), (True, 0.125), (True, 0.125), (False, 0.1)]:
        now += took
        step(writing)
    cost.phase("saving")  # at the end of an epoch: what a stop in the evaluation would write
    now += 0.01
    cost.phase("evaluation")
    now += 5
    cost.phase("saving")
    cost.saving()
    now += 0.01
    cost.phase("productive")
    now += 5
    step(False)
    expected = {"saves": 1, "pause_ms": 20.0, "write_s": 0.25, "speed_while_written": 0.8}
    assert cost.status() == {"saving": expected}
