"""What forked workers inherit from their rank, and must not share with it: positions in files, and connections."""

import errno
import os
import re
import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

# What an error in a worker says then, of recv() and of read()
SHARED_CONNECTION = re.compile(rf"{os.strerror(errno.ENOTSOCK)}|\] {os.strerror(errno.EISDIR)}$", re.MULTILINE)

FOR_ANY = re.compile("/torch-shm-|^/run/systemd/")  # torch's shared memory; the standard output of a service


def file_positions() -> dict[str, tuple[int, int, int]]:
    """The position of each regular file that this process can read, by its path and descriptor.

    After it the size and the time of the file, if this process can write it as well. Not of descriptor 0, which a shell
    script may read as well: workers have none.
    """
    found = {}
    for number in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with suppress(OSError, ValueError):  # it was closed meanwhile
            facts = dict(line.split(":\t") for line in Path(f"/proc/self/fdinfo/{number}").read_text().splitlines()[:2])
            mode, about = int(facts["flags"], 8) & os.O_ACCMODE, os.fstat(int(number))
            if mode != os.O_WRONLY and number != "0" and stat.S_ISREG(about.st_mode):
                path = os.readlink(f"/proc/self/fd/{number}")
                written = (about.st_size, about.st_mtime_ns) if mode == os.O_RDWR else (0, 0)
                if not path.startswith(("/proc/", "/memfd:")):
                    found[f"{path} (descriptor {number})"] = int(facts["pos"]), *written
    return found


def connections() -> dict[int, str]:
    """What /proc/self/fd has for each TCP connection, and each one to a socket file, by its descriptor."""
    found = {}
    for number in map(int, os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ()):
        with suppress(OSError):  # it was closed meanwhile, or has no peer
            if number > 2 and (target := os.readlink(f"/proc/self/fd/{number}")).startswith("socket:"):
                with _no_default_timeout(), socket.socket(fileno=os.dup(number)) as copy:
                    peer = copy.getpeername()  # with AF_UNIX a path; bytes or empty if it has none
                    other = isinstance(peer, tuple) or (isinstance(peer, str) and peer and not FOR_ANY.search(peer))
                    if copy.type == socket.SOCK_STREAM and other:
                        found[number] = target
    return found


@contextmanager
def _no_default_timeout() -> Iterator[None]:
    """Otherwise Python would let the connection, which a thread may wait for, not block any more."""
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(None)
    try:
        yield
    finally:
        socket.setdefaulttimeout(timeout)


def leave_connections(inherited: Mapping[int, str]) -> None:
    """In a worker: close these connections, and keep their descriptors. Their use fails with SHARED_CONNECTION.

    Otherwise a process could read the answer to another one. A client that opens a new connection then is right.
    """
    instead = os.open("/", os.O_RDONLY)  # no end of a stream: neither recv() nor read() works
    for number, target in inherited.items():
        with suppress(OSError):  # a hook of os.fork has closed it
            if os.readlink(f"/proc/self/fd/{number}") == target:
                os.dup2(instead, number, inheritable=False)
    os.close(instead)


@contextmanager
def moved_positions() -> Iterator[None]:
    """For a rehearsal: files that are open have another position, to notice a worker that moves it to and fro."""
    positions = file_positions().items()
    found = {int(name.rpartition(" ")[2][:-1]): facts for name, facts in positions if facts[1:] == (0, 0)}

    def move(by: int) -> None:
        for number, facts in found.items():
            with suppress(OSError):  # it was closed meanwhile
                os.lseek(number, facts[0] + by, os.SEEK_SET)

    move(1)
    try:
        yield
    finally:
        move(0)
