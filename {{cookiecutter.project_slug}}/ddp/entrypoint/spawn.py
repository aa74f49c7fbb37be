"""--nproc: start the processes of this machine, forward signals to them, and return one exit code for all."""

import math
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

import torch.multiprocessing as mp

from ddp.core.errors import ExitCode, print_line
from ddp.core.process_exit import exit_process
from ddp.core.signals import SignalHandler, killed_by, send_signal
from ddp.core.status import correct_status, output_dirs
from ddp.distributed.rank_env import Launcher, RankEnv

STOP_AFTER_S = 5.0  # after a failure, processes that have not noticed it are asked to stop
KILL_AFTER_S = 30.0  # and killed: until then they tell each other, and may be saving
RunRank = Callable[[RankEnv, int], int]  # with the process id of the parent; returns the exit code


def spawn(run_rank: RunRank, nproc: int, output_dir: str) -> int:
    """Call `run_rank` in `nproc` processes, which connect through a file and need no port. Returns the exit code."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # we report in one line what its C++ code warns of
    with tempfile.TemporaryDirectory(prefix="ddp-") as folder:
        forwarder = _SignalForwarder()
        forwarder.install()
        arguments = (run_rank, nproc, f"file://{folder}/rendezvous", os.getpid())
        context: Any = mp.spawn(_run_spawned, arguments, nprocs=nproc, join=False)
        forwarder.processes = processes = context.processes
        if forwarder.first is not None:  # before they started
            forwarder.on_first()
        code = _exit_code(processes, forwarder, _wait_for_all(processes))
        for path in output_dirs(output_dir):
            correct_status(path, [process.pid for process in processes], code, "a process was killed")
        return code


def _run_spawned(rank: int, run_rank: RunRank, nproc: int, init_method: str, parent: int) -> None:
    mp.set_start_method(None, force=True)  # otherwise DataLoader workers would be spawned as well, and import torch
    os.setpgid(0, 0)  # a terminal's Ctrl-C reaches the parent only, which forwards it once
    exit_process(run_rank(RankEnv(rank, nproc, rank, init_method, Launcher.NPROC), parent))


class _SignalForwarder(SignalHandler):
    """Forwards a request to stop to the processes, once; a second one kills them."""

    processes: Sequence[Any] = ()

    def on_first(self) -> None:
        _send(self.processes, signal.SIGTERM)

    def on_second(self) -> None:
        _send(self.processes, signal.SIGKILL)


def _send(processes: Sequence[Any], number: int) -> None:
    for process in processes:
        if process.is_alive():
            send_signal(process.pid, number)


def _wait_for_all(processes: list[Any]) -> list[Any]:
    """Wait until all have exited. Returns those that had to be killed because another one failed."""
    failed_at, asked, killed = math.inf, list[Any](), list[Any]()
    while alive := [process for process in processes if process.is_alive()]:
        wait([process.sentinel for process in alive], timeout=0.5)
        if any(process.exitcode for process in processes):
            failed_at = min(failed_at, time.monotonic())
        if not asked and time.monotonic() > failed_at + STOP_AFTER_S:  # one that has not joined waits for the others
            asked = alive
            _send(alive, signal.SIGTERM)
        if time.monotonic() > failed_at + KILL_AFTER_S:
            killed = alive
            _send(alive, signal.SIGKILL)
    return killed + [process for process in asked if process.exitcode == -signal.SIGTERM]  # not listening to it yet


def _exit_code(processes: list[Any], signals: SignalHandler, killed_by_us: list[Any]) -> int:
    """One exit code for all: of a process that exited by itself, otherwise of the signal that killed one."""
    codes = [process.exitcode for process in processes if process.exitcode > 0]
    killed = [process for process in processes if process.exitcode < 0 and process not in killed_by_us]
    if signals.second is not None:
        print_line(f"quit immediately on a second signal ({signals.second.name})")
        return 128 + signals.second
    if killed and signals.first is not None and not codes:
        print_line("stopped on request before training began: nothing to save")
        return ExitCode.STOPPED
    for process in killed:
        print_line(f"rank {processes.index(process)}: its process {process.pid} was {killed_by(process.exitcode)}")
    if killed and signals.first is None and (codes or killed_by_us) and set(codes) <= {ExitCode.STOPPED}:
        return ExitCode.PEER_LOST  # no user asked for a stop: we asked the processes that were left
    if codes:
        return codes[0]
    return 128 - (killed or killed_by_us)[0].exitcode if killed or killed_by_us else ExitCode.SUCCESS
