"""Compares each path with the paths of its kind, and finds the locations of dead and slow paths.

The pace of a path is its rate divided by the usual rate of its kind. Round trips have a separate
pace, because they do not show the rate of a path: on a busy machine, the scheduler causes a round
trip of 15 ms on a healthy path.

On each rail, paths inside a leaf switch are one kind, and paths between leaf switches are another.
If two leaf switches have `OWN_KIND_FROM` paths between them, these paths are a separate kind for
each direction. The usual rate of a kind is the median of the upper quartiles of its nodes: each
node has one for sending and one for receiving. With three nodes, one slow node slows down four of
six paths, but not the best paths of the other two nodes. If only some leaf switches are known, a
path to a node with an unknown leaf switch counts as a path between leaf switches. Such paths have a
lower usual rate, so a slow uplink does not make a node the culprit.

The result is the smallest set of `FaultLocation`s that explains the bad paths. As in C4's delay
matrix (arXiv 2406.04594), a row has the paths from a node, and a column has the paths to a node. A
row or column is a culprit if nearly all of its paths are bad. The culprit that explains the most
paths is named first, and the other rows and columns are judged again without its paths. Therefore,
two nodes that were probed only with one slow node do not count as slow.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from statistics import median, median_high

from ftrun.network.detect.probe_schedule import NetworkPath
from ftrun.wire.cluster.generation import PathMeasurement

RTT_FLOOR_S = 0.012
"""Round trips up to this are due to the scheduler; from twice this value, one is long."""
RTT_TIMES = 4.0
"""A round trip may also be this factor of the usual one; from twice that, it is long."""
OWN_KIND_FROM = 4
"""Paths between two leaves that are needed for their own usual rate."""


@dataclass(frozen=True, slots=True)
class PathRates:
    """What one survey shows of each path."""

    rates: Mapping[NetworkPath, float] = field(default_factory=dict)
    """Bytes per second."""
    rtts: Mapping[NetworkPath, float] = field(default_factory=dict)
    """Seconds."""
    dead: Mapping[NetworkPath, str] = field(default_factory=dict)
    """The problem that the probe reported."""
    paces: Mapping[NetworkPath, float] = field(default_factory=dict)
    """For paths that are not dead: rate divided by the usual one. 0: an answer, but no rate."""
    rtt_paces: Mapping[NetworkPath, float] = field(default_factory=dict)
    """For paths with a pace: the allowed round trip divided by the measured one; at most 1."""
    usual_rates: Mapping[NetworkPath, float] = field(default_factory=dict)
    """The usual rate that the pace of each path refers to."""
    usual_rtts: Mapping[NetworkPath, float] = field(default_factory=dict)
    """Likewise for round trips, in seconds."""
    usual: Mapping[str, float] = field(default_factory=dict)
    """Usual rate inside a leaf, by rail; of all paths if no leaf is known."""
    usual_between: Mapping[str, float] = field(default_factory=dict)
    """Likewise between leaves; only for rails that have such paths."""

    def usual_of(self, path: NetworkPath, leaves: Mapping[str, str]) -> float:
        """Usual rate of a path's kind on its rail; 0: no path of that kind has a rate."""
        kinds = self.usual if is_inside(path, leaves) else self.usual_between
        return kinds.get(path.rail, 0.0)


def is_inside(path: NetworkPath, leaves: Mapping[str, str]) -> bool:
    """Whether both ends are attached to one leaf switch; true if no switch is known."""
    if not leaves:
        return True
    source = leaves.get(path.source)
    return source is not None and source == leaves.get(path.destination)


def rate_paths(found: Iterable[PathMeasurement], leaves: Mapping[str, str]) -> PathRates:
    """Rates one survey; if a path was probed twice, the last measurement counts."""
    paths = {NetworkPath.of(one): one for one in found}
    alive = {path: one for path, one in paths.items() if one.rtt_s > 0 or not one.problem}
    rates = {path: one.bytes_per_s for path, one in alive.items() if one.bytes_per_s > 0}
    rtts = {path: one.rtt_s for path, one in alive.items() if one.rtt_s > 0}
    usual_rates = _Usual(rates, leaves, most_is_best=True)
    usual_rtts = _Usual(rtts, leaves, most_is_best=False)
    paces: dict[NetworkPath, float] = {}
    rtt_paces: dict[NetworkPath, float] = {}
    for path, one in alive.items():
        if path in rates:
            paces[path] = rates[path] / usual_rates.of(path)
        elif one.problem:
            paces[path] = 0.0
        if path in rtts and path in paces:
            allowed_s = max(RTT_FLOOR_S, RTT_TIMES * usual_rtts.of(path))
            rtt_paces[path] = min(1.0, allowed_s / rtts[path])
    return PathRates(
        rates,
        rtts,
        {path: one.problem for path, one in paths.items() if path not in alive},
        paces,
        rtt_paces,
        {path: usual_rates.of(path) for path in rates},
        {path: usual_rtts.of(path) for path in rtts},
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
        self._kinds_of = {path: self._kinds(path) for path in figures}
        for path, figure in figures.items():
            for kind in self._kinds_of[path]:
                of_kind = rows.setdefault(kind, {})
                of_kind.setdefault((path.source, "out"), []).append(figure)
                of_kind.setdefault((path.destination, "in"), []).append(figure)
        self._figures = {
            kind: median_high(
                sorted(of, reverse=most_is_best)[len(of) // 4] for of in of_kind.values()
            )
            for kind, of_kind in rows.items()
            if len(kind) == 2 or sum(map(len, of_kind.values())) >= 2 * OWN_KIND_FROM
        }

    def of(self, path: NetworkPath) -> float:
        return next(self._figures[kind] for kind in self._kinds_of[path] if kind in self._figures)

    def of_rails(self, *, inside: bool) -> dict[str, float]:
        word = "inside" if inside else "between"
        return {kind[0]: one for kind, one in self._figures.items() if kind[1:] == (word,)}

    def _kinds(self, path: NetworkPath) -> list[Kind]:
        """The narrowest first."""
        if is_inside(path, self._leaves):
            return [(path.rail, "inside")]
        ends = (self._leaves.get(path.source, ""), self._leaves.get(path.destination, ""))
        return [(path.rail, "between", *ends), (path.rail, "between")]


def slowest_medians(
    rates: Mapping[NetworkPath, float], members: Collection[str]
) -> dict[str, float]:
    """The rate of each rail at its slowest side, in bytes per second, on paths between members.

    A side is what a node sends or what it receives, and counts by the median of its paths. If each
    side has one path, as between two nodes, the median of all paths counts: one short probe proves
    nothing.
    """
    sides: dict[str, dict[tuple[str, str], list[float]]] = {}
    for path, rate in rates.items():
        if path.source in members and path.destination in members:
            of_rail = sides.setdefault(path.rail, {})
            of_rail.setdefault((path.source, "out"), []).append(rate)
            of_rail.setdefault((path.destination, "in"), []).append(rate)
    return {
        rail: min(
            (median(of) for of in of_rail.values() if len(of) > 1),
            default=median(rate for of in of_rail.values() for rate in of),
        )
        for rail, of_rail in sides.items()
    }


COVER = 0.8
"""Fraction of a row or column that must be dead for it to be dead."""
SLOW = 0.5
"""A relative rate (pace) below this is slow."""
SLOW_BETWEEN = 0.125
"""Likewise for a single path between leaf switches. The number of probes that share an uplink in a
round is unknown, so the rates of such paths vary by themselves."""
SLOW_SIDE_BETWEEN = 0.25
"""Likewise for the median of a row or column that has paths between leaf switches only: an uplink
that two nodes of another leaf share halves these rates."""
SLOW_RAIL = 1 / 3
"""A rail below this fraction of another rail's rate is slow as a whole. On a shared processor,
short probes of two equal rails differ by a factor of 2 to 3."""
QUICK = 0.8
"""A row or column that has a path with this pace is not slow."""


@dataclass(frozen=True, slots=True, order=True)
class FaultLocation:
    """The location of a fault on one rail."""

    node: str = ""
    """Node of the faulty interface; empty: the fault is of the whole rail or one path."""
    direction: str = ""
    """`out` or `in` if only what the node sends, or receives, is bad."""
    path: NetworkPath | None = None


Side = tuple[str, str]
"""A node, and `out` or `in`: a row or a column."""


def sides_of(path: NetworkPath) -> tuple[Side, Side]:
    return (path.source, "out"), (path.destination, "in")


def by_side(paths: Iterable[NetworkPath]) -> dict[Side, list[NetworkPath]]:
    found: dict[Side, list[NetworkPath]] = {}
    for path in paths:
        for side in sides_of(path):
            found.setdefault(side, []).append(path)
    return found


def blame_dead(
    paths: Collection[NetworkPath], dead: Collection[NetworkPath]
) -> list[FaultLocation]:
    """The locations that explain the dead paths among all probed paths of one rail."""
    dead = set(dead)
    if len(dead) == len(paths) > 1:
        return [FaultLocation()]
    known = by_side(paths)
    sides = {side: set(of) & dead for side, of in by_side(dead).items()}
    likely = {
        side: of
        for side, of in sides.items()
        if len(of) > 1 and len(of) >= COVER * len(known[side])
    }
    blamed: list[Side] = []
    left = set(dead)

    def weight(side: Side) -> int:
        # An interface that is dead both ways is named before the paths it makes dead for others.
        return sum(len(likely[one] & left) for one in (side, _other(side)) if one in likely)

    # Heaviest first. Weights only decrease: an entry whose weight is unchanged is the heaviest.
    heap = [(-weight(side), location, side) for location, side in enumerate(sorted(likely)[::-1])]
    heapify(heap)
    while heap:
        before, location, side = heap[0]
        if side not in likely:
            heappop(heap)
            continue
        if weight(side) < -before:
            heapreplace(heap, (-weight(side), location, side))
            continue
        for one in (side, _other(side)):
            explained = likely.pop(one, set())
            if len(explained & left) > 1:
                blamed.append(one)
                left -= explained
    return [*_as_places(blamed), *(FaultLocation(path=path) for path in sorted(left))]


def blame_slow(
    paces: Mapping[NetworkPath, float], leaves: Mapping[str, str]
) -> list[FaultLocation]:
    """The locations that explain the slow paths of one rail; see `PathRates` for paces."""
    known = by_side(paces)
    blamed: list[Side] = []
    nodes: set[str] = set()
    gone: set[NetworkPath] = set()
    likely = {side for side, of in known.items() if _is_slow(of, paces, leaves)}
    whole = {
        node: median(
            paces[path] for direction in ("out", "in") for path in known.get((node, direction), ())
        )
        for node, _ in likely
    }
    for side in sorted(likely, key=lambda side: (whole[side[0]], side)):
        # A path in the row of one slow node and the column of another is explained once.
        of = [path for path in known[side] if path not in gone or side[0] in nodes]
        if _is_slow(of, paces, leaves):
            blamed.append(side)
            nodes.add(side[0])
            gone.update(known[side])
    left = [
        FaultLocation(path=path)
        for path, pace in sorted(paces.items())
        if path not in gone and is_slow(path, pace, leaves)
    ]
    return [*_as_places(blamed), *left]


def is_slow(path: NetworkPath, pace: float, leaves: Mapping[str, str]) -> bool:
    return pace < (SLOW if is_inside(path, leaves) else SLOW_BETWEEN)


def _is_slow(
    paths: Collection[NetworkPath], paces: Mapping[NetworkPath, float], leaves: Mapping[str, str]
) -> bool:
    """Whether a row or column is slow: by paths inside the leaf, which no uplink limits."""
    informative, limit = [paces[path] for path in paths if is_inside(path, leaves)], SLOW
    if len(informative) < 2:
        limit = SLOW_SIDE_BETWEEN if len(informative) < len(paths) else SLOW
        informative = [paces[path] for path in paths]
    return len(informative) > 1 and median(informative) < limit and max(informative) < QUICK


def _other(side: Side) -> Side:
    return side[0], "in" if side[1] == "out" else "out"


def _as_places(sides: Collection[Side]) -> list[FaultLocation]:
    """The locations of these rows and columns; both directions of a node are one location."""
    found: dict[FaultLocation, None] = {}
    for node, direction in sides:
        found[FaultLocation(node, "" if _other((node, direction)) in sides else direction)] = None
    return list(found)
