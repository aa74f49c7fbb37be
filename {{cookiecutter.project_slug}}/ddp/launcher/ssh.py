"""What launch/ssh.sh ends in: launch_node.sh on every host of a file, each under an ssh client. No torch in here.

All hosts are reached before any of them starts. What runs there reads its standard input: each line is a signal to pass
on, and the end means that nobody is left here who could stop it.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from select import select
from typing import Any, NoReturn

from ddp.errors import EnvironmentFailure, Failure, PeerLost, Stopped, report, say
from ddp.launcher.hosts import SAYS, Host, prepare, ssh_command

# ssh takes the first value that it is given: SSH_OPTIONS go before these. It gives up a silent host after five minutes;
# a shorter failure of the network is for launch_node.sh to bridge.
OPTIONS = "-T -oBatchMode=yes -oConnectTimeout=10 -oServerAliveInterval=30 -oServerAliveCountMax=10"
OPTIONS += " -oControlMaster=no -oControlPath=none -oClearAllForwardings=yes"
# All that the login shell there sees, whichever it is. The program comes through standard input.
COMMAND = """exec bash -c 'IFS= read -r -d "" program && eval "$program"'"""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
REPEAT_S = 1.0  # as launch_node.sh counts: one request may come twice
GRACE_S = 30.0  # for saving, when one host has failed
# How those are ended who are to leave at once, by seconds. Too soon after the first, a TERM does not count as a second.
FORCE = ((0.0, "TERM"), (2.0, "TERM"), (10.0, "KILL"), (15.0, "cut"))
POLL_S = 0.1
NOTICE_S = 5.0  # after so long, say for whom one waits
LEAVE_S = 3.0  # for hosts that were ready, when another one is not


def main() -> NoReturn:
    """Called with the project's folder, and with what was given to launch/ssh.sh."""
    try:
        job = Job()  # it takes signals from now on
        code = job.run(prepare(sys.argv[1], sys.argv[2:]))
    except Failure as error:
        report(error)
        code = error.exit_code
    sys.exit(code)


class Session:
    """One host, as its ssh client here shows it."""

    def __init__(self, host: Host, program: bytes, width: int) -> None:
        self.host, self.prefix = host, f"{host.name:{width}} | ".encode()
        self.said = ""  # `ready`; or why the host is not
        self.code: int | None = None
        command, pipe = [*ssh_command(), *OPTIONS.split(), "--", host.target, COMMAND], subprocess.PIPE
        # A session of its own: Ctrl-C in the terminal reaches only this process, which passes it on once.
        self.client = subprocess.Popen(command, 0, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        assert self.client.stdin and self.client.stdout and self.client.stderr
        self.stdin = self.client.stdin
        self.goes = {self.client.stdout.fileno(): 1, self.client.stderr.fileno(): 2}  # each stream, to where
        self.rest = dict.fromkeys(self.goes, b"")
        self.streams = set(self.goes)  # those that are open
        for stream in self.streams:
            os.set_blocking(stream, False)
        self.send(program)

    def send(self, data: bytes) -> None:
        with suppress(OSError, ValueError):  # it is gone, and that shows elsewhere
            self.stdin.write(data)

    def take(self, stream: int) -> bool:
        """Pass on what was printed, by whole lines. Returns whether there may be more."""
        try:
            data = os.read(stream, 65536)
        except BlockingIOError:
            return False
        if not data:
            self.streams.remove(stream)
        *lines, self.rest[stream] = (self.rest[stream] + data).split(b"\n")
        for line in lines:
            if not self.said and SAYS in line:
                self.said = line.partition(SAYS)[2].decode(errors="replace")
            else:
                self._print(line, self.goes[stream])
        return bool(data)

    def ended(self) -> bool:
        """Whether it is over; all that it has printed was passed on, then."""
        if self.client.poll() is None:
            return False
        for stream in list(self.streams):
            while self.take(stream):
                pass
        for stream, line in self.rest.items():
            if line:  # the last one has no end
                self._print(line, self.goes[stream])
        self.code = self.client.returncode
        return True

    def _print(self, line: bytes, to: int) -> None:
        line = self.prefix + line + b"\n"
        with suppress(OSError):  # whoever read it may have left: the run goes on
            while line:
                line = line[os.write(to, line) :]


class Job:
    """All hosts together, from the first connection to the last exit code."""

    def __init__(self) -> None:
        self.sessions: list[Session] = []
        self.signals: list[signal.Signals] = []  # one: all are to save and leave; two: to leave at once
        self.told_at: float | None = None  # when the hosts were asked to stop
        self.force_at, self.forced = math.inf, 0  # when those who are left are ended; how much of FORCE is done
        self.cause: int | None = None  # the exit code of the first that failed
        for name in SIGNALS:
            if name != signal.SIGHUP or signal.getsignal(name) != signal.SIG_IGN:  # under nohup it stays ignored
                signal.signal(name, self._take)

    def run(self, parts: list[tuple[Host, bytes]]) -> int:
        """Run each host's program. Returns the exit code."""
        try:
            if not self._reach(parts):
                return EnvironmentFailure.exit_code
            self._tell("go")
            while self._left():
                for session in self._turn():
                    self._judge(session)
                self._force()
        finally:
            self._leave()
        if self.cause is not None:
            return self.cause if 0 < self.cause <= 128 else PeerLost.exit_code
        if len(self.signals) > 1:
            say(f"left at once, on a second signal ({self.signals[1].name})")
            return 128 + self.signals[1]
        return Stopped.exit_code if any(session.code for session in self.sessions) else 0

    def _left(self) -> list[Session]:
        return [session for session in self.sessions if session.code is None]

    def _tell(self, word: str) -> None:
        for session in self._left():
            session.send(f"{word}\n".encode())

    def _turn(self) -> list[Session]:
        """Pass on what is printed within a moment. Returns those who have ended meanwhile."""
        streams = {stream: session for session in self._left() for stream in session.streams}
        for stream in select(streams, [], [], POLL_S)[0]:
            streams[stream].take(stream)
        return [session for session in self._left() if session.ended()]

    def _reach(self, parts: list[tuple[Host, bytes]]) -> bool:
        """Connect to all hosts. Returns whether all of them are ready."""
        width = max(len(host.name) for host, _ in parts)
        for host, program in parts:
            self.sessions.append(Session(host, program, width))
        start, told = time.monotonic(), False
        while silent := [session for session in self._left() if not session.said]:
            self._turn()
            if time.monotonic() - start > NOTICE_S and not told:
                told = True
                say(f"waiting for {', '.join(session.host.name for session in silent)}")
            if self.signals:
                raise Stopped(f"stopped by {self.signals[0].name} before training began: nothing to save")
        missed = [session for session in self.sessions if session.said != "ready" or session.code is not None]
        for session in missed:
            why = f"ssh does not get there: 'ssh {session.host.target} true' must work without a password"
            if session.said not in ("", "ready"):
                why = session.said
            say(f"error: {session.host.where}: {session.host.name}: {why}")
        return not missed

    def _judge(self, session: Session) -> None:
        """One has ended. If it has failed, stop the others."""
        code = session.code
        as_asked = self.signals and code in (Stopped.exit_code, 128 + signal.SIGTERM)  # the latter in its first moments
        if code == 0 or as_asked or len(self.signals) > 1 or self.cause is not None:
            return
        self.cause = code
        how = "the connection was lost" if code == 255 else f"launch_node.sh has ended with {code}"
        say(f"error: {session.host.name}: {how}{'; stopping the others' if self._left() else ''}")
        now = time.monotonic()
        self.force_at = min(self.force_at, now + GRACE_S)
        if self.told_at is None:
            self.told_at = now
            self._tell("TERM")

    def _take(self, number: int, frame: Any) -> None:
        """A signal has come. The hosts are told here: the loop may be waiting for whoever reads the output."""
        now = time.monotonic()
        if self.told_at is None:
            self.told_at = now
        elif now - self.told_at > REPEAT_S:
            self.force_at = min(self.force_at, now)
        else:
            return
        self.signals.append(signal.Signals(number))
        self._tell("TERM")

    def _force(self) -> None:
        """End those whose time is over."""
        due = sum(self.force_at + after <= time.monotonic() for after, _ in FORCE)
        for _, how in FORCE[self.forced : due]:
            for session in self._left():
                session.client.kill() if how == "cut" else session.send(f"{how}\n".encode())
        self.forced = due

    def _leave(self) -> None:
        """Leave no client behind; whoever still waits for `go` ends with it."""
        for session in self.sessions:
            session.stdin.close()
        for session in self.sessions:
            with suppress(subprocess.TimeoutExpired):
                session.client.wait(LEAVE_S if session.said else 0)
            session.client.kill()
            session.client.wait()
