"""--nproc: starts the processes of this machine, passes signals on to them, and ends when they have ended."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from config import Config
from ddp.ending import leave
from ddp.errors import PeerLost, Stopped, say
from ddp.launch import Placement, run_as_rank
from ddp.status import correct_status
from ddp.stop import REPEAT_S, SIGNALS

ASK_S = 5.0  # by then they have noticed, where they can; they are asked to stop
GRACE_S = 30.0  # how long the others may take when one process has ended: they tell each other, and may be saving


def spawn(main: Callable[[Config, Placement], None], config: Config, nproc: int) -> int:
    """Run `main` as `nproc` processes here, which meet in a file: no port can be taken. Returns the exit code."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # what its C++ side warns of, we say in one line
    with tempfile.TemporaryDirectory(prefix="ddp-") as folder:
        signals = _Forwarder()
        arguments = (main, config, nproc, f"file://{folder}/rendezvous", os.getpid())
        context: Any = mp.spawn(_spawned, arguments, nprocs=nproc, join=False)
        signals.start(context.processes)
        ended = _wait(context.processes)
        code = _verdict(context.processes, signals, ended)
        pids = [process.pid for process in context.processes]
        correct_status(Path(config.output_dir), pids, code, "a process was killed")
        return code


def _spawned(
    rank: int,
    main: Callable[[Config, Placement], None],
    config: Config,
    nproc: int,
    init_method: str,
    parent: int,
) -> None:
    mp.set_start_method(None, force=True)  # else DataLoader workers, too, would start anew and import torch
    os.setpgid(0, 0)  # a terminal's Ctrl-C reaches the parent only, which passes it on once
    leave(run_as_rank(main, config, Placement(rank, nproc, rank, init_method, "--nproc"), parent))


class _Forwarder:
    """Passes a request to stop on to the processes, once; a second one kills them."""

    def __init__(self) -> None:
        self.asked: int | None = None
        self.second: int | None = None
        self.processes: list[Any] = []
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._take)

    def start(self, processes: list[Any]) -> None:
        """These are the processes. Somebody may have asked already."""
        self.processes = processes
        if self.asked is not None:
            _send(processes, signal.SIGTERM)

    def _take(self, number: int, _: Any) -> None:
        if self.asked is None:
            self.asked, self.asked_at = number, time.monotonic()
            _send(self.processes, signal.SIGTERM)
        elif time.monotonic() - self.asked_at > REPEAT_S:
            self.second = number
            _send(self.processes, signal.SIGKILL)


def _wait(processes: list[Any]) -> list[Any]:
    """Until all have ended. After the first failure the others have GRACE_S, then they are killed: returns those."""
    failed, asked, killed = None, False, []
    while alive := [process for process in processes if process.is_alive()]:
        wait([process.sentinel for process in alive], timeout=0.5)
        if failed is None and any(process.exitcode for process in processes):
            failed = time.monotonic()
        if failed is None:
            continue
        if not asked and time.monotonic() > failed + ASK_S:  # whoever has not met the others yet waits for them in vain
            asked = True
            _send(alive, signal.SIGTERM)
        if time.monotonic() > failed + GRACE_S:
            killed = alive
            _send(alive, signal.SIGKILL)
    return killed


def _send(processes: list[Any], number: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            if process.is_alive():
                os.kill(process.pid, number)


def _verdict(processes: list[Any], signals: _Forwarder, ended: list[Any]) -> int:
    """One exit code for all: of those that could say why; else of the signal that ended one. `ended`: by us."""
    said = [process.exitcode for process in processes if process.exitcode > 0]
    killed = [process for process in processes if process.exitcode < 0 and process not in ended]
    if signals.second is not None:
        say(f"left at once, on a second signal ({signal.Signals(signals.second).name})")
        return 128 + signals.second
    if killed and signals.asked is not None and not said:
        say("stopped on request before training began: nothing to save")
        return 75
    for process in killed:
        name = signal.Signals(-process.exitcode).name
        hint = "; if memory ran out, dmesg says so" if name == "SIGKILL" else ""
        say(f"rank {processes.index(process)}: its process {process.pid} was killed by {name}{hint}")
    if killed and signals.asked is None and (said or ended) and set(said) <= {Stopped.exit_code}:
        return PeerLost.exit_code  # nobody asked for a stop: it was we who asked those that were left
    return said[0] if said else 128 - (killed or ended)[0].exitcode if killed or ended else 0
