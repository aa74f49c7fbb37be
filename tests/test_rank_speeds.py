"""One rank is slower than the others: which one, where, and why. DDP makes all of them equally slow."""

from __future__ import annotations

import logging
import os
import platform
import re
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from outputs import lines
from torch import Tensor, nn

import data
import images
import main
from ddp.distributed.process_group import DistContext
from ddp.parts.monitor import rank_speeds
from ddp.parts.monitor.rank_speeds import RankSpeeds
from faults import fault
from processes import on_ranks, start

HOST = platform.node()


def said(*periods: list[list[float]], step_ms: float = 50.0) -> list[list[str]]:
    """What is logged after each period: of each rank, ms per step spent waiting for data, and in the forward pass."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    rank_speeds.log.addHandler(handler)
    rank_speeds.log.setLevel("INFO")
    hosts = [f"gpu{rank}" for rank in range(len(periods[0]))]
    ctx = SimpleNamespace(world_size=len(hosts), hosts=hosts, device=torch.device("cpu"))
    speeds = RankSpeeds(SimpleNamespace(ctx=ctx))
    found = []
    for times in periods:
        speeds.compare(times, step_ms)
        found.append(list(records))
        records.clear()
    rank_speeds.log.removeHandler(handler)
    return found


def test_a_slow_rank_is_reported_after_a_minute_and_again_only_when_that_changes() -> None:
    usual, waits, computes = [3.0, 10.0], [62.0, 10.0], [3.0, 18.0]
    slow, other, back = [usual, usual, waits], [usual, usual, computes], [usual] * 3
    found = said(back, slow, slow, slow, back, slow, slow, other, back)
    waiting = "warning: rank 2 (gpu2) is 5.5 x as slow as the others: waiting for data (62 ms per step, others 3)"
    again = "rank 2 (gpu2) is as fast as the others again"
    forward = "warning: rank 2 (gpu2) is 1.6 x as slow as the others: in the forward pass (18 ms per step, others 10)"
    assert found == [[], [], [waiting], [], [again], [], [waiting], [forward], [again]]


def test_what_changes_little_is_not_reported() -> None:
    for slow in ([3.0, 12.4], [3.9, 10.0]):
        assert said(*[[[3.0, 10.0], slow, [3.0, 10.0]]] * 3) == [[]] * 3, "less than a fifth"
    assert said(*[[[0.0, 1.0], [0.5, 1.0]]] * 3) == [[]] * 3, "less than a fiftieth of a step"
    assert said(*[[[5.0, 10.0], [9.0, 10.0]]] * 3)[1] != []
    alternating = [[[3.0, 10.0], [90.0, 10.0]], [[90.0, 10.0], [3.0, 10.0]]] * 3
    assert said(*alternating) == [[]] * 6, "a wait now and then on each rank"


def sleep_on_rank_1(seconds: float) -> None:
    if dist.get_rank() == 1:
        time.sleep(seconds)


class SlowModel(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        sleep_on_rank_1(0.1)
        return super().forward(inputs.flatten(1))


class SlowEverywhere(nn.Linear):
    """What other programs of this machine take from one rank is little compared with this."""

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(0.2)
        return super().forward(inputs.flatten(1))


def stop_half_of_the_time(pid: int, end: threading.Event) -> None:
    while not end.wait(0.1):
        os.kill(pid, signal.SIGSTOP)
        end.wait(0.1)
        os.kill(pid, signal.SIGCONT)


@fault(47)
@pytest.mark.sample(1)
@pytest.mark.parametrize("slow", ["data", "model", "process", ""])
def test_a_rank_that_is_slow_is_named_with_its_host_and_the_cause(
    slow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 64_000, "val": 51, "test": 50})
    monkeypatch.setattr(rank_speeds, "INTERVAL_S", 1.0)
    if slow == "data":
        read = images.ImagesInMemory.__getitems__
        monkeypatch.setattr(
            images.ImagesInMemory, "__getitems__", lambda *arguments: sleep_on_rank_1(0.5) or read(*arguments)
        )
    if slow in ("model", ""):
        monkeypatch.setattr(main.task, "build_model", lambda *_: (SlowModel if slow else SlowEverywhere)(3072, 10))
    options: list[Any] = ["--dataset", "synthetic", "--log-every", 5, "--output-dir", tmp_path]
    ranks, end = start(2, *options), threading.Event()
    stopping = threading.Thread(target=stop_half_of_the_time, args=(ranks.pids[1], end))
    if slow == "process":
        stopping.start()

    def shared() -> list[float]:
        """The distinct medians that were logged."""
        found = (line.get("rank_ms_median") for line in lines(tmp_path, "train"))
        return list(dict.fromkeys(value for value in found if value is not None))

    ranks.until((tmp_path / "metrics.jsonl").exists)
    ranks.until(lambda: shared() and ("as slow as the others" in ranks.output() or (not slow and len(shared()) > 3)))
    end.set()
    if slow == "process":
        stopping.join()
    ranks.kill()
    ranks.wait()
    causes = {"data": "waiting for data", "model": "in the forward pass"}
    cause = causes.get(slow, "(waiting for data|in the forward pass)")
    warning = rf"warning: rank 1 \({HOST}\) is [\d.]+ x as slow as the others: {cause} \([\d.]+ ms per step, others "
    found = re.findall(r".*as slow as the others.*", ranks.output())
    assert len(found) == 1 if slow in causes else bool(found) == bool(slow), ranks.output()
    assert not slow or re.match(warning, found[0]), found
    measured = [line for line in lines(tmp_path, "train") if "rank_ms_slowest" in line]
    assert measured and all(line["rank_ms_slowest"] >= line["rank_ms_median"] for line in measured)


def test_an_evaluation_and_a_stop_in_it_do_not_count_as_steps() -> None:
    def target(ctx: DistContext) -> tuple[bool, bool, bool]:
        ctx.stop_sync.maybe_sync()  # of an evaluation
        before = ctx.stop_sync.trained_s
        ctx.stop_sync.restart(training=True)
        ctx.stop_sync.maybe_sync()
        state = SimpleNamespace(step=0)
        speeds = RankSpeeds(SimpleNamespace(ctx=ctx, state=state, train_loader=SimpleNamespace(wait_s=0.0)))
        speeds.next_at = 0.0
        speeds.synced()  # no step was taken
        silent = not speeds.latest
        state.step = 1
        speeds.synced()
        return before == 0.0 < ctx.stop_sync.trained_s, silent, bool(speeds.latest) == (ctx.rank == 0)

    assert on_ranks(2, target) == [(True, True, True)] * 2
