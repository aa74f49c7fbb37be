"""Runs of main.py in one process with a tiny model, for a test that watches their file operations from outside.

python crash_runs.py record FOLDER WAY    trains, for strace
python crash_runs.py fail                 for each line of JSON on stdin, trains once; for failing_calls.c
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

PROJECT = Path(__file__).resolve().parent.parent / "{{cookiecutter.project_slug}}"
sys.path[:0] = [str(PROJECT), str(PROJECT / "tests")]

from PIL import Image  # noqa: E402
from torch import nn  # noqa: E402

import data  # noqa: E402
import main  # noqa: E402
from ddp.core import files  # noqa: E402
from ddp.core.files import sync_directory  # noqa: E402
from ddp.training.run import Run  # noqa: E402
from processes import start, train  # noqa: E402

SIZES = {"train": 160, "val": 51, "test": 50}
OPTIONS = ["--dataset", "synthetic", "--log-every", 1, "--checkpoint-every", 2, "--keep-checkpoints", 2, "--epochs", 4]
LAST = 20  # the last step: four epochs of five
KILLED_AT = (7, 12)  # the recorded run is killed after these steps
UNSYNCED = "step_00000012.pt"  # by then this checkpoint has its name, which has not reached the disk
IDLE_S = 0.5  # then no other thread is in the middle of a call, of which nobody would know whether it happened
NO_LINKS = "--shard without hard links"
WAYS: dict[str, tuple[int, list[Any]]] = {"DDP": (1, []), NO_LINKS: (2, ["--shard"])}  # processes and more options


def build_tiny(config: Any, train_set: Any) -> nn.Module:
    """Replaces main.task.build_model. A checkpoint has some blocks of the file system."""
    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(192, len(train_set.classes)))


def make_small() -> None:
    """Replace the model and the data by small ones."""
    main.task.build_model = build_tiny
    data.SYNTHETIC_SIZES = SIZES


def options(way: str, output: Path) -> list[Any]:
    """The command that trains in one of WAYS. All have the same global batch, so they take the same steps."""
    processes, more = WAYS[way]
    return [*OPTIONS, *more, "--batch-size", 32 // processes, "--output-dir", output]


def refuse_links(*_: Any) -> None:
    """In the place of os.link."""
    raise PermissionError(1, "Operation not permitted")  # as exFAT does


def kill_at(step: int, run: Run) -> None:
    if run.state.step == step:
        time.sleep(IDLE_S)
        os.kill(os.getpid(), signal.SIGKILL)


def hang_before_sync(directory: Path) -> None:
    """In the place of files.sync_directory."""
    if (directory / UNSYNCED).exists():
        time.sleep(60)
    sync_directory(directory)


def record(folder: Path, way: str) -> None:
    """Train with one of WAYS, in a directory of that name: killed twice, and resumed to the end.

    As with torchrun, a file names the last step that a rank has reported as saved: FOLDER/reports/saved.
    """
    processes = WAYS[way][0]
    (folder / "reports").mkdir()
    os.environ |= {"LOCAL_RANK": "0", "TORCHELASTIC_ERROR_FILE": str(folder / "reports" / "error.json")}
    if way == NO_LINKS:
        os.link = refuse_links
    with patch.object(files, "sync_directory", hang_before_sync):
        for step in KILLED_AT:
            killed = start(processes, *options(way, folder / way), after_step=partial(kill_at, step))
            assert -signal.SIGKILL in killed.wait(), killed.output()
    train(processes, *options(way, folder / way))


def fail() -> None:
    """Train once for each line, {"way", "output", "end", "rank", "killed", "environment"}. Print exit codes and output.

    Each rank has a log of its own, and the operations of `rank` fail.
    """
    train = main.main
    Image.init()  # or each run of these many would import the formats of images

    def failing_main(order: dict[str, Any], config: Any, rank_env: Any) -> None:
        for name, value in order["environment"].items():
            os.environ[name] = value + str(rank_env.rank) if name == "FAIL_LOG" else value
        if rank_env.rank != order["rank"]:
            os.environ["FAIL_AT"] = "0"
        train(config, rank_env)

    for line in sys.stdin:
        order = json.loads(line)
        command = [*options(order["way"], Path(order["output"])), "--max-steps", order["end"]]
        with patch.object(main, "main", partial(failing_main, order)):
            ranks = start(WAYS[order["way"]][0], *command)
        if order["killed"]:  # the other ranks would need seconds to be sure that it is lost
            os.waitid(os.P_PID, ranks.pids[order["rank"]], os.WEXITED | os.WNOWAIT)
            ranks.kill()
        print(json.dumps([ranks.wait(), ranks.output()]), flush=True)


if __name__ == "__main__":
    make_small()
    if sys.argv[1] == "record":
        record(Path(sys.argv[2]), sys.argv[3])
    else:
        fail()
