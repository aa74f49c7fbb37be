"""Where metrics are shown: metrics.jsonl, TensorBoard, and the progress bar."""

import json
import os
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ddp.core.errors import UsageError
from ddp.core.files import atomic_write, storage_errors
from ddp.core.rank_logs import console

SHOWN_IMAGES = 16
NO_CURVE = ("epoch", "first_step", "count")  # only in metrics.jsonl
RESERVED = {"step", "split", *NO_CURVE, "lr", "samples_per_s", "step_ms", "data_ms", "memory_mb"}


class NullLogger:
    """Accepts every call and does nothing. All ranks but 0 have one as their logger, so no code tests the rank."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *arguments: Any, **named: Any) -> None:
        pass

    def __bool__(self) -> bool:
        return False


class MetricLogger:
    """Writes metrics, on rank 0. Deletes lines after `last_step`, which a killed run wrote: they will come again."""

    def __init__(self, folder: Path, last_step: int, hyperparameters: Mapping[str, Any]) -> None:
        self.folder, self.last_step, self.hyperparameters = folder, last_step, hyperparameters
        self.has_hyperparameters = False  # whether TensorBoard has them
        self.path = folder / "metrics.jsonl"
        self.evaluated = _truncate_after(self.path, last_step)
        self.file = self.path.open("a", buffering=1)
        self.tensorboard: Any = NullLogger()  # until the first line
        self.bar: Any = NullLogger()

    def write(
        self, step: int, split: str, about: Mapping[str, Any], metrics: Mapping[str, Any], inputs: Any = None
    ) -> None:
        """Write one line to metrics.jsonl, and its numbers to TensorBoard; and `inputs`, if they are images.

        about: what a run knows by itself, with names of RESERVED. Raises UsageError if `metrics` have such a name.
        """
        if taken := sorted(RESERVED & metrics.keys()):
            raise UsageError(f"compute_metrics returns {taken[0]!r}, and metrics.jsonl has that already: rename it")
        values = {**about, **metrics}
        if (split, step) in self.evaluated:
            return  # a finished run, or one resumed where the epoch has no step left for more processes
        if not self.tensorboard:  # not earlier: the import alone takes as long as many steps
            from torch.utils.tensorboard import SummaryWriter

            threading.excepthook = _ignore_tensorboard_thread
            self.tensorboard = SummaryWriter(str(self.folder / "tensorboard"), purge_step=self.last_step + 1)
        self.file.write(json.dumps({"step": step, "split": split, **values}) + "\n")
        numbers = {f"{split}/{name}": value for name, value in values.items() if name not in NO_CURVE}
        for name, value in numbers.items():
            self.tensorboard.add_scalar(name, value, step)
        if split in ("val", "test") and not self.has_hyperparameters:
            self._write_hyperparameters(numbers)
        self._write_images(step, inputs)

    def _write_hyperparameters(self, metrics: Mapping[str, Any]) -> None:
        """For TensorBoard's page that compares runs: the options, and which curves measure a run."""
        from torch.utils.tensorboard.summary import hparams

        self.has_hyperparameters = True
        for summary in hparams(dict(self.hyperparameters), dict(metrics))[:2]:  # not that the run has ended
            self.tensorboard.file_writer.add_summary(summary)

    def _write_images(self, step: int, inputs: Any) -> None:
        """The first of a batch, if they are images: [b, 1 or 3, h, w], of any range."""
        if isinstance(inputs, torch.Tensor) and inputs.dim() == 4 and inputs.shape[1] in (1, 3):
            images = inputs[:SHOWN_IMAGES].detach().float().cpu()
            low, high = images.min(), images.max()
            self.tensorboard.add_images("train/inputs", (images - low) / (high - low).clamp(min=1e-12), step)

    def open_bar(self, title: str, steps: int, left: int) -> None:
        """Show a progress bar, on a terminal."""
        if sys.stderr.isatty():
            options: dict[str, Any] = {"unit": "step", "leave": False, "mininterval": 0.5, "file": console(sys.stderr)}
            self.bar = tqdm(total=steps, initial=steps - left, desc=title, **options)

    def show_step(self, remaining_s: float | None) -> None:
        """Move the progress bar on by a step, and show how long the whole run will still take."""
        if self.bar:
            left = "" if remaining_s is None else f"{tqdm.format_interval(remaining_s)} to the end of the run"
            self.bar.set_postfix_str(left, refresh=False)
            self.bar.update()

    def flush(self) -> None:
        self.file.flush()
        self.tensorboard.flush()

    def sync(self) -> None:
        """Make what was flushed survive a power cut. Raises StorageError."""
        with storage_errors(self.folder):
            for path in (self.path, *self.folder.glob("tensorboard/events*")):
                with path.open("rb") as file:
                    os.fsync(file.fileno())

    def close(self) -> None:
        self.bar.close()
        self.flush()
        self.file.close()
        self.tensorboard.close()


def format_metrics(values: Mapping[str, float]) -> str:
    """`loss 1.2345  accuracy 0.5678`: four decimals, or scientific notation for what is very small."""
    formats = {name: ".1e" if 0 < abs(value) < 1e-3 else ".4f" for name, value in values.items()}
    return "  ".join(f"{name} {value:{formats[name]}}" for name, value in values.items())


def _ignore_tensorboard_thread(arguments: threading.ExceptHookArgs) -> None:
    """On a full disk TensorBoard's thread raises; its next call in the main thread raises the same error again."""
    from_tensorboard = type(arguments.thread).__module__.startswith("tensorboard.")
    if not (from_tensorboard and isinstance(arguments.exc_value, OSError)):
        threading.__excepthook__(arguments)


def _truncate_after(path: Path, last_step: int) -> set[tuple[str, int]]:
    """Delete the lines of `path` after `last_step`, and incomplete ones. Returns split and step of the evaluations."""
    kept, evaluated = [], set()
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError, KeyError, TypeError):  # a kill cut it off
            values = json.loads(line)
            if values["step"] <= last_step:
                kept.append(line + "\n")
                evaluated |= {(values["split"], values["step"])} if values["split"] != "train" else set()
    with atomic_write(path, "w") as file:
        file.writelines(kept)
    return evaluated
