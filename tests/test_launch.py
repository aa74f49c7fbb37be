"""Every way to start a run gives the same ranks; an incomplete launcher environment is refused with what is missing."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from outputs import free_port
from project_runs import python
from template_copy import LEAN, TEMPLATE, copy_template, shrink, small_template

import data
import main
from config import Config
from ddp.checkpoint import storage as checkpoint
from ddp.core.errors import PeerFailed, SetupError, UsageError, UserError
from ddp.core.files import hash_source_files, temporary_directory, write_status
from ddp.core.process_exit import tell_launcher
from ddp.core.run_config import ELASTIC_VARIABLE
from ddp.core.signals import LAUNCHER_GONE, StopSignal, is_alive, killed_by, stop_error, stop_signal
from ddp.distributed import process_group, store
from ddp.distributed.failure_monitor import FailureMonitor
from ddp.distributed.process_group import DistContext, _choose_device, init_distributed
from ddp.distributed.rank_env import Launcher, RankEnv, find_rank_env, first_host
from ddp.distributed.store import RankInfo, create_store, exchange_rank_info, identify_gpus
from ddp.distributed.tensors import digest
from ddp.entrypoint import run_main
from ddp.entrypoint.run_main import SpawnSignals, join, run_as_rank
from ddp.launcher.launch_node import LaunchOptions, NodeAgent
from ddp.launcher.node_record import FINAL, LOST, STOPPED, RoundEnd, end_of_run, round_end
from ddp.launcher.node_rendezvous import StoreClient
from ddp.training.output_dir import OutputDir
from faults import fault
from needs import need
from processes import Ranks, on_ranks, train

PROJECT = small_template()
MAIN = str(PROJECT / "main.py")
SMALL_SIZES = {"train": 640, "val": 64, "test": 64}  # those of small_template
ALL = partial(pytest.param, marks=pytest.mark.sample(0))  # a case for --all
RUN = ["--dataset", "synthetic", "--max-steps", "3", "--output-dir"]
EXIT_THREAD = {"x86_64": 60, "aarch64": 93}  # the number of the system call that ends one thread


def run(command: list[Any], **environ: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **LEAN, **environ}
    return subprocess.run([str(part) for part in command], env=environment, capture_output=True, text=True, timeout=300)


def weights(output: Path) -> str:
    return digest(checkpoint.read(output / "checkpoints" / "step_00000003.pt")["model"])


def two_at_once(*calls: Callable[[], str]) -> list[str]:
    """What each prints; two programs that connect to each other."""
    with ThreadPoolExecutor() as pool:
        return [each.result() for each in [pool.submit(call) for call in calls]]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights after three steps with two processes, which are forked."""
    output = tmp_path_factory.mktemp("expected")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "SYNTHETIC_SIZES", SMALL_SIZES)
        train(2, *RUN, output)
    return weights(output)


LAUNCHERS = {
    "--nproc": [sys.executable, MAIN, "--nproc", 2],
    "mpirun": ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", 2, sys.executable, MAIN],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, MAIN],
    "torch.distributed.launch": [sys.executable, "-m", "torch.distributed.launch", "--nproc-per-node", 2, MAIN],
}


@pytest.mark.slow
@pytest.mark.sample(0)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_gives_the_same_two_ranks(launcher: str, expected: str, tmp_path: Path) -> None:
    command = [*LAUNCHERS[launcher], *RUN, tmp_path]
    need(str(command[0]))
    done = run(command, MASTER_PORT=str(free_port())) if launcher == "mpirun" else run(command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"2 processes ({'torchrun' if 'torch' in launcher else launcher})" in done.stdout
    assert weights(tmp_path) == expected


@pytest.mark.slow
@fault(32)
def test_launch_node_gives_them_too_from_a_folder_with_spaces_in_spite_of_stale_variables(
    expected: str, tmp_path: Path
) -> None:
    project = shrink(copy_template(tmp_path / "my project's"), **SMALL_SIZES)
    command = ["bash", project / "launch_node.sh", "--nproc-per-node", 2, "--", *RUN, tmp_path / "out put"]
    done = run(command, PET_NNODES="7", PET_MAX_RESTARTS="3", RANK="3", WORLD_SIZE="9", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 processes (torchrun)" in done.stdout and weights(tmp_path / "out put") == expected


@pytest.mark.sample(0)
@pytest.mark.slow
@fault(1)
def test_mpirun_leaves_enough_time_to_record_that_a_process_was_lost(tmp_path: Path) -> None:
    """It signals the other ranks at once, and kills them 2 s later: here more, since this machine may be busy."""
    need("mpirun")
    options = ["--dataset", "synthetic", "--epochs", 9999, "--checkpoint-every", 20, "--output-dir", tmp_path / "run"]
    command = [str(part) for part in (*LAUNCHERS["mpirun"], *options)]
    environment = {**os.environ, **LEAN, "MASTER_PORT": str(free_port()), "OMPI_MCA_odls_base_sigkill_timeout": "60"}
    with (tmp_path / "log").open("w") as log:
        launcher = psutil.Popen(command, env=environment, stdout=log, stderr=log)
    end = time.monotonic() + 120
    while not list(tmp_path.glob("run/checkpoints/step_*.pt")):
        assert time.monotonic() < end and launcher.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.05)
    (victim,) = [each for each in launcher.children() if each.environ().get("OMPI_COMM_WORLD_RANK") == "1"]
    victim.kill()
    assert launcher.wait(180) != 0
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 8) and "rank 1 was lost" in status["message"]
    assert "2 processes (mpirun)" in (tmp_path / "log").read_text()


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_arguments_give_the_same_two_ranks(scheme: str, expected: str, tmp_path: Path) -> None:
    init_method = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"file://{tmp_path}/rendezvous file"
    words = [MAIN, *RUN, tmp_path, "--world-size", 2, "--init-method", init_method, "--rank"]
    first, _ = two_at_once(*(partial(python, PROJECT, *words, rank) for rank in (0, 1)))
    assert "2 processes (arguments)" in first
    assert weights(tmp_path) == expected


@pytest.mark.slow
def test_slurm_variables_give_the_same_two_ranks(expected: str, tmp_path: Path) -> None:
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NODELIST": "gpu07", "SLURM_NTASKS": "2"}
    places = [{**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in (0, 1)]
    first, _ = two_at_once(*(partial(python, PROJECT, MAIN, *RUN, tmp_path, **place) for place in places))
    assert "2 processes (srun)" in first
    assert weights(tmp_path) == expected


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "LOCAL_RANK": "1"}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "1234",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_NODELIST": "gpu[03-04,9]",
}


def test_each_launcher_is_recognised_by_its_variables() -> None:
    config = Config.parse([])
    assert find_rank_env(config, {}) == RankEnv(0, 1, 0, None, Launcher.NONE)
    assert find_rank_env(config, TORCHRUN) == RankEnv(1, 4, 1, "env://", Launcher.TORCHRUN)
    assert find_rank_env(config, MPI) == RankEnv(1, 4, 1, "tcp://10.0.0.1:1234", Launcher.MPIRUN)
    slurm = find_rank_env(config, SLURM)
    assert (slurm.rank, slurm.world_size, slurm.local_rank, slurm.launcher) == (5, 8, 1, Launcher.SRUN)
    assert slurm.init_method is not None and slurm.init_method.startswith("tcp://gpu03:")
    inside_slurm = find_rank_env(config, {**SLURM, **TORCHRUN})
    assert inside_slurm.launcher == Launcher.TORCHRUN, "torchrun inside of a Slurm job"
    by_hand = ["--rank", "1", "--world-size", "3", "--init-method", "tcp://10.0.0.1:9", "--local-rank", "0"]
    assert find_rank_env(Config.parse(by_hand), {}) == RankEnv(1, 3, 0, "tcp://10.0.0.1:9", Launcher.ARGUMENTS)


def test_the_names_of_the_launchers_in_messages() -> None:
    names = {launcher.name: launcher.value for launcher in Launcher}
    assert names == {
        "NONE": "one process",
        "ARGUMENTS": "arguments",
        "TORCHRUN": "torchrun",
        "SRUN": "srun",
        "MPIRUN": "mpirun",
        "NPROC": "--nproc",
    }


def test_ranks_of_one_slurm_step_agree_on_a_port_and_other_steps_have_another() -> None:
    ports = {find_rank_env(Config.parse([]), {**SLURM, "SLURM_PROCID": str(rank)}).init_method for rank in range(8)}
    assert len(ports) == 1
    assert find_rank_env(Config.parse([]), {**SLURM, "SLURM_STEP_ID": "1"}).init_method not in ports


def test_a_batch_script_of_slurm_is_one_process() -> None:
    """Without srun, SLURM_PROCID is 0 and SLURM_NTASKS that of the whole job, but there are no other processes."""
    batch = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"} | {"SLURM_PROCID": "0"}
    assert find_rank_env(Config.parse([]), batch).world_size == 1
    # A shell of `srun --pty bash` is a step of one task, in which one may start several runs, also with --nproc.
    assert find_rank_env(Config.parse([]), {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}) == RankEnv()


@pytest.mark.parametrize("launcher", [MPI, SLURM])
@pytest.mark.parametrize("address", ["::1", "[::1]"])
def test_an_ipv6_address_of_rank_0(launcher: dict[str, str], address: str) -> None:
    env = find_rank_env(Config.parse([]), {**launcher, "MASTER_ADDR": address, "MASTER_PORT": "1234"})
    assert env.init_method == "tcp://[::1]:1234" and env.endpoint == ("::1", 1234)


def test_a_name_with_several_addresses_is_used_by_the_one_that_responds(monkeypatch: pytest.MonkeyPatch) -> None:
    """TCPStore would begin again with the first one, whose packets may vanish. Here it knows none of the name."""
    store, known = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **named: known("127.0.0.1", *rest, **named))
    client = StoreClient("node-0.invalid", store.port)
    client.set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL; if memory ran out"), (40, "signal 40")])
def test_a_signal_without_a_name_is_named_by_its_number(number: int, name: str) -> None:
    assert killed_by(-number).startswith(f"killed by {name}")


def test_a_path_that_is_no_text_reaches_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "a/b/c/error.json"))
    (tmp_path / "a/b/c").mkdir(parents=True)
    agent = NodeAgent(LaunchOptions(), Config.parse([]), [])
    agent.folder, path = tmp_path, os.fsdecode(b"/runs/\xff")
    tell_launcher("output_dir", path)
    assert agent._read("output_dir") == [path]


def test_without_a_place_for_temporary_files_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    with pytest.raises(SetupError, match="set TMPDIR to a directory in which one can write"):
        temporary_directory("ddp-")


@pytest.mark.parametrize(
    "nodelist, first",
    [("gpu1", "gpu1"), ("gpu[03-07,9],login", "gpu03"), ("a,b", "a"), ("r[1,3]n[2-4]", "r1n"), ("n[7]-ib", "n7-ib")],
)
def test_first_host_of_a_slurm_list(nodelist: str, first: str) -> None:
    assert first_host(nodelist).startswith(first)


@fault(32)
@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_an_incomplete_environment_of_torchrun_is_refused_with_what_is_missing(missing: str) -> None:
    environ = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(
        SetupError, match=f"environment of torchrun is incomplete: .* set, {missing} missing; "
    ) as error:
        find_rank_env(Config.parse([]), environ)
    assert all(f"{name}={value}" in str(error.value) for name, value in environ.items())


@pytest.mark.parametrize("only", ["MASTER_ADDR", "WORLD_SIZE", "LOCAL_RANK"])
def test_a_single_variable_of_torchrun_is_refused(only: str) -> None:
    with pytest.raises(SetupError, match="RANK"):
        find_rank_env(Config.parse([]), {only: TORCHRUN[only]})


@pytest.mark.parametrize("launcher, name", [(MPI, "OMPI_COMM_WORLD_SIZE"), (SLURM, "SLURM_LOCALID")])
def test_an_incomplete_environment_of_another_launcher_is_refused(launcher: dict[str, str], name: str) -> None:
    with pytest.raises(SetupError, match=f", {name} missing; "):
        find_rank_env(Config.parse([]), {key: value for key, value in launcher.items() if key != name})


def test_an_environment_without_the_rank_is_incomplete_as_well() -> None:
    """Otherwise each process would train alone, and all would report success."""
    for launcher, name in ((MPI, "OMPI_COMM_WORLD_RANK"), (SLURM, "SLURM_PROCID"), (SLURM, "SLURM_STEP_ID")):
        with pytest.raises(SetupError, match=f", {name} missing; "):
            find_rank_env(Config.parse([]), {key: value for key, value in launcher.items() if key != name})


def rank_infos(gpus: int | list[list[str]], local_ranks: list[int], host: str = "gpu1") -> list[RankInfo]:
    """What the ranks of one machine tell the others. All see the same number of GPUs, or each sees its own."""
    sees = gpus if isinstance(gpus, list) else [[f"UUID {index}" for index in range(gpus)]] * len(local_ranks)
    return [
        RankInfo(host, f"{host} boot", local_rank, seen, address=None)
        for local_rank, seen in zip(local_ranks, sees, strict=True)
    ]


@fault(30)
def test_the_device_follows_from_the_local_rank() -> None:
    """A machine without a GPU can show it only with made-up RankInfos."""
    config = Config.parse(["--backend", "nccl"])
    assert [str(_choose_device(config, rank_infos(4, [0, 1, 2, 3]), rank)[0]) for rank in range(4)] == [
        *("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    ]
    two_machines = [*rank_infos(2, [0, 1]), *rank_infos(2, [0, 1], host="gpu2")]
    assert str(_choose_device(config, two_machines, 3)[0]) == "cuda:1", "rank 3 of 2 x 2"
    own = rank_infos([["UUID 0"], ["UUID 1"]], [0, 1])  # srun --gpus-per-task=1
    assert [str(_choose_device(config, own, rank)[0]) for rank in (0, 1)] == ["cuda:0", "cuda:0"]
    too_few = (
        rank_infos(1, [0, 1]),
        rank_infos(2, [0, 0]),
        rank_infos(2, [0, 2]),
        rank_infos(1, [0]) + rank_infos(0, [1]),
        rank_infos([["UUID 0"], ["UUID 0"]], [0, 1]),
        rank_infos([["UUID 0"], ["UUID 1", "UUID 0"]], [0, 1]),
    )
    with pytest.raises(SetupError, match="--backend mpi trains on CPUs here: add --device cpu"):
        config.backend = "mpi"
        _choose_device(config, own, 0)
    config.backend = "nccl"
    for wrong in too_few:
        with pytest.raises(SetupError, match=r"gpu1: [12] process.*, [012] GPU"):
            _choose_device(config, wrong, 0)
    shared = _choose_device(Config.parse(["--backend", "gloo"]), rank_infos(1, [0, 1]), 1)
    assert shared == (torch.device("cuda:0"), "gloo")


@fault(30)
@pytest.mark.sample(6)
@pytest.mark.parametrize(
    "variable, visible, uuids, codes",
    [
        ("CUDA", ("0", "0"), (["a"], ["b"]), [0, 0]),  # srun --gpus-per-task=1: a cgroup for each task
        ("CUDA", ("0", "GPU-a"), (["a"], ["a"]), [3, 3]),
        ("CUDA", ("0", "1,0"), (["a"], ["b", "a"]), [3, 3]),
        ("CUDA", ("1,0", "1,0"), (["b", "a"], ["b", "a"]), [0, 1]),
        ("CUDA", ("0", "MIG-b"), (["a"], ["b"]), [0, 0]),
        ("HIP", ("0", "1"), (["a"], ["b"]), [0, 0]),
        ("HIP", ("0", "1"), (["58580000-0000-0000-0000-000000000000"],) * 2, [0, 0]),  # "XX": it has no UUID
        ("HIP", ("0", "0"), (["58580000-0000-0000-0000-000000000000"],) * 2, [3, 3]),
        ("HIP", ("0,1", "0,1"), (["a", "a"],) * 2, [0, 1]),  # partitions of one GPU
        ("ROCR", ("0", "1"), ([None], [None]), [0, 0]),
        ("ROCR", ("0", "0"), ([None], [None]), [3, 3]),
    ],
)
def test_ranks_tell_gpus_apart_by_their_uuids(
    variable: str, visible: tuple[str, str], uuids: tuple[list[str | None], ...], codes: list[int]
) -> None:
    """The exit code is 3 where two ranks would share one GPU, otherwise the index of the rank's GPU."""

    def target(env: RankEnv) -> int:
        own = uuids[env.rank]
        os.environ[f"{variable}_VISIBLE_DEVICES"] = visible[env.rank]
        cuda: Any = torch.cuda
        cuda.init, cuda.device_count = (lambda: None), (lambda: len(own))
        cuda.get_device_properties = lambda index: SimpleNamespace(**({"uuid": own[index]} if own[index] else {}))
        store = create_store(env, 30)
        infos = exchange_rank_info(store, env, FailureMonitor(store, env, 30), use_gpus=True)
        try:
            return _choose_device(Config.parse(["--backend", "nccl"]), infos, env.rank)[0].index
        except SetupError as error:
            assert "2 processes, " in str(error) and "start one process per GPU" in str(error)
            return error.exit_code

    ranks = Ranks(2, target)
    assert ranks.wait() == codes, ranks.output()


def test_gpus_that_cannot_be_used_or_are_not_wanted_do_not_stop_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> None:
        raise RuntimeError("CUDA driver initialization failed")

    monkeypatch.setattr(torch.cuda, "init", broken)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert identify_gpus() == ["0 of ", "1 of "]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "init", lambda: pytest.fail("there is no GPU"))
    assert identify_gpus() == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: pytest.fail("--device cpu"))
    store = torch.distributed.HashStore()
    env = RankEnv()
    assert exchange_rank_info(store, env, FailureMonitor(store, env, 5), use_gpus=False)[0].gpus == []


def test_the_file_of_an_earlier_run_is_refused(tmp_path: Path) -> None:
    """Its keys would be mistaken for those of this run."""
    method = f"file://{tmp_path}/rendezvous"

    def target(rank_env: RankEnv) -> int:
        try:
            with init_distributed(Config.parse([]), replace(rank_env, world_size=2, init_method=method)) as ctx:
                ctx.gather(None)
                os._exit(0)  # like a kill, this does not delete the file
        except SetupError as error:
            print(error)
            return error.exit_code

    ranks = Ranks(2, target)
    assert ranks.wait() == [0, 0], ranks.output()
    again = Ranks(2, target)
    assert again.wait() == [3, 3] and "delete a file that an earlier run has left" in again.output()


def test_a_missing_interface_is_reported_with_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope")
    output = train(1, "--dataset", "synthetic", "--output-dir", tmp_path, code=3)
    assert output.count("\n") == 1 and "cannot connect to the others over gloo" in output and "nope" in output


def test_contradictions_are_refused() -> None:
    by_hand = ["--rank", "0", "--world-size", "2", "--init-method", "tcp://localhost:1"]
    with pytest.raises(UsageError, match="a launcher has set RANK: remove one of them"):
        find_rank_env(Config.parse(by_hand), TORCHRUN)
    with pytest.raises(UsageError, match="contradicts the local rank 1 of torchrun"):
        find_rank_env(Config.parse(["--local-rank", "0"]), TORCHRUN)
    with pytest.raises(UsageError, match="no launcher has set RANK"):
        find_rank_env(Config.parse(["--local-rank", "0"]), {})
    with pytest.raises(SetupError, match="rank 4 of 4"):
        find_rank_env(Config.parse([]), {**TORCHRUN, "RANK": "4"})
    with pytest.raises(SetupError, match="RANK='x' must be an integer >= 0"):
        find_rank_env(Config.parse([]), {**TORCHRUN, "RANK": "x"})
    with pytest.raises(SetupError, match="MASTER_ADDR"):
        find_rank_env(Config.parse([]), {key: value for key, value in MPI.items() if key != "MASTER_ADDR"})


@pytest.mark.slow
def test_a_refusal_is_one_line_of_one_process() -> None:
    incomplete = python(TEMPLATE, MAIN, code=3, WORLD_SIZE="2", MASTER_ADDR="localhost")
    assert incomplete.count("\n") == 1 and "RANK, MASTER_PORT missing" in incomplete
    twice = python(TEMPLATE, MAIN, "--nproc", 2, code=2, **{**TORCHRUN, "RANK": "0"})
    assert twice.count("\n") == 1 and "torchrun did already: remove --nproc" in twice


def test_ranks_without_local_ranks_are_numbered_on_each_machine() -> None:
    """--rank sets no local rank. These processes are all on one machine."""

    def local_numbers(rank_env: RankEnv) -> int:
        with init_distributed(Config.parse([]), replace(rank_env, local_rank=None)) as ctx:
            return 10 * ctx.local_world_size + ctx.local_rank

    ranks = Ranks(3, local_numbers)
    assert ranks.wait() == [30, 31, 32], ranks.output()


@fault(27)
def test_the_same_rank_twice_is_refused() -> None:
    def double(rank_env: RankEnv) -> int:
        time.sleep(0.5 * rank_env.rank)
        try:
            with init_distributed(Config.parse(["--timeout", "3"]), replace(rank_env, rank=0, local_rank=0)):
                return 0
        except UserError as error:
            print(error)
            return error.exit_code

    ranks = Ranks(2, double)
    assert ranks.wait() == [3, 3]
    assert "rank 0 has already joined at" in ranks.output()


@fault(27)
def test_a_second_rank_0_does_not_disturb_a_run_that_trains(tmp_path: Path) -> None:
    began, refused = tmp_path / "began", tmp_path / "refused"

    def train(config: Config, env: RankEnv) -> None:
        with init_distributed(config, env) as ctx:
            began.touch()
            wait_for(refused)
            assert ctx.gather(ctx.monitor.other_failed()) == [None, None]

    def join(rank_env: RankEnv) -> int:
        if rank_env.rank < 2:
            return run_as_rank(train, Config.parse([]), replace(rank_env, world_size=2))
        wait_for(began)
        code = run_as_rank(train, Config.parse([]), replace(rank_env, rank=0, local_rank=0, world_size=2))
        refused.touch()
        return code

    ranks = Ranks(3, join)
    assert ranks.wait() == [0, 0, 3], ranks.output()
    assert "rank 0 has already joined at" in ranks.output(2) and not ranks.output(0) + ranks.output(1)


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("absent", "joined", "missing"), [((2,), 3, "rank 2"), ((1, 3), 2, "ranks 1 and 3")], ids=["one", "two"]
)
def test_rank_0_names_the_ranks_that_did_not_join(absent: tuple[int, ...], joined: int, missing: str) -> None:
    def some_join(rank_env: RankEnv) -> int:
        if rank_env.rank in absent:
            return 0
        try:
            with init_distributed(Config.parse(["--timeout", "4"]), rank_env):
                return 0
        except UserError as error:
            print(error)
            return error.exit_code

    ranks = Ranks(4, some_join)
    assert ranks.wait() == [0 if rank in absent else 3 for rank in range(4)], ranks.output()
    said = ranks.output(0)
    # The rank whose time ends first tells the others.
    assert re.match(rf"(rank 0 .* because rank \d failed: )?only {joined} of 4 processes joined at file://", said)
    assert said.count("\n") == 1
    assert f"within 4 s (--timeout); missing: {missing}; start all of them" in said


def test_an_error_on_rank_0_reaches_every_rank_and_only_one_prints_it() -> None:
    def fails(ctx: DistContext) -> str:
        def action() -> None:
            raise SetupError("the disk is full")

        try:
            ctx.on_main(action)
        except SetupError as error:
            return f"{error} {error.on_every_rank}"
        return "nothing"

    assert on_ranks(3, fails) == ["the disk is full True"] * 3
    assert on_ranks(3, lambda ctx: ctx.on_main(lambda: ctx.rank + 7)) == [7, 7, 7]


def test_an_accelerator_that_is_not_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user of a Mac would otherwise wonder why the training is slow."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))

    def target(device: str, rank_env: RankEnv) -> int:
        def nothing(config: Config, env: RankEnv) -> None:
            with init_distributed(config, env):
                pass

        return run_as_rank(nothing, Config.parse(["--device", device]), rank_env)

    for device, times in (("auto", 1), ("cpu", 0)):
        ranks = Ranks(2, partial(target, device))
        assert ranks.wait() == [0, 0]
        line = "warning: the mps device of this machine is not used, because DDP needs"
        assert ranks.output().count(line) == times


GLOO = (
    "[Gloo] Rank 0 is connected to 0 peer ranks. Expected number of connected peer ranks is : 1",
    "[Gloo] Rank 0 is NOT connected to: [1]",
)


@pytest.mark.parametrize(("version", "shown"), [("2.10.0+cu128", ["another"]), ("2.11.0", [*GLOO, "another"])])
def test_what_an_older_gloo_prints_about_its_groups_does_not_reach_the_console(
    version: str, shown: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It prints to descriptor 1, without Python, on each rank. What other threads print there, or an error, remains."""
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(RuntimeError, match="no peer"), store.quiet_gloo():
        os.write(1, "".join(f"{line}\n" for line in (*GLOO, "another")).encode())
        raise RuntimeError("no peer")
    os.write(1, b"later\n")
    assert capfd.readouterr().out.splitlines() == [*shown, "later"]


def test_the_process_group_is_destroyed_after_success_and_after_failure() -> None:
    import torch.distributed as dist

    def target(rank_env: RankEnv) -> int:
        try:
            with init_distributed(Config.parse([]), rank_env):
                assert dist.is_initialized()
                raise KeyError("a bug")
        except (KeyError, PeerFailed) as error:
            return 40 + dist.is_initialized() + 2 * isinstance(error, PeerFailed)

    assert sorted(Ranks(2, target).wait()) == [40, 42]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--nnodes"], "--nnodes: expected one argument"),
        (
            ["--nodes", "2"],
            "unrecognized arguments: --nodes 2 (did you mean --nnodes?); put options of main.py after --",
        ),
        (["--nnodes", "two"], "--nnodes: 'two' must be an integer >= 1, or MIN:MAX, such as 2:4"),
        (["--nnodes", "3:2"], "--nnodes: '3:2' must be an integer >= 1, or MIN:MAX, such as 2:4"),
        (["--nnodes", "2:3", "--node-rank=3", "--master-addr", "x"], "with --nnodes 2:3, ranks run from 0 to 2"),
        (["--nnodes", "2:3", "--master-addr=x", "--", "--strict-resume"], "refuses what --nnodes 2:3 asks for"),
        (["--nproc-per-node=0"], "--nproc-per-node: '0' must be an integer >= 1"),
        (["--nnodes=2"], "--master-addr: needed"),
        (["--nnodes", "2", "--node-rank", "2", "--master-addr", "x"], "ranks run from 0 to 1"),
        (["--", "--batch-size", "0"], "--batch-size: '0' must be an integer >= 1"),
        (["--", "--bad-option"], "unrecognized arguments: --bad-option"),
        (["--", "--epoch", "2"], "unrecognized arguments: --epoch 2 (did you mean --epochs?); see --help"),
    ],
)
def test_launch_node_refuses_before_it_starts_anything(arguments: list[str], says: str) -> None:
    done = run(["bash", TEMPLATE / "launch_node.sh", *arguments])
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1


def test_launch_node_is_clean_shell_with_help() -> None:
    script = TEMPLATE / "launch_node.sh"
    checked = subprocess.run(["shellcheck", script], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    helped = run(["bash", script, "--help"])
    assert helped.returncode == 0 and "--master-addr" in helped.stdout


def test_launch_node_finds_its_project_through_links(tmp_path: Path) -> None:
    (tmp_path / "a b" / "c").mkdir(parents=True)
    (tmp_path / "a b" / "first").symlink_to(TEMPLATE / "launch_node.sh")
    (tmp_path / "a b" / "c" / "second").symlink_to("../first")
    (tmp_path / "third").symlink_to("a b/c/second")
    (tmp_path / "folder").symlink_to("a b/c")
    for link in ("a b/first", "a b/c/second", "third", "folder/second", "folder/../first"):
        for path in (tmp_path / link, link):
            command, variables = ["bash", path, "--nnodes", "two"], {**os.environ, "CDPATH": "."}
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=variables)
            assert done.returncode == 2 and done.stderr.startswith("error: --nnodes: "), done.stderr


def test_a_shell_that_is_not_bash_is_told_what_to_type() -> None:
    script = "launch_node.sh"
    done = run(["bash", "--posix", TEMPLATE / script, "--nnodes", "two"])
    assert done.returncode == 2 and "error: --nnodes: " in done.stderr
    need("dash")
    done = run(["dash", TEMPLATE / script, "--nnodes", "2"])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: this script needs bash: type ./{script} ... or bash {script} ...\n"


# ---- rank 0 cannot be reached ---------------------------------------------------------------------------------------


def connect(rank: int, address: str, timeout: int, _: RankEnv) -> int:
    """Be one of two ranks whose rank 0 is at `address`."""

    def main(config: Any, rank_env: RankEnv) -> None:
        with init_distributed(config, rank_env):
            raise AssertionError("they are connected")

    env = RankEnv(rank, 2, rank, f"tcp://{address}", Launcher.ARGUMENTS)
    return run_as_rank(main, Config.parse(["--timeout", str(timeout)]), env)


def refusal(rank: int, address: str, timeout: int = 90) -> str:
    """The line with which one of two ranks refuses `address`. Fails unless it exits with 3 within --timeout."""
    ranks = Ranks(1, partial(connect, rank, address, timeout))
    assert ranks.wait(timeout) == [3], ranks.output()  # it does not wait for --timeout
    assert ranks.output().count("\n") == 1, ranks.output()
    return ranks.output()


@fault(25)
def test_the_process_that_holds_the_port_of_rank_0_is_named() -> None:
    """In a process of its own: this one would share the socket with the rank, which is forked."""
    listen = "s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); time.sleep(60)"
    command = [sys.executable, "-c", f"import socket, time; {listen}", "a server"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        line = refusal(0, f"127.0.0.1:{int(server.stdout.readline())}")
        server.kill()
    assert f"is taken by pid {server.pid} (python" in line and "choose another port" in line


@pytest.mark.slow
@fault(26)
def test_an_address_that_rank_0_cannot_have_is_refused_at_once() -> None:
    assert "is not an address of this machine, where rank 0 runs" in refusal(0, f"192.0.2.1:{free_port()}")
    assert "this machine cannot resolve the name nowhere.invalid" in refusal(1, f"nowhere.invalid:{free_port()}")
    nobody = f"127.0.0.1:{free_port()}"
    ranks = Ranks(1, partial(connect, 1, nobody, 1))
    assert ranks.wait() == [3] and "start rank 0, or correct the address" in ranks.output(), ranks.output()


@pytest.mark.slow
@fault(26)
def test_a_rank_that_starts_early_waits_for_rank_0() -> None:
    port = free_port()

    def late(rank_env: RankEnv) -> int:
        time.sleep(1.5 * (rank_env.rank == 0))
        with init_distributed(Config.parse([]), replace(rank_env, init_method=f"tcp://127.0.0.1:{port}")) as ctx:
            return int(ctx.gather(rank_env.rank) != [0, 1])

    assert Ranks(2, late).wait() == [0, 0]


# ---- --nproc --------------------------------------------------------------------------------------------------------


class Spawned:
    """A long training of `main.py --nproc 2`, and its processes by rank. They are forked, because torch is loaded."""

    def __init__(self, output: Path, hangup: Any = signal.SIG_DFL) -> None:
        self.output = output
        options = ["--dataset", "synthetic", "--epochs", "100000", "--log-every", "10", "--output-dir", str(output)]

        def nproc(rank_env: RankEnv) -> int:
            signal.signal(signal.SIGHUP, hangup)
            run_main.mp.spawn = partial(run_main.mp.start_processes, start_method="fork")
            run_main.resource_tracker.ensure_running = lambda: None
            return run_main.spawn(main.main, Config.parse(options), 2)

        self.started = Ranks(1, nproc)
        (self.parent,) = self.started.pids  # which leads a group of processes, as in a terminal
        self.until_it_saves_again()
        self.until_it_saves_again()  # all ranks know of the first one
        children = Path(f"/proc/{self.parent}/task/{self.parent}/children").read_text()
        self.ranks = sorted(int(pid) for pid in children.split())
        assert len(self.ranks) == 2

    def until_it_saves_again(self) -> None:
        saved = self.newest()
        self.started.until(lambda: self.newest() != saved)

    def newest(self) -> str:
        return max((path.name for path in self.output.glob("checkpoints/step_*.pt")), default="")

    def end(self) -> tuple[int, dict[str, Any]]:
        """Wait until all its processes have exited. Returns the exit code and status.json."""
        (code,) = self.started.wait()
        self.started.until(lambda: not any(is_alive(pid) for pid in self.ranks))
        return code, json.loads((self.output / "status.json").read_text())

    def log(self) -> str:
        return self.started.output()


@pytest.mark.slow
@fault(1)
def test_nproc_exits_with_8_if_a_process_was_killed_and_corrects_the_status(small: None, tmp_path: Path) -> None:
    run = Spawned(tmp_path / "run")
    os.kill(run.ranks[0], signal.SIGKILL)
    code, status = run.end()
    assert code == 8 and status["state"] == "failed" and status["exit_code"] == 8
    (line,) = [line for line in run.log().splitlines() if "error: " in line]
    assert "rank 0 was lost" in line and "resumable from step" in line and "Traceback" not in run.log()


def started_ranks(parent: subprocess.Popen[str]) -> list[int]:
    """Process ids of the two ranks of a `main.py --nproc 2`, as soon as both exist."""
    ranks: list[int] = []
    while len(ranks) < 2:
        assert parent.poll() is None, "it has ended"
        time.sleep(0.02)
        with suppress(psutil.Error):  # a short-lived child, such as gcc of a library that looks for its own files
            children = psutil.Process(parent.pid).children()
            ranks = [child.pid for child in children if "spawn_main" in str(child.cmdline())]
    return ranks


@pytest.mark.slow
@pytest.mark.sample(0)
@fault(1)
def test_only_the_process_of_nproc_that_was_killed_during_the_start_is_named(tmp_path: Path) -> None:
    command = [sys.executable, MAIN, *RUN, str(tmp_path), "--nproc", "2"]
    parent = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **LEAN})
    os.kill(max(started_ranks(parent)), signal.SIGKILL)  # the other one waits for it in the rendezvous
    _, stderr = parent.communicate(timeout=300)  # less than --timeout
    assert parent.returncode == 8, stderr
    assert "rank 1: its process" in stderr and "rank 0: its process" not in stderr


@fault(12)
@pytest.mark.skipif(platform.machine() not in EXIT_THREAD, reason="the number of the system call is not known")
def test_a_launcher_whose_other_threads_still_exit_counts_as_gone(tmp_path: Path) -> None:
    """The kernel signals the children when the main thread exits; getppid changes when the last thread has exited."""

    def rank() -> None:
        stop_signal.listen(os.getppid())
        stop_signal.defer_to_step_end = True
        (tmp_path / "ready").touch()
        while stop_signal.reason is None:
            time.sleep(0.05)
        (tmp_path / "reason").write_text(f"{stop_signal.reason} {os.getppid()}")

    def exit_last() -> None:
        while not (tmp_path / "reason").exists():
            time.sleep(0.05)
        os._exit(0)

    def launcher(rank_env: RankEnv) -> int:
        multiprocessing.get_context("fork").Process(target=rank).start()
        while not (tmp_path / "ready").exists():
            time.sleep(0.05)
        threading.Thread(target=exit_last).start()
        return ctypes.CDLL(None).syscall(EXIT_THREAD[platform.machine()], 0)

    launchers = Ranks(1, launcher)
    assert launchers.wait() == [0]
    assert (tmp_path / "reason").read_text() == f"{LAUNCHER_GONE} {launchers.pids[0]}"


def spawned(*targets: Callable[[], Any]) -> torch.multiprocessing.ProcessContext:
    """Processes as --nproc has them."""
    processes = [multiprocessing.get_context("fork").Process(target=target) for target in targets]
    for process in processes:
        process.start()
    return torch.multiprocessing.ProcessContext(processes, ["/no such file"] * len(processes))


@fault(1)
def test_a_process_that_does_not_handle_signals_yet_is_not_reported_as_killed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One that still imports torch when --nproc asks it to stop, since another one was killed."""
    monkeypatch.setattr(run_main, "SPAWN_GRACE_S", 0.1)
    context = spawned(partial(time.sleep, 60), partial(time.sleep, 60))
    os.kill(context.pids()[1], signal.SIGKILL)
    assert join(context, SpawnSignals()) == 8
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("rank ")]
    assert len(lines) == 1 and re.match(r"rank 1: its process \d+ was killed by SIGKILL", lines[0])


@fault(1)
@pytest.mark.parametrize("count", [1, 2])
def test_nproc_exits_with_8_if_all_its_processes_were_killed(count: int) -> None:
    """As launch_node.sh does: no rank is left to report it."""
    context = spawned(*[partial(time.sleep, 60)] * count)
    for pid in context.pids():
        os.kill(pid, signal.SIGKILL)
    assert join(context, SpawnSignals()) == 8


@fault(1)
def test_a_killed_rank_of_nproc_is_no_stop_although_the_others_stop() -> None:
    """They were asked to, because it was killed."""
    context = spawned(partial(time.sleep, 60), lambda: time.sleep(1) or os._exit(75))
    os.kill(context.pids()[0], signal.SIGKILL)
    assert join(context, SpawnSignals()) == 8


@pytest.mark.sample(1, "a signal while --nproc starts")
@fault(9)
@pytest.mark.slow
def test_ctrl_c_while_the_ranks_of_nproc_import_torch_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "main.py", "--nproc", "2", "--dataset", "synthetic", "--output-dir", str(tmp_path)]
    about: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=TEMPLATE, start_new_session=True, **about) as run:
        started_ranks(run)
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does, to the ranks as well
        assert run.communicate() == ("stopped on request before training began: nothing to save\n", None)
    assert run.returncode == 75


@fault(12)
@pytest.mark.parametrize("by_torchrun", [True, False])
def test_only_torchrun_must_stay_alive(by_torchrun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a shell in which its variables were set by hand."""
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in {**variables, **({"TORCHELASTIC_RUN_ID": "none"} if by_torchrun else {})}.items():
        monkeypatch.setenv(name, value)
    parents: list[int | None] = []
    as_rank = lambda main, config, env, parent: parents.append(parent) or 0  # noqa: E731
    monkeypatch.setattr(run_main, "run_as_rank", as_rank)
    assert run_main.run(main.main, Config.parse([])) == 0
    assert parents == [os.getppid() if by_torchrun else None]


GONE, SAVED, PIDS = "a process was lost", {"error.json": 75}, {"pid": "4000000"}
ENDS: list[tuple[bool, bool, list[dict[str, Any]], RoundEnd]] = [
    # whether a process was killed, whether a stop was requested, the files of each worker, what follows
    (True, True, [{"done": ""}, {"done": ""}], RoundEnd(0)),
    (True, False, [{}, SAVED], RoundEnd(8, GONE, LOST)),
    (True, False, [{}, {}], RoundEnd(8, GONE, LOST)),
    (True, True, [{}, SAVED], RoundEnd(75, "rank 1")),
    (False, False, [{}, {"error.json": 8}], RoundEnd(8, "rank 1", LOST)),
    (False, True, [{"error.json": 8}, SAVED], RoundEnd(8, "rank 0")),
    (False, False, [{"error.json": 6}, {"saved": "7"}], RoundEnd(6, "rank 0", saved_step=7)),
    (False, False, [SAVED, SAVED], RoundEnd(75, "rank 0", STOPPED)),
    (False, True, [SAVED, SAVED], RoundEnd(75, "rank 0")),
    (True, True, [PIDS], RoundEnd(75, "stopped before training began: nothing to save", reported=False)),
    (True, True, [PIDS, PIDS], RoundEnd(8, "the processes were killed before they had stopped", reported=False)),
    (False, False, [PIDS, PIDS], RoundEnd(1, "a process failed", LOST, reported=False)),
]


@fault(1, 9, 12)
@pytest.mark.parametrize(("lost", "requested", "workers", "expected"), ENDS)
def test_what_the_files_of_the_workers_say_about_their_end(
    lost: bool, requested: bool, workers: list[dict[str, Any]], expected: RoundEnd
) -> None:
    files: dict[str, list[str]] = {name: [] for name in ("pid", "saved", "done", "error.json")}
    for rank, written in enumerate(workers):
        for name, content in written.items():
            info = {"timestamp": str(rank), "cause": True, "saved": None}
            error = {"message": f"rank {rank}", "errorCode": content, "extraInfo": info}
            files[name].append(json.dumps({"message": error}) if name == "error.json" else content)
    assert round_end(files, 2, requested, lost) == expected


ERROR, ASKED, DONE = RoundEnd(4), RoundEnd(75, "asked"), RoundEnd(0)
KILLED, SAVES = RoundEnd(8, GONE, LOST), RoundEnd(75, "saved", STOPPED)


@fault(1, 9)
@pytest.mark.parametrize(
    ("ends", "complete", "expected"),
    [
        ([None, None], True, None),  # the start of a run
        ([KILLED, None], True, None),
        ([KILLED, KILLED], True, None),
        ([KILLED, ERROR], False, ERROR),
        ([ASKED, ERROR], True, ERROR),
        ([DONE, ERROR], True, ERROR),
        ([SAVES, ASKED], False, ASKED),
        ([SAVES, SAVES], True, SAVES),
        ([SAVES], False, None),  # the other node may have lost a process: torchrun stops the rest
        ([SAVES, KILLED], True, None),
        ([SAVES, None], True, None),
    ],
)
def test_what_follows_from_the_ends_of_all_nodes(
    ends: list[RoundEnd | None], complete: bool, expected: RoundEnd | None
) -> None:
    """No restart after an error that would occur again, or a stop that somebody has asked for."""
    assert RoundEnd(0).outcome == FINAL
    assert end_of_run(ends, complete) == expected


def test_the_processes_of_a_machine_share_its_cores_unless_the_user_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "available_cores", lambda: 6)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")  # torch has read it when it was imported
    assert on_ranks(2, lambda ctx: torch.get_num_threads()) == [torch.get_num_threads()] * 2
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert on_ranks(2, lambda ctx: torch.get_num_threads()) == [3, 3]


def test_a_node_waits_longer_for_others_that_notice_late_that_a_run_has_ended(tmp_path: Path) -> None:
    """At a restart, and if this node was restarted itself: --timeout, and a minute."""
    options = LaunchOptions(nnodes="2", master_addr="gpu1", start_grace=30)
    agent = NodeAgent(options, Config.parse(["--timeout", "100", "--output-dir", str(tmp_path)]), [])
    found = []
    for state, restart in (("done", False), ("running", False), ("failed", True)):
        write_status(tmp_path, state=state)
        found.append(agent.grace(restart))
    assert found == [30, 160, 160]


@pytest.mark.parametrize(("processes", "passes", "expected"), [(32, 1, 1), (24, 1, 1), (16, 1, 2), (24, 4, 5)])
def test_fewer_nodes_take_more_passes_to_keep_the_global_batch(
    processes: int, passes: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 32 processes on all nodes."""
    monkeypatch.setenv(ELASTIC_VARIABLE, "32")
    config = Config.parse([f"--grad-accum-steps={passes}", "--device=cpu"])

    config.output_dir = str(tmp_path)

    def show(config: Config, env: RankEnv) -> None:
        OutputDir(config).write_config()
        print(config.grad_accum_steps, flush=True)

    ranks = Ranks(1, lambda env: run_as_rank(show, config, RankEnv(0, processes)))
    assert ranks.wait() == [0] and ranks.output() == f"{expected}\n"
    options = json.loads((tmp_path / "config.json").read_text())["options"]
    assert options["grad_accum_steps"] == passes, "a run that repeats it with --config would multiply them again"


def test_a_file_whose_name_is_no_text_does_not_disturb_the_record_of_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """git prints such a name as it is, if core.quotePath is false."""
    for words in (["init", "--quiet"], ["config", "core.quotePath", "false"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).touch()
    monkeypatch.setattr("ddp.training.output_dir.PROJECT_DIR", tmp_path)
    OutputDir(Config(output_dir=str(tmp_path))).write_config()
    assert json.loads((tmp_path / "config.json").read_text())["git_changed"]


@pytest.mark.slow
@fault(9, 11, 12)
def test_processes_of_nproc_save_and_exit_if_their_parent_is_killed_and_not_for_a_hangup_under_nohup(
    small: None, tmp_path: Path
) -> None:
    run = Spawned(tmp_path / "run", signal.SIG_IGN)
    os.killpg(run.parent, signal.SIGHUP)
    for pid in run.ranks:
        os.kill(pid, signal.SIGHUP)
    run.until_it_saves_again()
    run.until_it_saves_again()  # it was not the checkpoint of a stop
    os.kill(run.parent, signal.SIGKILL)
    code, status = run.end()
    assert code == -9 and status["exit_code"] == 8 and status["saved"] == status["step"]
    assert "the launcher is gone: stopped and saved" in status["message"]
    assert "Traceback" not in run.log()


@pytest.mark.slow
@fault(9, 10)
def test_ctrl_c_twice_ends_nproc_at_once_with_all_its_processes(small: None, tmp_path: Path) -> None:
    """The terminal signals the whole foreground group; the parent forwards the signal once."""
    run = Spawned(tmp_path / "run")
    os.kill(run.ranks[1], signal.SIGSTOP)  # it never finishes its step
    os.killpg(run.parent, signal.SIGINT)
    time.sleep(1.2)
    assert is_alive(run.parent)
    os.killpg(run.parent, signal.SIGINT)
    code, status = run.end()  # long before --timeout, for which a rank would wait for the one that is stopped
    assert code == 128 + signal.SIGINT and status["state"] == "failed"
    assert "Traceback" not in run.log() and "quit immediately on a second signal" in run.log()


@pytest.mark.slow
@fault(9)
def test_ctrl_c_saves_once(small: None, tmp_path: Path) -> None:
    run = Spawned(tmp_path / "run")
    os.killpg(run.parent, signal.SIGINT)
    code, status = run.end()
    assert code == 75 and status["state"] == "stopped" and "Traceback" not in run.log()


@pytest.mark.sample(1, "a signal while --nproc starts")
@pytest.mark.slow
@fault(9)
def test_a_signal_while_nproc_starts_its_processes_is_not_lost(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, MAIN, *RUN, str(tmp_path), "--nproc", "2"], env={**os.environ, **LEAN})
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    while not any(
        b"multiprocessing.spawn" in _read(Path(f"/proc/{pid}/cmdline")) for pid in children.read_text().split()
    ):
        time.sleep(0.001)
    parent.terminate()
    assert parent.wait(120) == 75


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("output", ["closed", "broken"])
def test_a_run_with_closed_output_trains_to_its_end(output: str, tmp_path: Path) -> None:
    main = f"{sys.executable} {MAIN!r} {' '.join(RUN)} {tmp_path}/run"
    command = f"exec {main} --nproc 2 >&- 2>&-"
    if output == "broken":
        command = f"{main} --log-every 1 2>{tmp_path}/errors | head -n 1"
    done = subprocess.run(command, shell=True, env={**os.environ, **LEAN})
    assert done.returncode == 0
    assert output == "closed" or (tmp_path / "errors").read_text() == ""
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "done"


@pytest.mark.slow
@fault(9, 12)
@pytest.mark.parametrize("number", [signal.SIGKILL, ALL(signal.SIGTERM), ALL(signal.SIGUSR1)])
def test_workers_save_and_exit_for_any_end_of_torchrun(number: int, tmp_path: Path) -> None:
    output = tmp_path / "run"
    options = ["--dataset", "synthetic", "--epochs", "100000", "--output-dir", str(output)]
    torchrun = ["torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node", "2"]
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(
            [sys.executable, "-m", *torchrun, MAIN, *options],
            env={**os.environ, **LEAN},
            stdout=log,
            stderr=log,
        )
    end = time.monotonic() + 180
    while not list(output.glob("checkpoints/step_*.pt")):
        assert time.monotonic() < end and run.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.05)
    run.send_signal(number)
    run.wait(180)
    end = time.monotonic() + 120
    while left := [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(output).encode() in _read(path)]:
        assert time.monotonic() < end, f"still running: {left}"
        time.sleep(0.1)
    status = json.loads((output / "status.json").read_text())
    expected = ("stopped", 75) if number == signal.SIGTERM else ("failed", 8)  # USR1 kills torchrun
    assert (status["state"], status["exit_code"]) == expected and status["saved"] == status["step"]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.slow
@fault(27)
def test_ranks_with_different_code_learn_which_file_differs(tmp_path: Path) -> None:
    copy = shutil.copytree(small_template(), tmp_path / "copy")
    with (copy / "model.py").open("a") as file:
        file.write("# edited\n")
    shared = ["--world-size", 2, "--init-method", f"tcp://127.0.0.1:{free_port()}", "--timeout", 60, "--rank"]
    words = [*RUN, tmp_path / "run", *shared]
    mains = enumerate((MAIN, copy / "main.py"))
    outputs = two_at_once(*(partial(python, PROJECT, main, *words, rank, code=3) for rank, main in mains))
    assert "the file model.py is" in outputs[0] and "with the same options, code and data" in outputs[0]


@fault(42)
@pytest.mark.parametrize("has, lacks", [(0, 1), (1, 0), (2, 0)])
def test_a_file_that_one_rank_alone_has_is_named_with_that_rank(has: int, lacks: int, tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / str(rank) / "ddp" / "core").mkdir(parents=True)
        for name in ("launch_node.sh", "ddp/__init__.py", *(["ddp/core/extra.py"] if rank == has else [])):
            (tmp_path / str(rank) / name).touch()
        (tmp_path / str(rank) / ".#main.py").symlink_to("me@host.1:2")  # the lock of an editor

    def compare(config: Config, env: RankEnv) -> None:
        with init_distributed(config, env) as ctx:
            ctx.check_same(hash_source_files(tmp_path / str(env.rank)))

    ranks = Ranks(3, lambda env: run_as_rank(compare, Config.parse([]), env))
    assert ranks.wait() == [3, 3, 3], ranks.output()
    remedy = "start all ranks with the same options, code and data"
    expected = f"error: the file ddp/core/extra.py exists on rank {has} but not on rank {lacks}: {remedy}\n"
    assert ranks.output() == expected


def test_launch_node_sh_names_the_interpreter_that_lacks_the_packages(template: Path, tmp_path: Path) -> None:
    """The project was not installed, or its environment is not active."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    python = tmp_path / "bare" / "bin" / "python"
    environment = {**os.environ, "PYTHON": str(python)}
    done = subprocess.run([template / "launch_node.sh"], capture_output=True, text=True, env=environment)
    assert done.returncode == 3 and done.stdout == ""
    assert done.stderr.startswith(f"error: {python} has no package torch and psutil: run pip install -e . with it")
    assert done.stderr.count("\n") == 1


def test_asking_whether_a_child_is_alive_leaves_its_exit_code_to_popen() -> None:
    """A zombie counts as gone: one that a container's first process inherits is never waited for."""
    child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(9)"])
    assert is_alive(os.getpid())
    end = time.monotonic() + 60
    while is_alive(child.pid) and time.monotonic() < end:
        time.sleep(0.01)
    assert not is_alive(child.pid)
    assert child.poll() == 9
    assert not is_alive(child.pid), "it no longer exists"


def test_a_stop_that_the_program_asks_for_keeps_its_reason_in_words() -> None:
    requests = StopSignal()
    requests.mark_requested(signal.SIGTERM, "the budget is spent")
    requests.mark_requested(signal.SIGINT, "too late")
    assert (requests.reason, requests.text) == (signal.SIGTERM, "the budget is spent")
    stopped = stop_error(requests.reason, "and saved, at step 3", requests.text)
    assert (str(stopped), stopped.exit_code) == ("stopped on request (the budget is spent) and saved, at step 3", 75)
    assert str(stop_error(signal.SIGTERM, "and saved, at step 3")) == "stopped on request and saved, at step 3"
    gone = stop_error(LAUNCHER_GONE, "and saved, at step 3", "not asked")
    assert (str(gone), gone.exit_code) == ("the launcher is gone: stopped and saved, at step 3", 8)
