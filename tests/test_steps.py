"""examples/steps: the six scripts run, their diffs are in the READMEs, and the numbers in the READMEs are measured."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
from template_copy import LEAN

pytestmark = pytest.mark.slow
STEPS = Path(__file__).resolve().parent.parent / "examples/steps"
SCRIPTS = sorted(STEPS.glob("[1-6]_*.py"))
READMES = {"english": STEPS / "README.md", "chinese": STEPS / "README.zh-CN.md"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
LINE = re.compile(
    r"^epoch (\d): train loss (\S+), test loss (\S+), accuracy (\S+), (\S+) s(?:, (\d) processes)?$", re.M
)


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, STEPS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded  # for its dataclasses
    spec.loader.exec_module(loaded)
    return loaded


mistakes, make_readme = module("mistakes"), module("make_readme")
SHORT = mistakes.TWO_EPOCHS
# One write per line: torchrun runs `python -u`, whose print writes text and newline apart, and two ranks' would mix.
SLOW = (
    mistakes.STEP,
    mistakes.STEP
    + r"""            print(f"step {step}\n", end="", flush=True)
            time.sleep(0.3)
""",
)


def text_of(language: str) -> str:
    return READMES[language].read_text(encoding="utf-8")


def start(folder: Path, *command: str | Path) -> subprocess.Popen[str]:
    environment = {**os.environ, **LEAN, "CUDA_VISIBLE_DEVICES": ""}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(list(map(str, command)), cwd=folder, env=environment, text=True, **pipes)


def output_of(process: subprocess.Popen[str]) -> str:
    """What it prints until it ends. It is killed after 5 minutes."""
    try:
        return process.communicate(timeout=300)[0]
    finally:
        process.kill()


def stopped_after_step_3(process: subprocess.Popen[str]) -> str:
    """Send SIGTERM after step 3, and return what it prints from then on."""
    assert process.stdout is not None
    assert any(line.startswith("step 3") for line in process.stdout), "step 3 was never printed"
    process.send_signal(signal.SIGTERM)
    return output_of(process)


def edited_script(folder: Path, *edits: tuple[str, str]) -> Path:
    """Script 6 with these edits, in `folder`."""
    path = folder / "6_launch.py"
    path.write_text(mistakes.edited("6", edits), encoding="utf-8")
    return path


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "checkpoint.pt", weights_only=True)["model"]


# ---- the scripts run -------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("script", "123456")
def test_a_script_learns_on_one_and_two_processes(script: str, processes: int, tmp_path: Path) -> None:
    """Two processes of script 1 do not know of each other. Accuracies are those of the READMEs, within 0.05."""
    done = mistakes.run_in(tmp_path, script, processes=processes)
    assert not any(done.exit_codes), done.outputs
    lines = LINE.findall(done.outputs[0])
    assert [line[0] for line in lines] == list("01234"), done.outputs[0]
    assert float(lines[-1][3]) > 0.75 and float(lines[-1][1]) < 0.3
    if script != "1":
        assert {line[5] for line in lines} == {str(processes)} and done.outputs[1:] == ("",) * (processes - 1)
    shown = [
        LINE.findall(re.findall(r"```text\n(.*?)```", text_of(each), re.DOTALL)[int(script) - 1]) for each in READMES
    ]
    assert shown[0] == shown[1] and [line[0] for line in shown[0]] == list("01234")
    if processes == (1 if script == "1" else 2):
        for printed, line in zip(shown[0], lines, strict=True):
            assert float(line[3]) == pytest.approx(float(printed[3]), abs=0.05)


def test_metrics_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    """Script 3 without training: the test loss and the accuracy of the same weights on 1 and 2 processes."""
    untrained = (
        mistakes.ONE_EPOCH,
        ("            optimizer.step()\n", ""),
        (mistakes.TRAIN_MODE, "        ddp_model.eval()\n"),
    )
    lines = [LINE.findall(mistakes.run("3", untrained, processes).outputs[0])[0] for processes in (1, 2)]
    assert lines[0][2:4] == lines[1][2:4]


def test_a_killed_run_resumes_bit_for_bit() -> None:
    """In mid-epoch, on two processes."""
    whole, resumed = mistakes.resumed(killed=False)[0], mistakes.resumed()[0]
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.sample(0)
def test_torchrun_starts_script_2(tmp_path: Path) -> None:
    output = output_of(start(tmp_path, *TORCHRUN, "--nproc-per-node=2", SCRIPTS[1]))
    assert len(LINE.findall(output)) == 5, output


@pytest.mark.sample(0)
def test_spawn_starts_script_6_and_sigterm_stops_all_ranks(tmp_path: Path) -> None:
    """All ranks stop after the same step, with a checkpoint of it. The same command then resumes from there."""
    process = start(tmp_path, sys.executable, edited_script(tmp_path, SHORT, SLOW))
    output = stopped_after_step_3(process)
    stops = dict(re.findall(r"rank (\d) stops after step (\d+)", output))
    assert process.returncode == 0 and stops.keys() == {"0", "1"} and stops["0"] == stops["1"], output
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == int(stops["0"]) < 14
    output = output_of(start(tmp_path, sys.executable, edited_script(tmp_path, SHORT)))
    assert f"resumed after step {stops['0']}\n" in output and "epoch 1: " in output


@pytest.mark.sample(0)
def test_torchrun_starts_script_6_and_sigterm_stops_all_ranks(tmp_path: Path) -> None:
    process = start(tmp_path, *TORCHRUN, "--nproc-per-node=2", edited_script(tmp_path, SHORT, SLOW))
    output = stopped_after_step_3(process)
    stops = dict(re.findall(r"rank (\d) stops after step (\d+)", output))
    assert stops.keys() == {"0", "1"} and stops["0"] == stops["1"], output
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == int(stops["0"])


@pytest.mark.sample(0)
@pytest.mark.parametrize("method", ["tcp", "file"])
def test_two_machines_start_script_6_by_hand(method: str, tmp_path: Path) -> None:
    """Machine 1 has a folder of its own, without a checkpoint."""
    folders = [tmp_path / "0", tmp_path / "1"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}" if method == "tcp" else f"file://{tmp_path}/init"
    processes = []
    for rank, folder in enumerate(folders):
        folder.mkdir()
        script = edited_script(folder, SHORT)
        processes.append(start(folder, sys.executable, script, address, str(rank), "2"))
        time.sleep(0.1)
    outputs = [output_of(process) for process in processes]
    assert [line[5] for line in LINE.findall(outputs[0])] == ["2", "2"] and not LINE.findall(outputs[1]), outputs
    assert (folders[0] / "checkpoint.pt").exists() and not (folders[1] / "checkpoint.pt").exists()


# ---- the texts -------------------------------------------------------------------------------------------------------


def test_each_script_adds_at_most_60_lines() -> None:
    assert len(SCRIPTS) == 6
    for diff in make_readme.diffs():
        assert len(re.findall(r"^\+", diff, re.MULTILINE)) <= 60
    assert len(SCRIPTS[-1].read_text(encoding="utf-8").splitlines()) <= 220


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_uses_only_torch(script: Path) -> None:
    imports = re.findall(r"^(?:import|from) (\w+)", script.read_text(encoding="utf-8"), re.MULTILINE)
    assert {name for name in imports if name not in sys.stdlib_module_names} == {"torch"}


@pytest.mark.parametrize("language", READMES)
def test_a_readme_shows_the_diffs_of_the_scripts(language: str) -> None:
    assert make_readme.with_diffs(text_of(language)) == text_of(language), "run examples/steps/make_readme.py"


def test_both_readmes_have_the_same_structure() -> None:
    def structure(language: str) -> tuple[list[str], ...]:
        text = text_of(language)
        headings = re.findall(r"^(#+) (\d*)", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
        blocks = re.findall(r"```.*?```", text, re.DOTALL)
        commands = [line.partition(" #")[0].rstrip() for line in re.findall(r"^    (\S.*)$", text, re.MULTILINE)]
        commands = [line for line in commands if line.startswith(("python ", "torchrun "))]
        rows = [str(line.count("|")) for line in text.splitlines() if line.startswith("|")]
        names = re.findall(r"^\|.*?`(\w+)`: ", text, re.MULTILINE)
        return [*map(str, headings)], blocks, commands, rows, names

    english, chinese = structure("english"), structure("chinese")
    assert english == chinese and len(english[0]) == 11 and len(english[2]) > 8


def numbers_in(language: str, name: str) -> dict[str, str]:
    """The numbers of a mistake in a README."""
    mistake = mistakes.MISTAKES[name]
    (found,) = mistake.cell(name, getattr(mistake, language)).finditer(text_of(language))
    return found.groupdict()


@pytest.mark.parametrize("name", mistakes.MISTAKES)
def test_a_readme_has_numbers_in_their_ranges(name: str) -> None:
    """A rounded number may be outside by half of its last digit."""
    english, chinese = numbers_in("english", name), numbers_in("chinese", name)
    assert english == chinese
    for key, number in english.items():
        low, high = mistakes.MISTAKES[name].ranges[key]
        rounding = 0.5 * 10.0 ** -len(number.partition(".")[2]) if low != high else 0
        assert low - rounding <= float(number) <= high + rounding, key


def test_each_measured_cell_is_of_a_mistake() -> None:
    cells = re.findall(r"\| `(\w+)`: ", text_of("english"))
    assert sorted(cells) == sorted(mistakes.MISTAKES)


def test_the_table_names_what_a_project_has(template: Path) -> None:
    (table,) = re.findall(r"^## Where this is.*?(?=^## )", text_of("english"), re.MULTILINE | re.DOTALL)
    rows = [row.split(" | ") for row in table.splitlines() if row.startswith("| ") and ".py`" in row]
    assert len(rows) == 19
    for _, files, names in rows:
        sources = "\n".join(
            (template / file).read_text(encoding="utf-8") for file in re.findall(r"`([\w/]+\.py)`", files)
        )
        for name in re.findall(r"`(?:\w+\.)?(\w+)`", names):
            assert re.search(rf"^ *(?:def|class) {name}\b", sources, re.MULTILINE), name


# ---- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.sample(0)
@pytest.mark.parametrize("name", mistakes.MISTAKES)
def test_a_mistake_has_its_cost(name: str) -> None:
    mistake = mistakes.MISTAKES[name]
    assert mistake.outside(mistake.measure()) == []
