"""benchmark.py of a generated project compares one process, DataParallel and DDP."""

from __future__ import annotations

import csv
import itertools
import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import benchmark
import pytest
import torch
from benchmark import Task, Trainer
from benchmark_report import (
    DATA,
    NO_SYNC,
    NO_TERMS,
    ONE,
    PARALLEL,
    STRONG,
    WEAK,
    Row,
    breakdown,
    memory_table,
    plot,
    summarize,
    table,
    warning,
    write_csv,
)
from matplotlib.image import imread
from project_runs import python
from template_copy import small_template
from torch import nn
from torch.utils.data import TensorDataset

from config import Config
from ddp.core.options import option
from ddp.core.run_config import RunConfig
from ddp.data.dataset import Datasets
from ddp.distributed.process_group import DistContext, Work
from ddp.training.wrapping import autocast
from processes import on_ranks

TEMPLATE = Path(__file__).resolve().parent.parent / "{{cookiecutter.project_slug}}"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")
SHORT = ("benchmark.py", "--device", "cpu", "--seconds", "0.02", "--repeats", "1")


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "benchmark.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_it_measures_one_process_and_ddp_on_one_and_two_and_names_what_limits(tmp_path: Path) -> None:
    options = ("--dataset", "synthetic", "--precision", "bf16", "--batch-size", 8)
    printed = python(small_template(), *SHORT, *options, "--nproc", 2, "--output", tmp_path, fork=True)
    rows = rows_of(tmp_path)
    measured = [(row["kind"], row["processes"], row["batch"]) for row in rows]
    assert measured == [
        *((kind, "1", "8") for kind in (ONE, WEAK, NO_SYNC, DATA)),
        *((kind, "2", "8") for kind in (WEAK, NO_SYNC, DATA)),
        (STRONG, "2", "4"),
    ]
    assert all(float(row["samples_per_s"]) > 0 for row in rows)
    for text in ("one process", "DDP, 1 process", "DDP, 2 processes, weak", "DDP, 2 processes, strong", "limited by"):
        assert text in printed
    assert "DataParallel needs two GPUs" in printed and str(tmp_path / "benchmark.csv") in printed
    assert printed.startswith("ToyModel, bf16, batch 8\n") or printed.startswith("ToyModel, 32 x 32, bf16, batch 8\n")


@pytest.mark.slow
@pytest.mark.sample(0)
def test_under_a_launcher_it_measures_ddp_on_all_processes(tmp_path: Path) -> None:
    """A segmentation model needs no data. BatchNorm needs two samples, so the processes cannot share a batch of 3."""
    model = ("--model", "deeplabv3_mobilenet_v3_large", "--image-size", 64, "--batch-size", 3)
    printed = python(TEMPLATE, *TORCHRUN, *SHORT, *model, "--output", tmp_path)
    rows = rows_of(tmp_path)
    assert [(row["kind"], row["processes"], row["batch"]) for row in rows] == [(WEAK, "2", "3"), (NO_SYNC, "2", "3")]
    assert all(row["speed_up"] == "" for row in rows), "there is no single process to compare with"
    assert "data" not in printed.split("Where the time")[1].split("limited by")[0]


@pytest.mark.slow
def test_wrong_options_are_refused_with_one_line() -> None:
    torchrun = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    found = [python(TEMPLATE, "benchmark.py", "--seconds", 0, code=2, RANK=rank, **torchrun) for rank in ("0", "1")]
    assert found == ["error: --seconds: '0' must be a number > 0; see --help\n", ""]
    output = python(TEMPLATE, "benchmark.py", "--device", "cpu", "--model", "fcn_none", "--nproc", 1, code=2)
    assert output == "error: --model fcn_none: torchvision has no such model\n"


def test_the_speed_is_the_samples_of_all_processes_divided_by_the_time_of_their_steps(
    small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock on which a step takes 10 ms."""
    now = 0.0

    def a_step(*_: Any) -> None:
        nonlocal now
        now += 0.01

    def speed(ctx: DistContext) -> float:
        task = Task(Config.parse(["--dataset", "synthetic", "--device", "cpu", "--batch-size", "8"]))
        trainer = Trainer(task, ctx, task.config, lambda model: model)
        trainer.trained.register_forward_hook(a_step)
        return trainer.speed(task.batches(ctx), seconds=0.2)

    monkeypatch.setattr("time.perf_counter", lambda: now)
    assert on_ranks(2, speed) == pytest.approx([2 * 8 / 0.01] * 2)


@dataclass
class OneOption(RunConfig):
    """The options of a task that has no images: without model, image_size and channels_last."""

    lr: float = option(0.1, "learning rate")


def test_it_measures_a_task_without_the_options_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    points = TensorDataset(torch.randn(64, 3), torch.randn(64, 1))
    monkeypatch.setattr(benchmark, "load_datasets", lambda config: Datasets(points, points))
    monkeypatch.setattr(benchmark, "build_model", lambda config, train_set: nn.Linear(3, 1))
    monkeypatch.setattr(
        benchmark, "build_optimizer", lambda model, config: torch.optim.SGD(model.parameters(), config.lr)
    )
    monkeypatch.setattr(
        benchmark, "compute_loss", lambda outputs, targets, config: nn.functional.mse_loss(outputs, targets)
    )

    def measure(ctx: DistContext) -> tuple[str, list[str]]:
        task = Task(OneOption.parse(["--device=cpu", "--batch-size=8", "--workers=0"]))
        rows = list(benchmark._round(task, ctx, seconds=0.01))
        assert all(row.samples_per_s > 0 for row in rows)
        return task.title(), [row.kind for row in rows]

    expected = "Linear, fp32, batch 8", [WEAK, NO_SYNC, DATA, STRONG]
    assert on_ranks(2, measure) == [expected] * 2


@pytest.mark.parametrize(("precision", "other"), [("bf16", torch.float16), ("fp16", torch.bfloat16)])
def test_a_replica_of_data_parallel_computes_in_the_precision_that_was_asked_for(
    precision: str, other: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DataParallel needs two GPUs. Here a thread does what torch.nn.parallel.parallel_apply does in each of its own:

    It turns autocast on, but does not pass its dtype on, so the thread has the default, on a GPU fp16.
    """
    ctx = SimpleNamespace(device=torch.device("cpu"), work=Work())
    config = Config.parse(["--precision", precision])
    model, outputs = nn.Linear(2, 2), []

    def replica(module: nn.Module) -> None:
        torch.set_autocast_dtype("cpu", other)
        with torch.amp.autocast("cpu", enabled=True):
            outputs.append(module(torch.ones(1, 2)).dtype)

    monkeypatch.setattr(nn, "DataParallel", lambda module: module)
    for module in (nn.DataParallel(model), benchmark._data_parallel(config, ctx, model)):  # type: ignore[arg-type]
        with autocast(config, ctx):  # type: ignore[arg-type]
            thread = threading.Thread(target=replica, args=(module,))
            thread.start()
            thread.join()
    assert outputs == [other, {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]]


ROUNDS = [  # samples/s by kind and processes, of three rounds
    *((ONE, 1, 8, speed) for speed in (100.0, 110.0, 90.0)),
    *((WEAK, 2, 8, speed) for speed in (150.0, 160.0, 140.0)),
    *((NO_SYNC, 2, 8, speed) for speed in (250.0, 250.0, 250.0)),
    *((DATA, 2, 8, speed) for speed in (75.0, 75.0, 75.0)),
    *((STRONG, 2, 4, speed) for speed in (120.0, 130.0, 110.0)),
    *((PARALLEL, 2, 8, speed) for speed in (130.0, 130.0, 130.0)),
]


def test_speed_up_and_efficiency_compare_medians_with_one_process() -> None:
    lines = {line.kind: line for line in summarize([Row(*row) for row in ROUNDS])}
    weak = lines[WEAK]
    assert (weak.samples_per_s, weak.min, weak.max) == (150.0, 140.0, 160.0)
    assert (weak.speed_up, weak.efficiency) == (1.5, 0.75)
    assert (lines[STRONG].speed_up, lines[PARALLEL].efficiency) == (1.2, 0.65)
    text_lines = table(list(lines.values())).splitlines()
    assert text_lines[2].split() == ["DDP,", "2", "processes,", "weak", "8", "150", "13%", "1.50", "75%"]
    assert text_lines[4].startswith("DataParallel, 2 GPUs")
    assert not any(NO_SYNC in line or DATA in line for line in text_lines)


def test_the_time_of_a_step_is_split_into_compute_communication_and_data() -> None:
    """A step takes 1/75 s: 1/250 s without all-reduce, 1/150 s with it, and the rest for data."""
    (line,) = breakdown(summarize([Row(*row) for row in ROUNDS])).splitlines()
    assert " ".join(line.split()) == "2 processes compute 30% communication 20% data 50% limited by data"


def test_the_cost_of_loss_terms_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where model.py defines them."""
    rows = [Row(*row) for row in ROUNDS] + [Row(NO_TERMS, 2, 8, 160.0)] * 3
    assert breakdown(summarize(rows)).endswith("limited by data   (loss_terms of model.py: 6.2% of the step)")
    assert NO_TERMS not in table(summarize(rows))

    def kinds(ctx: DistContext) -> list[str]:
        task = Task(Config.parse(["--dataset", "synthetic", "--device", "cpu", "--batch-size", "8"]))
        return [row.kind for row in benchmark._round(task, ctx, seconds=0.01)]

    assert NO_TERMS not in on_ranks(1, kinds)[0]
    counted: list[int] = []

    def loss_terms(outputs: Any, targets: Any) -> int:
        counted.append(len(targets))
        return len(targets)

    def counts(ctx: DistContext) -> list[int]:
        task = Task(Config.parse(["--dataset", "synthetic", "--device", "cpu", "--batch-size", "8"]))
        for terms in (True, False):
            Trainer(task, ctx, task.config, lambda model: model, terms).step(next(task.batches(ctx)))
        return counted

    monkeypatch.setattr(benchmark.model_file, "loss_terms", loss_terms, raising=False)
    assert on_ranks(1, counts) == [[8]], "with them, and without"
    assert on_ranks(1, kinds) == [[ONE, WEAK, NO_SYNC, NO_TERMS, DATA]]


def test_shard_is_measured_next_to_ddp_with_its_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A process has the memory of its rank, which grows with each measurement: the table has that of rank 1."""

    def measure(ctx: DistContext) -> list[Row]:
        used = itertools.count(5)
        benchmark.memory_mb = lambda device: (1 + ctx.rank) * float(next(used))  # type: ignore[assignment]
        given = ["--dataset", "synthetic", "--device", "cpu", "--batch-size", "8", "--shard"]
        return [*benchmark._round(Task(Config.parse(given)), ctx, seconds=0.01)]

    for rows in on_ranks(2, measure):
        found = [(row.kind, row.memory_mb) for row in rows]
        assert found == [("--shard", 2.0), (WEAK, 4.0), (NO_SYNC, 6.0), (DATA, 8.0), (STRONG, 10.0)]

    rows = [Row("--shard", 2, 8, 100.0, 20.0), Row(WEAK, 2, 8, 150.0, 40.0), Row(NO_SYNC, 2, 8, 200.0, 40.0)]
    benchmark.show(Config.parse(["--device", "cpu", "--shard"]), tmp_path, "a title", rows)
    text = capsys.readouterr().out
    memory = memory_table(summarize(rows))
    assert f"Memory of a process, at its peak (on CPUs, with what malloc keeps):\n{memory}\n" in text
    assert [" ".join(line.split()) for line in memory.splitlines()] == [
        "--shard, 2 processes 20 MB",
        "DDP, 2 processes, weak 40 MB",
    ]
    assert [(row["kind"], row["memory_mb"]) for row in rows_of(tmp_path)][:2] == [("--shard", "20.0"), (WEAK, "40.0")]


def test_one_process_does_not_communicate() -> None:
    rows = [Row(WEAK, 1, 8, 100.0), Row(NO_SYNC, 1, 8, 200.0), Row(DATA, 1, 8, 80.0)]
    assert " ".join(breakdown(summarize(rows)).split()) == "1 process compute 80% data 20% limited by compute"


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([Row(ONE, 1, 8, 100.0), Row(ONE, 1, 8, 110.0), Row(WEAK, 2, 8, 180.0)], ""),
        ([Row(ONE, 1, 8, 100.0), Row(ONE, 1, 8, 160.0)], "the rounds differ by up to 46%"),
        ([Row(ONE, 1, 8, 100.0), Row(WEAK, 2, 8, 400.0)], "an efficiency of 200%"),
    ],
)
def test_unsteady_results_of_a_busy_machine_are_marked(rows: list[Row], why: str) -> None:
    found = warning(summarize(rows))
    assert why in found and bool(found) == bool(why)


def test_csv_and_plot_hold_the_results(tmp_path: Path) -> None:
    lines = summarize([Row(*row) for row in ROUNDS])
    write_csv(tmp_path / "benchmark.csv", lines)
    assert float(rows_of(tmp_path)[1]["efficiency"]) == 0.75
    plot(tmp_path / "benchmark.png", "a title", lines)
    picture = imread(tmp_path / "benchmark.png")
    assert min(picture.shape[:2]) > 400 and picture[..., :3].std() > 0.05
