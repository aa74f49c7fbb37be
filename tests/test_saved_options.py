"""`--evaluate --resume runs/A/best.pt` is a complete command: the checkpoint knows the options."""

from __future__ import annotations

import errno
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from outputs import lines, newest
from PIL import Image

import data
from config import Config
from ddp.checkpoint.reuse import saved_names, with_saved_options
from ddp.core.errors import CheckpointError, UsageError
from ddp.core.options import flag_of, option
from ddp.distributed.rank_env import RankEnv
from faults import fault
from processes import train

pytestmark = pytest.mark.slow
FIRST, OTHER_MACHINE = RankEnv(0, 2, 0), RankEnv(1, 2, 0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with unusual options."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "SYNTHETIC_SIZES", {"train": 320, "val": 101})
        options = (
            "--seed",
            5,
            "--ema",
            0.5,
            "--image-size",
            24,
            "--epochs",
            1,
            "--warmup-epochs",
            1,
            "--precision",
            "bf16",
        )
        train(2, "--dataset", "synthetic", "--device", "cpu", *options, "--output-dir", folder)
    return folder


def evaluated(output: str) -> list[str]:
    """Loss and accuracy, as printed."""
    return re.findall(r"  val    loss (\S+)  accuracy (\S+)", output)


def test_the_checkpoint_alone_is_enough(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 320, "val": 101})
    (line,) = lines(trained, "val")
    for where in (("--resume", trained / "best.pt"), ("--output-dir", trained), ("--resume", newest(trained))):
        output = train(1, "--evaluate", *where)
        assert evaluated(output) == [(f"{line['loss']:.4f}", f"{line['accuracy']:.4f}")]
        assert "although" not in output and ", bf16\n" in output


def test_a_file_system_may_map_no_files(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are read then, in an evaluation and in a resume."""
    load = torch.load

    def load_without_mmap(*arguments: Any, mmap: bool = False, **options: Any) -> Any:
        if mmap:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        return load(*arguments, **options)

    monkeypatch.setattr(torch, "load", load_without_mmap)
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 320, "val": 101})
    (line,) = lines(trained, "val")
    output = train(1, "--evaluate", "--resume", trained / "best.pt")
    assert evaluated(output) == [(f"{line['loss']:.4f}", f"{line['accuracy']:.4f}")]
    whole = Path(shutil.copytree(trained, tmp_path / "run"))
    resumed = train(2, "--config", whole / "config.json", "--epochs", 2, "--output-dir", whole)
    assert f"resuming from {newest(trained).name}" in resumed.replace(f"{whole}/checkpoints/", "")


def test_another_value_on_the_command_line_is_used_and_reported(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 320, "val": 101})
    (line,) = lines(trained, "val")
    path = trained / "best.pt"
    output = train(2, "--evaluate", "--resume", path, "--seed", 6, "--image-size", 24)
    assert output.count("although") == 1 and f"--seed 6, although {path} was trained with 5\n" in output
    assert evaluated(output) != [(f"{line['loss']:.4f}", f"{line['accuracy']:.4f}")], "other images"
    monkeypatch.setenv("DDP_ELASTIC", "2")  # launch_node.sh --nnodes MIN:MAX
    output = train(1, "--evaluate", "--resume", path, "--seed", 6, "--image-size", 24)
    assert f"--seed 6, although {path} was trained with 5\n" in output
    monkeypatch.delenv("DDP_ELASTIC")
    output = train(1, "--evaluate", "--resume", path, "--image-size", 32, code=4)
    assert f"--image-size 32, although {path} was trained with 24\n" in output
    assert f"error: cannot evaluate {path}: fc1.weight was [120, 144], is [120, 400]" in output


def test_the_folder_of_the_images_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part, name in ((part, name) for part in ("train", "val") for name in ("cat", "dog")):
        (tmp_path / "images" / part / name).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (32, 32)).save(tmp_path / "images" / part / name / f"{number}.png")
    options = ("--dataset", "imagefolder", "--data-dir", tmp_path / "images", "--batch-size", 4, "--epochs", 1)
    train(1, *options, "--device", "cpu", "--output-dir", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    output = train(1, "--evaluate", "--resume", "run/best.pt")
    assert "imagefolder: 8 training, 8 validation samples" in output and len(evaluated(output)) == 1

    for part in ("train", "val"):  # as many classes and images as before, but cats are in the place of dogs
        (tmp_path / "images" / part / "cat").rename(tmp_path / "images" / part / "wolf")
    for words in (("--evaluate", "--resume", "run/best.pt"), (*options, "--epochs", 2, "--output-dir", "run")):
        output = train(1, *words, code=4)
        assert ": class 0 of the data was cat, is dog; class 1 of the data was dog, is wolf. Restore these" in output
    for part in ("train", "val"):
        (tmp_path / "images" / part / "wolf").rename(tmp_path / "images" / part / "dog" / "wolf")
    output = train(1, "--evaluate", "--resume", "run/best.pt", code=4)
    assert "error: cannot evaluate run/best.pt: the data had 2 classes, have 1; fc3.weight was" in output


def test_which_options_are_taken() -> None:
    @dataclass
    class Own(Config):
        smoothing: float = option(0.0, "label smoothing", section="training")
        tiles: int = option(4, "cut images into tiles", section="data")
        fused: bool = option(False, "a faster kernel", section="speed")

    taken = set(saved_names(Own()))
    assert {"smoothing", "tiles", "dataset", "data_dir", "model", "image_size", "ema", "seed", "precision"} <= taken
    own_machine = {"fused", "compile", "sync_bn", "nproc", "device", "backend", "output_dir", "resume", "timeout"}
    assert not taken & {*own_machine, "evaluate", "log_every"}


def test_options_that_are_gone_or_new_are_no_obstacle(trained: Path, tmp_path: Path) -> None:
    content = torch.load(trained / "best.pt", weights_only=True)
    content["config"] |= {"of_an_earlier_version": 3}
    del content["config"]["momentum"]
    torch.save(content, tmp_path / "edited.pt")
    config = with_saved_options(Config.parse(["--evaluate", "--resume", str(tmp_path / "edited.pt")]), FIRST)
    assert (config.seed, config.dataset, config.momentum) == (5, "synthetic", Config.momentum)


def test_an_evaluation_without_a_checkpoint_and_a_training_keep_their_options(trained: Path, tmp_path: Path) -> None:
    for words in (["--resume", str(trained / "best.pt")], ["--evaluate", "--output-dir", str(tmp_path)]):
        config = Config.parse(words)
        assert asdict(with_saved_options(config, FIRST)) == asdict(config)


@fault(3)
def test_a_damaged_newest_checkpoint_is_skipped(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The options come from the one before it, as the weights do."""
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 320, "val": 101})
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run/checkpoints/step_00000099.pt").write_bytes(newest(trained).read_bytes()[:5000])
    output = train(1, "--evaluate", "--output-dir", tmp_path / "run")
    (line,) = lines(trained, "val")
    assert "step_00000099.pt cannot be used" in output
    assert evaluated(output) == [(f"{line['loss']:.4f}", f"{line['accuracy']:.4f}")]


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "No such file or directory"), (b"PK damaged", "it is no checkpoint of this project, or damaged")],
)
def test_a_checkpoint_that_cannot_be_read_is_refused_before_data_are_loaded(
    content: bytes | None, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "best.pt"
    if content is not None:
        path.write_bytes(content)
    assert train(2, "--evaluate", "--resume", path, code=4) == f"error: {path} cannot be used: {reason}\n"


def test_a_machine_without_the_file_takes_its_command_line(trained: Path, tmp_path: Path) -> None:
    words = ["--evaluate", "--resume", str(tmp_path / "nowhere.pt"), "--seed", "7"]
    assert with_saved_options(Config.parse(words), OTHER_MACHINE).seed == 7
    with pytest.raises(CheckpointError):
        with_saved_options(Config.parse(words), FIRST)


def test_options_are_checked_after_those_of_the_checkpoint_are_known(trained: Path, tmp_path: Path) -> None:
    """--val-fraction fits --dataset cifar10, which is the default, but not what the checkpoint was trained with."""
    words = ["--evaluate", "--resume", str(trained / "best.pt"), "--val-fraction", "0.2"]
    with pytest.raises(UsageError, match="synthetic has a validation set"):
        with_saved_options(Config.parse(words), FIRST)
    content = torch.load(trained / "best.pt", weights_only=True)
    content["config"]["dataset"] = "imagefolder"
    torch.save(content, tmp_path / "edited.pt")
    words = ["--evaluate", "--resume", str(tmp_path / "edited.pt"), "--cache", str(tmp_path)]
    assert with_saved_options(Config.parse(words), FIRST).cache == str(tmp_path), f"{flag_of('cache')} is for folders"


def test_ranks_with_other_options_are_refused(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if rank 1 were on another machine, without the file."""
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 320, "val": 101})
    import ddp.training.run

    def on_two_machines(config: Any, env: Any) -> Any:
        if env.rank == 1:
            config = Config.parse(["--evaluate", "--resume", "/nowhere", "--dataset", "synthetic"])
            return with_saved_options(config, RankEnv(1, 2, 0))
        return with_saved_options(config, env)

    monkeypatch.setattr(ddp.training.run, "with_saved_options", on_two_machines)
    output = train(2, "--evaluate", "--resume", trained / "best.pt", code=3)
    refused = r"error: --\S+ is \S+ on rank 0 and \S+ on rank 1: start all ranks with the same options, code and data\n"
    assert re.fullmatch(refused, output)
