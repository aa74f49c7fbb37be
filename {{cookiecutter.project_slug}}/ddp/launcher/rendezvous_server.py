"""The nodes connect to node 0, which compares what they are about to run: then all of them start, or none.

Node 0 listens at --master-port, where torchrun's store listens afterwards. Each other node sends its NodeInfo, and all
receive the same answer. Errors that torchrun would find by a timeout, or never, are reported here in one line, by every
node, within seconds.
"""

import errno
import json
import platform
import selectors
import socket
import time
from contextlib import suppress
from typing import Any

from ddp.core.errors import SetupError, UserError, one_line, print_line
from ddp.core.network import addresses, is_loopback, is_own_address, listen, plain, port_owner
from ddp.core.options import flag_of
from ddp.launcher import rendezvous_client as client
from ddp.launcher.node_info import BASIC_OPTIONS, NodeInfo, print_table
from ddp.launcher.rendezvous_client import GREETING, REPLY_TIMEOUT_S, Endpoint

LATE_NODES_GRACE_S = 5.0  # after a mismatch, wait for late nodes, so that they receive the answer as well
MAX_INFO_BYTES = 2**20


class ConfigMismatch(SetupError):
    """Two nodes do not belong to the same run."""


def join_nodes(info: NodeInfo, endpoint: Endpoint) -> str:
    """Wait until all nodes are ready and agree. Returns this node's own address on the route to the others.

    Raises SetupError, on every node, if they do not agree or one is missing; PeerLost for the latter after a restart.
    """
    found = client.resolve(endpoint)
    if info.node_rank != 0:
        return client.register(info, endpoint)
    if not endpoint.restart and not any(is_own_address(address) for address in found):
        with suppress(OSError, ValueError):  # if there is another node 0, both report the mismatch
            client.request_start(info, endpoint, wait=REPLY_TIMEOUT_S)
        own = [address for address in addresses() if not is_loopback(address) and not address.startswith("fe80")]
        raise SetupError(
            f"--master-addr {endpoint.host} is not an address of {platform.node()}, which has --node-rank 0 (its "
            f"addresses: {', '.join(own) or 'none'}): pass one of these on every node, or change this --node-rank"
        )
    server = NodeRendezvousServer(info, endpoint)
    try:
        return server.run()
    finally:
        server.close()


class NodeRendezvousServer:
    """Node 0's side: the nodes that have registered, and pending connections that have not."""

    def __init__(self, info: NodeInfo, endpoint: Endpoint) -> None:
        self.info, self.endpoint = info, endpoint
        self.nnodes: int = info.shared["--nnodes"]
        info.address = endpoint.host  # until another node connects
        self.nodes: dict[int, tuple[socket.socket, NodeInfo]] = {}
        self.pending: dict[socket.socket, tuple[float, bytes]] = {}  # deadline, and what was received so far
        try:
            self.listener = listen(endpoint.port)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            why = f"is taken by {port_owner(endpoint.port)}" if taken else f"cannot be used ({error.strerror})"
            remedy = f"{'end that process, or ' if taken else ''}choose another --master-port for all nodes"
            raise SetupError(f"port {endpoint.port} of {platform.node()} {why}: {remedy}") from error
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)

    def close(self) -> None:
        """Close all connections: torchrun's store needs the port."""
        for connection in [*self.pending, *(connection for connection, _ in self.nodes.values()), self.listener]:
            connection.close()
        self.selector.close()

    def run(self) -> str:
        """Wait for all nodes, and answer them. Returns node 0's address as they see it."""
        try:
            self._wait_for_nodes()
            if self.info.facts:
                self.info.add_network_facts(self.info.address)
                print_table([self.info, *self._others()])
                for node in self._others():  # in a table, all differences show before one is refused
                    self._compare(node)
        except UserError as error:
            answer = {"start": False, "message": one_line(error), "exit_code": error.exit_code}
            self._answer(answer)
            deadline = time.monotonic() + LATE_NODES_GRACE_S
            while isinstance(error, ConfigMismatch) and self._missing() and time.monotonic() < deadline:
                with suppress(UserError):
                    self._process_events()
                self._answer(answer)
            raise
        self._answer({"start": True})
        return self.info.address

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self.nnodes) if rank not in self.nodes]

    def _wait_for_nodes(self) -> None:
        start, announced, grace = time.monotonic(), False, self.endpoint.grace
        while missing := self._missing():
            waited = time.monotonic() - start
            who = f"node{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            if waited > grace:
                joined = ", ".join(self._name(node) for node in (self.info, *self._others()))
                raise self.endpoint.timeout_error(
                    f"only {self.nnodes - len(missing)} of {self.nnodes} nodes joined at {self.endpoint} within "
                    f"{grace:g} s: {joined}; missing: {who}. Run launch_node.sh there with --master-addr "
                    f"{self.endpoint.host} --master-port {self.endpoint.port}"
                )
            if waited > REPLY_TIMEOUT_S and not announced:
                announced = True
                print_line(f"node 0: waiting for {who} at port {self.endpoint.port} (up to {grace:g} s)")
            self._process_events()

    def _answer(self, answer: dict[str, Any]) -> None:
        for connection, _ in self.nodes.values():
            client.send(connection, json.dumps(answer).encode())

    # ---- connections ------------------------------------------------------------------------------------------------

    def _process_events(self) -> None:
        """Accept connections, read what was sent, drop what is gone. No connection can make the others wait."""
        ready = [key.fileobj for key, _ in self.selector.select(0.2)]
        for rank, (connection, _) in list(self.nodes.items()):
            if connection in ready:  # a registered node sends nothing more: it is gone. It may register again
                del self.nodes[rank]
                self._drop(connection)
        for connection, (deadline, received) in list(self.pending.items()):
            if connection in ready:
                self._read(connection, deadline, received)
            elif time.monotonic() > deadline:  # a port scanner, or a process of an earlier job
                self._drop(connection)
        if self.listener in ready:
            with suppress(OSError):
                self._accept(self.listener.accept()[0])

    def _accept(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        client.detect_dead_peer(connection)
        self.pending[connection] = (time.monotonic() + REPLY_TIMEOUT_S, b"")
        self.selector.register(connection, selectors.EVENT_READ)
        connection.send(GREETING)

    def _drop(self, connection: socket.socket) -> None:
        self.pending.pop(connection, None)
        self.selector.unregister(connection)
        connection.close()

    def _read(self, connection: socket.socket, deadline: float, received: bytes) -> None:
        data = b""
        with suppress(OSError):
            data = connection.recv(65536)
        line, end, _ = (received + data).partition(b"\n")
        node = NodeInfo.from_json(line) if end else None
        if not data or len(line) > MAX_INFO_BYTES or (end and node is None):
            self._drop(connection)
        elif node is None:
            self.pending[connection] = (deadline, line)
        else:
            del self.pending[connection]
            self._register(connection, node)

    # ---- nodes ------------------------------------------------------------------------------------------------------

    def _register(self, connection: socket.socket, node: NodeInfo) -> None:
        """A node has joined. Raises ConfigMismatch, for all nodes, if it does not belong to this run."""
        node.address, own = (plain(name[0]) for name in (connection.getpeername(), connection.getsockname()))
        if self.info.address == self.endpoint.host or not is_loopback(own):
            self.info.address = own  # if there are several, one that leads to other machines
        taken = self.info if node.node_rank == 0 else self.nodes.get(node.node_rank, (None, None))[1]
        self.nodes[-1 if taken else node.node_rank] = (connection, node)  # also a wrong node receives the answer
        if taken:
            raise ConfigMismatch(
                f"{self._name(taken)} and {self._name(node)} have the same --node-rank: give each machine its own, "
                f"from 0 to {self.nnodes - 1}"
            )
        ours = self.info.shared
        if node.facts and all(ours.get(flag) == node.shared.get(flag) for flag in map(flag_of, BASIC_OPTIONS)):
            node.facts["offset"] = node.facts["clock"] - time.time()  # --check compares the rest after all have joined
        else:
            self._compare(node)

    def _compare(self, node: NodeInfo) -> None:
        """Raises ConfigMismatch if this node would run something else than node 0."""
        ours, theirs = self.info.shared, node.shared
        differences = [
            f"{name} differs" if name.startswith("the file ") else f"{name} is {ours.get(name)} and {theirs.get(name)}"
            for name in {**ours, **theirs}
            if ours.get(name) != theirs.get(name)
        ]
        if differences:
            more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
            raise ConfigMismatch(
                f"{self._name(self.info)} and {self._name(node)} do not agree: {'; '.join(differences[:3])}{more}. "
                "Start all nodes with the same options, code and versions"
            )

    def _others(self) -> list[NodeInfo]:
        return [self.nodes[rank][1] for rank in sorted(self.nodes)]

    def _name(self, node: NodeInfo) -> str:
        return f"node {node.node_rank} ({node.host}, {node.address})"
