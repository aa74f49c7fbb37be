"""A training run: its progress, what it logs, when it saves and stops, and how it ends.

OUTPUT_DIR/config.json      options, versions, git commit      OUTPUT_DIR/checkpoints/step_NNNNNNNN.pt   the newest few
OUTPUT_DIR/status.json      progress, or how the run ended     OUTPUT_DIR/best.pt                        the best one
OUTPUT_DIR/metrics.jsonl    one line per logged step           OUTPUT_DIR/tensorboard/                   as curves
"""

import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, NoReturn

import torch

from ddp.checkpoint.manager import CheckpointManager, TrainState
from ddp.checkpoint.state import UnsavedState
from ddp.core.errors import Diverged, ExitCode, Stopped, UsageError, exit_code_of, one_line
from ddp.core.files import storage_errors
from ddp.core.process_exit import process_exit
from ddp.core.run_config import RunConfig, hyperparameters
from ddp.core.source_hash import hash_source_files
from ddp.core.status import write_status
from ddp.core.stop_signal import stop_error, stop_signal
from ddp.data.loader import EvalLoader, TrainLoader
from ddp.distributed.process_group import DistContext
from ddp.distributed.seeds import seed_rank
from ddp.distributed.stop_sync import StopDecision, StopRequested
from ddp.training.meter import RemainingTime, Throughput, memory_mb
from ddp.training.metric_logger import MetricLogger, NullLogger, format_metrics
from ddp.training.output_dir import OutputDir
from ddp.training.profiler import Profiler
from ddp.training.summary import describe_end, describe_epoch, describe_run, describe_start, describe_step

log = logging.getLogger(__name__)
STATUS_INTERVAL_S = 1.0
LAST_SAVE_TIMEOUT_S = 25.0  # torchrun kills the other processes 30 s after one failed


class Run:
    """One training run. Call each method on every rank, unless its docstring has another rule."""

    def __init__(self, config: RunConfig, ctx: DistContext) -> None:
        self.config, self.ctx = config, ctx
        self.output_dir = OutputDir(config)
        self.checkpoints = CheckpointManager(config, ctx, self._on_saved)
        self.state = self.checkpoints.train_state
        self.logger: Any = NullLogger()
        self.profiler: Any = NullLogger()
        self.throughput, self.remaining = Throughput(), RemainingTime()
        self.max_steps = config.max_steps or sys.maxsize
        self.unsaved_state: UnsavedState | None = None  # of the caller's variables, from the first step on
        self.evaluated_state: TrainState | None = None  # if it is not `state`
        self.stop_reason: int = signal.SIGTERM  # on which all ranks agree
        self.logged_samples, self.logged_s = 0, 0.0  # in this epoch, by this process
        self.last_train = ""  # the figures of the last logged steps, for the console
        self.started, self.status_written = time.perf_counter(), 0.0  # when status.json was last written

    # ---- resuming and saving ----------------------------------------------------------------------------------------

    def resume(self, train_loader: TrainLoader, **state: Any) -> None:
        """Load `state` from the checkpoint that --resume asks for, if there is one; save it from then on.

        Each part of `state` has state_dict() and load_state_dict(). From now on a request to stop waits for the end of
        a step. Raises CheckpointError if no checkpoint can be used, or if it belongs to another model or other options.
        """
        if "schedule" not in state:
            raise UsageError("run.resume needs schedule=...: the one whose learning rate is logged")
        self.train_loader, self.schedule = train_loader, state["schedule"]
        seed_rank(self.config.seed, self.ctx.rank)
        self.resumed_from = self.checkpoints.resume(train_loader, state)
        if not self.config.evaluate:
            self.ctx.stop_sync.save_failed = lambda: self.checkpoints.writer.error is not None
            self.ctx.on_main(self._open_logs)
        elif self.resumed_from is None:
            where = self.output_dir.checkpoints
            raise UsageError(f"--evaluate: there is no checkpoint in {where}; train first, or use --resume PATH")
        stop_signal.defer_to_step_end = True

    def _open_logs(self) -> None:
        """On rank 0, once it is clear that this run may use the directory: a refused one must not change it."""
        with storage_errors(self.output_dir.path / "config.json"):
            self.output_dir.write_config()
            self._write_status("running")
            self.logger = MetricLogger(self.output_dir.path, self.state.step, hyperparameters(self.config))
        if self.config.profile:
            self.profiler = Profiler(self.output_dir.path / "profile", self.ctx.device)

    def save(self) -> None:
        """Write a checkpoint of everything passed to `resume`; and best.pt, if this step's evaluation was the best."""
        self._refuse_unsaved_state()
        with self.throughput.paused():
            self._log(self.logger.flush, status=True)
            self.checkpoints.save(self.logger.sync)  # no checkpoint is on disk without the lines that led to it

    def _refuse_unsaved_state(self) -> None:
        if self.unsaved_state is not None and (changed := self.unsaved_state.changed()):
            name = changed[0]
            lost = "its state changes as the run trains, and a resumed run would lose it"
            raise UsageError(f"main.py does not pass {name} to run.resume, but {lost}: add {name}={name} there")

    def _on_saved(self, step: int) -> None:
        process_exit.record_saved(step)  # for the launcher
        if self.ctx.rank == 0:
            self.ctx.monitor.share_saved(step)  # for the other ranks

    # ---- stopping ---------------------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """Ask all ranks to save and exit with 75, like SIGTERM: within a second, after a step. One rank is enough."""
        stop_signal.mark_requested(signal.SIGTERM)

    def should_stop(self, decision: StopDecision | None = None) -> bool:
        """Whether any rank was asked to stop, or agreed on `decision`: all ranks get the same answer, twice a second.

        Raises on every rank if the last checkpoint could not be written.
        """
        decision = decision or self.ctx.stop_sync.maybe_sync()
        if decision is None:
            return False
        if decision.save_failed:
            self.checkpoints.wait()  # raises the error of rank 0
        if decision.reason is not None:
            stop_signal.mark_requested(decision.reason)
            self.stop_reason = decision.reason  # this rank alone may have another one
        return decision.reason is not None

    def stop(self) -> NoReturn:
        """Save, and raise Stopped (or PeerLost, if the launcher is gone) on every rank."""
        detail = "while nothing was being trained"
        if not self.config.evaluate:
            if self.checkpoints.last_step != self.state.step:
                self.save()
            self.checkpoints.wait()
            detail = f"and saved, at step {self.state.step:,}: repeat the command to resume"
        error = stop_error(self.stop_reason, detail)
        error.on_every_rank = True
        process_exit.exiting_with = error.exit_code  # from now on, torchrun's SIGTERM is not a second request
        raise error from None

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def log_summary(self, model: torch.nn.Module, *eval_loaders: EvalLoader) -> None:
        """Print what is about to run."""
        config, loader, state = self.config, self.train_loader, self.state
        left = loader.sampler.steps_left(state.samples_consumed)
        left += (config.epochs - state.epoch - 1) * loader.steps_per_epoch
        self.total_steps = state.step + max(0, left)  # earlier steps may have had another global batch
        for line in describe_run(model, config, self.ctx, loader, eval_loaders, self.schedule.peak):
            log.info(line)
        if config.evaluate:
            log.info(f"evaluating {self.resumed_from}, of step {state.step:,}")
            return
        log.info(describe_start(state, self.resumed_from, self.output_dir.path))
        self.remaining = RemainingTime(min(self.total_steps, self.max_steps), state.step)
        if self.finished():
            limit = "--patience" if self._is_out_of_patience() else "--epochs or --max-steps"
            log.info(f"already done; to train longer, raise {limit}; or choose another --output-dir")

    def finished(self) -> bool:
        """Whether --epochs, --max-steps or --patience end the run, and it was evaluated: it exits with 0."""
        enough = self.state.step >= self.max_steps and self.state.evaluated_step == self.state.step
        return enough or self.state.epoch >= self.config.epochs or self._is_out_of_patience()

    def _is_out_of_patience(self) -> bool:
        return self.config.patience is not None and self.state.epochs_since_best >= self.config.patience

    def steps(self) -> Iterator[Any]:
        """The steps that are left of this epoch, up to --max-steps, each as its batches."""
        state, loader = self.state, self.train_loader
        left_in_epoch = loader.sampler.steps_left(state.samples_consumed)
        left = min(left_in_epoch, self.max_steps - state.step)
        self.completes_epoch = left == left_in_epoch
        self.last_step, self.logged_samples, self.logged_s, self.last_train = state.step + left, 0, 0.0, ""
        self.logger.open_bar(f"epoch {state.epoch + 1}/{self.config.epochs}", loader.steps_per_epoch, left_in_epoch)
        self.throughput = Throughput(state.step, loader.wait_s)
        self.ctx.stop_sync.restart()
        if self.unsaved_state is None:
            self.unsaved_state = UnsavedState(sys._getframe(1).f_locals, self.checkpoints.state.values())
        yield from islice(loader.steps(state.epoch, state.samples_consumed), max(0, left))
        self.logger.bar.close()

    def epoch_progress(self) -> float:
        """The epochs done in the middle of the coming step: what the learning rate follows."""
        middle = self.state.samples_consumed + self.train_loader.global_batch / 2
        return self.state.epoch + middle / self.train_loader.length

    def advance(self) -> None:
        """Count one optimizer step."""
        self.state.step += 1
        self.state.samples_consumed += self.train_loader.global_batch
        if process_exit.step is None:  # soon after the start, and then before each checkpoint
            self._refuse_unsaved_state()
        process_exit.step = self.state.step
        self.logger.show_step(self.remaining.seconds(self.state.step))
        self.profiler.step()

    def should_log(self) -> bool:
        """Every --log-every steps, and at the end of an epoch, so that a line covers one epoch only."""
        at_end = self.state.step == self.last_step and self.completes_epoch
        return self.state.step % self.config.log_every == 0 or at_end

    def should_save(self) -> bool:
        """Every --checkpoint-every steps, except at the end of an epoch, which saves after its evaluation."""
        every = self.config.checkpoint_every
        return every is not None and self.state.step % every == 0 and self.state.step != self.last_step

    def log_train(self, metrics: Mapping[str, float], lr: float) -> None:
        """Log the steps since the last logged one. Short epochs and the end of each have only the epoch's line."""
        step, epoch, loader = self.state.step, self.state.epoch + 1, self.train_loader
        rates = self.throughput.rates(step, loader.wait_s, loader.global_batch)
        self.logged_samples += (step - self.throughput.step) * loader.global_batch
        self.logged_s += (step - self.throughput.step) * rates["step_ms"] / 1000
        self.throughput = Throughput(step, loader.wait_s)
        first, rates["memory_mb"] = self.state.logged_step + 1, memory_mb(self.ctx.device)
        about = {"epoch": epoch, "first_step": first, "lr": lr, **rates}
        with self.throughput.paused():  # the first line imports TensorBoard
            self._log(self.logger.write, step, "train", about, metrics, loader.take_example())
        self.state.logged_step, self.last_train = step, f"train since step {first:,}  {format_metrics(metrics)}"
        if step != self.last_step and loader.steps_per_epoch > self.config.log_every:
            shown = f"{self._where(epoch, step)}  train  {format_metrics(metrics)}"
            log.info(f"{shown}  lr {lr:.4g}  {rates['samples_per_s']:,.0f} samples/s")

    def log_eval(self, metrics: Mapping[str, float], eval_loader: EvalLoader) -> None:
        """Log an evaluation, of the weights of `load_best` after that. Nothing, if there was no data."""
        state = self.evaluated_state or self.state
        if metrics:
            epoch = state.epoch + (state.samples_consumed > 0)
            about = {"epoch": epoch, "count": eval_loader.length}
            self._log(self.logger.write, state.step, eval_loader.part, about, metrics)
            best = "  (best.pt)" if state.best_step == state.step and not self.config.evaluate else ""
            log.info(f"{self._where(epoch, state.step)}  {eval_loader.part:<5}  {format_metrics(metrics)}{best}")

    def end_epoch(
        self,
        train_metrics: Mapping[str, float],
        metrics: Mapping[str, float],
        metric: Callable[[Mapping[str, float]], float],
        val_loader: EvalLoader,
    ) -> None:
        """After the evaluation at the end of an epoch or of --max-steps: log and save.

        If metric(metrics) is the highest so far, this step's checkpoint becomes best.pt. metrics: empty without data.
        train_metrics: over the epoch so far; if empty, the console shows the last logged steps, and which they are.
        """
        state = self.state
        if not (metrics and state.update_best(float(metric(metrics)), metrics)) and self.completes_epoch:
            state.epochs_since_best += 1
        self._log_epoch(train_metrics, metrics, val_loader.length)
        state.evaluated_step = state.step
        if self.completes_epoch:
            state.epoch, state.samples_consumed = state.epoch + 1, 0
            state.logged_step = state.epoch_start = state.step
        self.save()
        if self._is_out_of_patience():
            log.info(f"stopping early: no better validation metric in {state.epochs_since_best} epochs (--patience)")

    def _log_epoch(self, train_metrics: Mapping[str, float], metrics: Mapping[str, float], count: int) -> None:
        state, epoch = self.state, self.state.epoch + 1
        if train_metrics:
            about = {"epoch": epoch, "first_step": state.epoch_start + 1}
            self._log(self.logger.write, state.step, "train_epoch", about, train_metrics)
        if metrics:
            self._log(self.logger.write, state.step, "val", {"epoch": epoch, "count": count}, metrics)
        speed = self.logged_samples / self.logged_s if self.logged_s else None
        train = f"train  {format_metrics(train_metrics)}" if train_metrics else self.last_train
        shown = describe_epoch(train, metrics, state.best_step == state.step, speed)
        log.info(f"{self._where(epoch, state.step)}  {shown}")

    def _log(self, write: Callable[..., None], *arguments: Any, status: bool = False) -> None:
        """Write to the logs, and to status.json if `status` or if it is old. Rank 0 may fail alone; others learn it."""
        if self.logger:
            with storage_errors(self.output_dir.path / "metrics.jsonl"):
                write(*arguments)
                if status or time.monotonic() - self.status_written > STATUS_INTERVAL_S:
                    self.status_written = time.monotonic()
                    self._write_status("running")

    def load_best(self) -> None:
        """Load the weights of best.pt, after the last step of the run: for its only evaluation on the test set."""
        self.evaluated_state = self.checkpoints.load_best()

    def _where(self, epoch: int, step: int) -> str:
        return describe_step(epoch, step, None if self.config.evaluate else (self.config.epochs, self.total_steps))

    # ---- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Record that the run is complete. Call on rank 0 only."""
        if not self.logger:  # nothing was trained
            return
        state, path = self.state, self.output_dir.path
        with storage_errors(path):
            self.profiler.close()
            self.logger.close()
            self._write_status("done", 0)
        newest = next(iter(self.checkpoints.directory.paths()), None)
        if newest is None:  # a finished run's checkpoint, in a new directory
            return
        for line in describe_end(state, newest, path, time.perf_counter() - self.started):
            log.info(line)

    def record_failure(self, error: BaseException) -> None:
        """Add to `error` what the user needs to know of the run, and record it in status.json. Not a collective."""
        if not isinstance(error, Stopped):  # a checkpoint in flight holds a good state, whatever has happened since
            self.checkpoints.writer.done.wait(LAST_SAVE_TIMEOUT_S)
        if isinstance(error, Diverged):
            last = next(iter(self.checkpoints.directory.paths()), "none")
            error.args = (f"{error} (noticed at step {self.state.step:,}; last good checkpoint: {last})",)
        self.ctx.monitor.add_saved_step(error)
        if self.logger:
            with suppress(Exception):  # a full disk, for example, must not hide the first error
                self._write_status("failed", exit_code_of(error), one_line(error))
                self.logger.close()

    def on_hard_exit(self, code: int, message: str) -> None:
        """The process exits now, from a thread."""
        if code < 128:
            self.checkpoints.writer.done.wait(LAST_SAVE_TIMEOUT_S)
        if self.logger:
            self._write_status("failed", code, message)

    def _write_status(self, state: str, exit_code: int | None = None, message: str = "") -> None:
        state = "stopped" if exit_code == ExitCode.STOPPED else state
        left = self.remaining.seconds(self.state.step) if state == "running" else None
        progress = {"step": self.state.step, "epoch": self.state.epoch, "saved": process_exit.saved_step}
        about = {"state": state, "exit_code": exit_code, **progress, "remaining_s": left, "message": message}
        write_status(self.output_dir.path, **about)


@contextmanager
def open_run(config: RunConfig, ctx: DistContext) -> Iterator[Run]:
    """Open --output-dir for one run, and record how it ends. Call on every rank."""
    ctx.check_same({**config.shared_options(), **hash_source_files()})
    run = Run(config, ctx)
    if not config.evaluate:
        ctx.on_main(run.output_dir.open)
    process_exit.on_hard_exit = run.on_hard_exit
    ctx.on_failure.append(run.record_failure)
    try:
        yield run
    except StopRequested as request:  # in an evaluation; the training loop calls run.should_stop itself
        if not run.should_stop(request.decision):
            raise
        run.stop()
    run.checkpoints.wait()
    ctx.on_main(run.close)
