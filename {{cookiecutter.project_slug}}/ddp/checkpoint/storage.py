"""The checkpoints of a run, as rank 0 sees them. archive.py writes and reads each file.

With --shard, the rows of each rank may be in a file of their own (see rank_files.py), under checkpoints/rows. Then a
checkpoint lists the names and digests of these files, and has empty meta tensors in the place of what they hold.

If power fails during a save, no file is partial. The new step_N.pt is complete or absent. best.pt is the previous one
or the new one, which may be newer than every step_N.pt. The newest --keep-checkpoints good files are there, with or
without the new one: old ones are deleted last. A *.tmp file may remain, and rows that no file lists; the next start
deletes them. The lines of metrics.jsonl that led to a checkpoint were synced before it. A resumed run deletes the lines
after its checkpoint, and syncs the file again. status.json and config.json are not synced: they may be old or empty,
and decide nothing: a resumed run only reads from status.json how much time was lost.
"""

import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ddp.checkpoint.archive import InvalidCheckpoint, has_digest, link, load, verify, write
from ddp.core.background import BackgroundJob
from ddp.core.errors import CheckpointError, UsageError
from ddp.core.files import storage_errors
from ddp.core.host import available_cores
from ddp.core.rank_logs import progress
from ddp.core.run_config import RESUME_WORDS, RunConfig
from ddp.distributed.process_group import AS_IT_IS, DistContext, ForTensor
from ddp.distributed.tensors import leaves, map_named

log = logging.getLogger(__name__)
FORMAT = 3
ROWS = "rows"  # under this name, a checkpoint lists files with the rows of its tensors: the name -> the digest
FOLDER = "checkpoints"
NAME = re.compile(r"step_\d{8,}\.pt")
STEP = re.compile(r"step_\d{8,}")
RowsOfAll = dict[tuple[Any, ...], list[torch.Tensor]]  # the keys of a tensor -> the rows of each rank


def read(path: Path, *, join: bool = True) -> dict[str, Any]:
    """The content of `path`, and `path`. Tensors are mapped: they take memory only where they are read.

    join=False: tensors whose rows are in other files stay empty; `rows` in the result has their rows, by their keys.
    Raises InvalidCheckpoint; runs no code.
    """
    verify(path)
    content = load(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InvalidCheckpoint(path, "it is a torch file, but not a checkpoint of this project and version")
    rows = read_rows(path, content)
    return {**(join_rows(content, rows) if join else content), ROWS: {} if join else rows, "path": str(path)}


# ---- rows in other files --------------------------------------------------------------------------------------------


def rows_folder(path: Path, names: Iterable[str]) -> Path:
    """The folder of the files that a checkpoint lists: next to it, or in the folder of checkpoints there or above."""
    origins = (path.absolute(), path.resolve())  # a link to a checkpoint may be elsewhere
    folders = [above / below / ROWS for below in ("", FOLDER) for origin in origins for above in origin.parents[:2]]
    return next((folder for folder in folders if any(os.path.exists(folder / name) for name in names)), folders[0])


def read_rows(path: Path, content: Mapping[str, Any]) -> RowsOfAll:
    """The rows of all ranks from the files that a checkpoint lists, mapped. Raises InvalidCheckpoint."""
    listed = content.get(ROWS, {})
    files = {rows_folder(path, listed) / name: digest for name, digest in listed.items()}
    rows: RowsOfAll = {}
    try:
        with ThreadPoolExecutor(available_cores()) as pool:
            digests = pool.map(partial(verify, bar=False), files)
            names = progress([*files], f"verifying the rows of {path.name}", "file")
            for file, digest in zip(names, digests, strict=True):
                if digest != files[file]:
                    raise InvalidCheckpoint(file, "it is not the file that was written for this checkpoint")
        for file in files:
            for keys, tensor in load(file).items():
                rows.setdefault(keys, []).append(tensor)
    except InvalidCheckpoint as error:
        raise InvalidCheckpoint(path, f"of its files, {error}") from error
    return rows


def join_rows(content: Any, rows: RowsOfAll) -> Any:
    """`content` with its whole tensors; one whose rows are in no other file stays. Tied weights stay one tensor."""
    joined: dict[Any, torch.Tensor] = {}

    def join(keys: tuple[Any, ...], tensor: torch.Tensor) -> torch.Tensor:
        if keys not in rows:
            return tensor
        place = (*(part.data_ptr() for part in rows[keys]), tensor.shape, tensor.dtype)
        if place not in joined:
            joined[place] = torch.cat(rows[keys])
        return joined[place]

    return map_named(content, join)


# ---- the files of a run ---------------------------------------------------------------------------------------------


def step_of(name: str) -> int:
    """The step of step_NNNNNNNN.pt."""
    return int(name.removeprefix("step_").removesuffix(".pt"))


class CheckpointDirectory:
    """OUTPUT_DIR/checkpoints/step_NNNNNNNN.pt, and OUTPUT_DIR/best.pt. If both hold one step, they are hard links.

    OUTPUT_DIR/checkpoints/rows has the files that they list.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config, self.path = config, Path(config.output_dir) / FOLDER
        self.best_path = self.path.parent / "best.pt"
        self.rows = self.path / ROWS
        self.warned = False
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
            return read(Path(resume), join=False)
        for path in paths:
            try:
                content = read(path, join=False)
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
        with storage_errors(path, needed=size_of(content)):
            if best:  # first, so that no checkpoint ever names a better best.pt than there is
                write(self.best_path, content)
                link(self.best_path, path)
            else:
                write(path, content)
        self.verified.add(path)
        self.prune()

    def write_rows(self, step: int, rank: int, rows: dict[Any, Any]) -> tuple[str, str]:
        """Write the rows of one rank. Returns the name of the file, which no other one ever had, and its digest."""
        path = self.rows / f"step_{step:08d}-rank_{rank}-{os.urandom(4).hex()}.pt"
        with storage_errors(path, needed=size_of(rows)):
            return path.name, write(path, rows)

    def prune(self) -> None:
        """Delete what is older than the newest --keep-checkpoints good ones. Bad ones do not count as kept.

        Raises StorageError.
        """
        paths, kept = self.paths(), 0
        with storage_errors(self.path):
            for path in paths if len(paths) > self.config.keep_checkpoints else ():
                if kept == self.config.keep_checkpoints:
                    path.unlink()
                else:
                    kept += self.is_good(path)
        self.delete_unlisted_rows()

    def is_good(self, path: Path) -> bool:
        """Whether a checkpoint can be used."""
        with suppress(InvalidCheckpoint):
            if path not in self.verified:
                read(path, join=False)
            self.verified.add(path)
        return path in self.verified

    def has_best_of(self, content: Mapping[str, Any]) -> bool:
        """Whether best.pt is the best checkpoint of the run that wrote `content`, and not that of another run."""
        if Path(content["path"]).parent == self.path:
            return self.best_path.exists()
        with suppress(InvalidCheckpoint, AttributeError):  # AttributeError: something else has that name
            best, theirs = load(self.best_path), (content.get("best_step"), content.get("best"))
            return (best.get("step"), best.get("best")) == theirs
        return False

    def delete_unlisted_rows(self) -> None:
        """Delete the files with rows that no checkpoint lists, nor a copy of one in OUTPUT_DIR or in a folder there.

        They are left from checkpoints that were deleted, and from saves that were interrupted. None is deleted while
        something that may list it cannot be read. Raises StorageError, and UsageError for files of another run.
        """
        if self.rows.is_symlink():
            remedy = "copy the folder that it leads to, or choose another --output-dir"
            raise UsageError(f"{self.rows} is a link, and this run would delete what it does not list there: {remedy}")
        try:
            unlisted = self._unlisted_rows()
        except (OSError, InvalidCheckpoint) as error:
            if not self.warned:
                what = f"{error.filename} cannot be read: {error.strerror}" if isinstance(error, OSError) else error
                log.warning(f"warning: {what}; {self.rows} keeps old files meanwhile, because it may list them")
            self.warned = True
            return
        with storage_errors(self.rows):
            for name in unlisted:
                (self.rows / name).unlink(missing_ok=True)

    def _unlisted_rows(self) -> set[str]:
        """Raises OSError or InvalidCheckpoint: Path.glob would leave out what cannot be read."""
        steps = {found[0] for name in os.listdir(self.path) if (found := STEP.match(name))}
        present = os.listdir(self.rows) if self.rows.is_dir() else []
        unlisted = {name for name in present if (found := STEP.match(name)) and found[0] not in steps}
        entries = list(os.scandir(self.path.parent)) if unlisted else []
        for folder in [entry.path for entry in entries if entry.is_dir()]:
            with suppress(FileNotFoundError):  # it is gone
                entries += os.scandir(folder)
        ours = self.path.resolve(), self.path.parent.resolve()
        for path in (Path(entry.path) for entry in entries):
            if path.is_symlink() and not os.path.exists(path) and path.resolve().parent not in ours:
                raise InvalidCheckpoint(path, "it leads to nothing")  # a disk may be missing
            if path == self.best_path or (".pt" in path.name and path.is_file() and has_digest(path)):
                content = load(path)
                if any(part.is_meta for part in leaves(content) if isinstance(part, torch.Tensor)):
                    verify(path, bar=False)  # it lists rows, and is small
                    unlisted -= content[ROWS].keys()
        return unlisted


def read_on_main(
    ctx: DistContext, read: Callable[[], dict[str, Any]], keep: ForTensor = AS_IT_IS, later: Collection[str] = ()
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
    rows = found.pop(ROWS, {})
    whole: ForTensor = lambda keys, tensor: torch.cat(rows[keys]) if keys in rows else tensor  # noqa: E731
    content = ctx.broadcast_tree({name: None if name in later else part for name, part in found.items()}, keep, whole)
    return content, lambda name: ctx.broadcast_tree({name: found.pop(name, None)}, keep, whole)[name]


def size_of(content: Any) -> int:
    """The bytes of the tensors in a state that have data; tied ones count once."""
    tensors = (part for part in leaves(content) if isinstance(part, torch.Tensor) and not part.is_meta)
    return sum({part.data_ptr(): part.nbytes for part in tensors}.values())
