"""The checkpoints of a run on disk, as rank 0 sees them: find the newest good one, write one, delete old ones.

If power fails during a save, each of best.pt and step_N.pt is the old file, the new file, or absent, and never partial;
best.pt may be newer than every step_N.pt; a *.tmp file may remain, which the next start deletes. The newest
--keep-checkpoints good files are there, because old ones are deleted last. The lines of metrics.jsonl that led to a
checkpoint were synced before it; later lines are deleted when the run resumes.
"""

import logging
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp.checkpoint import file
from ddp.checkpoint.state import size_of
from ddp.core.errors import CheckpointError
from ddp.core.files import storage_errors

log = logging.getLogger(__name__)
NAME = re.compile(r"step_\d{8,}\.pt")


class CheckpointDirectory:
    """OUTPUT_DIR/checkpoints/step_NNNNNNNN.pt, and OUTPUT_DIR/best.pt."""

    def __init__(self, output_dir: Path, keep: int) -> None:
        self.path, self.best_path, self.keep = output_dir / "checkpoints", output_dir / "best.pt", keep
        self.verified: set[str] = set()  # names of the checkpoints that this process has written or verified

    def paths(self) -> list[Path]:
        """The checkpoints, good or bad, newest first."""
        paths = [path for path in self.path.glob("step_*.pt") if NAME.fullmatch(path.name)]
        return sorted(paths, key=lambda path: int(path.stem.removeprefix("step_")), reverse=True)

    def find(self, resume: str, evaluate: bool) -> tuple[Path | None, dict[str, Any]]:
        """The checkpoint that --resume asks for, and its content; (None, {}) if there is nothing to resume from.

        --resume PATH applies until this directory has checkpoints of its own, so that the same command can be repeated
        after a crash. Raises CheckpointError if no checkpoint can be used.
        """
        from_path = resume not in ("auto", "never")
        if from_path and (evaluate or not self.paths()):
            try:
                return Path(resume), file.read(Path(resume))
            except file.InvalidCheckpoint as error:
                raise CheckpointError(f"{resume} cannot be used: {error}") from error
        path, content = self._newest()
        if from_path and content["started_from"] != os.path.realpath(resume):
            problem = f"{self.path.parent} already holds checkpoints of a run that did not start from it"
            remedy = "choose another --output-dir, or remove --resume"
            raise CheckpointError(f"--resume {resume}: {problem}; {remedy}")
        return path, content

    def _newest(self) -> tuple[Path | None, dict[str, Any]]:
        reasons = []
        for path in self.paths():
            try:
                content = file.read(path)
                self.verified.add(path.name)
                return path, content
            except file.InvalidCheckpoint as error:
                reasons.append(f"{path.name}: {error}")
                log.warning("warning: %s cannot be used: %s; trying the one before it", path, error)
        if reasons:
            remedy = "pass a good one with --resume PATH, or choose another --output-dir to start afresh"
            raise CheckpointError(f"no checkpoint in {self.path} can be used ({'; '.join(reasons)}): {remedy}")
        return None, {}

    def write(self, content: dict[str, Any], *, best: bool) -> None:
        """Write a checkpoint, and best.pt if it is the best; then delete the oldest ones. Raises StorageError."""
        path = self.path / f"step_{content['step']:08d}.pt"
        with storage_errors(path, needed=size_of(content) * (1 + best)):
            if best:  # first, so that no checkpoint ever names a better best.pt than there is
                file.write(self.best_path, content)
                file.copy(self.best_path, path)
            else:
                file.write(path, content)
            self.verified.add(path.name)
            self._prune()

    def _prune(self) -> None:
        """Delete what is older than the newest --keep-checkpoints good ones. Bad ones do not count as kept."""
        kept = 0
        for path in self.paths():
            if kept == self.keep:
                path.unlink()
                continue
            with suppress(file.InvalidCheckpoint):
                if path.name not in self.verified:
                    file.verify(path)
                self.verified.add(path.name)
                kept += 1
