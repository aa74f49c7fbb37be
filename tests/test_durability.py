"""The order in which a run syncs, renames and links its files; test_crash_states.py shows what that is good for.

POSIX promises that a file or a new name is on disk only after fsync of the file, or of the directory with the name.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from outputs import lines

from config import Config
from crash_runs import refuse_links
from ddp.checkpoint import storage as checkpoint
from ddp.checkpoint.storage import CheckpointDirectory
from ddp.training.output_dir import OutputDir
from processes import train

OPTIONS = ["--dataset", "synthetic", "--batch-size", 32, "--log-every", 2]


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with one line for each `sync PATH`, `rename PATH` (to this path) and `link PATH`, of this and all forked
    processes."""
    file = tmp_path / "events"
    file.touch()
    sync, rename, link = os.fsync, Path.replace, os.link

    def note(event: str, path: Any) -> None:
        with file.open("a") as notes:
            notes.write(f"{event} {path}\n")

    def noted_sync(descriptor: int) -> None:
        sync(descriptor)
        note("sync", os.readlink(f"/proc/self/fd/{descriptor}"))

    def noted_rename(self: Path, target: Any) -> Path:
        note("rename", Path(target).absolute())
        return rename(self, target)

    def noted_link(source: Any, target: Any) -> None:
        link(source, target)
        note("link", Path(target).absolute())

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(Path, "replace", noted_rename)
    monkeypatch.setattr(os, "link", noted_link)
    return file


def noted(events: Path, folder: Path) -> list[str]:
    """The events in `folder`, relative to it, with the process ids of temporary files cut off."""
    found = [line.split(" ", 1) for line in events.read_text().splitlines()]
    places = [(event, os.path.relpath(path, folder)) for event, path in found]
    return [f"{event} {place.split('.pt.')[0].split('.jsonl.')[0]}" for event, place in places]


def content(step: int) -> dict[str, Any]:
    return {"format": checkpoint.FORMAT, "step": step, "model": {"weight": torch.full((1000,), float(step))}}


# ---- new directories ------------------------------------------------------------------------------------------------


def test_each_directory_that_is_created_is_synced_in_its_parent(
    events: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    OutputDir(Config.parse(["--output-dir", "runs/many/first"])).open()
    synced = {line for line in noted(events, tmp_path / "project") if line.startswith("sync")}
    assert {"sync .", "sync runs", "sync runs/many", "sync runs/many/first"} <= synced
    assert "sync .." not in synced, "that directory existed before"


# ---- a resume -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_resumed_run_syncs_the_lines_that_it_keeps_before_they_replace_the_old_ones(
    small: None, events: Path, tmp_path: Path
) -> None:
    """Otherwise a power failure before the next checkpoint could leave metrics.jsonl empty."""
    output = tmp_path / "run"
    train(1, *OPTIONS, "--max-steps", 4, "--output-dir", output)
    events.write_text("")
    train(1, *OPTIONS, "--max-steps", 5, "--output-dir", output)
    found = noted(events, output)
    place = found.index("rename metrics.jsonl")
    assert found[place - 1] == "sync metrics"  # the temporary file
    assert found[place + 1] == "sync ."
    assert [line["step"] for line in lines(output, "train")] == [2, 4]


# ---- a save ---------------------------------------------------------------------------------------------------------


def test_the_best_checkpoint_is_on_disk_before_a_checkpoint_names_it(events: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    directory = CheckpointDirectory(Config.parse(["--output-dir", str(tmp_path / "run")]))
    directory.write(content(1), best=True)
    assert noted(events, tmp_path / "run") == [
        *("sync best", "rename best.pt", "sync ."),
        *("link checkpoints/step_00000001", "rename checkpoints/step_00000001.pt", "sync checkpoints"),
    ]


def test_the_best_checkpoint_is_written_once_and_outlives_its_step(tmp_path: Path) -> None:
    """best.pt is a hard link to the checkpoint of its step: deleting that, or a better one, changes no file."""
    output = tmp_path / "run"
    (output / "checkpoints").mkdir(parents=True)
    directory = CheckpointDirectory(Config.parse(["--output-dir", str(output), "--keep-checkpoints", "2"]))
    directory.write(content(1), best=True)
    first = output / "checkpoints" / "step_00000001.pt"
    assert first.samefile(output / "best.pt")
    for step in (2, 3):
        directory.write(content(step), best=False)
    assert not first.exists() and checkpoint.read(output / "best.pt")["step"] == 1
    directory.write(content(4), best=True)
    directory.write(content(5), best=True)
    fourth = output / "checkpoints" / "step_00000004.pt"
    assert checkpoint.read(fourth)["step"] == 4 and checkpoint.read(output / "best.pt")["step"] == 5
    directory.write(content(5), best=True)  # once more, with one name each for the old file and for the new one
    assert directory.paths()[0].samefile(output / "best.pt") and not list(output.rglob("*.tmp"))


def test_without_hard_links_the_best_checkpoint_is_copied(
    events: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)

    monkeypatch.setattr(os, "link", refuse_links)
    directory = CheckpointDirectory(Config.parse(["--output-dir", str(tmp_path / "run")]))
    directory.write(content(1), best=True)
    step = tmp_path / "run" / "checkpoints" / "step_00000001.pt"
    assert not step.samefile(tmp_path / "run" / "best.pt")
    assert step.read_bytes() == (tmp_path / "run" / "best.pt").read_bytes() and checkpoint.read(step)["step"] == 1
    expected = ["sync checkpoints/step_00000001", "rename checkpoints/step_00000001.pt", "sync checkpoints"]
    assert noted(events, tmp_path / "run")[-3:] == expected


def test_a_write_never_changes_an_existing_file(tmp_path: Path) -> None:
    """Otherwise it would change the other name of a hard link as well, even that of a temporary file a kill left."""
    checkpoint.write(tmp_path / "best.pt", content(1))
    os.link(tmp_path / "best.pt", tmp_path / "step_00000001.pt.link.ddp.tmp")
    before = (tmp_path / "best.pt").read_bytes()
    checkpoint.link(tmp_path / "best.pt", tmp_path / "step_00000001.pt")
    checkpoint.write(tmp_path / "step_00000001.pt", content(2))
    assert (tmp_path / "best.pt").read_bytes() == before


# ---- deletions that a crash left undone -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_resumed_run_deletes_the_checkpoints_that_a_crash_kept(small: None, tmp_path: Path) -> None:
    """It came between the last save of the run and its deletions; a run that is complete saves nothing more."""
    output, kept = tmp_path / "run", tmp_path / "kept"
    options = [*OPTIONS, "--checkpoint-every", 1, "--max-steps", 5, "--output-dir", output]
    train(1, *options, "--keep-checkpoints", 9)
    shutil.copytree(output, kept)
    names = [f"step_{step:08d}.pt" for step in range(1, 6)]
    train(1, *options, "--keep-checkpoints", 9, "--lr", 9, code=4)
    train(1, *options, "--keep-checkpoints", 2, "--lr", 9, code=4)
    train(1, "--dataset", "synthetic", "--output-dir", output, "--keep-checkpoints", 2, "--evaluate")
    assert sorted(os.listdir(output / "checkpoints")) == names, "neither a refused run nor an evaluation deletes any"
    assert "already done" in train(2, *options, "--batch-size", 16, "--keep-checkpoints", 2)
    assert sorted(os.listdir(output / "checkpoints")) == names[3:]
    os.truncate(kept / "checkpoints" / names[4], 1000)
    train(1, *options[:-1], kept, "--keep-checkpoints", 2)
    assert sorted(os.listdir(kept / "checkpoints")) == names[3:], "step 5 was bad, and trained again"
