"""Checkpoints on disk: one file, written completely or not at all; and the files of a run, as rank 0 sees them.

A checkpoint is an ordinary torch file, which is a zip archive. Its SHA-256 is in the archive's comment, at the very end
of the file, which `torch.load` does not read: torch.load alone accepts flipped bits without an error.

If power fails during a save, no file is partial. The new step_N.pt is complete or absent. best.pt is the previous one
or the new one, which may be newer than every step_N.pt. The newest --keep-checkpoints good files are there, with or
without the new one: old ones are deleted last. A *.tmp file may remain; the next start deletes it. The lines of
metrics.jsonl that led to a checkpoint were synced before it. A resumed run deletes the lines after its checkpoint, and
syncs the file again. status.json and config.json are not synced: they may be old or empty, and decide nothing: a
resumed run only reads from status.json how much time was lost.
"""

import hashlib
import logging
import os
import pickle
import re
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch

from ddp.core.background import BackgroundJob
from ddp.core.errors import CheckpointError
from ddp.core.files import atomic_write, storage_errors, sync_directory, temporary
from ddp.core.rank_logs import progress
from ddp.core.run_config import RESUME_WORDS, RunConfig
from ddp.distributed.process_group import KEEP_ALL, DistContext, Keep
from ddp.distributed.tensors import leaves

log = logging.getLogger(__name__)
FORMAT = 3
NAME = re.compile(r"step_\d{8,}\.pt")
BLOCK = 1 << 20  # bytes that are read at once
COMMENT_PREFIX = b"sha256:"
COMMENT_LENGTH = len(COMMENT_PREFIX) + 64
END_RECORD = b"PK\x05\x06"  # starts the last 22 bytes of an archive without a comment
END_RECORD_LENGTH = 22


class InvalidCheckpoint(CheckpointError):
    """This file cannot be used."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)  # by which it is pickled
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.args[0]} cannot be used: {self.reason}"


# ---- one file -------------------------------------------------------------------------------------------------------


def write(path: Path, content: dict[str, Any]) -> None:
    """Write `content` (tensors and plain types) to `path`. At any moment, `path` is the old file or the new one."""
    with atomic_write(path, durable=True) as file:
        writer = HashingWriter(file)
        try:
            torch.save(content, writer)  # type: ignore[arg-type]  # it only calls write and flush
        except Exception as error:  # torch.save replaces an OSError by an error of its own
            raise writer.error or error from None
        writer.finish()


def link(source: Path, path: Path) -> None:
    """Make `path` the same checkpoint as `source`, as safely as `write`: a hard link, or a copy where links fail.

    No checkpoint is ever changed in place, so a link is as good as a copy.
    """
    tmp_path = path.with_name(f"{path.name}.link.tmp")  # not the name that atomic_write would open and truncate
    try:
        os.link(source, tmp_path)
    except OSError:  # not on exFAT, on some network file systems, or between two file systems
        with source.open("rb") as original, atomic_write(path, durable=True) as file:
            shutil.copyfileobj(original, file, BLOCK)
        return
    with temporary(tmp_path, path):
        tmp_path.replace(path)
        sync_directory(path.parent)


def read(path: Path) -> dict[str, Any]:
    """The content of `path`, and `path`. Tensors are mapped: they take memory only where they are read.

    Raises InvalidCheckpoint; runs no code.
    """
    verify(path)
    try:
        try:
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except (OSError, RuntimeError):  # a file system that maps no files
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InvalidCheckpoint(path, "it holds more than tensors and plain values, and could run code") from error
    except Exception as error:
        raise InvalidCheckpoint(path, f"torch cannot load it ({type(error).__name__})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InvalidCheckpoint(path, "it is a torch file, but not a checkpoint of this project and version")
    return {**content, "path": str(path)}


def verify(path: Path) -> None:
    """Raise InvalidCheckpoint unless the file is exactly what was written."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            length = os.fstat(file.fileno()).st_size - COMMENT_LENGTH
            for position in progress(range(0, length, BLOCK), f"verifying {path.name}"):
                digest.update(file.read(min(BLOCK, length - position)))
            comment = file.read()
    except OSError as error:
        raise InvalidCheckpoint(path, f"it cannot be read: {error.strerror}") from error
    if length <= 0:
        raise InvalidCheckpoint(path, "it is empty or truncated")
    if not comment.startswith(COMMENT_PREFIX):
        raise InvalidCheckpoint(path, "it is truncated, or of another program: it has no digest at its end")
    if comment != COMMENT_PREFIX + digest.hexdigest().encode():
        raise InvalidCheckpoint(path, "its digest does not match: it was damaged after it was written")


class HashingWriter:
    """A file for torch.save: computes the digest on the way, and holds back the end record to add a comment to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.digest, self.held_back = file, hashlib.sha256(), b""
        self.flush = file.flush
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        size = view.nbytes
        if size < END_RECORD_LENGTH:
            view = memoryview(self.held_back + view)
        else:  # perhaps large: pass it on without a copy
            self._put(self.held_back)
        self._put(view[:-END_RECORD_LENGTH])
        self.held_back = bytes(view[-END_RECORD_LENGTH:])
        return size

    def finish(self) -> None:
        """Write the end record, and the digest as the comment."""
        assert self.held_back.startswith(END_RECORD), "torch.save wrote no zip archive"
        self._put(self.held_back[:-2] + COMMENT_LENGTH.to_bytes(2, "little"))
        self.file.write(COMMENT_PREFIX + self.digest.hexdigest().encode())

    def _put(self, data: Any) -> None:
        self.digest.update(data)
        try:
            self.file.write(data)
        except OSError as error:
            self.error = error
            raise


# ---- the files of a run ---------------------------------------------------------------------------------------------


def step_of(name: str) -> int:
    """The step of step_NNNNNNNN.pt."""
    return int(name.removeprefix("step_").removesuffix(".pt"))


class CheckpointDirectory:
    """OUTPUT_DIR/checkpoints/step_NNNNNNNN.pt, and OUTPUT_DIR/best.pt. If both hold one step, they are hard links."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.path = config, Path(config.output_dir) / "checkpoints"
        self.best_path = self.path.parent / "best.pt"
        self.verified: set[Path] = set()  # the checkpoints that this process has written or verified

    def paths(self) -> list[Path]:
        """The checkpoints, good or bad, newest first."""
        paths = [path for path in self.path.glob("step_*.pt") if NAME.fullmatch(path.name)]
        return sorted(paths, key=lambda path: step_of(path.name), reverse=True)

    def path_of(self, step: int) -> Path:
        return self.path / f"step_{step:08d}.pt"

    def find(self) -> dict[str, Any]:
        """The content of the checkpoint that --resume asks for; empty if there is nothing to resume from.

        --resume PATH applies until this directory has checkpoints of its own, so that the same command can be repeated
        after a crash. Raises CheckpointError if no checkpoint can be used, or if --resume must finds none.
        """
        resume, paths, reasons = self.config.resume, self.paths(), []
        from_path = resume not in RESUME_WORDS
        if from_path and (self.config.evaluate or not paths):
            return read(Path(resume))
        for path in paths:
            try:
                content = read(path)
            except InvalidCheckpoint as error:
                reasons.append(f"{path.name}: {error.reason}")
                log.warning("warning: %s; trying the one before it", error)
                continue
            if from_path and content["started_from"] != os.path.realpath(resume):
                problem = f"{self.path.parent} already holds checkpoints of a run that did not start from it"
                raise CheckpointError(f"--resume {resume}: {problem}; choose another --output-dir, or remove --resume")
            self.verified.add(path)
            return content
        if reasons:
            remedy = "pass a good one with --resume PATH, or choose another --output-dir to start afresh"
            raise CheckpointError(f"no checkpoint in {self.path} can be used ({'; '.join(reasons)}): {remedy}")
        if resume == "must":
            remedy = "restore that directory, or remove --resume to start a new run"
            raise CheckpointError(f"--resume must: there is no checkpoint in {self.path}: {remedy}")
        return {}

    def write(self, content: dict[str, Any], *, best: bool) -> None:
        """Write a checkpoint, and best.pt if it is the best; then delete the oldest ones. Raises StorageError."""
        path = self.path_of(content["step"])
        needed = sum(part.nbytes for part in leaves(content) if isinstance(part, torch.Tensor))
        with storage_errors(path, needed=needed):
            if best:  # first, so that no checkpoint ever names a better best.pt than there is
                write(self.best_path, content)
                link(self.best_path, path)
            else:
                write(path, content)
        self.verified.add(path)
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
                with suppress(InvalidCheckpoint):
                    if path not in self.verified:
                        verify(path)
                    self.verified.add(path)
                    kept += 1


def read_on_main(
    ctx: DistContext, read: Callable[[], dict[str, Any]], keep: Keep = KEEP_ALL, later: Collection[str] = ()
) -> tuple[dict[str, Any], Callable[[str], Any]]:
    """What `read` returns on rank 0, or its exception. Call on every rank.

    keep: makes of each tensor what stays. later: parts that are None in the result, and that a call of the function
    which is returned with it receives, on every rank. So no rank needs memory for all parts at once.
    """
    found: dict[str, Any] = {}
    reader = BackgroundJob("checkpoint reader")
    ctx.on_main(reader.start, lambda: found.update(read()))
    while not ctx.on_main(reader.finish, ctx.monitor.timeout / 4):  # the others would take it for lost
        pass
    content = ctx.broadcast_tree({name: None if name in later else part for name, part in found.items()}, keep)
    return content, lambda name: ctx.broadcast_tree({name: found.pop(name, None)}, keep)[name]
