"""How two runs differ, bit for bit: in their newest checkpoints and in metrics.jsonl. For rehearse.py and tests."""

import json
import math
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from ddp.checkpoint import storage
from ddp.core.parts import of_parts
from ddp.distributed.tensors import digest, named_leaves, whole_tree

SPEEDS = (
    "samples_per_s",
    "step_ms",
    "data_ms",
    "gpu_ms",
    "gpu_waits",
    "memory_mb",
    *chain.from_iterable(of_parts("SPEEDS")),
)
BEST = "metric_for_best_model"
OF_ONE_RUN = ("path", "config", "callbacks", "rows")  # in a checkpoint


def newest(output_dir: Path) -> Path:
    """The newest checkpoint of a run."""
    return max((output_dir / "checkpoints").glob("step_*.pt"))


def metrics_lines(output_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def differences(whole: Path, other: Path, weights: dict[str, list[str]] | None = None) -> list[str]:
    """How two output directories differ, as texts that name an entry each: tensors first, then metrics, then the rest.

    Options, paths and speeds may differ. weights: names for those of each optimizer, in the order of its state_dict.
    """
    first, second = (_entries(output_dir, weights or {}) for output_dir in (whole, other))
    found, every = [], {**first, **second}
    for name in sorted(every, key=lambda name: (not torch.is_tensor(every[name]), name[:13] != "metrics.jsonl")):
        one, two = (entries.get(name, "missing") for entries in (first, second))
        if digest(one) != digest(two):
            by = f"is {one!r}, then {two!r}"
            if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor) and one.shape == two.shape:
                by = f"differs by {(one.double() - two.double()).abs().max().item():.3g}"
            found.append(f"{name} {by}")
    return found


def _entries(output_dir: Path, weights: dict[str, list[str]]) -> dict[str, Any]:
    content = {
        name: part for name, part in whole_tree(storage.read(newest(output_dir))).items() if name not in OF_ONE_RUN
    }
    entries = {}
    for (part, *keys), value in named_leaves(content):
        name = ".".join(map(str, keys))
        if part in weights and len(keys) == 3 and keys[0] == "state":
            name = f"{keys[2].removesuffix('_buffer')} of {weights[part][keys[1]]}"
        entries[f"{part}: {name}" if name else part] = value
    for line in metrics_lines(output_dir):
        where = f"metrics.jsonl: {line['split']} of step {line['step']}:"
        entries |= {f"{where} {name}": value for name, value in line.items() if name not in SPEEDS}
    return entries


def update_differences(one: Path, other: Path, limit: float, kinds: Sequence[str]) -> tuple[float, list[str]]:
    """By which part of its update the state of two runs differs, at most; and a text, if that is above `limit`.

    Both directories have files of save_state: step_0.pt, and those of later steps. kinds: how names to compare begin.
    """
    steps = sorted(int(path.stem.removeprefix("step_")) for path in one.glob("step_*.pt"))
    before, largest = torch.load(one / "step_0.pt"), 0.0
    for step in steps[1:]:
        first, second = (torch.load(folder / f"step_{step}.pt") for folder in (one, other))
        for kind in kinds:
            names = [name for name in first if name.startswith(kind)]
            apart = {name: _distance(first[name], second.get(name)) for name in names}
            update = math.hypot(*(_distance(first[name], before.get(name), finite=True) for name in names))
            if not update and kind == "weights." and step == steps[-1]:
                return largest, [f"no weight changed in {step} steps"]
            part = math.hypot(*apart.values()) / (update or 1.0)
            largest = max(largest, part)
            if not part <= limit:  # also NaN
                name = max(apart, key=lambda name: apart[name]).split(".", 2)[2]
                return largest, [f"{name} and others differ by {part:.2g} of the update of step {step}"]
    return largest, []


def metric_differences(
    one: Path, other: Path, best: Callable[[Any], float], limits: tuple[float, float]
) -> tuple[list[str], list[str]]:
    """How the losses of two runs differ, and what `best` makes of metrics; and the names of other metrics that differ.

    limits: how far losses, and other metrics, may be apart, as a part of their value or as a number.
    """
    first, second = (
        {(line["split"], line["step"]): line | ({BEST: best(line)} if line["split"] == "val" else {}) for line in lines}
        for lines in (metrics_lines(one), metrics_lines(other))
    )
    found, names = [], []
    for (split, step), line in first.items():
        for name, value in line.items():
            divided = second.get((split, step), {}).get(name, math.nan)
            if name in SPEEDS or str(value) == str(divided):
                continue
            limit = limits[name != "loss"]
            if math.isclose(float(value), float(divided), rel_tol=limit, abs_tol=limit):
                continue
            if name in ("loss", BEST):
                found.append(f"{split} {name} of step {step} is {value:.6g}, and {divided:.6g} if the batch is divided")
            else:
                names.append(f"{split} {name}")
    return found, [*dict.fromkeys(names)]


def _distance(one: torch.Tensor, other: torch.Tensor | None, *, finite: bool = False) -> float:
    """The norm of the difference; with `finite`, of the numbers that are finite."""
    if other is None or one.shape != other.shape:
        return 0.0 if finite else math.inf
    same, dtype = (one == other) | (one.isnan() & other.isnan()), torch.cdouble if one.is_complex() else torch.double
    apart = torch.where(same, 0.0, one.to(dtype) - other)
    return torch.linalg.vector_norm(apart[apart.isfinite()] if finite else apart).item()
