"""The template folder is a project that runs in place: these tests import its modules, by `pythonpath` of pytest."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from faults import FAULTS, IN_PROJECT, NOT_SHOWN

REPOSITORY = Path(__file__).resolve().parent.parent
TEMPLATE = REPOSITORY / "{{cookiecutter.project_slug}}"

# In a shell inside a cluster allocation, the launcher's variables would set the ranks of every test's processes.
for name in list(os.environ):
    if name.startswith(("SLURM_", "OMPI_", "PMI", "PET_", "TORCHELASTIC_")) or name in (
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    ):
        del os.environ[name]

# torch's store asks a name server for the name of each address that connects. Some do not respond to every question.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Several tests run at once: threads that wait for each other must not keep a core busy.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Under nohup, and in the background of a script, every process that a test starts would inherit ignored signals.
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The random weights and numbers of a test do not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture
def template() -> Path:
    """The template folder."""
    return TEMPLATE


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A synthetic dataset of 640 training and 101 test images, so that an epoch takes a moment."""
    import data

    monkeypatch.setattr(data, "SYNTHETIC_SIZES", {"train": 640, "val": 101})


# ---- samples of what enumerates -------------------------------------------------------------------------------------


def seed() -> int:
    """Which sample `make test` takes: SEED, else a number of the commit, so that it is another one with each change."""
    if "SEED" in os.environ:
        return int(os.environ["SEED"])
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True)
    return int(git.stdout[:7] or "0", 16)  # without git, as in a zip of the repository: 0


SEED = seed()


@pytest.fixture(name="seed")
def fixture_seed() -> int:
    """SEED, for a test that draws by itself; pytest prints it."""
    return SEED


@pytest.fixture
def sample(request: pytest.FixtureRequest) -> Callable[[Sequence[Any], int], list[Any]]:
    """sample(items, count): `count` of the items, in their order; with --all, all of them.

    A test that asks for this fixture counts as marked with `sample`.
    """
    generator = random.Random(f"{SEED} {request.node.nodeid}")

    def choose(items: Sequence[Any], count: int) -> list[Any]:
        if request.config.getoption("all") or request.config.getoption("left_out") or count >= len(items):
            return list(items)
        return [items[place] for place in sorted(generator.sample(range(len(items)), count))]

    return choose


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run all cases of tests that are marked with `sample`")
    parser.addoption("--left-out", action="store_true", help="run only what is left out without --all")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fault(*rows): injects the faults of these numbers in tests/faults.py")
    text = "sample(count, group): without --all, `count` cases of this test run, or of all tests of this group"
    config.addinivalue_line("markers", text)


def pytest_collection_finish() -> None:
    """From now on, a garbage collection of this process does not visit what was imported and collected."""
    gc.collect()
    gc.freeze()


def pytest_report_header(config: pytest.Config) -> str:
    cases = "what is not in the samples" if config.getoption("left_out") else "samples"
    return "all cases" if config.getoption("all") else f"{cases}: SEED={SEED}"


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the cases that are not in the sample."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if (marker := item.get_closest_marker("sample")) is not None:
            _, group = (*marker.args, item.nodeid.partition("[")[0])[:2]
            cases.setdefault(group, []).append(item)
        elif "sample" in getattr(item, "fixturenames", ()):
            item.add_marker("sample")
    if config.getoption("all"):
        return
    left_out: set[pytest.Item] = set()
    for name, each in cases.items():
        count = next(each[0].iter_markers("sample")).args[0]
        chosen = random.Random(f"{SEED} {name}").sample(each, min(count, len(each)))
        left_out |= set(each) - set(chosen)
    if config.getoption("left_out"):  # a test that asks for the fixture has a sample within it
        inside = {item for item in items if "sample" in getattr(item, "fixturenames", ())}
        left_out = set(items) - left_out - inside
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


# ---- the end of a run -----------------------------------------------------------------------------------------------


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the faults that tests which passed have injected, and why tests were skipped."""
    passed = terminalreporter.stats.get("passed", [])
    rows = {row for report in passed for row in dict(report.user_properties).get("faults", [])}
    if rows:
        terminalreporter.section("faults")
        for row, fault in FAULTS.items():
            limit = f" (not here: {NOT_SHOWN[row]})" if row in NOT_SHOWN else ""
            terminalreporter.line(f"{row:>4}  {'survived' if row in rows else 'not run '}  {fault}{limit}")
    skipped = Counter(str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", []))
    if skipped:
        terminalreporter.section(f"{skipped.total()} tests were skipped")
        for reason, count in skipped.most_common():
            terminalreporter.line(f"{count:>4}  {reason.removeprefix('Skipped: ')}")


# Longest first, so that processes that take file by file end at nearly the same time.
LONG = (
    *("crash_states", "ports", "rendezvous", "nodes", "machines", "chaos", "benchmarks", "resume", "launch", "options"),
    *(
        "data",
        "training",
        "rehearse",
        "examples",
        "faults",
        "data_wait",
        "ssh",
        "slurm",
        "mirror",
        "generator",
        "steps",
    ),
    *("rank_files", "shard_more_faults", "shard", "storage", "owner_code", "loss_terms", "recipes"),
    *("surroundings", "samples", "shard_faults", "documentation", "benchmark", "check"),
)


@pytest.hookimpl(tryfirst=True)  # before pytest looks for the markers of -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_out(config, items)
    names = [f"test_{name}" for name in LONG]
    items.sort(key=lambda item: names.index(item.path.stem) if item.path.stem in names else len(names))
    for item in items:
        rows = [row for mark in item.iter_markers("fault") for row in mark.args]
        rows += IN_PROJECT.get(item.nodeid.rpartition("/")[2].partition("[")[0], ())
        item.user_properties.append(("faults", rows))
