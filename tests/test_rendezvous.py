"""The rendezvous of the nodes, with real stores, and a thread or a process for each node: who meets whom, and when."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import random
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from outputs import free_port
from template_copy import TEMPLATE
from torch.distributed import TCPStore

from config import Config
from ddp.core.errors import PeerLost, SetupError, Stopped, UserError
from ddp.core.host import allow_many_files, listen
from ddp.launcher import node_record, node_rendezvous
from ddp.launcher.launch_node import LaunchOptions, NodeAgent
from ddp.launcher.node_record import LOST, STOPPED, NodeRecord, RoundEnd, RunEnded
from ddp.launcher.node_rendezvous import NodeRendezvous
from faults import fault
from machines import Program, machines

RESET = struct.pack("ii", 1, 0)  # with SO_LINGER, close() resets the connection
KILLED, SAVES = RoundEnd(8, "a process was lost", LOST), RoundEnd(75, "saved", STOPPED)
NODES: list[NodeRendezvous] = []  # of one test


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Variables that a launcher sets for its workers are gone afterwards, and so are the threads of the nodes."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", {**os.environ})
        yield
    for node in NODES:
        node.shutdown()
    while NODES:
        if (beat := NODES.pop().beat).ident is not None:
            beat.join(3)  # the next test may fork


@pytest.fixture
def port() -> int:
    return free_port()


class Node(NodeRendezvous):
    """One node; its workers end as the test says."""

    def __init__(self, port: int, rank: int, nnodes: Any = 3, grace: int = 50, **shared: Any) -> None:
        where = {"master_addr": "127.0.0.1", "master_port": port}
        options = LaunchOptions(nnodes=str(nnodes), node_rank=rank, start_grace=grace, **where)  # type: ignore[arg-type]
        self.agent = NodeAgent(options, Config.parse(["--timeout", "1"]), [])
        self.agent.nproc = 1
        shared = {"--check": False, "--nnodes": options.nnodes, "--nproc-per-node": 1, **shared}
        NODES.append(self)
        super().__init__(NodeRecord(rank, f"gpu{rank + 1}", os.urandom(8).hex(), shared), self.agent)

    def join(self) -> Future[list[int]]:
        """The ranks of the nodes that run the first round."""

        def join() -> list[int]:
            try:
                self.next_rendezvous()
            except UserError:  # as torchrun does
                self.shutdown()
                raise
            return [*self.nodes]

        return in_thread(join)

    def join_again(self, end: RoundEnd = KILLED, grace: int = 50) -> Future[list[int]]:
        """After this end of the workers."""
        self.agent.end_round = lambda: end  # type: ignore[method-assign]
        self.agent.grace = lambda restart: grace  # type: ignore[method-assign]
        return self.join()


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


@contextmanager
def forking() -> Iterator[None]:
    """The new process does not collect the store of an earlier test: its thread is not there, and another one may be in
    its place, which the destructor waits for without end, or cannot wait for and aborts.
    """
    gc.freeze()
    pid = os.getpid()
    yield
    if os.getpid() == pid:
        gc.unfreeze()


def connect(port: int) -> socket.socket:
    """A connection to node 0, which may still be on its way to listen."""
    end = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 10)
        except (ConnectionRefusedError, ConnectionResetError):  # node 0 first tries whether the port is free
            assert time.monotonic() < end
            time.sleep(0.02)


def try_to_send(connection: socket.socket, data: bytes) -> None:
    with suppress(ConnectionError):  # who sends too much is sent away
        connection.sendall(data)


SENT = {
    "nothing": b"",
    "text": b"hello\n",
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "binary": bytes(range(256)) * 50,
    "zeros": bytes(5000),
    "nested": b"[" * 100_000 + b"\n",
    "too long": b"x" * (3 * 2**20),
}


@fault(27, 42)
@pytest.mark.sample(2)
@pytest.mark.parametrize("sent", SENT.values(), ids=SENT)
def test_what_a_stranger_sends_is_dropped_and_the_nodes_still_join(
    sent: bytes, port: int, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """However its connection ends."""
    nodes = [Node(port, rank) for rank in range(3)]
    answers = [nodes[0].join()]
    stays, closes, resets = (connect(port) for _ in range(3))
    for stranger in (stays, closes, resets):
        try_to_send(stranger, sent)
    closes.close()
    resets.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    resets.close()
    answers += [node.join() for node in nodes[1:]]
    assert [answer.result(180) for answer in answers] == [[0, 1, 2]] * 3
    stays.close()
    connected = [f"node {rank}: all nodes are connected; 1 process here; node 0 prints the progress" for rank in (1, 2)]
    printed = capfd.readouterr()
    lines = [line for line in printed.err.splitlines() if line.startswith("node ") and "waiting" not in line]
    assert printed.out == "" and sorted(lines) == connected and caplog.records == []


RECORD = {"node_rank": 1, "host": "gpu2", "launcher": "1", "shared": {}}


@fault(27, 42)
@pytest.mark.parametrize(
    "text",
    [
        "", "hello", "[1]", "7", "null", "9" * 10_000, "[" * 100_000, '{"node_rank": 1}',
        json.dumps({**RECORD, "node_rank": True}), json.dumps({**RECORD, "node_rank": 1.0}),
        json.dumps({**RECORD, "node_rank": [1]}), json.dumps({**RECORD, "shared": []}),
        json.dumps({**RECORD, "last": {"code": 1}}),
    ],
)  # fmt: skip
def test_what_is_no_record_of_a_node_is_ignored(text: str) -> None:
    """A process of another version, or of another program, may have written it."""
    with pytest.raises(ValueError, match="not a node"):
        NodeRecord.from_json(text)


def test_a_node_of_another_version_is_known_and_may_be_named() -> None:
    record = NodeRecord.from_json(json.dumps({**RECORD, "facts": {}, "new": 1}))
    assert (record.node_rank, record.host) == (1, "gpu2")


@fault(27, 42)
@pytest.mark.sample(1)
@pytest.mark.parametrize("sent", [b"", b"hello"], ids=["nothing", "something"])
def test_connections_that_are_reset_do_not_disturb(sent: bytes, port: int) -> None:
    nodes = [Node(port, rank) for rank in range(3)]
    answers = [nodes[0].join()]
    for _ in range(30):
        with connect(port) as stranger:
            try_to_send(stranger, sent)
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    answers += [node.join() for node in nodes[1:]]
    assert [answer.result(180) for answer in answers] == [[0, 1, 2]] * 3


@fault(25, 42)
def test_another_program_that_holds_the_port_for_a_moment_is_waited_for(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the node has waited before: its patience begins with the first answer of that program."""
    monkeypatch.setattr(node_rendezvous, "FOREIGN_PROGRAM_GRACE_S", 4.0)
    monkeypatch.setattr(node_rendezvous, "CALL_TIMEOUT_S", 1.0)
    nodes = [Node(port, rank) for rank in range(3)]
    answers = [node.join() for node in nodes[1:]]
    time.sleep(5)
    with listen(port) as other:
        other.accept()[0].close()
        with other.accept()[0] as connection:
            connection.sendall(b"SSH-2.0-OpenSSH\r\n")
            time.sleep(1.5)
    answers.append(nodes[0].join())
    assert [answer.result(180) for answer in answers] == [[0, 1, 2]] * 3


@fault(27)
def test_a_node_with_another_number_of_nodes_is_refused_whatever_its_rank(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_record, "LATE_NODES_GRACE_S", 1.0)
    answers = [Node(port, 0).join(), Node(port, 8, nnodes=9).join(), Node(port, 7, nnodes=9).join()]
    for answer in answers:
        with pytest.raises(SetupError, match=r"--nnodes is 3 and 9\. Start all"):
            answer.result(180)


@fault(27)
def test_a_stray_node_with_the_rank_of_one_that_runs_is_refused_and_the_run_goes_on(port: int) -> None:
    nodes = [Node(port, rank, nnodes=2) for rank in (0, 1)]
    assert [answer.result(180) for answer in [node.join() for node in nodes]] == [[0, 1]] * 2
    stray = Node(port, 1, nnodes=2)
    with pytest.raises(SetupError, match=r"node 1 \(gpu2, .*\) and node 1 \(gpu2, .*have the same --node-rank: give"):
        stray.join().result(180)
    assert [node.num_nodes_waiting() for node in nodes] == [0, 0]
    answers = [node.join_again() for node in nodes]
    assert [answer.result(180) for answer in answers] == [[0, 1]] * 2, "the run can still restart"


@fault(27)
@pytest.mark.sample(1)
@pytest.mark.parametrize("first", ["stray", "member"])
def test_a_stray_node_at_a_restart_is_refused_alone(port: int, first: str) -> None:
    nodes = [Node(port, rank, nnodes=2) for rank in (0, 1)]
    assert [answer.result(180) for answer in [node.join() for node in nodes]] == [[0, 1]] * 2
    stray, answers = Node(port, 1, nnodes=2), {}

    def join_again() -> Future[list[int]]:
        nodes[1].over.clear()
        threading.Thread(target=nodes[1]._beat, daemon=True).start()
        return nodes[1].join_again()

    nodes[1].over.set()  # as if its machine slept
    time.sleep(1)
    turns = {"stray": stray.join, "member": join_again}
    for name in sorted(turns, reverse=first == "stray"):
        answers[name] = turns[name]()
        time.sleep(5)  # it has registered
    others = nodes[0].join_again()
    with pytest.raises(SetupError, match="the same --node-rank"):
        answers["stray"].result(180)
    assert answers["member"].result(180) == others.result(180) == [0, 1]


@fault(1, 29)
def test_a_node_that_is_gone_while_it_waits_counts_as_missing(port: int) -> None:
    nodes = [Node(port, rank, grace=12) for rank in range(3)]
    answers = [node.join() for node in nodes[:2]]
    time.sleep(2)
    nodes[1].agent.wait = lambda seconds, last: time.sleep(60)  # type: ignore[method-assign]  # as if it was off
    nodes[1].over.set()
    time.sleep(4)
    answers.append(nodes[2].join())
    for answer in (answers[0], answers[2]):
        with pytest.raises(SetupError, match=r"only 2 of 3 nodes joined .*; missing: node 1\. Run"):
            answer.result(180)


@fault(29)
def test_a_node_that_is_silent_for_some_seconds_while_it_waits_is_taken_back(port: int) -> None:
    """As after a short failure of the network."""
    nodes = [Node(port, rank) for rank in range(3)]
    answers = [node.join() for node in nodes[:2]]
    time.sleep(2)
    nodes[1].agent.stop.wait = lambda seconds: time.sleep(6)  # type: ignore[method-assign]
    nodes[1].over.set()
    time.sleep(1)
    nodes[1].agent.stop = threading.Event()
    answers.append(nodes[2].join())
    assert [answer.result(180) for answer in answers] == [[0, 1, 2]] * 3


@fault(27)
def test_a_node_that_never_belonged_to_the_run_does_not_end_it_at_a_restart(port: int) -> None:
    nodes = [Node(port, rank, nnodes=2) for rank in range(2)]
    assert [answer.result(180) for answer in [node.join() for node in nodes]] == [[0, 1]] * 2
    stray = Node(port, 2, nnodes=3).join()
    time.sleep(2)
    answers = [node.join_again() for node in nodes]
    assert [answer.result(180) for answer in answers] == [[0, 1]] * 2
    with pytest.raises(SetupError, match="--nnodes is 2 and 3"):
        stray.result(180)


def test_a_checkpoint_that_another_node_knows_of_lets_restarts_count_anew(port: int) -> None:
    nodes = [Node(port, rank, nnodes=2) for rank in range(2)]
    assert [answer.result(180) for answer in [node.join() for node in nodes]] == [[0, 1]] * 2
    nodes[0].agent.exhausted = True
    answers = [nodes[0].join_again(), nodes[1].join_again(RoundEnd(8, "lost", LOST, saved_step=5))]
    assert [answer.result(180) for answer in answers] == [[0, 1]] * 2
    assert (nodes[0].agent.restarts, nodes[1].agent.restarts) == (1, 1)


@fault(9)
def test_a_node_that_is_stopped_while_it_waits_for_a_restart_stops_all(port: int) -> None:
    """At the start, the others wait for it to come again."""
    nodes = [Node(port, rank) for rank in range(3)]
    assert [answer.result(180) for answer in [node.join() for node in nodes]] == [[0, 1, 2]] * 3
    answers = [node.join_again() for node in nodes[:2]]
    time.sleep(2)
    nodes[1].agent.first = signal.SIGTERM
    nodes[1].agent.stop.set()
    answers.append(nodes[2].join_again())
    for answer in answers:
        with pytest.raises(Stopped, match="stopped by SIGTERM before the restart"):
            answer.result(180)


@fault(1)
@pytest.mark.parametrize(
    ("ends", "code", "says"),
    [
        ((SAVES, KILLED), 8, "a process was lost"),  # the ranks here were asked to stop, because one there was lost
        ((KILLED, SAVES), 8, "a process was lost"),
        ((RoundEnd(1, "a process failed", LOST, reported=False), KILLED), 1, "a process failed"),
    ],
)
def test_without_a_restart_all_nodes_end_with_the_code_of_the_loss(
    port: int, ends: tuple[RoundEnd, ...], code: int, says: str
) -> None:
    nodes = [Node(port, rank, nnodes=2) for rank in range(2)]
    assert [answer.result(180) for answer in [node.join() for node in nodes]] == [[0, 1]] * 2
    nodes[0].agent.exhausted = True
    answers = [node.join_again(end) for node, end in zip(nodes, ends, strict=True)]
    for answer in answers:
        with pytest.raises(RunEnded, match=says) as raised:
            answer.result(180)
        assert raised.value.exit_code == code


@fault(29)
def test_a_node_whose_connection_breaks_before_it_has_read_the_answer_asks_again(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not ask the others to restart."""
    nodes = [Node(port, rank, nnodes=2) for rank in range(2)]
    wait, failures = nodes[1]._wait_for_answer, [OSError("the link is down")]

    def fail(*where: Any) -> dict[str, Any]:
        answer = wait(*where)
        if failures:
            raise failures.pop()
        return answer

    monkeypatch.setattr(nodes[1], "_wait_for_answer", fail)
    assert [answer.result(180) for answer in [node.join() for node in nodes]] == [[0, 1]] * 2
    assert nodes[0].number == nodes[1].number == 1 and failures == []
    assert nodes[0].store and not nodes[0].store.check(["2/wanted"])


def test_a_node_that_comes_a_moment_too_late_waits_for_the_next_restart(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not ask the run to restart."""
    first, late = Node(port, 0, nnodes="1:2", grace=2), Node(port, 1, nnodes="1:2")
    assert first.join().result(180) == [0]
    wait, answers = late._wait_for_answer, [{"nodes": {"0": first.own.launcher}}]
    monkeypatch.setattr(late, "_wait_for_answer", lambda *where: answers.pop() if answers else wait(*where))
    answer = late.join()
    while answers:
        time.sleep(0.1)
    time.sleep(2)
    assert first.store and not any(first.store.check([f"{number}/wanted"]) for number in (2, 3))
    assert first.join_again().result(180) == answer.result(180) == [0, 1]


@fault(1)
def test_a_node_that_wants_the_next_round_lets_the_others_end_theirs(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not before their workers have had the time to notice by themselves."""
    monkeypatch.setattr(node_rendezvous, "WORKERS_GRACE_S", 3.0)
    nodes = [Node(port, rank) for rank in range(3)]
    assert [answer.result(180) for answer in [node.join() for node in nodes]] == [[0, 1, 2]] * 3
    answers, start = [nodes[2].join_again()], time.monotonic()
    while not all(node.num_nodes_waiting() for node in nodes[:2]):
        assert time.monotonic() - start < 180
        time.sleep(0.1)
    assert time.monotonic() - start > 3
    answers += [node.join_again() for node in nodes[:2]]
    assert [answer.result(180) for answer in answers] == [[0, 1, 2]] * 3
    assert [node.num_nodes_waiting() for node in nodes] == [0, 0, 0]


@fault(1)
def test_an_error_on_one_node_ends_the_run_on_all_although_the_others_have_lost_a_process(port: int) -> None:
    nodes = [Node(port, rank) for rank in range(3)]
    assert [answer.result(180) for answer in [node.join() for node in nodes]] == [[0, 1, 2]] * 3
    ends = [KILLED, RoundEnd(4, "no checkpoint"), KILLED]
    answers = [node.join_again(end) for node, end in zip(nodes, ends, strict=True)]
    for answer in answers:
        with pytest.raises(RunEnded, match="no checkpoint") as raised:
            answer.result(180)
        assert raised.value.exit_code == 4


@fault(1)
def test_nodes_meet_again_after_node_0_was_killed_and_started_again(port: int) -> None:
    """Its store is gone, and the new one counts rounds from 1."""

    def node_0(count: int) -> None:
        node = Node(port, 0, nnodes=2)
        for _ in range(count):
            node.join().result(180) if node.number == 0 else node.join_again().result(180)
        time.sleep(60)

    def later() -> None:
        restarted.wait()
        node_0(1)

    context = multiprocessing.get_context("fork")
    restarted = context.Event()
    first, second = context.Process(target=node_0, args=(2,)), context.Process(target=later, daemon=True)
    with forking():  # a process must not fork while its threads, as those of node 1, hold locks of torch
        first.start()
        second.start()
    other = Node(port, 1, nnodes=2)
    assert other.join().result(180) == other.join_again().result(180) == [0, 1] and other.number == 2
    first.kill()
    first.join()
    answer = other.join_again()
    restarted.set()
    assert answer.result(180) == [0, 1] and other.number == 1
    second.kill()
    second.join()


def in_process(node: Callable[[], Node], limits: tuple[int, int]) -> Future[list[int]]:
    """`join` in a process of its own, which may open so many files: now, and at most."""

    def run() -> list[int]:
        reader, writer = multiprocessing.get_context("fork").Pipe(duplex=False)
        with forking():
            pid = os.fork()
        if pid == 0:
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                try:
                    writer.send(node().join().result(120))
                except UserError as error:
                    writer.send(error)
                time.sleep(5)  # it hosts the store
            finally:
                os._exit(0)
        assert reader.poll(120)
        answer = reader.recv()
        os.waitpid(pid, 0)
        if isinstance(answer, UserError):
            raise answer
        return answer

    return in_thread(run)


def crowd(port: int, ranks: range, shared: dict[str, Any]) -> None:
    """So many nodes in one process: what each of them does with the store, as often as it does."""
    stores = {}
    for rank in ranks:
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
        record = NodeRecord(rank, f"gpu{rank + 1}", str(rank), shared, "10.0.0.1", "127.0.0.1")
        slot = store.add("1/count", 1)
        store.add(f"beat/{rank}", 1)
        store.set(f"1/record/{slot}", json.dumps(vars(record)))
        stores[rank] = store
    waiting = dict(stores)
    while waiting:
        start = time.monotonic()
        for rank, store in list(waiting.items()):
            if store.check(["1/answer"]):
                answer = json.loads(store.get("1/answer"))
                assert len(answer["nodes"]) == 1000
                del waiting[rank]
            else:
                store.check([f"1/refused/{rank}"])
                store.add(f"beat/{rank}", 1)
        time.sleep(max(0, start + node_rendezvous.RETRY_INTERVAL_S - time.monotonic()))


def thousand(count: int, port: int = 29500) -> None:
    """Node 0, `count` - 1 others and 2,000 strangers, in processes of one machine."""
    allow_many_files()
    context, ranks = multiprocessing.get_context("fork"), range(1, count)
    shared = Node(port, 0, nnodes=count).own.shared
    parts = [context.Process(target=crowd, args=(port, ranks[index::8], shared)) for index in range(8)]
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4000))
        Node(port, 0, nnodes=count, grace=110).join().result(120)
        time.sleep(60)  # it hosts the store
    connect(port).close()
    strangers, generator = [connect(port) for _ in range(2000)], random.Random(0)
    for stranger in strangers[::2]:
        try_to_send(stranger, generator.randbytes(generator.randrange(5000)))
    start = time.monotonic()
    for part in parts:
        part.start()
    for part in parts:
        part.join(120)
    print(f"{[part.exitcode for part in parts]} after {time.monotonic() - start:.1f} s", flush=True)
    os.kill(pid, signal.SIGKILL)


@fault(42)
@pytest.mark.sample(0)
def test_a_thousand_nodes_join_while_two_thousand_strangers_connect() -> None:
    """A process may often open no more than 1,024 files, unless it raises that limit.

    On a machine of its own: torch's store looks up the name of each address that connects, and a name server that is
    asked so often may not respond.
    """
    assert allow_many_files() > 4000, "the limit of this machine (ulimit -Hn) is too low for this test"
    variables = {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONPATH": os.pathsep.join(sys.path)}
    with machines(1) as (machine,):
        program = machine.start(sys.executable, "-c", "from test_rendezvous import *; thousand(1000)", **variables)
        assert program.wait(150) == 0 and f"{[0] * 8} after" in program.output(), program.output()


def test_too_few_files_for_all_nodes_are_one_line_at_once(port: int) -> None:
    node_0 = in_process(lambda: Node(port, 0, nnodes=1000), (512, 1024))
    says = r" may open 1024 files, and each of 1000 nodes needs one: raise the limit there \(ulimit -Hn\)$"
    with pytest.raises(SetupError, match=says):
        node_0.result(180)


def test_two_of_four_nodes_suffice_once_the_grace_time_is_over(
    port: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(node_record, "LATE_NODES_GRACE_S", 3.0)
    few = [Node(port, rank, nnodes="2:4", grace=6) for rank in (0, 2)]
    assert [answer.result(180) for answer in [node.join() for node in few]] == [[0, 2]] * 2
    absent = (
        "node 0: nodes 1 and 3 did not join within 6 s: training with 2 of 4 nodes; a node that comes back joins at"
    )
    assert absent in capfd.readouterr().err
    # Those that were not in the last round are not waited for as long.
    assert [answer.result(180) for answer in [node.join_again(grace=600) for node in few]] == [[0, 2]] * 2
    assert "did not join" not in capfd.readouterr().err
    # Two come while the others run, one of them with other options: it is refused alone.
    late, wrong = Node(port, 3, nnodes="2:4"), Node(port, 1, nnodes="2:4", x=1)
    answers = [late.join(), wrong.join()]
    time.sleep(2)
    assert [node.num_nodes_waiting() for node in few] == [0, 0], "they do not disturb the run"
    answers += [node.join_again() for node in few]
    assert [answer.result(180) for answer in (answers[0], *answers[2:])] == [[0, 2, 3]] * 3
    with pytest.raises(SetupError, match="do not agree: x is None and 1"):
        answers[1].result(180)
    printed = capfd.readouterr().err
    assert "node 0: node 3 joined again: 3 of 4 nodes\n" in printed
    assert "node 3: a run is in progress at 127.0.0.1:" in printed
    answer = few[0].join_again(grace=4)
    with pytest.raises(PeerLost, match="only 1 of 4 nodes joined"):
        answer.result(180)


@fault(29)
def test_a_node_that_waits_for_a_restart_says_so_if_the_run_ends(port: int) -> None:
    def node_0() -> None:
        Node(port, 0, nnodes="1:2", grace=2).join().result(180)
        time.sleep(60)

    first = multiprocessing.get_context("fork").Process(target=node_0)
    with forking():
        first.start()
    late = Node(port, 1, nnodes="1:2", grace=2)
    time.sleep(8)  # node 0 has gone on without it
    answer = late.join()
    time.sleep(3)
    assert not answer.done()
    first.kill()
    first.join()
    with pytest.raises(SetupError, match=r"the run at 127\.0\.0\.1:\d+ has ended without node 1 \(gpu2\)"):
        answer.result(180)


@fault(9)
@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_while_node_0_waits_stops_all_that_have_joined(name: str, port: int, tmp_path: Path) -> None:
    options = ["--nnodes", 3, "--master-addr", "127.0.0.1", "--master-port", port, "--node-rank"]
    command = ["bash", TEMPLATE / "launch_node.sh", *options]
    nodes = [
        Program([*command, rank, "--", "--output-dir", tmp_path], {"PYTHONDONTWRITEBYTECODE": "1"}) for rank in (0, 1)
    ]
    assert nodes[0].until("waiting for node").startswith("node 0: waiting for node")
    connected = (nodes[1].process.pid, psutil.CONN_ESTABLISHED)
    while connected not in [(each.pid, each.status) for each in psutil.net_connections("tcp")]:
        time.sleep(0.1)
    time.sleep(1)  # node 1 has registered
    nodes[0].signal(getattr(signal, name))
    assert [node.wait() for node in nodes] == [75, 75]
    for node in nodes:
        last = [line for line in node.output().splitlines() if "waiting for" not in line]
        assert last == [f"stopped by {name} before training began: nothing to save"]
