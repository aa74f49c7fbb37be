"""An outside judge: ckpt-chaos kills runs of a rendered project at their file operations, and resumes each.

    .venv/bin/python benchmarks/crash_judge.py                  # all cases, some hours
    .venv/bin/python benchmarks/crash_judge.py DDP-1 --points 10

Besides SIGKILL before each operation, it cuts each file in half that is being written, and lets all data disappear that
were not synced. A point passes if the run resumes from the newest complete checkpoint, and ends with the same tensors
and metrics as an undisturbed one. Prints a line per case, and each point that did not pass.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
CASES = {"DDP-1": [], "DDP-2": ["--batch-size", "16"], "shard-2": ["--batch-size", "16", "--shard"]}
OPTIONS = ["--dataset", "synthetic", "--batch-size", "32", "--checkpoint-every", "2", "--log-every", "1"]
OPTIONS += ["--max-steps", "6", "--keep-checkpoints", "9"]  # the judge must find all checkpoints
# At its end, the judge cuts files in half to which a run only appends. No kill and no power failure can do that.
APPENDED = ("open:metrics.jsonl", "open:.lock", "open:events.out")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help=f"{', '.join(CASES)}; without any, all")
    parser.add_argument("--points", type=int, default=10**6, help="at most so many operations per case")
    parser.add_argument("--digest", type=Path, help="print what has to be equal in OUTPUT_DIR; the judge calls this")
    arguments = parser.parse_args()
    if arguments.digest:
        print(digest(arguments.digest))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        render = [sys.executable, "-m", "cookiecutter", "--no-input", "--output-dir", folder, REPOSITORY]
        subprocess.run([*render, "project_slug=project"], check=True, stdout=subprocess.DEVNULL)
        return max([judge(case, folder, arguments.points) for case in arguments.cases or CASES])


def digest(output_dir: Path) -> str:
    """SHA-256 of all tensors of the newest checkpoint, and of the metrics; times differ between runs."""
    found = hashlib.sha256()
    with zipfile.ZipFile(max((output_dir / "checkpoints").glob("step_*.pt"))) as archive:
        for record in sorted(archive.namelist()):
            found.update(archive.read(record) if "/data/" in record else b"")
    for line in (output_dir / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        found.update(repr([values[name] for name in ("step", "split", "loss", "accuracy")]).encode())
    return found.hexdigest()


def judge(case: str, folder: Path, points: int) -> int:
    """Judge one case. Returns the exit code."""
    ranks, work = case.rpartition("-")[2], folder / case
    command = [sys.executable, str(folder / "project" / "main.py"), *OPTIONS, *CASES[case], "--output-dir", "{out}"]
    compare = [sys.executable, str(Path(__file__).resolve()), "--digest", "{out}"]
    chaos = [sys.executable, "-m", "ckpt_chaos", "run", "--work", work, "--ranks", ranks, "--max-points", points]
    chaos += ["--modes", "before,torn,unsynced", "--step-regex", r"at step (\d+)", "--result-cmd", shlex.join(compare)]
    chaos += ["--checkpoint-glob", "{out}/checkpoints/step_*.pt", "--ckpt-ignore-size", "--", *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(word) for word in chaos], capture_output=True, text=True, env=environment, cwd=folder)
    if not work.exists():
        print(done.stdout + done.stderr, file=sys.stderr)
        return 1
    from ckpt_chaos.runner import rejudge

    rows = rejudge(work)
    cut = [row for row in rows if "[torn]" in row.label and row.label.split(" ", 1)[-1].startswith(APPENDED)]
    judged = [row for row in rows if row not in cut]
    counts = ", ".join(f"{count} {verdict}" for verdict, count in Counter(row.verdict for row in judged).items())
    print(f"{case}: {counts}; {len(cut)} points that no kill can cause are left out", flush=True)
    for row in judged:
        if row.verdict != "PASS":
            print(f"  {row.verdict}  {row.label}  {row.outcome}", flush=True)
    return int(any(row.verdict != "PASS" for row in judged) or len(judged) < 2)


if __name__ == "__main__":
    sys.exit(main())
