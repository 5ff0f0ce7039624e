"""An agent whose connection over one rail is cut uses another rail before it counts as lost.

A real cluster thread with its control loop uses loopback addresses as rails. The test plays the
leader over real connections. If it stops reading and its buffers are full, the other side sees a
cut rail.
"""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import permutations
from typing import TypeVar

import pytest
from made_settings import made_settings, make_secret

from ftrun.agent.cluster.connections import ClusterConnections
from ftrun.agent.cluster.control_loop import ClusterControlLoop
from ftrun.agent.cluster.dialing import YOUNG_S, ConnectionFailover
from ftrun.config.cluster import ClusterSize
from ftrun.errors import PeerError
from ftrun.records.note import Note
from ftrun.recovery.commands import Connect, JournalEntry
from ftrun.wire.cluster.generation import NodeCard, Rail
from ftrun.wire.cluster.membership import Heartbeat, JoinRejected, Prepare
from ftrun.wire.cluster.messages import ClusterEnvelope, JournalLines
from ftrun.wire.transport.address_race import PeerAddress
from ftrun.wire.transport.handshake import PeerIdentity, accept_handshake, dial_handshake
from ftrun.wire.transport.peer_connection import PeerConnection
from ftrun.wire.transport.tcp import listen_tcp
from tests.contract import descriptors
from tests.contract.answering import full_port

TIMEOUT_S = 60.0
QUIET_S = 2.0
"""Longer than a new connection takes."""
TRIES = 3
"""Attempts of which the quickest counts, so that it is the agent's time and not the machine's."""

SECRET = make_secret()
FIRST, SECOND = "127.0.0.2", "127.0.0.3"
ME = NodeCard("me", 7, "127.0.0.4", 1, 1)
Connection = PeerConnection[ClusterEnvelope]
M = TypeVar("M")


def card(node_id: str, incarnation: int, ports: dict[str, int]) -> NodeCard:
    rails = [Rail(f"eth{at}", host, port=port) for at, (host, port) in enumerate(ports.items())]
    return NodeCard(node_id, incarnation, rails[0].host, rails[0].port, 1, rails=rails)


def identity(node_id: str, incarnation: int) -> PeerIdentity:
    return PeerIdentity("run", "agent", node_id, incarnation)


def wait_for(what: str, is_so: Callable[[], object]) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < end_s, what
        time.sleep(0.01)


@dataclass
class FakeLeader:
    """The other agent, simulated by the test; it listens on two rails."""

    stack: ExitStack
    incarnation: int = 5
    listeners: dict[str, socket.socket] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for host in (FIRST, SECOND):
            self.listen(host, 0)

    def listen(self, host: str, port: int) -> None:
        listener = self.stack.enter_context(listen_tcp(host, port))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listener.settimeout(TIMEOUT_S)
        self.listeners[host] = listener

    @property
    def card(self) -> NodeCard:
        ports = {host: self.port(host) for host in (FIRST, SECOND)}
        return card("lead", self.incarnation, ports)

    def port(self, host: str) -> int:
        return int(self.listeners[host].getsockname()[1])

    def accept(self, host: str) -> Connection:
        sock, _ = self.listeners[host].accept()
        me = identity("lead", self.incarnation)
        session = accept_handshake(sock, me, SECRET, deadline_s=TIMEOUT_S)
        return self._made(PeerConnection(sock, session, ClusterEnvelope))

    def dial(self, port: int, source: str) -> Connection:
        sock = socket.create_connection((ME.host, port), TIMEOUT_S, (source, 0))
        me = identity("lead", self.incarnation)
        session = dial_handshake(sock, me, SECRET, deadline_s=TIMEOUT_S)
        return self._made(PeerConnection(sock, session, ClusterEnvelope))

    def _made(self, connection: Connection) -> Connection:
        self.stack.callback(connection.close)
        return connection

    def leave(self, host: str) -> None:
        """Stop listening; the port stays reserved."""
        port = self.port(host)
        self.listeners[host].close()
        sock = self.stack.enter_context(socket.socket())
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))

    def cut(self, host: str) -> None:
        """Give no answer there: the queue of connections is full."""
        port = self.port(host)
        self.listeners[host].close()
        self.stack.enter_context(full_port(host, port))


def received(connection: Connection, kind: type[M]) -> M:
    """The next message of this kind."""
    while True:
        assert descriptors.select([connection], [], [], TIMEOUT_S)[0], kind
        for envelope in connection.receive_ready():
            if isinstance(envelope.body, kind):
                return envelope.body


def is_closed(connection: Connection) -> bool:
    try:
        connection.receive_ready()
    except PeerError:
        return True
    return False


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.fixture
def leader(stack: ExitStack) -> FakeLeader:
    return FakeLeader(stack)


@dataclass
class Agent:
    """The agent under test."""

    control_loop: ClusterControlLoop
    thread: ClusterConnections
    port: int
    asides: list[object]
    dialled: list[Callable[..., None]]
    """Called once each, when another agent was reached."""

    def notes(self, kind: str) -> list[Note]:
        self._all.extend(iter(self.control_loop.next_order, None))
        entries = [one.record for one in self._all if isinstance(one, JournalEntry)]
        return [record for record in entries if record.kind == kind]

    def __post_init__(self) -> None:
        self._all: list[object] = []


@pytest.fixture
def agent(stack: ExitStack, leader: FakeLeader) -> Agent:
    return made_agent(stack, leader)


def made_agent(
    stack: ExitStack,
    leader: FakeLeader,
    excluded: Callable[[object], object] | None = None,
    suspend_now: Callable[[bool], None] = lambda _: None,
) -> Agent:
    listener = listen_tcp(ME.host, 0)
    endpoint = (FIRST, leader.port(FIRST))
    settings = made_settings(
        ClusterSize(2, 2, 0),
        endpoint_host=endpoint[0],
        endpoint_port=endpoint[1],
        failure_timeout_s=60.0,
        self_fencing_timeout_s=30.0,
    )
    control_loop = ClusterControlLoop(ME, settings, kept=None, is_chosen=False)
    asides: list[object] = []
    dialled: list[Callable[..., None]] = []
    thread = control_loop.thread = ClusterConnections(
        control_loop,
        identity(ME.node_id, ME.incarnation),
        SECRET,
        [listener],
        wake_executor=lambda: None,
        suspend_now=suspend_now,
        each_turn=lambda _: None,
        lease=lambda _: None,
        on_other_message=lambda _, message: (excluded or asides.append)(message),
        dialled=lambda *who: dialled.pop()(*who) if dialled else None,
        serve_ring=lambda _: None,
    )
    thread.start()
    stack.callback(thread.close)
    return Agent(control_loop, thread, int(listener.getsockname()[1]), asides, dialled)


@pytest.fixture
def followed(agent: Agent, leader: FakeLeader) -> Connection:
    """The leader's connection to the agent, which follows it and has its rails."""
    return follower_of(leader)


def follower_of(leader: FakeLeader) -> Connection:
    connection = leader.accept(FIRST)
    connection.send(Prepare(0, leader.card, "the run begins", (-1, 0)))
    received(connection, Heartbeat)
    return connection


def stop_reading(agent: Agent) -> float:
    """Make the agent's kernel acknowledge nothing from now on; return the time."""
    agent.thread.send("lead", JournalLines(["x" * 200_000] * 4))
    return time.monotonic()


def test_a_bug_in_a_call_does_not_make_a_node_undiallable(agent: Agent, leader: FakeLeader) -> None:
    def fails(*_: object) -> None:
        raise ValueError("planted")

    agent.dialled.append(fails)
    leader.accept(FIRST)
    second = leader.accept(FIRST)
    second.send(Prepare(0, leader.card, "the run begins", (-1, 0)))
    received(second, Heartbeat)


def test_a_bug_in_the_thread_suspends_the_ranks_and_ends_the_agent(
    stack: ExitStack, leader: FakeLeader
) -> None:
    def fails(_: object) -> None:
        raise ValueError("planted")

    held: list[bool] = []
    agent = made_agent(stack, leader, excluded=fails, suspend_now=held.append)
    connection = follower_of(leader)
    agent.control_loop.tick()
    assert held == []
    connection.send(JournalLines(["a line"]))
    wait_for("the failure", lambda: agent.thread.failure is not None and held)
    assert held == [True]
    with pytest.raises(RuntimeError, match="the cluster thread has ended"):
        agent.control_loop.tick()


def quickest(scene: Callable[[ExitStack], float], enough_s: float) -> float:
    """The seconds that an action takes; repeated if that is too long."""
    took_s: list[float] = []
    while not took_s or (min(took_s) >= enough_s and len(took_s) < TRIES):
        with ExitStack() as stack:
            took_s.append(scene(stack))
    return min(took_s)


@pytest.mark.slow
def test_a_connection_that_is_cut_off_is_recreated_over_another_rail() -> None:
    def scene(stack: ExitStack) -> float:
        leader = FakeLeader(stack)
        agent = made_agent(stack, leader)
        followed = follower_of(leader)
        started_s = stop_reading(agent)
        second = leader.accept(SECOND)
        took_s = time.monotonic() - started_s
        received(second, Heartbeat)
        wait_for("the old one to be closed", lambda: is_closed(followed))
        (note,) = agent.notes("connection_failed_over")
        assert FIRST in note.text
        assert SECOND in note.text
        assert not agent.notes("leader_lost")
        return took_s

    assert quickest(scene, 1.8) < 1.8, "ranks are suspended after 2 s"


@pytest.mark.slow
def test_a_process_that_is_paused_is_not_dialled_again(
    agent: Agent, leader: FakeLeader, followed: Connection
) -> None:
    leader.listeners[SECOND].settimeout(QUIET_S)
    with pytest.raises(TimeoutError):
        leader.accept(SECOND)
    received(followed, Heartbeat)


@pytest.mark.slow
def test_a_node_with_one_rail_is_left_to_its_kernel(agent: Agent, leader: FakeLeader) -> None:
    connection = leader.accept(FIRST)
    alone = card("lead", leader.incarnation, {FIRST: leader.port(FIRST)})
    connection.send(Prepare(0, alone, "the run begins", (-1, 0)))
    received(connection, Heartbeat)
    stop_reading(agent)
    leader.listeners[FIRST].settimeout(QUIET_S)
    with pytest.raises(TimeoutError):
        leader.accept(FIRST)


@pytest.mark.slow
def test_a_closed_connection_is_dialled_over_any_rail() -> None:
    def scene(stack: ExitStack) -> float:
        leader = FakeLeader(stack)
        agent = made_agent(stack, leader)
        followed = follower_of(leader)
        leader.cut(FIRST)
        followed.close()
        started_s = time.monotonic()
        received(leader.accept(SECOND), Heartbeat)
        took_s = time.monotonic() - started_s
        assert not agent.notes("leader_lost")
        return took_s

    assert quickest(scene, 0.8) < 0.8


def test_a_refusal_at_the_address_of_the_card_is_the_death_of_the_agent(
    agent: Agent, leader: FakeLeader, followed: Connection
) -> None:
    leader.leave(FIRST)
    leader.leave(SECOND)
    followed.close()
    wait_for("the leader to be lost", lambda: agent.notes("leader_lost"))
    assert "refuses the connection" in agent.notes("leader_lost")[0].text


@pytest.mark.slow
def test_a_refusal_elsewhere_is_believed_only_where_the_agent_was_met_there(
    agent: Agent, leader: FakeLeader, followed: Connection
) -> None:
    leader.cut(FIRST)
    port = leader.port(SECOND)
    leader.leave(SECOND)  # as with a firewall that refuses connections it never allowed
    followed.close()
    time.sleep(QUIET_S)
    assert not agent.notes("leader_lost")
    leader.listen(SECOND, port)
    again = leader.accept(SECOND)
    received(again, Heartbeat)
    leader.leave(SECOND)
    again.close()
    wait_for("the leader to be lost", lambda: agent.notes("leader_lost"))


def test_an_agent_started_again_may_speak_from_another_rail_of_its_machine(
    agent: Agent, leader: FakeLeader, followed: Connection
) -> None:
    leader.incarnation += 1
    unknown_peer = leader.dial(agent.port, "127.0.0.77")
    assert "--node-id" in received(unknown_peer, JoinRejected).reason
    again = leader.dial(agent.port, SECOND)
    wait_for("the old one to be closed", lambda: is_closed(followed))
    leader.incarnation -= 1
    assert not is_closed(again)


def test_any_other_process_that_listens_at_the_other_address_is_passed_over(
    agent: Agent, leader: FakeLeader, followed: Connection
) -> None:
    leader.cut(FIRST)
    followed.close()
    sock, _ = leader.listeners[SECOND].accept()
    with sock, pytest.raises(PeerError, match="another node than"):
        accept_handshake(sock, identity("another", 3), SECRET)
    received(leader.accept(SECOND), Heartbeat)


# --- the choice between two connections ---------------------------------------------------------

SETTINGS = made_settings(ClusterSize(2, 2, 0))


@pytest.mark.parametrize("at_a", list(permutations("ab")))
@pytest.mark.parametrize("at_b", list(permutations("ab")))
def test_both_sides_keep_the_same_of_two_connections(
    at_a: tuple[str, ...], at_b: tuple[str, ...]
) -> None:
    """Both sides dial each other at once; a connection is named by its dialler."""
    kept = {}
    for me, other, order in (("a", "b", at_a), ("b", "a", at_b)):
        ways = ConnectionFailover(NodeCard(me, 1, "127.0.0.1", 1, 1), SETTINGS, lambda _: None)
        for number, dialler in enumerate(order):
            now_s = 100.0 + 0.1 * number
            is_ours = dialler == me
            if not ways.keeps(other, 2, is_ours=is_ours, now_s=now_s):
                ways.made(other, 2, is_ours=is_ours, now_s=now_s)
                kept[me] = dialler
    assert kept["a"] == kept["b"]


def test_the_newest_connection_wins_but_for_that() -> None:
    ways = ConnectionFailover(NodeCard("b", 1, "127.0.0.1", 1, 1), SETTINGS, lambda _: None)
    ways.made("a", 2, is_ours=False, now_s=100.0)
    assert ways.keeps("a", 2, is_ours=True, now_s=100.1)
    assert not ways.keeps("a", 2, is_ours=False, now_s=100.1), "it was dialled again"
    assert not ways.keeps("a", 3, is_ours=True, now_s=100.1), "it was started again"
    assert not ways.keeps("a", 2, is_ours=True, now_s=100.0 + YOUNG_S)
    ways.gone("a")
    assert not ways.keeps("a", 2, is_ours=True, now_s=100.1)


def test_only_addresses_of_the_life_that_is_meant_are_dialled() -> None:
    known = card("lead", 5, {FIRST: 10, SECOND: 11})
    ways = ConnectionFailover(ME, SETTINGS, lambda node_id: known if node_id == "lead" else None)
    first = PeerAddress(FIRST, 10, is_sure=True)
    assert ways.of(Connect(FIRST, 10, "lead")) == [first, PeerAddress(SECOND, 11)]
    assert ways.of(Connect(FIRST, 12, "lead")) == [PeerAddress(FIRST, 12, is_sure=True)]
    assert ways.of(Connect(FIRST, 10)) == [first]
    ways.met(("lead", 4), SECOND, 11)
    assert not ways.of(Connect(FIRST, 10, "lead"))[1].is_sure
    ways.met(("lead", 5), SECOND, 11)
    assert ways.of(Connect(FIRST, 10, "lead"))[1].is_sure
    assert ways.hosts_of("lead") == {FIRST, SECOND}
    assert ways.hosts_of("nobody") == set()
