"""Finds faults of the paths between nodes, and localizes them.

Rule 1: a path is slow relative to the usual rate of its own kind (see localization.py): a narrow
        uplink is no node's fault.
Rule 2: a location is named once, for all the paths that it explains (see localization.py).
Rule 3: an interface's speed by its driver is a finding of its own. If the rates agree, they are
        reported with it.
Rule 4: a long round trip is reported as such, in milliseconds, and changes no rate and no choice.
        If a low rate explains it, the round trip is not reported in addition.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from statistics import median

from ftrun.network.detect.localization import (
    SLOW_RAIL,
    FaultLocation,
    PathRates,
    Side,
    blame_dead,
    blame_slow,
    by_side,
    is_inside,
    is_slow,
    rate_paths,
)
from ftrun.network.detect.probe_schedule import NetworkPath
from ftrun.network.detect.rails import RunRails, match_rails
from ftrun.wire.cluster.generation import PathMeasurement, Rail

MANY = 0.1
"""If more than this fraction of a rail's paths is slow without a location, they are one finding."""
NOMINAL_MBIT = (10, 100, 1_000, 2_500, 5_000, 10_000, 25_000, 40_000, 50_000, 100_000, 200_000)
"""Nominal link speeds."""
PAYLOAD = (0.7, 1.0)
"""Payload of a transfer as a fraction of that speed; 0.96 over TCP in frames of 1,500 bytes."""


class NetworkFindingKind(Enum):
    """The kinds of network faults."""

    DEAD = "dead"
    SLOW = "slow"
    SPEED = "speed"
    """According to its driver, an interface is slower than others on its rail."""
    DUPLEX = "duplex"
    UPLINK = "uplink"
    """Paths that no interface explains: a link between switches is narrow."""


_WORST_FIRST = list(NetworkFindingKind)


@dataclass(frozen=True, slots=True)
class NetworkFinding:
    """One fault and its location."""

    kind: NetworkFindingKind
    rail: str
    nodes: tuple[str, ...]
    """None: the whole rail (for an uplink: no culprit); one: this node's interface; two: the path
    from the first to the second."""
    culprit: str
    """The location in words."""
    sentence: str
    direction: str = ""
    """For one node's interface: `out` or `in` if only what it sends or receives is bad."""
    pace: float = 0.0
    """Rate of a slow path relative to the usual one; for a late path, the same of round trips."""
    is_late: bool = False
    """It is slow only by its round trips, which do not show its rate."""


@dataclass(frozen=True, slots=True)
class NetworkFindings(PathRates):
    """The result of one survey."""

    rails: RunRails = field(default_factory=dict)
    late: frozenset[NetworkPath] = frozenset()
    """Paths with long round trips, including paths that are slow by their rate."""
    found: tuple[NetworkFinding, ...] = ()
    """The worst kind first."""

    def of_rail(self, rail: str) -> list[NetworkFinding]:
        return [one for one in self.found if one.rail == rail]


def judge(
    rails: Mapping[str, Sequence[Rail]],
    found: Iterable[PathMeasurement],
    leaves: Mapping[str, str] | None = None,
) -> NetworkFindings:
    """The faults that one survey shows.

    Args:
        found: measurements; if a path was probed twice, the last one counts.
        leaves: leaf switch by node id; None or empty: not known, all paths are of one kind.
    """
    matched = match_rails(rails)
    paths = rate_paths(found, leaves or {})
    one_by_one: list[NetworkFinding] = []
    for rail, on in matched.items():
        by_word = list(_by_driver(rail, on))
        one_by_one += _Rail(rail, paths, leaves or {}).findings(by_word)
    one_by_one += _slow_rails(paths)
    one_by_one.sort(key=lambda one: (_WORST_FIRST.index(one.kind), len(one.nodes)))
    late = [path for path, pace in paths.rtt_paces.items() if is_slow(path, pace, leaves or {})]
    known = {one.name: getattr(paths, one.name) for one in fields(paths)}
    return NetworkFindings(**known, rails=matched, late=frozenset(late), found=tuple(one_by_one))


def rate_text(bytes_per_s: float) -> str:
    """Formats a rate: `118 MB/s`."""
    mb = bytes_per_s / 1e6
    return f"{mb:,.0f} MB/s" if mb >= 10 else f"{mb:.2g} MB/s"


def round_trip_text(rtt_s: float) -> str:
    """Formats a round trip: `15 ms`."""
    ms = 1000 * rtt_s
    return f"{ms:,.0f} ms" if ms >= 10 else f"{ms:.2g} ms"


# --- from drivers ---------------------------------------------------------------------------------


def _by_driver(rail: str, on: Mapping[str, Rail]) -> Iterator[NetworkFinding]:
    speeds = Counter(one.speed_mbit for one in on.values() if one.speed_mbit > 0)
    usual = max(speeds, key=lambda speed: (speeds[speed], speed), default=0)
    for node, one in on.items():
        name = interface_text(node, one, rail)
        if 0 < one.speed_mbit < usual:
            yield NetworkFinding(
                NetworkFindingKind.SPEED,
                rail,
                (node,),
                name,
                f"{name} runs at {one.speed_mbit:,} Mbit/s according to its driver; "
                f"{speeds[usual]} of {len(on)} interfaces on {rail} run at {usual:,} Mbit/s.",
                pace=one.speed_mbit / usual,
            )
        if one.duplex == "half":
            others = sum(other.duplex == "full" for other in on.values())
            yield NetworkFinding(
                NetworkFindingKind.DUPLEX,
                rail,
                (node,),
                name,
                f"{name} is half duplex according to its driver: it cannot send and receive at "
                f"once. {others} of {len(on)} interfaces on {rail} are full duplex.",
            )


def interface_text(node: str, one: Rail, rail: str) -> str:
    """`eth0 of n3`, with the run's name of the rail if that differs."""
    return f"{one.name} of {node}" + (f" ({rail} of the run)" if one.name != rail else "")


def _finding(
    kind: NetworkFindingKind,
    rail: str,
    nodes: tuple[str, ...],
    sentence: str,
    direction: str = "",
    pace: float = 0.0,
    *,
    is_late: bool = False,
) -> NetworkFinding:
    """A finding of probes: its culprit follows from its nodes."""
    culprit = f"rail {rail}"
    if len(nodes) == 2:
        culprit = f"the path from {nodes[0]} to {nodes[1]} over {rail}"
    elif nodes:
        culprit = f"{rail} of {nodes[0]}"
    elif kind is NetworkFindingKind.UPLINK:
        culprit = f"the network between nodes on {rail}"
    return NetworkFinding(kind, rail, nodes, culprit, sentence, direction, pace, is_late)


# --- from probes ----------------------------------------------------------------------------------


class _Rail:
    """The findings of one rail."""

    def __init__(self, rail: str, paths: PathRates, leaves: Mapping[str, str]) -> None:
        self._rail = rail
        self._paths = paths
        self._leaves = leaves
        self._dead = [path for path in paths.dead if path.rail == rail]
        self._paces = {path: pace for path, pace in paths.paces.items() if path.rail == rail}
        self._known = sorted({*self._dead, *self._paces})
        self._known_by_side = by_side(self._known)
        self._paced_by_side = by_side(self._paces)

    def findings(self, by_driver: Sequence[NetworkFinding]) -> list[NetworkFinding]:
        found = [self._report_dead(location) for location in blame_dead(self._known, self._dead)]
        slow = blame_slow(self._paces, self._leaves)
        alone = [location.path for location in slow if location.path is not None]
        if len(alone) > max(2, MANY * len(self._paces)):
            found.append(self._report_many(alone))
        else:
            found += [self._report_path(path) for path in alone]
        left = {(one.kind, one.nodes): one for one in by_driver}
        for location in slow:
            if location.node:
                by_word = left.pop((NetworkFindingKind.SPEED, (location.node,)), None)
                found.append(self._report_slow(location, by_word))
        found += self._late(slow)
        return [*found, *left.values()]

    def _late(self, slow: Sequence[FaultLocation]) -> Iterator[NetworkFinding]:
        reported = {location.path for location in slow}
        for location in slow:
            reported.update(_of_place(location, self._paced_by_side) if location.node else ())
        paces = {
            path: pace
            for path, pace in self._paths.rtt_paces.items()
            if path.rail == self._rail and path not in reported
        }
        late = blame_slow(paces, self._leaves)
        alone = [location.path for location in late if location.path is not None]
        if len(alone) > max(2, MANY * len(paces)):
            yield self._report_late(FaultLocation(), alone, paces)
            late = [location for location in late if location.node]
        late_by_side = by_side(paces)
        for location in late:
            one = location.path
            paths = [one] if one is not None else _of_place(location, late_by_side)
            yield self._report_late(location, paths, paces)

    def _report_late(
        self,
        location: FaultLocation,
        paths: Sequence[NetworkPath],
        paces: Mapping[NetworkPath, float],
    ) -> NetworkFinding:
        rail, node = self._rail, location.node
        mine = median(self._paths.rtts[path] for path in paths)
        usual = median(self._paths.usual_rtts[path] for path in paths)
        nodes: tuple[str, ...] = (node,) if node else ()
        direction = {"": "between {} and others", "out": "from {}", "in": "to {}"}
        ends, time = direction[location.direction].format(node), round_trip_text(mine)
        takes = f"A round trip {ends} over {rail} takes {time} in the median"
        if location.path is not None:
            nodes = (location.path.source, location.path.destination)
            takes = f"A round trip from {nodes[0]} to {nodes[1]} over {rail} takes {time}"
        elif not node:
            takes = (
                f"{len(paths)} of {len(paces)} paths over {rail} have long round trips, and no "
                f"interface explains them: one takes {time} in the median"
            )
        return _finding(
            NetworkFindingKind.SLOW if nodes else NetworkFindingKind.UPLINK,
            rail,
            nodes,
            f"{takes}, where {round_trip_text(usual)} is usual{self._where(paths)}.",
            location.direction,
            median(paces[path] for path in paths),
            is_late=True,
        )

    def _report_dead(self, location: FaultLocation) -> NetworkFinding:
        rail = self._rail
        if location.path is not None:
            one, other = location.path.source, location.path.destination
            reason = self._paths.dead[location.path].rstrip(".")
            text = f"{one} does not reach {other} over {rail}: {reason}."
            return _finding(NetworkFindingKind.DEAD, rail, (one, other), text)
        if not location.node:
            text = f"Rail {rail} is dead: all {len(self._dead)} paths are dead."
            return _finding(NetworkFindingKind.DEAD, rail, (), text)
        paths = _of_place(location, self._known_by_side)
        dead = sum(path in self._paths.dead for path in paths)
        nodes = "any other node" if dead == len(paths) else "most other nodes"
        what = {"": "reach or be reached by", "out": "reach", "in": "be reached by"}
        text = f"{location.node} cannot {what[location.direction]} {nodes} over {rail}"
        text += f": {dead} of {len(paths)} paths are dead."
        return _finding(NetworkFindingKind.DEAD, rail, (location.node,), text, location.direction)

    def _report_slow(
        self, location: FaultLocation, by_driver: NetworkFinding | None
    ) -> NetworkFinding:
        paths = _of_place(location, self._paced_by_side)
        inside = [path for path in paths if is_inside(path, self._leaves)]
        informative = inside if len(inside) > 1 else paths
        mine = median(self._paths.rates.get(path, 0.0) for path in informative)
        others = median(self._usual_of(path) for path in informative)
        pace = median(self._paces[path] for path in informative)
        what = {"": "sends and receives", "out": "sends", "in": "receives"}[location.direction]
        text = (
            f"{location.node} {what} {rate_text(mine) if mine else 'nothing'} over {self._rail} in "
            f"the median{self._usual_words(others, informative)}"
        )
        if (nominal := _nominal(mine, others)) and by_driver is None:
            text += f": as a link of {nominal:,} Mbit/s would"
        if not self._leaves:
            text += "; no leaf switch is known, so the cause may be outside its interface"
        return _finding(
            NetworkFindingKind.SLOW if by_driver is None else NetworkFindingKind.SPEED,
            self._rail,
            (location.node,),
            f"{text}." if by_driver is None else f"{by_driver.sentence} Probes agree: {text}.",
            location.direction,
            pace,
        )

    def _report_path(self, path: NetworkPath) -> NetworkFinding:
        rate = self._paths.rates.get(path, 0.0)
        usual = self._usual_of(path)
        words = f"has {rate_text(rate)}" if rate else "completed no transfer"
        ends = (path.source, path.destination)
        text = (
            f"The path from {ends[0]} to {ends[1]} over {self._rail} {words}"
            f"{self._usual_words(usual, [path])}."
        )
        pace = self._paces[path]
        return _finding(NetworkFindingKind.SLOW, self._rail, ends, text, pace=pace)

    def _report_many(self, paths: Sequence[NetworkPath]) -> NetworkFinding:
        worst = min(paths, key=lambda path: self._paces[path])
        rates = [self._paths.rates.get(path, 0.0) for path in (*paths, worst)]
        return _finding(
            NetworkFindingKind.UPLINK,
            self._rail,
            (),
            f"{len(paths)} of {len(self._paces)} paths over {self._rail} are slow, with "
            f"{rate_text(median(rates[:-1]))} in the median, and no interface explains them: a "
            f"narrow uplink between switches would. The slowest is {worst.source} to "
            f"{worst.destination}, with {rate_text(rates[-1])}.",
            pace=median(self._paces[path] for path in paths),
        )

    def _usual_of(self, path: NetworkPath) -> float:
        """The rate that the path's pace refers to; without a rate, that of its kind; 0: unknown."""
        of_kind = self._paths.usual_of(path, self._leaves)
        return self._paths.usual_rates.get(path, of_kind)

    def _usual_words(self, usual: float, paths: Sequence[NetworkPath]) -> str:
        return f", where {rate_text(usual)} is usual{self._where(paths)}" if usual else ""

    def _where(self, paths: Sequence[NetworkPath]) -> str:
        if not self._leaves:
            return ""
        inside = all(is_inside(path, self._leaves) for path in paths)
        return " within a leaf switch" if inside else " between leaf switches"


def _of_place(
    location: FaultLocation, paths: Mapping[Side, Sequence[NetworkPath]]
) -> list[NetworkPath]:
    directions = ("out", "in") if not location.direction else (location.direction,)
    return [path for direction in directions for path in paths.get((location.node, direction), ())]


def _nominal(mine: float, others: float) -> int:
    """The link speed that explains this rate, but not the others'; 0: none."""
    low, high = PAYLOAD
    mbit = mine * 8 / 1e6
    fits = [one for one in NOMINAL_MBIT if low * one <= mbit <= high * one]
    return fits[0] if fits and others * 8 / 1e6 > fits[0] else 0


def _slow_rails(paths: PathRates) -> Iterator[NetworkFinding]:
    """Rails that are slow as a whole relative to the best: by usual rates, and on most paths."""
    by_rail: dict[str, dict[tuple[str, str], float]] = {}
    for path, rate in paths.rates.items():
        by_rail.setdefault(path.rail, {})[path.source, path.destination] = rate
    best = max(paths.usual, key=lambda rail: paths.usual[rail], default="")
    for rail, rate in paths.usual.items():
        pace = rate / paths.usual[best]
        ends = by_rail[rail].keys() & by_rail[best].keys()
        both = [by_rail[rail][one] / by_rail[best][one] for one in ends] or [pace]
        if pace < SLOW_RAIL and median(both) < SLOW_RAIL:
            text = (
                f"Rail {rail} is slow: {rate_text(rate)} is usual on it, and "
                f"{rate_text(paths.usual[best])} on {best}."
            )
            yield _finding(NetworkFindingKind.SLOW, rail, (), text, pace=pace)
