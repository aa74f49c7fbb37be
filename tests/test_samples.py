"""An index is the same sample on all ranks and after a resume; a file that validates never moves to the other part."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from outputs import lines, newest
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, default_collate

import data
import images
import main
import model
from config import Config
from ddp.checkpoint import storage
from ddp.core.errors import UsageError
from ddp.data.dataset import BatchDataset, Datasets
from ddp.data.reader import same
from ddp.data.samples import _is_same, _parts, _Recorder, _summary, changes, check_datasets
from ddp.distributed.rank_env import RankEnv
from ddp.entrypoint.run_main import run_as_rank
from faults import fault
from image_files import ImageFiles
from processes import Ranks, train

RUN = ("--device=cpu", "--batch-size=8", "--log-every=1", "--workers=1", "--timeout=60")


@pytest.fixture(autouse=True)
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def build(config: Config, train_set: Any) -> nn.Module:
        classes = len(getattr(train_set, "classes", range(10)))
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, classes))

    monkeypatch.setattr(model, "build_model", build)


class Pictures(Dataset):
    """Samples that depend on their number alone."""

    classes = tuple(map(str, range(10)))

    def __init__(self, numbers: Any) -> None:
        self.numbers = list(numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        number = self.numbers[index]
        return torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(number)), number % 10


def load(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Datasets]) -> None:
    monkeypatch.setattr(main, "load_datasets", lambda config: make())


def the_error(output: str) -> str:
    (error,) = [line for line in output.splitlines() if "error:" in line.lower()]
    assert error.startswith("error: ") and "Traceback" not in output, output
    return error


# ---- in each set ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [("0", "2"), ("1", "0")])
def test_sets_with_other_classes_are_refused(classes: tuple[str, ...]) -> None:
    """The same label would be another class."""
    train_set, val_set = Pictures(range(10)), Pictures(range(10))
    train_set.classes, val_set.classes = ("0", "1"), classes
    what = "their order" if classes[0] == "1" else "1; 2"
    with pytest.raises(UsageError, match=f"training and the validation data differ in their `classes`: {what}: give"):
        check_datasets(Datasets(train_set, val_set), Config.parse(["--workers=0"]))


def test_sets_that_share_what_changes_with_the_epoch_are_refused() -> None:
    class Growing(Pictures):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    base = Growing(range(20))
    sets = Datasets(Subset(base, range(10)), None, Subset(base, range(10, 20)))
    with pytest.raises(UsageError, match=r"the training and the test data share a Growing, which has set_epoch\(\)"):
        check_datasets(sets, Config.parse(["--workers=0"]))


InSlots = dataclass(slots=True)(type("InSlots", (), {"__annotations__": {"numbers": Tensor, "label": int}}))


@pytest.mark.parametrize(
    "make",
    [
        lambda number: InSlots(torch.full((8,), number), 0),
        lambda number: torch.full((8,), number).to_sparse(),
        lambda number: torch.full((8, 2), number).to_sparse_csr(),
        lambda number: torch.nested.nested_tensor([torch.full((3,), number), torch.full((5,), number)]),
    ],
)
def test_samples_of_other_kinds_are_compared_by_their_numbers(make: Callable[[float], Any]) -> None:
    methods = (
        {"__getitem__": lambda self, i, n=n: make(n), "collate": lambda self, samples: samples} for n in (1.0, 5.0)
    )
    one, two = (type("Made", (Pictures, BatchDataset), each)([1]) for each in methods)
    records = [json.loads(_Recorder({"training": each}, 0)[0]) for each in (one, two)]
    assert changes({"training": records[0]}, {"training": records[1]}) == (["training sample 0 is another one"], [])
    assert changes({"training": records[0]}, {"training": records[0]}) == ([], [])
    assert same(make(1.0), make(1.0)) and not same(make(1.0), make(5.0))


class Node:
    """Each leads to all others."""

    __slots__ = ("nodes", "number")

    def __init__(self, numbers: list[int], nodes: list[Node]) -> None:
        self.number, self.nodes = numbers[0], nodes
        nodes.append(self)
        if numbers[1:]:
            Node(numbers[1:], nodes)


def test_objects_that_lead_to_each_other_are_compared() -> None:
    assert same(Node([*range(30)], []), Node([*range(30)], []))
    assert not same(Node([*range(30)], []), Node([*range(29), 5], []))


# ---- on all ranks ---------------------------------------------------------------------------------------------------


def sharded(rank: int) -> Datasets:
    return Datasets(Pictures(range(rank, 256, 2)), Pictures(range(40)))


def split_at_random(rank: int) -> Datasets:
    order = random.Random(rank).sample(range(256), 256)
    return Datasets(Subset(Pictures(range(256)), order[:200]), Subset(Pictures(range(256)), order[200:]))


def other_labels(rank: int) -> Datasets:
    class Labelled(Pictures):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            inputs, target = super().__getitem__(index)
            return inputs, (target + rank) % 10

    return Datasets(Pictures(range(128)), None, Labelled(range(50)))


@fault(49)
@pytest.mark.parametrize(
    ("make", "where"),
    [
        (sharded, "training sample 0 on rank 1 is another one than on rank 0"),
        (split_at_random, "training sample 0 on rank 1 is another one than on rank 0"),
        (other_labels, "test sample 0 on rank 1 is another one than on rank 0"),
    ],
)
def test_ranks_with_other_samples_are_refused_before_the_first_step(
    make: Any, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(rank_env: RankEnv) -> int:
        load(monkeypatch, lambda: make(rank_env.rank))
        words = [*RUN, "--output-dir", str(tmp_path)]
        return run_as_rank(main.main, Config.parse(words), rank_env)

    ranks = Ranks(2, start)
    assert ranks.wait() == [2, 2], ranks.output()
    error = the_error(ranks.output())
    assert error.startswith(f"error: {where}: load the same data in the same order on all ranks: do not choose samples")
    assert not lines(tmp_path) if (tmp_path / "metrics.jsonl").exists() else True


def jpeg(picture: numpy.ndarray, quality: int) -> Tensor:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=quality)
    return torch.from_numpy(numpy.array(Image.open(file))).permute(2, 0, 1)


def test_what_decoders_and_processors_change_is_not_another_sample() -> None:
    generator = numpy.random.default_rng(0)
    for size in (32, 224):
        coarse = generator.integers(0, 255, (8, 8, 3), dtype=numpy.uint8)
        picture = numpy.array(Image.fromarray(coarse).resize((size, size), Image.Resampling.BILINEAR))
        other = numpy.array(Image.fromarray(coarse[::-1]).resize((size, size), Image.Resampling.BILINEAR))
        first, again, another = (
            [3, [_summary(part) for part in (each.float() / 255, 7)]]
            for each in (jpeg(picture, 95), jpeg(picture, 80), jpeg(other, 95))
        )
        assert _is_same(first, again) and not _is_same(first, another)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (torch.tensor([3]), torch.tensor([4]), False),
        (torch.tensor(3, dtype=torch.uint8), torch.tensor(4, dtype=torch.uint8), False),
        (torch.arange(1000), torch.arange(1000).flip(0), False),
        (0.5, 0.5000001, True),
        (0.5, 0.51, False),
        (torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0]), True),
        (torch.zeros(0), torch.zeros(0), True),
        (torch.zeros(2, 3), torch.zeros(3, 2), False),
        (numpy.float32(2.0), numpy.float32(2.0), True),
        (numpy.arange(4) % 2 == 0, numpy.arange(4) % 2 == 1, False),
        (torch.randn(50, dtype=torch.complex64) * 0 + 1j, torch.ones(50, dtype=torch.complex64), False),
        ("a text", "another text", False),
        ("/here/images/cat/1.png", "/there/images/cat/1.png", True),
        ("a long text " * 50, "a long text " * 49 + "a wrong text", False),
        (numpy.arange(40.0)[::-1], numpy.arange(40.0)[::-1], True),
        (numpy.arange(40, dtype=">i4")[::-1], numpy.arange(40, dtype=">i4"), False),
        (numpy.ones(3, numpy.longdouble), numpy.ones(3, numpy.longdouble) * 2, False),
        (None, None, True),
        (object(), object(), True),
    ],
)
def test_the_parts_of_samples_are_compared_by_their_kind(one: Any, other: Any, same: bool) -> None:
    assert _is_same([0, [_summary(one)]], [0, [_summary(other)]]) == same


@dataclass
class Graph:
    """As of a library for graphs: one object, which moves to a device as a whole."""

    nodes: Tensor
    label: int


def test_sound_and_objects_are_compared_by_what_they_hold() -> None:
    """The means of sound are all about 0."""
    sounds = [torch.randn(16000, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    one, other = ([0, [_summary(sound)]] for sound in sounds)
    assert _is_same(one, [0, [_summary(sounds[0] + 0.001)]]) and not _is_same(one, other)
    first, again, another = ([0, [*map(_summary, _parts([Graph(sounds[n], 3)]))]] for n in (0, 0, 1))
    assert _is_same(first, again) and not _is_same(first, another)


def test_a_part_that_is_the_index_may_change_with_it() -> None:
    one, moved, label = ([5, [("5", [])]], [4, [("4", [])]], [4, [("5", [])]])
    assert _is_same(one, moved) and _is_same(one, label)
    assert not _is_same(one, [4, [("3", [])]])


class Opens(Pictures):
    """Opens its file at the first read, as torch advises."""

    path = Path(__file__)
    file: Any = None

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.file = self.file or self.path.open("rb")
        return super().__getitem__(index)


def test_no_file_of_a_dataset_is_open_after_its_samples_were_recorded() -> None:
    found = check_datasets(Datasets(Opens(range(30)), Opens(range(12))), Config())
    records = list(found.records.batches)
    assert len(records) == 2 and '"count": 30' in records[0] and found.train.file is None
    assert records == [_Recorder({"": each}, 0)[0] for each in (found.train, found.val)], "read here, the same"


def test_with_workers_0_they_are_read_here_as_the_run_does() -> None:
    """A worker would move the position of a file that this process has opened, and has no threads of a pool."""

    class Reads(Pictures):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return super().__getitem__(index)[0], os.getpid()

    (record,) = check_datasets(Datasets(Reads(range(30))), Config(workers=0)).records.batches
    assert f'"{os.getpid()}"' in record


def test_a_collate_that_needs_several_samples_is_left_out() -> None:
    class Drops(BatchDataset):
        def __len__(self) -> int:
            return 30

        def __getitem__(self, index: int) -> Any:
            return None if index == 0 else (torch.ones(3), index % 10)

        def collate(self, samples: list[Any]) -> Any:
            return default_collate([sample for sample in samples if sample is not None])

    assert '"count": 30' in _Recorder({"training": Drops()}, 0)[0]


@pytest.mark.parametrize(
    ("keys", "accepted"),
    [
        (numpy.arange(30, dtype=numpy.uint64) + (1 << 63), True),
        ([(1 << 64) - 1 - number if number % 2 else number for number in range(30)], True),
        (torch.arange(30, dtype=torch.int32), True),
        ([f"name {number}" for number in range(30)], False),
        (torch.rand(30), False),
        (range(29), False),
    ],
)
def test_keys_are_whole_numbers(keys: Any, accepted: bool) -> None:
    class Keyed(BatchDataset):
        def __len__(self) -> int:
            return 30

        def __getitem__(self, index: int) -> Any:
            return torch.ones(3), index % 10

        def keys(self) -> Any:
            return keys

    recorder = _Recorder({"training": Keyed()}, 0)
    if accepted:
        assert '"count": 30' in recorder[0]
    else:
        with pytest.raises(UsageError, match=r"Keyed.keys\(\) must return a number of 64 bits for each of 30 samples"):
            recorder[0]


# ---- after a resume -------------------------------------------------------------------------------------------------


@fault(49)
def test_a_run_does_not_resume_with_other_samples_unless_that_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(monkeypatch, lambda: Datasets(Pictures(range(64)), Pictures(range(40))))
    given = (*RUN, "--epochs=3", "--output-dir", tmp_path)
    train(2, *given, "--max-steps=5")
    remedy = "(--accept-changed-data continues with them)"
    for changed, what in (
        (Datasets(Pictures(reversed(range(64))), Pictures(range(40))), "training sample 0 is another one"),
        (Datasets(Pictures(range(64)), Pictures(range(1, 41))), "validation sample 0 is another one"),
        (Datasets(Pictures(range(60)), Pictures(range(40))), "training samples were 64, are 60"),
        (Datasets(Pictures(range(64)), Pictures(range(44))), "validation samples were 40, are 44"),
    ):
        load(monkeypatch, lambda changed=changed: changed)
        error = the_error(train(2, *given, code=4))
        assert f"cannot resume from {newest(tmp_path)}: {what} {remedy}" in error
    assert "val    loss" in train(1, *given, "--evaluate"), "an evaluation may have other samples"
    output = train(2, *given, "--accept-changed-data")
    known = "validation samples were 40, are 44 (--accept-changed-data): the rest of this epoch is drawn anew"
    assert f"warning: since step_00000005.pt was written: {known}" in output
    assert lines(tmp_path, "val")[-1]["count"] == 44
    assert "already done" in train(2, *given), "the checkpoint has the new samples"


def test_a_checkpoint_without_a_record_resumes_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(monkeypatch, lambda: Datasets(Pictures(range(64)), Pictures(range(40))))
    given = (*RUN, "--epochs=2", "--output-dir", tmp_path)
    train(1, *given, "--max-steps=3")
    forget(newest(tmp_path))
    output = train(1, *given)
    line = "warning: step_00000003.pt has no record of the samples: only their number was compared"
    assert output.count(line) == 1
    assert "no record" not in train(1, *given)


def forget(path: Path) -> None:
    """Make of a checkpoint one of an earlier version, which held no record of samples."""
    content = torch.load(path, weights_only=True)
    del content["records"]
    storage.write(path, content)


# ---- folders of images ----------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """240 images in two classes, each of another colour."""
    for number in range(240):
        path = tmp_path / "images" / "train" / ("cat", "dog")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (number, 255 - number, number * 7 % 256)).save(path)
    return tmp_path / "images"


@pytest.fixture(params=["files", "cache"])
def given(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> tuple[Any, ...]:
    cache = ("--cache", tmp_path / "cache") if request.param == "cache" else ()
    what = ("--dataset=imagefolder", "--data-dir", folder, "--val-fraction=0.2", *cache)
    return (*RUN, *what, "--epochs=3", "--output-dir", tmp_path / "run")


def parts_of(given: tuple[Any, ...]) -> tuple[set[str], set[str]]:
    """The files that are trained on, and those that validate."""
    sets = data.load_datasets(Config.parse([str(word) for word in given]))
    samples = [getattr(each, "files", each).samples for each in (sets.train, sets.val)]
    return tuple({Path(path).name for path, _ in each} for each in samples)  # type: ignore[return-value]


@pytest.mark.sample(1)
@fault(49)
def test_a_removed_file_moves_no_other_and_the_run_resumes(given: tuple[Any, ...], folder: Path) -> None:
    trained, validates = parts_of(given)
    assert not trained & validates and len(trained | validates) == 240 and 25 < len(validates) < 75
    train(2, *given, "--max-steps=5")
    for name in (sorted(trained)[7], sorted(trained)[90], sorted(validates)[3]):
        (folder / "train" / ("cat", "dog")[int(name.removesuffix(".png")) % 2] / name).unlink()
    now_trained, now_validates = parts_of(given)
    assert now_trained < trained and now_validates < validates
    output = train(2, *given)
    removed = f"2 of {len(trained)} training samples; 1 of {len(validates)} validation samples were removed"
    assert f"warning: since step_00000005.pt was written: {removed}: the rest of this epoch is drawn anew" in output


@pytest.mark.parametrize("given", ["files"], indirect=True)
def test_files_that_were_renamed_are_not_removed_ones(given: tuple[Any, ...], folder: Path) -> None:
    train(1, *given, "--max-steps=3")
    trained = sorted(parts_of(given)[0])
    paths = [path for name in trained[20:27] for path in folder.rglob(name)]
    paths[0].unlink()
    for path in paths[1:]:
        path.rename(path.with_name(f"renamed {path.name}"))
    assert " samples were " in the_error(train(1, *given, code=4))


@pytest.mark.sample(1)
@fault(49)
def test_a_file_that_is_added_or_replaced_is_refused_by_name(given: tuple[Any, ...], folder: Path) -> None:
    train(2, *given, "--max-steps=5")
    first = next(iter(sorted(parts_of(given)[0])))
    shutil.copy(folder / "train" / "cat" / "0.png", folder / "train" / "cat" / "new.png")
    what = "training" if "new.png" in parts_of(given)[0] else "validation"
    assert f": {what} samples were " in the_error(train(2, *given, code=4))
    (folder / "train" / ("cat", "dog")[int(first.removesuffix(".png")) % 2] / first).unlink()
    assert (
        "training samples are others, or in another order" in the_error(train(2, *given, code=4)) or what != "training"
    )
    assert "(--accept-changed-data): the rest" in train(2, *given, "--accept-changed-data")


@pytest.mark.sample(1)
def test_a_run_of_the_version_before_keeps_its_split(
    given: tuple[Any, ...], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It rounded the number of each class, and drew from their places. An edited checkpoint stands for one of its."""
    split = images.split_by_class
    with monkeypatch.context() as before:
        before.setattr(images, "split_by_class", lambda targets, fraction, seed, keys: split(targets, fraction, seed))
        before.setattr(ImageFiles, "keep", lambda self: False)
        old = parts_of(given)
        train(2, *given)
        shutil.copytree(tmp_path / "run", whole := tmp_path / "whole")
        shutil.rmtree(tmp_path / "run")
        train(2, *given, "--max-steps=20")
    assert old != parts_of(given)
    for path in (tmp_path / "run").rglob("*.pt"):
        forget(path)
    output = train(2, *given, "--max-steps=30")
    assert f"{len(old[0])} training, {len(old[1])} validation samples" in output
    assert "has no record" in train(2, *given), "still"
    models = [torch.load(newest(each), weights_only=True)["model"] for each in (whole, tmp_path / "run")]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    assert f"{len(old[1])} validation" in train(1, *given, "--evaluate")


class Twice(BatchDataset):
    """Each image twice, as an owner may write it."""

    classes = ("cat", "dog")

    def __init__(self, files: ImageFiles, name: str = "dataset") -> None:
        self.name = name
        setattr(self, name, files)

    def __len__(self) -> int:
        return 2 * len(getattr(self, self.name))

    def __getitems__(self, indices: list[int]) -> Any:
        files = getattr(self, self.name)
        return files.__getitems__([index % len(files) for index in indices])

    def prepare(self, batch: Any) -> Any:
        return getattr(self, self.name).prepare(batch)


@fault(49)
@pytest.mark.parametrize("given", ["files"], indirect=True)
def test_a_wrapped_training_set_keeps_its_split(given: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it describes. One of an earlier version is refused if only one of the two could keep its split."""
    found = data.load_datasets(Config.parse([str(word) for word in given]))
    counts = f"{2 * len(found.train)} training, {len(found.val)} validation samples"
    for name in ("dataset", "images"):
        load(monkeypatch, lambda name=name: Datasets(Twice(found.train, name), found.val))
        output = train(1, *given, "--max-steps=3" if name == "dataset" else "--max-steps=5")
        assert counts in output and "no record" not in output
    path = newest(Path(given[-1]))
    forget(path)
    error = the_error(train(1, *given, "--max-steps=9", code=2))
    assert "an earlier version has split the data of this run in another way: name what a wrapper wraps" in error


def test_each_class_keeps_a_file_for_training_and_those_without_validation_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, count in {"many": 60, "one": 1, "two": 2}.items():
        (tmp_path / "train" / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (32, 32)).save(tmp_path / "train" / name / f"{number}.png")
    with caplog.at_level("INFO"):
        sets = data.load_datasets(
            Config.parse(["--dataset=imagefolder", f"--data-dir={tmp_path}", "--val-fraction=0.9"])
        )
    trained = [Path(path).parent.name for path, _ in sets.train.samples]
    assert trained.count("one") == 1 and trained.count("two") >= 1 and 1 <= trained.count("many") < 30
    assert "no image validates of one" in caplog.text


@pytest.mark.parametrize("fraction", [0.1, 0.5])
def test_shares_vary_as_in_a_random_draw(fraction: float) -> None:
    keys, targets = torch.randint(-(2**62), 2**62, (4000,)), torch.zeros(4000)
    counts = [len(images.split_by_class(targets, fraction, seed, keys)[1]) for seed in range(200)]
    spread = (4000 * fraction * (1 - fraction)) ** 0.5
    assert abs(numpy.mean(counts) - 4000 * fraction) < spread * 0.4
    assert 0.7 * spread < numpy.std(counts) < 1.3 * spread


class Streamed(BatchDataset):
    """Has a name for each sample, and no file."""

    classes = tuple(map(str, range(10)))

    def __init__(self, names: Iterator[int]) -> None:
        self.names = list(names)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((3, 32, 32), float(self.names[index])), self.names[index] % 10

    def keys(self) -> list[int]:
        return self.names


def test_the_keys_of_any_dataset_tell_which_samples_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = (*RUN, "--epochs=2", "--output-dir", tmp_path)
    load(monkeypatch, lambda: Datasets(Streamed(iter(range(64)))))
    train(1, *given, "--max-steps=3")
    load(monkeypatch, lambda: Datasets(Streamed(number for number in range(64) if number not in (0, 30, 63))))
    assert "3 of 64 training samples were removed" in train(1, *given)
