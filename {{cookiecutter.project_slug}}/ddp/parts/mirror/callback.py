"""When a run uses its mirror."""

import logging
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
        interval, waited_s = min(timeout or 2.0, self.config.timeout / 4), 0.0
        while not self.ctx.on_main(self.mirror.finish, interval):
            if timeout is None and not waited_s:
                log.info(f"waiting for the upload to {self.mirror.url}; Ctrl-C ends that")
            waited_s += interval
            stops = any(self.ctx.gather(stop_signal.reason is not None)) if timeout is None else waited_s >= timeout
            if stops:
                break
        self.ctx.on_main(self.mirror.warn_if_behind)

    def failed(self) -> None:
        if self.ctx.rank == 0:
            self.mirror.finish(FAILED_TIMEOUT_S)
            self.mirror.warn_if_behind()
