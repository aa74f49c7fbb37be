"""What turns a model into one that trains on many processes: DDP, precision, accumulation, compression, seeds."""

from __future__ import annotations

import os
import random
import shutil
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import numpy
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from config import Config
from ddp.errors import EnvironmentFailure, UsageError
from ddp.group import Group
from ddp.loader import derive_seed

ODD = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: neighbouring steps get seeds far apart
POWERSGD_START = 100  # steps with whole gradients first: compression of the first, large ones costs accuracy


def name_of(model: torch.nn.Module, config: Config) -> str:
    """What to call it: --model, or, where that was left as it is, its class, since model.py may have another one."""
    return type(model).__name__ if config.model == Config.model else config.model


def check_step(config: Config, model: torch.nn.Module) -> None:
    """Refuse options that this model or this machine cannot follow, before anyone is waited for."""
    gpu = config.device != "cpu" and torch.cuda.is_available()
    if config.sync_bn:
        if not gpu:
            raise UsageError("--sync-bn needs a GPU: torch has no SyncBatchNorm for the CPU; leave it out")
        if not any(isinstance(part, torch.nn.modules.batchnorm._BatchNorm) for part in model.modules()):
            raise UsageError(f"--sync-bn: {config.model} has no BatchNorm layer; leave it out")
    if config.comm_hook == "powersgd" and not gpu and torch.cuda.is_available():  # torch's hook would wait for a GPU
        raise UsageError("--comm-hook powersgd with --device cpu: hide the GPUs, with CUDA_VISIBLE_DEVICES=''")
    if config.precision == "bf16" and gpu and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UsageError("--precision bf16: this GPU has no bfloat16; use --precision fp16")
    if config.compile and not gpu and not shutil.which(os.environ.get("CXX", "g++")):
        raise EnvironmentFailure("--compile needs a C++ compiler on the CPU: install g++, or leave --compile out")


def make_deterministic() -> None:
    """Only deterministic algorithms; an operation that has none raises. See torch.use_deterministic_algorithms."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, numpy and torch, so that all ranks build the same model."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def seed_step(config: Config, step: int, group: Group) -> None:
    """Make dropout and the like a function of (seed, step, rank): a resumed run draws what an unbroken one does."""
    seed = (_first_seed(config.seed, group.rank) + step * ODD) % 2**63
    torch.default_generator.manual_seed(seed)  # 40 times cheaper than torch.manual_seed
    if group.device.type == "cuda":
        torch.cuda.manual_seed(seed)


@cache
def _first_seed(seed: int, rank: int) -> int:
    """What the seeds of a rank's steps are counted from: a digest in each step would cost a percent of a small one."""
    return derive_seed(seed, rank, 0)


def seed_rank(config: Config, group: Group) -> None:
    """Let Python's and numpy's generators differ between the ranks; checkpoints hold their states."""
    seed = derive_seed(config.seed, group.rank)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def wrap(model: torch.nn.Module, config: Config, group: Group) -> Any:
    """`model` for training: its gradients are averaged over the ranks in backward. Call on every rank.

    `model` itself stays what is evaluated and saved; both share their weights.
    """
    if config.sync_bn:
        torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)  # in place: the layers are exchanged, the weights stay
    if config.compile:
        model.compile()  # in place, so that the names of the weights stay as they are
    on_gpu = group.device.type == "cuda"
    # After its first step DDP orders its buckets anew, and with them the order in which more than two ranks add up: a
    # resumed run would add in another order than an unbroken one. Looking for unused parameters keeps it from that.
    warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
    ddp_model = DistributedDataParallel(
        model,
        device_ids=[group.device.index] if on_gpu else None,
        gradient_as_bucket_view=True,
        find_unused_parameters=config.deterministic,
    )
    if not config.deterministic:
        _name_unused(ddp_model, model)
    if config.comm_hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=POWERSGD_START)
        ddp_model.register_comm_hook(state, powerSGD_hook.powerSGD_hook if group.backend == "nccl" else _one_by_one)
    elif config.comm_hook != "none":
        hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
        ddp_model.register_comm_hook(None, hooks[config.comm_hook])
    return ddp_model


def _name_unused(ddp_model: DistributedDataParallel, model: torch.nn.Module) -> None:
    """Let the second step raise UsageError if weights had no gradient in the first: DDP would not say which."""
    missing = {name: None for name, weight in model.named_parameters() if weight.requires_grad}
    weights = dict(model.named_parameters())
    handles = [
        weights[name].register_post_accumulate_grad_hook(lambda _, name=name: missing.pop(name, None))
        for name in missing
    ]
    averaged = False  # whether the pass before this one was the last of its step

    def check(*_: Any) -> None:
        nonlocal averaged
        if not averaged:
            averaged = ddp_model.require_backward_grad_sync
            return
        for handle in handles:
            handle.remove()
        if missing:
            raise UsageError(
                f"the loss does not depend on {', '.join(missing)}: use them in forward(), take them out, or freeze "
                "them with requires_grad_(False); where that differs from step to step, set "
                "find_unused_parameters=True in ddp/step.py"
            )

    handles.append(ddp_model.register_forward_pre_hook(check))


def _one_by_one(state: powerSGD_hook.PowerSGDState, bucket):  # DDP would refuse annotations that are strings
    """PowerSGD, one bucket after the other.

    It sends three times for each, the later times from gloo's threads: several buckets at once would do so in another
    order on each rank, but gloo matches what is sent by its order.
    """
    future = powerSGD_hook.powerSGD_hook(state, bucket)
    future.wait()
    return future


def autocast(config: Config, group: Group) -> AbstractContextManager:
    """The arithmetic of --precision."""
    if config.precision == "fp32":
        return nullcontext()
    return torch.autocast(group.device.type, {"bf16": torch.bfloat16, "fp16": torch.float16}[config.precision])


def accumulate(ddp_model: Any, *, last: bool) -> AbstractContextManager:
    """No all-reduce but in the last of the passes whose gradients are added. Forward and backward belong inside."""
    return nullcontext() if last else ddp_model.no_sync()
