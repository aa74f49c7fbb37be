"""Copies of the template folder, which is a project that runs in place, and of its main.py with other lines."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

TEMPLATE = Path(__file__).resolve().parent.parent / "{{cookiecutter.project_slug}}"


def copy_template(folder: Path) -> Path:
    """Copy the template to `folder`, without what runs and tools have written there. Returns `folder`."""
    written = shutil.ignore_patterns("__pycache__", ".*_cache", ".venv")

    def ignored(directory: str, names: list[str]) -> set[str]:
        at_top = {"runs", "data"} if Path(directory) == TEMPLATE else set()  # ddp/data is source code
        return written(directory, names) | at_top

    return Path(shutil.copytree(TEMPLATE, folder, ignore=ignored))


def changed_main(edits: dict[str, str]) -> Any:
    """main.py with these lines replaced, as a module's main function."""
    text = (TEMPLATE / "main.py").read_text()
    for old, new in edits.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    module = ModuleType("changed_main")
    sys.modules["changed_main"] = module  # where dataclasses look
    exec(compile(text, "changed_main.py", "exec"), vars(module))
    return vars(module)["main"]
