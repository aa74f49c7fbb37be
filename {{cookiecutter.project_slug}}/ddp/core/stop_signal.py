"""Requests to stop, as one rank receives them: signals, and the death of its launcher.

While a run trains, all ranks save after a step and exit with 75. Before that, or on a second signal, the process exits
at once. If the launcher is gone, all ranks save, but exit with 8: no user asked for that. A thread reads the signals
from a pipe, to which Python writes them at once; handlers do not run while the main thread waits in a collective.
"""

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ddp.core.errors import PeerFailed, PeerLost, QuitImmediately, Stopped, UserError
from ddp.core.process_exit import process_exit
from ddp.core.rank_logs import dump_stacks
from ddp.core.signals import REPEAT_INTERVAL_S, STOP_SIGNALS, SignalHandler, die_with_parent, is_alive

log = logging.getLogger(__name__)
POLL_INTERVAL_S = 0.5
REPARENT_GRACE_S = 0.2  # the kernel's SIGTERM arrives before getppid changes
TELL_PEERS_TIMEOUT_S = 0.5  # to tell the other ranks of an immediate exit
NOTICE_AFTER_S = 1.5  # a stop that takes longer is announced
LAUNCHER_GONE = 256  # a reason to stop that is not a signal; larger than all signals


class StopSignal(SignalHandler):
    """What asks this process to stop. `reason` is a signal, LAUNCHER_GONE or None. There is one instance, below."""

    def __init__(self) -> None:
        super().__init__()
        self.announced = False
        self.late_at: float | None = None  # when a signal reached a process that was already exiting
        self.defer_to_step_end = False  # True while a stop can wait for the end of a step
        self.parent: int | None = None
        self.deadline: tuple[float, BaseException] | None = None

    def listen(self, parent: int | None = None) -> None:
        """Receive signals from now on; with `parent`, the launcher's process id, also stop when it is gone."""
        self.__init__()  # type: ignore[misc]
        self.parent = parent
        if parent is not None:
            die_with_parent()
            is_alive(parent)  # imports what a signal needs: a month later, the environment may have changed
        self.pipe, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        self.install(in_thread=True)
        threading.Thread(target=self._watch, name="stop signal", daemon=True).start()

    @contextmanager
    def watchdog(self, seconds: float, error: BaseException) -> Iterator[None]:
        """Print all stacks and exit with `error` unless the block ends in time."""
        self.deadline = (time.monotonic() + seconds, error)
        try:
            yield
        finally:
            self.deadline = None

    def _watch(self) -> None:
        """In the thread, as all methods below."""
        while True:
            if select.select([self.pipe], [], [], POLL_INTERVAL_S)[0]:
                for number in os.read(self.pipe, 512):
                    if number in STOP_SIGNALS:
                        self.receive(number)
            if self.reason is None and self._launcher_gone():
                self.receive(LAUNCHER_GONE)
            # Not at once: a stop usually takes a moment, and launchers signal the survivors of a killed rank as well.
            late = self.reason is not None and time.monotonic() - self.requested_at > NOTICE_AFTER_S
            exiting = process_exit.resolving or process_exit.exiting_with is not None
            if late and self.defer_to_step_end and not exiting and not self.announced:
                self.announced = True
                log.info("stop requested: saving and exiting after this step (signal again to quit immediately)")
            deadline = self.deadline
            if deadline is not None and time.monotonic() > deadline[0]:
                dump_stacks()
                process_exit.hard_exit(deadline[1])

    def _launcher_gone(self) -> bool:
        return self.parent is not None and os.getppid() != self.parent

    def receive(self, number: int, frame: Any = None) -> None:
        """Count one request; one that reaches a process that is already exiting hurries it."""
        if process_exit.exiting_with is None:
            return super().receive(number)
        process_exit.signalled.set()
        if self.late_at is not None and time.monotonic() - self.late_at > REPEAT_INTERVAL_S:
            os._exit(process_exit.exiting_with)  # something keeps the process: a thread of the user's, for example
        self.late_at = self.late_at or time.monotonic()

    def reason_for(self, number: int) -> int:
        """Decide before the main thread can see the reason: the kernel also sends SIGTERM when the launcher dies."""
        if number == signal.SIGTERM and self.parent:  # 0 if it is in another PID namespace
            time.sleep(REPARENT_GRACE_S)
            if not is_alive(self.parent):  # a zombie until its last thread has exited: getppid changes only then
                return LAUNCHER_GONE
        return LAUNCHER_GONE if self._launcher_gone() else number

    def on_first(self) -> None:
        if not self.defer_to_step_end:
            stopped = stop_error(self.reason, "before training began: nothing to save")
            stopped.on_every_rank = False  # the other ranks learn it from this one
            error = process_exit.resolve_root_cause(stopped)
            process_exit.hard_exit(error, silent=process_exit.rank != 0 or isinstance(error, PeerFailed))

    def on_second(self) -> None:
        assert self.second is not None
        error = QuitImmediately(self.second)
        telling = threading.Thread(target=process_exit.resolve_root_cause, args=(error,), daemon=True)
        telling.start()
        telling.join(TELL_PEERS_TIMEOUT_S)
        process_exit.hard_exit(error)


stop_signal = StopSignal()


def stop_error(reason: int | None, detail: str) -> UserError:
    """The error for a request to stop: Stopped, or PeerLost if the launcher is gone."""
    if reason == LAUNCHER_GONE:
        return PeerLost(f"the launcher is gone: stopped {detail}")
    return Stopped(f"stopped on request {detail}")
