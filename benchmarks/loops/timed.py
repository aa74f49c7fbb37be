"""Runs a training script as it is, and times its optimizer steps from outside.

    torchrun ... timed.py --steps 300 --times FILE SCRIPT [OPTIONS]

Every contestant goes through here, so that all are measured by the same clock: a hook that torch calls after each step
of any optimizer. After --steps of them the process ends, and rank 0 writes FILE: {"steps": [seconds, ...]}.

With --beside-limit OPTIONS, which are those of limit.py, script and limit take turns within the same processes, SLICE
steps each; FILE then has "slices" as well: [seconds of the script, seconds of the limit]. So a noisy machine, which
may change its speed by a quarter between two runs, disturbs both alike.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import runpy
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

SLICE = 50  # steps; a logged line is in each


class Timer:
    """Counts the steps of the script. There is one."""

    def __init__(self, steps: int, file: Path, limit: str | None) -> None:
        self.steps, self.file, self.limit_options = steps, file, limit
        self.times: list[float] = []
        self.slices: list[tuple[float, float]] = []
        self.limit: Any = None
        self.turn_of_limit = False
        self.begun = self.elsewhere = 0.0

    def after_step(self, *_: Any) -> None:
        if self.turn_of_limit:
            return
        now = time.perf_counter()
        self.times.append(now - self.elsewhere)
        if self.limit_options is not None and len(self.times) % SLICE == 0:
            self._let_limit_run(now)
        if len(self.times) == self.steps:
            self._end()

    def _let_limit_run(self, now: float) -> None:
        from limit import Limit, parser

        self.turn_of_limit = True
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            now = time.perf_counter()
        if self.limit is None:
            self.limit = Limit(parser().parse_args(shlex.split(self.limit_options or "")))
            for _ in range(SLICE):
                self.limit.step()
        else:
            start = time.perf_counter()
            for _ in range(SLICE):
                self.limit.step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.slices.append((now - self.begun, time.perf_counter() - start))
        self.turn_of_limit = False
        self.begun = time.perf_counter()
        self.elsewhere += self.begun - now

    def _end(self) -> None:
        world_size = int(os.environ["WORLD_SIZE"])
        assert dist.is_initialized() and dist.get_world_size() == world_size, "each process trained alone"
        if dist.get_rank() == 0:
            self.file.write_text(json.dumps({"steps": self.times, "slices": self.slices}))
        sys.stdout.flush()
        for child in multiprocessing.active_children():  # DataLoader workers would go on for seconds, beside the next
            child.kill()
        os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--times", type=Path, required=True)
    parser.add_argument("--beside-limit", metavar="OPTIONS")
    parser.add_argument("--cifar10", type=Path, help="a folder with made-up images in CIFAR-10's format")
    parser.add_argument("script")
    parser.add_argument("options", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()

    if arguments.cifar10 is not None:
        accept(arguments.cifar10)
    timer = Timer(arguments.steps, arguments.times, arguments.beside_limit)
    register_optimizer_step_post_hook(timer.after_step)
    sys.argv = [arguments.script, *arguments.options]
    sys.path.insert(0, str(Path(arguments.script).parent))
    runpy.run_path(arguments.script, run_name="__main__")
    sys.exit(f"{arguments.script} ended after {len(timer.times)} steps, not {arguments.steps}")


def accept(folder: Path) -> None:
    """Let torchvision's CIFAR10 take the files in `folder`, of which it knows no MD5."""
    from torchvision.datasets import CIFAR10

    def known(name: str) -> list[str]:
        return [name, hashlib.md5((folder / CIFAR10.base_folder / name).read_bytes()).hexdigest()]

    CIFAR10.train_list = [known(name) for name, _ in CIFAR10.train_list]
    CIFAR10.test_list = [known(name) for name, _ in CIFAR10.test_list]
    CIFAR10.meta = {**CIFAR10.meta, "md5": known("batches.meta")[1]}


if __name__ == "__main__":
    main()
