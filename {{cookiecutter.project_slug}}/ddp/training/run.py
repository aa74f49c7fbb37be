"""A training run: its progress, when it logs, saves and stops, and how it ends."""

import gc
import logging
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, islice
from typing import Any, NoReturn

import torch

from ddp.checkpoint.manager import CheckpointManager
from ddp.checkpoint.reuse import with_saved_options
from ddp.core.errors import Diverged, Stopped, UsageError, exit_code_of, one_line
from ddp.core.files import hash_source_files, storage_errors
from ddp.core.parts import Compute, of_parts
from ddp.core.process_exit import process_exit
from ddp.core.run_config import DEFAULT_PARENT, Config, RunConfig
from ddp.core.signals import stop_error, stop_signal
from ddp.data.dataset import Datasets, data_name
from ddp.data.loader import EvalLoader, TrainLoader
from ddp.distributed.process_group import DistContext, check_backend
from ddp.distributed.rank_env import RankEnv
from ddp.distributed.seeds import seed_everything, seed_step
from ddp.distributed.stop_sync import StopDecision, StopRequested
from ddp.training.loss_mean import check_result
from ddp.training.run_log import HEARTBEAT_S, Metric, RunLog, format_metrics
from ddp.training.schedule import Schedule
from ddp.training.wrapping import check_model, check_same_weights, choose_algorithms, model_name

log = logging.getLogger(__name__)
LAST_SAVE_TIMEOUT_S = 25.0  # torchrun kills the other processes 30 s after one failed


class Run:
    """The progress of one run. Call each method on every rank."""

    def __init__(self, config: RunConfig, ctx: DistContext, metric: Metric, trackers: Sequence[Callable]) -> None:
        self.config, self.ctx, self.metric = config, ctx, metric
        self.checkpoints = CheckpointManager(config, ctx)
        self.state = self.checkpoints.train_state
        self.evaluated_state = self.state  # that of best.pt, in the last evaluation
        self.run_log = RunLog(config, ctx, self.checkpoints, trackers)
        self.max_steps = config.max_steps or sys.maxsize
        self.stop_reason = int(signal.SIGTERM)  # on which all ranks agree
        self.train_loader: Any = None  # from resume() on, as all below
        self.meter: Any = None
        self.schedules: list[Schedule] = []  # the learning rate of the first one is logged

    # ---- resuming and saving ----------------------------------------------------------------------------------------

    def resume(self, train_loader: TrainLoader, training: Any) -> None:
        """Load the fields of `training` from the checkpoint that --resume asks for, if any; save them from then on.

        training: a dataclass with the fields `schedule` and `meter`. Each field that is not None has state_dict() and
        load_state_dict(). From now on, a stop waits for the end of a step. Raises CheckpointError if none can be used.
        """
        self.train_loader, self.meter = train_loader, training.meter
        self.schedules = [part for part in vars(training).values() if isinstance(part, Schedule)]
        resumed_from = self.checkpoints.resume(train_loader, training)
        for schedule in self.schedules if resumed_from is not None else ():
            schedule.resume()
        self.run_log.start(train_loader, resumed_from)
        if not self.config.evaluate:
            self.ctx.stop_sync.save_failed = lambda: self.checkpoints.writer.error is not None
            self.ctx.on_main(self.run_log.open_files)
            for each in self.ctx.callbacks:
                each.started()
        elif resumed_from is None:
            where = self.run_log.output_dir.checkpoints
            raise UsageError(f"--evaluate: there is no checkpoint in {where}; train first, or use --resume PATH")
        self._seed_epoch()
        stop_signal.defer_to_step_end = True

    def _seed_epoch(self) -> None:
        """Seed what your code draws between two epochs: the same if the epoch is resumed in the middle."""
        seed_step(self.config.seed, -1 - self.state.epoch_start, self.ctx.rank)  # no step has a negative number

    def save(self) -> None:
        """Write a checkpoint of Training: before `end_epoch`, as the last step has left it; and best.pt if due."""
        with self.run_log.paused("saving"):
            for each in self.ctx.callbacks:
                each.saving()
            check_same_weights(self.checkpoints.fields, self.state.step, self.ctx)
            self.run_log.flush()
            self.checkpoints.save(self.run_log.output_dir.sync_logs)

    # ---- stopping ---------------------------------------------------------------------------------------------------

    def request_stop(self, reason: str = "") -> None:
        """Ask all ranks to save and exit with 75, after a step: usually within a second. One rank is enough.

        reason: rank 0 prints it, as does each other node, and status.json has it. Not a collective.
        """
        stop_signal.mark_requested(signal.SIGTERM, reason)

    def should_stop(self, decision: StopDecision | None = None) -> bool:
        """Whether any rank was asked to stop, or agreed on `decision`: the same answer on all ranks.

        They ask each other about twice a second; in between, the answer is False. Raises on every rank if the last
        checkpoint could not be written.
        """
        decision = decision or self.ctx.stop_sync.maybe_sync()
        for each in self.ctx.callbacks:
            each.synced()
        self.run_log.write_status(max_age_s=HEARTBEAT_S)  # a killed run leaves its last sign of life
        if decision is not None and decision.save_failed:
            self.checkpoints.wait()  # raises the error of rank 0
        if decision is None or decision.reason is None:
            return False
        stop_signal.mark_requested(decision.reason)
        self.stop_reason = decision.reason  # this rank alone may have another one
        return True

    def stop(self) -> NoReturn:
        """Save, and raise Stopped (or PeerLost, if the launcher is gone) on every rank."""
        detail, text = "while nothing was being trained", next(filter(None, self.ctx.gather(stop_signal.text)), "")
        if not self.config.evaluate:
            if self.checkpoints.last_step != self.state.step:
                self.save()
            self.checkpoints.wait()
            for each in self.ctx.callbacks:
                each.finish(max(1.0, LAST_SAVE_TIMEOUT_S + stop_signal.requested_at - time.monotonic()))
            detail = f"and saved, at step {self.state.step:,}: repeat the command to resume"
        error = stop_error(self.stop_reason, detail, text)
        process_exit.agree(error.exit_code)
        raise error from None

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def log_summary(self, model: torch.nn.Module, *eval_loaders: EvalLoader) -> None:
        """Print what is about to run."""
        self.run_log.log_summary(model, eval_loaders, self.schedules[0].peak)
        if self.finished() and not self.config.evaluate:
            limit = "--patience" if self._is_out_of_patience() else "--epochs or --max-steps"
            log.info(f"already done; to train longer, raise {limit}; or choose another --output-dir")

    def checked(self, compute_gradients: Compute) -> Compute:
        """`compute_gradients`, as the parts of this project check it, and with a check of what it returns."""
        for each in self.ctx.callbacks:
            compute_gradients = each.wrap_compute(compute_gradients)
        return partial(check_result, compute_gradients)

    def finished(self) -> bool:
        """Whether --epochs, --max-steps or --patience end the training, and it was evaluated. True with --evaluate."""
        enough = self.state.step >= self.max_steps and self.state.evaluated_step == self.state.step
        return enough or self.config.evaluate or self.state.epoch >= self.config.epochs or self._is_out_of_patience()

    def _is_out_of_patience(self) -> bool:
        return self.config.patience is not None and self.state.epochs_since_best >= self.config.patience

    def steps(self) -> Iterator[Any]:
        """The steps that are left of this epoch, up to --max-steps, each as its batches.

        Before each, it seeds all generators for the step and the rank, and sets the learning rate.
        """
        state, loader = self.state, self.train_loader
        self.run_log.start_epoch()
        self.ctx.stop_sync.restart(training=True)
        self.ctx.work.in_epoch = True
        for batches in islice(loader.steps(state.epoch, state.samples_consumed), max(0, self.max_steps - state.step)):
            seed_step(self.config.seed, state.step, self.ctx.rank)
            self.ctx.work.step = state.step
            middle = state.samples_consumed + loader.global_batch / 2  # of this step
            for schedule in self.schedules:
                schedule.start_step(state.epoch + middle / loader.sampler.length(state.epoch))
            yield batches
            if state.step == self.ctx.work.step:
                raise UsageError("call run.advance() once for each step, also for one that changes nothing")
        self.ctx.work.in_epoch = False
        with self.run_log.paused("saving"):
            self.checkpoints.collect()  # what a save in the evaluation writes: a resumed run repeats what follows here
        self.run_log.end_steps()
        seed_step(self.config.seed, state.step, self.ctx.rank)  # a run that resumes after the last step has none

    def advance(self) -> None:
        """Count one optimizer step. Log it every --log-every steps, and save it every --checkpoint-every steps.

        The end of an epoch is logged as well, so that a line covers one epoch only. `end_epoch` saves it.
        """
        state, loader, every = self.state, self.train_loader, self.config.checkpoint_every
        state.step += 1
        state.samples_consumed += loader.global_batch
        if state.step == self.run_log.first_step + 1:
            gc.collect()
            gc.freeze()  # from now on, a full garbage collection of this process does not visit what exists
            check_same_weights(self.checkpoints.fields, state.step, self.ctx)
        self.run_log.step()
        complete = self.epoch_is_complete()
        at_end = complete or state.step >= self.max_steps
        if state.step % self.config.log_every == 0 or complete:
            shown = not at_end and self.run_log.steps_per_epoch > self.config.log_every
            self.run_log.log_train(self.meter.take(), self.schedules[0].last_lr, self.meter.taken, on_console=shown)
        if every is not None and state.step % every == 0 and not at_end:
            self.save()

    def epoch_is_complete(self) -> bool:
        """Whether the last step of the epoch was taken. --max-steps may end the steps before."""
        return self.train_loader.steps_left(self.state.epoch, self.state.samples_consumed) == 0

    def end_epoch(self, metrics: Mapping[str, float], val_loader: EvalLoader) -> None:
        """After the evaluation at the end of an epoch or of --max-steps: log and save. metrics: empty without data.

        If the metric for the best model is the highest so far, this step's checkpoint becomes best.pt.
        """
        state, complete, self.checkpoints.collected = self.state, self.epoch_is_complete(), None
        metrics = self.run_log.same_metrics(metrics, self.metric)
        if not (metrics and state.update_best(float(self.metric(metrics)), metrics)) and complete:
            state.epochs_since_best += 1
        self.run_log.log_epoch(self.meter.take_epoch(complete), metrics, val_loader.length)
        state.evaluated_step = state.step
        for schedule in self.schedules if complete else ():
            schedule.finish_epoch(metrics)
        if complete:
            state.epoch, state.samples_consumed = state.epoch + 1, 0
            state.logged_step = state.epoch_start = state.step
        self.save()
        self._seed_epoch()
        if self._is_out_of_patience():
            log.info(f"stopping early: no better validation metric in {state.epochs_since_best} epochs (--patience)")

    def last_evaluations(self, val_loader: EvalLoader, test_loader: EvalLoader) -> Iterator[EvalLoader]:
        """What to evaluate in the end: the test set, by the weights of best.pt; with --evaluate, both sets."""
        for each in self.ctx.callbacks if not self.config.evaluate else ():
            each.trained()
        if self.config.evaluate:
            yield val_loader
        elif test_loader.length:
            self.evaluated_state = self.checkpoints.load_best() or self.state
        yield test_loader

    def to_tensorboard(self, write: Callable[[Any, int], Any]) -> None:
        """Call `write(SummaryWriter, step)`, on rank 0 only, once there is a line of metrics. Not a collective."""
        if self.run_log.metrics is not None:
            self.run_log.metrics.to_tensorboard(lambda writer: write(writer, self.state.step))

    def log_eval(self, metrics: Mapping[str, float], eval_loader: EvalLoader) -> None:
        """Log one of the last evaluations."""
        self.run_log.log_eval(self.run_log.same_metrics(metrics), eval_loader, self.evaluated_state)

    # ---- the end: recorded in status.json and for the user. Not collective: other ranks may be gone -----------------

    def succeed(self) -> None:
        """The run is complete. Call on rank 0 only."""
        if self.run_log.metrics is None:  # nothing was trained
            return
        path, best = self.run_log.output_dir.path, self.state.best is not None
        with storage_errors(path):
            self.run_log.close()
            self.run_log.write_status(0, done=True)
        if (newest := next(iter(self.checkpoints.directory.paths()), None)) is None:
            return  # a finished run's checkpoint, in a new directory
        metrics = f"; best at step {self.state.best_step:,}: val {format_metrics(self.state.best_metrics)}"
        log.info(f"done in {time.perf_counter() - self.run_log.started:,.0f} s{metrics if best else ''}")
        self._log_summaries()
        log.info(f"  best weights  {path / 'best.pt'}" if best else f"  weights       {newest}")
        log.info(f"  curves        tensorboard --logdir {shlex.quote(str(path / 'tensorboard'))}")

    def fail(self, error: BaseException) -> None:
        """Add to `error` what the user needs to know of the run, and record it."""
        if not isinstance(error, Stopped):  # a checkpoint in flight holds a good state, whatever has happened since
            self.checkpoints.writer.done.wait(LAST_SAVE_TIMEOUT_S)
            for each in self.ctx.callbacks:
                each.failed()
        if isinstance(error, Diverged):
            last = next(iter(self.checkpoints.directory.paths()), "none")
            error.args = (f"{error} (noticed at step {self.state.step:,}; last good checkpoint: {last})",)
        self.ctx.monitor.add_saved_step(error)
        if self.run_log.metrics is not None:
            self._log_summaries()
        with suppress(Exception):  # a full disk, for example, must not hide the first error
            self.run_log.write_status(exit_code_of(error), one_line(error))
            self.run_log.close()

    def _log_summaries(self) -> None:
        for line in filter(None, [each.summary() for each in self.ctx.callbacks]):
            log.info(f"  {line}")

    def hard_exit(self, code: int, message: str) -> None:
        """The process exits now, from a thread."""
        if code < 128:
            self.checkpoints.writer.done.wait(LAST_SAVE_TIMEOUT_S)
        self.run_log.write_status(code, message)


def prepare(config: Config, rank_env: RankEnv) -> Config:
    """Choose torch's algorithms, and seed. Returns `config`; for --evaluate, with the options of the checkpoint.

    Raises SetupError or UsageError if this machine or this torch lacks the device or the backend.
    """
    config = with_saved_options(config, rank_env)
    check_backend(config)
    choose_algorithms(config)
    seed_everything(config.seed)  # what load_datasets draws: the same on every rank, and after a resume
    return config


def build(task: Any, config: RunConfig, train_set: Any, env: RankEnv) -> torch.nn.Module:
    """task.build_model(config, train_set), on the CPU. A part may keep only what `wrap_model` needs of it.

    Refuses options that this model or this machine does not support, and sets the default --output-dir.
    """
    make = lambda: check_model(config, task.build_model(config, train_set))  # noqa: E731
    for build_model in of_parts("build_model"):
        make = partial(build_model, make, config, env)
    model = make()
    # From the data and the model that were built: their options may be of no use to an edited task.
    name = re.sub(r"[^\w.-]+", "-", f"{data_name(train_set)}-{model_name(model, config)}")
    config.output_dir = config.output_dir or f"{DEFAULT_PARENT}/{name}"
    return model


@contextmanager
def open_run(
    config: RunConfig, ctx: DistContext, metric: Metric, datasets: Datasets, trackers: Sequence[Callable] = ()
) -> Iterator[Run]:
    """Open --output-dir for one run, and record how it ends. Call on every rank.

    metric: the value of the validation metrics that decides which checkpoint becomes best.pt; higher is better.
    datasets: what check_datasets returned, the same on all ranks. trackers: functions that rank 0 alone calls with
    `config` before the first line of metrics, for example of W&B. What they return has the methods `log(step, split,
    metrics)`, called after each line of metrics.jsonl with its numbers (split: train, train_epoch, val or test), and
    `close()`, called when the run ends, unless a hang has to be ended.
    """
    ctx.check_same({**config.shared_options(), **hash_source_files()})
    run = Run(config, ctx, metric, trackers)
    ctx.callbacks[:] = chain.from_iterable(callbacks(run) for callbacks in of_parts("callbacks"))
    if not config.evaluate:
        ctx.on_main(run.run_log.output_dir.open)
        for each in ctx.callbacks:
            each.opened()
    process_exit.on_hard_exit = run.hard_exit
    ctx.on_failure.append(run.fail)
    run.checkpoints.check_samples(datasets)
    try:
        yield run
    except StopRequested as request:  # in an evaluation; the training loop calls run.should_stop itself
        if not run.should_stop(request.decision):
            raise
        run.stop()
    run.checkpoints.wait()
    for each in ctx.callbacks if not config.evaluate else ():
        each.finish(None)
    ctx.on_main(run.succeed)
