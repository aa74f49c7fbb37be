"""Options, the ranks that launchers assign, and launch_node.sh. What is wrong is refused with one line."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import psutil
import pytest
from outputs import free_port, status

from config import Config
from ddp.core.errors import SetupError, UsageError
from ddp.core.run_config import RunConfig
from ddp.distributed.rank_env import find_rank_env

PROJECT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--batch_size=0", "--batch-size: '0' must be an integer >= 1"),
        ("--workers 1.5", "--workers: '1.5' must be an integer >= 0"),
        ("--timeout nan", "--timeout: 'nan' must be a number >= 1"),
        ("--seed", "--seed: expected one argument"),
        ("--precision fp8", "'fp8' (choose from 'fp32', 'bf16', 'fp16')"),
        ("--epoch 3", "did you mean --epochs?"),
        ("--compile=yes", "--compile"),
        ("--resume .", "'.' is not auto, must, never or the path of a checkpoint file"),
        ("--rank 0", "--rank: pass all of --rank, --world-size, --init-method, or none of them"),
        ("--evaluate --resume never", "--evaluate needs a checkpoint: remove --resume never"),
    ],
)
def test_a_bad_option_is_refused_with_what_is_allowed(words: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        Config.parse(words.split())
    assert message in str(raised.value) and "\n" not in str(raised.value) and raised.value.exit_code == 2


def test_defaults_a_file_and_the_command_line_in_this_order(tmp_path: Path) -> None:
    defaults = {field.name: field.default for field in fields(Config)}
    parsed = asdict(Config.parse([]))  # Config.check may set options of yours, which follow from others
    assert [field.name for field in fields(RunConfig) if parsed[field.name] != defaults[field.name]] == []
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"options": {"epochs": 7, "seed": 5, "log_every": 2, "compile": True, "ema": None}}))
    config = Config.parse(["--config", str(path), "--seed=6", "--log_every", "3", "--log-every", "4"])
    assert (config.epochs, config.seed, config.compile, config.log_every) == (7, 6, True, 4)
    assert (config.batch_size, config.timeout) == (defaults["batch_size"], defaults["timeout"])


def test_an_incomplete_environment_of_a_launcher_is_refused_with_what_is_missing() -> None:
    whole = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    found = find_rank_env(Config.parse([]), whole)
    assert (found.rank, found.world_size, found.local_rank) == (3, 4, 1)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        with pytest.raises(SetupError, match=f"the environment of torchrun is incomplete.*{name}"):
            find_rank_env(Config.parse([]), {key: value for key, value in whole.items() if key != name})
    slurm = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_NODELIST": "gpu07", "SLURM_NTASKS": "2"}
    found = find_rank_env(Config.parse([]), {**slurm, "SLURM_PROCID": "1", "SLURM_LOCALID": "1"})
    assert (found.rank, found.world_size, found.local_rank) == (1, 2, 1)
    assert find_rank_env(Config.parse([]), {}).world_size == 1


def test_launch_node_restarts_after_a_lost_process_and_exits_with_the_code_of_the_run(tmp_path: Path) -> None:
    """One of two processes is killed with -9 while it starts. A wrong option is refused before any process starts."""
    launch: list[Any] = ["bash", PROJECT / "launch_node.sh", "--nproc-per-node", "2", "--master-port", str(free_port())]
    launch += ["--max-restarts", "1", "--", "--dataset", "synthetic", "--device", "cpu"]
    launch += ["--output-dir", tmp_path / "run"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    refused = subprocess.run(
        [*launch, "--max-steps", "0"], env=environment, capture_output=True, text=True, timeout=180
    )
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1, refused.stderr

    with (tmp_path / "output").open("w") as output:
        run = subprocess.Popen([*launch, "--max-steps", "3"], env=environment, stdout=output, stderr=output)
    try:
        killed, end = False, time.monotonic() + 180
        while not killed:
            assert run.poll() is None and time.monotonic() < end, (tmp_path / "output").read_text()
            for process in psutil.Process(run.pid).children(recursive=True):
                with suppress(psutil.Error):
                    if process.environ().get("RANK") == "1":
                        process.send_signal(signal.SIGKILL)
                        killed = True
            time.sleep(0.05)
        code = run.wait(120)
    finally:
        run.kill()
    printed = (tmp_path / "output").read_text()
    assert code == 0 and "restart" in printed, printed
    assert (status(tmp_path / "run")["state"], status(tmp_path / "run")["step"]) == ("done", 3)
