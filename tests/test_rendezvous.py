"""Node 0 while it waits for the others: whoever else connects, and whatever it sends, changes nothing."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from template_copy import TEMPLATE

from ddp.core.errors import PeerLost, SetupError, UserError
from ddp.core.host import allow_many_files, listen
from ddp.launcher import rendezvous
from ddp.launcher.node_info import NodeInfo
from ddp.launcher.rendezvous import GREETING, MAX_INFO_BYTES, Endpoint, join_nodes
from faults import fault
from machines import Program

RESET = struct.pack("ii", 1, 0)  # with SO_LINGER, close() resets the connection
SHARED = {"--check": False, "--nnodes": 3, "--nproc-per-node": 1}
FACTS = {"Python": "3", "torch": "2", "NCCL": "-", "GPUs": "none", "dataset": "synthetic", "disk": 50.0, "code": "1"}


def free_endpoint() -> Endpoint:
    with socket.create_server(("", 0)) as probe:
        return Endpoint("127.0.0.1", probe.getsockname()[1], 50.0)


def node_info(rank: int, **shared: Any) -> NodeInfo:
    return NodeInfo(rank, f"gpu{rank + 1}", {**SHARED, **shared}, {})


def join(info: NodeInfo, endpoint: Endpoint, members: Collection[int] = range(1000)) -> list[int]:
    return join_nodes(info, endpoint, members)


def in_thread(call: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Its result, or what it raises."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def connect(endpoint: Endpoint) -> socket.socket:
    """A connection to node 0, which may still be on its way to listen."""
    end = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection((endpoint.host, endpoint.port), 10)
        except ConnectionRefusedError:
            assert time.monotonic() < end
            time.sleep(0.02)


def line(**changes: Any) -> bytes:
    """What a node sends, but for some changes."""
    sent = {"node_rank": 1, "host": "stranger", "shared": SHARED, "facts": {}, "address": "", **changes}
    return json.dumps(sent).encode() + b"\n"


def try_to_send(connection: socket.socket, data: bytes) -> None:
    with suppress(ConnectionError):  # who sends too much is sent away
        connection.sendall(data)


SENT = {
    "nothing": b"",
    "text": b"hello\n",
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "binary": bytes(range(256)) * 50,
    "invalid UTF-8": b'"\xff"\n',
    "no newline": line()[:-1],
    "nested": b"[" * 100_000 + b"\n",
    "too long": b" " * (MAX_INFO_BYTES + 1) + line(),
    "too long, no newline": b"x" * (3 * MAX_INFO_BYTES),
    "list": b"[1]\n",
    "number": b"7\n",
    "long number": b"9" * 10_000 + b"\n",
    "null": b"null\n",
    "only a rank": b'{"node_rank": 1}\n',
    "rank is a bool": line(node_rank=True),
    "rank is negative": line(node_rank=-1),
    "rank is a float": line(node_rank=1.0),
    "rank is a list": line(node_rank=[1]),
    "shared is a list": line(shared=[]),
    "shared is null": line(shared=None),
    "facts is a list": line(facts=[1]),
    "facts is null": line(facts=None),
    "host is a number": line(host=1),
    "host is no text": line(host="\ud800"),
    "host has two lines": line(host="a\nb"),
}


@fault(27, 42)
@pytest.mark.sample(5)
@pytest.mark.parametrize("sent", SENT.values(), ids=SENT)
def test_what_a_stranger_sends_is_dropped_and_the_nodes_still_join(
    sent: bytes, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """However its connection ends. Afterwards the port is free."""
    endpoint = free_endpoint()
    nodes = [in_thread(join, node_info(0), endpoint)]
    stays, closes, resets = (connect(endpoint) for _ in range(3))
    for stranger in (stays, closes, resets):
        assert stranger.recv(100) == GREETING
        try_to_send(stranger, sent)
    closes.close()
    resets.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    resets.close()
    nodes += [in_thread(join, node_info(rank), endpoint) for rank in (1, 2)]
    assert [node.result(60) for node in nodes] == [[0, 1, 2]] * 3
    listen(endpoint.port).close()
    stays.close()
    assert capfd.readouterr() == ("", "") and caplog.records == []


@fault(27, 42)
@pytest.mark.sample(2)
@pytest.mark.parametrize("waits", [False, True], ids=["at once", "after the greeting"])
@pytest.mark.parametrize("sent", [b"", line()[:20], line()], ids=["nothing", "half a line", "a line"])
def test_a_connection_that_is_reset_is_dropped_and_its_node_may_come_again(
    sent: bytes, waits: bool, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """After a whole line, node 0 can read it, but the connection has no other end anymore."""
    endpoint = free_endpoint()
    nodes = [in_thread(join, node_info(0), endpoint)]
    for _ in range(30):
        with connect(endpoint) as stranger:
            if waits:
                assert stranger.recv(100) == GREETING
            try_to_send(stranger, sent)
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    nodes += [in_thread(join, node_info(rank), endpoint) for rank in (1, 2)]
    assert [node.result(60) for node in nodes] == [[0, 1, 2]] * 3
    assert capfd.readouterr() == ("", "") and caplog.records == []


@fault(25, 42)
def test_another_program_that_holds_the_port_for_a_moment_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the node has waited before: its patience begins with the first answer of that program."""
    monkeypatch.setattr(rendezvous, "FOREIGN_PROGRAM_GRACE_S", 1.0)
    endpoint = free_endpoint()
    nodes = [in_thread(join, node_info(rank), endpoint) for rank in (1, 2)]
    time.sleep(1.5)
    with listen(endpoint.port) as other, other.accept()[0] as connection:
        connection.sendall(b"SSH-2.0-OpenSSH\r\n")
    nodes.append(in_thread(join, node_info(0), endpoint))
    assert [node.result(60) for node in nodes] == [[0, 1, 2]] * 3


@fault(26)
def test_a_port_that_says_nothing_until_it_closes_is_that_of_a_round_that_ends(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """So torchrun's store does: a machine that comes back meets it while the others have not noticed its loss."""
    monkeypatch.setattr(rendezvous, "REPLY_TIMEOUT_S", 0.3)
    monkeypatch.setattr(rendezvous, "FOREIGN_PROGRAM_GRACE_S", 0.5)
    endpoint = free_endpoint()
    with listen(endpoint.port) as earlier:
        early = in_thread(join, node_info(1), endpoint)
        time.sleep(1.2)
        for _ in range(5):  # those that have given up, and then some that are told that it ends
            earlier.accept()[0].close()
        assert not early.done()
    monkeypatch.setattr(rendezvous, "REPLY_TIMEOUT_S", 10.0)
    nodes = [early, *(in_thread(join, node_info(rank), endpoint) for rank in (0, 2))]
    assert [node.result(60) for node in nodes] == [[0, 1, 2]] * 3
    (line,) = capfd.readouterr().err.splitlines()
    assert line == f"node 1: waiting for node 0 at {endpoint} (up to 50 s; the port is open, but nothing responds)"


@fault(27, 42)
def test_silent_connections_are_closed_after_some_seconds_and_a_node_that_waits_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "REPLY_TIMEOUT_S", 1.5)
    endpoint = free_endpoint()
    first = in_thread(join, node_info(0), endpoint)
    silent, waiting = connect(endpoint), connect(endpoint)
    waiting.sendall(line())
    assert silent.recv(100) == waiting.recv(100) == GREETING
    start = time.monotonic()
    assert silent.recv(1) == b"" and time.monotonic() - start > 1
    second = in_thread(join, node_info(2), endpoint)
    assert json.loads(waiting.recv(100)) == {"start": True, "nodes": [0, 1, 2]}
    assert first.result(60) == second.result(60) == [0, 1, 2]


@fault(42)
def test_a_line_without_an_end_is_not_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is its connection kept until its time is over."""
    monkeypatch.setattr(rendezvous, "REPLY_TIMEOUT_S", 300.0)
    endpoint = free_endpoint()
    nodes = [in_thread(join, node_info(0), endpoint)]
    with connect(endpoint) as stranger, pytest.raises(ConnectionError):
        for _ in range(20 * MAX_INFO_BYTES // 2**16):  # more than the buffers of the kernel hold
            stranger.sendall(b"x" * 2**16)
    nodes += [in_thread(join, node_info(rank), endpoint) for rank in (1, 2)]
    assert [node.result(60) for node in nodes] == [[0, 1, 2]] * 3


@fault(27)
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "facts, shown",
    [
        ({}, "1  stranger  ?  ?  ?  ?  ?  ?  ?  ?  ?"),
        ({"torch": "9", "new": 1}, "1  stranger  ?  ?  9  ?  ?  ?  ?  ?  ?"),
        ({"clock": None, "disk": True}, "1  stranger  ?  ?  ?  ?  ?  ?  ?  ?  ?"),
        ({"clock": "noon", "disk": [1], "GPUs": 3}, "1  stranger  ?  ?  ?  ?  ?  ?  ?  ?  ?"),
        ({"clock": 10**400, "code": "\ud800", "offset": {}}, "1  stranger  ?  ?  ?  ?  ?  ?  ?  ?  ?"),
        ({"clock": float("nan"), "disk": float("inf")}, "1  stranger  ?  ?  ?  ?  ?  inf GB free  ?  ?  ?"),
    ],
)
def test_facts_that_are_missing_or_wrong_are_shown_as_unknown(
    facts: dict[str, Any], shown: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A node of another version may send others."""
    endpoint, shared = free_endpoint(), {**SHARED, "--check": True, "--nnodes": 2}
    first = in_thread(join, NodeInfo(0, "gpu1", shared, dict(FACTS)), endpoint)
    with connect(endpoint) as other:
        other.sendall(line(shared=shared, facts=facts))
        assert other.makefile("rb").readlines() == [GREETING, b'{"start": true, "nodes": [0, 1]}\n']
    first.result(10)
    table, errors = capfd.readouterr()
    assert errors == "" and table.splitlines()[2].split() == shown.split(), table
    assert "warning: " not in table


@fault(27)
def test_a_node_with_another_number_of_nodes_is_refused_whatever_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "LATE_NODES_GRACE_S", 1.0)
    endpoint = free_endpoint()
    nodes = [in_thread(join, node_info(0), endpoint)]
    nodes += [in_thread(join, node_info(rank, **{"--nnodes": 9}), endpoint) for rank in (8, 7)]
    with pytest.raises(SetupError, match=r"--nnodes is 3 and 9\. Start all"):
        nodes[0].result(60)
    for node in nodes[1:]:
        with pytest.raises(UserError, match=r"--nnodes is 3 and 9\. Start all"):
            node.result(60)


@fault(27)
def test_a_long_answer_arrives_whole_though_another_node_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def listen_with_a_small_buffer(port: int) -> socket.socket:
        listener = listen(port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listener

    monkeypatch.setattr(rendezvous, "listen", listen_with_a_small_buffer)
    monkeypatch.setattr(rendezvous, "LATE_NODES_GRACE_S", 1.0)
    endpoint = free_endpoint()
    nodes = [in_thread(join, node_info(0), endpoint)]
    with connect(endpoint) as deaf:
        deaf.sendall(line(node_rank=2, shared={**SHARED, "x": "y" * (MAX_INFO_BYTES - 300)}))
        nodes += [in_thread(join, node_info(1), endpoint)]
        for node in nodes:
            with pytest.raises(UserError, match=r"x is None and y{10000}.* Start all nodes with the same options"):
                node.result(60)


def in_process(node: NodeInfo, endpoint: Endpoint, *limits: int) -> Future[list[int]]:
    """`join` in a process of its own, which may open so many files: now, and at most."""

    def run() -> list[int]:
        reader, writer = multiprocessing.get_context("fork").Pipe(duplex=False)
        pid = os.fork()
        if pid == 0:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            try:
                writer.send(join(node, endpoint))
            except UserError as error:
                writer.send(error)
            os._exit(0)
        assert reader.poll(60)
        os.waitpid(pid, 0)
        if isinstance(answer := reader.recv(), UserError):
            raise answer
        return answer

    return in_thread(run)


@fault(42)
def test_a_thousand_nodes_join_while_two_thousand_strangers_connect() -> None:
    """A process may often open no more than 1,024 files, unless it raises that limit. All wait for the last node."""
    assert allow_many_files() > 4000, "the limit of this machine (ulimit -Hn) is too low for this test"
    endpoint, count = free_endpoint(), 999
    shared, generator = {**SHARED, "--nnodes": count + 1}, random.Random(0)
    node_0 = in_process(NodeInfo(0, "gpu1", shared, {}), endpoint, 1024, 4000)
    connect(endpoint).close()
    strangers = [connect(endpoint) for _ in range(2000)]
    for stranger in strangers[::2]:
        try_to_send(stranger, generator.randbytes(generator.randrange(5000)) + b"\n" * generator.randrange(2))
    start = time.monotonic()
    nodes = [connect(endpoint) for _ in range(count)]
    for rank, node in enumerate(nodes, start=1):
        text = line(node_rank=rank, shared=shared)
        node.sendall(text[:20])  # slowly
        try_to_send(strangers[2 * rank], text[:1])
        node.sendall(text[20:])
    answer = json.dumps({"start": True, "nodes": [*range(count + 1)]}).encode() + b"\n"
    for node in nodes:
        with node, node.makefile("rb") as received:
            assert received.readlines() == [GREETING, answer]
    assert node_0.result(60) == [*range(count + 1)]
    assert time.monotonic() - start < 60, "a machine without other work needs two seconds"
    for stranger in strangers:
        stranger.close()


def test_too_few_files_for_all_nodes_are_one_line_at_once() -> None:
    node_0 = in_process(NodeInfo(0, "gpu1", {**SHARED, "--nnodes": 1000}, {}), free_endpoint(), 512, 1024)
    says = r"^gpu1 may open 1024 files, and each of 1000 nodes needs one: raise the limit there \(ulimit -Hn\)$"
    with pytest.raises(SetupError, match=says):
        node_0.result(60)


def test_two_of_four_nodes_suffice_once_the_grace_time_is_over(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "LATE_NODES_GRACE_S", 1.5)

    def start(members: Collection[int], *nodes: NodeInfo, grace: float = 50.0, restart: bool = True) -> Any:
        """What each of them gets, node 0 first: the ranks of the nodes, or an error."""
        endpoint = replace(free_endpoint(), grace=grace, restart=restart, elastic=True)
        futures = [in_thread(join, info, endpoint, members) for info in nodes]
        answers = [future.exception(60) or future.result() for future in futures]
        return answers, capfd.readouterr().err

    def node(rank: int, **shared: Any) -> NodeInfo:
        return node_info(rank, **{"--nnodes": "2:4", **shared})

    two = (node(0), node(2))
    absent = (
        "node 0: nodes 1 and 3 did not join within 1 s: training with 2 of 4 nodes; a node that comes back joins at"
    )
    for first, restart in ((range(4), False), ((0, 1, 2), True)):  # at the start of a run, and after a loss
        answers, printed = start(first, *two, grace=1.0, restart=restart)
        assert answers == [[0, 2]] * 2 and absent in printed
    endpoint = replace(free_endpoint(), restart=True, elastic=True)
    early = [in_thread(join, info, endpoint, range(4)) for info in two]
    time.sleep(2)  # longer than for those that were not in the last round
    late = [in_thread(join, node(rank), endpoint, range(4)) for rank in (1, 3)]
    assert [future.result(60) for future in (*early, *late)] == [[0, 1, 2, 3]] * 4
    capfd.readouterr()
    before = time.monotonic()  # those that were not in the last round are not waited for as long
    assert start((0, 2), *two) == ([[0, 2]] * 2, "")
    assert time.monotonic() - before < 40
    assert start((0, 2), *two, node(3)) == ([[0, 2, 3]] * 3, "node 0: node 3 joined again: 3 of 4 nodes\n")
    answers, _ = start((0, 2), *two, node(3, x=1), node(3, x=1))  # with other options: refused alone
    assert answers[:2] == [[0, 2]] * 2
    assert all(isinstance(error, SetupError) and "do not agree: x is None and 1" in str(error) for error in answers[2:])
    answers, _ = start(range(4), node(0), grace=1.0)
    assert isinstance(answers[0], PeerLost) and "only 1 of 4 nodes joined" in str(answers[0])


def test_a_node_that_comes_back_waits_for_the_run_to_restart(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """torchrun's store has the port meanwhile, and says nothing."""
    monkeypatch.setattr(rendezvous, "REPLY_TIMEOUT_S", 0.5)
    endpoint = replace(free_endpoint(), grace=2.0, elastic=True)
    with listen(endpoint.port):
        late = in_thread(join, node_info(1, **{"--nnodes": "1:2"}), endpoint)
        time.sleep(4.5)
        assert not late.done()
        monkeypatch.setattr(rendezvous, "REPLY_TIMEOUT_S", 10.0)
    first = in_thread(join, node_info(0, **{"--nnodes": "1:2"}), replace(endpoint, grace=9.0), [0])
    assert first.result(60) == late.result(60) == [0, 1]
    waiting, back = capfd.readouterr().err.splitlines()
    assert "nothing responds: if a run is in progress there, this node joins when that restarts" in waiting
    assert back == "node 0: node 1 joined again: 2 of 2 nodes"


@fault(9)
@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_while_node_0_waits_stops_all_that_have_joined(name: str, tmp_path: Path) -> None:
    endpoint = free_endpoint()
    options = ["--nnodes", 3, "--master-addr", "127.0.0.1", "--master-port", endpoint.port, "--node-rank"]
    variables = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONASYNCIODEBUG": "1"}
    command = ["bash", TEMPLATE / "launch_node.sh", *options]
    nodes = [Program([*command, rank, "--", "--output-dir", tmp_path], variables) for rank in (0, 1)]
    assert nodes[0].until("waiting for node").startswith("node 0: waiting for node 2 at port"), "node 1 has joined"
    nodes[0].signal(getattr(signal, name))
    assert [node.wait() for node in nodes] == [75, 75]
    for node in nodes:
        last = node.output().splitlines()[1 if node is nodes[0] else 0 :]
        assert last == [f"stopped by {name} before training began: nothing to save"]
