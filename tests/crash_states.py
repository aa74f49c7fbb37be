"""What a disk may hold after a power failure, from a recording of the file operations of a program.

POSIX promises that a file is on disk only after an fsync of the file, and a name only after one of its directory. Until
then, a file may have any of the contents that it had since its last fsync, cut, zeroed or with a hole; and each name
may have any of its values since the last fsync of its directory, independently of other names. File systems with a
journal promise more: they keep the order of changes to names, and any fsync writes all earlier ones.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

CALLS = (
    *("open", "openat", "creat", "write", "pwrite64", "writev", "truncate", "ftruncate", "fsync", "fdatasync"),
    *("rename", "renameat", "renameat2", "link", "linkat", "unlink", "unlinkat", "mkdir", "mkdirat", "rmdir"),
    *("symlink", "symlinkat", "fallocate", "sendfile", "copy_file_range"),
)
LINE = re.compile(r"(\w+)\((.*)\) += (-?\d+)")
TEXT = re.compile(r'"((?:\\x..)*)"|<((?:\\x..)*)>(\(deleted\))?')
BLOCK = 4096  # bytes that a file system writes at once
DIRECTORY = -1  # in the place of the number of a file

Files = dict[Path, bytes]  # what is on disk
Names = dict[Path, int | None]  # the number of the file that a path names; None if there is none


class Operation(NamedTuple):
    """A system call that has succeeded. `path` is the last one that it names, which for most calls is the only one."""

    call: str
    path: Path
    source: Path  # of a rename or a link
    data: bytes  # of a write
    arguments: str


def record(trace: Path, command: list[Any]) -> None:
    """Run `command` under strace. Every string in the file `trace` is in hexadecimal digits."""
    strace = ["strace", "--follow-forks", "--seccomp-bpf", "--quiet=all", "--decode-fds=path", "-xx", "-s", "100000000"]
    subprocess.run([*strace, "-o", trace, "-e", f"trace={','.join(CALLS)}", *map(str, command)], check=True)


def operations(trace: Path, folder: Path) -> Iterator[Operation]:
    """The operations in `folder`, in the order in which they ended.

    Raises ValueError if the program was killed in the middle of one: it may have happened, or not.
    """
    unfinished: dict[str, str] = {}
    for text in trace.read_text().splitlines():
        thread, line = text.split(None, 1)
        if line.endswith("<unfinished ...>"):
            unfinished[thread] = line.removesuffix("<unfinished ...>")
            continue
        if line.startswith("<... "):
            line = unfinished.pop(thread) + line.partition("resumed>")[2]
        if not (found := LINE.match(line)) or int(found[3]) < 0:
            continue
        call, arguments = re.sub("at2?$", "", found[1]), found[2]
        texts = [(unhex(quoted), unhex(opened), deleted) for quoted, opened, deleted in TEXT.findall(arguments)]
        if any(deleted for _, _, deleted in texts):
            continue  # no name leads to this file any more
        folders, named = [opened for _, opened, _ in texts if opened], [quoted for quoted, _, _ in texts if quoted]
        data = named.pop()[: int(found[3])] if call == "write" and named else b""
        places = [Path(os.fsdecode(folders[-1] if folders else b""), os.fsdecode(name)) for name in named or [b""]]
        if places[-1].is_relative_to(folder):
            yield Operation(call, places[-1], places[0], data, arguments)
    here = "".join(f"\\x{byte:02x}" for byte in os.fsencode(folder))
    if cut := [line for line in unfinished.values() if here in line]:
        raise ValueError(f"killed in the middle of: {cut}")


def unhex(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


class Disk:
    """The files of one program, and all that may be on disk of them."""

    def __init__(self) -> None:
        self.contents: list[list[bytes]] = []  # by file: since its last fsync, the first one being on disk
        self.names: dict[Path, list[int | None]] = {}  # the files that a path named, since the fsync of its directory
        self.journal: Names = {}  # the names that are on disk if there is a journal
        self.order: list[tuple[Path, int | None]] = []  # and the changes since then
        self.remnants: dict[int, tuple[list[bytes], list[bytes]]] = {}  # by file: its contents, and what may be left

    def file(self, path: Path) -> int | None:
        """The file that `path` names now."""
        return self.names.get(path, [None])[-1]

    def name(self, path: Path, file: int | None) -> None:
        self.names.setdefault(path, [None]).append(file)
        self.order.append((path, file))

    def apply(self, done: Operation) -> None:
        """Raises ValueError for a call that this class does not know."""
        file = self.file(done.path)
        if done.call == "open":
            if file is None and "O_CREAT" in done.arguments:
                self.contents.append([b""])
                self.name(done.path, len(self.contents) - 1)
            elif file is not None and "O_TRUNC" in done.arguments:
                self.contents[file].append(b"")
        elif done.call == "write" and file is not None:
            self.contents[file].append(self.contents[file][-1] + done.data)
        elif done.call == "ftruncate" and file is not None:
            self.contents[file].append(self.contents[file][-1][: int(done.arguments.rpartition(", ")[2])])
        elif done.call == "fsync":
            if file is not None and file != DIRECTORY:
                self.contents[file] = self.contents[file][-1:]
            for path, files in self.names.items():
                if path.parent == done.path:
                    self.names[path] = files[-1:]
            self.journal.update(self.order)
            self.order.clear()
        elif done.call in ("rename", "link"):
            self.name(done.path, self.file(done.source))
            if done.call == "rename":
                self.name(done.source, None)
        elif done.call == "unlink":
            self.name(done.path, None)
        elif done.call == "mkdir":
            self.name(done.path, DIRECTORY)
        else:
            raise ValueError(f"unknown: {done}")

    def now(self) -> Files:
        """What a program sees, without a power failure."""
        files = [(path, self.file(path)) for path in self.names]
        return {path: self.contents[file][-1] for path, file in files if file not in (None, DIRECTORY)}

    def known(self, is_read: Callable[[Path], bool]) -> Any:
        """What states() and journal_states() depend on, but for the contents of files that are not read."""
        read = {file for path, files in self.names.items() if is_read(path) for file in files if file is not None}
        contents = {file: tuple(self.contents[file]) for file in read if file != DIRECTORY}
        return {path: tuple(files) for path, files in self.names.items()}, contents, self.journal.copy(), [*self.order]

    def states(self, is_read: Callable[[Path], bool]) -> Iterator[Files]:
        """All states after a power failure now, for a program that reads only some of the files. They may repeat.

        A file that it reads takes each of its names and contents, and a temporary file, which it only deletes, each of
        its names, in every combination. All others are on disk as far as they can be, or as little as they can be.
        """
        combined = [path for path in self.names if is_read(path) or path.suffix == ".tmp"]
        for others in (-1, 0):
            names = {path: files[others] for path, files in self.names.items()}
            for files in itertools.product(*(dict.fromkeys(self.names[path]) for path in combined)):
                yield from self._with_contents({**names, **dict(zip(combined, files, strict=True))}, is_read, others)

    def journal_states(self, is_read: Callable[[Path], bool]) -> Iterator[Files]:
        """Those that a file system with a journal leaves: for the files that are read, each is one of states()."""
        for count in range(len(self.order) + 1):
            yield from self._with_contents({**self.journal, **dict(self.order[:count])}, is_read, -1)

    def _with_contents(self, names: Names, is_read: Callable[[Path], bool], others: int) -> Iterator[Files]:
        """The files of `names`, with each combination of contents of those that are read."""
        found = {
            path: file
            for path, file in names.items()
            if file not in (None, DIRECTORY)
            and all(names.get(parent, DIRECTORY) is not None for parent in path.parents)
        }
        read = sorted({file for path, file in found.items() if is_read(path)})
        for contents in itertools.product(*(self._remnants(file) for file in read)):
            chosen = dict(zip(read, contents, strict=True))
            yield {path: chosen.get(file, self.contents[file][others]) for path, file in found.items()}

    def _remnants(self, file: int) -> list[bytes]:
        known, found = self.remnants.get(file, ([], []))
        if known != self.contents[file]:
            known, found = list(self.contents[file]), list(remnants(self.contents[file]))
            self.remnants[file] = known, found
        return found


def remnants(contents: list[bytes]) -> Iterable[bytes]:
    """What may be on disk of a file that had these contents since its last fsync, the first one being on disk."""
    found = dict.fromkeys(contents)
    for content in contents[1:]:
        start = len(contents[0]) if content.startswith(contents[0]) else 0
        kept, new = content[:start], content[start:]
        found[kept + new[: len(new) // 2]] = None  # torn
        found[kept + bytes(len(new))] = None  # its length is on disk, its data are not
        for place in range(0, len(new), BLOCK):  # a block is missing
            hole = bytes(min(BLOCK, len(new) - place))
            found[kept + new[:place] + hole + new[place + BLOCK :]] = None
    return found
