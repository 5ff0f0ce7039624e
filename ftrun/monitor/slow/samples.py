"""Samples of a node's collectives and connections, about one per second.

Runs in:  agent (makes and sends them), the agent that leads (judges them). Pure.
Takes in: entries of the flight recorders, traffic of the connections.
Gives:    a `NodeSample`, thinned so that a heartbeat stays small.

All ranks thin by the sequence number, so that they keep the same collectives. Runs of consecutive
numbers are kept together. If a step has two collectives, every second number alone would always be
the same one of the two.
"""

from collections.abc import Sequence

import msgspec

from ftrun.monitor.slow.delay_matrix import LinkSample

KEPT_CALLS = 48
"""Maximum number of collectives of one group that a rank reports in one sample."""

RUN = 16
"""Number of consecutive collectives that are kept or dropped together."""

Entered = tuple[str, int, float]
"""Group, sequence number, time on the node's monotonic clock in seconds."""


class RankSample(msgspec.Struct, frozen=True):
    """Sample of one rank."""

    rank: int
    step: int
    entered: tuple[Entered, ...]
    groups: str = ""
    """Its process groups, encoded by `ftrun.monitor.process_groups`."""
    is_training: bool = True
    calls: tuple[tuple[int, int], ...] = ()
    """Pairs of a step and the number of collectives called up to it on the default group."""
    resident_bytes: int = 0


class NodeSample(msgspec.Struct, frozen=True):
    """Sample of one node."""

    number: int
    at_s: float
    """When the sample was begun, on the node's monotonic clock."""
    span_s: float
    """Seconds since the previous sample."""
    ranks: tuple[RankSample, ...]
    links: tuple[LinkSample, ...] = ()
    available_bytes: int = 0
    """Memory available on the node, or in its cgroup; 0: not known."""


def thinned(entered: Sequence[Entered]) -> tuple[Entered, ...]:
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
