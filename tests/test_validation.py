"""The validation set chooses best.pt and stops early; the test set is evaluated once, at the end."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from outputs import lines, newest
from template_copy import changed_main

import data
import images
import main
from config import Config
from ddp.checkpoint import storage as checkpoint
from ddp.entrypoint.run_main import run_as_rank
from images import split_by_class
from processes import Ranks, start, train

pytestmark = pytest.mark.slow
SIZES = {"train": 320, "val": 101, "test": 70}
OPTIONS = ("--dataset", "synthetic", "--device", "cpu", "--batch-size", 32, "--epochs", 3)


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", SIZES)


def better_in_epoch(monkeypatch: pytest.MonkeyPatch, best: int) -> None:
    """Make the run believe that its evaluation after epoch `best` is better than all others."""
    numbers = iter(range(1, 100))
    monkeypatch.setattr(main.task, "metric_for_best_model", lambda metrics: -abs(next(numbers) - best))


def results(output: str, part: str) -> list[str]:
    """What was printed about the evaluations of a set."""
    return [line.partition(f"  {part:<5}  ")[2] for line in output.splitlines() if f"  {part:<5}  " in line]


def numbers(result: str) -> list[str]:
    return result.split()[1:4:2]  # loss and accuracy


# ---- the test set ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ema", [(), pytest.param(("--ema", 0.5), marks=pytest.mark.sample(0))])
def test_a_threshold_that_the_validation_chose_is_that_of_the_tested_weights(
    ema: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/state.md says: in a buffer. Also after a resume, and if best.pt is evaluated alone."""
    edit = """metrics = meter.take()
    if eval_loader.part == "val" and not config.evaluate:
        model.threshold.fill_(ctx.work.step)
    return {**metrics, "threshold": model.threshold.item()}"""
    changed, build = changed_main({"return meter.take()": edit}), main.task.build_model

    def build_with_threshold(*given: Any) -> torch.nn.Module:
        model: torch.nn.Module = build(*given)
        model.register_buffer("threshold", torch.zeros(()))
        return model

    def found(part: str, *options: Any) -> list[str]:
        config = Config.parse([*map(str, OPTIONS), *map(str, ema), "--output-dir", str(tmp_path / "run"), *options])
        ranks = Ranks(2, lambda rank_env: run_as_rank(changed, config, rank_env))
        assert ranks.wait() == [0, 0], ranks.output()
        return [line.split("threshold ")[1].split()[0] for line in results(ranks.output(), part)]

    monkeypatch.setattr(main.task, "build_model", build_with_threshold)
    monkeypatch.setattr(main.task, "metric_for_best_model", lambda metrics: -metrics["threshold"])  # the first epoch's
    found("val", "--max-steps", "7")
    (tested,) = found("test")
    chosen = [line["threshold"] for line in lines(tmp_path / "run", "val")]
    assert chosen == [4, 6, 9, 14] and float(tested) == 4
    best = ("--evaluate", "--resume", str(tmp_path / "run" / "best.pt"))
    assert found("test", *best) == found("val", *best) == [tested]


@pytest.mark.sample(2)
@pytest.mark.parametrize("best", [1, 3])
@pytest.mark.parametrize("ema", [(), ("--ema", 0.5)])
def test_the_weights_that_validation_chose_are_tested_once(
    best: int, ema: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (*OPTIONS, *ema, "--output-dir", tmp_path)
    with monkeypatch.context() as patch:
        better_in_epoch(patch, best)
        output = train(2, *options)
    assert "synthetic: 320 training, 101 validation, 70 test samples" in output
    assert [line["count"] for line in lines(tmp_path, "val")] == [101] * 3
    (tested,) = lines(tmp_path, "test")
    assert (tested["step"], tested["epoch"], tested["count"]) == (5 * best, best, 70)
    assert f"epoch {best}/3  step {5 * best:>2}/15  test " in output and "; best at step" in output
    of_each = {
        path: train(1, *options, "--evaluate", "--resume", path) for path in (tmp_path / "best.pt", newest(tmp_path))
    }
    (of_best,), (of_last,) = (results(each, "test") for each in of_each.values())
    assert numbers(results(output, "test")[0]) == numbers(of_best)
    assert (of_best == of_last) == (best == 3), "otherwise this shows nothing"
    *_, last = re.findall(r" val(?: \(best\))?  (loss \S+  accuracy \S+)", output)
    assert numbers(results(of_each[newest(tmp_path)], "val")[0]) == numbers(last)

    metrics = (tmp_path / "metrics.jsonl").read_text()
    again = train(2, *options)
    assert "already done" in again and results(again, "test") == results(output, "test")
    assert (tmp_path / "metrics.jsonl").read_text() == metrics, "not logged twice"
    fewer_epochs = train(1, *options, "--epochs", 1)
    assert f"epoch {best}/{best}  step {5 * best:>2}/15  test " in fewer_epochs


def test_a_run_that_was_stopped_in_its_test_is_tested_when_it_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of best.pt, which are in memory by then, do not become a checkpoint."""
    monkeypatch.setattr(images, "CHUNK_PIXELS", 8 * 32 * 32)  # otherwise the test would be one batch
    options = (*OPTIONS, "--checkpoint-every", 100, "--output-dir")
    better_in_epoch(monkeypatch, 1)
    train(2, *options, tmp_path / "whole")
    with monkeypatch.context() as patch:
        better_in_epoch(patch, 1)
        evaluate = main.evaluate

        def slow_test(model: Any, loader: Any, *rest: Any) -> Any:
            if loader.part == "test":
                (tmp_path / "testing").touch()
                time.sleep(2)
            return evaluate(model, loader, *rest)

        patch.setattr(main, "evaluate", slow_test)
        ranks = start(2, *options, tmp_path / "cut")
        wait_for(tmp_path / "testing")
        ranks.kill(signal.SIGTERM)
        assert ranks.wait() == [75, 75], ranks.output()
    assert lines(tmp_path / "cut", "test") == []
    train(2, *options, tmp_path / "cut")
    assert lines(tmp_path / "cut", "test") == lines(tmp_path / "whole", "test")
    models = [checkpoint.read(newest(tmp_path / each))["model"] for each in ("cut", "whole")]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def wait_for(path: Path) -> None:
    end = time.monotonic() + 180
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_without_a_best_pt_the_last_weights_are_tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    better_in_epoch(monkeypatch, 1)
    train(1, *OPTIONS, "--output-dir", tmp_path)
    (tmp_path / "best.pt").write_bytes(b"damaged")
    output = train(2, *OPTIONS, "--output-dir", tmp_path)
    warning = f"warning: {tmp_path}/best.pt cannot be used: it is empty or truncated; the weights of the last step are "
    assert output.count(warning) == 1
    assert [line["step"] for line in lines(tmp_path, "test")] == [10, 30]


def test_a_best_pt_of_a_save_that_was_lost_is_not_taken_for_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run was killed after it had replaced best.pt, and before the checkpoint of that step had its name."""
    better_in_epoch(monkeypatch, 1)
    train(1, *OPTIONS, "--output-dir", tmp_path)
    content = torch.load(tmp_path / "best.pt", weights_only=True)
    checkpoint.write(tmp_path / "best.pt", content | {"step": 25})
    output = train(2, *OPTIONS, "--output-dir", tmp_path)
    why = "is not of step 10: a lost save has replaced it; the weights of the last step are tested"
    assert output.count(f"warning: {tmp_path}/best.pt {why}") == 1
    assert [line["step"] for line in lines(tmp_path, "test")] == [10, 30]


# ---- without a validation set, or a test set ------------------------------------------------------------------------


def test_without_a_validation_set_the_last_weights_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 320, "test": 70})
    output = train(2, *OPTIONS, "--output-dir", tmp_path)
    assert "320 training, 70 test samples; no validation set" in output
    assert lines(tmp_path, "val") == [] and [line["step"] for line in lines(tmp_path, "test")] == [15]
    assert not (tmp_path / "best.pt").exists()
    assert f"  weights       {newest(tmp_path)}\n" in output and "best" not in output
    assert len(results(train(1, *OPTIONS, "--evaluate", "--output-dir", tmp_path), "test")) == 1
    error = train(1, *OPTIONS, "--patience", 2, "--output-dir", tmp_path / "other", code=2)
    assert error == "error: --patience needs a validation set: add one in data.py, or remove --patience\n"


def test_without_a_test_set_a_run_ends_after_its_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 320, "val": 70})
    output = train(1, *OPTIONS, "--output-dir", tmp_path)
    assert "; no test set" in output and results(output, "test") == [] == lines(tmp_path, "test")
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 320})
    output = train(1, *OPTIONS, "--output-dir", tmp_path / "neither")
    assert "320 training samples; no validation set and no test set" in output
    error = train(1, *OPTIONS, "--evaluate", "--output-dir", tmp_path / "neither", code=2)
    assert error == "error: --evaluate: there is neither a validation set nor a test set\n"


# ---- early stopping -------------------------------------------------------------------------------------------------


def test_a_run_stops_early_and_stays_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third epoch is better again. The run is also interrupted, to see that the count is in the checkpoint."""
    options = (*OPTIONS, "--epochs", 9, "--output-dir", tmp_path, "--patience")
    with monkeypatch.context() as patch:
        values = iter([5.0, 4.0, 6.0])
        patch.setattr(main.task, "metric_for_best_model", lambda metrics: next(values))
        train(1, *options, 2, "--max-steps", 30)  # 3 epochs
    monkeypatch.setattr(main.task, "metric_for_best_model", lambda metrics: 3.0)
    train(1, *options, 2, "--max-steps", 40)
    output = train(2, *options, 2, "--batch-size", 16)
    assert "stopping early: no better validation metric in 2 epochs (--patience)\n" in output
    assert [line["epoch"] for line in lines(tmp_path, "val")] == [1, 2, 3, 4, 5]
    assert [line["epoch"] for line in lines(tmp_path, "test")] == [3], "best.pt is still the same"
    again = train(1, *options, 2)
    assert "already done; to train longer, raise --patience" in again and len(lines(tmp_path, "val")) == 5
    train(1, *options, 3)
    assert [line["epoch"] for line in lines(tmp_path, "val")] == [1, 2, 3, 4, 5, 6]


def test_a_checkpoint_of_an_earlier_version_has_no_count_of_epochs(tmp_path: Path) -> None:
    train(1, *OPTIONS, "--output-dir", tmp_path)
    content = checkpoint.read(newest(tmp_path))
    del content["epochs_since_best"]
    checkpoint.write(newest(tmp_path), content)
    assert "resuming from" in train(1, *OPTIONS, "--epochs", 4, "--warmup-epochs", 1, "--output-dir", tmp_path)


# ---- the split ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.9])
def test_a_split_has_the_same_part_of_each_class(fraction: float) -> None:
    targets = torch.tensor([0] * 40 + [7] * 20 + [3] * 1 + [5] * 400)[torch.randperm(461)]
    train_part, val_part = split_by_class(targets, fraction, seed=0)
    assert sorted([*train_part.tolist(), *val_part.tolist()]) == list(range(461))
    assert all(part.tolist() == sorted(part.tolist()) for part in (train_part, val_part))
    for label, count in ((0, 40), (7, 20), (5, 400), (3, 1)):
        expected = round(fraction * count) if count > 1 else 0
        assert (targets[val_part] == label).sum() == expected, label
    assert torch.equal(val_part, split_by_class(targets, fraction, seed=0)[1])
    assert not torch.equal(val_part, split_by_class(targets, fraction, seed=1)[1])
