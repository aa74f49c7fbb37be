"""The output directory, as rank 0 sees it: its lock, config.json, and what a killed run has left."""

import fcntl
import os
import platform
import re
import subprocess
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ddp import __version__
from ddp.core.errors import OutputInUse, SetupError, UsageError
from ddp.core.files import PROJECT_DIR, TMP_PATTERN, atomic_write, sync_directory, write_json
from ddp.core.run_config import DEFAULT_PARENT, RunConfig
from ddp.data.dataset import data_name
from ddp.training.wrapping import model_name


def default_output_dir(config: RunConfig, model: torch.nn.Module, train_set: Any) -> str:
    """`runs/DATA-MODEL`, from the data and the model that were built."""
    return f"{DEFAULT_PARENT}/" + re.sub(r"[^\w.-]+", "-", f"{data_name(train_set)}-{model_name(model, config)}")


class OutputDir:
    """OUTPUT_DIR, which belongs to one process at a time."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.path = config, Path(config.output_dir)
        self.checkpoints = self.path / "checkpoints"
        self.lock: Any = None

    def open(self) -> None:
        """Create or check the directory, and lock it until this process exits.

        Raises SetupError if it is not writable, OutputInUse, and UsageError if --resume never finds checkpoints.
        """
        try:
            new = [folder for folder in self.path.absolute().parents if not folder.exists()]
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            for folder in (self.path, self.checkpoints):
                for left_over in folder.glob(TMP_PATTERN):
                    left_over.unlink()
                with atomic_write(folder / ".probe", durable=True) as file:
                    file.write(bytes(4096))
                (folder / ".probe").unlink()
            for folder in (self.path.absolute(), self.checkpoints, *new):
                # POSIX: a new directory survives a power failure only if its parent was synced as well.
                with suppress(OSError):  # the parent may not be readable
                    sync_directory(folder.parent)
        except OSError as error:
            reason = f"cannot write to the output directory {self.path}: {error.strerror}"
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
        except BlockingIOError as error:
            owner = ""
            with suppress(OSError):
                owner = f" ({lock_path.read_text()})"
            remedy = "choose another --output-dir, or end that run"
            raise OutputInUse(f"another run{owner} writes to {self.path}: {remedy}") from error
        self.lock.truncate(0)
        self.lock.write(f"process {os.getpid()} on {platform.node()}")
        self.lock.flush()

    def write_config(self) -> None:
        """Replace config.json: options, versions, git commit, host."""
        commit = changes = ""
        run = partial(subprocess.run, cwd=PROJECT_DIR, capture_output=True, text=True, timeout=10)
        with suppress(OSError, subprocess.TimeoutExpired):
            commit = run(["git", "rev-parse", "HEAD"]).stdout.strip()
            changes = run(["git", "status", "--porcelain", "."]).stdout
        record = {
            "options": asdict(self.config),
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
