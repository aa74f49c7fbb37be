"""launch(main, Config): read the command line, run main as one rank or as --nproc ranks, and exit with its code.

--nproc starts the ranks on this machine, forwards signals to them, and returns one exit code for all.
"""

import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from typing import Any, NoReturn

import torch.multiprocessing as mp

from ddp.core.errors import ExitCode, QuitImmediately, UsageError, UserError, print_line
from ddp.core.files import correct_status, temporary_directory
from ddp.core.host import allow_many_files
from ddp.core.process_exit import exit_code_of_run, exit_process, open_streams, process_exit, tell_launcher
from ddp.core.rank_logs import set_up_logging
from ddp.core.run_config import ELASTIC_VARIABLE, RunConfig
from ddp.core.signals import STOP_SIGNALS, SignalHandler, killed_by, send_signal, stop_signal
from ddp.distributed.rank_env import VARIABLES, Launcher, RankEnv, find_rank_env
from ddp.distributed.store import report_early_failure

# After a failure, for the other ranks to report it before they are asked to stop; then, before they are killed.
SPAWN_GRACE_S = 15.0
SIGNAL_INTERVAL_S = 1.0  # a signal that arrives just before a system call is handled after it
Main = Callable[[Any, RankEnv], None]  # with the Config of config.py


def launch(main: Main, config_class: type[RunConfig]) -> NoReturn:
    """Run `main(config, rank_env)` as every rank that this command line asks for. Exits with the exit code."""
    run_and_exit(lambda: run(main, config_class.parse()))


def run_and_exit(command: Callable[[], int]) -> NoReturn:
    """Exit with the exit code that `command` returns; a UserError is printed as one line."""
    open_streams()
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
        by_torchrun = env.launcher == Launcher.TORCHRUN and "TORCHELASTIC_RUN_ID" in os.environ  # or set by hand
        has_parent = by_torchrun or env.launcher == Launcher.MPIRUN
        return run_as_rank(main, config, env, parent=os.getppid() if has_parent else None)
    if env != RankEnv():
        raise UsageError(f"--nproc starts the processes itself, but {env.launcher.value} did already: remove --nproc")
    return spawn(main, config, config.nproc)


def run_as_rank(main: Main, config: RunConfig, env: RankEnv, parent: int | None = None) -> int:
    """Run `main` as one rank. Returns the exit code. `parent`: the process id of a launcher that must stay alive."""
    process_exit.rank = env.rank
    if env.launcher == Launcher.NPROC:  # no launcher ends the other ranks when one exits
        process_exit.report_grace_s = 0
    process_exit.resolve_root_cause = lambda error: report_early_failure(error, env)
    set_up_logging(env.rank)
    allow_many_files()
    stop_signal.listen(parent)
    tell_launcher("pid", str(os.getpid()))
    if full := int(os.environ.get(ELASTIC_VARIABLE, 0)):  # more passes keep the global batch, or come close from below
        config.passes_given = config.grad_accum_steps
        config.grad_accum_steps = config.grad_accum_steps * full // env.world_size
    return exit_code_of_run(lambda: main(config, env))


class SpawnSignals(SignalHandler):
    """Passes a request to stop on to the ranks that --nproc has started, once; a second one kills them."""

    processes: Sequence[Any] = ()

    def on_first(self) -> None:
        self.send(signal.SIGTERM)

    def on_second(self) -> None:
        self.send(signal.SIGKILL)

    def send(self, number: int) -> None:
        for process in self.processes:
            if process.exitcode is None:
                send_signal(process.pid, number)


def spawn(main: Main, config: RunConfig, nproc: int) -> int:
    """Run `main` in `nproc` processes. Returns the exit code."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # we report in one line what its C++ code warns of
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    signals = SpawnSignals()
    signals.install()
    with temporary_directory("ddp-") as folder:  # the ranks connect through a file: no port is needed
        arguments = (main, config, nproc, f"file://{folder}/rendezvous", os.getpid())
        resource_tracker.ensure_running()  # which unblocks signals
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # in each rank, until it listens to them
        try:
            context = mp.spawn(_run_spawned, arguments, nprocs=nproc, join=False)
            signals.processes = context.processes
            if signals.first is not None:
                signals.on_first()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        code = join(context, signals)
        for path in config.output_dirs():
            correct_status(path, context.pids(), code, "a process was killed")
        return code


def join(context: mp.ProcessContext, signals: SpawnSignals) -> int:
    """Wait for all. Returns one exit code: that of a rank that exited by itself; 8 if one was killed, unasked."""
    killed: Any = None
    try:
        while not context.join(SIGNAL_INTERVAL_S, SPAWN_GRACE_S):
            pass
    except mp.ProcessExitedException as error:  # of the first that failed
        killed = error if error.exit_code < 0 else None
    if signals.second is not None:
        quit = QuitImmediately(signals.second)
        print_line(str(quit))
        return quit.exit_code
    codes = [process.exitcode for process in context.processes if process.exitcode > 0]
    if killed:
        print_line(f"rank {killed.error_index}: its process {killed.error_pid} was {killed_by(killed.exit_code)}")
    if killed and set(codes) <= ({ExitCode.STOPPED} if signals.first is None else set()):  # torch has asked the others
        return ExitCode.PEER_LOST
    return next(iter(codes), 0)


def _run_spawned(rank: int, main: Main, config: RunConfig, nproc: int, init_method: str, parent: int) -> None:
    mp.set_start_method(None, force=True)  # otherwise DataLoader workers would be spawned as well, and import torch
    os.setpgid(0, 0)  # a terminal's Ctrl-C reaches the parent only, which forwards it once
    exit_process(run_as_rank(main, config, RankEnv(rank, nproc, rank, init_method, Launcher.NPROC), parent))
