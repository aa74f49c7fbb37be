"""Records the time of the first optimizer step of any script. Python imports this file if its folder is in PYTHONPATH.

Rank 0 writes the time to the file FIRST_STEP. This file does not import torch: it waits until the script does.
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
    """Finds the module NAME, once, and registers `record` when it is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != NAME:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_register(module: Any) -> None:
            execute(module)
            module.register_optimizer_step_post_hook(record)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def record(*_: Any) -> None:
    if os.environ.get("RANK", "0") == "0" and not done.exists():
        tmp_path = done.with_suffix(".tmp")
        tmp_path.write_text(str(time.monotonic()))
        tmp_path.replace(done)


if "FIRST_STEP" in os.environ:
    done = Path(os.environ["FIRST_STEP"])
    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
