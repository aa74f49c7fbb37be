"""A run that is killed and resumed by the same command equals an uninterrupted run, bit for bit."""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import shutil
import time
from dataclasses import asdict, make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from outputs import lines, newest, weights_and_momentum
from PIL import Image
from template_copy import changed_main
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import images
import main
from config import Config
from ddp.checkpoint import storage as checkpoint
from ddp.checkpoint.manager import CheckpointManager
from ddp.checkpoint.state import run_differences
from ddp.checkpoint.storage import CheckpointDirectory
from ddp.core.errors import UsageError
from ddp.core.files import hash_source_files
from ddp.core.run_config import ELASTIC_VARIABLE
from ddp.data.dataset import Datasets
from ddp.distributed.process_group import DistContext
from ddp.distributed.rank_env import RankEnv
from ddp.distributed.seeds import seed_step
from ddp.entrypoint.run_main import run_as_rank
from faults import fault
from processes import Ranks, on_ranks, start, train
from small_models import Awkward, build_awkward, build_slow_awkward

pytestmark = pytest.mark.slow
MB = 1 << 20


def private_mb() -> float:
    """The memory of this process that is not a file's."""
    fields = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return int(fields["Private_Dirty"].split()[0]) / 1024


def wait_for(path: Path, ranks: Ranks) -> None:
    """Wait until `path` exists. Fails with the run's output if it does not appear."""
    end = time.monotonic() + 180
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear:\n{ranks.output()}"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of 96 training and 10 validation images in JPEG."""
    root = tmp_path_factory.mktemp("images")
    generator = torch.Generator().manual_seed(0)
    for split, each in (("train", 48), ("val", 5)):
        for label in ("cat", "dog"):
            (root / split / label).mkdir(parents=True)
            for number in range(each):
                pixels = torch.randint(0, 256, (32, 32, 3), generator=generator, dtype=torch.uint8)
                Image.fromarray(pixels.numpy()).save(root / split / label / f"{number}.jpg")
    return root


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("source", "workers", "accumulation"), [("memory", 0, 2), ("memory", 2, 1), ("folder", 0, 1), ("folder", 2, 2)]
)
def test_a_killed_run_resumes_bit_for_bit(
    source: str, workers: int, accumulation: int, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, BatchNorm, augmentation and momentum; 2 processes are killed with -9 in the middle of epoch 2."""
    import data

    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 96, "val": 10})
    options: list[Any] = ["--dataset", "synthetic"] if source == "memory" else ["--dataset", "imagefolder"]
    options += ["--data-dir", folders, "--batch-size", 4, "--epochs", 3, "--checkpoint-every", 2]
    log_every = {1: 1, 2: 5}[accumulation]  # 5: a checkpoint also holds the totals of steps that are not logged yet
    options += ["--workers", workers, "--grad-accum-steps", accumulation, "--log-every", log_every]
    per_epoch = 96 // (2 * 4 * accumulation)
    monkeypatch.setattr(main.task, "build_model", build_awkward)
    train(2, *options, "--output-dir", tmp_path / "whole")

    monkeypatch.setattr(main.task, "build_model", build_slow_awkward)
    ranks = start(2, *options, "--output-dir", tmp_path / "killed")
    wait_for(tmp_path / "killed" / "checkpoints" / f"step_{per_epoch + 2:08d}.pt", ranks)
    ranks.kill()
    assert ranks.wait() == [-9, -9]
    time.sleep(1)  # TensorBoard orders files by the seconds in their names, and then by process ids, as text
    stopped_at = checkpoint.read(newest(tmp_path / "killed"))
    assert stopped_at["epoch"] == 1 and 0 < stopped_at["samples_consumed"] < 96, "it was not killed in mid-epoch"

    monkeypatch.setattr(main.task, "build_model", build_awkward)
    output = train(2, *options, "--output-dir", tmp_path / "killed")
    assert f"at step {stopped_at['step']}" in output
    assert weights_and_momentum(tmp_path / "killed") == weights_and_momentum(tmp_path / "whole")

    whole, killed = (
        [
            {name: line.get(name) for name in ("step", "split", "epoch", "loss", "accuracy", "lr")}
            for line in lines(output_dir)
        ]
        for output_dir in (tmp_path / "whole", tmp_path / "killed")
    )
    assert whole == killed, "each step must be logged once, with the same loss"
    logged = [step for step in range(1, 3 * per_epoch + 1) if step % log_every == 0 or step % per_epoch == 0]
    events = EventAccumulator(str(tmp_path / "killed" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == logged


def test_two_seeds_give_different_weights(small: None, tmp_path: Path) -> None:
    """Otherwise the tests of equality would prove nothing."""
    for seed in (0, 1):
        options = ["--dataset", "synthetic", "--epochs", 1, "--seed", seed, "--output-dir", tmp_path / str(seed)]
        train(1, *options)
    assert weights_and_momentum(tmp_path / "0") != weights_and_momentum(tmp_path / "1")


def indices_used(output: Path) -> list[int]:
    """The indices that all ranks have written with `record_indices`."""
    return [int(line) for path in sorted(output.glob("indices-*")) for line in path.read_text().split()]


def record_indices(monkeypatch: pytest.MonkeyPatch, output: Path) -> None:
    """Let each process write down the indices of the samples on which it trains, one batch at a time."""
    import data

    monkeypatch.setattr(images, "CHUNK_PIXELS", 1)
    prepare = images.ImagesInMemory.prepare

    def recording(self: Any, batch: Any) -> Any:
        if len(self) == data.SYNTHETIC_SIZES["train"]:
            with (output / f"indices-{os.getpid()}").open("a") as file:
                file.write("".join(f"{index}\n" for index in batch[1].tolist()))
        return prepare(self, batch)

    monkeypatch.setattr(images.ImagesInMemory, "prepare", recording)


@fault(20)
def test_another_number_of_processes_uses_each_sample_once(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 2 processes to 3, 1 and 2: each index once. Samples that do not fill the last global batch are dropped.

    launch_node.sh --nnodes MIN:MAX chooses --grad-accum-steps; your own choice must keep the global batch.
    """
    record_indices(monkeypatch, tmp_path)
    options = ["--dataset", "synthetic", "--epochs", 1, "--batch-size", 7, "--output-dir", tmp_path / "run"]
    options += ["--scale-lr", "--lr", 0.064]
    train(2, *options, "--max-steps", 11)
    output = train(3, *options, "--max-steps", 21)
    assert "2 processes wrote this checkpoint, this run has 3" in output
    assert "the global batch was 14, is 21, the learning rate was 0.014, is 0.021\n" in output
    output = train(1, *options, "--max-steps", 22, "--grad-accum-steps", 3)
    assert "the global batch is still 21, the learning rate is still 0.021\n" in output
    assert "--grad-accum-steps was 3, is 2" in train(2, *options, "--grad-accum-steps", 2, code=4)
    monkeypatch.setenv(ELASTIC_VARIABLE, "1")
    assert "--grad-accum-steps was 3, is 4" in train(1, *options, "--grad-accum-steps", 4, code=4)
    monkeypatch.setenv(ELASTIC_VARIABLE, "2")
    assert "the global batch was 21, is 28, " in train(2, *options, "--grad-accum-steps", 2)
    used = indices_used(tmp_path)
    assert len(used) == len(set(used)), "a sample is used twice"
    dropped = (640 - 11 * 14 - 10 * 21 - 21) % 28
    assert len(used) == 640 - dropped and dropped > 0


@fault(21)
def test_changed_options_are_refused_by_name_unless_they_may_change(small: None, tmp_path: Path) -> None:
    options = ["--dataset", "synthetic", "--output-dir", tmp_path, "--max-steps"]
    train(1, *options, 2)
    refused = train(1, *options, 4, "--lr", 0.5, "--seed", 3, code=4)
    assert "--lr was 0.03, is 0.5" in refused and "--seed was 0, is 3" in refused
    assert "--batch-size was 64, is 32" in train(1, *options, 4, "--batch-size", 32, code=4)
    train(1, *options, 3, "--epochs", 12, "--log-every", 1, "--workers", 1, "--keep-checkpoints", 2)
    train(1, *options, 4, "--batch-size", 32, "--grad-accum-steps", 2)  # the global batch is the same


@fault(21)
def test_files_edited_since_the_checkpoint_are_named(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An edit that keeps the shapes of the weights loads without an error: another activation, for example."""
    options = ["--dataset", "synthetic", "--batch-size", 64, "--output-dir", tmp_path]
    assert "warning" not in train(2, *options, "--max-steps", 2)
    assert "edited since" not in train(2, *options, "--max-steps", 3)
    edited = {**hash_source_files(), "the file model.py": "another"}
    monkeypatch.setattr("ddp.checkpoint.manager.hash_source_files", lambda: edited)
    assert ": model.py. This evaluation uses the new code\n" in train(1, *options, "--evaluate")
    output = train(2, *options, "--max-steps", 4)
    assert output.count("warning: edited since step_00000003.pt was written: model.py. This run uses the new code") == 1
    assert "edited since" not in train(2, *options, "--max-steps", 5), "the edited file wrote the newest checkpoint"


def test_an_option_that_the_checkpoint_does_not_know_had_its_default() -> None:
    then = {name: value for name, value in asdict(Config.parse([])).items() if name != "clip_grad"}
    content = {
        "config": then,
        "global_batch": 64,
        "samples": 100,
        "classes": {"optimizer": "SGD"},
        "parts": {},
        "shapes": {},
    }

    def differences(*options: str) -> list[str]:
        config = Config.parse(options)
        return run_differences(config, {**content, "config": asdict(config)}, content)

    assert differences() == []
    assert differences("--clip-grad=2") == ["--clip-grad was None, is 2.0"]
    then["comm_hook"] = "none"  # an option of an earlier version, at its default
    assert differences() == []
    then["comm_hook"] = "bf16"
    (refused,) = differences()
    assert refused == "--comm-hook (now 'Compressed gradients' in docs/recipes.md) was bf16, is none"
    assert differences("--evaluate", "--output-dir=runs") == []


def test_classes_in_another_order_are_other_classes() -> None:
    """Each label would mean another one."""
    facts = {
        "config": asdict(Config.parse([])),
        "global_batch": 64,
        "samples": 100,
        "classes": {},
        "parts": {},
        "shapes": {},
    }
    ours, theirs = ({**facts, "dataset": {"classes": classes}} for classes in (["cat", "dog"], ["dog", "cat"]))
    for options in ([], ["--evaluate", "--output-dir=runs"]):
        found = run_differences(Config.parse(options), ours, theirs)
        assert found == ["class 0 of the data was dog, is cat", "class 1 of the data was cat, is dog"]


def test_another_model_is_refused_with_the_names_of_the_weights_that_differ(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--dataset", "synthetic", "--output-dir", tmp_path, "--max-steps"]
    train(2, *options, 2)
    build = main.task.build_model

    def edited(config: Any, train_set: Any) -> torch.nn.Module:
        model: Any = build(config, train_set)
        model.fc1, model.fc2 = torch.nn.Linear(400, 100), torch.nn.Linear(100, 84)
        return model

    monkeypatch.setattr(main.task, "build_model", edited)
    output = train(2, *options, 4, code=4)
    assert "fc1.weight was [120, 400], is [100, 400]" in output
    assert output.count("error:") == 1, "every rank fails, one prints the error"


@fault(22)
def test_only_rank_0_needs_the_checkpoint(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a shared file system, the other ranks have no checkpoint; their momentum must be correct as well."""
    options = ["--dataset", "synthetic", "--epochs", 1, "--batch-size", 16, "--output-dir"]
    train(2, *options, tmp_path / "whole")
    train(2, *options, tmp_path / "split", "--max-steps", 7)
    find = CheckpointDirectory.find

    def find_once(self: CheckpointDirectory) -> Any:
        assert not marker.exists(), "a second rank searched for checkpoints"
        marker.touch()
        return find(self)

    marker = tmp_path / "searched"
    monkeypatch.setattr(CheckpointDirectory, "find", find_once)
    train(2, *options, tmp_path / "split")
    assert weights_and_momentum(tmp_path / "split") == weights_and_momentum(tmp_path / "whole")


def test_resume_path_starts_a_new_directory_and_the_command_can_be_repeated(small: None, tmp_path: Path) -> None:
    options = ["--dataset", "synthetic", "--epochs", 1]
    train(1, *options, "--output-dir", tmp_path / "first", "--max-steps", 3)
    again = [*options, "--output-dir", tmp_path / "second", "--resume", newest(tmp_path / "first")]
    assert "at step 3" in train(1, *again, "--max-steps", 5)
    assert "at step 5" in train(1, *again), "its own checkpoint is newer than the one it started from"
    train(1, *options, "--output-dir", tmp_path / "whole")
    assert weights_and_momentum(tmp_path / "second") == weights_and_momentum(tmp_path / "whole")
    refused = train(1, *options, "--output-dir", tmp_path / "whole", "--resume", newest(tmp_path / "first"), code=4)
    assert "did not start from it" in refused


def test_a_rank_whose_memory_changes_what_it_loads_is_refused(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one bit: otherwise the ranks would train different weights from then on."""
    broadcast = DistContext.broadcast

    def damaged(ctx: DistContext, tensor: torch.Tensor) -> torch.Tensor:
        broadcast(ctx, tensor)
        if ctx.rank == 1 and tensor.dim() > 1:
            tensor.flatten().view(torch.uint8)[0] ^= 1
        return tensor

    options = ["--dataset", "synthetic", "--output-dir", tmp_path / "run", "--max-steps"]
    train(2, *options, 2)
    monkeypatch.setattr(DistContext, "broadcast", damaged)
    refused = train(2, *options, 4, code=4)
    assert refused == "error: rank 1 loaded another state than rank 0: check the memory of its host\n"


def test_resume_must_refuses_to_start_a_new_run(small: None, tmp_path: Path) -> None:
    """As a job does that is started again, on a machine with an empty disk."""
    options = ["--dataset", "synthetic", "--output-dir", tmp_path / "run", "--max-steps"]
    refused = train(2, *options, 2, "--resume", "must", code=4)
    reason = f"error: --resume must: there is no checkpoint in {tmp_path / 'run' / 'checkpoints'}: restore that"
    assert refused.startswith(reason) and refused.count("\n") == 1
    train(2, *options, 2)
    assert "at step 2" in train(2, *options, 4, "--resume", "must")
    assert "evaluating" in train(1, *options[:-1], "--evaluate", "--resume", "must")


def test_a_file_for_the_batch_system_exists_once_there_is_a_checkpoint(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It survives the machine: launch/slurm.sbatch then passes --resume must."""
    saved = tmp_path / "saved"
    monkeypatch.setenv("DDP_SAVED_FILE", str(saved))
    options = ["--dataset", "synthetic", "--output-dir", tmp_path / "run", "--max-steps"]
    train(2, *options, 2, "--resume", "must", code=4)
    assert not saved.exists(), "nothing was saved"
    train(2, *options, 2)
    assert saved.exists()
    saved.unlink()
    train(2, *options, 2)
    assert saved.exists(), "another job has resumed from what an earlier one saved"
    monkeypatch.setenv("DDP_SAVED_FILE", str(tmp_path / "no such folder" / "saved"))
    train(1, *options, 3, "--batch-size", 128)


def test_resume_refuses_a_directory_unless_it_is_named_like_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("auto", "must", "never", "checkpoints"):
        (tmp_path / name).mkdir()
    assert [Config.parse(["--resume", word]).resume for word in ("auto", "must", "never")] == ["auto", "must", "never"]
    no_file = "--resume: 'checkpoints' is not auto, must, never or the path of a checkpoint file"
    for path, line in (("checkpoints", no_file), ("", "--resume: '' is not a path; see --help")):
        with pytest.raises(UsageError, match=line):
            Config.parse(["--resume", path])


def test_a_finished_runs_checkpoint_in_a_new_directory_names_no_files_that_do_not_exist(
    small: None, tmp_path: Path
) -> None:
    options = ["--dataset", "synthetic", "--batch-size", 64, "--epochs", 1, "--output-dir"]
    train(1, *options, tmp_path / "done")
    output = train(1, *options, tmp_path / "new", "--resume", tmp_path / "done" / "best.pt")
    assert "at step 10, the end of epoch 1" in output and "already done" in output
    assert "best" not in output.split("already done")[1] and "curves" not in output


def test_a_finished_run_reports_it_and_changes_nothing(small: None, tmp_path: Path) -> None:
    options = ["--dataset", "synthetic", "--epochs", 1, "--output-dir", tmp_path]
    train(1, *options)
    before = {path: path.read_bytes() for path in (newest(tmp_path), tmp_path / "best.pt", tmp_path / "metrics.jsonl")}
    assert "already done; to train longer" in train(1, *options)
    assert {path: path.read_bytes() for path in before} == before


def test_with_deterministic_three_processes_resume_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None
) -> None:
    """Without it, DDP reorders its buckets, and three ranks add gradients in another order than before the kill."""
    monkeypatch.setattr(main.task, "build_model", build_awkward)
    options = ["--dataset", "synthetic", "--batch-size", 8, "--epochs", 1, "--deterministic", "--output-dir"]
    train(3, *options, tmp_path / "whole")
    for stop in (5, 11):
        train(3, *options, tmp_path / "stopped", "--max-steps", stop)
    train(3, *options, tmp_path / "stopped")
    assert weights_and_momentum(tmp_path / "stopped") == weights_and_momentum(tmp_path / "whole")


class Noisy(torch.utils.data.Dataset):
    """Samples with random transforms that use all three generators, as a user may write them."""

    classes = ("a", "b")

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.randn(3, 32, 32) + random.random() + numpy.random.rand()
        return noise + index % 2, index % 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_random_transforms_in_a_dataset_resume_exactly_for_any_number_of_workers(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "load_datasets", lambda config: Datasets(Noisy(), Noisy()))
    monkeypatch.setattr(main.task, "build_model", build_awkward)
    options = ["--batch-size", 4, "--epochs", 2]
    train(2, *options, "--workers", 1, "--output-dir", tmp_path / "whole")
    train(2, *options, "--workers", workers, "--output-dir", tmp_path / "stopped", "--max-steps", 11)
    train(2, *options, "--workers", workers, "--output-dir", tmp_path / "stopped")
    assert weights_and_momentum(tmp_path / "stopped") == weights_and_momentum(tmp_path / "whole")
    assert lines(tmp_path / "stopped")[-1]["loss"] == lines(tmp_path / "whole")[-1]["loss"]


def test_ranks_with_different_options_are_refused(small: None, tmp_path: Path) -> None:
    def target(rank_env: RankEnv) -> int:
        options = ["--dataset", "synthetic", "--output-dir", str(tmp_path), "--lr", f"0.0{rank_env.rank + 1}"]
        return run_as_rank(main.main, Config.parse(options), rank_env)

    ranks = Ranks(2, target)
    assert ranks.wait() == [3, 3]
    assert "--lr is 0.01 on rank 0 and 0.02 on rank 1" in ranks.output() and ranks.output().count("error:") == 1


def test_a_refused_command_does_not_change_the_files_of_the_run(small: None, tmp_path: Path) -> None:
    options = ["--dataset", "synthetic", "--epochs", 1, "--output-dir", tmp_path]
    train(1, *options)
    before = {name: (tmp_path / name).read_text() for name in ("status.json", "config.json", "metrics.jsonl")}
    train(1, *options, "--lr", 9, code=4)
    assert {name: (tmp_path / name).read_text() for name in before} == before


def test_status_json_has_the_state_running_from_the_start(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main.task, "build_model", build_slow_awkward)
    ranks = start(1, "--dataset", "synthetic", "--epochs", 1, "--output-dir", tmp_path)
    wait_for(tmp_path / "status.json", ranks)
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "running"
    ranks.kill()
    ranks.wait()


def test_an_evaluation_is_logged_once_if_the_epoch_has_no_step_left(small: None, tmp_path: Path) -> None:
    options = ["--dataset", "synthetic", "--batch-size", 100, "--epochs", 2, "--output-dir", tmp_path]
    train(2, *options, "--max-steps", 2)
    train(3, *options)
    tests = [line["step"] for line in lines(tmp_path) if line["split"] == "val"]
    assert tests == [2, 4]


def test_a_run_that_starts_from_another_runs_checkpoint_writes_best_pt(small: None, tmp_path: Path) -> None:
    train(1, "--dataset", "synthetic", "--epochs", 2, "--output-dir", tmp_path / "first")
    source = newest(tmp_path / "first")
    content = checkpoint.read(source)
    checkpoint.write(source, {**content, "best": 1e9})  # no evaluation of the second run is better
    again = ["--dataset", "synthetic", "--epochs", 3, "--output-dir", tmp_path / "second", "--resume"]
    train(1, *again, source.parent / "." / source.name)
    assert (tmp_path / "second" / "best.pt").exists()
    train(1, *again, f"{source.parent}/../checkpoints/{source.name}")  # the same file by another path
    source.unlink()
    train(1, *again, source)  # it is no longer needed


def test_best_pt_of_another_run_is_not_taken_for_that_of_this_one(small: None, tmp_path: Path) -> None:
    """The folder of checkpoints was deleted, or moved; the run starts from a checkpoint that is elsewhere."""

    def run(folder: str, steps: int, *more: Any) -> str:
        return train(1, "--dataset", "synthetic", "--max-steps", steps, "--output-dir", tmp_path / folder, *more)

    run("this", 3, "--seed", 7)
    shutil.rmtree(tmp_path / "this" / "checkpoints")
    run("other", 4)
    start_from = newest(tmp_path / "other")
    printed = run("this", 5, "--resume", start_from)
    assert re.search(r"done.*; best at step 5:", printed), printed
    best = checkpoint.read(tmp_path / "this" / "best.pt")
    assert (best["step"], best["config"]["seed"], best["best"]) == (5, 0, best["best_metrics"]["accuracy"])

    # That of the same run is kept, wherever its checkpoints are now.
    moved = start_from.parent.rename(tmp_path / "other" / "old")
    found = checkpoint.read(moved / start_from.name)
    directory = CheckpointDirectory(Config.parse(["--output-dir", str(tmp_path / "other")]))
    assert found["best_step"] == 4 and directory.has_best_of(found)
    assert not directory.has_best_of({**found, "best": 0.5})


def test_numpy_numbers_in_the_metrics_are_saved_as_plain_numbers(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main.task, "metric_for_best_model", lambda metrics: numpy.float64(metrics["accuracy"]))
    options = ["--dataset", "synthetic", "--output-dir", tmp_path]
    train(1, *options, "--epochs", 1)
    assert "resuming from" in train(1, *options, "--epochs", 2)


def test_state_that_cannot_be_loaded_is_refused_at_the_first_save(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main.Schedule, "state_dict", lambda self: {"lr": numpy.float32(1)})
    output = train(1, "--dataset", "synthetic", "--max-steps", 1, "--output-dir", tmp_path, code=2)
    assert "error: state['schedule']['lr'] is of <class 'numpy.float32'>" in output and "Traceback" not in output


def test_the_module_versions_in_a_state_dict_reach_every_rank() -> None:
    """Some models, such as mnasnet, do not load without them."""

    def on_rank(ctx: DistContext) -> str:
        state = torch.nn.BatchNorm2d(3).state_dict() if ctx.rank == 0 else None
        received = ctx.broadcast_tree(state, lambda keys, tensor: tensor)
        return f"{type(received).__name__} {received._metadata['']['version']}"

    assert on_ranks(2, on_rank) == ["OrderedDict 2"] * 2


def test_models_that_compute_while_they_are_built_can_train_and_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import data

    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 16, "val": 4})
    options: list[Any] = ["--dataset", "synthetic", "--model", "regnet_y_400mf", "--batch-size", 4]
    options += ["--output-dir", tmp_path, "--max-steps"]
    train(1, *options, 1)
    train(1, *options, 2)


def test_parameter_groups_keep_their_own_learning_rates() -> None:
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": weights[:1], "lr": 0.003}, {"params": weights[1:]}]
    schedule = main.Schedule(torch.optim.SGD(groups, lr=0.03), Config.parse(["--lr", "0.03"]), 64)
    schedule.set(0.5)
    assert [group["lr"] for group in schedule.optimizer.param_groups] == pytest.approx([0.0015, 0.015])


def draw() -> list[float]:
    """Numbers from each generator. Those of Python and numpy draw two normal ones and keep the second for later."""
    return [random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.randn(), torch.rand(()).item()]


class Drawing(Awkward):
    """Its owner draws when an epoch starts, for all steps of it; in each step; and after the last step of an epoch."""

    def __init__(self, classes: int, pause: float) -> None:
        super().__init__(classes, pause)
        self.register_buffer("drawn", torch.zeros(5, dtype=torch.double))
        self.strength = 0.0  # in no checkpoint

    def start_epoch(self) -> None:
        self.strength = sum(draw())

    def end_epoch(self) -> None:
        self.drawn = 0.9 * self.drawn + torch.tensor(draw(), dtype=torch.double)  # depends on all earlier ones

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            images = images * (1 + 0.01 * (self.strength + sum(draw()) + self.drawn.sum().item()))
        return super().forward(images)


@pytest.mark.sample(1)
@pytest.mark.parametrize("processes", [1, 2])
def test_what_the_owner_draws_between_epochs_and_in_a_step_is_the_same_after_a_resume(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed with -9 at an epoch's end and in the middle of one; stopped between the last step and the evaluation."""
    import data

    def use(pause: float, stop_at: int) -> None:
        monkeypatch.setattr(main.task, "build_model", lambda config, data: Drawing(len(data.classes), pause))
        monkeypatch.setattr(main.task, "stop_at", stop_at, raising=False)

    head, stop, end = "for batches in run.steps():", "if run.should_stop():", "run.end_epoch("
    edits = {head: f"model.start_epoch()\n            {head}", end: f"model.end_epoch()\n            {end}"}
    edits[stop] = "if run.state.step == task.stop_at or run.should_stop():"
    monkeypatch.setattr(main, "main", changed_main(edits))
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 96, "val": 10})
    options: list[Any] = ["--dataset", "synthetic", "--batch-size", 8 // processes, "--epochs", 4]
    options += ["--checkpoint-every", 1, "--keep-checkpoints", 100, "--output-dir"]
    use(pause=0, stop_at=0)
    train(processes, *options, tmp_path / "whole")

    use(pause=0.02, stop_at=0)
    for step in (12, 17):  # the end of epoch 1, and in epoch 2
        ranks = start(processes, *options, tmp_path / "killed")
        wait_for(tmp_path / "killed" / "checkpoints" / f"step_{step:08d}.pt", ranks)
        ranks.kill()
        assert ranks.wait() == [-9] * processes
        for path in (tmp_path / "killed" / "checkpoints").glob("*.pt"):
            if int(path.stem[5:]) > step:
                path.unlink()
    use(pause=0, stop_at=36)  # the last step of epoch 3
    assert "at step 17" in train(processes, *options, tmp_path / "killed", code=75)
    use(pause=0, stop_at=0)
    assert "at step 36" in train(processes, *options, tmp_path / "killed")
    whole, killed = (checkpoint.read(newest(tmp_path / name))["model"] for name in ("whole", "killed"))
    assert whole["drawn"].all() and whole["drawn"].tolist() == killed["drawn"].tolist()
    assert weights_and_momentum(tmp_path / "killed") == weights_and_momentum(tmp_path / "whole")


def test_each_rank_and_each_step_draws_other_numbers_from_every_generator() -> None:
    drawn = []
    for step, rank in ((0, 0), (0, 1), (1, 0), (-1, 0), (0, 0)):
        seed_step(7, step, rank)
        drawn.append(draw())
    assert drawn[0] == drawn[4]
    assert all(len(set(numbers)) == 4 for numbers in zip(*drawn, strict=True))


def test_ranks_draw_differently_from_the_resume_on(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then, they draw the same, to build the same model."""
    line = "        run.log_summary("
    write = f"        (Path(config.output_dir) / f'rank {{ctx.rank}}').write_text(json.dumps(task.draw()))\n{line}"
    imports = "import torch\n\n"
    edits = {line: write, imports: f"import json\nfrom pathlib import Path\n{imports}"}
    monkeypatch.setattr(main, "main", changed_main(edits))
    monkeypatch.setattr(main.task, "draw", draw, raising=False)
    train(2, "--dataset", "synthetic", "--max-steps", 1, "--output-dir", tmp_path)
    first, second = (json.loads((tmp_path / f"rank {rank}").read_text()) for rank in (0, 1))
    assert not set(first) & set(second)


def test_a_checkpoint_of_a_version_that_stored_the_generators_resumes(small: None, tmp_path: Path) -> None:
    options = ["--dataset", "synthetic", "--batch-size", 64, "--epochs", 1, "--output-dir"]
    train(2, *options, tmp_path / "whole")
    train(2, *options, tmp_path / "old", "--max-steps", 2)
    path = newest(tmp_path / "old")
    python = (3, torch.tensor(random.getstate()[1]), None)
    stored = {"torch": torch.get_rng_state(), "python": python}
    checkpoint.write(path, {**checkpoint.read(path), "random": [stored] * 2})
    assert "at step 2" in train(2, *options, tmp_path / "old")
    assert "random" not in checkpoint.read(newest(tmp_path / "old"))
    assert weights_and_momentum(tmp_path / "old") == weights_and_momentum(tmp_path / "whole")


def test_reading_a_checkpoint_may_take_longer_than_the_timeout(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["--dataset", "synthetic", "--timeout", 2, "--output-dir", tmp_path, "--max-steps"]
    train(2, *given, 2)
    verify = checkpoint.verify
    monkeypatch.setattr(checkpoint, "verify", lambda path: time.sleep(7) or verify(path))
    assert "resuming from" in train(2, *given, 4)


class Queue:
    """A part of a checkpoint that is no module."""

    def __init__(self) -> None:
        self.numbers = torch.zeros(MB * 8, dtype=torch.uint8)

    def state_dict(self) -> dict[str, Any]:
        return {"numbers": self.numbers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not self.numbers.any(), "only the tensors of modules are overwritten before"
        self.numbers = self.numbers + state["numbers"]


def test_a_rank_that_resumes_needs_no_memory_for_a_second_model(tmp_path: Path) -> None:
    """Nor for all other parts at once."""
    (tmp_path / "checkpoints").mkdir()

    def peak_mb(ctx: DistContext) -> float:
        ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed is given back
        parts: dict[str, Any] = {f"queue_{number}": Queue() for number in range(6)}
        parts["model"] = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(MB * 2)) for _ in range(12))
        loader: Any = SimpleNamespace(dataset=None, global_batch=1, length=1, wait_s=0.0, order_facts=dict)
        loader.keep_order = lambda facts: None
        config = Config.parse(["--output-dir", str(tmp_path)])
        first, second = (CheckpointManager(config, ctx) for _ in range(2))
        first.resume(loader, make_dataclass("Training", parts)(**parts))
        for number in range(6):
            parts[f"queue_{number}"].numbers += number
        with torch.no_grad():
            for number, weight in enumerate(parts["model"]):
                weight += number
        first.train_state.step = 1
        first.save(lambda: None)
        first.wait()
        del first
        for number in range(6):
            parts[f"queue_{number}"].numbers.zero_()
        with torch.no_grad():
            parts["model"].requires_grad_(False)
            for weight in parts["model"]:
                weight.zero_()
        rest, peaks, receive = private_mb(), [], ctx.broadcast

        def broadcast(tensor: torch.Tensor) -> torch.Tensor:
            peaks.append(private_mb() - rest)
            return receive(tensor)

        object.__setattr__(ctx, "broadcast", broadcast)
        second.resume(loader, make_dataclass("Training", parts)(**parts))
        assert [parts[f"queue_{number}"].numbers.unique().tolist() for number in range(6)] == [[n] for n in range(6)]
        assert [weight.unique().tolist() for weight in parts["model"]] == [[n] for n in range(12)]
        assert len(peaks) >= 18
        return max(peaks)

    assert max(peaks := on_ranks(2, peak_mb)) < 45, f"{peaks} MB; the model has 96 MB, the others 48"


def test_another_optimizer_is_refused(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--dataset", "synthetic", "--output-dir", tmp_path, "--max-steps"]
    train(1, *options, 1)

    def adamw(parameters: Any, lr: float, momentum: float, weight_decay: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay)

    monkeypatch.setattr(torch.optim, "SGD", adamw)
    assert "the optimizer was SGD, is AdamW" in train(1, *options, 2, code=4)


def test_a_list_of_many_differences_is_short_and_begins_with_the_options(small: None, tmp_path: Path) -> None:
    options = ["--dataset", "synthetic", "--output-dir", tmp_path, "--max-steps"]
    train(1, *options, 1)
    output = train(1, *options, 2, "--model", "resnet18", code=4)
    assert re.search(r"cannot resume from \S+: --model was ToyModel, is resnet18; ", output)
    assert re.search(r"; and \d+ more\. Restore these settings", output)
    assert output.count("is not in the checkpoint") < 6
