"""--mirror URL: a copy of a run, to resume on another machine when this one is lost with its disk."""

from dataclasses import dataclass
from typing import Any

from ddp.core.options import option


@dataclass
class Options:
    """The options of this part."""

    mirror: str | None = option(
        None,
        "a copy of the run, to resume on another machine: s3://, gs:// or a directory",
        metavar="URL",
        section="run",
        may_change=True,
    )

    def rehearse(self) -> None:
        """The URL holds the real run."""
        self.mirror = None


def callbacks(run: Any) -> list[Any]:
    """One, with --mirror."""
    from ddp.parts.mirror.callback import MirrorCallback  # slow to import, and not needed to check a command line

    return [MirrorCallback(run)] if run.config.mirror else []
