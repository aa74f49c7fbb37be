"""--shard: a file of each rank and one that lists them; damage, kills and errors between them; one file again."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from outputs import newest
from test_shard import Tied, options
from test_storage import flipped, flips, mount, mounted

import compare
import main
from config import Config
from ddp.checkpoint import storage
from ddp.checkpoint.manager import CheckpointManager
from ddp.checkpoint.reuse import init_weights, load_checkpoint
from ddp.checkpoint.storage import CheckpointDirectory, InvalidCheckpoint, write
from ddp.core.errors import CheckpointError, PeerLost, UsageError
from ddp.core.files import PROJECT_DIR, TMP_PATTERN
from ddp.distributed.process_group import DistContext
from ddp.distributed.tensors import local, snapshot, whole, whole_tree
from ddp.parts.fsdp import merge, rank_files
from ddp.parts.fsdp.rank_files import RankFiles
from ddp.parts.fsdp.rows_folder import RowsFolder, folder_of
from ddp.parts.mirror.callback import MirrorCallback
from ddp.parts.mirror.mirror import Mirror
from ddp.training import run as training_run
from ddp.training.output_dir import OutputDir
from ddp.training.run import Run
from ddp.training.wrapping import wrap_model
from faults import fault
from processes import on_ranks, start, train
from small_models import build_awkward

GIVEN = ("--dataset=synthetic", "--device=cpu", "--batch-size", 8, "--log-every", 1, "--shard", "--output-dir")


def listed(path: Path) -> list[Path]:
    """The files that a checkpoint lists, by rank."""
    names = torch.load(path, weights_only=True)["rows"]
    return [folder_of(path, names) / name for name in names]


@pytest.fixture(autouse=True)
def awkward(monkeypatch: pytest.MonkeyPatch, small: None) -> None:
    """A model whose rows do not divide by the number of ranks."""
    monkeypatch.setattr(main.task, "build_model", build_awkward)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of 3 processes with checkpoints of steps 2, 4 and 6."""
    import data

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main.task, "build_model", build_awkward)
        patch.setattr(data, "SYNTHETIC_SIZES", {"train": 640, "val": 101})
        output = tmp_path_factory.mktemp("trained")
        train(3, *GIVEN, output, "--checkpoint-every", 2, "--max-steps", 6)
    return output


@pytest.mark.sample(1, "files of ranks")
def test_each_rank_writes_its_own_rows_and_one_file_can_be_made_of_them(trained: Path, tmp_path: Path) -> None:
    output = Path(shutil.copytree(trained, tmp_path / "run"))
    kept = [*output.rglob("step_*[0-9].pt"), output / "best.pt"]
    kept = [path for path in kept if path.parent.name != "rows"]
    rows = output / "checkpoints" / "rows"
    assert len(kept) == 4 and {*rows.iterdir()} == {file for path in kept for file in listed(path)}
    path = newest(output)
    files = listed(path)
    assert files == listed(output / "best.pt") and [re.findall(r"rank_(\d)", file.name) for file in files] == [
        *(["0"], ["1"], ["2"])
    ]
    parts, whole = [torch.load(file, weights_only=True) for file in files], whole_tree(storage.read(path))
    first = ("model", next(iter(whole["model"])))
    assert parts[0].keys() == parts[2].keys() and {keys[0] for keys in parts[0]} == {"model", "optimizer"}
    assert torch.equal(torch.cat([part[first] for part in parts]), whole["model"][first[1]])
    assert torch.load(path, weights_only=True)["model"][first[1]].is_meta, "which cannot be taken for a weight"
    sizes = [file.stat().st_size for file in files]
    assert max(sizes) < 0.6 * sum(sizes) and path.stat().st_size < 40_000

    # predict.py needs the weights; --init-from any name of them.
    content, _ = load_checkpoint(path, Config)
    assert torch.equal(content["model"][first[1]], whole["model"][first[1]])
    assert all(state["momentum_buffer"].is_meta for state in content["optimizer"]["state"].values())

    # One file; the run goes on from it, and deletes what a save has left that was interrupted, and nothing else.
    (rows / "step_00000003-rank_0-0badcafe.pt").write_bytes(b"of a save that was interrupted")
    (rows / f"half{TMP_PATTERN[1:]}").write_bytes(b"")
    command = [sys.executable, "-m", "ddp.parts.fsdp.merge", path]
    done = subprocess.run([*command, tmp_path / "one.pt"], cwd=PROJECT_DIR, capture_output=True, text=True)
    assert done.returncode == 0 and re.fullmatch(rf"{tmp_path}/one.pt has everything: [\d.]+ MB\n", done.stdout), done
    one = torch.load(tmp_path / "one.pt", weights_only=True)
    assert "rows" not in one
    path.unlink()  # best.pt is a link to it
    shutil.copy(tmp_path / "one.pt", path)
    assert all(torch.equal(one["model"][name], weight) for name, weight in whole["model"].items())
    other = Path(shutil.copytree(trained, tmp_path / "whole"))
    for each in (output, other):
        train(3, *GIVEN, each, "--max-steps", 8)
    assert not [*output.rglob(TMP_PATTERN)]
    left = [file for each in sorted(output.rglob("checkpoints/*.pt"))[::2] for file in listed(each)]
    left += rows.glob("step_00000006-*")  # there is a checkpoint of that step: whether it lists them does not matter
    assert {*rows.iterdir()} == {*left, *listed(output / "best.pt")}
    assert compare.differences(other, output) == []


def test_merge_refuses_in_one_line_what_it_cannot_read(trained: Path, tmp_path: Path) -> None:
    alone = Path(shutil.copy(newest(trained), tmp_path))
    with pytest.raises(
        CheckpointError, match=rf"{alone} cannot be used: of its files, {tmp_path}/rows/step_\S+ cannot"
    ):
        merge.main([str(alone), str(tmp_path / "new.pt")])
    with pytest.raises(UsageError, match=rf"{alone} exists: choose another FILE"):
        merge.main([str(newest(trained)), str(alone)])
    assert [*tmp_path.iterdir()] == [alone]
    done = subprocess.run(
        [sys.executable, "-m", "ddp.parts.fsdp.merge", tmp_path / "no.pt", tmp_path / "new.pt"],
        cwd=PROJECT_DIR,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 4 and done.stderr == f"error: {tmp_path}/no.pt cannot be used: " + (
        "No such file or directory\n"
    )


@pytest.mark.sample(1, "files of ranks")
@fault(4, 5)
def test_damage_to_a_file_of_a_rank_or_to_the_list_is_noticed(trained: Path, tmp_path: Path) -> None:
    output = Path(shutil.copytree(trained, tmp_path / "run"))
    directory = CheckpointDirectory(options("--output-dir", str(output)))
    last, before = directory.paths()[:2]
    files = [last, *listed(last)]
    for path in files:
        for place, value in flips(path.stat().st_size, 60):
            with flipped(path, place, value), pytest.raises(InvalidCheckpoint, match=re.escape(str(path))):
                storage.read(last)
    assert storage.read(last)["step"] == 6, "every byte was restored"
    # Good files, but not those that this checkpoint was written with; then one that is gone, or cut off.
    rank = files[2].read_bytes()
    for content in (files[1].read_bytes(), listed(before)[1].read_bytes(), rank[:-1], b"", None):
        files[2].unlink() if content is None else files[2].write_bytes(content)
        assert directory.find()["step"] == 4
    # A run says which file it was, and ends as if nothing had happened.
    printed = train(3, *GIVEN, output, "--max-steps", 8)
    assert f"warning: {last} cannot be used: of its files, {files[2]} cannot be used: " in printed
    train(3, *GIVEN, tmp_path / "whole", "--max-steps", 8)
    assert compare.differences(tmp_path / "whole", output) == []


@pytest.mark.sample(1, "files of ranks")
@fault(2)
def test_a_kill_between_the_files_and_the_list_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = CheckpointDirectory.write

    def killed(self: CheckpointDirectory, content: dict[str, Any], *, best: bool) -> None:
        assert len([*(self.path / "rows").glob(f"step_{content['step']:08d}-*.pt")]) == 3
        if content["step"] == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, content, best=best)

    given = (*GIVEN, tmp_path / "run", "--checkpoint-every", 2, "--max-steps", 8)
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointDirectory, "write", killed)
        ranks = start(3, *given)
        assert ranks.wait()[0] == -signal.SIGKILL
    assert newest(tmp_path / "run").name == "step_00000002.pt"
    rows = tmp_path / "run" / "checkpoints" / "rows"
    names = {path.name for path in rows.iterdir()}
    assert len(names) == 6
    assert "at step 2" in train(3, *given)
    old = {path for path in rows.glob("step_00000004-*") if path.name in names}
    assert not old, "those of the save that was interrupted are deleted"
    train(3, *GIVEN, tmp_path / "whole", "--checkpoint-every", 2, "--max-steps", 8)
    assert compare.differences(tmp_path / "whole", tmp_path / "run") == []


@fault(11)
def test_a_rank_that_is_lost_while_it_writes_does_not_keep_the_others_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows = RowsFolder.write

    def killed(self: RowsFolder, step: int, rank: int, rows: Any) -> tuple[str, str]:
        if (step, rank) == (4, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        return write_rows(self, step, rank, rows)

    monkeypatch.setattr(RowsFolder, "write", killed)
    monkeypatch.setattr(training_run, "LAST_SAVE_TIMEOUT_S", 600.0)
    ranks = start(3, *GIVEN, tmp_path, "--checkpoint-every", 2, "--max-steps", 8)
    os.waitid(os.P_PID, ranks.pids[1], os.WEXITED | os.WNOWAIT)
    assert ranks.wait() == [8, -signal.SIGKILL, 8], ranks.output()
    # Of a busy machine, a rank that does not answer in time may be named as well.
    assert re.search(r"rank 1 was lost|ranks 0 and 1 were lost|ranks 1 and 2 were lost", ranks.output(0))
    assert "resumable from step 2" in ranks.output(0)
    assert newest(tmp_path).name == "step_00000002.pt"


def test_a_save_in_flight_is_completed_if_a_rank_fails_that_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lost a DataLoader worker, for example, which has the same exit code as a lost rank."""
    write_rows = RowsFolder.write

    def write_slowly(self: RowsFolder, step: int, rank: int, rows: Any) -> tuple[str, str]:
        time.sleep(6 * (rank == 2))  # longer than lost ranks have to respond
        return write_rows(self, step, rank, rows)

    def fail(run: Run) -> None:
        if run.ctx.rank == 1 and run.state.step == 3:
            raise PeerLost("a DataLoader worker was killed")

    monkeypatch.setattr(RowsFolder, "write", write_slowly)
    ranks = start(3, *GIVEN, tmp_path, "--checkpoint-every", 2, "--max-steps", 8, after_step=fail)
    assert ranks.wait() == [8, 8, 8], ranks.output()
    assert storage.read(newest(tmp_path))["step"] == 2


def test_a_rank_that_cannot_tell_rank_0_about_its_file_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(found: Any) -> bytes:
        raise RuntimeError("the connection broke")

    monkeypatch.setattr(rank_files, "pickle", SimpleNamespace(dumps=fail, loads=pickle.loads))
    ranks = start(2, *GIVEN, tmp_path, "--checkpoint-every", 2, "--max-steps", 8, "--timeout", 8)
    assert ranks.wait() == [1, 1], ranks.output()
    assert "rank 1 failed: RuntimeError: the connection broke" in ranks.output(0)
    assert not [*(tmp_path / "checkpoints").glob("*.pt")]


def test_a_weight_may_be_called_rows(tmp_path: Path) -> None:
    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = torch.nn.Parameter(torch.zeros(3, 2))

    torch.save({"rows": torch.ones(3, 2)}, tmp_path / "weights.pt")

    def loaded(ctx: DistContext) -> bool:
        model = Table()
        given = ("--init-from", str(tmp_path / "weights.pt"), "--output-dir", str(tmp_path))
        init_weights(model, options(*given), ctx)
        return bool((model.rows == 1).all())

    assert on_ranks(2, loaded, "--device=cpu") == [True, True]


@pytest.mark.sample(1, "files of ranks")
@fault(7)
def test_an_error_of_one_rank_ends_all_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its disk is full; or its rows alone are no longer finite."""
    write_rows, disk = RowsFolder.write, tmp_path / "disk"
    disk.mkdir()

    def write_there(self: RowsFolder, step: int, rank: int, rows: Any) -> tuple[str, str]:
        if (step, rank) == (4, 2):
            self.path = disk
        return write_rows(self, step, rank, rows)

    given = ("--checkpoint-every", 2, "--max-steps", 8)
    with mounted(disk), monkeypatch.context() as patch:
        mount("-t", "tmpfs", "-o", "size=8k", "tmpfs", disk)
        patch.setattr(RowsFolder, "write", write_there)
        ranks = start(3, *GIVEN, tmp_path / "full", *given)
        assert ranks.wait() == [7, 7, 7], ranks.output()
        assert not [*disk.iterdir()]
    (line,) = {line for line in ranks.output().splitlines() if "error: " in line}
    name = rf"{disk}/step_00000004-rank_2-\w{{8}}.pt"
    assert re.search(rf"error: cannot write {name}: No space left on device \(0.0 MB needed, 0.0 MB free\)", line), line
    assert newest(tmp_path / "full").name == "step_00000002.pt"

    save = CheckpointManager.save

    def save_infinite(self: CheckpointManager, sync_logs: Any) -> None:
        infinite = self.ctx.rank == 2 and self.train_state.step == 4
        states = self.fields["optimizer"].state.values() if infinite else ()
        first = next((rows for state in states if len(rows := local(state["momentum_buffer"]))), torch.zeros(1))
        before = first.clone()
        first.fill_(float("inf") if infinite else 0)
        save(self, sync_logs)
        first.copy_(before)  # so that the training itself notices nothing

    monkeypatch.setattr(CheckpointManager, "save", save_infinite)
    ranks = start(3, *GIVEN, tmp_path / "infinite", *given)
    assert ranks.wait() == [6, 6, 6], ranks.output()
    assert re.search(r"error: optimizer\.state\.\d+\.momentum_buffer is no longer finite", ranks.output(0)), (
        ranks.output()
    )
    assert newest(tmp_path / "infinite").name == "step_00000002.pt"


def test_rank_0_collects_the_rows_where_not_all_ranks_see_its_folder_and_for_a_mirror(tmp_path: Path) -> None:
    def used(ctx: DistContext, theirs: str, *more: str) -> bool:
        folder = tmp_path / ("ours" if ctx.rank == 0 else theirs)
        folder.mkdir(exist_ok=True)
        (folder / "checkpoints" / "rows").mkdir(parents=True, exist_ok=True)  # as on two machines, each with such a run
        config = options("--shard", "--output-dir", str(folder), *more)
        run = SimpleNamespace(config=config, ctx=ctx, checkpoints=CheckpointManager(config, ctx))
        if config.mirror:
            ctx.callbacks.append(MirrorCallback(run))
        ctx.work.sharded = True
        files = RankFiles(run)
        files.started()
        ctx.gather(None)
        assert not [*(folder / "checkpoints" / "rows").iterdir()]
        return files.used

    assert on_ranks(3, lambda ctx: used(ctx, "theirs"), "--device=cpu") == [False] * 3
    assert on_ranks(3, lambda ctx: used(ctx, "ours"), "--device=cpu") == [True] * 3
    mirror = ("--mirror", f"file://{tmp_path / 'theirs'}")
    assert on_ranks(2, lambda ctx: used(ctx, "ours", *mirror), "--device=cpu") == [False] * 2
    # A run that has such files already is refused: the mirror would have checkpoints without their rows.
    config = options("--shard", "--output-dir", str(tmp_path / "ours"), *mirror)
    (tmp_path / "ours" / "checkpoints" / "rows" / "step_00000002-rank_0-0badcafe.pt").write_bytes(b"")
    with pytest.raises(
        UsageError, match=r"--mirror keeps no parts of files, such as \S+/ours/checkpoints/rows: choose"
    ):
        Mirror(config).open()


def test_tied_weights_and_tensors_that_are_not_split_are_copied_as_they_are(tmp_path: Path) -> None:
    config = options("--device=cpu", "--shard", "--output-dir", str(tmp_path))
    path = tmp_path / "checkpoints" / "step_00000001.pt"
    (path.parent / "rows").mkdir(parents=True)

    def copied(ctx: DistContext) -> Any:
        torch.manual_seed(0)
        model = Tied()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        wrap_model(model, config, ctx)
        state = {"model": model.state_dict(), "sum": model.layers[0].weight.detach().sum(), "steps": torch.ones(1)}
        files = RankFiles(SimpleNamespace(config=config, ctx=ctx, checkpoints=CheckpointManager(config, ctx)))
        files.used = True
        rest, write_rows = files.split({**state, "format": storage.FORMAT, "step": 1})
        copy, _ = snapshot(rest, ctx.streams, keep=ctx.rank == 0)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(1)
        written = write_rows() if write_rows is not None else {}
        if ctx.rank == 0:
            assert copy["model"]["head.weight"].is_meta and copy["sum"] == before["layers.0.weight"].sum()
            write(path, {**copy, **written})
            rows = torch.load(listed(path)[0], weights_only=True)
            assert rows["model", "head.weight"].data_ptr() == rows["model", "embedding.weight"].data_ptr()
            saved = whole_tree(storage.read(path))["model"]
            assert all(torch.equal(saved[name], before[name]) for name in before)
            assert saved["head.weight"] is saved["embedding.weight"]
        return copy["steps"].numel()

    assert on_ranks(3, copied, "--device=cpu") == [1, 0, 0]


rows_of = cache(RowsFolder)


@pytest.fixture
def directory(tmp_path: Path, request: pytest.FixtureRequest) -> CheckpointDirectory:
    """An output directory of this name, whose folder of checkpoints may be on another disk."""
    output = tmp_path / request.param
    (tmp_path / "scratch").mkdir()
    output.mkdir()
    (output / "checkpoints").symlink_to(tmp_path / "scratch")
    (output / "checkpoints" / "rows").mkdir()
    return CheckpointDirectory(options("--output-dir", str(output), "--keep-checkpoints", "2"))


def save(directory: CheckpointDirectory, *steps: int, best: int = 0) -> list[int]:
    """Save `steps`, and return those of which there are rows."""
    folder = rows_of(directory)
    for step in steps:
        files = dict(folder.write(step, rank, {("model", "w"): torch.full([3], step)}) for rank in range(2))
        content = {"format": storage.FORMAT, "step": step, "model": {"w": torch.empty(6, device="meta")}}
        directory.write({**content, "rows": files}, best=step == best)
        folder.delete_unlisted()
    return sorted({int(path.name[5:13]) for path in folder.path.iterdir()})


def weights_in(path: Path) -> list[int]:
    return whole(storage.read(path)["model"]["w"]).tolist()


@pytest.mark.parametrize("directory", ["run", "checkpoints"], indirect=True)
def test_rows_are_kept_as_long_as_any_file_of_the_run_lists_them(
    directory: CheckpointDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    assert save(directory, 1, 2, 3, best=1) == [1, 2, 3]
    copied = Path(shutil.copy(directory.path_of(2), directory.path.parent / "keep.pt"))
    assert save(directory, 4, 5) == [1, 2, 4, 5]
    best = directory.best_path.read_bytes()
    directory.best_path.write_bytes(best[:100])  # perhaps it can be read again later
    assert save(directory, 6, 7) == [1, 2, 4, 5, 6, 7]
    (line,) = [line for line in caplog.messages if "keeps old files meanwhile" in line]
    assert line.startswith(f"warning: {directory.best_path} cannot be used: ")
    directory.best_path.write_bytes(best)
    assert save(directory, 8) == [1, 2, 7, 8]
    found = [weights_in(path) for path in (directory.best_path, copied, *directory.paths())]
    assert found == [[step] * 6 for step in (1, 2, 8, 7)] and directory.find()["step"] == 8
    assert save(directory, 9, best=9) == [2, 8, 9], "the best one before is replaced"


@pytest.mark.parametrize("directory", ["run"], indirect=True)
def test_rows_that_no_file_lists_are_deleted_whatever_else_is_in_the_folders(
    directory: CheckpointDirectory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    output = directory.path.parent
    torch.save({"rows": 1000}, output / "table.pt")
    (output / "notes.pt").mkdir()
    os.mkfifo(output / "pipe.pt")
    (output / "model.pt").write_bytes(pickle.dumps([1, 2]) * 100)
    (output / ".#main.py").symlink_to("someone@here.1234")
    (output / "latest.pt").symlink_to("checkpoints/step_00000002.pt")
    assert save(directory, 1, 2, 3, best=1) == [1, 2, 3] and weights_in(output / "latest.pt") == [2] * 6
    rows_of(directory).write(7, 0, {("model", "w"): torch.ones(3)})  # and the process was killed
    damaged = directory.path_of(3).read_bytes()
    directory.path_of(3).write_bytes(damaged[:100])
    assert save(CheckpointDirectory(directory.config), 4) == [1, 2, 3, 4], "a list may be readable again later"
    directory.path_of(3).write_bytes(damaged)
    assert save(CheckpointDirectory(directory.config), 5) == [1, 4, 5], "of an earlier process"
    assert (output / "latest.pt").is_symlink() and not caplog.messages


@pytest.mark.parametrize("directory", ["run"], indirect=True)
@pytest.mark.parametrize("name", ["images", "copy.pt", "best.pt", "one.pt", "keep"])
def test_no_rows_are_deleted_as_long_as_something_that_may_list_them_cannot_be_read(
    name: str, directory: CheckpointDirectory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder; a damaged copy or best.pt; a link to a copy, or to a folder of copies, on a disk that is away."""
    path, disk = directory.path.parent / name, tmp_path / "disk"
    save(directory, 1)
    disk.mkdir()
    copy = Path(shutil.copy(directory.path_of(1), disk / "one.pt"))
    content = bytearray(copy.read_bytes())
    content[content.index(b"rank_0")] ^= 1  # in the name of a file
    if name == "images":
        path.symlink_to(path)  # not even root can look into it
    elif name in ("copy.pt", "best.pt"):
        path.write_bytes(content if name == "copy.pt" else content[:500])
    else:
        path.symlink_to(disk if name == "keep" else copy)
        disk.rename(tmp_path / "away")
    rows_of(directory).write(9, 0, {("model", "w"): torch.ones(3)})
    assert save(directory, 2, 3, 4) == [1, 2, 3, 4, 9]
    (line,) = caplog.messages
    assert re.match(rf"warning: {path} .*; \S+ keeps old files meanwhile, because it may list them", line), line
    assert directory.find()["step"] == 4
    if disk.exists():
        path.unlink()
        assert save(directory, 5) == [4, 5]
    else:
        (tmp_path / "away").rename(disk)
        assert save(directory, 5) == [1, 4, 5] and weights_in(path / "one.pt" if name == "keep" else path) == [1] * 6


@pytest.mark.parametrize("directory", ["run"], indirect=True)
def test_checkpoints_that_are_moved_copied_or_linked_keep_their_rows(
    directory: CheckpointDirectory, tmp_path: Path
) -> None:
    output = directory.path.parent
    save(directory, 1, best=1)
    (output / "keep").mkdir()
    kept = Path(shutil.copy(directory.path_of(1), output / "keep"))
    save(directory, 2, 3, best=3)
    renamed = Path(shutil.copy(directory.path_of(2), directory.path / "step_00000002_keep.pt"))
    assert save(directory, 4, 5, 6) == [1, 2, 3, 5, 6]
    assert [weights_in(path)[0] for path in (kept, renamed, output / "best.pt")] == [1, 2, 3]
    elsewhere = tmp_path / "latest.pt"
    elsewhere.symlink_to(directory.path_of(6))
    assert weights_in(elsewhere) == [6] * 6
    directory.best_path.symlink_to(directory.best_path.rename(tmp_path / "on_another_disk.pt"))
    assert weights_in(directory.best_path) == [3] * 6
    # The folder is moved away, with its rows, and a new run begins in this directory; best.pt is the old one.
    moved = Path(shutil.copytree(directory.path, tmp_path / "old"))
    directory.path.unlink()
    directory.path.mkdir()
    rows_of(directory).path.mkdir()
    new = CheckpointDirectory(directory.config)
    assert save(new, 1, 2, 3, 4, 5, best=1) == [1, 4, 5]
    assert weights_in(moved / "step_00000006.pt") == [6] * 6


@pytest.mark.parametrize("directory", ["run"], indirect=True)
def test_rows_that_may_belong_to_another_run_are_not_deleted(directory: CheckpointDirectory, tmp_path: Path) -> None:
    """Somebody has copied the files that list them, and linked the folder."""
    save(directory, 1, 2)
    shutil.copytree(directory.path, tmp_path / "copy" / "checkpoints", ignore=shutil.ignore_patterns("rows"))
    (tmp_path / "copy" / "checkpoints" / "rows").symlink_to(rows_of(directory).path.resolve())
    config = options("--output-dir", str(tmp_path / "copy"))
    with pytest.raises(UsageError, match=r"copy/checkpoints/rows is a link, and this run would delete"):
        OutputDir(config).open()
    assert weights_in(CheckpointDirectory(config).path_of(2)) == [2] * 6


@fault(7)
def test_rows_of_an_interrupted_save_do_not_keep_a_full_disk_full(tmp_path: Path) -> None:
    config = options("--output-dir", str(tmp_path / "disk" / "run"))
    (tmp_path / "disk").mkdir()
    with mounted(tmp_path / "disk"):
        mount("-t", "tmpfs", "-o", "size=256k", "tmpfs", tmp_path / "disk")
        rows = RowsFolder(CheckpointDirectory(config)).path
        rows.mkdir(parents=True)
        with suppress(OSError), (rows / "step_00000002-rank_0-0badcafe.pt").open("wb") as file:
            file.write(bytes(1 << 20))
        assert shutil.disk_usage(tmp_path / "disk").free == 0
        output_dir = OutputDir(config)
        output_dir.open()
        output_dir.lock.close()
        assert not [*rows.iterdir()]
