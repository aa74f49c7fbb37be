"""The nodes connect to node 0, which compares what they are about to run: then all of them start, or none.

Node 0 listens at --master-port, where torchrun's store listens afterwards. Each other node sends its NodeInfo, and all
receive the same answer. Errors that torchrun would find by a timeout, or never, are reported here in one line, by every
node, within seconds. With --nnodes MIN:MAX, some may be missing once the grace time is over; they join at a restart.
"""

import errno
import json
import math
import re
import socket
import sys
import time
from collections.abc import Collection
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from ddp.core.errors import (
    ExitCode,
    PeerLost,
    SetupError,
    Stopped,
    UsageError,
    UserError,
    numbered,
    one_line,
    print_line,
)
from ddp.core.host import addresses, allow_many_files, is_loopback, is_own_address, listen, plain, port_owner
from ddp.launcher.node_info import NodeInfo, print_table

# Node 0 speaks first: a node that is early, and reaches the torchrun store of a job that ends, sends nothing.
GREETING = b"ddp rendezvous\n"
MAX_INFO_BYTES = 2**20
SPARE_FILES = 100  # that the launcher opens itself
REPLY_TIMEOUT_S = 3.0  # for a connection, a greeting, a registration; and until waiting is announced
RETRY_INTERVAL_S, POLL_INTERVAL_S = 0.5, 0.05
LATE_NODES_GRACE_S = 5.0  # for nodes that try to connect now and then: after a mismatch they hear of it as well
FOREIGN_PROGRAM_GRACE_S = 10.0  # another program may hold the port for a while: the end of an earlier run, perhaps


@dataclass(frozen=True)
class Endpoint:
    """Where the nodes connect, and for how many seconds they wait for each other."""

    host: str
    port: int
    grace: float
    restart: bool = False  # the network worked before, so a failure may be temporary
    elastic: bool = False  # with --nnodes MIN:MAX: the run may continue without some nodes

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def timeout_error(self, message: str) -> UserError:
        """For a node that does not join: in the middle of a run it was lost, at the start the setup is wrong."""
        return PeerLost(message) if self.restart else SetupError(message)


class PortIsSilent(OSError):
    """Something listens at the port and sends nothing: perhaps the store of a job that has not ended there."""


def node_range(text: str) -> tuple[int, int]:
    """The smallest and the largest number of nodes: `4` gives 4 and 4, `2:4` gives 2 and 4. Raises UsageError."""
    found = re.fullmatch(r"(?:([0-9]{1,6}):)?([0-9]{1,6})", text)
    most = int(found[2]) if found else 0
    least = int(found[1] or most) if found else 0
    if not 1 <= least <= most:
        raise UsageError(f"--nnodes: {text!r} must be an integer >= 1, or MIN:MAX, such as 2:4")
    return least, most


def join_nodes(info: NodeInfo, endpoint: Endpoint, members: Collection[int]) -> list[int]:
    """Wait until all nodes are ready and agree, and return their ranks. Some may be missing with --nnodes MIN:MAX.

    members: those of the last round; the whole grace time is only for them.
    Raises SetupError, on every node, if they do not agree or one is missing; PeerLost for the latter after a restart.
    """
    if not endpoint.restart:
        _check_address(info, endpoint)
    if info.node_rank != 0:
        return _register(info, endpoint)
    with closing(RendezvousServer(info, endpoint, members)) as server:
        return server.run()


def _check_address(info: NodeInfo, endpoint: Endpoint) -> None:
    """Refuse a --master-addr that does not resolve, or that node 0 does not have."""
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        problem = f"{info.host} cannot find its address ({_reason(error)}): check the name, or pass an IP address"
        raise SetupError(f"--master-addr {endpoint.host}: {problem}") from error
    if info.node_rank == 0 and not any(is_own_address(str(entry[4][0])) for entry in found):
        with suppress(OSError, ValueError):  # if there is another node 0, both report the mismatch
            _request_start(info, replace(endpoint, grace=LATE_NODES_GRACE_S))
        own = [address for address in addresses() if not is_loopback(address) and not address.startswith("fe80")]
        here = f"{info.host}, which has --node-rank 0 (its addresses: {', '.join(own) or 'none'})"
        remedy = "pass one of these on every node, or change this --node-rank"
        raise SetupError(f"--master-addr {endpoint.host} is not an address of {here}: {remedy}")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _detect_dead_peer(connection: socket.socket) -> None:
    """Let the kernel find out within seconds that the other machine is off, or cut off."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3)):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _register(info: NodeInfo, endpoint: Endpoint) -> list[int]:
    """Ask node 0 until it responds."""
    me, there = f"node {info.node_rank} ({info.host})", f"node 0 at {endpoint}"
    start, grace, announced, foreign_since = time.monotonic(), endpoint.grace, False, math.inf
    deadline, was_silent = start + grace, False
    while True:
        try:
            return _request_start(info, endpoint)
        except (OSError, ValueError) as error:
            now, why = time.monotonic(), _reason(error)
            if endpoint.elastic and isinstance(error, PortIsSilent):
                was_silent, deadline = True, now + grace
                why = f"{why}: if a run is in progress there, this node joins when that restarts"
            foreign_since = min(foreign_since, now) if isinstance(error, ValueError) else math.inf
            unreachable = getattr(error, "errno", None) == errno.ENETUNREACH
        if unreachable and not endpoint.restart:
            raise SetupError(f"{me} has no route to {there} ({why}): check --master-addr and the network")
        if now - foreign_since > FOREIGN_PROGRAM_GRACE_S and not endpoint.restart:
            remedy = "end that program, or choose another --master-port for all nodes"
            raise SetupError(f"{me} finds another program than {there}: {remedy}")
        if now > deadline and was_silent:
            raise SetupError(f"the run at {endpoint} has ended without {me}")
        if now > deadline:
            hint = "check that launch_node.sh runs there with this --master-port, and that no firewall blocks the port"
            raise endpoint.timeout_error(f"{me} got no answer from {there} within {grace:g} s ({why}): {hint}")
        if now - start > REPLY_TIMEOUT_S and not announced:
            announced = True
            print_line(f"node {info.node_rank}: waiting for {there} (up to {grace:g} s; {why})")
        time.sleep(RETRY_INTERVAL_S)


def _request_start(info: NodeInfo, endpoint: Endpoint) -> list[int]:
    """Register, and wait for the answer. Raises OSError if there is none, ValueError for that of another program."""
    address = (endpoint.host, endpoint.port)
    with socket.create_connection(address, REPLY_TIMEOUT_S) as connection, connection.makefile("rb") as lines:
        _detect_dead_peer(connection)
        try:
            greeting = lines.readline(100)
        except TimeoutError as error:
            raise PortIsSilent("the port is open, but nothing responds") from error
        if greeting not in (GREETING, b""):
            raise ValueError("another program uses that port")
        if info.facts:
            info.add_network_facts(plain(connection.getsockname()[0]))
        connection.sendall(json.dumps(asdict(info)).encode() + b"\n")
        connection.settimeout(None if endpoint.elastic else endpoint.grace + REPLY_TIMEOUT_S)
        if not (line := lines.readline()):
            raise OSError("node 0 closed the connection")
    answer = json.loads(line)
    if not answer["start"]:
        kinds: dict[int, type[UserError]] = {ExitCode.PEER_LOST: PeerLost, ExitCode.STOPPED: Stopped}
        raise kinds.get(answer["exit_code"], SetupError)(answer["message"])
    return list(answer["nodes"])


def _send(connection: socket.socket, answer: dict[str, Any]) -> None:
    connection.settimeout(REPLY_TIMEOUT_S)
    with suppress(OSError):
        connection.sendall(json.dumps(answer).encode() + b"\n")


@dataclass
class Client:
    """Another program that has connected to node 0."""

    deadline: float  # to register
    received: bytes = b""
    node: NodeInfo | None = None  # once it has registered


class RendezvousServer:
    """Node 0's side. One loop serves all connections, without waiting for any."""

    def __init__(self, info: NodeInfo, endpoint: Endpoint, members: Collection[int]) -> None:
        self.info, self.endpoint, self.members = info, endpoint, {*members}
        self.least, self.most = node_range(str(info.shared["--nnodes"]))
        info.address = endpoint.host  # until a node of another machine connects
        self.clients: dict[socket.socket, Client] = {}
        self.mismatch = ""
        if self.most > (files := allow_many_files()) - SPARE_FILES:
            problem = f"{info.host} may open {files} files, and each of {self.most} nodes needs one"
            raise SetupError(f"{problem}: raise the limit there (ulimit -Hn)")
        try:
            self.listener = listen(endpoint.port)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            why = f"is taken by {port_owner(endpoint.port)}" if taken else f"cannot be used ({_reason(error)})"
            remedy = f"{'end that process, or ' if taken else ''}choose another --master-port for all nodes"
            raise SetupError(f"port {endpoint.port} of {info.host} {why}: {remedy}") from error
        self.listener.setblocking(False)

    def close(self) -> None:
        """Close all connections: torchrun's store needs the port."""
        for connection in (self.listener, *self.clients):
            connection.close()

    def run(self) -> list[int]:
        """Wait for the nodes, and answer them. Returns their ranks."""
        try:
            self._wait_for_nodes()
            if self.info.facts and not self.mismatch:
                self.info.add_network_facts(self.info.address)
                print_table(nodes := self._nodes())  # all differences show before one is refused
                self.mismatch = next(filter(None, map(self.info.differences, nodes)), "")
            if self.mismatch:
                deadline = time.monotonic() + LATE_NODES_GRACE_S
                while self._missing() and time.monotonic() < deadline:
                    self._serve()
                raise SetupError(self.mismatch)
        except UserError as error:
            self._answer(start=False, message=one_line(error), exit_code=error.exit_code)
            raise
        ranks = [node.node_rank for node in self._nodes()]
        if back := {*ranks} - self.members:
            print_line(f"node 0: {numbered('node', back)} joined again: {len(ranks)} of {self.most} nodes")
        self._answer(start=True, nodes=ranks)
        return ranks

    def _wait_for_nodes(self) -> None:
        start, announced, grace, port = time.monotonic(), False, self.endpoint.grace, self.endpoint.port
        while (missing := self._missing()) and not self.mismatch:
            waited, joined, who = time.monotonic() - start, self.most - len(missing), numbered("node", missing)
            if joined >= self.least and waited > (grace if self.members & missing else LATE_NODES_GRACE_S):
                if self.members & missing:
                    line = f"{who} did not join within {grace:g} s: training with {joined} of {self.most} nodes"
                    print_line(f"node 0: {line}; a node that comes back joins at the next restart")
                return
            if waited > grace:
                nodes = ", ".join(map(str, self._nodes()))
                count = f"only {joined} of {self.most} nodes joined at {self.endpoint}"
                remedy = f"Run launch_node.sh there with --master-addr {self.endpoint.host} --master-port {port}"
                raise self.endpoint.timeout_error(f"{count} within {grace:g} s: {nodes}; missing: {who}. {remedy}")
            if waited > REPLY_TIMEOUT_S and not announced:
                announced = True
                print_line(f"node 0: waiting for {who} at port {port} (up to {grace:g} s)")
            self._serve()

    def _nodes(self) -> list[NodeInfo]:
        """This node and those that have registered, by rank."""
        others = [client.node for client in self.clients.values() if client.node]
        return sorted([self.info, *others], key=lambda node: node.node_rank)

    def _missing(self) -> set[int]:
        return {*range(self.most)} - {node.node_rank for node in self._nodes()}

    def _answer(self, **answer: Any) -> None:
        """Answer the nodes that have registered. One that does not read delays a long answer by REPLY_TIMEOUT_S."""
        for connection, client in self.clients.items():
            if client.node:
                _send(connection, answer)

    def _serve(self) -> None:
        """Wait a moment, then accept and receive what has arrived. Bad input closes only its connection."""
        time.sleep(POLL_INTERVAL_S)
        with suppress(OSError):  # no other has connected; or too many have, for files
            while True:
                connection, _ = self.listener.accept()
                _detect_dead_peer(connection)
                connection.setblocking(False)
                connection.send(GREETING)
                self.clients[connection] = Client(time.monotonic() + REPLY_TIMEOUT_S)
        for connection, client in list(self.clients.items()):
            try:
                self._receive(connection, client)
            except BlockingIOError:
                pass
            except (OSError, ValueError):  # a port scanner, a process of an earlier job, or a node that is gone
                connection.close()
                del self.clients[connection]

    def _receive(self, connection: socket.socket, client: Client) -> None:
        """Receive what there is, and register the node. Raises OSError or ValueError if the connection is of no use."""
        if client.node is None and time.monotonic() > client.deadline:
            raise TimeoutError
        data = connection.recv(2**16)
        client.received += data
        if not data or client.node or len(client.received) > MAX_INFO_BYTES:  # a node sends nothing more
            raise OSError("closed")
        if not client.received.endswith(b"\n"):
            return
        node = NodeInfo.from_json(client.received)
        node.address, own = (plain(name[0]) for name in (connection.getpeername(), connection.getsockname()))
        if self.info.address == self.endpoint.host or not is_loopback(own):
            self.info.address = own
        conflict = self._conflict(node)
        if conflict and self.endpoint.restart and self.endpoint.elastic:  # the run continues without this node
            _send(connection, {"start": False, "message": conflict, "exit_code": ExitCode.SETUP})
            raise OSError("refused")
        self.mismatch = self.mismatch or conflict
        client.node = node  # also a wrong one receives the answer

    def _conflict(self, node: NodeInfo) -> str:
        """Why this node does not belong to this run; empty if it does."""
        for other in self._nodes():
            if other.node_rank == node.node_rank:
                remedy = f"give each machine its own, from 0 to {self.most - 1}"
                return f"{other} and {node} have the same --node-rank: {remedy}"
        if self.info.facts and node.facts and node.shared.get("--nnodes") == self.info.shared["--nnodes"]:
            return ""  # --check compares the rest after all have joined
        return self.info.differences(node)
