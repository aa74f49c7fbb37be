"""Python imports this at its start if its folder is in PYTHONPATH: notes when the first optimizer step was done.

It writes the time into the file FIRST_STEP, on rank 0. torch is not imported for it: it waits until somebody does.
"""

from __future__ import annotations

import os
import sys
import time
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

NAME = "torch.optim.optimizer"


class Finder:
    """Finds one module, once, and lets `hook` follow its import."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != NAME:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def and_then_hook(module: Any) -> None:
            execute(module)
            module.register_optimizer_step_post_hook(note)

        spec.loader.exec_module = and_then_hook  # type: ignore[method-assign]
        return spec


def note(*_: Any) -> None:
    if os.environ.get("RANK", "0") == "0" and not done.exists():
        beside = done.with_suffix(".tmp")
        beside.write_text(str(time.monotonic()))
        beside.replace(done)


if "FIRST_STEP" in os.environ:
    done = Path(os.environ["FIRST_STEP"])
    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
