"""Every way to start a run gives the same ranks; a launcher that is set up by half is refused by name."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from outputs import free_port

from config import parse
from ddp import checkpoint
from ddp.errors import Collateral, EnvironmentFailure, Failure, UsageError
from ddp.group import _choose, join
from ddp.launch import Placement, find_placement, first_host, run_as_rank
from ddp.state import digest
from faults import fault
from processes import Ranks, on_ranks, train

TEMPLATE = Path(__file__).resolve().parent.parent / "{{cookiecutter.project_slug}}"
MAIN = str(TEMPLATE / "main.py")
RUN = ["--dataset", "synthetic", "--max-steps", "3", "--output-dir"]


def run(command: list[Any], **environ: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    return subprocess.run([str(part) for part in command], env=environment, capture_output=True, text=True, timeout=120)


def weights(output: Path) -> str:
    return digest(checkpoint.read(output / "checkpoints" / "step_00000003.pt")["model"])


def by_arguments(init_method: str, output: Path) -> list[subprocess.Popen[str]]:
    return [
        subprocess.Popen(
            [
                sys.executable,
                MAIN,
                *RUN,
                str(output),
                "--rank",
                str(rank),
                "--world-size",
                "2",
                "--init-method",
                init_method,
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights after three steps with two processes."""
    output = tmp_path_factory.mktemp("expected")
    done = run([sys.executable, MAIN, *RUN, output, "--nproc", 2])
    assert done.returncode == 0 and "2 processes (" in done.stdout, done.stdout + done.stderr
    return weights(output)


LAUNCHERS = {
    "launch_node.sh": ["bash", TEMPLATE / "launch_node.sh", "--nproc-per-node", 2, "--"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, MAIN],
    "torch.distributed.launch": [sys.executable, "-m", "torch.distributed.launch", "--nproc-per-node", 2, MAIN],
    "mpirun": ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", 2, sys.executable, MAIN],
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_gives_the_same_two_ranks(launcher: str, expected: str, tmp_path: Path) -> None:
    command = [*LAUNCHERS[launcher], *RUN, tmp_path]
    if shutil.which(str(command[0])) is None:
        assert not os.environ.get("CI"), f"{command[0]} must be there in CI"
        pytest.skip(f"{command[0]} is not installed")
    done = run(command, MASTER_PORT=str(free_port())) if launcher == "mpirun" else run(command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 processes (" in done.stdout
    assert weights(tmp_path) == expected


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_arguments_give_the_same_two_ranks(scheme: str, expected: str, tmp_path: Path) -> None:
    init_method = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"file://{tmp_path}/meeting point"
    processes = by_arguments(init_method, tmp_path)
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert weights(tmp_path) == expected


@pytest.mark.slow
def test_slurm_variables_give_the_same_two_ranks(expected: str, tmp_path: Path) -> None:
    def environment(rank: int) -> dict[str, str]:
        step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NODELIST": "gpu07", "SLURM_NTASKS": "2"}
        return {**os.environ, "OMP_NUM_THREADS": "1", **step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}

    processes = [
        subprocess.Popen([sys.executable, MAIN, *RUN, str(tmp_path)], env=environment(rank), stdout=subprocess.PIPE)
        for rank in (0, 1)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
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
    config = parse([])
    assert find_placement(config, {}) == Placement(0, 1, 0, None, "one process")
    assert find_placement(config, TORCHRUN) == Placement(1, 4, 1, "env://", "torchrun")
    assert find_placement(config, MPI) == Placement(1, 4, 1, "tcp://10.0.0.1:1234", "mpirun")
    slurm = find_placement(config, SLURM)
    assert (slurm.rank, slurm.world_size, slurm.local_rank, slurm.source) == (5, 8, 1, "srun")
    assert slurm.init_method is not None and slurm.init_method.startswith("tcp://gpu03:")
    assert find_placement(config, {**SLURM, **TORCHRUN}).source == "torchrun", "torchrun inside of a Slurm job"
    by_hand = parse(["--rank", "1", "--world-size", "3", "--init-method", "tcp://10.0.0.1:9", "--local-rank", "0"])
    assert find_placement(by_hand, {}) == Placement(1, 3, 0, "tcp://10.0.0.1:9", "arguments")


def test_ranks_of_one_slurm_step_agree_on_a_port_and_other_steps_have_another() -> None:
    ports = {find_placement(parse([]), {**SLURM, "SLURM_PROCID": str(rank)}).init_method for rank in range(8)}
    assert len(ports) == 1
    assert find_placement(parse([]), {**SLURM, "SLURM_STEP_ID": "1"}).init_method not in ports


def test_a_batch_script_of_slurm_is_one_process() -> None:
    """Without srun, SLURM_PROCID is 0 and SLURM_NTASKS that of the whole job: nobody else would come."""
    batch = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"} | {"SLURM_PROCID": "0"}
    assert find_placement(parse([]), batch).world_size == 1


@pytest.mark.parametrize(
    "nodelist, first",
    [("gpu1", "gpu1"), ("gpu[03-07,9],login", "gpu03"), ("a,b", "a"), ("r[1,3]n[2-4]", "r1n"), ("n[7]-ib", "n7-ib")],
)
def test_first_host_of_a_slurm_list(nodelist: str, first: str) -> None:
    assert first_host(nodelist).startswith(first)


@fault(32)
@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_half_of_torchrun_is_refused_by_name(missing: str) -> None:
    environ = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(EnvironmentFailure, match=f"{missing} is missing") as error:
        find_placement(parse([]), environ)
    assert all(f"{name}={value}" in str(error.value) for name, value in environ.items())


@pytest.mark.parametrize("only", ["MASTER_ADDR", "WORLD_SIZE", "LOCAL_RANK"])
def test_a_single_variable_of_torchrun_is_refused(only: str) -> None:
    with pytest.raises(EnvironmentFailure, match="RANK"):
        find_placement(parse([]), {only: TORCHRUN[only]})


@pytest.mark.parametrize("launcher, name", [(MPI, "OMPI_COMM_WORLD_SIZE"), (SLURM, "SLURM_LOCALID")])
def test_half_of_another_launcher_is_refused_by_name(launcher: dict[str, str], name: str) -> None:
    with pytest.raises(EnvironmentFailure, match=f"{name} is missing"):
        find_placement(parse([]), {key: value for key, value in launcher.items() if key != name})


def test_launchers_without_the_rank_are_half_set_too() -> None:
    """Else each of their processes would train alone, and all would say that they are done."""
    for launcher, name in ((MPI, "OMPI_COMM_WORLD_RANK"), (SLURM, "SLURM_PROCID"), (SLURM, "SLURM_STEP_ID")):
        with pytest.raises(EnvironmentFailure, match=f"{name} is missing"):
            find_placement(parse([]), {key: value for key, value in launcher.items() if key != name})


def seats(gpus: int, local_ranks: list[int], visible: list[str | None] | None = None) -> list[dict[str, Any]]:
    """The roll call of one machine."""
    shown = visible or [None] * len(local_ranks)
    return [
        {"host": "gpu1 boot", "local_rank": local_rank, "gpus": gpus, "visible": sees}
        for local_rank, sees in zip(local_ranks, shown, strict=True)
    ]


@fault(30)
def test_the_device_follows_from_the_local_rank() -> None:
    """As far as a machine without a GPU can show it: from what the processes say of theirs."""
    config = parse(["--backend", "nccl"])
    assert [str(_choose(config, seats(4, [0, 1, 2, 3]), rank)[0]) for rank in range(4)] == [
        *("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    ]
    two_machines = [*seats(2, [0, 1]), *({**seat, "host": "gpu2 boot"} for seat in seats(2, [0, 1]))]
    assert str(_choose(config, two_machines, 3)[0]) == "cuda:1", "rank 3 of 2 x 2"
    own = seats(1, [0, 1], ["0", "1"])  # srun --gpus-per-task=1
    assert [str(_choose(config, own, rank)[0]) for rank in (0, 1)] == ["cuda:0", "cuda:0"]
    for wrong in (seats(1, [0, 1]), seats(2, [0, 0]), seats(2, [0, 2]), [*seats(1, [0]), *seats(0, [1])]):
        with pytest.raises(EnvironmentFailure, match=r"gpu1: [12] process"):
            _choose(config, wrong, 0)
    assert _choose(parse(["--backend", "gloo"]), seats(1, [0, 1]), 1) == (torch.device("cuda:0"), "gloo")


def test_a_file_that_an_earlier_run_has_left_is_refused(tmp_path: Path) -> None:
    """Its keys would be taken for those of this run."""
    method = f"file://{tmp_path}/meeting"

    def target(placement: Placement) -> int:
        try:
            with join(parse([]), Placement(placement.rank, 2, placement.rank, method, "")) as group:
                group.gather(None)
                os._exit(0)  # as a kill does, it leaves the file behind
        except EnvironmentFailure as error:
            print(error)
            return error.exit_code

    ranks = Ranks(2, target)
    assert ranks.wait() == [0, 0], ranks.output()
    again = Ranks(2, target)
    assert again.wait() == [3, 3] and "delete a file that an earlier run has left" in again.output()


def test_an_interface_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope")
    output = train(1, "--dataset", "synthetic", "--output-dir", tmp_path, code=3)
    assert output.count("\n") == 1 and "cannot connect to the others by gloo" in output and "nope" in output


def test_contradictions_are_refused() -> None:
    by_hand = ["--rank", "0", "--world-size", "2", "--init-method", "tcp://localhost:1"]
    with pytest.raises(UsageError, match="leave out one of them"):
        find_placement(parse(by_hand), TORCHRUN)
    with pytest.raises(UsageError, match="contradicts the local rank 1 of torchrun"):
        find_placement(parse(["--local-rank", "0"]), TORCHRUN)
    with pytest.raises(UsageError, match="no launcher has set RANK"):
        find_placement(parse(["--local-rank", "0"]), {})
    with pytest.raises(EnvironmentFailure, match="rank 4 of 4"):
        find_placement(parse([]), {**TORCHRUN, "RANK": "4"})
    with pytest.raises(EnvironmentFailure, match="RANK='x' is not a whole number"):
        find_placement(parse([]), {**TORCHRUN, "RANK": "x"})
    with pytest.raises(EnvironmentFailure, match="MASTER_ADDR"):
        find_placement(parse([]), {key: value for key, value in MPI.items() if key != "MASTER_ADDR"})


@pytest.mark.slow
def test_refusals_are_one_line_of_one_process() -> None:
    half = run([sys.executable, MAIN], WORLD_SIZE="2", MASTER_ADDR="localhost")
    assert half.returncode == 3 and half.stdout == ""
    assert half.stderr.count("\n") == 1 and "RANK, MASTER_PORT is missing" in half.stderr
    twice = run([sys.executable, MAIN, "--nproc", 2], **{**TORCHRUN, "RANK": "0"})
    assert twice.returncode == 2 and "leave out --nproc" in twice.stderr
    many = run([sys.executable, MAIN, "--dataset", "synthetic", "--nproc", 2, "--model", "no-such"])
    assert many.returncode == 2 and many.stderr.count("error:") == 1 and "resnet18" in many.stderr


def test_a_launcher_without_local_ranks_gets_them_numbered() -> None:
    """With --rank, nobody says the local rank; all these processes are on one machine."""

    def strip(placement: Placement) -> int:
        with join(parse([]), Placement(placement.rank, placement.world_size, None, placement.init_method, "")) as group:
            return 10 * group.local_world_size + group.local_rank

    ranks = Ranks(3, strip)
    assert ranks.wait() == [30, 31, 32], ranks.output()


@fault(27)
def test_the_same_rank_twice_is_refused() -> None:
    def double(placement: Placement) -> int:
        time.sleep(0.5 * placement.rank)
        try:
            with join(parse(["--timeout", "3"]), Placement(0, 2, 0, placement.init_method, "")):
                return 0
        except Failure as error:
            print(error)
            return error.exit_code

    ranks = Ranks(2, double)
    assert ranks.wait() == [3, 3]
    assert "rank 0 is already at" in ranks.output(1)


def test_an_error_on_rank_0_reaches_every_rank_and_one_of_them_speaks() -> None:
    def fails(group: Any) -> str:
        def action() -> None:
            raise EnvironmentFailure("the disk is full")

        try:
            group.on_main(action)
        except EnvironmentFailure as error:
            return f"{error} {error.on_every_rank}"
        return "nothing"

    assert on_ranks(3, fails) == ["the disk is full True"] * 3
    assert on_ranks(3, lambda group: group.on_main(lambda: group.rank + 7)) == [7, 7, 7]


def test_the_process_group_is_gone_after_success_and_after_failure() -> None:
    import torch.distributed as dist

    def target(placement: Placement) -> int:
        try:
            with join(parse([]), placement):
                assert dist.is_initialized()
                raise KeyError("a bug")
        except (KeyError, Collateral) as error:
            return 40 + dist.is_initialized() + 2 * isinstance(error, Collateral)

    assert sorted(Ranks(2, target).wait()) == [40, 42]


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--nnodes"], "--nnodes: needs a value"),
        (["--nodes", "2"], "--nodes: no such option"),
        (["--nnodes", "two"], "--nnodes: 'two' is not a whole number from 1"),
        (["--nproc-per-node=0"], "--nproc-per-node: '0' is not a whole number from 1"),
        (["--nnodes=2"], "--master-addr: needed"),
        (["--nnodes", "2", "--node-rank", "2", "--master-addr", "x"], "ranks run from 0 to 1"),
        (["--", "--batch-size", "0"], "--batch-size: '0' is not a whole number from 1"),
        (["--", "--bad-option"], "unrecognized arguments: --bad-option"),
    ],
)
def test_launch_node_refuses_before_it_starts_anything(arguments: list[str], says: str) -> None:
    done = run(["bash", TEMPLATE / "launch_node.sh", *arguments])
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1


@fault(32)
@pytest.mark.slow
def test_launch_node_works_from_any_folder_with_spaces_and_stale_variables(tmp_path: Path) -> None:
    project = tmp_path / "my project's"
    shutil.copytree(TEMPLATE, project, ignore=shutil.ignore_patterns("runs", "data", "__pycache__", ".*_cache"))
    command = ["bash", project / "launch_node.sh", "--", *RUN, tmp_path / "out put"]
    done = run(command, PET_NNODES="7", PET_MAX_RESTARTS="3", RANK="3", WORLD_SIZE="9", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 process on" in done.stdout and weights(tmp_path / "out put")


def test_launch_node_is_clean_shell_with_help() -> None:
    script = TEMPLATE / "launch_node.sh"
    checked = subprocess.run(["shellcheck", script], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    helped = run(["bash", script, "--help"])
    assert helped.returncode == 0 and "--master-addr" in helped.stdout


# ---- rank 0 cannot be met -------------------------------------------------------------------------------------------


def refused(rank: int, address: str, timeout: int = 30) -> str:
    """The line with which a rank of two refuses to meet at `address`; fails unless it ends with 3, within seconds."""

    def target(placement: Placement) -> int:
        placement = Placement(rank, 2, rank, f"tcp://{address}", "arguments")

        def meet(config: Any, placement: Placement) -> None:
            with join(config, placement):
                raise AssertionError("they have met")

        return run_as_rank(meet, parse(["--timeout", str(timeout)]), placement)

    begin = time.monotonic()
    ranks = Ranks(1, target)
    assert ranks.wait() == [3], ranks.output()
    assert time.monotonic() - begin < 10
    assert ranks.output().count("\n") == 1, ranks.output()
    return ranks.output()


@fault(25)
def test_who_holds_the_port_of_rank_0_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        line = refused(0, f"127.0.0.1:{taken.getsockname()[1]}")
    assert f"is taken by pid {os.getpid()} (" in line and "choose another port" in line


@pytest.mark.slow
@fault(26)
def test_an_address_that_cannot_be_rank_0s_is_refused_at_once() -> None:
    assert "is no address of this machine" in refused(0, f"192.0.2.1:{free_port()}")
    assert "the name nowhere.invalid is not known here" in refused(1, f"nowhere.invalid:{free_port()}")
    assert "start rank 0, or correct the address" in refused(1, f"127.0.0.1:{free_port()}", timeout=1)


@pytest.mark.slow
@fault(26)
def test_a_rank_that_is_early_waits_for_rank_0() -> None:
    port = free_port()

    def late(placement: Placement) -> int:
        time.sleep(1.5 * (placement.rank == 0))
        with join(parse([]), Placement(placement.rank, 2, placement.rank, f"tcp://127.0.0.1:{port}", "")) as group:
            return int(group.gather(placement.rank) != [0, 1])

    assert Ranks(2, late).wait() == [0, 0]


# ---- --nproc, for real ----------------------------------------------------------------------------------------------


class Spawned:
    """`python main.py --nproc 2`, training for long; its processes by rank."""

    def __init__(self, output: Path, *prefix: str) -> None:
        self.output = output
        options = ["--dataset", "synthetic", "--epochs", "500", "--nproc", "2", "--log-every", "10"]
        self.log = output.with_suffix(".log")
        self.parent = subprocess.Popen(
            [*prefix, sys.executable, MAIN, *options, "--output-dir", str(output)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        end = time.monotonic() + 60
        while len(list(output.glob("checkpoints/step_*.pt"))) < 2:  # so that the first is known to all
            assert time.monotonic() < end and self.parent.poll() is None, self.log.read_text()
            time.sleep(0.05)
        children = Path(f"/proc/{self.parent.pid}/task/{self.parent.pid}/children").read_text().split()
        commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
        self.ranks = sorted(pid for pid, command in commands.items() if b"spawn_main" in command)
        assert len(self.ranks) == 2

    def end(self, timeout: float = 30) -> tuple[int, dict[str, Any]]:
        """Wait for all its processes to end. Returns the exit code and status.json."""
        code = self.parent.wait(timeout)
        end = time.monotonic() + timeout
        while any(Path(f"/proc/{pid}").exists() for pid in self.ranks):
            assert time.monotonic() < end, "a process was left over"
            time.sleep(0.05)
        return code, json.loads((self.output / "status.json").read_text())


@pytest.mark.slow
@fault(1)
def test_nproc_ends_with_8_when_a_process_was_killed_and_corrects_the_status(tmp_path: Path) -> None:
    run = Spawned(tmp_path / "run")
    os.kill(run.ranks[0], signal.SIGKILL)
    code, status = run.end()
    assert code == 8 and status["state"] == "failed" and status["exit_code"] == 8
    (line,) = [line for line in run.log.read_text().splitlines() if "error: " in line]
    assert "rank 0 was lost" in line and "resumable from step" in line and "Traceback" not in run.log.read_text()


@pytest.mark.slow
@fault(1)
def test_a_process_of_nproc_that_is_killed_while_all_start_is_named_alone(tmp_path: Path) -> None:
    command = [sys.executable, MAIN, *RUN, str(tmp_path), "--nproc", "2"]
    parent = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    ranks: list[int] = []
    while len(ranks) < 2:
        found = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        ranks = [int(pid) for pid in found if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        time.sleep(0.05)
    os.kill(max(ranks), signal.SIGKILL)  # the other will wait for it where they meet
    started = time.monotonic()
    _, said = parent.communicate(timeout=60)
    assert parent.returncode == 8, said
    assert time.monotonic() - started < 25, "it need not wait as long as for processes that save"
    assert "rank 1: its process" in said and "rank 0: its process" not in said


@pytest.mark.slow
@fault(9, 12)
def test_processes_of_nproc_save_and_leave_when_their_parent_is_killed(tmp_path: Path) -> None:
    run = Spawned(tmp_path / "run")
    run.parent.kill()
    code, status = run.end()
    assert code == -9 and status["exit_code"] == 8 and status["saved"] == status["step"]
    assert "the launcher is gone: stopped and saved" in status["message"]
    assert "Traceback" not in run.log.read_text()


@pytest.mark.slow
@fault(9, 10)
def test_ctrl_c_twice_ends_nproc_at_once_and_leaves_no_process(tmp_path: Path) -> None:
    """The terminal sends it to the whole foreground group: the parent passes it on, once."""
    run = Spawned(tmp_path / "run")
    os.kill(run.ranks[1], signal.SIGSTOP)  # it will never come to the end of its step
    os.killpg(run.parent.pid, signal.SIGINT)
    time.sleep(1.2)
    assert run.parent.poll() is None
    os.killpg(run.parent.pid, signal.SIGINT)
    code, _ = run.end(5)
    assert code == 128 + signal.SIGINT
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"
    assert "Traceback" not in run.log.read_text() and "left at once" in run.log.read_text()


@pytest.mark.slow
@fault(9)
def test_a_signal_while_nproc_starts_its_processes_is_not_lost(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, MAIN, *RUN, str(tmp_path), "--nproc", "3"], env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    while not any(b"multiprocessing" in _read(Path(f"/proc/{pid}/cmdline")) for pid in children.read_text().split()):
        time.sleep(0.001)
    parent.terminate()
    assert parent.wait(20) == 75


@pytest.mark.slow
def test_a_run_whose_output_nobody_reads_trains_to_its_end(tmp_path: Path) -> None:
    main = f"{sys.executable} {MAIN!r} {' '.join(RUN)} {tmp_path}"
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    closed = subprocess.run(f"exec {main}/closed >&- 2>&-", shell=True, env=environ)
    assert closed.returncode == 0
    left = subprocess.run(f"{main}/left --log-every 1 2>{tmp_path}/errors | head -n 1", shell=True, env=environ)
    assert left.returncode == 0 and (tmp_path / "errors").read_text() == ""
    for run in ("closed", "left"):
        assert json.loads((tmp_path / run / "status.json").read_text())["state"] == "done"


@pytest.mark.slow
@fault(9, 11)
def test_ctrl_c_saves_once_and_sighup_under_nohup_does_nothing(tmp_path: Path) -> None:
    run = Spawned(tmp_path / "run", "nohup")
    os.killpg(run.parent.pid, signal.SIGHUP)
    time.sleep(1)
    assert run.parent.poll() is None
    os.killpg(run.parent.pid, signal.SIGINT)
    code, status = run.end()
    assert code == 75 and status["state"] == "stopped" and "Traceback" not in run.log.read_text()


@pytest.mark.slow
@fault(9, 12)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL])
def test_workers_save_and_leave_whatever_ends_torchrun(number: int, tmp_path: Path) -> None:
    output = tmp_path / "run"
    options = ["--dataset", "synthetic", "--epochs", "500", "--output-dir", str(output)]
    torchrun = ["torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node", "2"]
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(
            [sys.executable, "-m", *torchrun, MAIN, *options],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
        )
    end = time.monotonic() + 60
    while not list(output.glob("checkpoints/step_*.pt")):
        assert time.monotonic() < end and run.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.05)
    run.send_signal(number)
    run.wait(60)
    end = time.monotonic() + 20
    while left := [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(output).encode() in _read(path)]:
        assert time.monotonic() < end, f"left over: {left}"
        time.sleep(0.1)
    status = json.loads((output / "status.json").read_text())
    ending = ("stopped", 75) if number == signal.SIGTERM else ("failed", 8)  # USR1 kills torchrun
    assert (status["state"], status["exit_code"]) == ending and status["saved"] == status["step"]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.slow
@fault(27)
def test_ranks_with_different_code_are_told_which_file_differs(tmp_path: Path) -> None:
    shutil.copytree(TEMPLATE, tmp_path / "copy", ignore=shutil.ignore_patterns("runs", "data", "__pycache__"))
    with (tmp_path / "copy" / "model.py").open("a") as file:
        file.write("# edited\n")
    meet = ["--world-size", "2", "--init-method", f"tcp://127.0.0.1:{free_port()}", "--timeout", "30"]
    runs = [
        subprocess.Popen(
            [sys.executable, main, *RUN, str(tmp_path / "run"), "--rank", str(rank), *meet],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, main in enumerate((MAIN, str(tmp_path / "copy" / "main.py")))
    ]
    outputs = [run.communicate(timeout=60)[0] for run in runs]
    assert [run.returncode for run in runs] == [3, 3]
    assert "the file model.py is" in outputs[0] and "on the same code" in outputs[0]
