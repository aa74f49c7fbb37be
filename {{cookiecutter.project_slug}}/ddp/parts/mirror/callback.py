"""When a run uses its mirror."""

import logging
import math
import time
from typing import Any

from ddp.core.parts import Callback
from ddp.core.signals import stop_signal
from ddp.core.threads import BackgroundJob
from ddp.parts.mirror.mirror import Mirror

log = logging.getLogger(__name__)
FAILED_TIMEOUT_S = 5.0  # for the last upload of a run that fails


class MirrorCallback(Callback):
    """Its mirror is opened and asked on rank 0 alone."""

    needs_one_file = True

    def __init__(self, run: Any) -> None:
        self.config, self.ctx, self.mirror = run.config, run.ctx, Mirror(run.config)

    def opened(self) -> None:
        """Connect, and download its newest checkpoint if it is newer than ours."""
        opening = BackgroundJob("mirror")
        self.ctx.on_main(opening.start, self.mirror.open)
        self.ctx.wait_on_main(opening)

    def started(self) -> None:
        self.ctx.on_main(self.mirror.claim)

    def saved(self, step: int) -> None:
        self.mirror.request(step)

    def status(self) -> dict[str, Any]:
        return {"mirrored": self.mirror.step}

    def finish(self, timeout: float | None) -> None:
        """Wait for the upload of the last checkpoint, unless it fails; without `timeout`, until a request to stop."""
        interval = min(timeout or 2.0, self.config.timeout / 4)
        end = math.inf if timeout is None else time.monotonic() + timeout  # rank 0's clock decides for all
        waits = False
        while not self.ctx.on_main(lambda: self.mirror.finish(interval) or time.monotonic() >= end):
            if timeout is None and not waits:
                waits = True
                log.info(f"waiting for the upload to {self.mirror.url}; Ctrl-C ends that")
            if timeout is None and any(self.ctx.gather(stop_signal.reason is not None)):
                break
        self.ctx.on_main(self.mirror.warn_if_behind)

    def failed(self) -> None:
        if self.ctx.rank == 0:
            self.mirror.finish(FAILED_TIMEOUT_S)
            self.mirror.warn_if_behind()
