"""Speed of this checkout and of another one, such as a commit before a change: which of them trains faster?

    git worktree add /tmp/before COMMIT
    build/bench-venv/bin/python benchmarks/versions.py /tmp/before --cases toy-b16-p2 toy-b128-p1

Both versions train the same made-up images. They run at the same time, and take turns of a second: while one runs, all
processes of the other are stopped (SIGSTOP). So a noisy machine affects both equally. Prints the ratio of their step
times: its median over pairs of turns, and the middle half. Each pair of turns begins with the other version.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import psutil
from training import HERE, REPOSITORY, Case, cases_for

from made_up import cifar10

TEMPLATE = "{{cookiecutter.project_slug}}"
TURN_S = 1.0
FIRST_STEPS = 20  # which are not counted


class Version:
    """One checkout, training."""

    def __init__(self, checkout: Path, case: Case, steps: int, folder: Path, images: Path) -> None:
        self.folder = folder
        self.times, self.log = folder / "times.json", folder / "log"
        folder.mkdir()
        options = ["--model", case.model, "--batch-size", str(case.batch), "--dataset", "cifar10"]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        command += [f"--nproc-per-node={case.processes}", str(HERE / "loops/timed.py")]
        command += ["--steps", str(steps), "--times", str(self.times), "--cifar10", str(images)]
        command += [str(checkout / TEMPLATE / "main.py"), *options, "--data-dir", str(images)]
        command += ["--output-dir", str(folder / "run"), "--epochs", "1000", "--checkpoint-every", "1000000"]
        threads = max(1, (os.cpu_count() or 1) // case.processes)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder)

    def send(self, number: int) -> None:
        with suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            for process in [parent, *parent.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)

    def has_begun(self) -> bool:
        metrics = self.folder / "run/metrics.jsonl"
        return self.process.poll() is not None or (metrics.exists() and metrics.stat().st_size > 0)

    def result(self) -> list[float]:
        """When each step ended, in seconds of time.perf_counter, which all processes of a machine share."""
        if self.process.wait() != 0:
            sys.exit(f"a version exited with {self.process.returncode}:\n{self.log.read_text()[-3000:]}")
        return json.loads(self.times.read_text())["steps"]


def turns(case: Case, steps: int, checkouts: list[Path], folder: Path, images: Path) -> list[float]:
    """Step time of the first checkout / that of the second, for each pair of turns."""
    versions = []
    for number, checkout in enumerate(checkouts):
        versions.append(Version(checkout, case, steps, folder / f"{case.name}-{number}", images))
        while not versions[-1].has_begun():  # one after the other: to start is slow
            time.sleep(0.1)
        versions[-1].send(signal.SIGSTOP)
    pairs: list[list[tuple[float, float]]] = []
    order = [0, 1]
    while all(version.process.poll() is None for version in versions):
        pair = [(0.0, 0.0), (0.0, 0.0)]
        for number in order:
            versions[number].send(signal.SIGCONT)
            start = time.perf_counter()
            with suppress(subprocess.TimeoutExpired):
                versions[number].process.wait(TURN_S)
            pair[number] = (start, time.perf_counter())
            versions[number].send(signal.SIGSTOP)
        pairs.append(pair)
        order.reverse()
    for version in versions:
        version.send(signal.SIGCONT)
    ends = [version.result() for version in versions]
    found = [[_step_s(ends[number], *pair[number]) for number in (0, 1)] for pair in pairs[:-1]]
    return [ours / theirs for ours, theirs in found if ours and theirs]


def _step_s(ends: list[float], start: float, end: float) -> float | None:
    """The mean duration of the steps within a turn; an evaluation, or the turn's first step, is no step."""
    inside = [at for at in ends[FIRST_STEPS:] if start < at < end]
    durations = [after - before for before, after in pairwise(inside)]
    if len(durations) < 5:
        return None
    longest = 20 * statistics.median(durations)
    return statistics.mean(duration for duration in durations if duration < longest)


def main() -> None:
    cases = {case.name: case for case in cases_for(0) if case.dataset == "cifar10"}
    parser = argparse.ArgumentParser(description="Compare the speed of two checkouts of ddp-template.")
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--cases", nargs="+", choices=cases, default=list(cases))
    parser.add_argument("--seconds", type=float, default=60.0, help="of training, per version and case")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="versions-") as name:
        images = Path(name) / "cifar10"
        cifar10(images)
        for case in (cases[key] for key in options.cases):
            step_s = 0.0022 * case.batch**0.6  # only to choose the number of steps
            steps = FIRST_STEPS + int(options.seconds / step_s)
            ratios = turns(case, steps, [REPOSITORY, options.other.resolve()], Path(name), images)
            shutil.rmtree(Path(name) / f"{case.name}-0", ignore_errors=True)
            if len(ratios) < 2:
                sys.exit("too few turns: raise --seconds")
            low, middle, high = statistics.quantiles(ratios, n=4)
            other = f"{1 / middle:.3f} ({1 / high:.3f} to {1 / low:.3f})"
            print(f"{case.title:<34} speed of this version / the other: {other}, {len(ratios)} pairs", flush=True)


if __name__ == "__main__":
    main()
