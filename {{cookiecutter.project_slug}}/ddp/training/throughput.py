"""How fast a run is, how long it will take, and where the time of a step goes (--profile)."""

import logging
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

log = logging.getLogger(__name__)
FIRST_STEP, LAST_STEP = 10, 15  # of --profile, from the start or resume on: after the warm-up of caches and compilers


class Throughput:
    """The speed of the training since `step`, when the loader had waited `wait_s`; without evaluation and saving."""

    def __init__(self, step: int = 0, wait_s: float = 0.0) -> None:
        self.step, self.wait_s, self.start = step, wait_s, time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The time of the block does not count."""
        start = time.perf_counter()
        yield
        self.start += time.perf_counter() - start

    def rates(self, step: int, wait_s: float, global_batch: int) -> dict[str, float]:
        """Samples/s of all ranks, ms per step, and ms of it spent waiting for data."""
        steps, elapsed = step - self.step, time.perf_counter() - self.start
        return {
            "samples_per_s": round(steps * global_batch / elapsed, 1),
            "step_ms": round(1000 * elapsed / steps, 3),
            "data_ms": round(1000 * (wait_s - self.wait_s) / steps, 3),
        }


class RemainingTime:
    """Estimates when the run will have taken `total` steps, from the steps since `first`, evaluations and all."""

    def __init__(self, total: int = 0, first: int = 0) -> None:
        self.total, self.first, self.start = total, first, time.perf_counter()

    def seconds(self, step: int) -> float | None:
        """None before the first step."""
        done = step - self.first
        return (self.total - step) * (time.perf_counter() - self.start) / done if done > 0 else None


def memory_mb(device: torch.device) -> float:
    """The peak memory of this process in megabytes: of its GPU, or of the host if it has none."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 1e6, 1)
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6, 1)


class Profiler:
    """Writes a trace of a few steps of rank 0 to `folder`; chrome://tracing and ui.perfetto.dev show it."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.trace = folder / "trace.json"
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
        window = schedule(skip_first=FIRST_STEP - 2, wait=0, warmup=1, active=LAST_STEP - FIRST_STEP + 1, repeat=1)
        self.profile = profile(activities=activities, schedule=window, on_trace_ready=self._write)
        self.profile.start()
        self.step = self.profile.step  # call it after each step
        self.written = False

    def close(self) -> None:
        self.profile.stop()
        if not self.written:
            log.warning("warning: --profile: no trace, since the run ended before step %s", FIRST_STEP)

    def _write(self, finished: profile) -> None:
        finished.export_chrome_trace(str(self.trace))
        self.written = True
        log.info("profile of steps %s to %s: %s", FIRST_STEP, LAST_STEP, self.trace)
