"""--profile: what the time of a step goes into."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

log = logging.getLogger(__name__)
FIRST, LAST = 10, 15  # counted from the start or resume, the warm-up of caches and compilers behind them


class Profiler:
    """Writes a trace of a few steps of rank 0 to `folder`; chrome://tracing and ui.perfetto.dev show it."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.trace = folder / "trace.json"
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
        window = schedule(skip_first=FIRST - 2, wait=0, warmup=1, active=LAST - FIRST + 1, repeat=1)
        self.profile = profile(activities=activities, schedule=window, on_trace_ready=self._write)
        self.profile.start()
        self.written = False

    def step(self) -> None:
        """Count one step."""
        self.profile.step()

    def close(self) -> None:
        self.profile.stop()
        if not self.written:
            log.warning("warning: --profile: the run was over before step %s, so there is no trace", FIRST)

    def _write(self, finished: profile) -> None:
        finished.export_chrome_trace(str(self.trace))
        self.written = True
        log.info("profile of steps %s to %s: %s", FIRST, LAST, self.trace)
