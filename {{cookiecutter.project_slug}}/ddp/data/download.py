"""Download a dataset once per machine, and tell the user what to do if that fails."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path

from filelock import FileLock

from ddp.core.errors import SetupError

SOCKET_TIMEOUT_S = 30.0  # torchvision sets none: a dead network would hang


@contextmanager
def downloading(url: str, folder: Path, instead: str = "") -> Iterator[None]:
    """For a block that downloads `url` into `folder`. One process of this machine runs it at a time: look again first.

    Any failure to download becomes a SetupError. Its message ends with `instead`: what else the user can do.
    """
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SOCKET_TIMEOUT_S)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".download.lock"):
            yield
    except (OSError, RuntimeError, HTTPException) as error:
        by_hand = f"put {Path(url).name} into {folder.resolve()} by hand"
        raise SetupError(f"cannot download {url}: {error}; {by_hand}{instead}") from error
    finally:
        socket.setdefaulttimeout(before)
