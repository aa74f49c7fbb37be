"""The part preflight: launch_node.sh --check."""

import subprocess
from pathlib import Path


def test_this_machine_passes_and_nothing_is_written(tmp_path: Path) -> None:
    project = Path(__file__).parent.parent
    command = f"./launch_node.sh --nproc-per-node 1 --check -- --device cpu --output-dir {tmp_path}/out"
    done = subprocess.run(command.split(), cwd=project, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("node  host") and "all checks passed" in done.stdout
    assert not (tmp_path / "out").exists()
