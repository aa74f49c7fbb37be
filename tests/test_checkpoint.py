"""A checkpoint file is complete, verified, and an ordinary torch file."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp.checkpoint import storage as checkpoint
from faults import fault
from processes import train

CONTENT = {"format": checkpoint.FORMAT, "model": {"weight": torch.arange(5000.0)}, "step": 7, "list": [1, (2, 3)]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "step_00000007.pt"
    checkpoint.write(path, CONTENT)
    return path


def test_a_checkpoint_is_an_ordinary_torch_file(path: Path) -> None:
    for options in ({}, {"mmap": True}):
        content = torch.load(path, weights_only=True, **options)
        assert torch.equal(content["model"]["weight"], torch.arange(5000.0)) and content["list"] == [1, (2, 3)]
    assert zipfile.ZipFile(path).testzip() is None


def test_a_checkpoint_is_read_as_it_was_written(path: Path) -> None:
    content = checkpoint.read(path)
    assert content["step"] == 7 and torch.equal(content["model"]["weight"], torch.arange(5000.0))
    assert [name.name for name in path.parent.iterdir()] == [path.name], "a temporary file is left"


@fault(4)
def test_every_flipped_byte_is_detected(path: Path) -> None:
    whole = path.read_bytes()
    generator = random.Random(0)
    for position in [0, len(whole) - 1, *generator.sample(range(len(whole)), 300)]:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(checkpoint.InvalidCheckpoint):
            checkpoint.verify(path)
    path.write_bytes(whole)
    checkpoint.verify(path)


@fault(3)
def test_every_truncation_is_detected(path: Path) -> None:
    whole = path.read_bytes()
    for length in [0, 1, 22, 70, 71, 72, len(whole) // 2, len(whole) - 71, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(checkpoint.InvalidCheckpoint):
            checkpoint.verify(path)


def test_a_torch_file_of_another_program_is_refused(path: Path) -> None:
    torch.save({"model": {}}, path)
    with pytest.raises(checkpoint.InvalidCheckpoint, match="no digest"):
        checkpoint.read(path)
    for content in ({"model": {}}, {"format": 2, "model": {}}):
        checkpoint.write(path, content)
        with pytest.raises(checkpoint.InvalidCheckpoint, match="not a checkpoint of this project and version"):
            checkpoint.read(path)


class Hostile:
    """Unpickling it creates a directory."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@fault(6)
def test_a_hostile_pickle_runs_no_code(tmp_path: Path) -> None:
    """Neither as a bare pickle, nor in a file whose digest is correct."""
    mark = tmp_path / "the code ran"
    bare, sealed = tmp_path / "bare.pt", tmp_path / "sealed.pt"
    bare.write_bytes(pickle.dumps(Hostile(mark)) + bytes(200))
    checkpoint.write(sealed, {"format": checkpoint.FORMAT, "model": Hostile(mark)})
    for path in (bare, sealed):
        with pytest.raises(checkpoint.InvalidCheckpoint):
            checkpoint.read(path)
    assert not mark.exists()
    with pytest.raises(pickle.UnpicklingError):
        torch.load(sealed, weights_only=True)
    assert pickle.loads(bare.read_bytes()) is None and mark.exists(), "the pickle was not hostile"


def test_a_failed_write_leaves_the_old_file(path: Path) -> None:
    before = path.read_bytes()

    class Unpicklable:
        def __reduce__(self) -> Any:
            raise OSError("no")

    with pytest.raises(OSError, match="no"):
        checkpoint.write(path, {"model": Unpicklable()})
    assert path.read_bytes() == before
    assert [name.name for name in path.parent.iterdir()] == [path.name]


# ---- a run among damaged checkpoints --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 2, 4 and 6."""
    import data

    sizes, data.SYNTHETIC_SIZES = data.SYNTHETIC_SIZES, {"train": 640, "val": 101}
    output = tmp_path_factory.mktemp("trained")
    train(1, "--dataset", "synthetic", "--checkpoint-every", 2, "--max-steps", 6, "--output-dir", output)
    data.SYNTHETIC_SIZES = sizes
    return output


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Any] = {
    "flipped": flip,
    "truncated": lambda path: os.truncate(path, 1000),
    "empty": lambda path: os.truncate(path, 0),
    "garbage": lambda path: path.write_bytes(os.urandom(5000)),
}


@fault(3, 4)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(
    damage: str, trained: Path, small: None, tmp_path: Path
) -> None:
    output = Path(shutil.copytree(trained, tmp_path / "run"))
    DAMAGE[damage](output / "checkpoints" / "step_00000006.pt")
    printed = train(2, "--dataset", "synthetic", "--batch-size", 32, "--max-steps", 8, "--output-dir", output)
    assert "step_00000006.pt cannot be used" in printed and "at step 4" in printed
    assert checkpoint.read(output / "checkpoints" / "step_00000008.pt")["step"] == 8


@fault(5)
def test_if_all_checkpoints_are_bad_the_run_does_not_start_afresh(trained: Path, small: None, tmp_path: Path) -> None:
    output = Path(shutil.copytree(trained, tmp_path / "run"))
    mark = tmp_path / "the code ran"
    for path, damage in zip(sorted((output / "checkpoints").iterdir()), (*DAMAGE.values(),), strict=False):
        damage(path)
    content = {"format": checkpoint.FORMAT, "model": Hostile(mark)}
    checkpoint.write(output / "checkpoints" / "step_00000007.pt", content)
    before = {path.name: path.read_bytes() for path in (output / "checkpoints").iterdir()}
    printed = train(2, "--dataset", "synthetic", "--max-steps", 8, "--output-dir", output, code=4)
    errors = [line for line in printed.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert all(f"step_{step:08d}.pt: " in errors[0] for step in (2, 4, 6, 7)), "a reason for each checkpoint"
    assert {path.name: path.read_bytes() for path in (output / "checkpoints").iterdir()} == before
    assert not mark.exists()


def test_the_newest_good_checkpoints_are_kept(trained: Path, small: None, tmp_path: Path) -> None:
    """A bad checkpoint does not count as one of the --keep-checkpoints."""
    output = Path(shutil.copytree(trained, tmp_path / "run"))
    flip(output / "checkpoints" / "step_00000006.pt")
    options = ["--dataset", "synthetic", "--keep-checkpoints", 2, "--checkpoint-every", 1, "--output-dir", output]
    train(1, *options, "--max-steps", 5)
    names = sorted(path.name for path in (output / "checkpoints").iterdir())
    assert names == ["step_00000004.pt", "step_00000005.pt", "step_00000006.pt"], "4 and 5 are good, 6 is bad"
    train(1, *options, "--max-steps", 7)
    names = sorted(path.name for path in (output / "checkpoints").iterdir())
    assert names == ["step_00000006.pt", "step_00000007.pt"]


def test_the_content_is_what_the_readme_lists(trained: Path) -> None:
    content = torch.load(trained / "checkpoints" / "step_00000006.pt", weights_only=True)
    assert set(content) == {
        *("format", "sources", "classes"),
        *("model", "optimizer", "schedule", "scaler", "meter", "step", "epoch", "samples_consumed"),
        *("best", "best_step", "best_metrics", "evaluated_step", "epochs_since_best", "logged_step", "epoch_start"),
        *("config", "world_size", "global_batch", "samples", "dataset", "started_from"),
    }
    assert (content["step"], content["epoch"], content["samples_consumed"]) == (6, 0, 6 * 64)
    assert content["world_size"] == 1
