"""How a process ends: what it says, its exit code, what it leaves for its launcher. Every end leads through here."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from ddp.errors import Collateral, PeerLost, Stopped, one_line, report, say

KILLED_WORKER = re.compile(r"DataLoader worker .*(killed by signal|exited unexpectedly)", re.DOTALL)
SILENT_S = 3.0  # how long the other ranks stay when all have met the same error, so that rank 0 can say it


class Ending:
    """The end of this process. There is one: `ending`, below."""

    def __init__(self) -> None:
        self.rank, self.silent_s = 0, SILENT_S
        self.code: int | None = None  # set once the process is on its way out
        self.settling = False  # it has failed, and looks for the cause
        self.hurry = threading.Event()  # set when the launcher wants this process gone
        self.step: int | None = None  # how far the run is, and of which step its last checkpoint is
        self.saved: int | None = None
        # What a run still wants when its process ends in the middle of things: called with exit code and message.
        self.last_wish: Callable[[int, str], None] = lambda code, message: None
        # Tells the other ranks, or learns from them that they failed first: given an error, returns what it becomes.
        self.settle: Callable[[BaseException], BaseException] = lambda error: error

    def begin(self, rank: int, silent_s: float = SILENT_S) -> None:
        """Call once it is known who this process is. `silent_s`: how long rank 0 has to say what all would say."""
        self.__init__()  # type: ignore[misc]
        self.rank, self.silent_s = rank, silent_s
        self._leave_word("pid", str(os.getpid()))

    def note_saved(self, step: int | None) -> None:
        """The checkpoint of `step` is on the disk. The launcher sees by it whether the run gets on."""
        self.saved = step
        self._leave_word("saved", str(step))

    def succeed(self) -> int:
        """The end as it should be. Returns the exit code."""
        self.code = 0
        self._leave_word("done", "")
        return 0

    def _leave_word(self, name: str, text: str) -> None:
        folder = _folder_of_torchrun()
        if folder is not None:
            with suppress(OSError):
                (folder / name).write_text(text)

    def conclude(self, error: BaseException) -> int:
        """Say what `error` is, record it, and return the exit code. Only what is a bug is shown with its traceback."""
        code = self.code = exit_code(error)
        if code != 0:
            self._record(error, code)
        if isinstance(error, SystemExit):
            if isinstance(error.code, str):
                say(error.code, self.rank)
        elif not hasattr(error, "exit_code"):
            say("".join(traceback.format_exception(error)).rstrip(), self.rank)
        elif self.rank == 0 or not getattr(error, "on_every_rank", False):
            report(error, self.rank)
        elif not isinstance(error, Stopped | PeerLost):
            self.hurry.wait(self.silent_s)  # rank 0 speaks; launchers end all processes when the first one leaves
        return code

    def abruptly(self, error: BaseException, *, speak: bool = True) -> NoReturn:
        """End now, whatever the main thread does: it may never come back from where it is. Called by other threads."""
        code = self.code = exit_code(error)
        if speak:
            report(error, self.rank)
        with suppress(Exception):
            self.last_wish(code, one_line(error))
        self._record(error, code)
        os._exit(code)

    def _record(self, error: BaseException, code: int) -> None:
        """Write torchrun's error file, from which it, and launch_node.sh, know what happened."""
        if _folder_of_torchrun() is None:
            return
        more = {"rank": self.rank, "cause": not isinstance(error, Collateral), "step": self.step, "saved": self.saved}
        info = {"timestamp": str(int(time.time())), **more}
        message: dict[str, Any] = {"message": one_line(error), "errorCode": code, "extraInfo": info}
        path = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
        beside = path.with_suffix(".tmp")
        with suppress(OSError):
            beside.write_text(json.dumps({"message": message}))
            beside.replace(path)


ending = Ending()


def exit_code(error: BaseException) -> int:
    """The exit code that `error` stands for; 1 for a bug."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return getattr(error, "exit_code", 1)


def understand(error: BaseException) -> BaseException:
    """`error`; or what it means, where torch takes what is no bug for one."""
    killed = isinstance(error, RuntimeError) and KILLED_WORKER.search(str(error))
    # Or it died while it handed over a batch. What a dataset raises in a worker says so: "Caught ... in DataLoader".
    cut_off = isinstance(error, ConnectionError | EOFError) and "Caught" not in str(error)
    if killed or (cut_off and "torch/utils/data/dataloader.py" in "".join(traceback.format_tb(error.__traceback__))):
        return PeerLost("a DataLoader worker was killed; if memory ran out: fewer --workers, or a larger /dev/shm")
    return error


def leave(code: int) -> NoReturn:
    """End this process without tearing down the interpreter: gloo's threads may hold tensors, and would abort it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a DataLoader's handler would take what follows for a failure
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()  # DataLoader workers ignore SIGTERM, and would be waited for
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    with suppress(OSError):  # whoever read the output may have left
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _folder_of_torchrun() -> Path | None:
    """Where torchrun looks for this process's error file; not in a process that a worker has started in its turn."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(path).parent if path and "LOCAL_RANK" in os.environ else None
