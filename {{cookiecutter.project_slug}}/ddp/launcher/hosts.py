"""The hosts of a file, and the program for each: what launch/ssh.sh is to run where. No torch in here."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any, NoReturn

from config import number, parse
from ddp.errors import EnvironmentFailure, UsageError
from ddp.launcher.network import is_loopback

VARIABLES = re.compile(r"(NCCL|GLOO|TORCH)_\w+|OMP_NUM_THREADS|START_GRACE|PYTHON", re.ASCII)
HOST = re.compile(r"((?:[^\s=@-][^\s=@]*@)?([^\s=@-][^\s=@]*))(?:\s+slots=0*([1-9]\d{0,5}))?", re.ASCII)
SAYS = b"launch/ssh.sh: "  # begins what PROGRAM has to say: that the host is ready, or why not
PROGRAM = r"""
refuse() { echo "launch/ssh.sh: $1"; exit 3; }
{ cd -- "$folder" && [[ -f launch_node.sh ]]; } 2>/dev/null || refuse "no launch_node.sh in $folder; see --remote-dir"
[[ -z ${PYTHON:-} ]] || command -v "$PYTHON" >/dev/null || refuse "no $PYTHON there; set PYTHON to one of all hosts"
echo "launch/ssh.sh: ready"
read -r word && [[ $word == go ]] || exit 75
bash launch_node.sh "$@" </dev/null & launcher=$!
{
  while read -r name; do asked=1; kill -s "$name" "$launcher"; done
  [[ ${asked:-} ]] || kill "$launcher"
} <&0 >/dev/null 2>&1 & reader=$!
wait "$launcher"; code=$?
kill "$reader" 2>/dev/null
exit "$code"
"""


@dataclass(frozen=True)
class Host:
    """A line of the hostfile: what ssh is given, that without the user, the number of processes, and file and line."""

    target: str
    name: str
    slots: str
    where: str


def prepare(project: str, words: list[str]) -> list[tuple[Host, bytes]]:
    """The hosts, and the program for each. Checks all that can be checked here."""
    end = words.index("--") if "--" in words else len(words)
    arguments, options = _arguments(words[:end]), words[end + 1 :]
    if parse(options).nproc is not None:
        raise UsageError("--nproc: the launcher starts the processes; use --nproc-per-node, before the --")
    hosts = _read_hosts(arguments.hostfile)
    given = {name: getattr(arguments, name) for name in arguments.passed_on}
    given["nproc-per-node"] = _processes(hosts, given["nproc-per-node"])
    given["master-addr"] = given["master-addr"] or _address(hosts)
    common = [f"--nnodes={len(hosts)}", *(f"--{name}={value}" for name, value in given.items() if value is not None)]
    common += ["--check"] if arguments.check else []
    folder = arguments.remote_dir or project
    each = [[*common, f"--node-rank={rank}", "--", *options] for rank in range(len(hosts))]
    return [(host, _program(folder, arguments)) for host, arguments in zip(hosts, each, strict=True)]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.removeprefix('argument ')}; options of main.py go behind --; see --help")


def _arguments(words: list[str]) -> argparse.Namespace:
    """The options before the `--`; where one is missing, the variable that says the same to launch_node.sh."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("hostfile", metavar="HOSTFILE")
    parser.add_argument("--remote-dir")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--nnodes", "--node-rank", dest="by_hand")
    kinds: dict[str, Any] = {"nproc-per-node": number(int, 1), "master-addr": str}
    kinds |= {"master-port": number(int, 1, most=65535), "max-restarts": number(int, 0)}
    for name, kind in kinds.items():
        variable = name.replace("-", "_").upper()
        parser.add_argument(f"--{name}", dest=name, type=kind, default=os.environ.get(variable) or None)
    arguments = parser.parse_args([re.sub("^--[^=]+", lambda name: name[0].replace("_", "-"), word) for word in words])
    if arguments.by_hand is not None:
        raise UsageError(f"--nnodes and --node-rank follow from the lines of {arguments.hostfile}: leave them out")
    arguments.passed_on = kinds
    return arguments


def _read_hosts(file: str) -> list[Host]:
    try:
        with open(file, encoding="utf-8") as opened:
            lines = opened.read().splitlines()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "not a text file"
        raise UsageError(f"{file}: cannot be read ({why}): give a file with a line for each host") from error
    hosts: dict[str, Host] = {}
    for count, line in enumerate(lines, start=1):
        text, where = line.partition("#")[0].strip(), f"{file}, line {count}"
        if not text:
            continue
        match = HOST.fullmatch(text)
        if match is None:
            raise UsageError(f"{where}: {text!r} is neither HOST nor HOST slots=N")
        target, name, slots = match.groups()
        if name in hosts:
            raise UsageError(f"{where}: {name} is there already ({hosts[name].where}); each host has one line")
        hosts[name] = Host(target, name, slots or "", where)
    if not hosts:
        raise UsageError(f"{file}: there is no host in it: give a line for each")
    return list(hosts.values())


def _processes(hosts: list[Host], given: int | None) -> int | None:
    """How many on each host. Raises UsageError if the lines do not agree with each other, or with the option."""
    first = hosts[0]
    for host in hosts:
        if host.slots != first.slots:
            one, other = (f"slots={each.slots}" if each.slots else "no slots=" for each in (host, first))
            raise UsageError(f"{host.where}: {one}, but {other} in {first.where}: all hosts need the same")
    if first.slots and given not in (None, int(first.slots)):
        raise UsageError(f"{first.where}: slots={first.slots}, but --nproc-per-node is {given}: leave out one of them")
    return int(first.slots) if first.slots else given


def _address(hosts: list[Host]) -> str:
    """The address of the first host, as ssh understands its name."""
    first = hosts[0]
    said = subprocess.run([*ssh_command(), "-G", "--", first.target], capture_output=True, text=True)
    found = re.search("^hostname (.+)", said.stdout, re.MULTILINE)
    address = found[1] if found else first.name
    if len(hosts) > 1 and (is_loopback(address) or address == "localhost"):
        raise UsageError(f"{first.where}: to the others, {address} is not this host: name it as they do")
    return address


def ssh_command() -> list[str]:
    if not shutil.which("ssh"):
        raise EnvironmentFailure("there is no ssh on this machine: install OpenSSH's client")
    try:
        return ["ssh", *shlex.split(os.environ.get("SSH_OPTIONS", ""))]
    except ValueError as error:
        raise UsageError(f"SSH_OPTIONS: {error}: quote it as in a shell") from error


def _program(folder: str, arguments: list[str]) -> bytes:
    """PROGRAM for one host: with the folder, the variables, and what launch_node.sh is given."""
    variables = {name: value for name, value in os.environ.items() if VARIABLES.fullmatch(name)}
    active = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX")
    if active and not variables.get("PYTHON"):
        variables["PYTHON"] = f"{active}/bin/python"
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    lines += [f"folder={shlex.quote(folder)}", f"set -- {shlex.join(arguments)}"]
    return os.fsencode("\n".join(lines) + PROGRAM) + b"\0"
