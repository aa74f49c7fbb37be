"""What launch/ssh.sh runs: launch_node.sh on every host of a file, each through one ssh client.

All hosts are reached before launch_node.sh starts on any of them. What a host runs is run_on_host in launch/ssh.sh.
"""

import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from select import select
from threading import Lock, Thread
from typing import IO, NoReturn

from ddp.core.errors import ExitCode, QuitImmediately, Stopped, UserError, print_line, report_error
from ddp.core.run_config import RunConfig
from ddp.core.signals import REPEAT_INTERVAL_S, SignalHandler
from ddp.launcher.host_file import Host, prepare, ssh_command

# ssh uses the first value that it receives, so SSH_OPTIONS win. It gives up a silent host after five minutes; a shorter
# failure of the network is left to launch_node.sh.
DEFAULT_SSH_OPTIONS = "-T -oBatchMode=yes -oConnectTimeout=10 -oServerAliveInterval=30 -oServerAliveCountMax=10"
DEFAULT_SSH_OPTIONS += " -oControlMaster=no -oControlPath=none -oClearAllForwardings=yes"
# All that the login shell there interprets, whichever it is. The program follows on standard input.
REMOTE_COMMAND = """exec bash -c 'IFS= read -r -d "" program && eval "$program"'"""
REPLY_PREFIX = b"launch/ssh.sh: "  # of the line in which run_on_host reports that the host is ready, or why it is not
HOST_POLL_INTERVAL_S = 0.1
SLOW_HOST_GRACE_S = 5.0  # then print which hosts have not responded
SAVE_GRACE_S = 30.0  # for the other hosts, when one has failed
# How to end hosts that must exit now, with the seconds until each step. A TERM soon after another one does not count.
FORCE = ((0.0, "TERM"), (2.0, "TERM"), (10.0, "KILL"), (15.0, "cut"))
CLEANUP_GRACE_S = 3.0  # for hosts that were ready, when another one is not
PRINTING = Lock()  # one line at a time


def main(config_class: type[RunConfig], project: str, program: str) -> NoReturn:
    """What launch/ssh.sh runs, with the project's directory as it was typed, and the shell function for the hosts."""
    try:
        job = Job()
        code = job.run(prepare(sys.argv[1:], config_class, project, program))
    except UserError as error:
        report_error(error)
        code = error.exit_code
    sys.exit(code)


class Session:
    """One host, through its ssh client. Two threads print its lines: a slow reader delays neither signals nor hosts."""

    def __init__(self, host: Host, program: bytes, width: int) -> None:
        self.host, self.prefix = host, f"{host.name:{width}} | ".encode()
        self.reply = ""  # "ready", or why the host is not
        command = [*ssh_command(), *DEFAULT_SSH_OPTIONS.split(), "--", host.target, REMOTE_COMMAND]
        pipe = subprocess.PIPE
        # A session of its own: Ctrl-C in the terminal reaches only this process, which passes it on once.
        self.client = subprocess.Popen(command, 0, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        assert self.client.stdin and self.client.stdout and self.client.stderr
        self.stdin, streams = self.client.stdin, {1: self.client.stdout, 2: self.client.stderr}
        self.printers = [Thread(target=self._print_lines, args=each, daemon=True) for each in streams.items()]
        for printer in self.printers:
            printer.start()
        self.send(program)

    def send(self, data: bytes) -> None:
        """Send to the program on the host. If it is gone, its exit code shows that."""
        with suppress(OSError, ValueError):
            self.stdin.write(data)

    def exit_code(self) -> int | None:
        """None until ssh has exited and all that the host printed is printed here."""
        return None if any(printer.is_alive() for printer in self.printers) else self.client.poll()

    def _print_lines(self, target: int, source: IO[bytes]) -> None:
        rest, data = b"", b"-"
        while data:
            exited = self.client.poll() is not None
            if not select([source], [], [], HOST_POLL_INTERVAL_S)[0]:
                if exited:
                    break  # a process that ssh left may keep the stream open
                continue
            data = os.read(source.fileno(), 65536)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._print(line, target)
        if rest:
            self._print(rest, target)

    def _print(self, line: bytes, target: int) -> None:
        if not self.reply and REPLY_PREFIX in line:
            self.reply = line.partition(REPLY_PREFIX)[2].decode(errors="replace")
            return
        line = self.prefix + line + b"\n"
        with PRINTING, suppress(OSError):  # if nothing reads the output any more, the run continues
            while line:
                line = line[os.write(target, line) :]


class Job(SignalHandler):
    """All hosts together, from the first connection to the last exit code."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions: list[Session] = []
        self.running: list[Session] = []
        self.cause: int | None = None  # the exit code of the first host that failed
        self.failed_at = 0.0
        self.force_at, self.forced = math.inf, 0  # when hosts that still run are ended, and how many steps are done
        self.install()

    def run(self, programs: list[tuple[Host, bytes]]) -> int:
        """Run the program of each host. Returns the exit code."""
        width = max(len(host.name) for host, _ in programs)
        try:
            for host, program in programs:
                self.sessions.append(Session(host, program, width))
            self.running = list(self.sessions)
            if not self._wait_until_ready():
                return ExitCode.SETUP
            self._send("go")
            while self.running:
                time.sleep(HOST_POLL_INTERVAL_S)
                for session in list(self.running):
                    self._check(session)
                self._force_exit()
        finally:
            self._close()
        if self.cause is not None:
            return self.cause if 0 < self.cause <= 128 else ExitCode.PEER_LOST
        if self.second is not None:
            quit = QuitImmediately(self.second)
            print_line(str(quit))
            return quit.exit_code
        return ExitCode.STOPPED if any(session.exit_code() for session in self.sessions) else ExitCode.SUCCESS

    def _send(self, word: str) -> None:
        for session in self.running:
            session.send(f"{word}\n".encode())

    def _wait_until_ready(self) -> bool:
        """Wait until every host has responded. Returns whether all of them are ready."""
        start, announced = time.monotonic(), False
        while waiting := [session for session in self.sessions if not session.reply and session.exit_code() is None]:
            if self.first is not None:
                raise Stopped(f"stopped by {self.first.name} before training began: nothing to save")
            if time.monotonic() - start > SLOW_HOST_GRACE_S and not announced:
                announced = True
                print_line(f"waiting for {', '.join(session.host.name for session in waiting)}")
            time.sleep(HOST_POLL_INTERVAL_S)
        failed = [session for session in self.sessions if session.reply != "ready" or session.exit_code() is not None]
        for session in failed:
            host, reason = session.host, session.reply
            if reason in ("", "ready"):
                reason = f"ssh cannot connect: 'ssh {host.target} true' must work without a password"
            print_line(f"error: {host.where}: {host.name}: {reason}")
        return not failed

    def _check(self, session: Session) -> None:
        """If a host has failed, stop the others."""
        code = session.exit_code()
        if code is None:
            return
        self.running.remove(session)
        # 143: the signal arrived before launch_node.sh could handle it.
        as_asked = self.first is not None and code in (ExitCode.STOPPED, 128 + signal.SIGTERM)
        if code == 0 or as_asked or self.second is not None or self.cause is not None:
            return
        self.cause, self.failed_at = code, time.monotonic()
        how = "the connection was lost" if code == 255 else f"launch_node.sh exited with {code}"
        print_line(f"error: {session.host.name}: {how}{'; stopping the other hosts' if self.running else ''}")
        self.force_at = min(self.force_at, self.failed_at + SAVE_GRACE_S)
        if self.first is None:
            self._send("TERM")

    def on_first(self) -> None:
        if self.cause is None:
            self._send("TERM")
        elif time.monotonic() - self.failed_at > REPEAT_INTERVAL_S:  # the hosts were asked to stop before
            self.on_second()

    def on_second(self) -> None:
        self.force_at = min(self.force_at, time.monotonic())

    def _force_exit(self) -> None:
        """End the hosts whose time is over."""
        due = sum(self.force_at + after <= time.monotonic() for after, _ in FORCE)
        for _, how in FORCE[self.forced : due]:
            for session in self.running:
                session.client.kill() if how == "cut" else session.send(f"{how}\n".encode())
        self.forced = due

    def _close(self) -> None:
        """End all ssh clients. A host that waits for `go` exits at the end of its input."""
        for session in self.sessions:
            session.stdin.close()
        for session in self.sessions:
            with suppress(subprocess.TimeoutExpired):
                session.client.wait(CLEANUP_GRACE_S if session.reply else 0)
            session.client.kill()
            session.client.wait()
