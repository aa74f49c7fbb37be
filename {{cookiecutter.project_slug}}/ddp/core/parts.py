"""The parts of this project: parts.py lists their names, and each is a package ddp/parts/NAME.

Its __init__.py, which imports no torch, defines what of this the part has:

Options            a dataclass of options of main.py, with check() and rehearse(), as RunConfig has them
LaunchOptions      a dataclass of options of launch_node.sh, with script(): what the workers run in place of main.py
callbacks(run)     its Callbacks for a run: see callbacks.py
build_model(...)   the model, on the CPU: see `build` in run.py
wrap_model(...)    the model that trains in place of DDP's, or None: see wrapping.py
read_files(...)    a checkpoint whose tensors are in several files: see storage.py
clean(directory)   deletes what saves that were interrupted have left in the directory of checkpoints
explain(...)       what the user can do about an error: see process_exit.py
INSTEAD_OF_DDP     the option with which wrap_model returns a model
SPEEDS             names of figures in metrics.jsonl that differ between two equal runs
"""

import json
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ddp.core.errors import ExitCode, print_line
from parts import PARTS

# The part that has an option: who uses it in a project without that part is told how to add it.
PART_OF = {
    "shard": "fsdp",
    "checkpoint_activations": "fsdp",
    "mirror": "mirror",
    "guard": "monitor",
    "profile": "monitor",
    "check": "preflight",
}

for _part in PARTS:
    if PARTS.count(_part) > 1 or find_spec(f"ddp.parts.{_part}") is None:
        print_line(f"error: parts.py: {_part!r} is listed twice, or is no folder in ddp/parts: remove that line")
        raise SystemExit(ExitCode.USAGE)


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
