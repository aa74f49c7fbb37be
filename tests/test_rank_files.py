"""--shard: a file of each rank and one that lists them; damage, kills and errors between them; one file again."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from outputs import newest
from test_shard import Tied, options
from test_storage import flipped, flips, mount, mounted

import main
from ddp.checkpoint import compare, merge, storage
from ddp.checkpoint.manager import CheckpointManager
from ddp.checkpoint.mirror import Mirror
from ddp.checkpoint.rank_files import RankFiles
from ddp.checkpoint.state import snapshot
from ddp.checkpoint.storage import CheckpointDirectory, InvalidCheckpoint
from ddp.core.errors import CheckpointError, UsageError
from ddp.core.files import PROJECT_DIR, TMP_PATTERN
from ddp.distributed.process_group import DistContext
from ddp.distributed.shards import local
from ddp.training.wrapping import wrap_model
from faults import fault
from processes import on_ranks, start, train
from small_models import build_awkward

GIVEN = ("--dataset=synthetic", "--device=cpu", "--batch-size", 8, "--log-every", 1, "--shard", "--output-dir")


def listed(path: Path) -> list[Path]:
    """The files that a checkpoint lists, by rank."""
    names = torch.load(path, weights_only=True)["rows"]
    return [storage.rows_folder(path) / name for name in names]


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


def test_each_rank_writes_its_own_rows_and_one_file_can_be_made_of_them(trained: Path, tmp_path: Path) -> None:
    output = Path(shutil.copytree(trained, tmp_path / "run"))
    kept = [*output.rglob("step_*[0-9].pt"), output / "best.pt"]
    kept = [path for path in kept if path.parent.name != "rows"]
    assert len(kept) == 4 and {*(output / "rows").iterdir()} == {file for path in kept for file in listed(path)}
    path = newest(output)
    files = listed(path)
    assert files == listed(output / "best.pt") and [re.findall(r"rank_(\d)", file.name) for file in files] == [
        *(["0"], ["1"], ["2"])
    ]
    parts, whole = [torch.load(file, weights_only=True) for file in files], storage.read(path)
    first = ("model", next(iter(whole["model"])))
    assert parts[0].keys() == parts[2].keys() and {keys[0] for keys in parts[0]} == {"model", "optimizer"}
    assert torch.equal(torch.cat([part[first] for part in parts]), whole["model"][first[1]])
    assert torch.load(path, weights_only=True)["model"][first[1]].is_meta, "which cannot be taken for a weight"
    sizes = [file.stat().st_size for file in files]
    assert max(sizes) < 0.6 * sum(sizes) and path.stat().st_size < 40_000

    # One file, next to it and in its place; the run goes on from it, and deletes what nothing lists.
    (output / "rows" / "step_00000003-rank_0-0badcafe.pt").write_bytes(b"of a save that was interrupted")
    (output / "rows" / f"half{TMP_PATTERN[1:]}").write_bytes(b"")
    command = [sys.executable, "-m", "ddp.checkpoint.merge", path]
    done = subprocess.run([*command, tmp_path / "one.pt"], cwd=PROJECT_DIR, capture_output=True, text=True)
    assert done.returncode == 0 and re.fullmatch(rf"{tmp_path}/one.pt has everything: [\d.]+ MB\n", done.stdout), done
    merge.main([str(path)])
    one = torch.load(tmp_path / "one.pt", weights_only=True)
    assert path.read_bytes() == (tmp_path / "one.pt").read_bytes() and "rows" not in one
    assert all(torch.equal(one["model"][name], weight) for name, weight in whole["model"].items())
    other = Path(shutil.copytree(trained, tmp_path / "whole"))
    for each in (output, other):
        train(3, *GIVEN, each, "--max-steps", 8)
    assert not [*output.rglob(TMP_PATTERN)]
    left = [file for each in sorted(output.rglob("checkpoints/*.pt"))[::2] for file in listed(each)]
    assert {*(output / "rows").iterdir()} == {*left, *listed(output / "best.pt")}
    assert compare.differences(other, output) == []


def test_merge_refuses_in_one_line_what_it_cannot_read(trained: Path, tmp_path: Path) -> None:
    alone = Path(shutil.copy(newest(trained), tmp_path))
    with pytest.raises(
        CheckpointError, match=rf"{alone} cannot be used: of its files, {tmp_path}/rows/step_\S+ cannot"
    ):
        merge.main([str(alone)])
    done = subprocess.run(
        [sys.executable, "-m", "ddp.checkpoint.merge", tmp_path / "no.pt"],
        cwd=PROJECT_DIR,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 4 and done.stderr == f"error: {tmp_path}/no.pt cannot be used: it cannot be read: " + (
        "No such file or directory\n"
    )


@fault(4, 5)
def test_damage_to_a_file_of_a_rank_or_to_the_list_is_noticed(trained: Path, tmp_path: Path) -> None:
    output = Path(shutil.copytree(trained, tmp_path / "run"))
    directory = CheckpointDirectory(options("--output-dir", str(output)))
    last, before = directory.paths()[:2]
    files = [last, *listed(last)]
    for path in files:
        for place, value in flips(path.stat().st_size, 60):
            with flipped(path, place, value), pytest.raises(InvalidCheckpoint, match=re.escape(str(path))):
                storage.read(last, join=False)
    assert storage.read(last)["step"] == 6, "every byte was restored"
    # Good files, but not those that this checkpoint was written with; then one that is gone, or cut off.
    rank = files[2].read_bytes()
    for content in (files[1].read_bytes(), listed(before)[1].read_bytes(), rank[:-1], b"", None):
        files[2].unlink() if content is None else files[2].write_bytes(content)
        assert directory.find()["step"] == 4
    # A run says which file it was, and ends as if nothing had happened.
    printed = train(3, *GIVEN, output, "--max-steps", 8)
    assert f"warning: {last} cannot be used: of its files, {files[2]} cannot be used: it cannot be read" in printed
    train(3, *GIVEN, tmp_path / "whole", "--max-steps", 8)
    assert compare.differences(tmp_path / "whole", output) == []


@fault(2)
def test_a_kill_between_the_files_and_the_list_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = CheckpointDirectory.write

    def killed(self: CheckpointDirectory, content: dict[str, Any], *, best: bool) -> None:
        assert len([*self.rows.glob(f"step_{content['step']:08d}-*.pt")]) == 3
        if content["step"] == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, content, best=best)

    given = (*GIVEN, tmp_path / "run", "--checkpoint-every", 2, "--max-steps", 8)
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointDirectory, "write", killed)
        ranks = start(3, *given)
        assert ranks.wait()[0] == -signal.SIGKILL
    assert newest(tmp_path / "run").name == "step_00000002.pt"
    names = {path.name for path in (tmp_path / "run" / "rows").iterdir()}
    assert len(names) == 6
    assert "at step 2" in train(3, *given)
    old = {path for path in (tmp_path / "run" / "rows").glob("step_00000004-*") if path.name in names}
    assert not old, "those of the save that was interrupted are deleted"
    train(3, *GIVEN, tmp_path / "whole", "--checkpoint-every", 2, "--max-steps", 8)
    assert compare.differences(tmp_path / "whole", tmp_path / "run") == []


@fault(11)
def test_a_rank_that_is_lost_while_it_writes_does_not_keep_the_others_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows = CheckpointDirectory.write_rows

    def killed(self: CheckpointDirectory, step: int, rank: int, rows: Any) -> tuple[str, str]:
        if (step, rank) == (4, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        return write_rows(self, step, rank, rows)

    monkeypatch.setattr(CheckpointDirectory, "write_rows", killed)
    ranks = start(3, *GIVEN, tmp_path, "--checkpoint-every", 2, "--max-steps", 8)
    os.waitid(os.P_PID, ranks.pids[1], os.WEXITED | os.WNOWAIT)
    lost = time.monotonic()
    assert ranks.wait() == [8, -signal.SIGKILL, 8] and time.monotonic() - lost < 20  # of 25 s for a last save
    assert "rank 1 was lost" in ranks.output(0) and "resumable from step 2" in ranks.output(0)
    assert newest(tmp_path).name == "step_00000002.pt"


@fault(7)
def test_an_error_of_one_rank_ends_all_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its disk is full; or its rows alone are no longer finite."""
    write_rows, disk = CheckpointDirectory.write_rows, tmp_path / "disk"
    disk.mkdir()

    def write_there(self: CheckpointDirectory, step: int, rank: int, rows: Any) -> tuple[str, str]:
        if (step, rank) == (4, 2):
            self.rows = disk
        return write_rows(self, step, rank, rows)

    given = ("--checkpoint-every", 2, "--max-steps", 8)
    with mounted(disk), monkeypatch.context() as patch:
        mount("-t", "tmpfs", "-o", "size=8k", "tmpfs", disk)
        patch.setattr(CheckpointDirectory, "write_rows", write_there)
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
        states = self.state["optimizer"].state.values() if infinite else ()
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
    def used(ctx: DistContext, *more: str) -> bool:
        folder = tmp_path / "ours" if ctx.rank == 0 else tmp_path / "theirs"
        folder.mkdir(exist_ok=True)
        (folder / "rows").mkdir(exist_ok=True)  # as on two machines, each with a run of this name
        config = options("--shard", "--output-dir", str(folder), *more)
        files = RankFiles(config, ctx, CheckpointDirectory(config))
        files.open()
        ctx.gather(None)
        assert not [*(folder / "rows").iterdir()]
        return files.used

    assert on_ranks(3, used, "--device=cpu") == [False] * 3
    mirror = ("--mirror", f"file://{tmp_path / 'theirs'}")
    assert on_ranks(2, lambda ctx: used(ctx, *mirror), "--device=cpu") == [False] * 2
    # A run that has such files already is refused: the mirror would have checkpoints without their rows.
    config = options("--shard", "--output-dir", str(tmp_path / "ours"), *mirror)
    (tmp_path / "ours" / "rows" / "step_00000002-rank_0-0badcafe.pt").write_bytes(b"")
    with pytest.raises(
        UsageError, match=r"--mirror keeps no parts of files, such as \S+/ours/rows \(--shard\): choose"
    ):
        Mirror(config).open()


def test_tied_weights_and_tensors_that_are_not_split_are_copied_as_they_are() -> None:
    def copied(ctx: DistContext) -> Any:
        torch.manual_seed(0)
        model = Tied()
        whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        wrap_model(model, options("--device=cpu", "--shard"), ctx)
        state = {"model": model.state_dict(), "sum": model.layers[0].weight.detach().sum(), "steps": torch.ones(1)}
        rows: Any = {}
        copy, _ = snapshot(state, ctx.streams, keep=ctx.rank == 0, rows=rows)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(1)
        everyone = ctx.gather({keys: tensor.clone() for keys, tensor in rows.items()})
        assert rows["model", "head.weight"] is rows["model", "embedding.weight"]
        if ctx.rank:
            return copy["steps"].numel()
        assert copy["model"]["head.weight"].is_meta and copy["sum"] == whole["layers.0.weight"].sum()
        joined = storage.join_rows(copy, {keys: [each[keys] for each in everyone] for keys in rows})
        assert all(torch.equal(joined["model"][name], whole[name]) for name in whole)
        return copy["steps"].numel()

    assert on_ranks(3, copied, "--device=cpu") == [1, 0, 0]


def test_rows_are_kept_as_long_as_best_pt_or_a_checkpoint_lists_them(tmp_path: Path) -> None:
    directory = CheckpointDirectory(options("--output-dir", str(tmp_path), "--keep-checkpoints", "2"))
    directory.path.mkdir()
    directory.rows.mkdir()

    def save(*steps: int) -> list[str]:
        for step in steps:
            files = dict(directory.write_rows(step, rank, {("model", "w"): torch.ones(3)}) for rank in range(2))
            content = {"format": storage.FORMAT, "step": step, "model": {"w": torch.empty(6, device="meta")}}
            directory.write({**content, "rows": files}, best=step == 1)
        return sorted({path.name.partition("-")[0] for path in directory.rows.iterdir()})

    assert save(1, 2, 3, 4, 5) == ["step_00000001", "step_00000004", "step_00000005"]
    best = directory.best_path.read_bytes()
    directory.best_path.write_bytes(best[:100])  # perhaps it can be read again later
    assert save(6) == ["step_00000001", "step_00000004", "step_00000005", "step_00000006"]
    directory.best_path.write_bytes(best)
    assert save(7) == ["step_00000001", "step_00000006", "step_00000007"]
    assert storage.read(directory.best_path)["model"]["w"].tolist() == [1] * 6
