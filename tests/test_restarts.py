"""A run that loses a process, a launcher or its network ends as if nothing had happened: bit for bit the same weights.

Two machines are network namespaces; everything else is real. A loop of the shell starts a launcher again that was
killed, as Slurm and Kubernetes do. RESTARTS=10 repeats each loss ten times.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from template_copy import copy_template, shrink, slow_down
from test_machines import OPTIONS, SIZES, environment, trained

import data
from faults import fault
from machines import Machine, Program, machines, require
from processes import train

TIMEOUT_S = 8
AGAIN = 'while :; do bash "$@" && code=0 || code=$?; [ $code -eq 137 ] || exit $code; done'


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require()
    return slow_down(shrink(copy_template(tmp_path_factory.mktemp("restarts") / "project"), **SIZES))


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A launcher that is killed with -9 leaves its temporary directory; this one is deleted."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield


@pytest.fixture(scope="module")
def undisturbed(project: Path) -> str:
    """The hash of model and optimizer after a run of two forked processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "SYNTHETIC_SIZES", SIZES)
        train(2, *OPTIONS, "--output-dir", project.parent / "undisturbed")
    return trained(project.parent / "undisturbed")


def worker(machine: Machine) -> int:
    return next(pid for pid in machine.running() if b"\0LOCAL_RANK=0" in environment(pid))


def launcher(machine: Machine) -> int:
    """The parent of the worker."""
    return int(Path(f"/proc/{worker(machine)}/stat").read_text().rpartition(")")[2].split()[1])


def cut(machine: Machine) -> None:
    """The link is down for longer than --timeout."""
    machine.link("down")
    time.sleep(TIMEOUT_S + 4)
    machine.link("up")


LOSSES: dict[str, Callable[[list[Machine]], None]] = {
    "a worker": lambda two: os.kill(worker(two[1]), signal.SIGKILL),
    "rank 0": lambda two: os.kill(worker(two[0]), signal.SIGKILL),
    "launcher 1": lambda two: os.kill(launcher(two[1]), signal.SIGKILL),
    "launcher 0": lambda two: os.kill(launcher(two[0]), signal.SIGKILL),
    "the network": lambda two: cut(two[1]),
}


@fault(1, 12, 29)
@pytest.mark.slow
@pytest.mark.sample(1, "launchers that are lost")
@pytest.mark.parametrize("turn", range(int(os.environ.get("RESTARTS", "1"))))
@pytest.mark.parametrize("lost", LOSSES)
def test_a_run_of_two_machines_survives_the_loss_of(
    lost: str, turn: int, undisturbed: str, project: Path, tmp_path: Path
) -> None:
    """At another step in each turn."""
    options = [*OPTIONS, "--timeout", TIMEOUT_S, "--output-dir", tmp_path / "out"]
    with machines(2) as two:
        nodes: list[Program] = []
        for rank, machine in enumerate(two):
            variables = {"NNODES": "2", "NODE_RANK": str(rank), "NPROC_PER_NODE": "1", "MASTER_ADDR": "10.77.0.1"}
            variables |= {"PYTHONDONTWRITEBYTECODE": "1", "STEP_S": "0.1"}
            script = ["bash", "-c", AGAIN, "bash", project / "launch_node.sh", "--", *options]
            nodes.append(machine.start(*script, **variables))
        nodes[0].until(f"step {20 + 10 * (turn % 4)}/", 120)
        time.sleep(0.1 * (turn % 7))
        LOSSES[lost](two)
        codes = [node.wait(240) for node in nodes]
        assert codes == [0, 0], "\n".join(node.output() for node in nodes)
        assert [machine.running() for machine in two] == [[], []]
    assert nodes[0].output().count("resuming from") == 1, nodes[0].output()
    assert trained(tmp_path / "out") == undisturbed
