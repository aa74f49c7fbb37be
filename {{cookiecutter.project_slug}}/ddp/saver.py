"""Writes checkpoints beside the training: one at a time, and no failure is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Saver:
    """At most one job in flight, in a thread. Its failure is raised by the next call of `finish` or `start`."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Run `job` in the background, once the job before it is done."""
        self.finish()
        self.thread = threading.Thread(target=self._run, args=(job,), name="saver", daemon=True)
        self.thread.start()

    def finish(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds for the job in flight; raise what it raised. Returns whether it is done."""
        done = self.wait(timeout)
        if done and self.error is not None:
            error, self.error = self.error, None
            raise error
        return done

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the job in flight, without raising; for at most `timeout` seconds. Returns whether it is done."""
        if self.thread is not None:
            self.thread.join(timeout)
        return self.thread is None or not self.thread.is_alive()

    def failed(self) -> bool:
        """Whether the last job has failed, and nobody was told yet."""
        return self.error is not None

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:
            self.error = error
