"""What the ranks do with `launch_node.sh --check`: print a table of the nodes, then try their collectives.

Are all_reduce, all_gather and broadcast correct, and how fast are they? Latency is that of four bytes. Bandwidth is
what each process sends over its link: bus bandwidth, as in nccl-tests.
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
from ddp.distributed.process_group import DistContext, check_backend, init_distributed
from ddp.distributed.rank_env import RankEnv
from ddp.parts.preflight.nodes import compare_nodes

log = logging.getLogger(__name__)
TIMEOUT_S = 180.0  # a check should not take ten minutes
MIN_TRANSFER_S = 0.2  # a transfer this long shows the speed of the network
MIN_MIB, MAX_MIB = 1, 256
REPEATS = 20
Collective = Callable[[torch.Tensor, DistContext], Any]  # in place


class WrongResult(SetupError, on_every_rank=True):
    """A collective does not compute what it should."""


# Each collective, in place, and the share of the data that each of n processes sends.
COLLECTIVES: dict[str, tuple[Collective, Callable[[int], float]]] = {
    "all_reduce": (lambda tensor, ctx: dist.all_reduce(tensor), lambda n: 2 * (n - 1) / n),
    "all_gather": (
        lambda tensor, ctx: dist.all_gather([*(parts := tensor.chunk(ctx.world_size))], parts[ctx.rank].clone()),
        lambda n: (n - 1) / n,
    ),
    "broadcast": (lambda tensor, ctx: dist.broadcast(tensor, src=ctx.world_size - 1), lambda n: 1.0),
}


def check(config: RunConfig, env: RankEnv) -> None:
    """Compare the nodes, and run the collectives of a training with these options. Raises SetupError."""
    store = compare_nodes(config, env)  # first: it shows why a node may lack the backend
    check_backend(config)
    with init_distributed(replace(config, timeout=min(config.timeout, TIMEOUT_S)), env) as ctx:
        log.info("\n%s on %s, %s", plural(ctx.world_size, "process", "es"), ctx.device.type, ctx.backend)
        if ctx.world_size > 1:
            log.info("%-10s  %-6s  %10s  %s", "", "result", "latency", "bandwidth")
            for name, (collective, share) in COLLECTIVES.items():
                _check_result(name, collective, ctx)
                latency = 1000 * _seconds(collective, 4, ctx, REPEATS)
                size = MIN_MIB
                while (seconds := _seconds(collective, size << 20, ctx, 3)) <= MIN_TRANSFER_S and size < MAX_MIB:
                    size *= 4
                speed = share(ctx.world_size) * (size << 20) / seconds / 1e9
                log.info("%-10s  %-6s  %7.3f ms  %.3f GB/s  (of %d MiB)", name, "right", latency, speed, size)
        log.info("\nall checks passed: run the same command without --check to train")
    del store  # a FileStore deletes its file with the last one that is open


def _check_result(name: str, collective: Collective, ctx: DistContext) -> None:
    """Raise WrongResult, on every rank, if `collective` returns a wrong result on any rank."""
    n, share = ctx.world_size, 1009
    base = torch.arange(n * share) % 251  # rank r sends base + r: small integers, so that sums are exact
    expected = {
        "all_reduce": n * base + n * (n - 1) // 2,
        "all_gather": base + torch.arange(n).repeat_interleave(share),
        "broadcast": base + n - 1,
    }
    tensor = (base + ctx.rank).to(ctx.device, torch.float32)
    collective(tensor, ctx)
    correct = ctx.gather(torch.equal(tensor.cpu(), expected[name].float()))
    if wrong := [str(rank) for rank, right in enumerate(correct) if not right]:
        remedy = "check the driver, the memory and the network cards of these machines"
        raise WrongResult(f"{name} over {ctx.backend} returned a wrong result on rank {', '.join(wrong)}: {remedy}")


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
