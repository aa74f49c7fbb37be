"""The line of the owner's files at which a call was made: for messages that name the line to change."""

import linecache
import os
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

PROJECT = Path(__file__).resolve().parents[2]
INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]|torchinductor|^<")
NOT_OWNED = (f"{PROJECT / 'ddp'}{os.sep}", f"{sysconfig.get_paths()['stdlib']}{os.sep}")
ENTRYPOINT = f"{PROJECT / 'ddp' / 'entrypoint'}{os.sep}"
# Functions between a call and the function that is called.
WRAPPERS = re.compile(r"_|(wrapper|inner|decorate_context)$")


class Frame(NamedTuple):
    """One call of a stack."""

    file: str
    line: int
    function: str


def stack_of(thread: int) -> list[Frame]:
    """The stack of a thread of this process, innermost call first; empty if the thread has ended."""
    frame, frames = sys._current_frames().get(thread), []
    while frame is not None:
        frames.append(Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return frames


def stack_of_error(trace: TracebackType | None) -> list[Frame]:
    """Where an error was raised, innermost call first."""
    return [Frame(each.filename, each.lineno or 0, each.name) for each in reversed(traceback.extract_tb(trace))]


def is_owner_file(file: str) -> bool:
    """Whether `file` is neither Python's, nor installed, nor in ddp/."""
    return not INSTALLED.search(file) and not os.path.abspath(file).startswith(NOT_OWNED)


def call_site(stack: Iterable[Frame]) -> str:
    """`main.py:79 (barrier), called from main.py:40`, for a stack, innermost call first; empty without an own line.

    The name is that of the function that the line calls, if it has not returned.
    """
    inner, owned = "", []
    for frame in stack:
        if frame.file.startswith(ENTRYPOINT):
            break  # further out is only the call that starts a run
        if is_owner_file(frame.file):
            owned.append(frame)
        elif not owned and not WRAPPERS.match(frame.function):
            inner = frame.function
    if not owned:
        return ""
    callers = [frame for frame in owned[1:] if frame.function != owned[0].function]
    site = f"{_place(owned[0])} ({inner})" if inner else _place(owned[0])
    return f"{site}, called from {_place(callers[0])}" if callers else site


def format_stack(stack: Iterable[Frame]) -> str:
    """Lines for a stack, innermost call first; `>` marks those of the owner's files, which show their code.

    It ends with the outermost of those, if there is one, and before ddp calls main.
    """
    frames = list(takewhile(lambda frame: not frame.file.startswith(ENTRYPOINT), stack))
    own = [number for number, frame in enumerate(frames, start=1) if is_owner_file(frame.file)]
    lines = []
    for frame in frames[: own[-1] if own else None]:
        owned = is_owner_file(frame.file)
        lines.append(f"{'>' if owned else ' '} {frame.file}:{frame.line} in {frame.function}")
        code = linecache.getline(frame.file, frame.line).strip() if owned else ""
        lines += [f">     {code}"] if code else []
    return "\n".join(lines)


def waits_for_work(stack: list[Frame]) -> bool:
    """Whether this is the stack of a thread that has nothing to do, as those of ddp and TensorBoard mostly have."""
    idle = bool(stack) and (stack[0].file == threading.__file__ or stack[0].function == "_watch")
    return idle and not any(is_owner_file(frame.file) for frame in stack)


def _place(frame: Frame) -> str:
    path = Path(os.path.abspath(frame.file))
    name = path.relative_to(PROJECT) if path.is_relative_to(PROJECT) else path.name
    return f"{name}:{frame.line}"


def names(ranks: list[int]) -> str:
    """`rank 1`, `ranks 1, 2 and 3`, `ranks 0, 1, 2 and 60 others`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    first, rest = (ranks[:3], f"{len(ranks) - 3} others") if len(ranks) > 4 else (ranks[:-1], str(ranks[-1]))
    return f"ranks {', '.join(map(str, first))} and {rest}"


def by_site(sites: dict[int, str]) -> dict[str, list[int]]:
    """The ranks at each site."""
    found: dict[str, list[int]] = {}
    for rank, site in sorted(sites.items()):
        found.setdefault(site, []).append(rank)
    return found
