"""The process group: join it, talk in it, leave it. A single process is a group of one."""

from __future__ import annotations

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

from config import Config
from ddp import logs
from ddp.agreement import Agreement
from ddp.ending import ending
from ddp.errors import Collateral, EnvironmentFailure, Failure, UsageError
from ddp.launch import Placement
from ddp.launcher.network import interface_of, is_loopback, own_address
from ddp.peers import Peers
from ddp.rendezvous import meet, roll_call, store_at_rank_0
from ddp.stop import requests

Result = TypeVar("Result")
SLACK_S = 10.0  # what a hang may take longer than --timeout, until the process is ended from outside of it


@dataclass(frozen=True)
class Group:
    """This process among the others. Control traffic goes over gloo in host memory, so it never waits for a GPU."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    backend: str
    source: str
    peers: Peers  # whether the others still live
    agreement: Agreement = field(default_factory=Agreement)  # whether all shall stop

    def on_main(self, action: Callable[..., Result], *arguments: Any) -> Result:
        """Run `action` on rank 0; its result, or its exception, reaches every rank. Call on every rank."""
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = action(*arguments)
            except Exception as error:
                outcome[1] = error if _survives_pickling(error) else RuntimeError(f"{type(error).__name__}: {error}")
        dist.broadcast_object_list(outcome, src=0, device=torch.device("cpu"))
        if outcome[1] is not None:
            if isinstance(outcome[1], Failure):
                outcome[1].on_every_rank = True
            elif self.rank != 0 and not hasattr(outcome[1], "exit_code"):  # a bug: its traceback is rank 0's
                what = f"{type(outcome[1]).__name__}: {outcome[1]}"
                raise Collateral(f"rank {self.rank} ends too: rank 0 failed: {what}")
            raise outcome[1]
        return outcome[0]

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fill `tensor`, contiguous and in host memory, with rank 0's. Call on every rank."""
        dist.broadcast(tensor.flatten().view(torch.uint8), src=0)  # as bytes: gloo does not know every type
        return tensor

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add `tensor`, in host memory, over the ranks, in place. Call on every rank."""
        dist.all_reduce(tensor)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """The `value` of every rank, in the order of ranks, on every rank. Call on every rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def check_same(self, values: dict[str, Any]) -> None:
        """Raise EnvironmentFailure on every rank unless each of `values` is the same on all. Call on every rank."""
        everyone = self.gather(values)
        for rank, others in enumerate(everyone):
            for name, value in everyone[0].items():
                if others[name] != value:
                    what = f"{name} is {value} on rank 0 and {others[name]} on rank {rank}"
                    error = EnvironmentFailure(f"{what}: start all with the same options, on the same code and data")
                    error.on_every_rank = True
                    raise error


def check_backend(config: Config) -> None:
    """Refuse a backend or device that this torch or this machine does not have, before anyone is waited for."""
    if config.backend != "auto" and not dist.is_backend_available(config.backend):
        available = [name for name in ("gloo", "nccl", "mpi") if dist.is_backend_available(name)]
        raise UsageError(f"--backend {config.backend}: this torch was built with {', '.join(available)} only")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise EnvironmentFailure("--device cuda: torch finds no GPU here; use --device cpu, or check nvidia-smi")
    if config.backend == "nccl" and not torch.cuda.is_available():
        raise EnvironmentFailure("--backend nccl: torch finds no GPU here; use --backend gloo, or check nvidia-smi")


@contextmanager
def join(config: Config, placement: Placement) -> Iterator[Group]:
    """Meet the other processes; on the way out, whatever happens, leave the group. Call on every rank.

    Raises EnvironmentFailure if the others cannot be met, or if the GPUs do not suffice. An error of the block may
    become another one here: Collateral if another rank failed first, PeerLost if one is gone.
    """
    ending.settle = lambda error: error  # whoever cannot meet the others cannot tell them either
    store = meet(config, placement)
    peers = Peers(store, placement.rank, placement.world_size, config.timeout, store_at_rank_0(placement))
    ending.settle = peers.settle
    try:
        seats = roll_call(store, config, placement, peers)
        device, backend = _choose(config, seats, placement.rank)
        local = [seat for seat in seats if seat["host"] == seats[placement.rank]["host"]]
        _prepare(seats, local, seats[placement.rank], device)
        peers.watch()
        logs.keep(placement.rank, placement.world_size)  # what NCCL says as it connects is worth having
        hangs = EnvironmentFailure(f"rank {placement.rank} hangs while it connects to the others by {backend}")
        with requests.within(config.timeout + SLACK_S, hangs):
            _init(config, placement, store, device, backend)
            dist.all_reduce(torch.zeros(1))  # nobody goes on, and perhaps leaves, before all are connected
        local_rank = seats[placement.rank]["local_rank"]
        yield Group(
            placement.rank, placement.world_size, local_rank, len(local), device, backend, placement.source, peers
        )
        peers.close()
        _leave_group(EnvironmentFailure("the process group cannot be left"))
    except BaseException as error:
        settled = peers.settle(error)
        _leave_group(settled)
        peers.linger()
        if settled is error:
            raise
        raise settled from None


def _leave_group(error: BaseException) -> None:
    """Destroy the process group, if there is one. With a peer gone that may hang: then the process ends with `error."""
    if dist.is_initialized():
        with requests.within(SLACK_S, error):
            dist.destroy_process_group()


def _prepare(
    seats: list[dict[str, Any]], local: list[dict[str, Any]], own: dict[str, Any], device: torch.device
) -> None:
    """What has to be set in this process before the group exists."""
    _set_threads(len(local))
    interface = _interface(seats, own)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _interface(seats: list[dict[str, Any]], own: dict[str, Any]) -> str | None:
    """The interface that leads to the others. Gloo would take that of the host's name, which is often loopback."""
    elsewhere = [seat["address"] for seat in seats if seat["host"] != own["host"]]
    if not elsewhere:
        return "lo0" if sys.platform == "darwin" else "lo"
    address = own["address"]
    if address is not None and is_loopback(address):  # they meet here, at a name that is loopback to this machine
        address = next((own_address(other, 9) for other in elsewhere if other is not None), None)
    return interface_of(address) if address is not None else None


def _init(config: Config, placement: Placement, store: dist.Store, device: torch.device, backend: str) -> None:
    try:
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if backend == "nccl" else backend,
            store=dist.PrefixStore("group", store),
            rank=placement.rank,
            world_size=placement.world_size,
            timeout=timedelta(seconds=config.timeout),
            device_id=device if backend == "nccl" else None,
        )
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise EnvironmentFailure(
            f"rank {placement.rank} cannot connect to the others by {backend}: {reason}"
        ) from error


def broadcast_buffers(model: torch.nn.Module, group: Group) -> None:
    """Give every rank rank 0's buffers, such as BatchNorm's running statistics. Call on every rank."""
    for buffer in model.buffers():
        buffer.copy_(group.broadcast(buffer.detach().cpu().contiguous()))


def _choose(config: Config, seats: list[dict[str, Any]], rank: int) -> tuple[torch.device, str]:
    """This rank's device, by its local rank and never by its rank; and the backend that all ranks take."""
    if config.device == "cpu" or (config.device == "auto" and not any(seat["gpus"] for seat in seats)):
        if config.backend == "nccl":
            raise EnvironmentFailure("--backend nccl: no machine of this run has a GPU; use --backend gloo")
        return torch.device("cpu"), "gloo" if config.backend == "auto" else config.backend
    for seat in seats:
        mates = [other for other in seats if other["host"] == seat["host"]]
        if seat["gpus"] == 0 or (config.backend != "gloo" and not _own_gpus(mates)):
            there = f"{plural(len(mates), 'process', 'es')}, {plural(seat['gpus'], 'GPU')}"
            raise EnvironmentFailure(
                f"{seat['host'].split()[0]}: {there}: start one process for each GPU, with local ranks from 0; or use "
                "--device cpu; or share GPUs with --backend gloo"
            )
    nccl = config.backend == "nccl" or (config.backend == "auto" and dist.is_nccl_available())
    return torch.device("cuda", seats[rank]["local_rank"] % seats[rank]["gpus"]), "nccl" if nccl else "gloo"


def _own_gpus(mates: list[dict[str, Any]]) -> bool:
    """Whether each process of a machine has a GPU of its own: another index, or it sees its own only."""
    gpus = {(mate["visible"], mate["local_rank"] % mate["gpus"]) for mate in mates if mate["gpus"]}
    return len(gpus) == len(mates)


def plural(number: int, word: str, ending: str = "s") -> str:
    """`1 process`, `2 processes`."""
    return f"{number} {word}{'' if number == 1 else ending}"


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _set_threads(local_world_size: int) -> None:
    """Share the cores: by default every process would take all of them."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cores() // local_world_size))


def _survives_pickling(error: Exception) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
        return True
    except Exception:
        return False
