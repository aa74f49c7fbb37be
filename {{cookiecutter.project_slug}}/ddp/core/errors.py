"""Exit codes, and the errors that a user sees as one line: what failed, where, and what to do.

Any exception with an `exit_code` is printed without a traceback, so `model.py` can raise one without this import.
"""

import re
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """Every rank of a run exits with the same code. A second signal n exits with 128 + n."""

    SUCCESS = 0
    BUG = 1
    USAGE = 2
    SETUP = 3
    CHECKPOINT = 4
    OUTPUT_IN_USE = 5
    DIVERGED = 6
    STORAGE = 7
    PEER_LOST = 8
    STOPPED = 75


class UserError(Exception):
    """Something that a user can cause and can fix: printed as one line, without a traceback."""

    exit_code: int = ExitCode.BUG
    on_every_rank = False  # whether all ranks raise the same error: then only rank 0 prints it

    def __init__(self, message: str = "", **attributes: Any) -> None:
        super().__init__(message)
        vars(self).update(attributes)

    def __init_subclass__(cls, **attributes: Any) -> None:
        for name, value in attributes.items():
            setattr(cls, name, value)


class UsageError(UserError, exit_code=ExitCode.USAGE, on_every_rank=True):
    """An option, or a combination of options, that cannot work."""


class SetupError(UserError, exit_code=ExitCode.SETUP):
    """Network, port, device, disk or data: something outside the program is not as it must be."""


class CheckpointError(UserError, exit_code=ExitCode.CHECKPOINT, on_every_rank=True):
    """No checkpoint can be used, or it belongs to another model or to other options."""


class OutputInUse(UserError, exit_code=ExitCode.OUTPUT_IN_USE, on_every_rank=True):
    """Another run writes to this output directory."""


class Diverged(UserError, exit_code=ExitCode.DIVERGED, on_every_rank=True):
    """The loss or the weights are no longer finite, or ranks that should be equal are not."""


class StorageError(UserError, exit_code=ExitCode.STORAGE):
    """A file of the run can no longer be written: the disk is full or was removed."""


class PeerLost(UserError, exit_code=ExitCode.PEER_LOST):
    """Another process of the run is gone or does not respond."""


class RankHangs(PeerLost):
    """No process is gone: one of them is stuck. All ranks print their stacks."""


class CollectiveMismatch(RankHangs, exit_code=ExitCode.BUG):
    """The ranks do not call the same collectives: a mistake in the program, which would occur again."""


class PeerFailed(UserError):
    """This rank is fine, but another one failed; this rank exits with the exit code of that one."""


class Stopped(UserError, exit_code=ExitCode.STOPPED, on_every_rank=True):
    """A signal, or the program, asked the run to stop, and it stopped in an orderly way."""


class QuitImmediately(UserError):
    """A second signal asked the process to exit at once, with 128 + its number."""

    def __init__(self, number: int) -> None:
        super().__init__(f"quit immediately on a second signal ({signal.Signals(number).name})", exit_code=128 + number)


def exit_code_of(error: BaseException) -> int:
    """The exit code for `error`; 1 for a bug."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return int(getattr(error, "exit_code", ExitCode.BUG))


def one_line(error: BaseException) -> str:
    """The message of `error` on one line; for an error from a DataLoader worker, the original message."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if len(lines) > 1 and "DataLoader worker" in lines[0]:
        return re.sub(r"^[\w.]+: ", "", lines[-1])
    return " ".join(line.strip() for line in lines)


def print_line(line: str, rank: int = 0) -> None:
    """Print one line on stderr in a single write, so that lines of several processes do not mix."""
    prefix = f"[rank {rank}] " if rank else ""
    with suppress(OSError):  # the terminal may be closed
        sys.stderr.write(f"{prefix}{line}\n")
        sys.stderr.flush()


def plural(number: int, word: str, ending: str = "s") -> str:
    """`1 process`, `2 processes`."""
    return f"{number} {word}{'' if number == 1 else ending}"


def numbered(what: str, numbers: Collection[int]) -> str:
    """`rank 1`, `ranks 1, 2 and 3`, `ranks 0, 1, 2 and 60 others`; empty without numbers."""
    texts = [str(number) for number in sorted(numbers)]
    if len(texts) < 2:
        return f"{what} {texts[0]}" if texts else ""
    first, rest = (texts[:3], f"{len(texts) - 3} others") if len(texts) > 4 else (texts[:-1], texts[-1])
    return f"{what}s {', '.join(first)} and {rest}"


def first_few(texts: Sequence[str], limit: int = 6) -> str:
    """The first of many texts, and the number of the others."""
    more = len(texts) - limit
    return "; ".join(texts[:limit]) + (f"; and {more} more" if more > 0 else "")


def differences(
    first: Mapping[str, Any], second: Mapping[str, Any], changed: str, only_first: str = "", only_second: str = ""
) -> list[str]:
    """How two mappings differ, as texts. `changed` and the others are formats with {name}, {first} and {second}.

    Without `only_first` and `only_second`, a name that one of the two lacks counts as the value None there.
    """
    found = []
    for name in {**first, **second}:
        one, other = first.get(name), second.get(name)
        text = only_first if name not in second else only_second if name not in first else ""
        if text or one != other:
            found.append((text or changed).format(name=name, first=one, second=other))
    return found
