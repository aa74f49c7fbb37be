"""Work in another thread: one job at a time; a call that may block without end."""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from ddp.core.errors import UserError

Result = TypeVar("Result")


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
