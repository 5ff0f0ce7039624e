"""Collective checks with real processes, whose sockets the test connects."""

import contextlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from ftrun.agent.cluster import collective_check
from ftrun.agent.cluster.collective import PieceKeys, RingPart
from ftrun.agent.cluster.collective_check import WRONG_SUM, CollectiveCheck
from ftrun.agent.launch.process import awaited, python_command
from ftrun.errors import PeerError
from ftrun.monitor.slow.collective_check import (
    CollectiveResult,
    HopResult,
    NodeIdentity,
    WrongSum,
    slowest_rate,
    wrong_hops,
    wrong_nodes,
)
from ftrun.wire.cluster.membership import CollectiveRing
from ftrun.wire.transport.handshake import AuthSession, PeerIdentity, accept_handshake
from ftrun.wire.transport.secret import Secret
from tests.unit.agent.test_preflight import checks, node_check_of
from tests.unit.recovery.made import card

LIMIT_S = 60.0
MB = 1_000_000
Pair = tuple[socket.socket, socket.socket]
Reported = tuple[CollectiveCheck, Callable[[], str]]
"""The check of node a, and a wait for the problem that it reports."""


class Ring:
    """A process for each node; hop `at` connects node `at` with the next one."""

    def __init__(
        self,
        count: int,
        *,
        num_bytes: int,
        has_fault: int = -1,
        relay: int = -1,
        has_secret: bool = False,
    ) -> None:
        self.nodes = [(f"node{at}", 10 + at) for at in range(count)]
        pairs = [socket.socketpair() for _ in range(count)]
        self.changed = threading.Event()
        self.relays: list[tuple[list[threading.Thread], Pair]] = []
        if relay >= 0:
            for sock in pairs[relay]:
                sock.close()
            pairs[relay] = self._through_relay()
        self.processes = []
        for at in range(count):
            fds = (pairs[at][0].fileno(), pairs[at - 1][1].fileno())
            part = RingPart("x", tuple(self.nodes), at, num_bytes, fds, has_fault=at == has_fault)
            words = python_command(
                "ftrun.agent.cluster.collective", msgspec.json.encode(part).decode()
            )
            process = subprocess.Popen(
                words, pass_fds=fds, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(self._keys(at) if has_secret else PieceKeys()))
            process.stdin.close()
            process.stdin = None
            self.processes.append(process)
        for sock in (sock for pair in pairs for sock in pair):
            sock.close()

    def _keys(self, at: int) -> PieceKeys:
        """A key for each direction of each connection."""
        before = (at - 1) % len(self.nodes)
        return PieceKeys(
            send=(b"forward %d" % at, b"back %d" % before),
            receive=(b"back %d" % at, b"forward %d" % before),
        )

    def _through_relay(self) -> Pair:
        """The ends of a connection on which one byte changes."""
        (first, near), (far, second) = socket.socketpair(), socket.socketpair()
        threads = [
            threading.Thread(target=self._forward, args=pair) for pair in ((near, far), (far, near))
        ]
        for thread in threads:
            thread.start()
        self.relays = [(threads, (near, far))]
        return first, second

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if len(data) > 1000 and not self.changed.is_set():
                    self.changed.set()
                    data[500] ^= 1
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def results(self, *, without: int = -1) -> dict[NodeIdentity, CollectiveResult]:
        found = {}
        for at, process in enumerate(self.processes):
            out, _ = process.communicate(timeout=LIMIT_S)
            if at != without:
                found[self.nodes[at]] = msgspec.json.decode(out, type=CollectiveResult)
        for threads, pair in self.relays:
            for thread in threads:
                thread.join(LIMIT_S)
            for sock in pair:
                sock.close()
        return found


@pytest.mark.parametrize(("count", "has_secret"), [(2, False), (3, False), (3, True)])
def test_every_node_receives_right_sums_from_both_neighbours(count: int, has_secret: bool) -> None:
    ring = Ring(count, num_bytes=4 * MB, has_secret=has_secret)
    results = ring.results()
    assert wrong_hops(results) == []
    assert slowest_rate(results) > 0
    for at, node in enumerate(ring.nodes):
        found = results[node]
        assert (found.check, found.count, found.problem) == ("x", count, "")
        senders = [hop.sender for hop in found.hops]
        assert senders == [ring.nodes[at - 1], ring.nodes[(at + 1) % count]]
        # Of an all-reduce of 4 MB each node receives 2 (n - 1) / n times as much, in whole rounds.
        num_bytes = sum(hop.num_bytes for hop in found.hops)
        assert 0.75 < num_bytes / (2 * (count - 1) / count * 4 * MB) <= 1.05


@pytest.mark.parametrize("count", [2, 3])
def test_the_node_that_computes_a_wrong_sum_is_named(count: int) -> None:
    ring = Ring(count, num_bytes=2 * MB, has_fault=1)
    results = ring.results()
    hops = wrong_hops(results)
    assert len(hops) == 2, "one in each direction"
    assert list(wrong_nodes(hops)) == [ring.nodes[1]]
    assert all(not result.problem for result in results.values()), "the others continue"


def test_a_byte_that_changes_on_the_way_names_the_link() -> None:
    ring = Ring(3, num_bytes=2 * MB, relay=1)
    results = ring.results()
    assert ring.changed.is_set()
    (hop,) = wrong_hops(results)
    assert set(hop.nodes) == {ring.nodes[1], ring.nodes[2]}
    assert wrong_nodes([hop]) == {}


def test_with_a_secret_a_changed_byte_ends_the_check_and_names_neither_node_nor_link() -> None:
    ring = Ring(3, num_bytes=2 * MB, relay=1, has_secret=True)
    results = ring.results()
    assert ring.changed.is_set()
    assert wrong_hops(results) == []
    problems = " ".join(one.problem for one in results.values())
    assert " has changed on the way" in problems


def test_a_node_that_is_killed_ends_the_check_of_the_others_and_is_not_wrong() -> None:
    ring = Ring(3, num_bytes=4000 * MB)
    time.sleep(1.0)
    ring.processes[1].kill()
    started_s = time.monotonic()
    results = ring.results(without=1)
    assert time.monotonic() - started_s < 10.0
    assert wrong_hops(results) == []
    assert "node1 has ended the check" in {one.problem for one in results.values()}


# --- the agent's side -------------------------------------------------------------------------


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WRONG_SUM, "1")


@pytest.mark.usefixtures("faulty")
@pytest.mark.parametrize("allow_faults", [False, True])
def test_two_processes_of_one_machine_are_compared(allow_faults: bool) -> None:
    check = CollectiveCheck(allow_faults=allow_faults)
    results = check.on_one_machine(2 * MB)
    assert [one.problem for one in results.values()] == ["", ""]
    first = f"CPU {min(os.sched_getaffinity(0))}"
    assert [name for name, _ in wrong_nodes(wrong_hops(results))] == [first] * allow_faults


def ring_of(port: int) -> CollectiveRing:
    other = msgspec.structs.replace(card("b"), host="127.0.0.1", port=port)
    return CollectiveRing(3, [card("a"), other], MB)


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reported]:
    monkeypatch.setattr(collective_check, "JOIN_S", 0.2)
    found: list[CollectiveResult] = []
    check = CollectiveCheck(allow_faults=False)
    check.join(PeerIdentity("run", "agent", "a", 1), None, found.append)

    def problem() -> str:
        give_up_s = time.monotonic() + LIMIT_S
        while not found and time.monotonic() < give_up_s:
            time.sleep(0.01)
        assert (found[0].count, found[0].hops) == (2, ())
        return found[0].problem

    yield check, problem
    check.close()


def test_a_node_that_cannot_be_reached_is_a_reported_problem(
    reported: Reported,
) -> None:
    check, problem = reported
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    check.take(ring_of(port))
    assert "refuses the connection" in problem()


def test_a_neighbour_that_does_not_speak_ends_the_check(
    reported: Reported,
) -> None:
    check, problem = reported
    with socket.create_server(("127.0.0.1", 0)) as listener:
        check.take(ring_of(listener.getsockname()[1]))
        sock, _ = listener.accept()
        sock.close()
        assert problem()


class Nodes:
    """Two nodes with real handshakes; each takes the order that it is given."""

    def __init__(self, secret: Secret | None) -> None:
        self.reported: dict[str, list[CollectiveResult]] = {"a": [], "b": []}
        self.listeners = [socket.create_server(("127.0.0.1", 0)) for _ in "ab"]
        self.cards = [
            msgspec.structs.replace(
                card(name), host="127.0.0.1", port=listener.getsockname()[1], incarnation=at
            )
            for at, (name, listener) in enumerate(zip("ab", self.listeners, strict=True), 1)
        ]
        self.checks = []
        for at, name in enumerate("ab"):
            identity = PeerIdentity("run", "agent", name, self.cards[at].incarnation)
            check = CollectiveCheck(allow_faults=False)
            check.join(identity, secret, self.reported[name].append)
            self.checks.append(check)
            threading.Thread(target=self._serve, args=(at, identity, secret), daemon=True).start()

    def _serve(self, at: int, identity: PeerIdentity, secret: Secret | None) -> None:
        with contextlib.suppress(OSError, PeerError):
            while True:
                sock, _ = self.listeners[at].accept()
                with sock:
                    self.checks[at].accept(sock, accept_handshake(sock, identity, secret))

    def results(self, *orders: CollectiveRing) -> list[CollectiveResult]:
        for check, order in zip(self.checks, orders, strict=True):
            check.take(order)
        give_up_s = time.monotonic() + LIMIT_S
        while not all(self.reported.values()) and time.monotonic() < give_up_s:
            time.sleep(0.01)
        return [found[0] for found in self.reported.values()]

    def close(self) -> None:
        for check, listener in zip(self.checks, self.listeners, strict=True):
            check.close()
            listener.close()


@pytest.fixture(params=[False, True], ids=["no secret", "secret"])
def two(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setattr(collective_check, "JOIN_S", 2.0)
    made = Nodes(Secret(b"s" * 32) if request.param else None)
    yield made
    made.close()


def test_two_nodes_with_one_order_compare_sums(two: Nodes) -> None:
    order = CollectiveRing(1, two.cards, MB, ("a", 1), 0)
    results = two.results(order, order)
    assert [(one.problem, one.check) for one in results] == [("", order.check)] * 2
    assert not [hop for one in results for hop in one.hops if hop.wrong or not hop.num_bytes]


@pytest.mark.parametrize("what", ["leader", "nodes"])
def test_orders_of_one_number_that_differ_are_not_compared(two: Nodes, what: str) -> None:
    order = CollectiveRing(1, two.cards, MB, ("a", 1), 0)
    leader, nodes = {
        "leader": (("b", 2), two.cards),
        "nodes": (order.leader, two.cards[::-1]),
    }[what]
    other = CollectiveRing(1, nodes, MB, leader, 0)
    results = two.results(order, other)
    text = "the previous node has not connected within 2 s"
    assert [(one.problem, one.hops) for one in results] == [(text, ())] * 2
    assert [one.check for one in results] == [order.check, other.check]


def test_a_connection_of_an_earlier_agent_is_not_used(two: Nodes) -> None:
    successor = msgspec.structs.replace(two.cards[1], incarnation=9)
    order = CollectiveRing(1, [two.cards[0], successor], MB, ("a", 1), 0)
    two.checks[0].take(order)
    give_up_s = time.monotonic() + LIMIT_S
    while not two.reported["a"] and time.monotonic() < give_up_s:
        time.sleep(0.01)
    assert "expects another agent of b" in two.reported["a"][0].problem


def test_an_arrival_of_another_agent_is_not_taken(two: Nodes) -> None:
    order = CollectiveRing(1, two.cards, MB, ("a", 1), 0)
    stranger = PeerIdentity("run", "ring", "a", 77)
    near, far = socket.socketpair()
    with near, far:
        far.sendall(bytes.fromhex(order.check))
        session = AuthSession(stranger, stranger, b"", b"", is_authenticated=False)
        two.checks[1].accept(near, session)
        with pytest.raises(TimeoutError, match="has not connected"):
            two.checks[1]._previous(order, two.cards[0].identity)


def test_processes_that_were_started_are_ended_if_the_next_one_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = CollectiveCheck(allow_faults=False)
    started: list[subprocess.Popen[bytes]] = []
    start = check._start

    def first_only(part: RingPart, keys: PieceKeys) -> subprocess.Popen[bytes]:
        if started:
            raise OSError("no more processes")
        started.append(start(part, keys))
        return started[0]

    monkeypatch.setattr(check, "_start", first_only)
    with pytest.raises(OSError, match="no more"):
        check.on_one_machine(2 * MB)
    assert started[0].returncode is not None
    assert started[0].pid not in awaited
    assert not check._children


@pytest.mark.usefixtures("faulty")
def test_one_node_reports_its_own_wrong_sums(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check = node_check_of(tmp_path, nodes=False, allow_faults=True, collective_mb=2)
    check.begin(is_awaited=False)
    check.first()
    give_up_s = time.monotonic() + LIMIT_S
    while check.fitness is None or check.fitness.is_fit:
        assert time.monotonic() < give_up_s
        time.sleep(0.05)
    check.close()
    assert "this machine computes wrong sums: CPU " in caplog.text
    assert checks(tmp_path)[-1] == check.fitness


def test_a_later_result_keeps_the_wrong_sums_of_an_earlier_one(tmp_path: Path) -> None:
    check = node_check_of(tmp_path, nodes=True, enabled=True)
    check.begin(is_awaited=True)
    check.first()
    wrong = HopResult(("b", 2), wrong=WrongSum(1, 0, 1, 0, 1, 2, is_as_sent=True))
    for name, hops in (("1", (wrong, HopResult(("c", 3)))), ("2", ())):
        check._compared(CollectiveResult(name, 3, hops))
    assert check.fitness is not None
    found = check.fitness.figures.collective
    assert found is not None
    assert (found.check, [one.hops for one in found.earlier]) == ("2", [(wrong,)])
    check.close()


def test_an_agent_that_was_restarted_in_place_compares_nothing(tmp_path: Path) -> None:
    check = node_check_of(tmp_path, nodes=False)
    check.begin(is_awaited=True)
    check.first()
    assert not [one for one in threading.enumerate() if one.name == "ftrun-preflight"]
    check.close()
