"""The process group: create it, use it, destroy it. A single process is a group of one."""

import hashlib
import logging
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddp.core.errors import PeerFailed, SetupError, UsageError, UserError, differences, exit_code_of, plural
from ddp.core.host import available_cores, interface_for_gloo, is_loopback, own_address
from ddp.core.parts import Callback
from ddp.core.process_exit import process_exit, tell_launcher
from ddp.core.rank_logs import start_rank_log
from ddp.core.run_config import RunConfig
from ddp.core.threads import BackgroundJob, Result, dump_stacks
from ddp.distributed.failure_monitor import FailureMonitor
from ddp.distributed.rank_env import Launcher, RankEnv
from ddp.distributed.rank_reports import backend_of, record_collectives
from ddp.distributed.stop_sync import StopSync
from ddp.distributed.store import RankInfo, create_store, exchange_rank_info, quiet_gloo
from ddp.distributed.tensors import Streams, map_named, map_tensors, whole

log = logging.getLogger(__name__)
ForTensor = Callable[[tuple[Any, ...], torch.Tensor], torch.Tensor]
HANG_GRACE_S = 10.0  # a hang may take this much longer than --timeout before the process is ended from outside
MANY_RANKS = 256  # from here on, gloo connects two of them when they need it, and not all pairs at the start
NCCL_GRACE_S = 60.0  # NCCL's timeout is this much longer than --timeout
# Groups are not freed before the process exits. That waits for gloo's threads, while one of them, which frees a tensor
# of the last collective, may wait for the interpreter's lock, which this thread holds (seen with torch 2.6).
_groups: list[Any] = []


@dataclass
class Work:
    """What this rank computes."""

    step: int = 0  # optimizer steps that the run has taken, also before it was resumed
    in_step: bool = False  # whether a batch of the step that comes next was read: BatchNorm may have seen it
    sharded: bool = False  # whether the ranks compute each forward pass together, since none has the whole model
    repeats: bool = False  # whether this batch of an evaluation is one that another rank counts
    in_epoch: bool = False  # whether steps of this epoch are left: a stop in an evaluation between them would lose it
    asked: bool = False  # whether `skip` was called for this batch

    def skip(self) -> bool:
        """Whether this batch must not count: metrics that are not added up by a Meter leave it out."""
        self.asked = True
        return self.repeats


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
    stop_sync: StopSync
    streams: Streams
    # Called with the root cause when the run fails, before the group is destroyed. Other ranks may be gone by then.
    on_failure: list[Callable[[BaseException], None]]
    hosts: list[str]  # the name of each rank's machine
    work: Work = field(default_factory=Work)
    callbacks: list[Callback] = field(default_factory=list)  # of the parts, once a run is open

    def on_main(self, action: Callable[..., Result], *arguments: Any) -> Result:
        """Run `action` on rank 0; its result, or its exception, reaches every rank. Call on every rank."""
        result: list[Any] = [None, None, 0]  # the value; an error, or a text about it, with its exit code
        bug: Exception | None = None
        if self.rank == 0:
            try:
                result[0] = action(*arguments)
            except Exception as error:
                bug, result[1:] = error, [f"{type(error).__name__}: {error}", exit_code_of(error)]
                with suppress(Exception):  # one of the owner's may need two arguments, which pickle does not know
                    if isinstance(error, UserError) and pickle.loads(pickle.dumps(error)):
                        error.on_every_rank, result[1] = True, error
        dist.broadcast_object_list(result, src=0, device=torch.device("cpu"))
        value, failure, code = result
        if bug is not None or isinstance(failure, UserError):
            raise bug or failure
        if failure is not None:
            raise PeerFailed(f"rank {self.rank} is exiting because rank 0 failed: {failure}", exit_code=code)
        return value

    def wait_on_main(self, job: BackgroundJob) -> None:
        """Wait for a job of rank 0, which may take longer than --timeout; raise what it raised. Call on every rank."""
        while not self.on_main(job.finish, self.monitor.timeout / 4):  # otherwise the others would take it for lost
            if job.error is not None:  # of this rank's part, which could not even tell rank 0
                raise job.error

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fill `tensor`, contiguous and in host memory, with rank 0's values. Call on every rank."""
        dist.broadcast(tensor.flatten().view(torch.uint8), src=0)  # as bytes: gloo does not support every dtype
        return tensor

    def broadcast_tree(self, tree: Any, keep: ForTensor) -> Any:
        """Rank 0's `tree` of tensors and plain values on every rank, in host memory. Call on every rank.

        keep: returns what this rank keeps of the tensor to which `keys` lead, for example some of its rows.
        """
        shape: Any = lambda tensor: torch.empty_like(tensor, device="meta")  # noqa: E731
        skeleton = self.on_main(lambda: map_tensors(tree, shape))

        def receive(keys: tuple[Any, ...], tensor: torch.Tensor) -> torch.Tensor:
            # One by one: no rank needs memory for two copies.
            ours = whole(tensor) if self.rank == 0 else torch.empty(tensor.shape, dtype=tensor.dtype)
            return keep(keys, self.broadcast(ours.resolve_conj().contiguous()))

        return map_named(tree if self.rank == 0 else skeleton, receive)

    def broadcast_buffers(self, model: torch.nn.Module) -> None:
        """Copy rank 0's buffers, such as BatchNorm's running statistics, to every rank. Call on every rank."""
        for buffer in model.buffers():
            buffer.copy_(self.broadcast(buffer.detach().cpu().resolve_conj().contiguous()))

    @contextmanager
    def evaluating(self, model: torch.nn.Module) -> Iterator[None]:
        """Within the block, `model` is in evaluation mode, with the buffers of rank 0. Call on every rank."""
        self.broadcast_buffers(model)
        modes = [(part, part.training) for part in model.modules()]
        model.eval()
        try:
            yield
        finally:
            model.train(modes[0][1])
            for part, training in modes:  # a part may be in another mode than the model
                part.training = training

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor`, in host memory, over the ranks, in place. Call on every rank."""
        dist.all_reduce(tensor)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """The `value` of every rank, ordered by rank, on every rank. Call on every rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def compare(self, value: Any) -> list[Any]:
        """Empty if all ranks have the same `value`; otherwise the value of each, by rank. Call on every rank.

        At first they send digests: a value may be large.
        """
        digests = self.gather(hashlib.sha256(pickle.dumps(value)).digest())
        everyone = self.gather(value) if len({*digests}) > 1 else []
        return everyone if any(each != everyone[0] for each in everyone) else []  # one value may have two pickles

    def check_same(self, values: dict[str, Any]) -> None:
        """Raise SetupError on every rank unless each of `values` is the same on all. Call on every rank."""
        everyone = self.compare(values)
        for rank, theirs in enumerate(everyone):
            only_first = f"{{name}} exists on rank 0 but not on rank {rank}"
            only_second = f"{{name}} exists on rank {rank} but not on rank 0"
            changed = f"{{name}} is {{first}} on rank 0 and {{second}} on rank {rank}"
            if found := differences(everyone[0], theirs, changed, only_first, only_second):
                reason = f"{found[0]}: start all ranks with the same options, code and data"
                raise SetupError(reason, on_every_rank=True)


def check_backend(config: RunConfig) -> None:
    """Refuse a backend or device that this torch or this machine lacks, before any rank waits for another."""
    if config.backend != "auto" and not dist.is_backend_available(config.backend):
        available = [name for name in ("gloo", "nccl", "mpi") if dist.is_backend_available(name)]
        raise UsageError(f"--backend {config.backend}: this torch was built with {', '.join(available)} only")
    for option, needs_gpu, other in (("device", "cuda", "cpu"), ("backend", "nccl", "gloo")):
        if getattr(config, option) == needs_gpu and not torch.cuda.is_available():
            remedy = f"use --{option} {other}, or check nvidia-smi"
            raise SetupError(f"--{option} {needs_gpu}: torch finds no GPU here; {remedy}")


@contextmanager
def init_distributed(config: RunConfig, env: RankEnv) -> Iterator[DistContext]:
    """Connect to the other processes; destroy the group when the block ends. Call on every rank.

    Raises SetupError if the others cannot be reached, or if there are too few GPUs. An error of the block is replaced
    by its root cause: PeerFailed if another rank failed first, PeerLost if one is gone.
    """
    process_exit.resolve_root_cause = lambda error: error  # without a store there is no way to tell the others
    store = create_store(env, config.timeout)
    monitor = FailureMonitor(store, env, config.timeout, config.warn_after)
    process_exit.resolve_root_cause = monitor.resolve_root_cause
    on_failure: list[Callable[[BaseException], None]] = []
    with monitor.report_errors(on_failure):
        infos = exchange_rank_info(store, env, monitor, config.device != "cpu")
        if env.world_size > 1:
            monitor.thread.start()
        if config.output_dir:
            tell_launcher("output_dir", os.path.abspath(config.output_dir))
        start_rank_log(env.rank, env.world_size, config.output_dir)  # before NCCL prints how it connects
        own = infos[env.rank]
        local_world_size = sum(info.machine == own.machine for info in infos)
        if "OMP_NUM_THREADS" not in os.environ:  # share the cores: by default every process would use all of them
            torch.set_num_threads(max(1, available_cores() // local_world_size))
        if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := _choose_interface(infos, own)):
            os.environ["GLOO_SOCKET_IFNAME"] = interface
        device, backend = _choose_device(config, infos, env.rank)
        if config.device == "auto" and device.type == "cpu" and env.rank == 0 and torch.accelerator.is_available():
            unused = torch.accelerator.current_accelerator()  # Apple's mps, or Intel's xpu
            why = "DDP needs gloo on CPUs or NCCL on CUDA devices: training on the CPU"
            log.warning(f"warning: the {unused} device of this machine is not used, because {why}")
        with quiet_gloo():
            _create_group(env, store, device, backend, config.timeout)
            many, timeout = env.world_size >= MANY_RANKS, timedelta(seconds=config.timeout)
            tree: Any = dist.new_group(timeout=timeout, backend="gloo") if many else None
        streams = Streams(device)
        monitor.stop_sync = stop_sync = StopSync(streams, tree)
        ranks = (env.rank, env.world_size, own.local_rank, local_world_size)
        hosts = [info.host for info in infos]
        yield DistContext(*ranks, device, backend, env.launcher, monitor, stop_sync, streams, on_failure, hosts)


def _create_group(env: RankEnv, store: dist.Store, device: torch.device, backend: str, timeout: float) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    record_collectives()
    if env.world_size >= MANY_RANKS:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    hangs = SetupError(f"rank {env.rank} hangs while it connects to the others over {backend}")

    def end() -> None:
        dump_stacks(env.rank)
        process_exit.hard_exit(hangs)

    watchdog = threading.Timer(timeout + HANG_GRACE_S, end)
    watchdog.daemon = True
    watchdog.start()
    try:
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
        _groups.append(dist.group.WORLD)
        if backend == "nccl":
            _set_nccl_timeout(backend_of(device), timedelta(seconds=timeout + NCCL_GRACE_S))
        dist.all_reduce(torch.zeros(1))  # no rank continues, and perhaps exits, before all are connected
    finally:
        watchdog.cancel()


def _set_nccl_timeout(backend: Any, timeout: timedelta) -> None:
    """At its timeout NCCL aborts the process without a message. Control traffic, over gloo, ends it before."""
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL; torch 2.9 refuses it there
    # Since torch 2.15, NCCL's backend has no _set_default_timeout. Without both, NCCL's timeout may come first.
    for name in ("set_timeout", "_set_default_timeout"):
        if hasattr(backend, name):
            return getattr(backend, name)(timeout)


def _choose_device(config: RunConfig, infos: list[RankInfo], rank: int) -> tuple[torch.device, str]:
    """This rank's device, by its local rank and never by its rank; and the backend that all ranks use."""
    if config.device == "cpu" or (config.device == "auto" and not any(info.gpus for info in infos)):
        return torch.device("cpu"), "gloo" if config.backend == "auto" else config.backend
    for info in infos:
        local = [other for other in infos if other.machine == info.machine]
        gpus = {each.gpus[each.local_rank % len(each.gpus)] for each in local if each.gpus}
        if not info.gpus or (config.backend != "gloo" and len(gpus) < len(local)):
            found = f"{plural(len(local), 'process', 'es')}, {plural(len(info.gpus), 'GPU')}"
            remedy = "start one process per GPU, with local ranks from 0; or use --device cpu"
            raise SetupError(f"{info.host}: {found}: {remedy}; or share GPUs with --backend gloo")
    if config.backend == "mpi":
        raise SetupError("--backend mpi trains on CPUs here: add --device cpu, or remove --backend mpi")
    nccl = config.backend == "nccl" or (config.backend == "auto" and dist.is_nccl_available())
    return torch.device("cuda", infos[rank].local_rank % len(infos[rank].gpus)), "nccl" if nccl else "gloo"


def _choose_interface(infos: list[RankInfo], own: RankInfo) -> str | None:
    """The interface on the route to the others. Gloo would use that of the host's name, which is often loopback.

    NCCL needs no help: it avoids loopback, prefers InfiniBand, and may use several interfaces.
    """
    elsewhere = [info.address for info in infos if info.machine != own.machine]
    if not elsewhere:
        return "lo0" if sys.platform == "darwin" else "lo"
    address = own.address
    if address is not None and is_loopback(address):  # rank 0's machine, where the name of the endpoint is loopback
        address = next((own_address(other, 9) for other in elsewhere if other is not None), None)
    return interface_for_gloo(address) if address is not None else None
