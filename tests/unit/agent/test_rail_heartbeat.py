"""Heartbeats over each rail: the leader receives a report if a peer's heartbeats stop on a rail."""

import socket
import time
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from made_settings import make_secret

from ftrun.agent.cluster import rail_heartbeat as rail_pulse
from ftrun.agent.cluster.rail_heartbeat import RailHeartbeat
from ftrun.membership.events import MessageReceived
from ftrun.wire.cluster.generation import GenerationPlan, NodeCard, PlanMember, Rail
from ftrun.wire.cluster.messages import RailUnresponsive
from ftrun.wire.transport.secret import Secret
from ftrun.wire.transport.tcp import listen_tcp

WAIT_S = 600.0
UNRESPONSIVE_S = 2.0
"""Longer than a busy machine delays one thread and not the other."""
SECRET = make_secret()


def free_card(node_id: str, number: int, rails: int = 2) -> NodeCard:
    """A node with rails on loopback addresses, at free ports."""
    found = []
    for rail in range(rails):
        host = f"127.77.{rail}.{number}"
        with listen_tcp(host, 0) as probe:
            found.append(Rail(f"eth{rail}", host, 24, probe.getsockname()[1]))
    return NodeCard(node_id, number, found[0].host, found[0].port, 1, rails=found)


class Node:
    """One node's rail heartbeat, and its reports."""

    def __init__(
        self, card: NodeCard, plan: GenerationPlan, leader: NodeCard, secret: Secret | None
    ) -> None:
        self.reported: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        control_loop: Any = SimpleNamespace(
            plan=plan,
            leads=leader is card,
            member=SimpleNamespace(leader_card=leader),
            post=lambda event: self.reported.put(("", event)),
            thread=SimpleNamespace(send=lambda to, body: self.reported.put((to, body))),
        )
        self.pulse = RailHeartbeat("run", card, secret, control_loop)
        self.pulse.start()


def wait_until_received(*nodes: Node) -> None:
    """Runs until each node receives the other's heartbeats over both rails."""
    give_up_s = time.monotonic() + WAIT_S
    while any(len(node.pulse._received) < 2 for node in nodes):
        assert time.monotonic() < give_up_s
        time.sleep(0.02)


def plan_of(cards: list[NodeCard]) -> GenerationPlan:
    members = [PlanMember(card, rank) for rank, card in enumerate(cards)]
    return GenerationPlan(0, cards[0].node_id, "", members, [], None, "", "", 0)


def cut(card: NodeCard, rail: int) -> NodeCard:
    """The card of a node whose packets on this rail are lost."""
    rails = list(card.rails)
    rails[rail] = Rail(rails[rail].name, rails[rail].host, 24, 9)
    return NodeCard(card.node_id, card.incarnation, card.host, card.port, 1, rails=rails)


def test_a_rail_that_stops_responding_is_reported_to_the_leader_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rail_pulse, "UNRESPONSIVE_S", UNRESPONSIVE_S)
    cards = [free_card("a", 1), free_card("b", 2)]
    plan = plan_of(cards)
    nodes = [Node(card, plan, cards[0], SECRET) for card in cards]
    wait_until_received(*nodes)
    assert all(node.reported.empty() for node in nodes)
    # Packets from b to a over eth1 are lost from now on.
    broken = plan_of([cut(cards[0], 1), cards[1]])
    nodes[1].pulse._control_loop.__dict__["plan"] = broken
    where, what = nodes[0].reported.get(timeout=WAIT_S)
    assert where == ""
    assert isinstance(what, MessageReceived)
    assert isinstance(what.message, RailUnresponsive)
    assert (what.node_id, what.message.source, what.message.rail) == ("a", "b", "eth1")
    assert nodes[1].reported.empty()


def test_a_node_that_does_not_lead_sends_it_to_the_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rail_pulse, "UNRESPONSIVE_S", UNRESPONSIVE_S)
    cards = [free_card("a", 3), free_card("b", 4)]
    nodes = [Node(card, plan_of(cards), cards[0], None) for card in cards]
    wait_until_received(*nodes)
    nodes[0].pulse._control_loop.__dict__["plan"] = plan_of([cards[0], cut(cards[1], 0)])
    where, what = nodes[1].reported.get(timeout=WAIT_S)
    assert (where, what.source, what.rail) == ("a", "a", "eth0")


def test_a_node_that_never_responded_is_not_missed_and_another_secret_does_not_respond() -> None:
    cards = [free_card("a", 5), free_card("b", 6)]
    plan = plan_of(cards)
    one, _ = Node(cards[0], plan, cards[0], SECRET), Node(cards[1], plan, cards[0], make_secret())
    time.sleep(1.6)
    assert one.reported.empty()
    assert one.pulse._received == {}


def test_an_agent_that_is_not_in_the_plan_does_not_respond() -> None:
    cards = [free_card("a", 8), free_card("b", 9)]
    plan = plan_of(cards)
    one = Node(cards[0], plan, cards[0], SECRET)
    again = msgspec.structs.replace(cards[1], incarnation=77)
    other = Node(again, plan, cards[0], SECRET)
    time.sleep(1.0)
    assert one.pulse._received == {}
    other.pulse._card = cards[1]
    wait_until_received(one)


@pytest.mark.parametrize(("peer", "device"), [("203.0.113.7", b"lo"), ("127.0.0.1", b"")])
def test_a_pulse_leaves_by_its_interface_unless_a_peer_is_here(peer: str, device: bytes) -> None:
    card = free_card("a", 10)
    pulse = Node(card, plan_of([card]), card, None).pulse
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        pulse._leave_by(sock, Rail("lo", "127.0.0.1"), [Rail("lo", peer)])
        found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16)
    assert found.rstrip(b"\0") == device


def test_a_node_with_one_rail_has_no_pulse() -> None:
    card = free_card("a", 7, rails=1)
    assert Node(card, plan_of([card]), card, None).pulse._sockets == {}
