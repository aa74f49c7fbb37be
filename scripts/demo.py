"""`make demo`: render the template with its defaults, train the result, and print what to try next."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
DEMO = REPOSITORY / "demo"


def main() -> int:
    shutil.rmtree(DEMO, ignore_errors=True)
    render = [sys.executable, "-m", "cookiecutter", "--default-config", "--no-input"]
    # The hook prints hints, but main() has others.
    subprocess.run([*render, "--output-dir", DEMO, REPOSITORY], check=True, stdout=subprocess.DEVNULL)
    project = next(path for path in DEMO.iterdir() if path.is_dir())
    for left_over in ("runs", "data"):  # of a training in the template folder itself
        shutil.rmtree(project / left_over, ignore_errors=True)
    print(f"Rendered the template into {project.relative_to(REPOSITORY)}", flush=True)

    gpus = shutil.which("nvidia-smi") is not None and _has_gpu()
    here = [] if gpus else ["--nproc-per-node", "2"]
    command = ["./launch_node.sh", *here, "--", "--dataset", "synthetic", "--epochs", "3"]
    print(f"$ cd {project.relative_to(REPOSITORY)}\n$ {' '.join(command)}", flush=True)
    done = subprocess.run(command, cwd=project, env={**os.environ, "PYTHON": sys.executable})
    if done.returncode != 0:
        return done.returncode

    run = project / "runs" / "synthetic-ToyModel"
    tests = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if '"test"' in line]
    python = Path(sys.executable).parent
    print(
        f"\nTest accuracy {tests[-1]['accuracy']:.1%}, with the weights of epoch {tests[-1]['epoch']}."
        f"\nThe run's files are in {run}"
        f"\n\nThings to try next:"
        f"\n  source {python / 'activate'} && cd {project}"
        f"\n  ./launch_node.sh -- --epochs 10                      CIFAR-10: downloads 170 MB"
        f"\n  tensorboard --logdir runs                            the curves, in a browser"
        f"\n  $EDITOR model.py && ./launch_node.sh --nproc-per-node 2 -- --dataset synthetic --output-dir runs/mine"
    )
    return 0


def _has_gpu() -> bool:
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
    return listed.stdout.startswith("GPU")


if __name__ == "__main__":
    sys.exit(main())
