"""What follows from the end of a worker group: the exit code, and whether the job starts again. See the table GroupEnd.

WorkerGroup._group_end (worker_group.py) picks the row; NodeAgent.run (agent.py) restarts the job accordingly.

A restart helps only after the loss of a process: exit code 8, a killed torchrun, or a failure that no worker explains.
An error that main.py reports (1 to 7) would occur again, and 75 was asked for.
"""

from dataclasses import dataclass, field
from enum import Enum

from ddp.core.errors import ExitCode

FIRST_RESTART_INTERVAL_S, MAX_RESTART_INTERVAL_S = 3.0, 60.0


@dataclass
class RunResult:
    """How a worker group ended, and what the agent does about it."""

    exit_code: int
    message: str = ""
    restartable: bool = False
    reported: bool = True  # whether a worker or torchrun has printed the reason
    saved_step: int | None = None  # of the last checkpoint, if a worker recorded it
    pids: list[int] = field(default_factory=list)


class GroupEnd(Enum):
    """How a worker group can end."""

    SUCCEEDED = RunResult(ExitCode.SUCCESS)
    # torchrun stops the workers that are left; none of them reports another error.
    WORKER_KILLED = RunResult(ExitCode.PEER_LOST, "a process was lost", restartable=True)
    LOSS_REPORTED = RunResult(ExitCode.PEER_LOST, restartable=True)  # a worker reports that another one is lost
    # Exit code and message are the worker's. Also an orderly stop that only the workers know of.
    WORKER_REPORTED = RunResult(ExitCode.BUG)
    STOPPED_EARLY = RunResult(ExitCode.STOPPED, "stopped before training began: nothing to save", reported=False)
    STOP_CUT_SHORT = RunResult(ExitCode.PEER_LOST, "the processes were killed before they had stopped", reported=False)
    TORCHRUN_KILLED = RunResult(ExitCode.PEER_LOST, "torchrun was killed", restartable=True, reported=False)
    # torchrun reports a failure that no worker explains, with this exit code or another one.
    UNEXPLAINED = RunResult(ExitCode.BUG, "a process failed", restartable=True, reported=False)


class RestartBudget:
    """Counts restarts. Progress resets the count; without progress, the pauses get longer."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0
        self.pause, self.furthest_step = FIRST_RESTART_INTERVAL_S, -1

    def take(self, saved_step: int | None) -> float | None:
        """Use one restart. Returns the seconds to wait before it; None if there is none left."""
        step = -1 if saved_step is None else saved_step
        if step > self.furthest_step >= 0:
            self.used, self.pause = 0, FIRST_RESTART_INTERVAL_S
        self.furthest_step = max(self.furthest_step, step)
        if self.used >= self.limit:
            return None
        self.used += 1
        pause, self.pause = self.pause, min(2 * self.pause, MAX_RESTART_INTERVAL_S)
        return pause
