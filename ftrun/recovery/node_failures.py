"""Excludes nodes that were lost too often, and nodes that are barred at once.

Runs in:  the agent that leads. Pure.
Takes in: losses; evictions; what the last leader knew, as ages in seconds.
Gives:    the excluded nodes, and the same ages for the next leader.
"""

from collections.abc import Mapping, Sequence

_HOUR_S = 3600.0


class NodeFailures:
    """The losses of the last hour, by node id."""

    def __init__(self, per_hour: int) -> None:
        self._per_hour = per_hour
        self._lost_s: dict[str, list[float]] = {}
        self._barred_s: dict[str, float] = {}
        self._past_lost_s: dict[str, list[float]] = {}
        """Losses that an earlier leader recorded."""
        self._past_barred_s: dict[str, float] = {}

    def succeed(
        self, lost: Mapping[str, Sequence[float]], barred: Mapping[str, float], *, now_s: float
    ) -> None:
        self._past_lost_s = {one: [now_s - age_s for age_s in ages] for one, ages in lost.items()}
        self._past_barred_s = {one: now_s - age_s for one, age_s in barred.items()}

    def note(self, node_id: str, *, now_s: float) -> None:
        self._lost_s.setdefault(node_id, []).append(now_s)

    def bar(self, node_id: str, *, now_s: float) -> None:
        """Excludes a node at once; after an hour and a whole check of itself it may return."""
        self._barred_s[node_id] = now_s

    def set_aside(self, *, now_s: float) -> set[str]:
        lost = self.ages_s(now_s=now_s).items()
        often = {node_id for node_id, ages_s in lost if len(ages_s) >= self._per_hour}
        return often | set(self.barred_ages_s(now_s=now_s))

    def ages_s(self, *, now_s: float) -> dict[str, list[float]]:
        """Seconds since each loss of the last hour, by node id."""
        found = {}
        for node_id in sorted({*self._past_lost_s, *self._lost_s}):
            times = self._past_lost_s.get(node_id, []) + self._lost_s.get(node_id, [])
            ages_s = [now_s - at_s for at_s in times if now_s - at_s < _HOUR_S]
            if ages_s:
                found[node_id] = ages_s
        return found

    def barred_ages_s(self, *, now_s: float) -> dict[str, float]:
        times = {**self._past_barred_s, **self._barred_s}
        return {one: now_s - at_s for one, at_s in times.items() if now_s - at_s < _HOUR_S}
