"""Whatever the owner writes stays exact, or is refused with one line: random numbers, streams, averages, state."""

from __future__ import annotations

import random
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy
import pytest
import torch
import torch.nn.functional as F
from outputs import lines, newest
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

import data
import main
import model
from config import Config
from ddp.checkpoint import storage as checkpoint
from ddp.core.errors import SetupError, UsageError
from ddp.data.dataset import BatchDataset, Datasets
from ddp.data.loader import EvalLoader, TrainLoader
from ddp.data.samples import check_datasets
from ddp.distributed.process_group import DistContext
from ddp.distributed.rank_env import Launcher
from ddp.distributed.seeds import derive_seed
from ddp.distributed.tensors import digest, map_tensors
from ddp.training.ema import ModelEma
from ddp.training.meter import Meter
from ddp.training.schedule import Schedule
from ddp.training.wrapping import wrap_model
from faults import fault
from processes import on_ranks, train
from small_models import build_awkward


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models are small: a second thread would only wait for a core."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 96, "val": 51})


def options(*words: Any) -> Config:
    return Config.parse([str(word) for word in words])


def by_rank(world_size: int, function: Callable[[DistContext], Any]) -> list[Any]:
    """What `function` returns on each rank. None leaves before all are done: others may still be connecting to it."""

    def and_wait(ctx: DistContext) -> Any:
        result = function(ctx)
        ctx.gather(None)
        return result

    return on_ranks(world_size, and_wait, "--device=cpu", "--timeout=60")


def the_error(output: str) -> str:
    (error,) = [line for line in output.splitlines() if "error:" in line.lower()]
    assert error.startswith("error: ") and "Traceback" not in output
    return error


# ---- random numbers in a dataset ------------------------------------------------------------------------------------


class Numbered(Dataset):
    """`length` samples: (vector of two numbers, index)."""

    classes = ("one", "other")

    def __init__(self, length: int = 24) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def noise(self) -> Tensor:
        return torch.tensor([random.random(), numpy.random.rand(), torch.rand(()).item()])


class Noise(Numbered):
    """Random numbers of every kind."""

    classes = ()

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.noise(), index


class Dictionaries(Noise):
    """The same, in dictionaries, and with random numbers for some samples only."""

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        return {"noise": (self.noise() if index % 5 == 0 else torch.full((3,), float(index)),), "index": index}


class OwnGenerators(Noise):
    """A generator of its own, made from torch's seed for each sample."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = numpy.random.default_rng(torch.initial_seed())
        return torch.from_numpy(generator.random(3)), index


class InChunks(Noise, BatchDataset):
    """Several batches together."""

    chunk_size = 8


class Augmented(Noise, BatchDataset):
    """Whole batches are read without random numbers; `augment` adds them, as functions of (seed, epoch, sample)."""

    chunk_size = 8

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return torch.zeros(len(indices), 3), torch.tensor(indices)

    def augment(self, batch: Any, epoch: int) -> Any:
        generators = [torch.Generator().manual_seed(derive_seed(7, epoch, index)) for index in batch[1].tolist()]
        return batch[0] + torch.stack([torch.rand(3, generator=generator) for generator in generators]), batch[1]


class WithPrepare(Dictionaries, BatchDataset):
    def prepare(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch["noise"][0], batch["index"]


def as_pairs(batch: Any) -> Iterator[tuple[int, tuple[float, ...]]]:
    noise, indices = batch
    for index, numbers in zip(indices.tolist(), noise.tolist(), strict=True):
        yield index, tuple(numbers)


@fault(40)
@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", [Noise, WithPrepare, OwnGenerators, InChunks, Augmented])
def test_random_numbers_are_those_of_the_sample(kind: type[Numbered]) -> None:
    """For any number of processes, workers and samples that are read together, in training and in evaluation."""

    def samples(*words: Any, start: int = 0) -> Callable[[DistContext], dict[Any, Any]]:
        def of_rank(ctx: DistContext) -> dict[Any, Any]:
            config, dataset = options(*words), kind()
            training = TrainLoader(dataset, config, ctx).steps(2, samples_consumed=start)
            found = {("train", key): value for step in training for batch in step for key, value in as_pairs(batch)}
            evaluation = EvalLoader(dataset, config, ctx)
            return found | {("test", key): value for batch in evaluation for key, value in as_pairs(batch)}

        return of_rank

    (alone,) = by_rank(1, samples("--batch-size=4", "--workers=0"))
    assert len(alone) == 48 and len(set(alone.values())) >= (25 if kind is Augmented else 29)
    (large,) = by_rank(1, samples("--batch-size=12", "--workers=2"))
    assert large == alone
    two = by_rank(2, samples("--batch-size=2", "--workers=1"))
    assert two[0] | two[1] == alone
    (resumed,) = by_rank(1, samples("--batch-size=4", "--workers=0", start=12))
    assert len(resumed) == 36 and resumed.items() <= alone.items()


class WholeBatches(Numbered):
    """A pasted get_batch: whole batches with random numbers of every kind."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return torch.stack([self.noise() for _ in indices]), torch.tensor(indices) % 2


class Lists(Numbered):
    """The same, as a list of samples."""

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        return [(self.noise(), index % 2) for index in indices]


class OnlyPython(Numbered):
    """Draws for some samples only, and not from torch."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        noise = [random.random() if index == 7 else 0.0 for index in indices]
        return torch.tensor([[number] * 3 for number in noise]), torch.tensor(indices) % 2


class OnlyNumpy(Numbered):
    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(numpy.random.rand(len(indices), 3)).float(), torch.tensor(indices) % 2


class Padded(Numbered):
    """Pads a batch to its longest sample."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return torch.rand(len(indices), 2 + max(indices) % 3), torch.zeros(len(indices), dtype=torch.long)


class InChunksOfBatches(WholeBatches, BatchDataset):
    chunk_size = 8


@fault(40)
@pytest.mark.sample(6)
@pytest.mark.parametrize("kind", [WholeBatches, Lists, OnlyPython, OnlyNumpy, Padded, InChunksOfBatches])
@pytest.mark.parametrize("workers", [0, 2])
def test_random_numbers_in_getitems_are_refused(
    kind: type[Numbered], workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would depend on the samples that are read together. Reading one by one instead would be slow, in silence."""
    monkeypatch.setattr(main, "load_datasets", lambda config: Datasets(Subset(kind(), range(24))))
    monkeypatch.setattr(main.task, "build_model", lambda config, train_set: nn.Linear(3, 2))
    given = ("--workers", workers, "--batch-size=4", "--device=cpu", "--epochs=1", "--output-dir", tmp_path)
    remedy = "draw them in __getitem__, augment or mix, as docs/data.md shows"
    error = f"dataset {kind.__name__} draws random numbers in __getitems__: {remedy}"
    output = train(2, *given, code=2)
    assert output.count(error) == 1 and "Traceback" not in output  # of OnlyPython, the rank that reads sample 7


class RandomMasks(Noise, BatchDataset):
    """Masks a part of each batch, as a collator for masked language modelling does."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.ones(3), index

    def collate(self, samples: list[Any]) -> tuple[Tensor, Tensor]:
        inputs, targets = super().collate(samples)
        return inputs * torch.rand(len(samples), 3) * random.random() * numpy.random.rand(), targets


@fault(40)
@pytest.mark.parametrize("workers", [0, 2])
def test_random_numbers_in_collate_are_those_of_the_batch(workers: int) -> None:
    """The same after a resume, and with any number of workers."""

    def batches(ctx: DistContext) -> list[dict[int, tuple[float, ...]]]:
        found = []
        for number, start in ((0, 0), (workers, 0), (workers, 8)):
            loader = TrainLoader(RandomMasks(), options("--batch-size=4", "--workers", number), ctx)
            steps = loader.steps(1, samples_consumed=start)
            found.append({key: value for step in steps for batch in step for key, value in as_pairs(batch)})
        return found

    alone, repeated, resumed = by_rank(1, batches)[0]
    assert alone == repeated and len(set(alone.values())) == 24
    assert len(resumed) == 16 and resumed.items() <= alone.items()


@fault(40)
def test_random_numbers_in_collate_are_refused_in_chunks() -> None:
    """After a resume, other samples could be read together."""

    class RandomChunks(RandomMasks):
        chunk_size = 8

    def first_batch(ctx: DistContext) -> str:
        with pytest.raises(UsageError) as raised:
            next(next(TrainLoader(RandomChunks(), options("--batch-size=4", "--workers=0"), ctx).steps(0)))
        return str(raised.value)

    assert by_rank(1, first_batch) == ["dataset RandomChunks draws random numbers in collate: leave chunk_size at 1"]


def test_the_hooks_of_joined_data_sets_are_not_ignored() -> None:
    """torch's ConcatDataset has none of its parts' hooks."""
    from ddp.data.dataset import hooks_of

    with pytest.raises(UsageError, match="dataset ConcatDataset holds a BatchDataset, whose hooks would be ignored"):
        hooks_of(Subset(ConcatDataset([Numbered(), InChunks()]), range(3)))
    assert type(hooks_of(ConcatDataset([Numbered(), Numbered()]))) is BatchDataset


class Stream(Numbered):
    """Returns what comes next, whatever the index."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = iter(range(10**6))

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((2,), float(next(self.numbers))), index % 2


class ChangedInPlace(Numbered):
    """Each call normalizes what the data set keeps once more, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.ones(24, 2)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.kept[index].mul_(0.5), index % 2


class ErasedInPlace(Numbered):
    """Each call erases one of the pixels that the data set keeps. Two calls with the same random numbers are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.ones(24, 999)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.kept[index, torch.randint(999, ())] = 0
        return self.kept[index].sum().expand(2), index % 2


class EverySecondCall(Numbered):
    """Returns another sample in each second call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.calls += 1
        return torch.full((2,), self.calls % 2.0), index % 2


class KeptWithNoise(Numbered):
    """Keeps augmented samples, so that each epoch has the noise of the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, Tensor] = {}

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index not in self.kept:
            self.kept[index] = self.noise()[:2].float()
        return self.kept[index], index % 2


class DrawsToSetUp(Numbered):
    """Only the very first call draws, whatever the sample."""

    weight: Any = None

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.weight = torch.randn(2) if self.weight is None else self.weight
        return torch.zeros(2), index % 2


def test_samples_that_keep_their_first_random_numbers_are_refused() -> None:
    def first(ctx: DistContext) -> None:
        given = options("--batch-size=4", "--workers=0")
        next(TrainLoader(DrawsToSetUp(), given, ctx).steps(0)).rest()
        for size in (4, 1):
            with pytest.raises(
                UsageError, match="KeptWithNoise draws random numbers for a sample only when it is first"
            ):
                for step in TrainLoader(KeptWithNoise(), options("--batch-size", size, "--workers=0"), ctx).steps(0):
                    step.rest()

    by_rank(1, first)


class OneBuffer(Numbered):
    """Reads each sample into the same memory."""

    memory = torch.zeros(2)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.memory.fill_(index), index % 2


def test_samples_in_the_same_memory_are_refused() -> None:
    """A batch would hold the last one several times."""

    def first(ctx: DistContext) -> None:
        with pytest.raises(UsageError, match="dataset OneBuffer changes a sample when it reads the next one: return a"):
            next(TrainLoader(OneBuffer(), options("--batch-size=4", "--workers=0"), ctx).steps(0)).rest()

    by_rank(1, first)


class DrawsInPrepare(Noise, BatchDataset):
    chunk_size = 8

    def prepare(self, batch: Any) -> Any:
        return batch[0] * random.random(), batch[1]


class DrawsInAugment(Noise, BatchDataset):
    chunk_size = 8

    def augment(self, batch: Any, epoch: int) -> Any:
        return batch[0] + torch.rand(3), batch[1]


class DrawsWithNumpy(Noise, BatchDataset):
    chunk_size = 8

    def augment(self, batch: Any, epoch: int) -> Any:
        return batch[0] + numpy.random.rand(), batch[1]


@fault(40)
def test_random_numbers_of_several_batches_are_refused_in_training_alone() -> None:
    """A resumed run would draw others: it may begin in the middle of what is prepared together."""

    def first(ctx: DistContext) -> None:
        given = options("--batch-size=4", "--workers=0")
        for kind in (DrawsInPrepare, DrawsInAugment, DrawsWithNumpy):
            with pytest.raises(
                UsageError, match=f"{kind.__name__}: augment or prepare draws random numbers for several"
            ):
                next(TrainLoader(kind(), given, ctx).steps(0)).rest()
        assert len(list(EvalLoader(DrawsInPrepare(), given, ctx))) == 3
        one = options("--batch-size=8", "--workers=0")
        assert len(next(TrainLoader(DrawsInPrepare(), one, ctx).steps(0)).rest()) == 1, "a step has its own numbers"

    by_rank(1, first)


class OwnGenerator(Numbered):
    """Draws from a generator that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = numpy.random.default_rng(0)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.from_numpy(self.generator.random(2, dtype=numpy.float32)), index % 2


class OwnGeneratorInBatches(OwnGenerator):
    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self.generator.random((len(indices), 2), dtype=numpy.float32)), torch.tensor(
            indices
        ) % 2


class Mosaic(Numbered):
    """Mixes in the samples that were read before, as a mosaic of images does."""

    def __init__(self) -> None:
        super().__init__()
        self.before: list[int] = []

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.before = list(dict.fromkeys([*self.before, index]))[-8:]
        return torch.tensor([float(random.choice(self.before)), float(index)]), index % 2


class SeededGenerator(Numbered):
    """Has a generator, but seeds it as the message says."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = numpy.random.default_rng(torch.initial_seed())
        return torch.from_numpy(generator.random(2, dtype=numpy.float32)), index % 2


@fault(40)
@pytest.mark.sample(6)
@pytest.mark.parametrize(
    "kind", [Stream, ChangedInPlace, ErasedInPlace, EverySecondCall, OwnGenerator, OwnGeneratorInBatches, Mosaic]
)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_hidden_stream_is_refused_with_one_line(
    kind: type[Numbered], workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "load_datasets", lambda config: Datasets(Subset(kind(), range(24)), SeededGenerator()))
    monkeypatch.setattr(main.task, "build_model", lambda config, train_set: nn.Linear(2, 2))
    given = ("--workers", workers, "--batch-size", 4, "--device=cpu", "--output-dir", tmp_path)
    error = the_error(train(2, *given, code=2))
    assert "returned two different samples for index" in error and "docs/data.md" in error
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_generator_that_is_seeded_for_each_sample_is_accepted() -> None:
    def sums(ctx: DistContext) -> dict[float, int]:
        steps = TrainLoader(SeededGenerator(), options("--batch-size=4", "--workers=0"), ctx).steps(1)
        return {vector.sum().item(): 0 for step in steps for vectors, _ in step for vector in vectors}

    (alone,) = by_rank(1, sums)
    two = by_rank(2, sums)
    assert len(alone) == 24 and two[0] | two[1] == alone


@dataclass
class Boxes:
    """What a detection data set returns; its == compares tensors, and raises."""

    corners: Tensor


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ({"a": [torch.tensor([1.0, float("nan")])]}, {"a": [torch.tensor([1.0, float("nan")])]}, True),
        (torch.zeros(2), torch.zeros(3), False),
        (torch.zeros(2), torch.zeros(2, dtype=torch.long), False),
        (numpy.zeros(2), numpy.array([0, 1e-9]), False),
        (("a", 1), ("a", 2), False),
        ((1, [2]), (1, [2]), True),
        ({"a": 1}, {"b": 1}, False),
        (1, 1.0, False),
        (object(), object(), True),
        ((float("nan"), 1.0), (float("nan"), 1.0), True),
        (float("nan"), 1.0, False),
        (Boxes(torch.zeros(2)), Boxes(torch.zeros(2)), True),
        (Boxes(torch.zeros(2)), Boxes(torch.ones(2)), False),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), True),
        ("cat", "cat", True),
        ("cat", "dog", False),
        (None, None, True),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({"a": 1}, {"a": 2}, False),
        (Launcher.SRUN, Launcher.SRUN, True),
    ],
)
def test_samples_are_compared_by_their_values(one: Any, other: Any, equal: bool) -> None:
    from ddp.data.reader import same

    assert same(one, other) is equal


class UnevenChunks(Numbered, BatchDataset):
    """Pictures of different sizes, as lists, and several batches of them together."""

    chunk_size = 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(3, 4 + index % 3)

    def collate(self, samples: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        return samples, torch.zeros(len(samples))


class NamedChunks(UnevenChunks):
    """With the names of the files, one per sample, in a list: it would go whole to each batch of the chunk."""

    def collate(self, samples: list[Tensor]) -> tuple[Tensor, list[str]]:  # type: ignore[override]
        return torch.zeros(len(samples)), ["a.png"] * len(samples)


@pytest.mark.parametrize("kind", [UnevenChunks, NamedChunks])
def test_chunks_that_cannot_be_split_are_refused(kind: type[UnevenChunks]) -> None:
    def first_batch(ctx: DistContext) -> str:
        with pytest.raises(UsageError) as raised:
            next(next(TrainLoader(kind(), options("--batch-size=4", "--workers=0"), ctx).steps(0)))
        return str(raised.value)

    assert by_rank(1, first_batch)[0].startswith("a dataset with a chunk_size needs tensors with one row per sample")


def test_chunks_are_split_also_between_the_passes_of_a_step() -> None:
    """12 batches of 4 in 4 steps of 3 passes; a chunk has 2 batches, and the last two samples fill no step."""

    def sizes(ctx: DistContext) -> list[int]:
        config = options("--batch-size=4", "--grad-accum-steps=3", "--workers=0")
        return [len(targets) for step in TrainLoader(InChunks(50), config, ctx).steps(0) for _, targets in step]

    assert by_rank(1, sizes) == [[4] * 12] and by_rank(2, sizes) == [[4] * 6] * 2


# ---- streams --------------------------------------------------------------------------------------------------------


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class Countable(Endless):
    """webdataset's `with_length` gives a stream a length."""

    def __len__(self) -> int:
        return 8


@pytest.mark.parametrize("stream", [Endless(), Countable(), iter([1, 2])])
def test_a_stream_is_refused_before_the_model_is_built(
    stream: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "load_datasets", lambda config: Datasets(stream, Numbered()))
    error = the_error(train(1, "--device=cpu", "--output-dir", tmp_path, code=2))
    kind = type(stream).__name__
    assert error.startswith(f"error: the training data ({kind}) are a stream, which cannot be read by index: ")


def test_an_empty_test_set_is_refused() -> None:
    with pytest.raises(SetupError, match="there are no test samples"):
        check_datasets(Datasets(Numbered(), None, Numbered(0)), options())
    with pytest.raises(SetupError, match="there are no validation samples"):
        check_datasets(Datasets(Numbered(), Numbered(0)), options())
    assert check_datasets(Datasets(Numbered()), options()).val is None
    for several in ({"a": Numbered(), "b": Numbered()}, [Numbered(), Numbered()]):
        with pytest.raises(UsageError, match=r"the validation data are a .*, which holds data sets: return one"):
            check_datasets(Datasets(Numbered(), several), options())


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        ((Numbered(), Numbered()), "a tuple with 2 parts"),
        (Numbered(), "a Numbered"),
        (None, "None"),
        (Datasets(None, Numbered()), "no training set"),
    ],
)
def test_what_load_datasets_must_return(
    returned: Any, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "load_datasets", lambda config: returned)
    error = the_error(train(1, "--device=cpu", "--output-dir", tmp_path, code=2))
    assert error.startswith(f"error: load_datasets in data.py returned {found}: return Datasets(train, val, test)")


# ---- evaluation -----------------------------------------------------------------------------------------------------


class Ragged(Numbered, BatchDataset):
    """Samples of different lengths. A batch is padded to its longest, as for detection."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((1 + index % 7,), float(index))

    def collate(self, samples: list[Tensor]) -> tuple[Tensor, list[int]]:
        return nn.utils.rnn.pad_sequence(samples, batch_first=True), [len(sample) for sample in samples]


@fault(40)
@pytest.mark.parametrize("workers", [0, 1])
def test_evaluation_takes_the_same_batches_for_any_number_of_processes(workers: int) -> None:
    """So a result that depends on the rest of its batch, such as on its longest sample, is the same."""

    def batches(ctx: DistContext) -> list[tuple[list[list[float]], list[int]]]:
        loader = EvalLoader(Ragged(23), options("--batch-size=4", "--workers", workers), ctx)
        return [(inputs.tolist(), lengths) for inputs, lengths in loader]

    (alone,) = by_rank(1, batches)
    assert [len(lengths) for _, lengths in alone] == [4, 4, 4, 4, 4, 3]
    for world_size in (2, 3, 7):
        ranks = by_rank(world_size, batches)
        assert [ranks[number % world_size][number // world_size] for number in range(6)] == alone


def test_what_an_evaluation_draws_at_random_depends_on_the_batch_alone() -> None:
    """A model or a loss may draw: a diffusion model's noise, for example. The training's generators are left alone."""

    def draws(ctx: DistContext) -> list[Tensor]:
        before = torch.rand(ctx.rank + 1), torch.get_rng_state()
        found = []
        for _ in EvalLoader(Ragged(23), options("--batch-size=4", "--workers=0"), ctx):
            found.append([random.random(), numpy.random.rand(), torch.rand(()).item()])
        assert torch.equal(before[1], torch.get_rng_state())
        return found

    (alone,) = by_rank(1, draws)
    assert len(alone) == 6 and len({repr(numbers) for numbers in alone}) == 6
    for world_size in (2, 3):
        ranks = by_rank(world_size, draws)
        assert [ranks[number % world_size][number // world_size] for number in range(6)] == alone


def test_lists_that_some_batches_lack_stay_in_order_and_an_array_may_be_used_again() -> None:
    def gathered(ctx: DistContext) -> tuple[list[int], list[float]]:
        meter, array = Meter(ctx), numpy.zeros(2)
        for number in range(ctx.rank, 6, ctx.world_size):
            array[:] = number
            meter.add({"array": array} | ({"numbers": [number]} if number in (0, 1, 4, 5) else {}))
            if number < 3:
                meter._add_pending()  # as after many batches
        total = meter.take()
        return total["numbers"], total["array"].tolist()

    for world_size in (1, 2, 3):
        assert by_rank(world_size, gathered) == [([0, 1, 4, 5], [15.0, 15.0])] * world_size


def test_lists_are_gathered_in_the_order_of_the_samples_each_once() -> None:
    """Also on a rank that has no batch, and of tensors."""

    def gathered(ctx: DistContext) -> tuple[list[int], list[list[float]], float]:
        meter = Meter(ctx)
        for inputs, lengths in EvalLoader(Ragged(23), options("--batch-size=4", "--workers=0"), ctx):
            scores = [row[:2] for row in inputs]
            meter.add({"lengths": lengths, "scores": scores, "count": len(lengths)})
            if ctx.rank == 0 and lengths[0] == 1:
                assert meter.pending[-1]["lengths"] == lengths
        total = meter.take()
        return total["lengths"], [score.tolist() for score in total["scores"]], total["count"].item()

    expected = [1 + index % 7 for index in range(23)]
    for world_size in (1, 2, 3, 7):
        for lengths, scores, count in by_rank(world_size, gathered):
            assert (lengths, count) == (expected, 23)
            assert [score[0] for score in scores] == list(range(23))


def test_lists_survive_a_resume_in_the_middle_of_a_logged_interval() -> None:
    def resumed(ctx: DistContext) -> list[int]:
        meter, again = Meter(ctx), Meter(ctx)
        meter.add({"loss": torch.ones(()), "values": [2 * ctx.rank, 2 * ctx.rank + 1]})
        meter.before_save()
        again.load_state_dict(meter.state_dict())
        again.add({"loss": torch.ones(()), "values": [10 + ctx.rank]})
        totals = again.take()
        assert totals["loss"].item() == 2 * ctx.world_size
        return totals["values"]

    assert by_rank(2, resumed) == [[0, 1, 2, 3, 10, 11]] * 2


def test_the_state_of_a_meter_can_be_read_on_one_rank_alone() -> None:
    """What looks harmless has no collective: a save collects the totals of all ranks before."""

    def read(ctx: DistContext) -> float | None:
        meter = Meter(ctx)
        meter.add({"loss": torch.ones(()), "values": [ctx.rank]})
        meter.before_save()
        meter.add({"loss": torch.ones(()), "values": [ctx.rank]})
        return meter.state_dict()["total"]["loss"].item() if ctx.rank == 0 else None

    assert by_rank(2, read) == [2.0, None]


class WithTable(nn.Module):
    """The gradient of the outputs is that of `last`, and shares its memory with that of `table`."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.last, self.table = nn.Linear(4, 3), nn.Embedding(6, 3, sparse=sparse)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(inputs) + self.table((inputs.mean(1) * 20).long().clamp(0, 5))


@fault(54)
def test_sparse_gradients_leave_those_of_other_weights_alone() -> None:
    """DDP divides them in place."""

    def gradients(ctx: DistContext) -> list[list[float]]:
        torch.manual_seed(0)
        inputs, targets = torch.randn(8, 4), torch.randint(0, 3, (8,))
        model, alone = WithTable(sparse=True), WithTable(sparse=False)
        alone.load_state_dict(model.state_dict())
        wrapped = wrap_model(model, options("--device=cpu"), ctx)
        F.cross_entropy(wrapped(inputs[ctx.rank :: 2]), targets[ctx.rank :: 2]).backward()
        F.cross_entropy(alone(inputs), targets).backward()
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        return [(one.grad.to_dense() - other.grad).abs().max().item() for one, other in pairs]  # type: ignore

    assert all(max(apart) < 1e-6 for apart in by_rank(2, gradients))


# ---- the average of the weights -------------------------------------------------------------------------------------


def test_the_average_follows_weights_and_buffers() -> None:
    layer = nn.BatchNorm1d(2)
    average = ModelEma(layer, 0.75)
    with torch.no_grad():
        layer.weight.fill_(5.0)
        layer.running_mean.fill_(4.0)  # type: ignore[union-attr]
    layer.num_batches_tracked += 3  # type: ignore[operator]
    average.update(layer)
    assert average.module.weight.tolist() == [2.0, 2.0]  # 0.75 x 1 + 0.25 x 5
    assert average.module.running_mean.tolist() == [1.0, 1.0]
    assert average.module.num_batches_tracked.item() == 3
    assert list(average.state_dict()) == list(layer.state_dict())
    assert not any(weight.requires_grad for weight in average.module.parameters())


class Scaled(nn.Module):
    """Divides by a plain attribute, which the training changes."""

    def __init__(self, temperature: Any) -> None:
        super().__init__()
        self.inner, self.temperature = nn.Linear(1, 1), temperature

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs) / self.temperature


ATTRIBUTES = [(1.0, 4.0), (torch.ones(2), torch.zeros(2)), ({"of": [torch.ones(1)]}, {"of": [torch.zeros(1)]})]


@pytest.mark.parametrize(("first", "later"), ATTRIBUTES)
def test_an_average_that_lacks_a_plain_attribute_says_so_once(
    first: Any, later: Any, caplog: pytest.LogCaptureFixture
) -> None:
    network = nn.Sequential(Scaled(first))
    average = ModelEma(network, 0.5)
    network.eval()
    average.state_dict()
    network[0].temperature = later
    with caplog.at_level("INFO"):
        average.state_dict()
        average.state_dict()
    (line,) = caplog.messages
    assert line.startswith("warning: --ema: 0.temperature of the model has changed; its average keeps the first value")


def test_the_loss_of_a_batch_is_no_plain_attribute_of_an_average(caplog: pytest.LogCaptureFixture) -> None:
    network = nn.Sequential(Scaled(1.0))
    network[0].auxiliary_loss = torch.zeros(())
    network[0].itself = [1.0]
    network[0].itself.append(network[0].itself)  # nor is what leads back to itself
    average = ModelEma(network, 0.5)
    network[0].auxiliary_loss = network[0].inner.weight.sum()
    with caplog.at_level("INFO"):
        average.state_dict()
    assert caplog.messages == []


class Lazy(nn.Module):
    """A causal mask, and a buffer that the first forward pass makes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))

    def forward(self) -> None:
        self.register_buffer("a_first_by_name", torch.full((3,), 7.0))


def test_the_average_of_a_mask_and_of_a_later_buffer() -> None:
    network = Lazy()
    average = ModelEma(network, 0.5)
    network()
    with torch.no_grad():
        network.weight.fill_(3.0)
    average.update(network)
    assert average.module.weight.tolist() == [2.0]
    assert average.module.mask.tolist() == [0.0, float("-inf")]  # type: ignore[union-attr,operator]
    average.module()  # an evaluation
    network.a_first_by_name.fill_(8.0)  # type: ignore[union-attr,operator]
    average.update(network)
    assert average.module.a_first_by_name.tolist() == [8.0] * 3  # type: ignore[union-attr,operator]


class WithQueue(nn.Module):
    """A queue of unit vectors, a float buffer that is no statistic of BatchNorm, and an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.zeros(1)), [0]
        self.register_buffer("queue", F.normalize(torch.ones(4, 8)))

    def get_extra_state(self) -> list[int]:
        return self.seen

    def set_extra_state(self, state: list[int]) -> None:
        self.seen = state


def test_the_average_mixes_weights_and_batch_norm_only() -> None:
    network = nn.Sequential(WithQueue(), nn.BatchNorm1d(2))
    average = ModelEma(network, 0.5)
    with torch.no_grad():
        network[0].weight.fill_(4.0)
        network[0].queue.copy_(F.normalize(torch.randn(4, 8)))  # type: ignore[operator,arg-type]
        network[1].running_var.fill_(3.0)  # type: ignore[operator,union-attr]
    network[0].seen.append(5)  # type: ignore[union-attr,operator]
    average.update(network)
    inner: Any = average.module
    assert inner[0].weight.tolist() == [2.0] and inner[1].running_var.tolist() == [2.0] * 2
    assert torch.equal(inner[0].queue, network[0].queue)  # type: ignore[arg-type]
    assert inner[0].seen == [0, 5] and average.state_dict()["0._extra_state"] == [0, 5]
    inner[0].seen.append(6)
    assert network[0].seen == [0, 5], "a copy"


class Call:
    """An object that calls a function; with `weak`, one that it does not own."""

    def __init__(self, function: Any, weak: bool = False) -> None:
        self.function = ({"it": [weakref.ref(function) if weak else function]},)
        self.weak = weak

    def __call__(self, inputs: Tensor) -> Tensor:
        function = self.function[0]["it"][0]
        return (function() if self.weak else function)(inputs)


class WithFunctions(nn.Module):
    """Calls what is in an attribute, or a hook, as well as a layer. `kind`: which of them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(1, 1), nn.Parameter(torch.ones(1))
        self.function: Any = {
            "compiled": lambda: torch.compile(self.grown, backend="eager"),
            "closure": lambda: lambda inputs: inputs * self.scale,
            "default": lambda: lambda inputs, scale=self.scale: inputs * scale,
            "partial": lambda: partial(lambda factor, inputs: factor * inputs * self.scale, 2.0),
            "method": lambda: self.grown,
            "module": lambda: torch.compile(nn.Linear(1, 1), backend="eager"),
            "plain": lambda: lambda inputs: inputs * 2,
            "hook": lambda: F.leaky_relu,
            "object": lambda: Call(lambda inputs: inputs * self.scale),
            "weak reference": lambda: Call(self.inner, weak=True),
            "cache": lambda: lru_cache(lambda inputs: inputs * self.scale),
            "recurrent": lambda: nn.Sequential(nn.LSTM(1, 1), nn.Identity())[0],
            "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(1, 1)),
        }[kind]()
        if kind == "hook":
            self.inner.register_forward_hook(lambda layer, given, outputs: outputs * self.scale)

    def grown(self, inputs: Tensor) -> Tensor:
        return inputs * self.scale

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.function(self.inner(inputs).reshape(1, 1))
        return outputs[0] if isinstance(outputs, tuple) else outputs


KINDS = ["compiled", "closure", "default", "hook", "partial", "object", "weak reference", "cache"]
COPIED = ["method", "module", "plain", "recurrent", "parametrized"]


@pytest.mark.parametrize("kind", KINDS + COPIED)
def test_a_function_that_an_average_would_share_with_the_model_is_named(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """copy.deepcopy keeps a function as it is, with what it holds."""
    network = nn.Sequential(WithFunctions(kind))
    with caplog.at_level("INFO"):
        average = ModelEma(network, 0.5).module
    before = average(torch.ones(1))
    with torch.no_grad():
        for weight in network.parameters():
            weight.fill_(100.0)
    where = "0.inner._forward_hooks" if kind == "hook" else "0.function"
    line = f"warning: --ema: {where} of the model leads to a part of the model, so the average may use its weights: "
    shares = not torch.equal(average(torch.ones(1)), before)
    messages = [record.message for record in caplog.records if record.name == "ddp.training.ema"]  # torch logs as well
    assert [message.startswith(line) for message in messages] == [True] * shares
    assert shares == (kind not in COPIED)


def test_an_average_that_follows_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="--ema 1 would never follow the weights: pass less than 1"):
        options("--ema", 1)


@fault(40)
@pytest.mark.slow
def test_the_average_is_what_is_evaluated_now_and_after_a_resume_and_by_evaluate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 96, "val": 21})
    given = ("--dataset=synthetic", "--device=cpu", "--batch-size", 8, "--log-every", 2)
    given = (*given, "--ema", 0.5)
    monkeypatch.setattr(main.task, "build_model", build_awkward)  # it has BatchNorm
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    output = train(2, *given, "--epochs", 2, "--output-dir", whole)
    count = sum(weight.numel() for weight in build_awkward(None, SimpleNamespace(classes=range(10))).parameters())
    assert f"{count:,} weights" in output, "without the copy"
    train(2, *given, "--epochs", 2, "--max-steps", 3, "--output-dir", parts)
    train(2, *given, "--epochs", 2, "--output-dir", parts)
    contents = [checkpoint.read(newest(folder)) for folder in (whole, parts)]
    assert digest([contents[0][name] for name in ("model", "ema")]) == digest(
        [contents[1][name] for name in ("model", "ema")]
    )
    assert digest(contents[0]["ema"]) != digest(contents[0]["model"])
    trained = lines(whole, "val")[-1]
    for world_size in (1, 2, 3):
        output = train(world_size, *given, "--evaluate", "--output-dir", whole)
        assert f"loss {trained['loss']:.4f}  accuracy {trained['accuracy']:.4f}" in output
    config = options(*given)
    network = model.build_model(config, data.load_datasets(config).train)
    network.load_state_dict(contents[0]["ema"])  # as the README does

    def evaluate(ctx: DistContext) -> dict[str, Any]:
        return main.evaluate(network, EvalLoader(data.load_datasets(config).val, config, ctx), config, ctx)

    assert by_rank(1, evaluate)[0]["loss"] == pytest.approx(trained["loss"], rel=1e-6)
    output = train(1, "--evaluate", "--output-dir", whole)  # --ema is known from the checkpoint
    assert f"loss {trained['loss']:.4f}  accuracy {trained['accuracy']:.4f}" in output
    assert "--ema was 0.5, is None" in the_error(train(1, *given[:-2], "--output-dir", whole, code=4))


# ---- an optimizer that draws random numbers --------------------------------------------------------------------------


class NoisySGD(torch.optim.SGD):
    """Adds noise to the weights, as in Langevin dynamics."""

    drawn: ClassVar[list[float]] = []  # a number of each weight and step

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                noise = torch.randn_like(weight)
                weight.data.add_(noise, alpha=0.01)
                self.drawn.append(noise.flatten()[0].item())


def test_the_noise_of_an_optimizer_is_the_same_on_all_ranks_and_after_a_resume(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_optimizer(network: nn.Module, config: Config) -> torch.optim.Optimizer:
        return NoisySGD(network.parameters(), lr=config.lr)

    def evaluate(network: nn.Module, loader: Any, config: Config, ctx: DistContext) -> dict[str, Any]:
        assert len(set(ctx.gather(digest(network.state_dict())))) == 1, "the ranks have different weights"
        assert len(set(NoisySGD.drawn)) == len(NoisySGD.drawn), "the noise of a step was that of another one"
        return metrics(network, loader, config, ctx)

    metrics = main.evaluate
    monkeypatch.setattr(main.task, "build_optimizer", build_optimizer)
    monkeypatch.setattr(main, "evaluate", evaluate)
    given = ("--dataset=synthetic", "--device=cpu", "--batch-size", 8, "--epochs", 2)
    train(2, *given, "--output-dir", tmp_path / "whole")
    train(2, *given, "--max-steps", 3, "--output-dir", tmp_path / "parts")
    train(2, *given, "--output-dir", tmp_path / "parts")
    whole, parts = (checkpoint.read(newest(tmp_path / name))["model"] for name in ("whole", "parts"))
    assert digest(whole) == digest(parts)


# ---- BatchNorm in evaluation mode -----------------------------------------------------------------------------------


class MeanTeacher(nn.Module):
    """The student learns the outputs of a teacher, whose BatchNorm is in evaluation mode while the student trains."""

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10), nn.BatchNorm1d(10))
        self.teacher = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10), nn.BatchNorm1d(10)).requires_grad_(False)

    def train(self, mode: bool = True) -> MeanTeacher:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        outputs = self.student(images)
        if self.training:
            with torch.no_grad():
                for name, mine in self.teacher.state_dict().items():
                    theirs = self.student.state_dict()[name]
                    mine.copy_(mine.lerp(theirs, 0.5) if mine.is_floating_point() else theirs)
            outputs = outputs + 0.1 * self.teacher(images)
        return outputs


def test_a_teacher_is_the_same_on_all_ranks_and_after_a_resume(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main.task, "build_model", MeanTeacher)
    given = ("--dataset=synthetic", "--device=cpu", "--batch-size", 8, "--epochs", 2, "--momentum", 0)
    train(2, *given, "--output-dir", tmp_path / "whole")
    train(2, *given, "--max-steps", 8, "--output-dir", tmp_path / "parts")
    train(2, *given, "--output-dir", tmp_path / "parts")
    whole, parts = (checkpoint.read(newest(tmp_path / name))["model"] for name in ("whole", "parts"))
    assert digest(whole) == digest(parts)


class BatchRenorm(nn.BatchNorm1d):
    """It reads its statistics in training."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) - self.running_mean


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, BatchRenorm])
def test_buffers_are_broadcast_only_if_a_rank_reads_them(kind: type[nn.BatchNorm1d]) -> None:
    """Not those of BatchNorm while it trains: its statistics are of each rank's own batches until they are read."""

    def after_each_mode(ctx: DistContext) -> list[list[float]]:
        layer = kind(1)
        wrapped = wrap_model(nn.Sequential(layer, nn.Linear(1, 1)), options("--device=cpu"), ctx)
        found = []
        for training in (True, False):
            layer.running_mean.fill_(float(ctx.rank))  # type: ignore[union-attr]
            layer.train(training)
            wrapped(torch.zeros(2, 1)).sum().backward()
            found.append(layer.running_mean.tolist())  # type: ignore[union-attr]
        return found

    first, second = by_rank(2, after_each_mode)
    assert (first[0] == second[0]) == (kind is BatchRenorm) and first[1] == second[1] == [0.0]


# ---- groups of weights, and weights without a gradient --------------------------------------------------------------


def test_groups_keep_their_ratios_and_timms_lr_scale() -> None:
    layers = [nn.Linear(2, 2) for _ in range(3)]
    groups: list[dict[str, Any]] = [
        {"params": layers[0].parameters()},
        {"params": layers[1].parameters(), "lr": 0.01},
        {"params": layers[2].parameters(), "lr_scale": 0.5},
    ]
    config = options("--lr", 0.1, "--warmup-epochs", 2, "--scale-lr")
    optimizer = torch.optim.AdamW(groups, lr=config.lr)
    schedule = Schedule(optimizer, config, global_batch=128)
    schedule.set(1.0)  # half of the warm-up; linear scaling doubles the rate
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1, 0.01, 0.05])
    assert schedule.lr == pytest.approx(0.1)


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs).relu())


def test_a_model_may_be_called_twice_before_one_backward_pass() -> None:
    """D(real) and D(fake) of a GAN, over several steps; another model has an optimizer of its own."""

    def trained(ctx: DistContext) -> list[float]:
        torch.manual_seed(0)
        network, other, config = Discriminator(), Discriminator(), options("--device=cpu")
        ddp_model, ddp_other = wrap_model(network, config, ctx), wrap_model(other, config, ctx)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (network, other)]
        for step in range(3):
            torch.manual_seed(10 * step + ctx.rank)
            loss = F.softplus(-ddp_model(torch.randn(8, 4))).mean() + F.softplus(ddp_model(torch.randn(8, 4))).mean()
            loss.backward()
            optimizers[0].step()
            ddp_other(torch.randn(8, 4)).sum().backward()
            optimizers[1].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        return [weight.sum().item() for weight in (*network.parameters(), *other.parameters())]

    ranks = by_rank(2, trained)
    assert ranks[0] == ranks[1]


class Forgetful(Discriminator):
    """The first layer is not used."""

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(inputs)


@pytest.mark.parametrize("allowed", [False, True])
def test_weights_without_a_gradient_are_named_unless_the_owner_allows_them(allowed: bool) -> None:
    def trained(ctx: DistContext) -> str:
        network, config = Forgetful(), options("--device=cpu")
        ddp_model = wrap_model(network, config, ctx, SimpleNamespace(FIND_UNUSED_PARAMETERS=allowed))
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        try:
            for _ in range(3):
                ddp_model(torch.randn(8, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        except UsageError as error:
            return str(error)
        return ""

    for message in by_rank(2, trained):
        assert message.startswith("the loss does not depend on first.weight, first.bias: ") != allowed


def test_an_optimizer_may_call_a_closure_before_the_first_backward_pass() -> None:
    """torch's LBFGS; and another model's optimizer steps first."""

    def trained(ctx: DistContext) -> list[float]:
        torch.manual_seed(0)
        network, other, config = Discriminator(), Discriminator(), options("--device=cpu")
        ddp_model, ddp_other = wrap_model(network, config, ctx), wrap_model(other, config, ctx)
        both = torch.optim.SGD([*network.parameters(), *other.parameters()], lr=0.1)
        ddp_other(torch.ones(8, 4)).sum().backward()
        both.step()
        optimizer = torch.optim.LBFGS(network.parameters(), max_iter=2)

        def closure() -> float:
            optimizer.zero_grad()
            loss = F.softplus(ddp_model(torch.ones(8, 4))).mean()
            loss.backward()
            return loss.item()

        return [float(optimizer.step(closure)) for _ in range(2)]

    ranks = by_rank(2, trained)
    assert ranks[0] == ranks[1] and ranks[0][0] > ranks[0][1]


def test_a_weight_that_is_unfrozen_after_ddp_began_is_refused() -> None:
    """DDP would not average its gradient: the ranks would train different models."""

    def trained(ctx: DistContext) -> str:
        network, config = Discriminator(), options("--device=cpu")
        network.first.requires_grad_(False)
        ddp_model = wrap_model(network, config, ctx)
        ddp_model(torch.randn(8, 4)).sum().backward()
        network.first.requires_grad_(True)
        with pytest.raises(UsageError) as raised:
            ddp_model(torch.randn(8, 4))
        return str(raised.value)

    for message in by_rank(2, trained):
        assert message.startswith("first.weight was unfrozen after wrap_model, so no rank would average it: ")


# ---- mixing ---------------------------------------------------------------------------------------------------------


class Mixed(Numbered, BatchDataset):
    """Mixup, with random numbers of every kind, as libraries draw them."""

    classes = ()

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((3,), float(index)), index

    def mix(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        part = numpy.random.beta(1, 1) * random.random()
        mixed = part * inputs + (1 - part) * inputs[torch.randperm(len(inputs))]
        mixed[:, 2] = part
        return mixed, targets


class MixedInChunks(Mixed):
    chunk_size = 8


@pytest.mark.parametrize("kind", [Mixed, MixedInChunks])
def test_a_batch_is_mixed_alike_after_a_resume_and_only_in_training(kind: type[Mixed]) -> None:
    def batches(start: int, epoch: int = 1) -> Callable[[DistContext], list[Any]]:
        def of_rank(ctx: DistContext) -> list[Any]:
            before = torch.get_rng_state().tolist()
            loader = TrainLoader(kind(), options("--batch-size=4", "--workers=0"), ctx)
            found = [
                (inputs.tolist(), targets.tolist()) for step in loader.steps(epoch, start) for inputs, targets in step
            ]
            assert torch.get_rng_state().tolist() == before
            return found

        return of_rank

    whole, rest, next_epoch = by_rank(2, batches(0)), by_rank(2, batches(8)), by_rank(2, batches(0, epoch=2))
    assert [rank[1:] for rank in whole] == rest
    assert len({inputs[0][2] for rank in whole + next_epoch for inputs, _ in rank}) == 12, "each batch draws anew"
    assert any(inputs[0][:2] != [targets[0]] * 2 for rank in whole for inputs, targets in rank)

    def evaluated(ctx: DistContext) -> bool:
        loader = EvalLoader(kind(), options("--batch-size=4", "--workers=0"), ctx)
        return all((inputs[:, 0] == targets).all() for inputs, targets in loader)

    assert by_rank(1, evaluated) == [True]


# ---- values that are not finite from the start ----------------------------------------------------------------------


def test_a_mask_of_minus_infinity_is_no_divergence(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3 * 32 * 32, 10)
            self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))

        def forward(self, images: Tensor) -> Tensor:
            return self.layer(images.flatten(1))

    monkeypatch.setattr(main.task, "build_model", lambda config, train_set: Masked())
    train(1, "--dataset=synthetic", "--device=cpu", "--batch-size=8", "--epochs=1", "--output-dir", tmp_path)
    assert checkpoint.read(newest(tmp_path))["model"]["mask"][1] == float("-inf")


def test_a_metric_may_be_infinite_and_lists_may_hold_numpys_numbers(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The perplexity of a loss of a thousand, for example, in a checkpoint in the middle of a logged interval."""

    original = model.batch_totals

    def batch_totals(loss: Tensor, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
        scores = list(outputs.detach().double().sum(1).numpy())
        assert isinstance(scores[0], numpy.float64)
        totals = original(loss, outputs, targets)
        return {**totals, "perplexity": torch.tensor(float("inf")), "scores": scores}

    monkeypatch.setattr(main.task, "batch_totals", batch_totals)
    given = ("--dataset=synthetic", "--device=cpu", "--batch-size", 8, "--log-every", 3, "--max-steps", 4)
    train(2, *given, "--checkpoint-every", 2, "--keep-checkpoints", 9, "--output-dir", tmp_path)
    saved = checkpoint.read(tmp_path / "checkpoints" / "step_00000002.pt")["meter"]["total"]
    assert saved["perplexity"].item() == float("inf")
    assert len(saved["scores"]) == 32 and {type(score) for score in saved["scores"]} == {float}


def test_a_total_that_appears_late_is_refused() -> None:
    """Ranks that have seen no batch with it would not add it."""

    def late(ctx: DistContext) -> str:
        meter = Meter(ctx)
        meter.add({"loss": torch.ones(())})
        meter.reduce()
        meter.add({"loss": torch.ones(()), "rare": torch.ones(())})
        with pytest.raises(UsageError) as raised:
            meter.reduce()
        return str(raised.value)

    expected = "batch_totals: rare missing until the first log line: return zeros from the start"
    assert by_rank(1, late) == [expected]


def test_a_tree_keeps_the_kinds_of_its_mappings() -> None:
    counts: defaultdict[str, Any] = defaultdict(list, {"a": torch.ones(2)})
    doubled = map_tensors(counts, lambda tensor: 2 * tensor)
    assert doubled["a"].tolist() == [2, 2] and doubled["new"] == []
    assert counts["a"].tolist() == [1, 1] and list(counts) == ["a"]
