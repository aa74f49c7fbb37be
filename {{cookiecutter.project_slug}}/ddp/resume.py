"""What of a run is kept in checkpoints: how it is saved, beside the training, and how a run resumes from it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from config import Config
from ddp import checkpoint
from ddp.compare import class_differences, code_differences, in_short, model_differences, run_differences
from ddp.ending import ending
from ddp.errors import CheckpointFailure, Diverged
from ddp.fingerprint import code_of
from ddp.folder import Folder
from ddp.group import Group, plural
from ddp.loader import TrainLoader
from ddp.saver import Saver
from ddp.state import broadcast_state, digest, not_finite, random_state, set_random_state, snapshot

log = logging.getLogger(__name__)


@dataclass
class Progress:
    """How far a run is. `position` counts the samples of the current epoch that all ranks together have used."""

    step: int = 0
    epoch: int = 0
    position: int = 0
    best: float | None = None  # what the task judges by, at its highest; and the scores that went with it
    best_step: int = 0
    best_scores: dict[str, float] = field(default_factory=dict)
    evaluated: int | None = None  # the step of the last evaluation

    def load(self, content: Mapping[str, Any]) -> None:
        """Take the values of a checkpoint."""
        for item in fields(self):
            setattr(self, item.name, content[item.name])

    def advance(self, global_batch: int) -> None:
        """Count one optimizer step."""
        self.step += 1
        self.position += global_batch

    def end_epoch(self) -> None:
        self.epoch += 1
        self.position = 0


class Checkpoints:
    """Saves the progress and the state of a run, and loads them.

    `step` is that of the checkpoint that was begun or loaded last.
    """

    def __init__(self, config: Config, group: Group, folder: Folder) -> None:
        self.config, self.group, self.folder = config, group, folder
        self.progress = Progress()
        self.saver = Saver()
        self.code = code_of()  # that this run has loaded; it may be edited meanwhile
        self.step: int | None = None
        self.started_from: str | None = None  # the checkpoint of another run, if --resume named one

    def resume(self, train_loader: TrainLoader, state: dict[str, Any]) -> str | None:
        """Load `state` from the checkpoint that --resume asks for, if there is one; save it from then on.

        Returns the path of the checkpoint, or None. Call on every rank.
        """
        self.train_loader, self.state = train_loader, state
        found: dict[str, Any] = {}
        path = self.group.on_main(lambda: self._find(found))
        if path is not None:
            self._load(broadcast_state(found, self.group))
        return path

    def _classes(self) -> dict[str, str]:
        """What the state is of; of the model, names and shapes of its weights say more."""
        return {name: type(part).__name__ for name, part in self.state.items() if name != "model"}

    def _find(self, found: dict[str, Any]) -> str | None:
        """On rank 0: put the content of the checkpoint to use into `found`, and return its path."""
        path, content = self.folder.find(self.config)
        if path is None:
            return None
        differences = []
        if not self.config.evaluate:
            loader = self.train_loader
            differences += run_differences(self.config, content, loader.global_batch, loader.length)
            differences += class_differences(self._classes(), content["classes"])
        differences += model_differences(self.state["model"].state_dict(), content["model"])
        if not differences and not self.config.evaluate:
            differences += self._other_world(content)
        if differences:
            raise CheckpointFailure(
                f"{path} does not fit: {in_short(differences)}. For a new run, choose another --output-dir; to go on "
                "with this one, undo that"
            )
        edited = code_differences(self.code, content["code"]) if "code" in content else []
        if edited:
            then = "What is new takes part from here on; for a new run, choose another --output-dir"
            then = "What is new takes part in this evaluation" if self.config.evaluate else then
            log.warning("warning: edited since %s was written: %s. %s", path.name, in_short(edited), then)
        found.update(content)
        if not self.folder.best.exists():  # a new folder, begun from another run's checkpoint
            found.update(best=None, best_step=0, best_scores={})
        if path.parent != self.folder.checkpoints:
            found["started_from"] = os.path.realpath(path)
        found["path"] = str(path)
        if self.config.comm_hook == "powersgd":
            log.warning("warning: what --comm-hook powersgd remembers is not in checkpoints: not bit for bit the same")
        return str(path)

    def _other_world(self, content: Mapping[str, Any]) -> list[str]:
        then, now = content["world_size"], self.group.world_size
        if then == now:
            return []
        if self.config.strict_resume:
            return [f"--strict-resume, and the number of processes was {then}, is {now}"]
        log.warning(
            "warning: the checkpoint was made by %s, this run has %s: each sample of the epoch is still used once, but "
            "results are not bit for bit those of %s; the global batch was %s, is %s",
            *(plural(then, "process", "es"), now, then, content["global_batch"], self.train_loader.global_batch),
        )
        return []

    def _load(self, content: Mapping[str, Any]) -> None:
        self.progress.load(content)
        if os.path.dirname(content["path"]) == str(self.folder.checkpoints):
            self.step = self.progress.step
            self._note_saved(self.step)
        if self.config.evaluate:
            self.state["model"].load_state_dict(content["model"])
            return
        for name, part in self.state.items():
            try:
                part.load_state_dict(content[name])
            except (KeyError, RuntimeError, TypeError, ValueError) as error:
                raise CheckpointFailure(f"{content['path']} does not fit the {name} of this run: {error}") from error
        if content["world_size"] == self.group.world_size:
            set_random_state(content["random"][self.group.rank], self.group.device)
        self.started_from = content["started_from"]
        digests = self.group.gather(digest([self.state[name].state_dict() for name in ("model", "optimizer")]))
        for rank, other in enumerate(digests):
            if other != digests[0]:
                raise CheckpointFailure(
                    f"rank {rank} has loaded another state than rank 0: check the memory of its host"
                )

    def save(self, before: Callable[[], None]) -> None:
        """Write a checkpoint; and best.pt, if this step's evaluation was the best. Call on every rank.

        It is copied here, and written in the background: a failure to write the one before is raised here, on every
        rank, or at an agreement before that. `before` runs in the background as well, on rank 0.
        """
        self.finish()
        content = {
            "format": checkpoint.FORMAT,
            "code": self.code,
            "classes": self._classes(),
            **{name: part.state_dict() for name, part in self.state.items()},
            **asdict(self.progress),
            "config": asdict(self.config),
            "world_size": self.group.world_size,
            "global_batch": self.train_loader.global_batch,
            "samples": self.train_loader.length,
            "started_from": self.started_from,
            "random": self.group.gather(random_state(self.group.device)),
        }
        self.step = self.progress.step
        self.group.on_main(lambda: self._begin_writing(content, before))

    def _begin_writing(self, content: dict[str, Any], before: Callable[[], None]) -> None:
        copy, best = snapshot(content), self.progress.best_step == self.progress.step
        self.saver.start(lambda: self._write(copy, before, best=best))

    def _write(self, content: dict[str, Any], before: Callable[[], None], *, best: bool) -> None:
        """In the background, on rank 0."""
        for name in ("model", "optimizer"):
            bad = not_finite(content[name], name)
            if bad is not None:
                raise Diverged(f"{bad} is not finite any more: start again, elsewhere, with a lower --lr")
        before()
        self.folder.save(content, best=best)
        self._note_saved(content["step"])

    def finish(self) -> None:
        """Wait until the checkpoint in flight is on the disk. Raises on all ranks what it met. Call on every rank."""
        # A write may take longer than --timeout, for which others wait: so rank 0 says now and then that it goes on.
        while not self.group.on_main(self.saver.finish, self.config.timeout / 4):
            pass
        ending.note_saved(self.step)

    def _note_saved(self, step: int) -> None:
        """This checkpoint is on the disk."""
        ending.note_saved(step)
        if self.group.rank == 0:
            self.group.peers.tell_saved(step)
