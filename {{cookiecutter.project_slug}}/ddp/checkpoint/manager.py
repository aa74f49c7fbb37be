"""Save and resume a run: the objects passed to `run.resume`, the TrainState, and the random generators of all ranks."""

import logging
import math
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ddp.checkpoint import checkpoint_file, compatibility
from ddp.checkpoint.directory import CheckpointDirectory
from ddp.checkpoint.state import digest, find_non_finite, snapshot
from ddp.core.errors import CheckpointError, Diverged, UsageError
from ddp.core.run_config import RunConfig
from ddp.core.source_hash import hash_source_files
from ddp.data.loader import TrainLoader
from ddp.data.saved_dataset import describe
from ddp.distributed.process_group import DistContext, plural
from ddp.distributed.seeds import random_state, set_random_state
from ddp.distributed.streams import Mark

log = logging.getLogger(__name__)


@dataclass
class TrainState:
    """The progress of a run. `samples_consumed`: samples of the current epoch that all ranks together have used."""

    step: int = 0
    epoch: int = 0
    samples_consumed: int = 0
    best: float | None = None  # the highest value of the metric for the best model
    best_step: int = 0
    best_metrics: dict[str, float] = field(default_factory=dict)
    evaluated_step: int | None = None  # the step of the last evaluation
    epochs_since_best: int = 0
    logged_step: int = 0  # the last step that a logged training figure covers
    epoch_start: int = 0  # the last step before this epoch

    def update_best(self, value: float, metrics: Mapping[str, float]) -> bool:
        """Record `value` if it is the highest so far, and return whether it is. Any number is better than a NaN."""
        if self.best is not None and not math.isnan(self.best) and not value > self.best:
            return False
        self.best, self.best_step, self.epochs_since_best = value, self.step, 0
        self.best_metrics = {name: float(each) for name, each in metrics.items()}
        return True


def progress_of(content: Mapping[str, Any]) -> TrainState:
    """The progress that a checkpoint holds. One of an earlier version may lack a field."""
    return TrainState(**{item.name: content[item.name] for item in fields(TrainState) if item.name in content})


class BackgroundWriter:
    """Runs one job at a time in a daemon thread, for which no exit waits. Call `finish` before the next `start`."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.done.set()
        self.error: Exception | None = None  # what the job raised, until `finish` raises it

    def start(self, job: Callable[[], None]) -> None:
        self.done.clear()
        threading.Thread(target=self._run, args=(job,), name="checkpoint writer", daemon=True).start()

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:
            self.error = error
        finally:
            self.done.set()

    def finish(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the job; raise what it raised, once. Returns whether it is done."""
        if not self.done.wait(timeout):
            return False
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return True


class CheckpointManager:
    """Saves a run, and resumes it. `on_saved(step)` is called whenever a checkpoint is known to be on disk."""

    def __init__(self, config: RunConfig, ctx: DistContext, on_saved: Callable[[int], None]) -> None:
        self.config, self.ctx, self.on_saved = config, ctx, on_saved
        self.train_state = TrainState()
        self.directory = CheckpointDirectory(Path(config.output_dir), config.keep_checkpoints)
        self.writer = BackgroundWriter()
        self.last_step: int | None = None  # of the checkpoint that was loaded or started last
        self.facts: dict[str, Any] = {  # about this run; in every checkpoint
            "format": checkpoint_file.FORMAT,
            "sources": hash_source_files(),  # that this run has loaded; the files may be edited meanwhile
            "config": asdict(config),
            "world_size": ctx.world_size,
            "started_from": None,  # the checkpoint of another run, if --resume named one
        }

    def save(self, sync_logs: Callable[[], None]) -> None:
        """Write a checkpoint, and best.pt if this step's evaluation was the best. Call on every rank."""
        # 1. Wait for the previous checkpoint; if it could not be written, every rank raises that here.
        self.wait()
        # 2. Collect the state of this run, and the random generators of every rank.
        content = {
            **self.facts,
            **{name: part.state_dict() for name, part in self.state.items()},
            **asdict(self.train_state),
            "random": self.ctx.gather(random_state(self.ctx.device)),
        }
        self.last_step = self.train_state.step
        best = self.train_state.best_step == self.train_state.step

        def write(copy: dict[str, Any], copied: Mark) -> None:
            # 4. In the background: check that it is finite, sync the logs, write the file, delete old ones.
            copied.wait()
            bad = find_non_finite({name: copy[name] for name in self.finite})
            if bad := [name for name in bad if name not in self.non_finite]:
                raise Diverged(f"{bad[0]} is no longer finite: start again in another --output-dir with a lower --lr")
            sync_logs()
            self.directory.write(copy, best=best)
            # 5. Report that it is on disk.
            self.on_saved(copy["step"])

        # 3. On rank 0, copy it to host memory: training may then continue.
        self.ctx.on_main(lambda: self.writer.start(partial(write, *snapshot(content, self.ctx.streams))))

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk; raise on every rank what writing it raised. Call on every rank."""
        # A write may take longer than --timeout, for which the others wait: so rank 0 answers now and then.
        while not self.ctx.on_main(self.writer.finish, self.config.timeout / 4):
            pass
        if self.last_step is not None:
            self.on_saved(self.last_step)

    def resume(self, train_loader: TrainLoader, state: dict[str, Any]) -> str | None:
        """Load `state` from the checkpoint of --resume, if any, and return its path; save `state` from then on.

        Raises CheckpointError if no checkpoint can be used, or if it does not fit this run. Call on every rank.
        """
        self.state = state = {name: part for name, part in state.items() if part is not None}
        # Of models, names and shapes of the weights are compared instead of the class.
        classes = {name: type(part).__name__ for name, part in state.items() if not isinstance(part, torch.nn.Module)}
        self.facts |= {"classes": classes, "global_batch": train_loader.global_batch, "samples": train_loader.length}
        self.facts["dataset"] = describe(train_loader.dataset)
        self.reserved = {"path", "random", *self.facts, *asdict(self.train_state)}
        if taken := [name for name in state if name in self.reserved]:
            raise UsageError(f"run.resume({taken[0]}=...): checkpoints use that name; choose another one")
        # An attention mask may hold -inf from the start.
        self.finite = [name for name, part in state.items() if not getattr(part, "may_be_infinite", False)]
        self.non_finite = find_non_finite({name: state[name].state_dict() for name in self.finite})
        content: dict[str, Any] = {}
        path = self.ctx.on_main(self._find, content)
        if path is not None:
            self._load(self.ctx.broadcast_tree(content))
        return path

    def load_best(self) -> TrainState | None:
        """Load best.pt, all but optimizers, and return its progress. Call on every rank, after the last step.

        None, if the weights are those of best.pt, or if there is none.
        """
        if self.train_state.best is None or self.train_state.best_step == self.train_state.step:
            return None
        self.wait()
        content: dict[str, Any] = {}
        if not self.ctx.on_main(self._read_best, content):
            return None
        content = self.ctx.broadcast_tree(content)
        self._load_parts(content, for_training=False)
        return progress_of(content)

    def _read_best(self, found: dict[str, Any]) -> bool:
        path = self.directory.best_path
        try:
            found.update(checkpoint_file.read(path), path=str(path))
        except checkpoint_file.InvalidCheckpoint as error:
            log.warning("warning: %s cannot be used: %s; the weights of the last step are tested", path, error)
        return bool(found)

    def _find(self, found: dict[str, Any]) -> str | None:
        """On rank 0: put the content of the checkpoint to use into `found`, and return its path."""
        config = self.config
        path, content = self.directory.find(config.resume, config.evaluate)
        if path is None:
            return None
        self._check_fit(path, content)
        if edited := compatibility.source_differences(self.facts["sources"], content["sources"]):
            effect = "This run uses the new code from here on; for a new run, choose another --output-dir"
            effect = "This evaluation uses the new code" if config.evaluate else effect
            files = compatibility.first_few(edited)
            log.warning(f"warning: edited since {path.name} was written: {files}. {effect}")
        if config.comm_hook == "powersgd":
            log.warning("warning: checkpoints do not hold PowerSGD's memory: the run does not resume bit for bit")
        found.update(content, path=str(path))
        if not self.directory.best_path.exists():  # a new directory, started from another run's checkpoint
            found.update(best=None, best_step=0, best_metrics={})
        if path.parent != self.directory.path:
            found["started_from"] = os.path.realpath(path)
        return str(path)

    def _check_fit(self, path: Path, content: Mapping[str, Any]) -> None:
        then, now = content["world_size"], self.ctx.world_size
        theirs = {name: part for name, part in content.items() if name not in self.reserved}
        classes, their_classes = (facts.get("dataset", {}).get("classes", ()) for facts in (self.facts, content))
        differences = compatibility.class_differences(classes, their_classes)
        differences += compatibility.part_differences(self.state, theirs)
        if not self.config.evaluate:
            differences = compatibility.run_differences(self.config, self.facts, content) + differences
            if not differences and then != now and self.config.strict_resume:
                differences = [f"--strict-resume: the number of processes was {then}, is {now}"]
        if differences:
            remedy = f"choose another --output-dir for a new run; --init-from {path} gives it these weights"
            verb = "resume from"
            if self.config.evaluate:
                verb, remedy = "evaluate", "choose another checkpoint with --resume"
            reasons = compatibility.first_few(differences)
            raise CheckpointError(f"cannot {verb} {path}: {reasons}. Restore these settings, or {remedy}")
        if then != now and not self.config.evaluate:
            change = f"{plural(then, 'process', 'es')} wrote this checkpoint, this run has {now}"
            effect = f"each sample of the epoch is still used once, but the results are not bit for bit those of {then}"
            batch = f"the global batch was {content['global_batch']}, is {self.facts['global_batch']}"
            log.warning(f"warning: {change}: {effect}; {batch}")

    def _load(self, content: Mapping[str, Any]) -> None:
        for name, value in vars(progress_of(content)).items():
            setattr(self.train_state, name, value)
        if Path(content["path"]).parent == self.directory.path:
            self.last_step = self.train_state.step
            self.on_saved(self.last_step)
        self._load_parts(content, for_training=not self.config.evaluate)
        if self.config.evaluate:
            return
        if content["world_size"] == self.ctx.world_size:
            set_random_state(content["random"][self.ctx.rank], self.ctx.device)
        self.facts["started_from"] = content["started_from"]
        digests = self.ctx.gather(digest([part.state_dict() for part in self.state.values()]))
        for rank, other in enumerate(digests):
            if other != digests[0]:
                raise CheckpointError(f"rank {rank} loaded another state than rank 0: check the memory of its host")

    def _load_parts(self, content: Mapping[str, Any], *, for_training: bool) -> None:
        for name, part in self.state.items():
            if not for_training and isinstance(part, torch.optim.Optimizer | torch.amp.GradScaler):
                continue  # not evaluated, and its options may differ
            try:
                part.load_state_dict(content[name])
            except (KeyError, RuntimeError, TypeError, ValueError) as error:
                reason = f"its {name} does not fit this run: {error}"
                raise CheckpointError(f"cannot load {content['path']}: {reason}") from error
