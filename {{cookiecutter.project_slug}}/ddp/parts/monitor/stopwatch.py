"""How long a CPU or a GPU works on something."""

import time
from collections import deque

import torch


class Stopwatch:
    """Adds up the seconds that a CPU takes between `start` and `stop`."""

    def __init__(self) -> None:
        self.total_s, self.started_at = 0.0, 0.0

    def start(self) -> None:
        self.started_at = time.perf_counter()

    def stop(self) -> None:
        self.total_s += time.perf_counter() - self.started_at


class CudaStopwatch(Stopwatch):
    """Its twin for a GPU, for which it never waits: `total_s` has what the GPU has done by the last `stop`."""

    def __init__(self) -> None:
        super().__init__()
        self.started: torch.cuda.Event | None = None
        self.events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def start(self) -> None:
        self.started = None
        if not torch.cuda.is_current_stream_capturing():
            self.started = torch.cuda.Event(enable_timing=True)
            self.started.record()

    def stop(self) -> None:
        if self.started is None:
            return
        self.events.append((self.started, torch.cuda.Event(enable_timing=True)))
        self.events[-1][1].record()
        self.started = None
        while self.events and self.events[0][1].query():
            start, end = self.events.popleft()
            self.total_s += start.elapsed_time(end) / 1000
