"""A quiet run costs each node the same, however many there are."""

import itertools

from simulation.traffic import HEARTBEAT_S, measure

FEW, MANY = 8, 96


def no_clock() -> float:
    """The value of the clock has no effect on the messages."""
    return next(_ticks)


_ticks = (float(number) for number in itertools.count())


def test_a_node_costs_the_same_however_many_there_are() -> None:
    few, many = measure(FEW, no_clock), measure(MANY, no_clock)
    # The leader's own heartbeats are not sent, which matters less with more nodes.
    most = FEW / (FEW - 1) * 1.05
    assert 1 <= many.bytes_per_node_s / few.bytes_per_node_s <= most
    assert 1 <= many.messages_per_node_s / few.messages_per_node_s <= most


def test_it_is_heartbeats_and_commits_and_little_else() -> None:
    found = measure(FEW, no_clock)
    both_ways = 2 / HEARTBEAT_S * (FEW - 1) / FEW
    assert both_ways <= found.messages_per_node_s <= 1.2 * both_ways


def test_the_leader_sends_one_message_for_each_it_gets() -> None:
    """No heartbeat is passed on: that would be as many as there are pairs of nodes."""
    found = measure(MANY, no_clock)
    assert found.leader_cpu > 0
    assert found.messages_per_node_s * MANY < 3 * 2 / HEARTBEAT_S * MANY
