"""Training on several machines equals training on one machine, even if machines and links fail meanwhile.

Machines are network namespaces; everything else is real. test_nodes.py tests how the launchers of the machines connect
and restart, with a stub in place of the training.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from outputs import lines, weights_and_momentum
from template_copy import copy_template, shrink, slow_down

import data
from config import Config
from ddp.core.files import PROJECT_DIR
from faults import fault
from machines import Machine, Program, machines, require
from model import ToyModel
from processes import train

IPV6 = "fd00:77::"
ADDRESSES = ["gpu1", "[fd00:77::1]"]  # of gpu1, for each of two machines without IPv4
EPOCHS, PER_EPOCH = 2, 38
STEPS = EPOCHS * PER_EPOCH
SIZES = {"train": 1_230, "val": 200, "test": 500}
# With a constant learning rate, a run of one epoch is the beginning of one of two.
OPTIONS = ["--dataset", "synthetic", "--device", "cpu", "--warmup-epochs", 0, "--lr-schedule", "constant"]
OPTIONS += ["--batch-size", 16, "--timeout", 60, "--checkpoint-every", 10, "--log-every", 10]
OPTIONS += ["--epochs", EPOCHS]
NOTICE = ["--timeout", 10]  # a lost machine is noticed this soon


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy whose steps take as long as STEP_S says. Its path contains a space."""
    require()
    return slow_down(shrink(copy_template(tmp_path_factory.mktemp("a copy") / "project"), **SIZES))


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that is killed with -9 leaves its temporary directory; this one is deleted.

    It is not in tmp_path, which may be too long for the sockets of DataLoader workers.
    """
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield


@pytest.fixture(scope="module")
def uninterrupted(project: Path) -> str:
    """The hash of model and optimizer after a run of two forked processes."""
    output = project.parent / "uninterrupted"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "SYNTHETIC_SIZES", SIZES)
        train(2, *OPTIONS, "--output-dir", output)
    return trained(output)


def start(machine: Machine, rank: int, project: Path, *options: Any, **environ: str) -> Program:
    """Start launch_node.sh on one of two machines, with one process."""
    variables = {"NNODES": "2", "NODE_RANK": str(rank), "NPROC_PER_NODE": "1", "MASTER_ADDR": "10.77.0.1", **environ}
    launcher = ["bash", project / "launch_node.sh", "--", *OPTIONS, *options]
    return machine.start(*launcher, PYTHONDONTWRITEBYTECODE="1", **variables)


def assert_done(machines: list[Machine], nodes: list[Program], timeout: float = 240) -> None:
    """All exit with 0 and leave no process."""
    assert [node.wait(timeout) for node in nodes] == [0] * len(nodes), "\n".join(node.output() for node in nodes)
    assert [machine.running() for machine in machines] == [[] for _ in machines]


def trained(output: Path) -> str:
    """The hash of model and optimizer in the last checkpoint. Each step must have been logged once."""
    ends = list(range(PER_EPOCH, STEPS + 1, PER_EPOCH))
    assert [line["step"] for line in lines(output, "train")] == sorted({*range(10, STEPS + 1, 10), *ends})
    assert [line["step"] for line in lines(output, "val")] == ends
    return weights_and_momentum(output / "checkpoints" / f"step_{STEPS:08d}.pt")


def environment(pid: int) -> bytes:
    """What a process was started with; empty if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# ---- how they are connected -----------------------------------------------------------------------------------------

CHOOSE = """
from ddp.distributed import process_group
from ddp.distributed.store import RankInfo
own, other = (RankInfo(host, host, 0, [], address) for host, address in (("gpu1", "10.77.0.1"), ("gpu2", "10.77.0.2")))
print("chosen:", process_group._choose_interface([own, other], own))
"""


@pytest.mark.parametrize(
    ("added", "name", "chosen"), [("first", "10.77.0.1", None), ("first", "127.0.0.1", "eth0"), ("last", "", "eth0")]
)
def test_gloo_uses_the_address_on_the_route_to_the_others(added: str, name: str, chosen: str | None) -> None:
    """Of an interface it takes the first address. Only the host's name can lead it to another one."""
    with machines(1) as (machine,):
        inside = ["ip", "-n", machine.namespace, "address"]
        own = [["delete", f"{machine.address}/24"], ["add", f"{machine.address}/24"]] if added == "first" else []
        for what, address in (*own[:1], ("add", "192.168.7.1/24"), *own[1:]):
            subprocess.run([*inside, what, address, "dev", "eth0"], check=True)
        (Path("/etc/netns") / machine.namespace / "hosts").write_text(f"127.0.0.1 localhost\n{name} gpu1\n")
        program = machine.start(sys.executable, "-c", CHOOSE, PYTHONPATH=str(PROJECT_DIR))
        assert program.wait() == 0 and f"chosen: {chosen}\n" in program.output(), program.output()
        warned = "gloo uses 192.168.7.1 of eth0, and the route to the others has 10.77.0.1" in program.output()
        assert warned == (name == "127.0.0.1"), program.output()


# ---- without failures -----------------------------------------------------------------------------------------------


@fault(18, 28)
@pytest.mark.slow
@pytest.mark.sample(0)
def test_three_machines_train_although_one_is_30_s_late_and_count_each_test_sample_once(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--max-steps", 20, "--output-dir", tmp_path / "out"]
    with machines(3) as three:
        late = time.monotonic() + 30
        by_name = {"NNODES": "3", "MASTER_ADDR": "gpu1"}  # on gpu1 itself, it means 127.0.0.1, as on many machines
        nodes = [start(three[rank], rank, project, *options, **by_name) for rank in (0, 1)]
        nodes[0].until("node 0: waiting for node 2 at port 29500 (up to 300 s)")
        time.sleep(max(0, late - time.monotonic()))
        nodes.append(start(three[2], 2, project, *options, **by_name))
        assert_done(three, nodes)
    assert "3 processes (torchrun) on cpu, gloo" in nodes[0].output()
    line = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[-1])
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", SIZES)
    assert (line["split"], line["count"], 500 % 3) == ("test", 500, 2)
    assert line["accuracy"] == count_correct(tmp_path / "out" / "best.pt") / 500


def count_correct(path: Path) -> int:
    """The number of test samples that the model in this file classifies correctly, in one batch."""
    test_set = data.load_datasets(Config.parse(["--dataset", "synthetic"])).test
    model = ToyModel()
    model.load_state_dict(torch.load(path, weights_only=True)["model"])
    images, targets = test_set.prepare(test_set.__getitems__(list(range(len(test_set)))))
    with torch.no_grad():
        return int((model.eval()(images).argmax(1) == targets).sum())


@fault(28)
@pytest.mark.slow
@pytest.mark.sample(0)
def test_two_machines_without_ipv4_give_the_same_weights_as_two_processes_on_one(
    uninterrupted: str, project: Path, tmp_path: Path
) -> None:
    """On gpu1 itself, the name gpu1 means ::1, as on many machines. The other tests have IPv4."""
    options = ["--output-dir", tmp_path / "out"]
    with machines(2, IPV6) as two:
        nodes = [start(two[rank], rank, project, *options, MASTER_ADDR=ADDRESSES[rank]) for rank in (0, 1)]
        assert_done(two, nodes)
    assert "2 processes (torchrun) on cpu, gloo" in nodes[0].output()
    connected = "node 1: all nodes are connected; 1 process here; node 0 prints the progress"
    assert nodes[1].output().splitlines()[-2:] == [connected, "node 1: done"]
    assert trained(tmp_path / "out") == uninterrupted


# ---- with failures --------------------------------------------------------------------------------------------------


@pytest.mark.sample(0)
@fault(1, 22, 28, 29)
@pytest.mark.slow
def test_machines_without_a_shared_disk_resume_once_the_link_is_up_again_and_once_machine_0_is_back(
    uninterrupted: str, project: Path, tmp_path: Path
) -> None:
    """Each machine has its own disk at the same path, with the project. They have no IPv4 either."""
    disk = tmp_path / "disk"
    with machines(2, IPV6) as two:
        disks = own_disks(two, disk, project)
        sources = files(disks[0])
        options = ["--output-dir", disk / "out", *NOTICE]

        def command(rank: int) -> Program:
            return start(two[rank], rank, disk / "project", *options, MASTER_ADDR=ADDRESSES[rank], STEP_S="0.1")

        nodes = [command(0), command(1)]
        nodes[0].until("step 20/", 120)
        two[1].link("down")
        for node in nodes:
            node.until("starting again from step ", 120)
        two[1].link("up")
        assert "resuming from" in nodes[0].until("step 40/", 120)
        two[0].kill()
        nodes[0] = command(0)
        assert_done(two, nodes)
    assert "resuming from" in nodes[0].output() and "2 processes (torchrun) on cpu, gloo" in nodes[0].output()
    assert nodes[1].output().count("starting again from step ") == 2
    assert "; resumable from " in nodes[0].output() + nodes[1].output()  # a step, or the newest checkpoint
    assert not any("start all ranks again" in node.output() for node in nodes), "it starts again by itself"
    assert trained(disks[0] / "out") == uninterrupted
    new = set(files(disks[1])) - set(sources)
    assert not [name for name in new if not name.startswith("out/logs/")], new
    assert list(disk.iterdir()) == [], "the machines have shared this directory"


@fault(1, 22, 29)
@pytest.mark.slow
@pytest.mark.sample(0)
def test_machines_without_a_shared_disk_resume_from_rank_0s_disk_even_after_a_power_cut(
    uninterrupted: str, project: Path, tmp_path: Path
) -> None:
    """The second command trains more epochs."""
    disk = tmp_path / "disk"
    with machines(2) as two:
        disks = own_disks(two, disk, project)

        def command(rank: int, epochs: int) -> Program:
            options = ["--epochs", epochs, "--output-dir", disk / "out", *NOTICE]
            return start(two[rank], rank, disk / "project", *options, STEP_S="0.1")

        assert_done(two, [command(0, 1), command(1, 1)])
        nodes = [command(0, EPOCHS), command(1, EPOCHS)]
        assert "resuming from" in nodes[0].until("step 50/", 120)
        two[1].link("down")  # so that the packets that the kernel sends for killed processes are lost
        two[1].kill()
        nodes[0].until("starting again from step ", 120)
        two[1].link("up")
        nodes[1] = command(1, EPOCHS)
        assert_done(two, nodes)
    assert nodes[0].output().count("resuming from") == 2
    assert trained(disks[0] / "out") == uninterrupted


def own_disks(machines: list[Machine], path: Path, project: Path) -> list[Path]:
    """Give each machine a disk at this path, with the project; returns where the test finds them."""
    disks = [machine.own_folder(path) for machine in machines]
    for own in disks:
        shutil.copytree(project, own / "project")
    return disks


COUNTED = """

class Uses(nn.Module):  # one weight per sample, from which each use of the sample subtracts the learning rate / batch
    def __init__(self):
        super().__init__()
        self.uses = nn.Parameter(torch.zeros(2400, 2))

    def forward(self, numbers):
        time.sleep(0.5 if os.path.exists(__file__ + ".slow") else 0.03)
        return self.uses[numbers]

def build_model(config, train_set): return Uses()

def compute_loss(outputs, targets, config): return outputs.mean(0).sum()
"""
NUMBERS = """

class Numbers(torch.utils.data.Dataset):
    classes = ["a", "b"]

    def __len__(self): return 2400

    def __getitem__(self, index): return torch.tensor(index), 0

def load_datasets(config): return Datasets(train=Numbers())
"""


@pytest.mark.slow
@pytest.mark.sample(1, "launchers that are lost")
@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.sample(0))])
def test_machines_continue_without_one_which_joins_again_when_it_is_back(
    project: Path, tmp_path: Path, count: int
) -> None:
    """Each sample of an epoch is used once, which the weights count. With --scale-lr each use counts the same."""
    copy = shutil.copytree(project, tmp_path / "project")
    for name, code in (("model.py", COUNTED), ("data.py", NUMBERS)):
        (copy / name).write_text(f"import os\nimport time\n{(copy / name).read_text()}{code}")
    launcher = copy / "ddp" / "launcher" / "launch_node.py"
    launcher.write_text(launcher.read_text().replace("NOTICE_GRACE_S = 60.0", "NOTICE_GRACE_S = 2.0"))
    options = ["--epochs", 3, "--output-dir", tmp_path / "out", "--scale-lr", "--lr", 64, "--momentum", 0]
    options += ["--weight-decay", 0, "--timeout", 8, "--checkpoint-every", 10, "--log-every", 5]
    variables = {"NNODES": f"{count - 1}:{count}", "START_GRACE": "10"}
    with machines(count) as made:
        nodes = [start(machine, rank, copy, *options, **variables) for rank, machine in enumerate(made)]
        nodes[0].until("step  25/", 120)
        made[1].link("up" if count == 2 else "down")  # if it is up, its kernel tells that its processes are gone
        made[1].kill()
        printed = nodes[0].until("step  60/", 120)
        (copy / "model.py.slow").touch()  # so that the run lasts until the machine is back
        made[1].link("up")
        nodes[1] = start(made[1], 1, copy, *options, **variables)
        nodes[1].until("node 1: a run is in progress at 10.77.0.1: joining when it restarts")
        assert nodes[0].process.poll() is None
        other = made[2 if count == 3 else 0]
        worker = next(pid for pid in other.running() if b"\0LOCAL_RANK=0" in environment(pid))
        (copy / "model.py.slow").unlink()
        os.kill(worker, signal.SIGKILL)
        assert_done(made, nodes)
    absent = f"node 0: node 1 did not join within 10 s: training with {count - 1} of {count} nodes"
    assert f"{absent}; a node that comes back joins at the next restart" in printed
    assert f"node 0: node 1 joined again: {count} of {count} nodes" in nodes[0].output()
    if count == 3:  # with two, the one that is left takes two passes for each step
        assert "2 processes (torchrun) on cpu" in printed
        change = "used once, but the results are not bit for bit those of 3; the global batch was 48, is 32, the"
        assert f"{change} learning rate was 48, is 32" in printed
        assert "node 2: nodes 0 and 2 are connected; 1 process here" in nodes[2].output()
        assert "the global batch was 32, is 48, the learning rate was 32, is 48" in nodes[0].output()
    newest = max((tmp_path / "out" / "checkpoints").glob("step_*.pt"))
    uses = -torch.load(newest, weights_only=True)["model"]["uses"][:, 0].round().int()
    dropped = (uses == 2).count_nonzero()  # at the end of an epoch that changed its global batch in the middle
    assert uses.max() == 3 and uses.min() >= 2 and dropped < 48


BLOCKED = """
import ctypes, os, time
_loss, _calls = compute_loss, []
def compute_loss(outputs, targets, config):
    _calls.append(1)
    if len(_calls) == 15:
        if os.environ["RANK"] == "1":
            time.sleep(1)
            open(os.path.join(os.path.dirname(__file__), "killed"), "w").close()
            os.kill(os.getpid(), 9)
        mutex, libc = ctypes.create_string_buffer(256), ctypes.CDLL(None)
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)  # never returns, whatever signal arrives
    return _loss(outputs, targets, config)
"""


@pytest.mark.sample(0)
@fault(38)
@pytest.mark.slow
def test_a_process_that_is_killed_while_the_other_machine_waits_for_its_gpu_ends_both(
    project: Path, tmp_path: Path
) -> None:
    """Over NCCL nothing breaks on the other machine. Here a C call that never returns takes the place of the GPU."""
    copy = shutil.copytree(project, tmp_path / "project")
    (copy / "model.py").write_text(f"{(copy / 'model.py').read_text()}\n\n{BLOCKED}")
    with machines(2) as two:
        options = ["--output-dir", tmp_path / "out", "--timeout", 120]
        nodes = [start(machine, rank, copy, *options, MAX_RESTARTS="0") for rank, machine in enumerate(two)]
        codes = [node.wait(180) for node in nodes]
        output = "\n".join(node.output() for node in nodes)
        assert codes == [8, 8], output
        assert time.time() - (copy / "killed").stat().st_mtime < 60, "it waits for --timeout"
        assert [machine.running() for machine in two] == [[], []]
    assert "rank 0 is exiting because rank 1 was lost; resumable from step 10" in output
    assert json.loads((tmp_path / "out/status.json").read_text())["exit_code"] == 8


# ---- without launch_node.sh -----------------------------------------------------------------------------------------


@fault(28)
@pytest.mark.slow
def test_main_py_alone_finds_the_interface_that_leads_to_the_other_machine(
    uninterrupted: str, project: Path, tmp_path: Path
) -> None:
    """As srun and mpirun start it. gloo alone would use the interface of the machine's own name: the loopback."""
    options = [*OPTIONS, "--world-size", 2, "--init-method", "tcp://gpu1:29500"]
    main = [sys.executable, project / "main.py", *options, "--output-dir", tmp_path / "out", "--rank"]
    with machines(2) as two:
        assert_done(two, [machine.start(*main, rank, PYTHONDONTWRITEBYTECODE="1") for rank, machine in enumerate(two)])
    assert trained(tmp_path / "out") == uninterrupted
