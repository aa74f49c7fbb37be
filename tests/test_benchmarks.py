"""The benchmarks of the repository run and measure what they claim. No test asserts a speed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from matplotlib.image import imread
from project_runs import python

import machines

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
TEMPLATE = BENCHMARKS.parent / "{{cookiecutter.project_slug}}"
sys.path.insert(0, str(BENCHMARKS))

import crash_judge  # noqa: E402
import training  # noqa: E402
import variants  # noqa: E402
import versions  # noqa: E402
from training import ALL, IN_TURNS, LIMIT, NAIVE, OURS, Bench, Case, RunFailed, cases_for, table  # noqa: E402

from made_up import cifar10, jpegs  # noqa: E402


def run(name: str, *options: Any, **variables: str) -> str:
    return python(BENCHMARKS.parent, BENCHMARKS / name, *options, timeout=600, COLUMNS="100", **variables)


def cells_of(output: str) -> list[list[str]]:
    """The rows of the tables, without their heads."""
    lines = output.splitlines()
    rows = [line for line, after in zip(lines, [*lines[1:], ""], strict=True) if not after.startswith("|--")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows if re.match(r"\|[^-]", row)]


def test_ratios_are_computed_within_a_repetition() -> None:
    case = Case(
        "name", "a title", 2, 16, 100, speeds={"naive": [10, 20, 40], OURS: [20, 50, 80], "limit": [25, 50, 100]}
    )
    lines = table(case)
    assert lines[0] == "**a title**"
    assert lines[5] == f"| {OURS} | 50 | 2.00 (2.00 to 2.50) | 80.0% (80.0% to 100.0%) |"
    case.parts = [0.9, 0.97, 0.95]
    assert table(case)[5].endswith("| 95.0% (90.0% to 97.0%) |"), "turns in one process are more exact"


def test_a_failed_repetition_takes_its_partner_out_of_the_ratios() -> None:
    speeds: dict[str, list[float | None]] = {NAIVE: [10, None, 40], OURS: [20, 50, None], LIMIT: [None, None, None]}
    failures = {OURS: ["exit code 1, see c.log"], LIMIT: ["exit code 1, see b.log"] * 3, IN_TURNS: ["wrote no times"]}
    case = Case("name", "a title", 2, 16, 100, speeds=speeds, parts=[0.9, None, 0.8], failures=failures)
    assert table(case)[4:] == [
        f"| {NAIVE} | 25 | 1.00 | - |",
        f"| {OURS} | 35; failed: exit code 1, see c.log | 2.00 | 85.0% (80.0% to 90.0%) |",
        f"| {LIMIT} | failed: {'; failed: '.join(failures[LIMIT])} | - | - |",
        f"| {IN_TURNS} | failed: wrote no times | - | - |",
        "",
    ]


@pytest.mark.slow
@pytest.mark.sample(0)
def test_the_project_is_compared_with_the_limit_although_another_contestant_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The contestants that are not here need libraries that only the environment of `make bench` has."""
    (tmp_path / "fails.py").write_text("print('what the log must keep', flush=True)\nraise SystemExit(3)\n")
    results, seen = tmp_path / "out" / "results.json", []
    measure = Bench.speed

    def speed(self: Bench, case: Case, contestant: str) -> float:
        if contestant == OURS:
            seen.append(json.loads(results.read_text()))
        return measure(self, case, contestant)

    monkeypatch.setattr(Bench, "speed", speed)
    monkeypatch.setitem(training.SCRIPTS, NAIVE, str(tmp_path / "fails.py"))
    cases = [Case(name, f"a {name} case", 1, 4, 10, slices=4) for name in ("tiny", "huge")]
    monkeypatch.setattr(training, "cases_for", lambda gpus: cases)
    monkeypatch.setattr(training, "cifar10", lambda folder: cifar10(folder, images=10_000))
    chosen = ["--cases", "tiny", "--contestants", NAIVE, OURS, LIMIT]
    monkeypatch.setattr(sys, "argv", ["training.py", "--repetitions", "1", *chosen, "--output", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="1 of the measurements failed"):
        training.main()

    found = json.loads(results.read_text())
    (speeds,), (part,) = found["images_per_s"].values(), found["of_the_limit"]["tiny"]
    assert list(speeds) == [NAIVE, OURS, LIMIT] and speeds[NAIVE] == [None] and speeds[LIMIT][0] > 0
    (failure,) = found["failures"]["tiny"][NAIVE]
    assert failure.startswith("exit code 1, see ")
    assert "what the log must keep" in (tmp_path / "out" / failure.split()[-1]).read_text()
    output = capsys.readouterr().out
    assert f"| {NAIVE} | failed: {failure} | - | - |" in output
    assert f"| {OURS} | {speeds[OURS][0]:,.0f} | - | {part:.1%} |" in output
    first = {**found, "images_per_s": {"tiny": {NAIVE: [None]}}, "of_the_limit": {"tiny": []}}
    assert seen == [first], "the results come with each measurement"
    assert imread(tmp_path / "out" / "speed.png").std() > 0.01


def test_a_contestant_that_hangs_is_ended_with_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell script acts as torchrun. Like a rank, its child is in a session of its own, and ignores SIGTERM."""
    bench = Bench(tmp_path, None, tmp_path)
    (tmp_path / "imagefolder").mkdir()
    torchrun, pid, wait = tmp_path / "torchrun", tmp_path / "pid", training._wait
    rank = f"trap '' TERM; echo hanging; echo $$ > {pid}; sleep 600; exit"
    torchrun.write_text(f'#!/bin/bash\nsetsid bash -c "{rank}" &\nwait\n'.replace("$$", "\\$\\$"))
    torchrun.chmod(0o755)

    def wait_for_the_rank(process: subprocess.Popen[bytes]) -> str | None:
        while not (pid.exists() and pid.read_text().endswith("\n")):
            time.sleep(0.01)
        return wait(process)

    monkeypatch.setattr(training, "_wait", wait_for_the_rank)
    monkeypatch.setattr(sys, "executable", str(torchrun))
    monkeypatch.setattr(training, "RUN_TIMEOUT_S", 0.5)
    with pytest.raises(RunFailed, match=r"not done within 0\.5 s, see failed-1-tiny-naive\.log"):
        bench.speed(Case("tiny", "a tiny case", 1, 4, 10, "imagefolder"), NAIVE)
    assert (tmp_path / "failed-1-tiny-naive.log").read_text() == "hanging\n"
    assert not psutil.pid_exists(int(pid.read_text()))


@pytest.mark.sample(0)
@pytest.mark.slow
def test_the_workers_of_a_data_loader_end_with_the_timed_script(tmp_path: Path) -> None:
    """Slowly, so that torch notices that they were killed: it would raise that as an error."""
    jpegs(tmp_path / "data", 40, (32, 24))
    script = f"""
        import multiprocessing.process, runpy, sys, time
        kill = multiprocessing.process.BaseProcess.kill
        multiprocessing.process.BaseProcess.kill = lambda self: (kill(self), time.sleep(0.3))
        sys.path.insert(0, {str(BENCHMARKS / "loops")!r})
        runpy.run_path({str(BENCHMARKS / "loops" / "naive.py")!r}, run_name="__main__")
    """
    (tmp_path / "contestant.py").write_text(textwrap.dedent(script))
    options = ["--steps", "6", "--times", tmp_path / "times.json", tmp_path / "contestant.py", "--project", TEMPLATE]
    options += ["--dataset", "imagefolder", "--data-dir", tmp_path / "data", "--batch-size", 4, "--output", tmp_path]
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    run("loops/timed.py", *options, "--workers", 2, **environment)
    assert len(json.loads((tmp_path / "times.json").read_text())["steps"]) == 6


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


ROWS = {  # of each table: how many numbers they have
    "evaluation": {"batch 128, 1 process": 3, "batch 128, 2 processes": 3},
    "resuming": {
        "first batch, data in memory": 3,
        "first batch, image files and workers": 3,
        "first step, from the start of the command": 3,
    },
    "saving": {"ToyModel, batch 16, 0.5 MB": 5, "resnet18, batch 2, 89.6 MB": 5},
}


def assert_measured(kind: str) -> None:
    """All results are present, and are numbers. The script exits if a measurement fails."""
    found = cells_of(run("beyond_steps.py", "--quick", "--only", kind))
    figures = {name: [float(cell.rstrip("%").replace(",", "")) for cell in cells] for name, *cells in found}
    assert {name: len(values) for name, values in figures.items()} == ROWS[kind]
    delays = [values.pop(3) for values in figures.values() if kind == "saving"]
    assert all(value > 0 for values in figures.values() for value in values), figures
    assert all(abs(delay) < 10_000 for delay in delays), "a difference of two times, which may be negative"


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["evaluation", "saving"])
def test_evaluating_and_saving_are_measured(kind: str) -> None:
    assert_measured(kind)


@pytest.mark.slow
@pytest.mark.sample(0)
def test_resuming_is_measured() -> None:
    assert_measured("resuming")


@pytest.mark.slow
@pytest.mark.sample(0)
def test_the_memory_of_each_process_is_measured() -> None:
    """The bytes of weights, gradients and optimizer are counted: with --shard, two processes have half of them each."""
    output = run("shard_memory.py", "--width", 256, "--layers", 2, "--processes", 2)
    rows = cells_of(output)
    assert [row[0] for row in rows] == ["DDP, 2 processes", "`--shard`, 2 processes"]
    (*ddp, peak, start), (*sharded, their_peak, their_start) = ([int(cell) for cell in row[1:]] for row in rows)
    (number,) = (int(found.replace(",", "")) for found in re.findall(r"^([\d,]+) weights", output, re.MULTILINE))
    assert ddp == [round(4 * number / 1e6), round(4 * number / 1e6), round(8 * number / 1e6)]
    assert sharded == pytest.approx([size / 2 for size in ddp], abs=1)
    assert peak > sum(ddp) and their_peak > sum(sharded) and min(start, their_start) > 0


def test_a_step_is_timed_within_one_turn() -> None:
    """Between turns a version is stopped: that time belongs to no step, and neither does an evaluation."""
    first = [0.01 * number for number in range(versions.FIRST_STEPS)]
    turn = [10.0 + 0.1 * number for number in range(20)]
    after_evaluation = [50.0 + 0.1 * number for number in range(20)]
    ends = [*first, *turn, *after_evaluation]
    assert versions._step_s(ends, 9.5, 12.5) == pytest.approx(0.1)
    assert versions._step_s(ends, 11.0, 51.0) == pytest.approx(0.1)
    assert versions._step_s(ends, 20.0, 21.0) is None


def test_the_variants_of_a_step_fit_the_project(tmp_path: Path) -> None:
    for name, edits in variants.VARIANTS.items():
        project = variants.edited(name, tmp_path / name) / versions.TEMPLATE
        for file in {file for file, _, _ in edits}:
            compile((project / file).read_text(), file, "exec")
            assert (project / file).read_text() != (TEMPLATE / file).read_text()


@pytest.mark.slow
@pytest.mark.sample(0)
def test_two_versions_take_turns() -> None:
    output = run("versions.py", BENCHMARKS.parent, "--cases", "toy-b16-p1", "--seconds", 4)
    found = re.search(r": (\d\.\d+) \((\d\.\d+) to (\d\.\d+)\), (\d+) pairs$", output)
    assert found is not None and 0 < float(found[2]) <= float(found[1]) <= float(found[3]) and int(found[4]) > 1


@pytest.mark.slow
@pytest.mark.sample(0)
def test_an_outside_judge_lets_the_project_pass() -> None:
    """At one point of each kind; `python benchmarks/crash_judge.py` tries all of them."""
    printed = run("crash_judge.py", "DDP-1", "--points", 3)
    assert re.search(r"^DDP-1: [34] PASS; [01] points that no kill can cause are left out$", printed, re.M), printed


def test_the_outside_judge_fails_if_work_was_lost_or_no_point_passed(tmp_path: Path) -> None:
    work = tmp_path / "pt_1"
    work.mkdir()
    (work / "events.log.rank0").write_text("1\tos.rename\tcheckpoint.pt\t0\n2\topen\tmetrics.jsonl\t1\n")
    outcome = {"raised": None, "resumed_from_step": 2, "newest_complete_step": 4, "weights_diff": 0.0}
    (work / "result.json").write_text(json.dumps({"point": [1, "torn"], "outcome": outcome}))
    assert crash_judge.report("made up", tmp_path) == 1, "work was lost"
    (work / "result.json").write_text(json.dumps({"point": [2, "torn"], "outcome": outcome}))
    assert crash_judge.report("made up", tmp_path) == 1, "no point passed"


@pytest.mark.slow
@pytest.mark.sample(0)
def test_the_benchmark_of_recovery_measures_each_kind_of_loss() -> None:
    machines.require()
    output = run("recovery.py", "--quick")
    rows = cells_of(output)
    kinds = ["one of two processes", "the process of one of two machines", "one of two machines"]
    assert [re.split(r"[,(]", row[0])[0].strip() for row in rows] == kinds, output
    assert all(0 < float(row[2].split()[0]) < 300 for row in rows), output


@pytest.mark.slow
@pytest.mark.sample(0)
def test_the_costs_of_scale_are_measured(tmp_path: Path) -> None:
    output = run("scale.py", "--quick", "--plot", tmp_path / "scale.png")
    rows = cells_of(output)
    kinds = ["2", "1,024", "8,192", "0.062 GB", "0.062 GB"]
    assert [row[0] for row in rows if row[0][0].isdigit()] == kinds, output
    assert [row[1] for row in rows if row[0] == "0.062 GB"] == ["one", "one per rank"], output
    cost = {row[0]: float(row[3].rstrip("%")) for row in rows if row[0] in ("2", "1,024", "8,192")}
    assert 0 < cost["1,024"] <= 0.5 and 0 < cost["8,192"] <= 0.5
    assert (tmp_path / "scale.png").stat().st_size > 10_000
