"""What launch_node.sh runs: its command line, and the agent of one node, which runs the workers with torchrun.

After the loss of a process, the nodes meet again (node_rendezvous.py), and main.py resumes from the newest checkpoint.
"""

import argparse
import importlib.util
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ddp.core.errors import (
    ExitCode,
    PeerLost,
    QuitImmediately,
    SetupError,
    Stopped,
    UsageError,
    exit_code_of,
    numbered,
    one_line,
    plural,
    print_line,
)
from ddp.core.files import PROJECT_DIR, correct_status, read_status, temporary_directory
from ddp.core.host import available_cores
from ddp.core.options import OptionParser, option
from ddp.core.parts import of_parts
from ddp.core.process_exit import exit_process, open_streams, process_exit
from ddp.core.rank_logs import RANK_LOGS_VARIABLE, rank_log_path
from ddp.core.run_config import ELASTIC_VARIABLE, NOTICED_VARIABLE, RESTARTS_VARIABLE, RunConfig, check_process_count
from ddp.core.signals import SignalHandler, adopt_orphans, children, is_alive, kill_children, killed_by, send_signal
from ddp.launcher.node_record import FINAL, LOST, RoundEnd, RunEnded, round_end, this_node

NOTICE_GRACE_S = 60.0  # in addition to --timeout: another node may notice late that a worker is lost
FIRST_RESTART_INTERVAL_S, MAX_RESTART_INTERVAL_S = 1, 60
DEFAULT_RESTARTS = 3  # on several machines
POLL_INTERVAL_S = 0.1
FOREIGN = re.compile("PET_|((LOCAL_)?RANK|WORLD_SIZE|MASTER_(ADDR|PORT)|NNODES|NPROC_PER_NODE|TORCHELASTIC_.*)$")
OTHER_NODES_GRACE_S = 60.0  # how long torchrun may wait for others once all workers here are done, or after a signal
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
class LaunchOptions(*of_parts("LaunchOptions")):  # type: ignore[misc]
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
# fmt: on

    def __post_init__(self) -> None:
        """Refuse options that contradict each other, and set those that follow from others."""
        self.master_addr = self.master_addr.strip("[]")  # around an IPv6 address
        self.min_nodes, self.max_nodes = node_range(self.nnodes)
        scripts = [part.script(self) for part in of_parts("LaunchOptions")]
        self.script = next(filter(None, scripts), "main.py")  # what the workers run
        self.trains = self.script == "main.py"
        if not self.trains:  # none may be missing
            self.nnodes, self.min_nodes = str(self.max_nodes), self.max_nodes
        if self.node_rank >= self.max_nodes:
            last = self.max_nodes - 1
            raise UsageError(f"--node-rank {self.node_rank}: with --nnodes {self.nnodes}, ranks run from 0 to {last}")
        if self.max_nodes > 1 and not self.master_addr:
            raise UsageError(f"--master-addr: needed with --nnodes {self.nnodes}; see --help")
        if self.max_nodes == 1:
            self.master_addr, self.master_port = "127.0.0.1", 0  # any free one
        if self.max_restarts is None or not self.trains:
            self.max_restarts = DEFAULT_RESTARTS if self.max_nodes > 1 and self.trains else 0


def main(config_class: type[RunConfig]) -> NoReturn:
    """Train on this machine, and exit with the exit code of the run."""
    open_streams()
    try:
        options, config, main_options = read_command_line(sys.argv[1:], config_class)
        if missing := [name for name in ("torch", "psutil") if importlib.util.find_spec(name) is None]:
            remedy = "run pip install -e . with it, activate the right environment, or set PYTHON"
            raise SetupError(f"{sys.executable} has no package {' and '.join(missing)}: {remedy}")
        code = NodeAgent(options, config, main_options).run()
    except Exception as error:
        code = process_exit.handle_exception(error)
    exit_process(code)  # a thread may wait for a store without end


def node_range(text: str) -> tuple[int, int]:
    """The smallest and the largest number of nodes: `4` gives 4 and 4, `2:4` gives 2 and 4. Raises UsageError."""
    found = re.fullmatch(r"(?:([0-9]{1,6}):)?([0-9]{1,6})", text)
    most = int(found[2]) if found else 0
    least = int(found[1] or most) if found else 0
    if not 1 <= least <= most:
        raise UsageError(f"--nnodes: {text!r} must be an integer >= 1, or MIN:MAX, such as 2:4")
    return least, most


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
    """This node, through all rounds of one run: torchrun's agent in a thread, and signals in the main thread.

    torchrun starts and watches the workers, and calls `end_round` and `begin_round` through node_rendezvous.py. Between
    them, `end_of_run` in node_record.py decides whether another round begins.
    """

    def __init__(self, options: LaunchOptions, config: RunConfig, main_options: list[str]) -> None:
        super().__init__()
        self.options, self.config, self.main_options = options, config, main_options
        self.is_training = options.trains and not config.evaluate
        self.folder = Path()  # of the files that the workers write
        self.stop, self.ended = threading.Event(), threading.Event()  # stop: asked by a signal
        self.error: BaseException | None = None  # of the thread, once it has ended
        self.rendezvous: Any = None
        self.nproc, self.running = 0, False  # running: whether torchrun runs workers, or is about to
        self.pids, self.signalled = set[int](), set[int]()  # pids: of all workers so far
        self.others: list[Any] = []  # processes that were there before, as of a shell that became this one
        self.killed: tuple[int, int, int] | None = None  # the first worker that failed: exit code, local rank, pid
        self.restarts, self.furthest_step, self.pause, self.noticed_at = 0, -1, 0, 0.0
        self.exhausted = False  # whether no restart is left
        self.shows_no_progress = options.node_rank > 0 and options.trains  # rank 0 shows it, on node 0

    # ---- the main thread --------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run the workers, again if a process is lost and a restart is left. Returns the exit code."""
        self.install()
        adopt_orphans()
        self.others = children()
        self.temporary = temporary_directory("ddp-node-")
        self.folder = Path(self.temporary.name)
        try:
            threading.Thread(target=self._run_torchrun, name="torchrun", daemon=True).start()
            self._wait()
            if self.error:
                raise self.error
            end = RoundEnd(ExitCode.SUCCESS)
        except RunEnded as error:
            end = error.end
        except BaseException as error:
            self._close(exit_code_of(error), one_line(error))
            raise
        self._close(end.exit_code, end.message)
        if not end.reported:
            self._print(end.message)
        elif self.shows_no_progress and end.exit_code in (ExitCode.SUCCESS, ExitCode.STOPPED):
            self._print(end.message or "done")  # rank 0 has printed it on node 0
        return end.exit_code

    def _wait(self) -> None:
        """Wait until torchrun has ended. Passes on a signal, once to each worker; a second one ends all."""
        since = time.monotonic()
        while not self.ended.wait(POLL_INTERVAL_S):
            if self.second is not None:
                raise QuitImmediately(self.second)
            if self.first is not None:
                self.stop.set()
                self._pass_on(self.first)
            pids = [int(text) for text in self._read("pid")]
            starting_or_alive = self.running and (len(pids) < self.nproc or any(map(is_alive, pids)))
            if starting_or_alive or not (self.running or self.first):
                since = time.monotonic()
            elif time.monotonic() - since > OTHER_NODES_GRACE_S:
                if len(self._read("done")) < len(pids):
                    raise PeerLost("the processes here have ended, and those of another node have not")
                if not self.running and self.first is not None:
                    raise Stopped(f"stopped by {self.first.name}")
                return

    def _pass_on(self, number: int) -> None:
        """Ask the workers to save and exit."""
        handle = {int(text) for text in self._read("pid")}
        for child in children(*self.others):
            if child.pid not in self.signalled:
                self.signalled.add(child.pid)
                # Others would print a traceback for SIGINT.
                send_signal(child.pid, number if child.pid in handle and number != signal.SIGHUP else signal.SIGTERM)

    def _close(self, exit_code: int, message: str) -> None:
        """Kill what the workers have left, and wait until it is gone. If that was rank 0, record the end of the run."""
        self.stop.set()
        kill_children(*self.others)
        pids = self.pids | {int(text) for text in self._read("pid")}
        self.temporary.cleanup()
        if self.is_training:  # otherwise status.json belongs to another run
            for folder in self.config.output_dirs():
                correct_status(folder, pids, exit_code, message)

    def _print(self, line: str) -> None:
        print_line(f"node {self.options.node_rank}: {line}" if self.options.max_nodes > 1 else line)

    # ---- the thread of torchrun's agent -----------------------------------------------------------------------------

    def _run_torchrun(self) -> None:
        """Set up what torchrun needs, and run it."""
        try:
            for name in filter(FOREIGN.match, list(os.environ)):  # settings of other launchers would apply as well
                del os.environ[name]
            level = os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # a store out of reach would print a page
            os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"  # ranks follow from --nproc-per-node: no need to ask
            from ddp.launcher.node_rendezvous import NodeRendezvous, gpu_count, run_torchrun

            os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR" if level == "FATAL" else level  # of the workers: no warnings
            options, self.nproc = self.options, self.options.nproc_per_node or gpu_count() or 1
            check_process_count("--nproc-per-node", self.nproc)
            cores = max(1, available_cores() // self.nproc)  # torchrun's default is 1
            os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(cores)
            self.rendezvous = NodeRendezvous(this_node(options, self.nproc, self.config), self)
            workers = [f"--nproc-per-node={self.nproc}", f"--log-dir={self.folder}"]
            run_torchrun(self.rendezvous, [*workers, str(PROJECT_DIR / options.script), *self.main_options])
        except BaseException as error:
            self.error = error
        finally:
            self.ended.set()

    def grace(self, restart: bool) -> float:
        """For how many seconds the nodes wait for each other. Those of a run may notice late that it has ended."""
        states = [read_status(folder).get("state") for folder in self.config.output_dirs()]
        late = restart or "running" in states  # of a run that this node was a part of
        return max(self.options.start_grace, self.config.timeout + NOTICE_GRACE_S if late else 0)

    def wait(self, seconds: float, last: RoundEnd | None) -> None:
        """Wait between two rounds. Raises Stopped if this node is asked to stop, unless the run has ended here."""
        if last and last.outcome == FINAL:
            time.sleep(seconds)
        elif self.stop.wait(seconds) and self.first:
            when = "before the restart" if last else "before training began: nothing to save"
            raise Stopped(f"stopped by {self.first.name} {when}")

    def begin_round(self, nodes: list[int], restarts: int) -> None:
        """torchrun is about to start the workers; the ranks of all nodes that do, and what node 0 counts."""
        options, self.restarts, self.running, self.killed = self.options, restarts, True, None
        variables = {
            RESTARTS_VARIABLE: options.max_restarts > restarts,
            ELASTIC_VARIABLE: (options.min_nodes < options.max_nodes) * options.max_nodes * self.nproc,
            RANK_LOGS_VARIABLE: self.is_training,
            NOTICED_VARIABLE: self.noticed_at,
        }
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update({name: str(value) for name, value in variables.items() if value})
        if self.shows_no_progress:
            here, absent = plural(self.nproc, "process", "es"), options.max_nodes - len(nodes)
            who = f"{numbered('node', nodes)} are" if absent else "all nodes are"
            self._print(f"{who} connected; {here} here; node 0 prints the progress")

    def end_round(self) -> RoundEnd:
        """The workers are gone: how they ended. Prints why they start again, and counts restarts."""
        self.running, self.noticed_at = False, time.time()
        files = {name: self._read(name) for name in ("pid", "output_dir", "saved", "done", "error.json")}
        self.pids |= {int(text) for text in files["pid"]}
        if self.killed and not self.stop.is_set():
            self._report_killed(*self.killed, files["output_dir"])
        lost = bool(self.killed or self.rendezvous.num_nodes_waiting())
        end = round_end(files, self.nproc, self.first is not None, lost)
        kill_children(*self.others)  # what the workers have left
        for folder in self.folder.iterdir():
            shutil.rmtree(folder, ignore_errors=True)
        self.exhausted, self.restarts = self.restarts >= self.options.max_restarts, self.restarts + 1
        self.count_saved(end.saved_step)
        self.pause = min(FIRST_RESTART_INTERVAL_S * 2 ** (self.restarts - 1), MAX_RESTART_INTERVAL_S)
        if end.outcome == LOST and self.options.max_restarts:
            step, reason = self.furthest_step, "a process was lost" if end.reported else end.message
            start = "from the last checkpoint, if there is one" if step < 0 else f"from step {step:,}"
            again = f"starting again {start}, restart {self.restarts} of {self.options.max_restarts}, in {self.pause} s"
            self._print(f"{reason} (exit code {end.exit_code}); {'no restart is left' if self.exhausted else again}")
            end.reported = True
        return end

    def count_saved(self, step: int) -> None:
        """A checkpoint of `step` is on disk: if it is new, restarts are counted anew."""
        if step > self.furthest_step:
            self.furthest_step, self.restarts, self.exhausted = step, 1, self.options.max_restarts == 0

    def _report_killed(self, exit_code: int, local_rank: int, pid: int, folders: list[str]) -> None:
        """A worker was killed: print it, and tell the other workers."""
        rank = [*self.rendezvous.nodes].index(self.options.node_rank) * self.nproc + local_rank
        how = killed_by(exit_code)
        log = rank_log_path(folders[0], rank) if folders else None
        if log and "SIGKILL" not in how and log.exists():
            how += f"; its last output is in {log}"
        print_line(f"rank {rank}: process {pid} on {socket.gethostname()} was {how}")
        if len(self.rendezvous.nodes) > 1:
            self.rendezvous.tell_workers(rank)

    def _read(self, name: str) -> list[str]:
        """The content of that file, of each worker of this round that has it."""
        found = []
        with suppress(OSError):  # after a round they are deleted
            for file in self.folder.glob(f"*/*/*/{name}"):
                found.append(os.fsdecode(file.read_bytes()))
        return found
