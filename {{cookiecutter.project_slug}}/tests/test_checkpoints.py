"""Runs that continue with another number of processes or other options, or among damaged checkpoints."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from outputs import assert_same_run, checkpoints, lines, newest, status
from processes import make_synthetic_data_small, train

from ddp.checkpoint import storage as checkpoint

OPTIONS = ["--dataset", "synthetic", "--batch-size", 16, "--log-every", 1]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 2 processes with checkpoints of the steps 2, 4 and 6. Copy it before you use it."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        make_synthetic_data_small(patch)
        train(2, *OPTIONS, "--checkpoint-every", 2, "--max-steps", 6, "--output-dir", folder)
    return folder


@pytest.fixture
def output(trained: Path, tmp_path: Path) -> Path:
    """A copy of the trained run."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def flip(path: Path) -> None:
    """Change one bit in the middle of the file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_run_resumes_from_the_newest_checkpoint_that_is_not_damaged(output: Path, tmp_path: Path) -> None:
    """It then ends like a run that was not interrupted, and keeps the damaged files apart from the good ones."""
    flip(output / "checkpoints/step_00000006.pt")
    os.truncate(output / "checkpoints/step_00000004.pt", 1000)
    (output / "checkpoints/step_00000005.pt").write_bytes(b"")
    (output / "checkpoints/step_00000007.pt.12-34.ddp.tmp").write_bytes(b"left by a killed run")
    (output / "notes.tmp").write_bytes(b"of somebody else")
    options = [*OPTIONS, "--checkpoint-every", 2, "--max-steps", 9, "--output-dir"]
    printed = train(2, *options, output)
    for step in (4, 5, 6):
        assert f"step_{step:08d}.pt cannot be used" in printed
    assert "at step 2" in printed
    train(2, *options, tmp_path / "whole")
    assert_same_run(tmp_path / "whole", output)
    assert [path.name for path in output.rglob("*.tmp")] == ["notes.tmp"]


def test_if_all_checkpoints_are_damaged_no_new_run_starts(output: Path) -> None:
    for path in (output / "checkpoints").iterdir():
        flip(path)
    before = {path: path.read_bytes() for path in output.rglob("*.pt")}
    printed = train(2, *OPTIONS, "--max-steps", 8, "--output-dir", output, code=4)
    (line,) = [line for line in printed.splitlines() if "error: " in line]
    assert all(f"step_{step:08d}.pt: " in line for step in (2, 4, 6)), line
    assert {path: path.read_bytes() for path in output.rglob("*.pt")} == before


def test_with_another_number_of_processes_the_epoch_continues_where_it_was(output: Path) -> None:
    """From 2 processes to 3, then to 1. `test_loader.py` shows that each sample then comes once."""
    printed = train(3, *OPTIONS, "--max-steps", 7, "--output-dir", output)
    assert "2 processes wrote this checkpoint, this run has 3" in printed
    content = checkpoint.read(newest(output))
    assert (content["step"], content["world_size"], content["samples_consumed"]) == (7, 3, 6 * 32 + 48)
    refused = train(1, *OPTIONS, "--max-steps", 9, "--strict-resume", "--output-dir", output, code=4)
    assert "--strict-resume: the number of processes was 3, is 1" in refused
    train(1, *OPTIONS, "--max-steps", 9, "--output-dir", output)
    assert checkpoint.read(newest(output))["samples_consumed"] == 6 * 32 + 48 + 2 * 16
    assert [line["step"] for line in lines(output, "train")] == list(range(1, 10))


def test_options_that_make_another_run_are_refused_by_name(output: Path) -> None:
    before = (output / "metrics.jsonl").read_bytes()
    refused = train(2, *OPTIONS, "--max-steps", 8, "--seed", 3, "--warmup-epochs", 0.37, "--output-dir", output, code=4)
    (line,) = refused.splitlines()
    assert "--seed was 0, is 3" in line and "--warmup-epochs was " in line and "--output-dir" in line
    assert (output / "metrics.jsonl").read_bytes() == before, "a refused command changes nothing"
    train(2, *OPTIONS, "--max-steps", 7, "--epochs", 12, "--keep-checkpoints", 2, "--output-dir", output)
    assert checkpoints(output)[-1] == "step_00000007.pt" and status(output)["state"] == "done"


# ---- the file -------------------------------------------------------------------------------------------------------

CONTENT = {"format": checkpoint.FORMAT, "model": {"weight": torch.arange(5000.0)}, "step": 7, "list": [1, (2, 3)]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint file, alone in its directory."""
    path = tmp_path / "files/step_00000007.pt"
    path.parent.mkdir()
    checkpoint.write(path, CONTENT)
    return path


def test_a_checkpoint_is_an_ordinary_torch_file(path: Path) -> None:
    for content in (torch.load(path, weights_only=True), checkpoint.read(path)):
        assert torch.equal(content["model"]["weight"], torch.arange(5000.0)) and content["list"] == [1, (2, 3)]
    assert list(path.parent.iterdir()) == [path], "a temporary file is left"


def test_every_flipped_byte_and_every_truncation_is_detected(path: Path) -> None:
    whole = path.read_bytes()
    damaged = [whole[:length] for length in (0, 1, 22, 70, 71, 72, len(whole) // 2, len(whole) - 71, len(whole) - 1)]
    for place in range(0, len(whole), 97):
        damaged.append(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(checkpoint.InvalidCheckpoint):
            checkpoint.verify(path)
    path.write_bytes(whole)
    checkpoint.verify(path)


class Hostile:
    """Unpickling it creates a directory."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_a_file_of_another_program_is_refused_and_runs_no_code(path: Path) -> None:
    torch.save({"model": {}}, path)
    with pytest.raises(checkpoint.InvalidCheckpoint, match="no digest"):
        checkpoint.read(path)
    for format in ({}, {"format": 2}):
        checkpoint.write(path, {**format, "model": {}})
        with pytest.raises(checkpoint.InvalidCheckpoint, match="not a checkpoint of this project and version"):
            checkpoint.read(path)
    mark = path.parent / "the code ran"
    checkpoint.write(path, {"format": checkpoint.FORMAT, "model": Hostile(mark)})
    with pytest.raises(checkpoint.InvalidCheckpoint):
        checkpoint.read(path)
    assert not mark.exists()
    torch.load(path, weights_only=False)
    assert mark.exists(), "it was not hostile"


def test_a_write_that_fails_leaves_the_old_file(path: Path) -> None:
    before = path.read_bytes()

    class Unpicklable:
        def __reduce__(self) -> Any:
            raise OSError("no")

    with pytest.raises(OSError, match="no"):
        checkpoint.write(path, {"model": Unpicklable()})
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]
