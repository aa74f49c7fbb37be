"""torchrun's own process, as ddp/launcher/round.py starts it: quiet, and gone when the launcher is gone."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from typing import NoReturn

from ddp import logs
from ddp.errors import one_line, say
from ddp.stop import die_with_parent

SIGNALLED, LOST = 75, 8


def main() -> NoReturn:
    """Called with the launcher's process id, and torchrun's options."""
    die_with_parent()
    if os.getppid() != int(sys.argv[1]):  # it has died already
        sys.exit(LOST)
    sys.exit(run_torchrun(sys.argv[2:]))


def run_torchrun(options: list[str]) -> int:
    """Run torchrun; LOGLEVEL=INFO shows what it does. Else silent: what it says in forty lines, its workers say in one.

    Returns 0; 8 if a worker was killed, or if the store of node 0 is out of reach; 75 on a signal; else 1.
    """
    # Its events ask for the host's full name again and again: where no name server answers, for seconds each time.
    socket.getfqdn = lambda name="": name or socket.gethostname()
    from torch.distributed import DistError, run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    def explain(rank: int, failure: ProcessFailure) -> int:
        if failure.exitcode >= 0:
            return 1
        name = signal.Signals(-failure.exitcode).name
        hint = "; if memory ran out, dmesg says so" if name == "SIGKILL" else ""
        log = logs.path_of(os.environ.get(logs.VARIABLE, ""), rank)
        if name != "SIGKILL" and log.exists():
            hint = f"; what it said last is in {log}"
        say(f"rank {rank}: its process {failure.pid} on {socket.gethostname()} was killed by {name}{hint}")
        return LOST

    if "LOGLEVEL" not in os.environ:
        logging.disable()
    try:
        run.run(run.parse_args(options))
    except ChildFailedError as error:
        return explain(*error.get_first_failure())
    except SignalException:
        return SIGNALLED
    except DistError as error:
        say(f"torchrun cannot talk to node 0: {one_line(error)}")
        return LOST
    return 0
