"""Does this project still train, resume and evaluate? Run these tests after every edit: `pytest tests/test_project.py`.

They hold for any model.py, data.py and config.py that has a `--dataset synthetic`: data that need no download. If
data.py has SYNTHETIC_SIZES, they make these data small.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from outputs import assert_same_run, lines, status
from processes import fork, on_ranks, start, train
from torch.utils.data import Subset

import data
import model
from config import Config
from ddp.data.loader import EvalLoader, TrainLoader
from ddp.distributed.process_group import DistContext
from ddp.distributed.tensors import digest
from ddp.training.meter import Meter
from rehearse import Rehearsal

NO_SHUFFLE = "two epochs have the same order. Delete this line if the sampler of your task does not shuffle"
NO_LOSS = "compute_loss returned None. Delete this test if main.py computes the losses of your task in another way"
LOSS_MAY_RISE = (
    "the loss did not fall. Delete this test if the loss of your task may rise while the model learns: a contrastive "
    "loss does while its queue of negatives fills (MoCo), and so do the losses of a GAN"
)
OPTIONS = ["--dataset", "synthetic", "--batch-size", "16", "--log-every", "5"]


def evaluated_sets() -> dict[str, Any]:
    """The validation set and the test set, if there are such."""
    datasets = data.load_datasets(Config.parse(OPTIONS))
    return {name: each for name, each in (("val", datasets.val), ("test", datasets.test)) if each is not None}


def test_two_processes_train_and_the_loss_falls(tmp_path: Path) -> None:
    train(2, *OPTIONS, "--epochs", 3, "--output-dir", tmp_path)
    losses = [line["loss"] for line in lines(tmp_path, "train")]
    assert losses[-1] < losses[0], LOSS_MAY_RISE
    datasets = data.load_datasets(Config.parse(OPTIONS))
    lengths = [datasets.sampler.length(epoch) if datasets.sampler else len(datasets.train) for epoch in range(3)]
    steps = sum(length // 32 for length in lengths)
    assert lines(tmp_path, "train")[-1]["step"] == status(tmp_path)["step"] == steps
    for name, dataset in evaluated_sets().items():  # the test set once, at the end
        times = 1 if name == "test" else 3
        assert [line["count"] for line in lines(tmp_path, name)] == [len(dataset)] * times
    assert status(tmp_path)["state"] == "done"
    assert (tmp_path / "best.pt").exists() == ("val" in evaluated_sets()) and list((tmp_path / "tensorboard").iterdir())


def test_a_rehearsal_finds_nothing(tmp_path: Path) -> None:
    """What rehearse.py checks: resumed, with workers, evaluated in new processes, and with a divided batch."""
    for name, found, causes in Rehearsal(Config.parse(OPTIONS), 2, tmp_path, fork).checks():
        assert found == [], "\n".join([name, *causes])


def test_a_stopped_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    """After SIGTERM, or Ctrl-C, to one process, all save and exit. The same command ends as if nothing had happened."""
    options = [*OPTIONS, "--epochs", 2, "--checkpoint-every", 3, "--log-every", 2, "--output-dir"]
    train(2, *options, tmp_path / "whole")
    ranks = start(2, *options, tmp_path / "stopped", after_step=lambda run: time.sleep(0.05))
    ranks.until((tmp_path / "stopped/checkpoints/step_00000003.pt").exists)
    ranks.until(lambda: lines(tmp_path / "stopped", "train")[-1]["step"] >= 4)
    os.kill(ranks.pids[1], signal.SIGTERM)
    assert ranks.wait() == [75] * 2, ranks.output()
    stopped = status(tmp_path / "stopped")
    assert (stopped["state"], stopped["saved"]) == ("stopped", stopped["step"])
    assert f"at step {stopped['step']}" in train(2, *options, tmp_path / "stopped")
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def test_evaluation_is_the_same_with_1_2_and_3_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sample is counted once, even if the number of processes does not divide the number of samples."""
    # Data in memory are evaluated in large chunks: these few would be one, for rank 0 alone.
    of_one_batch = property(lambda loader: loader.config.batch_size, lambda loader, size: None)
    monkeypatch.setattr(EvalLoader, "chunk_size", of_one_batch, raising=False)
    train(2, *OPTIONS, "--max-steps", 5, "--output-dir", tmp_path)
    outputs = [train(world_size, *OPTIONS, "--evaluate", "--output-dir", tmp_path) for world_size in (1, 2, 3)]
    for split in evaluated_sets():
        (trained,) = lines(tmp_path, split)
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
        datasets = data.load_datasets(config)
        loader = TrainLoader(datasets.train, config, ctx, datasets.sampler)
        found = []
        for epoch in (0, 1):
            loader.sampler.start_at(epoch, samples_consumed=32)
            indices = list(loader.sampler)[: config.batch_size]
            found.append([(index, digest(loader.reader(epoch).__getitems__([index]))) for index in indices])
        return found

    (first, second), shared = on_ranks(1, samples_of)[0], on_ranks(2, samples_of)
    for epoch, alone in enumerate((first, second)):
        assert sorted(sample for rank in shared for sample in rank[epoch]) == sorted(alone)
    assert len(first) == len(second) == 16
    assert [index for index, _ in first] != [index for index, _ in second], NO_SHUFFLE


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
            assert loss is not None, NO_LOSS
            optimizer.zero_grad()
            (sum(loss.values()) if isinstance(loss, dict) else loss).backward()
            optimizer.step()
            meter.add(model.batch_totals(loss, outputs, targets))
            result.append(model.compute_metrics(meter.take())["loss"])
        return result

    first, *_, last = on_ranks(1, losses)[0]
    assert last < 0.5 * first, LOSS_MAY_RISE
