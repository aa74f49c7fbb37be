"""How much of a step the GPU waits for the program, which gives it one kernel after the other."""

import torch

from ddp.core.run_config import RunConfig
from ddp.distributed.process_group import DistContext

FIRST, HELD = 16, 20  # of an epoch: steps are timed from step 16 on, and after step 20 the GPU is held
HELD_STEPS, MAX_HELD_S = 1.5, 1.0  # for how long, and at most: the program issues the next step meanwhile
CYCLES_PER_S = 2e9  # of a GPU, about
MIN_STEPS = 2 * HELD  # of an epoch
MIN_SHARE = 1 / 3  # of a step, from which on it is worth a line


class GpuWait:
    """Measures once per epoch, on rank 0, what the GPU needs for a step without gaps between its kernels.

    Events do not show the gaps. So the GPU is held until the program has issued a step, for which it then needs what
    its kernels need. Where the program waits for the GPU within a step, that is longer: the share is a lower limit.
    """

    def __init__(self, ctx: DistContext) -> None:
        self.ctx, self.measures = ctx, ctx.rank == 0 and ctx.device.type == "cuda"
        self.start_epoch()

    def start_epoch(self) -> None:
        self.steps, self.since, self.last = 0, 0.0, 0.0
        self.events: list[torch.cuda.Event] = []  # the begin and the end of the step that the GPU took without gaps

    def step(self, clock: float) -> None:
        """A step was issued. clock: in seconds; it stops during evaluations and saves. Does not wait for the GPU."""
        self.steps, self.last = self.steps + 1, clock
        if not self.measures or self.steps > HELD + 1:
            return
        if self.steps == HELD and self.ctx.stop_sync.mark.reached():  # otherwise the GPU has enough to do
            step_s = (clock - self.since) / (HELD - FIRST)
            torch.cuda._sleep(int(min(HELD_STEPS * step_s, MAX_HELD_S) * CYCLES_PER_S))
            self._record()
        elif self.steps == HELD + 1 and self.events:
            self._record()
        if self.steps in (FIRST, HELD + 1):
            self.since = clock

    def advice(self, waits: float, data_share: float, config: RunConfig) -> str:
        """For the line of an epoch; empty if the GPU waits little. data_share: of a step, spent waiting for data."""
        if waits < MIN_SHARE:
            return ""
        remedy = "raise --batch-size" if config.compile else "raise --batch-size, or use --compile"
        if data_share > waits / 2:
            remedy = "for data: raise --workers, or keep them on the GPU (in_memory in docs/data.md)"
        return f"the GPU waits {waits:.0%} of the time: {remedy}"

    def _record(self) -> None:
        self.events.append(torch.cuda.Event(enable_timing=True))
        self.events[-1].record()

    def figures(self) -> dict[str, float]:
        """gpu_ms: what the GPU needs for a step; gpu_waits: its share of waiting. Empty if the GPU has enough to do."""
        if self.steps < MIN_STEPS or len(self.events) < 2 or not self.events[1].query():
            return {}
        gpu_ms, step_ms = self.events[0].elapsed_time(self.events[1]), 1000 * (self.last - self.since)
        step_ms /= self.steps - HELD - 1
        return {"gpu_ms": round(gpu_ms, 3), "gpu_waits": round(max(0.0, 1 - gpu_ms / step_ms), 3)}
