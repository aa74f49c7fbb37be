"""The part mirror: a run whose disk is gone resumes from its copy, and ends the same."""

import os
import shutil
import signal
import time
from pathlib import Path

from outputs import assert_same_run, status
from processes import start, train

from ddp.training.run import Run

OPTIONS = ["--dataset", "synthetic", "--batch-size", 16, "--log-every", 1, "--checkpoint-every", 2, "--max-steps", 6]


def test_a_run_resumes_without_its_disk(tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    mirror.mkdir()

    def kill(run: Run) -> None:
        while run.state.step == 3:
            if (mirror / "checkpoints" / "step_00000002.pt").exists():
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.01)

    train(2, *OPTIONS, "--output-dir", tmp_path / "whole", "--mirror", mirror)
    assert status(tmp_path / "whole")["mirrored"] == 6
    shutil.rmtree(mirror)
    mirror.mkdir()
    options = [*OPTIONS, "--output-dir", tmp_path / "run", "--mirror", mirror]
    start(2, *options, after_step=kill).wait()
    shutil.rmtree(tmp_path / "run")
    assert "at step 2" in train(2, *options)
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_a_url_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    options = [*OPTIONS, "--output-dir", tmp_path / "run", "--mirror", tmp_path / "absent"]
    assert "there is no such directory" in train(2, *options, code=3)
