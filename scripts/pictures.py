"""Draw the pictures of the README: docs/terminal.svg and docs/tensorboard.png. Takes a minute, and needs chromium.

    .venv/bin/python scripts/pictures.py        from the repository

It renders the template, trains the result with two processes in a pseudo-terminal, presses Ctrl-C in the middle of an
epoch, repeats the command, and draws the terminal's output. Then TensorBoard draws the curves of two more runs.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

from cookiecutter.main import cookiecutter
from rich.console import Console
from rich.text import Text

REPOSITORY = Path(__file__).resolve().parent.parent
DOCS = REPOSITORY / "docs"
COLUMNS = 120
COMMAND = "./launch_node.sh --nproc-per-node 2 -- --dataset synthetic --epochs 3 --output-dir runs/demo"
RUNS = "python main.py --nproc 2 --dataset synthetic --epochs 3 --log-every 5 --lr {0} --output-dir runs/lr-{0}"
STOP_AT = "epoch 1/3  step  78"  # Ctrl-C after this line


def environment() -> dict[str, str]:
    """The variables that `source .venv/bin/activate` sets, for this virtual environment."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "VIRTUAL_ENV": sys.prefix, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}


def on_a_terminal(command: str, folder: Path, stop_at: str | None = None) -> str:
    """Run `command` in a terminal; return its lines as they are at the end. Press Ctrl-C once `stop_at` appears."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execvpe("bash", ["bash", "-c", command], environment())
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    shown = b""
    with suppress(OSError):  # raised at the end of the output
        while piece := os.read(terminal, 1 << 16):
            shown += piece
            if stop_at is not None and stop_at.encode() in shown:
                stop_at = None
                time.sleep(0.1)
                os.write(terminal, b"\x03")
    os.waitpid(pid, 0)
    os.close(terminal)
    return "\n".join(last_state(line) for line in shown.decode().replace("\r\n", "\n").split("\n"))


def last_state(line: str) -> str:
    """The last state of a line that a progress bar has overwritten."""
    return next((part for part in reversed(line.split("\r")) if part.strip()), "")


def draw_terminal(parts: list[tuple[str, str]], path: Path) -> None:
    """Draw commands and their output as an SVG."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for command, shown in parts:
        console.print(Text(f"$ {command}", style="bold green"))
        console.print(Text.from_ansi(shown.strip("\n")))
    path.write_text(console.export_svg(title="my-ddp-project"), encoding="utf-8")


def draw_tensorboard(folder: Path, path: Path) -> None:
    """Draw TensorBoard as a browser shows it."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    shutil.rmtree(folder / "runs")
    for lr in ("0.01", "0.03"):
        subprocess.run(RUNS.format(lr).split(), cwd=folder, env=environment(), check=True, capture_output=True)
    command = ["tensorboard", "--logdir", "runs", "--port", str(port)]
    with subprocess.Popen(command, cwd=folder, env=environment(), stderr=subprocess.DEVNULL) as server:
        try:
            url = f"http://127.0.0.1:{port}/"
            for _ in range(300):
                time.sleep(0.2)
                with suppress(OSError):
                    urllib.request.urlopen(f"{url}data/plugins_listing", timeout=5).read()
                    break
            with tempfile.TemporaryDirectory() as profile:
                browser = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
                browser += ["--window-size=1400,900", "--virtual-time-budget=30000", f"--screenshot={path}"]
                subprocess.run(
                    [*browser, f"{url}?darkMode=false#scalars&_smoothingWeight=0&tagFilter=accuracy%7Closs%7Clr"],
                    check=True,
                    stderr=subprocess.DEVNULL,
                )
        finally:
            server.send_signal(signal.SIGTERM)


def main() -> None:
    if shutil.which("chromium") is None:
        sys.exit("the picture of TensorBoard needs chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory() as name:
        project = Path(cookiecutter(str(REPOSITORY), no_input=True, output_dir=name))
        first = on_a_terminal(COMMAND, project, STOP_AT)
        second = on_a_terminal(COMMAND, project)
        draw_terminal([(COMMAND, first), (COMMAND, second)], DOCS / "terminal.svg")
        draw_tensorboard(project, DOCS / "tensorboard.png")


if __name__ == "__main__":
    main()
