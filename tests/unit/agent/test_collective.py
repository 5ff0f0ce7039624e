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
from ftrun.agent.cluster.collective import RingPart
from ftrun.agent.cluster.collective_check import WRONG_SUM, CollectiveCheck
from ftrun.agent.launch.process import python_command
from ftrun.monitor.slow.collective_check import (
    CollectiveResult,
    NodeIdentity,
    slowest_rate,
    wrong_hops,
    wrong_nodes,
)
from ftrun.wire.cluster.membership import CollectiveRing
from ftrun.wire.transport.handshake import PeerIdentity
from tests.unit.agent.test_preflight import checks, node_check_of
from tests.unit.recovery.made import card

LIMIT_S = 60.0
MB = 1_000_000
Pair = tuple[socket.socket, socket.socket]
Reported = tuple[CollectiveCheck, Callable[[], str]]
"""The check of node a, and a wait for the problem that it reports."""


class Ring:
    """A process for each node; hop `at` connects node `at` with the next one."""

    def __init__(self, count: int, *, num_bytes: int, has_fault: int = -1, relay: int = -1) -> None:
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
            part = RingPart(5, tuple(self.nodes), at, num_bytes, fds, has_fault=at == has_fault)
            words = python_command(
                "ftrun.agent.cluster.collective", msgspec.json.encode(part).decode()
            )
            self.processes.append(subprocess.Popen(words, pass_fds=fds, stdout=subprocess.PIPE))
        for sock in (sock for pair in pairs for sock in pair):
            sock.close()

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


@pytest.mark.parametrize("count", [2, 3])
def test_every_node_receives_right_sums_from_both_neighbours(count: int) -> None:
    ring = Ring(count, num_bytes=4 * MB)
    results = ring.results()
    assert wrong_hops(results) == []
    assert slowest_rate(results) > 0
    for at, node in enumerate(ring.nodes):
        found = results[node]
        assert (found.number, found.count, found.problem) == (5, count, "")
        senders = [hop.sender for hop in found.hops]
        assert senders == [ring.nodes[at - 1], ring.nodes[(at + 1) % count]]
        # Of an all-reduce of 4 MB each node receives 2 (n - 1) / n times as much, in whole rounds.
        num_bytes = sum(hop.num_bytes for hop in found.hops)
        assert 0.75 < num_bytes / (2 * (count - 1) / count * 4 * MB) <= 1.05


@pytest.mark.parametrize("count", [2, 3])
def test_the_node_that_computes_a_wrong_sum_is_named(count: int) -> None:
    ring = Ring(count, num_bytes=2 * MB, has_fault=1)
    results = ring.results()
    (hop,) = wrong_hops(results)
    assert hop.nodes == (ring.nodes[1],)
    assert all(not result.problem for result in results.values()), "the others continue"


def test_a_byte_that_changes_on_the_way_names_the_link() -> None:
    ring = Ring(3, num_bytes=2 * MB, relay=1)
    results = ring.results()
    assert ring.changed.is_set()
    (hop,) = wrong_hops(results)
    assert set(hop.nodes) == {ring.nodes[1], ring.nodes[2]}
    assert wrong_nodes([hop]) == {}


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
        assert (found[0].number, found[0].count, found[0].hops) == (3, 2, ())
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


def test_an_agent_that_was_restarted_in_place_compares_nothing(tmp_path: Path) -> None:
    check = node_check_of(tmp_path, nodes=False)
    check.begin(is_awaited=True)
    check.first()
    assert not [one for one in threading.enumerate() if one.name == "ftrun-preflight"]
    check.close()
