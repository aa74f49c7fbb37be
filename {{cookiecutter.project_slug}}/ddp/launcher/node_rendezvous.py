"""The rendezvous of the nodes: before each round of workers, all nodes meet at node 0's store, and agree or end.

torchrun's agent calls `next_rendezvous` before it starts the workers, and again before each restart. Node 0 hosts the
store at --master-port. Its keys, where N is the number of a round, and S that of a registration:

round          the round that node 0 waits for the nodes of, or that runs; and the launcher of node 0
beat/L         counts while the launcher L (a random name) is there; who/L: its node, in words
N/wanted       is there once a node wants that round: its workers of the round before have ended
N/count        the number of registrations; N/record/S: a NodeRecord
N/refused/L    an error for that launcher alone; N/stopped: a node was asked to stop while it waited
N/answer       that of node 0 to all: {"nodes": ...} or {"exit_code": ...}
N/workers/...  what the ranks write

A torch store blocks without end if the other machine is cut off, so each call has a limit, and a thread of its own.
"""

import errno
import json
import logging
import math
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import run
from torch.distributed.elastic import rendezvous as elastic

from ddp.core.errors import ExitCode, PeerLost, SetupError, Stopped, print_line
from ddp.core.host import allow_many_files, is_own_address, own_addresses, plain, port_problem
from ddp.core.process_exit import FAILURE_KEY, failure_record
from ddp.core.run_config import ROUND_VARIABLE
from ddp.core.threads import call_with_timeout
from ddp.launcher.node_record import (
    BEAT_INTERVAL_S,
    DEAD_S,
    FINAL,
    LATE_NODES_GRACE_S,
    NOTICE_AFTER_S,
    SAME_RANK,
    Meeting,
    NodeRecord,
    RoundEnd,
    RunEnded,
)

SPARE_FILES = 100  # that the launcher opens itself
CONNECT_TIMEOUT_S, CALL_TIMEOUT_S = 3.0, 10.0
RETRY_INTERVAL_S = 0.2
WORKERS_GRACE_S = 15.0  # for the workers here to notice that those of another node have ended
FOREIGN_PROGRAM_GRACE_S = 10.0  # another program may hold the port for a while: the end of an earlier run, perhaps


class ForeignProgram(OSError):
    """What listens at the port is no store."""


def run_torchrun(handler: "NodeRendezvous", options: list[str]) -> None:
    """Run the workers with torchrun's agent, in this thread. Raises UserError if the run ends otherwise than well."""
    log = logging.Handler()
    log.emit = handler.note_failure  # type: ignore[method-assign]
    for name in ("elastic", "launcher", "run"):
        logger = logging.getLogger(f"torch.distributed.{name}")
        logger.addHandler(log)
        logger.propagate = "LOGLEVEL" in os.environ  # otherwise none of its messages reaches the console
    limit_name_lookups()
    # torchrun asks for the full name of this machine, once for each worker and more.
    socket.getfqdn = lambda name="": name or socket.gethostname()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a worker must not read what is meant for the caller
    elastic.rendezvous_handler_registry.register("ddp", lambda parameters: handler)
    # The handler decides on restarts.
    run.run(run.parse_args(["--rdzv-backend=ddp", "--max-restarts=1000000", *options]))


def limit_name_lookups() -> None:
    """Let this process wait 1 s, instead of 10, for a name server that does not respond.

    torch's store looks up the name of each address that connects to it, one after the other.
    """
    if "RES_OPTIONS" not in os.environ:
        os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
        with suppress(OSError):
            socket.getnameinfo(("127.0.0.1", 0), 0)  # the C library reads them once, in the first lookup
        del os.environ["RES_OPTIONS"]  # the workers look up what their owner asks for


gpu_count = torch.cuda.device_count


class StoreClient:
    """A connection to the store of node 0, or that store itself. Raises OSError if it does not respond."""

    def __init__(self, host: str, port: int, is_master: bool = False) -> None:
        self.is_master = is_master
        if not is_master:  # otherwise TCPStore would print pages
            with socket.create_connection((host, port), CONNECT_TIMEOUT_S) as probe:
                self.address, self.address_of_0 = (plain(n[0]) for n in (probe.getsockname(), probe.getpeername()))
                host = probe.getpeername()[0]  # TCPStore would try all addresses of a name again
        limit = timedelta(seconds=CALL_TIMEOUT_S)
        options: dict[str, Any] = {"is_master": is_master, "timeout": limit, "wait_for_workers": False}
        store = call_with_timeout(CALL_TIMEOUT_S, lambda: dist.TCPStore(host, port, **options))
        if store is None:
            raise ForeignProgram("another program uses that port")
        self.store = store

    def __getattr__(self, name: str) -> Any:
        """A method of torch's store. Raises OSError if a call fails, or takes too long."""

        if self.is_master:  # in this process
            return getattr(self.store, name)

        def method(*arguments: Any) -> Any:
            done = call_with_timeout(CALL_TIMEOUT_S, lambda: [getattr(self.store, name)(*arguments)])
            if done is None:
                raise OSError("the store of node 0 does not respond")
            return done[0]

        return method

    def text(self, key: str) -> str:
        """What is there; empty if there is nothing."""
        return str(self.get(key).decode()) if self.check([key]) else ""


class NodeRendezvous(elastic.RendezvousHandler):
    """This node's side of each rendezvous. Everything but `_beat` runs in the thread of torchrun's agent."""

    use_agent_store = True  # the workers connect to the store of node 0, too

    def __init__(self, own: NodeRecord, agent: Any) -> None:
        """agent: the NodeAgent of launch_node.py."""
        self.own, self.agent, self.rank = own, agent, own.node_rank
        self.host, self.port, most = agent.options.master_addr, agent.options.master_port, agent.options.max_nodes
        own.address = self.host
        self.number, self.store_id = 0, ""  # of the last round, and of the store that it was in
        self.nodes = dict.fromkeys(range(most), "")  # those that run the workers: rank and launcher
        self.store: StoreClient | None = None  # of the last round; on node 0, the store itself
        self.awaits_restart = False  # whether a run goes on without this node
        self.wanted = (0, 0.0)  # a round, and when another node has wanted the one after it
        self.outdated = 0  # this round, once the workers here have had time to notice that
        self.heard_at = 0.0  # when node 0 has responded
        self.beat = threading.Thread(target=self._beat, daemon=True)  # runs once node 0 has responded
        self.over = threading.Event()

    def get_backend(self) -> str:
        return "ddp"

    get_run_id = get_backend

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def shutdown(self) -> bool:
        self.over.set()
        return True

    def num_nodes_waiting(self) -> int:
        """torchrun asks ten times a second, and restarts the workers for 1."""
        return int(self.outdated == self.number)

    def next_rendezvous(self) -> elastic.RendezvousInfo:
        """Wait until all nodes are ready and agree. Raises UserError, on every node, if the run ends instead."""
        self.own.last = self.agent.end_round() if self.number else None
        if not self.own.last:
            self.agent.wait(0, None)  # once it has registered, the other nodes count on this one
        self.outdated, self.wanted = 0, (0, 0.0)
        if self.rank == 0:
            self.store, self.number = self.store or self._create_store(), self.number + 1
            answer = Meeting(self.number, self.store, self.own, self.agent, self.nodes).run()
        else:
            self.store, answer = self._join()
        self.nodes = {int(rank): launcher for rank, launcher in answer["nodes"].items()}
        os.environ[ROUND_VARIABLE] = f"{self.number}/workers"
        self.agent.begin_round([*self.nodes], answer["restarts"])
        # The address that connects: a name may have others, which the workers would try first.
        host = self.own.address_of_0 or self.own.address
        usable = not host.startswith("fe80") and (self.rank > 0 or is_own_address(host))  # fe80: of an interface
        agents, where = f"{self.number}/agents", elastic.RendezvousStoreInfo(host if usable else self.host, self.port)
        store = dist.PrefixStore(agents, self.store.store)
        return elastic.RendezvousInfo(store, [*self.nodes].index(self.rank), len(self.nodes), where)

    def _beat(self) -> None:
        """In a thread: show that this launcher is there, and notice that another one wants the next round."""
        store = None
        while not self.over.wait(BEAT_INTERVAL_S):
            with suppress(OSError):  # a client whose call has failed may block in the next one
                store, client = None, store or StoreClient(self.host, self.port)
                client.add(f"beat/{self.own.launcher}", 1)
                number, now = self.number, time.monotonic()
                if self.agent.running and client.check([f"{number + 1}/wanted"]):
                    self.wanted = self.wanted if self.wanted[0] == number else (number, now)
                    self.outdated = number if now - self.wanted[1] > WORKERS_GRACE_S else 0
                store = client

    def note_failure(self, record: logging.LogRecord) -> None:
        """Of torchrun's messages, the one that names the first worker that failed: no public object does."""
        if str(record.msg).startswith("failed (exitcode: %s) local_rank: %s (pid: %s)"):
            exit_code, local_rank, pid = (int(str(value)) for value in tuple(record.args or ())[:3])
            self.agent.killed = (exit_code, local_rank, pid) if exit_code < 0 else None

    def tell_workers(self, rank: int) -> None:
        """Tell the workers of the other nodes that `rank` was killed: see FailureMonitor.

        Over gloo a connection breaks; over NCCL they would wait for it.
        """
        with suppress(OSError):  # they notice by themselves that the store is gone
            lost = failure_record(rank, ExitCode.PEER_LOST, f"rank {rank} was lost")  # they add what was saved
            StoreClient(self.host, self.port).compare_set(f"{self.number}/workers/{FAILURE_KEY}", "", lost)

    def _create_store(self) -> StoreClient:
        most, here = self.agent.options.max_nodes, self.own.host
        if most > max(1, (files := allow_many_files()) - SPARE_FILES):
            problem = f"{here} may open {files} files, and each of {most} nodes needs one"
            raise SetupError(f"{problem}: raise the limit there (ulimit -Hn)")
        if not any(map(is_own_address, self._resolve())):
            with suppress(OSError):  # if there is another node 0, both report the mismatch
                self._register()
            mine = f"{here}, which has --node-rank 0 (its addresses: {', '.join(own_addresses()) or 'none'})"
            remedy = "pass one of these on every node, or change this --node-rank"
            raise SetupError(f"--master-addr {self.host} is not an address of {mine}: {remedy}")
        if self.port and (problem := port_problem(self.port)):
            problem = problem.replace("another port", "another --master-port for all nodes")
            raise SetupError(f"port {self.port} of {here} {problem}")
        try:
            store = StoreClient(self.host, self.port, is_master=True)
        except ForeignProgram as error:
            problem = f"cannot connect to its own store within {CALL_TIMEOUT_S:g} s"
            raise SetupError(
                f"{here} {problem}: does a name server respond (time getent hosts {self.host})?"
            ) from error
        self.port = store.store.port
        self.beat.start()
        return store

    def _join(self) -> tuple[StoreClient, dict[str, Any]]:
        """Ask node 0 until it responds. Returns its store and its answer."""
        me, there, last = f"node {self.rank} ({self.own.host})", f"node 0 at {self.host}:{self.port}", self.own.last
        start, announced, foreign_since, grace = time.monotonic(), False, math.inf, self.agent.grace(last is not None)
        if not last:
            self._resolve()
        while True:
            try:
                return self._register()
            except OSError as error:
                waited, why = time.monotonic() - max(start, self.heard_at), error.strerror or str(error)
                foreign_since = min(foreign_since, waited) if isinstance(error, ForeignProgram) else math.inf
                unreachable = error.errno == errno.ENETUNREACH
            if last and waited > LATE_NODES_GRACE_S and (last.outcome == FINAL or self.agent.exhausted):
                raise RunEnded(last)  # it would not run again anyway
            if unreachable and not last:
                raise SetupError(f"{me} has no route to {there} ({why}): check --master-addr and the network")
            if waited - foreign_since > FOREIGN_PROGRAM_GRACE_S and not last:
                remedy = "end that program, or choose another --master-port for all nodes"
                raise SetupError(f"{me} finds another program than {there}: {remedy}")
            if waited > grace:
                if self.awaits_restart:
                    raise SetupError(f"the run at {self.host}:{self.port} has ended without {me}")
                hint = "check that launch_node.sh runs there with this --master-port, and that no firewall blocks it"
                silent = f"{me} got no answer from {there} within {grace:g} s ({why})"
                raise (PeerLost if last else SetupError)(f"{silent}: {hint}")
            if waited > NOTICE_AFTER_S and not announced:
                announced = True
                print_line(f"node {self.rank}: waiting for {there} (up to {grace:g} s; {why})")
            self.agent.wait(RETRY_INTERVAL_S, last)

    def _register(self) -> tuple[StoreClient, dict[str, Any]]:
        """Meet node 0 in the next round. Returns its store and its answer; raises OSError if it does not respond."""
        own, store = self.own, StoreClient(self.host, self.port)
        own.address, own.address_of_0 = store.address, store.address_of_0
        if not (current := store.text("round")):
            raise ForeignProgram("the store of another program uses that port")
        if self.beat.ident is None:  # it was not started
            self.beat.start()
        number, store_id = int(current.split()[0]), current.split()[1]
        number = max(number, self.number + 1 if store_id == self.store_id else 1)
        answer = json.loads(store.text(f"{number}/answer") or "{}")
        running = answer.get("nodes", {})
        launcher = running.get(str(self.rank), "")
        if launcher == own.launcher:  # the connection broke while this node waited for the answer
            self.number, self.store_id = number, store_id
            return store, answer
        if launcher and self._is_there(store, launcher):
            who = f"{store.text(f'who/{launcher}')} and {own}"
            raise SetupError(SAME_RANK.format(who, self.agent.options.max_nodes - 1))
        if running and not launcher and not self.awaits_restart:
            self.awaits_restart = True
            print_line(f"node {self.rank}: a run is in progress at {self.host}: joining when it restarts")
        number += bool(running)
        store.set(f"who/{own.launcher}", str(own))
        slot = store.add(f"{number}/count", 1)
        store.set(f"{number}/record/{slot}", json.dumps(asdict(own)))
        if launcher or not running:
            store.set(f"{number}/wanted", "")
        answer = self._wait_for_answer(store, number)
        if answer.get("nodes", {}).get(str(self.rank)) == own.launcher:
            self.number, self.store_id = number, store_id
            return store, answer
        if "nodes" in answer:
            raise OSError("node 0 has started without this node")  # it came a moment too late
        code, message, last = answer["exit_code"], answer["message"], own.last
        if answer["ended"]:
            reported = bool(last and answer["reported"])
            raise RunEnded(last if last and last.outcome == FINAL else RoundEnd(code, message, reported=reported))
        raise (Stopped if code == ExitCode.STOPPED else SetupError)(message, exit_code=code)

    def _is_there(self, store: StoreClient, launcher: str) -> bool:
        before = store.add(f"beat/{launcher}", 0)
        time.sleep(DEAD_S)
        return bool(store.add(f"beat/{launcher}", 0) != before)

    def _wait_for_answer(self, store: StoreClient, number: int) -> dict[str, Any]:
        start, last = time.monotonic(), self.own.last
        while True:
            answer = store.text(f"{number}/answer")
            if refused := store.text(f"{number}/refused/{self.own.launcher}"):  # this is written first
                raise SetupError(refused)
            if answer:
                return dict(json.loads(answer))
            self.heard_at = time.monotonic()
            if last and last.outcome == FINAL and self.heard_at - start > LATE_NODES_GRACE_S:
                raise RunEnded(last)
            store.add(f"beat/{self.own.launcher}", 1)
            try:
                self.agent.wait(RETRY_INTERVAL_S, last)
            except Stopped as error:
                if last:  # at the start, the others wait for another node
                    store.set(f"{number}/stopped", str(error))
                raise

    def _resolve(self, tries: int = 10) -> list[str]:
        """The addresses of --master-addr. Raises SetupError if it has none."""
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            if tries > 1 and getattr(error, "errno", None) == socket.EAI_AGAIN:  # see limit_name_lookups
                return self._resolve(tries - 1)
            why = getattr(error, "strerror", None) or str(error)
            problem = f"{self.own.host} cannot find its address ({why}): check the name, or pass an IP address"
            raise SetupError(f"--master-addr {self.host}: {problem}") from error
        return [str(entry[4][0]) for entry in found]
