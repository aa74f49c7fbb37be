"""The checkpoints of a run on disk, as rank 0 sees them: find the newest good one, write one, delete old ones.

If power fails during a save, no file is partial. The new step_N.pt is complete or absent. best.pt is the previous one
or the new one, which may be newer than every step_N.pt. The newest --keep-checkpoints good files from before are there,
because old ones are deleted last. A *.tmp file may remain; the next start deletes it. The lines of metrics.jsonl that
led to a checkpoint were synced before it; a resumed run deletes later lines, and syncs the file as well. status.json
and config.json are not synced: they may be old or empty, and resuming does not read them.
"""

import logging
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp.checkpoint import checkpoint_file
from ddp.checkpoint.state import size_of
from ddp.core.errors import CheckpointError
from ddp.core.files import storage_errors
from ddp.core.run_config import RESUME_WORDS, RunConfig
from ddp.distributed.process_group import DistContext

log = logging.getLogger(__name__)
NAME = re.compile(r"step_\d{8,}\.pt")


class CheckpointDirectory:
    """OUTPUT_DIR/checkpoints/step_NNNNNNNN.pt, and OUTPUT_DIR/best.pt. If both hold one step, they are hard links."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.path = config, Path(config.output_dir) / "checkpoints"
        self.best_path = self.path.parent / "best.pt"
        self.verified: set[str] = set()  # names of the checkpoints that this process has written or verified

    def paths(self) -> list[Path]:
        """The checkpoints, good or bad, newest first."""
        paths = [path for path in self.path.glob("step_*.pt") if NAME.fullmatch(path.name)]
        return sorted(paths, key=lambda path: int(path.stem.removeprefix("step_")), reverse=True)

    def find(self) -> tuple[Path | None, dict[str, Any]]:
        """The checkpoint that --resume asks for, and its content; (None, {}) if there is nothing to resume from.

        --resume PATH applies until this directory has checkpoints of its own, so that the same command can be repeated
        after a crash. Raises CheckpointError if no checkpoint can be used, or if --resume must finds none.
        """
        resume = self.config.resume
        from_path = resume not in RESUME_WORDS
        if from_path and (self.config.evaluate or not self.paths()):
            return Path(resume), read_given(Path(resume))
        path, content = self._newest()
        if path is None and resume == "must":
            remedy = "restore that directory, or remove --resume to start a new run"
            raise CheckpointError(f"--resume must: there is no checkpoint in {self.path}: {remedy}")
        if from_path and content["started_from"] != os.path.realpath(resume):
            problem = f"{self.path.parent} already holds checkpoints of a run that did not start from it"
            remedy = "choose another --output-dir, or remove --resume"
            raise CheckpointError(f"--resume {resume}: {problem}; {remedy}")
        return path, content

    def _newest(self) -> tuple[Path | None, dict[str, Any]]:
        reasons = []
        for path in self.paths():
            try:
                content = checkpoint_file.read(path)
                self.verified.add(path.name)
                return path, content
            except checkpoint_file.InvalidCheckpoint as error:
                reasons.append(f"{path.name}: {error}")
                log.warning("warning: %s cannot be used: %s; trying the one before it", path, error)
        if reasons:
            remedy = "pass a good one with --resume PATH, or choose another --output-dir to start afresh"
            raise CheckpointError(f"no checkpoint in {self.path} can be used ({'; '.join(reasons)}): {remedy}")
        return None, {}

    def write(self, content: dict[str, Any], *, best: bool) -> None:
        """Write a checkpoint, and best.pt if it is the best; then delete the oldest ones. Raises StorageError."""
        path = self.path / f"step_{content['step']:08d}.pt"
        with storage_errors(path, needed=size_of(content)):
            if best:  # first, so that no checkpoint ever names a better best.pt than there is
                checkpoint_file.write(self.best_path, content)
                checkpoint_file.link(self.best_path, path)
            else:
                checkpoint_file.write(path, content)
        self.verified.add(path.name)
        self.prune()

    def prune(self) -> None:
        """Delete what is older than the newest --keep-checkpoints good ones. Bad ones do not count as kept.

        Raises StorageError.
        """
        paths, kept = self.paths(), 0
        if len(paths) <= self.config.keep_checkpoints:
            return
        with storage_errors(self.path):
            for path in paths:
                if kept == self.config.keep_checkpoints:
                    path.unlink()
                    continue
                with suppress(checkpoint_file.InvalidCheckpoint):
                    if path.name not in self.verified:
                        checkpoint_file.verify(path)
                    self.verified.add(path.name)
                    kept += 1


def read_given(path: Path) -> dict[str, Any]:
    """The content of a checkpoint that the user named. Raises CheckpointError."""
    try:
        return checkpoint_file.read(path)
    except checkpoint_file.InvalidCheckpoint as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from error


def read_on_main(ctx: DistContext, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `read` returns on rank 0, with tensors in host memory, or its exception. Call on every rank."""
    content: dict[str, Any] = {}
    ctx.on_main(lambda: content.update(read()))
    return ctx.broadcast_tree(content)
