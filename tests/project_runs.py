"""Python programs in a project's folder, in processes that a fork server starts: torch is imported once, not by each.

The fork server is a new interpreter, so that nothing of the test is in its processes. Where a test is about the start
of a process, or about its launcher, it starts Python itself.
"""

from __future__ import annotations

import atexit
import gc
import json
import multiprocessing
import os
import runpy
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent / "{{cookiecutter.project_slug}}" / "tests"
INSTALLED = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
PRELOADED = ["pytest", "torch", "torch._dynamo", "torch.utils.tensorboard", "torchvision.transforms.v2"]
PRELOADED += ["filelock", "psutil", "tqdm", "torch.distributed.algorithms.ddp_comm_hooks"]
PROGRAM = """
import json, sys
sys.path[:0] = [".", sys.argv[2]]
from processes import start
outputs = []
for world_size, *options in json.loads(sys.argv[1]):
    ranks = start(world_size, *options)
    outputs.append([ranks.wait(900), ranks.output()])
print(json.dumps(outputs))
"""

servers = multiprocessing.get_context("forkserver")
servers.set_forkserver_preload(PRELOADED)


def python(
    project: Path, *words: Any, code: int | None = 0, timeout: float = 1200, fork: bool = False, **variables: str
) -> str:
    """The output of `python WORDS` in the folder `project`. Fails unless it exits with `code`; None accepts any.

    fork: the processes that --nproc starts are forked, instead of new interpreters, each of which imports torch.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a thread pool would not survive the fork
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    with tempfile.NamedTemporaryFile("r", errors="replace") as log:
        process = servers.Process(target=_become, args=(log.name, str(project), [*map(str, words)], environment, fork))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
        output = log.read()
    assert process.exitcode == code or code is None, f"exit code {process.exitcode}, expected {code}:\n{output}"
    return output


def _become(log: str, project: str, words: list[str], environment: dict[str, str], fork: bool) -> None:
    """In a process of the fork server: do what Python does with these words."""
    gc.freeze()  # a garbage collection would copy all memory that is shared with the fork server
    multiprocessing.set_start_method(None, force=True)  # the default again, which DataLoader uses
    if fork:
        import torch.multiprocessing

        start_forked = partial(torch.multiprocessing.start_processes, start_method="fork")
        torch.multiprocessing.spawn = lambda function, *given, **named: start_forked(_Forked(function), *given, **named)
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(project)
    sys.path[:] = ["", *(path for path in sys.path if path.startswith(INSTALLED))]
    _open_output()
    option, *rest = words
    sys.argv = words
    if option == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    elif option == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        script = Path(option).resolve()
        sys.path[0] = str(script.parent)
        runpy.run_path(str(script), run_name="__main__")


@cache
def _rendered() -> Path:
    from cookiecutter.main import cookiecutter

    folder = tempfile.mkdtemp(prefix="rendered-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(cookiecutter(str(TESTS.parent.parent), no_input=True, output_dir=folder))


def render_defaults(folder: Path) -> Path:
    """A project in the new folder `folder`, as cookiecutter renders it with the defaults. It is rendered once."""
    return Path(shutil.copytree(_rendered(), folder))


def _open_output() -> None:
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115


class _Forked:
    """What a forked process runs instead of `function`: as a new interpreter, without what its parent has set."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __call__(self, *arguments: Any) -> None:
        atexit._clear()  # the parent's temporary folders
        _open_output()
        self.function(*arguments)


def train_in(project: Path, *runs: list[Any], code: int = 0, **variables: str) -> list[str]:
    """What main.py prints in `project` for each of `runs`: a number of processes, then its options; one after another.

    Fails unless all ranks exit with `code`.
    """
    words = json.dumps([[run[0], *map(str, run[1:])] for run in runs])
    output = python(project, "-c", PROGRAM, words, TESTS, **variables)
    outputs = json.loads(output.splitlines()[-1])
    for run, (codes, output) in zip(runs, outputs, strict=True):
        assert codes == [code] * run[0], f"{run}: exit codes {codes}, expected {code}:\n{output}"
    return [output for _, output in outputs]


def benchmark_of(project: Path, *options: Any) -> str:
    """What benchmark.py prints of a short measurement, by one process that acts as if torchrun had started it."""
    from outputs import free_port  # here, because the fork server's processes import this file, and would import ddp

    launcher = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    short = ("--device", "cpu", "--seconds", 0.02, "--repeats", 1)
    return python(project, "benchmark.py", *short, *options, MASTER_PORT=str(free_port()), **launcher)
