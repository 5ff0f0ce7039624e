"""How far another node's monotonic clock is from ours.

Runs in:  agent, one for each node it exchanges heartbeats with. Pure.
Takes in: the four times of an exchange: when we sent something, when it was heard there, when the
          answer was sent there, when it arrived here.
Gives:    an offset with a bound of its error.
Source:   the clock filter of NTP (RFC 5905, section 10): of the last exchanges the one with the
          shortest way counts. The clock that reads right lies within half that way, whichever
          direction was the slow one.

Monotonic clocks of two machines begin anywhere and drift by up to some 50 us a second. A machine
that was asleep, or was started again, has another offset than before: exchanges that contradict
all earlier ones put them aside.
"""

from collections import deque
from dataclasses import dataclass

WINDOW = 32
"""Exchanges that are remembered."""
DRIFT = 1e-4
"""Seconds per second by which two clocks may drift apart."""
CONTRADICTIONS = 3
"""So many exchanges in a row that cannot be true with what is known: it is forgotten."""


@dataclass(frozen=True, slots=True)
class _Exchange:
    offset_s: float
    error_s: float
    at_s: float


class ClockOffset:
    """Of one other node. Add it to a time of ours to get the other's."""

    def __init__(self) -> None:
        self._known: deque[_Exchange] = deque(maxlen=WINDOW)
        self._against: list[_Exchange] = []

    def add(
        self, sent_ns: int, heard_there_ns: int, answered_there_ns: int, arrived_ns: int
    ) -> None:
        """One exchange. What cannot be (an answer before its question) is left out.

        Args:
            sent_ns: when we sent it, on our clock.
            heard_there_ns: when the other heard it, on its clock.
            answered_there_ns: when the other sent the answer, on its clock.
            arrived_ns: when the answer came, on our clock.
        """
        way_ns = (arrived_ns - sent_ns) - (answered_there_ns - heard_there_ns)
        if way_ns < 0 or answered_there_ns < heard_there_ns:
            return
        offset_ns = ((heard_there_ns - sent_ns) + (answered_there_ns - arrived_ns)) / 2
        one = _Exchange(offset_ns / 1e9, way_ns / 2e9, arrived_ns / 1e9)
        best = self._best(one.at_s)
        if best is not None and not _agree(best, one):
            self._against.append(one)
            if len(self._against) < CONTRADICTIONS:
                return
            self._known.clear()
            self._known.extend(self._against[:-1])
        self._against.clear()
        self._known.append(one)

    @property
    def is_known(self) -> bool:
        return bool(self._known)

    def at(self, now_s: float) -> tuple[float, float]:
        """The offset, and how wrong it can be at the most, both in seconds; needs `is_known`.

        Raises:
            ValueError: there was no exchange yet.
        """
        best = self._best(now_s)
        if best is None:
            raise ValueError("no heartbeat has been answered yet: the offset is not known")
        return best.offset_s, best.error_s

    def to_ours_s(self, theirs_s: float, now_s: float) -> float:
        """A time of the other node's clock on ours. Raises: ValueError: as `at`."""
        return theirs_s - self.at(now_s)[0]

    def _best(self, now_s: float) -> _Exchange | None:
        """The one that binds tightest now; older ones bind less, as clocks drift."""
        best: _Exchange | None = None
        best_error_s = 0.0
        for one in self._known:
            error_s = one.error_s + DRIFT * max(0.0, now_s - one.at_s)
            if best is None or error_s < best_error_s:
                best, best_error_s = one, error_s
        return _Exchange(best.offset_s, best_error_s, best.at_s) if best is not None else None


def _agree(one: _Exchange, other: _Exchange) -> bool:
    return abs(one.offset_s - other.offset_s) <= one.error_s + other.error_s
