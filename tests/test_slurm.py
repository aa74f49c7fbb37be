"""launch/slurm.sbatch, and `srun python main.py`, on a real Slurm of two nodes.

What the batch script does is shown with a stub in the place of launch_node.sh, which starts at once.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from outputs import lines, weights_and_momentum
from template_copy import TEMPLATE, copy_template, shrink, slow_down

import data
from faults import fault
from processes import train
from slurm import Job, Slurm, slurm
from test_nodes import running

SCRIPT = "launch/slurm.sbatch"
STUB = """
import os, signal, sys, time
rank, turn = (int(os.environ.get(name, 0)) for name in ("SLURM_NODEID", "SLURM_RESTART_COUNT"))
asked = []
def say(text): print(f"node {rank} in turn {turn} {text}", flush=True)
def ask(number, frame):
    asked.append(number)
    say(f"got {signal.Signals(number).name}")
def train(saving=0.5):
    while not asked: time.sleep(0.02)
    time.sleep(saving)
    say("has saved")
    sys.exit(75)
for number in (signal.SIGTERM, signal.SIGUSR1): signal.signal(number, ask)
say(f"has {sys.argv[1:]}")
exec(os.environ["DO"])
"""
Submit = Callable[..., Job]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    with slurm() as made:
        yield made


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project of which the batch script is all that is real."""
    folder = tmp_path_factory.mktemp("slurm") / "my project"
    (folder / "launch").mkdir(parents=True)
    shutil.copy(TEMPLATE / SCRIPT, folder / SCRIPT)
    (folder / "stub.py").write_text(STUB)
    (folder / "launch_node.sh").write_text(f'exec "{sys.executable}" stub.py "$@"\n')
    return folder


@pytest.fixture(scope="module")
def limited(cluster: Slurm, stub: Path) -> Job:
    """A job whose time limit is near: within half a minute, and while other tests run, Slurm notices."""
    do = "train(0.5 + 3 * rank) if turn == 0 else None"
    return cluster.submit(stub, "--time=1", "--cpus-per-task=1", SCRIPT, DO=do)


@pytest.fixture
def submit(cluster: Slurm, stub: Path, limited: Job) -> Iterator[Submit]:
    """Submits the stub; what a failed test leaves is cancelled."""
    jobs: list[Job] = []

    def submit(do: str, *command: Any, **environ: str) -> Job:
        jobs.append(cluster.submit(stub, *(command or (SCRIPT,)), DO=do, **environ))
        return jobs[-1]

    yield submit
    for job in jobs:
        job.cancel("--quiet")


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """The real project; whatever of it a failed test has left running is killed."""
    copy = slow_down(shrink(copy_template(tmp_path / "my project"), **SIZES))
    yield copy
    for pid in running(tmp_path):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def arguments(job: Job) -> list[str]:
    """What launch_node.sh was given, on each node."""
    return [said for _, said in sorted(re.findall(r"node (\d) in turn 0 has \[(.*)\]", job.output()))]


# ---- what each node is told -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_node_runs_the_launcher_with_its_rank_the_first_nodes_address_and_a_port_of_the_job(
    cluster: Slurm, submit: Submit
) -> None:
    jobs = [submit("", SCRIPT, "--nproc-per-node", 2, "--", "--lr", "a b"), submit("", "--nodes=1", SCRIPT)]
    for job in jobs:
        assert job.ends("COMPLETED")["ExitCode"] == "0:0"
    ports = [20000 + int(job.number) for job in jobs]
    rest = f"'--nnodes', '2', '--master-addr', '10.77.0.1', '--master-port', '{ports[0]}', '--nproc-per-node', '2'"
    assert arguments(jobs[0]) == [f"'--node-rank', '{rank}', {rest}, '--', '--lr', 'a b'" for rank in (0, 1)]
    assert arguments(jobs[1])[0].endswith(
        f"'--nnodes', '1', '--master-addr', '10.77.0.1', '--master-port', '{ports[1]}'"
    )
    with cluster.resolving():
        named = submit("", MASTER_PORT="4711", MASTER_ADDR="of.another.job")
        named.ends("COMPLETED")
    submit("assert 'HOME' in os.environ", "--export=DO", SCRIPT).ends("COMPLETED")
    assert all("'--master-addr', 'node1', '--master-port', '4711'" in said for said in arguments(named))


@pytest.mark.slow
def test_the_job_ends_with_the_code_of_its_nodes_and_all_of_them_end_by_themselves(submit: Submit) -> None:
    """Also where the site has srun kill the others."""
    do = "time.sleep(3 * rank); say('has ended'); sys.exit(int(os.environ['CODE']))"
    codes = ("1", "2", "6")
    jobs = [submit(do, "--cpus-per-task=1", SCRIPT, CODE=code) for code in codes]
    for job, code in zip(jobs, codes, strict=True):
        known = job.ends("FAILED")
        assert (known["ExitCode"], known["Restarts"]) == (f"{code}:0", "0")
        assert job.output().count("has ended") == 2, job.output()


@pytest.mark.slow
def test_a_job_of_another_folder_is_refused_in_one_line(submit: Submit, stub: Path, tmp_path: Path) -> None:
    job = submit("", f"--chdir={tmp_path}", f"--output={stub}/slurm-%j.out", SCRIPT)
    assert job.ends("FAILED")["ExitCode"] == "2:0"
    assert job.output().startswith(f"error: no launch_node.sh in {tmp_path}: ") and job.output().count("\n") == 1
    job = submit("", f"--chdir={stub}", f"{stub}/{SCRIPT}")
    job.ends("COMPLETED")


def test_the_script_says_how_it_is_used() -> None:
    script = TEMPLATE / SCRIPT
    done = subprocess.run(["bash", script, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "sbatch launch/slurm.sbatch -- --epochs 90" in done.stdout
    done = subprocess.run(["bash", script], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: no Slurm job") and done.stderr.count("\n") == 1


# ---- stopping and requeueing ----------------------------------------------------------------------------------------


def stopped_once(job: Job, name: str) -> bool:
    """Whether each node was asked by one signal, and has saved."""
    got = re.findall(r"node (\d) in turn 0 got (\w+)", job.output())
    return sorted(got) == [("0", name), ("1", name)] and job.output().count("has saved") == 2


@fault(9)
@pytest.mark.slow
def test_scancel_of_the_batch_script_lets_all_save_and_the_job_does_not_come_again(submit: Submit) -> None:
    """Even if its time limit comes near while it saves."""
    job = submit("train(0.5 + 3 * rank)")
    job.says("has [", 2)
    job.cancel("--batch", "--signal=TERM")
    job.says("got", 2)
    job.cancel("--batch", "--signal=USR1")
    known = job.ends("FAILED")
    assert (known["ExitCode"], known["Restarts"]) == ("75:0", "0")
    assert stopped_once(job, "SIGUSR1"), job.output()


@fault(9)
@pytest.mark.slow
def test_after_scancel_no_job_comes_again_even_if_it_was_about_to(submit: Submit) -> None:
    plain, late = (submit("train(3)", "--cpus-per-task=1", SCRIPT) for _ in range(2))
    preempted = submit("train(3)", "--partition=spare", SCRIPT)
    jobs = (plain, late, preempted)
    for job in jobs:
        job.says("has [", 2)
    late.cancel("--batch", "--signal=USR1")
    submit("", "--cpus-per-task=28", SCRIPT)
    late.says("got SIGUSR1", 2)
    preempted.says("got SIGTERM", 2)
    for job in jobs:
        job.cancel()
    for job in jobs:
        job.says("has saved", 2)
        assert job.ends("CANCELLED")["Restarts"] == "0"
    assert stopped_once(plain, "SIGTERM"), plain.output()


@fault(9)
@pytest.mark.slow
def test_a_signal_to_the_steps_alone_stops_the_job_and_it_does_not_come_again(submit: Submit) -> None:
    job = submit("train()")
    job.says("has [", 2)
    job.cancel("--signal=USR1")
    assert job.ends("FAILED")["ExitCode"] == "75:0" and stopped_once(job, "SIGUSR1"), job.output()


@fault(9)
@pytest.mark.slow
def test_a_signal_that_comes_before_anything_has_started_is_not_lost(submit: Submit, tmp_path: Path) -> None:
    """While the batch script asks for the address of the first node, say."""
    (tmp_path / "getent").write_text(f"#!/bin/sh\ntouch '{tmp_path}/asked'; sleep 2\n")
    (tmp_path / "getent").chmod(0o755)
    job = submit("", PATH=f"{tmp_path}:{os.environ['PATH']}")
    job.until((tmp_path / "asked").exists)
    job.cancel("--batch", "--signal=USR1")
    job.comes_back()
    assert "has [" not in job.output()


@fault(9)
@pytest.mark.slow
def test_of_a_job_array_only_the_task_that_was_stopped_comes_again(cluster: Slurm, submit: Submit) -> None:
    array = submit("train()", "--array=1-2", "--cpus-per-task=1", SCRIPT)
    last = Job(cluster, f"{array.number}_2", array.project)  # its JobId is the array's
    array.says("has [", 2)
    last.cancel("--batch", "--signal=USR1")
    last.comes_back()
    other = Job(cluster, f"{array.number}_1", array.project).show()
    assert (other["JobState"], other["Restarts"]) == ("RUNNING", "0")


@fault(9)
@pytest.mark.slow
def test_a_job_that_is_preempted_saves_and_comes_again_once(submit: Submit) -> None:
    """Slurm itself would give up one that leaves by itself within its time of grace."""
    gentle, hasty = (submit("train(1)", f"--partition={name}", SCRIPT) for name in ("spare", "hasty"))
    for job in (gentle, hasty):
        job.says("has [", 2)
    other = submit("", "--cpus-per-task=28", SCRIPT)
    for job in (gentle, hasty):
        job.comes_back()
        job.says("has saved", 2)
        assert "error: requeueing failed" not in job.output()
    other.ends("COMPLETED")
    gentle.start_again()
    gentle.says("in turn 1 has [", 2)
    gentle.cancel("--signal=TERM")
    assert gentle.ends("FAILED")["Restarts"] == "1", "it was not preempted this time"


@fault(1)
@pytest.mark.slow
def test_a_job_that_lost_a_process_comes_again_three_times(submit: Submit) -> None:
    job = submit("os.kill(os.getpid(), 9) if (rank, turn) == (1, 0) else sys.exit(8)")
    for restart in (1, 2, 3):
        job.comes_back(restart)
        job.start_again()
    known = job.ends("FAILED")
    assert (known["ExitCode"], known["Restarts"]) == ("8:0", "3")


SAVE = "open(os.environ['DDP_SAVED_FILE'], 'a').close() if rank == 0 else None"  # as main.py does with a checkpoint


@fault(1)
@pytest.mark.slow
def test_a_job_that_starts_again_insists_on_a_checkpoint_if_it_has_saved_one(submit: Submit, stub: Path) -> None:
    """Whatever ended it; before the options of the user, which win; not after a save of another job."""
    lost = "sys.exit(8) if turn == 0 else None"
    saved = submit(f"{SAVE}; {lost}", SCRIPT, "--nproc-per-node", 2, "--", "--lr", "a b")
    plain, never = submit(f"{SAVE}; {lost}", "--cpus-per-task=1", SCRIPT), submit(lost, "--cpus-per-task=1", SCRIPT)
    jobs = (saved, plain, never)
    for job in jobs:
        job.comes_back()
        job.start_again()
    for job in jobs:
        job.ends("COMPLETED")
    again = [re.findall(r"node \d in turn 1 has \[.*'--master-port', '\d+'(.*)\]", job.output()) for job in jobs]
    assert again[0] == [", '--nproc-per-node', '2', '--', '--resume', 'must', '--lr', 'a b'"] * 2
    assert again[1] == [", '--', '--resume', 'must'"] * 2 and again[2] == [""] * 2
    assert "must" not in "".join(said for job in jobs for said in arguments(job)), "the first start of a job"


# ---- real training --------------------------------------------------------------------------------------------------

PYTHON = Path(sys.prefix) / "bin" / "python"
TRAIN = ["--dataset", "synthetic", "--device", "cpu", "--batch-size", 16, "--log-every", 10]
QUICK = [*TRAIN, "--max-steps", 40]
SIZES = {"train": 6_400, "val": 64, "test": 64}


def trained(output: Path) -> tuple[Any, list[int]]:
    """The digest of what a run has learned, and the steps that it has logged."""
    return weights_and_momentum(output), [line["step"] for line in lines(output, "train")]


@pytest.mark.sample(0)
@fault(9)
@pytest.mark.slow
def test_a_run_that_is_stopped_and_started_again_by_slurm_equals_an_undisturbed_one(
    cluster: Slurm, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The former by the batch script on two nodes, in the environment of the project; the latter in forked ranks."""
    environment = project / ".venv" / "bin" / "python"
    environment.parent.mkdir(parents=True)
    environment.write_text(f'#!/bin/sh\nexec "{PYTHON}" "$@"\n')
    environment.chmod(0o755)
    bare = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "VIRTUAL_ENV": "", "OMP_NUM_THREADS": "1", "STEP_S": "0.1"}
    job = cluster.submit(project, SCRIPT, "--", *QUICK, "--output-dir", "out", **bare)
    job.says("step 10/", timeout=240)
    job.cancel("--batch", "--signal=USR1")
    job.comes_back()
    job.start_again()
    job.ends("COMPLETED", timeout=240)
    assert job.output().count("2 processes (torchrun) on cpu") == 2, job.output()
    for said in ("a new run, in out", "resuming from out/", "done in"):
        assert job.output().count(said) == 1, job.output()
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", SIZES)
    train(2, *QUICK, "--output-dir", project / "whole")
    assert trained(project / "out") == trained(project / "whole")
    assert trained(project / "out")[1] == list(range(10, 41, 10)), "each step once"


@pytest.mark.sample(0)
@fault(9)
@pytest.mark.slow
def test_a_job_that_comes_back_to_an_empty_disk_does_not_train_from_the_start(cluster: Slurm, project: Path) -> None:
    job = cluster.submit(project, "--nodes=1", SCRIPT, "--", *TRAIN, "--output-dir", "disk", OMP_NUM_THREADS="1")
    job.says("step    10/", timeout=240)
    job.cancel("--batch", "--signal=USR1")
    job.comes_back()
    shutil.rmtree(project / "disk")
    job.start_again()
    assert job.ends("FAILED", timeout=240)["ExitCode"] == "4:0"
    assert job.output().count("error: --resume must: there is no checkpoint in disk/checkpoints") == 1, job.output()
    assert job.output().count("a new run, in disk") == 1


@pytest.mark.slow
def test_srun_alone_gives_each_process_its_place_and_the_address_of_the_first_node(
    cluster: Slurm, project: Path
) -> None:
    print_it = "import os; from config import Config; from ddp.distributed.rank_env import find_rank_env\n"
    print_it += "env = find_rank_env(Config.parse([]), os.environ); init = env.init_method\n"
    print_it += "print(env.rank, env.world_size, env.local_rank, init, env.launcher.value, flush=True)"
    for nodes, host, local_rank in ((2, "node1", "0"), (1, "127.0.0.1", "1")):
        program = cluster.srun(project, f"--nodes={nodes}", "--ntasks=2", PYTHON, "-c", print_it)
        assert program.wait() == 0, program.output()
        lines = [line for line in program.output().splitlines() if not line.startswith("srun: ")]  # it may have waited
        assert len(lines) == 2, program.output()
        first, second = (line.split() for line in sorted(lines))
        assert first[:3] == ["0", "2", "0"] and second[:3] == ["1", "2", local_rank]
        assert first[3] == second[3] and first[3].startswith(f"tcp://{host}:") and first[4] == "srun"


@fault(9, 28)
@pytest.mark.slow
def test_a_signal_to_srun_alone_lets_both_nodes_save_and_is_told_by_its_exit_code(
    cluster: Slurm, project: Path
) -> None:
    with cluster.resolving():
        program = cluster.srun(project, "--job-name=alone", "--nodes=2", "--ntasks=2", PYTHON, "main.py", *TRAIN)
        program.until("step    10/", 240)
        (job,) = cluster.run("squeue", "--name=alone", "--noheader", "--format=%A").split()
        cluster.run("scancel", "--signal=USR1", f"{job}.0")  # to srun's step, next to those of other tests
        assert program.wait(120) == 75, program.output()
    assert "2 processes (srun)" in program.output()
    assert program.output().count("stopped on request and saved") == 1, program.output()


# ---- last: the time limit, which has come meanwhile; and what no other job would survive ----------------------------


@fault(9)
@pytest.mark.slow
def test_before_the_time_limit_all_save_and_the_job_comes_again(limited: Job) -> None:
    """Although one node needs longer than the other."""
    limited.comes_back()
    assert stopped_once(limited, "SIGUSR1"), limited.output()
    assert "exit code 75: requeueing the job" in limited.output()
    limited.start_again()
    assert limited.ends("COMPLETED")["Restarts"] == "1"
    assert limited.output().count("has [") == 4, "both turns are in one file"


@fault(1)
@pytest.mark.slow
def test_a_job_that_lost_a_node_comes_again(cluster: Slurm, submit: Submit) -> None:
    job = submit("train()")
    job.says("has [", 2)
    cluster.run("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=test")
    try:
        job.comes_back()
        assert "error: requeueing failed" not in job.output()
    finally:
        cluster.run("scontrol", "update", "NodeName=node2", "State=IDLE")
