"""How a rank exits: what it prints, its exit code, and what it records for its launcher. Every exit passes here."""

import atexit
import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from ddp.core.errors import PeerFailed, PeerLost, SetupError, Stopped, UsageError, exit_code_of, one_line, print_line
from ddp.core.files import atomic_write
from ddp.core.parts import of_parts
from ddp.core.threads import is_owner_file

FAILURE_KEY = "failure"  # of the store of the ranks
ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
OUT_OF_MEMORY = re.compile(r"(CUDA|HIP)( error:)? out of memory|CUBLAS_STATUS_ALLOC_FAILED|Cuda failure .*out of mem")
GPU_FAULT = re.compile(r"uncorrectable (ECC|NVLink) error|peer GPU memory over nvlink or a hardware error")  # libcudart
# When all ranks raise the same error, the others wait this long so that rank 0 can print it: launchers end all
# processes when the first one exits.
REPORT_GRACE_S = 3.0


class ProcessExit:
    """The exit of this process. There is one instance: `process_exit`, below."""

    def __init__(self) -> None:
        self.rank, self.report_grace_s = 0, REPORT_GRACE_S
        self.exit_code: int | None = None  # once it is known
        self.agreed = False  # whether all ranks exit with it, and know that
        self.signalled = threading.Event()  # set when the launcher signals a process that is already exiting
        self.saved_step: int | None = None  # the step of the last checkpoint on disk
        # Why this process exits. Keeps what its frames hold: after a fault of the GPU, freeing a tensor aborts.
        self.error: BaseException | None = None
        # Called with (exit code, message) before an immediate exit, so that the run can record it.
        self.on_hard_exit: Callable[[int, str], None] = lambda code, message: None
        # Tells the other ranks about an error, or learns that another rank failed first. Returns the root cause.
        self.resolve_root_cause: Callable[[BaseException], BaseException] = lambda error: error

    def agree(self, code: int) -> None:
        """All ranks exit with `code`, and know it: what follows is no failure, and a signal no second request."""
        self.exit_code, self.agreed = code, True

    def record_saved(self, step: int) -> None:
        """Record that the checkpoint of `step` is on disk: the launcher counts restarts anew when steps progress."""
        self.saved_step = step
        tell_launcher("saved", str(step))

    def handle_exception(self, error: BaseException) -> int:
        """Print `error`, record it for the launcher, return the exit code. Only a bug is printed with its traceback."""
        code = self._record(error)
        if isinstance(error, SystemExit):
            if isinstance(error.code, str):
                print_line(error.code, self.rank)
        elif not hasattr(error, "exit_code"):
            print_line("".join(traceback.format_exception(error)).rstrip(), self.rank)
        elif not self._report(error) and not isinstance(error, Stopped | PeerLost):
            self.signalled.wait(self.report_grace_s)  # rank 0 prints it
        return code

    def hard_exit(self, error: BaseException) -> NoReturn:
        """Exit now, from another thread, whatever the main thread does: it may be blocked for good."""
        code = self._record(error)
        self._report(error)
        with suppress(Exception):
            self.on_hard_exit(code, one_line(error))
        os._exit(code)

    def _report(self, error: BaseException) -> bool:
        """Print `error`, unless rank 0 prints the same. Returns whether this rank has."""
        prints = self.rank == 0 or not getattr(error, "on_every_rank", False)
        if prints:
            prefix = "" if isinstance(error, Stopped | PeerFailed) else "error: "
            rank = 0 if isinstance(error, PeerFailed) else self.rank  # PeerFailed names the rank
            print_line(f"{prefix}{one_line(error)}", rank)
        return prints

    def _record(self, error: BaseException) -> int:
        """Write torchrun's error file, from which torchrun and launch_node.sh learn what happened."""
        code = self.exit_code = exit_code_of(error)
        if code != 0:
            info = {"timestamp": str(int(time.time())), "cause": not isinstance(error, PeerFailed)}
            message = {"message": one_line(error), "errorCode": code, "extraInfo": info}
            tell_launcher("error.json", json.dumps({"message": message}))
        return code


def tell_launcher(name: str, text: str) -> None:
    """Write a file to the directory of torchrun's error file, for launch_node.py. Without torchrun, do nothing.

    pid: the process id, once this process handles signals. output_dir: once it has joined the others. saved: the step
    of the last checkpoint, after each save, so that a killed process leaves it as well. done: empty; it succeeded.
    error.json: it failed: {"message": {"message": ..., "errorCode": ..., "extraInfo": {...}}}, where extraInfo has
    "cause" (false if another rank failed first) and "timestamp" (in seconds since 1970).
    """
    error_file = os.environ.get(ERROR_FILE_VARIABLE)
    if error_file and "LOCAL_RANK" in os.environ:
        with suppress(OSError), atomic_write(Path(error_file).with_name(name)) as file:
            file.write(os.fsencode(text))  # a path may be no text


def failure_record(rank: int, code: int, message: str, hang: bool = False) -> str:
    """What the store holds as FAILURE_KEY, for all ranks: which rank failed first, and why."""
    return json.dumps({"rank": rank, "code": code, "hang": hang, "message": message})


process_exit = ProcessExit()


def translate_exception(error: BaseException) -> BaseException:
    """The UserError for an error that torch reports like a bug, although the user can fix it; otherwise `error`.

    torch has no own type for these, except where its allocator is out of memory: their text decides.
    """
    if hasattr(error, "exit_code"):
        return error
    text, trace = str(error), traceback.extract_tb(error.__traceback__)
    own = [frame for frame in trace if is_owner_file(frame.filename)]
    where = f" ({os.path.basename(own[-1].filename)}, line {own[-1].lineno})" if own else ""
    # A worker can also die while it hands over a batch. An error that a dataset raises has "Caught" in its message.
    disconnected = isinstance(error, ConnectionError | EOFError) and "Caught" not in text
    disconnected &= any(frame.filename.endswith("torch/utils/data/dataloader.py") for frame in trace)
    if disconnected or (isinstance(error, RuntimeError) and text.startswith("DataLoader worker")):
        return PeerLost("a DataLoader worker was killed; if memory ran out: lower --workers, or enlarge /dev/shm")
    if GPU_FAULT.search(text):  # a restart may help: the driver no longer uses the damaged memory
        gpu = f"the GPU of rank {process_exit.rank} on {socket.gethostname()}"
        return PeerLost(f"{gpu} failed ({text.splitlines()[0]}): if a restart fails as well, leave this machine out")
    if found := re.search(r"([^:\n]+) does not have a deterministic implementation", text):
        lacks = f"{found[1].strip()}{where} has no deterministic form on this device"
        return UsageError(f"--deterministic: {lacks}: replace this operation, or remove --deterministic")
    for reason in filter(None, [explain(text, where) for explain in of_parts("explain")]):
        return UsageError(reason)
    if "mark a variable ready only once" in text or "gradient which is undefined, but still allreduced" in text:
        remedy = "pass use_reentrant=False to torch.utils.checkpoint, and use each weight only in forward()"
        return UsageError(f"one backward pass gave a weight its gradient twice{where}: {remedy}")
    if "support the deepcopy protocol" in text:
        remedy = "use torch.nn.utils.parametrizations.weight_norm"
        return UsageError(f"the model holds a computed tensor, which cannot be copied{where}: {remedy}")
    if isinstance(error, IndexError) and (label := re.match(r"Target (-?\d+) is out of bounds", text)):
        remedy = "labels are 0 to the number of outputs - 1; see `classes` in data.py and build_model in model.py"
        return UsageError(f"a label is {label[1]}, for which the model has no output{where}: {remedy}")
    if type(error).__name__ == "OutOfMemoryError" or (isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(text)):
        reason = ". ".join(text.splitlines()[0].split(". ")[:3]).rstrip(".")  # without torch's general advice
        remedy = "lower --batch-size and raise --grad-accum-steps by the same factor"
        return SetupError(f"out of GPU memory ({reason}): {remedy}")
    return error


def exit_code_of_run(run: Callable[[], None]) -> int:
    """Run all that this rank does; report how it ended. Returns the exit code."""
    try:
        run()
    except BaseException as error:
        process_exit.error = error
        return process_exit.handle_exception(process_exit.resolve_root_cause(translate_exception(error)))
    process_exit.agree(0)
    tell_launcher("done", "")
    return 0


def kill_workers() -> None:
    """When this process exits: DataLoader workers ignore SIGTERM, so that multiprocessing would wait for them."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a DataLoader's handler would report what follows as a failure
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def exit_process(code: int) -> NoReturn:
    """Exit without tearing down the interpreter: gloo's threads may hold tensors, and would abort the process."""
    kill_workers()
    # Private names, called as Python does: the first waits for threads that are not daemons.
    for module, name in ((threading, "_shutdown"), (atexit, "_run_exitfuncs")):
        getattr(module, name, lambda: None)()
    with suppress(OSError):  # the reader of the output may be gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def open_streams() -> None:
    """Open the standard streams that the parent has closed: the next files would get their numbers and their output."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
