"""Runs ranks as forked processes of the test: torch is loaded already, so a run starts in a fraction of a second."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # every DDP imports it: here it is imported once, and not in each rank
import torch.utils.tensorboard  # likewise

from config import parse
from ddp.launch import Placement, run_as_rank

torch.set_num_threads(1)  # a thread pool of the parent would not survive the fork


class Ranks:
    """`world_size` processes, each running `target(placement)`, which returns an exit code."""

    def __init__(self, world_size: int, target: Callable[[Placement], int]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.pids = [self._fork(rank, world_size, target) for rank in range(world_size)]
        self.codes: list[int] = []

    def _fork(self, rank: int, world_size: int, target: Callable[[Placement], int]) -> int:
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        atexit._clear()  # what the test wants done at its end is not for its ranks to do
        try:
            torch.set_num_threads(1)  # torch makes its pool anew: here, before several of its threads would at once
            os.setpgid(0, 0)  # so that its DataLoader workers can be cleaned up with it
            log = os.open(self.folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.stdout = os.fdopen(1, "w", buffering=1)
            sys.stderr = os.fdopen(2, "w", buffering=1)
            code = target(Placement(rank, world_size, rank, f"file://{self.folder}/rendezvous", "test"))
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to every rank that still runs."""
        for pid in self.pids[len(self.codes) :]:
            os.kill(pid, number)

    def _end_workers(self, pid: int) -> None:
        """End the DataLoader workers of a rank that is gone; they would notice by themselves, but later or never."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)

    def wait(self, timeout: float = 120) -> list[int]:
        """The exit codes by rank; minus the signal for a rank that was killed. Raises TimeoutError, and kills them."""
        end = time.monotonic() + timeout
        for pid in self.pids[len(self.codes) :]:
            while True:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    break
                if time.monotonic() > end:
                    self.kill()
                    raise TimeoutError(f"ranks still run after {timeout} s:\n{self.output()}")
                time.sleep(0.005)
            self._end_workers(pid)
            self.codes.append(os.waitstatus_to_exitcode(status))
        return self.codes

    def output(self, rank: int | None = None) -> str:
        """What a rank, or all of them, printed."""
        ranks = range(len(self.pids)) if rank is None else [rank]
        paths = [self.folder / f"{number}.log" for number in ranks]
        return "".join(path.read_text() for path in paths if path.exists())


def start(world_size: int, *options: Any) -> Ranks:
    """Start main.py's main on `world_size` ranks with these options."""
    import main

    arguments = [str(option) for option in options]
    return Ranks(world_size, lambda placement: run_as_rank(main.main, parse(arguments), placement))


def train(world_size: int, *options: Any, code: int = 0) -> str:
    """Run main.py's main to its end; fails unless every rank ends with `code`. Returns what was printed."""
    ranks = start(world_size, *options)
    codes = ranks.wait()
    assert codes == [code] * world_size, f"exit codes {codes}, expected {code}:\n{ranks.output()}"
    return ranks.output()


def on_ranks(world_size: int, function: Callable[[Any], Any], *options: Any) -> list[Any]:
    """What `function(group)` returns on each rank of a process group."""
    from ddp.group import join

    def target(placement: Placement) -> int:
        with join(parse([str(option) for option in options]), placement) as group:
            result = function(group)
            group.gather(None)  # nobody leaves while another still talks
        (folder / f"{placement.rank}.result").write_bytes(pickle.dumps(result))
        return 0

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = Ranks(world_size, target)
        codes = ranks.wait()
        assert codes == [0] * world_size, f"exit codes {codes}:\n{ranks.output()}"
        return [pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in range(world_size)]
