"""Where rank 0 writes metrics: metrics.jsonl, TensorBoard, and the trackers that main.py adds, such as W&B."""

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from ddp.core.errors import UsageError, one_line
from ddp.core.files import atomic_write, storage_errors

log = logging.getLogger(__name__)
NO_CURVE = ("epoch", "first_step", "count")  # only in metrics.jsonl
RESERVED = {"step", "split", *NO_CURVE, "lr", "samples_per_s", "step_ms", "data_ms", "memory_mb"}


class Tracker(Protocol):
    """What a function of `trackers` in main.py returns. Rank 0 alone calls it."""

    def log(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        """Called after each line of metrics.jsonl, with its numbers. split: train, train_epoch, val or test."""

    def close(self) -> None:
        """Called when the run ends, however it ends."""


class TensorBoard:
    """The tracker that every run has. `hyperparameters` are shown next to the results on the page HPARAMS."""

    def __init__(self, folder: Path, last_step: int, hyperparameters: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow: takes as long as many steps

        threading.excepthook = _ignore_tensorboard_thread
        self.writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=last_step + 1)
        self.hyperparameters: Mapping[str, Any] | None = hyperparameters  # None once they are written

    def log(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        numbers = {f"{split}/{name}": value for name, value in metrics.items()}
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)
        if split in ("val", "test") and self.hyperparameters is not None:
            from torch.utils.tensorboard.summary import hparams

            for summary in hparams(dict(self.hyperparameters), numbers)[:2]:  # without the summary of the run's end
                self.writer.file_writer.add_summary(summary)
            self.hyperparameters = None

    def close(self) -> None:
        self.writer.close()


class MetricLogger:
    """Writes metrics. Deletes lines after `last_step`, which a killed run wrote: the resumed run writes them again."""

    def __init__(
        self, config: Any, last_step: int, hyperparameters: Mapping[str, Any], trackers: Sequence[Callable] = ()
    ) -> None:
        self.folder = Path(config.output_dir)
        self.path = self.folder / "metrics.jsonl"
        self.evaluated = _truncate_after(self.path, last_step)
        self.file = self.path.open("a", buffering=1)
        # Started for the first line: by then the options, the data and the model have proved to work.
        self.starts = [("TensorBoard", lambda: TensorBoard(self.folder, last_step, hyperparameters))]
        self.starts += [(getattr(start, "__name__", repr(start)), partial(start, config)) for start in trackers]
        self.trackers: list[tuple[str, Any]] = []

    def write(self, step: int, split: str, about: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
        """Write one line to metrics.jsonl, and its numbers to the trackers.

        about: what a run knows by itself, with names of RESERVED. Raises UsageError if `metrics` have such a name.
        """
        if taken := sorted(RESERVED & metrics.keys()):
            raise UsageError(f"compute_metrics returns {taken[0]!r}, and metrics.jsonl has that already: rename it")
        values = {**about, **metrics}
        if (split, step) in self.evaluated:
            return  # a finished run, or one resumed where the epoch has no step left for more processes
        self.file.write(json.dumps({"step": step, "split": split, **values}) + "\n")
        numbers = {name: value for name, value in values.items() if name not in NO_CURVE}
        starts, self.starts = self.starts, []
        for name, start in starts:
            self._use(name, partial(self._start, name, start))
        self._each(lambda tracker: tracker.log(step, split, numbers))

    def to_tensorboard(self, write: Callable[[Any], None]) -> None:
        """Call `write` with TensorBoard's SummaryWriter."""
        self._each(lambda tracker: write(tracker.writer) if isinstance(tracker, TensorBoard) else None)

    def write_images(self, images: Tensor, step: int) -> None:
        """Show what the model gets: images [n, 1 or 3, h, w] in 0 to 1."""
        self.to_tensorboard(lambda writer: writer.add_images("train/inputs", images, step))

    def _start(self, name: str, start: Callable[[], Any]) -> None:
        self.trackers.append((name, start()))

    def _each(self, action: Callable[[Any], Any]) -> None:
        self.trackers = [(name, each) for name, each in self.trackers if self._use(name, partial(action, each))]

    def _use(self, name: str, action: Callable[[], Any]) -> bool:
        """Returns False if the tracker fails: metrics.jsonl has everything, so training continues without it."""
        try:
            action()
        except Exception as error:
            why = getattr(error, "strerror", None) or one_line(error)
            log.warning(f"warning: no more metrics go to {name} ({why}); metrics.jsonl has all of them")
            return False
        return True

    def flush(self) -> None:
        self.file.flush()
        self.to_tensorboard(lambda writer: writer.flush())

    def sync(self) -> None:
        """Make what was flushed survive a power cut. Raises StorageError."""
        for path in (self.path, *self.folder.glob("tensorboard/events*")):
            with storage_errors(path) if path == self.path else suppress(OSError), path.open("r+b") as file:
                os.fsync(file.fileno())

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
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError, KeyError, TypeError):  # truncated when the process was killed
            values = json.loads(line)
            if values["step"] <= last_step:
                kept.append(line + "\n")
                evaluated |= {(values["split"], values["step"])} if values["split"] != "train" else set()
    with atomic_write(path, "w", durable=True) as file:  # an empty file after a power failure would lose the history
        file.writelines(kept)
    return evaluated
