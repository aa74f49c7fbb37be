"""How costs grow with the samples, files, processes and weights: measured, and extrapolated to where they end a run.

    .venv/bin/python benchmarks/scale.py                   about 10 minutes; needs 16 GB of memory
    .venv/bin/python benchmarks/scale.py --only weights    one table
    .venv/bin/python benchmarks/scale.py --quick           tests that it works

- Samples and files: each measurement is a process of its own, which has imported torch. Seconds until the first batch
  is known, at the middle of epoch 1, and the memory at its peak. The files are empty, in memory, in 100 classes.
- Processes: how long an agreement on a stop takes, and so how often the ranks ask. From 1,024 on, it is modelled: the
  hops of the tree, each as long as between two processes here. The calls of the store that all ranks make are counted,
  and compared with what a real TCPStore answers on this machine.
- Weights: two processes save a state and resume. Their own weights are not counted; a mapped file is not either.

A wall is the first size that needs more than WALL_S or WALL_MB. Prints tables in Markdown; writes a plot.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import make_dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
TEMPLATE = HERE.parent / "{{cookiecutter.project_slug}}"
sys.path[:0] = [str(TEMPLATE), str(TEMPLATE / "tests")]

WALL_S, WALL_MB = 60.0, 8_000.0  # eight processes of a machine with 64 GB
CLASSES = 100
BATCH = 64
MODELLED = (1024, 8192)  # processes
STORE_CLIENTS = 4
TENSOR = 1 << 24  # numbers of a weight: 64 MB


class Memory:
    """The memory of this process that is not a file's, in MB: at its peak, above what it was at the start."""

    def __enter__(self) -> Memory:
        self.before = self.peak = self.now()
        self.end = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.peak = max(self.peak, self.now())
        self.end.set()
        self.thread.join()

    def _watch(self) -> None:
        while not self.end.wait(0.005):
            self.peak = max(self.peak, self.now())

    def now(self) -> float:
        fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
        return int(fields["RssAnon"].split()[0]) / 1024

    @property
    def mb(self) -> float:
        return self.peak - self.before


# ---- samples and files ----------------------------------------------------------------------------------------------


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
    from file_list import list_files
    from image_files import find_classes, find_images

    folder = folder_of(n)
    classes = find_classes(folder)
    samples = list_files(folder, classes, lambda name: find_images(folder / name))
    return samples, [samples[index] for index in range(0, n, max(1, n // BATCH))]


def files_of_others(n: int) -> Any:
    """This project's, in another process of the machine, which waits for it."""
    time.sleep(0.01)  # the first process has begun
    return files_here(n)


Law = Callable[[int], Any]
LAWS: dict[str, tuple[Law, list[int]]] = {
    "order, DistributedSampler": (order_of_torch, [10**6, 10**7, 3 * 10**7]),
    "order, this project": (order_here, [10**6, 10**7, 10**9, 10**12]),
    "files, ImageFolder": (files_of_torchvision, [10**4, 10**5, 3 * 10**5]),
    "files, this project": (files_here, [10**4, 10**5, 3 * 10**5]),
    "files, this project, other processes": (files_of_others, [10**4, 10**5, 3 * 10**5]),
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


def measure_law(name: str, n: int) -> None:
    """Print seconds and MB."""
    import torch.utils.data
    import torchvision.datasets

    import image_files  # noqa: F401  # its time and memory are not those of a list

    law, _ = LAWS[name]
    if name.startswith("order"):
        law(CLASSES)  # what is imported only once
    if law is files_of_others:  # processes of one run have one parent
        if os.fork() == 0:
            files_here(n)
            os._exit(0)
        if other := os.fork():
            os.waitpid(other, 0)
            return
    with Memory() as memory:
        start = time.perf_counter()
        kept = law(n)
        seconds = time.perf_counter() - start
    print(json.dumps([seconds, memory.mb, len(kept), torch.__version__, torchvision.__version__]))


def samples_and_files(quick: bool) -> dict[str, list[tuple[int, float, float]]]:
    """Print a table. Returns n, seconds and MB of each law."""
    print(f"| | n | s | MB | per sample | wall: {WALL_S:.0f} s or {WALL_MB / 1000:.0f} GB |\n|---|--:|--:|--:|--:|--:|")
    found: dict[str, list[tuple[int, float, float]]] = {}
    for n in sorted({n for name, (_, sizes) in LAWS.items() if name.startswith("files") for n in sizes}):
        if not quick or n == 10**4:
            make_files(n)
    for name, (_, sizes) in LAWS.items():
        for n in sizes[:1] if quick else sizes:
            command = [sys.executable, __file__, "--one", name, str(n)]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ())
            seconds, mb, *_ = json.loads(done.stdout)
            found.setdefault(name, []).append((n, seconds, mb))
            walls = [n * WALL_S / seconds, n * WALL_MB / mb if mb > 1 else float("inf")]
            wall = f"{min(walls):.0e}" if n == sizes[-1] and min(walls) < 1e15 else ""
            each = f"{1e9 * seconds / n:,.2g} ns, {1e6 * mb / n:,.2g} bytes"
            print(f"| {name} | {n:.0e} | {seconds:.3f} | {mb:,.1f} | {each} | {wall} |", flush=True)
    return found


def plot(found: dict[str, list[tuple[int, float, float]]], path: Path) -> None:
    """Draw seconds and MB against n, of this project and of what torch and torchvision have."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 2, figsize=(8, 5.2), sharex="col")
    for column, kind in enumerate(("order", "files")):
        for row, (unit, wall) in enumerate((("s", WALL_S), ("MB", WALL_MB))):
            panel = panels[row][column]
            for name, points in found.items():
                if name.startswith(kind):
                    sizes, values = [point[0] for point in points], [max(point[1 + row], 1e-3) for point in points]
                    colour = "#1f6feb" if name.endswith("this project") else "#9aa4af"
                    panel.loglog(sizes, values, "o-", color=colour, label=name.partition(", ")[2])
            panel.axhline(wall, color="black", linewidth=0.8, linestyle=":")
            panel.set_ylabel(unit)
            panel.spines[["top", "right"]].set_visible(False)
        panels[0][column].set_title(f"until the first batch is known: {kind}", fontsize=9)
        panels[0][column].legend(fontsize=8)
        panels[1][column].set_xlabel("samples")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def environ() -> dict[str, str]:
    return {**os.environ, "TMPDIR": tempfile.gettempdir(), "OMP_NUM_THREADS": "1"}


# ---- processes ------------------------------------------------------------------------------------------------------


def measure_agreement(ctx: Any) -> tuple[float, float]:
    """Seconds on the rank that comes last, which waits for none: the median, and what the ranks think that it is."""
    stop_sync, times = ctx.stop_sync, []
    for _ in range(60):
        stop_sync.steps_left = 1
        start = time.perf_counter()
        stop_sync.maybe_sync()
        times.append(time.perf_counter() - start)
    return statistics.median(map(min, zip(*ctx.gather(times[10:]), strict=True))), stop_sync.cost_s


def store_calls(world_size: int, seconds: float) -> float:
    """How many calls of the store the monitor of one rank makes per second. A TCPStore answers those of all."""
    import torch.distributed as dist

    from ddp.distributed.failure_monitor import FailureMonitor
    from ddp.distributed.rank_env import RankEnv

    calls = 0

    class Counting:
        def __init__(self, store: Any) -> None:
            self.store = store

        def __getattr__(self, name: str) -> Any:
            nonlocal calls
            calls += 1
            return getattr(self.store, name)

    store = dist.HashStore()
    store.set("saved", "5")
    monitor = FailureMonitor(Counting(store), RankEnv(1, world_size), 60.0)  # type: ignore[arg-type]
    monitor.thread.start()
    with monitor.report_errors([]):
        time.sleep(seconds)
        made = calls
    return made / seconds


def store_answers() -> float:
    """How many calls a TCPStore answers per second, of clients that do nothing else."""
    import torch.distributed as dist

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    reader, writer = os.pipe()
    for _ in range(STORE_CLIENTS):
        if os.fork() == 0:
            client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
            end, count = time.perf_counter() + 3, 0
            while time.perf_counter() < end:
                client.check(["question"])
                count += 1
            os.write(writer, f"{count / 3}\n".encode())
            os._exit(0)
    for _ in range(STORE_CLIENTS):
        os.wait()
    return sum(map(float, os.read(reader, 2**16).split()))


def processes(quick: bool) -> None:
    """Print a table."""
    from ddp.distributed import process_group
    from ddp.distributed.stop_sync import MAX_COST, SYNC_INTERVAL_S
    from processes import on_ranks

    process_group.MANY_RANKS = 64
    found = [(count, *on_ranks(count, measure_agreement)[0]) for count in ((2,) if quick else (2, 8, 64))]
    hop_s = found[0][1] / 2
    found += [(count, *[2 * math.log2(count) * hop_s] * 2) for count in MODELLED]
    answers = store_answers()
    print("| processes | an agreement | they ask every | part of the time | calls of the store | of its answers |")
    print("|--:|--:|--:|--:|--:|--:|")
    for count, median_s, shortest_s in found:
        every = max(SYNC_INTERVAL_S, shortest_s / MAX_COST)
        calls = count * store_calls(count, 2 if quick else 20)
        cells = [f"{count:,}", f"{1000 * median_s:.2f} ms", f"{every:.1f} s", f"{median_s / every:.2%}"]
        cells += [f"{calls:,.0f}", f"{calls / answers:.1%}"]
        print(f"| {' | '.join(cells)} |", flush=True)
    print(
        f"\n{' and '.join(f'{count:,}' for count in MODELLED)} are modelled: {1e6 * hop_s:.0f} us per hop of the tree."
    )
    print(f"A TCPStore answers {answers:,.0f} calls per second here, beside {STORE_CLIENTS} clients.")


# ---- weights --------------------------------------------------------------------------------------------------------


def save_and_resume(size_mb: int, device: str, shard: bool, folder: Path, ctx: Any) -> list[float]:
    """MB at the peak of a save and of a resume; seconds that a save pauses, that it takes, and of the resume."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from config import Config
    from ddp.checkpoint.manager import CheckpointManager
    from ddp.distributed.tensors import local

    given: Any = {"dataset": None, "global_batch": 1, "length": 1, "wait_s": 0.0}
    loader: Any = SimpleNamespace(**given, order_facts=dict, keep_order=lambda facts: None)
    count = max(1, size_mb * 2**20 // (4 * TENSOR))
    weights = [torch.nn.Parameter(torch.full((TENSOR,), float(number), device=device)) for number in range(count)]
    if shard:
        mesh = init_device_mesh(device, (ctx.world_size,))
        weights = [torch.nn.Parameter(distribute_tensor(weights.pop(0), mesh, [Shard(0)])) for _ in range(count)]
    config = Config.parse(["--output-dir", str(folder), *(["--shard"] if shard else [])])
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)

    def manager() -> CheckpointManager:
        return CheckpointManager(config, ctx)

    training = make_dataclass("Training", ["model"])(torch.nn.ParameterList(weights))
    first, second = manager(), manager()
    with Memory() as saving:
        first.resume(loader, training)
        first.train_state.step = 1
        start = time.perf_counter()
        first.save(lambda: None)
        paused_s = time.perf_counter() - start
        first.wait()
        saved_s = time.perf_counter() - start
    with torch.no_grad():
        for weight in weights:
            weight.zero_()
    with Memory() as resuming:
        start = time.perf_counter()
        second.resume(loader, training)
        resumed_s = time.perf_counter() - start
    assert [local(weight.detach())[-1].item() for weight in weights] == [*range(count)]
    return [saving.mb, resuming.mb, paused_s, saved_s, resumed_s]


def weights(sizes_mb: list[int], device: str, folder: Path) -> None:
    """Print a table."""
    from processes import on_ranks

    print("| state | files | save, rank 0 | other ranks | resume, rank 0 | other ranks | pause | save | resume |")
    print("|--:|--|--:|--:|--:|--:|--:|--:|--:|")
    for size_mb, shard in itertools.product(sizes_mb, (False, True)):
        place = folder / f"state {size_mb} {shard}"
        work = partial(save_and_resume, size_mb, device, shard, place)
        first, *others = on_ranks(2, work, "--device", device, "--backend", "gloo")
        other = [max(each) for each in zip(*others, strict=True)]
        cells = [f"{size_mb / 1024:.2g} GB", "one per rank" if shard else "one"]
        cells += [*(f"{mb:,.0f} MB" for mb in (first[0], other[0], first[1], other[1]))]
        shutil.rmtree(place)
        print("| " + " | ".join([*cells, *(f"{seconds:.2f} s" for seconds in first[2:])]) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=("samples", "processes", "weights"))
    parser.add_argument("--plot", type=Path, default=HERE.parent / "build/scale.png", metavar="FILE")
    parser.add_argument("--device", default="cpu", help="of the weights")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return measure_law(options.one[0], int(options.one[1]))
    chosen = options.only or ("samples", "processes", "weights")
    if "samples" in chosen:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            tempfile.tempdir = folder
            found = samples_and_files(options.quick)
            tempfile.tempdir = None
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        plot(found, options.plot)
    if "processes" in chosen:
        processes(options.quick)
    if "weights" in chosen:
        with tempfile.TemporaryDirectory() as folder:
            weights([64] if options.quick else [1024, 4096], options.device, Path(folder))


if __name__ == "__main__":
    main()
