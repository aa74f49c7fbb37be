"""Save and resume a run: the parts passed to `resume`, and the TrainState."""

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ddp.checkpoint import storage
from ddp.checkpoint.reuse import warn_of_other_split
from ddp.checkpoint.state import (
    FixedShapes,
    TrainState,
    check_fields,
    check_parts,
    check_weights,
    data_differences,
    group_sizes,
    keep_dtypes,
    run_differences,
    scale_change,
    weights_of_optimizers,
)
from ddp.checkpoint.storage import CheckpointDirectory, InvalidCheckpoint, read_on_main
from ddp.core.errors import CheckpointError, Diverged, UsageError, differences, first_few, plural
from ddp.core.files import hash_source_files
from ddp.core.parts import WriteRest
from ddp.core.process_exit import process_exit
from ddp.core.run_config import RunConfig
from ddp.core.threads import BackgroundJob
from ddp.data.dataset import BatchDataset, Datasets, describe, with_wrapped
from ddp.data.loader import TrainLoader
from ddp.data.samples import Records, compare_ranks
from ddp.distributed.process_group import DistContext
from ddp.distributed.tensors import check_state, checksum, digest, is_split, local, named_leaves, snapshot, split_like

log = logging.getLogger(__name__)
SAVED_FILE_VARIABLE = "DDP_SAVED_FILE"  # a job script may set it: a file that exists once there is a checkpoint


class CheckpointManager:
    """Saves a run, and resumes it."""

    def __init__(self, config: RunConfig, ctx: DistContext) -> None:
        self.config, self.ctx = config, ctx
        self.training: Any = None
        self.fields: dict[str, Any] = {}  # of Training that every checkpoint holds, by name
        self.train_state = TrainState()
        self.directory = CheckpointDirectory(config)
        self.records: Records = {}  # of samples, which must stay the same
        self.writer = BackgroundJob("checkpoint writer")
        self.collected: Any = None  # the state that the next save writes, if it is not that of then
        self.last_step: int | None = None  # of the checkpoint that was loaded or started last
        self.received: list[int] = []  # the checksums of the tensors of which this rank keeps its rows
        self.fixed = FixedShapes({})
        self.shapes: dict[str, list[int]] = {}  # of weights and buffers, which must stay the same
        self.groups: dict[str, list[int]] = {}  # of optimizers, as group_sizes has them
        self.infinite: list[str] = []  # tensors that were not finite from the start: an attention mask may hold -inf
        self.facts: dict[str, Any] = {  # about this run; in every checkpoint
            "format": storage.FORMAT,
            "sources": hash_source_files(),  # that this run has loaded; the files may be edited meanwhile
            "config": asdict(config),
            "world_size": ctx.world_size,
            "started_from": None,  # the checkpoint of another run, if --resume named one
        }

    def check_samples(self, datasets: Datasets) -> None:
        """Record samples of the sets, and keep a split of an earlier version. Call on every rank, before the loaders.

        Raises UsageError if the samples are not the same on all ranks, or if only one of two sets can keep its split.
        """
        self.records = compare_ranks(datasets, self.config, self.ctx)
        if self.ctx.on_main(self.directory.is_earlier):
            sets = [[*with_wrapped(each)] for each in (datasets.train, datasets.val) if each is not None]
            kept = [any([each.keep() for each in wrapped if isinstance(each, BatchDataset)]) for wrapped in sets]
            if any(kept):  # the next resume keeps it as well, since there is no record
                self.records = {}
            if any(kept) and not all(kept):
                remedy = "name what a wrapper wraps `dataset`, so that its keep() is called, or start a new run"
                raise UsageError(f"an earlier version has split the data of this run in another way: {remedy}")

    def collect(self) -> None:
        """Copy the state of this run for the next `save`, which may come later. Call on every rank."""
        # 1. Wait for the previous checkpoint; if it could not be written, every rank raises that here.
        self.wait()
        # 2. Collect the state of this run. before_save() may have collectives, state_dict() has none.
        check_fields(self.training, self.fields)
        for part in self.fields.values():
            if hasattr(part, "before_save"):
                part.before_save()
        content = {**self.facts, **self._states(), **asdict(self.train_state)}
        self._check_shapes(content)
        content["callbacks"] = {type(each).__name__: each.state_dict() for each in self.ctx.callbacks}
        check_state(content)
        # 3. Copy it to host memory, on rank 0 alone unless a part splits it. Training may then continue.
        rest: list[WriteRest] = []
        for each in self.ctx.callbacks:
            content, write_rest = each.split(content)
            rest += [write_rest] if write_rest is not None else []
        self.collected = (*snapshot(content, self.ctx.streams, keep=self.ctx.rank == 0), rest)

    def save(self, sync_logs: Callable[[], None]) -> None:
        """Write what was collected, or else what is now; and best.pt, if this step's evaluation was the best.

        Call on every rank.
        """
        kept = self.collected  # until the end of the epoch
        if kept is None:
            self.collect()
        (copy, copied, rest), self.collected = self.collected, kept
        self.last_step = step = self.train_state.step
        best = self.train_state.best is not None and self.train_state.best_step == step

        def write() -> None:
            # 4. In the background: check that it is finite; sync the logs, write the file, delete old ones.
            copied.wait()
            self.check_finite(named_leaves(copy))
            for write_rest in rest:
                copy.update(write_rest())
            if self.ctx.rank == 0:
                sync_logs()
                self.directory.write(copy, best=best)
                # 5. Report that it is on disk.
                self._report_saved(step)

        if rest and self.ctx.rank:
            self.writer.start(write)
        self.ctx.on_main(self.writer.start, write)

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk; raise on every rank what writing it raised. Call on every rank."""
        self.ctx.wait_on_main(self.writer)
        self.writer.done.wait()  # what other ranks write is on disk by now
        if self.last_step is not None:  # rank 0 has reported the rest
            process_exit.record_saved(self.last_step)

    def _report_saved(self, step: int) -> None:
        if self.ctx.rank == 0 and (path := os.environ.get(SAVED_FILE_VARIABLE)):
            with suppress(OSError):  # without it, a job that starts again does not insist on a checkpoint
                Path(path).touch()
        process_exit.record_saved(step)  # for the launcher
        if self.ctx.rank == 0:
            for each in self.ctx.callbacks:
                each.saved(step)
            self.ctx.monitor.share_saved(step)  # for the other ranks

    def _states(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.fields.items()}

    def _check_shapes(self, states: Mapping[str, Any]) -> None:
        """Raise UsageError for a weight or buffer that load_state_dict would refuse when the run resumes."""
        texts = "{name} was {second} at the start, is {first}", "{name} was not there at the start", "{name} is gone"
        if found := differences(self.fixed.of(states), self.shapes, *texts):
            remedy = "give it its shape in __init__, register it with persistent=False, or define _load_from_state_dict"
            raise UsageError(f"no run could resume from this checkpoint: {first_few(found)}: {remedy}")
        text = "the groups of the {name} had {second} weights, have {first}"
        if found := differences(group_sizes(self.fields), self.groups, text):
            remedy = "add all groups where the optimizer is made; the rate of one may be 0 at first"
            raise UsageError(f"no run could resume from this checkpoint: {first_few(found)}: {remedy}")

    def check_finite(self, tensors: Iterable[tuple[tuple[Any, ...], Any]]) -> None:
        """Raise Diverged for a value that became infinite or NaN. tensors: pairs of keys and whatever they lead to."""
        if bad := [name for name in self._find_non_finite(tensors) if name not in self.infinite]:
            raise Diverged(f"{bad[0]} is no longer finite: start again in another --output-dir with a lower --lr")

    def _find_non_finite(self, tensors: Iterable[tuple[tuple[Any, ...], Any]]) -> list[str]:
        """The names of those with a value that is not finite."""
        checked = [name for name, part in self.fields.items() if not getattr(part, "may_be_infinite", False)]
        return [
            ".".join(map(str, keys))
            for keys, part in tensors
            if keys[0] in checked and isinstance(part, torch.Tensor) and (part.is_floating_point() or part.is_complex())
            if not (part.is_meta or local(part).isfinite().all())
        ]

    def resume(self, train_loader: TrainLoader, training: Any) -> str | None:
        """Load the fields of `training` from the checkpoint of --resume, if any, and return its path; save them later.

        Those that are None are left out. One may have a method before_save(), which every save calls on all ranks.
        Raises CheckpointError if no checkpoint can be used, or if it does not fit this run. Call on every rank.
        """
        named = {each.name: getattr(training, each.name) for each in fields(training)}
        self.training, self.fields = training, {name: part for name, part in named.items() if part is not None}
        models = [name for name, part in self.fields.items() if isinstance(part, torch.nn.Module)]
        self.facts |= {
            # Of models, names and sizes of the weights are compared instead of the class.
            "classes": {name: type(part).__name__ for name, part in self.fields.items() if name not in models},
            "global_batch": train_loader.global_batch,
            "samples": train_loader.length,
            "dataset": {**describe(train_loader.dataset), **train_loader.order_facts()},
            "records": json.dumps(self.records),
            "weights_of": weights_of_optimizers(self.fields),
        }
        check_parts(self.fields, self._reserved())
        states = self._states()
        self.infinite = [name for each in self.ctx.gather(self._find_non_finite(named_leaves(states))) for name in each]
        self.fixed = FixedShapes(self.fields)
        self.shapes, self.groups = self.fixed.of(states), group_sizes(self.fields)
        content, receive = self._read_on_main(partial(self._find, states), states)
        del states  # a part may replace its tensors
        if content:
            train_loader.keep_order(content.get("dataset", {}))
            self.facts["dataset"] |= train_loader.order_facts()
            self._load(content, receive)
        for each in self.ctx.callbacks:
            each.resumed(content)
        if not self.config.evaluate:
            check_weights(self.fields)
        return content.get("path")

    def _read_on_main(self, read: Callable[[], dict[str, Any]], states: Mapping[str, Any]) -> Any:
        """The results of `read_on_main`, with each tensor where `states` have it, or what will take its place."""
        places = {
            keys: part
            for keys, part in named_leaves(states)  # others may be replaced, and their memory is needed
            if isinstance(part, torch.Tensor) and (self._only_copies(keys[0]) or is_split(part))
        }
        like = {tensor.shape: tensor for tensor in places.values() if is_split(tensor)}
        return read_on_main(self.ctx, read, partial(self._keep, places, like), later=self.fields)

    def _only_copies(self, name: str) -> bool:
        """Whether the field is a module whose load_state_dict only copies into the tensors of its state_dict."""
        return getattr(type(self.fields[name]), "load_state_dict", None) is torch.nn.Module.load_state_dict

    def _keep(self, places: Mapping[Any, Any], like: Mapping[Any, Any], keys: Any, tensor: torch.Tensor) -> Any:
        """`tensor` where it will be, so that no rank needs memory for a second model.

        places: by keys. like: weights that are split, by shape; the state of an optimizer, which has none yet, is split
        as they are.
        """
        if isinstance(self.fields.get(keys[0]), torch.optim.Optimizer):
            ours = self._own_rows(like.get(tensor.shape, tensor), tensor)
            return tensor.to(self.ctx.device if tensor.dim() else "cpu", copy=True) if ours is tensor else ours
        place = places.get(keys, tensor)
        ours = self._own_rows(place, tensor)
        fits = place is not tensor and (place.shape, place.dtype) == (ours.shape, ours.dtype)
        if fits and self._only_copies(keys[0]):
            with suppress(RuntimeError):  # its elements share memory, or it is of torch's inference mode
                local(place).copy_(local(ours))
                return place
        return tensor.to("cpu", copy=True) if ours is tensor else ours

    def _own_rows(self, like: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ours = split_like(like, tensor)
        if ours is not tensor:
            self.received.append(checksum(tensor))
        return ours

    def load_best(self) -> TrainState | None:
        """Load best.pt, all but optimizers, and return its progress. Call on every rank, after the last step.

        None, if the weights are those of best.pt, or if there is none.
        """
        if self.train_state.best is None or self.train_state.best_step == self.train_state.step:
            return None
        self.wait()
        content, receive = self._read_on_main(self._read_best, self._states())
        if not content:
            return None
        self._load_parts(content, receive, for_training=False)
        return TrainState.of(content)

    def _read_best(self) -> dict[str, Any]:
        path, step = self.directory.best_path, self.train_state.best_step
        reason: Any = f"{path} is not of step {step}: a lost save has replaced it"
        try:
            if (content := storage.read(path))["step"] == step:
                return content
        except (InvalidCheckpoint, UsageError) as error:
            reason = error
        log.warning("warning: %s; the weights of the last step are tested", reason)
        return {}

    def _reserved(self) -> set[str]:
        """The names in a checkpoint that no part may have."""
        return {"path", "random", "time", "callbacks", storage.FILES, *self.facts, *asdict(self.train_state)}

    def _find(self, states: Mapping[str, Any]) -> dict[str, Any]:
        """The content of the checkpoint to resume from; empty if there is none. Raises CheckpointError."""
        config, facts = self.config, self.facts
        if not (content := self.directory.find()):
            warn_of_other_split(config, facts)
            return {}
        path = Path(content["path"])
        parts = {name: content[name] for name in content if name not in self._reserved()}
        ours = {**facts, "parts": states, "shapes": self.shapes}
        theirs = {**content, "parts": parts, "shapes": self.fixed.of(parts)}
        samples = self.records, facts["samples"]
        if found := run_differences(config, ours, theirs) or data_differences(config, *samples, content):
            verb, remedy = "evaluate", "choose another checkpoint with --resume"
            if not config.evaluate:
                verb = "resume from"
                remedy = f"choose another --output-dir for a new run; --init-from {path} gives it these weights"
            raise CheckpointError(f"cannot {verb} {path}: {first_few(found)}. Restore these settings, or {remedy}")
        then = content["world_size"]
        if then != facts["world_size"] and not config.evaluate:
            log.warning(
                f"warning: {plural(then, 'process', 'es')} wrote this checkpoint, this run has {facts['world_size']}: "
                f"each sample of the epoch is still used once, but the results are not bit for bit those of {then}; "
                f"{scale_change(ours, theirs)}"
            )
        if edited := differences(facts["sources"], content["sources"], "{name}"):
            effect = "run uses the new code from here on; for a new run, choose another --output-dir"
            effect = "evaluation uses the new code" if config.evaluate else effect
            files = first_few(sorted(name.removeprefix("the file ") for name in edited))
            log.warning(f"warning: edited since {path.name} was written: {files}. This {effect}")
        if not self.directory.has_best_of(content):  # of another run, from whose checkpoint this one starts
            content.update(best=None, best_step=0, best_metrics={})
        if path.parent != self.directory.path:
            content["started_from"] = os.path.realpath(path)
        return content

    def _load(self, content: Mapping[str, Any], receive: Callable[[str], Any]) -> None:
        vars(self.train_state).update(vars(TrainState.of(content)))
        if self.ctx.on_main(lambda: Path(content["path"]).parent == self.directory.path):  # each rank has its own
            self.last_step = self.train_state.step
            self._report_saved(self.last_step)
        self._load_parts(content, receive, for_training=not self.config.evaluate)
        if self.config.evaluate:
            return
        self.facts["started_from"] = content["started_from"]
        digests = self.ctx.gather((digest(self._states()), self.received))
        for rank, other in enumerate(digests):
            if other != digests[0]:
                raise CheckpointError(f"rank {rank} loaded another state than rank 0: check the memory of its host")
        self.ctx.on_main(self.writer.start, self.directory.prune)  # a crash may have prevented it after the last save

    def _load_parts(self, content: Mapping[str, Any], receive: Callable[[str], Any], *, for_training: bool) -> None:
        for name, part in self.fields.items():
            if not for_training and isinstance(part, torch.optim.Optimizer | torch.amp.GradScaler):
                continue  # not evaluated, and its options may differ
            if name not in content:
                raise CheckpointError(f"cannot load {content['path']}: it has no {name}")
            state = receive(name)
            try:
                part.load_state_dict(state)
                same = content.get("weights_of", {}).get(name) == self.facts["weights_of"].get(name)
                if same and isinstance(part, torch.optim.Optimizer):
                    keep_dtypes(part, state)
            except (KeyError, RuntimeError, TypeError, ValueError) as error:
                reason = f"its {name} does not fit this run: {error}"
                raise CheckpointError(f"cannot load {content['path']}: {reason}") from error
