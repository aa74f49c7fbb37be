"""The checkpoint files of a run: each is written completely or not at all, and verified when it is read.

A checkpoint is an ordinary torch file, which is a zip archive. Its SHA-256 is in the archive's comment, at the very
end of the file, which torch.load does not read: torch.load alone accepts flipped bits without an error.

If power fails during a save, no file is partial. The new step_N.pt is complete or absent. best.pt is the previous one
or the new one, which may be newer than every step_N.pt. The newest --keep-checkpoints good files are there, with or
without the new one: old ones are deleted last. A *.ddp.tmp file may remain; the next start deletes it. The lines of
metrics.jsonl that led to a checkpoint were synced before it. A resumed run deletes the lines after its checkpoint, and
syncs the file again. status.json and config.json are not synced: they may be old or empty, and decide nothing of
what is trained.
"""

import hashlib
import logging
import os
import pickle
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch

from ddp.core.errors import CheckpointError, UsageError
from ddp.core.files import TMP_PATTERN, atomic_write, storage_errors, sync_directory, temporary
from ddp.core.parts import missing_part, of_parts
from ddp.core.rank_logs import progress
from ddp.core.run_config import RESUME_WORDS, RunConfig
from ddp.core.threads import BackgroundJob
from ddp.distributed.process_group import DistContext, ForTensor
from ddp.distributed.tensors import BLOCK, leaves

log = logging.getLogger(__name__)
FORMAT = 3
FILES = "rows"  # under this name, a checkpoint lists other files with tensors of it: the name -> the digest
FOLDER = "checkpoints"
NAME = re.compile(r"step_\d{8,}\.pt")
COMMENT_PREFIX = b"sha256:"
COMMENT_LENGTH = len(COMMENT_PREFIX) + 64
END_RECORD = b"PK\x05\x06"  # starts the last 22 bytes of an archive without a comment
END_RECORD_LENGTH = 22


class InvalidCheckpoint(CheckpointError):
    """This file cannot be used."""

    def __init__(self, path: Path, reason: str) -> None:
        Exception.__init__(self, path, reason)  # by which it is pickled
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.args[0]} cannot be used: {self.reason}"


# ---- one file -------------------------------------------------------------------------------------------------------


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
    # Not the name that atomic_write would open and truncate.
    tmp_path = path.with_name(f"{path.name}.link{TMP_PATTERN[1:]}")
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
        except (OSError, RuntimeError, UnicodeError):  # no file is mapped on some systems, nor a path that is no text
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
        raise InvalidCheckpoint(path, error.strerror or str(error)) from error
    if length <= 0:
        raise InvalidCheckpoint(path, "it is empty or truncated")
    if not comment.startswith(COMMENT_PREFIX):
        raise InvalidCheckpoint(path, "it is truncated, or of another program: it has no digest at its end")
    if comment != COMMENT_PREFIX + digest.hexdigest().encode():
        raise InvalidCheckpoint(path, "its digest does not match: it was damaged after it was written")
    return digest.hexdigest()


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


def read(path: Path) -> dict[str, Any]:
    """The content of `path`, and `path`. Tensors are mapped: they take memory only where they are read.

    Those that a part has written to other files are split: `whole` reads them. Raises InvalidCheckpoint; runs no code.
    """
    verify(path)
    content = load(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InvalidCheckpoint(path, "it is a torch file, but not a checkpoint of this project and version")
    return {**read_files(path, content), "path": str(path)}


def read_files(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """`content` of `path`, with the tensors that are in other files.

    Raises InvalidCheckpoint; UsageError if a part that this project lacks has written them.
    """
    if not content.get(FILES):
        return content
    for read_them in of_parts("read_files"):
        return read_them(path, {name: part for name, part in content.items() if name != FILES}, content[FILES])
    raise UsageError(f"{path} has its weights in other files: {missing_part('shard')}")


# ---- the files of a run ---------------------------------------------------------------------------------------------


def delete_left_over(folder: Path) -> None:
    """Delete what killed runs have left in `folder`, an output directory or a copy of one."""
    for path in (*folder.glob(TMP_PATTERN), *(folder / FOLDER).rglob(TMP_PATTERN)):
        path.unlink(missing_ok=True)  # a process of the run before may just have renamed it


def step_of(name: str) -> int:
    """The step of step_NNNNNNNN.pt."""
    return int(name.removeprefix("step_").removesuffix(".pt"))


class CheckpointDirectory:
    """OUTPUT_DIR/checkpoints/step_NNNNNNNN.pt, and OUTPUT_DIR/best.pt. If both hold one step, they are hard links where
    the file system has them.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config, self.path = config, Path(config.output_dir) / FOLDER
        self.best_path = self.path.parent / "best.pt"
        self.good: dict[Path, bool] = {}  # whether the checkpoints that this process has written or read can be used

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
        resume, from_path, reasons = self.config.resume, self.config.resume not in RESUME_WORDS, []
        if (given := self._given()) is not None:
            return read(given)
        for path in self.paths():
            try:
                content = read(path)
            except InvalidCheckpoint as error:
                self.good[path] = False
                reasons.append(f"{path.name}: {error.reason}")
                log.warning("warning: %s; trying the one before it", error)
                continue
            if from_path and content["started_from"] != os.path.realpath(resume):
                problem = f"{self.path.parent} already holds checkpoints of a run that did not start from it"
                raise CheckpointError(f"--resume {resume}: {problem}; choose another --output-dir, or remove --resume")
            self.good[path] = True
            return content
        if reasons:
            remedy = "pass a good one with --resume PATH, or choose another --output-dir to start afresh"
            raise CheckpointError(f"no checkpoint in {self.path} can be used ({'; '.join(reasons)}): {remedy}")
        if resume == "must":
            remedy = "restore that directory, or remove --resume to start a new run"
            raise CheckpointError(f"--resume must: there is no checkpoint in {self.path}: {remedy}")
        return {}

    def _given(self) -> Path | None:
        """The checkpoint of --resume PATH, unless this directory has checkpoints of its own."""
        applies = self.config.resume not in RESUME_WORDS and (self.config.evaluate or not self.paths())
        return Path(self.config.resume) if applies else None

    def is_earlier(self) -> bool:
        """Whether the checkpoint to resume from, which is not verified yet, has no record of the samples."""
        given = self._given()
        for path in self.paths() if given is None else [given]:
            with suppress(Exception):  # it is damaged: `find` reports that
                return load(path).get("records", "{}") == "{}"
        return False

    def write(self, content: dict[str, Any], *, best: bool) -> None:
        """Write a checkpoint, and best.pt if it is the best; then delete the oldest ones. Raises StorageError."""
        path = self.path_of(content["step"])
        with storage_errors(path, needed=size_of(content)):
            if best:  # first, so that no checkpoint ever names a better best.pt than there is
                write(self.best_path, content)
                link(self.best_path, path)
            else:
                write(path, content)
        self.good[path] = True
        self.prune()

    def prune(self) -> None:
        """Delete what is older than the newest --keep-checkpoints good ones, bad ones aside. Raises StorageError."""
        paths, kept = self.paths(), 0
        with storage_errors(self.path):
            for path in paths if len(paths) > self.config.keep_checkpoints else ():
                if kept == self.config.keep_checkpoints:
                    path.unlink()
                else:
                    kept += self.is_good(path)

    def is_good(self, path: Path) -> bool:
        if path not in self.good:
            self.good[path] = False
            with suppress(InvalidCheckpoint, UsageError):  # it may need a part that was removed
                self.good[path] = bool(read(path))
        return self.good[path]

    def has_best_of(self, content: Mapping[str, Any]) -> bool:
        """Whether best.pt is the best checkpoint of the run that wrote `content`, and not that of another run."""
        if Path(content["path"]).parent == self.path:
            return self.best_path.exists()
        with suppress(InvalidCheckpoint, AttributeError):  # AttributeError: something else has that name
            best, theirs = load(self.best_path), (content.get("best_step"), content.get("best"))
            return (best.get("step"), best.get("best")) == theirs
        return False


def read_on_main(
    ctx: DistContext, read: Callable[[], dict[str, Any]], keep: ForTensor, later: Collection[str] = ()
) -> tuple[dict[str, Any], Callable[[str], Any]]:
    """What `read` returns on rank 0, or its exception. Call on every rank.

    keep: makes of each tensor what stays. later: parts that are None in the result, and that a call of the function
    which is returned with it receives, on every rank. So no rank needs memory for all parts at once.
    """
    found: dict[str, Any] = {}
    reader = BackgroundJob("checkpoint reader")
    ctx.on_main(reader.start, lambda: found.update(read()))
    ctx.wait_on_main(reader)
    content = ctx.broadcast_tree({name: None if name in later else part for name, part in found.items()}, keep)
    return content, lambda name: ctx.broadcast_tree({name: found.pop(name, None)}, keep)[name]


def size_of(content: Any) -> int:
    """The bytes of the tensors in a state that have data; tied ones count once."""
    tensors = (part for part in leaves(content) if isinstance(part, torch.Tensor) and not part.is_meta)
    return sum({part.data_ptr(): part.nbytes for part in tensors}.values())
