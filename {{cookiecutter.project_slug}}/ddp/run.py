"""A training run: its progress, how it resumes, what it logs and when it saves. Files are in folder.py and metrics.py.

OUT/config.json      options, versions, git commit        OUT/checkpoints/step_NNNNNNNN.pt   the newest few
OUT/status.json      how far, or how it ended             OUT/best.pt                        of the best evaluation
OUT/metrics.jsonl    a line a logged step                 OUT/tensorboard/                   the same, to look at
"""

from __future__ import annotations

import logging
import math
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from config import Config
from ddp.ending import ending, exit_code, understand
from ddp.errors import Diverged, PeerLost, Stopped, UsageError, one_line
from ddp.fingerprint import code_of
from ddp.folder import Folder, storage
from ddp.group import Group, plural
from ddp.loader import TestLoader, TrainLoader
from ddp.metrics import Clock, NoWriter, Writer, in_words, memory_mb
from ddp.profile import Profiler
from ddp.resume import Checkpoints
from ddp.step import name_of, seed_rank
from ddp.stop import requests, stopped

log = logging.getLogger(__name__)
STATUS_EVERY_S = 1.0
LAST_SAVE_S = 25.0  # torchrun kills what has not ended 30 s after another process failed


class Run:
    """What belongs to one training run. Call every method on every rank."""

    def __init__(self, config: Config, group: Group) -> None:
        self.config = config
        self.group = group
        self.folder = Folder(config)
        self.checkpoints = Checkpoints(config, group, self.folder)
        self.progress = self.checkpoints.progress
        self.writer: Any = NoWriter()
        self.profiler: Any = NoWriter()
        self.clock = Clock()
        self.started = time.perf_counter()
        self.status_at = 0.0  # when status.json last said how far the run is

    # ---- resuming and saving ----------------------------------------------------------------------------------------

    def resume(self, train_loader: TrainLoader, **state: Any) -> None:
        """Load `state` from the checkpoint that --resume asks for, if there is one; save it from then on.

        Each of `state` has state_dict() and load_state_dict(). Raises CheckpointFailure if no checkpoint can be used,
        or if it belongs to another model or to other options.
        """
        self.train_loader, self.schedule = train_loader, state["schedule"]
        if not self.config.evaluate:
            agreement = self.group.agreement
            agreement.on_stop, agreement.on_failed_save = self._stop, self.checkpoints.finish
            agreement.save_failed = self.checkpoints.saver.failed
        seed_rank(self.config, self.group)
        self.resumed_from = self.checkpoints.resume(train_loader, state)
        if self.resumed_from is None and self.config.evaluate:
            raise UsageError(f"--evaluate: no checkpoint in {self.folder.checkpoints}; train first, or --resume PATH")
        if not self.config.evaluate:
            self.group.on_main(self._open_records)

    def _open_records(self) -> None:
        """On rank 0, once it is clear that this run may go on here: a refused one must not touch what is there."""
        with storage(self.folder.path / "config.json"):
            self.folder.write_config(self.config)
            self._write_status("running")
            self.writer = Writer(self.folder.path, self.progress.step)
        if self.config.profile:
            self.profiler = Profiler(self.folder.path / "profile", self.group.device)

    def save(self) -> None:
        """Write a checkpoint of everything given to `resume`; and best.pt, if this step's evaluation was the best."""
        with self.clock.paused():
            self._log_safely(self.writer.flush, status=True)
            self.checkpoints.save(before=self._sync_logs)

    def _sync_logs(self) -> None:
        """No checkpoint is on the disk before the lines that led to it."""
        with storage(self.folder.path):
            self.writer.sync()

    def _stop(self, number: int) -> None:
        """All ranks are at the same point, and one was asked to stop: save, and leave."""
        requests.agree_to(number)
        if self.checkpoints.step != self.progress.step:
            self.save()
        self.checkpoints.finish()
        raise stopped(number, f"and saved, at step {self.progress.step:,}: give the same command to go on", agreed=True)

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def introduce(self, model: torch.nn.Module, test_loader: TestLoader) -> None:
        """Say what is about to run. From now on, a request to stop waits for the end of a step."""
        requests.patient = True
        config, group, loader, progress = self.config, self.group, self.train_loader, self.progress
        weights = sum(tensor.numel() for tensor in model.parameters())
        log.info("%s, %s weights", name_of(model, config), f"{weights:,}")
        samples = f"{loader.length:,} training samples, {test_loader.length:,} test samples"
        log.info("%s: %s", loader.name, samples)
        processes = plural(group.world_size, "process", "es")
        source = f" ({group.source})" if group.world_size > 1 else ""
        log.info("%s%s on %s, %s, %s", processes, source, group.device.type, group.backend, config.precision)
        passes = f" x {config.grad_accum_steps} passes" if config.grad_accum_steps > 1 else ""
        batch = f"global batch {loader.global_batch} = {processes} x {config.batch_size}{passes}"
        peak = self.schedule.peak
        left = (
            loader.sampler.steps_left(progress.position) + (config.epochs - progress.epoch - 1) * loader.steps_per_epoch
        )
        self.all_steps = progress.step + max(0, left)  # the steps so far may have been larger or smaller ones
        if config.evaluate:
            log.info("evaluating %s, of step %s", self.resumed_from, f"{progress.step:,}")
            return
        log.info("%s; %s steps an epoch; learning rate %.4g", batch, f"{loader.steps_per_epoch:,}", peak)
        if self.resumed_from is None:
            log.info("a new run, in %s", config.output_dir)
        else:
            epoch = f"epoch {progress.epoch + 1}, sample {progress.position:,}"
            where = epoch if progress.position else f"the end of epoch {progress.epoch}"
            log.info("going on from %s, at step %s, %s", self.resumed_from, f"{progress.step:,}", where)
        if self.finished():
            log.info("all is done already; for more, raise --epochs or --max-steps; else choose another --output-dir")

    def finished(self) -> bool:
        """Whether there is nothing left to train, nor to evaluate."""
        progress, most = self.progress, self.config.max_steps
        enough = most is not None and progress.step >= most and progress.evaluated == progress.step
        return progress.epoch >= self.config.epochs or enough

    def epochs(self) -> Iterator[int]:
        """The epochs that are left; the first may have been begun before."""
        while not self.finished():
            yield self.progress.epoch

    def steps(self) -> Iterator[Any]:
        """The steps that are left of this epoch, up to --max-steps, each as its batches. Then counts it."""
        progress, loader = self.progress, self.train_loader
        left_in_epoch = left = loader.sampler.steps_left(progress.position)
        if self.config.max_steps is not None:
            left = min(left, self.config.max_steps - progress.step)
        self.reaches_end = left == left_in_epoch
        self.last_step = progress.step + left
        title = f"epoch {progress.epoch + 1}/{self.config.epochs}"
        self.writer.open_bar(title, loader.steps_per_epoch, loader.steps_per_epoch - left_in_epoch)
        self.clock.restart(progress.step, loader.wait_s)
        self.group.agreement.restart()
        for _, batches in zip(range(left), loader.steps(progress.epoch, progress.position), strict=False):
            yield batches
            ending.step = progress.step
            self.writer.advance_bar()
            self.profiler.step()
            self.group.agreement.point()
        self.writer.close_bar()
        self.whole_epoch = left == left_in_epoch

    def middle_of_step(self) -> float:
        """How many epochs are done in the middle of the coming step: what the learning rate follows."""
        loader = self.train_loader
        return self.progress.epoch + (self.progress.position + loader.global_batch / 2) / loader.length

    def log_due(self) -> bool:
        """Every --log-every steps, and where the epoch ends: a line is about one epoch."""
        return self.progress.step % self.config.log_every == 0 or (
            self.progress.step == self.last_step and self.reaches_end
        )

    def save_due(self) -> bool:
        """Every --checkpoint-every steps, except where the epoch ends: it saves after its evaluation."""
        every = self.config.checkpoint_every
        return every is not None and self.progress.step % every == 0 and self.progress.step != self.last_step

    def log_train(self, scores: Mapping[str, float], lr: float) -> None:
        """Log the steps since the last logged one: on the console, in metrics.jsonl, in TensorBoard."""
        step, loader = self.progress.step, self.train_loader
        with self.clock.paused(), storage(self.folder.path / "tensorboard"):
            self.writer.open_board()
        rates = self.clock.rates(step, loader.wait_s, loader.global_batch)
        values = {**scores, "lr": lr, **rates, "memory_mb": memory_mb(self.group.device)}
        epoch = self.progress.epoch + 1
        self._log_safely(lambda: self.writer.write(step, "train", {"epoch": epoch, **values}))
        speed = f"{rates['samples_per_s']:,.0f} samples/s"
        log.info("%s  train  %s  lr %.4g  %s", self._where(epoch), in_words(scores), lr, speed)

    def _log_safely(self, write: Callable[[], None], status: bool = False) -> None:
        """Write to the logs; and to status.json how far it is, if `status` says so or if it is old.

        Rank 0 alone may fail; the others learn of it.
        """
        if not isinstance(self.writer, NoWriter):
            with storage(self.folder.path / "metrics.jsonl"):
                write()
                if status or time.monotonic() - self.status_at > STATUS_EVERY_S:
                    self.status_at = time.monotonic()
                    self._write_status("running")

    def end_epoch(self, scores: Mapping[str, float], figure: float, test_loader: TestLoader) -> None:
        """After the evaluation at the end of an epoch, or of --max-steps: log and save. `figure`: higher is better."""
        self._keep_best(scores, figure)
        self.log_test(scores, test_loader)
        self.progress.evaluated = self.progress.step
        if self.whole_epoch:
            self.progress.end_epoch()
        self.save()

    def _keep_best(self, scores: Mapping[str, float], figure: float) -> None:
        progress = self.progress
        if progress.best is None or math.isnan(progress.best) or figure > progress.best:
            progress.best, progress.best_step = float(figure), progress.step
            progress.best_scores = {name: float(value) for name, value in scores.items()}

    def log_test(self, scores: Mapping[str, float], test_loader: TestLoader) -> None:
        """Log an evaluation."""
        progress = self.progress
        epoch = progress.epoch + (progress.position > 0)
        count = test_loader.length
        self._log_safely(lambda: self.writer.write(progress.step, "test", {"epoch": epoch, **scores, "count": count}))
        is_best = progress.best_step == progress.step and not self.config.evaluate
        best = "  (best so far)" if is_best else ""
        log.info("%s  test   %s%s", self._where(epoch), in_words(scores), best)

    def _where(self, epoch: int) -> str:
        if self.config.evaluate:  # how long the training was meant to be, its own options said
            return f"epoch {epoch}  step {self.progress.step:,}"
        epochs, steps = str(self.config.epochs), f"{self.all_steps:,}"
        return f"epoch {epoch:>{len(epochs)}}/{epochs}  step {self.progress.step:>{len(steps)},}/{steps}"

    # ---- the end ----------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """The run has come to its end. Call on every rank."""
        self.checkpoints.finish()
        self.group.on_main(self._close)

    def _close(self) -> None:
        if not isinstance(self.writer, NoWriter):  # else nothing was begun
            with storage(self.folder.path):
                self.profiler.close()
                self.writer.close()
                self._write_status("done", exit_code=0)
            self._conclude()

    def fail(self, error: BaseException) -> None:
        """Say in `error`, and in status.json, how the run ended. Not a collective: other ranks may be gone."""
        code = exit_code(error)
        if not isinstance(error, Stopped):
            self._let_save()
        if isinstance(error, Diverged):
            last = self.folder.of_step(self.folder.steps()[0]) if self.folder.steps() else "none"
            error.args = (f"{error} (noticed at step {self.progress.step:,}; last good checkpoint: {last})",)
        if isinstance(error, PeerLost) and not error.on_every_rank:
            ending.saved = self.group.peers.saved()
            saved = "nothing was saved yet" if ending.saved is None else f"resumable from step {ending.saved:,}"
            error.args = (f"{error}; {saved}: start all again with the same command",)
        if not isinstance(self.writer, NoWriter):
            self._write_last_status(code, one_line(error))
            with suppress(Exception):  # a full disk, say, must not hide what came first
                self.writer.close()

    def _last_wish(self, code: int, message: str) -> None:
        """The process ends now, from another thread than the main one."""
        if code < 128:
            self._let_save()
        if not isinstance(self.writer, NoWriter):
            self._write_last_status(code, message)

    def _let_save(self) -> None:
        """A checkpoint in flight is of a good state, whatever happened since: let it be written."""
        self.checkpoints.saver.wait(LAST_SAVE_S)

    def _write_last_status(self, code: int, message: str) -> None:
        with suppress(Exception):
            self._write_status("stopped" if code == Stopped.exit_code else "failed", exit_code=code, message=message)

    def _conclude(self) -> None:
        seconds, progress, folder = time.perf_counter() - self.started, self.progress, self.folder
        if progress.best is None:  # a finished run's checkpoint, in a new folder: nothing was trained
            return
        best = f"best at step {progress.best_step:,}: {in_words(progress.best_scores)}"
        log.info("done in %s s; %s", f"{seconds:,.0f}", best)
        log.info("  best weights  %s", folder.best)
        log.info("  curves        tensorboard --logdir %s", shlex.quote(str(folder.path / "tensorboard")))

    def _write_status(self, state: str, exit_code: int | None = None, message: str = "") -> None:
        step, epoch = self.progress.step, self.progress.epoch
        self.folder.write_status(
            state=state, exit_code=exit_code, step=step, epoch=epoch, saved=ending.saved, message=message
        )


@contextmanager
def open_run(config: Config, group: Group) -> Iterator[Run]:
    """Open --output-dir for a run of its own, and record how it ends. Call on every rank."""
    group.check_same({**config.shared(), **code_of()})
    run = Run(config, group)
    if not config.evaluate:
        group.on_main(lambda: run.folder.open(config))
    ending.last_wish = run._last_wish
    try:
        yield run
        run.end()
    except BaseException as error:
        settled = group.peers.settle(understand(error))
        run.fail(settled)
        if settled is error:
            raise
        raise settled from None
