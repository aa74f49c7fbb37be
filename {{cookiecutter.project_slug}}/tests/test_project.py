"""Does this project still train, resume and evaluate? Run these tests after every edit; they take half a minute.

They hold for any model.py, data.py and config.py that has a `--dataset synthetic`: data that need no download. If
data.py has SYNTHETIC_SIZES, they make these data small.
"""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import on_ranks, start, train
from torch.utils.data import Subset

import data
import main
import model
from config import Config
from ddp.checkpoint import storage as checkpoint
from ddp.checkpoint.state import digest
from ddp.core.errors import UsageError
from ddp.data.loader import EvalLoader, TrainLoader
from ddp.distributed.process_group import DistContext
from ddp.training.meter import Meter

OPTIONS = ["--dataset", "synthetic", "--batch-size", "16", "--log-every", "5"]
SPEEDS = ("samples_per_s", "step_ms", "data_ms", "memory_mb")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few samples, so that an epoch takes a moment."""
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 320, "val": 51, "test": 50}, raising=False)


COMPUTE_LOSS = model.compute_loss


def slow_loss(*batch: Any) -> Any:
    """The loss, 50 ms later, so that a test can kill the run before it ends."""
    time.sleep(0.05)
    return COMPUTE_LOSS(*batch)


def newest_checkpoint(output_dir: Path) -> dict[str, Any]:
    return checkpoint.read(max((output_dir / "checkpoints").glob("step_*.pt")))


def metrics(output_dir: Path, split: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl for `split`: train, val or test."""
    lines = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if line["split"] == split]
    return [{name: value for name, value in line.items() if name not in SPEEDS} for line in found]


def evaluated_sets() -> dict[str, Any]:
    """The validation set and the test set, if there are such."""
    datasets = data.load_datasets(Config.parse(OPTIONS))
    return {name: dataset for name, dataset in datasets._asdict().items() if name != "train" and dataset is not None}


def test_two_processes_train_and_the_loss_falls(tmp_path: Path) -> None:
    train(2, *OPTIONS, "--epochs", 3, "--output-dir", tmp_path)
    losses = [line["loss"] for line in metrics(tmp_path, "train")]
    assert losses[-1] < losses[0]
    for name, dataset in evaluated_sets().items():  # the test set once, at the end
        times = 1 if name == "test" else 3
        assert [line["count"] for line in metrics(tmp_path, name)] == [len(dataset)] * times
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "done"
    assert (tmp_path / "best.pt").exists() == ("val" in evaluated_sets()) and list((tmp_path / "tensorboard").iterdir())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_or_stopped_run_resumes_bit_for_bit(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command, repeated, ends with the same checkpoint and metrics as a run that was not interrupted.

    SIGKILL loses the steps since the last checkpoint. SIGTERM, like Ctrl-C, lets the run save before it exits.
    """
    options = [*OPTIONS, "--epochs", 3, "--checkpoint-every", 3, "--output-dir"]
    train(2, *options, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(main.task, "compute_loss", slow_loss)
        ranks = start(2, *options, tmp_path / "killed")
    end = time.monotonic() + 180
    while not (tmp_path / "killed" / "checkpoints" / "step_00000006.pt").exists():
        assert time.monotonic() < end, ranks.output()
        time.sleep(0.002)
    ranks.kill(number)
    assert ranks.wait() == [75 if number == signal.SIGTERM else -9] * 2, ranks.output()
    assert "resuming from" in train(2, *options, tmp_path / "killed")
    whole, killed = newest_checkpoint(tmp_path / "whole"), newest_checkpoint(tmp_path / "killed")
    assert whole.pop("config").pop("output_dir") != killed.pop("config").pop("output_dir")
    assert whole.pop("path") != killed.pop("path")
    assert whole.keys() == killed.keys()
    assert [name for name in whole if digest(whole[name]) != digest(killed[name])] == []
    for split in ("train", "val", "test"):
        assert metrics(tmp_path / "whole", split) == metrics(tmp_path / "killed", split)


def test_evaluation_is_the_same_with_1_2_and_3_processes(tmp_path: Path) -> None:
    """Each sample is counted once, even if the number of processes does not divide the number of samples."""
    train(2, *OPTIONS, "--max-steps", 5, "--output-dir", tmp_path)
    outputs = [train(world_size, *OPTIONS, "--evaluate", "--output-dir", tmp_path) for world_size in (1, 2, 3)]
    for split in evaluated_sets():
        (trained,) = metrics(tmp_path, split)
        values = [value for name, value in trained.items() if name not in ("step", "split", "epoch", "count")]
        printed = [output.partition(f"  {split:<5}  ")[2].partition("\n")[0] for output in outputs]
        assert printed[0] == printed[1] == printed[2]
        numbers = [float(word) for word in printed[0].split()[1::2]]
        assert numbers and numbers == pytest.approx(values, rel=1e-4, abs=1e-4)


def test_order_and_samples_depend_only_on_seed_and_epoch() -> None:
    """From any sample on, the next ones are the same for 1 and 2 processes, with the same random numbers."""

    def samples_of(ctx: DistContext) -> list[list[tuple[int, str]]]:
        """The indices of some samples in epochs 0 and 1, and the digest of each sample, read alone."""
        config = Config.parse([*OPTIONS, "--batch-size", str(16 // ctx.world_size)])
        loader = TrainLoader(data.load_datasets(config).train, config, ctx)
        found = []
        for epoch in (0, 1):
            loader.sampler.start_at(epoch, samples_consumed=32)
            indices = list(loader.sampler)[: config.batch_size]
            found.append([(index, digest(loader.reader(epoch).__getitems__([index]))) for index in indices])
        return found

    (first, second), shared = on_ranks(1, samples_of)[0], on_ranks(2, samples_of)
    for epoch, alone in enumerate((first, second)):
        assert sorted(sample for rank in shared for sample in rank[epoch]) == sorted(alone)
    assert len(set(first)) == 16 and [index for index, _ in first] != [index for index, _ in second]


def test_the_model_can_overfit_one_batch() -> None:
    """If it cannot, the model, its loss or its optimizer has an error: more training will not help."""

    def losses(ctx: DistContext) -> list[float]:
        """The loss of each step, as the run would log it: a task may add up several to train on."""
        config = Config.parse(OPTIONS)
        train_set = data.load_datasets(config).train
        batch = Subset(train_set, range(16))  # through the EvalLoader, which mixes nothing: soft targets have a floor
        inputs, targets = next(iter(EvalLoader(batch, config, ctx)))
        torch.manual_seed(0)
        learner = model.build_model(config, train_set).train()
        optimizer, meter = model.build_optimizer(learner, config), Meter(ctx)
        result: list[float] = []
        while len(result) < 200 and (not result or result[-1] >= 0.5 * result[0]):
            outputs = model.forward(learner, inputs, targets)
            loss = model.compute_loss(outputs, targets, config)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            meter.add(model.batch_totals(loss, outputs, targets))
            result.append(model.compute_metrics(meter.take())["loss"])
        return result

    first, *_, last = on_ranks(1, losses)[0]
    assert last < 0.5 * first


def test_a_wrong_value_is_refused_with_the_allowed_range() -> None:
    with pytest.raises(UsageError, match="--batch-size: '0' must be an integer >= 1"):
        Config.parse(["--batch_size=0"])
