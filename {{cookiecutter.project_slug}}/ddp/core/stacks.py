"""Stacks of threads, and the line of the owner's files at which a call was made: messages name the line to change."""

import linecache
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

from ddp.core.errors import print_line

PROJECT = Path(__file__).resolve().parents[2]
NOT_OWNED = (f"{PROJECT / 'ddp'}{os.sep}", f"{sysconfig.get_paths()['stdlib']}{os.sep}")
INSTALLED = ("site-packages", "dist-packages", "torchinductor")
ENTRYPOINT = f"{PROJECT / 'ddp' / 'entrypoint'}{os.sep}"
WRAPPERS = ("wrapper", "inner", "decorate_context")  # functions between a call and what it calls, as are private ones


class Frame(NamedTuple):
    """One call. A stack is a list of them, with the innermost call first."""

    file: str
    line: int
    function: str


def stacks() -> dict[int, list[Frame]]:
    """The stack of each thread of this process."""
    frames = getattr(sys, "_current_frames", dict[int, FrameType])()  # not every Python has it
    found: dict[int, list[Frame]] = {}
    for thread, frame in frames.items():
        calls = traceback.walk_stack(frame)
        found[thread] = [Frame(each.f_code.co_filename, line, each.f_code.co_name) for each, line in calls]
    return found


def main_stack() -> list[Frame]:
    """The stack of the main thread."""
    return stacks().get(threading.main_thread().ident or 0, [])


def stack_of_error(trace: TracebackType | None) -> list[Frame]:
    """Where an error was raised."""
    return [Frame(each.filename, each.lineno or 0, each.name) for each in reversed(traceback.extract_tb(trace))]


def is_owner_file(file: str) -> bool:
    """Whether `file` is neither Python's, nor installed, nor generated, nor in ddp/."""
    generated = file.startswith("<") or any(part in file for part in INSTALLED)
    return not generated and not os.path.abspath(file).startswith(NOT_OWNED)


def call_site(stack: Iterable[Frame]) -> str:
    """`main.py:79 (barrier), called from main.py:40`; empty without a line of the owner.

    The name is that of the function that the line calls, if it has not returned.
    """
    inner, owned = "", []
    for frame in _since_main(stack):
        if is_owner_file(frame.file):
            owned.append(frame)
        elif not owned and not frame.function.startswith("_") and frame.function not in WRAPPERS:
            inner = f" ({frame.function})"
    callers = [f", called from {_place(frame)}" for frame in owned[1:] if frame.function != owned[0].function]
    return f"{_place(owned[0])}{inner}{''.join(callers[:1])}" if owned else ""


def dump_stacks(rank: int, main: list[Frame] | None = None) -> None:
    """Print the stacks of this process on stderr, without idle threads. `main`: the main thread's, before it failed."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    named = [("main thread", main or main_stack())]
    for thread, stack in stacks().items():
        if thread not in (threading.main_thread().ident, threading.get_ident()) and not waits_for_work(stack):
            named.append((f"thread {names.get(thread, thread)}", stack))
    lines = "\n".join(f"{name}:\n{format_stack(stack)}" for name, stack in named)
    print_line(f"the stacks of rank {rank} (innermost call first; > marks your files):\n{lines}", rank)


def format_stack(stack: Iterable[Frame]) -> str:
    """Lines for a stack; `>` marks those of the owner's files, which show their code.

    It ends with the outermost of those, if there is one, and before ddp calls main.
    """
    frames = [(frame, is_owner_file(frame.file)) for frame in _since_main(stack)]
    last = max((number for number, (_, owned) in enumerate(frames, start=1) if owned), default=len(frames))
    lines = []
    for frame, owned in frames[:last]:
        lines.append(f"{'>' if owned else ' '} {frame.file}:{frame.line} in {frame.function}")
        code = linecache.getline(frame.file, frame.line).strip() if owned else ""
        lines += [f">     {code}"] if code else []
    return "\n".join(lines)


def waits_for_work(stack: list[Frame]) -> bool:
    """Whether this is the stack of a thread that has nothing to do, as the threads of ddp and TensorBoard usually."""
    idle = bool(stack) and (stack[0].file == threading.__file__ or stack[0].function == "_watch")
    return idle and not any(is_owner_file(frame.file) for frame in stack)


def _since_main(stack: Iterable[Frame]) -> Iterable[Frame]:
    """The part of a stack that is not the start of a run."""
    return takewhile(lambda frame: not frame.file.startswith(ENTRYPOINT), stack)


def _place(frame: Frame) -> str:
    path = Path(os.path.abspath(frame.file))
    return f"{path.relative_to(PROJECT) if path.is_relative_to(PROJECT) else path.name}:{frame.line}"
