"""Make the shell scripts executable, and print what to type next.

The output is complete without this hook (`--accept-hooks no`). It prints ASCII only: a console may know no more.
"""

from __future__ import annotations

from pathlib import Path

NEXT = """
Your project is ready. Next:

    cd {{ cookiecutter.project_slug }}
    pip install -e .
    ./launch_node.sh --nproc-per-node 2 -- --dataset synthetic --epochs 3
    tensorboard --logdir runs
"""

for script in Path().rglob("*.sh"):
    mode = script.stat().st_mode
    script.chmod(mode | (mode & 0o444) >> 2)  # who may read it may run it: a zip file has lost these bits

print(NEXT)
