"""A node on its way to the meeting (meeting.py): what it says of itself, and how it asks node 0. No torch in here."""

from __future__ import annotations

import errno
import json
import platform
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from config import Config
from ddp.errors import EnvironmentFailure, Failure, PeerLost, Stopped, say
from ddp.fingerprint import code_of
from ddp.launcher.facts import facts_of, nccl_version, seen_from, version_of
from ddp.launcher.network import plain

# Node 0 speaks first. So a node that comes early, and meets the store of a round that is about to end, is silent.
GREETING = b"ddp meeting\n"
PATIENCE_S = 3.0  # wait so long before saying that one waits; and for a connection, a greeting, a card
RETRY_S = 0.5
FOREIGN_S = 10.0  # so long another program may hold the port: the end of an earlier run, perhaps
Card = dict[str, Any]


class Foreign(OSError):
    """Something answers at the address of node 0, and it is no meeting."""


@dataclass(frozen=True)
class Place:
    """Where the nodes meet, and for how many seconds they wait for each other.

    again: not the run's first meeting. The network was right before, and somebody may notice late what happened.
    """

    host: str
    port: int
    grace: float
    again: bool = False


def make_card(node_rank: int, nnodes: int, nproc: int, config: Config, check: bool = False) -> Card:
    """What a node says about itself."""
    options = config.shared()
    options |= {"torch": version_of("torch"), "NCCL": nccl_version()}
    options["Python"] = ".".join(platform.python_version_tuple()[:2])
    same = {"--check": check, "--nnodes": nnodes, "--nproc-per-node": nproc, **options, **code_of()}
    facts = {"facts": facts_of(config)} if check else {}
    return {"node_rank": node_rank, "host": platform.node(), "same": same, **facts}


def resolve(place: Place) -> list[str]:
    """The addresses of --master-addr."""
    try:
        found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        if place.again:
            return []
        raise EnvironmentFailure(
            f"--master-addr {place.host}: {platform.node()} cannot find its address ({_reason(error)}): check the "
            "name, or give an IP address"
        ) from error
    return [str(entry[4][0]) for entry in found]


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def visit(card: Card, place: Place) -> str:
    """Ask node 0 until it answers. Returns this node's own address on the way there."""
    start, told, rank = time.monotonic(), False, card["node_rank"]
    foreign_since = None
    where = f"node 0 at {place.host}:{place.port}"
    while True:
        try:
            return ask(card, place, wait=place.grace)
        except (OSError, ValueError) as error:
            last, why = error, _reason(error)
            if getattr(error, "errno", None) == errno.ENETUNREACH and not place.again:
                me = f"node {rank} ({platform.node()})"
                raise EnvironmentFailure(
                    f"{me} has no way to {where} ({why}): check --master-addr and the network"
                ) from error
        now = time.monotonic()
        waited = now - start
        foreign_since = (foreign_since or now) if isinstance(last, Foreign) else None
        if foreign_since is not None and now - foreign_since > FOREIGN_S and not place.again:
            raise EnvironmentFailure(
                f"node {rank} ({platform.node()}) finds another program than node 0 at {place.host}:{place.port}: "
                "give all nodes another --master-port, or end that program"
            )
        if waited > place.grace:
            raise (PeerLost if place.again else EnvironmentFailure)(
                f"node {rank} ({platform.node()}) got no answer from {where} within {place.grace:g} s ({why}): is it "
                "started there, with this --master-port, and does no firewall close that port?"
            )
        if waited > PATIENCE_S and not told:
            told = True
            say(f"node {rank}: waiting for {where} (up to {place.grace:g} s; {why})")
        time.sleep(RETRY_S)


def ask(card: Card, place: Place, wait: float) -> str:
    """Go to node 0, and wait for its verdict. Raises OSError or ValueError if there is none."""
    address = (place.host, place.port)
    with socket.create_connection(address, PATIENCE_S) as connection, connection.makefile("rb") as lines:
        notice_death(connection)
        try:
            greeting = lines.readline(100)
        except TimeoutError as error:  # perhaps the store of a round that has not ended there
            raise OSError("the port is open, and says nothing") from error
        if not greeting:
            raise OSError("node 0 has left")
        if greeting != GREETING:
            raise Foreign("another program is at that port")
        own = plain(connection.getsockname()[0])
        send(connection, {**card, "facts": {**card["facts"], **seen_from(own)}} if "facts" in card else card)
        connection.settimeout(wait + PATIENCE_S)
        line = lines.readline()
        if not line:
            raise OSError("node 0 has left")
        verdict = json.loads(line)
        if verdict["go"]:
            return own
    kinds: dict[int, type[Failure]] = {8: PeerLost, 75: Stopped}
    raise kinds.get(verdict["exit_code"], EnvironmentFailure)(verdict["why"])


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send a line. Whoever does not take it is gone, and that shows elsewhere."""
    with suppress(OSError):
        connection.settimeout(PATIENCE_S)
        connection.sendall(json.dumps(message).encode() + b"\n")


def notice_death(connection: socket.socket) -> None:
    """Let the kernel find out, within seconds, that the other machine is off or cut off."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3)):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
