"""What a run reports while it trains: lines of metrics, its speed, status.json, and a progress bar."""

import logging
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from ddp.checkpoint.manager import CheckpointManager, TrainState
from ddp.core.errors import ExitCode, UsageError, plural
from ddp.core.files import storage_errors, write_status
from ddp.core.process_exit import process_exit
from ddp.core.rank_logs import console
from ddp.core.run_config import RunConfig
from ddp.data.dataset import classes_of, data_name
from ddp.data.loader import EvalLoader, TrainLoader
from ddp.distributed.process_group import DistContext
from ddp.training.gpu_wait import GpuWait
from ddp.training.meter import close
from ddp.training.output_dir import MetricLogger, OutputDir
from ddp.training.wrapping import model_name

log = logging.getLogger(__name__)
Metric = Callable[[Mapping[str, float]], float]
STATUS_INTERVAL_S, HEARTBEAT_S = 1.0, 5.0  # for status.json: with a line of metrics, and without


class Moment(NamedTuple):
    """A moment of the training. Both times are in seconds; the clock stops during evaluations and saves."""

    step: int
    clock: float
    waited: float  # for data

    def rates(self, end: "Moment", global_batch: int) -> dict[str, float]:
        """Until `end`: samples/s of all ranks, ms per step, and ms of it spent waiting for data."""
        steps, elapsed = end.step - self.step, end.clock - self.clock
        return {
            "samples_per_s": round(steps * global_batch / elapsed, 1),
            "step_ms": round(1000 * elapsed / steps, 3),
            "data_ms": round(1000 * (end.waited - self.waited) / steps, 3),
        }


class RunLog:
    """The log of one run. Every rank calls it; rank 0 alone writes files, once `open_files` was called there."""

    def __init__(self, config: RunConfig, ctx: DistContext, checkpoints: CheckpointManager, trackers: Any) -> None:
        self.config, self.ctx, self.trackers = config, ctx, trackers
        self.state = checkpoints.train_state
        self.phase = "start-up"  # until the first step; then productive, saving or evaluation
        self.output_dir = OutputDir(config)
        self.metrics: MetricLogger | None = None  # on rank 0
        self.differ: set[str] = set()  # metrics of which a rank had another value than rank 0
        self.bar: tqdm | None = None
        self.gpu_wait = GpuWait(ctx)
        self.loader: Any = None  # from start() on, as the next two lines
        self.resumed_from: str | None = None
        self.first_step, self.total_steps, self.steps_per_epoch, self.started = 0, 0, 0, 0.0
        self.epoch_moment = self.logged_moment = Moment(0, 0.0, 0.0)  # where the epoch and the next logged steps begin
        self.last_train = ""  # the figures of the last logged steps of this epoch, for the console
        self.paused_s, self.status_written = 0.0, 0.0  # all pauses together; when status.json was last written

    def start(self, loader: TrainLoader, resumed_from: str | None) -> None:
        """The run has its data and its progress: `state` is loaded."""
        self.loader, self.resumed_from = loader, resumed_from
        state, self.first_step, self.started = self.state, self.state.step, time.perf_counter()
        epoch, last = state.epoch, self.config.epochs - 1
        self.steps_per_epoch = loader.steps_left(min(epoch, last))  # a sampler may have epochs of other lengths
        left = 0 if epoch > last else loader.steps_left(epoch, state.samples_consumed)
        left += max(0, last - epoch) * self.steps_per_epoch
        total = state.step + left  # earlier steps may have had another global batch
        self.total_steps = min(total, self.config.max_steps or total)

    def open_files(self) -> None:
        """On rank 0, once it is clear that this run may use the directory: a refused one must not change it."""
        path = self.output_dir.path
        with storage_errors(path / "config.json"):
            self.output_dir.write_config()
            self.metrics = MetricLogger(self.config, self.state.step, self.trackers)
        self.write_status()

    def log_summary(self, model: torch.nn.Module, eval_loaders: Sequence[EvalLoader], peak_lr: float) -> None:
        """Print the model, the data, the processes, the steps, and where the run begins."""
        config, ctx, loader, state = self.config, self.ctx, self.loader, self.state
        log.info(f"{model_name(model, config)}, {sum(tensor.numel() for tensor in model.parameters()):,} weights")
        counts = [f"{loader.length:,} training"]
        counts += [f"{each.length:,} {each.part_name}" for each in eval_loaders if each.length]
        missing = " and ".join(f"no {each.part_name} set" for each in eval_loaders if not each.length)
        log.info(f"{data_name(loader.dataset)}: {', '.join(counts)} samples{missing and f'; {missing}'}")
        if classes := [str(name) for name in classes_of(loader.dataset)]:
            names = classes if len(classes) <= 3 else [classes[0], "...", classes[-1]]
            log.info(f"{plural(len(classes), 'class', 'es')}: {', '.join(names)}")
        processes = plural(ctx.world_size, "process", "es")
        launcher = f" ({ctx.launcher.value})" if ctx.world_size > 1 else ""
        log.info(f"{processes}{launcher} on {ctx.device.type}, {ctx.backend}, {config.precision}")
        if config.evaluate:
            return log.info(f"evaluating {self.resumed_from}, of step {state.step:,}")
        passes = f" x {config.grad_accum_steps} passes" if config.grad_accum_steps > 1 else ""
        batch = f"global batch {loader.global_batch} = {processes} x {config.batch_size}{passes}"
        log.info(f"{batch}; {self.steps_per_epoch:,} steps per epoch; learning rate {peak_lr:.4g}")
        if self.resumed_from is None:
            return log.info(f"a new run, in {self.output_dir.path}")
        inside = f"epoch {state.epoch + 1}, sample {state.samples_consumed:,}"
        where = inside if state.samples_consumed else f"the end of epoch {state.epoch}"
        log.info(f"resuming from {self.resumed_from}, at step {state.step:,}, {where}")

    # ---- steps ------------------------------------------------------------------------------------------------------

    def start_epoch(self) -> None:
        """Show a progress bar on a terminal, and measure the speed from here on."""
        self.enter("productive")
        self.last_train, self.epoch_moment, self.logged_moment = "", self._moment(), self._moment()
        self.gpu_wait.start_epoch()
        if self.metrics is not None and sys.stderr.isatty():
            total, left = (self.loader.steps_left(self.state.epoch, used) for used in (0, self.state.samples_consumed))
            about: dict[str, Any] = {"unit": "step", "leave": False, "mininterval": 0.5, "file": console(sys.stderr)}
            about["desc"] = f"epoch {self.state.epoch + 1}/{self.config.epochs}"
            self.bar = tqdm(total=total, initial=total - left, **about)

    def step(self) -> None:
        """An optimizer step was taken."""
        self.gpu_wait.step(time.perf_counter() - self.paused_s)
        if self.phase == "start-up":
            self._enter("productive")
        for each in self.ctx.callbacks:
            each.stepped()
        if self.bar is not None:
            left = tqdm.format_interval(self._remaining_s() or 0)
            self.bar.set_postfix_str(f"{left} to the end of the run", refresh=False)
            self.bar.update()

    def end_steps(self) -> None:
        self.enter("evaluation")
        self.close_bar()

    def close_bar(self) -> None:
        if self.bar is not None:
            self.bar.close()

    def enter(self, phase: str) -> None:
        """Another phase begins. The start-up lasts until the first step was taken."""
        if self.phase != "start-up":
            self._enter(phase)

    def _enter(self, phase: str) -> None:
        self.phase = phase
        for each in self.ctx.callbacks:
            each.phase(phase)

    @contextmanager
    def paused(self, phase: str | None = None) -> Iterator[None]:
        """The time of the block does not count as training."""
        start, before = time.perf_counter(), self.phase
        self._enter(phase or before)
        yield
        self._enter(before)
        self.paused_s += time.perf_counter() - start

    def _moment(self) -> Moment:
        return Moment(self.state.step, time.perf_counter() - self.paused_s, self.loader.wait_s)

    def _remaining_s(self) -> float | None:
        """Until the end of the run, from the steps so far, evaluations and all. None before the first one."""
        steps = self.state.step - self.first_step
        left = self.total_steps - self.state.step
        return left * (time.perf_counter() - self.started) / steps if steps > 0 else None

    # ---- metrics ----------------------------------------------------------------------------------------------------

    def log_train(self, metrics: Mapping[str, float], lr: float, totals: Any, *, on_console: bool) -> None:
        """Log the steps since the last logged one. Short epochs and the end of each have only the epoch's line.

        totals: of these steps, on all ranks, as batch_totals has them.
        """
        state, first, shown = self.state, self.state.logged_step + 1, format_metrics(metrics)
        before, self.logged_moment = self.logged_moment, self._moment()
        rates = before.rates(self.logged_moment, self.loader.global_batch)
        totals = totals if first > self.first_step else {}  # they may be those of steps before a resume
        more = [each.figures(rates, totals, self.logged_moment.clock - before.clock) for each in self.ctx.callbacks]
        with self.paused():  # the first line starts TensorBoard
            about = {"first_step": first, "lr": lr, **rates, "memory_mb": memory_mb(self.ctx.device)}
            for figures, _ in more:
                about |= figures
            self._write(state.epoch + 1, state.step, "train", metrics, **about)
            if self.metrics is not None and (images := self.loader.example) is not None:  # what the model gets
                self.loader.example = None
                self.metrics.to_tensorboard(lambda writer: writer.add_images("train/inputs", images, state.step))
        state.logged_step, self.last_train = state.step, f"train since step {first:,}  {shown}"
        if on_console:
            speed = f"lr {lr:.4g}  {rates['samples_per_s']:,.0f} samples/s"
            self._print(state.epoch + 1, state.step, f"train  {shown}", speed, *(text for _, text in more))

    def same_metrics(self, metrics: Mapping[str, Any], metric: Metric | None = None) -> dict[str, Any]:
        """`metrics`, those of rank 0 where the ranks have others, with a warning. Call on every rank.

        Raises UsageError for a metric that cannot be logged; and if the ranks have other names, or `metric` makes
        something else of their metrics: they would choose other weights as the best.
        """
        check_metrics(metrics)
        everyone = self.ctx.gather({name: float(value) for name, value in metrics.items()})
        first, same = everyone[0], dict(metrics)
        for rank, theirs in enumerate(everyone):
            for name in {**first, **theirs}:
                one, other = first.get(name, math.nan), theirs.get(name, math.nan)
                if name in same and str(one) != str(other):
                    same[name] = one
                if first.keys() == theirs.keys() and close(one, other):
                    continue
                found = f"evaluate() in main.py returned {name}={one} on rank 0 and {other} on rank {rank}"
                remedy = "add it up over the ranks with a Meter, or return ctx.on_main(lambda: it)"
                if first.keys() != theirs.keys() or (metric and not close(metric(first), metric(theirs))):
                    raise UsageError(f"{found}: {remedy}")
                if name not in self.differ and self.ctx.rank == 0:
                    log.warning(f"warning: {found}, and that of rank 0 is logged; {remedy}")
                self.differ.add(name)
        return same

    def log_eval(self, metrics: Mapping[str, float], eval_loader: EvalLoader, state: TrainState) -> None:
        """Log an evaluation of the weights that belong to `state`. Nothing, if there was no data."""
        if metrics:
            work, step = self.ctx.work, state.step
            step += work.in_epoch and work.in_step and work.step == step  # a step was taken that is not counted yet
            epoch = state.epoch + (state.samples_consumed > 0 or step > state.step)
            self._write(epoch, step, eval_loader.part, metrics, count=eval_loader.length)
            best = state.best_step == step and not self.config.evaluate
            figures = f"{eval_loader.part:<5}  {format_metrics(metrics)}"
            self._print(epoch, step, figures, "(best.pt)" if best else "")

    def log_epoch(self, train_metrics: Mapping[str, float], metrics: Mapping[str, float], count: int) -> None:
        """Log the end of an epoch: the metrics of training, and those of `count` validation samples. Each may be empty.

        Without train_metrics, the console shows the last logged steps, and which they are.
        """
        state, epoch = self.state, self.state.epoch + 1
        shown = [f"train  {format_metrics(train_metrics)}" if train_metrics else self.last_train]
        gpu = self.gpu_wait.figures()
        if train_metrics:
            self._write(epoch, state.step, "train_epoch", train_metrics, first_step=state.epoch_start + 1, **gpu)
        if metrics:
            self._write(epoch, state.step, "val", metrics, count=count)
            best = state.best_step == state.step and not math.isnan(state.best or 0.0)
            shown += ["val (best)" if best else "val", format_metrics(metrics)]
        if self.logged_moment.step > self.epoch_moment.step:
            rates = self.epoch_moment.rates(self.logged_moment, self.loader.global_batch)
            shown.append(f"{rates['samples_per_s']:,.0f} samples/s")
            if gpu:
                shown.append(self.gpu_wait.advice(gpu["gpu_waits"], rates["data_ms"] / rates["step_ms"], self.config))
        self._print(epoch, state.step, *shown)

    def _print(self, epoch: int, step: int, *shown: str) -> None:
        """`epoch  3/10  step  156/1,560  ...`, as wide at the start as at the end.

        A run that had more epochs before than it is to have now has its own epoch and step as totals.
        """
        where = f"epoch {epoch}  step {step:,}"
        if not self.config.evaluate:
            epochs, steps = f"{max(epoch, self.config.epochs):,}", f"{max(step, self.total_steps):,}"
            where = f"epoch {epoch:>{len(epochs)},}/{epochs}  step {step:>{len(steps)},}/{steps}"
        log.info("  ".join(filter(None, [where, *shown])))

    # ---- files: rank 0 may fail here alone; the other ranks learn it ------------------------------------------------

    def _write(self, epoch: int, step: int, split: str, metrics: Mapping[str, Any], **about: float) -> None:
        if self.metrics is not None:
            self.metrics.write(step, split, {"epoch": epoch, **about}, metrics)
            self.write_status(max_age_s=STATUS_INTERVAL_S)

    def flush(self) -> None:
        """Before a checkpoint, which must not be on disk without the lines that led to it. Raises StorageError."""
        if self.metrics is not None:
            self.metrics.flush()
            self.write_status()

    def close(self) -> None:
        """Close all files but status.json."""
        self.close_bar()
        if self.metrics is not None:
            self.metrics.close()

    def write_status(
        self, exit_code: int | None = None, message: str = "", max_age_s: float = 0.0, *, done: bool = False
    ) -> None:
        """Replace status.json on rank 0, unless it is younger than `max_age_s`. Raises StorageError."""
        if self.metrics is None or time.monotonic() - self.status_written < max_age_s:
            return
        self.status_written = time.monotonic()
        states: dict[int | None, str] = {None: "running", ExitCode.STOPPED: "stopped"}
        state = "done" if done else states.get(exit_code, "failed")
        progress = {"step": self.state.step, "epoch": self.state.epoch, "saved": process_exit.saved_step}
        left = self._remaining_s() if state == "running" else None
        about = {"state": state, "exit_code": exit_code, **progress, "remaining_s": left, "message": message}
        for each in self.ctx.callbacks:
            about |= each.status()
        with storage_errors(self.output_dir.path / "status.json"):
            write_status(self.output_dir.path, **about)


def memory_mb(device: torch.device) -> float:
    """The peak memory of this process in megabytes: of its GPU, or of the host if it has none."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 1e6, 1)
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6, 1)


def check_metrics(metrics: Mapping[str, Any]) -> None:
    """Raise UsageError for a metric that cannot be logged."""
    for name, value in metrics.items():
        try:
            float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            remedy = "return one number for each name, NaN where it is undefined"
            raise UsageError(f"compute_metrics in model.py returned {name}={value!r}: {remedy}") from error


def format_metrics(values: Mapping[str, float]) -> str:
    """`loss 1.2345  accuracy 0.5678`: four decimals, or scientific notation for what is very small."""
    check_metrics(values)
    formats = {name: ".1e" if 0 < abs(float(value)) < 1e-3 else ".4f" for name, value in values.items()}
    return "  ".join(f"{name} {float(value):{formats[name]}}" for name, value in values.items())
