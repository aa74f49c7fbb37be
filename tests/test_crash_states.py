"""A run that meets a power failure, an I/O error or SIGKILL at any of its file operations: what is left resumes."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from outputs import assert_same_run, checkpoints

import crash_runs
from config import Config
from crash_runs import WAYS, options
from crash_states import Disk, Files, operations, record
from ddp.checkpoint import storage as checkpoint
from ddp.checkpoint.storage import CheckpointDirectory
from ddp.core.files import read_status
from ddp.distributed.tensors import digest, map_named
from ddp.parts.monitor.ledger import Ledger
from ddp.training.output_dir import MetricLogger, OutputDir
from ddp.training.run import Run
from faults import fault
from needs import need
from processes import start, train

TESTS = Path(__file__).resolve().parent
Sample = Callable[[Sequence[Any], int], list[Any]]
RUNS = [sys.executable, TESTS / "crash_runs.py"]


@pytest.fixture(autouse=True)
def small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that a test continues have the model and the data of those that were watched."""
    monkeypatch.setattr("main.task.build_model", crash_runs.build_tiny)
    monkeypatch.setattr("data.SYNTHETIC_SIZES", crash_runs.SIZES)


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory, where an fsync takes no time."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as name:
        yield Path(name)


# ---- power fails ----------------------------------------------------------------------------------------------------


class Resumed(NamedTuple):
    """Where a run resumes, the step of best.pt, the number of checkpoints, and the lines of metrics.jsonl."""

    step: int
    best_step: int
    checkpoints: int
    metrics: tuple[str, ...]


def is_read(path: Path, listed: Collection[str] = ()) -> bool:
    """Whether a resume reads this file. The recording of the resumes is compared with this.

    listed: names of files with rows that any checkpoint has listed so far. No others are read, or needed.
    """
    return (
        path.suffix == ".pt" and (path.parent.name != "rows" or path.name in listed)
    ) or path.name == "metrics.jsonl"


@cache
def names_in(content: bytes, load: Any = torch.load) -> set[str]:
    """The files with rows that a checkpoint lists; none if it is incomplete."""
    with suppress(Exception):
        return set(load(io.BytesIO(content), weights_only=True).get("rows", {}))
    return set()


def told_apart(files: Files, reads: Callable[[Path], bool]) -> Any:
    """What a resume can tell apart: the contents of the files that it reads, and the names of the others.

    Without rows that no checkpoint there lists: it deletes them.
    """
    mains = [content for path, content in files.items() if path.suffix == ".pt" and path.parent.name != "rows"]
    listed = {name for content in mains for name in names_in(content)}
    return frozenset(
        (path, content if reads(path) or is_status(path) else None)
        for path, content in files.items()
        if path.parent.name != "rows" or path.name in listed
    )


def is_status(path: Path) -> bool:
    """Whether a resume reads this file for the time that was lost. It takes all its states while no other file does."""
    return path.name == "status.json"


def write(files: Files, output: Path, folder: Path) -> None:
    """Lay out `files`, which are paths in `output`, in `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for path, content in files.items():
        place = folder / path.relative_to(output)
        place.parent.mkdir(exist_ok=True, parents=True)
        place.write_bytes(content)


def resume(config: Config) -> Resumed:
    """Do what a run does before it builds its model, and delete the lines of metrics that it will write again."""
    output_dir = OutputDir(config)
    output_dir.open()
    content = CheckpointDirectory(config).find()
    ledger = Ledger()
    saved = content.get("callbacks", {}).get("Ledger", {})
    ledger.resume(saved, content.get("step", 0), read_status(output_dir.path))
    assert all(seconds >= 0 for seconds in ledger.seconds.values())
    MetricLogger(config, content.get("step", 0), []).close()
    output_dir.lock.close()
    assert not list(output_dir.path.rglob("*.tmp"))
    for path in output_dir.path.rglob("*.pt"):
        checkpoint.verify(path)
    best_path = CheckpointDirectory(config).best_path
    best_step = checkpoint.read(best_path)["step"] if best_path.exists() else 0
    assert best_step >= content.get("best_step", 0), "a checkpoint names a better best.pt than there is"
    metrics = (output_dir.path / "metrics.jsonl").read_text().splitlines()
    kept = len(list((output_dir.path / "checkpoints").glob("step_*.pt")))
    return Resumed(content.get("step", 0), best_step, kept, tuple(metrics))


def load_once() -> Any:
    """Let torch.load read equal files once. Before it, storage.read compares the digest of all bytes of the file."""
    load, loaded = torch.load, {}

    def load_new(path: Path, **options: Any) -> Any:
        content = path.read_bytes()
        if content not in loaded:
            loaded[content] = load(path, **options)
        return loaded[content]

    return patch.object(torch, "load", load_new)


def about(metrics: Iterable[str], last_step: int) -> list[tuple[int, str, float]]:
    """What lines of metrics.jsonl have in every run that takes the same steps. The test follows the last checkpoint."""
    values = [json.loads(line) for line in metrics]
    found = [(each["step"], each["split"], each["loss"]) for each in values if each["split"] != "test"]
    return [each for each in found if each[0] <= last_step]


@fault(2, 43)
@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("way", WAYS)
def test_each_state_of_the_disk_after_a_power_failure_resumes_exactly(
    way: str, memory: Path, sample: Sample, request: pytest.FixtureRequest
) -> None:
    """While a run starts, saves, is killed, and resumes: from the newest complete checkpoint, with all metrics."""
    need("strace")
    recording = memory / "recording"
    recording.mkdir()
    record(recording / "trace", [*RUNS, "record", recording, way])
    output, disk, reports, promised = recording / way, Disk(), Disk(), 0
    resumed: dict[Any, Resumed] = {}  # by what a resume can tell apart
    found: dict[Resumed, Files] = {}
    whole = (output / "metrics.jsonl").read_text().splitlines()
    read: set[Path] = set()
    listed: set[str] = set()
    needed = partial(is_read, listed=listed)
    config = Config.parse(["--output-dir", str(memory / "run")])
    recorded = [*operations(recording / "trace", recording)]
    chosen, known = set(sample(range(len(recorded)), 150)), None
    with load_once():
        for number, done in enumerate(recorded):
            if done.path.is_relative_to(recording / "reports"):
                reports.apply(done)
                if done.call == "rename" and done.path.name == "saved":
                    promised = max(promised, int(reports.now()[done.path]))
            if not (done.path.is_relative_to(output) or done.path == recording):
                continue
            disk.apply(done)
            if done.call == "open" and "O_RDONLY" in done.arguments and disk.file(done.path) is not None:
                read.add(done.path)
            if done.path.suffix == ".pt" and done.path.parent.name != "rows":
                listed |= names_in(disk.now().get(done.path, b""))
            if number not in chosen or (
                known == (known := (promised, disk.known(needed))) and not is_status(done.path)
            ):
                continue
            kinds = [disk.states(needed), disk.journal_states(needed)]
            kinds += [disk.states(is_status)] if is_status(done.path) else []
            states = {told_apart(files, needed): files for kind in kinds for files in kind}
            for key in sample([*states], 5):
                if key not in resumed:
                    write(states[key], output, memory / "run")
                    resumed[key] = resume(config)
                    found.setdefault(resumed[key], states[key])
                check(resumed[key], promised, whole)
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == disk.now()
    assert all(needed(path) or is_status(path) for path in read if path.is_file()), read
    print(f"{len(resumed):,} states after a power failure; {len(found)} ways to resume")
    if request.config.getoption("all"):
        assert len(resumed) > 1000 and {each.step for each in found} >= {0, *range(2, 21, 2)}
    for files in sample([*found.values()], 2):
        write(files, output, memory / "run")
        train(WAYS[way][0], *options(way, memory / "run"))
        assert_same_run(output, memory / "run")


def check(resumed: Resumed, promised: int, whole: list[str]) -> None:
    """promised: the last step that was reported as saved. whole: the metrics of the run that was not disturbed."""
    assert resumed.step >= promised, f"step {promised} was reported as saved"
    assert resumed.checkpoints >= min(2, promised // 2), "--keep-checkpoints"
    assert about(resumed.metrics, resumed.step) == about(whole, resumed.step)


# ---- one operation fails, or is the last one ------------------------------------------------------------------------

ERRORS = (errno.EIO, errno.ENOSPC, errno.EROFS)
KILL = 0
END = 6  # the run that fails resumes at step 4, and saves step 5, which is the best one, and step 6


class Failing:
    """Runs of which one file operation fails."""

    def __init__(self, process: subprocess.Popen[str], folder: Path, way: str) -> None:
        self.process: Any = process
        self.output, self.log, self.way = folder / "run", folder / "operations", way

    def train(self, end: int, rank: int = 0, number: int = 0, error: int = 0) -> tuple[list[int], str]:
        """The exit codes of the ranks, and their output.

        number: of the operation of `rank` that fails with `error`, from 1.
        """
        for log in self.log.parent.glob("operations*"):
            log.unlink()
        fail = {"FAIL_FOLDER": self.output, "FAIL_LOG": self.log, "FAIL_AT": number, "FAIL_ERRNO": error}
        variables = {name: str(value) for name, value in fail.items()}
        order: dict[str, Any] = {"way": self.way, "output": str(self.output), "end": end, "rank": rank}
        order |= {"killed": number > 0 and error == KILL}
        order["environment"] = variables
        print(json.dumps(order), file=self.process.stdin, flush=True)
        codes, output = json.loads(self.process.stdout.readline())
        return codes, output

    def operations(self, rank: int) -> list[str]:
        """Those of the last run."""
        return Path(f"{self.log}{rank}").read_text().splitlines()


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """A process that has torch and failing_calls.c loaded. It forks the ranks of each run."""
    need("cc")
    library = tmp_path_factory.mktemp("library") / "failing_calls.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, TESTS / "failing_calls.c"], check=True)
    variables = {**os.environ, "LD_PRELOAD": str(library)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([*map(str, RUNS), "fail"], env=variables, **pipes) as process:
        yield process


@pytest.fixture
def failing(process: subprocess.Popen[str], memory: Path, way: str) -> Failing:
    return Failing(process, memory, way)


def kill_once_saved(run: Run) -> None:
    """After step 4, which is no end of an epoch."""
    if run.state.step == 4 and run.ctx.rank == 0:
        while not (Path(run.config.output_dir) / "checkpoints" / "step_00000004.pt").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


def numbers(operations: list[str]) -> Iterator[tuple[int, bool]]:
    """The numbers of the operations that are tried, from 1, and whether it is TensorBoard's.

    TensorBoard opens and writes one file again and again: of its operations in a row, the first five and the last.
    """
    tensorboard = ["/tensorboard/" in operation for operation in operations]
    for place, is_one in enumerate(tensorboard):
        if 5 <= place < len(operations) - 1 and all(tensorboard[place - 5 : place + 2]):
            continue
        yield place + 1, is_one


def points(
    failing: Failing, memory: Path, errors: Sequence[int], sample: Sample
) -> Iterator[tuple[str, int, int, str]]:
    """Resume a run once for each of its file operations and each error. Returns which, exit code of the rank, output.

    Of TensorBoard's operations, each has one of three errors, or every third is killed.
    """
    processes = WAYS[failing.way][0]
    killed = start(processes, *options(failing.way, failing.output), after_step=kill_once_saved)
    os.waitid(os.P_PID, killed.pids[0], os.WEXITED | os.WNOWAIT)
    killed.kill()
    killed.wait()
    shutil.copytree(failing.output, memory / "before")
    failing.train(END)
    shutil.move(failing.output, memory / "whole")
    each = [(rank, *found) for rank in range(processes) for found in numbers(failing.operations(rank))]
    tried = [
        (rank, number, error)
        for rank, number, is_tensorboard in each
        for error in (errors[number % 3 :][:1] if is_tensorboard else errors)
    ]
    for rank, number, error in sample(tried, 8):
        shutil.copytree(memory / "before", failing.output)
        codes, output = failing.train(END, rank, number, error)
        operations = failing.operations(rank)
        if number <= len(operations):  # those of two threads may change places
            what = errno.errorcode.get(error, "killed")
            yield f"{number} of rank {rank}: {operations[number - 1]}, {what}", error, codes[rank], output
        shutil.rmtree(failing.output)


@fault(7, 8)
@pytest.mark.slow
@pytest.mark.parametrize("way", ["DDP"])
def test_an_error_at_any_operation_of_a_resume_and_a_save_is_one_line_and_damages_nothing(
    failing: Failing, memory: Path, sample: Sample, request: pytest.FixtureRequest
) -> None:
    before = None
    counts: dict[int, int] = {}
    left: dict[Any, str] = {}
    for point, error, code, output in points(failing, memory, ERRORS, sample):
        before = before or checkpoints(memory / "before")
        warnings = [line for line in output.splitlines() if line.startswith(("warning", "error", "Traceback"))]
        counts[code] = counts.get(code, 0) + 1
        if code == 0:  # an earlier checkpoint is read, or TensorBoard is left out
            assert len(warnings) <= 1, (point, output)
            assert_same_run(memory / "whole", failing.output)
            continue
        (line,) = warnings
        assert code == (3 if "cannot write to the output directory" in line else 7), (point, output)
        assert os.strerror(error) in line and str(failing.output) in line and ".tmp:" not in line, (point, line)
        for path in failing.output.rglob("*.pt"):
            checkpoint.verify(path)
        assert checkpoints(failing.output)[-1] >= before[-1], point
        resume_once(failing, memory, point, left)
    print(counts, f"{len(left)} ways to resume")
    if request.config.getoption("all"):
        assert min(counts[0], counts[3], counts[7]) > 10


@fault(2)
@pytest.mark.slow
@pytest.mark.sample(0)
@pytest.mark.parametrize("way", WAYS)
def test_a_run_may_be_killed_at_any_operation_of_a_resume_and_a_save(
    failing: Failing, memory: Path, sample: Sample, request: pytest.FixtureRequest
) -> None:
    left: dict[Any, str] = {}
    killed = 0
    for point, _, code, output in points(failing, memory, [KILL], sample):
        assert code == -signal.SIGKILL, (point, code, output)
        for path in failing.output.rglob("*.pt"):
            checkpoint.verify(path)  # no file with this name is ever incomplete
        resume_once(failing, memory, point, left)
        killed += 1
    print(f"killed {killed} times; {len(left)} ways to resume")
    if request.config.getoption("all"):
        assert killed > 60 and len(left) > 5


def resume_once(failing: Failing, memory: Path, point: str, left: dict[Any, str]) -> None:
    """Resume what is left, unless the same was left before. It ends as if nothing had happened."""
    found = [path for path in sorted(failing.output.rglob("*")) if path.is_file()]
    read = [path for path in found if is_read(path) or path.suffix == ".tmp" or path.parent.name == "rows"]
    key = tuple((re.sub(r"[\d-]+\.ddp\.tmp|-\w{8}\.pt", "", path.name), part_of_key(path)) for path in read)
    if left.setdefault(key, point) == point:
        codes, output = failing.train(END)
        assert not any(codes), (point, output)
        assert_same_run(memory / "whole", failing.output)


def part_of_key(path: Path) -> Any:
    """What decides how a file is resumed: nothing for a temporary file; no times, and no names that are random."""
    if path.suffix == ".tmp":
        return None
    if path.suffix != ".pt" or path.parent.name == "rows":
        return re.sub(rb'"(samples_per_s|step_ms|data_ms|memory_mb)": [^,}]*', b"", path.read_bytes())
    content = torch.load(path, weights_only=True)
    rows = sorted(content.pop("rows", {}).values())  # their digests; the tensors that they hold are empty here
    parts = {name: part for name, part in content.items() if name != "time"}
    return digest([map_named(parts, lambda _, tensor: torch.empty(0) if tensor.is_meta else tensor), rows])
