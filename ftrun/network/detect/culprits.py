"""Localizes dead and slow paths: the fewest places that explain them.

Runs in:  the agent that leads. Pure.
Takes in: the paths of one rail, and which of them are bad.
Gives:    `FaultLocation`s: the whole rail, what one node sends or receives over it, or one path.

As in C4's delay matrix (arXiv 2406.04594), a row is what a node sends, a column what it receives.
A row or a column is the culprit if nearly all of it is bad. The one that explains most is named
first, and the others are judged again without its paths. Two nodes that were probed only with one
slow node are therefore not called slow.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from statistics import median

from ftrun.network.detect.localization import is_inside
from ftrun.network.detect.probe_schedule import NetworkPath

COVER = 0.8
"""Fraction of a row or column that must be dead for it to be dead."""
SLOW = 0.5
"""A relative rate (pace) below this is slow."""
SLOW_BETWEEN = 0.125
"""Likewise for a single path between leaf switches. The number of probes that share an uplink in a
round is unknown, so the rates of such paths vary by themselves."""
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
    road: NetworkPath | None = None


Side = tuple[str, str]
"""A node, and `out` or `in`: a row or a column."""


def sides_of(road: NetworkPath) -> tuple[Side, Side]:
    return (road.source, "out"), (road.destination, "in")


def by_side(roads: Iterable[NetworkPath]) -> dict[Side, list[NetworkPath]]:
    found: dict[Side, list[NetworkPath]] = {}
    for road in roads:
        for side in sides_of(road):
            found.setdefault(side, []).append(road)
    return found


def blame_dead(
    roads: Collection[NetworkPath], dead: Collection[NetworkPath]
) -> list[FaultLocation]:
    """The locations that explain the dead paths of one rail.

    Args:
        roads: all that were probed on it, in order.
        dead: the dead ones of them.
    """
    dead = set(dead)
    if len(dead) == len(roads) > 1:
        return [FaultLocation()]
    known = by_side(roads)
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
    heap = [(-weight(side), place, side) for place, side in enumerate(sorted(likely)[::-1])]
    heapify(heap)
    while heap:
        before, place, side = heap[0]
        if side not in likely:
            heappop(heap)
            continue
        if weight(side) < -before:
            heapreplace(heap, (-weight(side), place, side))
            continue
        for one in (side, _other(side)):
            explained = likely.pop(one, set())
            if len(explained & left) > 1:
                blamed.append(one)
                left -= explained
    return [*_as_places(blamed), *(FaultLocation(road=road) for road in sorted(left))]


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
        node: median(paces[road] for way in ("out", "in") for road in known.get((node, way), ()))
        for node, _ in likely
    }
    for side in sorted(likely, key=lambda side: (whole[side[0]], side)):
        # A path in the row of one slow node and the column of another is explained once.
        of = [road for road in known[side] if road not in gone or side[0] in nodes]
        if _is_slow(of, paces, leaves):
            blamed.append(side)
            nodes.add(side[0])
            gone.update(known[side])
    left = [
        FaultLocation(road=road)
        for road, pace in sorted(paces.items())
        if road not in gone and is_slow(road, pace, leaves)
    ]
    return [*_as_places(blamed), *left]


def is_slow(road: NetworkPath, pace: float, leaves: Mapping[str, str]) -> bool:
    return pace < (SLOW if is_inside(road, leaves) else SLOW_BETWEEN)


def _is_slow(
    roads: Collection[NetworkPath], paces: Mapping[NetworkPath, float], leaves: Mapping[str, str]
) -> bool:
    """Whether a row or column is slow: by paths inside the leaf, which no uplink limits."""
    inside = [paces[road] for road in roads if is_inside(road, leaves)]
    telling = inside if len(inside) > 1 else [paces[road] for road in roads]
    return len(telling) > 1 and median(telling) < SLOW and max(telling) < QUICK


def _other(side: Side) -> Side:
    return side[0], "in" if side[1] == "out" else "out"


def _as_places(sides: Collection[Side]) -> list[FaultLocation]:
    """The locations of these rows and columns; both directions of a node are one location."""
    found: dict[FaultLocation, None] = {}
    for node, way in sides:
        found[FaultLocation(node, "" if _other((node, way)) in sides else way)] = None
    return list(found)
