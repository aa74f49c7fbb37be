"""A node registers with node 0, and waits for the permission to start. rendezvous_server.py is the other side."""

import errno
import json
import platform
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

from ddp.core.errors import ExitCode, PeerLost, SetupError, Stopped, UserError, print_line
from ddp.core.network import plain
from ddp.launcher.node_info import NodeInfo

# Node 0 speaks first: a node that is early, and reaches the torchrun store of a job that ends, sends nothing.
GREETING = b"ddp rendezvous\n"
REPLY_TIMEOUT_S = 3.0  # for a connection, a greeting, a registration; and until waiting is announced
RETRY_INTERVAL_S = 0.5
FOREIGN_PROGRAM_GRACE_S = 10.0  # another program may hold the port for a while: the end of an earlier run, perhaps


class ForeignProgram(OSError):
    """The program at node 0's address is not a rendezvous."""


@dataclass(frozen=True)
class Endpoint:
    """Where the nodes connect, and for how many seconds they wait for each other.

    restart: this is not the run's first rendezvous. The network worked before, so a failure may be temporary.
    """

    host: str
    port: int
    grace: float
    restart: bool = False

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def timeout_error(self, message: str) -> UserError:
        """For a node that does not join: in the middle of a run it was lost, at the start the setup is wrong."""
        return PeerLost(message) if self.restart else SetupError(message)


def resolve(endpoint: Endpoint) -> list[str]:
    """The addresses of --master-addr."""
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        if endpoint.restart:
            return []
        raise SetupError(
            f"--master-addr {endpoint.host}: {platform.node()} cannot find its address ({_reason(error)}): check the "
            "name, or pass an IP address"
        ) from error
    return [str(entry[4][0]) for entry in found]


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def register(info: NodeInfo, endpoint: Endpoint) -> str:
    """Ask node 0 until it responds. Returns this node's own address on the route to node 0."""
    me = f"node {info.node_rank} ({info.host})"
    start, foreign_since, announced = time.monotonic(), None, False
    while True:
        try:
            return request_start(info, endpoint, wait=endpoint.grace)
        except (OSError, ValueError) as failure:
            error, now = failure, time.monotonic()
        foreign_since = (foreign_since or now) if isinstance(error, ForeignProgram) else None
        if getattr(error, "errno", None) == errno.ENETUNREACH and not endpoint.restart:
            raise SetupError(
                f"{me} has no route to node 0 at {endpoint} ({_reason(error)}): check --master-addr and the network"
            ) from error
        if foreign_since is not None and now - foreign_since > FOREIGN_PROGRAM_GRACE_S and not endpoint.restart:
            raise SetupError(
                f"{me} finds another program than node 0 at {endpoint}: end that program, or choose another "
                "--master-port for all nodes"
            )
        if now - start > endpoint.grace:
            raise endpoint.timeout_error(
                f"{me} got no answer from node 0 at {endpoint} within {endpoint.grace:g} s ({_reason(error)}): check "
                "that launch_node.sh runs there with this --master-port, and that no firewall blocks the port"
            )
        if now - start > REPLY_TIMEOUT_S and not announced:
            announced = True
            wait = f"up to {endpoint.grace:g} s; {_reason(error)}"
            print_line(f"node {info.node_rank}: waiting for node 0 at {endpoint} ({wait})")
        time.sleep(RETRY_INTERVAL_S)


def request_start(info: NodeInfo, endpoint: Endpoint, wait: float) -> str:
    """Register with node 0, and wait for its answer. Raises OSError or ValueError if there is none."""
    address = (endpoint.host, endpoint.port)
    with socket.create_connection(address, REPLY_TIMEOUT_S) as connection, connection.makefile("rb") as lines:
        detect_dead_peer(connection)
        try:
            greeting = lines.readline(100)
        except TimeoutError as error:  # perhaps the store of a job that has not ended there
            raise OSError("the port is open, but nothing responds") from error
        if not greeting:
            raise OSError("node 0 closed the connection")
        if greeting != GREETING:
            raise ForeignProgram("another program uses that port")
        own_address = plain(connection.getsockname()[0])
        if info.facts:
            info.add_network_facts(own_address)
        send(connection, info.to_json())
        connection.settimeout(wait + REPLY_TIMEOUT_S)
        line = lines.readline()
        if not line:
            raise OSError("node 0 closed the connection")
    answer = json.loads(line)
    if answer["start"]:
        return own_address
    kinds: dict[int, type[UserError]] = {ExitCode.PEER_LOST: PeerLost, ExitCode.STOPPED: Stopped}
    raise kinds.get(answer["exit_code"], SetupError)(answer["message"])


def send(connection: socket.socket, line: bytes) -> None:
    """Send a line. If the other side is gone, that shows when its answer is read."""
    with suppress(OSError):
        connection.settimeout(REPLY_TIMEOUT_S)
        connection.sendall(line + b"\n")


def detect_dead_peer(connection: socket.socket) -> None:
    """Let the kernel find out within seconds that the other machine is off, or cut off."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3)):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
