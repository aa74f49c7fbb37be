"""The benchmarks of the repository run and measure what they claim. No test asserts a speed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import versions  # noqa: E402
from training import ALL, OURS, Case, cases_for, table  # noqa: E402


def run(name: str, *options: Any) -> str:
    command = [sys.executable, str(BENCHMARKS / name), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env={**os.environ, "COLUMNS": "100"})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_project_is_compared_with_the_naive_script_and_the_limit(tmp_path: Path) -> None:
    """The other contestants need libraries that only the environment of `make bench` has."""
    short = ("--repetitions", 1, "--steps", 0.05, "--cases", "toy-b128-p1")
    output = run("training.py", *short, "--contestants", "naive", OURS, "limit", "--output", tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    speeds = results["images_per_s"]["toy-b128-p1"]
    assert list(speeds) == ["naive", OURS, "limit"] and all(len(speed) == 1 for speed in speeds.values())
    (part,) = results["of_the_limit"]["toy-b128-p1"]
    assert f"| {OURS} | {speeds[OURS][0]:,.0f} | {speeds[OURS][0] / speeds['naive'][0]:.2f} | {part:.1%} |" in output
    assert imread(tmp_path / "speed.png").std() > 0.05


def test_ratios_are_computed_within_a_repetition() -> None:
    case = Case(
        "name", "a title", 2, 16, 100, speeds={"naive": [10, 20, 40], OURS: [20, 50, 80], "limit": [25, 50, 100]}
    )
    lines = table(case)
    assert lines[0] == "**a title**"
    assert lines[5] == f"| {OURS} | 50 | 2.00 (2.00 to 2.50) | 80.0% (80.0% to 100.0%) |"
    case.parts = [0.9, 0.97, 0.95]
    assert table(case)[5].endswith("| 95.0% (90.0% to 97.0%) |"), "turns in one process are more exact"


@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_no_case_needs_more_steps_than_an_epoch_has(gpus: int) -> None:
    """At the end of an epoch this project would evaluate, and the others would not."""
    cases = cases_for(gpus)
    images = {"cifar10": 50_000, "synthetic": 10_000, "imagefolder": 6_000}
    for case in cases:
        assert 10 <= case.steps <= images[case.dataset] // (case.batch * case.processes), case.name
    assert len({case.name for case in cases}) == len(cases)
    if gpus:
        assert all(case.dataset == "synthetic" and case.image_size == 224 for case in cases[1:])
        assert [case.model for case in cases].count("resnet50") == 3
    else:
        assert all(case.contestants == ALL for case in cases)


@pytest.mark.slow
def test_evaluating_resuming_and_saving_are_measured() -> None:
    """All results are present, and are numbers. The script exits if a measurement fails."""
    output = run("beyond_steps.py", "--quick")
    rows = [line for table in output.split("\n\n")[:3] for line in table.splitlines()[2:]]
    figures = {}
    for row in rows:
        name, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        figures[name] = [float(cell.rstrip("%").replace(",", "")) for cell in cells]
    assert {name: len(values) for name, values in figures.items()} == {
        "batch 128, 1 process": 3,
        "batch 128, 2 processes": 3,
        "first batch, data in memory": 3,
        "first batch, image files and workers": 3,
        "first step, from the start of the command": 3,
        "ToyModel, batch 16, 0.5 MB": 5,
        "resnet18, batch 2, 89.6 MB": 5,
    }
    delays = {name: values.pop(3) for name, values in figures.items() if len(values) == 5}
    assert all(value > 0 for values in figures.values() for value in values), figures
    assert all(abs(delay) < 10_000 for delay in delays.values()), "a difference of two times, which may be negative"


def test_a_step_is_timed_within_one_turn() -> None:
    """Between turns a version is stopped: that time belongs to no step, and neither does an evaluation."""
    first = [0.01 * number for number in range(versions.FIRST_STEPS)]
    turn = [10.0 + 0.1 * number for number in range(20)]
    after_evaluation = [50.0 + 0.1 * number for number in range(20)]
    ends = [*first, *turn, *after_evaluation]
    assert versions._step_s(ends, 9.5, 12.5) == pytest.approx(0.1)
    assert versions._step_s(ends, 11.0, 51.0) == pytest.approx(0.1)
    assert versions._step_s(ends, 20.0, 21.0) is None


@pytest.mark.slow
def test_two_versions_take_turns() -> None:
    output = run("versions.py", BENCHMARKS.parent, "--cases", "toy-b16-p1", "--seconds", 8)
    found = re.search(r": (\d\.\d+) \((\d\.\d+) to (\d\.\d+)\), (\d+) pairs$", output)
    assert found is not None and 0 < float(found[2]) <= float(found[1]) <= float(found[3]) and int(found[4]) > 1
