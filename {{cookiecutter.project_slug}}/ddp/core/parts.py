"""The parts of this project: parts.py lists their names, and each is a package ddp/parts/NAME.

Its __init__.py, which imports no torch, defines what of this the part has:

Options            a dataclass of options of main.py, with check() and rehearse(), as RunConfig has them
LaunchOptions      a dataclass of options of launch_node.sh, with script(): what the workers run in place of main.py
callbacks(run)     its Callbacks for a run
build_model(...)   the model, on the CPU: see `build` in run.py
wrap_model(...)    the model that trains in place of DDP's, or None: see wrapping.py
read_files(...)    a checkpoint whose tensors are in several files: see storage.py
clean(directory)   deletes what saves that were interrupted have left in the directory of checkpoints
explain(...)       what the user can do about an error: see process_exit.py
INSTEAD_OF_DDP     the option with which wrap_model returns a model
SPEEDS             names of figures in metrics.jsonl that differ between two equal runs
"""

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ddp.core.errors import ExitCode, print_line
from parts import PARTS

Compute = Callable[..., bool]  # compute_gradients of main.py
WriteRest = Callable[[], dict[str, Any]]  # writes what is not in the file of a checkpoint
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


class Callback:
    """What a part does at the moments of a run: by default, nothing.

    All ranks call each method at the same moment, unless it says otherwise. Those for training are not called with
    --evaluate: opened, started, stepped, saving, trained, finish.
    """

    needs_one_file = False  # whether a checkpoint must be one file

    def opened(self) -> None:
        """The output directory belongs to this run. No checkpoint was looked for yet."""

    def wrapped(self, model: Any, task: Any) -> None:
        """wrap_model has made `model` trainable. task: model.py."""

    def resumed(self, content: Mapping[str, Any]) -> None:
        """The progress is loaded. content: of the checkpoint, without the fields of Training; empty for a new run."""

    def started(self) -> None:
        """All is checked and loaded, and the files of the run are open: it may change its directory."""

    def phase(self, name: str) -> None:
        """Another phase begins, or the same one again: start-up, productive, saving or evaluation."""

    def wrap_compute(self, compute: Compute) -> Compute:
        """What computes the gradients of a step, in place of `compute`."""
        return compute

    def stepped(self) -> None:
        """A step of the optimizer was taken."""

    def synced(self) -> None:
        """The ranks have agreed whether to stop, after a step."""

    def figures(self, rates: Mapping[str, float], totals: Mapping[str, Any], seconds: float) -> tuple[dict, str]:
        """More figures of the steps since the last logged one, and those that the console shows.

        rates: of these steps, such as samples_per_s. totals: of batch_totals in these `seconds`, over all ranks.
        """
        return {}, ""

    def saving(self) -> None:
        """The state of this run is about to be saved."""

    def split(self, content: dict[str, Any]) -> tuple[dict[str, Any], WriteRest | None]:
        """What rank 0 writes of the content of a checkpoint, and what writes the rest: None if there is no rest.

        The latter is called on every rank, in the thread that writes. What it returns on rank 0 is written as well.
        """
        return content, None

    def saved(self, step: int) -> None:
        """The checkpoint of `step` is on disk. On rank 0 alone: in the thread that has written it, or at a resume."""

    def state_dict(self) -> dict[str, Any]:
        """What each checkpoint holds of it, for `resumed`, in content["callbacks"][the name of this class]."""
        return {}

    def status(self) -> dict[str, Any]:
        """What status.json holds of it. On rank 0 alone."""
        return {}

    def trained(self) -> None:
        """No step follows; the last evaluations do."""

    def finish(self, timeout: float | None) -> None:
        """The last checkpoint is on disk, and the process ends, within `timeout` seconds if that is not None."""

    def failed(self) -> None:
        """The run ends with an error other than a stop. Other ranks may be gone."""

    def summary(self) -> str:
        """A line for the end of the run. On rank 0 alone."""
        return ""
