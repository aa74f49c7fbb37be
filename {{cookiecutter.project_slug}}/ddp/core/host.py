"""This machine: its cores, its files, its addresses and interfaces, and the process that listens on a port."""

import errno
import logging
import math
import os
import re
import resource
import socket
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)
CGROUPS, CGROUPS_OF = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
QUOTAS = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")  # of control groups, version 2 and 1: quota and period
MANY_FILES = 2**20  # with more, some programs need long to start: they close all that could be open


def available_cores() -> int:
    """The number of cores that this process may use, by its affinity and by the CPU quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError):  # no Linux
        groups = re.findall(r"^\d+:(?:|cpu|cpu,cpuacct|cpuacct,cpu):/(.*)$", CGROUPS_OF.read_text(), re.MULTILINE)
        every = {each for group in map(Path, groups) for each in (group, *group.parents)}  # each may set one
        for folder in (CGROUPS / below / group for below in ("", "cpu") for group in every):
            files = [folder / name for name in QUOTAS if (folder / name).exists()]
            with suppress(OSError, ValueError):  # there is none, or it is "max"
                quota, period = map(int, " ".join(map(Path.read_text, files)).split())
                cores = min(cores, max(1, math.ceil(quota / period))) if quota > 0 else cores
    return cores


def allow_many_files() -> int:
    """Let this process and its children open as many files, and connections, as permitted. Returns how many."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = MANY_FILES if most == resource.RLIM_INFINITY else min(most, MANY_FILES)
    with suppress(OSError, ValueError):  # macOS permits fewer
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, enough), most))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def addresses() -> dict[str, str]:
    """Each address of this machine and the interface that has it: {"127.0.0.1": "lo", "10.0.0.1": "eth0"}."""
    import psutil  # slow, and not needed to check a command line

    found = ((entry, name) for name, entries in psutil.net_if_addrs().items() for entry in entries)
    return {plain(entry.address): name for entry, name in found if entry.family in (socket.AF_INET, socket.AF_INET6)}


def interface_of(address: str) -> str | None:
    return addresses().get(plain(address))


def interface_for_gloo(address: str) -> str | None:
    """The interface of this address, for gloo; None if there is none, or if the name of this machine leads to it.

    Of an interface, gloo takes the first address.
    """
    interface = interface_of(address)
    first = next((each for each, name in addresses().items() if name == interface), address)
    if first != plain(address) and (":" in first) == (":" in plain(address)):  # all nodes have IPv4, or none
        name = socket.gethostname()
        with suppress(OSError):
            if plain(str(socket.getaddrinfo(name, None)[0][4][0])) == plain(address):
                return None
        remedy = f"let the name {name} mean {address}, in /etc/hosts"
        log.warning(f"warning: gloo uses {first} of {interface}, and the route to the others has {address}: {remedy}")
    return interface


def own_address(host: str, port: int) -> str | None:
    """This machine's address on the route to `host`, from its routing table. Nothing is sent."""
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


def own_addresses() -> list[str]:
    """Those at which other machines may reach this one."""
    return [address for address in addresses() if not is_loopback(address) and not address.startswith("fe80")]


def is_own_address(address: str) -> bool:
    """Whether this machine has that address: only then can something listen there."""
    return is_loopback(address) or interface_of(address) is not None


def listen(port: int) -> socket.socket:
    """Listen on every address of this machine, as torchrun's store does. Raises OSError, in particular EADDRINUSE."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 may be disabled; a port that is taken is taken for IPv4 as well
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", port), backlog=1024)


def port_problem(port: int) -> str:
    """Why nothing can listen at that port, and what to do; empty if it is free."""
    try:
        listen(port).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"is taken by {port_owner(port)}: end that process, or choose another port"
        return f"cannot be used ({error.strerror}): choose another port"
    return ""


def port_owner(port: int) -> str:
    """The process that listens on a port: `pid 123 (python serve.py)`; or that it cannot be known."""
    import psutil

    unknown = "another process, perhaps of another user"
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            listening = connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,)
            if listening and connection.pid not in (None, os.getpid()):
                program, *arguments = psutil.Process(connection.pid).cmdline() or [unknown]
                return f"pid {connection.pid} ({' '.join([Path(program).name, *arguments]).strip()[:80]})"
    return unknown
