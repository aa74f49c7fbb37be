"""Which rank gets which sample: each one once, for any number of processes, wherever the epoch is resumed."""

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from processes import on_ranks
from torch.utils.data import Dataset, DistributedSampler

from config import Config
from ddp.core.errors import UsageError
from ddp.data.loader import EvalLoader, TrainLoader
from ddp.data.sampler import ResumableSampler, Shuffled
from ddp.distributed.process_group import DistContext
from ddp.training.meter import Meter


class Numbers(Dataset):
    """The plainest dataset: no more than its samples, one at a time: (input [2], its number)."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return torch.tensor([float(index), 1.0]), index


class Noise(Numbers):
    """Samples that hold random numbers of every kind."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([random.random(), numpy.random.rand(), torch.rand(()).item()]), index


def options(*words: Any) -> Config:
    return Config.parse([str(word) for word in words])


def sampled(samples: int, ranks: int, global_batch: int, epoch: int, samples_consumed: int, seed: int = 0) -> Any:
    """Which samples each rank gets after the first `samples_consumed` ones."""
    found = []
    for rank in range(ranks):
        sampler = ResumableSampler(Numbers(samples), rank, ranks, global_batch, Shuffled(samples, seed))
        sampler.start_at(epoch, samples_consumed)
        found.append(list(sampler))
        assert len(sampler) == len(found[-1]) == sampler.steps_left(epoch, samples_consumed) * global_batch // ranks
    return found


@pytest.mark.parametrize(("samples", "ranks", "batch"), [(96, 1, 8), (96, 2, 8), (96, 3, 4), (60, 4, 5)])
def test_at_the_start_of_an_epoch_the_order_is_that_of_distributed_sampler(
    samples: int, ranks: int, batch: int
) -> None:
    for rank, epoch in itertools.product(range(ranks), (0, 1, 7)):
        theirs: Any = DistributedSampler(Numbers(samples), ranks, rank, seed=3, drop_last=True)
        theirs.set_epoch(epoch)
        assert sampled(samples, ranks, ranks * batch, epoch, 0, seed=3)[rank] == list(theirs)


def test_all_ranks_get_the_same_number_of_samples_after_any_number_of_them() -> None:
    for samples, ranks, batch in itertools.product((1, 5, 16, 97, 100), (1, 2, 3, 5), (1, 3, 4)):
        for samples_consumed in range(0, samples + 1, 3):
            parts = sampled(samples, ranks, ranks * batch, 1, samples_consumed)
            assert {len(part) for part in parts} == {(samples - samples_consumed) // (ranks * batch) * batch}


def test_after_any_changes_of_the_number_of_processes_no_sample_comes_twice() -> None:
    choose = random.Random(0)
    for _ in range(100):
        samples, samples_consumed, used = choose.randrange(1, 200), 0, []
        for ranks in choose.choices((1, 2, 3, 5, 8), k=3):
            batch = choose.randrange(1, 6)
            parts = sampled(samples, ranks, ranks * batch, 2, samples_consumed)
            left = len(parts[0]) // batch
            steps = left if ranks == 1 else choose.randint(0, left)
            used += [index for part in parts for index in part[: steps * batch]]
            samples_consumed += steps * ranks * batch
        assert len(used) == len(set(used)) == samples_consumed
        assert set(used) == set(sampled(samples, 1, 1, 2, 0)[0][:samples_consumed])  # only the last ones are missing


def test_the_loader_resumes_from_2_processes_to_3_then_to_1() -> None:
    """101 samples, 4 a process: 3 steps of 8, 2 of 12, 13 of 4 leave 1, which fills no step."""

    def part(ranks: int, samples_consumed: int, steps: int) -> list[int]:
        def trained_on(ctx: DistContext) -> list[int]:
            loader = TrainLoader(Numbers(101), options("--batch-size=4", "--workers=0"), ctx)
            batches = itertools.chain.from_iterable(itertools.islice(loader.steps(3, samples_consumed), steps))
            return [int(number) for _, targets in batches for number in targets]

        return [number for rank in on_ranks(ranks, trained_on, "--device=cpu") for number in rank]

    used = part(2, 0, 3) + part(3, 24, 2) + part(1, 48, 1000)
    assert len(used) == len(set(used)) == 100
    assert set(used) <= set(range(101))


def metrics_of(totals: dict[str, Any]) -> dict[str, Any]:
    return {"mean": totals["sum"].item() / totals["count"].item(), "numbers": totals["numbers"]}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_ranks_take_the_same_steps_and_evaluate_each_sample_once(ranks: int) -> None:
    """Every rank takes part in a sum after each batch: one batch more on one of them, and it would wait until the end.

    The metrics of an evaluation are those of all samples; a list has one entry per sample, in their order.
    """

    def read(ctx: DistContext) -> list[list[int]]:
        for samples, batch, passes in itertools.product((1, 2, 5, 12, 31), (1, 2, 5), (1, 2)):
            # Not by options: a project's `check` may refuse some of these sizes.
            config = replace(options("--workers=0"), batch_size=batch, grad_accum_steps=passes)
            whole_steps = samples // (ranks * batch * passes)
            if whole_steps == 0:
                with pytest.raises(UsageError, match="do not fill one step"):
                    TrainLoader(Numbers(samples), config, ctx)
                continue
            taken = 0
            for step in TrainLoader(Numbers(samples), config, ctx).steps(0):
                for _, targets in step:
                    assert ctx.sum(torch.tensor([len(targets), taken])).tolist() == [batch * ranks, taken * ranks]
                    taken += 1
            assert taken == whole_steps * passes
        found = []
        for samples, workers in ((1, 0), (7, 0), (100, 2), (101, 2)):
            meter, mine = Meter(ctx, metrics_of), []
            for _, targets in EvalLoader(Numbers(samples), options("--batch-size=8", "--workers", workers), ctx):
                meter.add({"sum": targets.sum(), "count": len(targets), "numbers": targets.tolist()})
                mine += targets.tolist()
            assert meter.take() == {"mean": (samples - 1) / 2, "numbers": list(range(samples))}
            found.append(mine)
        return found

    on_each = on_ranks(ranks, read, "--device=cpu")
    for case, samples in enumerate((1, 7, 100, 101)):
        assert sorted(number for rank in on_each for number in rank[case]) == list(range(samples))


def states() -> list[Any]:
    """Of all generators."""
    return [random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()]


@pytest.mark.parametrize("workers", [0, 2])
def test_random_numbers_follow_the_sample_and_the_epoch(workers: int) -> None:
    """With any number of processes and workers; and the generators of the process itself are left alone."""

    def of_rank(ctx: DistContext) -> list[Any]:
        """For each of two epochs, the numbers in each sample of this rank."""
        before = states()
        loader = TrainLoader(Noise(16), options("--batch-size=2", "--workers", workers), ctx)
        found = [
            {int(i): x.tolist() for step in loader.steps(epoch) for xs, ys in step for x, i in zip(xs, ys, strict=True)}
            for epoch in (2, 3)
        ]
        assert before == states()
        return found

    (alone,) = on_ranks(1, of_rank, "--device=cpu")
    assert len({tuple(numbers) for epoch in alone for numbers in epoch.values()}) == 32
    two = on_ranks(2, of_rank, "--device=cpu")
    assert [{**two[0][epoch], **two[1][epoch]} for epoch in (0, 1)] == alone
