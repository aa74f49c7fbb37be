"""How the processes find each other: the store at which they meet, and the roll call there."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from config import Config
from ddp.errors import EnvironmentFailure, PeerLost
from ddp.launch import Placement
from ddp.launcher.network import holder, is_mine, listen, own_address
from ddp.peers import Peers, within

log = logging.getLogger(__name__)
NOTICE_S = 5.0  # after this long, rank 0 says for whom it waits
EARLY_S = 3.0  # how long a rank that has failed already tries to tell the others


def meet(config: Config, placement: Placement) -> dist.Store:
    """The store through which the processes find each other. Raises EnvironmentFailure if it cannot be reached."""
    if placement.init_method is None:
        return dist.HashStore()
    if not placement.init_method.startswith("file://"):
        _reach(placement, config.timeout)
    try:
        return _store(placement, config.timeout)
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        where = _address_in_words(placement)
        raise EnvironmentFailure(f"rank {placement.rank} cannot meet the others at {where}: {reason}") from error


def _store(placement: Placement, seconds: float) -> dist.Store:
    timeout = timedelta(seconds=seconds)
    assert placement.init_method is not None
    store = next(dist.rendezvous(placement.init_method, placement.rank, placement.world_size, timeout=timeout))[0]
    store.set_timeout(timeout)
    return store


def _reach(placement: Placement, timeout: float) -> None:
    """Wait until rank 0 listens; on rank 0, see that it can. TCPStore itself would print pages while it waits.

    Raises EnvironmentFailure: at once for a name, an address or a port that cannot be right, else after `timeout`.
    """
    host, port = _host_and_port(placement)
    where = _address_in_words(placement)
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise EnvironmentFailure(f"{where}: the name {host} is not known here ({error.strerror})") from error
    if not _hosts_store(placement):
        # torchrun's store is older than the processes that it starts.
        return _wait_until_open(host, port, where, timeout, of_torchrun=_store_of_torchrun(placement))
    if not any(is_mine(address) for address in found):
        raise EnvironmentFailure(f"{where} is no address of this machine, where rank 0 runs: give one that is")
    try:
        listen(port).close()
    except OSError as error:
        why = f"is taken by {holder(port)}" if error.errno == errno.EADDRINUSE else f"is refused ({error.strerror})"
        raise EnvironmentFailure(f"{where}: the port {why}; end that, or choose another port") from error


def _wait_until_open(host: str, port: int, where: str, timeout: float, of_torchrun: bool) -> None:
    start, said = time.monotonic(), False
    while True:
        try:
            return socket.create_connection((host, port), timeout=min(timeout, 5)).close()
        except OSError as error:
            waited = time.monotonic() - start
            if of_torchrun and isinstance(error, ConnectionRefusedError):
                raise PeerLost(f"torchrun, which should be at {where}, is gone") from error
            if error.errno in (errno.ENETUNREACH, errno.EADDRNOTAVAIL) or waited > timeout:
                raise EnvironmentFailure(
                    f"{where}, where rank 0 should be, cannot be reached: {error.strerror or error}; start rank 0, or "
                    "correct the address"
                ) from error
        if waited > NOTICE_S and not said:
            said = True
            log.warning("waiting for rank 0 at %s (up to %g s)", where, timeout)
        time.sleep(0.1)


def _host_and_port(placement: Placement) -> tuple[str, int]:
    if placement.init_method == "env://":
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    host, _, port = str(placement.init_method).removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def _hosts_store(placement: Placement) -> bool:
    """Whether the store is in this process, and not in another rank's, in torchrun's, or a file."""
    return placement.rank == 0 and store_at_rank_0(placement)


def store_at_rank_0(placement: Placement) -> bool:
    """Whether the store is in rank 0's process, and not in torchrun's, or a file."""
    in_a_file = str(placement.init_method).startswith("file://")
    return placement.init_method is not None and not in_a_file and not _store_of_torchrun(placement)


def _store_of_torchrun(placement: Placement) -> bool:
    return placement.init_method == "env://" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _address_in_words(placement: Placement) -> str:
    if placement.init_method == "env://":
        return f"MASTER_ADDR={os.environ['MASTER_ADDR']} MASTER_PORT={os.environ['MASTER_PORT']}"
    return str(placement.init_method)


def roll_call(store: dist.Store, config: Config, placement: Placement, peers: Peers) -> list[dict[str, Any]]:
    """What every process is and has, by rank: its host, its local rank, its host's GPUs. Call on every rank."""
    rank, host = placement.rank, _this_host()
    if store.add(f"arrived/{rank}", 1) > 1:
        _refuse_twice(store, placement, peers, host.split()[0])
    store.set(f"host/{rank}", host.split()[0])
    seat = {"host": host, "local_rank": placement.local_rank, "gpus": torch.cuda.device_count()}
    seat["visible"] = os.environ.get("CUDA_VISIBLE_DEVICES")
    in_a_file = str(placement.init_method).startswith("file://")
    seat["address"] = None if placement.init_method is None or in_a_file else own_address(*_host_and_port(placement))
    store.set(f"seat/{rank}", json.dumps(seat))
    if rank == 0:
        for other in range(placement.world_size):
            _await(store, f"seat/{other}", config, placement, peers)
        seats = [json.loads(store.get(f"seat/{other}")) for other in range(placement.world_size)]
        _number_within_hosts(seats)
        store.set("seats", json.dumps(seats))
    _await(store, "seats", config, placement, peers)
    return json.loads(store.get("seats"))


def _await(store: dist.Store, key: str, config: Config, placement: Placement, peers: Peers) -> None:
    """Wait until `key` is in the store, or another rank fails, or time is up. Says for whom rank 0 waits."""
    start = time.monotonic()
    said = False
    while not store.check([key]):
        peers.check()
        waited = time.monotonic() - start
        ranks = range(placement.world_size)
        if waited > NOTICE_S and placement.rank == 0 and not said:
            said = True
            missing = [rank for rank in ranks if not store.check([f"seat/{rank}"])]
            names = ", ".join(str(rank) for rank in missing[:8]) + (", ..." if len(missing) > 8 else "")
            log.info("waiting for rank %s of %s processes", names, placement.world_size)
        if waited > config.timeout:
            raise EnvironmentFailure(
                f"rank {placement.rank} waited in vain for all of {placement.world_size} processes at "
                f"{_address_in_words(placement)}: start all of them; --timeout sets how long to wait"
            )
        time.sleep(0.01 if waited < 1 else 0.1)


def _refuse_twice(store: dist.Store, placement: Placement, peers: Peers, host: str) -> NoReturn:
    """This rank is there already. A run that trains is not disturbed; one that gathers ends, on all ranks."""
    rank = placement.rank
    first = store.get(f"host/{rank}").decode() if store.check([f"host/{rank}"]) else "another"
    error = EnvironmentFailure(
        f"rank {rank} is already at {_address_in_words(placement)}, from host {first}, and this is host {host}: give "
        "each process a rank of its own, and each run a port or file of its own (delete a file that an earlier run has "
        "left)"
    )
    if store.check(["seats"]):
        peers.settled = error
    raise error


def _number_within_hosts(seats: list[dict[str, Any]]) -> None:
    """Where no launcher has given local ranks, number the ranks of each host from 0."""
    if any(seat["local_rank"] is None for seat in seats):
        for rank, seat in enumerate(seats):
            seat["local_rank"] = sum(other["host"] == seat["host"] for other in seats[:rank])


def _this_host() -> str:
    """Names the machine. Containers and network namespaces count as machines of their own."""
    parts = [socket.gethostname()]
    for read, path in ((os.readlink, "/proc/self/ns/net"), (_text, "/proc/sys/kernel/random/boot_id")):
        with suppress(OSError):  # not Linux: the name must do
            parts.append(read(path))
    return " ".join(parts)


def _text(path: str) -> str:
    with open(path) as file:
        return file.read().strip()


def settle_early(error: BaseException, placement: Placement) -> BaseException:
    """Tell ranks that wait, or will wait, for this one that it has failed before it met them."""
    if placement.init_method is None or getattr(error, "on_every_rank", False) or _hosts_store(placement):
        return error
    store = within(EARLY_S, lambda: _store(placement, EARLY_S))
    if store is None:
        return error
    return Peers(store, placement.rank, placement.world_size, EARLY_S, store_at_rank_0=False).settle(error)
