"""Signals that ask a process to stop, and the processes that they are sent to."""

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
REPEAT_INTERVAL_S = 1.0  # one request may arrive twice: from the terminal or Slurm, and from the launcher
# Loaded here, and not in a DataLoader worker: after a fork, a lock of the dynamic loader may never be released.
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class SignalHandler:
    """Requests to stop: the first asks for an orderly stop, a second one for an immediate exit.

    Subclasses override the hooks `reason_for` (what the first signal means), `on_first` and `on_second`.
    """

    def __init__(self) -> None:
        self.reason: int | None = None  # the first signal, or another reason to stop; None until then
        self.second: signal.Signals | None = None
        self.requested_at = 0.0

    @property
    def first(self) -> signal.Signals | None:
        return None if self.reason is None else signal.Signals(self.reason)

    def install(self, in_thread: bool = False) -> None:
        """Receive STOP_SIGNALS from now on; with `in_thread`, a thread calls `receive`. nohup keeps SIGHUP ignored."""
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, (lambda *_: None) if in_thread else self.receive)
                signal.siginterrupt(number, not in_thread)  # Python runs no handler while a system call waits

    def receive(self, number: int, frame: Any = None) -> None:
        """Count one request. A repetition within REPEAT_INTERVAL_S is the same request."""
        if self.reason is None:
            self.mark_requested(self.reason_for(number))
            self.on_first()
        elif time.monotonic() - self.requested_at > REPEAT_INTERVAL_S:
            self.second = signal.Signals(number)
            self.on_second()

    def mark_requested(self, reason: int) -> None:
        """A stop was requested, here or on another rank: the next signal counts as the second one."""
        if self.reason is None:
            self.requested_at, self.reason = time.monotonic(), reason

    def reason_for(self, number: int) -> int:
        return number

    def on_first(self) -> None: ...
    def on_second(self) -> None: ...


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """Let the kernel signal this process when its parent dies, even by SIGKILL. Linux only; elsewhere, poll getppid."""
    if LIBC is not None:
        LIBC.prctl(1, int(number))  # PR_SET_PDEATHSIG


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def is_alive(pid: int) -> bool:
    """Whether a process runs. A zombie, which has exited and was not waited for, does not."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)  # as the first process of a container, this one inherits orphans
    import psutil  # slow, and not needed to check a command line

    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def killed_by(exit_code: int) -> str:
    """`killed by SIGKILL; if memory ran out, dmesg reports it`, for the negative exit code of a process."""
    name = signal.Signals(-exit_code).name
    return f"killed by {name}" + ("; if memory ran out, dmesg reports it" if name == "SIGKILL" else "")
