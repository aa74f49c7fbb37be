"""The command line of launch/ssh.sh: its options, its host file, and what each host has to run."""

import argparse
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass, fields

from ddp.core.errors import SetupError, UsageError
from ddp.core.network import is_loopback
from ddp.core.options import directory, flag_of, option
from ddp.core.run_config import RunConfig
from ddp.launcher.options import JobOptions, LauncherParser

PASSED_ON = re.compile(r"(NCCL|GLOO|TORCH)_\w+|OMP_NUM_THREADS|PYTHON", re.ASCII)
HOST = re.compile(r"((?:[^\s=@-][^\s=@]*@)?([^\s=@-][^\s=@]*))(?:\s+slots=0*([1-9]\d{0,5}))?", re.ASCII)
HELP = """\
Run launch_node.sh on every host of HOSTFILE. Start this on any machine that can ssh to all of them without a password;
it may be one of them. The project is in the same directory on all hosts. HOSTFILE has one line per host; the first is
node 0:

  gpu1 slots=8        # slots: processes there, the same on every line; without it, one per GPU
  me@gpu2 slots=8
"""
MORE_HELP = """\
Each variable in brackets sets the option before it; the command line wins. Defaults: --master-addr is the address that
ssh uses for the first host; --max-restarts is 3 if there are several hosts. Relative paths in MAIN_OPTIONS start at the
project's directory on the hosts.
These variables are passed on: NCCL_*, GLOO_*, TORCH_*, OMP_NUM_THREADS, and PYTHON, which is by default the interpreter
of your active environment. Ports and keys belong in ~/.ssh/config; ssh also receives SSH_OPTIONS, such as '-F FILE'.

Each line of output begins with its host. Ctrl-C, SIGTERM, SIGUSR1 or SIGHUP: all hosts save, and exit with 75. A second
signal: all exit at once. When one host fails, the others are stopped, and its exit code is returned; it is 3 if a host
cannot be reached. "python main.py --help" lists MAIN_OPTIONS.

examples:
  launch/ssh.sh hosts
  launch/ssh.sh hosts --nproc-per-node 4 -- --dataset synthetic --epochs 90
"""


@dataclass
class SshOptions(JobOptions):
    """The options of launch/ssh.sh."""

    remote_dir: str = option("", "project directory on the hosts (default: as here)", kind=directory, section="options")


@dataclass(frozen=True)
class Host:
    """A line of the host file."""

    target: str  # what ssh is called with
    name: str  # the same without the user
    slots: str
    where: str  # the file and the number of the line


def prepare(words: list[str], config_class: type[RunConfig], project: str, program: str) -> list[tuple[Host, bytes]]:
    """The hosts, and the program for each. Checks everything that can be checked before a host is reached."""
    usage = "launch/ssh.sh HOSTFILE [OPTIONS] [-- MAIN_OPTIONS]"
    parser = LauncherParser(SshOptions, usage=usage, description=HELP, epilog=MORE_HELP)
    parser.add_argument("hostfile", metavar="HOSTFILE", help="one line per host: HOST or HOST slots=N")
    parser.add_argument("--nnodes", "--node-rank", dest="by_host", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    given, _, main_options = parser.read(words, config_class)
    if "by_host" in given:
        raise UsageError(f"--nnodes and --node-rank follow from the lines of {given['hostfile']}: remove them")
    hosts = _read_hosts(given["hostfile"])
    given["nproc_per_node"] = _processes(hosts, given.get("nproc_per_node"))
    given["master_addr"] = given.get("master_addr") or _address(hosts)
    passed_on = {flag_of(item.name): given.get(item.name) for item in fields(JobOptions)}
    common = [flag if value is True else f"{flag}={value}" for flag, value in passed_on.items() if value is not None]
    calls = []
    for rank, host in enumerate(hosts):
        arguments = [f"--nnodes={len(hosts)}", *common, f"--node-rank={rank}", "--", *main_options]
        call = shlex.join(["run_on_host", given.get("remote_dir", project), *arguments])
        calls.append((host, os.fsencode("\n".join([program, *_exports(), call])) + b"\0"))
    return calls


def _read_hosts(file: str) -> list[Host]:
    try:
        with open(file, encoding="utf-8") as opened:
            lines = opened.read().splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise UsageError(f"{file}: cannot be read ({reason}): pass a file with one line per host") from error
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
            raise UsageError(f"{where}: {name} is already in {hosts[name].where}: each host has one line")
        hosts[name] = Host(target, name, slots or "", where)
    if not hosts:
        raise UsageError(f"{file}: contains no host: write one line per host")
    return list(hosts.values())


def _processes(hosts: list[Host], given: int | None) -> int | None:
    """The number of processes on each host. Raises UsageError if the lines and the option do not agree."""
    first = hosts[0]
    for host in hosts:
        if host.slots != first.slots:
            one, other = (f"slots={each.slots}" if each.slots else "no slots=" for each in (host, first))
            raise UsageError(f"{host.where}: {one}, but {other} in {first.where}: all hosts need the same")
    if first.slots and given not in (None, int(first.slots)):
        raise UsageError(f"{first.where}: slots={first.slots}, but --nproc-per-node is {given}: remove one of them")
    return int(first.slots) if first.slots else given


def _address(hosts: list[Host]) -> str:
    """The address of the first host, as ssh resolves its name."""
    first = hosts[0]
    settings = subprocess.run([*ssh_command(), "-G", "--", first.target], capture_output=True, text=True).stdout
    found = re.search("^hostname (.+)", settings, re.MULTILINE)
    address = found[1] if found else first.name
    if len(hosts) > 1 and (is_loopback(address) or address == "localhost"):
        raise UsageError(f"{first.where}: on the other hosts, {address} is not this host: use its name in the network")
    return address


def ssh_command() -> list[str]:
    """ssh, with the options that the user chose for it."""
    if not shutil.which("ssh"):
        raise SetupError("there is no ssh on this machine: install OpenSSH's client")
    try:
        return ["ssh", *shlex.split(os.environ.get("SSH_OPTIONS", ""))]
    except ValueError as error:
        raise UsageError(f"SSH_OPTIONS: {error}: quote it as in a shell") from error


def _exports() -> list[str]:
    """Shell commands that set the variables to pass on."""
    variables = {name: value for name, value in os.environ.items() if PASSED_ON.fullmatch(name)}
    active = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX")
    if active and not variables.get("PYTHON"):
        variables["PYTHON"] = f"{active}/bin/python"
    return [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
