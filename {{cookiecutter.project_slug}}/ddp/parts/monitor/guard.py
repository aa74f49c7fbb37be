"""Faults of processors and memories: compare the ranks at each save; with --guard N, compute some gradients twice."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from ddp.checkpoint.state import TrainState
from ddp.core.errors import Diverged, UsageError
from ddp.core.parts import Callback, Compute
from ddp.distributed.seeds import seed_step
from ddp.distributed.tensors import leaves, named_leaves
from ddp.parts.monitor.replicas import bit_sum, bit_sums, check_replicas, rank_hosts
from ddp.training.meter import Meter


class Guard(Callback):
    """Raises Diverged on every rank if a fault has changed a bit."""

    def __init__(self, run: Any) -> None:
        self.run, self.is_called = run, False

    def wrapped(self, model: Any, task: Any) -> None:
        if self.run.config.guard and self.run.ctx.work.sharded:
            raise UsageError("--guard: no rank of this run has another one's weights or gradients; remove --guard")

    def wrap_compute(self, compute: Compute) -> Compute:
        self.is_called = True
        return twice(compute, self.run.state) if self.run.config.guard else compute

    def stepped(self) -> None:
        if self.run.config.guard and not self.is_called:
            raise UsageError("--guard: main.py does not call run.checked(compute_gradients)")

    def saving(self) -> None:
        if self.run.config.guard != 0 and not self.run.ctx.work.sharded:
            check_replicas(self.run.checkpoints.fields, self.run.ctx)


def twice(compute_gradients: Compute, state: TrainState) -> Compute:
    """`compute_gradients` of main.py, but twice in every N-th step.

    Both times from the same weights, batches, seeds and buffers. It raises Diverged on every rank if a gradient of one
    rank has other bits the second time: an all-reduce would give it to all. UsageError, if the first pass has changed
    what the second one starts from.
    """

    def compute(ddp_model: Any, training: Any, batches: Iterable[Any], config: Any, ctx: Any) -> bool:
        if state.step % config.guard:
            return compute_gradients(ddp_model, training, batches, config, ctx)
        batches = list(batches)
        alone = getattr(ddp_model, "no_sync", nullcontext)  # the first time, without an all-reduce
        sends_buffers = getattr(ddp_model, "require_forward_param_sync", True)  # no_sync changes it
        with _unchanged(training, batches), alone(), _sums_of_gradients(training) as first:
            compute_gradients(ddp_model, replace(training, meter=Meter(ctx)), batches, config, ctx)
        ddp_model.require_forward_param_sync = sends_buffers
        seed_step(config.seed, state.step, ctx.rank)
        with _sums_of_gradients(training) as second:
            has_gradients = compute_gradients(ddp_model, training, batches, config, ctx)
        _compare(first, second, ctx)
        return has_gradients

    return compute


@contextmanager
def _sums_of_gradients(training: Any) -> Iterator[dict[str, torch.Tensor]]:
    """The bits of each gradient of this rank in the block, added up as bit_sum does; by the names of the weights."""
    sums: dict[str, torch.Tensor] = {}

    def add(name: str, gradient: torch.Tensor) -> None:
        sums[name] = sums.get(name, 0) * 3 + bit_sum(gradient)

    weights = [pair for module in _modules(training) for pair in module.named_parameters()]
    trained = [(name, weight) for name, weight in weights if weight.requires_grad]
    hooks = [weight.register_hook(lambda gradient, name=name: add(name, gradient)) for name, weight in trained]
    yield sums
    for hook in hooks:
        hook.remove()


@contextmanager
def _unchanged(training: Any, batches: Any) -> Iterator[None]:
    """Undo what the block does to gradients and buffers. Raises UsageError if it changes anything else."""
    modules, before = _modules(training), _saved(training, batches)
    gradients = {weight: weight.grad for module in modules for weight in module.parameters()}
    owners = [part for module in modules for part in module.modules()]
    buffers = [(part, key, buffer) for part in owners for key, buffer in part.named_buffers(recurse=False)]
    contents = [buffer.clone() for _, _, buffer in buffers]
    for weight in gradients:
        weight.grad = None
    yield
    for weight, gradient in gradients.items():
        weight.grad = gradient
    for (owner, key, buffer), content in zip(buffers, contents, strict=True):
        setattr(owner, key, buffer.copy_(content))  # the block may have put another tensor in its place
    after = _saved(training, batches)
    if changed := [name for name in before | after if before.get(name) != after.get(name)]:
        remedy = "change a copy, or change it after compute_gradients, as in apply_gradients"
        raise UsageError(f"--guard computes the gradients twice, and each time {changed[0]} changes: {remedy}")


def _parts(training: Any) -> dict[str, Any]:
    """The fields of Training that have a value, by name."""
    return {name: part for name, part in vars(training).items() if part is not None}


def _modules(training: Any) -> list[torch.nn.Module]:
    return [part for part in _parts(training).values() if isinstance(part, torch.nn.Module)]


def _saved(training: Any, batches: Any) -> dict[str, Any]:
    """What checkpoints hold, but for the meter; and the batches. Texts of values, and sums of the bits of tensors."""
    parts = {name: part for name, part in _parts(training).items() if name != "meter"}
    states = {name: part.state_dict() for name, part in parts.items()}
    states["a batch"] = dict(enumerate(leaves(batches)))
    found = {": ".join(map(str, keys)): value for keys, value in named_leaves(states)}
    for name, part in parts.items():
        if hasattr(part, "before_save") and not isinstance(part, torch.nn.Module):  # it may save its attributes then
            values = [(".".join(map(str, keys)), value) for keys, value in named_leaves({name: vars(part)})]
            found |= {key: value for key, value in values if isinstance(value, int | float | torch.Tensor)}
    tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    return {name: repr(value) for name, value in found.items() if name not in tensors} | bit_sums(tensors)


def _compare(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], ctx: Any) -> None:
    sums, again = bit_sums(first), bit_sums(second)
    different = [name for name in sums | again if sums.get(name) != again.get(name)]
    if not any(found := ctx.gather(different)):
        return
    wrong = [rank for rank, names in enumerate(found) if names]
    who = rank_hosts(wrong, ctx)
    cause = "its processor or memory is faulty: repeat without that machine"
    if len(wrong) == ctx.world_size:
        cause = "its processor or memory is faulty, or the model keeps something outside of its state_dict()"
    weight = found[wrong[0]][0]
    raise Diverged(f"{who} computed two different gradients of {weight} from the same weights and batch: {cause}")
