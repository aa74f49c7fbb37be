"""`make gpu`: what only a GPU can settle. Each test is one question; the answers become a table for the README.

Without a GPU all tests are skipped. GPU_TESTS_DEVICE=cpu runs those that mean something on a CPU, to test the tests.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
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


ANSWERS: list[tuple[str, str]] = []  # with their questions


@pytest.fixture
def answer(request: pytest.FixtureRequest) -> Iterator[Callable[[str], None]]:
    """Call it with the answer to the question that the test's docstring asks, and with its figures."""
    question = (request.function.__doc__ or "").split("\n")[0]
    given = len(ANSWERS)
    yield lambda text: ANSWERS.append((question, text))
    if len(ANSWERS) == given:
        ANSWERS.append((question, "**no**: the test failed"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table, and write it to a file."""
    if not ANSWERS:
        return
    import torch

    machine = (
        f"{', '.join(GPUS) or platform.processor() or 'CPU'}; torch {torch.__version__}, CUDA {torch.version.cuda}"
    )
    lines = [f"{machine}, Python {platform.python_version()}", "", "| question | answer |", "|---|---|"]
    lines += [f"| {question} | {answer} |" for question, answer in ANSWERS]
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text("\n".join(lines) + "\n")
    terminalreporter.section("GPU")
    terminalreporter.write_line("\n".join([*lines, "", str(TABLE)]))


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "project")
