"""--profile: a trace of where the time of a step goes."""

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

log = logging.getLogger(__name__)
FIRST_STEP, LAST_STEP = 10, 15  # counted from the start or resume, after the warm-up of caches and compilers


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
