"""Who am I? Turns whatever started this process into rank, local rank and world size; and runs main as that rank."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from tqdm import tqdm

from config import Config, parse
from ddp import logs
from ddp.ending import SILENT_S, ending, leave, understand
from ddp.errors import RANK_VARIABLES, EnvironmentFailure, Failure, UsageError
from ddp.launcher import CHECK
from ddp.stop import requests

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NODELIST")


@dataclass(frozen=True)
class Placement:
    """One process among all: what a launcher tells it.

    rank: 0 to world_size - 1. local_rank: among the processes of this machine; None where nobody said it.
    init_method: where the processes meet, as torch.distributed.rendezvous takes it; None for a process that is alone.
    source: the launcher, in words.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = 0
    init_method: str | None = None
    source: str = "one process"


def find_placement(config: Config, environ: Mapping[str, str]) -> Placement:
    """The placement that arguments or a launcher's variables describe.

    Raises EnvironmentFailure if a launcher is set up by half, UsageError if the arguments contradict it.
    """
    if config.init_method is not None and config.rank is not None and config.world_size is not None:
        if "RANK" in environ:
            raise UsageError("--rank is given, and a launcher has set RANK: leave out one of them")
        return Placement(config.rank, config.world_size, config.local_rank, config.init_method, "arguments")
    if "RANK" not in environ and any(name.startswith("OMPI_COMM_WORLD_") for name in environ):
        return _agreeing(config, _from_open_mpi(environ))
    # A batch script, without srun, has SLURM_PROCID=0 and no step.
    if "RANK" not in environ and ("SLURM_STEP_ID" in environ or environ.get("SLURM_PROCID", "0") != "0"):
        return _agreeing(config, _from_slurm(environ))
    if any(name in environ for name in (*TORCHRUN, "LOCAL_RANK")):
        return _from_torchrun(config, environ)
    if config.local_rank is not None:
        raise UsageError("--local-rank is given, but no launcher has set " + ", ".join(TORCHRUN))
    return Placement()


def _from_torchrun(config: Config, environ: Mapping[str, str]) -> Placement:
    """torchrun, and torch.distributed.launch, which passes --local-rank as well."""
    _require(environ, TORCHRUN, "torchrun", also=("LOCAL_RANK",))
    local_rank = _whole(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else config.local_rank
    rank, world_size = _whole(environ, "RANK"), _whole(environ, "WORLD_SIZE")
    _check_size(world_size, environ)
    return _agreeing(config, _checked(Placement(rank, world_size, local_rank, "env://", "torchrun")))


def _check_size(world_size: int, environ: Mapping[str, str]) -> None:
    """Refuse a rendezvous that has left machines out: with clocks apart, torchrun's c10d lets a node train alone."""
    nodes, processes = environ.get("NNODES", ""), environ.get("NPROC_PER_NODE", "")
    if nodes.isdigit() and processes.isdigit() and int(nodes) * int(processes) != world_size:
        raise EnvironmentFailure(
            f"WORLD_SIZE={world_size} is not NNODES={nodes} x NPROC_PER_NODE={processes}: not all machines have met; "
            "compare their clocks and addresses, or unset NNODES and NPROC_PER_NODE"
        )


def _agreeing(config: Config, placement: Placement) -> Placement:
    if config.local_rank not in (None, placement.local_rank):
        said = f"the local rank {placement.local_rank} of {placement.source}"
        raise UsageError(f"--local-rank {config.local_rank} contradicts {said}: leave it out")
    return placement


def _from_open_mpi(environ: Mapping[str, str]) -> Placement:
    _require(environ, OPEN_MPI, "mpirun")
    rank, world_size, local_rank, local_size = (_whole(environ, name) for name in OPEN_MPI)
    if local_size == world_size:
        host = "127.0.0.1"
    elif "MASTER_ADDR" in environ:
        host = environ["MASTER_ADDR"]
    else:
        raise EnvironmentFailure("mpirun on several machines: give rank 0's address with -x MASTER_ADDR=...")
    job = environ.get("PMIX_NAMESPACE", environ.get("OMPI_MCA_ess_base_jobid", str(os.getppid())))
    return _checked(Placement(rank, world_size, local_rank, _address(host, job, environ), "mpirun"))


def _from_slurm(environ: Mapping[str, str]) -> Placement:
    _require(environ, SLURM, "srun")
    # A step may be smaller than its job: the step's own numbers go first.
    world_size = _whole(environ, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS")
    nodes = environ.get("SLURM_STEP_NODELIST", environ["SLURM_NODELIST"])
    one_node = not re.search(r"[,\[]", nodes)
    host = environ.get("MASTER_ADDR", "127.0.0.1" if one_node else first_host(nodes))
    job = environ["SLURM_JOB_ID"] + "." + environ["SLURM_STEP_ID"]
    rank, local_rank = _whole(environ, "SLURM_PROCID"), _whole(environ, "SLURM_LOCALID")
    return _checked(Placement(rank, world_size, local_rank, _address(host, job, environ), "srun"))


def first_host(nodelist: str) -> str:
    """The first name in Slurm's short form: `gpu[03-07,9],login` gives `gpu03`."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodelist)
    if match is None:
        raise EnvironmentFailure(f"the node list {nodelist!r} of Slurm has no first host: set MASTER_ADDR")
    return "".join(part or "" for part in match.groups())


def _address(host: str, job: str, environ: Mapping[str, str]) -> str:
    """tcp:// address on `host`; the port is MASTER_PORT or follows from the job's id, so that all ranks agree."""
    port = environ.get("MASTER_PORT", str(20000 + zlib.crc32(job.encode()) % 10000))
    return f"tcp://{host}:{port}"


def _require(environ: Mapping[str, str], names: tuple[str, ...], launcher: str, also: tuple[str, ...] = ()) -> None:
    missing = [name for name in names if not environ.get(name)]
    if missing:
        there = [f"{name}={environ[name]}" for name in (*names, *also) if name in environ]
        raise EnvironmentFailure(
            f"half of what {launcher} sets is there ({', '.join(there)}), {', '.join(missing)} is missing: "
            f"start with {launcher}, or unset these variables"
        )


def _whole(environ: Mapping[str, str], name: str) -> int:
    if not (environ[name].isascii() and environ[name].isdigit()):
        raise EnvironmentFailure(f"{name}={environ[name]!r} is not a whole number: set it right, or unset it")
    return int(environ[name])


def _checked(placement: Placement) -> Placement:
    if placement.rank >= placement.world_size:
        raise EnvironmentFailure(
            f"{placement.source} says rank {placement.rank} of {placement.world_size} processes: "
            "ranks run from 0 to one less than the number of processes"
        )
    return placement


# ---- starting -------------------------------------------------------------------------------------------------------


def launch(main: Callable[[Config, Placement], None]) -> NoReturn:
    """Read the command line, find or make this process's place, run `main` there; end with the exit code."""
    if CHECK in os.environ:
        from ddp.preflight import check

        main = check
    conduct(lambda: run(main, parse()))


def conduct(command: Callable[[], int]) -> NoReturn:
    """End this process with the exit code that `command` returns; or with that of its Failure, said in one line."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  # closed by whoever started this
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    named = next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "0")
    ending.begin(int(named) if named.isdigit() else 0)
    try:
        code = command()
    except Failure as error:
        code = ending.conclude(error)
    leave(code)


def run(main: Callable[[Config, Placement], None], config: Config) -> int:
    """Run `main` as the rank that a launcher has made of this process, or as --nproc of them. Returns the exit code."""
    placement = find_placement(config, os.environ)
    if config.nproc is None:
        launched = placement.source in ("torchrun", "mpirun")
        return run_as_rank(main, config, placement, parent=os.getppid() if launched else None)
    if placement != Placement():
        raise UsageError(f"--nproc starts the processes itself, but {placement.source} has done so: leave out --nproc")
    from ddp.spawn import spawn

    return spawn(main, config, config.nproc)


def run_as_rank(
    main: Callable[[Config, Placement], None], config: Config, placement: Placement, parent: int | None = None
) -> int:
    """Run `main` as one rank. Returns the exit code. `parent` is the process id of a launcher that must stay alive."""
    ending.begin(placement.rank, silent_s=0 if placement.source in ("--nproc", "test") else SILENT_S)
    _set_up_logging(placement.rank)
    requests.listen(parent)
    ending.settle = lambda error: _settle_early(error, placement)
    try:
        main(config, placement)
    except BaseException as error:
        return ending.conclude(ending.settle(understand(error)))
    return ending.succeed()


def _settle_early(error: BaseException, placement: Placement) -> BaseException:
    from ddp.rendezvous import settle_early  # it uses this file

    return settle_early(error, placement)


def _set_up_logging(rank: int) -> None:
    """One logger that every rank may call: all from rank 0, warnings and worse, with their rank, from the others."""
    # tqdm's own is a semaphore of the system, of which a killed process leaves a trace.
    tqdm.set_lock(threading.RLock())
    handler = _AboveTheBar(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s" if rank == 0 else f"[rank {rank}] %(message)s"))
    logger = logging.getLogger("ddp")
    logger.handlers[:] = [handler]
    logger.propagate = False
    handler.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.setLevel(logging.INFO)


class _AboveTheBar(logging.StreamHandler):
    """Prints lines without tearing a progress bar that may be on the terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(logs.console(sys.stderr)):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # `| head` may have left: the run goes on
            super().handleError(record)
