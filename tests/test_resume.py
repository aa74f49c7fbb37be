"""A run that was killed and started again by the same command equals one that was not, bit for bit."""

from __future__ import annotations

import json
import os
import random
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from outputs import lines, newest, weights_and_momentum
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import main
from config import parse
from ddp import checkpoint
from ddp.compare import run_differences
from ddp.fingerprint import code_of
from ddp.launch import Placement, run_as_rank
from ddp.state import broadcast_state, digest, random_state, set_random_state
from faults import fault
from processes import Ranks, on_ranks, start, train
from small_models import build_awkward, build_slow_awkward

pytestmark = pytest.mark.slow


def wait_for(path: Path, ranks: Ranks) -> None:
    """Until `path` exists. Fails with the run's output if it does not come."""
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, f"{path} never came:\n{ranks.output()}"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 96 training and 10 test images, in JPEG."""
    root = tmp_path_factory.mktemp("images")
    generator = torch.Generator().manual_seed(0)
    for split, each in (("train", 48), ("test", 5)):
        for label in ("cat", "dog"):
            (root / split / label).mkdir(parents=True)
            for number in range(each):
                pixels = torch.randint(0, 256, (32, 32, 3), generator=generator, dtype=torch.uint8)
                Image.fromarray(pixels.numpy()).save(root / split / label / f"{number}.jpg")
    return root


@pytest.mark.parametrize("source", ["memory", "folder"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_killed_run_resumes_bit_for_bit(
    source: str, workers: int, accumulation: int, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout, BatchNorm, augmentation, momentum, 2 processes; killed with -9 in the middle of the second epoch."""
    import data

    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 96, "test": 10})
    options: list[Any] = ["--dataset", "synthetic"] if source == "memory" else ["--dataset", "imagefolder"]
    options += ["--data-dir", folders, "--batch-size", 4, "--epochs", 3, "--checkpoint-every", 2, "--log-every", 1]
    options += ["--workers", workers, "--grad-accum-steps", accumulation]
    per_epoch = 96 // (2 * 4 * accumulation)
    monkeypatch.setattr(main, "build_model", build_awkward)
    train(2, *options, "--output-dir", tmp_path / "whole")

    monkeypatch.setattr(main, "build_model", build_slow_awkward)
    ranks = start(2, *options, "--output-dir", tmp_path / "killed")
    wait_for(tmp_path / "killed" / "checkpoints" / f"step_{per_epoch + 2:08d}.pt", ranks)
    ranks.kill()
    assert ranks.wait() == [-9, -9]
    stopped_at = checkpoint.read(newest(tmp_path / "killed"))
    assert stopped_at["epoch"] == 1 and 0 < stopped_at["position"] < 96, "it was not killed in mid-epoch"

    monkeypatch.setattr(main, "build_model", build_awkward)
    output = train(2, *options, "--output-dir", tmp_path / "killed")
    assert f"at step {stopped_at['step']}" in output
    assert weights_and_momentum(tmp_path / "killed") == weights_and_momentum(tmp_path / "whole")

    timeless = [
        [
            {name: line.get(name) for name in ("step", "split", "epoch", "loss", "accuracy", "lr")}
            for line in lines(output)
        ]
        for output in (tmp_path / "whole", tmp_path / "killed")
    ]
    assert timeless[0] == timeless[1], "each logged step once, with the same loss"
    events = EventAccumulator(str(tmp_path / "killed" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 3 * per_epoch + 1))


def test_two_seeds_differ(small: None, tmp_path: Path) -> None:
    """Else the tests of equality would prove nothing."""
    for seed in (0, 1):
        options = ["--dataset", "synthetic", "--epochs", 1, "--seed", seed, "--output-dir", tmp_path / str(seed)]
        train(1, *options)
    assert weights_and_momentum(tmp_path / "0") != weights_and_momentum(tmp_path / "1")


def indices_used(output: Path) -> list[int]:
    """What every rank has written with `record_indices`."""
    return [int(line) for path in sorted(output.glob("indices-*")) for line in path.read_text().split()]


def record_indices(monkeypatch: pytest.MonkeyPatch, output: Path) -> None:
    """Let each process write down the indices of the samples it trains on, and make batches one by one."""
    import data

    monkeypatch.setattr(data, "PIXELS_AT_ONCE", 1)
    prepare = data.Images.prepare

    def recording(self: Any, batch: Any) -> Any:
        if len(self) == data.SYNTHETIC_SIZES["train"]:
            with (output / f"indices-{os.getpid()}").open("a") as file:
                file.write("".join(f"{index}\n" for index in batch[1].tolist()))
        return prepare(self, batch)

    monkeypatch.setattr(data.Images, "prepare", recording)


@fault(20)
def test_another_number_of_processes_uses_each_sample_once(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 2 processes to 3, then to 1: each index once; what fills no global batch at the end is dropped."""
    record_indices(monkeypatch, tmp_path)
    options = ["--dataset", "synthetic", "--epochs", 1, "--batch-size", 7, "--output-dir", tmp_path / "run"]
    train(2, *options, "--max-steps", 11)
    output = train(3, *options, "--max-steps", 21)
    assert "made by 2 processes, this run has 3" in output
    train(1, *options)
    used = indices_used(tmp_path)
    assert len(used) == len(set(used)), "a sample was used twice"
    dropped = (640 - 11 * 2 * 7 - 10 * 3 * 7) % 7
    assert len(used) == 640 - dropped


@fault(20)
def test_strict_resume_refuses_another_number_of_processes(small: None, tmp_path: Path) -> None:
    options = ["--dataset", "synthetic", "--output-dir", tmp_path, "--strict-resume"]
    train(2, *options, "--max-steps", 2)
    assert "the number of processes was 2, is 1" in train(1, *options, "--max-steps", 4, code=4)
    train(2, *options, "--max-steps", 4)
    assert newest(tmp_path).name == "step_00000004.pt"


@fault(21)
def test_other_options_are_refused_by_name_and_harmless_ones_are_not(small: None, tmp_path: Path) -> None:
    options = ["--dataset", "synthetic", "--output-dir", tmp_path, "--max-steps"]
    train(1, *options, 2)
    refused = train(1, *options, 4, "--lr", 0.5, "--seed", 3, code=4)
    assert "--lr was 0.03, is 0.5" in refused and "--seed was 0, is 3" in refused
    assert "--batch-size was 64, is 32" in train(1, *options, 4, "--batch-size", 32, code=4)
    train(1, *options, 3, "--epochs", 12, "--log-every", 1, "--workers", 1, "--keep-checkpoints", 2)
    train(1, *options, 4, "--batch-size", 32, "--grad-accum-steps", 2)  # the global batch is the same


@fault(21)
def test_files_that_were_edited_since_the_checkpoint_are_named(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An edit that keeps the shapes of the weights fits: another activation, say, on the old weights."""
    options = ["--dataset", "synthetic", "--batch-size", 64, "--output-dir", tmp_path]
    assert "warning" not in train(2, *options, "--max-steps", 2)
    assert "edited since" not in train(2, *options, "--max-steps", 3)
    edited = {**code_of(), "the file model.py": "another"}
    monkeypatch.setattr("ddp.resume.code_of", lambda: edited)
    assert ": model.py. What is new takes part in this evaluation\n" in train(1, *options, "--evaluate")
    output = train(2, *options, "--max-steps", 4)
    assert output.count("warning: edited since step_00000003.pt was written: model.py. ") == 1
    assert "edited since" not in train(2, *options, "--max-steps", 5), "the newest checkpoint is of the edited file"


def test_an_option_that_is_newer_than_the_checkpoint_had_its_default() -> None:
    then = {name: value for name, value in asdict(parse([])).items() if name != "clip_grad"}
    content = {"config": then, "global_batch": 64, "samples": 100}
    assert run_differences(parse([]), content, 64, 100) == []
    assert run_differences(parse(["--clip-grad=2"]), content, 64, 100) == ["--clip-grad was None, is 2.0"]


def test_another_model_is_refused_with_the_weights_that_differ(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--dataset", "synthetic", "--output-dir", tmp_path, "--max-steps"]
    train(2, *options, 2)
    build = main.build_model

    def edited(config: Any, train_set: Any) -> torch.nn.Module:
        model: Any = build(config, train_set)
        model.fc1, model.fc2 = torch.nn.Linear(400, 100), torch.nn.Linear(100, 84)
        return model

    monkeypatch.setattr(main, "build_model", edited)
    output = train(2, *options, 4, code=4)
    assert "fc1.weight was [120, 400], is [100, 400]" in output
    assert output.count("error:") == 1, "every rank fails, one speaks"


@fault(22)
def test_only_rank_0_needs_the_checkpoint(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a shared file system the other ranks have none; momentum must be right on them too."""
    from ddp.folder import Folder

    options = ["--dataset", "synthetic", "--epochs", 1, "--batch-size", 16, "--output-dir"]
    train(2, *options, tmp_path / "whole")
    train(2, *options, tmp_path / "split", "--max-steps", 7)
    owner = os.getpid()
    find = Folder.find

    def find_on_rank_0(self: Folder, config: Any) -> Any:
        assert ranks_seen.exists() is False, "another rank has looked for checkpoints too"
        ranks_seen.write_text(str(owner))
        return find(self, config)

    ranks_seen = tmp_path / "looked"
    monkeypatch.setattr(Folder, "find", find_on_rank_0)
    train(2, *options, tmp_path / "split")
    assert weights_and_momentum(tmp_path / "split") == weights_and_momentum(tmp_path / "whole")


def test_resume_path_starts_a_new_folder_and_survives_the_same_command_again(small: None, tmp_path: Path) -> None:
    options = ["--dataset", "synthetic", "--epochs", 1]
    train(1, *options, "--output-dir", tmp_path / "first", "--max-steps", 3)
    again = [*options, "--output-dir", tmp_path / "second", "--resume", newest(tmp_path / "first")]
    assert "at step 3" in train(1, *again, "--max-steps", 5)
    assert "at step 5" in train(1, *again), "its own checkpoint is newer than the one that it started from"
    train(1, *options, "--output-dir", tmp_path / "whole")
    assert weights_and_momentum(tmp_path / "second") == weights_and_momentum(tmp_path / "whole")
    refused = train(1, *options, "--output-dir", tmp_path / "whole", "--resume", newest(tmp_path / "first"), code=4)
    assert "did not start from it" in refused


def test_a_finished_runs_checkpoint_in_a_new_folder_names_no_files_that_are_not_there(
    small: None, tmp_path: Path
) -> None:
    options = ["--dataset", "synthetic", "--batch-size", 64, "--epochs", 1, "--output-dir"]
    train(1, *options, tmp_path / "done")
    output = train(1, *options, tmp_path / "new", "--resume", tmp_path / "done" / "best.pt")
    assert "at step 10, the end of epoch 1" in output and "all is done already" in output
    assert "best" not in output.split("all is done already")[1] and "curves" not in output


def test_a_finished_run_says_so_and_changes_nothing(small: None, tmp_path: Path) -> None:
    options = ["--dataset", "synthetic", "--epochs", 1, "--output-dir", tmp_path]
    train(1, *options)
    before = {path: path.read_bytes() for path in (newest(tmp_path), tmp_path / "best.pt", tmp_path / "metrics.jsonl")}
    assert "all is done already" in train(1, *options)
    assert {path: path.read_bytes() for path in before} == before


def test_with_deterministic_three_processes_resume_bit_for_bit_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None
) -> None:
    """Without it, DDP's second order of its buckets lets three ranks add up in another order than before the kill."""
    monkeypatch.setattr(main, "build_model", build_awkward)
    options = ["--dataset", "synthetic", "--batch-size", 8, "--epochs", 1, "--deterministic", "--output-dir"]
    train(3, *options, tmp_path / "whole")
    for stop in (5, 11):
        train(3, *options, tmp_path / "stopped", "--max-steps", stop)
    train(3, *options, tmp_path / "stopped")
    assert weights_and_momentum(tmp_path / "stopped") == weights_and_momentum(tmp_path / "whole")


class Noisy(torch.utils.data.Dataset):
    """Samples with random transforms by all three generators, as a user may write it."""

    classes = ("a", "b")

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.randn(3, 32, 32) + random.random() + numpy.random.rand()
        return noise + index % 2, index % 2


@pytest.mark.parametrize("workers", [0, 2])
def test_random_transforms_in_a_dataset_resume_exactly_whatever_the_workers(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "load_datasets", lambda config: (Noisy(), Noisy()))
    monkeypatch.setattr(main, "build_model", build_awkward)
    options = ["--batch-size", 4, "--epochs", 2]
    train(2, *options, "--workers", 1, "--output-dir", tmp_path / "whole")
    train(2, *options, "--workers", workers, "--output-dir", tmp_path / "stopped", "--max-steps", 11)
    train(2, *options, "--workers", workers, "--output-dir", tmp_path / "stopped")
    assert weights_and_momentum(tmp_path / "stopped") == weights_and_momentum(tmp_path / "whole")
    assert lines(tmp_path / "stopped")[-1]["loss"] == lines(tmp_path / "whole")[-1]["loss"]


def test_ranks_started_with_different_options_are_told(small: None, tmp_path: Path) -> None:
    def target(placement: Placement) -> int:
        options = ["--dataset", "synthetic", "--output-dir", str(tmp_path), "--lr", f"0.0{placement.rank + 1}"]
        return run_as_rank(main.main, parse(options), placement)

    ranks = Ranks(2, target)
    assert ranks.wait() == [3, 3]
    assert "--lr is 0.01 on rank 0 and 0.02 on rank 1" in ranks.output() and ranks.output().count("error:") == 1


def test_a_refused_command_leaves_the_records_of_the_run_alone(small: None, tmp_path: Path) -> None:
    options = ["--dataset", "synthetic", "--epochs", 1, "--output-dir", tmp_path]
    train(1, *options)
    before = {name: (tmp_path / name).read_text() for name in ("status.json", "config.json", "metrics.jsonl")}
    train(1, *options, "--lr", 9, code=4)
    assert {name: (tmp_path / name).read_text() for name in before} == before


def test_status_says_running_from_the_first_step_on(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "build_model", build_slow_awkward)
    ranks = start(1, "--dataset", "synthetic", "--epochs", 1, "--output-dir", tmp_path)
    wait_for(tmp_path / "status.json", ranks)
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "running"
    ranks.kill()
    ranks.wait()


def test_an_evaluation_is_logged_once_where_an_epoch_has_no_step_left(small: None, tmp_path: Path) -> None:
    options = ["--dataset", "synthetic", "--batch-size", 100, "--epochs", 2, "--output-dir", tmp_path]
    train(2, *options, "--max-steps", 2)
    train(3, *options)
    tests = [line["step"] for line in lines(tmp_path) if line["split"] == "test"]
    assert tests == [2, 4]


def test_best_pt_comes_into_a_folder_that_starts_from_another_runs_checkpoint(small: None, tmp_path: Path) -> None:
    train(1, "--dataset", "synthetic", "--epochs", 2, "--output-dir", tmp_path / "first")
    source = newest(tmp_path / "first")
    again = ["--dataset", "synthetic", "--epochs", 3, "--output-dir", tmp_path / "second", "--resume"]
    train(1, *again, source.parent / "." / source.name)
    assert (tmp_path / "second" / "best.pt").exists()
    train(1, *again, f"{source.parent}/../checkpoints/{source.name}")  # the same file by another path
    source.unlink()
    train(1, *again, source)  # it is not needed any more


def test_numpy_numbers_among_the_scores_are_kept_as_plain_ones(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "figure_of_merit", lambda scores: numpy.float64(scores["accuracy"]))
    options = ["--dataset", "synthetic", "--output-dir", tmp_path]
    train(1, *options, "--epochs", 1)
    assert "going on from" in train(1, *options, "--epochs", 2)


def test_state_that_could_not_be_loaded_again_is_refused_at_the_first_save(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main.Schedule, "state_dict", lambda self: {"lr": numpy.float32(1)})
    output = train(1, "--dataset", "synthetic", "--max-steps", 1, "--output-dir", tmp_path, code=1)
    assert "state['schedule']['lr'] is of <class 'numpy.float32'>" in output


def test_what_a_state_dict_says_of_versions_reaches_every_rank() -> None:
    """mnasnet, for one, does not load without it."""

    def on_rank(group: Any) -> str:
        state = torch.nn.BatchNorm2d(3).state_dict() if group.rank == 0 else None
        received = broadcast_state(state, group)
        return f"{type(received).__name__} {received._metadata['']['version']}"

    assert on_ranks(2, on_rank) == ["OrderedDict 2"] * 2


def test_models_that_compute_while_they_are_built_train_and_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import data

    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 16, "test": 4})
    options = [
        "--dataset",
        "synthetic",
        "--model",
        "regnet_y_400mf",
        "--batch-size",
        4,
        "--output-dir",
        tmp_path,
        "--max-steps",
    ]
    train(1, *options, 1)
    train(1, *options, 2)


def test_groups_of_parameters_keep_learning_rates_of_their_own() -> None:
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": weights[:1], "lr": 0.003}, {"params": weights[1:]}]
    schedule = main.Schedule(torch.optim.SGD(groups, lr=0.03), parse(["--lr", "0.03"]), 64)
    schedule.set(0.5)
    assert [group["lr"] for group in schedule.optimizer.param_groups] == pytest.approx([0.0015, 0.015])


def test_python_and_numpy_draw_differently_on_each_rank(small: None, tmp_path: Path) -> None:
    train(2, "--dataset", "synthetic", "--max-steps", 1, "--output-dir", tmp_path)
    first, second = checkpoint.read(newest(tmp_path))["random"]
    for name in ("torch", "python", "numpy"):
        assert digest(first[name]) != digest(second[name]), name


def test_generators_draw_again_what_they_drew_after_a_trip_through_a_checkpoint(tmp_path: Path) -> None:
    random.gauss(0, 1)  # from now on it has a second one in store; so has the next
    numpy.random.randn()
    drawn = []
    checkpoint.write(tmp_path / "a.pt", {"format": checkpoint.FORMAT, "random": random_state(torch.device("cpu"))})
    for _ in range(2):
        drawn.append((random.gauss(0, 1), numpy.random.randn(), numpy.random.rand(), torch.randn(3).tolist()))
        set_random_state(checkpoint.read(tmp_path / "a.pt")["random"], torch.device("cpu"))
    assert drawn[0] == drawn[1]


def test_another_optimizer_is_refused(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--dataset", "synthetic", "--output-dir", tmp_path, "--max-steps"]
    train(1, *options, 1)

    def adamw(parameters: Any, lr: float, momentum: float, weight_decay: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay)

    monkeypatch.setattr(torch.optim, "SGD", adamw)
    assert "the optimizer was SGD, is AdamW" in train(1, *options, 2, code=4)


def test_of_many_differences_the_options_come_first_and_the_list_is_short(small: None, tmp_path: Path) -> None:
    options = ["--dataset", "synthetic", "--output-dir", tmp_path, "--max-steps"]
    train(1, *options, 1)
    output = train(1, *options, 2, "--model", "resnet18", code=4)
    assert "does not fit: --model was ToyModel, is resnet18; " in output
    assert re.search(r"; and \d+ more\. For a new run", output) and output.count("is not in the checkpoint") < 6
