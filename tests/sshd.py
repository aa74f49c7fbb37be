"""A real sshd on each machine (machines.py), with keys and settings of its own, gone afterwards. Needs root."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from template_copy import LEAN

import machines
from machines import Machine, Program
from needs import need

SERVER = """
Port 2222
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
SetEnv TMPDIR={folder}/temporary "PYTHONPATH={lean}"
"""
CLIENT = """
Host gpu1
  HostName 10.77.0.1
Host closed
  HostName 10.77.0.2
  Port 9
Host silent
  HostName 10.77.0.2
  Port 2223
Host *
  Port 2222
  IdentityFile "{folder}/key"
  IdentitiesOnly yes
  IdentityAgent none
  UserKnownHostsFile "{folder}/known_hosts"
  GlobalKnownHostsFile none
"""


@dataclass(frozen=True)
class Network:
    """Machines that ssh to each other without a password. What they do leaves its temporary files in `temporary`."""

    machines: list[Machine]
    folder: Path
    servers: list[Program]

    @property
    def temporary(self) -> Path:
        return self.folder / "temporary"

    def start(self, *command: Any, on: int = 0, **environ: str) -> Program:
        """Start a command on a machine, where ssh knows the others."""
        options = shlex.join(["-F", str(self.folder / "client")])
        return self.machines[on].start(*command, **{"SSH_OPTIONS": options, **environ})

    def processes(self, machine: int) -> list[str]:
        """What runs on a machine, but for sshd waiting for connections."""
        namespace, server = self.machines[machine].namespace, self.servers[machine].process.pid
        pids = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout.split()
        found = []
        for pid in pids:
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if command and int(pid) != server:  # a zombie has none
                    found.append(f"{pid} {command}")
        return found


def require() -> None:
    """Skip the test where there is no sshd."""
    need("ssh", "sshd")
    machines.require()


def _server() -> str | None:
    return shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin")


@contextlib.contextmanager
def reachable(made: list[Machine], folder: Path) -> Iterator[Network]:
    """Let sshd run on each of these machines; `folder` holds its settings, in a path without spaces."""
    require()
    (folder / "temporary").mkdir(parents=True)
    for name in ("key", "host_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    key = (folder / "host_key.pub").read_text()
    (folder / "known_hosts").write_text(f"[10.77.0.1]:2222,[gpu2]:2222 {key}")
    (folder / "client").write_text(CLIENT.format(folder=folder))
    separation = Path("/run/sshd")  # sshd wants an empty folder there
    absent = not separation.exists()
    separation.mkdir(mode=0o755, exist_ok=True)
    try:
        yield Network(made, folder, [_serve(machine, folder) for machine in made])
    finally:
        for machine in made:
            machine.kill()
        if absent:
            separation.rmdir()


def _serve(machine: Machine, folder: Path) -> Program:
    settings = folder / f"server {machine.name}"
    settings.write_text(SERVER.format(address=machine.address, folder=folder, lean=LEAN["PYTHONPATH"]))
    # What bash reads for a command over ssh may print, or change files that others use at the same time (pyenv).
    plain = 'if [ -e ~/.bashrc ]; then mount --bind /dev/null ~/.bashrc; fi; exec "$0" "$@"'
    server = machine.start("sh", "-euc", plain, _server(), "-D", "-e", "-f", settings)
    server.until("Server listening")
    return server
