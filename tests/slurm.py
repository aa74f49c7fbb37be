"""A real Slurm for tests: controller and two nodes on two machines (machines.py), gone afterwards. Needs root."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from template_copy import LEAN

from machines import Machine, Program, machines
from needs import need

# As on some clouds, the names of the nodes are known to Slurm alone; `resolving` makes them known. The 32 CPUs are only
# counted. KillOnBadExit and WaitTime let srun kill the other tasks once one has ended. Jobs in `spare` and `hasty` give
# way to those in `main`, with and without a time of grace.
CONFIGURATION = """
ClusterName=test
SlurmctldHost=gpu1(10.77.0.1)
NodeName=node[1-2] NodeHostname=gpu[1-2] NodeAddr=10.77.0.[1-2] CPUs=32 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES PriorityTier=2 PreemptMode=OFF
PartitionName=spare Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=hasty Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
KillOnBadExit=1
WaitTime=1
SchedulerParameters=sched_interval=1
ReturnToService=2
"""


@dataclass(frozen=True)
class Slurm:
    """The cluster: node1 and node2, on gpu1 and gpu2."""

    machines: list[Machine]
    folder: Path

    def run(self, *command: Any, folder: Path | None = None, **environ: str) -> str:
        """What a command of Slurm prints, called on the first node in a folder."""
        words = ["ip", "netns", "exec", self.machines[0].namespace, *(str(word) for word in command)]
        environment = {**os.environ, **LEAN, "SLURM_CONF": str(self.folder / "slurm.conf"), **environ}
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, f"{words[4:]}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, project: Path, *command: Any, **environ: str) -> Job:
        """`sbatch COMMAND`, from the project's folder."""
        return Job(self, self.run("sbatch", "--parsable", *command, folder=project, **environ).strip(), project)

    def srun(self, project: Path, *command: Any, **environ: str) -> Program:
        """Start `srun COMMAND`, from the project's folder."""
        configuration = str(self.folder / "slurm.conf")
        return self.machines[0].start("srun", "--chdir", project, *command, SLURM_CONF=configuration, **environ)

    @contextlib.contextmanager
    def resolving(self) -> Iterator[None]:
        """Within the block, the machines know the addresses of node1 and node2."""
        files = [Path("/etc/netns") / machine.namespace / "hosts" for machine in self.machines]
        before = [file.read_text() for file in files]
        names = "".join(f"{machine.address} node{i}\n" for i, machine in enumerate(self.machines, start=1))
        try:
            for file, text in zip(files, before, strict=True):
                file.write_text(text + names)
            yield
        finally:
            for file, text in zip(files, before, strict=True):
                file.write_text(text)


@dataclass(frozen=True)
class Job:
    """A batch job."""

    slurm: Slurm
    number: str
    project: Path

    def show(self) -> dict[str, str]:
        """What Slurm knows about it: JobState, ExitCode, Restarts and so on."""
        words = self.slurm.run("scontrol", "--oneliner", "show", "job", self.number).split()
        return {name: value for name, _, value in (word.partition("=") for word in words)}

    def output(self) -> str:
        """What it has printed so far, in all of its starts."""
        file = self.project / f"slurm-{self.number}.out"
        return file.read_text() if file.exists() else ""

    def until(self, condition: Callable[[], Any], timeout: float = 240) -> None:
        """Wait until something holds."""
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, f"not within {timeout} s: {self.show()}\n{self.output()}"
            time.sleep(0.1)

    def says(self, text: str, count: int = 1, timeout: float = 240) -> None:
        """Wait until it has printed something so many times."""
        self.until(lambda: self.output().count(text) >= count, timeout)

    def ends(self, state: str, timeout: float = 240) -> dict[str, str]:
        """Wait until it has ended. Returns what Slurm knows."""
        self.until(lambda: self.show()["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"), timeout)
        known = self.show()
        assert known["JobState"] == state, f"{known}\n{self.output()}"
        return known

    def comes_back(self, restarts: int = 1, timeout: float = 240) -> None:
        """Wait until it is in the queue again, or has left it again."""

        def back() -> bool:
            known = self.show()
            return known["Restarts"] == str(restarts) and known["JobState"] != "COMPLETING"

        self.until(back, timeout)

    def start_again(self) -> None:
        """Slurm starts a job that is back in the queue after two minutes; now, instead."""
        time.sleep(1.1)  # in the second in which it ended, slurmd would not take it
        if self.show()["JobState"] == "PENDING":
            self.slurm.run("scontrol", "update", f"JobId={self.number}", "StartTime=now")
        self.until(lambda: self.show()["JobState"] != "PENDING")

    def cancel(self, *options: str) -> None:
        """`scancel`."""
        self.slurm.run("scancel", *options, self.number)


def require() -> None:
    """Skip the test where there is no Slurm."""
    need("munged", "slurmctld", "slurmd", "sbatch")


@contextlib.contextmanager
def slurm() -> Iterator[Slurm]:
    """A cluster, gone afterwards with all its daemons, jobs and files."""
    require()
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        with machines(2) as made:
            cluster = Slurm(made, folder)
            _configure(folder)
            files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
            _start(cluster, made[0], "munged", "--foreground", f"--socket={folder}/munge.socket", *files)
            _start(cluster, made[0], "slurmctld", "-D", "-f", folder / "slurm.conf")
            for number, machine in enumerate(made, start=1):
                _start(cluster, machine, "slurmd", "-D", "-N", f"node{number}", "-f", folder / "slurm.conf")
            _wait_for_nodes(cluster)
            yield cluster
    finally:
        if not os.environ.get("KEEP"):
            shutil.rmtree(folder)


def _configure(folder: Path) -> None:
    folder.chmod(0o755)  # munged demands it
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder))
    # Nothing here needs control groups, which may be missing, but slurmd asks for them.
    version = subprocess.run(["slurmd", "-V"], capture_output=True, text=True, check=True).stdout
    old = tuple(map(int, re.findall(r"\d+", version)[:2])) < (23, 2)
    (folder / "cgroup.conf").write_text(f"CgroupPlugin={'cgroup/v1' if old else 'disabled'}\n")


def _start(cluster: Slurm, machine: Machine, *command: Any) -> None:
    log = cluster.folder / f"{command[0]}-{machine.name}.log"
    machine.start("sh", "-c", 'exec "$@" >"$0" 2>&1', log, *command)


def _wait_for_nodes(cluster: Slurm) -> None:
    end = time.monotonic() + 180
    states = ""
    while states != "idle\nidle\n":
        logs = "\n".join(file.read_text() for file in cluster.folder.glob("*.log"))
        assert time.monotonic() < end, f"Slurm does not come up: {states}\n{logs}"
        time.sleep(0.2)
        with contextlib.suppress(AssertionError):
            states = cluster.run("sinfo", "--noheader", "--Node", "--partition=main", "--format=%T")
