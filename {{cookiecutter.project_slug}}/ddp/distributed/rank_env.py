"""Rank, local rank and world size of this process, from any launcher."""

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from ddp.core.errors import SetupError, UsageError
from ddp.core.run_config import RunConfig

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MPIRUN_VARIABLES = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
SRUN_VARIABLES = tuple(f"SLURM_{name}" for name in ("PROCID", "NTASKS", "LOCALID", "JOB_ID", "STEP_ID", "NODELIST"))


class Launcher(Enum):
    """What started this process."""

    NONE = "one process"
    ARGUMENTS = "arguments"
    TORCHRUN = "torchrun"
    SRUN = "srun"
    MPIRUN = "mpirun"
    NPROC = "--nproc"
    TEST = "test"


@dataclass(frozen=True)
class RankEnv:
    """One process among all."""

    rank: int = 0  # to world_size - 1
    world_size: int = 1
    local_rank: int | None = 0  # its number on this machine; None if no launcher sets it
    init_method: str | None = None  # where the processes connect, for dist.rendezvous; None for a single process
    launcher: Launcher = Launcher.NONE

    def __post_init__(self) -> None:
        if self.rank >= self.world_size:
            ranks = f"rank {self.rank} of {self.world_size} processes"
            raise SetupError(f"{self.launcher.value} sets {ranks}: ranks must be below the number of processes")

    @property
    def store_in(self) -> str:
        """Where the store is: in "memory" for a single process, in a "file", in "torchrun", or in "rank 0"."""
        if self.init_method is None:
            return "memory"
        if self.init_method.startswith("file://"):
            return "file"
        in_torchrun = self.init_method == "env://" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return "torchrun" if in_torchrun else "rank 0"

    @property
    def hosts_store(self) -> bool:
        """Whether the store runs in this process, for the others."""
        return self.rank == 0 and self.store_in == "rank 0"

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port of the store."""
        if self.init_method == "env://":
            return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        host, _, port = str(self.init_method).removeprefix("tcp://").rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def endpoint_text(self) -> str:
        """The endpoint as the user has given it."""
        variables = [f"{name}={os.environ.get(name)}" for name in ("MASTER_ADDR", "MASTER_PORT")]
        return " ".join(variables) if self.init_method == "env://" else str(self.init_method)


def find_rank_env(config: RunConfig, environ: Mapping[str, str]) -> RankEnv:
    """Read the ranks. Raises SetupError for incomplete variables, UsageError for arguments that contradict them."""
    if config.init_method is not None and config.rank is not None and config.world_size is not None:
        if "RANK" in environ:
            raise UsageError("--rank is given, and a launcher has set RANK: remove one of them")
        return RankEnv(config.rank, config.world_size, config.local_rank, config.init_method, Launcher.ARGUMENTS)
    if "RANK" not in environ and any(name.startswith("OMPI_COMM_WORLD_") for name in environ):
        env = _from_mpirun(environ)
    # In a batch script without srun, SLURM_PROCID is 0 and there is no step.
    elif "RANK" not in environ and ("SLURM_STEP_ID" in environ or environ.get("SLURM_PROCID", "0") != "0"):
        env = _from_srun(environ)
    elif any(name in environ for name in (*TORCHRUN_VARIABLES, "LOCAL_RANK")):
        env = _from_torchrun(config, environ)
    elif config.local_rank is not None:
        raise UsageError("--local-rank is given, but no launcher has set " + ", ".join(TORCHRUN_VARIABLES))
    else:
        return RankEnv()
    if config.local_rank not in (None, env.local_rank):
        theirs = f"the local rank {env.local_rank} of {env.launcher.value}"
        raise UsageError(f"--local-rank {config.local_rank} contradicts {theirs}: remove it")
    return env


def _from_torchrun(config: RunConfig, environ: Mapping[str, str]) -> RankEnv:
    """torchrun, and torch.distributed.launch, which passes --local-rank as well."""
    _require(environ, TORCHRUN_VARIABLES, Launcher.TORCHRUN, also=("LOCAL_RANK",))
    rank, world_size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
    local_rank = _integer(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else config.local_rank
    # With clocks that differ, torchrun's c10d rendezvous lets a node train alone.
    nodes, processes = environ.get("NNODES", ""), environ.get("NPROC_PER_NODE", "")
    if nodes.isdigit() and processes.isdigit() and int(nodes) * int(processes) != world_size:
        raise SetupError(
            f"WORLD_SIZE={world_size} is not NNODES={nodes} x NPROC_PER_NODE={processes}: some machines did not join; "
            "compare their clocks and addresses, or unset NNODES and NPROC_PER_NODE"
        )
    return RankEnv(rank, world_size, local_rank, "env://", Launcher.TORCHRUN)


def _from_mpirun(environ: Mapping[str, str]) -> RankEnv:
    _require(environ, MPIRUN_VARIABLES, Launcher.MPIRUN)
    rank, world_size, local_rank, local_size = (_integer(environ, name) for name in MPIRUN_VARIABLES)
    host = "127.0.0.1" if local_size == world_size else environ.get("MASTER_ADDR")
    if host is None:
        raise SetupError("mpirun on several machines: pass rank 0's address with -x MASTER_ADDR=...")
    job = environ.get("PMIX_NAMESPACE", environ.get("OMPI_MCA_ess_base_jobid", str(os.getppid())))
    return RankEnv(rank, world_size, local_rank, _tcp_address(host, job, environ), Launcher.MPIRUN)


def _from_srun(environ: Mapping[str, str]) -> RankEnv:
    _require(environ, SRUN_VARIABLES, Launcher.SRUN)
    # A step may be smaller than its job: the step's own numbers come first.
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    rank, world_size, local_rank = (_integer(environ, name) for name in ("SLURM_PROCID", size, "SLURM_LOCALID"))
    nodes = environ.get("SLURM_STEP_NODELIST", environ["SLURM_NODELIST"])
    host = environ.get("MASTER_ADDR") or (first_host(nodes) if re.search(r"[,\[]", nodes) else "127.0.0.1")
    address = _tcp_address(host, f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}", environ)
    return RankEnv(rank, world_size, local_rank, address, Launcher.SRUN)


def first_host(nodelist: str) -> str:
    """The first host of Slurm's short form: `gpu[03-07,9],login` gives `gpu03`."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodelist)
    if match is None:
        raise SetupError(f"Slurm's node list {nodelist!r} has no first host: set MASTER_ADDR")
    return "".join(part or "" for part in match.groups())


def _tcp_address(host: str, job: str, environ: Mapping[str, str]) -> str:
    """The port is MASTER_PORT, or follows from the job's id so that all ranks agree."""
    return f"tcp://{host}:{environ.get('MASTER_PORT', 20000 + zlib.crc32(job.encode()) % 10000)}"


def _require(environ: Mapping[str, str], names: tuple[str, ...], by: Launcher, also: tuple[str, ...] = ()) -> None:
    if missing := [name for name in names if not environ.get(name)]:
        found = ", ".join(f"{name}={environ[name]}" for name in (*names, *also) if name in environ)
        raise SetupError(
            f"the environment of {by.value} is incomplete: {found} set, {', '.join(missing)} missing; "
            f"start with {by.value}, or unset these variables"
        )


def _integer(environ: Mapping[str, str], name: str) -> int:
    if not (environ[name].isascii() and environ[name].isdigit()):
        raise SetupError(f"{name}={environ[name]!r} must be an integer >= 0: correct it, or unset it")
    return int(environ[name])
