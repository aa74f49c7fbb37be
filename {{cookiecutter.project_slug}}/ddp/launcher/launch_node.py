"""What launch_node.sh runs: its command line, and the agent of one node, which runs and restarts the workers.

torchrun's own --max-restarts is not used: restarted workers read stale keys from its store (pytorch issue 135712).
Instead all nodes end their workers and connect again, and main.py resumes from the newest checkpoint.
"""

import argparse
import importlib.util
import os
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from ddp.core.errors import (
    ExitCode,
    SetupError,
    Stopped,
    UsageError,
    UserError,
    numbered,
    one_line,
    plural,
    print_line,
)
from ddp.core.files import correct_status, read_status
from ddp.core.ledger import NOTICED_VARIABLE
from ddp.core.options import OptionParser, option
from ddp.core.process_exit import process_exit
from ddp.core.rank_logs import RANK_LOGS_VARIABLE
from ddp.core.run_config import (
    CHECK_VARIABLE,
    ELASTIC_VARIABLE,
    RESTARTS_VARIABLE,
    RunConfig,
    check_process_count,
    output_dirs,
)
from ddp.core.signals import SignalHandler
from ddp.launcher.node_info import describe_node, gpu_names, print_table
from ddp.launcher.rendezvous import Endpoint, join_nodes, node_range
from ddp.launcher.worker_group import RunResult, WorkerGroup

NOTICE_GRACE_S = 60.0  # in addition to --timeout: another node may notice late that a worker is lost
FIRST_RESTART_INTERVAL_S, MAX_RESTART_INTERVAL_S = 1, 60
DEFAULT_RESTARTS = 3  # on several machines
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

    nnodes: str = _option("1", "number of machines; 2:4 starts with 4, and continues with 2 or 3 if some are lost",
                          metavar="N|MIN:MAX", variable="NNODES")
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
        self.min_nodes, self.max_nodes = node_range(self.nnodes)
        if self.check:  # none may be missing
            self.nnodes = str(self.max_nodes)
        if self.node_rank >= self.max_nodes:
            last = self.max_nodes - 1
            raise UsageError(f"--node-rank {self.node_rank}: with --nnodes {self.nnodes}, ranks run from 0 to {last}")
        if self.max_nodes > 1 and not self.master_addr:
            raise UsageError(f"--master-addr: needed with --nnodes {self.nnodes}; see --help")
        if self.max_restarts is None or self.check:
            self.max_restarts = DEFAULT_RESTARTS if self.max_nodes > 1 and not self.check else 0


def main(config_class: type[RunConfig]) -> NoReturn:
    """Train on this machine, and exit with the exit code of the run."""
    try:
        options, config, main_options = read_command_line(sys.argv[1:], config_class)
        if missing := [name for name in ("torch", "psutil") if importlib.util.find_spec(name) is None]:
            remedy = "run pip install -e . with it, activate the right environment, or set PYTHON"
            raise SetupError(f"{sys.executable} has no package {' and '.join(missing)}: {remedy}")
        code = NodeAgent(options, config, main_options).run()
    except UserError as error:
        code = process_exit.handle_exception(error)
    sys.exit(code)


def read_command_line(words: list[str], config_class: type[RunConfig]) -> tuple[LaunchOptions, RunConfig, list[str]]:
    """The launcher's options, those of main.py after `--`, and the latter as words. Raises UsageError."""
    layout = partial(argparse.RawDescriptionHelpFormatter, max_help_position=34, width=120)
    parser = OptionParser(formatter_class=layout, description=HELP, epilog=MORE_HELP)
    parser.usage = "./launch_node.sh [OPTIONS] [-- MAIN_OPTIONS]"
    parser.unknown_hint = "; put options of main.py after --"
    parser.sections["options"] = parser
    parser.add_options(LaunchOptions)
    if not (port := os.environ.get("MASTER_PORT") or "0").isdigit():
        raise UsageError(f"MASTER_PORT={port!r} (a Kubernetes service named `master` sets it) is no port: unset it")
    end = words.index("--") if "--" in words else len(words)
    given, main_options = vars(parser.parse_args(words[:end])), words[end + 1 :]
    config = config_class.parse(main_options)
    if config.nproc is not None:
        raise UsageError("--nproc: the launcher starts the processes; use --nproc-per-node, before the --")
    options = LaunchOptions(**given)
    if config.strict_resume and options.min_nodes < options.max_nodes:
        raise UsageError(f"--strict-resume refuses what --nnodes {options.nnodes} asks for: remove one of them")
    return options, config, main_options


class NodeAgent(SignalHandler):
    """This node, through all restarts of one run. A signal stops it; while no workers run, it raises Stopped."""

    def __init__(self, options: LaunchOptions, config: RunConfig, main_options: list[str]) -> None:
        super().__init__()
        self.pids: list[int] = []  # of the last workers
        self.when = ""  # what Stopped reports; empty while workers run
        self.install()
        self.options, self.config, self.main_options = options, config, main_options
        self.nodes = list(range(options.max_nodes))  # the ranks of those that run the workers
        self.nproc = options.nproc_per_node or len(gpu_names()) or 1
        check_process_count("--nproc-per-node", self.nproc)
        basics = {"--check": options.check, "--nnodes": options.nnodes, "--nproc-per-node": self.nproc}
        self.info = describe_node(options.node_rank, basics, config)
        self.shows_no_progress = options.node_rank > 0 and not options.check  # rank 0 shows it, on node 0

    def on_first(self) -> None:
        if self.first is not None and self.when:
            raise Stopped(f"stopped by {self.first.name} {self.when}")

    def run(self) -> int:
        """Run the workers, again if a process is lost and a restart is left; progress resets the count of restarts."""
        restarts, furthest_step, pause, noticed_at = 0, -1, 0, 0.0
        while True:
            try:
                self._connect_nodes(pause)
            except UserError as error:
                self._correct_status(error.exit_code, one_line(error))
                raise
            result = self._run_workers(self.options.max_restarts - restarts, noticed_at)
            noticed_at = result.noticed_at
            if result.saved_step > furthest_step:
                restarts, furthest_step = 0, result.saved_step
            if not result.restartable or self.first is not None or restarts >= self.options.max_restarts:
                break
            pause = min(FIRST_RESTART_INTERVAL_S * 2**restarts, MAX_RESTART_INTERVAL_S)
            restarts += 1
            reason = "a process was lost" if result.reported else result.message
            start = "from the last checkpoint, if there is one" if furthest_step < 0 else f"from step {furthest_step:,}"
            count = f"restart {restarts} of {self.options.max_restarts}"
            self._print(f"{reason} (exit code {result.exit_code}); starting again {start}, {count}, in {pause} s")
        self._correct_status(result.exit_code, result.message)
        if not result.reported:
            self._print(result.message)
        elif self.shows_no_progress and result.exit_code in (ExitCode.SUCCESS, ExitCode.STOPPED):
            self._print(result.message or "done")  # rank 0 has printed it on node 0
        return result.exit_code

    def _print(self, line: str) -> None:
        print_line(f"node {self.options.node_rank}: {line}" if self.options.max_nodes > 1 else line)

    def _connect_nodes(self, pause: int) -> None:
        """Wait until all nodes are ready to run the same; before a restart, for `pause` seconds first."""
        options = self.options
        # The other nodes of a run that continues, or that this node was a part of, may notice late that it has ended.
        states = [read_status(folder).get("state") for folder in output_dirs(self.config.output_dir)]
        late = pause > 0 or "running" in states
        grace = max(options.start_grace, self.config.timeout + NOTICE_GRACE_S if late else 0)
        self.when = "before the restart" if pause else "before training began: nothing to save"
        try:
            self.on_first()  # a signal that has arrived earlier
            time.sleep(pause)
            if options.max_nodes > 1:
                elastic = options.min_nodes < options.max_nodes and not options.check
                endpoint = Endpoint(options.master_addr, options.master_port, grace, pause > 0, elastic)
                self.nodes = join_nodes(self.info, endpoint, self.nodes)
            elif options.check:
                self.info.add_network_facts("127.0.0.1")
                print_table([self.info])
        finally:
            self.when = ""
        if self.shows_no_progress:
            here, absent = plural(self.nproc, "process", "es"), options.max_nodes - len(self.nodes)
            who = f"{numbered('node', self.nodes)} are" if absent else "all nodes are"
            self._print(f"{who} connected; {here} here; node 0 prints the progress")

    def _run_workers(self, restarts_left: int, noticed_at: float = 0.0) -> RunResult:
        """Run the workers until all of them are gone. noticed_at: when the end of those before them was noticed."""
        options = self.options
        flags = {CHECK_VARIABLE: options.check, RESTARTS_VARIABLE: restarts_left > 0}
        flags[ELASTIC_VARIABLE] = options.min_nodes < options.max_nodes
        flags[RANK_LOGS_VARIABLE] = not (options.check or self.config.evaluate)
        variables = {name: "1" for name, applies in flags.items() if applies}
        variables |= {NOTICED_VARIABLE: f"{noticed_at:.3f}"} if noticed_at else {}
        nodes = ["--standalone", "--local-addr=127.0.0.1"]
        if options.max_nodes > 1:
            timeout = min(300, max(30, options.start_grace))  # the agents have just connected: no node is missing
            rank = self.nodes.index(options.node_rank)
            nodes = [f"--nnodes={len(self.nodes)}", f"--node-rank={rank}", f"--rdzv-conf=timeout={timeout}"]
            nodes += [f"--master-addr={options.master_addr}", f"--master-port={options.master_port}"]
        # With fewer nodes, more forward passes per step keep the global batch, or come close to it from below.
        passes = options.max_nodes * self.config.grad_accum_steps // len(self.nodes)
        more = [] if passes == self.config.grad_accum_steps else [f"--grad-accum-steps={passes}"]
        words = [*self.main_options, *more]
        with closing(WorkerGroup(self.nproc, nodes, words, self.config.timeout, variables)) as group:
            group.watch(self)
            self.pids = group.pids()
            return group.result()

    def _correct_status(self, exit_code: int, message: str) -> None:
        """Record the end of a run whose rank 0 was killed: status.json would report it as running."""
        if not (self.options.check or self.config.evaluate):  # then the file belongs to another run
            for folder in output_dirs(self.config.output_dir):
                correct_status(folder, self.pids, exit_code, message)
