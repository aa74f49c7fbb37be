"""Training and evaluation are correct for any number of processes."""

from __future__ import annotations

import ast
import contextlib
import fcntl
import gc
import itertools
import json
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from outputs import checkpoints, lines, newest, weights_and_momentum
from project_runs import python
from template_copy import LEAN, TEMPLATE, copy_template, shrink
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

import ddp.training.run
import ddp.training.run_log
import images
import main
from config import Config
from ddp.checkpoint import storage as checkpoint
from ddp.core.files import write_status
from ddp.data.loader import EvalLoader, TrainLoader
from ddp.distributed.process_group import DistContext
from ddp.distributed.seeds import seed_step
from ddp.training.meter import Meter
from ddp.training.wrapping import wrap_model
from faults import fault
from processes import on_ranks, train
from small_models import Awkward, build_awkward, build_slow_awkward, build_smooth


def newest_model(output: Path) -> dict[str, torch.Tensor]:
    return checkpoint.read(newest(output))["model"]


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first command of the README, with real processes: two of them, three epochs."""
    output = tmp_path_factory.mktemp("first") / "run"
    command = ["bash", TEMPLATE / "launch_node.sh", "--nproc-per-node", "2", "--"]
    command += ["--dataset", "synthetic", "--epochs", "3", "--output-dir", output]
    command = [str(part) for part in command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | LEAN)
    assert done.returncode == 0, done.stdout + done.stderr
    return output


@pytest.mark.slow
def test_the_first_run_learns(first_run: Path) -> None:
    assert lines(first_run, "val")[-1]["accuracy"] > 0.9


@pytest.mark.slow
def test_the_first_run_writes_the_files_that_the_readme_names(first_run: Path) -> None:
    names = {path.name for path in first_run.iterdir() if not path.name.startswith(".")}
    assert names == {"best.pt", "checkpoints", "config.json", "logs", "metrics.jsonl", "status.json", "tensorboard"}
    assert sorted(path.name for path in (first_run / "checkpoints").iterdir()) == [
        *("step_00000078.pt", "step_00000156.pt", "step_00000234.pt")
    ]
    status = json.loads((first_run / "status.json").read_text())
    assert status.pop("pid") > 0 and status.pop("host")
    assert status.pop("time")["seconds"]["productive"] > 0 and status.pop("saving")["saves"] == 3
    progress = {"step": 234, "epoch": 3, "saved": 234, "remaining_s": None}
    assert status == {"state": "done", "exit_code": 0, **progress, "message": ""}
    config = json.loads((first_run / "config.json").read_text())
    assert config["options"]["epochs"] == 3 and config["torch"] == torch.__version__
    assert config["ddp_template"] == ddp.__version__
    assert re.fullmatch(r"[0-9a-f]{40}", config["git_commit"] or "0" * 40)


@pytest.mark.slow
def test_metrics_have_the_fields_that_the_readme_names(first_run: Path) -> None:
    steps = [line["step"] for line in lines(first_run, "train")]
    assert steps == [78, 100, 156, 200, 234]
    assert set(lines(first_run, "train")[0]) == {
        *("step", "epoch", "split", "first_step", "loss", "accuracy"),
        *("lr", "samples_per_s", "step_ms", "data_ms", "memory_mb"),
    }
    assert [line["first_step"] for line in lines(first_run, "train")] == [1, 79, 101, 157, 201]
    epochs = lines(first_run, "train_epoch")
    assert set(epochs[0]) == {"step", "epoch", "split", "first_step", "loss", "accuracy"}
    assert [(line["first_step"], line["step"]) for line in epochs] == [(1, 78), (79, 156), (157, 234)]
    for name in ("loss", "accuracy"):
        parts = [(line["step"] + 1 - line["first_step"], line[name]) for line in lines(first_run, "train")[1:3]]
        mean = sum(steps * value for steps, value in parts) / 78
        assert epochs[1][name] == pytest.approx(mean, rel=1e-12), "the mean of all steps of the epoch"
    for split in ("val", "test"):
        assert set(lines(first_run, split)[0]) == {"step", "epoch", "split", "loss", "accuracy", "count"}
    assert [(line["step"], line["epoch"], line["count"]) for line in lines(first_run, "val")] == [
        *((78, 1, 2000), (156, 2, 2000), (234, 3, 2000))
    ]
    assert [line["count"] for line in lines(first_run, "test")] == [2000], "once, at the end"
    line = lines(first_run, "train")[3]
    assert 0 <= line["data_ms"] < line["step_ms"] and line["memory_mb"] > 100
    assert line["samples_per_s"] == pytest.approx(128 / (line["step_ms"] / 1000), rel=0.01)


@pytest.mark.slow
def test_tensorboard_shows_the_scalars_at_their_steps(first_run: Path) -> None:
    events = EventAccumulator(str(first_run / "tensorboard"))
    events.Reload()
    for split in ("train", "train_epoch", "val", "test"):
        written = [(line["step"], line["loss"]) for line in lines(first_run, split)]
        found = [(event.step, event.value) for event in events.Scalars(f"{split}/loss")]
        assert [step for step, _ in found] == [step for step, _ in written]
        assert [value for _, value in found] == pytest.approx([value for _, value in written], rel=1e-6)
    tags = set(events.Tags()["scalars"])
    assert {"train/lr", "train/samples_per_s", "val/accuracy"} <= tags
    assert not {"train/first_step", "val/count", "val/epoch"} & tags, "figures that are no curve"


@pytest.mark.slow
def test_tensorboard_shows_the_options_and_the_first_images(first_run: Path) -> None:
    events = EventAccumulator(str(first_run / "tensorboard"))
    events.Reload()

    def plugin_data(name: str) -> HParamsPluginData:
        return HParamsPluginData.FromString(events.SummaryMetadata(f"_hparams_/{name}").plugin_data.content)

    options = plugin_data("session_start_info").session_start_info.hparams
    assert (options["lr"].number_value, options["epochs"].number_value) == (0.03, 3)
    assert (options["model"].string_value, options["scale_lr"].bool_value) == ("ToyModel", False)
    assert options["dataset"].string_value == "synthetic" and "clip_grad" not in options and "data_dir" not in options
    metrics = {info.name.tag for info in plugin_data("experiment").experiment.metric_infos}
    assert metrics == {"val/loss", "val/accuracy"}
    (image, *more) = events.Images("train/inputs")
    assert (image.step, image.height, image.width, more) == (78, 64, 256, []), "two rows of eight"


@pytest.mark.slow
def test_best_pt_needs_only_torch_and_model_py(first_run: Path) -> None:
    """The three lines of the README, with torch and model.py only; the accuracy is the one that the run reported."""
    script = f"""
import sys, torch
sys.path.insert(0, {str(TEMPLATE)!r})
from model import ToyModel
model = ToyModel()
model.load_state_dict(torch.load({str(first_run / "best.pt")!r}, weights_only=True)["model"])
model.eval()
assert not [name for name in sys.modules if name.split(".")[0] in ("ddp", "config", "data", "main", "torchvision")]
from config import Config
from data import load_datasets
test_set = load_datasets(Config.parse(["--dataset", "synthetic"])).test
images, targets = test_set.prepare(test_set.__getitems__(list(range(len(test_set)))))
print((model(images).argmax(1) == targets).double().mean().item())
"""
    (tested,) = lines(first_run, "test")
    command = [sys.executable, "-c", script]  # in a new interpreter, which has imported nothing
    output = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=os.environ | LEAN).stdout
    assert float(output) == tested["accuracy"]


@pytest.mark.slow
@fault(18)
def test_evaluation_counts_each_sample_once_for_any_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a BatchNorm model whose buffers differ between ranks: the buffers of rank 0 are used."""
    import data

    def evaluated(n: int) -> Callable[[DistContext], tuple[float, float, float]]:
        def on_rank(ctx: DistContext) -> tuple[float, float, float]:
            config = Config.parse(["--dataset", "synthetic", "--batch-size", "16"])
            test_set = data.load_datasets(config).val
            torch.manual_seed(0)
            model = build_awkward(config, test_set)
            for buffer in model.buffers():
                if buffer.is_floating_point():
                    buffer.add_(ctx.rank)  # as if they had drifted apart in training
            loader = EvalLoader(test_set, config, ctx)
            metrics = main.evaluate(model, loader, config, ctx)
            meter = Meter(ctx)
            for _, targets in loader:
                meter.add({"loss": torch.zeros(()), "count": len(targets)})
            return metrics["loss"], metrics["accuracy"], meter.take()["count"].item()

        return on_rank

    monkeypatch.setattr(images, "CHUNK_PIXELS", 16 * 32 * 32)  # in one chunk, all would be evaluated on rank 0
    for n in (1, 7, 100, 101):
        monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 64, "val": n})
        results = [result for world_size in (1, 2, 3) for result in on_ranks(world_size, evaluated(n))]
        assert len(results) == 6
        for loss, accuracy, count in results:
            assert count == n
            assert accuracy == results[0][1]
            assert loss == pytest.approx(results[0][0], rel=1e-5)


def test_a_garbage_collection_does_not_visit_what_exists_since_the_first_step(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take 0.2 s for 350,000 objects, on any rank at any time, for which all others wait."""

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    left: list[Any] = []  # garbage of the first step is freed, and what is made later as before
    batch_totals = main.task.batch_totals

    def totals(*arguments: Any) -> Any:
        left.append(weakref.ref(Cycle()))
        return batch_totals(*arguments)

    monkeypatch.setattr(main.task, "batch_totals", totals)

    def check(run: Any) -> None:
        assert left[0]() is None, "collected"
        assert len(gc.get_objects()) < 50_000 and not any(each is run for each in gc.get_objects())
        gc.collect()
        assert left[-1]() is None

    train(1, "--dataset", "synthetic", "--max-steps", 3, "--output-dir", tmp_path, after_step=check)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_same_global_batch_gives_the_same_weights_with_1_and_2_processes(
    accumulation: int, small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main.task, "build_model", build_smooth)
    options = ["--dataset", "synthetic", "--max-steps", 20, "--lr", 0.1, "--output-dir"]
    train(1, *options, tmp_path / "one", "--batch-size", 32)
    train(2, *options, tmp_path / "two", "--batch-size", 16 // accumulation, "--grad-accum-steps", accumulation)
    one, two = newest_model(tmp_path / "one"), newest_model(tmp_path / "two")
    assert checkpoint.read(tmp_path / "one" / "checkpoints" / "step_00000020.pt")["step"] == 20
    for name in one:
        assert torch.allclose(one[name], two[name], atol=1e-5, rtol=0), name


def test_the_logged_loss_is_the_mean_over_all_ranks(small: None, tmp_path: Path) -> None:
    """With a learning rate close to 0, the mean over an epoch does not depend on the number of ranks."""
    options = ["--dataset", "synthetic", "--epochs", 1, "--lr", 1e-9, "--output-dir"]
    train(1, *options, tmp_path / "one", "--batch-size", 32, "--log-every", 20)
    train(2, *options, tmp_path / "two", "--batch-size", 16, "--log-every", 20)
    one, two = lines(tmp_path / "one", "train")[0], lines(tmp_path / "two", "train")[0]
    assert one["step"] == two["step"] == 20
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5) and two["accuracy"] == one["accuracy"]


@fault(23)
def test_a_loss_that_is_not_finite_stops_every_rank_and_saves_nothing(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = main.task.compute_loss
    calls = []

    def diverging(*batch: Any) -> torch.Tensor:
        calls.append(1)
        return compute(*batch) * (math.nan if len(calls) > 12 else 1)

    monkeypatch.setattr(main.task, "compute_loss", diverging)
    options = ["--dataset", "synthetic", "--batch-size", 16, "--checkpoint-every", 5, "--log-every", 7]
    output = train(2, *options, "--output-dir", tmp_path, code=6)
    assert output.count("error:") == 1
    assert "noticed at step 14" in output and "step_00000010.pt" in output
    assert checkpoints(tmp_path) == ["step_00000005.pt", "step_00000010.pt"]
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 6)


def test_a_meter_may_be_kept_over_evaluations_of_fewer_batches_than_ranks() -> None:
    def evaluated(ctx: DistContext) -> list[float]:
        meter, found = Meter(ctx), []
        for _ in range(3):
            if ctx.rank == 0:
                meter.add({"count": 5})
            found.append(meter.take()["count"].item())
        return found

    assert on_ranks(2, evaluated) == [[5, 5, 5]] * 2


def test_totals_of_many_batches_are_exact_and_keep_no_graph() -> None:
    """Many batches are added at once; the activations that a loss depends on are freed before that."""
    weight = torch.ones(1, requires_grad=True)

    def on_rank(ctx: DistContext) -> list[list[Any]]:
        meter = Meter(ctx)
        kept = []
        for number in range(200):
            activation = torch.full((1,), number + 0.25)
            kept.append(weakref.ref(activation))
            meter.add({"loss": (weight * activation).sum(), "count": 3, "table": torch.full((2, 2), number)})
            del activation
        assert all(activation() is None for activation in kept)
        first = meter.take()
        meter.add({"loss": torch.ones(()), "count": 1, "table": torch.ones(2, 2)})
        second = meter.take()
        return [[part[name].tolist() for name in ("loss", "count", "table")] for part in (first, second)]

    total = sum(range(200))
    for first, second in on_ranks(2, on_rank):
        assert first == [2 * (total + 50.0), 1200.0, [[2.0 * total] * 2] * 2]
        assert second == [2.0, 2.0, [[2.0] * 2] * 2]


def test_a_stop_that_one_rank_requests_stops_all_ranks(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a task may do it in main.py, with run.request_stop(): all ranks save after the same step."""
    advance = ddp.training.run.Run.advance

    def advance_and_request(self: ddp.training.run.Run) -> None:
        advance(self)
        if self.ctx.rank == 1 and self.state.step == 3:
            self.request_stop()

    monkeypatch.setattr(ddp.training.run.Run, "advance", advance_and_request)
    options = ["--dataset", "synthetic", "--batch-size", 16, "--epochs", 2, "--output-dir"]
    output = train(2, *options, tmp_path / "stopped", code=75)
    (found,) = re.findall(r"stopped on request and saved, at step (\d+): repeat the command to resume", output)
    assert int(found) >= 3 and newest(tmp_path / "stopped").name == f"step_{int(found):08d}.pt"
    monkeypatch.setattr(ddp.training.run.Run, "advance", advance)
    train(2, *options, tmp_path / "stopped")
    train(2, *options, tmp_path / "whole")
    assert weights_and_momentum(tmp_path / "stopped") == weights_and_momentum(tmp_path / "whole")


@pytest.mark.parametrize(
    ("interval_s", "steps"), [(1e9, [0, 8, 16, 20, 20]), (-1.0, [0, 5, 8, 10, 15, 16, 20, 20, 20, 20, 20])]
)
def test_status_json_is_written_now_and_then_and_at_every_save(
    interval_s: float, steps: list[int], small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every fifth of 20 steps is logged, every eighth is saved; the last one is evaluated, and ends the run."""

    def write_and_record(path: Path, **status: Any) -> None:
        write_status(path, **status)
        with (tmp_path / "written").open("a") as file:
            print(status["step"], file=file)

    monkeypatch.setattr(ddp.training.run_log, "write_status", write_and_record)
    monkeypatch.setattr(ddp.training.run_log, "STATUS_INTERVAL_S", interval_s)
    options = ["--dataset", "synthetic", "--epochs", 1, "--batch-size", 32, "--log-every", 5, "--checkpoint-every", 8]
    train(1, *options, "--output-dir", tmp_path / "run")
    assert [int(step) for step in (tmp_path / "written").read_text().split()] == steps


def test_a_resumed_run_does_not_estimate_its_remaining_time_before_its_first_step(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_and_record(path: Path, **status: Any) -> None:
        write_status(path, **status)
        with (tmp_path / "seen").open("a") as file:
            file.write(json.dumps([status["state"], status["remaining_s"]]) + "\n")

    options = ["--dataset", "synthetic", "--batch-size", 32, "--output-dir", tmp_path / "run", "--epochs"]
    train(1, *options, 1)
    monkeypatch.setattr(ddp.training.run_log, "write_status", write_and_record)
    train(1, *options, 2)
    first, *others = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    assert first == ["running", None] and others[-1] == ["done", None]
    assert all(remaining >= 0 for state, remaining in others[:-1])


def test_tensorboard_is_opened_for_the_first_line_and_that_time_does_not_count_as_training(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = SummaryWriter.__init__

    def open_slowly(self: SummaryWriter, *arguments: Any, **named: Any) -> None:
        callers = [frame.name for frame in traceback.extract_stack()]
        assert "log_train" in callers and "write" in callers, "opened before there is a line"
        time.sleep(6)
        opened(self, *arguments, **named)

    monkeypatch.setattr(SummaryWriter, "__init__", open_slowly)
    options = ["--dataset", "synthetic", "--max-steps", 4, "--batch-size", 32, "--log-every", 2]
    train(1, *options, "--output-dir", tmp_path / "run")
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    first, second = lines(tmp_path / "run", "train")
    assert first["step"] == 2 and first["step_ms"] < 3000, "6 s for TensorBoard count as training"
    assert second["step"] == 4 and second["step_ms"] < 3000, "6 s for TensorBoard count as training"


def test_the_lists_of_a_whole_epoch_are_not_kept() -> None:
    def on_rank(ctx: DistContext) -> list[Any]:
        meter, found = Meter(ctx), []
        for count in (1, 2):
            meter.add({"loss": torch.tensor(1.0), "all": [count]})
            found.append(meter.take()["all"])
        found.append(meter.take_epoch(complete=True))
        meter.add({"loss": torch.tensor(2.0), "all": [3]})
        return [*found, meter.take_epoch(complete=False), meter.take()["all"]]

    assert on_ranks(1, on_rank) == [[[1], [2], {}, {}, [3]]]


def test_where_no_whole_epoch_is_known_the_line_names_its_first_step(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_totals = main.task.batch_totals
    monkeypatch.setattr(main.task, "batch_totals", lambda *batch: {**batch_totals(*batch), "all": [0] * len(batch[2])})
    options = ["--dataset", "synthetic", "--epochs", 1, "--batch-size", 32, "--log-every", 15]
    output = train(1, *options, "--output-dir", tmp_path)
    assert re.search(r"step 20/20  train since step 16  loss .*  val \(best\)  loss ", output), output
    assert lines(tmp_path, "train_epoch") == []
    (line,) = [line for line in lines(tmp_path, "train") if line["step"] == 20]
    assert line["first_step"] == 16 and f"train since step 16  loss {line['loss']:.4f}" in output


@pytest.mark.parametrize("name", ["count", "step", "lr"])
def test_a_metric_with_a_name_that_each_line_has_is_refused(
    name: str, small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the two would replace the other; `step` would also decide which lines a resumed run deletes."""
    monkeypatch.setattr(main.task, "compute_metrics", lambda totals: {"loss": 1.0, "accuracy": 0.5, name: 3.0})
    output = train(2, "--dataset", "synthetic", "--epochs", 1, "--output-dir", tmp_path, code=2)
    assert f"error: compute_metrics returns '{name}', and metrics.jsonl has that already: rename it\n" in output


def test_a_metric_that_is_no_number_is_not_the_best(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main.task, "metric_for_best_model", lambda metrics: math.nan)
    output = train(1, "--dataset", "synthetic", "--epochs", 1, "--batch-size", 32, "--output-dir", tmp_path)
    assert "  val  loss " in output and "val (best)" not in output, output


def test_a_line_covers_one_epoch_only(small: None, tmp_path: Path) -> None:
    """Epochs have 20 steps. A mean that includes the previous epoch would look worse than the evaluation before it."""
    options = ["--dataset", "synthetic", "--epochs", 2, "--batch-size", 32, "--output-dir", tmp_path]
    train(1, *options, "--log-every", 15, "--max-steps", 33)
    assert [line["step"] for line in lines(tmp_path, "train")] == [15, 20, 30]
    assert [(line["first_step"], line["step"]) for line in lines(tmp_path, "train_epoch")] == [(1, 20), (21, 33)]
    train(1, *options[:-1], tmp_path / "each", "--log-every", 1, "--max-steps", 33)
    for name in ("loss", "accuracy"):  # steps 31 to 33 have no line of their own
        values = [lines(folder, "train_epoch")[1][name] for folder in (tmp_path, tmp_path / "each")]
        assert values[0] == pytest.approx(values[1], rel=1e-12)
    train(1, *options, "--log-every", 15)
    assert [(line["first_step"], line["step"]) for line in lines(tmp_path, "train_epoch")[2:]] == [(21, 40)]
    stopped, whole = lines(tmp_path, "train_epoch")[-1], tmp_path / "whole"
    train(1, *options[:-1], whole)
    assert {**stopped, "step": 40} == lines(whole, "train_epoch")[-1], "all steps of the epoch, also before the stop"
    assert [(line["step"], line["epoch"]) for line in lines(tmp_path, "train")] == [(15, 1), (20, 1), (30, 2), (40, 2)]


class HalfUsed(Awkward):
    """Has a layer that forward() does not use."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.forgotten = torch.nn.Linear(3, 3)


@pytest.mark.sample(2)
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_weights_that_the_loss_does_not_depend_on_are_named_in_one_line(
    processes: int, accumulation: int, small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main.task, "build_model", lambda config, train_set: HalfUsed(len(train_set.classes)))
    options = ["--dataset", "synthetic", "--batch-size", 16, "--grad-accum-steps", accumulation, "--output-dir"]
    output = train(processes, *options, tmp_path / "refused", code=2)
    assert output.count("the loss does not depend on forgotten.weight, forgotten.bias: use them in forward()") == 1
    assert "Traceback" not in output and output.count("error:") == 1
    train(processes, *options, tmp_path / "found", "--deterministic", "--max-steps", 3)  # DDP finds them itself


@pytest.mark.parametrize("processes", [1, 2])
def test_trackers_get_all_metrics_on_rank_0_and_none_that_fails_ends_the_run(
    processes: int, small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorBoard is one of them: here its folder is a file."""

    class Tracker:
        def __init__(self, config: Config) -> None:
            self.file = (tmp_path / f"tracked by {os.getpid()}").open("w")

        def log(self, step: int, split: str, metrics: dict[str, float]) -> None:
            self.file.write(json.dumps({"step": step, "split": split, **metrics}) + "\n")

        def close(self) -> None:
            self.file.close()

    class Failing(Tracker):
        def log(self, step: int, split: str, metrics: dict[str, float]) -> None:
            raise ConnectionError("the server is gone")

    open_run = main.open_run
    monkeypatch.setattr(main, "open_run", lambda *arguments: open_run(*arguments, [Tracker, Failing]))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").touch()
    options = ["--dataset", "synthetic", "--batch-size", 32, "--epochs", 2, "--log-every", 5]
    output = train(processes, *options, "--output-dir", tmp_path / "run")
    for name, reason in (("Failing", "the server is gone"), ("TensorBoard", "")):
        assert output.count(f"warning: no more metrics go to {name} ({reason}") == 1 and "Traceback" not in output
    tracked = [path.read_text() for path in tmp_path.glob("tracked by *")]
    (found,) = [[json.loads(line) for line in text.splitlines()] for text in tracked if text]
    not_tracked = ("epoch", "first_step", "count")
    assert found == [{key: line[key] for key in line if key not in not_tracked} for line in lines(tmp_path / "run")]
    assert len(tracked) <= 2 and len(found) > 6


def test_every_step_of_every_rank_has_its_own_seed() -> None:
    """torch's generator on the CPU uses only the lower 32 bits of its seed."""
    seeds: dict[tuple[int, int, int], int] = {}
    for seed, rank, step in itertools.product((0, 1), (0, 1, 7), (*range(2000), 10**6, 10**9)):
        seed_step(seed, step, rank)
        seeds[seed, rank, step] = torch.default_generator.initial_seed() % 2**32
    assert len(set(seeds.values())) == len(seeds)
    seed_step(1, 17, 7)
    assert torch.default_generator.initial_seed() % 2**32 == seeds[1, 7, 17], "a resumed run draws the same"


def test_weights_that_are_not_finite_are_never_saved(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an infinite gradient, the loss of that step is still finite."""
    clip = torch.nn.utils.clip_grad_norm_

    def poison(parameters: Any, norm: float) -> Any:
        first = next(iter(parameters))
        first.grad.fill_(math.inf)
        return clip([first], norm)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", poison)
    options = ["--dataset", "synthetic", "--checkpoint-every", 1, "--clip-grad", 1, "--output-dir", tmp_path]
    assert "conv1.weight is no longer finite" in train(1, *options, code=6)
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.slow
def test_all_ranks_take_the_same_number_of_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No rank hangs, and no rank crashes. A dataset too small for one step is refused."""
    import data

    for number, (n, world_size, batch) in enumerate([(7, 2, 3), (13, 3, 4), (12, 2, 6), (33, 2, 16)]):
        monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": n, "val": 5})
        output = tmp_path / str(number)
        train(world_size, "--dataset", "synthetic", "--epochs", 1, "--batch-size", batch, "--output-dir", output)
        assert lines(output, "val")[0]["step"] == n // (world_size * batch)
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 7, "val": 5})
    options = ["--dataset", "synthetic", "--batch-size", 4, "--output-dir", tmp_path / "none"]
    output = train(2, *options, code=2)
    assert output.count("error:") == 1 and "7 training samples do not fill one step of 8" in output


@fault(8)
def test_an_output_directory_that_is_not_writable_is_refused_before_training(small: None, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    output = train(2, "--dataset", "synthetic", "--output-dir", tmp_path / "file" / "run", code=3)
    assert "cannot write to the output directory" in output and output.count("error:") == 1


def test_temporary_files_of_a_killed_run_are_deleted_at_the_next_start(small: None, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    stale = [tmp_path / f"{name}.12-3.ddp.tmp" for name in ("best.pt", "status.json", "metrics.jsonl")]
    stale.append(tmp_path / "checkpoints" / "step_00000001.pt.12-3.ddp.tmp")
    for path in stale:
        path.write_bytes(b"torn")
    train(1, "--dataset", "synthetic", "--max-steps", 1, "--output-dir", tmp_path)
    assert not any(path.exists() for path in stale)


@pytest.mark.slow
def test_the_status_tells_the_time_to_the_end_of_the_run(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(folder: Path, **status: Any) -> None:
        with (tmp_path / "seen").open("a") as file:
            file.write(json.dumps([time.monotonic(), status["state"], status["step"], status["remaining_s"]]) + "\n")
        write_status(folder, **status)

    monkeypatch.setattr(ddp.training.run_log, "write_status", record)
    monkeypatch.setattr(ddp.training.run_log, "STATUS_INTERVAL_S", 0)
    monkeypatch.setattr(main.task, "build_model", build_slow_awkward)
    train(2, "--dataset", "synthetic", "--epochs", 2, "--log-every", 2, "--output-dir", tmp_path / "run")
    seen = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    (began, _, _, first), *running, (end, state, steps, last) = seen
    assert first is last is None and state == "done" and len(running) > 5
    assert running[-1][3] == 0, "after the last step"
    # As long per step as the steps so far. So all lines give the same moment for the first step, but for a late record.
    starts = [then - remaining * step / (steps - step) for then, _, step, remaining in running if step < steps]
    start = median(starts)
    assert abs(start - began) < (end - start) / 4
    assert median(abs(start - other) for other in starts) < (end - start) / 20


@pytest.mark.slow
def test_a_terminal_gets_a_bar_and_a_pipe_gets_plain_lines(tmp_path: Path) -> None:
    """With a real process on a pseudo-terminal of 100 columns. The bar does not break the lines."""
    words = ["main.py", "--dataset", "synthetic", "--max-steps", "60", "--log-every", "50", "--output-dir"]
    project = shrink(copy_template(tmp_path / "project"), train=10_000, val=64, test=64)
    piped = python(project, *words, tmp_path / "pipe")
    assert "\r" not in piped and "train  loss" in piped

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    shown = b""
    command = [sys.executable, *words, str(tmp_path / "terminal")]
    with subprocess.Popen(command, cwd=project, stdout=theirs, stderr=theirs, env=os.environ | LEAN) as process:
        os.close(theirs)
        with contextlib.suppress(OSError):  # the end of a terminal
            while block := os.read(ours, 65536):
                shown += block
    assert process.returncode == 0
    assert b"epoch 1/10:   0%|" in shown and b"/156 [" in shown
    assert re.search(rb"\d\d:\d\d to the end of the run\]", shown)
    assert any(re.match(r"epoch  1/10  step 50/60  train  loss", line) for line in re.split(r"[\r\n]+", shown.decode()))


# ---- the shape of the code ------------------------------------------------------------------------------------------


def test_no_file_outside_ddp_tests_the_rank() -> None:
    compared = re.compile(r"rank\s*(==|!=|>|<)=?\s*\d|\b(if|not|while)\s+[\w.]*rank\s*:|is_main|is_rank_?zero|get_rank")
    files = sorted(TEMPLATE.glob("*.py"))
    assert {"main.py", "model.py", "data.py", "config.py", "benchmark.py", "benchmark_report.py"} <= {
        path.name for path in files
    }
    for path in files:
        found = compared.search(path.read_text())
        assert not found, f"{path.name} tests the rank: {found}"


def imports(path: Path) -> set[str]:
    """The top-level names of the modules that a file imports at any depth."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def test_imports_run_one_way() -> None:
    assert imports(TEMPLATE / "model.py") - set(sys.stdlib_module_names) == {"torch", "torchvision"}
    assert imports(TEMPLATE / "config.py") - set(sys.stdlib_module_names) == {"ddp"}
    assert not imports(TEMPLATE / "data.py") & {"main", "model"}
    for path in (TEMPLATE / "ddp").rglob("*.py"):
        allowed = {"config"} if path.name == "__main__.py" else set()  # a program, as main.py
        assert not imports(path) & {"main", "model", "data", "config"} - allowed, path.name
    for path in [*(TEMPLATE / "ddp" / "core").glob("*.py"), *(TEMPLATE / "ddp" / "launcher").glob("*.py")]:
        if path.name != "node_rendezvous.py":  # imported once the options are checked
            assert "torch" not in imports(path), f"{path.name}: the launcher would take seconds to start"


def test_files_and_functions_are_short() -> None:
    for path in [*TEMPLATE.glob("*.py"), *(TEMPLATE / "ddp").rglob("*.py")]:
        assert len(path.read_text().splitlines()) <= 350, path.name
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 50, f"{path.name}: {node.name}"


def test_the_context_knows_the_step_that_is_computed(small: None, tmp_path: Path) -> None:
    """docs/state.md says so. After advance(), the run has taken one more."""

    def compare(run: Any) -> None:
        assert run.ctx.work.step == run.state.step - 1

    options = ["--dataset", "synthetic", "--batch-size", 16, "--output-dir", tmp_path]
    train(1, *options, "--max-steps", 2, after_step=compare)
    train(1, *options, "--max-steps", 4, after_step=compare)


def test_the_train_loader_computes_the_global_batch(small: None) -> None:
    import data

    def sizes(ctx: DistContext) -> tuple[int, int]:
        config = Config.parse(["--dataset", "synthetic", "--batch-size", "8", "--grad-accum-steps", "3"])
        loader = TrainLoader(data.load_datasets(config).train, config, ctx)
        return loader.global_batch, loader.steps_left(0)

    assert on_ranks(2, sizes) == [(48, 13)] * 2


def test_buffers_are_broadcast_in_training_only_if_a_rank_could_need_them() -> None:
    """Running statistics are read by evaluations and checkpoints only; a broadcast in each forward pass is wasted."""

    class Codebook(nn.Module):
        """Its buffer follows the data, and changes what the model computes."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("centre", torch.zeros(4))

        def forward(self, inputs: Tensor) -> Tensor:
            self.centre += inputs.mean(0)  # type: ignore[operator,misc]
            return self.layer(inputs - self.centre)  # type: ignore[operator]

    def trained(ctx: DistContext) -> dict[str, tuple[list[float], int]]:
        found = {}
        for name, network in (("codebook", Codebook()), ("norm", nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))):
            ddp_model = wrap_model(network, Config.parse(["--device=cpu"]), ctx)
            for _ in range(3):
                ddp_model(torch.full((2, 4), float(ctx.rank + 1)) + torch.eye(4)[:2]).sum().backward()
            broadcasts = ddp_model.will_sync_module_buffers()
            found[name] = [buffer.sum().item() for buffer in network.buffers()], broadcasts
        return found

    ranks = on_ranks(2, trained)
    assert [rank["codebook"][1] for rank in ranks] == [True, True]
    assert [rank["norm"][1] for rank in ranks] == [False, False]
    first, second = (rank["codebook"][0][0] for rank in ranks)
    assert first != second and abs(first - second) < 5, "each step begins with the buffer of rank 0"
