"""Samples of a node's collectives and connections, and the offset of its clock.

All ranks thin their samples by the sequence number, so that they keep the same collectives. Runs of
consecutive numbers are kept or dropped together. If every second number were dropped and a step had
two collectives, only the first or only the second of them would be kept.

Monotonic clocks of two machines start at arbitrary values and drift by up to about 50 us a second.
A suspension or reboot of a machine changes its offset. Exchanges that contradict all earlier
exchanges therefore replace them.

Source: the clock filter of NTP (RFC 5905, section 10): of the last exchanges, the one with the
        shortest network delay counts. The true offset is within half that delay, whichever
        direction was slower.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    """Its process groups, encoded by `ftrun.monitor.page_values`."""
    is_training: bool = True
    calls: tuple[tuple[int, int], ...] = ()
    """Pairs of a step and the number of collectives called up to it on the default group."""
    resident_bytes: int = 0
    waited_s: tuple[float, ...] = ()
    """For each of `entered`: the total time that the rank had waited for messages until then; empty
    if it has called no message."""
    boundary: tuple[float, float] | None = None
    """Of a rank that has called messages: when it completed `step`, and the total time that it had
    waited until then, for messages and for collectives that Python code calls."""


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
    """Memory available on the node, or in its cgroup; 0: not read for this sample."""


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


WINDOW = 32
"""Number of retained exchanges."""
DRIFT = 1e-4
"""Maximum drift between two clocks, in seconds per second."""
CONTRADICTIONS = 3
"""Number of consecutive contradicting exchanges that replace the known exchanges."""


@dataclass(frozen=True, slots=True)
class _Exchange:
    offset_s: float
    error_s: float
    at_s: float


class ClockOffset:
    """Clock offset of another node: that node's time minus this node's time."""

    def __init__(self) -> None:
        self._known: deque[_Exchange] = deque(maxlen=WINDOW)
        self._counter_evidence: list[_Exchange] = []

    def add(
        self, sent_ns: int, received_there_ns: int, answered_there_ns: int, arrived_ns: int
    ) -> None:
        """Add one exchange. It is ignored if its answer precedes its question.

        Args:
            sent_ns: when this node sent the question, on its clock.
            received_there_ns: when the other node received it, on the other clock.
            answered_there_ns: when the other node sent the answer, on the other clock.
            arrived_ns: when the answer arrived, on this node's clock.
        """
        way_ns = (arrived_ns - sent_ns) - (answered_there_ns - received_there_ns)
        if way_ns < 0 or answered_there_ns < received_there_ns:
            return
        offset_ns = ((received_there_ns - sent_ns) + (answered_there_ns - arrived_ns)) / 2
        one = _Exchange(offset_ns / 1e9, way_ns / 2e9, arrived_ns / 1e9)
        best = self._best(one.at_s)
        if best is not None and not _agree(best, one):
            self._counter_evidence.append(one)
            if len(self._counter_evidence) < CONTRADICTIONS:
                return
            self._known.clear()
            self._known.extend(self._counter_evidence[:-1])
        self._counter_evidence.clear()
        self._known.append(one)

    @property
    def is_known(self) -> bool:
        return bool(self._known)

    def at(self, now_s: float) -> tuple[float, float]:
        """Return the offset and its maximum error, both in seconds; needs `is_known`.

        Raises:
            ValueError: there was no exchange yet.
        """
        best = self._best(now_s)
        if best is None:
            raise ValueError("no heartbeat has been answered yet: the offset is not known")
        return best.offset_s, best.error_s

    def _best(self, now_s: float) -> _Exchange | None:
        """The exchange with the smallest error now; errors grow with age, as clocks drift."""

        def error_s(one: _Exchange) -> float:
            return one.error_s + DRIFT * max(0.0, now_s - one.at_s)

        best = min(self._known, key=error_s, default=None)
        return None if best is None else replace(best, error_s=error_s(best))


def _agree(one: _Exchange, other: _Exchange) -> bool:
    return abs(one.offset_s - other.offset_s) <= one.error_s + other.error_s
