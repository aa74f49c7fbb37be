"""How the start of a process grows with its data: measured, and extrapolated to where a machine ends it.

    .venv/bin/python benchmarks/scale.py           about 3 minutes; needs 8 GB of memory
    .venv/bin/python benchmarks/scale.py --quick   tests that it works

Each measurement runs in a process of its own, which has imported torch: seconds until the first batch is known, and how
much memory that has taken. The order of the samples is that of epoch 1, from its middle on. The files are empty, in
memory, in 100 classes. A wall is the first n at which a process needs more than WALL_S or WALL_MB.
Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "{{cookiecutter.project_slug}}"))

WALL_S, WALL_MB = 60.0, 8_000.0  # eight processes of a machine with 64 GB
CLASSES = 100
BATCH = 64


class Range:
    """n samples that are never read."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n


def order_of_torch(n: int) -> Any:
    """torch's DistributedSampler, which begins at the start of an epoch."""
    from torch.utils.data import DistributedSampler

    sampler: Any = DistributedSampler(Range(n), 1, 0)  # type: ignore[arg-type]
    sampler.set_epoch(1)
    return list(islice(sampler, n // 2, n // 2 + BATCH))


def order_here(n: int) -> Any:
    """This project's."""
    from ddp.data.sampler import ResumableSampler, Shuffled

    sampler = ResumableSampler(Range(n), 0, 1, BATCH, Shuffled(n, 0))  # type: ignore[arg-type]
    sampler.start_at(1, n // 2)
    return list(islice(sampler, BATCH))


def files_of_torchvision(n: int) -> Any:
    """torchvision's ImageFolder."""
    from torchvision.datasets import ImageFolder

    samples = ImageFolder(folder_of(n)).samples
    return samples, [samples[index] for index in range(0, n, max(1, n // BATCH))]


def files_here(n: int) -> Any:
    """This project's, in the process that lists them."""
    from ddp.data.file_list import list_files

    samples = list_files(folder_of(n), (".jpg",))[1]
    return samples, [samples[index] for index in range(0, n, max(1, n // BATCH))]


Law = Callable[[int], Any]
LAWS: dict[str, tuple[Law, list[int]]] = {
    "order, DistributedSampler": (order_of_torch, [10**6, 10**7, 3 * 10**7]),
    "order, this project": (order_here, [10**6, 10**7, 10**9, 10**12]),
    "files, ImageFolder": (files_of_torchvision, [10**4, 10**5, 3 * 10**5]),
    "files, this project": (files_here, [10**4, 10**5, 3 * 10**5]),
}


def folder_of(n: int) -> Path:
    return Path(tempfile.gettempdir()) / f"files {n}"


def make_files(n: int) -> None:
    """n empty files."""
    for number in range(CLASSES):
        folder = folder_of(n) / f"class {number:03}"
        folder.mkdir(parents=True)
        for index in range(number, n, CLASSES):
            (folder / f"{index:012}.jpg").touch()


def own_mb() -> float:
    """The memory of this process alone: without what it shares with others, as a mapped file."""
    fields = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return int(fields["Private_Dirty"].split()[0]) / 1024


def measure(name: str, n: int) -> None:
    """Print seconds and MB."""
    import torch.utils.data
    import torchvision.datasets

    law, _ = LAWS[name]
    law(CLASSES) if name.startswith("order") else None  # what is imported only once
    before, start = own_mb(), time.perf_counter()
    kept = law(n)
    seconds = time.perf_counter() - start
    print(seconds, own_mb() - before, len(kept), len((torch.__name__, torchvision.__name__)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return measure(options.one[0], int(options.one[1]))
    print(f"| | n | s | MB | per sample | wall: {WALL_S:.0f} s or {WALL_MB / 1000:.0f} GB |\n|---|--:|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        tempfile.tempdir = folder
        for n in sorted({n for name, (_, sizes) in LAWS.items() if name.startswith("files") for n in sizes}):
            if not options.quick or n == 10**4:
                make_files(n)
        for name, (_, sizes) in LAWS.items():
            for n in sizes[:1] if options.quick else sizes:
                command = [sys.executable, __file__, "--one", name, str(n)]
                environ = {**os.environ, "TMPDIR": folder}
                done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
                seconds, mb = map(float, done.stdout.split()[:2])
                walls = [n * WALL_S / seconds, n * WALL_MB / mb if mb > 1 else float("inf")]
                wall = f"{min(walls):.1g}" if n == sizes[-1] and min(walls) < 1e15 else ""
                each = f"{1e9 * seconds / n:,.2g} ns, {1e6 * mb / n:,.2g} bytes"
                print(f"| {name} | {n:.0e} | {seconds:.3f} | {mb:,.1f} | {each} | {wall} |", flush=True)


if __name__ == "__main__":
    main()
