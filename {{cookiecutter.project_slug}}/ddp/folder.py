"""The output folder, as rank 0 sees it: its lock, its checkpoints, its records. Nothing here talks to another rank."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from config import Config
from ddp import checkpoint
from ddp.errors import CheckpointFailure, EnvironmentFailure, OutputInUse, StorageFailure, UsageError
from ddp.state import size_of
from ddp.status import write_json, write_last_status, write_status

log = logging.getLogger(__name__)
NAME = re.compile(r"step_(\d{8,})\.pt")


class Folder:
    """Paths in an output folder, and what rank 0 does there."""

    def __init__(self, config: Config) -> None:
        self.path = Path(config.output_dir)
        self.checkpoints = self.path / "checkpoints"
        self.best = self.path / "best.pt"
        self.keep = config.keep_checkpoints
        self.good: set[str] = set()  # names of the checkpoints that this process has written or verified
        self.lock: Any = None

    def open(self, config: Config) -> None:
        """Make the folder, or find it usable; keep every other run out until this process ends.

        Raises EnvironmentFailure if it cannot be written, OutputInUse if another run is in it, UsageError if
        --resume never finds checkpoints in it.
        """
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            for folder in (self.path, self.checkpoints):
                for left in (*folder.glob("*.pt.tmp"), *folder.glob("*.json.tmp"), *folder.glob("*.jsonl.tmp")):
                    left.unlink()
                _probe(folder)
        except OSError as error:
            raise EnvironmentFailure(
                f"cannot write to the output folder {self.path}: {error.strerror}; choose another --output-dir"
            ) from error
        if config.resume == "never" and self.steps():
            raise UsageError(
                f"--resume never: {self.checkpoints} holds checkpoints of an earlier run; "
                "choose another --output-dir, or delete them"
            )

    def _take_lock(self) -> None:
        # lockf, not flock: a flock is inherited by DataLoader workers, which outlive a killed rank 0 by seconds.
        self.lock = (self.path / ".lock").open("a")
        try:
            fcntl.lockf(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputInUse(
                f"another run{self._holder()} writes to {self.path}: choose another --output-dir, or end it"
            ) from error
        self.lock.truncate(0)
        self.lock.write(f"process {os.getpid()} on {platform.node()}")
        self.lock.flush()

    def _holder(self) -> str:
        with suppress(OSError):
            return f" ({(self.path / '.lock').read_text()})"
        return ""

    def write_config(self, config: Config) -> None:
        """Replace config.json: options, versions, git commit."""
        write_json(self.path / "config.json", {"options": asdict(config), **_versions()})

    def write_status(self, **status: Any) -> None:
        """Replace status.json."""
        (write_last_status if status["exit_code"] else write_status)(self.path, **status)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The steps of which there is a checkpoint, good or bad, newest first."""
        names = (NAME.fullmatch(path.name) for path in self.checkpoints.glob("step_*.pt"))
        return sorted((int(match[1]) for match in names if match), reverse=True)

    def of_step(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:08d}.pt"

    def find(self, config: Config) -> tuple[Path | None, dict[str, Any]]:
        """The checkpoint that --resume asks for and its content; None if there is nothing to resume from.

        --resume PATH counts as long as the folder has no checkpoints of its own, so that the same command can be
        given again after a crash. Raises CheckpointFailure if none can be used.
        """
        resume = config.resume
        if resume in ("auto", "never") or (self.steps() and not config.evaluate):
            path, content = self._newest()
            if resume not in ("auto", "never") and content["started_from"] != os.path.realpath(resume):
                raise CheckpointFailure(
                    f"--resume {resume}: {self.path} already holds checkpoints of a run that did not start from it; "
                    "choose another --output-dir, or leave out --resume"
                )
            return path, content
        try:
            return Path(resume), checkpoint.read(Path(resume))
        except checkpoint.BadCheckpoint as error:
            raise CheckpointFailure(f"{resume} cannot be used: {error}") from error

    def _newest(self) -> tuple[Path | None, dict[str, Any]]:
        """The newest checkpoint that verifies."""
        reasons = []
        for step in self.steps():
            path = self.of_step(step)
            try:
                content = checkpoint.read(path)
            except checkpoint.BadCheckpoint as error:
                reasons.append(f"{path.name}: {error}")
                log.warning("warning: %s cannot be used: %s; taking the one before it", path, error)
                continue
            self.good.add(path.name)
            return path, content
        if reasons:
            raise CheckpointFailure(
                f"no checkpoint in {self.checkpoints} can be used ({'; '.join(reasons)}): "
                "give a good one with --resume PATH, or choose another --output-dir to start afresh"
            )
        return None, {}

    def save(self, content: dict[str, Any], *, best: bool) -> Path:
        """Write a checkpoint, and best.pt if it is the best; then drop the oldest ones."""
        path = self.of_step(content["step"])
        with storage(path, needed=2 * size_of(content) if best else size_of(content)):
            if best:  # first, so that no checkpoint ever speaks of a better best.pt than there is
                checkpoint.write(self.best, content)
                checkpoint.copy(self.best, path)
            else:
                checkpoint.write(path, content)
            self.good.add(path.name)
            self._prune()
        return path

    def _prune(self) -> None:
        """Delete what is older than the newest --keep-checkpoints good ones. Bad ones do not count as kept."""
        kept = 0
        for step in self.steps():
            path = self.of_step(step)
            if kept >= self.keep:
                path.unlink()
            elif self._is_good(path):
                kept += 1

    def _is_good(self, path: Path) -> bool:
        if path.name not in self.good:
            try:
                checkpoint.verify(path)
            except checkpoint.BadCheckpoint:
                return False
            self.good.add(path.name)
        return True


@contextmanager
def storage(path: Path, needed: int | None = None) -> Iterator[None]:
    """Turns an OSError of the block into StorageFailure, which names `path` and the space, in bytes, that it needs."""
    try:
        yield
    except OSError as error:
        what, remedy = error.strerror or str(error), "mend that"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "make room"
            with suppress(OSError):
                wanted = f"{needed / 1e6:,.1f} MB needed, " if needed else ""
                what += f" ({wanted}{shutil.disk_usage(path.parent).free / 1e6:,.1f} MB free)"
        where = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else path
        raise StorageFailure(
            f"cannot write {where}: {what}: {remedy}, then give the same command again; earlier checkpoints are as "
            "they were"
        ) from error


def _probe(folder: Path) -> None:
    """Raises OSError unless a file can be written here and kept."""
    probe = folder / ".probe.json.tmp"
    with probe.open("wb") as file:
        file.write(bytes(4096))
        file.flush()
        os.fsync(file.fileno())
    probe.unlink()


def _versions() -> dict[str, Any]:
    """What a run was made with: versions, and the git commit of the code."""
    code = Path(__file__).resolve().parent
    git = ["git", "-C", str(code)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10).stdout.strip()
        changes = subprocess.run(
            [*git, "status", "--porcelain", ".."], capture_output=True, text=True, timeout=10
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        commit, changes = "", ""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "git_commit": commit or None,
        "git_changed": bool(changes),
        "host": platform.node(),
        "pid": os.getpid(),
    }
