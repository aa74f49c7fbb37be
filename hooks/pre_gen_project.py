"""Refuse a slug that cannot work, an unknown part, and an old cookiecutter: one line, before any file is written.

Cookiecutter then removes the folder that it created. On stdout it adds "Stopping generation because ...", a traceback
and "Hook script failed". A hook cannot prevent that.

Cookiecutter replaces the braces below. Of the answers, only the slug and the parts are put into this code, and only in
their normal form (a-z, 0-9 and hyphens), because the others may contain quotes and backslashes.

In a folder that exists, it copies the files that are there for post_gen_project.py.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

SLUG = "{{ cookiecutter.project_slug|slugify }}"
RENDERS_PRIVATE = "{{ '{' not in cookiecutter.__spdx }}" == "True"
NORMAL = "{{ cookiecutter.project_slug == cookiecutter.project_slug|slugify }}" == "True"

PARTS = "{{ cookiecutter.parts|slugify }}"
KNOWN_PARTS = ("fsdp", "mirror", "monitor", "preflight")
BACKUP, README = Path(".before"), Path("README.md")
# What the template may have, but no data and no runs.
FOLDERS = ("ddp", "docs", "launch", "tests", ".github")
FILES = ("*.py", "*.md", "*.sh", "*.toml", "LICENSE", "Dockerfile", ".*", *(f"{folder}/**/*" for folder in FOLDERS))

MAX_LENGTH = 100  # a file name may have 255 bytes, and a full path on Windows 260 characters
EMPTY = "unnamed"  # cookiecutter.json replaces an empty slug by this

WINDOWS_DEVICES = {"con", "prn", "aux", "nul"} | {f"{port}{n}" for port in ("com", "lpt") for n in range(1, 10)}

# The packages that `pip install -e '.[dev,plot]'` installs, and the installers. pip would replace a package by a
# project of the same name.
PACKAGES = """
    absl-py colorama contourpy cuda-bindings cuda-pathfinder cuda-toolkit cycler exceptiongroup filelock fonttools
    fsspec grpcio iniconfig jinja2 kiwisolver markdown markupsafe matplotlib mpmath networkx numpy nvidia-cublas
    nvidia-cuda-cccl nvidia-cuda-cupti nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cudnn-cu12 nvidia-cudnn-cu13
    nvidia-cufft nvidia-cufile nvidia-curand nvidia-cusolver nvidia-cusparse nvidia-cusparselt-cu12
    nvidia-cusparselt-cu13 nvidia-nccl-cu12 nvidia-nccl-cu13 nvidia-nvjitlink nvidia-nvshmem-cu12 nvidia-nvshmem-cu13
    nvidia-nvtx packaging pillow pip pluggy protobuf psutil pygments pyparsing pytest python-dateutil ruff setuptools
    six sympy tensorboard tensorboard-data-server tomli torch torchvision tqdm triton typing-extensions tzdata uv
    werkzeug wheel
"""


def refusal() -> str | None:
    """Why this slug cannot be used, and what to type instead; or that cookiecutter is too old."""
    if not RENDERS_PRIVATE:  # version 1 leaves braces in pyproject.toml
        return "This template needs cookiecutter 2.1 or newer: pip install --upgrade cookiecutter"
    if SLUG == EMPTY:
        return "The project slug has no letter from a to z and no digit; type one that has, such as my-ddp-project"
    if len(SLUG) > MAX_LENGTH:
        return f"The project slug is longer than {MAX_LENGTH} characters; type a shorter one, such as my-ddp-project"
    if SLUG in PACKAGES.split():
        return f"The project slug '{SLUG}' is a package that the project needs; type another, such as {SLUG}-training"
    if SLUG in WINDOWS_DEVICES:
        return f"The project slug '{SLUG}' is a device name on Windows; type another, such as {SLUG}-training"
    if not NORMAL:  # only an edited replay file gets here
        return f"The project slug in the replay file must contain only a-z, 0-9 and hyphens; write '{SLUG}' there"
    if PARTS not in ("", "none", "all") and (unknown := [name for name in PARTS.split("-") if name not in KNOWN_PARTS]):
        return f"There is no part '{unknown[0]}'; type none, all, or names of {', '.join(KNOWN_PARTS)}"
    if BACKUP.exists():  # newer files would be replaced by those
        return "An interrupted run has left .before with your files: move back what it has replaced, and delete .before"
    return None


def back_up() -> None:
    """Copy the files of a project that exists: post_gen_project.py deletes none of them, and with -s restores all.

    cookiecutter's -s keeps only files that it renders: README.md shows whether it was given.
    """
    for path in (found for pattern in FILES for found in Path().glob(pattern)):
        copy = BACKUP / path
        if path.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
    if BACKUP.exists():
        README.touch()
        os.utime(README, (0, 0))


if message := refusal():
    print(message, file=sys.stderr)
    sys.exit(1)
back_up()
