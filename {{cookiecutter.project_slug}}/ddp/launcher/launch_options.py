"""The command line of launch_node.sh, and the environment variables that set its options too."""

import argparse
from dataclasses import dataclass
from functools import partial

from ddp.core.errors import UsageError
from ddp.core.options import OptionParser, option
from ddp.core.run_config import RunConfig

DEFAULT_RESTARTS = 3  # on several machines
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
_option = partial(option, section="options")


# fmt: off
@dataclass
class LaunchOptions:
    """The options of launch_node.sh."""

    nnodes: int = _option(1, "number of machines", min=1, variable="NNODES")
    node_rank: int = _option(0, "number of this machine, from 0", min=0, variable="NODE_RANK")
    # The same on every machine:
    nproc_per_node: int = _option(None, "processes on each machine (default: one per GPU; 1 without a GPU)",
                                  min=1, variable="NPROC_PER_NODE", alias="--nproc")
    master_addr: str = _option("", "address of the machine with --node-rank 0", metavar="HOST", variable="MASTER_ADDR")
    master_port: int = _option(29500, "a free port of that machine", min=1, max=65535, variable="MASTER_PORT")
    max_restarts: int = _option(None, "restart up to N times after a lost process (default: 0; 3 on several machines)",
                                min=0, variable="MAX_RESTARTS")
    start_grace: int = _option(300, "seconds to wait for other machines", min=0, variable="START_GRACE")
    check: bool = _option(False, "do not train: compare the machines, and measure the network between them")
# fmt: on

    def __post_init__(self) -> None:
        """Refuse options that contradict each other, and set those that follow from others."""
        self.master_addr = self.master_addr.strip("[]")  # around an IPv6 address
        if self.node_rank >= self.nnodes:
            ranks = f"ranks run from 0 to {self.nnodes - 1}"
            raise UsageError(f"--node-rank {self.node_rank}: with --nnodes {self.nnodes}, {ranks}")
        if self.nnodes > 1 and not self.master_addr:
            raise UsageError(f"--master-addr: needed with --nnodes {self.nnodes}; see --help")
        if self.max_restarts is None or self.check:
            self.max_restarts = DEFAULT_RESTARTS if self.nnodes > 1 and not self.check else 0


def read_command_line(words: list[str], config_class: type[RunConfig]) -> tuple[LaunchOptions, RunConfig, list[str]]:
    """The launcher's options, those of main.py after `--`, and the latter as words. Raises UsageError."""
    layout = partial(argparse.RawDescriptionHelpFormatter, max_help_position=34, width=120)
    parser = OptionParser(formatter_class=layout, usage=USAGE, description=HELP, epilog=MORE_HELP)
    parser.unknown_hint = "; put options of main.py after --"
    parser.sections["options"] = parser
    parser.add_options(LaunchOptions)
    end = words.index("--") if "--" in words else len(words)
    own, main_options = words[:end], words[end + 1 :]
    given = vars(parser.parse_args(own))
    config = config_class.parse(main_options)
    if config.nproc is not None:
        raise UsageError("--nproc: the launcher starts the processes; use --nproc-per-node, before the --")
    return LaunchOptions(**given), config, main_options
