"""Threads: work in another one; where each one is, and the line of the owner's files at which a call was made.

Messages name that line, which is the one to change. A stack is a list of traceback.FrameSummary, with the innermost
call first.
"""

import faulthandler
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryFile
from traceback import FrameSummary, StackSummary, format_tb, walk_stack
from types import FrameType
from typing import TypeVar

from ddp.core.errors import UserError, print_line
from ddp.core.files import PROJECT_DIR

Result = TypeVar("Result")
NOT_OWNED = (f"{PROJECT_DIR / 'ddp'}{os.sep}", f"{os.path.realpath(sysconfig.get_paths()['stdlib'])}{os.sep}")
INSTALLED = ("site-packages", "dist-packages", "torchinductor")
ENTRYPOINT = f"{PROJECT_DIR / 'ddp' / 'entrypoint'}{os.sep}"  # whose frames are the start of a run
WRAPPERS = ("wrapper", "inner", "decorate_context")  # functions between a call and what it calls, as are private ones


class BackgroundJob:
    """Runs one job at a time in a daemon thread, so no exit waits for it. Call `finish` before the next `start`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.done = threading.Event()
        self.done.set()
        self.error: Exception | None = None  # what a job has raised: it ends the run

    def start(self, job: Callable[[], None]) -> None:
        self.done.clear()
        threading.Thread(target=self._run, args=(job,), name=self.name, daemon=True).start()

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:
            self.error = error
        finally:
            self.done.set()

    def finish(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the job; raise what it raised. Returns whether it is done."""
        done = self.done.wait(timeout)
        if self.error is not None:
            raise self.error
        return done


def call_with_timeout(seconds: float, call: Callable[[], Result]) -> Result | None:
    """What `call` returns; None if it fails or takes longer. Its thread is left behind then.

    For a call such as one to a store whose machine is cut off.
    """
    results: list[Result] = []

    def run() -> None:
        with suppress(OSError, RuntimeError, UserError):
            results.append(call())

    thread = threading.Thread(target=run, name="call with timeout", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def main_stack() -> list[FrameSummary]:
    frames: dict[int, FrameType] = getattr(sys, "_current_frames", dict)()  # not every Python has it
    top = frames.get(threading.main_thread().ident or 0)
    return StackSummary.extract(walk_stack(top), lookup_lines=False) if top else []


def is_owner_file(file: str) -> bool:
    """Whether `file` is neither Python's, nor installed, nor generated, nor in ddp/."""
    generated = file.startswith("<") or any(part in file for part in INSTALLED)
    return not generated and not os.path.realpath(file).startswith(NOT_OWNED)


def call_site(stack: Iterable[FrameSummary]) -> str:
    """`main.py:110 (barrier), called from main.py:70`; empty without a line of the owner.

    The name is that of the function that the line calls, if it has not returned.
    """
    inner, owned = "", []
    in_run = takewhile(lambda frame: not os.path.realpath(frame.filename).startswith(ENTRYPOINT), stack)
    for frame in in_run:
        if is_owner_file(frame.filename):
            owned.append(frame)
        elif not owned and not frame.name.startswith("_") and frame.name not in WRAPPERS:
            inner = f" ({frame.name})"
    if not owned:
        return ""
    caller = next((f", called from {_place(frame)}" for frame in owned if frame.name != owned[0].name), "")
    return f"{_place(owned[0])}{inner}{caller}"


def dump_stacks(rank: int, error: BaseException | None = None) -> None:
    """Print the stacks of all threads of this process on stderr. `error`: what the main thread has raised before."""
    lines = [f"the stacks of rank {rank}:", *format_tb(error.__traceback__ if error else None), *_all_stacks()]
    print_line("\n".join(map(str.rstrip, lines)), rank)


def _all_stacks() -> list[str]:
    """Those of all threads; of the main thread alone if no file can be written. It must not raise."""
    try:  # in memory where the system can: the temporary directory may be gone or full
        memory = partial(os.fdopen, os.memfd_create("stacks")) if hasattr(os, "memfd_create") else TemporaryFile
        with memory("w+") as file:  # stderr may have no file descriptor of its own
            faulthandler.dump_traceback(file)
            file.seek(0)
            return [file.read()]
    except OSError:
        return StackSummary.from_list(main_stack()).format()


def _place(frame: FrameSummary) -> str:
    path = Path(os.path.realpath(frame.filename))
    return f"{path.relative_to(PROJECT_DIR) if path.is_relative_to(PROJECT_DIR) else path.name}:{frame.lineno}"
