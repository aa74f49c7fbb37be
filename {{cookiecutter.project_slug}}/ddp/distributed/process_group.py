"""The process group: create it, use it, destroy it. A single process is a group of one."""

import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ddp.core.errors import PeerFailed, SetupError, UsageError, UserError
from ddp.core.network import interface_of, is_loopback, own_address
from ddp.core.process_exit import process_exit, translate_exception
from ddp.core.rank_logs import start_rank_log
from ddp.core.run_config import RunConfig
from ddp.core.stop_signal import stop_signal
from ddp.distributed.failure_monitor import FailureMonitor
from ddp.distributed.rank_env import Launcher, RankEnv
from ddp.distributed.rendezvous import RankInfo, create_store, exchange_rank_info
from ddp.distributed.stop_sync import StopSync

Result = TypeVar("Result")
HANG_GRACE_S = 10.0  # a hang may take this much longer than --timeout before the process is ended from outside


@dataclass(frozen=True)
class DistContext:
    """This process among the others. Control traffic goes over gloo in host memory, so it never waits for a GPU."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    backend: str
    launcher: Launcher
    monitor: FailureMonitor
    stop_sync: StopSync = field(default_factory=StopSync)
    # Called with the root cause when the run fails, before the group is destroyed. Other ranks may be gone by then.
    on_failure: list[Callable[[BaseException], None]] = field(default_factory=list)

    def on_main(self, action: Callable[..., Result], *arguments: Any) -> Result:
        """Run `action` on rank 0; its result, or its exception, reaches every rank. Call on every rank."""
        result: list[Any] = [None, None]
        if self.rank == 0:
            try:
                result[0] = action(*arguments)
            except Exception as error:
                result[1] = error
                try:
                    pickle.loads(pickle.dumps(error))
                except Exception:
                    result[1] = RuntimeError(f"{type(error).__name__}: {error}")
        dist.broadcast_object_list(result, src=0, device=torch.device("cpu"))
        value, failure = result
        if failure is None:
            return value
        if isinstance(failure, UserError):
            failure.on_every_rank = True
        elif self.rank != 0 and not hasattr(failure, "exit_code"):  # rank 0 prints a traceback
            raise PeerFailed(f"rank {self.rank} is exiting because rank 0 failed: {type(failure).__name__}: {failure}")
        raise failure

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fill `tensor`, contiguous and in host memory, with rank 0's values. Call on every rank."""
        dist.broadcast(tensor.flatten().view(torch.uint8), src=0)  # as bytes: gloo does not support every dtype
        return tensor

    def broadcast_buffers(self, model: torch.nn.Module) -> None:
        """Copy rank 0's buffers, such as BatchNorm's running statistics, to every rank. Call on every rank."""
        for buffer in model.buffers():
            buffer.copy_(self.broadcast(buffer.detach().cpu().contiguous()))

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor`, in host memory, over the ranks, in place. Call on every rank."""
        dist.all_reduce(tensor)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """The `value` of every rank, ordered by rank, on every rank. Call on every rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def check_same(self, values: dict[str, Any]) -> None:
        """Raise SetupError on every rank unless each of `values` is the same on all. Call on every rank."""
        everyone = self.gather(values)
        for rank, theirs in enumerate(everyone):
            for name, value in everyone[0].items():
                if theirs[name] != value:
                    difference = f"{name} is {value} on rank 0 and {theirs[name]} on rank {rank}"
                    error = SetupError(f"{difference}: start all ranks with the same options, code and data")
                    error.on_every_rank = True
                    raise error


def check_backend(config: RunConfig) -> None:
    """Refuse a backend or device that this torch or this machine lacks, before any rank waits for another."""
    if config.backend != "auto" and not dist.is_backend_available(config.backend):
        available = [name for name in ("gloo", "nccl", "mpi") if dist.is_backend_available(name)]
        raise UsageError(f"--backend {config.backend}: this torch was built with {', '.join(available)} only")
    options = {"--device cuda": ("cpu", config.device == "cuda"), "--backend nccl": ("gloo", config.backend == "nccl")}
    for option, (remedy, given) in options.items():
        if given and not torch.cuda.is_available():
            remedy = f"{option.split()[0]} {remedy}"
            raise SetupError(f"{option}: torch finds no GPU here; use {remedy}, or check nvidia-smi")


@contextmanager
def init_distributed(config: RunConfig, env: RankEnv) -> Iterator[DistContext]:
    """Connect to the other processes; destroy the group when the block ends. Call on every rank.

    Raises SetupError if the others cannot be reached, or if there are too few GPUs. An error of the block is replaced
    by its root cause: PeerFailed if another rank failed first, PeerLost if one is gone.
    """
    process_exit.resolve_root_cause = lambda error: error  # without a store there is no way to tell the others
    store = create_store(env, config.timeout)
    monitor = FailureMonitor(store, env, config.timeout)
    process_exit.resolve_root_cause = monitor.resolve_root_cause
    on_failure: list[Callable[[BaseException], None]] = []
    try:
        infos = exchange_rank_info(store, env, monitor)
        monitor.start()
        process_exit.record_output_dir(config.output_dir)
        start_rank_log(env.rank, env.world_size, config.output_dir)  # before NCCL prints how it connects
        own = infos[env.rank]
        local_world_size = sum(info.machine == own.machine for info in infos)
        if "OMP_NUM_THREADS" not in os.environ:  # share the cores: by default every process would use all of them
            torch.set_num_threads(max(1, available_cores() // local_world_size))
        if (interface := _choose_interface(infos, own)) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        device, backend = _choose_device(config, infos, env.rank)
        _create_group(env, store, device, backend, config.timeout)
        ranks = (env.rank, env.world_size, own.local_rank or 0, local_world_size)
        yield DistContext(*ranks, device, backend, env.launcher, monitor, on_failure=on_failure)
        monitor.close()
        _destroy_group(SetupError("the process group cannot be destroyed"))
    except BaseException as error:
        cause = monitor.resolve_root_cause(translate_exception(error))
        for callback in on_failure:
            callback(cause)
        _destroy_group(cause)
        monitor.wait_for_acks()
        if cause is error:
            raise
        raise cause from None


def _create_group(env: RankEnv, store: dist.Store, device: torch.device, backend: str, timeout: float) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    hangs = SetupError(f"rank {env.rank} hangs while it connects to the others over {backend}")
    with stop_signal.watchdog(timeout + HANG_GRACE_S, hangs):
        try:
            dist.init_process_group(
                backend="cpu:gloo,cuda:nccl" if backend == "nccl" else backend,
                store=dist.PrefixStore("group", store),
                rank=env.rank,
                world_size=env.world_size,
                timeout=timedelta(seconds=timeout),
                device_id=device if backend == "nccl" else None,
            )
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise SetupError(f"rank {env.rank} cannot connect to the others over {backend}: {reason}") from error
        dist.all_reduce(torch.zeros(1))  # no rank continues, and perhaps exits, before all are connected


def _destroy_group(error: BaseException) -> None:
    """Destroy the process group, if there is one. If that hangs, as it may without a peer, exit with `error`."""
    if dist.is_initialized():
        with stop_signal.watchdog(HANG_GRACE_S, error):
            dist.destroy_process_group()


def _choose_device(config: RunConfig, infos: list[RankInfo], rank: int) -> tuple[torch.device, str]:
    """This rank's device, by its local rank and never by its rank; and the backend that all ranks use."""
    if config.device == "cpu" or (config.device == "auto" and not any(info.gpus for info in infos)):
        if config.backend == "nccl":
            raise SetupError("--backend nccl: no machine of this run has a GPU; use --backend gloo")
        return torch.device("cpu"), "gloo" if config.backend == "auto" else config.backend
    for info in infos:
        local = [other for other in infos if other.machine == info.machine]
        # A GPU of its own for each process: another index, or another one that it sees.
        gpus = {(each.visible_gpus, (each.local_rank or 0) % each.gpus) for each in local if each.gpus}
        if info.gpus == 0 or (config.backend != "gloo" and len(gpus) < len(local)):
            found = f"{plural(len(local), 'process', 'es')}, {plural(info.gpus, 'GPU')}"
            raise SetupError(
                f"{info.host}: {found}: start one process per GPU, with local ranks from 0; or use --device cpu; or "
                "share GPUs with --backend gloo"
            )
    nccl = config.backend == "nccl" or (config.backend == "auto" and dist.is_nccl_available())
    return torch.device("cuda", (infos[rank].local_rank or 0) % infos[rank].gpus), "nccl" if nccl else "gloo"


def _choose_interface(infos: list[RankInfo], own: RankInfo) -> str | None:
    """The interface on the route to the others. Gloo would use that of the host's name, which is often loopback."""
    elsewhere = [info.address for info in infos if info.machine != own.machine]
    if not elsewhere:
        return "lo0" if sys.platform == "darwin" else "lo"
    address = own.address
    if address is not None and is_loopback(address):  # rank 0's machine, where the name of the endpoint is loopback
        address = next((own_address(other, 9) for other in elsewhere if other is not None), None)
    return interface_of(address) if address is not None else None


def plural(number: int, word: str, ending: str = "s") -> str:
    """`1 process`, `2 processes`."""
    return f"{number} {word}{'' if number == 1 else ending}"


def available_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
