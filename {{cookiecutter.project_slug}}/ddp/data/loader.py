"""The batches of this rank: TrainLoader for optimizer steps, EvalLoader for evaluations.

BatchDataset in dataset.py lists the steps of a batch, from the disk to the model.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import BatchSampler, DataLoader

from ddp.core.errors import PeerLost, UsageError, plural
from ddp.core.host import available_cores
from ddp.core.run_config import RunConfig
from ddp.data.dataset import SAMPLER_REMEDY, BatchDataset, check_batch, check_outputs, data_name, hooks_of, set_epoch
from ddp.data.reader import SeededReader, hand_over
from ddp.data.sampler import ResumableSampler, Shuffled
from ddp.data.workers import DataWait, start_workers
from ddp.distributed.process_group import DistContext
from ddp.distributed.seeds import derive_seed, keep_random_state, random_states, seed_step
from ddp.distributed.stop_sync import StopRequested
from ddp.distributed.tensors import Streams, leaves, map_tensors

ALIGNMENT = 64  # bytes: torch starts new tensors at multiples of it
MAX_WORKERS = 8  # per process, unless --workers asks for more
EVALUATION = -2  # takes the place of the epoch, and of the rank in seeds


class _Loader:
    """Reads batches from any torch Dataset. ddp.data.dataset.BatchDataset describes what else a dataset can do."""

    def __init__(self, dataset: Any, part: str, config: RunConfig, ctx: DistContext) -> None:
        self.dataset, self.hooks, self.config, self.ctx = dataset, hooks_of(dataset), config, ctx
        self.length, self.checked = len(dataset), False  # whether a batch of the training was prepared
        # Otherwise ranks would take different numbers of steps, and wait for each other.
        ctx.check_same({f"the number of {part} samples": self.length})
        self.chunk_size = self._whole_batches(self.hooks.chunk_size)
        default = 0 if self.hooks.in_memory else max(1, min(MAX_WORKERS, available_cores() // ctx.local_world_size))
        self.workers = 0 if self.length == 0 else default if config.workers is None else config.workers
        if self.workers == 0 and ctx.device.type == "cuda":  # DataLoader workers could not reach data on the GPU
            self.hooks.to(ctx.device)

    def _whole_batches(self, samples: int) -> int:
        return self.config.batch_size * max(1, samples // self.config.batch_size)

    def reader(self, epoch: int) -> SeededReader:
        """What reads and collates the samples of an epoch, in each DataLoader worker."""
        return SeededReader(self.dataset, self.hooks.collate, self.config.seed, epoch)

    def _chunks(self, indices: Any, epoch: int) -> Iterator[Any]:
        """Prepared batches of the samples in each of `indices`, on the device. Raises PeerLost if some do not come."""
        loader = DataLoader(
            self.reader(epoch),
            batch_sampler=indices,
            num_workers=self.workers,
            collate_fn=hand_over,
            pin_memory=self.ctx.device.type == "cuda",
            generator=torch.Generator(),  # otherwise iter() would draw from the global one
            persistent_workers=False,  # True would keep the order of an earlier epoch after a resume
        )
        missing = len(indices)
        workers = start_workers(loader)  # and iter(loader)
        watched = DataWait(self.config, self.ctx, workers)  # the same batches; it ends a run that waits too long
        for chunk in upload(watched, self.ctx.streams):  # move
            missing -= 1
            if epoch == EVALUATION:
                yield self.hooks.prepare(chunk)  # prepare
                continue
            before = None if self.checked or self.chunk_size == self.config.batch_size else random_states()
            chunk = self.hooks.prepare(self.hooks.augment(chunk, epoch))  # augment, prepare
            if before is not None and before != random_states():
                reason = (
                    f"{data_name(self.dataset)}: augment or prepare draws random numbers for several batches at once"
                )
                remedy = "use mix, or derive_seed, as docs/data.md says; set up in __init__ what is made once"
                raise UsageError(f"{reason}: {remedy}")
            self.checked = True
            yield chunk
        if missing:
            raise PeerLost(f"the DataLoader of rank {self.ctx.rank} lost {missing} of {len(indices)} batches")


class Step(Iterator[Any]):
    """The batches of one optimizer step, each once. Raises UsageError if they are read again."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.unread, self.ended = iter(batches), False

    def __iter__(self) -> Iterator[Any]:
        if self.ended:  # a second loop would compute no gradient, and train nothing
            raise UsageError("the batches of a step were read already: write batches = list(batches) to use them twice")
        return self

    def __next__(self) -> Any:
        for batch in self.unread:
            return batch
        self.ended = True
        raise StopIteration

    def rest(self) -> list[Any]:
        """Those that were not read yet; they stay to be read."""
        rest = list(self.unread)
        self.unread = iter(rest)
        return rest


class TrainLoader(_Loader):
    """Batches of this rank, on its device, in an order that depends on (seed, epoch) only.

    `wait_s` adds up the seconds in which the training waited for data.
    """

    def __init__(self, dataset: Any, config: RunConfig, ctx: DistContext, sampler: Any = None) -> None:
        super().__init__(dataset, "training", config, ctx)
        self.chunk_size = self._whole_batches(self.hooks.train_chunk_size or self.hooks.chunk_size)
        self.global_batch = ctx.world_size * config.batch_size * config.grad_accum_steps
        seed = derive_seed(config.seed)  # the epoch is added to it: a plain seed 0 would become seed 1 in epoch 1
        self.order = sampler or Shuffled(self.length, seed)
        self.sampler = ResumableSampler(dataset, ctx.rank, ctx.world_size, self.global_batch, self.order)
        if not config.evaluate:
            self._check_epoch(0)
        self.wait_s = 0.0
        self.classes: int | None = None  # of the labels in the first batch; None before it
        self.example: Any = None  # what example_images made of the first batch, until it is logged

    def order_facts(self) -> dict[str, Any]:
        """What checkpoints hold about the order of the samples."""
        version = self.order.version if isinstance(self.order, Shuffled) else 0  # yours may have another `version`
        return {"sampler": type(self.order).__name__, "order": version}

    def keep_order(self, facts: Mapping[str, Any]) -> None:
        """Go on in the order of a checkpoint: an earlier version of this project shuffled otherwise."""
        if isinstance(self.order, Shuffled):
            self.order.version = facts.get("order", 1)

    def steps_left(self, epoch: int, samples_consumed: int = 0) -> int:
        """Optimizer steps until the end of the epoch. Raises UsageError if the sampler was replaced."""
        if not isinstance(self.sampler, ResumableSampler):
            raise UsageError(f"train_loader.sampler cannot be replaced: {SAMPLER_REMEDY}")
        return self.sampler.steps_left(epoch, samples_consumed)

    def steps(self, epoch: int, samples_consumed: int = 0) -> Iterator["Step"]:
        """For each optimizer step, its --grad-accum-steps batches. Leaves out the first `samples_consumed` samples.

        Call on every rank. Raises UsageError if an owner's sampler does not depend on its arguments alone.
        """
        if self.global_batch != self.ctx.world_size * self.config.batch_size * self.config.grad_accum_steps:
            remedy = "start another run with --init-from for another size"
            raise UsageError(f"config.batch_size or config.grad_accum_steps changed during the training: {remedy}")
        set_epoch(self.dataset, epoch)
        self._check_epoch(epoch)
        if isinstance(self.order, Shuffled) and len(self.dataset) != self.length:
            found = f"the training set had {self.length:,} samples, has {len(self.dataset):,} after set_epoch({epoch})"
            remedy = "keep its length, and return a sampler, whose length(epoch) may change: see docs/data.md"
            raise UsageError(f"{found}: {remedy}")
        self.sampler.start_at(epoch, samples_consumed)
        steps = self.steps_left(epoch, samples_consumed)
        if steps and not isinstance(self.order, Shuffled):
            self.sampler.check_order(self.ctx)
        batches = self._timed(self._batches(epoch, samples_consumed))
        for _ in range(steps):
            self.ctx.work.in_step = False
            yield (step := Step(islice(batches, self.config.grad_accum_steps)))
            step.rest()  # what main.py has left of them
        if epoch + 1 < self.config.epochs:
            self.sampler.first_length(epoch + 1)  # to be compared in that epoch

    def _check_epoch(self, epoch: int) -> None:
        if self.steps_left(epoch) == 0:
            config, processes = self.config, plural(self.ctx.world_size, "process", "es")
            factors = f"{processes} x --batch-size {config.batch_size} x --grad-accum-steps {config.grad_accum_steps}"
            found = f"{self.sampler.length(epoch):,} training samples do not fill one step of {self.global_batch:,}"
            raise UsageError(f"{found} ({factors}): lower one of them")

    def _batches(self, epoch: int, samples_consumed: int) -> Iterator[Any]:
        size, mixes = self.config.batch_size, getattr(self.hooks.mix, "__func__", None) is not BatchDataset.mix
        end = samples_consumed + len(self.sampler) * self.ctx.world_size
        for chunk in self._chunks(BatchSampler(self.sampler, self.chunk_size, drop_last=False), epoch):
            rows = min(self.chunk_size, (end - samples_consumed) // self.ctx.world_size)
            for batch in (chunk,) if self.chunk_size == size else _split(chunk, size, rows):  # split
                if mixes:
                    with keep_random_state():
                        seed_step(derive_seed(self.config.seed, epoch), samples_consumed, self.ctx.rank)
                        batch = self.hooks.mix(*batch)  # mix
                if self.classes is None:
                    self.classes = check_batch(batch, self.dataset)
                    self.example = self.hooks.example_images(batch[0])
                yield batch
                samples_consumed += size * self.ctx.world_size

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self.wait_s += time.perf_counter() - start
            if batch is None:
                return
            self.ctx.work.in_step = True
            yield batch


class EvalLoader(_Loader):
    """Batches of this rank's part of a validation or test set, on its device: each sample on one rank, once, in order.

    part: "val" or "test". A dataset of None has no batches.

    The batches are the same for any number of processes, which take turns. They are not split: an evaluation keeps
    nothing for a backward pass, so it takes chunks as they are.
    """

    def __init__(self, dataset: Any, config: RunConfig, ctx: DistContext, part: str = "val") -> None:
        self.part, self.part_name = part, {"val": "validation"}.get(part, part)
        super().__init__([] if dataset is None else dataset, self.part_name, config, ctx)
        if config.eval_batch_size is not None:
            self.chunk_size = config.eval_batch_size
        # Otherwise ranks that take turns would count some samples twice, and others never.
        ctx.check_same({f"the number of {self.part_name} samples in a batch": self.chunk_size})

    def __iter__(self) -> Iterator[Any]:
        """Call on every rank. Raises StopRequested between two batches if all ranks agree to stop there.

        Not within an epoch: the run would resume after this evaluation, or before a step that it has taken.
        """
        self.ctx.stop_sync.restart()
        self.ctx.work.in_step &= self.ctx.work.in_epoch
        world_size, count = self.ctx.world_size, -(-self.length // self.chunk_size)  # of batches
        # Where all ranks compute a pass together, those that are out of turn read the last batch once more.
        end, work = count + -count % world_size if self.ctx.work.sharded else count, self.ctx.work
        starts = (min(number, count - 1) * self.chunk_size for number in range(self.ctx.rank, end, world_size))
        ours = [range(self.length)[start : start + self.chunk_size] for start in starts]
        with keep_random_state():
            chunks = self._chunks(ours, EVALUATION)
            for number in range(len(ours)):
                # `prepare`, a model or a loss may draw random numbers: the same for any number of processes.
                position = number * world_size + self.ctx.rank
                seed_step(self.config.seed, position, rank=EVALUATION)
                batch = next(chunks)
                if number == 0:
                    check_batch(batch, self.dataset)
                seed_step(self.config.seed, position, rank=EVALUATION)
                work.repeats, work.asked = position >= count, False
                try:
                    yield batch
                finally:
                    repeated, work.repeats = work.repeats, False
                if repeated and not work.asked:
                    what = "this rank repeats a batch of another one, and evaluate() in main.py counts it"
                    raise UsageError(f"{what}: add up with a Meter, or leave out a batch if ctx.work.skip()")
                may_stop = number < count // world_size and not work.in_epoch
                if may_stop and (decision := self.ctx.stop_sync.maybe_sync()):
                    raise StopRequested(decision)


@runtime_checkable
class Movable(Protocol):
    """A tensor, or anything else in a batch that can follow it to its device."""

    def to(self, device: torch.device, *, non_blocking: bool) -> Any: ...


def upload(batches: Iterable[Any], streams: Streams) -> Iterator[Any]:
    """Each of `batches` on the device: its tensors, and everything else that has a method `to`.

    On a GPU one batch ahead: the next one is copied while the device computes with this one. Copies need pinned host
    memory, which a GPU can read by itself.
    """
    ahead: list[tuple[Any, torch.cuda.Event]] = []
    for batch in batches:
        if streams.copies is None:
            yield _move(batch, streams.device, Movable)
            continue
        with torch.cuda.stream(streams.copies):
            ahead.append((_move(batch, streams.device, torch.Tensor), streams.copies.record_event()))
        if len(ahead) > 1:
            yield _receive(*ahead.pop(0), streams.device)
    for last in ahead:
        yield _receive(*last, streams.device)


def _receive(batch: Any, copied: torch.cuda.Event, device: torch.device) -> Any:
    """`batch` for the stream that computes, which waits for the copy; the program does not."""
    current = torch.cuda.current_stream(device)
    current.wait_event(copied)
    # Otherwise the memory could be given to a later copy while this stream still reads it.
    map_tensors(batch, lambda tensor: tensor.record_stream(current))
    return _move(batch, device, Movable)  # tensors are there already


def _move(batch: Any, device: torch.device, kind: Any) -> Any:
    return map_tensors(batch, lambda part: part.to(device, non_blocking=True), kind)


def watch_first_outputs(train_loader: TrainLoader, ddp_model: torch.nn.Module, task: Any) -> None:
    """Compare the outputs for the first training batch with its classes, before a loss fails because of them.

    Not if model.py (task) says OUTPUTS_ARE_CLASSES = False: a model may return embeddings of samples that have labels.
    """
    if not getattr(task, "OUTPUTS_ARE_CLASSES", True):
        return

    def check(model: torch.nn.Module, arguments: Any, outputs: Any) -> None:
        hook.remove()
        check_outputs(outputs, train_loader.classes or 0)

    hook = ddp_model.register_forward_hook(check)


def _split(chunk: Any, batch_size: int, rows: int) -> Iterator[Any]:
    """Cut a chunk into batches. Each starts where a new tensor could: elsewhere, sums may be rounded differently."""
    for part in leaves(chunk):
        if part is not None and not (isinstance(part, torch.Tensor) and part.shape[:1] == (rows,)):
            raise UsageError("a dataset with a chunk_size needs tensors with one row per sample; or leave it at 1")

    def cut(first: int, part: torch.Tensor) -> torch.Tensor:
        batch = part[first : first + batch_size]
        return batch if batch.data_ptr() % ALIGNMENT == 0 else batch.clone()

    for first in range(0, rows, batch_size):
        yield map_tensors(chunk, partial(cut, first))
