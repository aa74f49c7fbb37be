"""The memory of each process, with DDP and with --shard, on 1, 2 and 4 processes of this machine's CPU.

    .venv/bin/python benchmarks/shard_memory.py                                            38 million weights; 3 minutes
    .venv/bin/python benchmarks/shard_memory.py --width 1024 --layers 24 --processes 2     300 million; needs 20 GB

The model is that of examples/language_model, with AdamW in fp32. Weights, gradients and optimizer state are counted in
bytes. The peak is what the operating system reports, without the reserves of malloc. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent / "tests"), str(HERE.parent / "examples")]

from apply import apply  # noqa: E402
from template_copy import copy_template  # noqa: E402

RETURN_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # what is freed is not kept


def measure(project: Path, *options: Any) -> list[dict[str, Any]]:
    """What loops/memory.py prints for each rank."""
    command = [sys.executable, HERE / "loops/memory.py", "--device", "cpu", *options]
    environment = {**os.environ, "PYTHONPATH": str(project), **RETURN_AT_ONCE}
    done = subprocess.run(list(map(str, command)), env=environment, cwd=project, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, options))}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=2)
    options = parser.parse_args()
    given = ["--width", options.width, "--layers", options.layers, "--batch-size", options.batch_size]
    lines = ["| MB, at most | weights | gradients | optimizer | peak of a step | peak of the start |"]
    lines.append("|---|--:|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory(prefix="shard-memory-") as folder:
        project = copy_template(Path(folder) / "project")
        apply("language_model", project)
        for count in options.processes:
            for name, more in (("DDP", ()), ("`--shard`", ("--shard",))):
                ranks = measure(project, "--nproc", count, *given, *more)
                cells = [max(rank["rest_mb"][part] for rank in ranks) for part in ranks[0]["rest_mb"]]
                cells += [max(rank[part] for rank in ranks) for part in ("step_mb", "build_mb")]
                plural = "process" if count == 1 else "processes"
                lines.append(f"| {name}, {count} {plural} | {' | '.join(f'{cell:,.0f}' for cell in cells)} |")
                print(f"{count} {name}", *map(json.dumps, ranks), sep="\n", file=sys.stderr)
    print(f"{ranks[0]['numbers']:,} weights, {options.batch_size} samples per process:\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
