"""Machines for tests: network namespaces on one switch, each with its address, host name and /etc/hosts. Needs root."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

numbers = itertools.count()


@dataclass(frozen=True)
class Machine:
    """One of them. Its host name means 127.0.0.1 to itself, as on many real ones, and its address to the others."""

    name: str
    address: str
    namespace: str

    def start(self, *command: Any, **environ: str) -> Program:
        """Start a command here."""
        enter = ["ip", "netns", "exec", self.namespace, "unshare", "--uts"]
        return Program([*enter, "sh", "-c", 'hostname "$0" && exec "$@"', self.name, *command], environ)

    def link(self, state: str) -> None:
        """Plug the cable in (`up`) or out (`down`)."""
        _run("ip", "-n", self.namespace, "link", "set", "eth0", state)


class Program:
    """A running command, and what it has printed so far."""

    def __init__(self, command: list[Any], environ: dict[str, str]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environ}
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

    def until(self, text: str, timeout: float = 60) -> str:
        """Wait until it has printed `text`."""
        end = time.monotonic() + timeout
        while text not in self.output():
            assert time.monotonic() < end, f"no {text!r} within {timeout} s:\n{self.printed}"
            assert self.process.poll() is None or text in self.output(), f"ended without {text!r}:\n{self.printed}"
            time.sleep(0.02)
        return self.printed

    def wait(self, timeout: float = 60) -> int:
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
    """Skip the test where there can be no namespaces; in CI they must be there."""
    reason = "needs root" if os.geteuid() else "needs iproute2" if not shutil.which("ip") else ""
    if reason:
        assert not os.environ.get("CI"), f"in CI this test must run, but it {reason}"
        pytest.skip(reason)


@contextlib.contextmanager
def machines(count: int) -> Iterator[list[Machine]]:
    """`count` machines, gone afterwards with all that runs on them."""
    require()
    tag = f"{os.getpid()}-{next(numbers)}"
    switch = f"ddpS-{tag}"
    made = [Machine(f"gpu{i + 1}", f"10.77.0.{i + 1}", f"ddp{'ABCDEF'[i]}-{tag}") for i in range(count)]
    namespaces = [switch, *(machine.namespace for machine in made)]
    try:
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge", "forward_delay", "0")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for machine in made:
            _connect(machine, switch, made)
        yield made
    finally:
        for namespace in namespaces:
            _remove(namespace)


def _connect(machine: Machine, switch: str, everyone: list[Machine]) -> None:
    names = [f"{other.address} {other.name}" for other in everyone if other != machine]
    etc = Path("/etc/netns") / machine.namespace
    etc.mkdir(parents=True)
    (etc / "hosts").write_text("\n".join([f"127.0.0.1 localhost {machine.name}", *names, ""]))
    (etc / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # nobody answers there
    _run("ip", "netns", "add", machine.namespace)
    _run("ip", "-n", machine.namespace, "link", "set", "lo", "up")
    _run("ip", "-n", switch, "link", "add", machine.name, "type", "veth", "peer", "eth0", "netns", machine.namespace)
    _run("ip", "-n", switch, "link", "set", machine.name, "master", "bridge", "up")
    _run("ip", "-n", machine.namespace, "address", "add", f"{machine.address}/24", "dev", "eth0")
    _run("ip", "-n", machine.namespace, "link", "set", "eth0", "up")


def _remove(namespace: str) -> None:
    running = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout
    for pid in running.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)
    shutil.rmtree(Path("/etc/netns") / namespace, ignore_errors=True)
