"""Which rank is slow. DDP makes all as slow as the slowest, so the time of a step does not show it."""

import logging
from statistics import median
from typing import Any

import torch

from ddp.core.parts import Callback
from ddp.parts.monitor.stopwatch import CudaStopwatch, Stopwatch

log = logging.getLogger(__name__)
INTERVAL_S = 30.0
PERIODS = 2  # in a row, after which a rank is reported
SLOWER, OF_A_STEP = 1.2, 0.02  # than the others, and by this part of a step: less would change nothing
PARTS = ("waiting for data", "in the forward pass")


class RankSpeeds(Callback):
    """Compares what each rank does alone: waiting for data, and the forward pass. Shared twice a minute."""

    def __init__(self, run: Any) -> None:
        self.run, self.ctx, self.next_at = run, run.ctx, INTERVAL_S
        self.forward = CudaStopwatch() if run.ctx.device.type == "cuda" else Stopwatch()  # of passes in training
        self.hooks: list[Any] = []
        self.measured: tuple[int, float, float, float] = (0, 0.0, 0.0, 0.0)  # when shared last; see `started`
        self.slow_for = [0] * self.ctx.world_size  # periods in a row, by rank
        self.reported: dict[int, str] = {}  # the ranks that are slow, and in which part
        self.latest: dict[str, float] = {}  # ms per step: of the median of the ranks, and of the slowest one

    def wrapped(self, model: Any, task: Any) -> None:
        config = self.run.config
        # With these options, a forward pass waits for other ranks. A single one has no other to be compared with.
        waits = self.ctx.work.sharded or config.sync_bn or config.compile or config.evaluate
        if self.ctx.world_size > 1 and not waits:
            start, stop = self.forward.start, self.forward.stop
            self.hooks += [
                model.register_forward_pre_hook(lambda *_: start() if torch.is_grad_enabled() else None),
                model.register_forward_hook(lambda *_: stop() if torch.is_grad_enabled() else None),
            ]

    def figures(self, *_: Any) -> tuple[dict[str, float], str]:
        return self.latest, ""

    def trained(self) -> None:
        for hook in self.hooks:  # a model with hooks cannot be exported
            hook.remove()

    def started(self) -> None:
        """Measure from here on."""
        data_s = self.run.train_loader.wait_s  # in which this rank has waited for data
        self.measured = (self.run.state.step, self.ctx.stop_sync.trained_s, data_s, self.forward.total_s)
        self.next_at = self.ctx.stop_sync.trained_s + INTERVAL_S

    def synced(self) -> None:
        """Once the time has come, compare the ranks; rank 0 prints what has changed. Call on every rank."""
        no_step = self.run.state.step == self.measured[0]  # a run that stops in an evaluation
        if self.ctx.world_size == 1 or self.ctx.stop_sync.trained_s < self.next_at or no_step:
            return
        before = self.measured
        self.started()
        steps, *elapsed = (now - then for now, then in zip(self.measured, before, strict=True))
        step_ms, *own = (1000 * seconds / steps for seconds in elapsed)
        everyone = torch.zeros(self.ctx.world_size, len(own), dtype=torch.double)
        everyone[self.ctx.rank] = torch.tensor(own)
        times = self.ctx.sum(everyone).tolist()
        if self.ctx.rank == 0:
            self.compare(times, step_ms)

    def compare(self, times: list[list[float]], step_ms: float) -> None:
        """times: of each rank, ms per step in each of PARTS."""
        own = [sum(parts) for parts in times]
        self.latest = {"rank_ms_median": round(median(own), 3), "rank_ms_slowest": round(max(own), 3)}
        slow: dict[int, str] = {}
        for rank, mine in enumerate(own):
            others = median(own[:rank] + own[rank + 1 :])
            is_slow = mine > SLOWER * others and mine - others > OF_A_STEP * step_ms
            self.slow_for[rank] = self.slow_for[rank] + 1 if is_slow else 0
            if self.slow_for[rank] >= PERIODS:
                usual = [median(part[:rank] + part[rank + 1 :]) for part in map(list, zip(*times, strict=True))]
                part = max(range(len(PARTS)), key=lambda part: times[rank][part] - usual[part])
                slow[rank] = PARTS[part]
                if self.reported.get(rank) != PARTS[part]:
                    figures = f"{times[rank][part]:.3g} ms per step, others {usual[part]:.3g}"
                    by = f"{mine / max(others, 1e-3):.1f} x as slow as the others: {PARTS[part]} ({figures})"
                    log.warning(f"warning: rank {rank} ({self.ctx.hosts[rank]}) is {by}")
        for rank in self.reported.keys() - slow.keys():
            log.info(f"rank {rank} ({self.ctx.hosts[rank]}) is as fast as the others again")
        self.reported = slow
