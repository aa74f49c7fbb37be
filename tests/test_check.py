"""launch_node.sh --check: all machines side by side, whether their collectives are right, and how fast they are."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from template_copy import TEMPLATE, copy_template

from config import Config
from ddp.core.errors import UsageError
from ddp.distributed.process_group import DistContext
from ddp.distributed.rank_env import RankEnv
from ddp.entrypoint import preflight
from ddp.entrypoint.run_main import run_as_rank
from ddp.launcher import node_info
from ddp.launcher.node_info import NodeInfo, gpu_names, print_table
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
    """A project that measures the network with up to 4 MiB."""
    copy = copy_template(tmp_path_factory.mktemp("quick") / "project")
    preflight = copy / "ddp/entrypoint/preflight.py"
    before = preflight.read_text()
    preflight.write_text(before.replace("MIN_MIB, MAX_MIB = 1, 256", "MIN_MIB, MAX_MIB = 1, 4"))
    assert preflight.read_text() != before
    return copy


def said(node: Program) -> str:
    """What it has printed, but for whom it has waited."""
    return re.sub(r"^node \d: waiting .*\n", "", node.output(), flags=re.MULTILINE)


@pytest.mark.slow
def test_two_machines_are_shown_side_by_side_with_what_their_network_carries(quick: Path, tmp_path: Path) -> None:
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
        nodes = [check(two[0], 0, quick, *options), check(two[1], 1, quick, *options, **path)]
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
    assert cifar10.data_status() == f"cifar10: not in {tmp_path}, will be downloaded"
    assert folders.data_status() == f"imagefolder: not in {tmp_path}"
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "train").mkdir()
    assert cifar10.data_status() == f"cifar10 in {tmp_path}"
    assert folders.data_status() == f"imagefolder in {tmp_path}"


LISTING = """\
GPU 0: Imaginary 9000 (UUID: GPU-a-b)
  MIG 1g.5gb Device 0: (UUID: MIG-c)
GPU 1: Other (X)
Unable
"""


def add_nvidia_smi(folder: Path) -> None:
    """It lists two GPUs, one of them with MIG, and a line that is none."""
    folder.mkdir(exist_ok=True)
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\necho '{LISTING}'\n")
    (folder / "nvidia-smi").chmod(0o755)


def test_gpus_are_those_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_info.runpy, "run_path", lambda path: pytest.fail("nvidia-smi has answered"))
    add_nvidia_smi(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_names() == gpu_names(hidden=True) == ["Imaginary 9000", "Other (X)"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert gpu_names(hidden=True) == ["Imaginary 9000", "Other (X)"]
    monkeypatch.undo()
    monkeypatch.setattr(node_info, "DEVICE_FILES", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert gpu_names() == gpu_names(hidden=True) == []


FAKE_TORCH = """
import os, pathlib
pathlib.Path(__file__).with_name("imported").touch()
visible = [value for name, value in os.environ.items() if "VISIBLE_DEVICES" in name] or ["0,1,2"]
visible = visible[0].split(",") if visible[0] else []
def device_count(): return len(visible)
def get_device_name(index): return "Imaginary MI" + visible[index]
"""
COUNT = """
import os, sys; from pathlib import Path
sys.path[0] = os.getcwd()
from ddp.launcher import node_info
node_info.DEVICE_FILES, node_info.GPU_TIMEOUT_S = Path(sys.argv[1]) / "dev", float(sys.argv[2])
os.chdir(sys.argv[1])
print(len(node_info.gpu_names()), node_info.gpu_names(hidden=True))
"""
CUDA, ROCM, CPU = "cuda, hip = '13.0', None", "cuda, hip = None, '6.4'", "cuda, hip = None, None"
THREE = "['Imaginary MI0', 'Imaginary MI1', 'Imaginary MI2']"


def count_without_torch(
    folder: Path, build: str, files: list[str], module: str = FAKE_TORCH, timeout_s: float = 30, **environ: str
) -> Any:
    """Count the GPUs with these device files and this torch, in a process that has not imported the real one."""
    for name in (*(f"dev/{file}" for file in files), "torch/__init__.py", "json.py", "bin/other"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / "json.py").write_text("raise SystemExit('the working directory')")
    (folder / "torch" / "version.py").write_text(build)
    (folder / "torch" / "cuda.py").write_text(module)
    variables = {name: value for name, value in os.environ.items() if "VISIBLE_DEVICES" not in name}
    variables |= {"PATH": str(folder / "bin"), "PYTHONPATH": str(folder / "path"), **environ}
    (folder / "path").mkdir()
    (folder / "path" / "torch").symlink_to(folder / "torch")
    command = [sys.executable, "-c", COUNT, str(folder), str(timeout_s)]
    done = subprocess.run(command, cwd=TEMPLATE, env=variables, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "build, files, environ, shown",
    [
        (ROCM, ["kfd"], {}, f"3 {THREE}"),
        (ROCM, ["kfd"], {"HIP_VISIBLE_DEVICES": "0,2"}, f"2 {THREE}"),
        (ROCM, ["kfd"], {"ROCR_VISIBLE_DEVICES": "1"}, f"1 {THREE}"),
        (CUDA, ["nvidia0", "nvidia1", "nvidiactl"], {}, f"3 {THREE}"),
        (CUDA, ["nvidiactl", "nvidia-uvm", "dri"], {}, None),  # the driver is there, but no GPU
        (CUDA, ["kfd", "dri"], {}, None),  # a laptop with AMD's graphics, and torch from PyPI
        (ROCM, ["dri"], {}, None),
        (CPU, ["nvidia0", "kfd"], {}, None),
    ],
)
def test_without_nvidia_smi_torch_counts_the_gpus_where_it_may_find_some(
    build: str, files: list[str], environ: dict[str, str], shown: str | None, tmp_path: Path
) -> None:
    done = count_without_torch(tmp_path, build, files, **environ)
    assert (done.stdout, done.stderr) == (f"{shown or '0 []'}\n", "")
    assert (tmp_path / "torch" / "imported").exists() == (shown is not None)


@pytest.mark.sample(2)
@pytest.mark.parametrize("visible, count", [("", 0), ("2", 1), ("0,2", 2), ("GPU-a,GPU-b,GPU-c,GPU-d", 4)])
@pytest.mark.parametrize("files", [["nvidia0"], []], ids=["Linux", "WSL"])
def test_torch_counts_the_gpus_that_cuda_visible_devices_leaves(
    visible: str, count: int, files: list[str], tmp_path: Path
) -> None:
    """nvidia-smi ignores the variable. tests/gpu asks a real torch on a machine with GPUs."""
    add_nvidia_smi(tmp_path / "bin")
    done = count_without_torch(tmp_path, CUDA, files, CUDA_VISIBLE_DEVICES=visible)
    assert (done.stdout, done.stderr) == (f"{count} ['Imaginary 9000', 'Other (X)']\n", "")


def test_an_nvidia_smi_that_fails_hides_no_gpus(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    assert count_without_torch(tmp_path, CUDA, ["nvidia0"]).stdout == f"3 {THREE}\n"


@pytest.mark.parametrize("module", ["raise OSError('libcuda')", "import time; time.sleep(60)", "device_count = int"])
def test_gpus_that_torch_cannot_count_are_not_ignored_silently(module: str, tmp_path: Path) -> None:
    done = count_without_torch(tmp_path, CUDA, ["nvidia0"], module, 1 if "sleep" in module else 30)
    assert done.stdout == "0 []\n"
    line = "warning: neither nvidia-smi nor torch lists the GPUs of this machine: set --nproc-per-node\n"
    assert done.stderr == ("" if module == "device_count = int" else 2 * line)


def test_clocks_apart_and_a_full_disk_are_pointed_out(capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"Python": "3", "torch": "2", "NCCL": "-", "GPUs": "none", "dataset": "synthetic", "code": "1"}
    facts |= {"address": "10.0.0.1 eth0"}
    nodes = [
        NodeInfo(0, "one", {}, {**facts, "disk": 100.0, "offset": 0.0}),
        NodeInfo(1, "two", {}, {**facts, "disk": 1.25, "offset": -61.4}),
        NodeInfo(2, "three", {}, {**facts, "offset": 4.9}),
    ]
    print_table(nodes)
    assert capsys.readouterr().out.splitlines()[4:] == [
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
