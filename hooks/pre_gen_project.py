"""Refuse a project slug that cannot work, with one line on stderr, before a file is written.

Cookiecutter removes the folder that it made, and adds on stdout "Stopping generation because ...", a traceback and
"Hook script failed": a hook cannot keep it from that.

Cookiecutter fills in the braces below. Only the slug is put into this code, and only in its normal form (a to z, 0 to 9
and hyphens): the other answers may hold quotes and backslashes.
"""

from __future__ import annotations

import sys

SLUG = "{{ cookiecutter.project_slug|slugify }}"
NORMAL = "{{ cookiecutter.project_slug == cookiecutter.project_slug|slugify }}" == "True"

LONGEST = 100  # a name of a file may have 255 bytes, and a whole path on Windows 260 characters
NAMELESS = "unnamed"  # what cookiecutter.json puts in the place of an empty slug

WINDOWS_DEVICES = {"con", "prn", "aux", "nul"} | {f"{port}{n}" for port in ("com", "lpt") for n in range(1, 10)}

# What `pip install -e .` brings, and what does the installing. A project of the same name would take its place.
PACKAGES = """
    absl-py colorama exceptiongroup filelock fsspec grpcio iniconfig jinja2 markdown markupsafe mpmath networkx numpy
    packaging pillow pip pluggy protobuf pygments pytest ruff setuptools six sympy tensorboard tensorboard-data-server
    tomli torch torchvision tqdm triton typing-extensions uv werkzeug wheel
"""


def refusal() -> str | None:
    """Why this slug cannot be used, and what to type instead."""
    if SLUG == NAMELESS:
        return "The project slug has no letter from a to z and no digit: type one that has, such as my-ddp-project"
    if len(SLUG) > LONGEST:
        return f"The project slug is longer than {LONGEST} characters: type a shorter one, such as my-ddp-project"
    if SLUG in PACKAGES.split():
        return f"The project slug '{SLUG}' is a package that the project needs: type another, such as {SLUG}-training"
    if SLUG in WINDOWS_DEVICES:
        return f"The project slug '{SLUG}' is a device on Windows, not a folder: type another, such as {SLUG}-training"
    if not NORMAL:  # only a replay file that somebody edited comes so far
        return f"The project slug in the replay file holds more than a to z, 0 to 9 and hyphens: write '{SLUG}' there"
    return None


if message := refusal():
    print(message, file=sys.stderr)
    sys.exit(1)
