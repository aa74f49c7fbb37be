"""Where the time of a run goes, which rank is slow or faulty, and how well the GPUs are used; --guard and --profile."""

from dataclasses import dataclass
from typing import Any

from ddp.core.errors import UsageError
from ddp.core.options import option

SPEEDS = ("tokens_per_s", "mfu", "rank_ms_median", "rank_ms_slowest")  # in metrics.jsonl: two equal runs may differ


@dataclass
class Options:
    """The options of this part."""

    profile: bool = option(
        False, "write a trace of steps 10 to 15 to OUTPUT_DIR/profile", section="speed", may_change=True
    )
    guard: int | None = option(
        None,
        "compute the gradients of every N-th step twice; 0: do not even compare the ranks at each save",
        min=0,
        section="run",
        may_change=True,
    )

    def check(self) -> None:
        """Refuse options that contradict each other. Raises UsageError."""
        if self.guard and not getattr(self, "deterministic", False):
            raise UsageError("--guard needs --deterministic: otherwise two computations may differ without a fault")


def callbacks(run: Any) -> list[Any]:
    """One for each thing that is measured or compared."""
    from ddp.parts.monitor.flops import Flops  # these import torch
    from ddp.parts.monitor.guard import Guard
    from ddp.parts.monitor.ledger import Ledger
    from ddp.parts.monitor.profile import Profile
    from ddp.parts.monitor.rank_speeds import RankSpeeds
    from ddp.parts.monitor.save_cost import SaveCost

    return [Ledger(run), SaveCost(run), RankSpeeds(run), Flops(run), Guard(run), *([Profile(run)] * run.config.profile)]
