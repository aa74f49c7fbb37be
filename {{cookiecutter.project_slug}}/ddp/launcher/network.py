"""This machine on the network: its addresses, the interface behind one, who holds a port. No torch in here."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path


class _Entry(ctypes.Structure):
    """struct ifaddrs of the C library, as far as it is used."""


_Entry._fields_ = [
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def addresses() -> dict[str, str]:
    """Each address of this machine, and the interface that has it: {"127.0.0.1": "lo", "10.0.0.1": "eth0"}.

    From the C library, as containers mostly have no `ip`. Empty where that is not possible.
    """
    found: dict[str, str] = {}
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None, use_errno=True)
        first = ctypes.POINTER(_Entry)()
        if library.getifaddrs(ctypes.byref(first)) == 0:
            entry = first
            while entry:
                if text := _address_text(entry.contents.address):
                    found[text] = entry.contents.name.decode()
                entry = entry.contents.next
            library.freeifaddrs(first)
    return found


def _address_text(pointer: int | None) -> str | None:
    """A struct sockaddr as text; None for what is no IP address."""
    if not pointer:
        return None
    head = ctypes.string_at(pointer, 2)
    family = int.from_bytes(head, sys.byteorder) if sys.platform == "linux" else head[1]
    if family == socket.AF_INET:
        return socket.inet_ntop(family, ctypes.string_at(pointer + 4, 4))
    if family == socket.AF_INET6:
        return socket.inet_ntop(family, ctypes.string_at(pointer + 8, 16))
    return None


def interface_of(address: str) -> str | None:
    """The interface that has this address."""
    return addresses().get(plain(address))


def own_address(host: str, port: int) -> str | None:
    """This machine's address on the way to `host`, by its routing table. Nothing is sent."""
    with suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return plain(probe.getsockname()[0])
    return None


def plain(address: str) -> str:
    """Without what a socket adds: `::ffff:10.0.0.1` is 10.0.0.1, `fe80::1%eth0` is fe80::1."""
    return address.partition("%")[0].removeprefix("::ffff:")


def is_loopback(address: str) -> bool:
    return plain(address).startswith("127.") or plain(address) == "::1"


def is_mine(address: str) -> bool:
    """Whether this machine has that address: only then can something listen there."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def listen(port: int) -> socket.socket:
    """Listen on every address of this machine, as torchrun's store does. Raises OSError, EADDRINUSE above all."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 may be switched off; a port that is taken is so for IPv4, too
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", port), backlog=1024)


def holder(port: int) -> str:
    """Who else listens on a port: `pid 123 (python serve.py)`; what is known where /proc does not say it."""
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if int(local.rpartition(":")[2], 16) == port and state == "0A":  # listening
                    sockets.add(f"socket:[{inode}]")
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            others = process.name != str(os.getpid())
            if others and any(os.readlink(file) in sockets for file in (process / "fd").iterdir()):
                program, *arguments = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
                command = " ".join([Path(program).name, *arguments]).strip()
                return f"pid {process.name} ({command[:79] + '…' if len(command) > 80 else command})"
    return "another process, perhaps of another user"
