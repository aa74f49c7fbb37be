"""What launch_node.sh runs: the agent of one node, which connects to the other nodes, and runs and restarts workers.

torchrun's own --max-restarts is not used: restarted workers read stale keys from its store (pytorch issue 135712).
Instead all nodes end their workers and connect again, and main.py resumes from the newest checkpoint.
"""

import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from ddp.core.errors import (
    ExitCode,
    QuitImmediately,
    SetupError,
    Stopped,
    UserError,
    one_line,
    plural,
    print_line,
    report_error,
)
from ddp.core.files import correct_status, read_status
from ddp.core.host import interface_of
from ddp.core.rank_logs import RANK_LOGS_VARIABLE
from ddp.core.run_config import CHECK_VARIABLE, RESTARTS_VARIABLE, RunConfig, check_process_count, output_dirs
from ddp.core.signals import SignalHandler, is_alive
from ddp.launcher.launch_options import LaunchOptions, read_command_line
from ddp.launcher.node_info import describe_node, print_table, visible_gpus
from ddp.launcher.rendezvous import Endpoint, join_nodes
from ddp.launcher.worker_group import RunResult, WorkerGroup

NOTICE_GRACE_S = 60.0  # in addition to --timeout: another node may notice late that a worker is lost
FIRST_RESTART_INTERVAL_S, MAX_RESTART_INTERVAL_S = 3, 60


def main(config_class: type[RunConfig]) -> NoReturn:
    """Train on this machine, and exit with the exit code of the run."""
    try:
        options, config, main_options = read_command_line(sys.argv[1:], config_class)
        if missing := [name for name in ("torch", "psutil") if importlib.util.find_spec(name) is None]:
            remedy = "run pip install -e . with it, activate the right environment, or set PYTHON"
            raise SetupError(f"{sys.executable} has no package {' and '.join(missing)}: {remedy}")
        code = NodeAgent(options, config, main_options).run()
    except UserError as error:
        report_error(error)
        code = error.exit_code
    sys.exit(code)


class StopRequests(SignalHandler):
    """Signals that ask this node to stop. Between worker groups they raise Stopped."""

    raise_with: str | None = None

    def on_first(self) -> None:
        if self.first is not None and self.raise_with is not None:
            raise Stopped(f"stopped by {self.first.name} {self.raise_with}")

    @contextmanager
    def raising(self, message: str) -> Iterator[None]:
        """Raise Stopped within the block: nothing runs that has to end in an orderly way."""
        self.raise_with = message
        try:
            self.on_first()
            yield
        finally:
            self.raise_with = None


class NodeAgent:
    """This node, through all restarts of one run."""

    def __init__(self, options: LaunchOptions, config: RunConfig, main_options: list[str]) -> None:
        self.requests = StopRequests()
        self.requests.install()
        self.options, self.config, self.main_options = options, config, main_options
        options.nproc_per_node = options.nproc_per_node or visible_gpus() or 1
        check_process_count("--nproc-per-node", options.nproc_per_node)
        self.info = describe_node(options, config)
        self.restarts, self.furthest_step = 0, -1  # restarts without progress
        # The name of the default one follows from the data and the model: the workers report it.
        self.output_dir = Path(config.output_dir) if config.output_dir else None
        self.shows_no_progress = options.node_rank > 0 and not options.check  # rank 0 shows it, on node 0

    def run(self) -> int:
        """Run the workers, again if a process is lost and a restart is left; progress resets the count of restarts."""
        result = self._run_workers()
        while result.restartable and self.requests.first is None:
            saved = result.saved_step
            if saved is None and self.output_dir is not None:  # the workers could not record it
                found = read_status(self.output_dir).get("saved")
                saved = found if isinstance(found, int) else None
            if saved is not None and saved > self.furthest_step:
                self.restarts, self.furthest_step = 0, saved
            if self.restarts >= self.options.max_restarts:
                break
            pause = min(FIRST_RESTART_INTERVAL_S * 2**self.restarts, MAX_RESTART_INTERVAL_S)
            self.restarts += 1
            start = "from the last checkpoint, if there is one" if saved is None else f"from step {saved:,}"
            reason = "a process was lost" if result.reported else result.message
            count = f"restart {self.restarts} of {self.options.max_restarts}"
            self._print(f"{reason} (exit code {result.exit_code}); starting again {start}, {count}, in {pause} s")
            try:
                with self.requests.raising("before the restart"):
                    time.sleep(pause)
                result = self._run_workers(restart=True)
            except UserError as error:
                self._correct_status(replace(result, exit_code=error.exit_code, message=one_line(error)))
                raise
        if not result.reported:
            self._print(result.message)
        elif self.shows_no_progress and result.exit_code in (ExitCode.SUCCESS, ExitCode.STOPPED):
            self._print(result.message or "done")  # rank 0 has printed it on node 0
        self._correct_status(result)
        return result.exit_code

    def _print(self, line: str) -> None:
        print_line(f"node {self.options.node_rank}: {line}" if self.options.nnodes > 1 else line)

    def _run_workers(self, restart: bool = False) -> RunResult:
        """Connect to the other nodes, run the workers, and wait until all of them are gone."""

        variables = self._connect_nodes(restart)
        if self.options.check:
            variables[CHECK_VARIABLE] = "1"
        if left := self.options.max_restarts - self.restarts:
            variables[RESTARTS_VARIABLE] = str(left)
        if not (self.options.check or self.config.evaluate):
            variables[RANK_LOGS_VARIABLE] = "1"
        with closing(WorkerGroup(self.options, self.main_options, self.config.timeout, variables)) as group:
            group.watch(self.requests)
            self.output_dir = self.output_dir or group.output_dir()
            if self.requests.second is None:
                return group.result()
            quit = QuitImmediately(self.requests.second)
            return RunResult(quit.exit_code, str(quit), reported=False)

    def _connect_nodes(self, restart: bool) -> dict[str, str]:
        """Wait until all nodes are ready. Returns the variables that follow from the network."""
        options = self.options
        if options.nnodes == 1:
            if options.check:
                self.info.add_network_facts("127.0.0.1")
                print_table([self.info])
            return {}
        # The other nodes of a run that continues, or that this node was a part of, may notice late that it has ended.
        states = [read_status(folder).get("state") for folder in output_dirs(self.config.output_dir)]
        late = self.config.timeout + NOTICE_GRACE_S if restart or "running" in states else 0
        grace = max(options.start_grace, late)
        with self.requests.raising("before training began: nothing to save"):
            address = join_nodes(self.info, Endpoint(options.master_addr, options.master_port, grace, restart))
        if self.shows_no_progress:
            processes = plural(options.nproc_per_node, "process", "es")
            self._print(f"all nodes are connected; {processes} here; node 0 prints the progress")
        # By default gloo uses the interface of the host's name, which is often loopback. NCCL needs no help: it avoids
        # loopback, prefers InfiniBand, and may use several interfaces, which one name would prevent.
        interface = os.environ.get("GLOO_SOCKET_IFNAME") or interface_of(address)
        return {"GLOO_SOCKET_IFNAME": interface} if interface else {}

    def _correct_status(self, result: RunResult) -> None:
        """Record the end of a run whose rank 0 was killed: status.json would report it as running."""
        if self.options.check or self.config.evaluate or self.output_dir is None:
            return  # the file belongs to another run, or there is none
        pid = read_status(self.output_dir).get("pid")
        if isinstance(pid, int) and not is_alive(pid):
            correct_status(self.output_dir, [pid], result.exit_code, result.message)
