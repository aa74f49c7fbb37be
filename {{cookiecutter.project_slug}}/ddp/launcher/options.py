"""The options of launch_node.sh, from environment variables and from the command line."""

import argparse
import os
from dataclasses import dataclass
from functools import partial
from typing import Any

from ddp.core.errors import UsageError
from ddp.core.options import OptionParser, environment_arguments, non_negative, number, option, positive, with_hyphens
from ddp.core.run_config import RunConfig

DEFAULT_RESTARTS = 3  # on several machines
_port = number(int, 1, max=65535)
_option = partial(option, section="options")


def host(text: str) -> str:
    """A name or an address; brackets around an IPv6 address are removed."""
    return text.strip("[]")


# fmt: off
@dataclass
class JobOptions:
    """Options that are the same on every machine. A launcher for several machines passes them on."""

    nproc_per_node: int = _option(None, "processes on each machine (default: one per GPU; 1 without a GPU)",
                                  kind=positive, variable="NPROC_PER_NODE", alias="--nproc")
    master_addr: str = _option("", "address of the machine with --node-rank 0", kind=host, variable="MASTER_ADDR")
    master_port: int = _option(29500, "a free port of that machine", kind=_port, variable="MASTER_PORT")
    max_restarts: int = _option(None, "restart up to N times after a lost process (default: 0; 3 on several machines)",
                                kind=non_negative, variable="MAX_RESTARTS")
    start_grace: int = _option(300, "seconds to wait for other machines", kind=non_negative, variable="START_GRACE")
    check: bool = _option(False, "do not train: compare the machines, and measure the network between them")


@dataclass
class LaunchOptions(JobOptions):
    """The options of launch_node.sh."""

    nnodes: int = _option(1, "number of machines", kind=positive, variable="NNODES")
    node_rank: int = _option(0, "number of this machine, from 0", kind=non_negative, variable="NODE_RANK")
# fmt: on

    def __post_init__(self) -> None:
        """Refuse options that contradict each other, and set those that follow from others."""
        if self.node_rank >= self.nnodes:
            ranks = f"ranks run from 0 to {self.nnodes - 1}"
            raise UsageError(f"--node-rank {self.node_rank}: with --nnodes {self.nnodes}, {ranks}")
        if self.nnodes > 1 and not self.master_addr:
            raise UsageError(f"--master-addr: needed with --nnodes {self.nnodes}; see --help")
        if self.max_restarts is None or self.check:
            self.max_restarts = DEFAULT_RESTARTS if self.nnodes > 1 and not self.check else 0


class LauncherParser(OptionParser):
    """Reads a command line with options of the launcher before a `--` and options of main.py after it."""

    unknown_hint = "; put options of main.py after --"

    def __init__(self, options_class: type, **texts: str) -> None:
        layout = partial(argparse.RawDescriptionHelpFormatter, max_help_position=34, width=120)
        super().__init__(formatter_class=layout, **texts)
        self.sections["options"] = self
        self.options_class = options_class
        self.add_options(options_class)

    def read(self, words: list[str], config_class: type[RunConfig]) -> tuple[dict[str, Any], RunConfig, list[str]]:
        """The launcher's options that are set, those of main.py, and the latter as words. Raises UsageError."""
        end = words.index("--") if "--" in words else len(words)
        own, main_options = words[:end], words[end + 1 :]
        actions = self._option_string_actions
        names = (with_hyphens(word).partition("=")[0] for word in own)
        flags = {actions[name].option_strings[0] for name in names if name in actions}
        variables = environment_arguments(self.options_class, os.environ)  # only for options that are not in `own`
        given = vars(self.parse_args([*(word for word in variables if word.partition("=")[0] not in flags), *own]))
        config = config_class.parse(main_options)
        if config.nproc is not None:
            raise UsageError("--nproc: the launcher starts the processes; use --nproc-per-node, before the --")
        return given, config, main_options
