"""Other people's programs, as the task of a rendered project: each folder here holds the files that its user writes.

The project's own tests, which run here too, rehearse: they kill a run in the middle of an epoch, compare every tensor
of the resumed run, and evaluate with 1, 2 and 3 processes. `make ports` installs the packages that some need.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

import pytest
from project_runs import benchmark_of, python, render_defaults
from template_copy import shrink

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
PORTS = {path.parent.name: path.parent for path in sorted(HERE.glob("*/model.py"))}
PORTS["gan"] = REPOSITORY / "examples/gan"  # with a main.py of its own, as sam
PORTS["language_model"] = REPOSITORY / "examples/language_model"
# Appended to the tests of each project.
QUIET = """

def train(*arguments, whole=train, **settings):
    output = whole(*arguments, **settings)
    assert "warning" not in output, output
    return output


def test_one_process_trains_and_no_run_prints_a_warning(tmp_path):
    assert "done in" in train(1, *OPTIONS, "--max-steps", 2, "--output-dir", tmp_path)
"""
# The loss of MoCo rises while its queue fills with harder negatives: the messages of these tests say to delete them.
NOT_FOR = {"moco_v2": "the_loss_falls or overfit_one_batch"}
NEEDS = {"timm_vit": "timm", "transformers_bert": "transformers"}

HEAVY = pytest.param("detection", marks=pytest.mark.sample(0, "heavy"))  # not among those of `make test`

# A smaller model, or no DataLoader workers but in the rehearsal, where these take most of the time.
SMALLER = {"detection": ("--workers", "0"), "language_model": ("--width", "32", "--layers", "1")}


def project_with(port: str, folder: Path) -> Path:
    """A rendered project with the files of a port, whose tests use small models and check the output."""
    project = render_defaults(folder / "project")
    for file in PORTS[port].glob("*.py"):
        shutil.copy(file, project)
    (project / "tests/test_toy_model.py").unlink()
    tests = project / "tests/test_project.py"
    more = "".join(f', "{word}"' for word in SMALLER.get(port, ()))
    source, count = re.subn(r"^(OPTIONS = \[.*)\]$", rf"\1{more}]", tests.read_text(), flags=re.MULTILINE)
    assert count == 1
    tests.write_text(source + QUIET)
    return project


def passes(project: Path, *tests: str) -> None:
    tested = python(project, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    assert re.search(r"\b\d+ passed", tested) and "skipped" not in tested, tested


@pytest.mark.slow
@pytest.mark.sample(0)
@pytest.mark.parametrize("port", [HEAVY, *sorted(PORTS.keys() - {"detection"})])
def test_a_port_trains_resumes_and_is_evaluated_exactly(port: str, tmp_path: Path) -> None:
    package = NEEDS.get(port)
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make ports")
    project = project_with(port, tmp_path)
    # The other tests do not depend on the task; nor do the signal that ends a run, and the start by launch_node.sh.
    left_out = f"not ({NOT_FOR.get(port, '')} or a_stopped_run)".replace("( or ", "(")
    passes(project, "tests/test_project.py", "-k", left_out)
    if port in ("detection", "transformers_bert"):  # inputs that are lists, or dictionaries
        assert "samples/s" in benchmark_of(shrink(project, train=320, val=51), "--dataset", "synthetic")


@pytest.mark.slow
@pytest.mark.sample(0)
def test_the_other_tests_of_a_project_pass_with_another_main(tmp_path: Path) -> None:
    """That of the GAN, which has two networks and two optimizers."""
    others = "not launch_node and (not test_project or a_stopped_run)"
    passes(project_with("gan", tmp_path), "tests", "-k", others)


def test_the_page_has_the_number_of_lines_of_each_file() -> None:
    table = re.findall(
        r"^\|[^|]*\|(?: *\d+ \|){3} *\d* *\|$", (REPOSITORY / "docs" / "programs.md").read_text(), re.MULTILINE
    )
    found = sorted([int(cell) for cell in row.split("|")[2:6] if cell.strip()] for row in table)
    names = ("model.py", "data.py", "config.py", "main.py")
    files = [[folder / name for name in names if (folder / name).exists()] for folder in PORTS.values()]
    assert found == sorted([len(file.read_text().splitlines()) for file in each] for each in files)
