"""Turn a model into one that trains on many processes: DDP, precision, accumulation."""

import logging
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from itertools import chain, count
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddp.core.errors import SetupError, UsageError
from ddp.core.parts import of_parts
from ddp.core.run_config import RunConfig
from ddp.data.dataset import check_loss
from ddp.distributed.process_group import NCCL_GRACE_S, DistContext
from ddp.distributed.tensors import local

log = logging.getLogger(__name__)
PART = 1 << 22  # numbers of a weight that are added up at once
ROUNDING = 32  # units in the last place by which processors may differ after a step
FEW = 2  # units of a narrow format by which they may differ all the same


def check_model(config: RunConfig, model: torch.nn.Module) -> torch.nn.Module:
    """Returns `model`. Raises UsageError or SetupError for options that it or this machine does not support."""
    gpu = config.device != "cpu" and torch.cuda.is_available()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if lazy := [name for name, tensor in tensors if torch.nn.parameter.is_lazy(tensor)]:
        raise UsageError(f"{lazy[0]} has no shape before the first batch: run the model once in build_model")
    if config.sync_bn and not gpu:
        raise UsageError("--sync-bn needs a GPU: torch has no SyncBatchNorm for the CPU; remove it")
    synchronized = any(isinstance(part, torch.nn.SyncBatchNorm) and part.training for part in model.modules())
    if synchronized and not gpu and not config.evaluate:
        raise UsageError("the model has SyncBatchNorm, which needs a GPU: build BatchNorm, and pass --sync-bn there")
    if config.sync_bn and not any(map(is_batch_norm, model.modules())):
        raise UsageError(f"--sync-bn: {model_name(model, config)} has no BatchNorm layer; remove it")
    if config.precision == "bf16" and gpu and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UsageError("--precision bf16: this GPU has no bfloat16; use --precision fp16")
    if config.compile:  # Triton compiles C for GPUs, and torch C++ for CPUs
        language, variable, *names = ("C", "CC", "gcc", "clang") if gpu else ("C++", "CXX", "g++")
        tried = [os.environ[variable]] if variable in os.environ else names
        if not any(map(shutil.which, tried)):
            remedy = f"install {names[0]}, set {variable}, or remove --compile"
            raise SetupError(f"--compile needs a {language} compiler, but found no {' and no '.join(tried)}: {remedy}")
    return model


def model_name(model: torch.nn.Module, config: RunConfig) -> str:
    """--model if it was given; otherwise the class, since the owner may have replaced the default model."""
    given, default = (getattr(options, "model", None) for options in (config, type(config)))
    return type(model).__name__.removeprefix("FSDP" * hasattr(model, "unshard")) if given in (None, default) else given


def choose_algorithms(config: RunConfig) -> None:
    """Set how torch computes: --deterministic, or the fastest algorithms; --matmul-precision.

    With --deterministic, an operation that has no deterministic algorithm raises.
    """
    warnings.filterwarnings("ignore", "Please use the new API settings to control TF32")  # torch 2.9 prints it here
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set by torch's newer functions
        before = "another"
    if before not in ("highest", config.matmul_precision) and "matmul_precision" not in config.given:
        text = f"model.py (or TORCH_ALLOW_TF32_CUBLAS_OVERRIDE) sets {before} precision of matrix products"
        log.warning(f"warning: {text}, but --matmul-precision {config.matmul_precision} counts")
    torch.set_float32_matmul_precision(config.matmul_precision)
    reproducible = config.deterministic or torch.backends.cudnn.deterministic  # which model.py may set
    torch.backends.cudnn.benchmark = not reproducible  # try all algorithms for each new shape, keep the fastest
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def wrap_model(model: torch.nn.Module, config: RunConfig, ctx: DistContext, task: Any = None) -> Any:
    """`model` for training, on the device: backward averages gradients over the ranks. Call on every rank.

    `model` remains the one to evaluate and save. task: model.py.
    """
    if config.sync_bn:
        torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)  # in place: it replaces layers and keeps their weights
    tensors = chain(model.named_parameters(), model.named_buffers())
    everyone = ctx.compare([(name, each.shape, str(each.dtype)) for name, each in tensors])
    if everyone and all(sorted(each) == sorted(everyone[0]) for each in everyone):  # DDP goes by position
        raise UsageError("the ranks have the weights or buffers of the model in another order: sort names from a set")
    of_part = [wrap(model, config, ctx, task) for wrap in of_parts("wrap_model")]
    wrapped: Any = next((each for each in of_part if each is not None), None)
    ctx.work.sharded = wrapped is not None
    if wrapped is None:
        wrapped = _replicate(model.to(ctx.device), config, ctx, task)
    if config.compile:
        if config.deterministic:  # kernels for all sizes, or for the first few, would depend on the sizes seen before
            dynamo = torch._dynamo.config
            dynamo.recompile_limit = dynamo.accumulated_recompile_limit = sys.maxsize
        model.compile(dynamic=False if config.deterministic else None)  # in place: it keeps the names of the weights
    _warn_of_frozen_norms(model, ctx)
    for each in ctx.callbacks:
        each.wrapped(model, task)
    return wrapped


def _replicate(model: torch.nn.Module, config: RunConfig, ctx: DistContext, task: Any) -> DistributedDataParallel:
    # After its first step DDP reorders its buckets, and with them the order in which more than two ranks add gradients:
    # a resumed run would add in another order than an uninterrupted one. find_unused_parameters=True prevents that.
    warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
    embeddings = [part for part in model.modules() if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag)]
    for part in embeddings:
        # DDP divides a sparse gradient in place, although that of another weight may share its memory.
        if part.sparse and part.weight.requires_grad:
            part.weight.register_hook(torch.clone)
    group = None  # the default one
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        # With the wrapper that DETAIL puts around a group, DDP crashes on CPUs (SIGSEGV, seen with torch 2.15).
        dist.set_debug_level(dist.DebugLevel.OFF)
        grace_s = NCCL_GRACE_S if ctx.backend == "nccl" else 0
        group = dist.new_group(timeout=timedelta(seconds=config.timeout + grace_s))
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    ddp_model = DistributedDataParallel(
        model,
        process_group=group,
        device_ids=[ctx.device.index] if ctx.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        find_unused_parameters=config.deterministic or getattr(task, "FIND_UNUSED_PARAMETERS", False),
    )
    _look_before_each_pass(ddp_model, model)
    report_unused_weights(model, ddp_model)
    return ddp_model


def _look_before_each_pass(ddp_model: DistributedDataParallel, model: torch.nn.Module) -> None:
    """Let DDP send rank 0's buffers to all ranks before a training pass only if a rank reads them there.

    Raise UsageError if a frozen weight is trained later: DDP averages only those that were trained when it began.
    """
    are_read = reads_buffers(model)
    frozen = {name: weight for name, weight in model.named_parameters() if not weight.requires_grad}

    def look(*_: Any) -> None:
        for name, weight in frozen.items():
            if weight.requires_grad:
                remedy = "unfreeze it before wrap_model, and keep its learning rate at 0 until then"
                raise UsageError(f"{name} was unfrozen after wrap_model, so no rank would average it: {remedy}")
        if ddp_model.broadcast_buffers != (read := are_read()):  # slow to set: it is an attribute of a module
            ddp_model.broadcast_buffers = read

    ddp_model.register_forward_pre_hook(look)


def reads_buffers(model: torch.nn.Module) -> Callable[[], bool]:
    """Whether the next forward pass of `model` reads its buffers, when it is asked.

    A BatchNorm layer in training mode only writes its running statistics. In evaluation mode it reads them, as in the
    teacher of a model: ranks that keep their own would train with different teachers.
    """
    with_buffers = [part for part in model.modules() if any(True for _ in part.buffers(recurse=False))]
    forwards = torch.nn.modules.batchnorm._BatchNorm.forward, torch.nn.SyncBatchNorm.forward  # BatchRenorm has its own
    only_batch_norm = all(is_batch_norm(part) and type(part).forward in forwards for part in with_buffers)
    return lambda: not (only_batch_norm and all(part.training for part in with_buffers))


def is_batch_norm(part: torch.nn.Module) -> bool:
    return isinstance(part, torch.nn.modules.batchnorm._BatchNorm)


def report_unused_weights(model: torch.nn.Module, ddp_model: Any = None) -> None:
    """Let a step of an optimizer raise UsageError if its weights got no gradient: DDP would not name them.

    Without `ddp_model`, each weight is checked in its first step only.
    """
    unchecked = {id(weight): name for name, weight in model.named_parameters() if weight.requires_grad}
    names = dict(model.named_parameters())
    trained = [weight for weight in names.values() if weight.requires_grad]

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if ddp_model is not None and not any(weight.grad is None for weight in trained):
            return
        now = dict(model.named_parameters()) if ddp_model is not None else names
        pairs = {name: (now[name], weight) for name, weight in names.items() if name in now}
        if replaced := [name for name, (new, old) in pairs.items() if new is not old and new.requires_grad]:
            raise UsageError(f"{replaced[0]} was replaced after wrap_model, so no rank averages it: do so before")
        allowed = (getattr(ddp_model, name, False) for name in ("find_unused_parameters", "static_graph"))
        if not unchecked or any(allowed):
            return
        weights = [each for group in optimizer.param_groups for each in group["params"] if id(each) in unchecked]
        missing = [unchecked[id(weight)] for weight in weights if weight.grad is None]
        if len(missing) == len(weights):  # no backward pass yet: a closure's will come, or this is another model's step
            return
        if late := [name for name in missing if not names[name].requires_grad]:
            remedy = "freeze it before wrap_model, or write FIND_UNUSED_PARAMETERS = True in model.py"
            raise UsageError(f"{late[0]} was frozen after wrap_model, which would wait for its gradient: {remedy}")
        if missing:
            remedy = "use them in forward(), remove them, or freeze them with requires_grad_(False)"
            remedy += "; a checkpoint() around them needs use_reentrant=False"
            if ddp_model is not None:
                remedy += "; if they are used in some steps only, or you set `grad = None` to leave them out of a step"
                remedy += ", write FIND_UNUSED_PARAMETERS = True in model.py"
            raise UsageError(f"the loss does not depend on {', '.join(missing)}: {remedy}")
        for weight in weights if ddp_model is None else ():
            del unchecked[id(weight)]

    register_optimizer_step_pre_hook(check)


def _warn_of_frozen_norms(model: torch.nn.Module, ctx: DistContext) -> None:
    """Warn, at the third step, of a BatchNorm layer whose weights do not change while its statistics do."""
    norms = [(name, part) for name, part in model.named_modules() if is_batch_norm(part) and part.affine]
    frozen = [(name, part, local(part.bias).clone()) for name, part in norms if not part.bias.requires_grad]
    steps = count(1)

    def check(*_: Any) -> None:
        for name, part, before in frozen if next(steps) == 3 and ctx.rank == 0 else ():
            if part.training and before.equal(local(part.bias)):  # a key encoder has followed the trained weights
                remedy = "keep it in evaluation mode, as 'Fine-tune' in docs/recipes.md does"
                return log.warning(f"warning: {name} is frozen, but its statistics follow each batch: {remedy}")

    if frozen:
        register_optimizer_step_pre_hook(check)


def weights_of(optimizer: Any) -> list[torch.Tensor]:
    """Those that `optimizer` trains."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def check_same_weights(fields: Mapping[str, Any], step: int, ctx: DistContext) -> None:
    """Raise UsageError, on every rank, if their weights differ by more than rounding. Call on every rank.

    fields: those of Training, by name. Different processors may round a step of an optimizer in different ways. That
    adds up like a random walk, since all of them take the same gradients. Where weights have few digits, few of them
    are rounded in another way: as many as would be in float32, each by a unit of its own format. So one such weight
    alone may differ unnoticed.
    """
    weights: dict[str, torch.Tensor] = {}
    parts = fields if ctx.world_size > 1 and not ctx.work.sharded else {}
    for key, part in parts.items():
        if isinstance(part, torch.nn.Module):
            weights |= {f"{key}.{name}": weight for name, weight in part.named_parameters()}
    named = {id(weight) for weight in weights.values()}
    for key, part in parts.items():
        if isinstance(part, torch.optim.Optimizer):
            own = [(number, each) for number, each in enumerate(weights_of(part)) if id(each) not in named]
            weights |= {f"a weight of {key}, {number}": each for number, each in own}
    plain = {name: each.detach() for name, each in weights.items() if type(each) in (torch.Tensor, torch.nn.Parameter)}
    plain = {
        name: torch.view_as_real(each.resolve_conj()) if each.is_complex() else each for name, each in plain.items()
    }
    real = {name: each for name, each in plain.items() if each.is_floating_point() and each.element_size() > 1}
    if ctx.compare([*real]) or not real:  # each rank may have an optimizer for some of them
        return
    sums, sizes, squares = torch.stack([_sums(each) for each in real.values()]).T.contiguous()
    eps = torch.tensor([torch.finfo(each.dtype).eps for each in real.values()])
    both = torch.stack([sums, sizes])  # gradients of a softmax layer add up to 0, so its sum stays
    rounded = ROUNDING * step**0.5 * eps.clamp(max=torch.finfo(torch.float32).eps) * sizes + FEW * eps * squares.sqrt()
    apart = (both - ctx.sum(both.clone()) / ctx.world_size).abs() > rounded
    if (found := ctx.sum(apart.any(0).double())).any():
        first = [*real][int((found > 0).int().argmax())]
        remedy = "change weights in optimizer.step() alone, on all ranks, by one backward() of what ddp_model returned"
        remedy += "; put weights of another module into the model"
        remedy += "; numbers of random and numpy differ between ranks, those of torch do not in apply_gradients"
        raise UsageError(f"after step {step:,} the ranks have different weights, first {first}: {remedy}")


def _sums(weight: torch.Tensor) -> torch.Tensor:
    """The sums of its numbers, each times a factor, of their sizes, and of their squares, in float64 and host memory.

    In parts, which are copied. Without factors, loss weights whose sum is always 1 would be the same on all ranks.
    """
    sums = []
    for place, part in enumerate(map(torch.Tensor.double, weight.flatten().split(PART))):
        factors = torch.arange(1, len(part) + 1, dtype=part.dtype, device=part.device).add_(place * PART).sin_()
        sums.append(torch.stack([part.dot(factors), part.abs().sum(), part.dot(part)]))
    return torch.stack(sums).sum(0).cpu()


def autocast(config: RunConfig, ctx: DistContext) -> AbstractContextManager:
    """The number format of --precision."""
    if config.precision == "fp32" or ctx.work.sharded:  # such a model has its own policy
        return nullcontext()
    return torch.autocast(ctx.device.type, {"bf16": torch.bfloat16, "fp16": torch.float16}[config.precision])


def accumulate(ddp_model: Any, *, last: bool) -> AbstractContextManager:
    """All-reduce only in the last pass of a step. Forward and backward belong inside."""
    # A model that is sharded reduces each pass: gradients that are not would need the memory of all weights.
    return nullcontext() if last or not isinstance(ddp_model, DistributedDataParallel) else ddp_model.no_sync()


def backward(loss: Any, scaler: torch.amp.GradScaler, passes: int) -> None:
    """Add the gradients of `loss`, the mean of one of the `passes` of a step. Raises UsageError if it has none."""
    check_loss(loss)
    scaler.scale(loss if passes == 1 else loss / passes).backward()


def grad_scaler(config: RunConfig, ctx: DistContext) -> torch.amp.GradScaler:
    """It scales the loss with --precision fp16, and does nothing otherwise."""
    return torch.amp.GradScaler(ctx.device.type, enabled=config.precision == "fp16")
