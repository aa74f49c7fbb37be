"""A project whose model.py a test edits, on the device of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from template_copy import copy_template

DEVICE = os.environ.get("GPU_TESTS_DEVICE", "cuda")


def gpus() -> list[str]:
    """The names of the GPUs, from another process: CUDA must not be initialised before this one forks."""
    code = "import torch; [print(torch.cuda.get_device_name(n)) for n in range(torch.cuda.device_count())]"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.splitlines()


GPUS = gpus() if DEVICE != "cpu" else []


class Project:
    """A copy of the template whose model.py ends with other lines."""

    def __init__(self, folder: Path) -> None:
        self.path = copy_template(folder)
        self.model = (self.path / "model.py").read_text()

    def edit(self, lines: str) -> None:
        """End model.py with `lines`."""
        (self.path / "model.py").write_text(f"{self.model}\n\n{lines}\n")

    def start(self, *words: Any) -> subprocess.Popen[str]:
        """Start Python with `words`."""
        return subprocess.Popen(
            [sys.executable, *map(str, words)],
            cwd=self.path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "4"},
        )

    def run(self, *words: Any, code: int = 0, timeout: float = 900) -> str:
        """What Python prints. Fails unless it exits with `code`."""
        with self.start(*words) as process:
            try:
                output, _ = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        assert process.returncode == code, output
        return output

    def train(self, *options: Any, code: int = 0, timeout: float = 900) -> str:
        """What main.py prints: on the synthetic data, without output of an earlier test."""
        given = ("--dataset", "synthetic", "--device", DEVICE, "--epochs", 1, *options)
        return self.run("main.py", *given, code=code, timeout=timeout)

    def start_training(self, *options: Any) -> subprocess.Popen[str]:
        return self.start("main.py", "--dataset", "synthetic", "--device", DEVICE, "--epochs", 1, *options)
