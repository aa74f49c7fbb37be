"""Run ranks as forked processes of the test: torch is already loaded, so a run starts in a fraction of a second."""

import atexit
import contextlib
import faulthandler
import gc
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
from unittest.mock import patch

import PIL.Image
import psutil  # noqa: F401
import tensorboard.plugins.hparams.metadata  # noqa: F401
import torch
import torch._dynamo
import torch.utils.serialization
import torch.utils.tensorboard

import data
from config import Config
from ddp.distributed.process_group import DistContext, init_distributed
from ddp.distributed.rank_env import Launcher, RankEnv
from ddp.entrypoint.run_main import run_as_rank
from ddp.training.run import Run

PIL.Image.init()  # as the imports above that nothing here uses: once, and not in each rank
torch.set_num_threads(1)  # a thread pool of the parent would not survive the fork


class Ranks:
    """`world_size` processes. Each runs `target(rank_env)`, which returns an exit code."""

    def __init__(self, world_size: int, target: Callable[[RankEnv], int]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        gc.freeze()  # a garbage collection in a rank writes to, and so copies, all memory that it shares with the test
        self.pids = [self._fork(rank, world_size, target) for rank in range(world_size)]
        self.codes: list[int] = []  # the exit codes of the ranks that `wait` has waited for

    def _fork(self, rank: int, world_size: int, target: Callable[[RankEnv], int]) -> int:
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        faulthandler.disable()  # pytest's would print the stacks of a rank that is aborted on purpose
        atexit._clear()  # the exit handlers of the test must not run in its ranks
        try:
            torch.set_num_threads(1)  # creates torch's thread pool now: later, several threads would do so at once
            os.setpgid(0, 0)  # so that DataLoader workers can be killed together with their rank
            log = os.open(self.folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.stdout = os.fdopen(1, "w", buffering=1)
            sys.stderr = os.fdopen(2, "w", buffering=1)
            code = target(RankEnv(rank, world_size, rank, f"file://{self.folder}/rendezvous", Launcher.NPROC))
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to every rank that `wait` has not waited for yet."""
        for pid in self.pids[len(self.codes) :]:
            os.kill(pid, number)

    def wait(self, timeout: float = 240) -> list[int]:
        """The exit codes by rank; -N for a rank that signal N killed.

        Raises TimeoutError, and kills all ranks, if one still runs after `timeout` seconds.
        """
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
            with contextlib.suppress(ProcessLookupError):  # DataLoader workers of a killed rank may exit late or never
                os.killpg(pid, signal.SIGKILL)
            self.codes.append(os.waitstatus_to_exitcode(status))
        return self.codes

    def until(self, condition: Callable[[], Any], timeout: float = 180) -> None:
        """Wait until `condition()` holds. Fails with what the ranks printed if it does not within `timeout` seconds."""
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, f"not within {timeout:g} s:\n{self.output()}"
            time.sleep(0.005)

    def output(self, rank: int | None = None) -> str:
        """What `rank` printed; without `rank`, what all ranks printed."""
        ranks = range(len(self.pids)) if rank is None else [rank]
        paths = [self.folder / f"{number}.log" for number in ranks]
        return "".join(path.read_text() for path in paths if path.exists())


def start(world_size: int, *options: Any, after_step: Callable[[Run], Any] = lambda run: None) -> Ranks:
    """Start the main function of main.py on `world_size` ranks. Each calls `after_step(run)` when it counts a step."""
    import main

    arguments = [str(option) for option in options]

    def target(rank_env: RankEnv) -> int:
        advance = Run.advance

        def advance_and_call(run: Run) -> None:
            advance(run)
            after_step(run)

        with patch.object(Run, "advance", advance_and_call):  # in this process only
            return run_as_rank(main.main, Config.parse(arguments), rank_env)

    return Ranks(world_size, target)


def train(world_size: int, *options: Any, code: int = 0, after_step: Callable[[Run], Any] = lambda run: None) -> str:
    """Run the main function of main.py to its end; return what it prints. Fails unless all ranks exit with `code`."""
    ranks = start(world_size, *options, after_step=after_step)
    codes = ranks.wait()
    assert codes == [code] * world_size, f"exit codes {codes}, expected {code}:\n{ranks.output()}"
    return ranks.output()


def make_synthetic_data_small(patch: Any) -> None:
    """So that an epoch takes a moment: by SYNTHETIC_SIZES in data.py, if that is a number of samples for each part."""
    few, sizes = {"train": 320, "val": 51, "test": 50}, getattr(data, "SYNTHETIC_SIZES", None)
    if isinstance(sizes, dict) and all(isinstance(size, int) for size in sizes.values()):
        patch.setattr(data, "SYNTHETIC_SIZES", {part: min(size, few.get(part, size)) for part, size in sizes.items()})


def fork(function: Callable[[Any, RankEnv], None], config: Config, world_size: int) -> int:
    """Run a main function on `world_size` ranks. Returns its exit code; 8 if a rank was killed, as --nproc does."""
    codes = Ranks(world_size, lambda rank_env: run_as_rank(function, config, rank_env)).wait()
    return next((code for code in codes if code > 0), 8 if any(codes) else 0)


def on_ranks(world_size: int, function: Callable[[DistContext], Any], *options: Any) -> list[Any]:
    """What `function(ctx)` returns on each rank of a process group."""

    def target(rank_env: RankEnv) -> int:
        with init_distributed(Config.parse([str(option) for option in options]), rank_env) as ctx:
            result = function(ctx)
            ctx.gather(None)  # no rank exits while another one still communicates
        (folder / f"{rank_env.rank}.result").write_bytes(pickle.dumps(result))
        return 0

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = Ranks(world_size, target)
        codes = ranks.wait()
        assert codes == [0] * world_size, f"exit codes {codes}:\n{ranks.output()}"
        return [pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in range(world_size)]
