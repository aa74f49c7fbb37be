"""The documentation is tested: its examples and its commands are taken from its text, and run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
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

from ddp.distributed.rank_env import RankEnv
from processes import Ranks

REPOSITORY = Path(__file__).resolve().parent.parent
TEMPLATE = REPOSITORY / "{{cookiecutter.project_slug}}"
README = (TEMPLATE / "README.md").read_text(encoding="utf-8")
CONCEPTS = (TEMPLATE / "docs" / "concepts.md").read_text(encoding="utf-8")
PIECES = re.findall(
    r"^## ([^\n]*)\n(?:(?!^## ).)*?```python\n(.*?)```\n\n```text\n(.*?)```", CONCEPTS, re.MULTILINE | re.DOTALL
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
    words = ["bash", "-c", command]
    done = subprocess.run(words, cwd=project, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project rendered with the defaults."""
    return Path(cookiecutter(str(REPOSITORY), no_input=True, output_dir=str(tmp_path_factory.mktemp("rendered"))))


def test_every_piece_of_code_is_found_with_what_it_prints() -> None:
    assert len(PIECES) == CONCEPTS.count("```python") == CONCEPTS.count("```text") >= 7


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
    assert ranks.wait(60) == [0] * world_size, ranks.output()
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


# ---- the generated README -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("launchers", json.loads((REPOSITORY / "cookiecutter.json").read_text())["launchers"])
def test_the_readme_names_the_launch_scripts_that_are_generated(launchers: str, tmp_path: Path) -> None:
    answers = {"launchers": launchers}
    project = Path(cookiecutter(str(REPOSITORY), no_input=True, extra_context=answers, output_dir=str(tmp_path)))
    text = (project / "README.md").read_text(encoding="utf-8")
    scripts = {path.relative_to(project).as_posix() for path in project.glob("launch/*")}
    assert {name.rstrip(".") for name in re.findall(r"\blaunch/\w[\w.]*", text)} == scripts
    assert bool(re.search(r"\blaunch/", text)) == bool(scripts)
    anchors, all_anchors = (
        {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(levels, text, re.MULTILINE)}
        for levels in ("^## (.*)", "^###? (.*)")
    )
    links = set(re.findall(r"\]\(#([^)]*)\)", text))
    assert anchors <= links <= all_anchors, "the contents and the links lead to all sections, and nowhere else"
    assert all(part.count("\n") > 3 for part in text.split("\n## ")), "no section is empty"
    assert "\n\n\n" not in text and "{%" not in text


@pytest.mark.parametrize("page", ["README.md", "docs/concepts.md"])
def test_the_code_has_what_the_pages_name(page: str) -> None:
    """Files, and names such as `Schedule.factor` or `run.request_stop()`; but no names that an example adds."""
    sources = "".join(path.read_text(encoding="utf-8") for path in TEMPLATE.rglob("*.py"))
    words = {*re.findall(r"\w+", sources), "Dockerfile", "pyproject", "toml", "smoothing"}
    prose = re.sub(r"```.*?```", "", (TEMPLATE / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    codes = re.findall(r"`([^`\n]+)`", prose)
    files = {code for code in codes if re.fullmatch(r"[\w/]+\.(py|sh|md|yaml|sbatch)", code)} - {"try.py"}
    names = {code for code in codes if re.fullmatch(r"[A-Za-z_][\w.]*(\(.*\))?", code)} - files - {"try.py"}
    assert len(files) > 1 and len(names) > 9
    assert not [file for file in files if not (TEMPLATE / file).exists()]
    assert not [name for name in names if not set(re.findall(r"[A-Za-z_]\w*", name.partition("(")[0])) <= words]


# ---- the commands of the generated README ---------------------------------------------------------------------------

PROGRAMS = (
    r"python3? |pip |pytest|torchrun |mpirun |srun |sbatch |scancel |docker |kubectl |tensorboard |bash |sudo |sed "
)
TO_TYPE = re.compile(rf"(?:[A-Z_]+=\S+ )?(?:\./launch_node|launch/\w+\.\w+ |nvidia-smi|ss |py-spy |{PROGRAMS})")
TINY = "--dataset synthetic --max-steps 2 --device cpu --output-dir runs/"  # the last value of an option counts
# Commands to run as they are, and what is appended so that they take a moment; {} becomes a directory of its own.
RUN = {
    "python main.py --help": "",
    "python main.py --dataset synthetic --output-dir runs/one": f"{TINY}{{}}",
    "python main.py --nproc 2 --dataset synthetic --output-dir runs/two": f"{TINY}{{}}",
    "python main.py --nproc 2 --dataset synthetic --output-dir runs/mine": f"{TINY}{{}}",
    "OMP_NUM_THREADS=1 python main.py --nproc 2": f"{TINY}{{}}",
    "./launch_node.sh": f"-- {TINY}{{}}",
    "./launch_node.sh --nproc-per-node 4 -- --epochs 90": f"{TINY}{{}}",
    "./launch_node.sh --max-restarts 3": f"-- {TINY}{{}}",
    "torchrun --nproc-per-node 8 main.py": f"{TINY}{{}} --batch-size 8",
    "mpirun -np 2 python main.py": f"{TINY}{{}}",
    "python benchmark.py --dataset synthetic": "--device cpu --nproc 2 --seconds 0.05 --repeats 1",
    "bash launch/slurm.sbatch --help": "",
    "pytest -k order": "",
}
# Commands that another test runs, with other names, addresses, models or sizes; or the reason not to.
ELSEWHERE = {
    "python3 -m venv .venv && source .venv/bin/activate": "test_generator",
    "pip install -e .": "test_generator",
    "pip install -e '.[dev]' && pytest": "test_generator, and make own-tests",
    "pip install matplotlib": "test_benchmark",
    "python main.py": "test_data: with a download from a server of the test",
    "python main.py --evaluate --resume runs/cifar10-ToyModel/best.pt": "test_saved_options",
    "python main.py --model resnet18 --init-from torchvision --dataset imagefolder --data-dir flowers --image-size 224 "
    "--lr 0.003": "test_init_from",
    "python main.py --config runs/A/config.json": "test_config_file",
    "python main.py --config flowers.toml --lr 0.1": "test_config_file",
    "python predict.py runs/cifar10-ToyModel/best.pt cat.jpg dog.jpg": "test_predict",
    "python main.py --rank 0 --world-size 2 --init-method tcp://10.0.0.1:23456": "test_launch, test_machines",
    "python benchmark.py": "test_benchmark",
    "python benchmark.py --model resnet50 --dataset synthetic --image-size 224 --precision bf16": "test_benchmark",
    "python benchmark.py --model deeplabv3_resnet101 --image-size 224 --batch-size 4": "test_benchmark",
    "torchrun --nnodes 2 ... benchmark.py": "test_benchmark",
    "tensorboard --logdir runs": "below",
    "./launch_node.sh --nnodes 2 --node-rank 0 --master-addr 10.0.0.1": "test_machines",
    "./launch_node.sh --check": "test_check",
    "./launch_node.sh --check --nnodes 2 --node-rank 0 --master-addr 10.77.0.1": "test_check",
    "bash launch/ssh.sh --help": "test_ssh",
    "launch/ssh.sh hosts": "test_ssh",
    "launch/ssh.sh hosts -- --epochs 90": "test_ssh",
    "sbatch --nodes=2 --gpus-per-node=8 --cpus-per-task=64 launch/slurm.sbatch -- --epochs 90": "test_slurm",
    "srun python main.py": "test_slurm",
    "scancel --batch --signal=TERM JOB": "test_slurm",
    "scancel JOB": "test_slurm",
    "sudo .venv/bin/python benchmarks/slow_network.py": "of a clone of the template; takes minutes",
}
NOT_HERE = (
    "docker ",
    "kubectl ",
    "sed 's/my-run/",
    "nvidia-smi",
    "ss -ltnp",
    "py-spy ",
)  # test_containers checks the files


def commands(text: str) -> list[str]:
    """What a reader may type: lines of indented blocks and text in backticks that begin like a command."""
    lines = [line.split("  #")[0].strip() for line in re.findall(r"^    (\S[^\n]*)", text, re.MULTILINE)]
    found = lines + re.findall(r"`([^`\n]+)`", text)
    return list(dict.fromkeys(line.strip() for line in found if TO_TYPE.match(line)))


def test_every_command_of_the_generated_readme_is_run_by_a_test() -> None:
    shown = [command for command in commands(README) if not command.startswith(NOT_HERE)]
    assert sorted(shown) == sorted([*RUN, *ELSEWHERE])


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN)
def test_a_command_of_the_generated_readme_works(command: str, project: Path) -> None:
    if command.startswith("mpirun") and shutil.which("mpirun") is None:
        assert not os.environ.get("CI"), "mpirun must be there in CI"
        pytest.skip("mpirun is not installed")
    said = run(f"{command} {RUN[command].format(list(RUN).index(command))}", project)
    assert "Traceback" not in said
    if TINY in RUN[command]:
        assert "done in " in said


@pytest.fixture(scope="module")
def edited(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a third convolution, and the option and the EMA of the README; two processes have trained it."""
    edited = Path(shutil.copytree(project, tmp_path_factory.mktemp("edited") / "project"))
    (option,) = re.findall(r"^    (smoothing: .*)", README, re.MULTILINE)
    step = "    training.optimizer.zero_grad()\n"
    make = "average = torch.optim.swa_utils.AveragedModel(model)"
    (field,) = re.findall(r"^    (average: .*)$", README, re.MULTILINE)
    (loop,) = re.findall(r"^    (while not run.finished\(\) and .*)", README, re.MULTILINE)
    (finished,) = re.findall(
        r"^        while not run.finished\(\):.*\n", (project / "main.py").read_text(), re.MULTILINE
    )
    edits = {
        "config.py": {"    lr: float = ": f"    {option}\n    lr: float = "},
        "main.py": {
            finished: f"        {loop}\n",
            "        model.to(ctx.device)\n": f"        model.to(ctx.device)\n        {make}\n",
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
    said = run(f"python main.py --nproc 2 --smoothing 0.5 --ema 0.5 --log-every 1 {TINY}cifar10-ToyModel", edited)
    assert "ToyModel, 64,326 weights" in said, "2,320 more than without conv3"
    return edited


@pytest.mark.slow
def test_an_option_is_added_by_the_line_of_the_readme(edited: Path) -> None:
    assert json.loads((edited / "runs/cifar10-ToyModel/config.json").read_text())["options"]["smoothing"] == 0.5


@pytest.mark.slow
def test_a_checkpoint_holds_the_state_that_is_passed_as_the_readme_says(edited: Path) -> None:
    checkpoint = torch.load(edited / "runs/cifar10-ToyModel/best.pt", weights_only=True)
    assert checkpoint["average"]["n_averaged"] == 2, "the number of steps"
    average, weights = (checkpoint[name] for name in ("average", "model"))
    assert not torch.equal(average["module.conv3.weight"], weights["conv3.weight"])
    said = run(f"python main.py --nproc 2 --smoothing 0.5 --ema 0.5 {TINY}cifar10-ToyModel --max-steps 3", edited)
    assert "resuming from" in said


@pytest.mark.slow
def test_weights_are_frozen_or_trained_more_slowly_by_the_lines_of_the_readme(project: Path, tmp_path: Path) -> None:
    """In one step, frozen weights stay and the head moves; or the rest moves by a tenth."""
    section = README.partition("### Fine-tune\n")[2].partition("\n### ")[0]
    _, freeze, slower = re.findall(r"(?:^    .*\n)+", section, re.MULTILINE)

    def moved(name: str, old: str = "", new: str = "") -> list[float]:
        edited = Path(shutil.copytree(project, tmp_path / name))
        text = (edited / "model.py").read_text()
        assert not old or text.count(old) == 1
        (edited / "model.py").write_text(text.replace(old, new) if old else text)
        step = "--max-steps 1 --lr-schedule constant --warmup-epochs 0 --momentum 0 --weight-decay 0 --model resnet18"
        for folder, lr in (("a", 1e-30), ("b", 0.1)):
            run(f"python main.py {TINY}{folder} {step} --lr {lr}", edited)
        files = (edited / f"runs/{folder}/checkpoints/step_00000001.pt" for folder in "ab")
        before, after = (torch.load(file, weights_only=True)["model"] for file in files)
        return [(after[each] - before[each]).norm().item() for each in ("layer1.0.conv1.weight", "fc.weight")]

    anchor, optimizer = (
        "    return model.to(memory_format=torch.channels_last)",
        "    return torch.optim.SGD(model.parameters(), ",
    )
    whole = moved("whole")
    frozen = moved("frozen", anchor, freeze + anchor)
    slow = moved("slow", optimizer, f"{slower}    return torch.optim.SGD(model.parameters(), ")
    assert frozen[0] < 1e-20 and frozen[1] > 0.01
    assert slow == pytest.approx([whole[0] / 10, whole[1]], rel=1e-3)


@pytest.mark.slow
def test_a_run_stops_early_by_the_line_of_the_readme(edited: Path) -> None:
    """As soon as the accuracy is enough; the same command then ends at once."""
    output = edited / "runs/early"
    options = "--dataset synthetic --device cpu --epochs 20"
    said = run(f"python main.py {options} --output-dir {output}", edited)
    status, metrics = json.loads((output / "status.json").read_text()), (output / "metrics.jsonl").read_text()
    *early, last = [line["accuracy"] for line in map(json.loads, metrics.splitlines()) if line["split"] == "val"]
    assert last >= 0.9 > max(early) and "done in " in said
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
    done = subprocess.run(
        [sys.executable, "-c", block + show], cwd=edited, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == f"{weights['conv3.bias'].tolist()} False\n"


@pytest.mark.slow
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
