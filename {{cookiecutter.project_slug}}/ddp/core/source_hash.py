"""Hashes of the project's source files, so that processes can check that they all run the same code."""

import hashlib
from contextlib import suppress
from pathlib import Path

PROJECT_DIR = Path(__file__).resolve().parents[2]


def hash_source_files(project: Path = PROJECT_DIR) -> dict[str, str]:
    """`the file NAME` -> the first 12 digits of its SHA-256, for launch_node.sh and every Python file of `project`."""
    files = [project / "launch_node.sh", *project.glob("*.py")]
    for folder in project.iterdir():  # those with Python files at their top level
        with suppress(OSError):
            if folder.name[0] != "." and folder.name != "tests" and any(folder.glob("*.py")):
                files += folder.rglob("*.py")
    hashes = {file: hashlib.sha256(file.read_bytes()).hexdigest()[:12] for file in sorted(files)}
    return {f"the file {file.relative_to(project)}": digits for file, digits in hashes.items()}
