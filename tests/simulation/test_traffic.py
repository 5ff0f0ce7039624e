"""In a run without faults, the cost of each node does not depend on the number of nodes."""

import itertools
from functools import cache

from simulation.traffic import HEARTBEAT_S, Traffic, measure

FEW, MANY = 8, 96


@cache
def measured(num_nodes: int) -> Traffic:
    """The value of the clock has no effect on the messages."""
    ticks = itertools.count()
    return measure(num_nodes, lambda: float(next(ticks)))


def test_a_node_costs_the_same_however_many_there_are() -> None:
    few, many = measured(FEW), measured(MANY)
    # The leader sends itself no heartbeat, which matters less with more nodes.
    most = FEW / (FEW - 1) * 1.05
    assert 1 <= many.bytes_per_node_s / few.bytes_per_node_s <= most
    assert 1 <= many.messages_per_node_s / few.messages_per_node_s <= most


def test_traffic_is_mostly_heartbeats_and_commits() -> None:
    found = measured(FEW)
    both_ways = 2 / HEARTBEAT_S * (FEW - 1) / FEW
    assert both_ways <= found.messages_per_node_s <= 1.2 * both_ways


def test_the_leader_sends_one_message_for_each_it_gets() -> None:
    """No node forwards heartbeats: the number would grow with the number of pairs of nodes."""
    found = measured(MANY)
    assert found.leader_cpu > 0
    assert found.messages_per_node_s * MANY < 3 * 2 / HEARTBEAT_S * MANY
