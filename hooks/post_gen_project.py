"""Remove the launch scripts and the parts that were not chosen, and print the next commands.

Without this hook (`--accept-hooks no`) the project is complete: it has all of them. In a folder that existed, no file
that was there before is deleted, and with -s none is changed. The hook prints ASCII only, because some consoles cannot
encode anything else.
"""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from pathlib import Path

LAUNCHERS = "{{ cookiecutter.launchers|slugify }}"
CHOSEN = "{{ cookiecutter.__parts }}"
PARTS = CHOSEN.split("-")
KNOWN_PARTS = ("fsdp", "mirror", "monitor", "preflight")

# File -> the values of LAUNCHERS that keep it.
KEPT_FOR = {
    "launch/ssh.sh": ("all",),
    "launch/slurm.sbatch": ("all", "slurm"),
    "launch/kubernetes.yaml": ("all", "kubernetes"),
    "launch/trainjob.yaml": ("all", "kubernetes"),
    "launch/skypilot.yaml": ("all", "skypilot") if "mirror" in PARTS else (),
}

# What the owner of a file that was there before adds.
LINES = {("parts.py", name): f'"{name}",' for name in KNOWN_PARTS}
LINES["pyproject.toml", "mirror"] = '"fsspec>=2024.2", # part mirror'

NEXT = """
Your project is ready. Next:

    cd {{ cookiecutter.project_slug }}
    pip install -e .
    ./launch_node.sh --nproc-per-node 2 -- --dataset synthetic --epochs 3
    tensorboard --logdir runs
"""

# pre_gen_project.py has copied what was there.
BACKUP, README = Path(".before"), Path("README.md")
BEFORE = {path.relative_to(BACKUP).as_posix(): path.read_bytes() for path in BACKUP.rglob("*") if path.is_file()}
if README.stat().st_mtime == 0:  # -s was given: keep all
    for name in BEFORE:
        shutil.copy2(BACKUP / name, name)
    if "README.md" not in BEFORE:
        README.unlink()
shutil.rmtree(BACKUP, ignore_errors=True)

# The lines of a part: in these files, they are marked so.
MARKS = {"parts.py": '^    "{}",.*\n', "pyproject.toml": "^.* # part {}\n"}


def remove(name: str) -> None:
    """Delete a file, or the files of a folder, but none that was there before."""
    for path in [*Path(name).rglob("*"), Path(name)]:
        if path.as_posix() not in BEFORE:
            with suppress(OSError):  # a folder
                path.unlink()
    with suppress(OSError):  # the folder is not empty
        Path(name).rmdir()


for name, kept_for in KEPT_FOR.items():
    if LAUNCHERS not in kept_for:
        remove(name)
with suppress(OSError):  # the folder is not empty
    Path("launch").rmdir()

for name in set(KNOWN_PARTS).difference(PARTS):
    for file in (f"ddp/parts/{name}", f"tests/test_part_{name}.py", f"docs/{name}.md"):
        remove(file)
to_add = []
for file, mark in MARKS.items():
    text = Path(file).read_bytes().decode()  # read_text would change the newlines
    if BEFORE.get(file) != text.encode():  # it was rendered now, with all parts
        for name in set(KNOWN_PARTS).difference(PARTS):
            text = re.sub(mark.format(name), "", text, flags=re.MULTILINE)
        Path(file).write_bytes(text.encode())
    to_add += [(file, name) for name in PARTS if name and not re.search(mark.format(name), text, re.MULTILINE)]

for script in filter(Path.exists, map(Path, ("launch_node.sh", "launch/ssh.sh"))):
    mode = script.stat().st_mode
    script.chmod(mode | (mode & 0o444) >> 2)  # a zip file loses the run bits: set one for each read bit

if lines := [f"    {file}: {LINES[file, name]}" for file, name in to_add if (file, name) in LINES]:
    print("\n".join(["These files were there before. Add to", *lines]))
else:
    print(NEXT)
