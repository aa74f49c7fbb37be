"""Runs a training script as it is, and times its optimizer steps from outside.

    torchrun ... timed.py --steps 300 --times FILE SCRIPT [OPTIONS]

Every contestant goes through here, so that all are measured by the same clock: a hook that torch calls after each step
of any optimizer. After --steps of them the process ends, and rank 0 writes FILE: one number a step, in seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--times", type=Path, required=True)
    parser.add_argument("--cifar10", type=Path, help="a folder with made-up images in CIFAR-10's format")
    parser.add_argument("script")
    parser.add_argument("options", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()

    if arguments.cifar10 is not None:
        accept(arguments.cifar10)
    times: list[float] = []

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        times.append(time.perf_counter())
        if len(times) == arguments.steps:
            if os.environ.get("RANK", "0") == "0":
                arguments.times.write_text(json.dumps(times))
            sys.stdout.flush()
            os._exit(0)

    register_optimizer_step_post_hook(after_step)
    sys.argv = [arguments.script, *arguments.options]
    sys.path[0] = str(Path(arguments.script).parent)
    runpy.run_path(arguments.script, run_name="__main__")
    sys.exit(f"{arguments.script} ended after {len(times)} steps, not {arguments.steps}")


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
