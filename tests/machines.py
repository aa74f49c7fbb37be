"""Machines for tests: network namespaces on one switch, each with its address, host name and /etc/hosts. Needs root."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from template_copy import LEAN

from needs import need, need_root

numbers = itertools.count()
LISTENING, CONNECTED = "0A", "01"  # states of a socket, as the kernel lists them
# Called as START NAME [FOLDER PATH]... -- COMMAND, in network, host name and mounts of its own.
START = 'hostname "$0"; while [ "$1" != -- ]; do mount --bind "$1" "$2"; shift 2; done; shift; exec "$@"'


@dataclass(frozen=True)
class Machine:
    """One of them. Its host name means 127.0.0.1 to itself, as on many real ones, and its address to the others."""

    name: str
    address: str
    namespace: str
    folders: dict[Path, Path] = field(default_factory=dict)  # what is mounted here, and nowhere else, at a path

    def start(self, *command: Any, **environ: str) -> Program:
        """Start a command here."""
        enter = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-euc", START, self.name]
        mounts = [part for path, folder in self.folders.items() for part in (folder, path)]
        return Program([*enter, *mounts, "--", *command], environ)

    def own_folder(self, path: Path) -> Path:
        """Give this machine a folder of its own at `path`. Returns where the test, which is no machine, finds it."""
        self.folders[path] = path.with_name(f"{path.name} of {self.name}")
        for folder in (path, self.folders[path]):
            folder.mkdir(exist_ok=True)
        return self.folders[path]

    def link(self, state: str) -> None:
        """Plug the cable in (`up`) or out (`down`)."""
        _run("ip", "-n", self.namespace, "link", "set", "eth0", state)

    def lose_name_server(self) -> None:
        """Let no name server respond: each question to it takes as long as the C library waits."""
        address = self.address.rpartition(".")[0] + ".250"
        _run(*f"ip -n {self.namespace} neighbour add {address} lladdr 02:00:00:00:00:fa dev eth0".split())
        (Path("/etc/netns") / self.namespace / "resolv.conf").write_text(f"nameserver {address}\n")

    def limit(self, mbit: int) -> None:
        """Let out no more than this many Mbit/s."""
        rate = ["root", "tbf", "rate", f"{mbit}mbit", "burst", "128kb", "latency", "50ms"]
        _run("tc", "-n", self.namespace, "qdisc", "replace", "dev", "eth0", *rate)

    def sent(self) -> int:
        """How many bytes have left this machine."""
        (link,) = json.loads(_run("ip", "-n", self.namespace, "-s", "-j", "link", "show", "eth0"))
        return link["stats64"]["tx"]["bytes"]

    def running(self) -> list[int]:
        """The processes that run here."""
        found = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True).stdout
        return [int(pid) for pid in found.split()]

    def until_port(self, port: int, state: str = LISTENING, timeout: float = 180) -> None:
        """Wait until a process here listens at this port, or is connected to it."""
        end = time.monotonic() + timeout
        sockets = ("ip", "netns", "exec", self.namespace, "cat", "/proc/net/tcp", "/proc/net/tcp6")
        between = "" if state == CONNECTED else r"\S+ "  # the other end of the connection
        expected = re.compile(f":{port:04X} {between}{state} ")
        while not expected.search(_run(*sockets)):
            assert time.monotonic() < end, f"nobody has port {port} of {self.name} in state {state}"
            time.sleep(0.02)

    def kill(self) -> None:
        """End all that runs here, at once."""
        for pid in self.running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Program:
    """A running command, and what it has printed so far."""

    def __init__(self, command: list[Any], environ: dict[str, str]) -> None:
        environment = {**os.environ, **LEAN, "PYTHONUNBUFFERED": "1", **environ}
        read_end, write_end = os.pipe()
        self.process = subprocess.Popen(
            [str(part) for part in command], env=environment, stdout=write_end, stderr=write_end, start_new_session=True
        )
        os.close(write_end)
        os.set_blocking(read_end, False)
        self.pipe, self.printed = read_end, ""

    def output(self) -> str:
        """What was printed so far."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.pipe, 65536):
                self.printed += data.decode(errors="replace")
        return self.printed

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def until(self, text: str, timeout: float = 180) -> str:
        """Wait until it has printed `text`."""
        end = time.monotonic() + timeout
        while text not in self.output():
            assert time.monotonic() < end, f"no {text!r} within {timeout} s:\n{self.printed}"
            assert self.process.poll() is None or text in self.output(), f"ended without {text!r}:\n{self.printed}"
            time.sleep(0.02)
        return self.printed

    def wait(self, timeout: float = 180) -> int:
        """Its exit code."""
        end = time.monotonic() + timeout
        while self.process.poll() is None:
            self.output()  # so that the pipe never fills
            if time.monotonic() > end:
                self.process.kill()
                raise AssertionError(f"still runs after {timeout} s:\n{self.output()}")
            time.sleep(0.02)
        self.output()
        return self.process.returncode


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


def require() -> None:
    """Skip the test where there can be no namespaces."""
    need("ip")
    need_root("network namespaces")


@contextlib.contextmanager
def machines(count: int, network: str = "10.77.0.") -> Iterator[list[Machine]]:
    """`count` machines, gone afterwards with all that runs on them. `network`: or "fd00:77::", for IPv6 alone."""
    require()
    tag = f"{os.getpid()}-{next(numbers)}"
    switch = f"ddpS-{tag}"
    made = [Machine(f"gpu{i + 1}", f"{network}{i + 1}", f"ddp{'ABCDEF'[i]}-{tag}") for i in range(count)]
    try:
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge", "forward_delay", "0")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for machine in made:
            _connect(machine, switch, made)
        yield made
    finally:
        for machine in made:
            machine.kill()
            _remove(machine.namespace)
        _remove(switch)


def _connect(machine: Machine, switch: str, everyone: list[Machine]) -> None:
    loopback, length, *now = ("::1", 64, "nodad") if ":" in machine.address else ("127.0.0.1", 24)
    names = [f"{other.address} {other.name}" for other in everyone if other != machine]
    etc = Path("/etc/netns") / machine.namespace
    etc.mkdir(parents=True)
    (etc / "hosts").write_text("\n".join([f"{loopback} localhost {machine.name}", *names, ""]))
    (etc / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # nobody answers there
    _run("ip", "netns", "add", machine.namespace)
    _run("ip", "-n", machine.namespace, "link", "set", "lo", "up")
    if ":" in machine.address:  # as with IPv4, it keeps its address while the cable is out
        keep = "echo 1 >/proc/sys/net/ipv6/conf/all/keep_addr_on_down"
        _run("ip", "netns", "exec", machine.namespace, "sh", "-c", keep)
    _run("ip", "-n", switch, "link", "add", machine.name, "type", "veth", "peer", "eth0", "netns", machine.namespace)
    _run("ip", "-n", switch, "link", "set", machine.name, "master", "bridge", "up")
    _run("ip", "-n", machine.namespace, "address", "add", f"{machine.address}/{length}", "dev", "eth0", *now)
    _run("ip", "-n", machine.namespace, "link", "set", "eth0", "up")


def _remove(namespace: str) -> None:
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)
    shutil.rmtree(Path("/etc/netns") / namespace, ignore_errors=True)
