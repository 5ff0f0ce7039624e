"""What a node tells of its ranks' collectives and connections, about once a second.

Runs in:  agent (makes and sends it), the agent that leads (judges it). Pure.
Takes in: entries of the flight recorders, what the connections have carried.
Gives:    a `NodeSample`, thinned so that a heartbeat stays small.

All ranks thin alike, by the sequence number, so that what is left of one is left of the others.
Runs of neighbours are kept: of a step with two collectives every second one is always the same.
"""

from collections.abc import Sequence

import msgspec

from ftrun.monitor.slow.delay_matrix import LinkSample

KEPT_CALLS = 48
"""Collectives of one group that a rank tells of in one sample."""

RUN = 16
"""So many neighbours stay together."""

Entered = tuple[str, int, float]
"""Group, sequence number, time on the node's monotonic clock in seconds."""


class RankSample(msgspec.Struct, frozen=True):
    """One rank."""

    rank: int
    step: int
    entered: tuple[Entered, ...]
    groups: str = ""
    """Its process groups, see process_groups.py."""
    is_training: bool = True
    calls: tuple[tuple[int, int], ...] = ()
    """At some steps: how many collectives it had called on the default group."""
    resident_bytes: int = 0


class NodeSample(msgspec.Struct, frozen=True):
    """One node."""

    number: int
    at_s: float
    """When it was begun, on the node's monotonic clock."""
    span_s: float
    """Since the one before."""
    ranks: tuple[RankSample, ...]
    links: tuple[LinkSample, ...] = ()
    available_bytes: int = 0
    """Memory that is left on the node, or in its cgroup; 0: not known."""


def thinned(entered: Sequence[Entered]) -> tuple[Entered, ...]:
    """So few of each group that they fit, at sequence numbers on which all ranks agree."""
    by_group: dict[str, list[Entered]] = {}
    for one in entered:
        by_group.setdefault(one[0], []).append(one)
    found: list[Entered] = []
    for own in by_group.values():
        every = 1
        while len(own) > KEPT_CALLS * every:
            every *= 2
        found += [one for one in own if one[1] // RUN % every == 0]
    return tuple(found)
