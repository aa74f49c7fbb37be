"""Failures of a run that trains: signals, lost, hanging and failing ranks. One cause, one line, one exit code."""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import os
import re
import signal
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import make_dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from outputs import free_port, weights_and_momentum

import ddp.training.run
import images
import main
from config import Config
from ddp.checkpoint import storage as checkpoint
from ddp.checkpoint.manager import CheckpointManager
from ddp.core.errors import SetupError, UsageError, one_line
from ddp.core.files import correct_status, write_status
from ddp.core.process_exit import ProcessExit, process_exit
from ddp.core.signals import LAUNCHER_GONE, stop_signal
from ddp.distributed import failure_monitor, process_group, rank_reports, stop_sync
from ddp.distributed.process_group import DistContext
from ddp.distributed.rank_env import RankEnv, find_rank_env
from ddp.distributed.rank_reports import RECORDERS, Collective, RankReports, Report, backend_of, collective_count
from ddp.distributed.stop_sync import MAX_STEPS_BETWEEN_SYNCS, StopSync, largest
from ddp.distributed.tensors import Mark, Streams
from ddp.entrypoint.run_main import run_as_rank
from ddp.training.run import Run
from faults import FAULTS, IN_PROJECT, NOT_SHOWN, fault
from processes import Ranks, on_ranks, start, train
from small_models import build_awkward, build_slow_awkward

pytestmark = pytest.mark.slow
ALL = partial(pytest.param, marks=pytest.mark.sample(0))  # a case for --all

TESTS = Path(__file__).parent
PROJECT_TESTS = TESTS.parent / "{{cookiecutter.project_slug}}" / "tests"


def status(output: Path) -> dict[str, Any]:
    return json.loads((output / "status.json").read_text())


def checkpoints(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "checkpoints").iterdir() if path.is_file())


def errors(output: str) -> list[str]:
    return [line for line in output.splitlines() if "error: " in line]


def start_faulty(
    world_size: int, inject: Callable[[int, int], Any], *options: Any, init_method: str | None = None
) -> Ranks:
    """Start a run that calls `inject(rank, number)` whenever it computes a loss; `number` counts from 1.

    The loss is multiplied by what `inject` returns, unless that is None.
    """
    arguments = [str(option) for option in ("--dataset", "synthetic", "--batch-size", 16, *options)]

    def target(rank_env: RankEnv) -> int:
        compute, count = main.task.compute_loss, 0

        def compute_loss(*tensors: Any) -> torch.Tensor:
            nonlocal count
            count += 1
            changed = inject(rank_env.rank, count)
            loss = compute(*tensors)
            return loss if changed is None else loss * changed

        main.task.compute_loss = compute_loss
        rank_env = replace(rank_env, init_method=init_method or rank_env.init_method)
        return run_as_rank(main.main, Config.parse(arguments), rank_env)

    return Ranks(world_size, target)


def wait_for_text(ranks: Ranks, text: str, timeout: float = 180) -> None:
    end = time.monotonic() + timeout
    while text not in ranks.output():
        assert time.monotonic() < end, f"{text!r} was not printed:\n{ranks.output()}"
        time.sleep(0.01)


# ---- signals --------------------------------------------------------------------------------------------------------


@fault(9)
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("number", "to"),
    [(signal.SIGUSR1, 0), (signal.SIGINT, 1)],
)
def test_a_signal_to_one_rank_stops_all_after_a_step_and_the_run_resumes_bit_for_bit(
    small: None, number: int, to: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--dataset", "synthetic", "--epochs", 2, "--batch-size", 4, "--log-every", 1, "--output-dir"]
    monkeypatch.setattr(main.task, "build_model", build_awkward)
    train(2, *options, tmp_path / "whole")
    monkeypatch.setattr(main.task, "build_model", build_slow_awkward)
    ranks = start(2, *options, tmp_path / "stopped")
    wait_for_text(ranks, "step   7/160")
    os.kill(ranks.pids[to], number)
    assert ranks.wait() == [75, 75], ranks.output()
    assert "Traceback" not in ranks.output() and ranks.output().count("stopped on request and saved") == 1
    stopped = status(tmp_path / "stopped")
    assert stopped["state"] == "stopped" and stopped["exit_code"] == 75
    assert 7 <= stopped["step"] == stopped["saved"] < 80, "not in the middle of the first epoch"
    assert f"step_{stopped['step']:08d}.pt" in checkpoints(tmp_path / "stopped")

    monkeypatch.setattr(main.task, "build_model", build_awkward)
    assert f"at step {stopped['step']}" in train(2, *options, tmp_path / "stopped")
    assert weights_and_momentum(tmp_path / "stopped") == weights_and_momentum(tmp_path / "whole")


@fault(9)
def test_a_signal_to_a_forked_process_is_no_request_to_its_rank(small: None, tmp_path: Path) -> None:
    """A Pool of the owner's ends its processes with SIGTERM."""

    def inject(rank: int, number: int) -> None:
        if number == 3:
            pid = os.fork()
            if pid == 0:
                time.sleep(60)
                os._exit(0)
            os.kill(pid, signal.SIGTERM)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
            # What the program has blocked stays blocked: a DataLoader worker has to ignore signals first.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            pid = os.fork()
            if pid == 0:
                os._exit(int(signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])))
            assert os.waitpid(pid, 0)[1] == 0
            assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        time.sleep(0.1)  # the ranks ask each other twice a second

    ranks = start_faulty(2, inject, "--max-steps", 12, "--output-dir", tmp_path)
    assert ranks.wait() == [0, 0], ranks.output()


@fault(13)
def test_a_refusal_on_one_rank_alone_reaches_those_that_wait_for_it(small: None, tmp_path: Path) -> None:
    """Such as --precision bf16 on the one machine that has an older GPU."""

    def target(rank_env: RankEnv) -> int:
        def check(config: Config, model: torch.nn.Module) -> None:
            if rank_env.rank == 1:
                raise UsageError("--precision bf16: this GPU has no bfloat16; use --precision fp16")

        ddp.training.run.check_model = check
        options = ["--dataset=synthetic", "--timeout=600", f"--output-dir={tmp_path}"]
        return run_as_rank(main.main, Config.parse(options), rank_env)

    ranks = Ranks(2, target)
    assert ranks.wait() == [2, 2], ranks.output()  # long before --timeout
    refusal = "rank 1 failed: --precision bf16: this GPU has no bfloat16; use --precision fp16"
    assert ranks.output(0).splitlines()[-1] == f"rank 0 is exiting because {refusal}"


@fault(9)
def test_a_stop_needs_no_module_that_is_not_loaded(small: None, tmp_path: Path) -> None:
    """The environment of a run may be removed, or upgraded, while it trains: it saves and exits with 75."""

    class Gone:
        def find_spec(self, name: str, *_: Any) -> None:
            print(f"import {name}", flush=True)
            raise OSError(f"{name} is gone")

    def inject(rank: int, number: int) -> None:
        if number == 1:
            sys.modules.pop("psutil", None)  # the parent of the ranks may have loaded it
            stop_signal.listen(os.getppid())
        if number == 5:
            sys.meta_path.insert(0, Gone())
            print("removed", flush=True)
        time.sleep(0.1)

    ranks = start_faulty(2, inject, "--checkpoint-every", 1, "--output-dir", tmp_path)
    wait_for_text(ranks, "removed", 60)
    ranks.kill(signal.SIGTERM)
    assert ranks.wait() == [75, 75], ranks.output()
    assert "import " not in ranks.output() and "Traceback" not in ranks.output()


@pytest.mark.sample(0)
def test_request_stop_on_one_rank_alone_stops_all_ranks_with_a_checkpoint(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = Run.advance

    def advance_and_ask(run: Run) -> None:
        advance(run)
        time.sleep(0.05)
        if run.ctx.rank == 0 and run.state.step == 5:
            run.request_stop("the quota of the disk")

    monkeypatch.setattr(Run, "advance", advance_and_ask)
    options = ("--dataset", "synthetic", "--batch-size", 4, "--output-dir", tmp_path)
    output = train(2, *options, code=75)
    assert "Traceback" not in output and "error" not in output
    assert output.count("stopped on request (the quota of the disk) and saved, at step ") == 1
    stopped = status(tmp_path)
    assert stopped["state"] == "stopped" and stopped["exit_code"] == 75
    assert "(the quota of the disk)" in stopped["message"]
    assert 5 <= stopped["step"] == stopped["saved"] < 40, "long after the request, or not in the first epoch"
    assert checkpoints(tmp_path) == [f"step_{stopped['step']:08d}.pt"]
    monkeypatch.setattr(Run, "advance", advance)
    assert f"at step {stopped['step']}" in train(2, *options, "--max-steps", 60)


@fault(9)
@pytest.mark.sample(1)
@pytest.mark.parametrize("steps", [[], ["--max-steps", 27]])
def test_a_stop_in_the_evaluation_repeats_it_after_a_resume(
    small: None, steps: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--dataset", "synthetic", "--epochs", 2, "--batch-size", 8, *steps, "--output-dir"]
    monkeypatch.setattr(images, "CHUNK_PIXELS", 8 * 32 * 32)  # otherwise it would be one batch
    train(2, *options, tmp_path / "whole")

    def slow_evaluation(rank: int, number: int) -> None:
        if not torch.is_grad_enabled():
            (tmp_path / "evaluating").touch()
            time.sleep(0.5)

    ranks = start_faulty(2, slow_evaluation, "--epochs", 2, "--batch-size", 8, *steps, "--output-dir", tmp_path / "cut")
    while not (tmp_path / "evaluating").exists():
        time.sleep(0.01)
    os.kill(ranks.pids[1], signal.SIGTERM)
    assert ranks.wait() == [75, 75], ranks.output()
    assert not any('"val"' in line for line in (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines())
    train(2, *options, tmp_path / "cut")
    results = [
        [line for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines() if '"val"' in line]
        for run in ("whole", "cut")
    ]
    assert results[0] == results[1] and len(results[0]) == (1 if steps else 2)
    assert weights_and_momentum(tmp_path / "cut") == weights_and_momentum(tmp_path / "whole")


@fault(9)
def test_a_stop_of_an_evaluation_exits_with_75_and_changes_no_file(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "CHUNK_PIXELS", 8 * 32 * 32)  # otherwise it would be one batch
    train(1, "--dataset", "synthetic", "--max-steps", 2, "--batch-size", 16, "--output-dir", tmp_path)
    before = status(tmp_path)
    ranks = start_faulty(2, lambda rank, number: time.sleep(0.3), "--evaluate", "--output-dir", tmp_path)
    wait_for_text(ranks, "evaluating")
    os.kill(ranks.pids[0], signal.SIGTERM)
    assert ranks.wait() == [75, 75] and "stopped on request while nothing was being trained" in ranks.output()
    assert status(tmp_path) == before


@pytest.mark.sample(0)
@fault(10)
def test_a_second_signal_ends_the_process_at_once(small: None, tmp_path: Path) -> None:
    """Even in the middle of a step that never ends."""
    number = signal.SIGTERM
    ranks = start_faulty(
        1, lambda rank, count: time.sleep(600 * (count == 3)), "--output-dir", tmp_path, "--log-every", 1
    )
    wait_for_text(ranks, "step   2/400")
    time.sleep(0.2)
    os.kill(ranks.pids[0], number)
    time.sleep(0.1)
    os.kill(ranks.pids[0], number)  # the same request, which arrives twice
    wait_for_text(ranks, "stop requested: saving and exiting after this step (signal again to quit immediately)")
    time.sleep(1.2)
    assert "quit immediately on" not in ranks.output()
    os.kill(ranks.pids[0], number)
    assert ranks.wait() == [128 + number]  # long before the step ends
    assert f"quit immediately on a second signal ({signal.Signals(number).name})" in ranks.output()
    assert status(tmp_path)["state"] == "failed"


@fault(9, 10)
def test_a_signal_to_another_rank_is_not_the_first_one_of_this_rank(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user signals all ranks, one after another: the second rank is already saving, and completes it."""
    save = Run.save

    def save_slowly(run: Run) -> None:
        print("saving", flush=True)
        time.sleep(2.5)
        save(run)

    monkeypatch.setattr(Run, "save", save_slowly)
    ranks = start_faulty(2, lambda rank, number: time.sleep(0.05), "--log-every", 1, "--output-dir", tmp_path)
    wait_for_text(ranks, "step   2/200")
    os.kill(ranks.pids[0], signal.SIGTERM)
    wait_for_text(ranks, "saving")
    time.sleep(1.3)
    os.kill(ranks.pids[1], signal.SIGTERM)
    assert ranks.wait() == [75, 75], ranks.output()
    assert len(checkpoints(tmp_path)) == 1


@fault(9)
def test_a_signal_before_training_ends_all_ranks_at_once(tmp_path: Path) -> None:
    """One rank waits for another that never joins: there is nothing to save."""

    def target(rank_env: RankEnv) -> int:
        if rank_env.rank == 1:
            time.sleep(3600)
        return run_as_rank(main.main, Config.parse(["--dataset", "synthetic", "--output-dir", str(tmp_path)]), rank_env)

    ranks = Ranks(2, target)
    wait_for_text(ranks, "waiting for rank 1 of 2 processes")
    os.kill(ranks.pids[0], signal.SIGTERM)
    os.kill(ranks.pids[1], signal.SIGKILL)
    assert ranks.wait()[0] == 75 and "before training began" in ranks.output()


@fault(9)
def test_a_signal_to_a_rank_that_has_not_connected_ends_the_others_as_well() -> None:
    """It still loads its data, for example. The others do not wait for --timeout."""

    def load_for_long(config: Config, rank_env: RankEnv) -> None:
        if rank_env.rank == 1:
            print("loading", flush=True)
            time.sleep(3600)
        with process_group.init_distributed(config, rank_env):
            raise AssertionError("they are connected")

    ranks = Ranks(2, lambda rank_env: run_as_rank(load_for_long, Config.parse([]), rank_env))
    wait_for_text(ranks, "loading")
    os.kill(ranks.pids[1], signal.SIGTERM)
    assert ranks.wait() == [75, 75], ranks.output()
    expected = "rank 0 is exiting because rank 1 failed: stopped on request before training began: nothing to save\n"
    assert ranks.output(0) == expected and ranks.output(1) == "loading\n"


@fault(9, 12)
@pytest.mark.sample(1)
@pytest.mark.parametrize("launcher_gone_on", [0, 1])
def test_ranks_with_different_reasons_to_stop_exit_with_the_same_code(
    small: None, launcher_gone_on: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user stops one node while the launcher of another is killed."""
    advance = Run.advance

    def advance_and_mark(run: Run) -> None:
        advance(run)
        if run.state.step == 1:
            stop_signal.mark_requested(LAUNCHER_GONE if run.ctx.rank == launcher_gone_on else signal.SIGTERM)

    monkeypatch.setattr(Run, "advance", advance_and_mark)
    output = train(2, "--dataset", "synthetic", "--output-dir", tmp_path, code=8)
    assert "the launcher is gone: stopped and saved, at step 1: " in output and "stopped on request" not in output
    assert status(tmp_path)["exit_code"] == 8 and checkpoints(tmp_path) == ["step_00000001.pt"]


@fault(11)
@pytest.mark.parametrize("nohup", [True, False])
def test_sighup_stops_a_run_but_not_under_nohup(small: None, nohup: bool, tmp_path: Path) -> None:
    arguments = ["--dataset", "synthetic", "--epochs", "1", "--log-every", "1", "--output-dir", str(tmp_path)]

    def target(rank_env: RankEnv) -> int:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
        compute = main.task.compute_loss
        main.task.compute_loss = lambda *tensors: (time.sleep(0.1), compute(*tensors))[1]
        return run_as_rank(main.main, Config.parse(arguments), rank_env)

    ranks = Ranks(1, target)
    wait_for_text(ranks, "step  2/10")
    os.kill(ranks.pids[0], signal.SIGHUP)
    assert ranks.wait() == [0 if nohup else 75], ranks.output()


@fault(9)
def test_workers_of_a_data_loader_outlive_the_signal(small: None, tmp_path: Path) -> None:
    """torchrun and Slurm also signal the workers, but the last step still needs their batches."""
    options = ("--workers", 2, "--epochs", 3, "--output-dir", tmp_path, "--log-every", 1)
    ranks = start_faulty(2, lambda rank, number: time.sleep(0.05), *options)
    wait_for_text(ranks, "step  4/60")
    for pid in ranks.pids:
        os.killpg(pid, signal.SIGTERM)
    assert ranks.wait() == [75, 75], ranks.output()
    assert "Traceback" not in ranks.output()


def test_the_ranks_sync_stop_requests_twice_a_second_and_not_after_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(ctx: DistContext) -> tuple[list[int], float]:
        synced: list[int] = []
        passed: list[int] = []
        reduce = dist.all_reduce
        monkeypatch.setattr(
            dist, "all_reduce", lambda *args, **named: (synced.append(len(passed)), reduce(*args, **named))
        )
        stop_sync, begin = StopSync(), time.monotonic()
        for _ in range(60):
            time.sleep(0.02 if ctx.rank else 0.001)
            assert stop_sync.maybe_sync() is None
            passed.append(1)
        return synced, time.monotonic() - begin

    (first, seconds), (second, _) = on_ranks(2, count)
    assert first == second, "the ranks do not sync after the same steps"
    assert 3 <= len(first) <= 3 + 4 * seconds, f"60 steps in {seconds} s: synced after {first}"
    assert MAX_STEPS_BETWEEN_SYNCS <= 100


@pytest.mark.sample(2)
@pytest.mark.parametrize("many", [2, 100])
@pytest.mark.parametrize("count", [2, 3, 6, 7])
def test_all_ranks_learn_the_largest_number(count: int, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "MANY_RANKS", many)

    def learn(ctx: DistContext) -> list[list[float]]:
        here = ctx.world_size - ctx.rank
        values = [[float(here), -float(here), float(ctx.rank == place)] for place in range(ctx.world_size)]
        before = collective_count()
        found = [largest(torch.tensor(each, dtype=torch.double), ctx.stop_sync.tree).tolist() for each in values]
        assert len({*ctx.gather(collective_count() - before)}) == 1, "a message counts as a collective"
        return found

    assert on_ranks(count, learn) == [[[count, -1.0, 1.0]] * count] * count


def test_ranks_that_need_long_to_agree_on_a_stop_ask_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not more than 64 steps apart, 1,500 of them would be 29 times."""

    def count(ctx: DistContext) -> tuple[list[int], float]:
        synced: list[int] = []
        reduce = dist.all_reduce

        def slowly(*arguments: Any, **named: Any) -> Any:
            synced.append(passed)
            time.sleep(0.01)
            return reduce(*arguments, **named)

        monkeypatch.setattr(dist, "all_reduce", slowly)
        stop_sync = StopSync()
        for passed in range(1500):  # noqa: B007  read by `slowly`
            time.sleep(0.0005)
            assert stop_sync.maybe_sync() is None
        return synced, stop_sync.interval_s

    (first, interval_s), (second, other_s) = on_ranks(2, count)
    assert first == second and interval_s == other_s > 2, "an answer takes 10 ms, a part of MAX_COST of 2 s"
    assert len(first) <= 12, first


class SlowMark(Mark):
    """A point in the work of a GPU that takes its time."""

    def __init__(self, last: float, step_s: float) -> None:
        super().__init__()
        self.at = max(last, time.monotonic()) + step_s

    def reached(self) -> bool:
        return time.monotonic() >= self.at

    def wait(self) -> None:
        time.sleep(max(0.0, self.at - time.monotonic()))


class SlowStreams(Streams):
    """A GPU that is given its work at once, and takes `step_s` for each step."""

    def __init__(self, step_s: float) -> None:
        super().__init__(torch.device("cpu"))
        self.step_s, self.last = step_s, 0.0

    def mark(self) -> Mark:
        mark = SlowMark(self.last, self.step_s if self.last else 0)  # the first comes before any step
        self.last = mark.at
        return mark


def test_a_stop_is_seen_after_few_steps_of_a_slow_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program gives a GPU many steps in advance. What counts is how long the GPU takes for them."""
    monkeypatch.setattr(stop_sync, "MAX_COST", 1.0)  # on a busy machine an answer takes long

    def late(ctx: DistContext) -> tuple[int, float]:
        stop_sync = StopSync(SlowStreams(0.3))
        begin, steps = time.monotonic(), 0
        while stop_sync.maybe_sync() is None:
            steps += 1
            if time.monotonic() - begin > 2:
                stop_signal.mark_requested(signal.SIGTERM)
        return steps, time.monotonic() - begin

    for steps, seconds in on_ranks(2, late):
        assert steps <= seconds / 0.3 + 6, "many steps were still waiting for the GPU"


# ---- ranks that are lost, exit early, hang or fail ------------------------------------------------------------------


@fault(1)
@pytest.mark.parametrize(("world_size", "victim"), [(2, 0), ALL(3, 2)])
def test_a_killed_rank_is_named_and_nothing_is_saved_after(
    small: None, world_size: int, victim: int, tmp_path: Path
) -> None:
    def kill(rank: int, number: int) -> None:
        if rank == victim and number == 7:
            while not (tmp_path / "checkpoints" / "step_00000004.pt").exists():
                time.sleep(0.01)  # the checkpoint is written in the background
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)

    ranks = start_faulty(world_size, kill, "--checkpoint-every", 4, "--output-dir", tmp_path)
    codes = ranks.wait()
    assert codes == [-9 if rank == victim else 8 for rank in range(world_size)], ranks.output()
    output = ranks.output()
    assert len(errors(output)) == 1 and "Traceback" not in output, output
    assert f"rank {victim} was lost" in errors(output)[0] and "resumable from step 4" in errors(output)[0]
    assert output.count("is exiting because") == world_size - 2
    assert checkpoints(tmp_path) == ["step_00000004.pt"]
    if victim != 0:
        assert status(tmp_path)["exit_code"] == 8 and status(tmp_path)["state"] == "failed"


@pytest.mark.sample(0)
@fault(1)
def test_the_rank_that_asks_which_ranks_are_lost_may_be_lost_as_well(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = RankReports.ask

    def ask_and_die(self: RankReports) -> bool:
        asked = ask(self)
        if asked and self.question.startswith("1:"):
            os.kill(os.getpid(), signal.SIGKILL)
        return asked

    monkeypatch.setattr(RankReports, "ask", ask_and_die)
    ranks = start_faulty(
        4,
        lambda rank, number: os.kill(os.getpid(), signal.SIGKILL) if (rank, number) == (3, 3) else None,
        *("--warn-after", 60, "--output-dir", tmp_path),
    )
    codes = ranks.wait()
    assert codes.count(8) == 2 and codes.count(-9) == 2 and codes[3] == -9, ranks.output()
    assert f"ranks {codes.index(-9)} and 3 were lost (" in ranks.output(codes.index(8)), ranks.output()


def test_one_rank_asks_for_all_even_if_several_do_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    first, second, third = (RankReports(store, rank, 3, lambda: 0.0) for rank in range(3))
    assert first.ask() and not second.ask(), "the second one has not seen the question when it asks"
    assert set(first.received()) == {0, 1} and not first.complete(), "and responds to the first"
    third.respond()
    second.error = Report("main.py:7", 3.5, [Collective("gloo 0 2", "all_reduce", "float [5]", "main.py:9", 0.0)])
    second.respond()  # once more: a collective broke
    assert first.complete() and first.received()[1] == second.error
    assert third.question == second.question and not third.ask(), "the question is too recent"
    monkeypatch.setattr(rank_reports, "QUESTION_INTERVAL_S", 0.0)
    assert third.ask() and set(third.received()) == {2}, "the first rank may be lost"


@fault(13)
@pytest.mark.parametrize("victim", [0, ALL(1)])
def test_all_ranks_exit_with_one_code_even_if_the_store_is_in_rank_0(small: None, victim: int, tmp_path: Path) -> None:
    """As with --init-method tcp://, mpirun and srun: rank 0 must not exit before the others have read the cause."""

    def fail(rank: int, number: int) -> None:
        if rank == victim and number == 3:
            raise ValueError("a bug of mine")

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = start_faulty(4, fail, "--output-dir", tmp_path, init_method=f"tcp://127.0.0.1:{port}")
    assert ranks.wait() == [1] * 4, ranks.output()
    line = f"is exiting because rank {victim} failed: ValueError: a bug of mine"
    assert ranks.output().count(line) == 3, ranks.output()


@fault(13)
def test_an_error_that_mentions_a_connection_is_still_a_bug_of_the_code(small: None, tmp_path: Path) -> None:
    def fail(rank: int, number: int) -> None:
        if rank == 1 and number == 3:
            raise RuntimeError("feature server: Connection reset while reading row 7")

    ranks = start_faulty(2, fail, "--output-dir", tmp_path)
    assert ranks.wait() == [1, 1]
    assert "in fail" in ranks.output(1)
    assert "rank 0 is exiting because rank 1 failed: RuntimeError" in ranks.output(0)


CUDA_ADVICE = (
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
ASSERTS = {
    "in the model": ("/project/model.py", f"CUDA error: device-side assert triggered\n{CUDA_ADVICE}"),
    "in a collective": ("/torch/distributed/all.py", f"CUDA error: device-side assert triggered\n{CUDA_ADVICE}"),
    "in NCCL": (
        "/torch/distributed/all.py",
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error (run with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\n"
        "Last error:\nCuda failure 710 'device-side assert triggered'",
    ),
    "in nccl2": (
        "/torch/distributed/all.py",
        "NCCL AllReduce failed: unhandled cuda error (run with NCCL_DEBUG=INFO for details) \nNCCL Last Error: "
        "Cuda failure 710 'device-side assert triggered'",
    ),
}


@fault(39)
@pytest.mark.sample(1)
@pytest.mark.parametrize("where", ASSERTS)
def test_a_device_side_assert_is_a_bug_of_the_rank_that_has_it(small: None, where: str, tmp_path: Path) -> None:
    """CUDA reports it in a later call, perhaps in a collective, but no other rank was lost."""
    path, text = ASSERTS[where]

    def fail(rank: int, number: int) -> None:
        if rank == 1 and number == 3:
            kind = {"in NCCL": dist.DistBackendError, "in nccl2": RuntimeError}.get(where, torch.AcceleratorError)
            exec(compile("raise error", path, "exec"), {"error": kind(text)})

    ranks = start_faulty(2, fail, "--output-dir", tmp_path)
    assert ranks.wait() == [1, 1], ranks.output()
    assert ranks.output(1).count("Traceback") == 1 and "in fail" in ranks.output(1) and text in ranks.output(1)
    (line,) = ranks.output(0).splitlines()[-1:]
    assert re.match("rank 0 is exiting because rank 1 failed: .*Error: ", line) and "device-side assert" in line


@fault(1)
def test_an_error_of_nccl2_is_that_of_a_lost_peer(small: None, tmp_path: Path) -> None:
    """It is a plain RuntimeError, which would be a bug of the rank that has it."""
    text = "NCCL AllReduce failed: remote process exited or there was a network error"

    def fail(rank: int, number: int) -> None:
        if number == 3:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError(f"{text} \nNCCL Last Error: Net: Connection closed by remote peer")

    ranks = start_faulty(2, fail, "--output-dir", tmp_path)
    assert ranks.wait() == [8, -signal.SIGKILL], ranks.output()
    assert f"rank 1 was lost ({text})" in ranks.output(0), ranks.output(0)


@fault(39)
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 1 has a total capacity of 79.11 GiB of which 12.12 "
            "MiB is free. Process 77 has 79.09 GiB memory in use. Of the allocated memory 70.01 GiB is allocated by "
            "PyTorch, and 1.20 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large "
            "try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.",
            "out of GPU memory (CUDA out of memory. Tried to allocate 20.00 MiB. GPU 1 has a total capacity of "
            "79.11 GiB of which 12.12 MiB is free): ",
        ),
        (f"CUDA error: out of memory\n{CUDA_ADVICE}", "out of GPU memory (CUDA error: out of memory): "),
        (
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            "out of GPU memory (CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`): ",
        ),
    ],
)
def test_a_gpu_that_is_out_of_memory_is_one_line(small: None, text: str, line: str, tmp_path: Path) -> None:
    def fail(rank: int, number: int) -> None:
        if rank == 1 and number == 3:
            raise torch.OutOfMemoryError(text) if "Tried" in text else RuntimeError(text)

    ranks = start_faulty(2, fail, "--output-dir", tmp_path)
    assert ranks.wait() == [3, 3], ranks.output()
    line += "lower --batch-size and raise --grad-accum-steps by the same factor"
    assert ranks.output(1) == f"[rank 1] error: {line}\n"
    assert ranks.output(0).endswith(f"rank 0 is exiting because rank 1 failed: {line}\n")


@fault(39)
def test_a_gpu_that_fails_is_a_lost_process(small: None, tmp_path: Path) -> None:
    """So the launcher starts the run again. The texts are those of CUDA's runtime."""

    def fail(rank: int, number: int) -> None:
        if rank == 1 and number == 3:
            raise RuntimeError(f"CUDA error: uncorrectable ECC error encountered\n{CUDA_ADVICE}")

    ranks = start_faulty(2, fail, "--output-dir", tmp_path)
    assert ranks.wait() == [8, 8], ranks.output()
    line = f"the GPU of rank 1 on {socket.gethostname()} failed (CUDA error: uncorrectable ECC error encountered): "
    assert ranks.output(1).startswith(f"[rank 1] error: {line}") and ranks.output(1).count("\n") == 1
    assert f"{line}if a restart fails as well, leave this machine out" in ranks.output(0).splitlines()[-1]


@fault(13)
def test_an_operation_that_is_not_deterministic_on_one_rank_is_named_on_the_others(small: None, tmp_path: Path) -> None:
    def put(rank: int, number: int) -> None:
        if rank == 1 and number == 3:
            torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))

    ranks = start_faulty(2, put, "--deterministic", "--output-dir", tmp_path)
    assert ranks.wait() == [2, 2], ranks.output()
    (line,) = [line for line in ranks.output().splitlines() if "--deterministic" in line]
    cause = r"--deterministic: put_ \(test_faults\.py, line \d+\) has no deterministic form on this device: replace .*"
    assert re.fullmatch(f"rank 0 is exiting because rank 1 failed: {cause}", line), line


@fault(13)
def test_a_bug_in_an_action_of_rank_0_is_shown_with_its_source_line(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(rank: int, number: int) -> None:
        if number == 3:
            contexts[0].on_main(lambda: {}["missing"])

    contexts: list[DistContext] = []
    create = DistContext.__init__

    def create_and_keep(self: DistContext, *args: Any, **named: Any) -> None:
        contexts.append(self)
        create(self, *args, **named)

    monkeypatch.setattr(DistContext, "__init__", create_and_keep)
    ranks = start_faulty(3, fail, "--output-dir", tmp_path)
    assert ranks.wait() == [1, 1, 1]
    assert '{}["missing"]' in ranks.output(0) and "Traceback" not in ranks.output(1) + ranks.output(2)
    for rank in (1, 2):
        assert f"rank {rank} is exiting because rank 0 failed: KeyError: 'missing'" in ranks.output(rank)


@fault(10)
def test_a_second_signal_to_one_rank_ends_all_with_its_code(small: None, tmp_path: Path) -> None:
    ranks = start_faulty(
        2, lambda rank, number: time.sleep(3 * (number > 2)), "--log-every", 1, "--output-dir", tmp_path
    )
    wait_for_text(ranks, "step   2/200")
    time.sleep(0.3)
    os.kill(ranks.pids[1], signal.SIGINT)
    time.sleep(1.2)
    os.kill(ranks.pids[1], signal.SIGINT)
    assert ranks.wait() == [130, 130], ranks.output()


def test_a_data_loader_worker_that_is_killed_is_one_line(small: None, tmp_path: Path) -> None:
    options = ("--workers", 1, "--epochs", 3, "--log-every", 1, "--output-dir", tmp_path)
    ranks = start_faulty(1, lambda rank, number: time.sleep(0.1), *options)
    wait_for_text(ranks, "step   3/120")
    (worker,) = Path(f"/proc/{ranks.pids[0]}/task/{ranks.pids[0]}/children").read_text().split()
    os.kill(int(worker), signal.SIGKILL)
    assert ranks.wait() == [8], ranks.output()
    assert "Traceback" not in ranks.output()
    assert "a DataLoader worker was killed; if memory ran out: lower --workers" in ranks.output()


@fault(13)
def test_a_bug_on_all_ranks_is_printed_once(small: None, tmp_path: Path) -> None:
    ranks = start_faulty(3, lambda rank, number: [][0], "--output-dir", tmp_path)
    assert ranks.wait() == [1, 1, 1]
    assert ranks.output().count("Traceback") == 1, ranks.output()


@fault(13)
def test_a_rank_that_fails_before_it_connects_tells_the_others(tmp_path: Path) -> None:
    """For example because its data are missing. The others do not wait for --timeout."""

    def target(rank_env: RankEnv) -> int:
        options = ["--dataset", "imagefolder", "--data-dir", str(tmp_path)] if rank_env.rank else []
        options = options or ["--dataset", "synthetic"]
        return run_as_rank(main.main, Config.parse([*options, "--output-dir", str(tmp_path)]), rank_env)

    ranks = Ranks(2, target)
    assert ranks.wait() == [3, 3]
    assert len(errors(ranks.output())) == 1 and "[rank 1] error" in ranks.output()
    assert "rank 0 is exiting because rank 1 failed" in ranks.output()


@fault(14)
def test_a_rank_that_exits_early_is_named(small: None, tmp_path: Path) -> None:
    def exit_early(rank: int, number: int) -> None:
        if rank == 1 and number == 3:
            sys.exit(0)

    ranks = start_faulty(2, exit_early, "--output-dir", tmp_path)
    assert ranks.wait() == [8, 0], ranks.output()
    assert "Traceback" not in ranks.output() and "rank 1" in ranks.output(0)


@fault(14)
def test_a_run_that_its_owner_ends_early_is_not_done(small: None, tmp_path: Path) -> None:
    assert start_faulty(1, lambda rank, number: sys.exit(0), "--output-dir", tmp_path).wait() == [0]
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 0)


@pytest.mark.sample(0)
@fault(15)
def test_a_rank_that_hangs_ends_all_and_prints_its_stack(small: None, tmp_path: Path) -> None:
    victim = 0  # the project's own tests have rank 1

    def hang_here(rank: int, number: int) -> None:
        if rank == victim and number == 3:
            time.sleep(3600)

    ranks = start_faulty(2, hang_here, "--output-dir", tmp_path, "--timeout", 2)
    assert ranks.wait() == [8, 8]
    assert "in hang_here" in ranks.output(victim), "the stack of the rank that hangs is missing"
    line = rf"rank {victim} did not respond for 2 s \(--timeout\): rank {1 - victim} has waited \d+ s at main\.py:\d+ "
    line += rf"\(backward\), called from main\.py:\d+; rank {victim} is at test_faults\.py:\d+.*; "
    line += rf"see the stacks of rank {victim}"
    assert re.search(line, ranks.output(1 - victim))
    assert status(tmp_path)["exit_code"] == 8 and status(tmp_path)["state"] == "failed"


def block_for_good() -> None:
    """In a C call that releases the interpreter's lock and never returns, whatever signal arrives: as in CUDA."""
    mutex, libc = ctypes.create_string_buffer(256), ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


@fault(38)
@pytest.mark.parametrize(("store_in", "world_size"), [("a file", 3), ALL("rank 0", 2)])
def test_a_rank_that_is_killed_while_others_wait_for_their_gpus(
    small: None, store_in: str, world_size: int, tmp_path: Path
) -> None:
    """A launcher then asks the survivors to stop; or the store is gone, and with it the rank that hosts it."""
    victim = 0 if store_in == "rank 0" else 1

    def inject(rank: int, number: int) -> None:
        if number == 6:
            while not (tmp_path / "checkpoints" / "step_00000004.pt").exists():
                time.sleep(0.01)
            print("blocked", flush=True)
            block_for_good() if rank != victim else time.sleep(3600)

    address = None if store_in == "a file" else f"tcp://127.0.0.1:{free_port()}"
    ranks = start_faulty(world_size, inject, "--checkpoint-every", 4, "--output-dir", tmp_path, init_method=address)
    wait_for_text(ranks, "blocked", 60)
    time.sleep(0.5)
    os.kill(ranks.pids[victim], signal.SIGKILL)
    if store_in == "a file":
        for rank in (0, 2):
            os.kill(ranks.pids[rank], signal.SIGTERM)
    codes = ranks.wait()
    assert codes == [-9 if rank == victim else 8 for rank in range(world_size)], ranks.output()
    (error,) = errors(ranks.output())
    step = "the newest checkpoint, if there is one" if victim == 0 else "step 4"  # rank 0 would know
    assert f"rank {victim} was lost; resumable from {step}: start all ranks again" in error, error
    assert checkpoints(tmp_path) == ["step_00000004.pt"]


@fault(38)
def test_steps_that_take_long_are_no_lost_rank(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked to stop in a step that takes longer than ranks usually need to agree, they save and exit with 75."""
    monkeypatch.setattr(stop_sync, "SYNC_INTERVAL_S", 0)  # they agree after each step
    monkeypatch.setattr(stop_sync, "MAX_COST", 1.0)
    monkeypatch.setattr(failure_monitor, "RESPONSE_TIMEOUT_S", 2.0)

    def inject(rank: int, number: int) -> None:
        if number == 6:
            print("slow", flush=True)
            time.sleep(6)

    ranks = start_faulty(2, inject, "--output-dir", tmp_path)
    wait_for_text(ranks, "slow", 60)
    ranks.kill(signal.SIGTERM)
    assert ranks.wait() == [75, 75], ranks.output()
    assert checkpoints(tmp_path) == ["step_00000006.pt"]


@fault(15)
def test_a_gpu_that_waits_for_another_rank_longer_than_the_timeout_ends_the_run(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a mark that is never reached takes the place of the GPU, and a C call that of the main thread in CUDA."""

    class Stuck(Streams):
        def mark(self) -> Mark:
            return SlowMark(time.monotonic(), 1e9)

    def inject(rank: int, number: int) -> None:
        if number == 3:
            if rank == 1:
                time.sleep(3600)  # a bug of this rank
            process_group_of_rank[0].monitor.stop_sync.mark = Stuck(torch.device("cpu")).mark()
            block_for_good()

    process_group_of_rank: list[Any] = []
    monitor_init = failure_monitor.FailureMonitor.__init__

    def keep(self: Any, *arguments: Any) -> None:
        monitor_init(self, *arguments)
        process_group_of_rank.append(SimpleNamespace(monitor=self))

    monkeypatch.setattr(failure_monitor.FailureMonitor, "__init__", keep)
    ranks = start_faulty(2, inject, "--output-dir", tmp_path, "--timeout", 3)
    assert ranks.wait() == [8, 8], ranks.output()
    assert "the GPU of rank 0 waited 3 s (--timeout) for another rank: rank 0 is at test_faults.py:" in ranks.output(0)
    assert "; rank 1 is at test_faults.py:" in ranks.output(0)
    assert "in inject" in ranks.output(1), "the stack of the rank that hangs is missing"


def test_a_group_that_cannot_be_destroyed_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the exit code of a success, nor the error of a failure. After an error of CUDA, it raises again."""
    monkeypatch.setattr(process_group, "HANG_GRACE_S", 0.5)

    def target(env: RankEnv, fails: bool, hangs: bool) -> int:
        def destroy() -> None:
            if hangs:
                time.sleep(3600)
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(dist, "destroy_process_group", destroy)

        def run(config: Config, env: RankEnv) -> None:
            with process_group.init_distributed(config, env):
                if fails:
                    raise ValueError("a bug of mine")

        return run_as_rank(run, Config.parse(["--device=cpu"]), env)

    for fails, hangs in itertools.product([False, True], repeat=2):
        ranks = Ranks(1, partial(target, fails=fails, hangs=hangs))
        assert ranks.wait() == [int(fails)], ranks.output()
        assert ("ValueError: a bug of mine" in ranks.output()) == fails
        assert "CUDA error" not in ranks.output()


def test_a_group_is_not_freed_before_the_process_exits() -> None:
    """With torch 2.6 a run that had finished sometimes hung while it freed its group."""

    def run(config: Config, env: RankEnv) -> None:
        with process_group.init_distributed(config, env):
            group = weakref.ref(dist.distributed_c10d._get_default_group())
        gc.collect()
        assert group() is not None

    ranks = Ranks(1, lambda env: run_as_rank(run, Config.parse(["--device=cpu"]), env))
    assert ranks.wait() == [0], ranks.output()


def test_the_timeout_of_one_backend_changes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control traffic must time out before NCCL does. Here gloo takes the place of NCCL."""

    def waits(ctx: DistContext) -> float:
        process_group._set_nccl_timeout(backend_of(torch.device("cpu")), timedelta(seconds=1.5))
        ctx.gather(None)
        begin = time.monotonic()
        if ctx.rank == 0:
            with pytest.raises(RuntimeError, match=r"[Tt]imed? ?out"):
                dist.all_reduce(torch.zeros(1))
        else:
            time.sleep(4)
        took = time.monotonic() - begin
        os._exit(0) if took < 30 else os._exit(9)  # half of --timeout

    ranks = Ranks(2, lambda env: run_waits(waits, env))
    assert ranks.wait() == [0, 0], ranks.output()

    class Renamed:
        """A group of a torch that calls its private method otherwise."""

    monkeypatch.setattr(rank_reports, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=Renamed())))
    process_group._set_nccl_timeout(backend_of(torch.device("cpu")), timedelta(seconds=1.5))  # the run continues


def test_the_wrapper_of_detail_hands_its_backend_over() -> None:
    """That of torch 2.9 refuses a timeout: a run over NCCL that looks for a mistake could not start."""
    wrapper = SimpleNamespace(wrapped_pg=mock.Mock(), set_timeout=mock.Mock(side_effect=RuntimeError))
    process_group._set_nccl_timeout(wrapper, timedelta(seconds=1.5))
    wrapper.wrapped_pg.set_timeout.assert_called_once_with(timedelta(seconds=1.5))


def test_a_thread_asks_for_a_mark_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins on GPU 0, where each process of a machine would take memory."""
    current = [0]

    @contextmanager
    def device(number: int) -> Iterator[None]:
        current.append(number)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    asked = mock.Mock(side_effect=lambda: current[-1] == 3)
    mark = Mark(mock.Mock(device=3, query=asked, synchronize=asked))
    assert mark.reached()
    mark.wait()
    assert asked.call_count == 2 and current == [0]


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch was built without NCCL")
def test_every_nccl_backend_takes_a_timeout() -> None:
    """Also that of torch 2.15, without _set_default_timeout: each run over NCCL ended with an AttributeError."""
    timeout = timedelta(seconds=1.5)
    made_up = mock.create_autospec(dist.ProcessGroupNCCL, instance=True)  # a real one needs a GPU
    process_group._set_nccl_timeout(made_up, timeout)
    assert [call.args for call in made_up.method_calls] == [(timeout,)]
    nccl2 = getattr(dist.distributed_c10d, "ProcessGroupNCCL2", None)
    if nccl2 is None:
        pytest.skip("this torch has no ProcessGroupNCCL2")

    def set_it(env: RankEnv) -> int:
        options = dist.ProcessGroupNCCL.Options()
        options.enable_reconfigure = True  # does not connect yet, and so needs no GPU
        backend: Any = nccl2(dist.HashStore(), 0, 1, options)
        process_group._set_nccl_timeout(backend, timeout)
        is_set = (backend.name(), backend.options._timeout) == (RECORDERS[-1][-1], timeout)
        os._exit(7 if is_set else 1)  # to free the object would need a GPU

    assert Ranks(1, set_it).wait() == [7]


def run_waits(waits: Callable[[DistContext], Any], env: RankEnv) -> int:
    with process_group.init_distributed(Config.parse(["--device=cpu", "--timeout=60"]), env) as ctx:
        waits(ctx)
    return 7


@fault(16)
def test_an_init_process_group_that_hangs_ends_with_3_and_a_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "HANG_GRACE_S", -28)  # 2 s to create the group, of the 30 s to join

    def hang_here(*arguments: Any, **named: Any) -> None:
        time.sleep(3600)

    monkeypatch.setattr(dist, "init_process_group", hang_here)
    ranks = start(2, "--dataset", "synthetic", "--output-dir", tmp_path, "--timeout", 30)
    assert ranks.wait() == [3, 3]
    assert "in hang_here" in ranks.output() and "hangs while it connects to the others over gloo" in ranks.output()


@fault(13)
def test_a_rank_that_never_notices_the_failure_of_another_is_ended(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over NCCL a collective may never return. Here the main thread sleeps instead."""
    monkeypatch.setattr(failure_monitor, "FOLLOW_TIMEOUT_S", 1.0)

    def fail(rank: int, number: int) -> None:
        if number == 3:
            if rank == 1:
                raise ValueError("a bug of mine")
            time.sleep(3600)

    ranks = start_faulty(2, fail, "--output-dir", tmp_path)
    assert ranks.wait() == [1, 1]
    assert "rank 0 is exiting because rank 1 failed: ValueError" in ranks.output(0)
    assert status(tmp_path)["state"] == "failed"


# ---- divergence -----------------------------------------------------------------------------------------------------


@fault(23)
def test_a_step_that_the_scaler_of_fp16_skips_is_not_a_divergence(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scale that is far too large makes the gradients infinite until the scaler has lowered it."""
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device, enabled: scaler(device, 2.0**40, enabled=enabled))
    options = ["--dataset", "synthetic", "--precision", "fp16", "--epochs", 3, "--log-every", 5]
    output = train(2, *options, "--output-dir", tmp_path)
    content = checkpoint.read(max((tmp_path / "checkpoints").glob("step_*.pt")))
    assert content["scaler"]["scale"] < 2.0**40, "no step was skipped"
    assert "done" in output and "error" not in output


# ---- what is told, and to whom --------------------------------------------------------------------------------------


def test_an_error_is_one_line_whatever_its_text() -> None:
    assert one_line(ValueError("first\n   second  \n")) == "first second"
    assert one_line(ValueError()) == "ValueError"
    worker = "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback:\n  a line\nValueError: {}\n"
    assert one_line(ValueError(worker.format("bad image"))) == "bad image"


def test_only_the_status_of_a_process_that_is_gone_is_corrected(tmp_path: Path) -> None:
    """launch_node.sh calls it for the ranks that it had; a rank of another run may have written since."""
    write_status(tmp_path, state="running", pid=7)
    correct_status(tmp_path, [8], 9, "killed")
    assert status(tmp_path)["state"] == "running"
    correct_status(tmp_path, [7, 8], 9, "killed")
    assert status(tmp_path)["state"] == "failed" and status(tmp_path)["exit_code"] == 9
    correct_status(tmp_path, [7, 8], 75, "stopped")
    assert status(tmp_path)["message"] == "killed", "it is no longer running"
    write_status(tmp_path, state="running", pid=7, host="another")
    correct_status(tmp_path, [7], 9, "killed")
    assert status(tmp_path)["state"] == "running", "pids are those of one machine"


def test_every_rank_learns_the_step_of_the_last_checkpoint_before_it_has_to_report_it() -> None:
    """Once rank 0 is gone, nobody could tell it."""

    def learned(ctx: DistContext) -> int | None:
        if ctx.rank == 0:
            ctx.monitor.share_saved(7)
        end = time.monotonic() + 60
        while process_exit.saved_step != 7 and time.monotonic() < end:
            time.sleep(0.02)
        return process_exit.saved_step

    assert on_ranks(2, learned) == [7, 7]


def test_the_launcher_is_told_the_step_of_each_saved_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("LOCAL_RANK", "0")
    for step in (20, 40):
        ProcessExit().record_saved(step)
        assert (tmp_path / "saved").read_text() == str(step)


# ---- wrong starts ---------------------------------------------------------------------------------------------------


@fault(34)
def test_a_world_size_without_some_of_the_machines_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    with pytest.raises(SetupError, match="WORLD_SIZE=1 is not NNODES=2 x NPROC_PER_NODE=1"):
        find_rank_env(Config.parse([]), {**alone, "NNODES": "2", "NPROC_PER_NODE": "1"})
    assert find_rank_env(Config.parse([]), {**alone, "NNODES": "1", "NPROC_PER_NODE": "1"}).world_size == 1


@fault(35, 36)
def test_the_metrics_of_a_batchnorm_model_are_those_of_the_saved_model(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """101 test samples on 2 ranks. Each has seen other training batches, so their running statistics differ."""
    monkeypatch.setattr(main.task, "build_model", build_awkward)
    monkeypatch.setattr(images, "CHUNK_PIXELS", 7 * 32 * 32)  # in one chunk, all would be evaluated on rank 0
    options = ["--dataset", "synthetic", "--batch-size", 7, "--output-dir", tmp_path]
    trained = train(2, *options, "--max-steps", 20)
    evaluated = train(1, *options, "--evaluate")
    metrics = [
        re.findall(r"val(?: \(best\))?  +(loss [\d.]+  accuracy [\d.]+)", output) for output in (trained, evaluated)
    ]
    assert metrics[0] == metrics[1] and len(metrics[0]) == 1


def test_a_reserved_name_passed_to_resume_is_refused_with_one_line(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint has one level of names: a part named `step` would replace the number of steps."""
    resume = CheckpointManager.resume

    def with_step(self: CheckpointManager, train_loader: Any, training: Any) -> str | None:
        kind = make_dataclass("Training", [("step", Any)], bases=(type(training),))
        return resume(self, train_loader, kind(*vars(training).values(), training.model))

    monkeypatch.setattr(CheckpointManager, "resume", with_step)
    output = train(2, "--dataset", "synthetic", "--output-dir", tmp_path, code=2)
    assert output == "error: Training.step in main.py: checkpoints use that name; rename the field\n"
    assert not any((tmp_path / "checkpoints").iterdir()) and not (tmp_path / "metrics.jsonl").exists()


def test_each_fault_has_a_test() -> None:
    """The marks of the tests map to the table in faults.py; `pytest` prints which rows were injected."""
    marked = set()
    for path in TESTS.glob("test_*.py"):
        for words in re.findall(r"^@fault\(([\d, ]+)\)", path.read_text(), re.MULTILINE):
            marked |= {int(row) for row in words.split(",")}
    for name, rows in IN_PROJECT.items():
        file, _, test = name.partition("::")
        assert f"def {test}(" in (PROJECT_TESTS / file).read_text(), name
        marked |= set(rows)
    assert not set(FAULTS) - marked, f"faults without a test: {sorted(set(FAULTS) - marked)}"
    assert set(NOT_SHOWN) <= set(FAULTS)
