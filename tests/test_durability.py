"""What survives when power fails: the order in which a run syncs, renames and links its files.

POSIX promises that a file or a new name is on disk only after fsync of the file, or of the directory with the name.
"""

from __future__ import annotations

import itertools
import os
import pickle
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from outputs import lines

from config import Config
from ddp.checkpoint import storage as checkpoint
from ddp.checkpoint.storage import CheckpointDirectory
from ddp.core.process_exit import process_exit
from ddp.training.output_dir import OutputDir
from faults import fault
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


def refuse(*_: Any) -> None:
    """In the place of os.link."""
    raise PermissionError(1, "Operation not permitted")  # as exFAT does


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

    monkeypatch.setattr(os, "link", refuse)
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
    os.link(tmp_path / "best.pt", tmp_path / "step_00000001.pt.link.tmp")
    before = (tmp_path / "best.pt").read_bytes()
    checkpoint.link(tmp_path / "best.pt", tmp_path / "step_00000001.pt")
    checkpoint.write(tmp_path / "step_00000001.pt", content(2))
    assert (tmp_path / "best.pt").read_bytes() == before


# ---- power fails ----------------------------------------------------------------------------------------------------


class Recorder:
    """Writes down, in this and in forked processes, all that POSIX needs to tell what is on disk after a crash."""

    def __init__(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = file
        file.touch()
        sync, rename, link, unlink, saved = os.fsync, Path.replace, os.link, Path.unlink, process_exit.record_saved

        def recorded_sync(descriptor: int) -> None:
            sync(descriptor)
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            self.add("sync", path, os.fstat(descriptor).st_ino, None if path.is_dir() else path.read_bytes())

        def recorded_rename(source: Path, target: Any) -> Path:
            self.add("name", Path(target).absolute(), source.stat().st_ino, None)
            return rename(source, target)

        def recorded_link(source: Any, target: Any) -> None:
            link(source, target)
            self.add("name", Path(target).absolute(), os.stat(source).st_ino, None)

        def recorded_unlink(path: Path, missing_ok: bool = False) -> None:
            unlink(path, missing_ok)
            self.add("name", path.absolute(), None, None)

        def recorded_saved(step: int) -> None:
            self.add("saved", Path(), step, None)
            saved(step)

        monkeypatch.setattr(os, "fsync", recorded_sync)
        monkeypatch.setattr(Path, "replace", recorded_rename)
        monkeypatch.setattr(os, "link", recorded_link)
        monkeypatch.setattr(Path, "unlink", recorded_unlink)
        monkeypatch.setattr(process_exit, "record_saved", recorded_saved)

    def add(self, *event: Any) -> None:
        with self.file.open("ab") as file:
            file.write(pickle.dumps(event))

    def events(self) -> Iterator[Any]:
        with self.file.open("rb") as file, suppress(EOFError):
            while True:
                yield pickle.load(file)


Files = dict[Path, bytes]
NEEDED = (".pt", ".jsonl")  # the files without which a run does not resume exactly


def crashes(before: Files, events: Iterable[Any]) -> Iterator[tuple[Files, int]]:
    """All files that may be on disk if power fails after any event, and the step that was reported as saved by then.

    before: files that were synced. A file has the content of its last sync, and is empty without one. Any set of the
    names that were changed since the last sync of their directory may be on disk.
    """
    contents: dict[Any, bytes] = dict(before)  # of an inode; of a path, for those from before
    names: dict[Path, Any] = {path: path for path in before}
    changed: list[tuple[Path, Any]] = []
    saved = 0
    for event, path, number, content in events:
        if event == "saved":
            saved = max(saved, number)
        elif event == "name" and path.suffix not in NEEDED:
            continue
        elif event == "name":
            changed.append((path, number))
        elif content is not None:
            contents[number] = content
        else:
            names.update(change for change in changed if change[0].parent == path)
            changed = [change for change in changed if change[0].parent != path]
        changed = [change for change in changed if names.get(change[0]) != change[1]]
        for size in range(len(changed) + 1):
            for some in itertools.combinations(changed, size):
                found = {**names, **dict(some)}
                yield {path: contents.get(inode, b"") for path, inode in found.items() if inode is not None}, saved


def check(files: Files, saved: int, output: Path, folder: Path) -> None:
    """That a run resumes from the newest checkpoint, which is complete, with the metrics that led to it."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "checkpoints").mkdir(parents=True)
    for path, content in files.items():
        if path.is_relative_to(output) and path.suffix in NEEDED:
            (folder / path.relative_to(output)).write_bytes(content)
    for path in folder.rglob("*.pt"):
        checkpoint.verify(path)
    content = CheckpointDirectory(Config.parse(["--output-dir", str(folder)])).find()
    step = content["step"] if content else 0
    assert step >= saved, f"step {saved} was saved, the newest checkpoint is {content.get('path')}"
    if step:
        best = checkpoint.read(folder / "best.pt")["step"] if content["best_step"] else 0
        assert best >= content["best_step"], "a checkpoint names a better best.pt than there is"
        logged = [line["step"] for line in lines(folder, "train")]
        assert logged[: step // 2] == list(range(2, step + 1, 2)), f"the metrics that led to step {step} are lost"


@fault(43)
@pytest.mark.slow
@pytest.mark.parametrize("links", [True, False])
def test_power_may_fail_at_any_moment_of_a_save_or_a_resume(
    links: bool, small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", refuse)
    recorder, output, tried = Recorder(tmp_path / "events", monkeypatch), tmp_path / "run", 0
    options = [*OPTIONS, "--checkpoint-every", 2, "--keep-checkpoints", 2, "--output-dir", output]
    for end in (6, 10, 20):  # 20: the end of the epoch
        before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
        recorder.file.write_bytes(b"")
        train(1, *options, "--max-steps", end)
        seen = set()
        for files, saved in crashes(before, recorder.events()):
            key = (saved, *((path, hash(content)) for path, content in sorted(files.items())))
            if key not in seen:
                check(files, saved, output, tmp_path / "after")
                seen.add(key)
        tried += len(seen)
        assert saved == end
    print(f"{tried} states after a power failure")
    assert tried > 50


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
