"""Images/s of this project and of other ways to train, with the same model, batch, data and processes.

    make bench                                  from the repository: creates its own environment; about half an hour
    make bench ARGS='--repetitions 1 --cases toy-b128-p2'

Each contestant is a script in loops/, written as its own documentation recommends. It runs under torchrun, timed from
outside by loops/timed.py. The limit is the DDP step alone, again and again on one batch on the device. In each
repetition all contestants take turns, so that a noisy machine affects all of them equally; ratios are computed within a
repetition. The difference between this project and the limit is too small for that: these two take turns in the same
processes, every 50 steps. Prints tables in Markdown; writes results.json and a plot.

A machine with GPUs has other cases: ToyModel, ResNet-18 and ResNet-50, also in bf16.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from made_up import cifar10, jpegs

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
NAIVE, OURS, LIMIT = "naive", "this project", "limit"
SCRIPTS = {
    NAIVE: "naive.py",
    "Accelerate": "accelerate_loop.py",
    "Fabric": "fabric_loop.py",
    "Ignite": "ignite_loop.py",
    LIMIT: "limit.py",
}
ALL = (NAIVE, "Accelerate", "Fabric", "Ignite", OURS, LIMIT)
SLICE = 50  # steps, as in loops/timed.py
CIFAR10 = 50_000  # images
WARM_UP = 0.2  # of the steps
RUN_TIMEOUT_S = 1800


@dataclass
class Case:
    """One comparison. `batch`: images per process. `flags`: options that all contestants accept."""

    name: str
    title: str
    processes: int
    batch: int
    steps: int
    dataset: str = "cifar10"
    model: str = "ToyModel"
    image_size: int = 32
    flags: tuple[str, ...] = ()
    contestants: tuple[str, ...] = ALL
    slices: int = 12  # the minimum number, to compare with the limit
    speeds: dict[str, list[float]] = field(default_factory=dict)  # images/s of all processes, by contestant
    parts: list[float] = field(default_factory=list)  # this project's speed / the limit's, which take turns


def cases_for(gpus: int) -> list[Case]:
    """The cases for a machine with `gpus` GPUs."""
    if gpus == 0:
        return [
            Case("toy-b16-p1", "ToyModel, batch 16, 1 process", 1, 16, 800),
            Case("toy-b16-p2", "ToyModel, batch 16, 2 processes", 2, 16, 800),
            Case("toy-b128-p1", "ToyModel, batch 128, 1 process", 1, 128, 250),
            Case("toy-b128-p2", "ToyModel, batch 128, 2 processes", 2, 128, 190),
            Case("jpeg-b64-p2", "JPEG files, batch 64, 2 processes", 2, 64, 46, dataset="imagefolder", image_size=128),
        ]
    fast = ("--precision", "bf16", "--channels-last")
    cases = [Case("toy-b128", f"ToyModel, batch 128, GPUs: {gpus}", gpus, 128, min(1000, 50_000 // (128 * gpus) - 1))]
    for model, batch in (("resnet18", 256), ("resnet50", 128)):
        for flags in ((), fast, (*fast, "--compile")):
            title = " ".join((f"{model}, 224 x 224, batch {batch}, 1 GPU", *flags))
            name = f"{model}{''.join(flags).replace('--precision', '').replace('--', '-')}"
            # One GPU: synthetic data have 10,000 images, and at the end of an epoch the project would evaluate.
            both, steps = (OURS, LIMIT), 10_000 // batch - 1
            cases.append(Case(name, title, 1, batch, steps, "synthetic", model, 224, flags, both))
    return cases


class Bench:
    """Folders and commands of one benchmark run."""

    def __init__(self, folder: Path, data_dir: Path | None) -> None:
        self.folder, self.given = folder, data_dir
        command = [
            sys.executable,
            "-m",
            "cookiecutter",
            "--no-input",
            "--output-dir",
            str(folder / "project"),
            str(REPOSITORY),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (self.project,) = (folder / "project").iterdir()

    def data_dir(self, case: Case) -> Path:
        """The images of `case`; the first call makes them."""
        if case.dataset == "cifar10" and self.given is not None:
            return self.given
        made = self.folder / case.dataset
        if not made.exists():
            {"cifar10": cifar10, "imagefolder": jpegs}.get(case.dataset, Path.mkdir)(made)
        return made

    def speed(self, case: Case, contestant: str) -> float:
        """Run `contestant` once. Returns images/s of all processes, after the warm-up."""
        at = self._run(case, contestant, case.steps)["steps"]
        first = int(WARM_UP * len(at))
        return (len(at) - 1 - first) * case.batch * case.processes / (at[-1] - at[first])

    def part_of_limit(self, case: Case) -> float:
        """This project's speed / the limit's: the median over slices of steps, without slices with an epoch's end."""
        epoch = CIFAR10 // (case.batch * case.processes)
        steps = max(case.steps, case.slices * SLICE)
        found = self._run(case, OURS, steps, "--compare-limit", shlex.join(self._model(case, LIMIT)))
        begins = range(SLICE, steps, SLICE)
        whole = [times for begin, times in zip(begins, found["slices"], strict=False) if begin % epoch + SLICE < epoch]
        return statistics.median(limit / ours for ours, limit in whole)

    def _model(self, case: Case, contestant: str) -> list[str]:
        options = ["--model", case.model, "--batch-size", str(case.batch), "--image-size", str(case.image_size)]
        return [*options, *case.flags, *(() if contestant == OURS else ("--project", str(self.project)))]

    def _run(self, case: Case, contestant: str, steps: int, *timing: str) -> dict[str, list[Any]]:
        """Run `contestant`. Returns what loops/timed.py writes."""
        times, output, log = self.folder / "times.json", self.folder / "output", self.folder / "log"
        shutil.rmtree(output, ignore_errors=True)
        times.unlink(missing_ok=True)
        data = self.data_dir(case)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        command += [f"--nproc-per-node={case.processes}", str(HERE / "loops/timed.py")]
        command += ["--steps", str(steps), "--times", str(times), *timing]
        if case.dataset == "cifar10" and self.given is None:
            command += ["--cifar10", str(data)]
        if contestant == OURS:
            command += [str(self.project / "main.py"), "--output-dir", str(output), "--checkpoint-every", "1000"]
        else:
            command.append(str(HERE / "loops" / SCRIPTS[contestant]))
        command += self._model(case, contestant)
        if contestant != LIMIT:
            command += ["--dataset", case.dataset, "--data-dir", str(data)]
        threads = max(1, (os.cpu_count() or 1) // case.processes)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        with log.open("w") as file:
            done = subprocess.run(
                command, env=environment, stdout=file, stderr=file, cwd=self.folder, timeout=RUN_TIMEOUT_S
            )
        if done.returncode != 0:
            sys.exit(f"{contestant}, {case.title}, exited with {done.returncode}:\n{log.read_text()[-3000:]}")
        return json.loads(times.read_text())


def table(case: Case) -> list[str]:
    """Medians, and the range of the ratios, which are computed within each repetition."""
    lines = [f"**{case.title}**", "", "| | images/s | times naive | of the limit |", "|---|--:|--:|--:|"]
    for name, speeds in case.speeds.items():
        to_naive = _ratios(speeds, case.speeds.get(NAIVE, [])) if name != NAIVE else [1.0]
        of_limit = case.parts if name == OURS and case.parts else _ratios(speeds, case.speeds.get(LIMIT, []))
        cells = [f"{statistics.median(speeds):,.0f}", _shown(to_naive, "{:.2f}"), _shown(of_limit, "{:.1%}")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, ""]


def _ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(ours, theirs, strict=False)]


def _shown(ratios: Sequence[float], form: str) -> str:
    if not ratios:
        return "-"
    spread = f" ({form.format(min(ratios))} to {form.format(max(ratios))})" if min(ratios) < max(ratios) else ""
    return form.format(statistics.median(ratios)) + spread


def plot(cases: Sequence[Case], path: Path) -> None:
    """Draw each contestant's speed as a part of the limit, as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(cases), figsize=(2.9 * len(cases), 3.2), sharey=True, squeeze=False)
    for panel, case in zip(panels[0], cases, strict=True):
        names = [name for name in case.speeds if name != LIMIT]
        limit = statistics.median(case.speeds[LIMIT])
        parts = [100 * statistics.median(case.speeds[name]) / limit for name in names]
        if case.parts and OURS in names:
            parts[names.index(OURS)] = 100 * statistics.median(case.parts)
        colours = ["#1f6feb" if name == OURS else "#9aa4af" for name in names]
        bars = panel.bar(names, parts, color=colours)
        panel.bar_label(bars, fmt="%.0f", padding=2, fontsize=8)
        panel.axhline(100, color="black", linewidth=0.8)
        panel.set_title(case.title, fontsize=8)
        panel.set_ylim(0, 115)
        panel.tick_params(axis="x", rotation=60, labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("images/s, in % of the limit")
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def machine() -> str:
    names = ("torch", "torchvision", "accelerate", "lightning-fabric", "pytorch-ignite")
    versions = ", ".join(f"{name} {_version(name)}" for name in names)
    gpus = torch.cuda.device_count()
    device = f"{gpus} x {torch.cuda.get_device_name(0)}, " if gpus else ""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return f"{device}{model}, {os.cpu_count()} cores, Linux; Python {platform.python_version()}, {versions}"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "(not installed)"


def main() -> None:
    gpus = torch.cuda.device_count()
    cases = cases_for(gpus)
    parser = argparse.ArgumentParser(description="Training speed of this project and of others.")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in cases], metavar="NAME")
    parser.add_argument("--contestants", nargs="+", choices=ALL, default=ALL, metavar="NAME")
    parser.add_argument("--steps", type=float, default=1.0, help="multiply the number of steps by this")
    parser.add_argument("--data-dir", type=Path, help="directory of CIFAR-10; default: made-up images of its size")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "build/bench", metavar="DIR")
    options = parser.parse_args()
    cases = [case for case in cases if options.cases is None or case.name in options.cases]
    for case in cases:
        case.steps = max(10, int(case.steps * options.steps))
        case.slices = max(4, int(case.slices * options.steps))
    options.output.mkdir(parents=True, exist_ok=True)

    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        bench = Bench(Path(folder), options.data_dir)
        for number in range(options.repetitions):
            for case in cases:
                for name in (name for name in case.contestants if name in options.contestants):
                    speed = bench.speed(case, name)
                    case.speeds.setdefault(name, []).append(speed)
                    print(f"{number + 1}/{options.repetitions}  {case.name:<14} {name:<14} {speed:10,.0f}", flush=True)
                takes_turns = case.dataset == "cifar10" and CIFAR10 // (case.batch * case.processes) > 3 * SLICE
                if takes_turns and {OURS, LIMIT} <= set(options.contestants):
                    case.parts.append(bench.part_of_limit(case))
    print()
    for case in cases:
        print("\n".join(table(case)))
    print(machine())
    results = {
        "machine": machine(),
        "images_per_s": {case.name: case.speeds for case in cases},
        "of_the_limit": {case.name: case.parts for case in cases},
    }
    (options.output / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    if all(LIMIT in case.speeds for case in cases):
        plot(cases, options.output / "speed.png")
        print(f"plot: {options.output / 'speed.png'}")


if __name__ == "__main__":
    main()
