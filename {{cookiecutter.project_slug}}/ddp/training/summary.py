"""What a run prints before its first step."""

from collections.abc import Iterator, Sequence

import torch

from ddp.core.run_config import RunConfig
from ddp.data.loader import EvalLoader, TrainLoader
from ddp.distributed.process_group import DistContext, plural
from ddp.training.wrapping import model_name


def describe_run(
    model: torch.nn.Module,
    config: RunConfig,
    ctx: DistContext,
    train_loader: TrainLoader,
    eval_loaders: Sequence[EvalLoader],
    peak_lr: float,
) -> Iterator[str]:
    """Lines about the model, the data, the processes, and in training the steps."""
    weights = sum(tensor.numel() for tensor in model.parameters())
    yield f"{model_name(model, config)}, {weights:,} weights"
    yield f"{train_loader.name}: {sample_counts(train_loader, eval_loaders)}"
    processes = plural(ctx.world_size, "process", "es")
    launcher = f" ({ctx.launcher.value})" if ctx.world_size > 1 else ""
    yield f"{processes}{launcher} on {ctx.device.type}, {ctx.backend}, {config.precision}"
    if not config.evaluate:
        passes = f" x {config.grad_accum_steps} passes" if config.grad_accum_steps > 1 else ""
        batch = f"global batch {train_loader.global_batch} = {processes} x {config.batch_size}{passes}"
        yield f"{batch}; {train_loader.steps_per_epoch:,} steps per epoch; learning rate {peak_lr:.4g}"


def sample_counts(train_loader: TrainLoader, eval_loaders: Sequence[EvalLoader]) -> str:
    """`45,000 training, 5,000 validation samples; no test set`."""
    counts = [f"{each.length:,} {each.part_name}" for each in eval_loaders if each.length]
    missing = " and ".join(f"no {each.part_name} set" for each in eval_loaders if not each.length)
    samples = ", ".join([f"{train_loader.length:,} training", *counts])
    return f"{samples} samples{f'; {missing}' if missing else ''}"
