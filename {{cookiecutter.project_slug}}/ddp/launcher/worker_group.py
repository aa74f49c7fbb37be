"""torchrun and its workers on this node: start them, watch them, stop them, collect what they left.

A worker reports to its agent through files. torchrun gives each worker a directory, the one of TORCHELASTIC_ERROR_FILE;
the worker (core/process_exit.py) writes into it, and the agent only reads:

pid         the worker's process id, once it handles signals
output_dir  the output directory, once the worker has joined the others
saved       the step of the last checkpoint, after each save, so that a killed worker leaves it as well
done        empty; the worker succeeded
error.json  the worker failed: {"message": {"message": ..., "errorCode": ..., "extraInfo": {...}}}, where extraInfo has
            "cause" (false if another rank failed first), "timestamp", and "saved" as above

The agent sends its workers nothing but a signal: to save and exit.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from ddp.core.errors import ExitCode, print_line
from ddp.core.signals import is_alive, send_signal
from ddp.core.source_hash import PROJECT_DIR
from ddp.launcher.options import LaunchOptions
from ddp.launcher.restart_policy import GroupEnd, RunResult

# Neither `python -m` nor `python FILE`: those look for modules in the working directory, or next to run_torchrun.py.
START = "import sys; sys.path[0] = sys.argv.pop(1); from ddp.launcher.run_torchrun import main; main()"
# Options of torchrun, as variables: an old torchrun (2.8, 2.11) ignores those that it does not know. SIGHUP is not
# there, for nohup. Slurm signals every process: torchrun would then kill workers that take more than 30 s to save.
TORCHRUN_VARIABLES = {"PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGQUIT,SIGUSR1", "PET_SHUTDOWN_TIMEOUT": "600"}
OTHER_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE")
# How long torchrun may outlive its workers: if one of them failed, and if all are done: it waits for the other nodes.
FAILED_WORKERS_GRACE_S, DONE_WORKERS_GRACE_S = 5.0, 60.0
WORKER_POLL_INTERVAL_S = 0.1


class WorkerGroup:
    """torchrun and its workers. As a context manager: none of them is left when the block ends."""

    def __init__(self, options: LaunchOptions, main_options: list[str], timeout: float, **variables: str) -> None:
        self.nproc, self.timeout = options.nproc_per_node, timeout
        self.folder = Path(tempfile.mkdtemp(prefix="ddp-node-"))
        self.stop_requested = self.torchrun_hung = False
        self.exited_at: float | None = None  # when torchrun exited
        self.idle_since: float | None = None  # when the workers exited, and torchrun did not
        # A session of its own: Ctrl-C in the terminal reaches only the agent, which passes it on once.
        self.torchrun = subprocess.Popen(
            [sys.executable, "-c", START, str(PROJECT_DIR), str(os.getpid()), *self._arguments(options), *main_options],
            env=_environment(self.nproc) | variables,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _arguments(self, options: LaunchOptions) -> list[str]:
        nodes = ["--standalone", "--local-addr=127.0.0.1"]
        if options.nnodes > 1:
            timeout = min(300, max(30, options.start_grace))  # the agents have just connected: no node is missing
            nodes = [f"--nnodes={options.nnodes}", f"--node-rank={options.node_rank}", f"--rdzv-conf=timeout={timeout}"]
            nodes += [f"--master-addr={options.master_addr}", f"--master-port={options.master_port}"]
        workers = [f"--nproc-per-node={self.nproc}", "--max-restarts=0", f"--log-dir={self.folder}"]
        return [*nodes, *workers, str(PROJECT_DIR / "main.py")]

    def __enter__(self) -> "WorkerGroup":
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- while it runs ----------------------------------------------------------------------------------------------

    def has_exited(self) -> bool:
        """Whether torchrun and all its workers are gone. Kills those that hang."""
        running = [pid for pid in self.pids() if is_alive(pid)]
        if self.torchrun.poll() is None:
            self._kill_hung_torchrun(workers_run=bool(running))
            return False
        self.exited_at = self.exited_at or time.monotonic()
        # If torchrun was killed, its workers notice that, and save. One that waits for a lost worker gives up after
        # --timeout, so those that are left then are stuck. But after a request to stop, saving may take its time.
        if running and not self.stop_requested and time.monotonic() - self.exited_at > self.timeout:
            who = ", ".join(map(str, running))
            print_line(f"killing processes {who}: they still run {self.timeout:g} s after torchrun")
            return True
        return not running

    def _kill_hung_torchrun(self, workers_run: bool) -> None:
        """torchrun does not exit when it cannot reach its store."""
        if workers_run or len(self.pids()) < self.nproc:
            self.idle_since = None
            return
        self.idle_since = self.idle_since or time.monotonic()
        failed = bool(self._errors())
        if time.monotonic() - self.idle_since > (FAILED_WORKERS_GRACE_S if failed else DONE_WORKERS_GRACE_S):
            # After a failure it would have exited at once; a worker that it has not waited for would be a zombie.
            self.torchrun_hung = not failed and not any(psutil.pid_exists(pid) for pid in self.pids())
            self.torchrun.kill()
            self.torchrun.wait()

    def stop(self, number: signal.Signals) -> None:
        """Ask the workers to save and exit. Not through torchrun, which would kill them after 30 s."""
        self.stop_requested = True
        pids = self.pids()
        if len(pids) < self.nproc:
            self.torchrun.terminate()
        for pid in pids:
            send_signal(pid, signal.SIGTERM if number == signal.SIGHUP else number)

    def kill(self) -> None:
        """Kill everything that this group has started."""
        pids = self.pids()
        if self.torchrun.poll() is None:
            self.torchrun.kill()
        self.torchrun.wait()
        for pid in {*pids, *self.pids(), *self._stray_pids()}:
            send_signal(pid, signal.SIGKILL)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # a worker leads a session; its DataLoader processes are in it
        for _ in range(50):
            if not any(is_alive(pid) for pid in pids):
                return
            time.sleep(WORKER_POLL_INTERVAL_S)

    def _stray_pids(self) -> list[int]:
        """Processes with this group's directory in their environment: also those without a `pid` file."""
        folder = str(self.folder)
        found = [(process.pid, process.info["environ"] or {}) for process in psutil.process_iter(["environ"])]
        return [pid for pid, environ in found if any(folder in value for value in environ.values())]

    # ---- what the workers wrote -------------------------------------------------------------------------------------

    def pids(self) -> list[int]:
        """The workers that have started so far."""
        return [int(text) for text in self._read("pid") if text.isdigit()]

    def output_dir(self) -> Path | None:
        """Where the run writes; None if no worker has got that far."""
        return next((Path(text) for text in self._read("output_dir")), None)

    def result(self) -> RunResult:
        """How it ended, after all processes are gone."""
        errors, end = self._errors(), self._group_end()
        result = replace(end.value, saved_step=self._saved_step(), pids=self.pids())
        if end in (GroupEnd.LOSS_REPORTED, GroupEnd.WORKER_REPORTED):
            result.exit_code, result.message = errors[0]["exit_code"], errors[0]["message"]
        elif end is GroupEnd.UNEXPLAINED:
            result.exit_code = self.torchrun.returncode
        return result

    def _group_end(self) -> GroupEnd:
        """The first case that applies. restart_policy.py has what follows from it."""
        # Of our process around torchrun (run_torchrun.py): 8 if a worker was killed, 75 if torchrun was signalled.
        torchrun_code, codes = self.torchrun.returncode, [error["exit_code"] for error in self._errors()]
        # If a worker is killed, torchrun stops the others, and they exit with 75 as if the user had asked for that.
        only_stops = not self.stop_requested and all(code == ExitCode.STOPPED for code in codes)  # or no code at all
        stopping = self.stop_requested or torchrun_code == ExitCode.STOPPED
        cases = (
            (len(self._read("done")) == self.nproc, GroupEnd.SUCCEEDED),  # whatever torchrun was asked meanwhile
            (torchrun_code == ExitCode.PEER_LOST and only_stops, GroupEnd.WORKER_KILLED),
            (torchrun_code != 0 and codes[:1] == [ExitCode.PEER_LOST], GroupEnd.LOSS_REPORTED),
            (torchrun_code != 0 and codes, GroupEnd.WORKER_REPORTED),
            (torchrun_code == 0 or self.torchrun_hung, GroupEnd.SUCCEEDED),  # hung: after all workers were done
            (stopping and len(self.pids()) < self.nproc, GroupEnd.STOPPED_EARLY),
            (stopping, GroupEnd.STOP_CUT_SHORT),
            (torchrun_code < 0, GroupEnd.TORCHRUN_KILLED),
            (True, GroupEnd.UNEXPLAINED),
        )
        return next(end for applies, end in cases if applies)

    def _saved_step(self) -> int | None:
        """The step of the last checkpoint, as far as workers recorded it."""
        steps = [int(text) for text in self._read("saved") if text.isdigit()]
        told = [error["saved"] for error in self._errors() if isinstance(error.get("saved"), int)]
        return max([*steps, *told], default=None)

    def _errors(self) -> list[dict[str, Any]]:
        """What the workers that failed wrote, the root cause first."""
        found = []
        for text in self._read("error.json"):
            with suppress(ValueError, KeyError, TypeError):
                error = json.loads(text)["message"]
                known = {"exit_code": int(error["errorCode"]), "message": error["message"]}
                found.append({**error["extraInfo"], **known})
        return sorted(found, key=lambda error: (not error.get("cause", True), float(error.get("timestamp", 0))))

    def _read(self, name: str) -> list[str]:
        """The content of that file, of each worker that has it."""
        found = []
        for file in self.folder.glob(f"*/*/*/{name}"):
            with suppress(OSError, ValueError):
                found.append(file.read_text())
        return found


def _environment(nproc: int) -> dict[str, str]:
    """The variables of torchrun, without settings of other launchers, which would apply to it."""
    foreign = [name for name in os.environ if name.startswith("PET_") or name in OTHER_LAUNCHERS]
    kept = {name: value for name, value in os.environ.items() if name not in foreign}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    kept["OMP_NUM_THREADS"] = kept.get("OMP_NUM_THREADS") or str(max(1, cores // nproc))  # torchrun would set 1
    kept.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # without reverse DNS, each process would print a warning
    return kept | TORCHRUN_VARIABLES
