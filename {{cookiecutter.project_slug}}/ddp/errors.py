"""Exit codes, and errors that are one line: what, where, what to do.

Any exception with an `exit_code` is for the user, and is shown without a traceback. So `model.py`
takes part without importing this file.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress


class Failure(Exception):
    """Something that a user can cause and can mend: shown as one line, without a traceback."""

    exit_code = 1
    on_every_rank = False  # True where all ranks raise the same, so that only rank 0 says it


class UsageError(Failure):
    """An option, or a combination of options, that cannot work."""

    exit_code = 2
    on_every_rank = True


class EnvironmentFailure(Failure):
    """Network, port, device, disk or data: something outside of the program is not as it must be."""

    exit_code = 3


class CheckpointFailure(Failure):
    """No checkpoint can be used, or it does not belong to this model and these options."""

    exit_code = 4
    on_every_rank = True


class OutputInUse(Failure):
    """Another run writes to this output folder."""

    exit_code = 5
    on_every_rank = True


class Diverged(Failure):
    """The loss or the weights are not finite any more."""

    exit_code = 6
    on_every_rank = True


class StorageFailure(Failure):
    """A file of the run cannot be written any more: the disk is full, or went away."""

    exit_code = 7


class PeerLost(Failure):
    """Another process of the run is gone, or does not answer."""

    exit_code = 8

    def __init__(self, message: str, hang: bool = False) -> None:
        super().__init__(message)
        self.hang = hang  # nobody is gone: one of the processes stands still


class Collateral(Failure):
    """This rank is fine, but another one has failed; it ends with that one's exit code."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Stopped(Failure):
    """Asked to stop, by a signal, and did so in good order."""

    exit_code = 75
    on_every_rank = True


# The variables from which a launcher's rank can be read before anything else is known.
RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


def one_line(error: BaseException) -> str:
    """The message of `error` on one line; of an error that crossed from a DataLoader worker, the original's."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if len(lines) > 1 and "DataLoader worker" in lines[0]:
        return re.sub(r"^[\w.]+: ", "", lines[-1])
    return " ".join(line.strip() for line in lines)


def report(error: BaseException, rank: int = 0) -> None:
    """Print one line on stderr, written at once so that lines of several processes do not mix."""
    if isinstance(error, Collateral):
        say(one_line(error))
    else:
        say(one_line(error) if isinstance(error, Stopped) else f"error: {one_line(error)}", rank)


def say(line: str, rank: int = 0) -> None:
    """Print a line on stderr, with the rank that says it."""
    who = f"[rank {rank}] " if rank else ""
    with suppress(OSError):  # the terminal may be gone
        sys.stderr.write(f"{who}{line}\n")
        sys.stderr.flush()
