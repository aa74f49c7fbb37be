"""The blocks of a model: --shard gathers the weights of one at a time, --checkpoint-activations computes each twice."""

import logging
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp.core.errors import UsageError

log = logging.getLogger(__name__)
MIN_BLOCK = 0.01  # of all weights: a smaller block would cost more time to gather than it saves memory
MIN_WARNED = 10_000_000  # weights: a smaller model is no reason to use --shard
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
Blocks = Sequence[nn.Module]


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
        block.forward = partial(torch.compiler.disable(_compute_twice, recursive=False), block, block.forward)


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
