"""Sums over batches and ranks, and where they are shown: the console, metrics.jsonl, TensorBoard."""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ddp import logs
from ddp.errors import Diverged
from ddp.group import Group

log = logging.getLogger(__name__)
Sums = dict[str, torch.Tensor]
MOST_NUMBERS = 200  # that wait to be added up, on the device: 64 batches of a loss, a count and a score


class Meter:
    """Adds up a task's sums over batches, on the device, and over ranks when asked."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.batches: list[dict[str, Any]] = []  # not added up yet; on the device
        self.waiting = 0  # numbers in them: a confusion matrix is large
        self.local: Sums = {}  # not reduced yet; on the device
        self.total: Sums = {}  # over all ranks; on the host, and the same on every rank
        self.shapes: dict[str, torch.Size] | None = None

    def add(self, sums: Mapping[str, Any]) -> None:
        """Add one batch's sums: numbers or tensors. Costs no synchronisation, and now and then an addition."""
        self.batches.append({name: _without_graph(value) for name, value in sums.items()})
        self.waiting += sum(value.numel() if isinstance(value, torch.Tensor) else 1 for value in sums.values())
        if self.waiting >= MOST_NUMBERS:
            self._add_up()

    def _add_up(self) -> None:
        """Add many batches in one operation: one by one they would cost a small model a percent of its step."""
        batches, self.batches, self.waiting = self.batches, [], 0
        for name in dict.fromkeys(name for batch in batches for name in batch):
            values = [batch[name] for batch in batches if name in batch]
            if isinstance(values[0], torch.Tensor):
                total = torch.stack(values).double().sum(0)
            else:
                total = torch.tensor(sum(values), dtype=torch.double)
            self.local[name] = self.local[name] + total if name in self.local else total

    def reduce(self) -> Sums:
        """The sums so far, over all ranks. Raises Diverged if the loss among them is not finite. Call on every rank."""
        self._add_up()
        local = {name: value.cpu() for name, value in self.local.items()}
        if self.shapes is None:  # a rank without any batch learns from rank 0 what there is to add up
            self.shapes = self.group.on_main(lambda: {name: value.shape for name, value in local.items()})
        if local.keys() - self.shapes.keys():
            raise KeyError(f"sums {sorted(local.keys() - self.shapes.keys())} were not there from the start")
        parts = [
            local.get(name, torch.zeros(shape, dtype=torch.double)).flatten() for name, shape in self.shapes.items()
        ]
        flat = self.group.sum(torch.cat(parts))
        for name, part in zip(self.shapes, flat.split([part.numel() for part in parts]), strict=True):
            value = part.reshape(self.shapes[name])
            self.total[name] = self.total[name] + value if name in self.total else value
        self.local = {}
        if not math.isfinite(self.total["loss"].item()):
            raise Diverged(
                "the loss is not finite any more: start again, in another --output-dir, with a lower --lr, a longer "
                "--warmup-epochs or --clip-grad"
            )
        return self.total

    def take(self) -> Sums:
        """`reduce`, and start again from zero. Call on every rank."""
        total = self.reduce()
        self.total = {}
        return total

    def state_dict(self) -> dict[str, Any]:
        """The sums of the steps since the last logged one. Call on every rank."""
        return {"total": dict(self.reduce()) if self.batches or self.local else dict(self.total)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = dict(state["total"])


def _without_graph(value: Any) -> Any:
    """Else the memory of all steps that are not added up yet would be kept."""
    return value.detach() if isinstance(value, torch.Tensor) and value.requires_grad else value


class Clock:
    """Seconds of training since the last line was logged; evaluation and saving do not count."""

    def __init__(self) -> None:
        self.restart()

    def restart(self, step: int = 0, wait_s: float = 0.0) -> None:
        self.step, self.wait_s, self.start = step, wait_s, time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens meanwhile is not a part of the training's speed."""
        before = time.perf_counter()
        yield
        self.start += time.perf_counter() - before

    def rates(self, step: int, wait_s: float, global_batch: int) -> dict[str, float]:
        """Speed since the last restart: samples/s of all ranks, ms a step, and the ms of it spent waiting for data."""
        steps, elapsed = step - self.step, time.perf_counter() - self.start
        waited = wait_s - self.wait_s
        self.restart(step, wait_s)
        return {
            "samples_per_s": round(steps * global_batch / elapsed, 1),
            "step_ms": round(1000 * elapsed / steps, 3),
            "data_ms": round(1000 * waited / steps, 3),
        }


def memory_mb(device: torch.device) -> float:
    """The most memory that this process has used: of its GPU, else of the host. In megabytes."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 1e6, 1)
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6, 1)


class Writer:
    """Writes metrics. Only rank 0 has one; the others have a NoWriter, so that nobody needs to ask.

    Lines after `last_step`, left by a run that was killed behind its last checkpoint, are taken out: they come again.
    """

    def __init__(self, folder: Path, last_step: int) -> None:
        self.folder, self.last_step = folder, last_step
        self.path = folder / "metrics.jsonl"
        self.last_test = _keep_lines(self.path, last_step)
        self.file = self.path.open("a", buffering=1)
        self.board: Any = None
        self.bar: tqdm | None = None

    def open_board(self) -> None:
        """Open TensorBoard's file, when there is something to write: the import alone takes as long as many steps."""
        if self.board is None:
            from torch.utils.tensorboard import SummaryWriter

            threading.excepthook = _let_tensorboard_fail_in_silence
            self.board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=self.last_step + 1)

    def write(self, step: int, split: str, values: Mapping[str, Any]) -> None:
        if split == "test" and step == self.last_test:
            return  # resumed where an epoch had no step left for more processes: this evaluation is there already
        self.open_board()
        line = {"step": step, "split": split, **values}
        self.file.write(json.dumps(line) + "\n")
        for name, value in values.items():
            if name != "epoch":
                self.board.add_scalar(f"{split}/{name}", value, step)

    def open_bar(self, title: str, steps: int, done: int) -> None:
        """A progress bar, on a terminal."""
        if sys.stderr.isatty():
            terminal = logs.console(sys.stderr)
            self.bar = tqdm(
                total=steps, initial=done, desc=title, unit="step", leave=False, mininterval=0.5, file=terminal
            )

    def advance_bar(self) -> None:
        if self.bar is not None:
            self.bar.update()

    def close_bar(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def flush(self) -> None:
        self.file.flush()
        if self.board is not None:
            self.board.flush()

    def sync(self) -> None:
        """Make what was flushed last through a power cut."""
        for path in (self.path, *self.path.parent.glob("tensorboard/events*")):
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def close(self) -> None:
        self.close_bar()
        self.flush()
        self.file.close()
        if self.board is not None:
            self.board.close()


class NoWriter:
    """Takes whatever Writer takes, and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def _let_tensorboard_fail_in_silence(arguments: threading.ExceptHookArgs) -> None:
    """Where the disk is full its thread raises; its next call in the main thread raises the same, and that counts."""
    of_tensorboard = type(arguments.thread).__module__.startswith("tensorboard.")
    if not (of_tensorboard and isinstance(arguments.exc_value, OSError)):
        threading.__excepthook__(arguments)


def in_words(values: Mapping[str, float]) -> str:
    """`loss 1.2345  accuracy 0.5678`: four decimals, or more of what is very small."""
    return "  ".join(
        f"{name} {value:.4f}" if value == 0 or abs(value) >= 1e-3 else f"{name} {value:.1e}"
        for name, value in values.items()
    )


def _keep_lines(path: Path, last_step: int) -> int | None:
    """Drop the lines of `path` that are later than `last_step`, or torn. Returns the step of the last evaluation."""
    if not path.exists():
        return None
    kept, last_test = [], None
    for line in path.read_text().splitlines():
        try:
            values = json.loads(line)
            if values["step"] <= last_step:
                kept.append(line + "\n")
                last_test = values["step"] if values["split"] == "test" else last_test
        except (ValueError, KeyError, TypeError):
            continue  # a kill tore it
    beside = path.with_suffix(".jsonl.tmp")
    try:
        beside.write_text("".join(kept))
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return last_test
