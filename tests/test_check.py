"""launch_node.sh --check: all machines side by side, whether their collectives are right, and how fast they are."""

from __future__ import annotations

import json
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from template_copy import TEMPLATE, copy_template

from config import Config
from ddp.core.errors import UsageError
from ddp.distributed.process_group import DistContext
from ddp.distributed.rank_env import RankEnv
from ddp.entrypoint.run_main import run_as_rank
from ddp.parts.preflight import check as preflight
from ddp.parts.preflight import data_status
from ddp.parts.preflight.nodes import NodeFacts, table
from faults import fault
from machines import Machine, Program, machines
from processes import Ranks


def check(machine: Machine, rank: int, project: Path, *options: Any, **environ: str) -> Program:
    """launch_node.sh --check, as node `rank` of 2 at gpu1's address, with one process."""
    variables = {"NNODES": "2", "NODE_RANK": str(rank), "NPROC_PER_NODE": "1", "MASTER_ADDR": "10.77.0.1", **environ}
    variables["PYTHONDONTWRITEBYTECODE"] = "1"
    return machine.start("bash", project / "launch_node.sh", *options, **variables)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that measures the network with up to 4 MiB, and has the GPUs that the variable GPUS lists."""
    copy = copy_template(tmp_path_factory.mktemp("quick") / "project")
    preflight = copy / "ddp/parts/preflight/check.py"
    before = preflight.read_text()
    preflight.write_text(before.replace("MIN_MIB, MAX_MIB = 1, 256", "MIN_MIB, MAX_MIB = 1, 4"))
    assert preflight.read_text() != before
    nodes = copy / "ddp/parts/preflight/nodes.py"
    before = nodes.read_text()
    real = "[torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]"
    nodes.write_text(before.replace(real, 'filter(None, os.environ.get("GPUS", "").split(","))'))
    assert nodes.read_text() != before
    return copy


def said(node: Program) -> str:
    """What it has printed, but for whom it has waited."""
    return re.sub(r"^node \d: waiting .*\n", "", node.output(), flags=re.MULTILINE)


@pytest.mark.sample(1, "checks of machines")
@pytest.mark.slow
def test_two_machines_are_shown_side_by_side_with_what_their_network_carries(quick: Path, tmp_path: Path) -> None:
    """Other options and files are only named once all was shown."""
    options = ["--check", "--", "--dataset", "synthetic", "--device", "cpu", "--output-dir", tmp_path / "out"]
    with machines(2) as two:
        gpus = "Imaginary 9000,Imaginary 9000"
        nodes = [check(two[0], 0, quick, *options), check(two[1], 1, quick, *options, GPUS=gpus)]
        assert [node.wait(240) for node in nodes] == [0, 0], [node.output() for node in nodes]
        shown, other = (said(node) for node in nodes)
    assert other == ""
    titles, first, second, *_ = (re.split(r"  +", line) for line in shown.splitlines())
    assert " ".join(titles) == "node host address Python torch NCCL GPUs disk dataset clock code"
    assert first[:3] == ["0", "gpu1", "10.77.0.1 eth0"] and second[:3] == ["1", "gpu2", "10.77.0.2 eth0"]
    assert (first[6], second[6]) == ("none", "2 x Imaginary 9000")
    assert first[8] == second[8] == "synthetic" and first[10] == second[10]
    assert abs(float(second[9].split()[0])) < 5, "one clock for both"
    assert "warning: gpu1 has none, gpu2 has 2 x Imaginary 9000" in shown
    for name in ("all_reduce", "all_gather", "broadcast"):
        assert re.search(rf"^{name} +right +[\d.]+ ms  [\d.]+ GB/s  \(of \d+ MiB\)$", shown, re.MULTILINE), shown
    assert shown.endswith("\nall checks passed: run the same command without --check to train\n")
    assert not (tmp_path / "out").exists(), "nothing is written"


@pytest.mark.sample(1, "checks of machines")
@pytest.mark.slow
def test_one_machine_is_checked_alone_and_a_run_that_it_has_lost_stays_as_it_is(quick: Path, tmp_path: Path) -> None:
    status = tmp_path / "out" / "status.json"
    status.parent.mkdir()
    gone = subprocess.Popen(["true"])
    gone.wait()
    status.write_text(json.dumps({"state": "running", "pid": gone.pid, "host": platform.node(), "step": 7}))
    before = status.read_bytes()
    options = ["--nproc-per-node", 2, "--check", "--", "--device", "cpu", "--output-dir", tmp_path / "out"]
    program = Program(["bash", quick / "launch_node.sh", *options], {"PYTHONDONTWRITEBYTECODE": "1"})
    assert program.wait(240) == 0, program.output()
    assert len(re.findall("^0     ", program.output(), re.MULTILINE)) == 1
    assert "2 processes on cpu, gloo" in program.output() and program.output().count("  right  ") == 3
    assert status.read_bytes() == before and list(status.parent.iterdir()) == [status]


@pytest.mark.sample(1, "checks of machines")
@fault(27)
def test_what_differs_is_shown_first_and_then_refused_with_both_hosts(tmp_path: Path) -> None:
    copy = copy_template(tmp_path / "copy")
    with (copy / "model.py").open("a") as file:
        file.write("# mine\n")
    with machines(2) as two:
        nodes = [check(two[0], 0, TEMPLATE, "--check"), check(two[1], 1, copy, "--check", "--", "--lr", "1")]
        assert [node.wait() for node in nodes] == [3, 3]
        shown, other = (said(node).splitlines() for node in nodes)
    assert shown[0].startswith("node  host") and shown[1].split()[-1] != shown[2].split()[-1], shown
    assert shown[3:] == other == [
        "error: node 0 (gpu1, 10.77.0.1) and node 1 (gpu2, 10.77.0.2) do not agree: --lr is 0.03 and 1.0; the file "
        "model.py differs. Start all nodes with the same options, code and versions"
    ]  # fmt: skip


@pytest.mark.sample(1, "checks of machines")
@fault(27)
def test_a_check_on_one_machine_and_a_training_on_the_other_are_refused() -> None:
    with machines(2) as two:
        nodes = [check(two[0], 0, TEMPLATE, "--check"), check(two[1], 1, TEMPLATE)]
        assert [node.wait() for node in nodes] == [3, 3]
        assert all("--check is True and False" in node.output() for node in nodes)


def test_data_that_are_not_there_yet_are_not_called_there(tmp_path: Path) -> None:
    (tmp_path / ".download.lock").touch()
    cifar10 = Config.parse(["--data-dir", str(tmp_path)])
    folders = Config.parse(["--dataset=imagefolder", f"--data-dir={tmp_path}"])
    assert data_status(cifar10) == f"cifar10: not in {tmp_path}, will be downloaded"
    assert data_status(folders) == f"imagefolder: not in {tmp_path}"
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "train").mkdir()
    assert data_status(cifar10) == f"cifar10 in {tmp_path}"
    assert data_status(folders) == f"imagefolder in {tmp_path}"


def test_clocks_apart_and_a_full_disk_are_pointed_out() -> None:
    shared = {"torch": "2", "NCCL": "-"}

    def facts(node: int, host: str, disk: float, offset: float) -> NodeFacts:
        return NodeFacts(node, host, "10.0.0.1", "?", "3", "none", disk, "synthetic", 0.0, shared, offset)

    nodes = [facts(0, "one", 100.0, 0.0), facts(1, "two", 1.25, -61.4), facts(2, "three", 100.0, 4.9)]
    assert table(nodes).splitlines()[4:] == [
        "warning: the clock of two is -61 s off that of one",
        "warning: two has only 1.2 GB of disk left for --output-dir",
    ]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "broadcast"])
def test_a_wrong_result_is_refused_and_its_rank_is_named(name: str) -> None:
    def target(env: RankEnv) -> int:
        def damaged(tensor: torch.Tensor, ctx: DistContext) -> None:
            collective(tensor, ctx)
            tensor.add_(ctx.rank == 1 and tensor.numel() == 3027)

        preflight.MAX_MIB = preflight.MIN_MIB
        collective, share = preflight.COLLECTIVES[name]
        preflight.COLLECTIVES[name] = (damaged, share)
        return run_as_rank(preflight.check, Config.parse(["--device=cpu"]), env)

    ranks = Ranks(3, target)
    assert ranks.wait() == [3, 3, 3], ranks.output()
    errors = [line for line in ranks.output().splitlines() if "error" in line]
    assert len(errors) == 1 and errors[0].startswith(f"error: {name} over gloo returned a wrong result on rank 1: ")


def test_a_backend_that_torch_lacks_is_refused_before_the_ranks_connect() -> None:
    with pytest.raises(UsageError, match=r"--backend mpi: this torch was built with gloo"):
        preflight.check(Config.parse(["--backend", "mpi"]), RankEnv())


def test_data_that_cannot_be_shared_out_evenly_are_right_as_well() -> None:
    def target(env: RankEnv) -> int:
        preflight.MAX_MIB = preflight.MIN_MIB
        return run_as_rank(preflight.check, Config.parse(["--device=cpu"]), env)

    ranks = Ranks(3, target)
    assert ranks.wait() == [0, 0, 0], ranks.output()
    assert ranks.output().count("  right  ") == 3
