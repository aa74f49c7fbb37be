"""What a run writes while it trains: metrics, status.json, lines on the console, and a progress bar."""

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tqdm import tqdm

from ddp.checkpoint.manager import TrainState
from ddp.core.errors import ExitCode, plural
from ddp.core.files import storage_errors, write_status
from ddp.core.process_exit import process_exit
from ddp.core.rank_logs import console
from ddp.core.run_config import RunConfig, hyperparameters
from ddp.data.loader import EvalLoader, TrainLoader
from ddp.distributed.process_group import DistContext
from ddp.training.metric_logger import MetricLogger
from ddp.training.output_dir import OutputDir
from ddp.training.throughput import Profiler, RemainingTime, Throughput, memory_mb
from ddp.training.wrapping import model_name

log = logging.getLogger(__name__)
STATUS_INTERVAL_S = 1.0


class RunLog:
    """The log of one run. Every rank calls it; rank 0 alone writes files, once `open` was called there."""

    def __init__(self, config: RunConfig, ctx: DistContext, state: TrainState, trackers: Sequence[Callable]) -> None:
        self.config, self.ctx, self.state, self.trackers = config, ctx, state, trackers
        self.output_dir = OutputDir(config)
        self.metrics: MetricLogger | None = None  # on rank 0
        self.profiler: Profiler | None = None
        self.bar: tqdm | None = None
        self.throughput, self.remaining = Throughput(), RemainingTime()
        self.total_steps = 0
        self.epoch_samples, self.epoch_s = 0, 0.0  # logged in this epoch, by this process
        self.last_train = ""  # the figures of the last logged steps, for the console
        self.status_written = 0.0  # when status.json was last written

    def open(self) -> None:
        """On rank 0, once it is clear that this run may use the directory: a refused one must not change it."""
        path = self.output_dir.path
        with storage_errors(path / "config.json"):
            self.output_dir.write_config()
            self.write_status("running")
            self.metrics = MetricLogger(self.config, self.state.step, hyperparameters(self.config), self.trackers)
        if self.config.profile:
            self.profiler = Profiler(path / "profile", self.ctx.device)

    def log_setup(
        self, model: torch.nn.Module, loader: TrainLoader, eval_loaders: Sequence[EvalLoader], peak_lr: float
    ) -> None:
        """Print the model, the data, the processes, and in training the steps."""
        config, ctx = self.config, self.ctx
        log.info(f"{model_name(model, config)}, {sum(tensor.numel() for tensor in model.parameters()):,} weights")
        counts = [
            f"{loader.length:,} training",
            *(f"{each.length:,} {each.part_name}" for each in eval_loaders if each.length),
        ]
        missing = " and ".join(f"no {each.part_name} set" for each in eval_loaders if not each.length)
        log.info(f"{loader.name}: {', '.join(counts)} samples{f'; {missing}' if missing else ''}")
        processes = plural(ctx.world_size, "process", "es")
        launcher = f" ({ctx.launcher.value})" if ctx.world_size > 1 else ""
        log.info(f"{processes}{launcher} on {ctx.device.type}, {ctx.backend}, {config.precision}")
        if not config.evaluate:
            passes = f" x {config.grad_accum_steps} passes" if config.grad_accum_steps > 1 else ""
            batch = f"global batch {loader.global_batch} = {processes} x {config.batch_size}{passes}"
            log.info(f"{batch}; {loader.steps_per_epoch:,} steps per epoch; learning rate {peak_lr:.4g}")

    def log_start(self, resumed_from: str | None) -> None:
        """Print where the run begins."""
        state = self.state
        epoch = f"epoch {state.epoch + 1}, sample {state.samples_consumed:,}"
        where = epoch if state.samples_consumed else f"the end of epoch {state.epoch}"
        if self.config.evaluate:
            log.info(f"evaluating {resumed_from}, of step {state.step:,}")
        elif resumed_from is None:
            log.info(f"a new run, in {self.output_dir.path}")
        else:
            log.info(f"resuming from {resumed_from}, at step {state.step:,}, {where}")

    def start_epoch(self, loader: TrainLoader, steps_left: int) -> None:
        """Show a progress bar on a terminal, and measure the speed from here on."""
        self.epoch_samples, self.epoch_s, self.last_train = 0, 0.0, ""
        self.throughput = Throughput(self.state.step, loader.wait_s)
        if self.metrics is not None and sys.stderr.isatty():
            options: dict[str, Any] = {"unit": "step", "leave": False, "mininterval": 0.5, "file": console(sys.stderr)}
            options |= {"total": loader.steps_per_epoch, "initial": loader.steps_per_epoch - steps_left}
            self.bar = tqdm(desc=f"epoch {self.state.epoch + 1}/{self.config.epochs}", **options)

    def step(self) -> None:
        """An optimizer step was taken."""
        if self.bar is not None:
            left = self.remaining.seconds(self.state.step)
            text = "" if left is None else f"{tqdm.format_interval(left)} to the end of the run"
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update()
        if self.profiler is not None:
            self.profiler.step()

    def close_bar(self) -> None:
        if self.bar is not None:
            self.bar.close()

    def log_train(self, metrics: Mapping[str, float], lr: float, loader: TrainLoader, *, on_console: bool) -> None:
        """Log the steps since the last logged one. Short epochs and the end of each have only the epoch's line."""
        step, first, steps = self.state.step, self.state.logged_step + 1, self.state.step - self.throughput.step
        rates = self.throughput.rates(step, loader.wait_s, loader.global_batch)
        self.epoch_samples += steps * loader.global_batch
        self.epoch_s += steps * rates["step_ms"] / 1000
        self.throughput = Throughput(step, loader.wait_s)
        about = {"first_step": first, "lr": lr, **rates, "memory_mb": memory_mb(self.ctx.device)}
        with self.throughput.paused():  # the first line starts TensorBoard
            self._write(step, "train", {"epoch": self.state.epoch + 1, **about}, metrics)
            if self.metrics is not None and loader.example is not None:
                self.metrics.write_images(loader.example, step)
                loader.example = None
        self.state.logged_step, self.last_train = step, f"train since step {first:,}  {format_metrics(metrics)}"
        if on_console:
            figures = f"{format_metrics(metrics)}  lr {lr:.4g}  {rates['samples_per_s']:,.0f} samples/s"
            log.info(f"{self._where(self.state.epoch + 1, step)}  train  {figures}")

    def log_eval(self, metrics: Mapping[str, float], eval_loader: EvalLoader, state: TrainState) -> None:
        """Log an evaluation of the weights that belong to `state`. Nothing, if there was no data."""
        if metrics:
            epoch = state.epoch + (state.samples_consumed > 0)
            self._write(state.step, eval_loader.part, {"epoch": epoch, "count": eval_loader.length}, metrics)
            best = "  (best.pt)" if state.best_step == state.step and not self.config.evaluate else ""
            log.info(f"{self._where(epoch, state.step)}  {eval_loader.part:<5}  {format_metrics(metrics)}{best}")

    def log_epoch(self, train_metrics: Mapping[str, float], metrics: Mapping[str, float], count: int) -> None:
        """Log the end of an epoch: the metrics of training, and those of `count` validation samples. Each may be empty.

        Without train_metrics, the console shows the last logged steps, and which they are.
        """
        state, epoch = self.state, self.state.epoch + 1
        shown = [f"train  {format_metrics(train_metrics)}" if train_metrics else self.last_train]
        if train_metrics:
            self._write(state.step, "train_epoch", {"epoch": epoch, "first_step": state.epoch_start + 1}, train_metrics)
        if metrics:
            self._write(state.step, "val", {"epoch": epoch, "count": count}, metrics)
            shown += [f"val  {format_metrics(metrics)}", "best" if state.best_step == state.step else ""]
        shown += [f"{self.epoch_samples / self.epoch_s:,.0f} samples/s"] if self.epoch_s else []
        log.info("  ".join(filter(None, [self._where(epoch, state.step), *shown])))

    def _where(self, epoch: int, step: int) -> str:
        """`epoch  3/10  step  156/1,560`, as wide at the start as at the end.

        A run that had more epochs before than it is to have now has its own epoch and step as totals.
        """
        if self.config.evaluate:
            return f"epoch {epoch}  step {step:,}"
        epochs, steps = f"{max(epoch, self.config.epochs):,}", f"{max(step, self.total_steps):,}"
        return f"epoch {epoch:>{len(epochs)},}/{epochs}  step {step:>{len(steps)},}/{steps}"

    # ---- files: rank 0 may fail here alone; the other ranks learn it ------------------------------------------------

    def _write(self, step: int, split: str, about: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
        if self.metrics is not None:
            with storage_errors(self.metrics.path):
                self.metrics.write(step, split, about, metrics)
            self._update_status(max_age_s=STATUS_INTERVAL_S)

    def flush(self) -> None:
        """Before a checkpoint, which must not be on disk without the lines that led to it. Raises StorageError."""
        if self.metrics is not None:
            with storage_errors(self.metrics.path):
                self.metrics.flush()
            self._update_status()

    def close(self) -> None:
        """Close all files but status.json."""
        self.close_bar()
        if self.metrics is not None:
            self.metrics.close()

    def _update_status(self, max_age_s: float = 0.0) -> None:
        if time.monotonic() - self.status_written > max_age_s:
            self.status_written = time.monotonic()
            with storage_errors(self.output_dir.path / "status.json"):
                self.write_status("running")

    def write_status(self, state: str, exit_code: int | None = None, message: str = "") -> None:
        """Replace status.json, on rank 0. Raises OSError."""
        state = "stopped" if exit_code == ExitCode.STOPPED else state
        left = self.remaining.seconds(self.state.step) if state == "running" else None
        progress = {"step": self.state.step, "epoch": self.state.epoch, "saved": process_exit.saved_step}
        about = {"state": state, "exit_code": exit_code, **progress, "remaining_s": left, "message": message}
        write_status(self.output_dir.path, **about)


def format_metrics(values: Mapping[str, float]) -> str:
    """`loss 1.2345  accuracy 0.5678`: four decimals, or scientific notation for what is very small."""
    formats = {name: ".1e" if 0 < abs(value) < 1e-3 else ".4f" for name, value in values.items()}
    return "  ".join(f"{name} {value:{formats[name]}}" for name, value in values.items())
