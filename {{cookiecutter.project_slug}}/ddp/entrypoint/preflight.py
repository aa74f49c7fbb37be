"""The ranks' part of `launch_node.sh --check`: are all_reduce, all_gather and broadcast correct, and how fast are they?

Latency is that of four bytes. Bandwidth is what each process sends over its link: bus bandwidth, as in nccl-tests.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ddp.core.errors import SetupError, plural
from ddp.core.run_config import RunConfig
from ddp.distributed.process_group import DistContext, init_distributed
from ddp.distributed.rank_env import RankEnv

log = logging.getLogger(__name__)
TIMEOUT_S = 180.0  # a check should not take ten minutes
MIN_TRANSFER_S = 0.2  # a transfer this long shows the speed of the network
MIN_BYTES, MAX_BYTES = 2**18, 2**28
REPEATS = 20
Collective = Callable[[torch.Tensor, DistContext], Any]  # in place


class WrongResult(SetupError, on_every_rank=True):
    """A collective does not compute what it should."""


def _all_gather(tensor: torch.Tensor, ctx: DistContext) -> None:
    dist.all_gather_into_tensor(tensor, tensor.chunk(ctx.world_size)[ctx.rank].clone())


# Each collective, and the share of the data that each of n processes sends.
COLLECTIVES: dict[str, tuple[Collective, Callable[[int], float]]] = {
    "all_reduce": (lambda tensor, ctx: dist.all_reduce(tensor), lambda n: 2 * (n - 1) / n),
    "all_gather": (_all_gather, lambda n: (n - 1) / n),
    "broadcast": (lambda tensor, ctx: dist.broadcast(tensor, src=ctx.world_size - 1), lambda n: 1.0),
}


def check(config: RunConfig, env: RankEnv) -> None:
    """Run the collectives of a training with these options. Raises WrongResult."""
    with init_distributed(replace(config, timeout=min(config.timeout, TIMEOUT_S)), env) as ctx:
        log.info("\n%s on %s, %s", plural(ctx.world_size, "process", "es"), ctx.device.type, ctx.backend)
        if ctx.world_size > 1:
            log.info("%-10s  %-6s  %10s  %s", "", "result", "latency", "bandwidth")
            for name, (collective, share) in COLLECTIVES.items():
                _check_result(name, collective, ctx)
                latency = 1000 * _seconds(collective, 4, ctx, REPEATS)
                size = MIN_BYTES
                while (seconds := _seconds(collective, size, ctx, 3)) <= MIN_TRANSFER_S and size < MAX_BYTES:
                    size *= 4
                speed = share(ctx.world_size) * size / seconds / 1e9
                size_text = f"{size / 2**20:,.0f} MiB" if size >= 2**20 else f"{size / 2**10:,.0f} KiB"
                log.info("%-10s  %-6s  %7.3f ms  %.3f GB/s  (of %s)", name, "right", latency, speed, size_text)
        log.info("\nall checks passed: run the same command without --check to train")


def _check_result(name: str, collective: Collective, ctx: DistContext) -> None:
    """Raise WrongResult, on every rank, if `collective` returns a wrong result on any rank."""
    n, share = ctx.world_size, 1009
    numbers = torch.arange(n * share, dtype=torch.float32)  # integers, so that sums are exact
    base = numbers % 251  # rank r sends base + r
    expected = {
        "all_reduce": n * base + n * (n - 1) / 2,
        "all_gather": base + (numbers / share).floor(),
        "broadcast": base + n - 1,
    }
    tensor = (base + ctx.rank).to(ctx.device)
    collective(tensor, ctx)
    correct = ctx.gather(torch.equal(tensor.cpu(), expected[name]))
    if not all(correct):
        wrong = ", ".join(str(rank) for rank, right in enumerate(correct) if not right)
        remedy = "check the driver, the memory and the network cards of these machines"
        raise WrongResult(f"{name} over {ctx.backend} returned a wrong result on rank {wrong}: {remedy}")


def _seconds(collective: Collective, size: int, ctx: DistContext, repeats: int) -> float:
    """Seconds of one call with `size` bytes, on the slowest rank. The same on all ranks."""
    length = ctx.world_size * max(1, size // 4 // ctx.world_size)  # the same share for each rank
    tensor = torch.zeros(length, device=ctx.device)
    collective(tensor, ctx)  # the first call opens the connections
    tensor[0].item()  # waits for the GPU
    ctx.gather(None)  # all ranks begin together
    start = time.perf_counter()
    for _ in range(repeats):
        collective(tensor, ctx)
    tensor[0].item()
    return max(ctx.gather((time.perf_counter() - start) / repeats))
