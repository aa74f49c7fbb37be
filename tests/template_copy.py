"""Copies of the template folder, which is a project that runs in place, and of its main.py with other lines."""

from __future__ import annotations

import atexit
import re
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

TEMPLATE = Path(__file__).resolve().parent.parent / "{{cookiecutter.project_slug}}"
# Variables of a process that starts Python anew: tests/lean saves most of the time of importing torch.
LEAN = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parent / "lean")}


def copy_template(folder: Path) -> Path:
    """Copy the template to `folder`, without what runs and tools have written there. Returns `folder`."""
    written = shutil.ignore_patterns("__pycache__", ".*_cache", ".venv")

    def ignored(directory: str, names: list[str]) -> set[str]:
        at_top = {"runs", "data"} if Path(directory) == TEMPLATE else set()  # ddp/data is source code
        return written(directory, names) | at_top

    return Path(shutil.copytree(TEMPLATE, folder, ignore=ignored))


def shrink(project: Path, **sizes: int) -> Path:
    """Let its `--dataset synthetic` have these numbers of samples. Returns `project`."""
    source = (project / "data.py").read_text()
    edited, count = re.subn(r"^(SYNTHETIC_SIZES =) \{.*\}", rf"\1 {sizes}", source, flags=re.MULTILINE)
    assert count == 1
    (project / "data.py").write_text(edited)
    return project


SLOW = """

import os, time

_compute_loss = compute_loss


def compute_loss(outputs, targets, config):
    time.sleep(float(os.environ.get("STEP_S", 0)))
    return _compute_loss(outputs, targets, config)
"""


def slow_down(project: Path) -> Path:
    """Let each of its steps last STEP_S, a variable, so that a run is still training when the test interferes."""
    with (project / "model.py").open("a") as model:
        model.write(SLOW)
    return project


@cache
def small_template() -> Path:
    """A copy for tests that start Python anew: a second less of each process goes into making data."""
    folder = Path(tempfile.mkdtemp(prefix="small-template-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return shrink(copy_template(folder / "project"), train=640, val=64, test=64)


def changed_main(edits: dict[str, str]) -> Any:
    """main.py with these lines replaced, as a module's main function."""
    text = (TEMPLATE / "main.py").read_text()
    for old, new in edits.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    module = ModuleType("changed_main")
    module.__file__ = str(TEMPLATE / "main.py")
    sys.modules["changed_main"] = module  # where dataclasses look
    exec(compile(text, "changed_main.py", "exec"), vars(module))
    return vars(module)["main"]
