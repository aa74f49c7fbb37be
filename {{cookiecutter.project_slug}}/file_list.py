"""Files of classes, listed by one process of a machine for all of them: they map one table, so none holds a copy."""

import hashlib
import os
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from filelock import FileLock
from torch import Tensor

from ddp.core.errors import SetupError, UsageError
from ddp.core.files import atomic_write
from ddp.core.rank_logs import progress


class FileList(Sequence[tuple[str, int]]):
    """Pairs of a path and a class, in tensors that all processes of a machine share.

    names: all paths as bytes, uint8. ends: where each path ends, int64 [n]. targets: the class of each, int64 [n].
    keys: a hash of each path, int64 [n], without the folder of the list. rows: which of them are in this list, int64.
    """

    def __init__(self, names: Tensor, ends: Tensor, targets: Tensor, keys: Tensor, rows: Tensor) -> None:
        self.names, self.ends, self.targets, self.keys, self.rows = names, ends, targets, keys, rows

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, int]], folder: str = "") -> "FileList":
        """A FileList of any pairs, with paths in `folder`; the same if it is one."""
        if isinstance(pairs, FileList):
            return pairs
        names, ends, targets, keys = array("B"), array("q"), array("q"), array("q")
        for path, target in pairs:
            names.frombytes(os.fsencode(path))
            ends.append(len(names))
            try:
                targets.append(target)
            except TypeError as error:
                remedy = "give a number; for several labels, override __getitems__"
                raise UsageError(f"ImageFiles.samples has {target!r} as the class of {path}: {remedy}") from error
            digest = hashlib.blake2b(os.fsencode(path.removeprefix(f"{folder}{os.sep}")), digest_size=8).digest()
            keys.append(int.from_bytes(digest, "little", signed=True))
        table = [torch.from_numpy(numpy.array(each)) for each in (names, ends, targets, keys)]
        return cls(table[0], table[1], table[2], table[3], torch.arange(len(ends)))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(len(self))[index]]
        row = int(self.rows[index])
        start = int(self.ends[row - 1]) if row else 0
        return os.fsdecode(self.names[start : self.ends[row]].numpy().tobytes()), int(self.targets[row])

    def part(self, indices: Tensor) -> "FileList":
        """The pairs at these places of this list."""
        return FileList(self.names, self.ends, self.targets, self.keys, self.rows[indices])

    def digest(self) -> str:
        """Changes with any path, and with their order."""
        result = hashlib.blake2b(digest_size=8)
        for tensor in (self.names, self.ends, self.targets, self.rows):
            result.update(tensor.contiguous().numpy().data)
        return result.hexdigest()


def list_files(folder: Path, classes: Sequence[str], files_of: Callable[[str], Sequence[str]]) -> FileList:
    """The files of each class in `folder`, in order, as `files_of` lists those of one."""

    def find() -> dict[str, Any]:
        numbered = enumerate(progress(classes, "listing files", "class"))
        return vars(FileList.of(((path, number) for number, name in numbered for path in files_of(name)), str(folder)))

    return FileList(**once_per_machine(f"files {folder.absolute()} {classes}", find))


def digest_contents(files: FileList) -> str:
    """Changes with the list, and with the size or the time of any file. Raises OSError."""

    def find() -> dict[str, Any]:
        key = hashlib.blake2b(digest_size=8)
        for name, _ in progress(files, "looking for changed files", "file"):
            about = os.stat(name)
            key.update(os.fsencode(f"{name} {about.st_size} {about.st_mtime_ns}\n"))
        return {"key": key.hexdigest()}

    return str(once_per_machine(f"contents {files.digest()}", find)["key"])


def once_per_machine(name: str, find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `find` returns: a dictionary of tensors and plain values. One process calls it while the others wait.

    name: what is found. Each later call finds it again: it may have changed. So does each other run, by whose launcher
    and directory it is told apart. Raises what `find` raises, SetupError, and OSError.
    """
    start, run = time.time(), [os.getppid(), os.getcwd()]
    folder = Path(tempfile.gettempdir()) / f"ddp-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as own:
        if os.fstat(own.fileno()).st_uid != folder.lstat().st_uid:  # who could replace what is found
            raise SetupError(f"{folder} belongs to another user: set TMPDIR to a directory of your own")
    path = folder / f"{hashlib.blake2b(os.fsencode(name), digest_size=16).hexdigest()}.pt"
    with FileLock(path.with_suffix(".lock")):
        if path.exists() and path.stat().st_mtime >= start:  # found while this process has waited
            table = torch.load(path, mmap=True, weights_only=True)
            if table["run"] == run:
                return dict(table["found"])
        found = find()
        with atomic_write(path) as file:
            torch.save({"run": run, "found": found}, file)
        return dict(torch.load(path, mmap=True, weights_only=True)["found"])
