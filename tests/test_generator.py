"""The generator: what a person may type, what is refused, and that each way of rendering gives the same project."""

from __future__ import annotations

import ast
import fnmatch
import hashlib
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
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from cookiecutter.exceptions import FailedHookException
from cookiecutter.main import cookiecutter
from packaging.licenses import canonicalize_license_expression
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

REPOSITORY = Path(__file__).resolve().parent.parent
TEMPLATE = "{{cookiecutter.project_slug}}"
RENDERED = {"README.md", "pyproject.toml", "LICENSE"}
LICENSES = ["MIT", "Apache-2.0", "BSD-3-Clause", "Proprietary"]
APACHE_SHA256 = (
    "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"  # apache.org/licenses/LICENSE-2.0.txt
)

Tree = dict[str, tuple[bytes, bool]]

needs_run_bits = pytest.mark.skipif(os.name == "nt", reason="Windows has no run bits")


def tree(folder: Path) -> Tree:
    """The bytes of every file below a folder, and whether its owner may run it."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), bool(path.stat().st_mode & 0o100)) for path in files
    }


def run(*command: object, ok: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; where it has to succeed, a failure shows what it printed."""
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, encoding="utf-8", timeout=120, **options
    )
    assert not ok or done.returncode == 0, f"{command} exited {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this template's own files, without the caches and environments that lie between them."""
    copy = tmp_path_factory.mktemp("source") / "ddp-template"
    listed = run("git", "ls-files", "-co", "--exclude-standard", "-z", cwd=REPOSITORY).stdout
    for name in filter(None, listed.split("\0")):
        if (REPOSITORY / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, copy / name)
    return copy


@pytest.fixture(scope="module", autouse=True)
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables for child processes that keep this user's cookiecutter, git and uv settings out of the tests."""
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
    """Render the template with these answers and the defaults of the others; the path of the project."""
    out.mkdir(exist_ok=True)
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
    """One project, rendered with the defaults. Tests read it and leave it as it is."""
    return render(source, tmp_path_factory.mktemp("defaults"))


def metadata(project: Path) -> dict[str, Any]:
    """The [project] table of its pyproject.toml."""
    return tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]


# What a person answers


@pytest.mark.parametrize("license", LICENSES)
def test_every_license_comes_with_its_text_year_holder_and_spdx_expression(
    source: Path, tmp_path: Path, license: str
) -> None:
    project = render(source, tmp_path, license=license, full_name="Ada Lovelace")
    text = (project / "LICENSE").read_bytes().decode()
    year = datetime.now(timezone.utc).year
    telling = {
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
    start, middle, end = telling[license]
    assert text.startswith(start) and middle in text and text.endswith(end)
    assert len(re.findall(rf"Copyright (\(c\) )?{year} Ada Lovelace", text)) == 1
    spdx = metadata(project)["license"]
    assert spdx == {"Proprietary": "LicenseRef-Proprietary"}.get(license, license)
    assert canonicalize_license_expression(spdx) == spdx


def test_the_apache_license_is_the_official_text_but_for_the_holder(source: Path, tmp_path: Path) -> None:
    text = (render(source, tmp_path, license="Apache-2.0", full_name="Ada") / "LICENSE").read_text(encoding="utf-8")
    blank = re.sub(r"Copyright \d{4} Ada$", "Copyright [yyyy] [name of copyright owner]", text, flags=re.MULTILINE)
    assert hashlib.sha256(b"\n" + blank.encode()).hexdigest() == APACHE_SHA256


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


@pytest.mark.parametrize(
    "typed",
    [
        *("torch", "TorchVision", "NumPy", "filelock", "Pillow", "typing_extensions", "pip", "ruff"),
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


def test_a_project_name_of_emoji_alone_is_refused_and_works_with_a_typed_slug(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(FailedHookException):
        render(source, tmp_path, project_name="🚀🚀")
    assert "no letter from a to z and no digit" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())
    assert metadata(render(source, tmp_path, project_name="🚀🚀", project_slug="rocket"))["name"] == "rocket"


def test_every_package_that_pyproject_names_is_refused_as_a_slug(source: Path) -> None:
    project = tomllib.loads((source / TEMPLATE / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    names = {Requirement(line).name for line in [*wanted, *project["build-system"]["requires"]]}
    hook = ast.parse((source / "hooks" / "pre_gen_project.py").read_text(encoding="utf-8"))
    assigned = {ast.unparse(node.targets[0]): node.value for node in hook.body if isinstance(node, ast.Assign)}
    assert {"torch", "pytest", "setuptools"} <= names
    assert names <= set(ast.literal_eval(assigned["PACKAGES"]).split())


def test_the_command_line_exits_1_with_our_line_alone_on_stderr(
    source: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    # Cookiecutter adds its own report of the failed hook, with a traceback, on stdout. No hook can prevent it.
    command = [sys.executable, "-m", "cookiecutter", source, "--no-input", "project_slug=torch"]
    done = run(*command, ok=False, cwd=tmp_path, env=environment)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "The project slug 'torch' is a package that the project needs: type another, such as torch-training"
    ]
    assert "Hook script failed" in done.stdout
    assert not list(tmp_path.iterdir())


def test_a_refusal_leaves_a_folder_that_was_there_before_untouched(source: Path, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "mine.txt").write_text("mine")
    with pytest.raises(FailedHookException):
        render(source, tmp_path, force=True, project_slug="torch")
    assert list(tree(tmp_path)) == ["torch/mine.txt"]


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
    done = run(*command, input='Say "hi" 🚀\n../Foo Bar\nJane {{ Doe }}\n3\n', cwd=tmp_path, env=environment)
    labels = json.loads((source / "cookiecutter.json").read_text(encoding="utf-8"))["__prompts__"]
    asked = ["project_name", "project_slug", "full_name", "license"]
    assert list(labels) == asked and list(labels["license"]) == ["__prompt__", *LICENSES]
    shown = [labels["project_name"], labels["project_slug"], labels["full_name"], *labels["license"].values()]
    places = [done.stdout.find(label) for label in shown]
    assert -1 not in places and places == sorted(places), done.stdout
    assert "[4/4]" in done.stdout and not any(variable in done.stdout for variable in asked[:3])
    assert os.listdir(tmp_path / "out") == ["foo-bar"]
    table = metadata(tmp_path / "out" / "foo-bar")
    assert table["description"].startswith('Say "hi" 🚀:') and table["license"] == "BSD-3-Clause"
    assert table["authors"] == [{"name": "Jane {{ Doe }}"}]


# What comes out


def test_only_readme_pyproject_and_license_are_rendered(source: Path, project: Path) -> None:
    before, after = tree(source / TEMPLATE), tree(project)
    assert before.keys() == after.keys() and before.keys() > RENDERED
    assert [name for name in before if before[name] != after[name]] == sorted(RENDERED)


def test_no_jinja_is_left_over(project: Path) -> None:
    for name in RENDERED:
        assert not re.search(r"\{\{|\{%|\{#", (project / name).read_text(encoding="utf-8")), name
    assert not [name for name in tree(project) if "{" in name]


def test_the_patterns_of_copied_files_leave_out_the_three_and_match_no_folder(source: Path) -> None:
    # A file that matches no pattern would be rendered, braces and all. A folder that matches one would be deleted and
    # copied anew by `cookiecutter --overwrite-if-exists`, with what its owner had added to it.
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


def test_a_template_that_was_run_in_place_renders_in_spite_of_its_caches(source: Path, tmp_path: Path) -> None:
    used = tmp_path / "used"
    shutil.copytree(source, used)
    for name in (".mypy_cache/3.10/a.json", ".ruff_cache/1/x", "ddp/__pycache__/a.cpython-310.pyc", "runs/status.json"):
        cache = used / TEMPLATE / name
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.write_bytes(b'{"{% broken": {{}} ')
    assert (render(used, tmp_path / "out") / "main.py").exists()


@pytest.mark.parametrize("command", [("check",), ("format", "--check")], ids=" ".join)
def test_ruff_is_content_with_the_template_folder_and_with_the_project(
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


@pytest.mark.slow
def test_pip_installs_the_project_and_reads_its_license(
    source: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    project = render(source, tmp_path, full_name='Zoë "Z" \\ 模型', license="Proprietary")
    venv.create(tmp_path / "venv", with_pip=False, symlinks=os.name != "nt")
    python = tmp_path / "venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    own = run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").stdout.strip()
    # The new environment borrows pip and setuptools from this one, so that nothing is downloaded.
    Path(own, "borrowed.pth").write_text(sysconfig.get_paths()["purelib"], encoding="utf-8")
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    run(python, "-m", "pip", "install", *offline, "-e", ".", cwd=project, env=environment)
    script = (
        "import config, ddp.errors, importlib.metadata as m; d = m.metadata('my-ddp-project'); print(config.__file__)"
    )
    script += "; print(d['License-Expression'], d['License-File'], d['Author'], sep='|')"
    seen = run(python, "-c", script, cwd=tmp_path, env=environment).stdout.splitlines()
    assert seen == [str(project / "config.py"), 'LicenseRef-Proprietary|LICENSE|Zoë "Z" \\ 模型']


@pytest.mark.slow
def test_uv_resolves_the_project(source: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    project = render(source, tmp_path)
    here = environment | {"UV_PYTHON": sys.executable, "UV_PYTHON_DOWNLOADS": "never"}
    done = run(sys.executable, "-m", "uv", "sync", "--dry-run", "--no-progress", ok=False, cwd=project, env=here)
    offline = re.search(r"Failed to (fetch|download)|dns error|error sending request", done.stderr)
    if offline and os.environ.get("CI") != "true":
        pytest.skip("uv reads the packages' metadata from the network, which is not there")
    assert done.returncode == 0, done.stderr
    assert re.search(r"\+ torch==", done.stderr) and re.search(r"\+ pytest==", done.stderr)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="a shell script")
def test_the_launcher_takes_the_environment_that_is_active_or_else_the_projects(
    source: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    """Also under `uv run`, which activates the project's. A wrong option ends it before it would need torch."""
    project = render(source, tmp_path)
    text = (project / "config.py").read_text(encoding="utf-8")
    told = text.replace("import sys\n", "import sys\n\nprint(sys.prefix)\n", 1)
    (project / "config.py").write_text(told, encoding="utf-8")
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


def test_the_hooks_need_nothing_but_the_standard_library(source: Path) -> None:
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
    """A zip of the template with one folder at its top and no permissions, as a download of a branch has."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo(f"{source.name}/"), b"")
        for name, (content, _) in tree(source).items():
            archive.writestr(zipfile.ZipInfo(f"{source.name}/{name}"), content)
    return path


@needs_run_bits
def test_shell_scripts_can_be_run_when_rendered_from_a_zip(source: Path, tmp_path: Path, project: Path) -> None:
    archive = zipped(source, tmp_path / "ddp-template.zip")
    bare = render(archive, tmp_path / "bare", hooks=False)
    assert not any(runs for _, runs in tree(bare).values())  # else this test would prove nothing
    assert tree(render(archive, tmp_path / "out")) == tree(project)  # the bits among the rest


@pytest.mark.slow
def test_without_hooks_the_output_is_the_same(
    source: Path, tmp_path: Path, project: Path, environment: dict[str, str]
) -> None:
    command = [sys.executable, "-m", "cookiecutter", source, "--no-input", "--accept-hooks", "no"]
    done = run(*command, "project_slug=../Foo Bar", "-o", "out", cwd=tmp_path, env=environment)
    assert done.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    run(*command, "-o", "out", cwd=tmp_path, env=environment)
    assert sorted(os.listdir(tmp_path / "out")) == ["foo-bar", "my-ddp-project"]
    assert tree(tmp_path / "out" / "my-ddp-project") == tree(project)


# Other ways to render


@pytest.mark.slow
def test_a_replay_gives_the_same_project_again(source: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "cookiecutter", source]
    answers = ['project_name=A "b" \\ 模型', "project_slug=../Foo Bar", "full_name=O'Neil", "license=Apache-2.0"]
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
    """A git repository with one commit that holds these files."""
    shutil.copytree(source, repository)
    run("git", "init", "--quiet", "--initial-branch", "main", cwd=repository, env=environment)
    commit_all(repository, environment)
    return repository


def commit_all(repository: Path, environment: dict[str, str]) -> None:
    run("git", "add", "--all", "--force", cwd=repository, env=environment)
    run("git", "commit", "--quiet", "--message", "a change", cwd=repository, env=environment)


def test_a_git_url_gives_the_same_project(
    source: Path, tmp_path: Path, project: Path, environment: dict[str, str]
) -> None:
    work = committed(source, tmp_path / "work", environment)
    bare = tmp_path / "ddp-template.git"
    run("git", "clone", "--quiet", "--bare", work, bare, env=environment)
    command = [sys.executable, "-m", "cookiecutter", bare.as_uri(), "--no-input", "-o", tmp_path / "out"]
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
