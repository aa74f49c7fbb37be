"""The lines that a run prints: before its first step, after an epoch, and at the end."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from ddp.checkpoint.manager import TrainState
from ddp.core.run_config import RunConfig
from ddp.data.loader import EvalLoader, TrainLoader
from ddp.distributed.process_group import DistContext, plural
from ddp.training.metric_logger import format_metrics
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


def describe_start(state: TrainState, resumed_from: str | None, output_dir: Path) -> str:
    """Where the training begins."""
    if resumed_from is None:
        return f"a new run, in {output_dir}"
    epoch = f"epoch {state.epoch + 1}, sample {state.samples_consumed:,}"
    where = epoch if state.samples_consumed else f"the end of epoch {state.epoch}"
    return f"resuming from {resumed_from}, at step {state.step:,}, {where}"


def describe_step(epoch: int, step: int, total: tuple[int, int] | None) -> str:
    """Where a run is; total: epochs and steps, None in an evaluation. As wide at the start as at the end.

    A run that had more epochs before than it is to have now has its own epoch and step as totals.
    """
    if total is None:
        return f"epoch {epoch}  step {step:,}"
    epochs, steps = (f"{max(pair):,}" for pair in zip((epoch, step), total, strict=True))
    return f"epoch {epoch:>{len(epochs)},}/{epochs}  step {step:>{len(steps)},}/{steps}"


def describe_epoch(train: str, val: Mapping[str, float], is_best: bool, speed: float | None) -> str:
    """The metrics of training and validation side by side, and the speed in samples/s. Each may be missing."""
    parts = [train] if train else []
    parts += [f"val  {format_metrics(val)}"] if val else []
    parts += ["best"] if val and is_best else []
    parts += [] if speed is None else [f"{speed:,.0f} samples/s"]
    return "  ".join(parts)


def describe_end(state: TrainState, newest: Path, output_dir: Path, seconds: float) -> Iterator[str]:
    """How long it took, the best metrics, and where the results are. newest: the newest checkpoint."""
    chosen = state.best is not None
    best = f"; best at step {state.best_step:,}: val {format_metrics(state.best_metrics)}" if chosen else ""
    yield f"done in {seconds:,.0f} s{best}"
    yield f"  best weights  {output_dir / 'best.pt'}" if chosen else f"  weights       {newest}"
    yield f"  curves        tensorboard --logdir {shlex.quote(str(output_dir / 'tensorboard'))}"
