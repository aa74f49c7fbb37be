"""The nodes connect to node 0, which compares what they are about to run: then all of them start, or none.

Node 0 listens at --master-port, where torchrun's store listens afterwards. Each other node sends its NodeInfo, and all
receive the same answer. Errors that torchrun would find by a timeout, or never, are reported here in one line, by every
node, within seconds.
"""

import asyncio
import errno
import json
import platform
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from ddp.core.errors import ExitCode, PeerLost, SetupError, Stopped, UserError, one_line, print_line
from ddp.core.network import addresses, is_loopback, is_own_address, listen, plain, port_owner
from ddp.core.signals import STOP_SIGNALS
from ddp.launcher.node_info import NodeInfo, print_table

# Node 0 speaks first: a node that is early, and reaches the torchrun store of a job that ends, sends nothing.
GREETING = b"ddp rendezvous\n"
MAX_INFO_BYTES = 2**20
REPLY_TIMEOUT_S = 3.0  # for a connection, a greeting, a registration; and until waiting is announced
RETRY_INTERVAL_S = 0.5
WAKE_INTERVAL_S = 0.05  # how long node 0 serves connections before it looks who has registered, and at signals
LATE_NODES_GRACE_S = 5.0  # after a mismatch, wait for late nodes, so that they receive the answer as well
FOREIGN_PROGRAM_GRACE_S = 10.0  # another program may hold the port for a while: the end of an earlier run, perhaps


class ConfigMismatch(SetupError):
    """Two nodes do not belong to the same run."""


@dataclass(frozen=True)
class Endpoint:
    """Where the nodes connect, and for how many seconds they wait for each other."""

    host: str
    port: int
    grace: float
    restart: bool = False  # the network worked before, so a failure may be temporary

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def timeout_error(self, message: str) -> UserError:
        """For a node that does not join: in the middle of a run it was lost, at the start the setup is wrong."""
        return PeerLost(message) if self.restart else SetupError(message)


def join_nodes(info: NodeInfo, endpoint: Endpoint) -> str:
    """Wait until all nodes are ready and agree. Returns this node's own address on the route to the others.

    Raises SetupError, on every node, if they do not agree or one is missing; PeerLost for the latter after a restart.
    """
    found = _resolve(endpoint)
    if info.node_rank != 0:
        return _register(info, endpoint)
    if not endpoint.restart and not any(is_own_address(address) for address in found):
        with suppress(OSError, ValueError):  # if there is another node 0, both report the mismatch
            _request_start(info, endpoint, wait=REPLY_TIMEOUT_S)
        own = [address for address in addresses() if not is_loopback(address) and not address.startswith("fe80")]
        here = f"{platform.node()}, which has --node-rank 0 (its addresses: {', '.join(own) or 'none'})"
        remedy = "pass one of these on every node, or change this --node-rank"
        raise SetupError(f"--master-addr {endpoint.host} is not an address of {here}: {remedy}")
    with closing(RendezvousServer(info, endpoint)) as server:
        return server.run()


def _resolve(endpoint: Endpoint) -> list[str]:
    """The addresses of --master-addr."""
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        if endpoint.restart:
            return []
        why = getattr(error, "strerror", None) or str(error)
        problem = f"{platform.node()} cannot find its address ({why}): check the name, or pass an IP address"
        raise SetupError(f"--master-addr {endpoint.host}: {problem}") from error
    return [str(entry[4][0]) for entry in found]


def _detect_dead_peer(connection: socket.socket) -> None:
    """Let the kernel find out within seconds that the other machine is off, or cut off."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3)):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _register(info: NodeInfo, endpoint: Endpoint) -> str:
    """Ask node 0 until it responds. Returns this node's own address on the route to node 0."""
    me, there = f"node {info.node_rank} ({info.host})", f"node 0 at {endpoint}"
    start, grace, foreign_since, announced = time.monotonic(), endpoint.grace, None, False
    while True:
        try:
            return _request_start(info, endpoint, wait=grace)
        except (OSError, ValueError) as failure:
            error, why, now = failure, getattr(failure, "strerror", None) or str(failure), time.monotonic()
        foreign_since = (foreign_since or now) if isinstance(error, ValueError) else None
        if getattr(error, "errno", None) == errno.ENETUNREACH and not endpoint.restart:
            raise SetupError(f"{me} has no route to {there} ({why}): check --master-addr and the network") from error
        if foreign_since is not None and now - foreign_since > FOREIGN_PROGRAM_GRACE_S and not endpoint.restart:
            remedy = "end that program, or choose another --master-port for all nodes"
            raise SetupError(f"{me} finds another program than {there}: {remedy}")
        if now - start > grace:
            hint = "check that launch_node.sh runs there with this --master-port, and that no firewall blocks the port"
            raise endpoint.timeout_error(f"{me} got no answer from {there} within {grace:g} s ({why}): {hint}")
        if now - start > REPLY_TIMEOUT_S and not announced:
            announced = True
            print_line(f"node {info.node_rank}: waiting for {there} (up to {grace:g} s; {why})")
        time.sleep(RETRY_INTERVAL_S)


def _request_start(info: NodeInfo, endpoint: Endpoint, wait: float) -> str:
    """Register, and wait for the answer. Raises OSError if there is none, ValueError for that of another program."""
    address = (endpoint.host, endpoint.port)
    with socket.create_connection(address, REPLY_TIMEOUT_S) as connection, connection.makefile("rb") as lines:
        _detect_dead_peer(connection)
        try:
            greeting = lines.readline(100)
        except TimeoutError as error:  # perhaps the store of a job that has not ended there
            raise OSError("the port is open, but nothing responds") from error
        if greeting != GREETING:
            raise ValueError("another program uses that port") if greeting else OSError("node 0 closed the connection")
        own_address = plain(connection.getsockname()[0])
        if info.facts:
            info.add_network_facts(own_address)
        with suppress(OSError):  # if node 0 is gone, that shows when its answer is read
            connection.sendall(info.to_json() + b"\n")
        connection.settimeout(wait + REPLY_TIMEOUT_S)
        if not (line := lines.readline()):
            raise OSError("node 0 closed the connection")
    answer = json.loads(line)
    if answer["start"]:
        return own_address
    kinds: dict[int, type[UserError]] = {ExitCode.PEER_LOST: PeerLost, ExitCode.STOPPED: Stopped}
    raise kinds.get(answer["exit_code"], SetupError)(answer["message"])


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Let signals' handlers run after this block: within asyncio, what they raise may be lost, or only printed."""
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


class RendezvousServer:
    """Node 0's side: an event loop serves the connections, and `run` looks now and then at who has registered."""

    def __init__(self, info: NodeInfo, endpoint: Endpoint) -> None:
        self.info, self.endpoint = info, endpoint
        self.nnodes: int = info.shared["--nnodes"]
        info.address = endpoint.host  # until another node connects
        self.connections: dict[asyncio.StreamWriter, NodeInfo | None] = {}  # None until the node has registered
        self.mismatch, self.answer = "", b""
        try:
            self.listener = listen(endpoint.port)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            why = f"is taken by {port_owner(endpoint.port)}" if taken else f"cannot be used ({error.strerror})"
            remedy = f"{'end that process, or ' if taken else ''}choose another --master-port for all nodes"
            raise SetupError(f"port {endpoint.port} of {platform.node()} {why}: {remedy}") from error
        self.loop = asyncio.new_event_loop()
        self.server: asyncio.Server | None = None

    @_signals_deferred()
    def close(self) -> None:
        """Close all connections: torchrun's store needs the port."""
        (self.server or self.listener).close()
        deadline = time.monotonic() + REPLY_TIMEOUT_S
        while asyncio.all_tasks(self.loop):  # one for each connection; `close` sends the rest of an answer first
            for writer in self.connections:
                writer.close() if time.monotonic() < deadline else writer.transport.abort()
            self.loop.run_until_complete(asyncio.sleep(WAKE_INTERVAL_S))
        self.loop.close()

    @_signals_deferred()
    def _serve_connections(self) -> None:
        if self.server is None:  # not in __init__: after a signal there, `close` would not be called
            start = asyncio.start_server(self._serve, sock=self.listener, limit=MAX_INFO_BYTES, backlog=1024)
            self.server = self.loop.run_until_complete(start)
        self.loop.run_until_complete(asyncio.sleep(WAKE_INTERVAL_S))

    def run(self) -> str:
        """Wait for all nodes, and answer them. Returns node 0's address as they see it."""
        try:
            self._wait_for_nodes()
            if self.info.facts and not self.mismatch:
                self.info.add_network_facts(self.info.address)
                print_table([self.info, *self._others()])  # all differences show before one is refused
                self.mismatch = next(filter(None, map(self.info.differences, self._others())), "")
            if self.mismatch:
                raise ConfigMismatch(self.mismatch)
        except UserError as error:
            self._answer(start=False, message=one_line(error), exit_code=error.exit_code)
            deadline = time.monotonic() + LATE_NODES_GRACE_S
            while isinstance(error, ConfigMismatch) and self._missing() and time.monotonic() < deadline:
                with suppress(UserError):
                    self._serve_connections()
            raise
        self._answer(start=True)
        return self.info.address

    def _wait_for_nodes(self) -> None:
        start, announced, grace, port = time.monotonic(), False, self.endpoint.grace, self.endpoint.port
        while (missing := self._missing()) and not self.mismatch:
            waited = time.monotonic() - start
            who = f"node{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            if waited > grace:
                joined = ", ".join(map(str, (self.info, *self._others())))
                count = f"only {self.nnodes - len(missing)} of {self.nnodes} nodes joined at {self.endpoint}"
                remedy = f"Run launch_node.sh there with --master-addr {self.endpoint.host} --master-port {port}"
                raise self.endpoint.timeout_error(f"{count} within {grace:g} s: {joined}; missing: {who}. {remedy}")
            if waited > REPLY_TIMEOUT_S and not announced:
                announced = True
                print_line(f"node 0: waiting for {who} at port {port} (up to {grace:g} s)")
            self._serve_connections()

    def _others(self) -> list[NodeInfo]:
        return sorted((node for node in self.connections.values() if node), key=lambda node: node.node_rank)

    def _missing(self) -> list[int]:
        joined = {node.node_rank for node in self._others()}
        return [rank for rank in range(1, self.nnodes) if rank not in joined]

    def _answer(self, **answer: Any) -> None:
        """Answer all nodes that have registered, and those that will."""
        self.answer = json.dumps(answer).encode() + b"\n"
        for writer, node in self.connections.items():
            if node:
                writer.write(self.answer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until it is closed. Whatever it sends can only end itself."""
        self.connections[writer] = None
        try:
            _detect_dead_peer(writer.get_extra_info("socket"))
            writer.write(GREETING)
            line = await asyncio.wait_for(reader.readuntil(b"\n"), REPLY_TIMEOUT_S)
            if node := NodeInfo.from_json(line):
                self._add(writer, node)
                await reader.read(1)  # a registered node sends nothing more: it is gone. It may register again
        except (OSError, EOFError, asyncio.LimitOverrunError, asyncio.TimeoutError):
            pass  # from a port scanner, or from a process of an earlier job. Python 3.10 has two kinds of TimeoutError
        finally:
            del self.connections[writer]
            writer.transport.abort()
            with suppress(OSError):
                await writer.wait_closed()

    def _add(self, writer: asyncio.StreamWriter, node: NodeInfo) -> None:
        """A node has joined; also a wrong one receives the answer. Raises OSError if it is gone."""
        connection = writer.get_extra_info("socket")
        node.address, own = (plain(name[0]) for name in (connection.getpeername(), connection.getsockname()))
        if self.info.address == self.endpoint.host or not is_loopback(own):
            self.info.address = own  # if there are several, one that leads to other machines
        self.mismatch = self.mismatch or self._conflict(node)
        self.connections[writer] = node
        writer.write(self.answer)

    def _conflict(self, node: NodeInfo) -> str:
        """Why this node does not belong to this run; empty if it does."""
        for other in (self.info, *self._others()):
            if other.node_rank == node.node_rank:
                ranks = f"from 0 to {self.nnodes - 1}"
                return f"{other} and {node} have the same --node-rank: give each machine its own, {ranks}"
        if node.facts and self.info.fits_in_one_table(node):
            return ""  # --check compares the rest after all have joined
        return self.info.differences(node)
