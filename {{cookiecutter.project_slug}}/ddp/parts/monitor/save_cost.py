"""What the saves of this process cost: the pauses, and the speed of steps while a checkpoint is written."""

import time
from typing import Any

from ddp.core.parts import Callback
from ddp.parts.monitor.ledger import add_scalars


class SaveCost(Callback):
    """Averages over the saves of this process."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.saves, self.pause_s = 0, 0.0
        self.saving_since: float | None = None
        self.steps, self.step_s = {False: 0, True: 0}, {False: 0.0, True: 0.0}  # by whether one was being written
        self.stepped_at: float | None = None  # None after a pause

    def phase(self, name: str) -> None:
        self.stepped_at, now = None, time.perf_counter()
        if self.saving_since is not None:
            self.pause_s += now - self.saving_since
        self.saving_since = now if name == "saving" else None

    def saving(self) -> None:
        add_scalars(self.run, {f"save/{name}": value for name, value in self.figures_so_far().items()})
        self.saves += 1

    def status(self) -> dict[str, Any]:
        return {"saving": self.figures_so_far()}

    def stepped(self) -> None:
        now, writing = time.perf_counter(), not self.run.checkpoints.writer.done.is_set()
        if self.stepped_at is not None:
            self.steps[writing] += 1
            self.step_s[writing] += now - self.stepped_at
        self.stepped_at = now

    def figures_so_far(self) -> dict[str, float]:
        """Averages: the pause in ms; the seconds of writing, and the speed meanwhile, as a part of the usual one."""
        if not self.saves:
            return {}
        found = {"saves": self.saves, "pause_ms": round(1000 * self.pause_s / self.saves, 1)}
        if self.steps[True] and self.steps[False]:
            during, usual = (self.steps[writing] / self.step_s[writing] for writing in (True, False))
            found |= {
                "write_s": round(self.step_s[True] / self.saves, 3),
                "speed_while_written": round(during / usual, 3),
            }
        return found
