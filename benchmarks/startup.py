"""How long it takes from the start of the command to the first optimizer step, and to the refusal of a bad option.

    .venv/bin/python benchmarks/startup.py          from the repository; about 5 minutes

It is compared with a bare script that imports torch, connects to the others, wraps a model and takes one step. All take
turns, --repetitions times; ratios are computed within a repetition. first_step/ records the first step of all of them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
TEMPLATE = HERE.parent / "{{cookiecutter.project_slug}}"
FIRST_STEP_TIMEOUT_S = 120.0


def first_step(command: list[str], folder: Path) -> float:
    """Seconds until rank 0 has taken its first step. Then all processes are killed."""
    done = folder / "first_step"
    done.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(HERE / "first_step"), "FIRST_STEP": str(done)}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    with (folder / "log").open("w") as log:
        start = time.monotonic()
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        while not done.exists():
            if time.monotonic() - start > FIRST_STEP_TIMEOUT_S or (process.poll() is not None and not done.exists()):
                sys.exit(f"{' '.join(command)}: no first step\n{(folder / 'log').read_text()}")
            time.sleep(0.02)
        for _ in range(100):  # let it exit by itself, so that none of its processes is left
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                time.sleep(0.2)
        process.wait()
    return float(done.read_text()) - start


def refusal(project: Path) -> float:
    """Seconds until launch_node.sh refuses a bad option."""
    start = time.monotonic()
    command = [str(project / "launch_node.sh"), "--", "--bad-option"]
    done = subprocess.run(command, env={**os.environ, "PYTHON": sys.executable}, capture_output=True)
    assert done.returncode == 2, done.stderr
    return time.monotonic() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds to the first step.")
    parser.add_argument("--repetitions", type=int, default=5)
    repetitions = parser.parse_args().repetitions
    with tempfile.TemporaryDirectory(prefix="startup-") as name:
        folder = Path(name)
        project = Path(shutil.copytree(TEMPLATE, folder / "project"))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        torchrun.append("--nproc-per-node=2")
        options = ["--dataset", "synthetic", "--output-dir", str(folder / "run")]
        commands = {
            "bare script, torchrun": [*torchrun, str(HERE / "loops/bare.py")],
            "this project, torchrun": [*torchrun, str(project / "main.py"), *options],
            "this project, launch_node.sh": [str(project / "launch_node.sh"), "--nproc-per-node=2", "--", *options],
            "this project, --nproc 2": [sys.executable, str(project / "main.py"), "--nproc=2", *options],
        }
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        refusals = []
        for _ in range(repetitions + 1):
            for name, command in commands.items():
                shutil.rmtree(folder / "run", ignore_errors=True)
                seconds[name].append(first_step(command, folder))
            refusals.append(refusal(project))
    seconds = {name: taken[1:] for name, taken in seconds.items()}  # the first has filled the caches
    bare = seconds["bare script, torchrun"]
    print("| 2 processes, CPU | seconds to the first step | times the bare script |\n|---|--:|--:|")
    for name, taken in seconds.items():
        ratios = sorted(ours / theirs for ours, theirs in zip(taken, bare, strict=True))
        spread = f" ({ratios[0]:.2f} to {ratios[-1]:.2f})" if name != "bare script, torchrun" else ""
        print(f"| {name} | {statistics.median(taken):.2f} | {statistics.median(ratios):.2f}{spread} |")
    print(f"\nlaunch_node.sh -- --bad-option: {statistics.median(refusals):.2f} s")


if __name__ == "__main__":
    main()
