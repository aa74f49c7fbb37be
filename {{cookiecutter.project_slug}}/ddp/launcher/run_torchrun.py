"""torchrun's own process, which worker_group.py starts: quiet, and gone when the agent is gone."""

import logging
import os
import socket
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from ddp.core.errors import FAILURE_KEY, ExitCode, failure_record, one_line, print_line
from ddp.core.rank_logs import rank_log_path
from ddp.core.signals import die_with_parent, killed_by

STORE_TIMEOUT_S = 3.0


def main() -> NoReturn:
    """Called with the agent's process id, and torchrun's options."""
    die_with_parent()
    if os.getppid() != int(sys.argv[1]):  # the agent is dead already
        sys.exit(ExitCode.PEER_LOST)
    sys.exit(run_torchrun(sys.argv[2:]))


def run_torchrun(options: list[str]) -> int:
    """Run torchrun without its messages: the workers print in one line what takes it forty. LOGLEVEL=INFO shows them.

    Returns 0; 8 if a worker was killed, or if node 0's store is out of reach; 75 after a signal; 1 for other failures.
    """
    from torch.distributed import DistError, run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if "LOGLEVEL" not in os.environ:
        logging.disable()
    sys.addaudithook(_refuse_reverse_lookup)
    arguments = run.parse_args(options)
    try:
        run.run(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return ExitCode.BUG
        if not arguments.standalone:
            _tell_other_nodes(rank, arguments.master_addr, arguments.master_port)
        how = killed_by(failure.exitcode)
        for output_dir in list(Path(arguments.log_dir).glob("*/*/*/output_dir"))[:1]:  # all workers have the same
            log = rank_log_path(output_dir.read_text(), rank)
            if "SIGKILL" not in how and log.exists():
                how += f"; its last output is in {log}"
        print_line(f"rank {rank}: process {failure.pid} on {socket.gethostname()} was {how}")
        return ExitCode.PEER_LOST
    except SignalException:
        return ExitCode.STOPPED
    except DistError as error:
        print_line(f"torchrun cannot reach node 0: {one_line(error)}")
        return ExitCode.PEER_LOST
    return ExitCode.SUCCESS


def _refuse_reverse_lookup(event: str, arguments: object) -> None:
    """Let socket.getfqdn return the plain name of this machine.

    torchrun asks for the full one at its end, once for each worker and more. Without an answer each takes 10 s or more.
    """
    if event == "socket.gethostbyaddr":
        raise OSError("not looked up")


def _tell_other_nodes(rank: int, host: str, port: int) -> None:
    """Tell the workers of the other nodes, through their store, that this one was killed: see FailureMonitor.

    Over gloo a connection breaks; over NCCL they would wait for it.
    """
    from torch.distributed import PrefixStore, TCPStore

    with suppress(OSError, RuntimeError):  # they notice by themselves that the store is gone
        socket.create_connection((host, port), STORE_TIMEOUT_S).close()  # otherwise TCPStore would print pages
        store = TCPStore(host, port, timeout=timedelta(seconds=STORE_TIMEOUT_S), wait_for_workers=False)
        for workers in (store, PrefixStore("/worker/attempt_0", store)):  # torch's env:// has used either
            saved = workers.get("saved").decode() if workers.check(["saved"]) else None
            resumable = "nothing was saved yet" if saved is None else f"resumable from step {int(saved):,}"
            lost = failure_record(rank, ExitCode.PEER_LOST, f"rank {rank} was lost; {resumable}")
            workers.compare_set(FAILURE_KEY, "", lost)
