"""Stacks of threads, and the line of the owner's files at which a call was made: messages name the line to change.

A stack is a list of traceback.FrameSummary, with the innermost call first.
"""

import os
import sys
import sysconfig
import threading
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from traceback import FrameSummary, StackSummary, walk_stack
from types import FrameType

from ddp.core.errors import print_line
from ddp.core.files import PROJECT_DIR

NOT_OWNED = (f"{PROJECT_DIR / 'ddp'}{os.sep}", f"{sysconfig.get_paths()['stdlib']}{os.sep}")
INSTALLED = ("site-packages", "dist-packages", "torchinductor")
ENTRYPOINT = f"{PROJECT_DIR / 'ddp' / 'entrypoint'}{os.sep}"
WRAPPERS = ("wrapper", "inner", "decorate_context")  # functions between a call and what it calls, as are private ones


def stacks() -> dict[int, list[FrameSummary]]:
    """The stack of each thread of this process."""
    frames: dict[int, FrameType] = getattr(sys, "_current_frames", dict)()  # not every Python has it
    return {thread: StackSummary.extract(walk_stack(top), lookup_lines=False) for thread, top in frames.items()}


def main_stack() -> list[FrameSummary]:
    """The stack of the main thread."""
    return stacks().get(threading.main_thread().ident or 0, [])


def is_owner_file(file: str) -> bool:
    """Whether `file` is neither Python's, nor installed, nor generated, nor in ddp/."""
    generated = file.startswith("<") or any(part in file for part in INSTALLED)
    return not generated and not os.path.abspath(file).startswith(NOT_OWNED)


def call_site(stack: Iterable[FrameSummary]) -> str:
    """`main.py:79 (barrier), called from main.py:40`; empty without a line of the owner.

    The name is that of the function that the line calls, if it has not returned.
    """
    inner, owned = "", []
    for frame in _since_main(stack):
        if is_owner_file(frame.filename):
            owned.append(frame)
        elif not owned and not frame.name.startswith("_") and frame.name not in WRAPPERS:
            inner = f" ({frame.name})"
    if not owned:
        return ""
    caller = next((f", called from {_place(frame)}" for frame in owned if frame.name != owned[0].name), "")
    return f"{_place(owned[0])}{inner}{caller}"


def dump_stacks(rank: int, main: list[FrameSummary] | None = None) -> None:
    """Print the stacks of this process on stderr, without idle threads. `main`: the main thread's, before it failed."""
    lines = [f"the stacks of rank {rank} (innermost call first; > marks your files):"]
    lines += ["main thread:", format_stack(main or main_stack())]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for thread, stack in stacks().items():
        if thread not in (threading.main_thread().ident, threading.get_ident()) and not waits_for_work(stack):
            lines += [f"thread {names.get(thread, thread)}:", format_stack(stack)]
    print_line("\n".join(lines), rank)


def format_stack(stack: Iterable[FrameSummary]) -> str:
    """Lines for a stack; `>` marks those of the owner's files, which show their code.

    It ends with the outermost of those, if there is one, and before ddp calls main.
    """
    frames = [(frame, is_owner_file(frame.filename)) for frame in _since_main(stack)]
    last = max((number for number, (_, owned) in enumerate(frames, start=1) if owned), default=len(frames))
    lines = []
    for frame, owned in frames[:last]:
        lines.append(f"{'>' if owned else ' '} {frame.filename}:{frame.lineno} in {frame.name}")
        if owned and frame.line:
            lines.append(f">     {frame.line}")
    return "\n".join(lines)


def waits_for_work(stack: list[FrameSummary]) -> bool:
    """Whether this is the stack of a thread that has nothing to do, as the threads of ddp and TensorBoard usually."""
    idle = bool(stack) and (stack[0].filename == threading.__file__ or stack[0].name == "_watch")
    return idle and not any(is_owner_file(frame.filename) for frame in stack)


def _since_main(stack: Iterable[FrameSummary]) -> Iterable[FrameSummary]:
    """The part of a stack that is not the start of a run."""
    return takewhile(lambda frame: not frame.filename.startswith(ENTRYPOINT), stack)


def _place(frame: FrameSummary) -> str:
    path = Path(os.path.abspath(frame.filename))
    return f"{path.relative_to(PROJECT_DIR) if path.is_relative_to(PROJECT_DIR) else path.name}:{frame.lineno}"
