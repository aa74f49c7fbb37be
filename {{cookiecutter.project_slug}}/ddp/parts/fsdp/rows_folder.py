"""OUTPUT_DIR/checkpoints/rows: in a file of each rank, the rows that it holds of the tensors of a checkpoint.

The checkpoint lists the names and digests of these files, and has empty meta tensors in the place of what they hold.
After a crash, files may be left that no checkpoint lists; the next start deletes them.
"""

import logging
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ddp.checkpoint.storage import (
    COMMENT_LENGTH,
    COMMENT_PREFIX,
    FILES,
    FOLDER,
    CheckpointDirectory,
    InvalidCheckpoint,
    load,
    size_of,
    verify,
    write,
)
from ddp.core.errors import UsageError
from ddp.core.files import storage_errors
from ddp.core.host import available_cores
from ddp.core.rank_logs import progress
from ddp.distributed.tensors import leaves, map_named

log = logging.getLogger(__name__)
STEP = re.compile(r"step_\d{8,}")


# ---- read -----------------------------------------------------------------------------------------------------------


def read_rows(path: Path, content: dict[str, Any], files: Mapping[str, str]) -> dict[str, Any]:
    """`content` of a checkpoint, with split tensors in the place of the empty ones. `files` have their rows.

    Tied weights stay one tensor. Raises InvalidCheckpoint.
    """
    folder = folder_of(path, files)
    rows: dict[Any, list[torch.Tensor]] = {}
    try:
        with ThreadPoolExecutor(available_cores()) as pool:
            digests = pool.map(partial(verify, bar=False), [folder / name for name in files])
            names = progress([*files], f"verifying the rows of {path.name}", "file")
            for name, digest in zip(names, digests, strict=True):
                if digest != files[name]:
                    raise InvalidCheckpoint(folder / name, "it is not the file that was written for this checkpoint")
        for name in files:
            for keys, tensor in load(folder / name).items():
                rows.setdefault(keys, []).append(tensor)
    except InvalidCheckpoint as error:
        raise InvalidCheckpoint(path, f"of its files, {error}") from error
    tied: dict[Any, torch.Tensor] = {}

    def split(keys: tuple[Any, ...], tensor: torch.Tensor) -> torch.Tensor:
        if keys not in rows:
            return tensor
        place = (*(part.data_ptr() for part in rows[keys]), tensor.shape, tensor.dtype)
        if place not in tied:
            tied[place] = torch.empty_like(tensor)
            vars(tied[place])["full_tensor"] = partial(torch.cat, rows[keys])
        return tied[place]

    joined: dict[str, Any] = map_named(content, split)
    return joined


def folder_of(path: Path, names: Iterable[str]) -> Path:
    """The folder of these files: next to the checkpoint, or in the folder of checkpoints there or above."""
    origins = (path.absolute(), path.resolve())  # a link to a checkpoint may be elsewhere
    folders = [above / below / FILES for below in ("", FOLDER) for origin in origins for above in origin.parents[:2]]
    return next((folder for folder in folders if any(os.path.exists(folder / name) for name in names)), folders[0])


# ---- write, and delete ----------------------------------------------------------------------------------------------


class RowsFolder:
    """The files of one run."""

    def __init__(self, directory: CheckpointDirectory) -> None:
        self.directory, self.path = directory, directory.path / FILES
        self.warned = False

    def write(self, step: int, rank: int, rows: dict[Any, Any]) -> tuple[str, str]:
        """Write the rows of one rank. Returns the name of the file, which no other one ever had, and its digest."""
        path = self.path / f"step_{step:08d}-rank_{rank}-{os.urandom(4).hex()}.pt"
        with storage_errors(path, needed=size_of(rows)):
            return path.name, write(path, rows)

    def delete_unlisted(self) -> None:
        """Delete the files that no checkpoint lists, nor a copy of one in OUTPUT_DIR or in a folder there.

        They are left from checkpoints that were deleted, and from saves that were interrupted. None is deleted while
        something that may list it cannot be read. Raises StorageError, and UsageError for files of another run.
        """
        if self.path.is_symlink():
            remedy = "copy the folder that it leads to, or choose another --output-dir"
            raise UsageError(f"{self.path} is a link, and this run would delete what it does not list there: {remedy}")
        try:
            unlisted = self._unlisted()
        except (OSError, InvalidCheckpoint) as error:
            if not self.warned:
                what = f"{error.filename} cannot be read: {error.strerror}" if isinstance(error, OSError) else error
                log.warning(f"warning: {what}; {self.path} keeps old files meanwhile, because it may list them")
            self.warned = True
            return
        with storage_errors(self.path):
            for name in unlisted:
                (self.path / name).unlink(missing_ok=True)

    def _unlisted(self) -> set[str]:
        """Raises OSError or InvalidCheckpoint: Path.glob would leave out what cannot be read."""
        folder = self.directory.path
        steps = {found[0] for name in os.listdir(folder) if (found := STEP.match(name))}
        present = os.listdir(self.path) if self.path.is_dir() else []
        unlisted = {name for name in present if (found := STEP.match(name)) and found[0] not in steps}
        entries = list(os.scandir(folder.parent)) if unlisted else []
        for below in [entry.path for entry in entries if entry.is_dir()]:
            with suppress(FileNotFoundError):  # it is gone
                entries += os.scandir(below)
        ours = folder.resolve(), folder.parent.resolve()
        for path in (Path(entry.path) for entry in entries):
            if path.is_symlink() and not os.path.exists(path) and path.resolve().parent not in ours:
                raise InvalidCheckpoint(path, "it leads to nothing")  # a disk may be missing
            if path == self.directory.best_path or (".pt" in path.name and path.is_file() and _has_digest(path)):
                content = load(path)
                if any(part.is_meta for part in leaves(content) if isinstance(part, torch.Tensor)):
                    verify(path, bar=False)  # it lists rows, and is small
                    unlisted -= content[FILES].keys()
        return unlisted


def _has_digest(path: Path) -> bool:
    """Whether a file ends as `write` ends it. Raises OSError."""
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - COMMENT_LENGTH))
        return file.read().startswith(COMMENT_PREFIX)
