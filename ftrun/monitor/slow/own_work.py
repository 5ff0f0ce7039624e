"""Measures how much a rank works in a step, and does not wait, in runs with send and recv.

Source:   C4's non-communication slow (arXiv 2406.04594), for stages of a pipeline: if all replicas
          of a stage are slow, no rank is late in a collective of its group, and the other stages
          wait in messages.

A value is the time of a step without the waits that the rank itself has measured, so no clocks are
compared. Waits inside of C++ code (DDP's buckets) are part of it. The values of all ranks form a
window, in which each is compared with the median of the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ftrun.monitor.slow.arrivals import against_the_others

STEPS_OF_VALUE = 2
"""Minimum number of steps of a value."""


@dataclass(frozen=True, slots=True)
class _Boundary:
    step: int
    at_s: float
    waited_s: float


class OwnWork:
    """The values of one generation."""

    def __init__(self) -> None:
        self._begun: dict[int, _Boundary] = {}
        self._values_s: dict[int, float] = {}

    def add(self, rank: int, step: int, at_s: float, waited_s: float) -> None:
        """Add a boundary of a rank: when it completed `step`, and its total waits until then."""
        now, last = _Boundary(step, at_s, waited_s), self._begun.get(rank)
        if last is None or step < last.step:
            self._begun[rank] = now
        elif step - last.step >= STEPS_OF_VALUE:
            worked_s = (at_s - last.at_s) - (waited_s - last.waited_s)
            self._values_s[rank] = worked_s / (step - last.step)
            self._begun[rank] = now

    def take(self) -> Mapping[int, float]:
        """A window, if each known rank has a new value: seconds per step more than the others."""
        if len(self._begun) < 2 or self._values_s.keys() != self._begun.keys():
            return {}
        values_s, self._values_s = self._values_s, {}
        return against_the_others(values_s)
