"""The processes' part of `launch_node.sh --check`: do all_reduce, all_gather and broadcast work, and how fast?

Latency is that of four bytes. Bandwidth is what each of n processes sends over its link, as nccl-tests count it (bus
bandwidth): 2 (n - 1) / n of the data for all_reduce, (n - 1) / n for all_gather, all of them for broadcast.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from config import Config
from ddp.errors import EnvironmentFailure
from ddp.group import Group, join, plural
from ddp.launch import Placement

log = logging.getLogger(__name__)
TIMEOUT_S = 180.0  # nobody who checks wants to wait for ten minutes
LONG_ENOUGH_S = 0.2  # a transfer that takes so long says how fast the network is
SMALLEST, LARGEST = 2**18, 2**28  # bytes to transfer
REPEATS = 20
Collective = Callable[[torch.Tensor, Group], torch.Tensor]


def check(config: Config, placement: Placement) -> None:
    """Run the collectives of a training that would be started like this. Raises EnvironmentFailure if one is wrong."""
    with join(replace(config, timeout=min(config.timeout, TIMEOUT_S)), placement) as group:
        processes = plural(group.world_size, "process", "es")
        log.info("\n%s on %s, %s", processes, group.device.type, group.backend)
        if group.world_size > 1:
            log.info("%-10s  %-6s  %10s  %s", "", "result", "latency", "bandwidth")
            for name, collective, share in COLLECTIVES:
                _refuse_wrong(name, collective, group)
                latency = 1000 * _seconds(collective, 4, group, REPEATS)
                size, seconds = _transfer(collective, group)
                speed = share(group.world_size) * size / seconds / 1e9
                log.info("%-10s  %-6s  %7.3f ms  %.3f GB/s  (of %s)", name, "right", latency, speed, _in_words(size))
        log.info("\nall is well: leave out --check, and it trains")


def _all_reduce(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    dist.all_reduce(tensor)
    return tensor


def _all_gather(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    mine = tensor.chunk(group.world_size)[group.rank].clone()
    dist.all_gather_into_tensor(tensor, mine)
    return tensor


def _broadcast(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    dist.broadcast(tensor, src=group.world_size - 1)
    return tensor


COLLECTIVES: tuple[tuple[str, Collective, Callable[[int], float]], ...] = (
    ("all_reduce", _all_reduce, lambda n: 2 * (n - 1) / n),
    ("all_gather", _all_gather, lambda n: (n - 1) / n),
    ("broadcast", _broadcast, lambda n: 1.0),
)


def _refuse_wrong(name: str, collective: Collective, group: Group) -> None:
    """Raises EnvironmentFailure, on every rank, if `collective` gives one of them a wrong result."""
    wrong = [str(rank) for rank, bad in enumerate(group.gather(_is_wrong(name, collective, group))) if bad]
    if wrong:
        error = EnvironmentFailure(
            f"{name} over {group.backend} gave a wrong result on rank {', '.join(wrong)}: check the driver, the memory "
            "and the network cards of these machines"
        )
        error.on_every_rank = True
        raise error


def _is_wrong(name: str, collective: Collective, group: Group) -> bool:
    """Whether `collective` gives something else than what was worked out without it. Whole numbers, so exact."""
    n, each = group.world_size, 1009
    numbers = torch.arange(n * each, dtype=torch.float32)
    base = numbers % 251  # rank r sends base + r
    expected = {
        "all_reduce": n * base + n * (n - 1) / 2,
        "all_gather": base + (numbers / each).floor(),
        "broadcast": base + n - 1,
    }
    found = collective((base + group.rank).to(group.device), group)
    return not torch.equal(found.cpu(), expected[name])


def _transfer(collective: Collective, group: Group) -> tuple[int, float]:
    """The first size, in bytes, that takes long enough to measure, and the seconds that it takes."""
    size = SMALLEST
    while True:
        seconds = _seconds(collective, size, group, 3)
        if seconds > LONG_ENOUGH_S or size >= LARGEST:
            return size, seconds
        size *= 4


def _seconds(collective: Collective, size: int, group: Group, repeats: int) -> float:
    """Of one call with `size` bytes, on the slowest rank. The same on all ranks."""
    length = group.world_size * max(1, size // 4 // group.world_size)  # the same share for each
    tensor = torch.zeros(length, device=group.device)
    collective(tensor, group)  # connections are made by the first one
    _wait_for(group.device)
    group.gather(None)  # all begin together
    start = time.perf_counter()
    for _ in range(repeats):
        collective(tensor, group)
    _wait_for(group.device)
    return max(group.gather((time.perf_counter() - start) / repeats))


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _in_words(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB" if size >= 2**20 else f"{size / 2**10:,.0f} KiB"
