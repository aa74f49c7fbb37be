"""launch_node.sh --check: all machines side by side, whether their collectives are right, and how fast they are."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from template_copy import TEMPLATE, copy_template

from config import Config
from ddp.distributed.process_group import DistContext
from ddp.distributed.rank_env import RankEnv
from ddp.entrypoint import preflight
from ddp.entrypoint.launch import run_as_rank
from ddp.launcher.node_info import NodeInfo, gpu_names, print_table, visible_gpus
from faults import fault
from machines import Machine, Program, machines
from processes import Ranks


def check(machine: Machine, rank: int, project: Path, *options: Any, **environ: str) -> Program:
    """launch_node.sh --check, as node `rank` of 2 at gpu1's address, with one process."""
    variables = {"NNODES": "2", "NODE_RANK": str(rank), "NPROC_PER_NODE": "1", "MASTER_ADDR": "10.77.0.1", **environ}
    variables["PYTHONDONTWRITEBYTECODE"] = "1"
    return machine.start("bash", project / "launch_node.sh", *options, **variables)


def said(node: Program) -> str:
    """What it has printed, but for whom it has waited."""
    return re.sub(r"^node \d: waiting .*\n", "", node.output(), flags=re.MULTILINE)


@pytest.mark.slow
def test_two_machines_are_shown_side_by_side_with_what_their_network_carries(tmp_path: Path) -> None:
    """Also: GPUs, as the driver names them; other options and files are only named once all was shown."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(
        "#!/bin/sh\necho 'GPU 0: Imaginary 9000 (UUID: GPU-0)'; echo 'GPU 1: Imaginary 9000 (UUID: GPU-1)'\n"
    )
    tool.chmod(0o755)
    options = ["--check", "--", "--dataset", "synthetic", "--device", "cpu", "--output-dir", tmp_path / "out"]
    with machines(2) as two:
        path = {"PATH": f"{tool.parent}:/usr/sbin:/usr/bin:/sbin:/bin", "PYTHON": shutil.which("python") or ""}
        nodes = [check(two[0], 0, TEMPLATE, *options), check(two[1], 1, TEMPLATE, *options, **path)]
        assert [node.wait(90) for node in nodes] == [0, 0], [node.output() for node in nodes]
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
        assert re.search(rf"^{name} +right +[\d.]+ ms  [\d.]+ GB/s  \(of \d+ [KM]iB\)$", shown, re.MULTILINE), shown
    assert shown.endswith("\nall checks passed: run the same command without --check to train\n")
    assert not (tmp_path / "out").exists(), "nothing is written"


@pytest.mark.slow
def test_one_machine_is_checked_alone_and_a_run_that_it_has_lost_stays_as_it_is(tmp_path: Path) -> None:
    """Three processes: not all data can be shared out evenly among them."""
    status = tmp_path / "out" / "status.json"
    status.parent.mkdir()
    gone = subprocess.Popen(["true"])
    gone.wait()
    status.write_text(json.dumps({"state": "running", "pid": gone.pid, "host": platform.node(), "step": 7}))
    before = status.read_bytes()
    options = ["--nproc-per-node", 3, "--check", "--", "--device", "cpu", "--output-dir", tmp_path / "out"]
    program = Program(["bash", TEMPLATE / "launch_node.sh", *options], {"PYTHONDONTWRITEBYTECODE": "1"})
    assert program.wait(120) == 0, program.output()
    assert len(re.findall("^0     ", program.output(), re.MULTILINE)) == 1
    assert "3 processes on cpu, gloo" in program.output() and program.output().count("  right  ") == 3
    assert status.read_bytes() == before and list(status.parent.iterdir()) == [status]


@fault(27)
def test_what_differs_is_shown_first_and_then_refused_with_both_hosts(tmp_path: Path) -> None:
    copy = copy_template(tmp_path / "copy")
    with (copy / "model.py").open("a") as file:
        file.write("# mine\n")
    with machines(2) as two:
        nodes = [check(two[0], 0, TEMPLATE, "--check"), check(two[1], 1, copy, "--check", "--", "--lr", "1")]
        assert [node.wait(15) for node in nodes] == [3, 3]
        shown, other = (said(node).splitlines() for node in nodes)
    assert shown[0].startswith("node  host") and shown[1].split()[-1] != shown[2].split()[-1], shown
    assert shown[3:] == other == [
        "error: node 0 (gpu1, 10.77.0.1) and node 1 (gpu2, 10.77.0.2) do not agree: --lr is 0.03 and 1.0; the file "
        "model.py differs. Start all nodes with the same options, code and versions"
    ]  # fmt: skip


@fault(27)
def test_a_check_on_one_machine_and_a_training_on_the_other_are_refused() -> None:
    with machines(2) as two:
        nodes = [check(two[0], 0, TEMPLATE, "--check"), check(two[1], 1, TEMPLATE)]
        assert [node.wait(15) for node in nodes] == [3, 3]
        assert all("--check is True and False" in node.output() for node in nodes)


def test_data_that_are_not_there_yet_are_not_called_there(tmp_path: Path) -> None:
    (tmp_path / ".download.lock").touch()
    cifar10 = Config.parse(["--data-dir", str(tmp_path)])
    folders = Config.parse(["--dataset=imagefolder", f"--data-dir={tmp_path}"])
    assert cifar10.data_status() == f"cifar10: not in {tmp_path}, will be downloaded"
    assert folders.data_status() == f"imagefolder: not in {tmp_path}"
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "train").mkdir()
    assert cifar10.data_status() == f"cifar10 in {tmp_path}"
    assert folders.data_status() == f"imagefolder in {tmp_path}"


def test_gpus_are_those_of_the_driver_or_of_cuda_visible_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with MIG, and a line that is no GPU. CUDA_VISIBLE_DEVICES changes what is used, not what is there."""
    listing = "GPU 0: Imaginary 9000 (UUID: GPU-a-b)\n  MIG 1g.5gb Device 0: (UUID: MIG-c)\nGPU 1: Other (X)\nUnable\n"
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{listing}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_names() == ["Imaginary 9000", "Other (X)"] and visible_gpus() == 2
    for devices, count in (("", 0), ("3", 1), ("0,1,GPU-a-b", 3)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
        assert visible_gpus() == count
    assert len(gpu_names()) == 2
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert gpu_names() == []


def test_clocks_apart_and_a_full_disk_are_pointed_out(capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"Python": "3", "torch": "2", "NCCL": "-", "GPUs": "none", "dataset": "synthetic", "code": "1"}
    facts |= {"address": "10.0.0.1 eth0"}
    nodes = [
        NodeInfo(0, "one", {}, {**facts, "disk": 100.0, "offset": 0.0}),
        NodeInfo(1, "two", {}, {**facts, "disk": 1.25, "offset": -61.4}),
        NodeInfo(2, "three", {}, {**facts, "disk": None, "offset": 4.9}),
    ]
    print_table(nodes)
    assert capsys.readouterr().out.splitlines()[4:] == [
        "warning: the clock of two is -61 s off that of one",
        "warning: two has only 1.2 GB of disk left for --output-dir",
    ]


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "broadcast"])
def test_a_wrong_result_is_refused_and_its_rank_is_named(name: str) -> None:
    def target(env: RankEnv) -> int:
        def damaged(tensor: torch.Tensor, ctx: DistContext) -> None:
            collective(tensor, ctx)
            tensor.add_(ctx.rank == 1 and tensor.numel() == 3027)

        preflight.MAX_BYTES = preflight.MIN_BYTES
        collective, share = preflight.COLLECTIVES[name]
        preflight.COLLECTIVES[name] = (damaged, share)
        return run_as_rank(preflight.check, Config.parse(["--device=cpu"]), env)

    ranks = Ranks(3, target)
    assert ranks.wait() == [3, 3, 3], ranks.output()
    errors = [line for line in ranks.output().splitlines() if "error" in line]
    assert len(errors) == 1 and errors[0].startswith(f"error: {name} over gloo returned a wrong result on rank 1: ")
