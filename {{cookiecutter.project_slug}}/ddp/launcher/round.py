"""One round of a node: torchrun, its workers, and what they have left when all are gone. No torch in here.

torchrun gives each worker a folder: the one of TORCHELASTIC_ERROR_FILE. A worker writes `pid` there once it can take
signals, and `error.json` at its end, when its exit code is not 0.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp.errors import say
from ddp.fingerprint import PROJECT

# Neither `python -m` nor `python FILE`: those find modules in the working folder, or `ddp/profile.py` as `profile`.
START = "import sys; sys.path[0] = sys.argv.pop(1); from ddp.launcher.torchrun import main; main()"
# Options of torchrun, as variables: a torchrun that is too old for them (2.8, 2.11) does not mind. SIGHUP is left out,
# for nohup. Slurm signals every process: torchrun would then kill workers that take more than 30 s to save.
TORCHRUN_OPTIONS = {"PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGQUIT,SIGUSR1", "PET_SHUTDOWN_TIMEOUT": "600"}
HANGS_S = 5.0  # so long torchrun may outlive workers of which one has failed,
BARRIER_S = 60.0  # and so long workers that are done: it waits for the other nodes
POLL_S = 0.1


@dataclass
class Outcome:
    """How a round ended, on this node."""

    code: int
    try_again: bool = False
    saved: int | None = None  # the step of the last checkpoint, if a worker said so
    why: str = ""
    said: bool = True  # whether a worker, or torchrun, has said why
    pids: list[int] = field(default_factory=list)


class Round:
    """torchrun and its workers. As a context manager: on the way out, none of them is left."""

    def __init__(self, arguments: argparse.Namespace, timeout: float, environment: dict[str, str]) -> None:
        self.nproc = arguments.nproc
        self.timeout = timeout
        self.folder = Path(tempfile.mkdtemp(prefix="ddp-node-"))
        self.stopping = False
        self.ended: float | None = None  # since when torchrun is gone
        self.idle: float | None = None  # since when its workers are gone, and it is not
        self.waited_in_vain = False  # it had to be killed, and had seen all of them succeed
        environment.pop("TORCHELASTIC_ERROR_FILE", None)
        environment |= TORCHRUN_OPTIONS
        # Else each process on a network without reverse look-up warns of that.
        environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        command = [sys.executable, "-c", START, str(PROJECT), str(os.getpid()), *self._options(arguments)]
        # A session of its own: Ctrl-C in the terminal reaches only the launcher, which passes it on once.
        self.torchrun = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)

    def _options(self, arguments: argparse.Namespace) -> list[str]:
        if arguments.nnodes == 1:
            where = ["--standalone", "--local-addr=127.0.0.1"]
        else:
            where = [f"--nnodes={arguments.nnodes}", f"--node-rank={arguments.node_rank}"]
            where += [f"--master-addr={arguments.master_addr}", f"--master-port={arguments.master_port}"]
            where += [
                f"--rdzv-conf=timeout={min(300, max(30, arguments.grace))}"
            ]  # they have just met: nobody is missing
        each = [f"--nproc-per-node={arguments.nproc}", "--max-restarts=0", f"--log-dir={self.folder}"]
        return [*where, *each, str(PROJECT / "main.py"), *arguments.options]

    def __enter__(self) -> Round:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- while it runs ----------------------------------------------------------------------------------------------

    def pids(self) -> list[int]:
        """Of the workers that have started so far."""
        found = []
        for file in self.folder.glob("*/*/*/pid"):
            with suppress(OSError, ValueError):
                found.append(int(file.read_text()))
        return found

    def over(self) -> bool:
        """Whether torchrun and all its workers are gone. Ends those that will not go by themselves."""
        working = [pid for pid in self.pids() if alive(pid)]
        if self.torchrun.poll() is None:
            self._see_whether_it_hangs(bool(working))
            return False
        self.ended = self.ended or time.monotonic()
        # torchrun was killed, and its workers know: they save. One that waits in vain for another gives up after
        # --timeout: who is still there then will not leave by itself. But whoever was asked to stop may take its time.
        if working and not self.stopping and time.monotonic() - self.ended > self.timeout:
            who = ", ".join(map(str, working))
            say(f"processes {who} have not ended within {self.timeout:g} s of torchrun: killing them")
            return True
        return not working

    def _see_whether_it_hangs(self, working: bool) -> None:
        """torchrun stays when its store is out of reach."""
        if working or len(self.pids()) < self.nproc:
            self.idle = None
            return
        self.idle = self.idle or time.monotonic()
        failed = self.reports()
        if time.monotonic() - self.idle > (HANGS_S if failed else BARRIER_S):
            # Of a failure it would have gone at once; and a worker that it had not waited for would be a zombie.
            self.waited_in_vain = not failed and not any(exists(pid) for pid in self.pids())
            self.torchrun.kill()
            self.torchrun.wait()

    def stop(self, number: signal.Signals) -> None:
        """Ask the workers to save and leave. Not by way of torchrun, which would kill them after 30 s."""
        self.stopping = True
        pids = self.pids()
        if len(pids) < self.nproc:
            self.torchrun.terminate()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM if number == signal.SIGHUP else number)

    def kill(self) -> None:
        """End everything that this round has started, at once."""
        pids = self.pids()
        if self.torchrun.poll() is None:
            self.torchrun.kill()
        self.torchrun.wait()
        for pid in {*pids, *self.pids(), *self._strays()}:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # a worker leads a session; its DataLoader processes are in it
        for _ in range(50):
            if not any(alive(pid) for pid in pids):
                return
            time.sleep(POLL_S)

    def _strays(self) -> list[int]:
        """Processes with this round's folder in their environment: those without a `pid` file, too."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.fsencode(self.folder) in (process / "environ").read_bytes():
                    found.append(int(process.name))
        return found

    # ---- afterwards -------------------------------------------------------------------------------------------------

    def reports(self) -> list[dict[str, Any]]:
        """What the workers that failed have written, the cause first."""
        found = []
        for file in self.folder.glob("*/*/*/error.json"):
            with suppress(OSError, ValueError, KeyError, TypeError):
                message = json.loads(file.read_text())["message"]
                found.append({**message["extraInfo"], "code": int(message["errorCode"]), "why": message["message"]})
        return sorted(found, key=lambda report: (not report.get("cause", True), float(report.get("timestamp", 0))))

    def _saved(self) -> int | None:
        """The step of the last checkpoint; every worker notes it, so that a killed one has, too."""
        steps = []
        for file in self.folder.glob("*/*/*/saved"):
            with suppress(OSError, ValueError):
                steps.append(int(file.read_text()))
        told = [report["saved"] for report in self.reports() if isinstance(report.get("saved"), int)]
        return max([*steps, *told], default=None)

    def outcome(self) -> Outcome:
        """How it ended: as the first worker says that was a cause; else as torchrun does."""
        reports, code = self.reports(), self.torchrun.returncode
        saved = self._saved()
        pids = self.pids()
        if len(list(self.folder.glob("*/*/*/done"))) == self.nproc:  # whatever torchrun was asked meanwhile
            return Outcome(0, pids=pids)
        if code == 8 and not self.stopping and all(report["code"] == 75 for report in reports):
            # A worker was killed; torchrun has then ended the others, who take that for a request to stop.
            return Outcome(8, True, saved, "a process was lost", pids=pids)
        if reports and code != 0:
            first = reports[0]
            return Outcome(first["code"], first["code"] == 8, saved, first["why"], pids=pids)
        if code == 0 or self.waited_in_vain:
            return Outcome(0, pids=pids)
        if self.stopping or code == 75:  # torchrun's, when it was asked by itself
            if len(pids) < self.nproc:
                return Outcome(75, why="stopped before training began: nothing to save", said=False, pids=pids)
            return Outcome(8, why="the processes were killed before they had stopped", said=False, pids=pids)
        if code < 0:
            return Outcome(8, True, saved, "torchrun was killed", said=False, pids=pids)
        why = "a process was lost" if code == 8 else "a process failed"
        return Outcome(code, True, saved, why, said=code == 8, pids=pids)


def alive(pid: int) -> bool:
    """Whether a process runs. One that has ended, and that nobody has waited for, does not."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)  # where this process is the container's first, orphans are its children
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return exists(pid)


def exists(pid: int) -> bool:
    """Whether a process is there, if only as a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
