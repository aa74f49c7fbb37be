"""The worker processes of this node: watched, asked to stop and killed together; with torchrun, also started here.

torchrun's workers report to the agent through files. torchrun gives each a directory, that of
TORCHELASTIC_ERROR_FILE. The worker (core/process_exit.py) writes into it, and the agent only reads:

pid         the worker's process id, once it handles signals
output_dir  the output directory, once the worker has joined the others
saved       the step of the last checkpoint, after each save, so that a killed worker leaves it as well
done        empty; the worker succeeded
error.json  the worker failed: {"message": {"message": ..., "errorCode": ..., "extraInfo": {...}}}, where extraInfo has
            "cause" (false if another rank failed first) and "timestamp"

The agent sends its workers nothing but a signal: to save and exit.
"""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ddp.core.errors import ExitCode, QuitImmediately, print_line
from ddp.core.files import PROJECT_DIR
from ddp.core.host import available_cores
from ddp.core.signals import SignalHandler, is_alive, send_signal

# Neither `python -m` nor `python FILE`: those look for modules in the working directory, or next to run_torchrun.py.
START = "import sys; sys.path[0] = sys.argv.pop(1); from ddp.launcher.run_torchrun import main; main()"
# Options of torchrun, as variables: an older torchrun (2.11) ignores those that it does not know. SIGHUP is not
# there, for nohup. Slurm signals every process: torchrun would then kill workers that take more than 30 s to save.
TORCHRUN_VARIABLES = {"PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGQUIT,SIGUSR1", "PET_SHUTDOWN_TIMEOUT": "600"}
# How long torchrun may outlive its workers: if one of them failed, and if all are done: it waits for the other nodes.
FAILED_WORKERS_GRACE_S, DONE_WORKERS_GRACE_S = 5.0, 60.0
POLL_INTERVAL_S = 0.1
KILL_TIMEOUT_S = 5.0  # for the kernel to end killed processes


@dataclass
class RunResult:
    """How a worker group ended, and what the agent does about it."""

    exit_code: int
    message: str = ""
    restartable: bool = False
    reported: bool = True  # whether a worker or torchrun has printed the reason
    saved_step: int = -1  # of the last checkpoint; -1 if no worker has recorded one
    noticed_at: float = field(default=0.0, compare=False)  # when the first worker had ended, in seconds since 1970


class WorkerProcesses:
    """Processes that are watched, asked to stop and killed together: those of torchrun, or of --nproc."""

    # After the first failure the others have time to report it: seconds until they are asked to stop, and are killed.
    stop_after_s, kill_after_s = math.inf, math.inf
    failure = "another process failed"

    def __init__(self) -> None:
        self.stop_requested = False  # by the user
        self.quit_signal: signal.Signals | None = None  # a second one, which ends all at once
        self.survivors: list[int] = []  # process ids: those that were asked to stop because another process failed

    def running(self) -> list[int]:
        """The process ids of those that run; empty at the end."""
        raise NotImplementedError

    def has_failed(self) -> bool:
        """Whether one has failed, so that the others have limited time."""
        raise NotImplementedError

    def stop(self, number: int) -> None:
        """Ask all to save and exit. Not with `number`: a rank that still starts would print a traceback for SIGINT."""
        for pid in self.running():
            send_signal(pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill all, and wait until they are gone."""
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while (running := self.running()) and time.monotonic() < deadline:
            for pid in running:
                send_signal(pid, signal.SIGKILL)
            time.sleep(POLL_INTERVAL_S)

    def watch(self, requests: SignalHandler) -> None:
        """Wait until all have exited. Passes on a request to stop, once; a second one kills all."""
        failed_at = math.inf
        while running := self.running():
            if requests.first is not None and not self.stop_requested:
                self.stop_requested = True
                self.stop(requests.first)
            failed_at = min(failed_at, time.monotonic()) if self.has_failed() else math.inf
            elapsed = time.monotonic() - failed_at
            if elapsed > self.stop_after_s and not self.survivors:
                self.survivors = running
                self.stop(signal.SIGTERM)
            if elapsed > self.kill_after_s:
                who = ", ".join(map(str, running))
                print_line(f"killing processes {who}: they still run {self.kill_after_s:g} s after {self.failure}")
            self.quit_signal = requests.second
            if self.quit_signal is not None or elapsed > self.kill_after_s:
                return self.kill()
            time.sleep(POLL_INTERVAL_S)


class WorkerGroup(WorkerProcesses):
    """torchrun and its workers. None of them is left after `close`."""

    failure = "torchrun"
    noticed_at = 0.0  # as in RunResult

    def __init__(
        self, nproc: int, nodes: list[str], words: list[str], timeout: float, variables: dict[str, str]
    ) -> None:
        """Start torchrun with `nodes`, its options about the nodes, and main.py with `words`."""
        super().__init__()
        # If torchrun was killed, its workers notice that, and save. One that waits for a lost worker gives up after
        # --timeout, so those that are left then are stuck.
        self.nproc, self.kill_after_s = nproc, timeout
        self.folder = Path(tempfile.mkdtemp(prefix="ddp-node-"))
        self.idle_since = math.inf  # when the workers exited, and torchrun did not
        workers = [f"--nproc-per-node={nproc}", "--max-restarts=0", f"--log-dir={self.folder}"]
        main = str(PROJECT_DIR / "main.py")
        # Without settings of other launchers, which would apply to torchrun as well.
        foreign = re.compile("PET_|(RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_ERROR_FILE)$")
        environ = {name: value for name, value in os.environ.items() if not foreign.match(name)}
        environ["OMP_NUM_THREADS"] = environ.get("OMP_NUM_THREADS") or str(max(1, available_cores() // nproc))  # not 1
        environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # without reverse DNS, each process would print a warning
        # A session of its own: Ctrl-C in the terminal reaches only the agent, which passes it on once.
        self.torchrun = subprocess.Popen(
            [sys.executable, "-c", START, str(PROJECT_DIR), str(os.getpid()), *nodes, *workers, main, *words],
            env=environ | TORCHRUN_VARIABLES | variables,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def running(self) -> list[int]:
        pids = self.pids()
        workers = [pid for pid in pids if is_alive(pid)]
        if len(workers) < len(pids):
            self.noticed_at = self.noticed_at or time.time()
        idle = not workers and len(pids) == self.nproc
        self.idle_since = min(self.idle_since, time.monotonic()) if idle else math.inf
        grace = FAILED_WORKERS_GRACE_S if self._read("error.json") else DONE_WORKERS_GRACE_S
        if time.monotonic() - self.idle_since > grace:
            self.torchrun.kill()  # it does not exit when it cannot reach its store
        return workers if self.torchrun.poll() is not None else [self.torchrun.pid, *workers]

    def has_failed(self) -> bool:
        """Whether torchrun has exited. After a request to stop, the workers may take their time to save."""
        return self.torchrun.poll() is not None and not self.stop_requested

    def stop(self, number: int) -> None:
        """Ask the workers to save and exit. Not through torchrun, which would kill them after 30 s."""
        pids = self.pids()
        if len(pids) < self.nproc:
            self.torchrun.terminate()
        for pid in pids:
            send_signal(pid, signal.SIGTERM if number == signal.SIGHUP else number)

    def kill(self) -> None:
        """Kill everything that this group has started: also workers without a `pid` file, and DataLoader processes."""
        import psutil  # slow, and not needed to check a command line

        self.torchrun.kill()
        self.torchrun.wait()
        folder = str(self.folder)  # all have it in their environment
        for process in psutil.process_iter(["environ"]):
            if any(folder in value for value in (process.info["environ"] or {}).values()):
                send_signal(process.pid, signal.SIGKILL)
        super().kill()

    def pids(self) -> list[int]:
        """The workers that have started so far."""
        return [int(text) for text in self._read("pid") if text.isdigit()]

    def result(self) -> RunResult:
        """How it ended, after all processes are gone: the first row of `table` whose condition is true.

        A restart helps only after the loss of a process: exit code 8, a killed torchrun, or a failure that no worker
        explains. An error that main.py reports (1 to 7) would occur again, and 75 was asked for.
        """
        if self.quit_signal is not None:
            return RunResult(128 + self.quit_signal, str(QuitImmediately(self.quit_signal)), reported=False)
        reports = []
        for text in self._read("error.json"):
            with suppress(ValueError, KeyError, TypeError):  # torch's own, if the owner puts its @record on main
                error = json.loads(text)["message"]
                info = error["extraInfo"]
                reports.append((not info["cause"], int(info["timestamp"]), error["errorCode"], error["message"]))
        *_, reported, why = min(reports, default=(0, ""))  # the root cause
        # Of our process around torchrun (run_torchrun.py): 8 if a worker was killed, 75 if torchrun was signalled.
        code, lost = self.torchrun.returncode, ExitCode.PEER_LOST
        # If a worker is killed, torchrun stops the others, and they exit with 75 as if the user had asked for that.
        only_stops = not self.stop_requested and all(report[2] == ExitCode.STOPPED for report in reports)
        stopping = self.stop_requested or code == ExitCode.STOPPED
        early = "stopped before training began: nothing to save"
        cut_short = "the processes were killed before they had stopped"
        table = [
            (code == 0 or len(self._read("done")) == self.nproc, RunResult(0)),  # whatever torchrun was asked meanwhile
            (code == lost and only_stops, RunResult(lost, "a process was lost", restartable=True)),
            (reports, RunResult(reported, why, restartable=reported == lost)),  # also a stop that only workers know of
            (stopping and len(self.pids()) < self.nproc, RunResult(ExitCode.STOPPED, early, reported=False)),
            (stopping, RunResult(lost, cut_short, reported=False)),
            (code < 0, RunResult(lost, "torchrun was killed", restartable=True, reported=False)),
            (True, RunResult(code, "a process failed", restartable=True, reported=False)),
        ]
        result = next(result for applies, result in table if applies)
        result.saved_step = max(map(int, self._read("saved")), default=-1)
        result.noticed_at = self.noticed_at or time.time()
        return result

    def _read(self, name: str) -> list[str]:
        """The content of that file, of each worker that has it."""
        return [file.read_text() for file in self.folder.glob(f"*/*/*/{name}")]
