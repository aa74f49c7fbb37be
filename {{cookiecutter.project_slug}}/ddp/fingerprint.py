"""The project's code as digests, by which processes see whether they all run the same."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent


def code_of(project: Path = PROJECT) -> dict[str, str]:
    """`the file NAME` and the start of its SHA-256, for launch_node.sh and every Python file of `project`.

    Of folders, those count that hold Python files themselves; tests do not.
    """
    files = [project / "launch_node.sh", *project.glob("*.py")]
    for folder in project.iterdir():
        with suppress(OSError):
            if folder.name[0] != "." and folder.name != "tests" and any(folder.glob("*.py")):
                files += folder.rglob("*.py")
    return {
        f"the file {file.relative_to(project)}": hashlib.sha256(file.read_bytes()).hexdigest()[:12]
        for file in sorted(files)
    }
