"""The parts of this project: parts.py lists their names, and each is a package ddp/parts/NAME.

Its __init__.py, which imports no torch, defines what of this the part has:

Options            a dataclass of options of main.py, with check() and rehearse(), as RunConfig has them
LaunchOptions      a dataclass of options of launch_node.sh, with script(): what the workers run in place of main.py
callbacks(run)     its Callbacks for a run: see callbacks.py
SPEEDS             names of figures in metrics.jsonl that differ between two equal runs
"""

import json
from importlib import import_module
from typing import Any

from parts import PARTS

# The part that has an option: who uses it in a project without that part is told how to add it.
PART_OF = {"mirror": "mirror", "guard": "monitor", "profile": "monitor", "check": "preflight"}


def of_parts(name: str) -> tuple[Any, ...]:
    """What the parts of this project define under this name."""
    modules = [import_module(f"ddp.parts.{part}") for part in PARTS]
    return tuple(getattr(module, name) for module in modules if hasattr(module, name))


def missing_part(option: str) -> str:
    """How to add the part with this option; empty if no part has it, or this project has that part."""
    part = PART_OF.get(option)
    if part is None or part in PARTS:
        return ""
    parts = json.dumps({"parts": ",".join([*PARTS, part])})
    add = f"add it with cruft update -y --variables-to-update '{parts}'"
    return f"this project has no part {part}: {add}; without cruft, see Parts in README.md"
