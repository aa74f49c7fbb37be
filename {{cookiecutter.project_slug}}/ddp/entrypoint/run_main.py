"""launch(main, Config): read the command line, run main as one rank or as --nproc ranks, and exit with its code.

--nproc starts the ranks on this machine, forwards signals to them, and returns one exit code for all.
"""

import logging
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import torch.multiprocessing as mp
from tqdm import tqdm

from ddp.core.errors import ExitCode, QuitImmediately, UsageError, UserError, print_line
from ddp.core.files import correct_status
from ddp.core.host import allow_many_files
from ddp.core.process_exit import exit_process, process_exit, tell_launcher, translate_exception
from ddp.core.rank_logs import console
from ddp.core.run_config import CHECK_VARIABLE, RunConfig, output_dirs
from ddp.core.signals import SignalHandler, killed_by, stop_signal
from ddp.distributed.rank_env import VARIABLES, Launcher, RankEnv, find_rank_env
from ddp.distributed.store import report_early_failure
from ddp.entrypoint import preflight
from ddp.launcher.worker_group import WorkerProcesses

Main = Callable[[Any, RankEnv], None]  # with the Config of config.py


def launch(main: Main, config_class: type[RunConfig]) -> NoReturn:
    """Run `main(config, rank_env)` as every rank that this command line asks for. Exits with the exit code."""
    run_and_exit(lambda: run(preflight.check if CHECK_VARIABLE in os.environ else main, config_class.parse()))


def run_and_exit(command: Callable[[], int]) -> NoReturn:
    """Exit with the exit code that `command` returns; a UserError is printed as one line."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  # closed by the parent process
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # the console may lack a character of a path
            stream.reconfigure(errors="backslashreplace")
    # To report an error before the rank is known. The first variable of each launcher holds it.
    rank = next((os.environ[first] for first, *_ in VARIABLES.values() if first in os.environ), "0")
    process_exit.rank = int(rank) if rank.isdigit() else 0
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
    return spawn(main, config, config.nproc)


def run_as_rank(main: Main, config: RunConfig, env: RankEnv, parent: int | None = None) -> int:
    """Run `main` as one rank. Returns the exit code. `parent`: the process id of a launcher that must stay alive."""
    process_exit.rank = env.rank
    if env.launcher in (Launcher.NPROC, Launcher.TEST):  # no launcher ends the other ranks when one exits
        process_exit.report_grace_s = 0
    process_exit.resolve_root_cause = lambda error: report_early_failure(error, env)
    _set_up_logging(env.rank)
    allow_many_files()
    stop_signal.listen(parent)
    tell_launcher("pid", str(os.getpid()))
    try:
        main(config, env)
    except BaseException as error:
        process_exit.error = error
        return process_exit.handle_exception(process_exit.resolve_root_cause(translate_exception(error)))
    process_exit.exiting_with = 0
    tell_launcher("done", "")
    return 0


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
        """One exit code for all: of a rank that exited by itself; 8 if one was killed, and no user asked for a stop."""
        if requests.second is not None:
            quit = QuitImmediately(requests.second)
            print_line(str(quit))
            return quit.exit_code
        codes = [each.exitcode for each in self.processes if each.exitcode > 0]
        ended = {rank: each for rank, each in enumerate(self.processes) if each.pid not in self.survivors}
        killed = {rank: each for rank, each in ended.items() if each.exitcode < 0}
        if killed and requests.first is not None and not codes:
            print_line("stopped on request before training began: nothing to save")
            return ExitCode.STOPPED
        for rank, each in killed.items():
            print_line(f"rank {rank}: its process {each.pid} was {killed_by(each.exitcode)}")
        if killed and requests.first is None and set(codes) <= {ExitCode.STOPPED}:  # we asked the others to stop
            return ExitCode.PEER_LOST
        return next(iter(codes), 0)


def spawn(main: Main, config: RunConfig, nproc: int) -> int:
    """Run `main` in `nproc` processes. Returns the exit code."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # we report in one line what its C++ code warns of
    requests = SignalHandler()
    requests.install()
    with tempfile.TemporaryDirectory(prefix="ddp-") as folder:  # the ranks connect through a file: no port is needed
        arguments = (main, config, nproc, f"file://{folder}/rendezvous", os.getpid())
        ranks = SpawnedRanks(mp.spawn(_run_spawned, arguments, nprocs=nproc, join=False).processes)
        ranks.watch(requests)
        code = ranks.exit_code(requests)
        for path in output_dirs(config.output_dir):
            correct_status(path, [process.pid for process in ranks.processes], code, "a process was killed")
        return code


def _run_spawned(rank: int, main: Main, config: RunConfig, nproc: int, init_method: str, parent: int) -> None:
    mp.set_start_method(None, force=True)  # otherwise DataLoader workers would be spawned as well, and import torch
    os.setpgid(0, 0)  # a terminal's Ctrl-C reaches the parent only, which forwards it once
    exit_process(run_as_rank(main, config, RankEnv(rank, nproc, rank, init_method, Launcher.NPROC), parent))


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
