"""A run that is killed repeatedly, in every way, and resumed by the same command equals an uninterrupted run."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from outputs import newest, weights_and_momentum
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from faults import fault
from processes import start, train

MAIN = Path(__file__).resolve().parent.parent / "{{cookiecutter.project_slug}}" / "main.py"
FORKED: list[Any] = []  # no launcher
SPAWN = [sys.executable, MAIN, "--nproc", 2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
TORCHRUN += ["--nproc-per-node", 2, MAIN]
TRAIN, TEST = 240, 16  # numbers of images
PER_EPOCH = TRAIN // (2 * 4)
# A small model with dropout and BatchNorm, DataLoader workers, and a checkpoint every third of a second.
OPTIONS = ["--dataset", "imagefolder", "--model", "mobilenet_v3_small", "--batch-size", 4, "--workers", 1]
OPTIONS += ["--checkpoint-every", 5, "--log-every", 1, "--epochs", 1000, "--timeout", 60]
START_S, TRAIN_S = 4.0, 0.5  # a signal is sent within this time after the start, or after training began


class Forked:
    """One start of two ranks that the test forks, since Python takes seconds to start: for signals to the ranks."""

    def __init__(self, options: list[Any]) -> None:
        self.ranks = start(2, *options)

    def workers(self) -> list[int]:
        return self.ranks.pids

    def until(self, condition: Callable[[], Any]) -> None:
        self.ranks.until(condition)

    def wait(self) -> list[int]:
        """The exit codes of the ranks."""
        return self.ranks.wait()

    def kill_all(self) -> None:
        self.ranks.kill()

    def output(self) -> str:
        return self.ranks.output()


class Run:
    """One start of the command. A mark in their environment identifies all of its processes."""

    def __init__(self, launcher: list[Any], options: list[Any], mark: str) -> None:
        self.mark = f"CHAOS={mark}".encode()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CHAOS": mark, "PYTHONUNBUFFERED": "1"}
        self.log = Path(options[-1]).parent / "log"
        with self.log.open("wb") as log:
            self.launcher = subprocess.Popen(
                [str(part) for part in (*launcher, *options)],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def processes(self) -> list[int]:
        """All processes of this start that still run, including those whose parent is gone."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and self.mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def workers(self) -> list[int]:
        """The process ids of rank 0 and rank 1; fewer before both have started."""
        children = []
        for pid in self.processes():
            with suppress(OSError):
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if parent == self.launcher.pid and (b"spawn_main" in command or str(MAIN).encode() in command):
                    children.append(pid)
        return sorted(children)

    def until(self, condition: Callable[[], Any], timeout: float = 180) -> None:
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end and self.launcher.poll() is None, (
                f"not before it exited, or within {timeout:g} s:\n{self.output()}"
            )
            time.sleep(0.002)

    def wait(self, timeout: float = 300) -> int:
        """The launcher's exit code, once all processes have exited. If some have not in time, kills them, and fails."""
        end = time.monotonic() + timeout
        while self.launcher.poll() is None or self.processes():
            if time.monotonic() > end:
                left = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in self.processes()}
                self.kill_all()
                raise AssertionError(f"after {timeout} s these still run: {left}:\n{self.output()}")
            time.sleep(0.02)
        return self.launcher.returncode

    def kill_all(self) -> None:
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.launcher.wait()

    def output(self) -> str:
        return self.log.read_text(errors="replace")


# The target of a signal: the process of the launcher, or of a rank.
LAUNCHER, RANK_0, RANK_1 = -1, 0, 1
# (launcher, signal, targets, when): 20 of them.
KILLS: list[tuple[list[Any], int, tuple[int, ...], str]] = [
    (FORKED, signal.SIGKILL, (RANK_0,), "training"),
    (FORKED, signal.SIGKILL, (RANK_1,), "training"),
    *[(FORKED, signal.SIGKILL, (RANK_0, RANK_1), "training")] * 2,
    *[(FORKED, signal.SIGKILL, (RANK_0,), "saving")] * 2,
    (FORKED, signal.SIGTERM, (RANK_0,), "training"),
    (FORKED, signal.SIGTERM, (RANK_1,), "saving"),
    (SPAWN, signal.SIGKILL, (RANK_1,), "training"),
    (SPAWN, signal.SIGKILL, (LAUNCHER,), "training"),
    *[(SPAWN, signal.SIGKILL, (LAUNCHER,), "starting")] * 2,
    (SPAWN, signal.SIGKILL, (LAUNCHER, RANK_0, RANK_1), "saving"),
    (SPAWN, signal.SIGTERM, (LAUNCHER,), "training"),
    (TORCHRUN, signal.SIGKILL, (RANK_0,), "training"),
    (TORCHRUN, signal.SIGKILL, (LAUNCHER,), "training"),
    (TORCHRUN, signal.SIGKILL, (LAUNCHER,), "starting"),
    (TORCHRUN, signal.SIGKILL, (LAUNCHER,), "saving"),
    (TORCHRUN, signal.SIGKILL, (LAUNCHER, RANK_0, RANK_1), "saving"),
    (TORCHRUN, signal.SIGTERM, (RANK_1,), "training"),
]


def newest_step(output: Path) -> int:
    return max([int(path.stem.removeprefix("step_")) for path in (output / "checkpoints").glob("step_*.pt")] or [0])


def send_signals(
    run: Run | Forked, output_dir: Path, number: int, targets: tuple[int, ...], when: str, moment: float
) -> None:
    """Send the signal at a moment (0 to 1) of the start or of the training; or after it, in the middle of a save."""
    if when == "starting":
        run.until(run.workers)
        time.sleep(START_S * moment)
    else:
        run.until(lambda: "train  loss" in run.output())
        time.sleep(TRAIN_S * moment)
    if when == "saving":
        run.until(lambda: any((output_dir / "checkpoints").glob("*.tmp")))
    workers = run.workers()
    for target in targets:
        os.kill(run.launcher.pid if isinstance(run, Run) and target == LAUNCHER else workers[target], number)


def check_end(code: Any, launcher: list[Any], number: int, targets: tuple[int, ...], output: str, newest: int) -> None:
    """Check the exit code (of FORKED: both), and the output. `newest`: the step of the newest checkpoint."""
    if launcher is FORKED:
        assert code == [75 if number == signal.SIGTERM else -9 if rank in targets else 8 for rank in (0, 1)], output
    elif LAUNCHER in targets and number == signal.SIGKILL:
        assert code == -signal.SIGKILL
    elif launcher is TORCHRUN:
        assert code == 1  # torchrun's own, for any code of its workers; launch_node.sh exits with theirs
    elif number == signal.SIGTERM:
        assert code == 75, output
    else:
        assert code == 8, output
    if number == signal.SIGTERM:
        assert len(re.findall("^stopped on request and saved", output, re.MULTILINE)) == 1, output
    elif launcher is not TORCHRUN and len(targets) == 1 and targets != (LAUNCHER,):
        found = re.search(
            rf"rank {targets[0]} was lost .*; (?:nothing was saved yet|resumable from step ([\d,]+)):", output
        )
        assert found is not None, output
        assert int((found[1] or "0").replace(",", "")) <= newest, f"there is no such checkpoint:\n{output}"
    if launcher is not TORCHRUN:
        assert "Traceback" not in output, output


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of random images in two classes."""
    root = tmp_path_factory.mktemp("images")
    generator = torch.Generator().manual_seed(0)
    for split, each in (("train", TRAIN // 2), ("val", TEST // 2)):
        for label in ("cat", "dog"):
            (root / split / label).mkdir(parents=True)
            for number in range(each):
                pixels = torch.randint(0, 256, (32, 32, 3), generator=generator, dtype=torch.uint8)
                Image.fromarray(pixels.numpy()).save(root / split / label / f"{number}.png")
    return root


def logged(output: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without what depends on the speed of the machine."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{name: line.get(name) for name in ("step", "split", "epoch", "loss", "accuracy", "lr")} for line in lines]


def scalars(output: Path, name: str) -> list[tuple[int, float]]:
    """The steps and values of a TensorBoard curve."""
    events = EventAccumulator(str(output / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def compare(output: Path, whole: Path) -> None:
    """The checkpoints and logs of two runs are the same, bit for bit."""
    assert newest(output).name == newest(whole).name
    assert weights_and_momentum(output) == weights_and_momentum(whole), "the weights or the momentum differ"
    assert logged(output) == logged(whole)
    steps = [line["step"] for line in logged(output) if line["split"] == "train"]
    assert steps == list(range(1, len(steps) + 1)), "a step was logged twice or not at all"
    for name in ("train/loss", "train/accuracy", "train/lr", "val/loss", "val/accuracy"):
        assert scalars(output, name) == scalars(whole, name), name
    assert [step for step, _ in scalars(output, "train/loss")] == steps


@pytest.mark.slow
@fault(1, 2, 9, 12)
@pytest.mark.sample(0)
@pytest.mark.parametrize("more", [[], ["--shard"]], ids=["ddp", "shard"])
def test_a_run_that_is_killed_repeatedly_equals_an_uninterrupted_one(
    images: Path, tmp_path: Path, more: list[str], seed: int, sample: Callable[[Sequence[Any], int], list[Any]]
) -> None:
    """With --shard, without launchers, and compared to a run without --shard: both are the same, bit for bit."""
    print(f"SEED={seed}")
    generator = random.Random(seed)
    forked, launched = ([kill for kill in KILLS if (kill[0] is FORKED) == yes] for yes in (True, False))
    kills = [*sample(forked, 3), *sample(launched, 1)]
    generator.shuffle(kills)
    if more:
        kills = generator.choices(forked, k=20)
    output = tmp_path / "run"
    options = [*OPTIONS, "--data-dir", images, *(["--model", "ToyModel"] if more else [])]
    before, began = 0, time.monotonic()
    for count, (launcher, number, targets, when) in enumerate(kills, start=1):
        given = [*options, *more, "--output-dir", output]
        run = Run(launcher, given, f"{os.getpid()}-{count}") if launcher else Forked(given)
        try:
            send_signals(run, output, number, targets, when, generator.random())
            code = run.wait()
        finally:
            run.kill_all()
        event = f"signal {number} to {targets}, {when}: exit code {code}"
        name = {id(FORKED): "forked", id(SPAWN): "--nproc", id(TORCHRUN): "torchrun"}[id(launcher)]
        print(f"{time.monotonic() - began:6.1f} s  {count:>2}  {name:<8}  {event}, step {newest_step(output)}")
        check_end(code, launcher, number, targets, run.output(), newest_step(output))
        assert newest_step(output) >= before, "a checkpoint was lost"
        before = newest_step(output)

    end = [*options, "--max-steps", before + 7, "--output-dir"]
    run = Run(SPAWN, [*more, *end, output], f"{os.getpid()}-end")
    assert run.wait() == 0, run.output()
    train(2, *end, tmp_path / "whole")
    print(f"{time.monotonic() - began:6.1f} s  both ended at step {newest_step(output)}")
    compare(output, tmp_path / "whole")
    assert not [path for path in output.rglob("*") if ".tmp" in path.name], "a temporary file is left"
