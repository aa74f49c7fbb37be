"""What a machine brings: CPU quotas, odd paths, variables, consoles, and disks without locks."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import pytest
from outputs import checkpoints
from PIL import Image
from project_runs import python
from template_copy import LEAN, TEMPLATE, small_template

import data
import model
from ddp.core import host
from ddp.training import output_dir
from faults import fault
from processes import start, train
from small_models import build_awkward

OPTIONS = ("--dataset", "synthetic", "--device", "cpu", "--batch-size", 16, "--max-steps", 2)
GIVEN = (*OPTIONS, "--output-dir")
LONG = ("--epochs", 9999, "--max-steps", 999_999, "--checkpoint-every", 1)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 160, "val": 90, "test": 60})
    monkeypatch.setattr(model, "build_model", build_awkward)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def until_saved(folder: Path) -> None:
    while not (folder / "checkpoints").exists() or not checkpoints(folder):
        time.sleep(0.05)


def the_error(output: str) -> str:
    (error,) = [line for line in output.splitlines() if "error:" in line.lower()]
    assert error.startswith("error: ") and "Traceback" not in output, output
    return error


# ---- CPU quotas -----------------------------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of version 1, which limits its processes to one core."""
    folder = Path(f"/sys/fs/cgroup/cpu/ddp-test-{os.getpid()}")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"needs cgroup v1 and root ({error.strerror})")
    try:
        (folder / "cpu.cfs_quota_us").write_text("100000")
        yield folder
    finally:
        folder.rmdir()


def test_a_quota_of_a_control_group_limits_the_cores(group: Path) -> None:
    count = [sys.executable, "-c", "from ddp.core.host import available_cores; print(available_cores())"]
    found = []
    for quota in ("100000", "-1"):
        (group / "cpu.cfs_quota_us").write_text(quota)
        join = lambda: (group / "cgroup.procs").write_text(str(os.getpid()))  # noqa: E731
        found.append(int(subprocess.run(count, cwd=TEMPLATE, preexec_fn=join, capture_output=True, check=True).stdout))
    assert found == [1, len(os.sched_getaffinity(0))]


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "150000 100000"}, 2),  # a container, with version 2
        ("0::/\n", {"cpu.max": "max 100000"}, 8),
        ("0::/a.slice/b\n", {"a.slice/b/cpu.max": "20000 100000"}, 1),
        ("0::/a.slice/b\n", {"a.slice/b/cpu.max": "max 100000", "a.slice/cpu.max": "400000 100000"}, 4),
        ("3:cpu,cpuacct:/docker/1\n", {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ("", {}, 8),
    ],
)
def test_the_quota_of_a_container_is_read(
    own: str, files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files as the kernel shows them: version 2, which this machine may not have, and version 1."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(host, "CGROUPS", tmp_path)
    monkeypatch.setattr(host, "CGROUPS_OF", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert host.available_cores() == cores


# ---- paths, variables, consoles -------------------------------------------------------------------------------------


def command(*words: Any, code: int = 0, **variables: str) -> str:
    return python(small_template(), "main.py", *words, code=code, fork=True, **variables)


@pytest.mark.slow
def test_a_temporary_directory_may_have_any_name(tmp_path: Path) -> None:
    """A URL would end at # or ?: all runs would meet in one file, which stays."""
    odd = tmp_path / "a#b?c%20d"
    odd.mkdir()
    for number in range(2):
        command(*GIVEN, tmp_path / f"run{number}", "--nproc", 2, TMPDIR=str(odd))
    assert sorted(path.name for path in tmp_path.iterdir()) == [odd.name, "run0", "run1"]


KUBERNETES = {"MASTER_PORT": "tcp://10.0.0.1:80"}  # of a service with the name `master`


@pytest.mark.slow
def test_a_variable_of_kubernetes_is_named(tmp_path: Path) -> None:
    of_torchrun = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    of_slurm = {f"SLURM_{name}": "0" for name in ("PROCID", "LOCALID", "JOB_ID", "STEP_ID")}
    of_slurm |= {"SLURM_NTASKS": "1", "SLURM_NODELIST": "a"}
    for variables in ({}, of_torchrun, of_slurm):
        error = the_error(command(*GIVEN, tmp_path, code=3, **KUBERNETES, **variables))
        assert error.startswith("error: MASTER_PORT='tcp://10.0.0.1:80' must be an integer") and "`master`" in error
    launch = [TEMPLATE / "launch_node.sh", "--nproc-per-node", "1", "--"]
    launched = subprocess.run(launch, capture_output=True, text=True, env={**os.environ, **KUBERNETES})
    assert launched.returncode == 2 and "error: MASTER_PORT='tcp://10.0.0.1:80' (a Kubernetes " in launched.stderr


def test_a_dangling_link_is_named(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "scratch/gone")
    for path in (tmp_path / "link", tmp_path / "link/run"):
        error = the_error(train(1, *GIVEN, path, code=3))
        assert f": {tmp_path}/link links to {tmp_path}/scratch/gone, which does not exist; choose" in error


@pytest.mark.slow
def test_a_console_may_lack_a_character(tmp_path: Path) -> None:
    words = [sys.executable, "main.py", *GIVEN, tmp_path / "épreuve"]
    environment = {**os.environ, **LEAN, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*map(str, words)], cwd=small_template(), env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "a new run, in " in done.stdout and "\\xe9preuve" in done.stdout
    assert "Error" not in done.stderr


@pytest.mark.slow
@pytest.mark.sample(0)
@pytest.mark.parametrize("flag", ["-P", "-I"])
def test_python_may_leave_the_folder_of_the_program_out(flag: str, tmp_path: Path) -> None:
    if flag == "-P" and sys.version_info < (3, 11):
        pytest.skip("Python 3.10 has no -P")
    picture = tmp_path / "a.png"
    Image.new("RGB", (32, 32)).save(picture)
    train = ["main.py", *GIVEN, tmp_path / "run", "--nproc", 2]
    predict = ["predict.py", tmp_path / "run/best.pt", picture]
    for words in (train, predict, ["rehearse.py", "--help"], ["benchmark.py", "--help"]):
        command = [sys.executable, "-B", flag, *map(str, words)]
        done = subprocess.run(command, cwd=TEMPLATE, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


# ---- a file system without locks ------------------------------------------------------------------------------------


@pytest.fixture
def lockless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No such file system can be mounted here: Lustre without flock answers so."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    monkeypatch.setattr(output_dir, "LEASE_S", 3.0)


@fault(24)
def test_where_no_locks_are_one_run_has_the_directory(
    lockless: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was killed gives it up at once, on its own machine."""
    first = start(1, *OPTIONS, *LONG, "--output-dir", tmp_path)
    until_saved(tmp_path)
    error = the_error(train(1, *GIVEN, tmp_path, code=5))
    assert error.startswith(f"error: another run writes to {tmp_path}: ")
    touched = (tmp_path / ".lease").stat().st_mtime_ns
    first.until(lambda: (tmp_path / ".lease").stat().st_mtime_ns > touched)
    os.kill(first.pids[0], signal.SIGKILL)
    assert first.wait() == [-signal.SIGKILL]
    monkeypatch.setattr(output_dir, "LEASE_S", 9999.0)  # a run that waits for it does not end within this test
    output = train(1, *OPTIONS, *LONG, "--max-steps", 1, "--output-dir", tmp_path)
    assert "has no locks: .lease takes its place" in output and "resuming from" in output


def elsewhere(path: Path) -> None:
    """Let a lease be that of another machine."""
    text = path.read_text()
    path.write_text(text.replace(os.uname().nodename, "elsewhere"))
    assert path.read_text() != text


@fault(24)
def test_a_lease_of_another_machine_counts_while_it_is_touched(lockless: None, tmp_path: Path) -> None:
    theirs = filelock.SoftFileLease(
        tmp_path / ".lease", lease_duration=output_dir.LEASE_S, heartbeat_interval=output_dir.LEASE_S / 12
    )
    theirs.acquire()
    shutil.copy(tmp_path / ".lease", tmp_path / "copy")
    theirs.release()
    elsewhere(tmp_path / "copy")
    (tmp_path / "copy").rename(tmp_path / ".lease")
    stop = threading.Event()

    def touch() -> None:
        while not stop.wait(0.2):
            os.utime(tmp_path / ".lease")

    thread = threading.Thread(target=touch)
    thread.start()
    assert "another run writes to" in the_error(train(1, *GIVEN, tmp_path, code=5))
    stop.set()
    thread.join()
    begin = time.monotonic()
    train(1, *GIVEN, tmp_path)
    assert time.monotonic() - begin > output_dir.LEASE_S


@fault(24)
def test_a_run_that_lost_its_lease_ends(lockless: None, tmp_path: Path) -> None:
    """Its machine stood still for a minute, and another one has taken over."""
    ranks = start(1, *OPTIONS, *LONG, "--output-dir", tmp_path)
    until_saved(tmp_path)
    (tmp_path / ".lease").unlink()
    (tmp_path / ".lease").write_text("4711\nelsewhere\n")
    assert ranks.wait() == [5]
    assert "another run took " in the_error(ranks.output())
