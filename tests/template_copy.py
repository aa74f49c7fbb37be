"""Copies of the template folder, which is a project that runs in place."""

from __future__ import annotations

import shutil
from pathlib import Path

TEMPLATE = Path(__file__).resolve().parent.parent / "{{cookiecutter.project_slug}}"


def copy_template(folder: Path) -> Path:
    """Copy the template to `folder`, without what runs and tools have written there. Returns `folder`."""
    written = shutil.ignore_patterns("__pycache__", ".*_cache", ".venv")

    def ignored(directory: str, names: list[str]) -> set[str]:
        at_top = {"runs", "data"} if Path(directory) == TEMPLATE else set()  # ddp/data is source code
        return written(directory, names) | at_top

    return Path(shutil.copytree(TEMPLATE, folder, ignore=ignored))
