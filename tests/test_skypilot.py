"""launch/skypilot.yaml: SkyPilot accepts it, and its script starts launch_node.sh on each machine. No cloud is used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from template_copy import TEMPLATE

TASK = yaml.safe_load((TEMPLATE / "launch" / "skypilot.yaml").read_text())
SHOW = '#!/usr/bin/env bash\nprintf "%s\\n" "$@" >"$SHOWN"\n'
# In an environment of its own: SkyPilot needs dozens of packages, of other versions than the tests do.
VALIDATE = """
import jsonschema, os, sys, yaml
from sky import Task
from sky.utils import schemas
task = yaml.safe_load(open(sys.argv[1]))
jsonschema.validate(task, schemas.get_task_schema())
jsonschema.validate(task["resources"], schemas.get_resources_schema())
(resources,) = Task.from_yaml_config(task).resources
print(resources.use_spot, resources.job_recovery["recover_on_exit_codes"])
try:
    jsonschema.validate({**task, "number_of_nodes": 2}, schemas.get_task_schema())
except jsonschema.ValidationError:
    print("refused")
"""


@pytest.mark.slow
@pytest.mark.sample(0)
def test_skypilot_accepts_the_task(tmp_path: Path) -> None:
    shutil.copytree(TEMPLATE / "launch", tmp_path / "launch")
    command = [
        str(Path(sys.executable).with_name("uv")),
        "run",
        "--no-project",
        "--quiet",
        "--with",
        "skypilot>=0.11.2",
    ]
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "UV_CACHE_DIR": os.environ.get("UV_CACHE_DIR", str(Path.home() / ".cache/uv")),
    }
    done = subprocess.run(
        [*command, "--python", sys.executable, "python", "-c", VALIDATE, "launch/skypilot.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={name: value for name, value in environment.items() if name != "PYTHONPATH"},
    )
    assert done.stdout.split("\n")[-3:-1] == ["True [8, 75]", "refused"], done.stdout + done.stderr


def run(folder: Path, mirror: Path, rank: int = 0, **environ: str) -> list[str]:
    """The words that the script passes to launch_node.sh on a machine."""
    (folder / "launch_node.sh").write_text(SHOW)
    variables: dict[str, Any] = {"SKYPILOT_NUM_NODES": 2, "SKYPILOT_NUM_GPUS_PER_NODE": 8, "SKYPILOT_NODE_RANK": rank}
    variables |= {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "MIRROR": mirror, "SHOWN": folder / "shown", **environ}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}, "PATH": path}
    subprocess.run(["bash", "-c", TASK["run"]], cwd=folder, env=environment, check=True)
    return (folder / "shown").read_text().splitlines()


def test_each_machine_starts_its_node_and_a_job_that_has_saved_must_resume(tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    words = run(tmp_path, mirror)
    assert words[:8] == ["--nnodes", "2", "--node-rank", "0", "--nproc-per-node", "8", "--master-addr", "10.0.0.1"]
    assert words[8] == "--" and words[-4:] == ["--mirror", str(mirror), "--resume", "auto"]
    (mirror / "checkpoints").mkdir(parents=True)
    (mirror / "checkpoints" / "step_00000010.pt").touch()
    words = run(tmp_path, mirror, rank=1)
    assert words[2:4] == ["--node-rank", "1"] and words[-2:] == ["--resume", "must"]


def test_the_options_of_the_task_are_those_of_main_py() -> None:
    from config import Config

    words = TASK["run"].partition(" -- ")[2].replace("\\\n", " ").replace('"', "").split()
    config = Config.parse(
        [word.replace("$MIRROR", TASK["envs"]["MIRROR"]).replace("$resume", "must") for word in words]
    )
    assert config.mirror == TASK["envs"]["MIRROR"] and config.checkpoint_every


def test_exit_codes_start_the_job_again_as_elsewhere() -> None:
    recovery = TASK["resources"]["job_recovery"]
    assert TASK["resources"]["use_spot"] and recovery["recover_on_exit_codes"] == [8, 75]
    assert "max_restarts_on_errors" not in recovery, "it would also start bugs and wrong options again"


def test_the_script_is_clean_bash() -> None:
    checked = subprocess.run(["shellcheck", "--shell=bash", "-"], input=TASK["run"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
