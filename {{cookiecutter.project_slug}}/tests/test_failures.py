"""One cause, one line, one exit code: runs in which a process is killed, fails, hangs, or is told to stop."""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from outputs import checkpoints, lines, status
from processes import start, train

from ddp.training.run import Run

OPTIONS = ["--dataset", "synthetic", "--batch-size", 16, "--log-every", 1, "--checkpoint-every", 2, "--output-dir"]


def fail(run: Run) -> None:
    raise ValueError("a bug of mine")


def hang(run: Run) -> None:
    time.sleep(3600)


def poison(run: Run) -> None:
    """Make a weight infinite, as a diverging run does."""
    model = next(part for part in run.checkpoints.fields.values() if isinstance(part, torch.nn.Module))
    torch.nn.init.constant_(next(weight for weight in model.parameters() if weight.requires_grad), float("nan"))


# What rank 1 does after step 5; the exit codes of both ranks; what rank 0 prints, as a regular expression.
FAILURES: dict[str, tuple[Callable[[Run], Any], list[int], str]] = {
    "killed": (lambda run: os.kill(os.getpid(), signal.SIGKILL), [8, -9], r"rank 1 was lost.*resumable from step 4"),
    "raises": (fail, [1, 1], r"rank 0 is exiting because rank 1 failed: ValueError: a bug of mine"),
    "exits": (lambda run: os._exit(0), [8, 0], r"rank 1 was lost.*resumable from step 4"),
    "hangs": (
        hang,
        [8, 8],
        r"rank 1 did not respond for 2 s \(--timeout\): .*rank 1 is at tests/test_failures\.py:\d+",
    ),
    "calls another collective": (
        lambda run: torch.distributed.barrier(),
        [1, 1],
        r"rank 0 called \w+ .*, but rank 1 called barrier at tests/test_failures\.py:\d+",
    ),
    "diverges": (poison, [6, 6], r"no longer finite.*last good checkpoint: \S+step_00000004\.pt"),
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_rank_that_fails_ends_all_with_one_cause_and_one_code(how: str, tmp_path: Path) -> None:
    action, codes, cause = FAILURES[how]

    def after_step(run: Run) -> None:
        if run.ctx.rank == 1 and run.state.step == 5:
            while not (tmp_path / "checkpoints/step_00000004.pt").exists():  # it is written in the background
                time.sleep(0.01)
            time.sleep(0.6)
            action(run)

    ranks = start(2, *OPTIONS, tmp_path, "--timeout", 2, after_step=after_step)
    assert ranks.wait(90) == codes, ranks.output()
    assert re.search(cause, ranks.output(0)), ranks.output()
    assert ranks.output().count("Traceback") == (1 if how == "raises" else 0)
    assert " in hang\n" in ranks.output(1) or how != "hangs", "the stack of the rank that hangs"
    assert checkpoints(tmp_path) == ["step_00000002.pt", "step_00000004.pt"], "nothing is saved after a failure"
    found = status(tmp_path)
    assert (found["state"], found["exit_code"], found["saved"]) == ("failed", codes[0], 4)


class TensorOfABrokenGpu:
    def __del__(self) -> None:
        os.abort()


def test_a_rank_that_fails_frees_nothing_before_it_exits(tmp_path: Path) -> None:
    def fail_with_tensors(run: Run) -> None:
        tensor = TensorOfABrokenGpu()
        raise ValueError(f"a bug of mine: {tensor}")

    assert "a bug of mine" in train(1, *OPTIONS, tmp_path, code=1, after_step=fail_with_tensors)


def test_a_second_signal_ends_a_process_that_does_not_reach_the_end_of_its_step(tmp_path: Path) -> None:
    ranks = start(1, *OPTIONS, tmp_path, after_step=lambda run: time.sleep(3600 * (run.state.step == 3)))
    ranks.until(lambda: len(lines(tmp_path, "train")) == 3 if (tmp_path / "metrics.jsonl").exists() else False)
    time.sleep(0.2)
    ranks.kill(signal.SIGINT)
    ranks.until(lambda: "stop requested: saving and exiting after this step" in ranks.output())
    time.sleep(1.2)  # within a second, it would count as the same request
    ranks.kill(signal.SIGINT)
    assert ranks.wait() == [128 + signal.SIGINT]
    assert "quit immediately on a second signal (SIGINT)" in ranks.output()


def test_a_stop_of_your_own_saves_and_a_second_run_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    """`run.request_stop` on one rank is enough. Meanwhile, another command with this --output-dir exits with 5."""

    def after_step(run: Run) -> None:
        time.sleep(0.1)
        if run.state.step == 3:
            (tmp_path / "training").touch()
            while not (tmp_path / "refused").exists():
                time.sleep(0.01)
        if run.state.step == 4 and run.ctx.rank == 1:
            run.request_stop("enough")

    first = start(2, *OPTIONS, tmp_path, after_step=after_step)
    first.until((tmp_path / "training").exists)
    (line,) = train(1, *OPTIONS, tmp_path, code=5).splitlines()
    assert line.startswith(f"error: another run (process {first.pids[0]} on ")
    (tmp_path / "refused").touch()
    assert first.wait() == [75, 75], first.output()
    assert "stopped on request (enough) and saved, at step " in first.output(0)
    stopped = status(tmp_path)
    assert (stopped["state"], stopped["exit_code"]) == ("stopped", 75) and stopped["step"] == stopped["saved"]


def test_too_few_samples_for_one_step_are_refused_before_training(tmp_path: Path) -> None:
    (line,) = train(2, *OPTIONS, tmp_path, "--batch-size", 10**6, code=2).splitlines()
    assert re.search(r"error: \d+ training samples do not fill one step of 2,?000,?000", line), line
