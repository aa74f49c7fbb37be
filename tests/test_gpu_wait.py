"""Whether the GPU waits for the program. The GPU is made up: tests/gpu asks a real one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from config import Config
from ddp.training.gpu_wait import GpuWait

STEP_S = 0.005  # that the program needs


class FakeGpu:
    """It needs `step_ms` for the kernels of a step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_ms: float) -> None:
        self.held: list[int] = []  # cycles
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                pass

            def query(self) -> bool:
                return gpu.done

            def elapsed_time(self, end: Event) -> float:
                return step_ms

        self.done = True
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", self.held.append)


def wait_of(rank: int = 0, device: str = "cuda", *, idle: bool = True) -> GpuWait:
    """`idle`: the GPU has done the last step when the program has issued the next one."""
    sync = SimpleNamespace(mark=SimpleNamespace(reached=lambda: idle))
    ctx: Any = SimpleNamespace(rank=rank, device=torch.device(device), stop_sync=sync)
    return GpuWait(ctx)


def epoch(wait: GpuWait, steps: int) -> dict[str, float]:
    """What is found in an epoch of so many steps."""
    wait.start_epoch()
    for number in range(steps):
        wait.step(STEP_S * number)
    return wait.figures()


def test_the_gpu_is_held_for_one_step_of_an_epoch_and_its_share_of_waiting_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, wait = FakeGpu(monkeypatch, step_ms=1.0), wait_of()
    for number in (1, 2):
        assert epoch(wait, 100) == {"gpu_ms": 1.0, "gpu_waits": 0.8}
        assert gpu.held == [pytest.approx(1.5 * STEP_S * 2e9, abs=1)] * number  # longer than the program needs
    gpu.done = False  # the figures do not wait for it
    assert epoch(wait, 100) == {}


def test_a_gpu_that_has_enough_to_do_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch, step_ms=1.0)
    assert epoch(wait_of(idle=False), 100) == {}
    assert epoch(wait_of(rank=1), 100) == {} and epoch(wait_of(device="cpu"), 100) == {}
    assert gpu.held == []
    assert epoch(wait_of(), 39) == {}  # too short to know the duration of a step


def test_a_step_that_waits_for_the_gpu_itself_is_no_negative_share(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGpu(monkeypatch, step_ms=6.0)
    assert epoch(wait_of(), 100) == {"gpu_ms": 6.0, "gpu_waits": 0.0}


def test_the_remedy_is_the_one_that_applies() -> None:
    config, compiled = (Config.parse(options) for options in ([], ["--compile"]))
    wait = wait_of()
    assert wait.advice(0.3, 0.3, config) == ""
    assert wait.advice(0.86, 0.1, config) == "the GPU waits 86% of the time: raise --batch-size, or use --compile"
    assert wait.advice(0.86, 0.1, compiled) == "the GPU waits 86% of the time: raise --batch-size"
    assert wait.advice(0.86, 0.5, config).startswith("the GPU waits 86% of the time: for data: raise --workers, or ")
