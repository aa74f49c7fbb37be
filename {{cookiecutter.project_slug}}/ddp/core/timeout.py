"""A call that may block without end, such as one to a store whose machine is cut off."""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from ddp.core.errors import UserError

Result = TypeVar("Result")


def call_with_timeout(seconds: float, call: Callable[[], Result]) -> Result | None:
    """What `call` returns; None if it fails or takes longer. Its thread is left behind then."""
    results: list[Result] = []

    def run() -> None:
        with suppress(OSError, RuntimeError, UserError):
            results.append(call())

    thread = threading.Thread(target=run, name="call with timeout", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
