"""Downloading a dataset: once a machine, and with an error that says what to do by hand."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path

from filelock import FileLock

from ddp.errors import EnvironmentFailure

SILENT_S = 30.0  # torchvision sets no limit: a dead network would hang


@contextmanager
def downloading(url: str, folder: Path, instead: str = "") -> Iterator[None]:
    """For a block that downloads `url` into `folder`: one process of this machine at a time, so look again in there.

    Raises EnvironmentFailure for whatever goes wrong in it; its message ends with what else to do, `instead`.
    """
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SILENT_S)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".download.lock"):
            yield
    except (OSError, RuntimeError, HTTPException) as error:
        by_hand = f"put {Path(url).name} into {folder.resolve()} by hand"
        raise EnvironmentFailure(f"cannot download {url}: {error}; {by_hand}{instead}") from error
    finally:
        socket.setdefaulttimeout(before)
