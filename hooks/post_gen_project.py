"""Remove the launch scripts that were not chosen, make the shell scripts executable, and print the next commands.

Without this hook (`--accept-hooks no`) the project is complete: it has all launch scripts. The hook prints ASCII only,
because some consoles cannot encode anything else.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

LAUNCHERS = "{{ cookiecutter.launchers|slugify }}"

# File -> the values of LAUNCHERS that keep it.
KEPT_FOR = {
    "launch/ssh.sh": ("all",),
    "launch/slurm.sbatch": ("all", "slurm"),
    "launch/kubernetes.yaml": ("all", "kubernetes"),
    "launch/trainjob.yaml": ("all", "kubernetes"),
    "launch/skypilot.yaml": ("all", "skypilot"),
}

NEXT = """
Your project is ready. Next:

    cd {{ cookiecutter.project_slug }}
    pip install -e .
    ./launch_node.sh --nproc-per-node 2 -- --dataset synthetic --epochs 3
    tensorboard --logdir runs
"""

for name, kept_for in KEPT_FOR.items():
    if LAUNCHERS not in kept_for:
        Path(name).unlink(missing_ok=True)
with suppress(OSError):  # the folder is not empty
    Path("launch").rmdir()

for script in Path().rglob("*.sh"):
    mode = script.stat().st_mode
    script.chmod(mode | (mode & 0o444) >> 2)  # a zip file loses the run bits: set one for each read bit

print(NEXT)
