"""What a test needs of the machine: it is skipped where that is missing, with the command that installs it."""

from __future__ import annotations

import os
import shutil

import pytest

PACKAGES = {  # of Debian and Ubuntu; .ci/run installs them
    "cc": "gcc libc6-dev",
    "dash": "dash",
    "g++": "g++",
    "ip": "iproute2",
    "mpirun": "openmpi-bin",
    "munged": "munge",
    "sbatch": "slurm-client",
    "slurmctld": "slurmctld",
    "setpriv": "util-linux",
    "slurmd": "slurmd",
    "ssh": "openssh-client",
    "sshd": "openssh-server",
    "strace": "strace",
}
PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"  # sshd is there, which not every user has in PATH


def need(*programs: str) -> None:
    """Skip the test if one of these programs is missing. In CI all must be there."""
    missing = [program for program in programs if shutil.which(program, path=PATH) is None]
    if missing:
        _skip(f"needs {', '.join(missing)}: apt-get install {' '.join(PACKAGES[program] for program in missing)}")


def need_root(what: str) -> None:
    """Skip the test if it does not run as root; `what` needs that."""
    if os.geteuid() != 0:
        _skip(f"needs root for {what}: sudo --preserve-env=PATH make test")


def _skip(reason: str) -> None:
    assert os.environ.get("CI") != "true", f"in CI this test must run, but it {reason}"
    pytest.skip(reason)
