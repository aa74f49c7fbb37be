"""Does this project still train, resume and evaluate? Half a minute; run it after every edit of model.py or data.py.

They hold for another model.py and data.py as well, if that has a --dataset synthetic: a few data without a download.
"""

from __future__ import annotations

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
from config import parse
from ddp import checkpoint
from ddp.loader import TestLoader, TrainLoader
from ddp.state import digest

OPTIONS = ["--dataset", "synthetic", "--batch-size", "16", "--log-every", "5"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few data, so that an epoch takes a moment."""
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 320, "test": 51}, raising=False)


def slow_loss(*batch: Any) -> Any:
    """The loss, 50 ms later: a run that lasts for long enough to be killed."""
    time.sleep(0.05)
    return model.compute_loss(*batch)


def newest(output: Path) -> dict[str, Any]:
    return checkpoint.read(max((output / "checkpoints").glob("step_*.pt")))


def lines(output: Path, split: str) -> list[dict[str, Any]]:
    every = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line for line in every if line["split"] == split]


def test_two_processes_train_and_the_loss_falls(tmp_path: Path) -> None:
    train(2, *OPTIONS, "--epochs", 3, "--output-dir", tmp_path)
    losses = [line["loss"] for line in lines(tmp_path, "train")]
    assert losses[-1] < losses[0]
    assert [line["count"] for line in lines(tmp_path, "test")] == [51] * 3
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "done"
    assert (tmp_path / "best.pt").exists() and list((tmp_path / "tensorboard").iterdir())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_was_killed_or_stopped_resumes_bit_for_bit(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command again ends with the same weights and momentum. SIGTERM, like Ctrl-C, lets it save before."""
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
    assert "going on from" in train(2, *options, tmp_path / "killed")
    whole, killed = newest(tmp_path / "whole"), newest(tmp_path / "killed")
    assert whole["step"] == killed["step"]
    assert digest([whole["model"], whole["optimizer"]]) == digest([killed["model"], killed["optimizer"]])


def test_evaluation_is_the_same_with_1_2_and_3_processes() -> None:
    """Each sample is counted once, whether or not the number of processes divides the number of samples."""

    def on_rank(group: Any) -> dict[str, float]:
        config = parse(OPTIONS)
        train_set, test_set = data.load_datasets(config)
        torch.manual_seed(0)
        untrained = model.build_model(config, train_set)
        return main.evaluate(untrained, TestLoader(test_set, config, group), config, group)

    results = [scores for world_size in (1, 2, 3) for scores in on_ranks(world_size, on_rank)]
    for scores in results:
        assert scores == pytest.approx(results[0], rel=1e-5)


def test_order_and_augmentation_depend_on_nothing_but_seed_and_epoch() -> None:
    """The first global batch behind a position holds the same samples, augmented alike, however it is shared."""

    def batch_and_orders(group: Any) -> tuple[list[str], list[list[int]]]:
        config = parse([*OPTIONS, "--batch-size", str(16 // group.world_size)])
        train_set, _ = data.load_datasets(config)
        loader = TrainLoader(train_set, config, group)
        orders = []
        for epoch in (0, 1):
            inputs, targets = next(next(loader.steps(epoch, position=32)))
            orders.append(list(loader.sampler))
        return [digest([pair[0], pair[1]]) for pair in zip(inputs, targets, strict=True)], orders

    alone, (first, second) = on_ranks(1, batch_and_orders)[0]
    shared = [sample for part, _ in on_ranks(2, batch_and_orders) for sample in part]
    assert sorted(shared) == sorted(alone) and len(set(alone)) == 16
    assert first != second, "each epoch has an order of its own"


def test_the_model_learns_one_batch_by_heart() -> None:
    """If it cannot, the model, its loss or its optimizer is broken: no amount of GPU time will help."""

    def losses(group: Any) -> list[float]:
        config = parse(OPTIONS)
        train_set, _ = data.load_datasets(config)
        inputs, targets = next(next(TrainLoader(train_set, config, group).steps(epoch=0)))
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


def test_a_wrong_option_is_one_line_that_says_what_is_allowed() -> None:
    with pytest.raises(Exception, match="--batch-size: '0' is not a whole number from 1"):
        parse(["--batch_size=0"])
