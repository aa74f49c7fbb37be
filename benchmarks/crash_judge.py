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
import re
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
APPENDED = ("metrics.jsonl", ".lock", "events.out")


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
        render = [sys.executable, "-m", "cookiecutter", "--no-input", "--output-dir", name, str(REPOSITORY)]
        subprocess.run([*render, "project_slug=project"], check=True, stdout=subprocess.DEVNULL)
        return max([judge(case, folder, arguments.points) for case in arguments.cases or CASES])


def digest(output_dir: Path) -> str:
    """SHA-256 of all tensors of the newest checkpoint, and of the metrics; times differ between runs."""
    found = hashlib.sha256()
    files = [max((output_dir / "checkpoints").glob("step_*.pt"))]
    for file in files:
        with zipfile.ZipFile(file) as archive:
            for record in sorted(archive.namelist()):
                found.update(archive.read(record) if "/data/" in record else b"")
                if record.endswith("/data.pkl") and len(files) == 1:  # with --shard, it lists files of the ranks
                    names = re.findall(rb"step_\d+-rank_\d+-\w{8}\.pt", archive.read(record))
                    files += [output_dir / "checkpoints" / "rows" / name.decode() for name in names]
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
    return report(case, work)


def report(case: str, work: Path) -> int:
    """Print the verdicts of the points in `work`. Returns the exit code."""
    from ckpt_chaos.invariants import ResumeOutcome, classify

    verdicts, failed, cut = Counter[str](), [], 0
    for path in sorted(work.glob("pt_*/result.json")):
        found = json.loads(path.read_text())
        number, mode = found.get("point", (0, "control"))
        # What it was killed at: numbers differ between runs, because a run writes status.json when it is old.
        lines = (path.parent / "events.log.rank0").read_text().splitlines() if number else []
        event = lines[number - 1].split("\t")[1:3] if len(lines) >= number > 0 else []
        if mode == "torn" and event and event[1].startswith(APPENDED):
            cut += 1
            continue
        verdict = classify(ResumeOutcome(**found["outcome"]))
        verdicts[verdict] += 1
        if verdict != "PASS":
            failed.append(f"  {verdict}  {mode} {event}  {found['outcome']}")
    counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
    print("\n".join([f"{case}: {counts}; {cut} points that no kill can cause are left out", *failed]), flush=True)
    return int(bool(failed) or verdicts["PASS"] < 2)


if __name__ == "__main__":
    sys.exit(main())
