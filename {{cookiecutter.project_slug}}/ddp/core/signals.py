"""Signals that ask a process to stop, and what they ask of a rank.

While a run trains, all ranks save after a step and exit with 75. Before that, or on a second signal, the process exits
at once. If the launcher is gone, all ranks save, but exit with 8: no user asked for that.
"""

import ctypes
import logging
import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from ddp.core.errors import PeerLost, QuitImmediately, Stopped, UserError
from ddp.core.process_exit import process_exit
from ddp.core.threads import call_with_timeout

log = logging.getLogger(__name__)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
REPEAT_INTERVAL_S = 1.0  # one request may arrive twice: from the terminal or Slurm, and from the launcher
POLL_INTERVAL_S = 0.5
REPARENT_GRACE_S = 0.2  # the kernel's SIGTERM arrives before getppid changes
TELL_PEERS_TIMEOUT_S = 0.5  # to tell the other ranks of an immediate exit
KILL_TIMEOUT_S = 5.0  # for the kernel to end killed processes
NOTICE_AFTER_S = 1.5  # a stop that takes longer is announced
LAUNCHER_GONE = 256  # a reason to stop that is not a signal; larger than all signals
# Loaded here, and not in a DataLoader worker: after a fork, a lock of the dynamic loader may never be released.
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class SignalHandler:
    """Signals that this process receives: the first asks for an orderly stop, a second one for an immediate exit."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.second: signal.Signals | None = None
        self.first_at = 0.0

    def install(self, handler: Any = None) -> None:
        """Receive STOP_SIGNALS from now on. nohup keeps SIGHUP ignored."""
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, handler or self.receive)

    def receive(self, number: int, frame: Any = None) -> None:
        """Count one request. A repetition within REPEAT_INTERVAL_S is the same request."""
        if self.first is None:
            self.first, self.first_at = signal.Signals(number), time.monotonic()
            self.on_first()
        elif time.monotonic() - self.first_at > REPEAT_INTERVAL_S:
            self.second = signal.Signals(number)
            self.on_second()

    def on_first(self) -> None: ...
    def on_second(self) -> None: ...


class StopSignal(SignalHandler):
    """What asks this rank to stop. There is one instance, below.

    A thread reads the signals from a pipe, to which Python writes them at once; handlers do not run while the main
    thread waits in a collective.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reason: int | None = None  # a signal that this or another rank has received, or LAUNCHER_GONE
        self.text = ""  # why, in words, if the program asked for the stop
        self.requested_at = 0.0
        self.defer_to_step_end = False  # True while a stop can wait for the end of a step
        self.announced = False  # True once the stop was announced; also if the run fails, because no step follows
        self.mask: set[Any] = set()  # of signals that were blocked before a fork
        self.parent: int | None = None  # the launcher's process id; 0 if it is in another PID namespace

    def listen(self, parent: int | None = None) -> None:
        """Receive signals from now on; with `parent`, the launcher's process id, also stop when it is gone."""
        self.parent = parent
        if parent is not None:
            die_with_parent()
            is_alive(parent)  # imports what a signal needs: a month later, the environment may have changed
        pipe, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        self.install(lambda *_: None)
        for number in STOP_SIGNALS:  # Python runs no handler while a system call waits
            signal.siginterrupt(number, False)
        # A signal to a forked process, such as one of a Pool, is no request to the rank, whose pipe it shares.
        os.register_at_fork(before=self._block, after_in_parent=self._unblock, after_in_child=self._forget)
        threading.Thread(target=self._watch, args=(pipe,), name="stop signal", daemon=True).start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # --nproc has blocked them

    def _block(self) -> None:
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def _unblock(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)

    def _forget(self) -> None:
        signal.set_wakeup_fd(-1)
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        self._unblock()

    def mark_requested(self, reason: int | None, text: str = "") -> None:
        """A stop was requested: by a signal to this rank, by the program, or on another rank."""
        if self.reason is None:
            self.requested_at, self.text, self.reason = time.monotonic(), text, reason

    def _watch(self, pipe: int) -> None:
        """In the thread, as all methods below."""
        while True:
            if select.select([pipe], [], [], POLL_INTERVAL_S)[0]:
                for number in os.read(pipe, 512):
                    if number in STOP_SIGNALS:
                        self.receive(number)
            if self.first is None and self.reason is None and self._launcher_gone():  # one request
                self.receive(signal.SIGTERM)  # as the kernel does on Linux
            # Not at once: a stop usually takes a moment, and launchers signal the survivors of a killed rank as well.
            late = self.reason is not None and time.monotonic() - self.requested_at > NOTICE_AFTER_S
            if late and self.defer_to_step_end and process_exit.exit_code is None and not self.announced:
                self.announced = True
                again = " (signal again to quit immediately)" if self.first is not None else ""
                log.info("stop requested: saving and exiting after this step%s", again)

    def _launcher_gone(self) -> bool:
        return self.parent is not None and os.getppid() != self.parent

    def receive(self, number: int, frame: Any = None) -> None:
        """Count one request. Launchers also signal a process that is already exiting: there, the count begins anew."""
        if process_exit.exit_code is not None and not process_exit.signalled.is_set():
            process_exit.signalled.set()
            self.first = None
        super().receive(number)

    def on_first(self) -> None:
        """Decide before the main thread can see the reason: the kernel also sends SIGTERM when the launcher dies."""
        if process_exit.exit_code is not None:
            return
        gone = self._launcher_gone()
        if self.first == signal.SIGTERM and self.parent:
            time.sleep(REPARENT_GRACE_S)
            gone = not is_alive(self.parent)  # a zombie until its last thread has exited: getppid changes only then
        self.mark_requested(LAUNCHER_GONE if gone else self.first)
        if not self.defer_to_step_end:
            error = stop_error(self.reason, "before training began: nothing to save")
            process_exit.hard_exit(process_exit.resolve_root_cause(error))

    def on_second(self) -> None:
        if process_exit.exit_code is not None:  # something keeps the process: a thread of the user's, for example
            os._exit(process_exit.exit_code)
        assert self.second is not None
        error = QuitImmediately(self.second)
        call_with_timeout(TELL_PEERS_TIMEOUT_S, lambda: process_exit.resolve_root_cause(error))
        process_exit.hard_exit(error)


stop_signal = StopSignal()


def stop_error(reason: int | None, detail: str, text: str = "") -> UserError:
    """The error for a request to stop: Stopped, with `text` for the reason in words; PeerLost without a launcher."""
    if reason == LAUNCHER_GONE:
        return PeerLost(f"the launcher is gone: stopped {detail}", on_every_rank=True)
    return Stopped(f"stopped on request{f' ({text})' if text else ''} {detail}")


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """Let the kernel signal this process when its parent dies, even by SIGKILL. Linux only; elsewhere, poll getppid."""
    if LIBC is not None:
        LIBC.prctl(1, int(number))  # PR_SET_PDEATHSIG


def adopt_orphans() -> None:
    """From now on, a process whose parent dies becomes a child of this one, if that parent descends from it. Linux."""
    if LIBC is not None:
        LIBC.prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def children(*others: Any) -> list[Any]:
    """The processes that this one has started, but `others`, from an earlier call."""
    return [each for each, parent in _parents().items() if parent == os.getpid() and each not in others]


def with_descendants(*processes: Any) -> list[Any]:
    """These, and what they have started."""
    found, parents = [*processes], _parents()
    for process in found:  # which grows meanwhile
        found += [each for each, parent in parents.items() if parent == process.pid]
    return found


def _parents() -> dict[Any, int]:
    """The parent of each process that this one may read: psutil's children() must read all."""
    import psutil  # slow, and not needed to check a command line

    found = {}
    for pid in psutil.pids():
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            found[process] = process.ppid()
    return found


def kill_children(*others: Any) -> None:
    """Kill these processes and what they have started, and wait until it is gone."""
    import psutil

    left = with_descendants(*children(*others))
    for process in left:
        send_signal(process.pid, signal.SIGKILL)
    psutil.wait_procs(left, KILL_TIMEOUT_S)


def is_alive(pid: int) -> bool:
    """Whether a process runs. A zombie, which has exited and was not waited for, does not."""
    import psutil  # slow, and not needed to check a command line

    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def killed_by(exit_code: int) -> str:
    """`killed by SIGKILL; if memory ran out, dmesg reports it`, for the negative exit code of a process."""
    hints: dict[int, str] = {
        signal.SIGKILL: "; if memory ran out, dmesg reports it",
        signal.SIGABRT: "; if ranks passed tensors of different sizes, TORCH_DISTRIBUTED_DEBUG=DETAIL names them",
    }
    name = next((each.name for each in signal.Signals if each == -exit_code), f"signal {-exit_code}")
    return f"killed by {name}{hints.get(-exit_code, '')}"
