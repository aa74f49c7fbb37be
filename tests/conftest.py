"""The template folder is a project that runs in place: these tests import its modules, by `pythonpath` of pytest."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from faults import FAULTS, IN_PROJECT, NOT_SHOWN

REPOSITORY = Path(__file__).resolve().parent.parent
TEMPLATE = REPOSITORY / "{{cookiecutter.project_slug}}"

# In a shell inside a cluster allocation, the launcher's variables would set the ranks of every test's processes.
for name in list(os.environ):
    if name.startswith(("SLURM_", "OMPI_", "PMI", "PET_", "TORCHELASTIC_")) or name in (
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    ):
        del os.environ[name]

# Several tests run at once: threads that wait for each other must not keep a core busy.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Under nohup, and in the background of a script, every process that a test starts would inherit ignored signals.
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def template() -> Path:
    """The template folder."""
    return TEMPLATE


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A synthetic dataset of 640 training and 101 test images, so that an epoch takes a moment."""
    import data

    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 640, "val": 101})


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fault(*rows): injects the faults of these numbers in tests/faults.py")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the faults that tests which passed have injected."""
    passed = terminalreporter.stats.get("passed", [])
    rows = {row for report in passed for row in dict(report.user_properties).get("faults", [])}
    if rows:
        terminalreporter.section("faults")
        for row, fault in FAULTS.items():
            limit = f" (not here: {NOT_SHOWN[row]})" if row in NOT_SHOWN else ""
            terminalreporter.line(f"{row:>4}  {'survived' if row in rows else 'not run '}  {fault}{limit}")


# Longest first, so that processes that take file by file end at nearly the same time.
LONG = (
    "chaos",
    "nodes",
    "machines",
    "ports",
    "crash_states",
    "launch",
    "examples",
    "slurm",
    "benchmarks",
    "ssh",
    "faults",
    "collectives",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    names = [f"test_{name}" for name in LONG]
    items.sort(key=lambda item: names.index(item.path.stem) if item.path.stem in names else len(names))
    for item in items:
        rows = [row for mark in item.iter_markers("fault") for row in mark.args]
        rows += IN_PROJECT.get(item.nodeid.rpartition("/")[2].partition("[")[0], ())
        item.user_properties.append(("faults", rows))
