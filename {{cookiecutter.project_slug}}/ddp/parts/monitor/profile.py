"""--profile: a trace of a few steps of rank 0, which chrome://tracing and ui.perfetto.dev show."""

import logging
from typing import Any

from torch.profiler import profile, schedule

from ddp.core.parts import Callback

log = logging.getLogger(__name__)
FIRST_STEP, LAST_STEP = 10, 15  # from the start or resume on: after the warm-up of caches and compilers


class Profile(Callback):
    """Writes OUTPUT_DIR/profile/trace.json."""

    def __init__(self, run: Any) -> None:
        self.run, self.steps = run, 0
        self.profiler: profile | None = None  # on rank 0

    def started(self) -> None:
        if self.run.ctx.rank == 0:
            folder = self.run.run_log.output_dir.path / "profile"
            folder.mkdir(parents=True, exist_ok=True)
            active = LAST_STEP - FIRST_STEP + 1
            window = schedule(skip_first=FIRST_STEP - 2, wait=0, warmup=1, active=active, repeat=1)
            self.trace = folder / "trace.json"
            self.profiler = profile(schedule=window, on_trace_ready=self._write)
            self.profiler.start()

    def stepped(self) -> None:
        self.steps += 1
        if self.profiler is not None:
            self.profiler.step()

    def trained(self) -> None:
        if self.profiler is not None:
            self.profiler.stop()
            if self.steps < FIRST_STEP - 1:
                log.warning(f"warning: --profile: no trace, since the run ended before step {FIRST_STEP}")

    def _write(self, finished: profile) -> None:
        finished.export_chrome_trace(str(self.trace))
        log.info(f"profile of steps {FIRST_STEP} to {LAST_STEP}: {self.trace}")
