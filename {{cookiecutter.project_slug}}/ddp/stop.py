"""Asked to stop: by a signal, or because the launcher is gone.

While a run trains, the first signal lets all ranks save at the end of a step and leave with 75; before that there is
nothing to save, and the process leaves at once. A second signal leaves at once in any case, with 128 + its number.
If the launcher is gone, all ranks save likewise, but leave with 8: nobody wanted that.

Python runs its signal handlers in the main thread, between two lines of Python: while it waits for another rank, it
may never get there. So a thread reads the numbers of signals from a pipe, to which Python writes them at once.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ddp import logs
from ddp.ending import ending
from ddp.errors import Collateral, Failure, PeerLost, Stopped, say

log = logging.getLogger(__name__)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
REPEAT_S = 1.0  # one request may come twice: from the terminal, or Slurm, and from the launcher
POLL_S = 0.5
SETTLE_S = 0.2
TELL_S = 0.5  # for telling the others that one leaves at once
NOTICE_S = 1.5  # a stop that takes longer is announced
PR_SET_PDEATHSIG = 1
# Opened here, and not in a DataLoader worker: after a fork, a lock of the dynamic loader may be held for ever.
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
LAUNCHER_GONE = 256  # beyond all signals


class StopRequests:
    """What asks this process to stop. There is one: `requests`, below."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.asked: int | None = None  # a signal, or LAUNCHER_GONE
        self.said = False
        self.late_at: float | None = None  # when a signal came to a process on its way out
        self.patient = False  # True while a stop can wait for the end of a step
        self.parent: int | None = None
        self.deadline: tuple[float, BaseException] | None = None

    def listen(self, parent: int | None = None) -> None:
        """Take signals from now on; with `parent`, the process id of the launcher, also stop when that is gone."""
        self.reset()
        self.parent = parent
        if parent is not None:
            die_with_parent()
        self.pipe, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in SIGNALS:
            # Under nohup, SIGHUP stays ignored.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda *_: None)
                signal.siginterrupt(number, False)
        threading.Thread(target=self._watch, name="stop", daemon=True).start()

    @contextmanager
    def within(self, seconds: float, error: BaseException) -> Iterator[None]:
        """Ends the process with `error`, and the stack of every thread, unless the block is left in time."""
        self.deadline = (time.monotonic() + seconds, error)
        try:
            yield
        finally:
            self.deadline = None

    def agree_to(self, number: int) -> None:
        """This process, or another rank, was asked to stop: from now on, one more signal is a second one."""
        if self.asked is None:
            self.asked, self.asked_at = number, time.monotonic()

    def _watch(self) -> None:
        while True:
            if select.select([self.pipe], [], [], POLL_S)[0]:
                for number in os.read(self.pipe, 512):
                    if number in SIGNALS:
                        self._take(number)
            if self._orphaned() and self.asked is None:
                self._take(LAUNCHER_GONE)
            self._say_that_it_takes_a_while()
            deadline = self.deadline
            if deadline is not None and time.monotonic() > deadline[0]:
                dump_stacks()
                ending.abruptly(deadline[1])

    def _orphaned(self) -> bool:
        return self.parent is not None and os.getppid() != self.parent

    def _say_that_it_takes_a_while(self) -> None:
        """Not at once: mostly it takes a moment only; and a launcher signals the others too when one was killed."""
        waits = self.asked is not None and self.patient and not ending.settling and ending.code is None
        if waits and not self.said and time.monotonic() - self.asked_at > NOTICE_S:
            self.said = True
            log.info("asked to stop: after this step, with a checkpoint (a second signal leaves at once)")

    def _take(self, number: int) -> None:
        if ending.code is not None:
            ending.hurry.set()  # on its way out already
            if self.late_at is not None and time.monotonic() - self.late_at > REPEAT_S:
                os._exit(ending.code)  # something does not let it go: a thread of the user's, say
            self.late_at = self.late_at or time.monotonic()
        elif self.asked is None:
            if number == signal.SIGTERM and self.parent is not None:
                time.sleep(SETTLE_S)  # the kernel sends it before the parent is quite gone
            self.agree_to(LAUNCHER_GONE if self._orphaned() else number)
            if not self.patient:
                error = ending.settle(stopped(self.asked, "before training began: nothing to save"))
                ending.abruptly(error, speak=ending.rank == 0 and not isinstance(error, Collateral))
        elif time.monotonic() - self.asked_at > REPEAT_S:
            leaving = Failure(f"left at once, on a second signal ({signal.Signals(number).name})")
            leaving.exit_code = 128 + number
            telling = threading.Thread(target=ending.settle, args=(leaving,), daemon=True)
            telling.start()
            telling.join(TELL_S)
            ending.abruptly(leaving)


requests = StopRequests()


def stopped(number: int | None, what: str, agreed: bool = False) -> Failure:
    """What a request to stop becomes: Stopped; or PeerLost, if the launcher is gone. `agreed`: by all ranks."""
    gone = number == LAUNCHER_GONE
    error: Failure = (
        PeerLost(f"the launcher is gone: stopped {what}") if gone else Stopped(f"stopped on request {what}")
    )
    error.on_every_rank = agreed
    if agreed:
        ending.code = error.exit_code  # what comes now, such as torchrun's SIGTERM, is no second request
    return error


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """Let the kernel send a signal when the parent dies, even of SIGKILL. Linux only; elsewhere StopRequests polls."""
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, int(number))


def dump_stacks() -> None:
    """Print the stack of every thread of this process on stderr."""
    say("stands here (the stack of every thread, innermost call first):", ending.rank)
    for stream in logs.places(sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            faulthandler.dump_traceback(stream, all_threads=True)
