"""Training on several machines equals training on one, whatever happens to the machines and the network meanwhile.

Machines are network namespaces, and everything else is real. What the launchers say to each other before and after a
round is in test_nodes.py, with a stub in the place of training.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from outputs import lines, weights_and_momentum

from faults import fault
from machines import Machine, Program, machines, require

TEMPLATE = Path(__file__).resolve().parent.parent / "{{cookiecutter.project_slug}}"
IPV4, IPV6 = "10.77.0.", "fd00:77::"
EPOCHS, PER_EPOCH = 4, 78
STEPS = EPOCHS * PER_EPOCH
# With a constant learning rate, a run of two epochs is the beginning of one of four.
OPTIONS = ["--dataset", "synthetic", "--device", "cpu", "--warmup-epochs", 0, "--lr-schedule", "constant"]
OPTIONS += ["--timeout", 60, "--checkpoint-every", 20, "--log-every", 10]
NOTICE = ["--timeout", 10]  # so soon a machine is missed


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy that nobody edits meanwhile; its path has a space in it."""
    require()
    copy = tmp_path_factory.mktemp("a copy") / "project"
    shutil.copytree(TEMPLATE, copy, ignore=shutil.ignore_patterns("runs", "data", "__pycache__", ".*_cache"))
    return copy


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is killed with -9 leaves its temporary folder."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))


@pytest.fixture(scope="module")
def undisturbed(project: Path) -> str:
    """The hash of model and optimizer after a run of two processes on one machine."""
    output = project.parent / "undisturbed"
    options = ["--nproc-per-node", 2, "--", *OPTIONS, "--epochs", EPOCHS, "--output-dir", output]
    program = Program(["bash", project / "launch_node.sh", *options], {})
    assert program.wait(120) == 0, program.output()
    return trained(output)


def start(machine: Machine, rank: int, project: Path, *options: Any, **environ: str) -> Program:
    """launch_node.sh on one of two machines, with one process."""
    variables = {"NNODES": "2", "NODE_RANK": str(rank), "NPROC_PER_NODE": "1", "MASTER_ADDR": "10.77.0.1", **environ}
    launcher = ["bash", project / "launch_node.sh", "--", *OPTIONS, *options]
    return machine.start(*launcher, PYTHONDONTWRITEBYTECODE="1", **variables)


def assert_done(machines: list[Machine], nodes: list[Program], timeout: float = 120) -> None:
    """All end with 0, and leave no process."""
    assert [node.wait(timeout) for node in nodes] == [0] * len(nodes), "\n".join(node.output() for node in nodes)
    assert [machine.running() for machine in machines] == [[] for _ in machines]


def trained(output: Path) -> str:
    """The hash of model and optimizer in the last checkpoint. Each step must have been logged once."""
    ends = list(range(PER_EPOCH, STEPS + 1, PER_EPOCH))
    assert [line["step"] for line in lines(output, "train")] == sorted({*range(10, STEPS + 1, 10), *ends})
    assert [line["step"] for line in lines(output, "test")] == ends
    return weights_and_momentum(output / "checkpoints" / f"step_{STEPS:08d}.pt")


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# ---- undisturbed ----------------------------------------------------------------------------------------------------


@fault(18)
@pytest.mark.slow
def test_three_machines_train_though_one_comes_30_s_late_and_count_each_test_sample_once(
    project: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    options = ["--max-steps", 20, "--output-dir", tmp_path / "out"]
    with machines(3) as three:
        late = time.monotonic() + 30
        nodes = [start(three[rank], rank, project, *options, NNODES="3") for rank in (0, 1)]
        nodes[0].until("node 0: waiting for node 2 at port 29500 (up to 300 s)", 25)
        request.getfixturevalue("undisturbed")  # what else there is to do meanwhile
        time.sleep(max(0, late - time.monotonic()))
        nodes.append(start(three[2], 2, project, *options, NNODES="3"))
        assert_done(three, nodes)
    assert "3 processes (torchrun) on cpu, gloo" in nodes[0].output()
    line = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (line["split"], line["count"], 2000 % 3) == ("test", 2000, 2)
    assert line["accuracy"] == right_answers(tmp_path / "out" / "best.pt") / 2000


def right_answers(path: Path) -> int:
    """How many of the test samples the model in this file gets right, all in one batch."""
    from config import parse
    from data import load_datasets
    from model import ToyModel

    _, test_set = load_datasets(parse(["--dataset", "synthetic"]))
    model = ToyModel()
    model.load_state_dict(torch.load(path, weights_only=True)["model"])
    images, targets = test_set.prepare(test_set.__getitems__(list(range(len(test_set)))))
    with torch.no_grad():
        return int((model.eval()(images).argmax(1) == targets).sum())


@fault(28)
@pytest.mark.slow
@pytest.mark.parametrize("network, addresses", [(IPV4, ["gpu1", "gpu1"]), (IPV6, ["gpu1", "[fd00:77::1]"])])
def test_two_machines_give_the_same_weights_as_two_processes_on_one(
    undisturbed: str, project: Path, tmp_path: Path, network: str, addresses: list[str]
) -> None:
    """To gpu1 itself, gpu1 is 127.0.0.1 or ::1, as its own name is on every machine. With IPv6 there is no IPv4."""
    options = ["--epochs", EPOCHS, "--output-dir", tmp_path / "out"]
    with machines(2, network) as two:
        nodes = [start(two[rank], rank, project, *options, MASTER_ADDR=addresses[rank]) for rank in (0, 1)]
        assert_done(two, nodes)
    assert "2 processes (torchrun) on cpu, gloo" in nodes[0].output()
    assert trained(tmp_path / "out") == undisturbed


# ---- disturbed ------------------------------------------------------------------------------------------------------


@fault(1, 22, 29)
@pytest.mark.slow
def test_machines_without_a_shared_disk_resume_from_rank_0s_and_so_they_do_after_a_power_cut(
    undisturbed: str, project: Path, tmp_path: Path
) -> None:
    """Each has a disk of its own at one path, and the project on it. The second command asks for more epochs."""
    disk = tmp_path / "disk"
    with machines(2) as two:
        disks = [machine.own_folder(disk) for machine in two]
        for own in disks:
            shutil.copytree(project, own / "project")
        code = files(disks[0])

        def command(rank: int, epochs: int) -> Program:
            return start(two[rank], rank, disk / "project", "--epochs", epochs, "--output-dir", disk / "out", *NOTICE)

        assert_done(two, [command(0, 2), command(1, 2)])
        nodes = [command(0, EPOCHS), command(1, EPOCHS)]
        assert "going on from" in nodes[0].until("step 200/", 90)
        two[1].link("down")  # what the kernel sends when processes die must not get out
        two[1].kill()
        nodes[0].until("starting again from step ", 60)
        two[1].link("up")
        nodes[1] = command(1, EPOCHS)
        assert_done(two, nodes)
    assert nodes[0].output().count("going on from") == 2
    assert trained(disks[0] / "out") == undisturbed
    new = set(files(disks[1])) - set(code)
    assert not [name for name in new if not name.startswith("out/logs/")], new
    assert list(disk.iterdir()) == [], "the machines have shared this folder"


@fault(29)
@pytest.mark.slow
def test_a_run_goes_on_once_the_link_is_back_and_once_machine_0_is(
    undisturbed: str, project: Path, tmp_path: Path
) -> None:
    options = ["--epochs", EPOCHS, "--output-dir", tmp_path / "out", *NOTICE]
    with machines(2) as two:
        nodes = [start(machine, rank, project, *options) for rank, machine in enumerate(two)]
        nodes[0].until("step  40/", 90)
        two[1].link("down")
        for node in nodes:
            node.until("starting again from step ", 60)
        two[1].link("up")
        assert "going on from" in nodes[0].until("step 200/", 90)
        two[0].kill()
        nodes[0] = start(two[0], 0, project, *options)
        assert_done(two, nodes)
    assert "going on from" in nodes[0].output()
    assert nodes[1].output().count("starting again from step ") == 2
    assert trained(tmp_path / "out") == undisturbed


# ---- without launch_node.sh -----------------------------------------------------------------------------------------


@fault(28)
@pytest.mark.slow
def test_main_py_alone_finds_the_interface_that_leads_to_the_other_machine(
    undisturbed: str, project: Path, tmp_path: Path
) -> None:
    """As srun and mpirun start it. Gloo itself would take that of the machine's own name, which is 127.0.0.1."""
    options = [*OPTIONS, "--epochs", EPOCHS, "--world-size", 2, "--init-method", "tcp://gpu1:29500"]
    main = [sys.executable, project / "main.py", *options, "--output-dir", tmp_path / "out", "--rank"]
    with machines(2) as two:
        assert_done(two, [machine.start(*main, rank, PYTHONDONTWRITEBYTECODE="1") for rank, machine in enumerate(two)])
    assert trained(tmp_path / "out") == undisturbed
