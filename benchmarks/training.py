"""Images/s of this project and of other ways to train, with the same model, batch, data and processes.

    make bench                                  from the repository: creates its own environment; about half an hour
    make bench ARGS='--repetitions 1 --cases toy-b128-p2'

Each contestant is a script in loops/, written as its own documentation recommends. It runs under torchrun, timed from
outside by loops/timed.py. The limit is the DDP step alone, again and again on one batch on the device. In each
repetition all contestants take turns, so that a noisy machine affects all of them equally; ratios are computed within a
repetition. The difference between this project and the limit is too small for that: these two take turns in the same
processes, every 50 steps. Prints tables in Markdown; writes results.json after each measurement, and a plot.

A contestant that fails, or runs longer than half an hour, does not end the others: it is a row of the table, and its
log is kept next to results.json. The exit code is then 1.

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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from made_up import cifar10, jpegs

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
sys.path.insert(0, str(REPOSITORY / "tests"))

from template_copy import copy_template  # noqa: E402

NAIVE, OURS, LIMIT = "naive", "this project", "limit"
SCRIPTS = {
    NAIVE: "naive.py",
    "Accelerate": "accelerate_loop.py",
    "Fabric": "fabric_loop.py",
    "Ignite": "ignite_loop.py",
    LIMIT: "limit.py",
}
ALL = (NAIVE, "Accelerate", "Fabric", "Ignite", OURS, LIMIT)
IN_TURNS = f"{OURS}, in turns with the {LIMIT}"
EPOCHS = {"cifar10": 50_000, "synthetic": 10_000}  # images of an epoch, validation included
WARM_UP = 0.2  # of the steps
RUN_TIMEOUT_S = 1800
EXIT_GRACE_S = 45  # torchrun kills ranks that have not exited 30 s after SIGTERM


class RunFailed(Exception):
    """A contestant failed. The message is for its row of the table."""


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
    slice: int = 50  # steps in each
    # One value per repetition, None if it failed: images/s of all processes, by contestant.
    speeds: dict[str, list[float | None]] = field(default_factory=dict)
    parts: list[float | None] = field(default_factory=list)  # this project's speed / the limit's, which take turns
    failures: dict[str, list[str]] = field(default_factory=dict)  # by contestant, or IN_TURNS


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
            cases.append(Case(name, title, 1, batch, steps, "synthetic", model, 224, flags, both, slice=10))
    return cases


class Bench:
    """Folders and commands of one benchmark run. `logs`: where the logs of failed contestants are kept."""

    def __init__(self, folder: Path, data_dir: Path | None, logs: Path) -> None:
        self.folder, self.given, self.logs = folder, data_dir, logs
        self.project = copy_template(folder / "project")

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
        epoch = EPOCHS[case.dataset] // (case.batch * case.processes)
        steps = max(case.steps, case.slices * case.slice)
        timing = ("--slice", str(case.slice), "--compare-limit", shlex.join(self._model(case, LIMIT)))
        slices = zip(
            range(case.slice, steps, case.slice), self._run(case, OURS, steps, *timing)["slices"], strict=False
        )
        whole = [times for begin, times in slices if begin % epoch + case.slice < epoch]
        return statistics.median(limit / ours for ours, limit in whole)

    def _model(self, case: Case, contestant: str) -> list[str]:
        options = ["--model", case.model, "--batch-size", str(case.batch), "--image-size", str(case.image_size)]
        return [*options, *case.flags, *(() if contestant == OURS else ("--project", str(self.project)))]

    def _run(self, case: Case, contestant: str, steps: int, *timing: str) -> dict[str, list[Any]]:
        """Run `contestant`. Returns what loops/timed.py writes. Raises RunFailed; its log is then in `self.logs`."""
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
            problem = _wait(subprocess.Popen(command, env=environment, stdout=file, stderr=file, cwd=self.folder))
        if problem is None and not times.exists():
            problem = "wrote no times"
        if problem is not None:
            number = len(list(self.logs.glob("failed-*.log"))) + 1
            kept = self.logs / f"failed-{number}-{case.name}-{contestant.replace(' ', '-')}.log"
            shutil.copy(log, kept)
            raise RunFailed(f"{problem}, see {kept.name}")
        return json.loads(times.read_text())


def _wait(process: subprocess.Popen[bytes]) -> str | None:
    """Wait until torchrun ends, at most RUN_TIMEOUT_S. Returns what went wrong. No process of it is left."""
    ranks: list[psutil.Process] = []
    try:
        code = process.wait(RUN_TIMEOUT_S)
        return None if code == 0 else f"exit code {code}"
    except subprocess.TimeoutExpired:
        return f"not done within {RUN_TIMEOUT_S} s"
    finally:
        if process.poll() is None:
            ranks = psutil.Process(process.pid).children(recursive=True)
            process.terminate()  # torchrun ends its ranks, which are in process groups of their own
            with suppress(subprocess.TimeoutExpired):
                process.wait(EXIT_GRACE_S)
            process.kill()
            process.wait()
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.kill()
        psutil.wait_procs(ranks, timeout=EXIT_GRACE_S)


def table(case: Case) -> list[str]:
    """Medians, and the range of the ratios, which are computed within each repetition."""
    lines = [f"**{case.title}**", "", "| | images/s | times naive | of the limit |", "|---|--:|--:|--:|"]
    for name, speeds in case.speeds.items():
        done = [speed for speed in speeds if speed is not None]
        to_naive = _ratios(speeds, case.speeds.get(NAIVE, []))
        in_turns = [part for part in case.parts if part is not None] if name == OURS else []
        of_limit = in_turns or _ratios(speeds, case.speeds.get(LIMIT, []))
        notes = [f"{statistics.median(done):,.0f}"] if done else []
        notes += [f"failed: {failure}" for failure in case.failures.get(name, [])]
        cells = ["; ".join(notes), _shown(to_naive, "{:.2f}"), _shown(of_limit, "{:.1%}")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    if IN_TURNS in case.failures:
        lines.append(f"| {IN_TURNS} | failed: {'; failed: '.join(case.failures[IN_TURNS])} | - | - |")
    return [*lines, ""]


def _ratios(ours: Sequence[float | None], theirs: Sequence[float | None]) -> list[float]:
    pairs = zip(ours, theirs, strict=False)
    return [one / other for one, other in pairs if one is not None and other is not None]


def _shown(ratios: Sequence[float], form: str) -> str:
    if not ratios:
        return "-"
    spread = f" ({form.format(min(ratios))} to {form.format(max(ratios))})" if min(ratios) < max(ratios) else ""
    return form.format(statistics.median(ratios)) + spread


def plot(cases: Sequence[Case], path: Path) -> None:
    """Draw each contestant's speed as a part of the limit, as bars. `cases`: those with a result of the limit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(cases), figsize=(2.9 * len(cases), 3.2), sharey=True, squeeze=False)
    for panel, case in zip(panels[0], cases, strict=True):
        names = [name for name in case.speeds if name != LIMIT]
        limit = _median(case.speeds[LIMIT])
        parts = [100 * _median(case.speeds[name]) / limit for name in names]
        if OURS in names and _has_values(case.parts):
            parts[names.index(OURS)] = 100 * _median(case.parts)
        colours = ["#1f6feb" if name == OURS else "#9aa4af" for name in names]
        bars = panel.bar(names, parts, color=colours)
        panel.bar_label(bars, [f"{part:.0f}" if part else "failed" for part in parts], padding=2, fontsize=8)
        panel.axhline(100, color="black", linewidth=0.8)
        panel.set_title(case.title, fontsize=8)
        panel.set_ylim(0, 115)
        panel.tick_params(axis="x", rotation=60, labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("images/s, in % of the limit")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _has_values(values: Sequence[float | None]) -> bool:
    return any(value is not None for value in values)


def _median(values: Sequence[float | None]) -> float:
    """The median of the repetitions that did not fail; 0 if all did."""
    return statistics.median([value for value in values if value is not None] or [0.0])


def write_results(cases: Sequence[Case], path: Path) -> None:
    """Write everything that is known so far; a reader never sees a part of it."""
    results = {
        "machine": machine(),
        "images_per_s": {case.name: case.speeds for case in cases},
        "of_the_limit": {case.name: case.parts for case in cases},
        "failures": {case.name: case.failures for case in cases if case.failures},
    }
    tmp_path = path.with_name(f"{path.name}.tmp")
    tmp_path.write_text(json.dumps(results, indent=2) + "\n")
    tmp_path.replace(path)


def repetition(bench: Bench, case: Case, contestants: Sequence[str], prefix: str, save: Callable[[], None]) -> None:
    """Measure every contestant once. Calls `save` after each."""

    def measure(name: str, action: Callable[[], float]) -> float | None:
        try:
            result = action()
        except RunFailed as error:
            case.failures.setdefault(name, []).append(str(error))
            print(f"{prefix}{name} failed: {error}", flush=True)
            return None
        print(f"{prefix}{name:<14} {result:10,.{0 if name != IN_TURNS else 3}f}", flush=True)
        return result

    for name in contestants:
        case.speeds.setdefault(name, []).append(measure(name, partial(bench.speed, case, name)))
        save()
    takes_turns = EPOCHS.get(case.dataset, 0) // (case.batch * case.processes) > 3 * case.slice
    if takes_turns and {OURS, LIMIT} <= set(contestants):
        case.parts.append(measure(IN_TURNS, partial(bench.part_of_limit, case)))
        save()


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

    save = partial(write_results, cases, options.output / "results.json")
    for log in options.output.glob("failed-*.log"):  # of an earlier benchmark
        log.unlink()

    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        bench = Bench(Path(folder), options.data_dir, options.output)
        for number in range(options.repetitions):
            for case in cases:
                contestants = [name for name in case.contestants if name in options.contestants]
                repetition(bench, case, contestants, f"{number + 1}/{options.repetitions}  {case.name:<14} ", save)
    print()
    for case in cases:
        print("\n".join(table(case)))
    print(machine())
    if drawn := [case for case in cases if _has_values(case.speeds.get(LIMIT, []))]:
        plot(drawn, options.output / "speed.png")
        print(f"plot: {options.output / 'speed.png'}")
    if failed := sum(len(failures) for case in cases for failures in case.failures.values()):
        sys.exit(f"{failed} of the measurements failed: see the tables above, and the logs in {options.output}")


if __name__ == "__main__":
    main()
