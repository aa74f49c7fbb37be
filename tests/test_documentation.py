"""The documentation is tested: its examples and its commands are taken from its text, and run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from cookiecutter.main import cookiecutter
from outputs import free_port
from project_runs import python, render_defaults, train_in
from template_copy import shrink

from ddp.core.errors import ExitCode
from ddp.distributed.rank_env import RankEnv
from faults import FAULTS
from processes import Ranks

REPOSITORY = Path(__file__).resolve().parent.parent
TEMPLATE = REPOSITORY / "{{cookiecutter.project_slug}}"
PAGES = {  # of the generated project
    path.relative_to(TEMPLATE).as_posix(): path.read_text(encoding="utf-8")
    for path in [TEMPLATE / "README.md", TEMPLATE / "AGENTS.md", *sorted((TEMPLATE / "docs").glob("*.md"))]
}
README, AGENTS, CONCEPTS, RECIPES = (
    PAGES[name] for name in ("README.md", "AGENTS.md", "docs/concepts.md", "docs/recipes.md")
)
LAUNCHERS = json.loads((REPOSITORY / "cookiecutter.json").read_text())["launchers"]
EXPLAINED = CONCEPTS + PAGES["docs/fsdp.md"]
PIECES = re.findall(
    r"^##? ([^\n]*)\n(?:(?!^##? ).)*?```python\n(.*?)```\n\n```text\n(.*?)```", EXPLAINED, re.MULTILINE | re.DOTALL
)


def environment() -> dict[str, str]:
    """The variables of a user who has activated this environment, as root on a small machine."""
    bin = str(Path(sys.executable).parent)
    open_mpi = {
        f"OMPI_{name}": "1"
        for name in ("ALLOW_RUN_AS_ROOT", "ALLOW_RUN_AS_ROOT_CONFIRM", "MCA_rmaps_base_oversubscribe")
    }
    return {
        **os.environ,
        "PATH": f"{bin}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(Path(sys.prefix)),
        "COLUMNS": "100",
        **open_mpi,
    }


def run(command: str, project: Path) -> str:
    """The output of a command that is typed in the project's folder. Fails unless it exits with 0."""
    if command.startswith(("python ", "pytest ")):
        program, *words = shlex.split(command)
        return python(project, *(["-m", "pytest"] if program == "pytest" else []), *words)
    words = ["bash", "-c", command]
    done = subprocess.run(words, cwd=project, env=environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project rendered with the defaults, but for fewer synthetic data."""
    project = render_defaults(tmp_path_factory.mktemp("rendered") / "project")
    return shrink(project, train=640, val=100, test=100)


def test_every_piece_of_code_is_found_with_what_it_prints() -> None:
    assert len(PIECES) == EXPLAINED.count("```text") >= 4 and len(PIECES) >= CONCEPTS.count("```python") + 1


@pytest.mark.parametrize(("code", "printed"), [piece[1:] for piece in PIECES], ids=[piece[0] for piece in PIECES])
def test_a_piece_of_code_prints_the_output_below_it(code: str, printed: str) -> None:
    """On two processes with the variables of torchrun, if it needs them."""
    world_size, port = (2 if "dist." in code or "RANK" in code else 1), str(free_port())

    def target(rank_env: RankEnv) -> int:
        rank = str(rank_env.rank)
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        exec(compile(code, "try.py", "exec"), {"__name__": "__main__"})
        return 0

    ranks = Ranks(world_size, target)
    assert ranks.wait(600) == [0] * world_size, ranks.output()
    assert sorted(ranks.output().splitlines()) == sorted(printed.splitlines())


# ---- the Chinese README ---------------------------------------------------------------------------------------------

ENGLISH = (REPOSITORY / "README.md").read_text(encoding="utf-8")
CHINESE = (REPOSITORY / "README.zh-CN.md").read_text(encoding="utf-8")


def headings(text: str) -> list[int]:
    """The levels of the headings, in order."""
    return [len(marks) for marks in re.findall(r"^(#+) ", text, re.MULTILINE)]


def blocks(text: str) -> list[list[str]]:
    """The indented lines, block by block: commands and file names, without the text after them."""
    found = re.findall(r"(?:^    \S[^\n]*\n)+", text, re.MULTILINE)
    return [[re.split(r" {2,}", line.strip())[0] for line in block.splitlines()] for block in found]


def tables(text: str) -> list[list[list[str]]]:
    """The commands and the numbers of each row of each table; the words differ."""
    found = re.findall(r"(?:^\|[^\n]*\n)+", text, re.MULTILINE)
    return [[sorted(re.findall(r"`[^`]*`|\d+(?:[.,]\d+)*", row)) for row in table.splitlines()] for table in found]


@pytest.mark.parametrize("part", [headings, blocks, tables])
def test_the_chinese_readme_has_the_same_structure(part: Callable[[str], list[Any]]) -> None:
    english, chinese = part(ENGLISH), part(CHINESE)
    assert len(english) >= 2
    assert chinese == english


def test_the_chinese_readme_names_the_same_commands_and_links() -> None:
    for what in (r"(?<!`)`([^`\n]+)`(?!`)", r"\]\(([^)]*)\)"):
        found = [sorted(set(re.findall(what, text)) - {"README.md", "README.zh-CN.md"}) for text in (ENGLISH, CHINESE)]
        assert found[1] == found[0]


# ---- links, lengths, facts ------------------------------------------------------------------------------------------


def prose(text: str) -> str:
    """A page without its blocks between ```."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str, levels: str = "#+") -> set[str]:
    """The anchors that GitHub makes of the headings of a page."""
    found = re.findall(rf"^{levels} (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in found}


def links(text: str) -> list[tuple[str, str]]:
    """The path and the anchor of each link of a page, except those to other sites."""
    found = re.findall(r"\]\(([^)\s]+)\)", prose(text))
    return [(path, anchor) for path, _, anchor in (link.partition("#") for link in found) if "://" not in path]


def dead_links(pages: list[Path]) -> list[str]:
    """The links that lead to no file, or to no heading of it."""
    dead = []
    for page in pages:
        for path, anchor in links(page.read_text(encoding="utf-8")):
            target = page.parent / path if path else page
            if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
                dead.append(f"{page}: {path}#{anchor}")
    return dead


def pages_of(folder: Path) -> list[Path]:
    return [*sorted(folder.glob("*.md")), *sorted(folder.glob("docs/*.md")), *sorted(folder.glob("examples/**/*.md"))]


def test_the_links_of_the_repository_lead_somewhere(tmp_path: Path) -> None:
    assert len(pages_of(REPOSITORY)) >= 12
    assert dead_links(pages_of(REPOSITORY)) == []
    (tmp_path / "page.md").write_text("# A title: two\n[a](#a-title-two) [b](page.md#b) [c](none.md)")
    assert [link.rpartition(" ")[2] for link in dead_links([tmp_path / "page.md"])] == ["page.md#b", "none.md#"]


def test_the_pages_are_short() -> None:
    assert max(ENGLISH.count("\n"), CHINESE.count("\n")) <= 170
    assert AGENTS.count("\n") <= 40 and (REPOSITORY / "AGENTS.md").read_text(encoding="utf-8").count("\n") <= 40


def test_the_readme_leads_to_every_page() -> None:
    assert set(PAGES) - {"README.md", "AGENTS.md"} <= {path for path, _ in links(README)}
    assert "AGENTS.md" in README


@pytest.mark.parametrize("page", [name for name in PAGES if name.startswith("docs/")])
def test_the_contents_of_a_page_list_its_sections(page: str) -> None:
    contents = PAGES[page].partition("\n## ")[0]
    assert {anchor for path, anchor in links(contents) if not path} == anchors(PAGES[page], "##")


def test_the_exit_codes_are_those_of_the_code() -> None:
    codes = {code.value: code.name.lower().replace("_", " ") for code in ExitCode}
    table = re.findall(r"^\| (\d+) \| \w", README, re.MULTILINE)
    assert sorted(map(int, table)) == sorted(codes)
    listed = AGENTS.partition("## Exit codes\n")[2].partition(";")[0]
    assert {int(number): name for number, name in re.findall(r"(\d+) ([a-z ]+)", listed)} == codes


def test_the_numbers_of_lines_are_those_of_the_files() -> None:
    def lines(*files: str) -> int:
        return sum(len((TEMPLATE / file).read_text(encoding="utf-8").splitlines()) for file in files)

    section = CONCEPTS.partition("## Read the code\n")[2]
    order = re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \|", section, re.MULTILINE)
    assert order == [(file, str(lines(file))) for file, _ in order]
    total = lines(*(file for file, _ in order))
    assert len(order) >= 8 and total <= 1500
    everything = {path.relative_to(TEMPLATE).as_posix() for path in (TEMPLATE / "ddp").rglob("*.py")}
    of_parts = {name for name in everything if name.count("/") > 2}  # ddp/parts/NAME/
    modules = everything - of_parts
    owned = lines("main.py", "model.py", "data.py", "config.py")
    assert f"{total:,} lines" in section
    assert f"{owned} lines" in ENGLISH and f"{total:,} lines" in ENGLISH
    assert f"about {round(lines(*modules), -2):,} lines in {len(modules)} modules" in ENGLISH
    assert f"add up to {round(lines(*of_parts), -2):,}" in ENGLISH
    assert re.search(rf"{len(FAULTS)} faults", ENGLISH)


@pytest.mark.slow
def test_the_page_names_the_fields_of_metrics_jsonl(edited: Path) -> None:
    section = RECIPES.partition("## The metrics of a run\n")[2].partition("\n## ")[0]
    written = (edited / "runs/cifar10-ToyModel/metrics.jsonl").read_text().splitlines()
    fields = {name for line in written for name in json.loads(line)}
    assert fields <= {*re.findall(r"`(\w+)`", section)}, fields
    assert {json.loads(line)["split"] for line in written} <= {*re.findall(r"\w+", section)}


# ---- the generated pages --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("launchers", "parts"), [*((each, "none") for each in LAUNCHERS), ("all", "all")])
def test_the_readme_names_the_launch_scripts_that_are_generated(launchers: str, parts: str, tmp_path: Path) -> None:
    answers = {"launchers": launchers, "parts": parts}
    project = Path(cookiecutter(str(REPOSITORY), no_input=True, extra_context=answers, output_dir=str(tmp_path)))
    assert dead_links(pages_of(project)) == []
    text = (project / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") <= 190
    scripts = {path.relative_to(project).as_posix() for path in project.glob("launch/*")}
    assert {name.rstrip(".") for name in re.findall(r"\blaunch/\w[\w.]*", text)} == scripts
    assert bool(re.search(r"\blaunch/", text)) == bool(scripts)
    linked = {anchor for path, anchor in links(text) if not path}
    assert anchors(text, "##") <= linked, "the contents lead to all sections"
    assert all(part.count("\n") > 3 for part in text.split("\n## ")), "no section is empty"
    assert "\n\n\n" not in text and "{%" not in text


def test_only_one_page_names_all_launch_scripts_and_it_says_that_they_may_be_absent() -> None:
    scripts = sorted(f"`launch/{path.name}`" for path in (TEMPLATE / "launch").iterdir())
    note = "are in your project if it was generated with them (the prompt `launchers`)"
    page = " ".join(PAGES["docs/cluster.md"].split())
    assert note in page and all(script in page for script in scripts)
    others = [text for name, text in PAGES.items() if name not in ("README.md", "docs/cluster.md")]
    assert not any(re.search(r"launch/\w+\.\w+", text) for text in others)
    assert not any(mark in text for name, text in PAGES.items() if name != "README.md" for mark in ("{{", "{%"))


# What the pages name of other programs.
OTHERS = {
    "diff",
    "MLFLOW_TRACKING_URI",
    "TORCHINDUCTOR_CACHE_DIR",
    "set_transform",
    "default_rng",
    "define_metric",
    "pipeline",
    "set_random_state",
    "set_random_seed",
}


@pytest.mark.parametrize("page", PAGES)
def test_the_code_has_what_the_pages_name(page: str) -> None:
    """Files, and names such as `Schedule.factor` or `run.request_stop()`; but no names that an example adds."""
    sources = "".join(path.read_text(encoding="utf-8") for path in TEMPLATE.rglob("*.py"))
    words = {*re.findall(r"\w+", sources), "Dockerfile", "pyproject", "toml", "smoothing", *OTHERS}
    codes = re.findall(r"`([^`\n]+)`", prose(PAGES[page]))
    files = {code for code in codes if re.fullmatch(r"[\w/]+\.(py|sh|md|yaml|sbatch)", code)} - {"try.py"}
    names = {code for code in codes if re.fullmatch(r"[A-Za-z_][\w.]*(\(.*\))?", code)} - files - {"try.py"}
    assert len(files) + len(names) > 3
    assert not [file for file in files if not (TEMPLATE / file).exists()]
    assert not [name for name in names if not set(re.findall(r"[A-Za-z_]\w*", name.partition("(")[0])) <= words]


# ---- the commands of the generated pages ----------------------------------------------------------------------------

PROGRAMS = (
    r"python3? |pip |pytest|ruff |torchrun |mpirun |srun |sbatch |scancel |"
    r"docker |kubectl |tensorboard |bash |sudo |sed "
)
TO_TYPE = re.compile(rf"(?:[A-Z_]+=\S+ )?(?:\./launch_node|launch/\w+\.\w+ |nvidia-smi|ss |py-spy |{PROGRAMS})")
TINY = "--dataset synthetic --max-steps 2 --device cpu --output-dir runs/"  # the last value of an option counts
# Commands to run as they are, and what is appended so that they take a moment; {} becomes a directory of its own.
RUN = {
    "python main.py --help": "",
    "python main.py --dataset synthetic --output-dir runs/one": f"{TINY}{{}}",
    "./launch_node.sh": f"-- {TINY}{{}}",
    "bash launch/slurm.sbatch --help": "",
    "pytest -k order": "",
}
# Commands that another test runs, with other names, addresses, models or sizes; or the reason not to.
ELSEWHERE = {
    "python3 -m venv .venv && source .venv/bin/activate": "test_generator",
    "pip install -e .": "test_generator",
    "pip install -e '.[dev]' && pytest": "test_generator, and make own-tests",
    "pip install matplotlib": "test_benchmark",
    "pip install wandb": "test_recipes",
    "python main.py --mirror s3://bucket/run": "test_mirror",
    "pip install mlflow": "test_recipes",
    "ruff check . && ruff format --check .": "test_generator",
    "torchrun --standalone --nproc-per-node 2 try.py": "above, with the variables of torchrun",
    "python main.py --nproc 2 --dataset synthetic --output-dir runs/two": "test_launch",
    "python main.py --nproc 2 --dataset synthetic --max-steps 20 --output-dir runs/try": "test_launch",
    "./launch_node.sh --nproc-per-node 4 -- --epochs 90": "test_launch",
    "torchrun --nproc-per-node 8 main.py": "test_launch",
    "mpirun -np 2 python main.py": "test_launch",
    "python main.py --nproc 1 --dataset synthetic --max-steps 20 --output-dir runs/one": "test_launch",
    "OMP_NUM_THREADS=1 python main.py --nproc 2": "test_launch",
    "./launch_node.sh --max-restarts 3": "test_nodes",
    "python main.py": "test_data: with a download from a server of the test",
    "python main.py --evaluate --resume runs/cifar10-ToyModel/best.pt": "test_saved_options",
    "python main.py --model resnet18 --init-from torchvision --dataset imagefolder --data-dir flowers --image-size 224 "
    "--lr 0.003": "test_init_from",
    "python main.py --config runs/A/config.json": "test_config_file",
    "python main.py --config flowers.toml --lr 0.1": "test_config_file",
    "python predict.py runs/cifar10-ToyModel/best.pt cat.jpg dog.jpg": "test_predict",
    "python -m ddp.parts.fsdp.merge runs/cifar10-ToyModel/best.pt weights.pt": "test_rank_files",
    "python main.py --rank 0 --world-size 2 --init-method tcp://10.0.0.1:23456": "test_launch, test_machines",
    "python benchmark.py": "test_benchmark",
    "python benchmark.py --dataset synthetic": "test_benchmark",
    "python benchmark.py --shard --model vit_b_16": "test_benchmark",
    "python benchmark.py --model resnet50 --dataset synthetic --image-size 224 --precision bf16": "test_benchmark",
    "python benchmark.py --model deeplabv3_resnet101 --image-size 224 --batch-size 4": "test_benchmark",
    "torchrun --nnodes 2 ... benchmark.py": "test_benchmark",
    "tensorboard --logdir runs": "below",
    "./launch_node.sh --nnodes 2 --node-rank 0 --master-addr 10.0.0.1": "test_machines",
    "./launch_node.sh --nnodes 2:3 --node-rank 0 --master-addr 10.0.0.1 -- --epochs 90": "test_machines",
    "./launch_node.sh --nnodes 3 --node-rank 0 --master-addr 10.0.0.1 --nproc-per-node 8 "
    "-- --resume must": "test_machines",
    "./launch_node.sh --nnodes 3 --node-rank 1 --master-addr 10.0.0.1 --nproc-per-node 8 "
    "-- --resume must": "test_machines",
    "pytest tests/test_project.py": "test_generator",
    "./launch_node.sh --check": "test_check",
    "./launch_node.sh --check --nnodes 2 --node-rank 0 --master-addr 10.77.0.1": "test_check",
    "bash launch/ssh.sh --help": "test_ssh",
    "launch/ssh.sh hosts": "test_ssh",
    "launch/ssh.sh hosts -- --epochs 90": "test_ssh",
    "sbatch --nodes=2 --gpus-per-node=8 --cpus-per-task=64 launch/slurm.sbatch -- --epochs 90": "test_slurm",
    "srun python main.py": "test_slurm",
    "scancel --batch --signal=TERM JOB": "test_slurm",
    "scancel JOB": "test_slurm",
    "python rehearse.py": "test_rehearse",
    "python rehearse.py -- OPTIONS": "test_rehearse",
    "python rehearse.py -- OPTIONS of main.py": "test_rehearse",
    "python rehearse.py -- --dataset synthetic": "test_rehearse",
}
NOT_HERE = (
    "docker ",
    "kubectl ",
    "sky ",
    "pip install 'skypilot[aws]'",
    "sed 's/my-run/",
    "nvidia-smi",
    "ss -ltnp",
    "py-spy ",
)  # test_containers checks the files


def commands(text: str) -> list[str]:
    """What a reader may type: lines of indented blocks and text in backticks that begin like a command."""
    lines = [line.split("  #")[0].strip() for line in re.findall(r"^    (\S[^\n]*)", prose(text), re.MULTILINE)]
    found = lines + re.findall(r"`([^`\n]+)`", prose(text))
    return list(dict.fromkeys(line.strip() for line in found if TO_TYPE.match(line)))


def test_every_command_of_the_generated_pages_is_run_by_a_test() -> None:
    shown = {command for text in PAGES.values() for command in commands(text) if not command.startswith(NOT_HERE)}
    assert shown == {*RUN, *ELSEWHERE}


def test_the_command_of_the_slow_network_is_there() -> None:
    text = (REPOSITORY / "docs" / "slow-network.md").read_text(encoding="utf-8")
    (command,) = [line for line in commands(text) if line.startswith("sudo ")]
    program = command.split()[-1]
    assert f"python {program}" in (REPOSITORY / program).read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("command", RUN)
def test_a_command_of_the_generated_pages_works(command: str, project: Path) -> None:
    said = run(f"{command} {RUN[command].format(list(RUN).index(command))}", project)
    assert "Traceback" not in said
    if TINY in RUN[command]:
        assert "done in " in said


@pytest.fixture(scope="module")
def edited(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a third convolution, and the option and the EMA of the recipes; two processes have trained it."""
    edited = Path(shutil.copytree(project, tmp_path_factory.mktemp("edited") / "project"))
    (option,) = re.findall(r"^    (smoothing: .*)", RECIPES, re.MULTILINE)
    step = "    training.optimizer.zero_grad()\n"
    make = "average = torch.optim.swa_utils.AveragedModel(model)"
    (field,) = re.findall(r"^    (average: .*)$", RECIPES, re.MULTILINE)
    (loop,) = re.findall(r"^    (while not run.finished\(\) and .*)", RECIPES, re.MULTILINE)
    (finished,) = re.findall(
        r"^        while not run.finished\(\):.*\n", (project / "main.py").read_text(), re.MULTILINE
    )
    edits = {
        "config.py": {"    lr: float = ": f"    {option}\n    lr: float = "},
        "main.py": {
            finished: f"        {loop}\n",
            "        ema = None if": f"        {make}\n        ema = None if",
            "    ema: ModelEma | None\n": f"    ema: ModelEma | None\n    {field}\n",
            "task.compute_metrics), ema)": "task.compute_metrics), ema, average)",
            step: f"{step}    training.average.update_parameters(training.model)\n",
        },
        "model.py": {
            "        self.pool = ": "        self.conv3 = nn.Conv2d(16, 16, 3, padding=1)\n        self.pool = ",
            "        x = x.flatten(1)": "        x = F.relu(self.conv3(x))\n        x = x.flatten(1)",
            "(outputs, targets)\n": "(outputs, targets, label_smoothing=config.smoothing)\n",
        },
    }
    for name, changes in edits.items():
        text = (edited / name).read_text()
        for old, new in changes.items():
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (edited / name).write_text(text)
    options = f"--smoothing 0.5 --ema 0.5 --log-every 1 {TINY}cifar10-ToyModel"
    (said,) = train_in(edited, [2, *options.split()])
    assert "ToyModel, 64,326 weights" in said, "2,320 more than without conv3"
    return edited


@pytest.mark.slow
def test_an_option_is_added_by_the_line_of_the_recipe(edited: Path) -> None:
    assert json.loads((edited / "runs/cifar10-ToyModel/config.json").read_text())["options"]["smoothing"] == 0.5


@pytest.mark.slow
def test_a_checkpoint_holds_the_state_that_is_passed_as_the_recipe_shows(edited: Path) -> None:
    checkpoint = torch.load(edited / "runs/cifar10-ToyModel/best.pt", weights_only=True)
    assert checkpoint["average"]["n_averaged"] == 2, "the number of steps"
    average, weights = (checkpoint[name] for name in ("average", "model"))
    assert not torch.equal(average["module.conv3.weight"], weights["conv3.weight"])
    (said,) = train_in(edited, [2, *f"--smoothing 0.5 --ema 0.5 {TINY}cifar10-ToyModel --max-steps 3".split()])
    assert "resuming from" in said


@pytest.mark.slow
def test_weights_are_frozen_or_trained_more_slowly_by_the_lines_of_the_recipe(project: Path, tmp_path: Path) -> None:
    """In one step, frozen weights stay and the head moves; or the rest moves by a tenth."""
    section = RECIPES.partition("## Fine-tune\n")[2].partition("\n## ")[0]
    _, freeze, frozen_norm, slower = re.findall(r"(?:^    .*\n)+", section, re.MULTILINE)

    edited = Path(shutil.copytree(project, tmp_path / "project"))
    source = (edited / "model.py").read_text()
    shrink(edited, train=64, val=20, test=20)

    def weights(name: str, lr: float, old: str = "", new: str = "") -> dict[str, torch.Tensor]:
        """After one step."""
        assert not old or source.count(old) == 1
        text = source.replace(old, new) if old else source
        (edited / "model.py").write_text(f"{text}\n\n{textwrap.dedent(frozen_norm)}")
        step = "--max-steps 1 --batch-size 16 --lr-schedule constant --warmup-epochs 0 --momentum 0 --weight-decay 0"
        train_in(edited, [1, *f"{TINY}{name} {step} --model resnet18 --lr {lr}".split()])
        return torch.load(edited / f"runs/{name}/checkpoints/step_00000001.pt", weights_only=True)["model"]

    before = weights("before", 1e-30)

    def moved(name: str, old: str = "", new: str = "") -> list[float]:
        after = weights(name, 0.1, old, new)
        names = ("layer1.0.conv1.weight", "fc.weight", "layer1.0.bn1.running_mean")
        return [(after[each] - before[each]).norm().item() for each in names]

    anchor, optimizer = (
        "    return model.to(memory_format=torch.channels_last)",
        "    return torch.optim.SGD(model.parameters(), ",
    )
    whole = moved("whole")
    frozen = moved("frozen", anchor, freeze + anchor)
    slow = moved("slow", optimizer, f"{slower}    return torch.optim.SGD(model.parameters(), ")
    assert frozen[0] < 1e-20 and frozen[1] > 0.01
    assert slow == pytest.approx([whole[0] / 10, *whole[1:]], rel=1e-3)
    assert whole[2] < 1e-20, "one step, as before"
    initial = torch.zeros(64)  # running_mean of a new layer
    kept = torch.load(edited / "runs/frozen/checkpoints/step_00000001.pt", weights_only=True)["model"]
    assert torch.equal(kept["layer1.0.bn1.running_mean"], initial) and before["layer1.0.bn1.running_mean"].any()


@pytest.mark.slow
def test_a_run_stops_early_by_the_line_of_the_recipe(edited: Path) -> None:
    """As soon as the accuracy is enough; the same command then ends at once. Here 0.3 is enough; guessing has 0.1."""
    source = (edited / "main.py").read_text()
    assert source.count('.get("accuracy", 0) < 0.9') == 1
    (edited / "main.py").write_text(source.replace("< 0.9", "< 0.3"))
    output = edited / "runs/early"
    options = "--dataset synthetic --device cpu --batch-size 16 --epochs 40"
    said = run(f"python main.py {options} --output-dir {output}", edited)
    status, metrics = json.loads((output / "status.json").read_text()), (output / "metrics.jsonl").read_text()
    *early, last = [line["accuracy"] for line in map(json.loads, metrics.splitlines()) if line["split"] == "val"]
    assert last >= 0.3 and all(each < 0.3 for each in early) and "done in " in said
    assert (status["state"], status["exit_code"], status["epoch"]) == ("done", 0, 1 + len(early))
    run(f"python main.py {options} --output-dir {output}", edited)
    assert (output / "metrics.jsonl").read_text() == metrics


@pytest.mark.slow
def test_the_best_weights_are_loaded_by_the_lines_of_the_readme(edited: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    checkpoint = torch.load(edited / "runs/cifar10-ToyModel/best.pt", weights_only=True)
    weights = checkpoint["ema"]
    assert not torch.equal(weights["conv3.bias"], checkpoint["model"]["conv3.bias"])
    show = "print(model.conv3.bias.tolist(), model.training)"
    assert python(edited, "-c", block + show) == f"{weights['conv3.bias'].tolist()} False\n"


@pytest.mark.slow
@pytest.mark.sample(0)
def test_tensorboard_shows_the_curves_of_a_run(edited: Path) -> None:
    (line,) = [line for line in commands(README) if line.startswith("tensorboard")]
    port = free_port()
    with subprocess.Popen(
        ["bash", "-c", f"exec {line} --port {port}"], cwd=edited, env=environment(), stderr=subprocess.DEVNULL
    ) as server:
        try:
            tags = {}
            end = time.monotonic() + 180
            while "cifar10-ToyModel/tensorboard" not in tags and time.monotonic() < end:
                time.sleep(0.2)
                with suppress(OSError):
                    url = f"http://127.0.0.1:{port}/data/plugin/scalars/tags"
                    tags = json.loads(urllib.request.urlopen(url, timeout=10).read())
            assert {"train/loss", "train/lr", "test/accuracy"} <= set(tags["cifar10-ToyModel/tensorboard"])
        finally:
            server.terminate()
