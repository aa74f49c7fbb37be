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

import data
import main
import model
from config import Config
from ddp.checkpoint import checkpoint_file as checkpoint
from ddp.checkpoint.state import digest
from ddp.core.errors import UsageError
from ddp.data.loader import EvalLoader, TrainLoader
from ddp.distributed.process_group import DistContext
from ddp.distributed.tree import map_tensors

OPTIONS = ["--dataset", "synthetic", "--batch-size", "16", "--log-every", "5"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few samples, so that an epoch takes a moment."""
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 320, "test": 51}, raising=False)


def slow_loss(*batch: Any) -> Any:
    """The loss, 50 ms later, so that a test can kill the run before it ends."""
    time.sleep(0.05)
    return model.compute_loss(*batch)


def newest_checkpoint(output_dir: Path) -> dict[str, Any]:
    return checkpoint.read(max((output_dir / "checkpoints").glob("step_*.pt")))


def metrics(output_dir: Path, split: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl for `split`: train or test."""
    lines = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["split"] == split]


def test_two_processes_train_and_the_loss_falls(tmp_path: Path) -> None:
    train(2, *OPTIONS, "--epochs", 3, "--output-dir", tmp_path)
    losses = [line["loss"] for line in metrics(tmp_path, "train")]
    assert losses[-1] < losses[0]
    _, test_set = data.load_datasets(Config.parse(OPTIONS))
    assert [line["count"] for line in metrics(tmp_path, "test")] == [len(test_set)] * 3  # type: ignore[arg-type]
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "done"
    assert (tmp_path / "best.pt").exists() and list((tmp_path / "tensorboard").iterdir())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_or_stopped_run_resumes_bit_for_bit(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command, repeated, ends with the same weights and momentum as a run that was not interrupted.

    SIGKILL loses the steps since the last checkpoint. SIGTERM, like Ctrl-C, lets the run save before it exits.
    """
    options = [*OPTIONS, "--epochs", 3, "--checkpoint-every", 3, "--output-dir"]
    train(2, *options, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(main, "compute_loss", slow_loss)
        ranks = start(2, *options, tmp_path / "killed")
    end = time.monotonic() + 60
    while not (tmp_path / "killed" / "checkpoints" / "step_00000006.pt").exists():
        assert time.monotonic() < end, ranks.output()
        time.sleep(0.002)
    ranks.kill(number)
    assert ranks.wait() == [75 if number == signal.SIGTERM else -9] * 2, ranks.output()
    assert "resuming from" in train(2, *options, tmp_path / "killed")
    whole, killed = newest_checkpoint(tmp_path / "whole"), newest_checkpoint(tmp_path / "killed")
    assert whole["step"] == killed["step"]
    assert digest([whole["model"], whole["optimizer"]]) == digest([killed["model"], killed["optimizer"]])


def test_evaluation_is_the_same_with_1_2_and_3_processes() -> None:
    """Each sample is counted once, even if the number of processes does not divide the number of samples."""

    def evaluate(ctx: DistContext) -> dict[str, float]:
        config = Config.parse(OPTIONS)
        train_set, test_set = data.load_datasets(config)
        torch.manual_seed(0)
        untrained = model.build_model(config, train_set)
        return main.evaluate(untrained, EvalLoader(test_set, config, ctx), config, ctx)

    results = [result for world_size in (1, 2, 3) for result in on_ranks(world_size, evaluate)]
    for result in results:
        assert result == pytest.approx(results[0], rel=1e-5)


def test_order_and_augmentation_depend_only_on_seed_and_epoch() -> None:
    """From any sample on, the next global batch holds the same samples, augmented alike, for 1 and 2 processes."""

    def samples_and_orders(ctx: DistContext) -> tuple[list[str], list[list[int]]]:
        """A digest of each sample of one batch in epoch 1, and the order of the samples in epochs 0 and 1."""
        config = Config.parse([*OPTIONS, "--batch-size", str(16 // ctx.world_size)])
        train_set, _ = data.load_datasets(config)
        loader = TrainLoader(train_set, config, ctx)
        orders = []
        for epoch in (0, 1):
            batch = next(next(loader.steps(epoch, samples_consumed=32)))
            orders.append(list(loader.sampler))
        tensors: list[torch.Tensor] = []  # inputs and targets; each may also be a dictionary of tensors
        map_tensors(batch, tensors.append)
        return [digest(sample) for sample in zip(*tensors, strict=True)], orders

    alone, (first, second) = on_ranks(1, samples_and_orders)[0]
    shared = [sample for part, _ in on_ranks(2, samples_and_orders) for sample in part]
    assert sorted(shared) == sorted(alone) and len(set(alone)) == 16
    assert first != second, "each epoch has its own order"


def test_the_model_can_overfit_one_batch() -> None:
    """If it cannot, the model, its loss or its optimizer has an error: more training will not help."""

    def losses(ctx: DistContext) -> list[float]:
        config = Config.parse(OPTIONS)
        train_set, _ = data.load_datasets(config)
        inputs, targets = next(next(TrainLoader(train_set, config, ctx).steps(epoch=0)))
        torch.manual_seed(0)
        learner = model.build_model(config, train_set)
        optimizer = model.build_optimizer(learner, config)
        result: list[float] = []
        while len(result) < 200 and (not result or result[-1] >= 0.5 * result[0]):
            loss = model.compute_loss(learner(inputs), targets, config)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            result.append(loss.item())
        return result

    first, *_, last = on_ranks(1, losses)[0]
    assert last < 0.5 * first


def test_a_wrong_value_is_refused_with_the_allowed_range() -> None:
    with pytest.raises(UsageError, match="--batch-size: '0' must be an integer >= 1"):
        Config.parse(["--batch_size=0"])
