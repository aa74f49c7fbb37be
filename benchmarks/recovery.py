"""How long a run needs after the loss of a process, with launch_node.sh: from the kill to the end of the next step.

    .venv/bin/python benchmarks/recovery.py           from the repository, as root; about 10 minutes
    .venv/bin/python benchmarks/recovery.py --quick   tests that it works

ToyModel on the CPU, two processes. Machines are network namespaces. Prints a table in Markdown: the median, the minimum
and the maximum over the repetitions. A machine that vanishes comes back at once; it is noticed after --timeout 10.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

from template_copy import copy_template  # noqa: E402

from machines import Machine, Program, machines  # noqa: E402

OPTIONS = ["--dataset", "synthetic", "--device", "cpu", "--epochs", 10_000, "--checkpoint-every", 50, "--timeout", 10]
RECOVERED = re.compile(r"recovered: lost at [\d:]+, noticed after ([\d.]+) s, training again after ([\d.]+) s")


def processes(folder: Path, text: bytes, machine: Machine | None = None) -> list[int]:
    """Those with `folder` and `text` in their environment or command line; on one machine, if there are several."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes() + b"\0" + (process / "environ").read_bytes()
        except OSError:
            continue
        pid = int(process.name)
        if text in words and os.fsencode(folder) in words and (machine is None or pid in machine.running()):
            found.append(pid)
    return sorted(found)


def measure(nodes: list[Program], repetitions: int, lose: Callable[[], None]) -> list[tuple[float, float]]:
    """For each repetition: seconds until the loss was noticed, and from the loss to the end of the next step."""
    found, earlier = [], len(RECOVERED.findall(nodes[0].output()))
    for number in range(earlier, earlier + repetitions):
        before = nodes[0].output().count("  train  ")
        while nodes[0].output().count("  train  ") < before + 3:  # some steps, and a checkpoint
            assert nodes[0].process.poll() is None, nodes[0].output()
            time.sleep(0.1)
        lost_at = time.monotonic()
        lose()
        while len(RECOVERED.findall(nodes[0].output())) <= number:
            assert nodes[0].process.poll() is None, nodes[0].output()
            time.sleep(0.02)
        took = time.monotonic() - lost_at
        found.append((float(RECOVERED.findall(nodes[0].output())[-1][0]), took))
    return found


def row(what: str, found: list[tuple[float, float]]) -> str:
    cells = [f"{statistics.median(each):.1f} ({min(each):.1f} to {max(each):.1f})" for each in zip(*found, strict=True)]
    return f"| {what} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    repetitions = 1 if arguments.quick else arguments.repetitions
    print("| lost | noticed after, s | next step after, s |\n|---|--:|--:|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        project = copy_template(folder / "project")
        variables = {"MAX_RESTARTS": "3", "TMPDIR": name}

        def command(output: str, *launch: Any) -> list[Any]:
            return ["bash", project / "launch_node.sh", *launch, "--", *OPTIONS, "--output-dir", folder / output]

        node = Program(command("one", "--nproc-per-node", 2), variables)
        kill_worker = lambda: os.kill(processes(folder, b"\0LOCAL_RANK=1\0")[0], signal.SIGKILL)  # noqa: E731
        print(row("one of two processes (kill -9)", measure([node], repetitions, kill_worker)), flush=True)
        node.signal(signal.SIGTERM)
        node.wait()
        with machines(2) as two:
            launch = ["--nnodes", 2, "--nproc-per-node", 1, "--master-addr", two[0].address, "--node-rank"]
            nodes = [machine.start(*command("two", *launch, rank), **variables) for rank, machine in enumerate(two)]

            def kill_remote() -> None:
                os.kill(processes(folder, b"\0LOCAL_RANK=0\0", two[1])[0], signal.SIGKILL)

            def vanish() -> None:
                two[1].link("down")
                two[1].kill()
                two[1].link("up")
                nodes[1] = two[1].start(*command("two", *launch, 1), **variables)

            found = measure(nodes, repetitions, kill_remote)
            print(row("the process of one of two machines (kill -9)", found), flush=True)
            print(row("one of two machines, which comes back", measure(nodes, min(3, repetitions), vanish)))


if __name__ == "__main__":
    main()
