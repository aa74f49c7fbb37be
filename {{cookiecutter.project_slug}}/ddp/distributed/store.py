"""How the processes find each other: the store, and what each rank tells the others about its host and its GPUs."""

import errno
import json
import logging
import os
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddp.core.errors import PeerLost, SetupError, numbered
from ddp.core.host import is_own_address, own_address, port_problem
from ddp.core.run_config import ROUND_VARIABLE
from ddp.core.threads import call_with_timeout
from ddp.distributed.failure_monitor import FailureMonitor
from ddp.distributed.rank_env import RankEnv

log = logging.getLogger(__name__)
CONNECT_TIMEOUT_S = 5.0
NOTICE_AFTER_S = 5.0  # a process that waits longer prints which ranks are missing
EARLY_TIMEOUT_S = 3.0  # how long a rank that fails before it joins tries to tell the others


def create_store(env: RankEnv, timeout: float) -> dist.Store:
    """The store of this run; `timeout` in seconds. Raises SetupError if it cannot be reached."""
    if env.init_method is None:
        return dist.HashStore()
    limit = timedelta(seconds=timeout)
    try:
        if env.store_in == "file":  # not as a URL, which would end at a # or a ?
            store: dist.Store = dist.FileStore(env.init_method.removeprefix("file://"), env.world_size)
        else:
            found = socket.getaddrinfo(*env.endpoint, type=socket.SOCK_STREAM)
            _check_endpoint(env, found) if env.hosts_store else _wait_for_rank_0(env, timeout)
            if turn := os.environ.get(ROUND_VARIABLE):
                store = dist.PrefixStore(turn, dist.TCPStore(*env.endpoint, timeout=limit, wait_for_workers=False))
            else:
                store = next(dist.rendezvous(env.init_method, env.rank, env.world_size, timeout=limit))[0]
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        if isinstance(error, socket.gaierror):
            reason = f"this machine cannot resolve the name {env.endpoint[0]} ({error.strerror})"
        raise SetupError(f"rank {env.rank} cannot connect to the others at {env.endpoint_text}: {reason}") from error
    store.set_timeout(limit)
    return store


def _check_endpoint(env: RankEnv, found: list[Any]) -> None:
    """On rank 0: raise OSError if it cannot listen there."""
    if not any(is_own_address(str(entry[4][0])) for entry in found):
        raise OSError("this is not an address of this machine, where rank 0 runs: use one that is")
    if problem := port_problem(env.endpoint[1]):
        raise OSError(f"the port {problem}")


def _wait_for_rank_0(env: RankEnv, timeout: float) -> None:
    """Wait until rank 0 listens, or raise OSError. TCPStore itself would print pages while it waits."""
    where, reason = env.endpoint_text, OSError()
    for _ in _attempts(timeout, lambda: log.warning("waiting for rank 0 at %s (up to %g s)", where, timeout)):
        try:
            return socket.create_connection(env.endpoint, timeout=min(timeout, CONNECT_TIMEOUT_S)).close()
        except OSError as error:
            reason = error
        if env.store_in == "torchrun" and isinstance(reason, ConnectionRefusedError):
            raise PeerLost(f"torchrun is no longer running at {where}")
        if reason.errno in (errno.ENETUNREACH, errno.EADDRNOTAVAIL):
            break
    raise OSError(f"{reason.strerror or reason}; start rank 0, or correct the address")


def _attempts(timeout: float, announce: Callable[[], None]) -> Iterator[None]:
    """Yields again and again for `timeout` seconds. Calls `announce` once, when that takes long."""
    start, announced, waited = time.monotonic(), False, 0.0
    while waited <= timeout:
        yield
        time.sleep(0.01 if waited < 1 else 0.1)
        waited = time.monotonic() - start
        if waited > NOTICE_AFTER_S and not announced:
            announced = True
            announce()


def report_early_failure(error: BaseException, env: RankEnv) -> BaseException:
    """Tell the ranks that wait for this one that it failed before it joined them. Returns the root cause."""
    if env.init_method is None or env.hosts_store:
        return error
    store = call_with_timeout(2 * EARLY_TIMEOUT_S, lambda: create_store(env, EARLY_TIMEOUT_S))
    # Rank 0 may have failed as well, before it listens.
    return error if store is None else FailureMonitor(store, env, EARLY_TIMEOUT_S).resolve_root_cause(error)


@dataclass
class RankInfo:
    """What a rank tells the others."""

    host: str
    machine: str  # unique per machine
    local_rank: int  # -1 until it is known
    gpus: list[str]  # what identifies each GPU that the rank sees, by index, among those of its machine
    address: str | None  # the rank's own on the route to rank 0
    process: str = field(default_factory=lambda: os.urandom(8).hex())  # unique per process


def identify_gpus() -> list[str]:
    """What identifies each GPU that this process sees: its UUID, or its index if GPUs have none.

    Indices are not enough: under srun, each process may see a different GPU as "0". This initializes CUDA, but it
    creates no context, so it uses no memory of a GPU.
    """
    if torch.cuda.device_count() == 0:
        return []
    uuids: list[str] = []
    with suppress(Exception):  # a GPU that does not work fails again where it is used
        torch.cuda.init()  # before, device_count() does not consider MIG
        uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    count = torch.cuda.device_count()
    # Some AMD drivers report none (two letters, then zeros), or the same one for all partitions of a GPU.
    if len(set(uuids)) < count or any(uuid.endswith("0" * 12) for uuid in uuids):
        visible = sorted(f"{name}={value}" for name, value in os.environ.items() if "VISIBLE_DEVICES" in name)
        return [f"{index} of {' '.join(visible)}" for index in range(count)]
    return uuids


def exchange_rank_info(store: dist.Store, env: RankEnv, monitor: FailureMonitor, use_gpus: bool) -> list[RankInfo]:
    """The RankInfo of every process, by rank; without `use_gpus`, it lists none. Call on every rank.

    Raises SetupError if some do not join in time, or if two processes have the same rank.
    """
    host = machine = socket.gethostname()
    with suppress(OSError):  # only on Linux; containers and network namespaces count as machines of their own
        machine += f" {os.readlink('/proc/self/ns/net')} {Path('/proc/sys/kernel/random/boot_id').read_text()}"
    address = None if env.store_in in ("memory", "file") else own_address(*env.endpoint)
    local_rank = -1 if env.local_rank is None else env.local_rank
    own = json.dumps(asdict(RankInfo(host, machine, local_rank, identify_gpus() if use_gpus else [], address)))
    first = store.compare_set(f"rank_info/{env.rank}", "", own).decode()
    if first != own:
        theirs = json.loads(first)["host"]
        joined = f"rank {env.rank} has already joined at {env.endpoint_text} from host {theirs}"
        remedy = "use each rank once, and a different port or file for each run"
        error = SetupError(f"{joined}, and this is host {host}: {remedy} (delete a file that an earlier run has left)")
        if store.check(["rank_infos"]):  # do not disturb a run that trains; one that is still starting fails
            monitor.cause = error
        raise error
    if env.rank == 0:
        keys = [f"rank_info/{rank}" for rank in range(env.world_size)]
        _wait_for_keys(store, keys, env, monitor)
        infos = [json.loads(store.get(key)) for key in keys]
        shared: Any = zlib.compress(json.dumps(infos).encode())  # each rank reads those of all
        store.set("rank_infos", shared)
    _wait_for_keys(store, ["rank_infos"], env, monitor)
    everyone = [RankInfo(**info) for info in json.loads(zlib.decompress(store.get("rank_infos")))]
    if any(info.local_rank < 0 for info in everyone):  # no launcher sets local ranks: number those of each machine
        for rank, info in enumerate(everyone):
            info.local_rank = sum(other.machine == info.machine for other in everyone[:rank])
    return everyone


def _wait_for_keys(store: dist.Store, keys: list[str], env: RankEnv, monitor: FailureMonitor) -> None:
    """Wait until `keys` are in the store. Rank 0 waits for all ranks, and prints which of them are missing."""

    def missing() -> list[int]:
        return [rank for rank in range(env.world_size) if not store.check([f"rank_info/{rank}"])]

    def announce() -> None:
        if env.rank == 0:  # each of many ranks would ask the store for all others
            log.info("waiting for %s of %s processes", numbered("rank", missing()), env.world_size)

    for _ in _attempts(monitor.timeout, announce):
        if store.check(keys):
            return
        if failed := monitor.other_failed():
            raise failed
    absent = missing()
    joined = f"only {env.world_size - len(absent)} of {env.world_size} processes joined at {env.endpoint_text}"
    missed = f"within {monitor.timeout:g} s (--timeout); missing: {numbered('rank', absent)}"
    raise SetupError(f"{joined} {missed}; start all of them")


@contextmanager
def quiet_gloo() -> Iterator[None]:
    """Keep away from the console what gloo prints about each group. Delete this when torch 2.11 is the oldest.

    On Linux, it writes `[Gloo] Rank 0 is connected to ...` to descriptor 1. Other lines appear after the block.
    """
    if sys.platform != "linux" or tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11):
        yield
        return
    with os.fdopen(os.memfd_create("stdout"), "w+b") as printed:
        console = os.dup(1)
        sys.stdout.flush()
        os.dup2(printed.fileno(), 1)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(console, 1)
            os.close(console)
            printed.seek(0)
            if others := b"".join(line for line in printed if not line.startswith(b"[Gloo] ")):
                os.write(1, others)
