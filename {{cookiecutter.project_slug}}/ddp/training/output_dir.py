"""What rank 0 writes to the output directory: its lock, config.json, metrics.jsonl, TensorBoard and other trackers."""

import fcntl
import json
import logging
import os
import platform
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from filelock import SoftFileLease, Timeout

from ddp import __version__
from ddp.checkpoint.storage import CheckpointDirectory, delete_left_over
from ddp.core.errors import OutputInUse, SetupError, UsageError, one_line
from ddp.core.files import PROJECT_DIR, atomic_write, storage_errors, sync_directory, write_json
from ddp.core.parts import of_parts
from ddp.core.process_exit import process_exit
from ddp.core.run_config import RunConfig, hyperparameters

log = logging.getLogger(__name__)
LEASE_S = 60.0  # after which another machine takes over a lease that its holder no longer touches
IN_USE_REMEDY = "choose another --output-dir, or end that run"
NO_CURVE = ("epoch", "first_step", "count")  # only in metrics.jsonl
RESERVED = {"step", "split", *NO_CURVE, "lr", "samples_per_s", "step_ms", "data_ms", "memory_mb"}


class OutputDir:
    """OUTPUT_DIR, which belongs to one process at a time."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.path = config, Path(config.output_dir)
        self.directory = CheckpointDirectory(config)
        self.checkpoints = self.directory.path
        self.lock: Any = None

    def open(self) -> None:
        """Create or check the directory, and lock it until this process exits.

        Raises SetupError if it is not writable, OutputInUse, and UsageError if --resume never finds checkpoints.
        """
        try:
            new = [folder for folder in self.path.absolute().parents if not folder.exists()]
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            delete_left_over(self.path)
            for clean in of_parts("clean"):  # before anything is written: a full disk would stay full
                clean(self.directory)
            self.lock.truncate(0)
            self.lock.write(f"process {os.getpid()} on {platform.node()}")
            self.lock.flush()
            for folder in (self.path, self.checkpoints):
                with atomic_write(folder / ".probe", durable=True) as file:
                    file.write(bytes(4096))
                (folder / ".probe").unlink()
            for folder in (self.path.absolute(), self.checkpoints, *new):
                # POSIX: a new directory survives a power failure only if its parent was synced as well.
                with suppress(OSError):  # the parent may not be readable
                    sync_directory(folder.parent)
        except OSError as error:
            links = (each for each in (self.path, *self.path.parents) if each.is_symlink() and not each.exists())
            why = next((f"{each} links to {each.readlink()}, which does not exist" for each in links), error.strerror)
            reason = f"cannot write to the output directory {self.path}: {why}"
            raise SetupError(f"{reason}; choose another --output-dir") from error
        if self.config.resume == "never" and any(self.checkpoints.glob("step_*.pt")):
            reason = f"--resume never: {self.checkpoints} holds checkpoints of an earlier run"
            raise UsageError(f"{reason}; choose another --output-dir, or delete them")

    def _take_lock(self) -> None:
        # lockf, not flock: DataLoader workers inherit a flock, and outlive a killed rank 0 by seconds.
        lock_path = self.path / ".lock"
        self.lock = lock_path.open("a")
        try:
            fcntl.lockf(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:  # POSIX allows both
            owner = ""
            with suppress(OSError):
                owner = f" ({lock_path.read_text()})"
            raise OutputInUse(f"another run{owner} writes to {self.path}: {IN_USE_REMEDY}") from error
        except OSError as error:
            log.warning(f"warning: the file system of {lock_path} has no locks: .lease takes its place")
            lost = OutputInUse(f"another run took {self.path} over, because this one stood still for {LEASE_S:.0f} s")
            times: Any = {"lease_duration": LEASE_S, "heartbeat_interval": LEASE_S / 12}
            lease = SoftFileLease(self.path / ".lease", **times, on_compromise=lambda _: process_exit.hard_exit(lost))
            try:  # of a process of this machine that is gone: at once; of one of another machine: after LEASE_S
                self.lease = lease.acquire(timeout=1.2 * LEASE_S)
            except Timeout:
                raise OutputInUse(f"another run writes to {self.path}: {IN_USE_REMEDY}") from error

    def write_config(self) -> None:
        """Replace config.json: options, versions, git commit, host."""
        commit, changes, given = "", "", self.config.passes_given  # with which the run can be repeated
        run = partial(subprocess.run, cwd=PROJECT_DIR, capture_output=True, text=True, errors="replace", timeout=10)
        with suppress(OSError, subprocess.TimeoutExpired):
            commit = run(["git", "rev-parse", "HEAD"]).stdout.strip()
            changes = run(["git", "status", "--porcelain", "."]).stdout
        record = {
            "options": {**asdict(self.config), "grad_accum_steps": given or self.config.grad_accum_steps},
            "ddp_template": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "git_commit": commit or None,
            "git_changed": bool(changes),
            "host": platform.node(),
            "pid": os.getpid(),
        }
        write_json(self.path / "config.json", record)

    def sync_logs(self) -> None:
        """Make what a MetricLogger has flushed survive a power cut. Raises StorageError."""
        metrics = self.path / "metrics.jsonl"
        for path in (metrics, *self.path.glob("tensorboard/events*")):
            with storage_errors(path) if path == metrics else suppress(OSError), path.open("r+b") as file:
                os.fsync(file.fileno())


class TensorBoard:
    """The tracker that every run has. `hyperparameters` are shown next to the results on the page HPARAMS."""

    def __init__(self, folder: Path, last_step: int, hyperparameters: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow: takes as long as many steps

        threading.excepthook = _ignore_tensorboard_thread
        self.writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=last_step + 1)
        self.hyperparameters = dict(hyperparameters)  # empty once they are written

    def log(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        numbers = {f"{split}/{name}": value for name, value in metrics.items()}
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)
        if split in ("val", "test") and self.hyperparameters:
            from torch.utils.tensorboard.summary import hparams

            for summary in hparams(self.hyperparameters, numbers)[:2]:  # without the summary of the run's end
                self.writer.file_writer.add_summary(summary)
            self.hyperparameters = {}

    def close(self) -> None:
        self.writer.close()


class MetricLogger:
    """Writes metrics. Deletes lines after `last_step`, which a killed run wrote: the resumed run writes them again."""

    def __init__(self, config: RunConfig, last_step: int, trackers: Sequence[Callable]) -> None:
        self.path = Path(config.output_dir) / "metrics.jsonl"
        self.evaluated = _truncate_after(self.path, last_step)
        self.file = self.path.open("a", buffering=1)
        self.trackers: list[tuple[str, Any]] = []  # names, and functions that start them once
        # Started for the first line: by then the options, the data and the model have proved to work.
        start = partial(TensorBoard, self.path.parent, last_step, hyperparameters(config))
        self.waiting: list[tuple[str, Any]] = [("TensorBoard", cache(start))]
        self.waiting += [(getattr(each, "__name__", repr(each)), cache(partial(each, config))) for each in trackers]

    def write(self, step: int, split: str, about: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
        """Write one line to metrics.jsonl, and its numbers to the trackers. Raises StorageError.

        about: what a run knows by itself, with names of RESERVED. Raises UsageError if `metrics` have such a name.
        """
        if taken := sorted((RESERVED | about.keys()) & metrics.keys()):
            raise UsageError(f"compute_metrics returns {taken[0]!r}, and metrics.jsonl has that already: rename it")
        if (split, step) in self.evaluated:
            return  # a finished run, or one resumed where the epoch has no step left for more processes
        values = {**about, **metrics}
        with storage_errors(self.path):
            # A metric may be a tensor of one number, or a number of numpy.
            self.file.write(json.dumps({"step": step, "split": split, **values}, default=float) + "\n")
        numbers = {name: value for name, value in values.items() if name not in NO_CURVE}
        self.trackers, self.waiting = self.trackers + self.waiting, []
        self._each(lambda tracker: tracker.log(step, split, numbers))

    def to_tensorboard(self, write: Callable[[Any], Any]) -> None:
        """Call `write` with TensorBoard's SummaryWriter."""
        self._each(lambda tracker: write(tracker.writer) if isinstance(tracker, TensorBoard) else None)

    def _each(self, action: Callable[[Any], Any]) -> None:
        """Drop a tracker that fails: metrics.jsonl has everything, so training continues without it."""
        for name, tracker in list(self.trackers):
            try:
                action(tracker())
            except Exception as error:
                self.trackers.remove((name, tracker))
                why = getattr(error, "strerror", None) or one_line(error)
                log.warning(f"warning: no more metrics go to {name} ({why}); metrics.jsonl has all of them")

    def flush(self) -> None:
        """Raises StorageError."""
        with storage_errors(self.path):
            self.file.flush()
        self.to_tensorboard(lambda writer: writer.flush())

    def close(self) -> None:
        self.flush()
        self.file.close()
        self._each(lambda tracker: tracker.close())


def _ignore_tensorboard_thread(arguments: threading.ExceptHookArgs) -> None:
    """On a full disk, TensorBoard's thread raises. Its next call in the main thread raises the same error again."""
    from_tensorboard = type(arguments.thread).__module__.startswith("tensorboard.")
    if not (from_tensorboard and isinstance(arguments.exc_value, OSError)):
        threading.__excepthook__(arguments)


def _truncate_after(path: Path, last_step: int) -> set[tuple[str, int]]:
    """Delete the lines of `path` after `last_step`, and incomplete ones. Returns split and step of the evaluations."""
    kept, evaluated = [], set()
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        with suppress(ValueError, KeyError, TypeError):  # truncated when the process was killed
            values = json.loads(line)
            if values["step"] <= last_step:
                kept.append(line + "\n")
                evaluated |= {(values["split"], values["step"])} if values["split"] != "train" else set()
    with atomic_write(path, "w", durable=True) as file:  # an empty file after a power failure would lose the history
        file.writelines(kept)
    return evaluated
