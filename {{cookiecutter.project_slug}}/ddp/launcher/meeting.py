"""The nodes meet before each of them starts torchrun: node 0 compares what they are about to run; then all go, or none.

Node 0 listens at --master-port, where torchrun's store will listen afterwards. Every other node connects and sends its
card: who it is, and what must be the same everywhere. All receive one verdict. What torchrun would find out by a
timeout, or never, is said here in one line, by every node, within seconds. No torch in here.
"""

from __future__ import annotations

import errno
import json
import platform
import selectors
import socket
import time
from contextlib import suppress
from typing import Any

from ddp.errors import EnvironmentFailure, Failure, PeerLost, one_line, say
from ddp.launcher.facts import seen_from, show
from ddp.launcher.network import addresses, holder, is_loopback, is_mine, listen, plain
from ddp.launcher.visit import GREETING, PATIENCE_S, Card, Place, ask, notice_death, resolve, send, visit

LINGER_S = 5.0  # after a refusal, stay so long for nodes that are late
LONGEST_CARD = 2**20


class Disagreement(EnvironmentFailure):
    """Two nodes do not belong to the same run."""


def meet(card: Card, place: Place) -> str:
    """Wait until all nodes are there and agree. Returns this node's own address on the way to the others.

    Raises EnvironmentFailure, on every node, if they do not agree or one does not come; PeerLost for the latter unless
    it is the first meeting.
    """
    found = resolve(place)
    if card["node_rank"] != 0:
        return visit(card, place)
    if not place.again and not any(is_mine(address) for address in found):
        _refuse_foreign_address(card, place)
    table = Table(card, place)
    try:
        return table.run()
    finally:
        table.close()


def _refuse_foreign_address(card: Card, place: Place) -> None:
    with suppress(OSError, ValueError):  # a node 0 that is there learns that this one has its number, too
        ask(card, place, wait=PATIENCE_S)
    own = [address for address in addresses() if not is_loopback(address) and not address.startswith("fe80")]
    raise EnvironmentFailure(
        f"--master-addr {place.host} is no address of {platform.node()}, which has --node-rank 0 (its addresses: "
        f"{', '.join(own) or 'none'}): give one of these on every node, or start this one with another --node-rank"
    )


class Table:
    """The nodes that have come, and the strangers who have not said yet who they are."""

    def __init__(self, card: Card, place: Place) -> None:
        self.card, self.place = card, place
        self.nnodes: int = card["same"]["--nnodes"]
        self.address = place.host  # of node 0, as others see it once one of them has come
        self.nodes: dict[int, tuple[socket.socket, Card]] = {}
        self.strangers: dict[socket.socket, tuple[float, bytes]] = {}  # deadline, and what they have sent so far
        try:
            self.door = listen(place.port)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            why = f"is taken by {holder(place.port)}: end that, or" if taken else f"cannot be used ({error.strerror}):"
            raise EnvironmentFailure(
                f"port {place.port} of {platform.node()} {why} give all nodes another --master-port"
            ) from error
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.door, selectors.EVENT_READ)

    def close(self) -> None:
        """Close every connection, so that torchrun's store can take the port."""
        for connection in [*self.strangers, *(connection for connection, _ in self.nodes.values()), self.door]:
            connection.close()
        self.selector.close()

    def run(self) -> str:
        """Wait for all nodes, and tell them the verdict. Returns the address by which they have come."""
        try:
            self._wait()
            if "facts" in self.card:
                self._show()
        except Failure as error:
            self._tell({"go": False, "why": one_line(error), "exit_code": error.exit_code})
            if isinstance(error, Disagreement) and self._missing():
                self._linger(error)
            raise
        self._tell({"go": True})
        return self.address

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self.nnodes) if rank not in self.nodes]

    def _wait(self) -> None:
        start, told = time.monotonic(), False
        while missing := self._missing():
            waited = time.monotonic() - start
            who = f"node{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            if waited > self.place.grace:
                here = ", ".join(self._name(rank) for rank in (0, *sorted(self.nodes)))
                raise (PeerLost if self.place.again else EnvironmentFailure)(
                    f"{who} of {self.nnodes} did not come within {self.place.grace:g} s; here: {here}. Start "
                    f"launch_node.sh there, with --master-addr {self.place.host} --master-port {self.place.port}"
                )
            if waited > PATIENCE_S and not told:
                told = True
                say(f"node 0: waiting for {who} at port {self.place.port} (up to {self.place.grace:g} s)")
            self._turn()

    def _tell(self, verdict: dict[str, Any]) -> None:
        for connection, _ in self.nodes.values():
            send(connection, verdict)

    def _linger(self, error: Failure) -> None:
        """Nodes that are late hear the verdict, too, instead of waiting for a node 0 that is gone."""
        end = time.monotonic() + LINGER_S
        while time.monotonic() < end:
            with suppress(Failure):
                self._turn()
            self._tell({"go": False, "why": one_line(error), "exit_code": error.exit_code})

    # ---- one turn ---------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Let in who has come, see off who has left, read what was sent. Nobody can keep the others waiting."""
        ready = [key.fileobj for key, _ in self.selector.select(0.2)]
        for rank, (connection, _) in list(self.nodes.items()):
            if connection in ready:  # a node has nothing more to say: it is gone. It may come again
                del self.nodes[rank]
                self._forget(connection)
        for stranger, (deadline, _) in list(self.strangers.items()):
            if stranger in ready:
                self._read(stranger)
            elif time.monotonic() > deadline:
                self._dismiss(stranger)
        if self.door in ready:
            with suppress(OSError):
                self._let_in(self.door.accept()[0])

    def _let_in(self, stranger: socket.socket) -> None:
        stranger.setblocking(False)
        notice_death(stranger)
        self.strangers[stranger] = (time.monotonic() + PATIENCE_S, b"")
        self.selector.register(stranger, selectors.EVENT_READ)
        stranger.send(GREETING)

    def _forget(self, connection: socket.socket) -> None:
        self.selector.unregister(connection)
        connection.close()

    def _dismiss(self, stranger: socket.socket) -> None:
        """A port scanner, or a process of an earlier round."""
        del self.strangers[stranger]
        self._forget(stranger)

    def _read(self, stranger: socket.socket) -> None:
        deadline, before = self.strangers[stranger]
        received = b""
        with suppress(OSError):
            received = stranger.recv(65536)
        line, end, _ = (before + received).partition(b"\n")
        card = _card(line) if end else None
        if not received or len(line) > LONGEST_CARD or (end and card is None):
            self._dismiss(stranger)
        elif card is None:
            self.strangers[stranger] = (deadline, line)
        else:
            del self.strangers[stranger]
            self._seat(stranger, card)

    def _seat(self, connection: socket.socket, card: Card) -> None:
        """A node has come. Raises Disagreement, for all, if it does not belong to the others."""
        rank = card["node_rank"]
        card["address"] = plain(connection.getpeername()[0])
        own = plain(connection.getsockname()[0])
        if self.address == self.place.host or not is_loopback(own):
            self.address = own  # of several, one that leads to other machines
        if rank == 0 or rank in self.nodes:
            known = self.card if rank == 0 else self.nodes[rank][1]
            self.nodes[-1] = (connection, card)  # so that it hears the verdict
            raise Disagreement(
                f"{self._name(rank, known)} and {self._name(rank, card)} have the same number: give each machine a "
                f"--node-rank of its own, from 0 to {self.nnodes - 1}"
            )
        self.nodes[rank] = (connection, card)
        if self._checks(card):
            card["facts"]["offset"] = card["facts"]["clock"] - time.time()
        else:
            self._compare(rank, card)

    def _checks(self, card: Card) -> bool:
        """Whether all that differs shall be shown at the end, once everybody is there, in a table."""
        basic = ("--check", "--nnodes", "--nproc-per-node")
        return "facts" in card and all(self.card["same"].get(name) == card["same"].get(name) for name in basic)

    def _compare(self, rank: int, card: Card) -> None:
        """Raises Disagreement if this node would run something else than node 0."""
        differences = _differences(self.card["same"], card["same"])
        if differences:
            more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
            raise Disagreement(
                f"{self._name(0)} and {self._name(rank)} do not agree: {'; '.join(differences[:3])}{more}. Start "
                "all nodes with the same options, on the same code and versions"
            )

    def _show(self) -> None:
        """--check: print what the nodes are, side by side. Raises Disagreement if they do not belong together."""
        self.card["facts"] |= {**seen_from(self.address), "offset": 0.0}
        show([self.card, *(self.nodes[rank][1] for rank in sorted(self.nodes))])
        for rank, (_, card) in sorted(self.nodes.items()):
            self._compare(rank, card)

    def _name(self, rank: int, card: Card | None = None) -> str:
        card = card or (self.card if rank == 0 else self.nodes[rank][1])
        return f"node {rank} ({card['host']}, {card.get('address', self.address)})"


def _card(line: bytes) -> Card | None:
    """The card of a node; None for anything else."""
    with suppress(ValueError):
        card = json.loads(line)
        if isinstance(card, dict) and isinstance(card.get("same"), dict) and isinstance(card.get("node_rank"), int):
            return {"host": "?", **card}
    return None


def _differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return [
        f"{name} differs" if name.startswith("the file ") else f"{name} is {ours.get(name)} and {theirs.get(name)}"
        for name in names
    ]
