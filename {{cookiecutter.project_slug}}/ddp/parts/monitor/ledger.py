"""Where the time of a run went, over all its restarts; and what the loss of a process has cost."""

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ddp.core.errors import ExitCode, plural
from ddp.core.files import read_status
from ddp.core.parts import Callback
from ddp.core.run_config import NOTICED_VARIABLE

log = logging.getLogger(__name__)

PARTS = ("productive", "data", "saving", "evaluation", "start-up", "repeated", "down")
CLOCK_ERROR_S = 60.0  # between two machines


class Ledger(Callback):
    """Divides the time since the first start of a run into PARTS. One part lasts until the next is entered.

    Times are in seconds, moments since 1970. "data" is the time in which training waited for data, "repeated" that of
    steps that were lost with a process and computed again. In "down" no process of the run existed.
    """

    def __init__(self, run: Any = None) -> None:
        self.run = run
        import psutil  # slow, and not needed to check a command line

        alone = hasattr(sys.modules["__main__"], "__file__")  # and not in a notebook, which may be hours old
        started = psutil.Process().create_time() if alone else time.time()
        self.first_start = self.since = self.stepped_at = started
        self.offset = time.time() - time.perf_counter()  # the clock of the machine may be set while the run lasts
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.part, self.data_s = "start-up", 0.0  # data_s: as in the last call of `phase`
        self.waited_s: Callable[[], float] = lambda: 0.0  # for how long this process has waited for data
        self.lost_at, self.noticed_at, self.lost_steps = 0.0, 0.0, 0  # of the process that was lost before, if any

    # ---- the moments of a run ---------------------------------------------------------------------------------------

    def resumed(self, content: Mapping[str, Any]) -> None:
        self.waited_s = lambda: self.run.train_loader.wait_s
        folder = self.run.run_log.output_dir.path
        status = read_status(folder) if self.run.ctx.rank == 0 else {}  # its ledger is the run's
        own = content and Path(content["path"]).parent == self.run.run_log.output_dir.checkpoints
        lost = not content and status.get("step") and status["state"] in ("running", "failed")  # before the first save
        if own or lost:  # an earlier version has saved it as "time"
            saved = content.get("callbacks", {}).get("Ledger") or content.get("time", {})
            self.resume(saved, content.get("step", 0), status)

    def stepped(self) -> None:
        self.stepped_at = self.now()
        if self.lost_at:
            log.info(self.recovery())
            self.lost_at = 0.0

    def saving(self) -> None:
        add_scalars(self.run, {f"time/{part}": seconds for part, seconds in self.seconds.items()})

    def status(self) -> dict[str, Any]:
        return {"time": self.state_dict()}

    def summary(self) -> str:
        self.state_dict()
        return f"time          {self}"

    # ---- the record -------------------------------------------------------------------------------------------------

    def now(self) -> float:
        return self.offset + time.perf_counter()

    def phase(self, name: str) -> None:
        """Another part begins."""
        now, before, data_s = self.now(), self.part, self.waited_s()
        self.seconds[before] += now - self.since
        if before == "productive":
            self.seconds["data"] += data_s - self.data_s
            self.seconds["productive"] -= data_s - self.data_s
        self.part, self.since, self.data_s = name, now, data_s

    def state_dict(self) -> dict[str, Any]:
        """Where the time went so far: what a later process continues from, and status.json shows."""
        self.phase(self.part)
        moments = {"since": self.first_start, "until": self.since, "stepped": self.stepped_at}
        return {**moments, "seconds": {**self.seconds}}

    def resume(self, saved: Mapping[str, Any], step: int, status: Mapping[str, Any]) -> None:
        """Continue the record in the checkpoint of `step`, and the later one in status.json. Either may be empty."""
        later = status.get("time") or saved
        if saved and (later["since"] != saved["since"] or later["until"] < saved["until"] - CLOCK_ERROR_S):
            later = saved  # status.json is of another run, or from before the run moved
        if not later:
            return
        if later is not saved and (status["state"] == "running" or status["exit_code"] == ExitCode.PEER_LOST):
            self.lost_at, self.lost_steps = later["stepped"], max(0, status["step"] - step)
            noticed = [float(os.environ.get(NOTICED_VARIABLE, 0)), later["until"] * (status["state"] == "failed")]
            self.noticed_at = min(filter(None, noticed), default=0.0)
        kept = saved.get("seconds", {})
        for part, seconds in later["seconds"].items():
            lost = max(0.0, seconds - kept.get(part, 0.0)) if part in ("productive", "data") else 0.0
            self.seconds[part] += seconds - lost
            self.seconds["repeated"] += lost
        self.since = max(self.since, later["until"])  # the system knows the start of a process to a second
        self.seconds["down"] += self.since - later["until"]
        self.first_start = later["since"]

    def recovery(self) -> str:
        """What the loss of a process has cost, once training continues."""
        lost = time.strftime("%H:%M:%S", time.localtime(self.lost_at))
        noticed = f"noticed after {max(0.0, self.noticed_at - self.lost_at):.1f} s, " if self.noticed_at else ""
        again = f"{plural(self.lost_steps, 'step')} or a few more computed again"  # status.json may be 5 s old
        return f"recovered: lost at {lost}, {noticed}training again after {self.now() - self.lost_at:.1f} s; {again}"

    def __str__(self) -> str:
        """`41 h 12 min: 93.1 % productive, 2.0 % data, ...`."""
        total = max(sum(self.seconds.values()), 1e-9)
        hours, minutes = divmod(round(total / 60), 60)
        length = f"{hours:,} h {minutes} min" if hours else f"{total / 60:.1f} min" if total >= 60 else f"{total:.0f} s"
        shares = {part: 100 * seconds / total for part, seconds in self.seconds.items()}
        return f"{length}: " + ", ".join(f"{share:.1f} % {part}" for part, share in shares.items() if share >= 0.05)


def add_scalars(run: Any, curves: Mapping[str, float]) -> None:
    """Add a point to each of these curves in TensorBoard."""
    run.to_tensorboard(lambda writer, step: [writer.add_scalar(*curve, step) for curve in curves.items()])
