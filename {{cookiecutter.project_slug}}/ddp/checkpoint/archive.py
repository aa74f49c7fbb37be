"""One checkpoint file: written completely or not at all, and verified when it is read.

It is an ordinary torch file, which is a zip archive. Its SHA-256 is in the archive's comment, at the very end of the
file, which `torch.load` does not read: torch.load alone accepts flipped bits without an error.
"""

import hashlib
import os
import pickle
import shutil
from pathlib import Path
from typing import IO, Any

import torch

from ddp.core.errors import CheckpointError
from ddp.core.files import atomic_write, sync_directory, temporary
from ddp.core.rank_logs import progress

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


def write(path: Path, content: dict[Any, Any]) -> str:
    """Replace `path` with `content` (tensors and plain types), at once and durably. Returns its SHA-256."""
    with atomic_write(path, durable=True) as file:
        writer = HashingWriter(file)
        try:
            torch.save(content, writer)  # type: ignore[arg-type]  # it only calls write and flush
        except Exception as error:  # torch.save replaces an OSError by an error of its own
            raise writer.error or error from None
        return writer.finish()


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


def load(path: Path) -> Any:
    """What `path` holds, which is not verified. Tensors are mapped: they take memory only where they are read.

    Raises InvalidCheckpoint; runs no code.
    """
    try:
        try:
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except (OSError, RuntimeError):  # a file system that maps no files
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InvalidCheckpoint(path, "it holds more than tensors and plain values, and could run code") from error
    except Exception as error:
        raise InvalidCheckpoint(path, f"torch cannot load it ({type(error).__name__})") from error


def verify(path: Path, *, bar: bool = True) -> str:
    """Raise InvalidCheckpoint unless the file is exactly what was written. Returns its SHA-256."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            length = os.fstat(file.fileno()).st_size - COMMENT_LENGTH
            positions = range(0, length, BLOCK)
            for position in progress(positions, f"verifying {path.name}") if bar else positions:
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
    return digest.hexdigest()


def has_digest(path: Path) -> bool:
    """Whether a file ends as `write` ends it. Raises OSError."""
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - COMMENT_LENGTH))
        return file.read().startswith(COMMENT_PREFIX)


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

    def finish(self) -> str:
        """Write the end record, and the digest, which it returns, as the comment."""
        assert self.held_back.startswith(END_RECORD), "torch.save wrote no zip archive"
        self._put(self.held_back[:-2] + COMMENT_LENGTH.to_bytes(2, "little"))
        self.file.write(COMMENT_PREFIX + self.digest.hexdigest().encode())
        return self.digest.hexdigest()

    def _put(self, data: Any) -> None:
        self.digest.update(data)
        try:
            self.file.write(data)
        except OSError as error:
            self.error = error
            raise
