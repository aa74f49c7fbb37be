"""The generator: which answers it accepts, which it refuses, and that each way to render produces the same project."""

from __future__ import annotations

import ast
import fnmatch
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from cookiecutter import main as cookiecutter_main
from cookiecutter.exceptions import FailedHookException
from cookiecutter.main import cookiecutter
from packaging.licenses import canonicalize_license_expression
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from project_runs import python
from template_copy import LEAN

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # a dependency of pytest

REPOSITORY = Path(__file__).resolve().parent.parent
TEMPLATE = "{{cookiecutter.project_slug}}"
RENDERED = {"README.md", "pyproject.toml", "LICENSE"}
LICENSES = ["MIT", "Apache-2.0", "BSD-3-Clause", "Proprietary"]
YAML_FILES = ("kubernetes.yaml", "trainjob.yaml", "skypilot.yaml")
LAUNCHERS = {  # answer -> the files that it removes
    "all": set(),
    "slurm": {"launch/ssh.sh", "launch/kubernetes.yaml", "launch/trainjob.yaml", "launch/skypilot.yaml"},
    "kubernetes": {"launch/ssh.sh", "launch/slurm.sbatch", "launch/skypilot.yaml"},
    "skypilot": {"launch/ssh.sh", "launch/slurm.sbatch", "launch/kubernetes.yaml", "launch/trainjob.yaml"},
    "launch_node.sh only": {f"launch/{name}" for name in ("ssh.sh", "slurm.sbatch", *YAML_FILES)},
}
MODULES = ("main", "model", "data", "config", "ddp", "benchmark", "benchmark_report")
APACHE_SHA256 = (
    "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"  # apache.org/licenses/LICENSE-2.0.txt
)

Tree = dict[str, tuple[bytes, bool]]

needs_run_bits = pytest.mark.skipif(os.name == "nt", reason="Windows has no run bits")


def tree(folder: Path) -> Tree:
    """The bytes of every file in a folder and its sub-folders, and whether its owner may run it."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), bool(path.stat().st_mode & 0o100)) for path in files
    }


def run(*command: object, ok: bool = True, timeout: int = 900, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. With `ok`, it must succeed; if it fails, the error shows its output."""
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, encoding="utf-8", timeout=timeout, **options
    )
    assert not ok or done.returncode == 0, f"{command} exited {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files of this repository, without caches and environments."""
    copy = tmp_path_factory.mktemp("source") / "ddp-template"
    listed = run("git", "ls-files", "-co", "--exclude-standard", "-z", cwd=REPOSITORY).stdout
    for name in filter(None, listed.split("\0")):
        if (REPOSITORY / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, copy / name)
    return copy


@pytest.fixture(scope="module", autouse=True)
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables for child processes. They hide the user's own cookiecutter, git and uv settings from the tests."""
    home = tmp_path_factory.mktemp("home")
    config = home / "cookiecutter.yaml"
    folders = {"cookiecutters_dir": str(home / "templates"), "replay_dir": str(home / "replay")}
    config.write_text(json.dumps(folders), encoding="utf-8")  # JSON is YAML
    settings = ("GIT_", "COOKIECUTTER_", "FORCE_COLOR")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(settings)}
    variables |= {"HOME": str(home), "USERPROFILE": str(home), "COOKIECUTTER_CONFIG": str(config), "COLUMNS": "200"}
    variables |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "PYTHONUTF8": "1"}
    for role in ("AUTHOR", "COMMITTER"):
        variables |= {f"GIT_{role}_NAME": "Tester", f"GIT_{role}_EMAIL": "tester@example.org"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COOKIECUTTER_CONFIG", str(config))
        yield variables


def render(source: Path | str, out: Path, *, hooks: bool = True, force: bool = False, **answers: str) -> Path:
    """Render the template with these answers, all parts, and the other defaults. Returns the project's path."""
    out.mkdir(exist_ok=True)
    answers = {"parts": "all", **answers}
    made = cookiecutter(
        str(source),
        no_input=True,
        extra_context=answers,
        output_dir=str(out),
        accept_hooks=hooks,
        overwrite_if_exists=force,
    )
    return Path(made)


@pytest.fixture(scope="module")
def project(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One project, rendered with the defaults. Tests only read it."""
    return render(source, tmp_path_factory.mktemp("defaults"))


def metadata(project: Path) -> dict[str, Any]:
    """The [project] table of its pyproject.toml."""
    return tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def virtual_environment(folder: Path) -> Path:
    """Create an environment that uses the packages of this one. Downloads nothing. Returns its Python."""
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    own = run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").stdout.strip()
    Path(own, "borrowed.pth").write_text(sysconfig.get_paths()["purelib"], encoding="utf-8")
    return python


# Answers


@pytest.mark.parametrize("license", LICENSES)
def test_every_license_comes_with_its_text_year_holder_and_spdx_expression(
    source: Path, tmp_path: Path, license: str
) -> None:
    project = render(source, tmp_path, license=license, full_name="Ada Lovelace")
    text = (project / "LICENSE").read_bytes().decode()
    year = datetime.now(timezone.utc).year
    expected = {
        "MIT": ("MIT License\n", "Permission is hereby granted", "OTHER DEALINGS IN THE\nSOFTWARE.\n"),
        "Apache-2.0": (
            " " * 33 + "Apache License\n",
            "END OF TERMS AND CONDITIONS",
            "limitations under the License.\n",
        ),
        "BSD-3-Clause": ("BSD 3-Clause License\n", "Neither the name of the copyright holder", "SUCH DAMAGE.\n"),
        "Proprietary": (
            f"Copyright (c) {year} Ada Lovelace. All rights reserved.\n",
            "written permission",
            "IMPLIED.\n",
        ),
    }
    start, middle, end = expected[license]
    assert text.startswith(start) and middle in text and text.endswith(end)
    assert len(re.findall(rf"Copyright (\(c\) )?{year} Ada Lovelace", text)) == 1
    spdx = metadata(project)["license"]
    assert spdx == {"Proprietary": "LicenseRef-Proprietary"}.get(license, license)
    assert canonicalize_license_expression(spdx) == spdx


def test_the_apache_license_is_the_official_text_but_for_the_holder(source: Path, tmp_path: Path) -> None:
    text = (render(source, tmp_path, license="Apache-2.0", full_name="Ada") / "LICENSE").read_text(encoding="utf-8")
    blank = re.sub(r"Copyright \d{4} Ada$", "Copyright [yyyy] [name of copyright owner]", text, flags=re.MULTILINE)
    assert hashlib.sha256(b"\n" + blank.encode()).hexdigest() == APACHE_SHA256


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("typed", "folder"),
    [
        ("../Foo Bar", "foo-bar"),
        ("/etc/passwd", "etc-passwd"),
        ("..\\..\\evil", "evil"),
        ("C:\\Users\\me", "c-users-me"),
        ("~/net", "net"),
        ("Foo_Bar.v2", "foo-bar-v2"),
        ("  --help  ", "help"),
        ("$(touch x); 'y' \"z\"", "touch-x-y-z"),
        ("Über Netz", "uber-netz"),
        ("模型", "mo-xing"),
        ("con-1", "con-1"),
        ("torch-training", "torch-training"),
        ("x" * 100, "x" * 100),
    ],
)
def test_an_odd_slug_becomes_one_plain_folder_inside_the_output(
    source: Path, tmp_path: Path, typed: str, folder: str
) -> None:
    project = render(source, tmp_path / "out", project_slug=typed)
    assert project == tmp_path / "out" / folder
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == [folder]
    assert metadata(project)["name"] == folder
    assert Requirement(f"{folder}>=0.1").name == folder


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "typed",
    [
        *("psutil", "torch", "TorchVision", "NumPy", "filelock", "Pillow", "typing_extensions", "pip", "ruff"),
        *("con", "AUX", "nul", "Prn", "COM1", "lpt9"),
        *("", "-", "😀", "../..", "x" * 101, "x" * 119 + " y", "long name " * 30),
    ],
)
def test_a_slug_that_cannot_work_is_refused_in_one_line_and_nothing_is_left(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], typed: str
) -> None:
    with pytest.raises(FailedHookException, match="exit status: 1"):
        render(source, tmp_path / "out", project_slug=typed)
    assert list(tmp_path.rglob("*")) == [tmp_path / "out"]
    line = capfd.readouterr().err
    assert line.count("\n") == 1 and line.endswith("\n") and line.isascii() and len(line) < 160
    advice = re.search(r"type .*such as (\S+)\n", line)
    assert advice, line
    assert render(source, tmp_path / "out", project_slug=advice[1]).name == advice[1]


def test_a_cookiecutter_that_leaves_braces_is_refused(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 1.7, which Debian has, does not render private variables of cookiecutter.json, and reports success."""
    prompt = cookiecutter_main.prompt_for_config

    def leave_private_variables(context: Any, *given: Any) -> Any:
        found, raw = prompt(context, *given), context["cookiecutter"]
        return {name: raw[name] if name.startswith("__") else value for name, value in found.items()}

    monkeypatch.setattr(cookiecutter_main, "prompt_for_config", leave_private_variables)
    with pytest.raises(FailedHookException):
        render(source, tmp_path / "out")
    line = capfd.readouterr().err
    assert line == "This template needs cookiecutter 2.1 or newer: pip install --upgrade cookiecutter\n"
    assert list(tmp_path.rglob("*")) == [tmp_path / "out"]


def test_a_project_name_of_emoji_alone_is_refused_and_works_with_a_typed_slug(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(FailedHookException):
        render(source, tmp_path, project_name="🚀🚀")
    assert "no letter from a to z and no digit" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())
    assert metadata(render(source, tmp_path, project_name="🚀🚀", project_slug="rocket"))["name"] == "rocket"


def refused_packages(source: Path) -> set[str]:
    hook = ast.parse((source / "hooks" / "pre_gen_project.py").read_text(encoding="utf-8"))
    assigned = {ast.unparse(node.targets[0]): node.value for node in hook.body if isinstance(node, ast.Assign)}
    return set(ast.literal_eval(assigned["PACKAGES"]).split())


def requirements_of(source: Path) -> list[str]:
    """Every requirement that the generated project's pyproject.toml names."""
    project = tomllib.loads((source / TEMPLATE / "pyproject.toml").read_text(encoding="utf-8"))
    tables = project["project"]["optional-dependencies"] | project["dependency-groups"]
    lists = [project["project"]["dependencies"], project["build-system"]["requires"], *tables.values()]
    return [requirement for requirements in lists for requirement in requirements]


def test_every_package_that_pyproject_names_is_refused_as_a_slug(source: Path) -> None:
    names = {Requirement(line).name for line in requirements_of(source)}
    assert {"torch", "pytest", "setuptools", "psutil", "pillow", "matplotlib"} <= names
    assert names <= refused_packages(source)


def test_every_package_that_pip_installs_with_the_project_is_refused_as_a_slug(source: Path) -> None:
    """Those of NVIDIA are in the list as well, but change with each torch."""
    pending = [Requirement(line) for line in requirements_of(source)]
    found: set[str] = set()
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        with suppress(importlib.metadata.PackageNotFoundError):
            pending += [Requirement(line) for line in importlib.metadata.requires(name) or []]
    assert {"torch", "sympy", "mpmath", "pyparsing"} <= found
    assert {name for name in found if not name.startswith("nvidia-")} <= refused_packages(source)


def test_the_command_line_exits_1_with_our_line_alone_on_stderr(
    source: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    # On stdout, cookiecutter adds its own report of the failed hook, with a traceback. A hook cannot prevent that.
    command = [sys.executable, "-m", "cookiecutter", source, "--no-input", "project_slug=torch"]
    done = run(*command, ok=False, cwd=tmp_path, env=environment)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "The project slug 'torch' is a package that the project needs; type another, such as torch-training"
    ]
    assert "Hook script failed" in done.stdout
    assert not list(tmp_path.iterdir())


def test_a_refusal_leaves_a_folder_that_was_there_before_untouched(source: Path, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "mine.txt").write_text("mine")
    with pytest.raises(FailedHookException):
        render(source, tmp_path, force=True, project_slug="torch")
    assert list(tree(tmp_path)) == ["torch/mine.txt"]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "name",
    [
        'The "best" net',
        "It's Bob's",
        "C:\\nets\\new",
        'ends in \\"',
        "ends in \\",
        '"""',
        "'''",
        "深度学习 モデル 딥러닝",
        "rocket 🚀 👩‍🔬",
        "Zoë Ångström-Müller, PhD <z@example.org>",
        "# [tool] = ${HOME} %s %(x)s",
        "two\nlines\n\tand a tab",
        "a bell \x07, an escape \x1b[31m, a delete \x7f",
    ],
)
def test_names_survive_into_valid_toml(source: Path, tmp_path: Path, name: str) -> None:
    project = render(source, tmp_path, project_name=name, full_name=name, project_slug="named")
    plain = re.sub(r"[\x00-\x1f\x7f]", " ", name)  # TOML allows no control characters
    table = metadata(project)
    assert table["description"] == f"{plain}: training with PyTorch DistributedDataParallel"
    assert table["authors"] == [{"name": plain}]
    assert f" {name}\n" in (project / "LICENSE").read_bytes().decode()


def test_the_prompts_have_human_labels_and_take_what_is_typed(
    source: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    command = [sys.executable, "-m", "cookiecutter", source, "--output-dir", tmp_path / "out"]
    done = run(*command, input='Say "hi" 🚀\n../Foo Bar\nJane {{ Doe }}\n3\n2\n\n', cwd=tmp_path, env=environment)
    labels = json.loads((source / "cookiecutter.json").read_text(encoding="utf-8"))["__prompts__"]
    asked = ["project_name", "project_slug", "full_name", "license", "launchers", "parts"]
    assert list(labels) == asked and list(labels["license"]) == ["__prompt__", *LICENSES]
    assert list(labels["launchers"]) == ["__prompt__", *LAUNCHERS]
    shown = [labels["project_name"], labels["project_slug"], labels["full_name"]]
    shown += [*labels["license"].values(), *labels["launchers"].values(), labels["parts"]]
    places = [done.stdout.find(label) for label in shown]
    assert -1 not in places and places == sorted(places), done.stdout
    assert "[6/6]" in done.stdout and not any(variable in done.stdout for variable in asked[:3])
    assert os.listdir(tmp_path / "out") == ["foo-bar"]
    table = metadata(tmp_path / "out" / "foo-bar")
    assert table["description"].startswith('Say "hi" 🚀:') and table["license"] == "BSD-3-Clause"
    assert table["authors"] == [{"name": "Jane {{ Doe }}"}]
    assert os.listdir(tmp_path / "out" / "foo-bar" / "launch") == ["slurm.sbatch"]


# The launchers


@pytest.fixture(scope="module", params=LAUNCHERS)
def chosen(request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Each answer to the prompt `launchers`, and a project with it. Tests only read the project."""
    return request.param, render(source, tmp_path_factory.mktemp("chosen"), launchers=request.param)


def test_only_the_chosen_launchers_are_in_the_project(project: Path, chosen: tuple[str, Path]) -> None:
    choice, other = chosen
    before, after = tree(project), tree(other)
    assert set(before) - set(after) == LAUNCHERS[choice] and set(after) <= set(before)
    assert [name for name in after if after[name] != before[name]] == (["README.md"] if LAUNCHERS[choice] else [])
    assert (other / "launch").exists() == (choice != "launch_node.sh only")
    assert {"Dockerfile", "launch_node.sh", "ddp/launcher/launch_node.py"} <= set(after)


def test_nothing_in_the_project_needs_a_launcher_that_was_not_chosen(chosen: tuple[str, Path]) -> None:
    choice, project = chosen
    removed = {Path(name).name for name in LAUNCHERS[choice]}
    modules = {name.removesuffix(".py").replace("/", ".") for name in LAUNCHERS[choice] if name.endswith(".py")}
    for path in project.rglob("*"):
        if path.suffix == ".py":
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                    assert not {start[:-1], *(start + name.name for name in node.names)} & modules, path
        elif path.is_file() and path.name not in ("LICENSE", "cluster.md"):  # that page is copied verbatim
            text = path.read_text(encoding="utf-8")
            assert not [name for name in removed if name in text], path


def test_the_linter_accepts_a_project_with_any_launchers(chosen: tuple[str, Path], environment: dict[str, str]) -> None:
    for command in (("check",), ("format", "--check")):
        run(sys.executable, "-m", "ruff", *command, "--no-cache", ".", cwd=chosen[1], env=environment)


def test_the_readme_is_whole_with_any_launchers(chosen: tuple[str, Path]) -> None:
    text = (chosen[1] / "README.md").read_text(encoding="utf-8")
    assert (
        not re.search(r"[ \t]$|\n{3}|\{[%{#]", text, re.MULTILINE) and text.endswith("\n") and not text.endswith("\n\n")
    )
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    linked = set(re.findall(r"\]\(#([^)]+)\)", text))
    assert linked and linked <= anchors
    assert all((chosen[1] / path).exists() for path in re.findall(r"\]\(([^)#:]+)\)", text))


@pytest.mark.slow
@pytest.mark.sample(0)
def test_a_project_without_launch_scripts_passes_its_own_tests(
    source: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    """Those that depend on the files: it has the fewest."""
    project = render(source, tmp_path, launchers="launch_node.sh only")
    tested = python(project, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_project.py", **environment)
    assert re.search(r"^\d+ passed in ", tested, re.MULTILINE), tested


def test_generating_again_deletes_nothing_that_was_there(source: Path, tmp_path: Path) -> None:
    project = render(source, tmp_path)
    (project / "launch" / "mine.sh").write_text("mine")
    (tmp_path / "elsewhere.sh").write_text("a script of another project")
    (project / "linked.sh").symlink_to(tmp_path / "elsewhere.sh")
    (project / "gone.sh").symlink_to(tmp_path / "gone")
    before, mode = set(tree(project)), (tmp_path / "elsewhere.sh").stat().st_mode
    render(source, tmp_path, force=True, launchers="launch_node.sh only", parts="monitor")
    assert set(tree(project)) == before and (tmp_path / "elsewhere.sh").stat().st_mode == mode
    listed = run(sys.executable, "-c", "from parts import PARTS; print(*PARTS)", cwd=project).stdout.split()
    assert listed == [*PARTS], "with their files"


def test_an_answer_that_is_no_choice_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="launchers"):
        render(source, tmp_path, launchers="ssh")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_replay_file_from_before_the_prompt_asks_only_for_the_launchers(
    source: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    command = [sys.executable, "-m", "cookiecutter", source]
    run(*command, "--no-input", "-o", tmp_path / "first", "project_slug=older", env=environment)
    answers = json.loads((Path(environment["HOME"]) / "replay" / "ddp-template.json").read_text(encoding="utf-8"))
    del answers["cookiecutter"]["launchers"]
    (tmp_path / "older.json").write_text(json.dumps(answers), encoding="utf-8")
    replay = [*command, "--replay-file", tmp_path / "older.json", "-o", tmp_path / "second"]
    run(*replay, input="2\n", env=environment)
    assert os.listdir(tmp_path / "second" / "older" / "launch") == ["slurm.sbatch"]


# The parts

PARTS = ("fsdp", "mirror", "monitor", "preflight")
ALL = functools.partial(pytest.param, marks=pytest.mark.sample(0))  # a case for --all
OF_MIRROR = {"launch/skypilot.yaml"}  # which passes --mirror


def files_of(part: str) -> set[str]:
    """The files of a part, as README.md lists them."""
    package = (REPOSITORY / TEMPLATE / "ddp" / "parts" / part).glob("*.py")
    return {f"ddp/parts/{part}/{file.name}" for file in package} | {f"tests/test_part_{part}.py", f"docs/{part}.md"}


@pytest.fixture(
    scope="module", params=["none", ALL("fsdp"), ALL("mirror"), ALL("monitor"), ALL("preflight"), " Mirror, PREFLIGHT"]
)
def with_parts(request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The names of some parts, and a project with these alone. Tests only read the project."""
    names = [name for name in PARTS if name in request.param.lower()]
    return names, render(source, tmp_path_factory.mktemp("parts"), parts=request.param)


def test_only_the_chosen_parts_are_in_the_project(project: Path, with_parts: tuple[list[str], Path]) -> None:
    names, other = with_parts
    before, after = tree(project), tree(other)
    absent = [name for name in PARTS if name not in names]
    gone = set().union(*map(files_of, absent)) | (set() if "mirror" in names else OF_MIRROR)
    assert set(before) - set(after) == gone and set(after) <= set(before)
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"README.md", "parts.py"} | (set() if "mirror" in names else {"pyproject.toml"})
    listed = run(sys.executable, "-c", "from parts import PARTS; print(*PARTS)", cwd=other).stdout.split()
    assert listed == names


MARKS = {  # words of the pages, the options and the code of a part
    "fsdp": r"--shard|checkpoint-activations|docs/fsdp|fully_shard|FSDP2",
    "mirror": r"--mirror|docs/mirror|MirrorCallback|fsspec",
    "monitor": r"--guard|--profile|docs/monitor|MFU|tokens_per_s|rank_ms|[Ll]edger",
    "preflight": r"--check\b(?! \.)|docs/preflight|all_gather  ",
}


def test_a_project_has_no_word_of_a_part_that_was_not_chosen(with_parts: tuple[list[str], Path]) -> None:
    names, project = with_parts
    for name in sorted(set(PARTS).difference(names)):
        for path in project.rglob("*"):
            if path.is_file() and path.name not in ("LICENSE", ".pre-commit-config.yaml"):
                found = re.findall(MARKS[name], path.read_text(encoding="utf-8"))
                assert not found or path.name == "ci.yml", (path, found)


@pytest.mark.sample(1)
def test_an_option_of_an_absent_part_is_refused_with_how_to_add_it(with_parts: tuple[list[str], Path]) -> None:
    names, project = with_parts
    words = {"fsdp": ["--shard"], "mirror": ["--mirror", "x"], "monitor": ["--profile"], "preflight": ["--check"]}
    lean = {**os.environ, **LEAN, "PYTHON": sys.executable}
    for name in set(PARTS).difference(names):
        script = ["bash", "launch_node.sh"] if name == "preflight" else [sys.executable, "main.py"]
        done = run(*script, *words[name], ok=False, cwd=project, env=lean)
        parts = json.dumps({"parts": ",".join([*names, name])})
        add = f"this project has no part {name}: add it with cruft update -y --variables-to-update '{parts}'"
        add += "; without cruft, see Parts in README.md"
        assert (done.returncode, done.stderr) == (2, f"error: {words[name][0]}: {add}\n")
        assert words[name][0] not in run(*script, "--help", cwd=project, env=lean).stdout


@pytest.mark.sample(0)
def test_the_linter_and_the_types_accept_a_project_with_any_parts(
    with_parts: tuple[list[str], Path], environment: dict[str, str], tmp_path: Path
) -> None:
    names, project = with_parts
    for command in (("check",), ("format", "--check")):
        run(sys.executable, "-m", "ruff", *command, "--no-cache", ".", cwd=project, env=environment)
    config = ["--config-file", REPOSITORY / "pyproject.toml", "--cache-dir", tmp_path / "mypy"]
    run(sys.executable, "-m", "mypy", *config, ".", cwd=project, env=environment)
    rules = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    for name in set(PARTS).difference(names):
        rules = rules.replace(f'"ddp.parts.{name}"', "").replace(f'"ddp.parts.{name}.__main__ -> config"', "")
    rules = re.sub(r"\[(, )+", "[", re.sub(r"(, )+\]", "]", re.sub(r"(, )+", ", ", rules)))
    (tmp_path / "rules.toml").write_text(rules, encoding="utf-8")
    linter = Path(sys.executable).with_name("lint-imports")
    run(linter, "--no-cache", "--config", tmp_path / "rules.toml", cwd=project, env={**environment, "PYTHONPATH": "."})


@pytest.mark.slow
@pytest.mark.parametrize("parts", [*map(ALL, ["none", *PARTS])])
def test_a_project_passes_its_own_tests_with_these_parts(
    source: Path, tmp_path: Path, environment: dict[str, str], parts: str
) -> None:
    """With all of them, the template folder passes its own."""
    project = render(source, tmp_path, parts=parts)
    tested = python(project, "-m", "pytest", "-q", "-p", "no:cacheprovider", **environment)
    assert re.search(r"^\d+ passed(, \d+ skipped)? in ", tested, re.MULTILINE), tested


@pytest.mark.slow
@pytest.mark.sample(0)
def test_a_project_passes_its_own_tests_when_all_parts_were_deleted_by_hand(
    source: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    """As its README says."""
    project = render(source, tmp_path)
    for name in PARTS:
        for file in files_of(name):
            (project / file).unlink()
        (project / "ddp" / "parts" / name).rmdir()
        listed = (project / "parts.py").read_text(encoding="utf-8")
        (project / "parts.py").write_text(re.sub(rf'^    "{name}",.*\n', "", listed, flags=re.MULTILINE))
    run(sys.executable, "-m", "ruff", "format", "--check", "--no-cache", ".", cwd=project, env=environment)
    tested = python(project, "-m", "pytest", "-q", "-p", "no:cacheprovider", **environment)
    assert re.search(r"^\d+ passed(, \d+ skipped)? in ", tested, re.MULTILINE), tested


@pytest.mark.parametrize(("parts", "named"), [("mirror,miror", "miror"), ("none mirror", "none"), ('"$(x)', "x")])
def test_an_unknown_part_is_refused_in_one_line(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], parts: str, named: str
) -> None:
    with pytest.raises(FailedHookException):
        render(source, tmp_path, parts=parts)
    expected = f"There is no part '{named}'; type none, all, or names of fsdp, mirror, monitor, preflight\n"
    assert capfd.readouterr().err == expected and not list(tmp_path.iterdir())


@pytest.mark.sample(1)
@pytest.mark.parametrize("lines", ['"gone",', '"fsdp", "fsdp",'])
def test_a_wrong_line_in_parts_py_is_one_line(source: Path, tmp_path: Path, lines: str) -> None:
    project = render(source, tmp_path, parts="fsdp")
    (project / "parts.py").write_text(f"PARTS = [{lines}]\n", encoding="utf-8")
    for script in (["main.py", "--help"], ["launch_node.sh", "--help"]):
        program = "bash" if script[0].endswith(".sh") else sys.executable
        done = run(program, *script, ok=False, cwd=project, env={**os.environ, "PYTHON": sys.executable})
        assert done.returncode == 2 and done.stderr.startswith("error: parts.py: ") and done.stderr.count("\n") == 1, (
            done
        )


def test_skypilot_brings_the_part_that_it_needs(source: Path, tmp_path: Path) -> None:
    project = render(source, tmp_path, parts="none", launchers="skypilot")
    assert os.listdir(project / "launch") == ["skypilot.yaml"] and (project / "ddp" / "parts" / "mirror").exists()


def test_generating_again_adds_a_part_and_changes_nothing_that_was_there(
    source: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    """For a project without cruft: with -f -s. The lines that it needs in the owner's files are printed."""
    project = render(source, tmp_path, parts="preflight")
    for name in ("parts.py", "pyproject.toml", "main.py"):
        with (project / name).open("a", encoding="utf-8") as file:
            file.write("# OWNER\n")
    (project / "docs" / "monitor.md").write_text("of the owner")
    (project / "README.md").rename(project / "README.rst")
    (project / "model.py").chmod(0o755)
    before = tree(project)
    command = [sys.executable, "-m", "cookiecutter", "-f", "-s", "--no-input", source, "-o", tmp_path]
    printed = run(*command, "parts=mirror", env=environment).stdout
    assert printed == (
        'These files were there before. Add to\n    parts.py: "mirror",\n'
        '    pyproject.toml: "fsspec>=2024.2", # part mirror\n'
    )
    after = tree(project)
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == files_of("mirror") | OF_MIRROR
    (project / ".before").mkdir()  # as an interrupted run leaves it
    done = run(*command, "parts=mirror", ok=False, env=environment)
    assert done.returncode == 1 and done.stderr.startswith("An interrupted run has left .before with your files: ")
    assert {name: each for name, each in tree(project).items() if name in before} == before


@pytest.mark.slow
def test_cruft_update_adds_a_part_and_removes_it_and_keeps_the_owners_edits(
    source: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    template = committed(source, tmp_path / "ddp-template", environment)
    cruft = [sys.executable, "-m", "cruft"]
    context = ["--extra-context", json.dumps({"parts": "monitor"})]
    run(*cruft, "create", template, "--no-input", "--output-dir", tmp_path, *context, cwd=tmp_path, env=environment)
    owner = tmp_path / "my-ddp-project"
    run("git", "init", "--quiet", cwd=owner, env=environment)
    owned = ("main.py", "model.py", "data.py", "config.py", "README.md", "pyproject.toml")
    for name in owned:
        with (owner / name).open("a", encoding="utf-8") as file:
            file.write("\n# OWNER\n")
    commit_all(owner, environment)
    for parts in ("monitor,mirror", "mirror", "none"):
        variables = ["--variables-to-update", json.dumps({"parts": parts})]
        run(*cruft, "update", "--skip-apply-ask", *variables, cwd=owner, env=environment)
        expected = tree(render(source, tmp_path / parts, parts=parts))
        after = {name: each for name, each in tree(owner).items() if not name.startswith(".git/")}
        assert set(after) == {*expected, ".cruft.json"}
        for name in expected:
            ending = b"\n# OWNER\n" if name in owned else b""
            assert after[name][0] == expected[name][0] + ending, name
        commit_all(owner, environment)


@pytest.mark.slow
def test_a_project_from_before_the_prompt_keeps_its_parts_with_parts_all(
    source: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    """CHANGELOG.md says so. It has no answer to the prompt: a plain update would take the default, none."""
    older = shutil.copytree(source, tmp_path / "older")
    path = older / "cookiecutter.json"
    answers = json.loads(path.read_text(encoding="utf-8"))
    del answers["parts"], answers["__prompts__"]["parts"]
    answers["__parts"] = "-".join(PARTS)
    path.write_text(json.dumps(answers), encoding="utf-8")
    hook = older / "hooks" / "pre_gen_project.py"
    hook.write_text(hook.read_text(encoding="utf-8").replace("{{ cookiecutter.parts|slugify }}", "all"))
    template = committed(older, tmp_path / "ddp-template", environment)
    cruft = [sys.executable, "-m", "cruft"]
    run(*cruft, "create", template, "--no-input", "--output-dir", tmp_path, cwd=tmp_path, env=environment)
    owner = tmp_path / "my-ddp-project"
    run("git", "init", "--quiet", cwd=owner, env=environment)
    commit_all(owner, environment)
    for name in ("cookiecutter.json", "hooks/pre_gen_project.py"):
        shutil.copy(source / name, template / name)
    commit_all(template, environment)
    variables = ["--variables-to-update", json.dumps({"parts": "all"})]
    run(*cruft, "update", "--skip-apply-ask", *variables, cwd=owner, env=environment)
    after = {name: each for name, each in tree(owner).items() if not name.startswith(".git/") and name != ".cruft.json"}
    assert after == tree(render(source, tmp_path / "expected"))


@pytest.mark.slow
@pytest.mark.sample(1)
def test_a_checkpoint_that_was_written_with_all_parts_resumes_without_them(with_parts: Any, tmp_path: Path) -> None:
    options = ["--dataset", "synthetic", "--device", "cpu", "--deterministic", "--output-dir", str(tmp_path / "out")]
    options += ["--epochs", "1", "--max-steps"]
    (tmp_path / "copy").mkdir()
    parts = ["--guard", "2", "--profile", "--mirror", str(tmp_path / "copy")]
    python(REPOSITORY / TEMPLATE, "main.py", *options, "3", *parts)
    assert "resuming from" in python(with_parts[1], "main.py", *options, "5")


# The output


def test_only_readme_pyproject_and_license_are_rendered(source: Path, project: Path) -> None:
    before, after = tree(source / TEMPLATE), tree(project)
    assert before.keys() == after.keys() and before.keys() > RENDERED
    assert [name for name in before if before[name] != after[name]] == sorted(RENDERED)


def test_no_jinja_remains(project: Path) -> None:
    for name in RENDERED:
        assert not re.search(r"\{\{|\{%|\{#", (project / name).read_text(encoding="utf-8")), name
    assert not [name for name in tree(project) if "{" in name]


def test_the_patterns_of_copied_files_exclude_the_three_and_match_no_folder(source: Path) -> None:
    # A file that matches no pattern would be rendered, with its braces. If a folder matched a pattern,
    # `cookiecutter --overwrite-if-exists` would delete it, with the owner's own files, and copy it again.
    patterns = json.loads((source / "cookiecutter.json").read_text(encoding="utf-8"))["_copy_without_render"]
    root = source / TEMPLATE
    paths = {path.relative_to(root).as_posix(): path for path in root.rglob("*")}
    matched = {name for name in paths if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)}
    assert matched == {name for name, path in paths.items() if path.is_file()} - RENDERED


def test_rendering_over_a_project_keeps_files_that_its_owner_added(source: Path, tmp_path: Path) -> None:
    project = render(source, tmp_path)
    added = [*(f"{path.parent}/mine.txt" for path in project.rglob("*") if path.is_file()), f"{project}/runs/mine.txt"]
    for path in map(Path, added):
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    render(source, tmp_path, force=True)
    assert all(Path(path).read_text() == "mine" for path in added)


def test_a_template_that_was_run_in_place_renders_despite_its_caches(source: Path, tmp_path: Path) -> None:
    used = tmp_path / "used"
    shutil.copytree(source, used)
    for name in (".mypy_cache/3.10/a.json", ".ruff_cache/1/x", "ddp/__pycache__/a.cpython-310.pyc", "runs/status.json"):
        cache = used / TEMPLATE / name
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.write_bytes(b'{"{% broken": {{}} ')
    assert (render(used, tmp_path / "out") / "main.py").exists()


@pytest.mark.parametrize("command", [("check",), ("format", "--check")], ids=" ".join)
def test_ruff_accepts_the_template_folder_and_the_project(
    source: Path, project: Path, command: tuple[str, ...], environment: dict[str, str]
) -> None:
    for folder in (source / TEMPLATE, project):
        run(sys.executable, "-m", "ruff", *command, "--no-cache", ".", cwd=folder, env=environment)


def test_the_unrendered_pyproject_is_valid_toml(source: Path, project: Path) -> None:
    unrendered, rendered = (
        tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
        for folder in (source / TEMPLATE, project)
    )
    assert unrendered["project"].pop("name") == "{{ cookiecutter.project_slug }}"
    assert rendered["project"].pop("name") == "my-ddp-project"
    for field in ("description", "authors", "license"):
        del unrendered["project"][field], rendered["project"][field]
    assert unrendered == rendered


OFFLINE = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]


@pytest.mark.slow
def test_pip_installs_the_project_and_reads_its_license(
    source: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    project = render(source, tmp_path, full_name='Zoë "Z" \\ 模型', license="Proprietary")
    python = virtual_environment(tmp_path / "venv")
    run(python, "-m", "pip", "install", *OFFLINE, "-e", ".", cwd=project, env=environment)
    script = "import importlib.metadata as m; d = m.metadata('my-ddp-project')"
    script += "; print(d['License-Expression'], d['License-File'], d['Author'], sep='|'); print(*m.requires(d['Name']))"
    license, requirements = run(python, "-c", script, cwd=tmp_path, env=environment).stdout.splitlines()
    assert license == 'LicenseRef-Proprietary|LICENSE|Zoë "Z" \\ 模型'
    assert requirements.startswith(" ".join(metadata(project)["dependencies"]) + " pytest>=8;")
    script = "import config, ddp.core.errors; print(config.__file__)"
    assert run(python, "-c", script, cwd=project, env=environment).stdout == f"{project / 'config.py'}\n"


@pytest.mark.sample(0)
@pytest.mark.slow
def test_two_projects_in_one_environment_import_their_own_modules(
    source: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    """Both have a model.py. pip installs none of their modules, editable or not: neither hides those of the other."""
    python = virtual_environment(tmp_path / "venv")
    projects = [render(source, tmp_path, project_slug=slug) for slug in ("one", "two")]
    for project, editable in zip(projects, (["-e"], []), strict=True):
        for name in ("model.py", "data.py", "config.py", "ddp/__init__.py"):
            with (project / name).open("a", encoding="utf-8") as file:
                file.write("\n\nprint(__file__)\n")
        (project / "tests" / "conftest.py").unlink()  # it imports torch
        (project / "tests" / "test_origin.py").write_text(
            "from importlib.util import find_spec\n"
            "from pathlib import Path\n\n"
            "import config, ddp, pytest\n\n"
            f"@pytest.mark.parametrize('module', {MODULES})\n"
            "def test_origin(module):\n"
            "    assert Path(find_spec(module).origin).is_relative_to(Path(__file__).parent.parent)\n"
        )
        run(python, "-m", "pip", "install", *OFFLINE, *editable, project, cwd=tmp_path, env=environment)

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    script = f"from importlib.util import find_spec; print([name for name in {MODULES} if find_spec(name)])"
    assert run(python, "-c", script, cwd=elsewhere, env=environment).stdout == "[]\n"
    script = "import importlib.metadata as m; print(m.version('one'), m.version('two'))"
    assert run(python, "-c", script, cwd=elsewhere, env=environment).stdout == "0.1.0 0.1.0\n"
    for project, other in (projects, projects[::-1]):
        printed = run(python, project / "main.py", "--help", cwd=other, env=environment | LEAN).stdout.splitlines()
        own = {f"{project / name}" for name in ("model.py", "data.py", "config.py", "ddp/__init__.py")}
        assert {line for line in printed if line.endswith(".py")} == own
        pytest_run = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", project / "tests" / "test_origin.py"]
        folder = elsewhere if project == projects[0] else project
        assert f"{len(MODULES)} passed" in run(*pytest_run, cwd=folder, env=environment).stdout


@pytest.mark.slow
@pytest.mark.sample(0)
def test_uv_resolves_the_project(source: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    project = render(source, tmp_path)
    here = environment | {"UV_PYTHON": sys.executable, "UV_PYTHON_DOWNLOADS": "never"}
    done = run(sys.executable, "-m", "uv", "sync", "--dry-run", "--no-progress", ok=False, cwd=project, env=here)
    offline = re.search(r"Failed to (fetch|download)|dns error|error sending request", done.stderr)
    if offline and os.environ.get("CI") != "true":
        pytest.skip("uv reads the packages' metadata from the network, which is out of reach")
    assert done.returncode == 0, done.stderr
    assert re.search(r"\+ torch==", done.stderr) and re.search(r"\+ pytest==", done.stderr)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="a shell script")
def test_the_launcher_uses_the_active_environment_or_the_one_of_the_project(
    source: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    """Also under `uv run`, which activates the project's own. An invalid option ends it before it needs torch."""
    project = render(source, tmp_path)
    text = (project / "config.py").read_text(encoding="utf-8")
    start = "from dataclasses import dataclass\n"
    assert text.count(start) == 1
    (project / "config.py").write_text(
        text.replace(start, f"{start}\nimport sys\n\nprint(sys.prefix)\n"), encoding="utf-8"
    )
    for folder in (project / ".venv", tmp_path / "other"):
        venv.create(folder, with_pip=False, symlinks=True)
    bare = {name: value for name, value in environment.items() if name not in ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHON")}
    bare["PATH"] = "/usr/local/bin:/usr/bin:/bin"
    other = tmp_path / "other"
    active = {"VIRTUAL_ENV": str(other), "PATH": f"{other}/bin:{bare['PATH']}"}
    launch = ["bash", project / "launch_node.sh", "--", "--lr", "x"]
    uv = [sys.executable, "-m", "uv", "run", "--no-sync", "--offline", "--project", project]
    for command, variables, expected in (
        (launch, {}, project / ".venv"),
        ([*uv, *launch], {}, project / ".venv"),
        (launch, active, other),
        (launch, {"PYTHON": str(other / "bin" / "python")}, other),
    ):
        done = run(*command, ok=False, cwd=tmp_path, env=bare | variables)
        assert (done.returncode, done.stdout.splitlines()[:1]) == (2, [str(expected)]), done.stderr


# Hooks


def test_the_hooks_need_only_the_standard_library(source: Path) -> None:
    hooks = sorted((source / "hooks").iterdir())
    assert [hook.name for hook in hooks] == ["post_gen_project.py", "pre_gen_project.py"]
    for hook in hooks:
        for node in ast.walk(ast.parse(hook.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                imported = [node.module] if isinstance(node, ast.ImportFrom) else [name.name for name in node.names]
                assert {str(name).split(".")[0] for name in imported} <= sys.stdlib_module_names


def test_the_next_commands_are_printed_in_ascii(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    render(source, tmp_path, project_name='模型 "🚀"', full_name="模型\\")
    printed = capfd.readouterr().out
    assert printed.isascii()
    assert [line.strip() for line in printed.splitlines() if line.startswith("    ")] == [
        "cd mo-xing",
        "pip install -e .",
        "./launch_node.sh --nproc-per-node 2 -- --dataset synthetic --epochs 3",
        "tensorboard --logdir runs",
    ]


@needs_run_bits
def test_shell_scripts_can_be_run_when_rendered_from_a_folder(project: Path) -> None:
    scripts = {name: runs for name, (_, runs) in tree(project).items() if name.endswith(".sh")}
    assert "launch_node.sh" in scripts and all(scripts.values())
    assert not tree(project)["main.py"][1]


def zipped(source: Path, path: Path) -> Path:
    """A zip of the template with one top folder and without permissions, like a downloaded branch."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo(f"{source.name}/"), b"")
        for name, (content, _) in tree(source).items():
            archive.writestr(zipfile.ZipInfo(f"{source.name}/{name}"), content)
    return path


@needs_run_bits
def test_shell_scripts_can_be_run_when_rendered_from_a_zip(source: Path, tmp_path: Path, project: Path) -> None:
    archive = zipped(source, tmp_path / "ddp-template.zip")
    bare = render(archive, tmp_path / "bare", hooks=False)
    assert not any(runs for _, runs in tree(bare).values())  # otherwise this test proves nothing
    assert tree(render(archive, tmp_path / "out")) == tree(project)  # the run bits included


@pytest.mark.slow
def test_without_hooks_the_output_is_complete(
    source: Path, tmp_path: Path, project: Path, environment: dict[str, str]
) -> None:
    command = [sys.executable, "-m", "cookiecutter", source, "--no-input", "--accept-hooks", "no", "parts=all"]
    done = run(*command, "project_slug=../Foo Bar", "-o", "out", cwd=tmp_path, env=environment)
    assert done.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    run(*command, "-o", "out", cwd=tmp_path, env=environment)
    assert sorted(os.listdir(tmp_path / "out")) == ["foo-bar", "my-ddp-project"]
    assert tree(tmp_path / "out" / "my-ddp-project") == tree(project)
    slurm = render(source, tmp_path / "slurm", hooks=False, launchers="slurm")
    assert set(tree(slurm)) == set(tree(project))
    none = render(source, tmp_path / "none", hooks=False, parts="none")
    assert (
        set(tree(none)) == set(tree(project))
        and (none / "parts.py").read_bytes() == (project / "parts.py").read_bytes()
    )


# Other ways to render


@pytest.mark.slow
def test_a_replay_renders_the_same_project_again(source: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "cookiecutter", source]
    answers = [
        'project_name=A "b" \\ 模型',
        "project_slug=../Foo Bar",
        "full_name=O'Neil",
        "license=Apache-2.0",
        "launchers=slurm",
    ]
    run(*command, "--no-input", "-o", tmp_path / "first", *answers, env=environment)
    run(*command, "--replay", "-o", tmp_path / "second", env=environment)
    assert os.listdir(tmp_path / "second") == ["foo-bar"]
    assert tree(tmp_path / "first") == tree(tmp_path / "second")


@pytest.mark.slow
def test_a_slug_that_was_edited_into_a_replay_file_is_refused(
    source: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "cookiecutter", source]
    run(*command, "--no-input", "-o", tmp_path / "first", env=environment)
    answers = json.loads((Path(environment["HOME"]) / "replay" / "ddp-template.json").read_text(encoding="utf-8"))
    answers["cookiecutter"]["project_slug"] = '../Foo" Bar'
    (tmp_path / "edited.json").write_text(json.dumps(answers), encoding="utf-8")
    out.mkdir()
    done = run(*command, "--replay-file", tmp_path / "edited.json", "-o", out, ok=False, env=environment)
    assert done.returncode == 1 and done.stderr.endswith("write 'foo-bar' there\n") and done.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["edited.json", "first", "out"] and not list(
        out.iterdir()
    )


def committed(source: Path, repository: Path, environment: dict[str, str]) -> Path:
    """A git repository with one commit of these files."""
    shutil.copytree(source, repository)
    run("git", "init", "--quiet", "--initial-branch", "main", cwd=repository, env=environment)
    commit_all(repository, environment)
    return repository


def commit_all(repository: Path, environment: dict[str, str]) -> None:
    run("git", "add", "--all", "--force", cwd=repository, env=environment)
    run("git", "commit", "--quiet", "--message", "a change", cwd=repository, env=environment)


def test_a_git_url_renders_the_same_project(
    source: Path, tmp_path: Path, project: Path, environment: dict[str, str]
) -> None:
    work = committed(source, tmp_path / "work", environment)
    bare = tmp_path / "ddp-template.git"
    run("git", "clone", "--quiet", "--bare", work, bare, env=environment)
    command = [sys.executable, "-m", "cookiecutter", bare.as_uri(), "--no-input", "-o", tmp_path / "out", "parts=all"]
    run(*command, env=environment)
    assert tree(tmp_path / "out" / "my-ddp-project") == tree(project)


@pytest.mark.slow
def test_cruft_update_brings_a_change_of_the_template_and_keeps_the_owners_edit_of_model_py(
    source: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    template = committed(source, tmp_path / "ddp-template", environment)
    cruft = [sys.executable, "-m", "cruft"]
    answers = {"project_name": 'A "b" \\ 模型', "project_slug": "../Foo Bar", "license": "Proprietary"}
    create = [*cruft, "create", template, "--no-input", "--output-dir", tmp_path / "out"]
    run(*create, "--extra-context", json.dumps(answers), cwd=tmp_path, env=environment)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ddp-template", "out"]
    owner = tmp_path / "out" / "foo-bar"
    run("git", "init", "--quiet", cwd=owner, env=environment)
    with (owner / "model.py").open("a", encoding="utf-8") as file:
        file.write("\n\nOWNER = 'edit'\n")
    commit_all(owner, environment)
    kept = tree(owner)
    run(*cruft, "check", cwd=owner, env=environment)

    first_line = (template / TEMPLATE / "model.py").read_text(encoding="utf-8").splitlines()[0]
    for name in ("model.py", "main.py"):
        path = template / TEMPLATE / name
        path.write_text("# news of the template\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    (template / TEMPLATE / "new.py").write_text("NEW = True\n", encoding="utf-8")
    commit_all(template, environment)
    assert run(*cruft, "check", ok=False, cwd=owner, env=environment).returncode == 1
    run(*cruft, "update", "--skip-apply-ask", cwd=owner, env=environment)

    model = (owner / "model.py").read_text(encoding="utf-8")
    assert model.startswith(f"# news of the template\n{first_line}\n") and model.endswith("\n\nOWNER = 'edit'\n")
    assert (owner / "main.py").read_text(encoding="utf-8").startswith("# news of the template\n")
    updated = tree(owner)
    changed = [name for name in updated if updated[name] != kept.get(name) and not name.startswith(".git/")]
    assert changed == [".cruft.json", "main.py", "model.py", "new.py"]
    run(*cruft, "check", cwd=owner, env=environment)


@pytest.mark.slow
@pytest.mark.sample(0)
@pytest.mark.parametrize(
    ("first", "second"), [("all", "slurm"), ("slurm", "all"), ("launch_node.sh only", "kubernetes")]
)
def test_cruft_update_changes_the_launchers_and_keeps_the_owners_edits(
    source: Path, tmp_path: Path, environment: dict[str, str], first: str, second: str
) -> None:
    template = committed(source, tmp_path / "ddp-template", environment)
    cruft = [sys.executable, "-m", "cruft"]
    context = ["--extra-context", json.dumps({"launchers": first})]
    run(*cruft, "create", template, "--no-input", "--output-dir", tmp_path, *context, cwd=tmp_path, env=environment)
    owner = tmp_path / "my-ddp-project"
    run("git", "init", "--quiet", cwd=owner, env=environment)
    for name in ("model.py", "README.md", "pyproject.toml"):
        with (owner / name).open("a", encoding="utf-8") as file:
            file.write("\n# OWNER\n")
    (owner / "launch").mkdir(exist_ok=True)
    (owner / "launch" / "mine.sh").write_text("mine")
    commit_all(owner, environment)
    before = tree(owner)

    variables = ["--variables-to-update", json.dumps({"launchers": second})]
    run(*cruft, "update", "--skip-apply-ask", *variables, cwd=owner, env=environment)
    after = {name: content for name, content in tree(owner).items() if not name.startswith(".git/")}
    rendered = render(source, tmp_path / "expected", launchers=second, parts="none")
    assert set(after) == {*tree(rendered), ".cruft.json", "launch/mine.sh"}
    owned = {"model.py", "README.md", "pyproject.toml"}
    assert {name: after[name] for name in tree(rendered) if name not in owned} == {
        name: content for name, content in tree(rendered).items() if name not in owned
    }
    for name in owned:
        assert after[name][0] == tree(rendered)[name][0] + b"\n# OWNER\n"
    assert after["launch/mine.sh"] == before["launch/mine.sh"]
    assert json.loads(after[".cruft.json"][0])["context"]["cookiecutter"]["launchers"] == second
    run(*cruft, "check", cwd=owner, env=environment)
