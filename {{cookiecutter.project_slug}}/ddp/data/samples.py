"""What load_datasets returned: check that it can be read by index, and that each index is the same sample everywhere.

A record of some samples of each set is compared on all ranks, and with that in the checkpoint when a run resumes. They
are read in a DataLoader worker, so that no file of a dataset is open here when the workers of the run are forked.
"""

import dataclasses
import hashlib
import json
import multiprocessing
import os
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ddp.core.errors import SetupError, UsageError, UserError, first_few
from ddp.core.run_config import RunConfig
from ddp.data.dataset import INTEGERS, BatchDataset, Datasets, attributes, classes_of, held_by, hooks_of, kind
from ddp.data.reader import SeededReader
from ddp.data.workers import DataWait, Workers, start_workers
from ddp.distributed.process_group import DistContext
from ddp.distributed.seeds import derive_seed, random_bits
from ddp.distributed.tensors import checksum, leaves, strided

PARTS = ("training", "validation", "test")
BUCKETS = 256  # of keys, with the number and the sum of those in each: a key that was added shows
RECORDED = 8  # samples of each set, chosen by the seed, as well as the first and the last one
FEW = 16  # numbers of a sample that are compared one by one; of more, the means of BLOCKS
BLOCKS = 8
LONGEST, LONGEST_TEXT = 1 << 18, 100  # values of a sample that are read for the means; characters that are stored
TOLERANCES = {True: 1e-3, False: 0.02}  # of few numbers, and of means: decoders and processors differ by less
Record = dict[str, Any]
Records = dict[str, Record]  # by set: training, validation, test
REMEDY = (
    "load the same data in the same order on all ranks: do not choose samples by RANK, which the loader does; seed a "
    "split or shuffle of your own; sort lists of files"
)


def check_datasets(found: Any, config: RunConfig) -> Datasets:
    """Check what load_datasets returned: no set is empty or a stream. Raises UsageError or SetupError."""
    if not isinstance(found, Datasets) or found.train is None:
        returned = "no training set" if isinstance(found, Datasets) else kind(found)
        remedy = "return Datasets(train, val, test), from ddp.data.dataset; val and test may be None"
        raise UsageError(f"load_datasets in data.py returned {returned}: {remedy}")
    if config.evaluate and found.val is None and found.test is None:
        raise UsageError("--evaluate: there is neither a validation set nor a test set")
    if config.patience is not None and found.val is None and not config.evaluate:
        raise UsageError("--patience needs a validation set: add one in data.py, or remove --patience")
    if found.sampler is not None and not (hasattr(found.sampler, "indices") and hasattr(found.sampler, "length")):
        returned = f"the sampler that load_datasets returned ({type(found.sampler).__name__})"
        raise UsageError(f"{returned} lacks indices(epoch, start, stop) or length(epoch): see docs/data.md")
    for part, dataset in _sets(found).items():
        held = [*dataset.values()] if isinstance(dataset, Mapping) else dataset
        if isinstance(held, list | tuple) and held and isinstance(held[0], Dataset):
            remedy = "return one; main.py may evaluate others before run.end_epoch, as docs/state.md says"
            raise UsageError(f"the {part} data are {kind(dataset)}, which holds data sets: {remedy}")
        indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        if isinstance(dataset, IterableDataset) or not indexed:
            stream = f"the {part} data ({type(dataset).__name__}) are a stream, which cannot be read by index"
            raise UsageError(f"{stream}: give them __len__ and __getitem__, as docs/data.md does for tar files")
        if len(dataset) == 0:
            raise SetupError(f"there are no {part} samples: check --data-dir")
        if not hasattr(dataset, "classes") and hasattr(dataset, "__dict__") and (classes := classes_of(dataset)):
            dataset.classes = classes  # of what it wraps, for build_model
        _compare_with_training(dataset, found.train, part)
    found.records = _start(_Recorder(_sets(found), config.seed), config)
    return found


def _compare_with_training(dataset: Any, train_set: Any, part: str) -> None:
    """Raise UsageError if a label is another class in this set, or if the training would change what it returns.

    A set may have other classes altogether, to measure how embeddings tell them apart.
    """
    ours, theirs = ([str(name) for name in classes_of(each)] for each in (dataset, train_set))
    if ours != theirs and set(ours) & set(theirs):
        what = first_few(sorted(set(ours) ^ set(theirs))) or "their order"
        raise UsageError(f"the training and the {part} data differ in their `classes`: {what}: give both the same list")
    inside = [{id(each): each for each in (data, *held_by(data))} for data in (dataset, train_set)]
    for each in [inside[0][key] for key in inside[0].keys() & inside[1].keys()] if part != PARTS[0] else ():
        if callable(getattr(each, "set_epoch", None)):
            shared = f"the training and the {part} data share a {type(each).__name__}, which has set_epoch()"
            raise UsageError(f"{shared}: give the {part} data their own, as by copy.deepcopy()")


def _sets(datasets: Datasets) -> dict[str, Any]:
    return {part: each for part, each in zip(PARTS, datasets[:], strict=True) if each is not None}


class _Recorder(Dataset):
    """Reads the record of each set: how many samples it has, and what some of them are, by their keys."""

    def __init__(self, sets: Mapping[str, Any], seed: int) -> None:
        self.sets, self.seed = list(sets.values()), seed

    def __len__(self) -> int:
        return len(self.sets)

    def __getitem__(self, number: int) -> str:
        dataset, count = self.sets[number], len(self.sets[number])
        keys: Any = dataset.keys() if isinstance(dataset, BatchDataset) else None
        if keys is None:
            digest, buckets, chosen = "", [], {derive_seed(self.seed, each) % count for each in range(RECORDED)}
        else:  # the largest of random numbers that belong to the keys: the same ones if others are removed
            if isinstance(keys, list | tuple) and all(isinstance(key, int) for key in keys):
                keys = numpy.array([key % (1 << 64) for key in keys], numpy.uint64)  # with or without a sign
            keys = numpy.asarray(keys)
            if keys.dtype.kind not in "iu" or keys.shape != (count,):
                wanted = f"a number of 64 bits for each of {count:,} samples, such as a hash of its name by hashlib"
                raise UsageError(f"{type(dataset).__name__}.keys() must return {wanted}")
            wide = numpy.int64 if keys.dtype.kind == "i" else numpy.uint64
            keys = torch.from_numpy(keys.astype(wide).view(numpy.int64))
            digest, places = hashlib.sha256(keys.numpy().data).hexdigest(), keys % BUCKETS
            sums = torch.zeros(BUCKETS, dtype=torch.int64).index_add(0, places, keys)
            buckets = [*zip(places.bincount(minlength=BUCKETS).tolist(), sums.tolist(), strict=True)]
            chosen = {*random_bits(derive_seed(self.seed), keys).topk(min(RECORDED, count)).indices.tolist()}
        readers = [SeededReader(dataset, each, self.seed, epoch=0) for each in (hooks_of(dataset).collate, list)]
        samples = {}
        for index in sorted(chosen | {0, count - 1}):
            try:
                batch = readers[0].__getitems__([index])
            except UserError:
                raise
            except Exception:  # it may need several samples
                batch = readers[1].__getitems__([index])
            parts = [_summary(part) for part in _parts(batch)]
            samples[int(keys[index]) if digest else index] = [index, parts]
        return json.dumps({"count": count, "keys": digest, "buckets": buckets, "samples": samples})


def _start(recorder: _Recorder, config: RunConfig) -> Workers:
    """Start to read the records of all sets; with --workers 0, files are read in this process, as in the run."""
    forks = multiprocessing.get_start_method() == "fork"  # otherwise data in memory would have to be sent
    if not forks:  # read copies, in which no file is open: the run has to send the sets to its workers
        sets = recorder.sets
        recorder.sets = [each if hooks_of(each).in_memory else pickle.loads(pickle.dumps(each)) for each in sets]
    generator = torch.Generator()  # otherwise iter() would draw from the global one
    in_memory = all(hooks_of(each).in_memory for each in recorder.sets)
    count = int(forks and (in_memory or config.workers != 0))
    return start_workers(DataLoader(recorder, None, num_workers=count, generator=generator))


def _parts(tree: Any, depth: int = 4) -> Iterator[Any]:
    """The parts of a batch, also those of a dataclass, an object that moves to a device, a sparse or nested tensor."""
    for part in leaves(tree):
        is_tensor = isinstance(part, torch.Tensor)
        if is_tensor and (part.layout != torch.strided or part.is_nested):
            yield from strided(part)
        else:
            is_batch = depth and not is_tensor and (dataclasses.is_dataclass(part) or hasattr(part, "to"))
            yield from _parts(inside, depth - 1) if is_batch and (inside := attributes(part)) else [part]


def _summary(part: Any) -> tuple[str, list[float]]:
    """What is compared exactly of a part of a sample, and what roughly: the last number is the scale of the others."""
    if isinstance(part, float):
        part = torch.tensor(part)
    if isinstance(part, numpy.ndarray | numpy.generic) and part.dtype.kind in "biufc":
        wide = {"f": "float64", "c": "complex128"}.get(part.dtype.kind, part.dtype.newbyteorder("="))
        part = torch.from_numpy(numpy.ascontiguousarray(part, wide))
    if not isinstance(part, torch.Tensor) or part.is_quantized:
        if isinstance(part, str) and os.path.isabs(part):  # --data-dir may be another one
            part = os.path.basename(part)
        text = repr(part) if isinstance(part, str | bytes | int | None) else type(part).__name__
        return text if len(text) < LONGEST_TEXT else hashlib.sha256(text.encode()).hexdigest(), []
    if part.dtype == torch.bool or (part.dtype in INTEGERS and (part.dtype != torch.uint8 or part.numel() <= FEW)):
        return str(int(part) if part.numel() == 1 else f"{list(part.shape)} {checksum(part)}"), []
    flat = (torch.view_as_real(part.resolve_conj()) if part.is_complex() else part).detach().flatten()
    values = flat[:: 1 + len(flat) // LONGEST].double()
    few = len(values) <= FEW
    means = [block.mean().item() for block in values.chunk(FEW if few else BLOCKS) if len(block)]
    points = values[:0] if few else values[:: len(values) // FEW][:FEW] / 10  # the means of sound are all 0
    scale = values.std(correction=0).item() + max(map(abs, means)) if means else 0.0
    return f"{part.dtype} {list(part.shape)}", [*means, *points.tolist(), scale * TOLERANCES[few]]


def _is_same(one: list[Any], other: list[Any]) -> bool:
    """Whether two samples of a record are the same. Each may have its own index as a part."""
    (index, parts), (other_index, others) = one, other
    return len(parts) == len(others) and all(
        (text == theirs or (text, theirs) == (str(index), str(other_index)))
        and len(numbers) == len(their_numbers)
        and numpy.allclose(numbers[:-1], their_numbers[:-1], 0, max([0, *numbers[-1:], *their_numbers[-1:]]), True)
        for (text, numbers), (theirs, their_numbers) in zip(parts, others, strict=True)
    )


def _different(one: Record, other: Record) -> list[int]:
    """The indices in `one` of the recorded samples that are others in `other`."""
    common = one["samples"].keys() & other["samples"].keys()
    return sorted(one["samples"][key][0] for key in common if not _is_same(one["samples"][key], other["samples"][key]))


def compare_ranks(datasets: Datasets, config: RunConfig, ctx: DistContext) -> Records:
    """The records of the sets. Raises UsageError unless they are the same on all ranks. Call on every rank."""
    sets, (workers, datasets.records) = _sets(datasets), (datasets.records, None)
    try:
        texts = list(DataWait(config, ctx, workers))
    except UserError:
        raise
    except Exception as error:
        recorder = _Recorder(sets, config.seed)
        on_gpu = "CUDA" in str(error)  # data that no other process can read; others may need the process group
        here = Workers(recorder[number] for number in range(len(sets)))
        texts = list(DataWait(config, ctx, here if on_gpu else _start(recorder, config)))
    ours = dict(zip(sets, map(json.loads, texts), strict=True))
    first, found = ctx.on_main(lambda: ours), ""
    for part, record in ours.items():
        other = first.get(part, record)
        if record["count"] == other["count"] and (record["keys"] != other["keys"] or _different(record, other)):
            indices = _different(record, other)
            what = f"{part} sample {indices[0]}" if indices else f"a {part} sample"
            found = found or f"{what} on rank {ctx.rank} is another one than on rank 0"
    if text := next(filter(None, ctx.gather(found)), ""):
        raise UsageError(f"{text}: {REMEDY}")
    return ours


def _has_new_keys(one: Record, other: Record) -> bool:
    """Whether a bucket of keys has more than it had, or others."""
    pairs = zip(one["buckets"], other["buckets"], strict=True)
    return any(now > was or (now == was and a != b) for (now, a), (was, b) in pairs)


def changes(ours: Records, theirs: Records) -> tuple[list[str], list[str]]:
    """How the data differ from those of a checkpoint, as texts; and what was only removed from them."""
    changed, removed = [], []
    for part in [part for part in ours if part in theirs]:
        one, other = ours[part], theirs[part]
        fewer = other["count"] - one["count"]
        missing = len(other["samples"].keys() - one["samples"].keys())
        indices, keyed = _different(one, other), one["keys"] and other["keys"]
        keyed = keyed and not _has_new_keys(one, other)
        if fewer > 0 and keyed and not indices and missing <= min(fewer, len(other["samples"]) - 1):
            removed.append(f"{fewer:,} of {other['count']:,} {part} samples")
        elif fewer:
            changed.append(f"{part} samples were {other['count']:,}, are {one['count']:,}")
        elif indices:
            changed.append(f"{part} sample {indices[0]:,} is another one")
        elif one["keys"] != other["keys"]:
            changed.append(f"the {part} samples are others, or in another order")
    return changed, removed
