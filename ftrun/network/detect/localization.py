"""The speed of each path relative to others of its kind.

Runs in:  the agent that leads. Pure.
Takes in: measurements of probes; the leaf switches, if they are known.
Gives:    `PathRates`: rates, round trips, dead paths, and each path's pace: 1 is usual.

A pace depends on rates alone. Round trips have a pace of their own, which does not show what a path
carries: on a busy machine, the scheduler causes a round trip of 15 ms on a healthy path.

Paths inside a leaf are one kind on their rail, paths between leaves another. If two leaves have
enough paths between them, those paths are compared with each other, per direction. The usual rate
of a kind is the median over nodes, sending and receiving, of each node's best quarter. With three
nodes, one slow node spoils four of six paths, but not the best paths of the other two.
If only some leaves are known, a path to a node with an unknown leaf counts as one between leaves.
Those are slower, so no node is blamed for what may be an uplink.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from statistics import median, median_high

from ftrun.network.detect.probe_schedule import NetworkPath
from ftrun.wire.cluster.rails import PathMeasurement

RTT_FLOOR_S = 0.012
"""Round trips up to this are due to the scheduler; from twice this value, one is long."""
RTT_TIMES = 4.0
"""A round trip may also be this factor of the usual one; from twice that, it is long."""
OWN_KIND_FROM = 4
"""Paths between two leaves that are needed for their own usual rate."""


@dataclass(frozen=True, slots=True)
class PathRates:
    """What one survey shows of each path."""

    rates: Mapping[NetworkPath, float]
    """Bytes per second."""
    rtts: Mapping[NetworkPath, float]
    """Seconds."""
    dead: Mapping[NetworkPath, str]
    """The problem that the probe reported."""
    paces: Mapping[NetworkPath, float]
    """For paths that are not dead: rate divided by the usual one. 0: an answer, but no rate."""
    rtt_paces: Mapping[NetworkPath, float]
    """For paths with a pace: the allowed round trip divided by the measured one; at most 1."""
    usual_rates: Mapping[NetworkPath, float]
    """The usual rate that the pace of each path refers to."""
    usual_rtts: Mapping[NetworkPath, float]
    """Likewise for round trips, in seconds."""
    usual: Mapping[str, float]
    """Usual rate inside a leaf, by rail; of all paths if no leaf is known."""
    usual_between: Mapping[str, float]
    """Likewise between leaves; only for rails that have such paths."""

    def usual_of(self, road: NetworkPath, leaves: Mapping[str, str]) -> float:
        """Usual rate of a path's kind on its rail; 0: no path of that kind has a rate."""
        kinds = self.usual if is_inside(road, leaves) else self.usual_between
        return kinds.get(road.rail, 0.0)


def is_inside(road: NetworkPath, leaves: Mapping[str, str]) -> bool:
    """Whether both ends are attached to one leaf switch; true if no switch is known."""
    if not leaves:
        return True
    source = leaves.get(road.source)
    return source is not None and source == leaves.get(road.destination)


def rate_roads(found: Iterable[PathMeasurement], leaves: Mapping[str, str]) -> PathRates:
    """Rates one survey; if a path was probed twice, the last measurement counts."""
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
"""Rail and `inside` or `between`; with both leaves if those have enough paths."""


class _Usual:
    """The usual value of each kind of path."""

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
    """The rate of each rail at its slowest side, in bytes per second.

    A side is what a node sends or what it receives, and counts by the median of its paths. If each
    side has one path, as between two nodes, the median of all paths counts: one short probe proves
    nothing.

    Args:
        rates: of paths, in bytes per second.
        members: nodes; paths of others do not count.
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
