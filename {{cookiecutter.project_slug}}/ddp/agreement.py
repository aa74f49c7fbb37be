"""Agreements at a step's end: shall all ranks stop? has a checkpoint failed? Asked twice a second, not every step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ddp.stop import requests, stopped

EVERY_S = 0.5
MOST_STEPS = 64  # between two agreements, should steps suddenly take much longer


def nothing_to_save(number: int) -> NoReturn:
    """What a stop means where nothing is trained."""
    requests.agree_to(number)
    raise stopped(number, "while nothing was being trained", agreed=True)


class Agreement:
    """Counts the points at which all ranks can stop; at some of them they ask each other.

    An all-reduce costs 0.1 to 0.3 ms over gloo, a percent or more of a small model's step. So after each one all ranks
    know how long a step takes on the slowest, and from that the next point at which to ask, EVERY_S later.
    """

    def __init__(self) -> None:
        self.restart()
        self.on_stop: Callable[[int], Any] = nothing_to_save
        self.on_failed_save: Callable[[], Any] = lambda: None
        self.save_failed: Callable[[], bool] = lambda: False  # on rank 0: whether the last checkpoint was not written

    def restart(self) -> None:
        """Other steps begin: ask after the first of them, since nobody knows how long they take."""
        self.left = self.steps = 1
        self.since = time.perf_counter()

    def point(self) -> None:
        """All ranks are at the same point, between two steps: stop here if anyone was asked to. Call on every rank."""
        self.left -= 1
        if self.left > 0:
            return
        seconds = (time.perf_counter() - self.since) / self.steps
        said = torch.tensor([float(requests.asked or 0), float(self.save_failed()), seconds], dtype=torch.double)
        dist.all_reduce(said, op=dist.ReduceOp.MAX)
        number, failed, seconds = said.tolist()
        self.left = self.steps = int(min(MOST_STEPS, max(1.0, EVERY_S / seconds)))
        self.since = time.perf_counter()
        if failed:
            self.on_failed_save()
        if number:
            self.on_stop(int(number))
