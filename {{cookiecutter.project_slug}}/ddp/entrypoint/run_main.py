"""launch(main, Config): read the command line, run main as one rank or as --nproc ranks, and exit with its code.

--nproc starts the ranks on this machine, forwards signals to them, and returns one exit code for all.
"""

import logging
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch.multiprocessing as mp
from tqdm import tqdm

from ddp.core.errors import ExitCode, QuitImmediately, UsageError, UserError, print_line
from ddp.core.files import correct_status
from ddp.core.process_exit import REPORT_GRACE_S, exit_process, process_exit, translate_exception
from ddp.core.rank_logs import console
from ddp.core.run_config import CHECK_VARIABLE, RunConfig, output_dirs
from ddp.core.signals import SignalHandler, killed_by, stop_signal
from ddp.distributed.rank_env import Launcher, RankEnv, find_rank_env
from ddp.distributed.store import report_early_failure
from ddp.entrypoint import preflight
from ddp.launcher.worker_group import WorkerProcesses

Main = Callable[[Any, RankEnv], None]  # with the Config of config.py
RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")  # to report errors before the rank is known


def launch(main: Main, config_class: type[RunConfig]) -> NoReturn:
    """Run `main(config, rank_env)` as every rank that this command line asks for. Exits with the exit code."""
    run_and_exit(lambda: run(preflight.check if CHECK_VARIABLE in os.environ else main, config_class.parse()))


def run_and_exit(command: Callable[[], int]) -> NoReturn:
    """Exit with the exit code that `command` returns; a UserError is printed as one line."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  # closed by the parent process
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    rank = next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "0")
    process_exit.start(int(rank) if rank.isdigit() else 0)
    try:
        code = command()
    except UserError as error:
        code = process_exit.handle_exception(error)
    exit_process(code)


def run(main: Main, config: RunConfig) -> int:
    """Run `main` as the rank that a launcher has assigned, or as --nproc ranks. Returns the exit code."""
    env = find_rank_env(config, os.environ)
    if config.nproc is None:
        has_parent = env.launcher in (Launcher.TORCHRUN, Launcher.MPIRUN)
        return run_as_rank(main, config, env, parent=os.getppid() if has_parent else None)
    if env != RankEnv():
        raise UsageError(f"--nproc starts the processes itself, but {env.launcher.value} did already: remove --nproc")
    return spawn(partial(run_as_rank, main, config), config.nproc, config.output_dir)


def run_as_rank(main: Main, config: RunConfig, env: RankEnv, parent: int | None = None) -> int:
    """Run `main` as one rank. Returns the exit code. `parent`: the process id of a launcher that must stay alive."""
    alone = env.launcher in (Launcher.NPROC, Launcher.TEST)  # no launcher ends the other ranks when one exits
    process_exit.start(env.rank, report_grace_s=0 if alone else REPORT_GRACE_S)
    process_exit.resolve_root_cause = lambda error: report_early_failure(error, env)
    _set_up_logging(env.rank)
    stop_signal.listen(parent)
    try:
        main(config, env)
    except BaseException as error:
        return process_exit.handle_exception(process_exit.resolve_root_cause(translate_exception(error)))
    return process_exit.succeed()


class SpawnedRanks(WorkerProcesses):
    """The ranks that --nproc starts."""

    stop_after_s = 5.0  # one that has not joined waits for the rank that failed
    kill_after_s = 30.0  # until then they tell each other, and may be saving

    def __init__(self, processes: list[Any]) -> None:
        super().__init__()
        self.processes = processes

    def running(self) -> list[int]:
        return [process.pid for process in self.processes if process.is_alive()]

    def has_failed(self) -> bool:
        return any(process.exitcode for process in self.processes)

    def exit_code(self, requests: SignalHandler) -> int:
        """One exit code for all: of a rank that exited by itself, otherwise of the signal that killed one."""
        codes = [process.exitcode for process in self.processes if process.exitcode > 0]
        killed = {rank: process for rank, process in enumerate(self.processes) if process.exitcode < 0}
        by_others = {rank: process for rank, process in killed.items() if process.pid not in self.survivors}
        if requests.second is not None:
            quit = QuitImmediately(requests.second)
            print_line(str(quit))
            return quit.exit_code
        if by_others and requests.first is not None and not codes:
            print_line("stopped on request before training began: nothing to save")
            return ExitCode.STOPPED
        for rank, process in by_others.items():
            print_line(f"rank {rank}: its process {process.pid} was {killed_by(process.exitcode)}")
        if by_others and requests.first is None and (codes or self.survivors) and set(codes) <= {ExitCode.STOPPED}:
            return ExitCode.PEER_LOST  # no user asked for a stop: we asked the processes that were left
        return next(iter([*codes, *(128 - process.exitcode for process in (by_others or killed).values())]), 0)


def spawn(run_rank: Callable[[RankEnv, int], int], nproc: int, output_dir: str) -> int:
    """Call `run_rank` in `nproc` processes, with the process id of this one. Returns the exit code."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # we report in one line what its C++ code warns of
    requests = SignalHandler()
    requests.install()
    with tempfile.TemporaryDirectory(prefix="ddp-") as folder:  # the ranks connect through a file: no port is needed
        arguments = (run_rank, nproc, f"file://{folder}/rendezvous", os.getpid())
        ranks = SpawnedRanks(mp.spawn(_run_spawned, arguments, nprocs=nproc, join=False).processes)
        ranks.watch(requests)
        code = ranks.exit_code(requests)
        for path in output_dirs(output_dir):
            correct_status(path, [process.pid for process in ranks.processes], code, "a process was killed")
        return code


def _run_spawned(rank: int, run_rank: Callable[[RankEnv, int], int], nproc: int, init_method: str, parent: int) -> None:
    mp.set_start_method(None, force=True)  # otherwise DataLoader workers would be spawned as well, and import torch
    os.setpgid(0, 0)  # a terminal's Ctrl-C reaches the parent only, which forwards it once
    exit_process(run_rank(RankEnv(rank, nproc, rank, init_method, Launcher.NPROC), parent))


def _set_up_logging(rank: int) -> None:
    """One logger that every rank may call: rank 0 prints everything, the others warnings, with their rank."""
    tqdm.set_lock(threading.RLock())  # tqdm's default is a system-wide semaphore, which outlives a killed process
    handler = _ConsoleHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s" if rank == 0 else f"[rank {rank}] %(message)s"))
    handler.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger = logging.getLogger("ddp")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO)


class _ConsoleHandler(logging.StreamHandler):
    """Prints lines above a progress bar, if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(console(sys.stderr)):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # the reader may be gone, as in `| head`: the run continues
            super().handleError(record)
