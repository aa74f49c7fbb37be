"""benchmark.py of a generated project: one process against DataParallel against DDP."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmark import Task, Trainer
from matplotlib.image import imread

from config import parse
from ddp.group import Group
from ddp.speeds import DATA, ONE, PARALLEL, SILENT, STRONG, WEAK, Row, doubts, limits, plot, summary, table, write_csv
from processes import on_ranks

TEMPLATE = Path(__file__).resolve().parent.parent / "{{cookiecutter.project_slug}}"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")
SHORT = ("--device", "cpu", "--seconds", "0.02", "--repeats", "1")


def benchmark(*options: Any, launcher: tuple[str, ...] = (), timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run benchmark.py as a user does."""
    command = [sys.executable, *launcher, TEMPLATE / "benchmark.py", *options]
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=timeout)


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "benchmark.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_it_measures_one_process_and_ddp_on_one_and_two_and_says_what_limits(tmp_path: Path) -> None:
    done = benchmark(*SHORT, "--dataset", "synthetic", "--nproc", 2, "--batch-size", 8, "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path)
    measured = [(row["kind"], row["processes"], row["batch"]) for row in rows]
    assert measured == [
        *((kind, "1", "8") for kind in (ONE, WEAK, SILENT, DATA)),
        *((kind, "2", "8") for kind in (WEAK, SILENT, DATA)),
        (STRONG, "2", "4"),
    ]
    assert all(float(row["samples_per_s"]) > 0 for row in rows)
    for text in ("one process", "DDP, 1 process", "DDP, 2 processes, weak", "DDP, 2 processes, strong", "limited by"):
        assert text in done.stdout
    assert "DataParallel needs two GPUs" in done.stdout and str(tmp_path / "benchmark.csv") in done.stdout
    assert not done.stderr, "nothing but the table"


@pytest.mark.slow
def test_a_launcher_lets_it_measure_ddp_on_all_of_its_processes(tmp_path: Path) -> None:
    """Here a segmentation model, without data of its own; it cannot share a batch of 3: BatchNorm needs two."""
    model = ("--model", "deeplabv3_mobilenet_v3_large", "--image-size", 64, "--batch-size", 3, "--precision", "bf16")
    done = benchmark(*SHORT, *model, "--output", tmp_path, launcher=TORCHRUN)
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path)
    assert [(row["kind"], row["processes"], row["batch"]) for row in rows] == [(WEAK, "2", "3"), (SILENT, "2", "3")]
    assert all(row["speed_up"] == "" for row in rows), "there is no process alone to compare with"
    assert "data" not in done.stdout.split("Where the time")[1].split("limited by")[0]


@pytest.mark.parametrize(
    ("launcher", "options", "line"),
    [
        (TORCHRUN, ("--seconds", "0"), "--seconds: '0' is not a number above 0"),
        ((), ("--model", "fcn_none", "--nproc", 1), "--model fcn_none: torchvision has no such model"),
    ],
)
@pytest.mark.slow
def test_what_cannot_be_measured_is_refused_in_one_line(
    launcher: tuple[str, ...], options: tuple[str, ...], line: str
) -> None:
    done = benchmark("--device", "cpu", *options, launcher=launcher)
    assert done.returncode == (1 if launcher else 2), done.stderr
    # Around it, torchrun's own words; the first of them only where OMP_NUM_THREADS is not set.
    assert [line in said for said in done.stderr.splitlines() if "error:" in said] == [True], done.stderr
    assert launcher or "Traceback" not in done.stderr


def test_a_speed_is_the_samples_of_all_processes_over_the_time_of_their_steps(
    small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock on which a step takes 10 ms."""
    now = 0.0

    def a_step(*_: Any) -> None:
        nonlocal now
        now += 0.01

    def speed(group: Group) -> float:
        task = Task(parse(["--dataset", "synthetic", "--device", "cpu", "--batch-size", "8"]))
        trainer = Trainer(task, group, lambda model: model)
        trainer.trained.register_forward_hook(a_step)
        return trainer.speed(task.batches(group), seconds=0.2)

    monkeypatch.setattr("time.perf_counter", lambda: now)
    assert on_ranks(2, speed) == pytest.approx([2 * 8 / 0.01] * 2)


ROUNDS = [  # samples/s by kind and processes, of three rounds
    *((ONE, 1, 8, speed) for speed in (100.0, 110.0, 90.0)),
    *((WEAK, 2, 8, speed) for speed in (150.0, 160.0, 140.0)),
    *((SILENT, 2, 8, speed) for speed in (250.0, 250.0, 250.0)),
    *((DATA, 2, 8, speed) for speed in (75.0, 75.0, 75.0)),
    *((STRONG, 2, 4, speed) for speed in (120.0, 130.0, 110.0)),
    *((PARALLEL, 2, 8, speed) for speed in (130.0, 130.0, 130.0)),
]


def test_speed_up_and_efficiency_are_of_medians_against_one_process() -> None:
    lines = {line.kind: line for line in summary([Row(*row) for row in ROUNDS])}
    weak = lines[WEAK]
    assert (weak.samples_per_s, weak.least, weak.most) == (150.0, 140.0, 160.0)
    assert (weak.speed_up, weak.efficiency) == (1.5, 0.75)
    assert (lines[STRONG].speed_up, lines[PARALLEL].efficiency) == (1.2, 0.65)
    said = table(list(lines.values())).splitlines()
    assert said[2].split() == ["DDP,", "2", "processes,", "weak", "8", "150", "13%", "1.50", "75%"]
    assert said[4].startswith("DataParallel, 2 GPUs")
    assert not any(SILENT in line or DATA in line for line in said)


def test_the_time_of_a_step_is_split_into_compute_communication_and_data() -> None:
    """Of 1/75 s: 1/250 without all-reduce, 1/150 with it, and the rest for data."""
    (line,) = limits(summary([Row(*row) for row in ROUNDS])).splitlines()
    assert " ".join(line.split()) == "2 processes compute 30% communication 20% data 50% limited by data"


def test_one_process_communicates_with_nobody() -> None:
    rows = [Row(WEAK, 1, 8, 100.0), Row(SILENT, 1, 8, 200.0), Row(DATA, 1, 8, 80.0)]
    assert " ".join(limits(summary(rows)).split()) == "1 process compute 80% data 20% limited by compute"


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([Row(ONE, 1, 8, 100.0), Row(ONE, 1, 8, 110.0), Row(WEAK, 2, 8, 180.0)], ""),
        ([Row(ONE, 1, 8, 100.0), Row(ONE, 1, 8, 160.0)], "the rounds differ by up to 46%"),
        ([Row(ONE, 1, 8, 100.0), Row(WEAK, 2, 8, 400.0)], "an efficiency of 200%"),
    ],
)
def test_figures_of_a_machine_in_use_are_called_unsteady(rows: list[Row], why: str) -> None:
    assert (why in doubts(summary(rows))) and bool(doubts(summary(rows))) == bool(why)


def test_csv_and_plot_hold_what_was_measured(tmp_path: Path) -> None:
    lines = summary([Row(*row) for row in ROUNDS])
    write_csv(tmp_path / "benchmark.csv", lines)
    assert float(rows_of(tmp_path)[1]["efficiency"]) == 0.75
    plot(tmp_path / "benchmark.png", "a title", lines)
    picture = imread(tmp_path / "benchmark.png")
    assert min(picture.shape[:2]) > 400 and picture[..., :3].std() > 0.05
