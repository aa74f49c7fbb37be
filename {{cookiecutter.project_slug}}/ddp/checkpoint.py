"""One checkpoint file: write it whole or not at all, verify it, read it.

A checkpoint is an ordinary torch file, that is a zip archive. Its SHA-256 stands in the archive's comment, the very
end of the file, where `torch.load` does not look: torch.load alone accepts flipped bytes without a word.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
from pathlib import Path
from typing import Any, BinaryIO

import torch

FORMAT = 2
MARK = b"sha256:"
COMMENT_LENGTH = len(MARK) + 64
END_RECORD = b"PK\x05\x06"  # the last 22 bytes of an archive without a comment start with it
END_RECORD_LENGTH = 22


class BadCheckpoint(Exception):
    """This file cannot be used; the message says why."""


def write(path: Path, content: dict[str, Any]) -> None:
    """Write `content` (tensors and plain types) to `path`. Whatever happens, `path` is the old file or the new one."""
    beside = temporary(path)
    archive = None
    try:
        with beside.open("wb") as file:
            archive = _Sealed(file)
            torch.save(content, archive)  # type: ignore[arg-type]  # it only calls write and flush
            archive.seal()
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        sync_folder(path.parent)
    except Exception as error:  # torch.save turns the error of a file into one of its own
        raise (archive and archive.error) or error from None
    finally:
        beside.unlink(missing_ok=True)


def copy(source: Path, path: Path) -> None:
    """Copy a checkpoint to `path`, with the same care."""
    beside = temporary(path)
    try:
        with source.open("rb") as read, beside.open("wb") as written:
            shutil.copyfileobj(read, written, 1 << 20)
            written.flush()
            os.fsync(written.fileno())
        beside.replace(path)
        sync_folder(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def read(path: Path) -> dict[str, Any]:
    """The content of `path`, with all tensors in host memory. Raises BadCheckpoint; runs no code out of the file."""
    verify(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise BadCheckpoint("it holds more than tensors and plain values, which could run code when loaded") from error
    except Exception as error:
        raise BadCheckpoint(f"torch cannot load it ({type(error).__name__})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise BadCheckpoint("it is a torch file, but not a checkpoint of this project and version")
    return content


def verify(path: Path) -> None:
    """Raises BadCheckpoint unless the file is exactly what was written."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            left = os.fstat(file.fileno()).st_size - COMMENT_LENGTH
            if left <= 0:
                raise BadCheckpoint("it is empty or cut short")
            while left > 0 and (block := file.read(min(left, 1 << 20))):
                digest.update(block)
                left -= len(block)
            comment = file.read()
    except OSError as error:
        raise BadCheckpoint(f"it cannot be read: {error.strerror}") from error
    if not comment.startswith(MARK):
        raise BadCheckpoint(
            "it is cut short, or damaged, or not a checkpoint of this project: it has no digest at its end"
        )
    if comment != MARK + digest.hexdigest().encode():
        raise BadCheckpoint("its digest does not match: it was damaged after it was written")


def temporary(path: Path) -> Path:
    """Where `path` is written before it is renamed; what a killed run leaves there goes at the next start."""
    return path.with_name(path.name + ".tmp")


def sync_folder(folder: Path) -> None:
    """Make a rename last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Sealed:
    """A file for torch.save that computes the digest on the way, and holds back the end to put a comment into it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.digest = hashlib.sha256()
        self.held = b""
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if view.nbytes >= END_RECORD_LENGTH:
            self._put(self.held)
            self._put(view[:-END_RECORD_LENGTH])
            self.held = bytes(view[-END_RECORD_LENGTH:])
        else:
            together = self.held + view.tobytes()
            self._put(together[:-END_RECORD_LENGTH])
            self.held = together[-END_RECORD_LENGTH:]
        return view.nbytes

    def flush(self) -> None:
        self.file.flush()

    def seal(self) -> None:
        assert self.held.startswith(END_RECORD), "torch.save wrote no zip archive"
        self._put(self.held[:-2] + COMMENT_LENGTH.to_bytes(2, "little"))
        self.file.write(MARK + self.digest.hexdigest().encode())

    def _put(self, data: Any) -> None:
        self.digest.update(data)
        try:
            self.file.write(data)
        except OSError as error:
            self.error = error
            raise
