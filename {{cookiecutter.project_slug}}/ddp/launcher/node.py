"""One machine's part of a run, under launch_node.sh: meet others, run torchrun, start again when a process is lost.

torchrun's own --max-restarts is not used: restarted workers read stale keys of its store (pytorch issue 135712). Here
every node ends its round, all meet again, and main.py resumes from the newest checkpoint. No torch in here.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from config import Config, check_processes, parse
from ddp import logs
from ddp.errors import Failure, Stopped, UsageError, one_line, report, say
from ddp.launcher import CHECK
from ddp.launcher.facts import seen_from, show
from ddp.launcher.meeting import meet
from ddp.launcher.network import interface_of
from ddp.launcher.round import Outcome, Round, alive
from ddp.launcher.visit import Place, make_card
from ddp.status import correct_status, read_status

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
REPEAT_S = 1.0  # one request may come twice: Slurm signals the script, and the step as well
POLL_S = 0.1
FIRST_PAUSE_S, LONGEST_PAUSE_S = 3.0, 60.0
NOTICE_S = 60.0  # beyond --timeout: how long another node may take to notice that a round is over


def main() -> NoReturn:
    """`launch_node.sh` ends in this."""
    try:
        code = Node(_arguments(), Requests()).run()
    except Failure as error:
        report(error)
        code = error.exit_code
    sys.exit(code)


def _arguments() -> argparse.Namespace:
    """What launch_node.sh has checked already."""
    parser = argparse.ArgumentParser(prog="ddp.launcher.node", allow_abbrev=False)
    for name in ("nnodes", "node-rank", "nproc", "master-port", "max-restarts", "check"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--master-addr", default="")
    parser.add_argument("options", nargs="*")
    arguments = parser.parse_args()
    grace = os.environ.get("START_GRACE", "300")
    if not grace.isdigit():
        raise UsageError(f"START_GRACE={grace!r} is not a whole number of seconds")
    check_processes("--nproc-per-node", arguments.nproc)
    arguments.grace = int(grace)
    arguments.master_addr = arguments.master_addr.strip("[]")  # of an IPv6 address
    return arguments


class Requests:
    """Signals that ask this node to stop."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.second: signal.Signals | None = None
        self.interruptible = False
        for number in SIGNALS:
            # Under nohup, SIGHUP stays ignored.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._take)

    def _take(self, number: int, frame: Any) -> None:
        if self.first is None:
            self.first, self.at = signal.Signals(number), time.monotonic()
            self._leave()
        elif time.monotonic() - self.at > REPEAT_S:
            self.second = signal.Signals(number)

    def _leave(self) -> None:
        if self.interruptible and self.first is not None:
            raise Stopped(f"stopped by {self.first.name} before training began: nothing to save")

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Within the block, a signal raises Stopped at once: nothing runs that would have to end in good order."""
        self.interruptible = True
        try:
            self._leave()
            yield
        finally:
            self.interruptible = False


class Node:
    """This machine, through all rounds of one run."""

    def __init__(self, arguments: argparse.Namespace, requests: Requests) -> None:
        self.arguments, self.requests = arguments, requests
        self.config: Config = parse(arguments.options)
        self.several = arguments.nnodes > 1
        self.card = make_card(
            arguments.node_rank, arguments.nnodes, arguments.nproc, self.config, check=bool(arguments.check)
        )

    def run(self) -> int:
        """Rounds, until one must not be tried again. Returns the exit code."""
        restarts, reached, pause = 0, -1, FIRST_PAUSE_S
        outcome = self._round()
        while outcome.try_again and self.requests.first is None:
            saved = outcome.saved if outcome.saved is not None else self._saved()
            if saved is not None and saved > reached >= 0:  # it gets on
                restarts, pause = 0, FIRST_PAUSE_S
            reached = max(reached, -1 if saved is None else saved)
            if restarts >= self.arguments.max_restarts:
                break
            restarts += 1
            where = "from the last checkpoint, if there is one" if saved is None else f"from step {saved:,}"
            count = f"restart {restarts} of {self.arguments.max_restarts}"
            what = "a process was lost" if outcome.said else outcome.why
            self._say(f"{what} (exit code {outcome.code}); starting again {where}, {count}, in {pause:g} s")
            try:
                self._pause(pause)
                outcome = self._round(again=True)
            except Failure as error:
                self._correct_status(replace(outcome, code=error.exit_code, why=one_line(error)))
                raise
            pause = min(2 * pause, LONGEST_PAUSE_S)
        if not outcome.said:
            self._say(outcome.why)
        self._correct_status(outcome)
        return outcome.code

    def _say(self, line: str) -> None:
        say(f"node {self.arguments.node_rank}: {line}" if self.several else line)

    def _pause(self, seconds: float) -> None:
        try:
            with self.requests.interrupting():
                time.sleep(seconds)
        except Stopped as error:
            raise Stopped("stopped by a signal, before starting again") from error

    def _round(self, again: bool = False) -> Outcome:
        """Meet, and run torchrun once."""
        environment = dict(os.environ)
        if self.several:
            ours = self.arguments
            # The others of a run that goes on, or that this machine was a part of, may notice late that it is over.
            late = again or read_status(Path(self.config.output_dir)).get("state") == "running"
            grace = max(ours.grace, self.config.timeout + NOTICE_S) if late else ours.grace
            with self.requests.interrupting():
                address = meet(self.card, Place(ours.master_addr, ours.master_port, grace, again))
            # Left to itself, gloo takes the interface that the host's name leads to, and that is often loopback. NCCL
            # leaves out loopback, prefers InfiniBand, and may use several: one name would take that away from it.
            interface = interface_of(address)
            if interface is not None:
                environment.setdefault("GLOO_SOCKET_IFNAME", interface)
        elif self.arguments.check:
            self.card["facts"] |= {**seen_from("127.0.0.1"), "offset": 0.0}
            show([self.card])
        if self.arguments.check:
            environment[CHECK] = "1"
        elif not self.config.evaluate:
            environment[logs.VARIABLE] = os.path.abspath(os.path.join(self.config.output_dir, "logs"))
        with Round(self.arguments, self.config.timeout, environment) as round:
            return self._watch(round)

    def _watch(self, round: Round) -> Outcome:
        """Wait for a round to end, and pass on requests to stop it."""
        requests, told = self.requests, False
        while not round.over():
            if requests.second is not None:
                round.kill()
                why = f"left at once, on a second signal ({requests.second.name})"
                return Outcome(128 + requests.second, why=why, said=False, pids=round.pids())
            if requests.first is not None and not told:
                told = True
                round.stop(requests.first)
            time.sleep(POLL_S)
        return round.outcome()

    # ---- the run's own record ---------------------------------------------------------------------------------------

    def _saved(self) -> int | None:
        """The step of the last checkpoint, where this machine has the output folder."""
        saved = read_status(Path(self.config.output_dir)).get("saved")
        return saved if isinstance(saved, int) else None

    def _correct_status(self, outcome: Outcome) -> None:
        """Of a rank 0 that was killed, status.json would say for ever that it runs."""
        if self.arguments.check or self.config.evaluate:
            return  # it was another run's
        folder = Path(self.config.output_dir)
        pid = read_status(folder).get("pid")
        gone = [*outcome.pids, *([pid] if isinstance(pid, int) and not alive(pid) else [])]
        correct_status(folder, gone, outcome.code, outcome.why)
