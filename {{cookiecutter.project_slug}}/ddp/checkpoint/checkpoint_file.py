"""One checkpoint file: write it completely or not at all, verify it, read it.

A checkpoint is an ordinary torch file, which is a zip archive. Its SHA-256 is in the archive's comment, at the very end
of the file, which `torch.load` does not read: torch.load alone accepts flipped bits without an error.
"""

import hashlib
import os
import pickle
import shutil
from pathlib import Path
from typing import IO, Any

import torch

from ddp.core.files import atomic_write, sync_directory

FORMAT = 3
BLOCK = 1 << 20  # bytes that are read at once
COMMENT_PREFIX = b"sha256:"
COMMENT_LENGTH = len(COMMENT_PREFIX) + 64
END_RECORD = b"PK\x05\x06"  # starts the last 22 bytes of an archive without a comment
END_RECORD_LENGTH = 22


class InvalidCheckpoint(Exception):
    """This file cannot be used; the message is the reason."""


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
    tmp_path.replace(path)
    sync_directory(path.parent)


def read(path: Path) -> dict[str, Any]:
    """The content of `path`, with all tensors in host memory. Raises InvalidCheckpoint; runs no code from the file."""
    verify(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InvalidCheckpoint("it holds more than tensors and plain values, and could run code") from error
    except Exception as error:
        raise InvalidCheckpoint(f"torch cannot load it ({type(error).__name__})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InvalidCheckpoint("it is a torch file, but not a checkpoint of this project and version")
    return content


def verify(path: Path) -> None:
    """Raise InvalidCheckpoint unless the file is exactly what was written."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            length = os.fstat(file.fileno()).st_size - COMMENT_LENGTH
            if length <= 0:
                raise InvalidCheckpoint("it is empty or truncated")
            for position in range(0, length, BLOCK):
                digest.update(file.read(min(BLOCK, length - position)))
            comment = file.read()
    except OSError as error:
        raise InvalidCheckpoint(f"it cannot be read: {error.strerror}") from error
    if not comment.startswith(COMMENT_PREFIX):
        reason = "it is truncated, or damaged, or not a checkpoint of this project: it has no digest at its end"
        raise InvalidCheckpoint(reason)
    if comment != COMMENT_PREFIX + digest.hexdigest().encode():
        raise InvalidCheckpoint("its digest does not match: it was damaged after it was written")


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
