"""Shard a model: each rank holds a part of every weight, of its gradient and of its optimizer state (torch's FSDP2).

The weights of a block are gathered from all ranks before it computes, and freed again afterwards. So a rank needs
memory for its part of everything, and for all weights of one block.
"""

import sys
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from ddp.core.errors import UsageError, differences, first_few
from ddp.core.run_config import RunConfig
from ddp.core.threads import is_owner_file
from ddp.distributed.process_group import DistContext
from ddp.distributed.tensors import is_split, leaves, map_tensors
from ddp.parts.fsdp.blocks import Blocks, group_blocks
from ddp.parts.fsdp.building import built_checksum, restore_rows
from ddp.training.wrapping import reads_buffers, report_unused_weights, weights_of

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def shard_model(model: nn.Module, config: RunConfig, ctx: DistContext, blocks: Blocks) -> nn.Module:
    """Shard `model` in place, block by block. Call on every rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if ctx.device.type == "cuda" and ctx.backend == "gloo":  # torch's all-gather of a DTensor: a segmentation fault
        raise UsageError("--shard on GPUs needs NCCL: remove --backend gloo and start one process per GPU")
    _compare_built(model, ctx)
    refuse_numbers_of_rows()
    mesh = init_device_mesh(ctx.device.type, (ctx.world_size,))
    dtype = DTYPES[config.precision]
    wide = torch.float32 if dtype else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide)
    for_norm = MixedPrecisionPolicy(param_dtype=wide, output_dtype=dtype)
    for_root = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide, output_dtype=wide)
    attributes = {name: {**vars(weight)} for name, weight in model.named_parameters()}
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
        vars(weight).update({key: value for key, value in attributes[name].items() if key != "to_local"})
    for module in filter(_is_sharded_module, model.modules()):
        module.register_forward_hook(_copy_views, prepend=True)
    model.register_forward_hook(_reshard_after_evaluation)
    _compare_first_pass(model, ctx)
    _broadcast_buffers_that_are_read(model, ctx)
    report_unused_weights(model)
    _refuse_changed_requires_grad(model)
    return model


def refuse_numbers_of_rows() -> None:
    """Let item(), float(), int() and bool() of a split tensor raise UsageError.

    torch gives each rank the number of its own rows, without a word.
    """
    from torch.distributed.tensor import DTensor

    def read(name: str, tensor: Any) -> Any:
        if all(place.is_replicate() for place in tensor.placements):
            return getattr(tensor.to_local(), name)()
        if not is_owner_file(sys._getframe(2).f_code.co_filename):  # an optimizer of torch, for example
            raise RuntimeError(f"{name}() does not have a sharding strategy")
        rule = f"each rank has its own rows only: on every rank, write whole(tensor).{name}()"
        raise UsageError(f"--shard: {name}() of a tensor of weights: {rule}, from ddp.distributed.tensors import whole")

    for name in ("item", "__float__", "__int__", "__bool__"):
        setattr(DTensor, name, lambda tensor, name=name: read(name, tensor))


def _is_sharded_module(module: nn.Module) -> bool:
    return hasattr(module, "set_requires_gradient_sync")


def _compare_built(model: nn.Module, ctx: DistContext) -> None:
    """Raise UsageError unless all ranks have built the same weights. DDP would send those of rank 0 to all others."""
    ours = {name: built_checksum(each) for name, each in chain(model.named_parameters(), model.named_buffers())}
    everyone = ctx.compare(ours)
    for rank, theirs in enumerate(everyone):
        if other := differences(everyone[0], theirs, "{name}"):
            remedy = "draw random numbers from the global generators of torch, numpy and Python"
            raise UsageError(f"--shard: build_model made other weights on rank {rank} ({first_few(other)}): {remedy}")


def check_optimizers(parts: Mapping[str, Any]) -> None:
    """Raise UsageError for an optimizer that was built before the model was sharded: it would train nothing."""
    for name, part in parts.items():
        if isinstance(part, torch.optim.Optimizer) and not all(map(is_split, weights_of(part))):
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


def _broadcast_buffers_that_are_read(model: nn.Module, ctx: DistContext) -> None:
    """Send rank 0's buffers to all ranks before a training pass that reads them, as DDP does."""
    are_read = reads_buffers(model)

    def send(*_: Any) -> None:
        if torch.is_grad_enabled() and are_read():
            ctx.broadcast_buffers(model)

    if any(True for _ in model.buffers()):
        model.register_forward_pre_hook(send)


def _refuse_changed_requires_grad(model: nn.Module) -> None:
    """Raise UsageError if a frozen weight is trained later, or a trained one is frozen: FSDP2 would train on."""
    trained = {name: (weight, weight.requires_grad) for name, weight in model.named_parameters()}

    def check(*_: Any) -> None:
        for name, (weight, before) in trained.items():
            if weight.requires_grad != before:
                remedy = "set its learning rate to 0 instead"
                if not before:
                    remedy = "unfreeze it before wrap_model, and keep its learning rate at 0 until then"
                raise UsageError(f"--shard: {name} was {'frozen' if before else 'unfrozen'} after wrap_model: {remedy}")

    model.register_forward_pre_hook(check)


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
