"""What launch_node.sh runs: it checks the command line, then starts the agent of this machine.

What is slow to import is imported after the check, so that a wrong option is reported within 0.05 s.
"""

import importlib.util
import sys
from typing import NoReturn

from ddp.core.errors import SetupError, UserError, report_error
from ddp.core.run_config import RunConfig
from ddp.launcher.options import LauncherParser, LaunchOptions

USAGE = "./launch_node.sh [OPTIONS] [-- MAIN_OPTIONS]"
HELP = """\
Train on all GPUs of this machine, or with one process if it has none.
To train on several machines, run this on each, with the same options except for --node-rank.
"""
MORE_HELP = """\
Each variable in brackets sets the option before it; the command line wins. PYTHON chooses the interpreter.
Ctrl-C, SIGTERM or SIGUSR1: save, and exit with 75. A second signal: exit at once.
"python main.py --help" lists MAIN_OPTIONS.

examples:
  ./launch_node.sh --nproc-per-node 2 -- --dataset synthetic --epochs 3
  ./launch_node.sh --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 -- --epochs 90      on 10.0.0.1
  ./launch_node.sh --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 -- --epochs 90      on the other machine
"""


def main(config_class: type[RunConfig]) -> NoReturn:
    """Train on this machine, and exit with the exit code of the run."""
    parser = LauncherParser(LaunchOptions, usage=USAGE, description=HELP, epilog=MORE_HELP)
    try:
        given, config, main_options = parser.read(sys.argv[1:], config_class)
        options = LaunchOptions(**given)
        if missing := [name for name in ("torch", "psutil") if importlib.util.find_spec(name) is None]:
            remedy = "run pip install -e . with it, activate the right environment, or set PYTHON"
            raise SetupError(f"{sys.executable} has no package {' and '.join(missing)}: {remedy}")
        from ddp.launcher.agent import NodeAgent

        code = NodeAgent(options, config, main_options).run()
    except UserError as error:
        report_error(error)
        code = error.exit_code
    sys.exit(code)
