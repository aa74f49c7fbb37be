"""The results of benchmark.py as a table, as CSV and as a plot."""

import csv
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ddp.core.errors import plural

ONE, PARALLEL, WEAK, STRONG = "one process", "DataParallel", "DDP, weak", "DDP, strong"
NO_SYNC, NO_TERMS, DATA = "without all-reduce", "without loss_terms", "with real data"
MAX_SPREAD, MAX_EFFICIENCY = 0.3, 1.15  # above that, other programs disturbed the measurement


@dataclass(frozen=True)
class Row:
    """One measurement: `kind` of training on `processes`, or GPUs of DataParallel, with `batch` samples on each."""

    kind: str
    processes: int
    batch: int
    samples_per_s: float
    memory_mb: float = 0.0  # the peak of a process so far, beyond what it used before


@dataclass(frozen=True)
class Line:
    """The measurements of one kind, over all rounds; speed-up and efficiency against one process, if there was one."""

    kind: str
    processes: int
    batch: int
    samples_per_s: float
    min: float
    max: float
    speed_up: float | None
    efficiency: float | None
    memory_mb: float = 0.0


def summarize(rows: Sequence[Row]) -> list[Line]:
    """One line per kind and number of processes, in the order in which they were first measured."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.kind, row.processes), []).append(row)
    alone = [row.samples_per_s for row in rows if row.kind == ONE]
    lines = []
    for (kind, processes), group in groups.items():
        speeds = [row.samples_per_s for row in group]
        middle = statistics.median(speeds)
        speed_up = middle / statistics.median(alone) if alone else None
        efficiency = speed_up / processes if speed_up is not None else None
        spread, memory = (min(speeds), max(speeds)), group[0].memory_mb
        lines.append(Line(kind, processes, group[0].batch, middle, *spread, speed_up, efficiency, memory))
    return lines


def table(lines: Sequence[Line]) -> str:
    """Samples/s, speed-up and efficiency of each line."""
    text_lines = [f"{'':<28}{'batch each':>10}{'samples/s':>12}{'spread':>9}{'speed-up':>11}{'efficiency':>12}"]
    for line in lines:
        if line.kind in (NO_SYNC, NO_TERMS, DATA):
            continue
        spread = (line.max - line.min) / line.samples_per_s
        text = f"{_who(line):<28}{line.batch:>10}{line.samples_per_s:>12,.0f}{spread:>9.0%}"
        if line.speed_up is not None and line.efficiency is not None:
            text += f"{line.speed_up:>11.2f}{line.efficiency:>12.0%}"
        text_lines.append(text)
    return "\n".join(text_lines)


def _who(line: Line) -> str:
    if line.kind == ONE:
        return ONE
    if line.kind == PARALLEL:
        return f"DataParallel, {line.processes} GPUs"
    if line.kind.startswith("--"):
        return f"{line.kind}, {plural(line.processes, 'process', 'es')}"
    who = f"DDP, {plural(line.processes, 'process', 'es')}"
    return who if line.processes == 1 else f"{who}, {line.kind.removeprefix('DDP, ')}"


def memory_table(lines: Sequence[Line]) -> str:
    """The memory of DDP, and of what replaces it, for each number of processes."""
    shown = [line for line in lines if line.kind == WEAK or line.kind.startswith("--")]
    return "\n".join(f"{_who(line):<28}{line.memory_mb:>12,.0f} MB" for line in shown)


def breakdown(lines: Sequence[Line]) -> str:
    """Where the time of a DDP step goes, for each number of processes.

    communication: how much longer a step takes than without all-reduce. data: how much longer it takes on real batches.
    loss_terms: how much longer it takes than without, if model.py defines it.
    """
    text_lines = []
    for processes in sorted({line.processes for line in lines if line.kind == WEAK}):
        speeds = {line.kind: line.samples_per_s for line in lines if line.processes == processes}
        silent, resident = 1 / speeds[NO_SYNC], 1 / speeds[WEAK]
        real = 1 / speeds.get(DATA, speeds[WEAK])
        whole = max(silent, resident, real)
        parts = {"communication": max(0.0, resident - silent) / whole} if processes > 1 else {}
        parts |= {"data": max(0.0, real - resident) / whole} if DATA in speeds else {}
        parts = {"compute": 1 - sum(parts.values()), **parts}
        shown = "  ".join(f"{name} {part:>4.0%}" for name, part in parts.items())
        largest = max(parts, key=parts.__getitem__)
        if NO_TERMS in speeds:
            largest += f"   (loss_terms of model.py: {1 - speeds[WEAK] / speeds[NO_TERMS]:.1%} of the step)"
        text_lines.append(f"{plural(processes, 'process', 'es'):<14}{shown}   limited by {largest}")
    return "\n".join(text_lines)


def warning(lines: Sequence[Line]) -> str:
    """Why these figures cannot be trusted; empty if they can."""
    spread = max((line.max - line.min) / line.samples_per_s for line in lines)
    efficiency = max((line.efficiency or 0.0) for line in lines)
    if spread <= MAX_SPREAD and efficiency <= MAX_EFFICIENCY:
        return ""
    why = f"the rounds differ by up to {spread:.0%}" if spread > MAX_SPREAD else f"an efficiency of {efficiency:.0%}"
    return f"Unsteady, {why}: other programs use this machine. Stop them, or raise --repeats and --seconds."


def write_csv(path: Path, lines: Sequence[Line]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(vars(lines[0])))
        writer.writeheader()
        writer.writerows(vars(line) for line in lines)


def plot(path: Path, title: str, lines: Sequence[Line]) -> None:
    """Samples/s by processes. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for kind, mark in ((WEAK, "o-"), (STRONG, "s--"), (PARALLEL, "^")):
        points = [line for line in lines if line.kind == kind]
        if points:
            axes.plot([line.processes for line in points], [line.samples_per_s for line in points], mark, label=kind)
    alone = next((line for line in lines if line.kind == ONE), None)
    if alone is not None:
        most = max(line.processes for line in lines)
        ideal = [alone.samples_per_s * processes for processes in (1, most)]
        axes.plot((1, most), ideal, ":", color="gray", label="one process, scaled")
    axes.set(title=title, xlabel="processes", ylabel="samples/s", ylim=(0, None))
    axes.set_xticks(sorted({line.processes for line in lines}))
    axes.legend()
    figure.savefig(path, dpi=150)


def show(config: Any, output: Path, title: str, rows: Sequence[Row]) -> None:
    """Print the tables; write benchmark.csv and, with matplotlib, benchmark.png."""
    lines = summarize(rows)
    print(f"{title}\n\n{table(lines)}")
    print("spread: between the rounds. weak: each process has a whole batch; strong: they share one.")
    if any(line.kind.startswith("--") for line in lines):  # of a part, instead of DDP
        print(f"\nMemory of a process, at its peak (on CPUs, with what malloc keeps):\n{memory_table(lines)}")
    if not any(line.kind == PARALLEL for line in lines) and any(line.kind == ONE for line in lines):
        print("DataParallel needs two GPUs.")
    if config.device == "cpu" or not torch.cuda.is_available():
        print("Processes on CPUs share the cores of their machine; one process alone uses all of them.")
    print(f"\nWhere the time of a step of DDP goes, with a batch of {config.batch_size} on each process:")
    print(breakdown(lines))
    if warning(lines):
        print(f"\n{warning(lines)}")
    output.mkdir(parents=True, exist_ok=True)
    write_csv(output / "benchmark.csv", lines)
    print(f"\n{output / 'benchmark.csv'}")
    try:
        plot(output / "benchmark.png", title, lines)
        print(output / "benchmark.png")
    except ImportError:
        print("to get a plot: pip install matplotlib")
