"""The cost of a slow network, and what compressed gradients and --grad-accum-steps save.

    sudo .venv/bin/python benchmarks/slow_network.py           from the repository; about 6 minutes

Two network namespaces are the machines. Each sends at most 100 Mbit/s, and runs one process with one thread. Each run
is measured twice: first without that limit, then with it. The kinds of runs take turns, --repetitions times; one kind
is a single machine. PowerSGD compresses from step 3 on: in its first hundred steps it would cost as much as no hook.
Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import NoReturn

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "tests"))

from template_copy import copy_template  # noqa: E402

from machines import Machine, machines  # noqa: E402

HOOKS, ACCUMULATE = ("none", "fp16", "bf16", "PowerSGD"), (1, 4)
WARM_UP = 5  # steps
# What main.py does after wrap_model: as in docs/recipes.md.
HOOKED = """
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook as power

        def one_by_one(state, bucket):
            future = power.powerSGD_hook(state, bucket)
            future.wait()
            return future

        hook = __import__("os").environ["HOOK"]
        if hook == "PowerSGD":
            ddp_model.register_comm_hook(power.PowerSGDState(None, start_powerSGD_iter=3), one_by_one)
        elif hook != "none":
            ddp_model.register_comm_hook(None, getattr(default_hooks, f"{hook}_compress_hook"))
"""
STEP_TIMEOUT_S = 120.0  # for the first step, and for each one after it


@dataclass
class Kind:
    """Runs with the same options, and their results: the median of each repetition."""

    hook: str
    accumulate: int
    machines: int = 2
    limited_ms: list[float] = field(default_factory=list)  # per step
    free_ms: list[float] = field(default_factory=list)
    sent_mb: list[float] = field(default_factory=list)  # per machine and step


class Training:
    """A run on one or two machines, which trains until it is killed."""

    def __init__(
        self, machines: list[Machine], project: Path, folder: Path, options: Sequence[object], hook: str
    ) -> None:
        self.machines, self.metrics = machines, folder / "metrics.jsonl"
        options = ["--dataset", "synthetic", "--device", "cpu", "--log-every", 1, "--output-dir", folder, *options]
        variables = {"NNODES": str(len(machines)), "MASTER_ADDR": machines[0].address, "NPROC_PER_NODE": "1"}
        variables |= {"PYTHON": sys.executable, "MAX_RESTARTS": "0", "TMPDIR": str(folder), "HOOK": hook}
        variables |= {"PYTHONDONTWRITEBYTECODE": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = ["bash", project / "launch_node.sh", "--", *options]
        self.nodes = [one.start(*command, NODE_RANK=str(rank), **variables) for rank, one in enumerate(machines)]

    def kill(self) -> None:
        for machine, node in zip(self.machines, self.nodes, strict=True):
            machine.kill()
            node.process.wait()

    def steps(self) -> list[float]:
        """The milliseconds of each step so far."""
        for node in self.nodes:
            node.output()  # so that its pipe never fills
            if node.process.poll() is not None:
                self.give_up(f"a run exited with {node.process.returncode}")
        lines = self.metrics.read_text().splitlines(keepends=True) if self.metrics.exists() else []
        whole = [json.loads(line) for line in lines if line.endswith("\n")]
        return [line["step_ms"] for line in whole if line["split"] == "train"]

    def give_up(self, why: str) -> NoReturn:
        last_lines = [line for node in self.nodes for line in node.output().splitlines()[-20:]]
        sys.exit("\n".join([f"error: {why}; its last output:", *last_lines]))

    def until(self, count: int) -> None:
        """Wait until `count` steps are done."""
        done, end = -1, time.monotonic() + STEP_TIMEOUT_S
        while done < count:
            now = len(self.steps())
            if now > done:
                done, end = now, time.monotonic() + STEP_TIMEOUT_S
            elif time.monotonic() > end:
                self.give_up(f"no step within {STEP_TIMEOUT_S:g} s")
            time.sleep(0.005)

    def measure(self, least: int, seconds: float) -> tuple[float, float]:
        """The median milliseconds of a step, and the MB that each machine sends in one step."""
        first = len(self.steps()) + 1  # one step is in flight
        self.until(first)
        sent, end = sum(machine.sent() for machine in self.machines), time.monotonic() + seconds
        self.until(first + least)
        while time.monotonic() < end:
            self.until(len(self.steps()) + 1)
        steps = self.steps()[first:]
        sent = sum(machine.sent() for machine in self.machines) - sent
        return statistics.median(steps), sent / len(self.machines) / len(steps) / 1e6


def copy_project(folder: Path) -> Path:
    """A copy of the project that compresses gradients as HOOK says."""
    project = copy_template(folder / "project")
    main = project / "main.py"
    text, changed = re.subn(
        r"^ +ddp_model = wrap_model.*\n", lambda found: found[0] + HOOKED, main.read_text(), flags=re.M
    )
    assert changed == 1, f"{main} does not call wrap_model"
    main.write_text(text)
    return project


def measure(kind: Kind, project: Path, arguments: argparse.Namespace) -> str:
    """Add a repetition. Returns the first line that the run prints: the model and its size."""
    options = ["--model", arguments.model, "--image-size", arguments.image_size, "--batch-size", arguments.batch_size]
    options += ["--grad-accum-steps", kind.accumulate]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, machines(2) as two:
        run = Training(two[: kind.machines], project, Path(folder), options, kind.hook)
        try:
            run.until(WARM_UP)
            free_ms, _ = run.measure(arguments.steps, 2)
            for machine in two:
                machine.limit(arguments.mbit)
            limited_ms, sent_mb = run.measure(arguments.steps, 4)
        finally:
            run.kill()
        kind.free_ms.append(free_ms)
        kind.limited_ms.append(limited_ms)
        kind.sent_mb.append(sent_mb)
        return next(line for line in run.nodes[0].output().splitlines() if line.endswith(" weights"))


def table(kinds: list[Kind], arguments: argparse.Namespace) -> str:
    """The results in Markdown; each is the median over the repetitions."""
    limit = f"{arguments.mbit} Mbit/s"
    lines = [
        f"| hook | `--grad-accum-steps` | MB sent per step | steps/s | samples/s at {limit} | without limit |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for kind in kinds:
        limited, free = (1000 / statistics.median(ms) for ms in (kind.limited_ms, kind.free_ms))
        samples = kind.machines * arguments.batch_size * kind.accumulate
        name = kind.hook if kind.machines > 1 else "one machine"
        figures = " | ".join(f"{figure:.3g}" for figure in (limited, limited * samples, free * samples))
        lines.append(f"| {name} | {kind.accumulate} | {statistics.median(kind.sent_mb):.2f} | {figures} |")
    return "\n".join(lines)


def spread(kinds: list[Kind]) -> float:
    """The largest difference between two repetitions of a kind at the limit, in percent."""
    return max(100 * (max(kind.limited_ms) / min(kind.limited_ms) - 1) for kind in kinds)


def where() -> str:
    """The machine and the versions."""
    names = [line.partition(": ")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    cores = len(os.sched_getaffinity(0))
    versions = f"Linux {platform.release()}, Python {platform.python_version()}, torch {metadata.version('torch')}"
    return f"{names[0] if names else platform.machine()}, {cores} cores, {versions}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Training over a slow network: compression and accumulation.")
    parser.add_argument("--model", default="resnet18", help="a classification model of torchvision (resnet18)")
    parser.add_argument("--image-size", type=int, default=32, help="in pixels (32)")
    parser.add_argument("--batch-size", type=int, default=8, help="samples per process and forward pass (8)")
    parser.add_argument("--mbit", type=int, default=100, help="what each machine may send, in Mbit/s (100)")
    parser.add_argument("--steps", type=int, default=3, help="minimum number of measured steps (3)")
    parser.add_argument("--repetitions", type=int, default=2, help="of each run (2)")
    arguments = parser.parse_args()
    if os.geteuid() or not shutil.which("tc"):
        sys.exit("error: needs root and iproute2: sudo .venv/bin/python benchmarks/slow_network.py")
    kinds = [Kind("none", 1, machines=1), *(Kind(hook, accumulate) for hook in HOOKS for accumulate in ACCUMULATE)]
    start, model = time.monotonic(), ""
    with tempfile.TemporaryDirectory() as folder:
        project = copy_project(Path(folder))
        for repetition in range(arguments.repetitions):
            for kind in kinds if repetition % 2 == 0 else reversed(kinds):
                model = measure(kind, project, arguments)
                figures = f"{kind.free_ms[-1]:7.1f} ms per step, {kind.limited_ms[-1]:7.1f} ms at the limit"
                took = time.monotonic() - start
                print(f"{took:4.0f} s  {kind.machines} x {kind.hook:<8}  {kind.accumulate}  {figures}", file=sys.stderr)
    print(table(kinds, arguments))
    size = f"{arguments.image_size} x {arguments.image_size} pixels, {arguments.batch_size} samples per process"
    print(f"\n{model}; {size}; 2 machines of 1 process and 1 thread; repetitions differ by up to {spread(kinds):.0f} %")
    print(where())


if __name__ == "__main__":
    main()
