"""How quick each road is beside others of its kind.

Runs in:  the agent that leads. Pure.
Takes in: what probes have found; the leaf switches, where they are known.
Gives:    `PathRates`: rates, round trips, dead roads, and each road's pace: 1 is usual.

A pace is by rates alone. Round trips have one of their own, and say nothing of what a road
carries: on a busy machine the scheduler makes one of 15 ms on a road that is well.

Roads inside a leaf are one kind on their rail, roads between leaves another: between two leaves
that have roads enough, they are measured by those of the same two leaves in the same direction.
What is usual for a kind is the median of what nodes have at their best (their quickest quarter),
sending and receiving: of three nodes one that is slow spoils four of six roads, and two nodes'
best it does not.
Where some leaves are known, a road to a node whose leaf is not counts as one between leaves:
those are slower, so nobody is blamed for what an uplink may be.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from statistics import median, median_high

from ftrun.network.detect.probe_schedule import NetworkPath
from ftrun.wire.cluster.rails import PathMeasurement

RTT_FLOOR_S = 0.012
"""Round trips up to this are the scheduler's; from twice this on one is long."""
RTT_TIMES = 4.0
"""A round trip may be so many times the usual one as well; from twice this on it is long."""
OWN_KIND_FROM = 4
"""Roads that two leaves must have for a usual rate of their own."""


@dataclass(frozen=True, slots=True)
class PathRates:
    """What one survey tells of each road."""

    rates: Mapping[NetworkPath, float]
    """Bytes per second."""
    rtts: Mapping[NetworkPath, float]
    """Seconds."""
    dead: Mapping[NetworkPath, str]
    """With what the probe said."""
    paces: Mapping[NetworkPath, float]
    """Of roads that are not dead: rate by the usual one. 0: an answer came, no rate."""
    rtt_paces: Mapping[NetworkPath, float]
    """Of roads that have a pace: what a round trip may take, by what it takes; 1 at the most."""
    usual_rates: Mapping[NetworkPath, float]
    """What is usual for each road that has a rate, as its pace has it."""
    usual_rtts: Mapping[NetworkPath, float]
    """Likewise of round trips, in seconds."""
    usual: Mapping[str, float]
    """Usual rate inside a leaf, by rail; of all roads where no leaf is known."""
    usual_between: Mapping[str, float]
    """Likewise between leaves; of rails that have such roads."""

    def usual_of(self, road: NetworkPath, leaves: Mapping[str, str]) -> float:
        """Usual rate of a road's kind on its rail; 0: no road of that kind has a rate."""
        kinds = self.usual if is_inside(road, leaves) else self.usual_between
        return kinds.get(road.rail, 0.0)


def is_inside(road: NetworkPath, leaves: Mapping[str, str]) -> bool:
    """Both ends hang on one leaf switch; true of all roads where no switch is known."""
    if not leaves:
        return True
    source = leaves.get(road.source)
    return source is not None and source == leaves.get(road.destination)


def rate_roads(found: Iterable[PathMeasurement], leaves: Mapping[str, str]) -> PathRates:
    """Take in one survey; of a road that was probed twice the last one counts."""
    roads = {NetworkPath.of(one): one for one in found}
    alive = {road: one for road, one in roads.items() if one.rtt_s > 0 or not one.problem}
    rates = {road: one.bytes_per_s for road, one in alive.items() if one.bytes_per_s > 0}
    rtts = {road: one.rtt_s for road, one in alive.items() if one.rtt_s > 0}
    usual_rates = _Usual(rates, leaves, most_is_best=True)
    usual_rtts = _Usual(rtts, leaves, most_is_best=False)
    paces: dict[NetworkPath, float] = {}
    rtt_paces: dict[NetworkPath, float] = {}
    for road, one in alive.items():
        if road in rates:
            paces[road] = rates[road] / usual_rates.of(road)
        elif one.problem:
            paces[road] = 0.0
        if road in rtts and road in paces:
            allowed_s = max(RTT_FLOOR_S, RTT_TIMES * usual_rtts.of(road))
            rtt_paces[road] = min(1.0, allowed_s / rtts[road])
    return PathRates(
        rates,
        rtts,
        {road: one.problem for road, one in roads.items() if road not in alive},
        paces,
        rtt_paces,
        {road: usual_rates.of(road) for road in rates},
        {road: usual_rtts.of(road) for road in rtts},
        usual_rates.of_rails(inside=True),
        usual_rates.of_rails(inside=False),
    )


Kind = tuple[str, ...]
"""Rail and `inside` or `between`; with both leaves where those have roads enough."""


class _Usual:
    """What is usual for each kind of road."""

    def __init__(
        self, figures: Mapping[NetworkPath, float], leaves: Mapping[str, str], *, most_is_best: bool
    ) -> None:
        self._leaves = leaves
        rows: dict[Kind, dict[tuple[str, str], list[float]]] = {}
        self._kinds_of = {road: self._kinds(road) for road in figures}
        for road, figure in figures.items():
            for kind in self._kinds_of[road]:
                of_kind = rows.setdefault(kind, {})
                of_kind.setdefault((road.source, "out"), []).append(figure)
                of_kind.setdefault((road.destination, "in"), []).append(figure)
        self._figures = {
            kind: median_high(
                sorted(of, reverse=most_is_best)[len(of) // 4] for of in of_kind.values()
            )
            for kind, of_kind in rows.items()
            if len(kind) == 2 or sum(map(len, of_kind.values())) >= 2 * OWN_KIND_FROM
        }

    def of(self, road: NetworkPath) -> float:
        """Of a road's kind, the narrowest that a figure is known of."""
        return next(self._figures[kind] for kind in self._kinds_of[road] if kind in self._figures)

    def of_rails(self, *, inside: bool) -> dict[str, float]:
        word = "inside" if inside else "between"
        return {kind[0]: one for kind, one in self._figures.items() if kind[1:] == (word,)}

    def _kinds(self, road: NetworkPath) -> list[Kind]:
        """The narrowest first."""
        if is_inside(road, self._leaves):
            return [(road.rail, "inside")]
        ends = (self._leaves.get(road.source, ""), self._leaves.get(road.destination, ""))
        return [(road.rail, "between", *ends), (road.rail, "between")]


def slowest_medians(
    rates: Mapping[NetworkPath, float], members: Collection[str]
) -> dict[str, float]:
    """What each rail carries, at the side that has least of it, in bytes per second.

    A side is what a node sends or what it receives, and counts by the median of its roads. Where
    each side has one road, as between two nodes, the median of all roads counts: one short probe
    proves nothing.

    Args:
        rates: of roads, in bytes per second.
        members: nodes; roads of others do not count.
    """
    sides: dict[str, dict[tuple[str, str], list[float]]] = {}
    for road, rate in rates.items():
        if road.source in members and road.destination in members:
            of_rail = sides.setdefault(road.rail, {})
            of_rail.setdefault((road.source, "out"), []).append(rate)
            of_rail.setdefault((road.destination, "in"), []).append(rate)
    return {
        rail: min(
            (median(of) for of in of_rail.values() if len(of) > 1),
            default=median(rate for of in of_rail.values() for rate in of),
        )
        for rail, of_rail in sides.items()
    }
