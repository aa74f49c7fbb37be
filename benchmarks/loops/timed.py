"""Run an unchanged training script, and time its optimizer steps from outside.

    torchrun ... timed.py --steps 300 --times FILE SCRIPT [OPTIONS]

All contestants run under this script, so all are measured by the same clock: a hook that torch calls after each step of
any optimizer. After --steps steps the process exits, and rank 0 writes FILE: {"steps": [seconds, ...]}.

With --compare-limit OPTIONS, which are options of limit.py, the script and the limit take turns in the same processes,
--slice steps each. FILE then also has "slices": [seconds of the script, seconds of the limit]. The speed of a noisy
machine may change by a quarter between two runs; this way it affects both equally.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import runpy
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook


class Timer:
    """Counts and times the steps of the script. There is one instance."""

    def __init__(self, steps: int, file: Path, limit: str | None, slice_steps: int) -> None:
        self.steps, self.file, self.limit_options, self.slice_steps = steps, file, limit, slice_steps
        self.times: list[float] = []
        self.slices: list[tuple[float, float]] = []
        self.limit: Any = None
        self.limit_runs = False
        self.slice_start = 0.0
        self.limit_s = 0.0  # seconds in which the limit ran

    def after_step(self, *_: Any) -> None:
        if self.limit_runs:
            return
        now = time.perf_counter()
        self.times.append(now - self.limit_s)
        if self.limit_options is not None and len(self.times) % self.slice_steps == 0:
            self._run_limit(now)
        if len(self.times) == self.steps:
            self._end()

    def _run_limit(self, now: float) -> None:
        from limit import Limit, parser

        self.limit_runs = True
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            now = time.perf_counter()
        if self.limit is None:
            self.limit = Limit(parser().parse_args(shlex.split(self.limit_options or "")))
            for _ in range(self.slice_steps):
                self.limit.step()
        else:
            start = time.perf_counter()
            for _ in range(self.slice_steps):
                self.limit.step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.slices.append((now - self.slice_start, time.perf_counter() - start))
        self.limit_runs = False
        self.slice_start = time.perf_counter()
        self.limit_s += self.slice_start - now

    def _end(self) -> None:
        world_size = int(os.environ["WORLD_SIZE"])
        assert dist.is_initialized() and dist.get_world_size() == world_size, "each process trained alone"
        if dist.get_rank() == 0:
            self.file.write_text(json.dumps({"steps": self.times, "slices": self.slices}))
        sys.stdout.flush()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise for each DataLoader worker
        for child in multiprocessing.active_children():  # DataLoader workers would disturb the next run for seconds
            child.kill()
        os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--times", type=Path, required=True)
    parser.add_argument("--compare-limit", metavar="OPTIONS")
    parser.add_argument("--slice", type=int, default=50, help="with 50, each includes a logged line")
    parser.add_argument("--cifar10", type=Path, help="a folder with made-up images in CIFAR-10's format")
    parser.add_argument("script")
    parser.add_argument("options", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()

    if arguments.cifar10 is not None:
        accept(arguments.cifar10)
    timer = Timer(arguments.steps, arguments.times, arguments.compare_limit, arguments.slice)
    register_optimizer_step_post_hook(timer.after_step)
    sys.argv = [arguments.script, *arguments.options]
    sys.path.insert(0, str(Path(arguments.script).parent))
    runpy.run_path(arguments.script, run_name="__main__")
    sys.exit(f"{arguments.script} ended after {len(timer.times)} steps, not {arguments.steps}")


def accept(folder: Path) -> None:
    """Let torchvision's CIFAR10 accept the files in `folder`, whose MD5 it does not know."""
    from torchvision.datasets import CIFAR10

    def known(name: str) -> list[str]:
        return [name, hashlib.md5((folder / CIFAR10.base_folder / name).read_bytes()).hexdigest()]

    CIFAR10.train_list = [known(name) for name, _ in CIFAR10.train_list]
    CIFAR10.test_list = [known(name) for name, _ in CIFAR10.test_list]
    CIFAR10.meta = {**CIFAR10.meta, "md5": known("batches.meta")[1]}


if __name__ == "__main__":
    main()
