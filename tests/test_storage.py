"""Checkpoints on disks that fail: flipped bytes, torn writes, full, read-only, shared; and writes during training."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from outputs import weights_and_momentum
from PIL import Image
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.tensorboard import SummaryWriter

import ddp.training.run
import ddp.training.run_log
import main
from config import Config
from ddp.checkpoint import storage as checkpoint
from ddp.checkpoint.storage import CheckpointDirectory
from ddp.core.files import write_status
from ddp.training.output_dir import OutputDir
from faults import fault
from model import build_model as build_toy
from needs import need_root
from processes import Ranks, start, train
from small_models import Awkward, build_awkward, build_slow_awkward

SYNTHETIC = ["--dataset", "synthetic"]
Sample = Callable[[Sequence[Any], int], list[Any]]


@pytest.fixture(autouse=True)
def hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let failing threads print as usual: a forked rank inherits pytest's hooks, which would hide that."""
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)


def checkpoints(output: Path) -> list[Path]:
    return sorted((output / "checkpoints").glob("step_*.pt"))


def temporary_files(output: Path) -> list[Path]:
    return [path for path in output.rglob("*") if ".tmp" in path.name]


def status(output: Path) -> dict[str, Any]:
    return json.loads((output / "status.json").read_text())


def logged(output: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without what depends on the speed of the machine."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{name: line.get(name) for name in ("step", "split", "epoch", "loss", "accuracy", "lr")} for line in lines]


def the_error(ranks: Ranks) -> str:
    """The one line that reports the error. Fails if there are more, or a traceback, or output of a failing thread."""
    output = ranks.output()
    (line,) = [line for line in output.splitlines() if "error: " in line]
    for noise in ("Traceback", "Exception", "Errno", "Thread"):
        assert noise not in output, output
    return line


def until(condition: Callable[[], Any], ranks: Ranks, timeout: float = 180) -> None:
    """Wait until `condition` holds. Fails with the run's output if it does not."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"not within {timeout:g} s:\n{ranks.output()}"
        time.sleep(0.005)


def read_lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


# ---- mounts ---------------------------------------------------------------------------------------------------------


@contextmanager
def mounted(path: Path) -> Iterator[None]:
    """Unmount what the block mounts at `path`. Skips the test without the right to mount."""
    need_root("mounts")
    try:
        yield
    finally:
        while os.path.ismount(path) or str(path) in Path("/proc/self/mounts").read_text():
            if subprocess.run(["umount", "--lazy", path], capture_output=True).returncode != 0:
                break


def mount(*arguments: Any) -> None:
    done = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def make_read_only(path: Path) -> None:
    """For root as well: no file below `path` can be opened for writing from now on."""
    mount("--bind", path, path)
    mount("-o", "remount,ro,bind", path)


def fill(folder: Path) -> Path:
    """Fill the disk of `folder`."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    return filler


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    with mounted(path):
        mount("-t", "tmpfs", "-o", "size=8M", "tmpfs", path)
        yield path


# ---- damaged files --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 2 processes with checkpoints of steps 2, 4 and 6."""
    import data

    sizes, data.SYNTHETIC_SIZES = data.SYNTHETIC_SIZES, {"train": 640, "val": 101}
    output = tmp_path_factory.mktemp("trained")
    train(2, *SYNTHETIC, "--checkpoint-every", 2, "--max-steps", 6, "--output-dir", output)
    data.SYNTHETIC_SIZES = sizes
    return output


def flips(size: int, count: int) -> Iterator[tuple[int, int]]:
    """`count` places, spread over `size` bytes, and the value to xor each byte with: every value in turn."""
    generator = random.Random(0)
    values = [1 + number % 255 for number in range(count)]
    generator.shuffle(values)
    for number, value in enumerate(values):
        yield generator.randrange(number * size // count, (number + 1) * size // count), value


@contextmanager
def flipped(path: Path, place: int, value: int) -> Iterator[None]:
    with path.open("r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, place)[0]
        os.pwrite(file.fileno(), bytes([byte ^ value]), place)
        yield
        os.pwrite(file.fileno(), bytes([byte]), place)


@fault(4)
def test_each_of_a_thousand_flipped_bytes_is_detected(trained: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(checkpoints(trained)[-1], tmp_path))
    detected, places = 0, set()
    for place, value in flips(path.stat().st_size, 1000):
        with flipped(path, place, value):
            try:
                checkpoint.verify(path)
            except checkpoint.InvalidCheckpoint:
                detected += 1
        places.add(place)
    checkpoint.verify(path)  # every byte was restored
    assert (detected, len(places)) == (1000, 1000)


def test_a_checkpoint_in_a_folder_whose_name_is_no_text_is_read(trained: Path, tmp_path: Path) -> None:
    """As of a file that was copied from a system with another encoding. torch cannot map it."""
    folder = tmp_path / os.fsdecode(b"lat\xe4")
    shutil.copytree(trained, folder)
    configs = [Config.parse(["--output-dir", str(each)]) for each in (trained, folder)]
    first, second = (CheckpointDirectory(config).find() for config in configs)
    assert first["step"] == second["step"] and torch.equal(*(each["model"]["fc3.bias"] for each in (first, second)))


def test_the_newest_checkpoint_has_the_highest_step_with_more_than_eight_digits_as_well(tmp_path: Path) -> None:
    directory = CheckpointDirectory(Config(output_dir=str(tmp_path)))
    directory.path.mkdir()
    names = ["step_100000000.pt", "step_99999999.pt", "step_00000008.pt"]
    for name in (*names, "step_9.pt", "step_100000001.pt.link.ddp.tmp"):
        (directory.path / name).touch()
    assert [path.name for path in directory.paths()] == names


def test_damaged_checkpoints_are_read_once_and_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may be large, and is looked at after every save."""
    directory, read = CheckpointDirectory(Config(output_dir=str(tmp_path), keep_checkpoints=2)), []
    directory.path.mkdir()
    verify = checkpoint.verify
    monkeypatch.setattr(checkpoint, "verify", lambda path: (read.append(path.name), verify(path)))
    damaged = directory.path_of(99)
    damaged.write_bytes(b"damaged")
    for step in range(1, 6):
        directory.write({"format": checkpoint.FORMAT, "step": step}, best=False)
    assert [path.name[-5:] for path in directory.paths()] == ["99.pt", "05.pt", "04.pt"] and read == [damaged.name]
    directory.write({"format": checkpoint.FORMAT, "step": 99}, best=False)
    directory.write({"format": checkpoint.FORMAT, "step": 100}, best=False)
    assert [path.name[-6:] for path in directory.paths()] == ["100.pt", "099.pt"]


@pytest.mark.slow
@fault(3, 4)
def test_a_run_falls_back_wherever_its_newest_checkpoint_is_damaged(
    trained: Path, small: None, tmp_path: Path, sample: Sample
) -> None:
    """It then equals an uninterrupted run."""
    options = [*SYNTHETIC, "--max-steps", 7, "--output-dir"]
    train(2, *options, tmp_path / "whole")
    expected = weights_and_momentum(checkpoints(tmp_path / "whole")[-1])
    for place, value in sample([*flips(checkpoints(trained)[-1].stat().st_size, 12)], 3):
        output = Path(shutil.copytree(trained, tmp_path / "run"))
        newest = checkpoints(output)[-1]
        with flipped(newest, place, value):
            printed = train(2, *options, output)
        assert f"warning: {newest} cannot be used" in printed and "at step 5" in printed, f"{place} {value}: {printed}"
        assert weights_and_momentum(checkpoints(output)[-1]) == expected
        shutil.rmtree(output)


def test_the_newest_good_checkpoints_are_kept(trained: Path, small: None, tmp_path: Path) -> None:
    """A bad checkpoint does not count as one of the --keep-checkpoints."""
    output = Path(shutil.copytree(trained, tmp_path / "run"))
    (output / "checkpoints" / "step_00000006.pt").write_bytes(b"bad")
    options = [
        "--dataset",
        "synthetic",
        "--batch-size",
        128,
        "--keep-checkpoints",
        2,
        "--checkpoint-every",
        1,
        "--output-dir",
        output,
    ]
    train(1, *options, "--max-steps", 5)
    names = sorted(path.name for path in (output / "checkpoints").iterdir())
    assert names == ["step_00000004.pt", "step_00000005.pt", "step_00000006.pt"], "4 and 5 are good, 6 is bad"
    train(1, *options, "--max-steps", 7)
    names = sorted(path.name for path in (output / "checkpoints").iterdir())
    assert names == ["step_00000006.pt", "step_00000007.pt"]


def test_the_content_is_what_the_readme_lists(trained: Path) -> None:
    content = torch.load(trained / "checkpoints" / "step_00000006.pt", weights_only=True)
    assert set(content) == {
        *("format", "sources", "classes"),
        *("model", "optimizer", "schedule", "scaler", "meter", "step", "epoch", "samples_consumed"),
        *("best", "best_step", "best_metrics", "evaluated_step", "epochs_since_best", "logged_step", "epoch_start"),
        *(
            "config",
            "world_size",
            "global_batch",
            "samples",
            "dataset",
            "records",
            "weights_of",
            "started_from",
            "callbacks",
        ),
    }
    assert (content["step"], content["epoch"], content["samples_consumed"]) == (6, 1, 128)
    assert content["world_size"] == 2


# ---- killed during a write -------------------------------------------------------------------------------------------

KILLS = 50
STATE = 1 << 20  # numbers in the state that is written repeatedly: 4 MB


def save_repeatedly(config: Config, first: int, report: int) -> None:
    """In a child process: save step after step, every third as the best, and report each in the pipe `report`."""
    output_dir, directory = OutputDir(config), CheckpointDirectory(config)
    output_dir.open()
    directory.find()
    step = first
    os.write(report, b"0\n")
    while True:
        content = {"format": checkpoint.FORMAT, "step": step, "model": {"weight": torch.full((STATE,), float(step))}}
        directory.write({**content, "started_from": None}, best=step % 3 == 0)
        os.write(report, f"{step}\n".encode())
        step += 1


@contextmanager
def saving_child(config: Config, first: int) -> Iterator[tuple[int, Any]]:
    """A child that saves until it is killed: its process id, and a file with its reports. The block's end kills it."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            save_repeatedly(config, first, write_end)
        os._exit(1)
    os.close(write_end)
    with os.fdopen(read_end) as reports:
        try:
            yield pid, reports
        finally:
            os.kill(pid, signal.SIGKILL)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, "it exited by itself"


def seconds_of_a_save(config: Config) -> float:
    with saving_child(config, 1) as (_, reports):
        reports.readline()
        begin = time.monotonic()
        for _ in range(9):
            reports.readline()
        return (time.monotonic() - begin) / 9


@pytest.mark.slow
@fault(2)
def test_a_save_killed_at_any_moment_loses_no_save_before_it(
    tmp_path: Path, seed: int, sample: Sample, request: pytest.FixtureRequest
) -> None:
    generator = random.Random(seed)
    duration = seconds_of_a_save(Config.parse(["--output-dir", str(tmp_path / "measured")]))
    output = tmp_path / "run"
    config = Config.parse(["--output-dir", str(output)])
    whole = 4 * STATE
    torn: list[float] = []  # the size of each temporary file that a kill left, as a share of the whole state
    step = 0
    kills = sample(range(KILLS), 12)
    for kill in kills:
        with saving_child(config, step + 1) as (pid, reports):
            completed = [int(reports.readline()) for _ in range(generator.randint(2, 3))][-1]
            time.sleep(duration * (kill + generator.random()) / KILLS)
            os.kill(pid, signal.SIGKILL)
            completed = max([completed, *map(int, reports.read().split())])  # all reports until its death
        torn += [path.stat().st_size / whole for path in temporary_files(output)]
        for path in (*checkpoints(output), *output.glob("best.pt")):
            checkpoint.verify(path)  # every file with a final name is complete

        output_dir = OutputDir(config)
        output_dir.open()
        assert not temporary_files(output), "the temporary file of the killed process is still there"
        content = CheckpointDirectory(config).find()
        output_dir.lock.close()
        step = content["step"]
        assert step >= completed, f"step {completed} was saved, the newest is {content['path']}"
        assert torch.equal(content["model"]["weight"], torch.full((STATE,), float(step)))
    print(f"a save takes {1000 * duration:.0f} ms; {len(torn)} of {len(kills)} kills left a temporary file")
    if request.config.getoption("all"):
        assert len(torn) >= KILLS // 4, f"too few kills hit a write: {torn}"
        assert len({round(part, 1) for part in torn}) >= 2, f"all kills hit the same moment of a write: {torn}"


# ---- a full disk ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@fault(7)
def test_a_run_on_a_full_disk_exits_with_7_and_resumes_once_there_is_space(
    small: None, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three checkpoints of 0.5 MB fit, but not a fourth. No metrics are written meanwhile: that might fail first."""
    monkeypatch.setattr(main.task, "build_model", build_slow_toy)
    options = [*SYNTHETIC, "--batch-size", 16, "--epochs", 2, "--checkpoint-every", 4, "--log-every", 4, "--output-dir"]
    train(2, *options, tmp_path / "whole")
    output = disk / "run"
    mount("-o", "remount,size=1900K", disk)
    ranks = start(2, *options, output)
    assert ranks.wait() == [7, 7], ranks.output()
    line = the_error(ranks)
    assert f"cannot write {output / 'checkpoints' / 'step_00000016.pt'}: No space left on device" in line
    needed, free = map(float, re.search(r"([\d.]+) MB needed, ([\d.]+) MB free", line).groups())
    assert needed == pytest.approx(0.5, abs=0.1) and free < needed
    assert "free some space, then run the same command again; earlier checkpoints are intact" in line
    assert [path.name for path in checkpoints(output)] == [f"step_{step:08d}.pt" for step in (4, 8, 12)]
    for path in checkpoints(output):
        checkpoint.read(path)
    assert not temporary_files(output)
    found = status(output)
    assert (found["state"], found["exit_code"], found["saved"]) == ("failed", 7, 12)

    mount("-o", "remount,size=8M", disk)
    assert "at step 12" in train(2, *options, output)
    assert weights_and_momentum(checkpoints(output)[-1]) == weights_and_momentum(checkpoints(tmp_path / "whole")[-1])
    assert logged(output) == logged(tmp_path / "whole")


@pytest.mark.slow
@fault(7)
@pytest.mark.parametrize("log_every", [1, 10**6])
def test_a_disk_that_fills_up_between_two_saves_makes_the_run_exit_with_7(
    small: None, log_every: int, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as metrics are written; or at the next checkpoint, if no metrics are."""
    monkeypatch.setattr(main.task, "build_model", build_slow_awkward)
    every = ["--checkpoint-every", 30, "--log-every", log_every]
    ranks = start(2, *SYNTHETIC, "--batch-size", 2, *every, "--output-dir", disk / "run")
    until(lambda: checkpoints(disk / "run"), ranks)
    time.sleep(0.1)
    before = {path: path.read_bytes() for path in checkpoints(disk / "run")}
    fill(disk)
    assert ranks.wait() == [7, 7], ranks.output()
    line = the_error(ranks)
    assert f"cannot write {disk / 'run'}" in line and "No space left on device" in line and "MB free" in line
    assert {path: path.read_bytes() for path in checkpoints(disk / "run")} == before
    assert not temporary_files(disk)
    assert status(disk / "run")["state"] in ("running", "failed"), "status.json is JSON, although it may be old"


@pytest.mark.slow
@fault(7)
def test_a_disk_that_is_full_when_tensorboard_flushes_makes_the_run_exit_with_7_without_a_traceback(
    small: None, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorBoard writes in a thread, which would print a traceback of its own."""
    monkeypatch.setattr(main.task, "build_model", build_slow_awkward)
    write = SummaryWriter.add_scalar

    def add_many(self: SummaryWriter, name: str, value: Any, step: int) -> None:
        for number in range(20):  # more than the buffer holds
            write(self, f"{name}/{number}", value, step)

    monkeypatch.setattr(SummaryWriter, "add_scalar", add_many)
    monkeypatch.setattr(ddp.training.run_log, "write_status", lambda *arguments, **named: None)  # it would fail first
    ranks = start(2, *SYNTHETIC, "--batch-size", 2, "--log-every", 1, "--output-dir", disk / "run")
    until(lambda: len(read_lines(disk / "run" / "metrics.jsonl")) > 5, ranks)
    fill(disk)
    assert ranks.wait() == [7, 7], ranks.output()
    assert "No space left on device" in the_error(ranks)


@pytest.mark.slow
@fault(7)
def test_a_run_does_not_start_on_a_full_disk(small: None, disk: Path) -> None:
    fill(disk)
    ranks = start(2, *SYNTHETIC, "--output-dir", disk / "run")
    assert ranks.wait() == [3, 3], ranks.output()
    assert (
        f"cannot write to the output directory {disk / 'run'}: No space left on device; choose another --output-dir"
        in the_error(ranks)
    )


@pytest.mark.slow
@fault(7)
def test_a_full_disk_keeps_the_status_of_a_run_and_takes_its_end(disk: Path) -> None:
    """The end overwrites the file in place, because there is no space for another one."""
    write_status(disk, state="running", note="a long one " * 9)
    fill(disk)
    with pytest.raises(OSError, match="No space left"):
        write_status(disk, state="running", saved=8)
    assert status(disk)["note"], "a run that goes on leaves it intact"
    write_status(disk, state="failed", exit_code=5)
    assert status(disk) == {"pid": os.getpid(), "host": platform.node(), "state": "failed", "exit_code": 5}


# ---- a directory that is not writable -------------------------------------------------------------------------------


@pytest.mark.slow
@fault(8)
@pytest.mark.parametrize("exists", [True, False])
def test_a_read_only_directory_is_refused(exists: bool, tmp_path: Path) -> None:
    """Whether it exists or would have to be created."""
    output = tmp_path / "disk" / "run"
    (output if exists else output.parent).mkdir(parents=True)
    with mounted(tmp_path / "disk"):
        make_read_only(tmp_path / "disk")
        ranks = start(2, *SYNTHETIC, "--output-dir", output)
        assert ranks.wait() == [3, 3], ranks.output()
    line = the_error(ranks)
    assert f"cannot write to the output directory {output}: Read-only file system; choose another --output-dir" in line
    assert len(ranks.output().splitlines()) == 1, "there is no other output, so nothing was trained"


@pytest.mark.slow
@fault(8)
@pytest.mark.sample(1)
@pytest.mark.parametrize("part", ["run", "run/checkpoints"])
def test_a_directory_that_becomes_read_only_in_mid_run_makes_it_exit_with_7(
    small: None, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main.task, "build_model", build_slow_awkward)
    output = tmp_path / "run"
    options = [*SYNTHETIC, "--batch-size", 4, "--checkpoint-every", 20, "--log-every", 10, "--output-dir", output]
    ranks = start(2, *options)
    with mounted(tmp_path / part):
        until(lambda: checkpoints(output), ranks)
        make_read_only(tmp_path / part)
        assert ranks.wait() == [7, 7], ranks.output()
    line = the_error(ranks)
    assert f"cannot write {output}" in line and "Read-only file system" in line
    for path in checkpoints(output):
        checkpoint.read(path)
    train(2, *options, "--max-steps", 41)
    assert not temporary_files(output)


# ---- saving in the background ---------------------------------------------------------------------------------------


def build_slow_toy(config: Any, train_set: Any) -> torch.nn.Module:
    """ToyModel with 5 ms more per step."""
    model = build_toy(config, train_set)
    model.register_forward_pre_hook(lambda *_: time.sleep(0.005))
    return model


def slow_writes(monkeypatch: pytest.MonkeyPatch, output: Path, before: float = 0.0, after: float = 0.0) -> Path:
    """Let each write take longer, by so many seconds before its first byte and before its last.

    Returns a file with a line for the begin and the end of each write: its step, and the last step in metrics.jsonl.
    """
    save, write, notes = torch.save, checkpoint.write, output.parent / "notes"

    def note(event: str, content: Any) -> None:
        last = [line["step"] for line in logged(output)][-1:] if (output / "metrics.jsonl").exists() else []
        with notes.open("a") as file:
            file.write(f"{event} {content['step']} {last[0] if last else 0}\n")

    def slow_save(content: Any, *arguments: Any, **named: Any) -> None:
        in_background = threading.current_thread() is not threading.main_thread()  # elsewhere, it pickles tensors
        time.sleep(before * in_background)
        save(content, *arguments, **named)
        time.sleep(after * in_background)

    def noted_write(path: Path, content: Any) -> None:
        note("begin", content)
        try:
            write(path, content)
        finally:
            note("end", content)

    monkeypatch.setattr(torch, "save", slow_save)
    monkeypatch.setattr(checkpoint, "write", noted_write)
    return notes


@pytest.mark.slow
def test_training_continues_while_a_checkpoint_is_written(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file holds the state of its step, although weights, BatchNorm and momentum have changed since."""
    monkeypatch.setattr(main.task, "build_model", build_slow_awkward)
    options = [*SYNTHETIC, "--batch-size", 4, "--log-every", 1, "--output-dir"]
    train(2, *options, tmp_path / "stopped at 30", "--max-steps", 30)
    notes = slow_writes(monkeypatch, tmp_path / "run", before=0.6, after=0.6)
    train(2, *options, tmp_path / "run", "--max-steps", 60, "--checkpoint-every", 30)
    begin, end = (line.split() for line in read_lines(notes)[:2])
    assert begin[:2] == ["begin", "30"] and end[:2] == ["end", "30"]
    assert int(end[2]) - int(begin[2]) >= 10, "no step was trained during the write"
    path = tmp_path / "run" / "checkpoints" / "step_00000030.pt"
    assert weights_and_momentum(path) == weights_and_momentum(checkpoints(tmp_path / "stopped at 30")[-1])


@pytest.mark.slow
def test_checkpoints_are_written_one_at_a_time_and_in_order(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save waits for the write of the previous one. At its end, the run waits for the last one."""
    notes = slow_writes(monkeypatch, tmp_path, after=0.3)
    begin = time.monotonic()
    train(2, *SYNTHETIC, "--checkpoint-every", 1, "--max-steps", 5, "--keep-checkpoints", 9, "--output-dir", tmp_path)
    assert time.monotonic() - begin > 5 * 0.3
    order = [line.split()[:2] for line in read_lines(notes)]
    assert order == [[event, str(step)] for step in range(1, 6) for event in ("begin", "end")]
    assert [checkpoint.read(path)["step"] for path in checkpoints(tmp_path)] == [1, 2, 3, 4, 5]
    assert (status(tmp_path)["state"], status(tmp_path)["saved"]) == ("done", 5)


@pytest.mark.slow
@fault(7)
def test_a_checkpoint_that_cannot_be_written_ends_the_run_before_the_next_checkpoint(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main.task, "build_model", build_slow_awkward)
    options = ["--batch-size", 2, "--checkpoint-every", 60, "--log-every", 10**6, "--output-dir", tmp_path]
    (tmp_path / "checkpoints").mkdir()
    with mounted(tmp_path / "checkpoints"):
        ranks = start(2, *SYNTHETIC, *options)
        until(lambda: (tmp_path / "status.json").exists(), ranks)
        make_read_only(tmp_path / "checkpoints")
        assert ranks.wait() == [7, 7], ranks.output()
    assert "Read-only file system" in the_error(ranks)
    assert 60 <= status(tmp_path)["step"] < 110, "one second is 50 steps of 20 ms"


class Poisoned(Awkward):
    """After 30 steps, a buffer is not finite that no training loss depends on."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.steps = getattr(self, "steps", 0) + self.training
        if self.steps == 30:
            self.layers[1].running_mean[0] = float("nan")
        return super().forward(images)


@pytest.mark.slow
@fault(23)
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name", ["model.layers.1.running_mean", "optimizer.state.0.momentum_buffer", "optimizer.state.0.phases"]
)
def test_a_state_that_is_not_finite_is_not_saved_and_makes_the_run_exit_with_6(
    small: None, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if every loss is finite: the state is checked before it is written."""
    model = Poisoned if name.startswith("model") else Awkward
    monkeypatch.setattr(main.task, "build_model", lambda config, train_set: model(10, pause=0.02))
    steps = 0

    def poison(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal steps
        steps += 1
        state = next(iter(optimizer.state.values()))
        if name.endswith("phases"):
            state["phases"] = torch.tensor([1.0, 1j, float("nan") if steps >= 40 else 0])
        elif steps == 40 and name.startswith("optimizer"):
            state["momentum_buffer"].view(-1)[0] = float("inf")

    hook = register_optimizer_step_post_hook(poison)
    options = ["--batch-size", 2, "--checkpoint-every", 20, "--log-every", 10**6, "--output-dir", tmp_path]
    ranks = start(2, *SYNTHETIC, *options)
    hook.remove()
    assert ranks.wait() == [6, 6], ranks.output()
    line = the_error(ranks)
    assert f"{name} is no longer finite" in line and "step_00000020.pt" in line
    assert [path.name for path in checkpoints(tmp_path)] == ["step_00000020.pt"]
    assert not temporary_files(tmp_path)
    assert 40 <= status(tmp_path)["step"] < 90, "one second is 50 steps of 20 ms"


# ---- two runs -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@fault(24)
def test_a_second_run_in_one_directory_is_refused_and_does_not_disturb_the_first(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [*SYNTHETIC, "--batch-size", 16, "--epochs", 2, "--checkpoint-every", 3, "--log-every", 1, "--output-dir"]
    monkeypatch.setattr(main.task, "build_model", build_awkward)
    train(2, *options, tmp_path / "alone")
    monkeypatch.setattr(main.task, "build_model", build_slow_awkward)
    first = start(2, *options, tmp_path / "run")
    until(lambda: checkpoints(tmp_path / "run"), first)
    for _ in range(2):
        second = start(2, *options, tmp_path / "run")
        assert second.wait() == [5, 5], second.output()
        assert f"another run (process {first.pids[0]} on " in the_error(second)
        assert len(second.output().splitlines()) == 1
    assert os.waitpid(first.pids[0], os.WNOHANG) == (0, 0), "the first run ended before the second was refused"
    assert first.wait() == [0, 0], first.output()
    assert weights_and_momentum(checkpoints(tmp_path / "run")[-1]) == weights_and_momentum(
        checkpoints(tmp_path / "alone")[-1]
    )
    assert logged(tmp_path / "run") == logged(tmp_path / "alone")
    assert "already done" in train(2, *options, tmp_path / "run"), "the directory can be used again"


def read_by_workers(folder: Path) -> list[Any]:
    """The options of a run whose DataLoader workers read some images in `folder`."""
    for split, kind in itertools.product(("train", "val"), ("a", "b")):
        images = folder / "images" / split / kind
        images.mkdir(parents=True)
        for number in range(8):
            Image.new("RGB", (64, 64), (number, 0, 0)).save(images / f"{number}.png")
    options = ["--dataset", "imagefolder", "--data-dir", folder / "images", "--image-size", 64, "--workers", 2]
    return [*options, "--batch-size", 8, "--device", "cpu", "--epochs", 1, "--output-dir", folder / "out"]


@pytest.mark.slow
def test_a_dev_shm_that_is_too_small_ends_the_run_with_one_line(tmp_path: Path) -> None:
    """As in a container without --ipc host. torch alone prints a traceback, and waits for that batch without end."""
    need_root("mounts")
    options = read_by_workers(tmp_path)
    small = 'mount -t tmpfs -o size=100k tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", small, "sh", sys.executable, main.__file__, *options]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=100)
    assert done.returncode == 8, done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "DataLoader worker" in line]
    assert line.startswith("error: a DataLoader worker cannot hand over a batch: unable to allocate shared memory")
    assert "; if memory ran out: lower --workers, or enlarge /dev/shm; nothing was saved yet: start all" in line
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_tmpdir_that_is_too_long_for_sockets_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("long" * 20)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.delitem(multiprocessing.current_process()._config, "tempdir", raising=False)  # of an earlier test
    options = read_by_workers(tmp_path)
    remedy = f"DataLoader workers open sockets in {long}: set TMPDIR to a shorter path"
    ranks = start(1, *options)
    assert ranks.wait() == [2], ranks.output()
    assert the_error(ranks) == f"error: {remedy}"
