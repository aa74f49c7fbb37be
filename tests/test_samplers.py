"""A sampler of the owner's decides what each epoch reads, exactly, on resume and for any number of processes."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from outputs import lines, newest, weights_and_momentum
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, WeightedRandomSampler

import data
import main
from config import Config
from ddp.checkpoint import storage
from ddp.core.errors import UsageError
from ddp.data import sampler
from ddp.data.dataset import BatchDataset, Datasets, hooks_of
from ddp.data.loader import EvalLoader, TrainLoader
from ddp.data.sampler import ResumableSampler, Shuffled, permute
from ddp.data.samples import check_datasets
from ddp.distributed.process_group import DistContext
from ddp.distributed.seeds import derive_seed, random_bits
from processes import on_ranks, train

LARGE = 10**9
SMALL = (1, 2, 3, 5, 31, 32, 33, 1000, 4097)


def permutation(length: int, seed: int = 0) -> numpy.ndarray:
    return permute(numpy.arange(length), length, seed)


def chi_squared(counts: Any) -> float:
    """Per degree of freedom: about 1 if all counts are equal but for chance."""
    counts = numpy.asarray(counts, dtype=float).flatten()
    return float(((counts - counts.mean()) ** 2 / counts.mean()).sum() / (len(counts) - 1))


def test_a_computed_order_has_each_index_once() -> None:
    for length in SMALL:
        assert sorted(permutation(length)) == list(range(length))


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_a_computed_order_has_each_index_once_for_any_number_of_ranks_from_any_position(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "MANY", 1)
    for length, begin in itertools.product((50, 997, 5000), (0, 1, 49)):
        order = [int(index) for index in Shuffled(length, 3).indices(2, 0, length)]
        found = []
        for rank in range(ranks):
            each = ResumableSampler(Numbers(length), rank, ranks, ranks, Shuffled(length, 3))
            each.start_at(2, begin)
            found.append(list(each))
        used = (length - begin) // ranks * ranks
        assert [index for step in zip(*found, strict=True) for index in step] == order[begin : begin + used]
        assert len(set(order)) == length
        others = (Shuffled(length, 3).indices(1, 0, length), Shuffled(length, 4).indices(2, 0, length))
        assert all(other.tolist() != order for other in others), "another epoch, and another seed"


def test_a_computed_order_is_even() -> None:
    """With few rounds, it is not: the figures of two rounds are above 5."""
    where = numpy.zeros((16, 16))
    for seed in range(2000):
        where[numpy.arange(16), permutation(16, seed)] += 1
    assert chi_squared(where) < 1.5
    for length in (100_003, LARGE):
        positions = numpy.arange(min(length, 200_000))
        first, other = (permute(positions, length, seed) for seed in (1, 2))
        steps = numpy.diff(first) % length * 64 // length
        assert chi_squared(numpy.bincount(steps, minlength=64)) < 1.8, "the next index does not follow from the last"
        pairs = first * 16 // length * 16 + other * 16 // length
        assert chi_squared(numpy.bincount(pairs, minlength=256)) < 1.4, "one epoch does not follow from another"
        assert abs(numpy.corrcoef(first, other)[0, 1]) < 0.01
        assert abs(numpy.corrcoef(first, positions)[0, 1]) < 0.01


def test_each_bit_of_an_index_or_a_seed_changes_half_of_the_random_bits() -> None:
    numbers = numpy.arange(1000, dtype=numpy.int64)
    assert random_bits(5, torch.from_numpy(numbers)).tolist() == random_bits(5, numbers).tolist()
    for bit in range(0, 62, 3):
        for changed in (random_bits(5, numbers ^ (1 << bit)), random_bits(5 ^ (1 << bit), numbers)):
            flipped = numpy.unpackbits((random_bits(5, numbers) ^ changed).view(numpy.uint8).reshape(1000, 8), axis=1)
            assert (abs(flipped.mean(0) - 0.5) < 0.08).all(), bit


def test_a_billion_samples_are_read_from_any_position_without_a_table() -> None:
    order = Shuffled(LARGE, 0)
    tracemalloc.start()
    for start in (0, LARGE // 2, LARGE - 100):
        assert len(set(order.indices(7, start, start + 100).tolist())) == 100
    assert tracemalloc.get_traced_memory()[1] < 1_000_000 and order.order.numel() == 0
    tracemalloc.stop()


def test_a_run_of_an_earlier_version_goes_on_in_its_own_order(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoints have no number of the order, which was stored then."""
    monkeypatch.setattr(sampler, "MANY", 1)
    weights = []
    for earlier in (True, False):
        whole, resumed = tmp_path / f"whole {earlier}", tmp_path / f"resumed {earlier}"
        words = ["--dataset", "synthetic", "--epochs", 2, "--batch-size", 64, "--output-dir"]
        with monkeypatch.context() as patch:
            if earlier:
                patch.setattr(Shuffled.__init__, "__defaults__", (1,))
                patch.setattr(TrainLoader, "order_facts", lambda loader: {"sampler": "Shuffled"})
            train(1, *words, whole)
            train(1, *words, resumed, "--max-steps", 4)
        train(1, *words, resumed)
        weights += [weights_and_momentum(newest(output)) for output in (whole, resumed)]
        assert storage.read(newest(resumed))["dataset"]["order"] == (1 if earlier else 2)
    assert weights[0] == weights[1] != weights[2] == weights[3]


def options(*words: Any) -> Config:
    return Config.parse(["--device=cpu", "--workers=0", *map(str, words)])


class Numbers(Dataset):
    """Samples that are their own indices."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, -1

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([float(self.epoch)]), index

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Weighted:
    """Draws with replacement. Epochs have different lengths, and only a block of the order exists at a time."""

    def __init__(self, weights: Tensor, seed: int = 0) -> None:
        self.weights, self.seed, self.asked = weights, seed, list[tuple[int, int]]()

    def length(self, epoch: int) -> int:
        return 20_000 if epoch == 0 else 44

    def indices(self, epoch: int, start: int, stop: int) -> Tensor:
        self.asked.append((start, stop))
        draws = torch.empty(0, dtype=torch.int64)
        for position in range(start, stop):
            generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch, position))
            draws = torch.cat([draws, torch.multinomial(self.weights, 1, generator=generator)])
        return draws


def read(world_size: int, epoch: int, consumed: int, steps: int, batch_size: int) -> list[int]:
    """The samples of some steps, in the order of the sampler."""

    def trained_on(ctx: DistContext) -> list[int]:
        loader = TrainLoader(Numbers(30), options("--batch-size", batch_size), ctx, Weighted(torch.arange(30.0)))
        found: list[int] = []
        for number, batches in enumerate(loader.steps(epoch, consumed)):
            if number == steps:
                break
            found += [index for _, targets in batches for index in targets.tolist()]
        return found

    ranks = on_ranks(world_size, trained_on, "--device=cpu")
    return [index for position in zip(*ranks, strict=True) for index in position]


def test_the_order_is_the_samplers_from_any_position_and_for_any_number_of_processes() -> None:
    sampler = Weighted(torch.arange(30.0))
    for epoch, consumed, total in ((0, 0, 48), (0, 1200, 24), (1, 24, 12)):
        expected = sampler.indices(epoch, consumed, consumed + total).tolist()
        for world_size in (1, 2, 3):
            assert read(world_size, epoch, consumed, total // 12, 12 // world_size) == expected
    assert len(read(2, 1, 0, 100, 6)) == 36, "44 positions hold 3 steps of 12"
    assert 0 not in sampler.indices(0, 0, 200).tolist(), "its weight is 0"


def test_the_order_is_read_in_blocks() -> None:
    """An order of a billion samples need not exist as a list."""

    def asked(ctx: DistContext) -> list[tuple[int, int]]:
        sampler = Weighted(torch.ones(30))
        loader = TrainLoader(Numbers(30), options("--batch-size", 8), ctx, sampler)
        next(next(loader.steps(0, 16)))
        return sampler.asked

    (blocks,) = on_ranks(1, asked)
    first = [(16, 24), (16, 20), (20, 24)]
    assert blocks[:3] == first and blocks[3:] == [(16, 16 + 4096)], "the first step, its halves, then blocks"


class Bad:
    """Returns what `make` makes of the positions."""

    def __init__(self, make: Any, length: Any = 24) -> None:
        self.make, self.positions = make, length

    def length(self, epoch: int) -> int:
        return self.positions

    def indices(self, epoch: int, start: int, stop: int) -> Any:
        return self.make(range(start, stop))


GENERATOR = torch.Generator().manual_seed(0)
REFUSED = {
    "sampler Bad returned 7 indices for the positions 0 to 8: return one for each": lambda found: list(found)[:-1],
    "sampler Bad returned the index 30, but there are 30 samples": lambda found: [30, *list(found)[1:]],
    "sampler Bad returned the index -1, but there are 30 samples": lambda found: torch.tensor([-1, *list(found)[1:]]),
    "sampler Bad returned two different orders of one epoch: let a sample depend on (epoch, position) only": (
        lambda found: torch.randint(30, (len(found),), generator=GENERATOR)
    ),
    "sampler Bad returned two different orders of one epoch: let a sample depend on": (
        lambda found: torch.randint(30, (len(found),), generator=torch.Generator().manual_seed(found.start))
    ),
    "sampler Bad returned different orders on the ranks: let a sample depend on (epoch, position) only": (
        lambda found: [torch.distributed.get_rank() for _ in found]
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_wrong_sampler_is_refused(message: str) -> None:
    def raised(ctx: DistContext) -> str:
        loader = TrainLoader(Numbers(30), options("--batch-size", 4), ctx, Bad(REFUSED[message]))
        with pytest.raises(UsageError) as error:
            next(loader.steps(0))
        return str(error.value)

    for text in on_ranks(2, raised, "--device=cpu"):
        assert text.startswith(message), text


def test_a_length_that_is_no_whole_number_is_refused() -> None:
    def raised(ctx: DistContext) -> str:
        with pytest.raises(UsageError) as error:
            next(TrainLoader(Numbers(30), options("--batch-size", 4), ctx, Bad(list, 0.5 * 48)).steps(0))
        return str(error.value)

    assert on_ranks(1, raised, "--device=cpu") == ["sampler Bad.length(0) is 24.0, and no whole number"]
    four = options("--batch-size", 4)
    steps = lambda ctx: [*TrainLoader(Numbers(30), four, ctx, Bad(list, torch.tensor(24))).steps(0)]  # noqa: E731
    assert on_ranks(1, lambda ctx: len(steps(ctx)), "--device=cpu") == [6]


def test_an_epoch_without_a_step_is_refused() -> None:
    def raised(ctx: DistContext) -> str:
        with pytest.raises(UsageError) as error:
            TrainLoader(Numbers(30), options("--batch-size", 25), ctx, Bad(list))
        return str(error.value)

    assert on_ranks(1, raised)[0].startswith("24 training samples do not fill one step of 25 (1 process x --batch-size")


def test_a_sampler_in_another_place_is_refused() -> None:
    """A dataset's own would be ignored; so would one that replaces the loader's."""
    place = "return Datasets(train, val, test, sampler) from load_datasets, as docs/data.md shows"
    plain, hooks = Numbers(30), type("Hooks", (Numbers, BatchDataset), {})(30)
    for dataset in (plain, Subset(plain, range(8)), hooks):
        for name in ("sampler", "batch_sampler"):
            owner = getattr(dataset, "dataset", dataset)
            setattr(owner, name, WeightedRandomSampler([1.0] * 30, 30))
            with pytest.raises(UsageError, match="would be ignored") as raised:
                hooks_of(dataset)
            assert str(raised.value) == f"{type(owner).__name__}.{name} would be ignored: {place}"
            delattr(owner, name)
    with pytest.raises(UsageError, match=r"\(WeightedRandomSampler\) lacks indices\(epoch, start, stop\) or length"):
        check_datasets(Datasets(plain, sampler=WeightedRandomSampler([1.0] * 30, 30)), options())

    def raised_by_steps(ctx: DistContext) -> str:
        loader: Any = TrainLoader(Numbers(30), options("--batch-size", 4), ctx)
        loader.sampler = WeightedRandomSampler([1.0] * 30, 30)
        with pytest.raises(UsageError) as error:
            next(loader.steps(0))
        return str(error.value)

    assert on_ranks(1, raised_by_steps) == [f"train_loader.sampler cannot be replaced: {place}"]


def test_the_epoch_reaches_the_dataset() -> None:
    """With and without workers, and through the datasets that wrap or join it."""

    def epochs(ctx: DistContext) -> list[list[float]]:
        found = []
        joined = ConcatDataset([Subset(Numbers(8), range(8)), Numbers(8)])
        for workers in (0, 1):
            loader = TrainLoader(joined, options("--batch-size", 16, "--workers", workers), ctx)
            for epoch in (0, 3):
                ((inputs, _),) = next(loader.steps(epoch))
                found.append(inputs.unique().tolist())
        return found

    assert on_ranks(1, epochs) == [[[0.0], [3.0]] * 2]


class Growing:
    """A curriculum: the first third of the samples in epoch 0, then two thirds, then all."""

    def __init__(self, samples: int, seed: int) -> None:
        self.samples, self.seed = samples, seed

    def length(self, epoch: int) -> int:
        return self.samples * min(epoch + 1, 3) // 3

    def indices(self, epoch: int, start: int, stop: int) -> Iterable[int]:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
        return torch.randperm(self.length(epoch), generator=generator)[start:stop].tolist()


def test_a_run_with_epochs_of_different_lengths_resumes_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And names the sampler, if another one resumes it."""

    def load_datasets(config: Config) -> Datasets:
        found = load(config)
        return replace(found, sampler=Growing(len(found.train), config.seed))

    load = data.load_datasets
    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 192, "val": 51})
    monkeypatch.setattr(main, "load_datasets", load_datasets)
    given = ("--dataset=synthetic", "--device=cpu", "--batch-size=8", "--epochs=3", "--log-every=1")
    whole = train(2, *given, "--output-dir", tmp_path / "whole")
    assert "4 steps per epoch" in whole
    for steps in (6, 9, 24):
        output = train(2, *given, "--max-steps", steps, "--output-dir", tmp_path / "parts")
    assert "step 24/24" in output
    assert weights_and_momentum(tmp_path / "whole") == weights_and_momentum(tmp_path / "parts")
    found = [line["epoch"] for line in lines(tmp_path / "whole", "train")]
    assert found == [1] * 4 + [2] * 8 + [3] * 12
    rates = [line["lr"] for line in lines(tmp_path / "whole", "train")]
    assert rates[3] == pytest.approx(0.03 * 56 / 64) and rates[-1] < 1e-4, "the schedule follows the epochs"
    train(3, *given, "--epochs=4", "--max-steps=26", "--output-dir", tmp_path / "parts")
    assert storage.read(newest(tmp_path / "parts"))["samples_consumed"] == 2 * 24
    monkeypatch.setattr(main, "load_datasets", load)
    refused = train(2, *given, "--epochs=5", "--output-dir", tmp_path / "parts", code=4)
    assert "the sampler was Growing, is Shuffled" in refused


def test_evaluations_have_batches_of_their_own_size() -> None:
    """A loss that compares the samples of a batch depends on it. By default, data in memory are read many at a time."""

    def sizes(ctx: DistContext) -> list[list[int]]:
        val = data.load_datasets(Config.parse(["--dataset=synthetic"])).val
        found = []
        for words in ((), ("--eval-batch-size", 48)):
            batches = EvalLoader(Subset(val, range(100)), options("--batch-size", 16, *words), ctx)
            found.append([len(targets) for _, targets in batches])
        return found

    assert on_ranks(1, sizes) == [[[100], [48, 48, 4]]]
