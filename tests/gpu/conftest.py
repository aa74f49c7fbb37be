"""`make gpu`: what only a GPU can settle. Each test is one question; the answers become a table for the README.

Without a GPU all tests are skipped. GPU_TESTS_DEVICE=cpu runs those that mean something on a CPU, to test the tests.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from gpu_project import DEVICE, GPUS, Project

REPOSITORY = Path(__file__).resolve().parent.parent.parent
TABLE = REPOSITORY / "build/gpu.md"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs_gpu(count=1): means nothing on a CPU, or needs this many GPUs")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        mark = item.get_closest_marker("needs_gpu")
        needed = mark.kwargs.get("count", 1) if mark else int(DEVICE != "cpu")
        if len(GPUS) < needed:
            there = f"this machine has {len(GPUS)}"
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU{'s' * (needed > 1)}: {there}; see make gpu"))


@pytest.fixture
def answer(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Call it with the answer to the question that the test's docstring asks, and with its figures."""
    properties = request.node.user_properties
    properties.append(("question", (request.function.__doc__ or "").split("\n")[0]))
    return lambda text: properties.append(("answer", text))


def answers(reports: Mapping[str, list[pytest.TestReport]]) -> Iterator[tuple[str, str]]:
    """Each question with an answer."""
    for outcome in ("passed", "failed"):
        for report in reports.get(outcome, []):
            question, *found = [text for name, text in report.user_properties if name in ("question", "answer")] or [""]
            if question and report.when == "call":
                yield from ((question, text) for text in found if outcome == "passed")
                if outcome == "failed":
                    yield question, "**no**: the test failed"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table, and write it to a file."""
    rows = [*answers(terminalreporter.stats)]
    if not rows:
        return
    import torch

    machine = (
        f"{', '.join(GPUS) or platform.processor() or 'CPU'}; torch {torch.__version__}, CUDA {torch.version.cuda}"
    )
    if GPUS:
        machine += f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
        machine += f" (TORCH_DIST_USE_NCCL2={os.environ.get('TORCH_DIST_USE_NCCL2', '')})"
    lines = [f"{machine}, Python {platform.python_version()}", "", "| question | answer |", "|---|---|"]
    lines += [f"| {question} | {answer} |" for question, answer in rows]
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text("\n".join(lines) + "\n")
    terminalreporter.section("GPU")
    terminalreporter.write_line("\n".join([*lines, "", str(TABLE)]))


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "project")
