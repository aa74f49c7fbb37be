"""The learning rate: linear scaling with the global batch, warm-up, then cosine or constant. Edit me, or subclass it.

It follows epochs and not steps, so that another number of processes keeps its shape.
Linear scaling and warm-up: Goyal et al., Accurate, Large Minibatch SGD, 2017, https://arxiv.org/abs/1706.02677.
Cosine: Loshchilov and Hutter, SGDR, 2017, https://arxiv.org/abs/1608.03983.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import numpy
import torch

from ddp.core.errors import UsageError
from ddp.data.dataset import attributes
from ddp.distributed.tensors import digest, leaves

log = logging.getLogger(__name__)
REMEDY = "subclass Schedule instead, as 'A schedule of your own' in docs/recipes.md does"
NO_STATE = ("optimizer", "config", "lr", "_start", "_given", "_used", "_inner", "_warned")  # or saved elsewhere
REFERENCE_BATCH = 64  # --lr is for this global batch; --scale-lr scales it to another


class Schedule:
    """Sets the learning rate of `optimizer` from --lr, --lr-schedule, --warmup-epochs, --epochs and --scale-lr."""

    def __init__(self, optimizer: torch.optim.Optimizer, config: Any, global_batch: int) -> None:
        self.optimizer, self.config, self.lr, self._warned = optimizer, config, 0.0, False
        self.peak = config.lr * (global_batch / REFERENCE_BATCH if config.scale_lr else 1)
        # Groups of weights may have their own rates: as `lr`, or as a factor `lr_scale` (timm's layer decay).
        if any(group.get("lr") is None for group in optimizer.param_groups):
            raise UsageError(f"{type(optimizer).__name__} has no learning rate: pass lr=config.lr in build_optimizer")
        self.ratios = [group["lr"] / config.lr * group.get("lr_scale", 1.0) for group in optimizer.param_groups]
        base = getattr(optimizer, "defaults", {}).get("lr")
        own = base is not None and [group for group in optimizer.param_groups if group["lr"] != base]
        if own and any(group.get("lr_scale", 1.0) != 1 for group in own):
            raise UsageError("a group of weights has its own `lr` and an `lr_scale`, which multiplies it: give it one")
        self._start = self._rates()  # before the first step of this process
        self._given: list[Any] = []  # by `set`, to each group
        self._used: list[Any] = []  # by the optimizer's last step
        try:
            optimizer.register_step_pre_hook(lambda *_: vars(self).update(_used=self._rates()))
        except AttributeError as error:
            remedy = "call super().__init__(params, defaults) in its __init__"
            raise UsageError(f"{type(optimizer).__name__} is no complete torch.optim.Optimizer: {remedy}") from error
        inner = [each for each in leaves(vars(optimizer)) if isinstance(each, torch.optim.Optimizer)]  # as of Lookahead
        self._inner = [(each, self._same_rates(each)) for each in inner]
        for each, same in self._inner:
            with suppress(AttributeError):  # it lacks super().__init__, and so the hooks
                each.register_step_pre_hook(partial(self._check_reaches, same))

    def _rates(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]

    @property
    def last_lr(self) -> float:
        """The highest rate of the optimizer's last step; before it, that of `set`."""
        return float(max(self._used)) if self._used else self.lr

    def _rates_in(self, inner: torch.optim.Optimizer) -> Iterator[tuple[Any, Any]]:
        """The rate of each group in `inner`, and the rate that its weights have here, or else the first group."""
        ours = {id(weight): group["lr"] for group in self.optimizer.param_groups for weight in group["params"]}
        for group in inner.param_groups:
            found = (ours[id(weight)] for weight in group["params"] if id(weight) in ours)
            yield group.get("lr"), next(found, self.optimizer.param_groups[0]["lr"])

    def _same_rates(self, inner: torch.optim.Optimizer) -> dict[int, Any]:
        """The rates in `inner` that equal those around it, by the place of their group."""
        return {place: rate for place, (rate, ours) in enumerate(self._rates_in(inner)) if rate == ours}

    def _check_reaches(self, same: dict[int, Any], inner: torch.optim.Optimizer, *_: Any) -> None:
        """Before a step of `inner`. Raises UsageError if its rate stays the same, while that around it changes.

        same: the rates that have equalled those around them, and have not changed so far.
        """
        for place, (rate, ours) in enumerate(self._rates_in(inner)):
            if place not in same or rate is ours:
                continue
            if rate != same[place]:
                del same[place]
            elif not math.isclose(ours, rate, rel_tol=0.01):
                what = f"the schedule does not reach the {type(inner).__name__} in {type(self.optimizer).__name__}"
                remedy = "let both have the same param_groups, after load_state_dict() too"
                raise UsageError(f"{what}: {remedy}, as 'Muon with AdamW' in docs/recipes.md does")

    def resume(self) -> None:
        """The optimizer has the rates of a checkpoint."""
        self._start = self._rates()
        for inner, same in self._inner:
            same.update(self._same_rates(inner))

    def finish_epoch(self, metrics: Mapping[str, float]) -> None:
        """Call `end_epoch`. Warn of what it has changed if no checkpoint holds it."""
        is_saved = self._warned or type(self).state_dict is not Schedule.state_dict
        before = {} if is_saved else self._unsaved()
        self.end_epoch(metrics)
        if type(self).set is not Schedule.set:  # it may keep the rates that `end_epoch` has set
            self._given = self._rates()
        changed = [name for name, value in ({} if is_saved else self._unsaved()).items() if value != before.get(name)]
        if changed:
            self._warned = True
            remedy = "write state_dict() and load_state_dict(), as 'A schedule of your own' in docs/recipes.md does"
            log.info(f"warning: {type(self).__name__}.end_epoch changes {changed[0]}, which is not saved: {remedy}")

    def _unsaved(self) -> dict[str, str]:
        """Digests of the attributes that `state_dict` leaves out, also of the states of schedulers of torch."""
        found = {}
        for name, value in vars(self).items():
            if name not in NO_STATE:
                with suppress(Exception):  # it has no state that can be compared
                    found[name] = digest(_state_of(value))
        return found

    def start_step(self, epochs_done: float) -> None:
        """Call `set`. Raises UsageError if something else has set a rate since the last step: no step would use it."""
        replaced = type(self).set is not Schedule.set  # it may use schedulers, and add groups
        if hasattr(self.optimizer.step, "_wrapped_by_lr_sched") and not replaced:  # torch marks it
            raise UsageError(f"a scheduler of torch would have no effect, because run.steps() sets the rate: {REMEDY}")
        now = self._rates()
        if len(now) != len(self.ratios) and not replaced:
            remedy = "add all groups in build_optimizer; the rate of one may be 0 at first, as in docs/recipes.md"
            raise UsageError(f"the optimizer had {len(self.ratios)} groups of weights, has {len(now)}: {remedy}")
        start, self._start = [] if replaced else self._start, []
        if any(rate not in pair for rate, *pair in zip(now, self._used or start, self._given or start, strict=False)):
            reason = "the learning rate was set between two steps, and the schedule sets it before the next one"
            remedy = "set it just before optimizer.step(), or in a Schedule of your own, as docs/recipes.md does"
            raise UsageError(f"{reason}: {remedy}")
        self.set(epochs_done)
        self._given = self._rates()

    def set(self, epochs_done: float) -> None:
        """Set the learning rate for a step whose middle is at `epochs_done`, in epochs from the start of the run."""
        self.lr = self.peak * self.factor(epochs_done)
        for group, ratio in zip(self.optimizer.param_groups, self.ratios, strict=True):
            group["lr"] = self.lr * ratio

    def end_epoch(self, metrics: Mapping[str, float]) -> None:
        """Called after the evaluation of each whole epoch, before it is saved. metrics: the same on all ranks."""

    def factor(self, epochs_done: float) -> float:
        """The part of the peak learning rate at `epochs_done`."""
        warmup = self.config.warmup_epochs
        if epochs_done < warmup:
            return epochs_done / warmup
        if self.config.lr_schedule == "constant":
            return 1.0
        done = (epochs_done - warmup) / max(self.config.epochs - warmup, 1e-9)
        return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))

    def state_dict(self) -> dict[str, Any]:
        """For readers of a checkpoint: the schedule itself follows from the options and the progress."""
        return {"lr": self.lr, "peak_lr": self.peak}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.lr = state["lr"]


def _state_of(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_state_of(each) for each in value]
    if isinstance(value, numpy.ndarray):
        return value.tolist()
    if hasattr(value, "state_dict"):
        return value.state_dict()
    return attributes(value) if type(value).__repr__ is object.__repr__ else value
