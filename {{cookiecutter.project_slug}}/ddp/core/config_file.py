"""--config FILE: options in a TOML file, or those of a run in its config.json."""

import json
from pathlib import Path
from typing import Any

from ddp.core.errors import UsageError
from ddp.core.options import flag_of

OF_ONE_PROCESS = ("rank", "world_size", "local_rank", "init_method")  # in config.json, but not those of the next run


def read_words(path: str) -> list[str]:
    """The options of a file as words of a command line. Raises UsageError."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: cannot be read: {getattr(error, 'strerror', '') or error}") from error
    options = _parse(path, text)
    if isinstance(options.get("options"), dict):  # config.json of a run
        options = {name: value for name, value in options["options"].items() if name not in OF_ONE_PROCESS}
    words = []
    for name, value in options.items():
        if name == "config":
            raise UsageError(f"--config {path}: a file cannot name another one")
        if isinstance(value, bool):
            words += [flag_of(name)] * value
        elif isinstance(value, str | int | float):
            words.append(f"{flag_of(name)}={value}")
        elif value is not None:
            raise UsageError(f"--config {path}: {name} must be one value, such as lr = 0.1")
    return words


def _parse(path: str, text: str) -> dict[str, Any]:
    if path.endswith(".toml"):
        try:
            import tomllib
        except ImportError as error:
            raise UsageError(f"--config {path}: TOML needs Python 3.11 or newer; write it as JSON") from error
        loads: Any = tomllib.loads
    else:
        loads = json.loads
    try:
        options = loads(text)
    except ValueError as error:  # of both
        kind = "TOML" if path.endswith(".toml") else "JSON (a TOML file ends with .toml)"
        raise UsageError(f"--config {path}: is not {kind}: {error}") from error
    if not isinstance(options, dict):
        raise UsageError(f"--config {path}: needs names and values of options")
    return options
