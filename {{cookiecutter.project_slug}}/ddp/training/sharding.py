"""--shard: each rank holds a part of every weight, of its gradient and of its optimizer state (torch's FSDP2).

The model is split into blocks. The weights of a block are gathered from all ranks before it computes, and freed again
afterwards. So a rank needs memory for its part of everything, and for all weights of one block.
"""

import fcntl
import logging
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp.core.errors import UsageError, differences, first_few
from ddp.core.run_config import RunConfig
from ddp.distributed.process_group import DistContext
from ddp.distributed.rank_env import RankEnv
from ddp.distributed.shards import KEPT, checksum, is_sharded, keep_own_rows, read_whole_numbers, restore_rows
from ddp.distributed.tensors import leaves, map_tensors

log = logging.getLogger(__name__)
MIN_BLOCK = 0.01  # of all weights: a smaller block would cost more time to gather than it saves memory
MIN_WARNED = 10_000_000  # weights: a smaller model is no reason to use --shard
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
Blocks = Sequence[nn.Module]
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


# ---- build a model of which no process keeps everything -------------------------------------------------------------


def build_in_turn(build_model: Callable[[], nn.Module], config: RunConfig, env: RankEnv) -> nn.Module:
    """What `build_model` returns. With --shard, one process of this machine at a time calls it, and keeps its rows.

    So the machine needs memory for one whole model, and the weights are those of the same seed without --shard.
    """
    if not config.shard:
        return build_model()
    with (Path(tempfile.gettempdir()) / f"ddp-build-{os.getuid()}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        model = build_model()
        _check_weights(model)
        if env.world_size > 1:
            keep_own_rows(model, env.rank, env.world_size)
    return model


# ---- shard ----------------------------------------------------------------------------------------------------------


def shard_model(model: nn.Module, config: RunConfig, ctx: DistContext, blocks: Blocks) -> nn.Module:
    """Shard `model` in place, block by block. Call on every rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    _compare_built(model, ctx)
    read_whole_numbers()
    mesh = init_device_mesh(ctx.device.type, (ctx.world_size,))
    dtype = DTYPES[config.precision]
    wide = torch.float32 if dtype else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide)
    for_norm = MixedPrecisionPolicy(param_dtype=wide, output_dtype=dtype)
    for_root = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide, output_dtype=wide)
    attributes = {name: {**vars(weight), KEPT: None} for name, weight in model.named_parameters()}
    for group in [*group_blocks(model, blocks, warn=ctx.rank == 0), [model]]:
        for block in group:
            restore_rows(block, ctx.rank, ctx.world_size)
            if dtype:
                for norm in block.modules():
                    if isinstance(norm, nn.modules.batchnorm._BatchNorm) and not _is_sharded_module(norm):
                        fully_shard(norm, mesh=mesh, mp_policy=for_norm)
                        _refuse_other_weights([norm])
        unit = group if len(group) > 1 else group[0]
        fully_shard(unit, mesh=mesh, mp_policy=for_root if group == [model] else policy)
        _refuse_other_weights(group)
    for name, weight in model.named_parameters():  # what the owner has stored there, perhaps for the optimizer
        vars(weight).update(attributes[name])
        del vars(weight)[KEPT]
    for module in filter(_is_sharded_module, model.modules()):
        module.register_forward_hook(_copy_views, prepend=True)
    model.register_forward_hook(_reshard_after_evaluation)
    _compare_first_pass(model, ctx)
    return model


def _is_sharded_module(module: nn.Module) -> bool:
    return hasattr(module, "set_requires_gradient_sync")


def _check_weights(model: nn.Module) -> None:
    """Raise UsageError for weights that fully_shard cannot split."""
    types = {weight.dtype: name for name, weight in model.named_parameters()}
    if len(types) > 1:
        found = " and ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in types.items())
        raise UsageError(f"--shard: {found}: build all weights in one number format")
    if sparse := [name for name, part in model.named_modules() if getattr(part, "sparse", False) is True]:
        raise UsageError(f"--shard: the gradient of {sparse[0]} is sparse, and cannot be split: remove sparse=True")
    for name, weight in model.named_parameters():
        if not weight.is_contiguous():
            raise UsageError(f"--shard: {name} is not contiguous: remove --channels-last, or call contiguous()")
        if weight.dim() == 0:
            raise UsageError(f"--shard: {name} is a single number, which cannot be split: give it the shape [1]")


def _compare_built(model: nn.Module, ctx: DistContext) -> None:
    """Raise UsageError unless all ranks have built the same weights. DDP would send those of rank 0 to all others."""
    ours = {name: checksum(each) for name, each in chain(model.named_parameters(), model.named_buffers())}
    everyone = ctx.compare(ours)
    for rank, theirs in enumerate(everyone):
        if other := differences(everyone[0], theirs, "{name}"):
            remedy = "draw random numbers from the global generators of torch, numpy and Python"
            raise UsageError(f"--shard: build_model made other weights on rank {rank} ({first_few(other)}): {remedy}")


def check_optimizers(parts: Mapping[str, Any]) -> None:
    """Raise UsageError for an optimizer that was built before the model was sharded: it would train nothing."""
    for name, part in parts.items():
        groups = part.param_groups if isinstance(part, torch.optim.Optimizer) else ()
        if not all(is_sharded(weight) for group in groups for weight in group["params"]):
            raise UsageError(f"--shard: build {name} after wrap_model, which replaces the weights of the model")


def _refuse_other_weights(group: list[nn.Module]) -> None:
    """Let a forward pass raise UsageError if `group` has other weights in it, as by torch.func.functional_call.

    FSDP2 would put its own in their place, and accumulate gradients in them.
    """
    modules = [module for block in group for module in _own_modules(block)]
    known = {id(weight) for module in modules for weight in module.parameters(recurse=False)}  # the rows

    def refuse(*_: Any) -> None:
        for module in modules:
            for name, weight in module.named_parameters(recurse=False):
                if id(weight) not in known:
                    what = f"{name} of {type(module).__name__}"
                    raise UsageError(f"--shard: {what} was replaced, as by torch.func.functional_call: remove --shard")

    def learn(*_: Any) -> None:  # the gathered weights: FSDP2 creates these tensors once
        known.update(id(weight) for module in modules for weight in module.parameters(recurse=False))
        for hook in hooks:
            hook.remove()

    hooks = [block.register_forward_pre_hook(torch.compiler.disable(learn)) for block in group]
    for block in group:
        block.register_forward_pre_hook(torch.compiler.disable(refuse), prepend=True)


def _own_modules(block: nn.Module) -> Iterator[nn.Module]:
    """The modules of `block` that are in no smaller block."""
    yield block
    for child in block.children():
        if not _is_sharded_module(child):
            yield from _own_modules(child)


def _copy_views(module: nn.Module, arguments: Any, outputs: Any) -> Any:
    """An operation in place on a view would remove the hook by which FSDP2 gathers weights for the backward pass."""
    if torch.is_grad_enabled():
        return map_tensors(outputs, lambda tensor: tensor if getattr(tensor, "_base", None) is None else tensor.clone())


def _reshard_after_evaluation(model: Any, arguments: Any, outputs: Any) -> None:
    if not torch.is_grad_enabled():
        model.reshard()


def _compare_first_pass(model: nn.Module, ctx: DistContext) -> None:
    """Let the first training pass raise UsageError, on every rank, if the ranks use different blocks or weights.

    They would wait for each other, or take the rows of another block.
    """
    names: dict[int, str] = {}  # of the gathered weights
    hooks: list[Any] = []

    def announce(name: str, *_: Any) -> None:
        if torch.is_grad_enabled():
            _refuse_different(ctx.gather(name))

    def remember(prefix: str, module: nn.Module, *_: Any) -> None:
        names.update({id(weight): f"{prefix}{name}" for name, weight in module.named_parameters(recurse=False)})

    def finish(_: nn.Module, arguments: Any, outputs: Any) -> None:
        if torch.is_grad_enabled():
            for hook in hooks:
                hook.remove()
            announce("")
            trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
            used = {names.get(id(weight), "") for weight in _weights_of(outputs)}
            missing = first_few(sorted(trained - used))
            _refuse_different(ctx.gather(f"all weights but {missing}" if missing else "all weights"))

    announce, remember, finish = map(torch.compiler.disable, (announce, remember, finish))
    for name, module in model.named_modules():
        if _is_sharded_module(module):
            hooks.append(module.register_forward_pre_hook(partial(announce, name or "the model"), prepend=True))
        hooks.append(module.register_forward_pre_hook(partial(remember, f"{name}." if name else "")))
    hooks.append(model.register_forward_hook(finish))


def _refuse_different(used: list[str]) -> None:
    for rank, theirs in enumerate(used):
        if theirs != used[0]:
            uses = f"rank 0 uses {used[0] or 'no more'}, rank {rank} uses {theirs or 'no more'}"
            raise UsageError(f"--shard: {uses}: all ranks must use the same weights, in the same order")


def _weights_of(outputs: Any) -> Iterator[torch.Tensor]:
    """The weights on which a backward pass from `outputs` would accumulate gradients."""
    pending = [part.grad_fn for part in leaves(outputs) if getattr(part, "grad_fn", None) is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if hasattr(node, "variable"):
            yield node.variable
        fresh = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= fresh
        pending += fresh


# ---- blocks ---------------------------------------------------------------------------------------------------------


def find_blocks(module: nn.Module) -> Blocks:
    """The default for `blocks(model)` in model.py: the outermost modules in a ModuleList, ModuleDict or Sequential."""
    blocks: list[nn.Module] = []
    for child in module.children():
        if isinstance(module, CONTAINERS) and not isinstance(child, CONTAINERS):
            blocks.append(child)
        else:
            blocks += find_blocks(child)
    return blocks


def count(weights: Any) -> int:
    return sum(weight.numel() for weight in set(weights))


def group_blocks(model: nn.Module, blocks: Blocks, warn: bool) -> list[list[nn.Module]]:
    """Blocks that share a weight belong together; one that shares a weight with the rest of the model is no block."""
    total, everything = count(model.parameters()), {module for block in blocks for module in [*block.modules()][1:]}
    if nested := [type(block).__name__ for block in blocks if block in everything]:
        raise UsageError(f"blocks in model.py: {nested[0]} is inside of another block; return one of the two")
    groups = [([block], set(block.parameters())) for block in blocks if count(block.parameters()) >= MIN_BLOCK * total]
    inside = {module for block in blocks for module in block.modules()}
    rest = {weight for module in set(model.modules()) - inside for weight in module.parameters(recurse=False)}
    merged: list[tuple[list[nn.Module], set[Any]]] = []
    for group, weights in groups:
        if weights & rest:
            continue
        for other in [other for other in merged if other[1] & weights]:
            merged.remove(other)
            group, weights = [*other[0], *group], other[1] | weights
        merged.append((group, weights))
    sizes = [count(weights) for _, weights in merged]
    largest = total - sum(sizes) + max(sizes, default=0)
    if warn and largest > total / 2 and total > MIN_WARNED:
        log.warning(f"warning: --shard gathers {largest / total:.0%} of the weights at once: define blocks in model.py")
    return [group for group, _ in merged]


# ---- activations ----------------------------------------------------------------------------------------------------


def checkpoint_activations(blocks: Blocks) -> None:
    """--checkpoint-activations: keep the inputs of a block, and compute the rest again in the backward pass."""
    for block in blocks:
        block.forward = partial(_compute_twice, block, block.forward)


@partial(torch.compiler.disable, recursive=False)
def _compute_twice(block: nn.Module, compute: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return compute(*arguments, **named)
    again = _Again(block)
    return checkpoint(compute, *arguments, use_reentrant=False, context_fn=lambda: (nullcontext(), again), **named)


class _Again:
    """The second forward pass of a block: it draws the same random numbers, and its buffers change once only.

    torch restores its own generators, and neither those of Python and numpy, nor buffers: running statistics would
    count each batch twice.
    """

    def __init__(self, block: nn.Module) -> None:
        modules = [(module, dict(module.named_buffers(recurse=False))) for module in block.modules()]
        self.before = [(module, name, each.clone()) for module, own in modules for name, each in own.items()]
        self.random = random.getstate(), numpy.random.get_state()

    def __enter__(self) -> None:
        self.after = [(module, name, getattr(module, name)) for module, name, _ in self.before]
        self.random_after = random.getstate(), numpy.random.get_state()
        self._set([(module, name, each.clone()) for module, name, each in self.before], self.random)

    def __exit__(self, *_: Any) -> None:
        self._set(self.after, self.random_after)

    def _set(self, buffers: Any, states: Any) -> None:
        for module, name, buffer in buffers:
            setattr(module, name, buffer)
        random.setstate(states[0])
        numpy.random.set_state(states[1])
