"""Rank, local rank and world size of this process, from any launcher."""

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from ddp.core.errors import SetupError, UsageError
from ddp.core.run_config import RunConfig


class Launcher(Enum):
    """What started this process."""

    NONE = "one process"
    ARGUMENTS = "arguments"
    TORCHRUN = "torchrun"
    SRUN = "srun"
    MPIRUN = "mpirun"
    NPROC = "--nproc"


# What each launcher sets: rank, number of processes and local rank; then what else is needed. torch.distributed.launch
# passes the local rank as an argument.
VARIABLES = {
    Launcher.TORCHRUN: ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    Launcher.MPIRUN: tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    Launcher.SRUN: tuple(f"SLURM_{name}" for name in ("PROCID", "NTASKS", "LOCALID", "JOB_ID", "STEP_ID", "NODELIST")),
}


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
            raise SetupError(f"{self.launcher.value} sets {ranks}: ranks are 0 to {self.world_size - 1}")

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
        if self.init_method != "env://":
            return str(self.init_method)
        return f"MASTER_ADDR={os.environ.get('MASTER_ADDR')} MASTER_PORT={os.environ.get('MASTER_PORT')}"


def find_rank_env(config: RunConfig, environ: Mapping[str, str]) -> RankEnv:
    """Read the ranks. Raises SetupError for incomplete variables, UsageError for arguments that contradict them."""
    if config.init_method is not None and config.rank is not None and config.world_size is not None:
        if "RANK" in environ:
            raise UsageError("--rank is given, and a launcher has set RANK: remove one of them")
        return RankEnv(config.rank, config.world_size, config.local_rank, config.init_method, Launcher.ARGUMENTS)
    launcher = _find_launcher(environ)
    if launcher == Launcher.NONE:
        if config.local_rank is not None:
            raise UsageError("--local-rank is given, but no launcher has set RANK: remove it")
        return RankEnv()
    if "MASTER_PORT" in environ:
        _integer(environ, "MASTER_PORT")
    names = VARIABLES[launcher]
    if missing := [name for name in names if not environ.get(name) and name != "LOCAL_RANK"]:
        found = ", ".join(f"{name}={environ[name]}" for name in names if name in environ)
        what = f"the environment of {launcher.value} is incomplete: {found} set, {', '.join(missing)} missing"
        raise SetupError(f"{what}; start with {launcher.value}, or unset these variables")
    in_step = launcher == Launcher.SRUN and "SLURM_STEP_NUM_TASKS" in environ  # a step may be smaller than its job
    rank, world_size = (_integer(environ, name) for name in (names[0], "SLURM_STEP_NUM_TASKS" if in_step else names[1]))
    local_rank = _integer(environ, names[2]) if names[2] in environ else config.local_rank
    if config.local_rank not in (None, local_rank):
        raise UsageError(f"--local-rank contradicts the local rank {local_rank} of {launcher.value}: remove it")
    if launcher == Launcher.SRUN and world_size == 1:  # also a shell that srun has started: it may start several runs
        return RankEnv()
    return RankEnv(rank, world_size, local_rank, _init_method(launcher, environ, world_size), launcher)


def _find_launcher(environ: Mapping[str, str]) -> Launcher:
    if "RANK" not in environ:
        if any(name.startswith("OMPI_COMM_WORLD_") for name in environ):
            return Launcher.MPIRUN
        # In a batch script without srun, SLURM_PROCID is 0 and there is no step.
        if "SLURM_STEP_ID" in environ or environ.get("SLURM_PROCID", "0") != "0":
            return Launcher.SRUN
    return Launcher.TORCHRUN if any(name in environ for name in VARIABLES[Launcher.TORCHRUN]) else Launcher.NONE


def _init_method(launcher: Launcher, environ: Mapping[str, str], world_size: int) -> str:
    if launcher == Launcher.TORCHRUN:
        # With clocks that differ, torchrun's c10d rendezvous lets a node train alone.
        nodes, processes = environ.get("NNODES", ""), environ.get("NPROC_PER_NODE", "")
        if nodes.isdigit() and processes.isdigit() and int(nodes) * int(processes) != world_size:
            found = f"WORLD_SIZE={world_size} is not NNODES={nodes} x NPROC_PER_NODE={processes}"
            remedy = "compare their clocks and addresses, or unset NNODES and NPROC_PER_NODE"
            raise SetupError(f"{found}: some machines did not join; {remedy}")
        return "env://"
    host = environ.get("MASTER_ADDR")
    if launcher == Launcher.SRUN:
        nodes = environ.get("SLURM_STEP_NODELIST", environ["SLURM_NODELIST"])
        host = host or (first_host(nodes) if re.search(r"[,\[]", nodes) else "127.0.0.1")
        job = f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"
    else:
        host = "127.0.0.1" if _integer(environ, "OMPI_COMM_WORLD_LOCAL_SIZE") == world_size else host
        job = environ.get("PMIX_NAMESPACE", environ.get("OMPI_MCA_ess_base_jobid", str(os.getppid())))
    if host is None:
        raise SetupError("mpirun on several machines: pass rank 0's address with -x MASTER_ADDR=...")
    host = f"[{host}]" if ":" in host.strip("[]") and host[0] != "[" else host  # an IPv6 address
    # The port follows from the job's id, so that all ranks agree.
    return f"tcp://{host}:{environ.get('MASTER_PORT', 20000 + zlib.crc32(job.encode()) % 10000)}"


def first_host(nodelist: str) -> str:
    """The first host of Slurm's short form: `gpu[03-07,9],login` gives `gpu03`."""
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodelist).partition(",")[0]


def _integer(environ: Mapping[str, str], name: str) -> int:
    if not (environ[name].isascii() and environ[name].isdigit()):
        hint = " (a Kubernetes service named `master` sets it)" if environ[name].startswith("tcp://") else ""
        raise SetupError(f"{name}={environ[name]!r} must be an integer >= 0: correct it, or unset it{hint}")
    return int(environ[name])
