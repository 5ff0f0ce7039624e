"""Derives which nodes share a leaf switch from the probes between them.

Paths inside a leaf are fast, paths through narrow uplinks are slow. Bounds between fast and slow
are tried at the widest gaps of the measurements. For each bound, nodes that are fast to each other
and to the same third nodes form a cluster. Each node then moves to the cluster that most of its
fast paths lead to. A bound is rated by its clusters: nearly all paths inside them must be fast,
nearly all others slow. Rates are tried first; if they fail, round trips.

Rule 1: a rate is taken relative to the best rates of both ends, so a slow node does not look like
        its own leaf. A node that is equally slow to all others has no leaf that can be determined.
Rule 2: nothing is guessed. Measurements that differ by +-30 % are of one kind. Two clusters without
        a probe between them are not separated. A leaf with one node cannot be detected.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median

from ftrun.network.detect.leaves import LeafSwitches
from ftrun.wire.cluster.generation import PathMeasurement

SEPARATE = 1.5
"""Minimum ratio of the median rate inside leaves to that between them."""
SEPARATE_FEW = 1.9
"""Likewise with fewer nodes than `FEW`: two measurements of +-30 % can have the ratio 1.86."""
FEW = 8
CONSISTENT = 0.85
"""Minimum fraction of the paths inside clusters that is fast, and of those between that is slow."""
MARGIN = 1.2
"""Minimum ratio of the 10 % quantile inside to the 90 % quantile between. A bound within the noise
of one kind of path has no such gap."""
AGREE = 0.75
"""Minimum fraction of a node's own paths to its cluster that is fast."""
WHOLE = 0.6
"""Minimum fraction of a cluster that belongs to it for certain."""
BOUNDS = 12
"""Number of bounds that are tried. With many pairs there are fewer: `MOST_WORK` limits the pairs
over all bounds, but at least three are tried."""
MOST_WORK = 20_000
RTT_FLOOR_S = 0.001
"""Differences of shorter round trips are due to the scheduler."""
MANY = 64
PARTNERS = 4
"""Mean number of other nodes that each node must have been probed with, for more than `MANY` nodes.
With fewer, clusters cannot be separated, and are not searched."""
PLACED = 0.75
"""Minimum fraction of all nodes that must have a cluster."""
WEAK = 0.5
"""A node whose best rate is below this fraction of the usual best shows nothing about others."""

Pair = tuple[int, int]
"""Positions of two nodes, the lower first."""


def leaves_from_probes(nodes: Sequence[str], found: Iterable[PathMeasurement]) -> LeafSwitches:
    """Leaf switches, named leaf0, leaf1 ... in the order of their first nodes."""
    at = {node: place for place, node in enumerate(nodes)}
    roads = [one for one in found if one.source in at and one.destination in at]
    met = {frozenset((one.source, one.destination)) for one in roads}
    if len(nodes) > MANY and 2 * len(met) < PARTNERS * len(nodes):
        return LeafSwitches(
            words=f"Leaf switches are not known: each of {len(nodes)} nodes was probed with too "
            "few others to tell them; name them by labels or a topology file."
        )
    for what, figures in (
        ("rates", {_key(one): one.bytes_per_s for one in roads if one.bytes_per_s > 0}),
        (
            "round trips",
            {_key(one): 1 / max(RTT_FLOOR_S, one.rtt_s) for one in roads if one.rtt_s > 0},
        ),
    ):
        best = _best(len(nodes), _Table(figures, at))
        if best is not None:
            return _named(nodes, best, what)
    return LeafSwitches(
        words=f"Leaf switches are not known: what {len(roads):,} probes between {len(nodes)} nodes "
        "found does not fall into quick and slow."
    )


@dataclass(frozen=True, slots=True)
class _Clusters:
    """Nodes by cluster, and the quality of the clusters."""

    of: Mapping[int, int]
    """Cluster by position; positions without a known cluster are missing."""
    consistent: float
    margin: float
    """The 10 % quantile inside divided by the 90 % quantile between."""
    times: float
    """Median inside divided by the median between."""


Key = tuple[str, str, str]
"""Source, destination, rail."""


def _key(one: PathMeasurement) -> Key:
    return one.source, one.destination, one.rail


class _Table:
    """The speed of each pair of nodes, relative to the best of both."""

    def __init__(self, figures: Mapping[Key, float], at: Mapping[str, int]) -> None:
        rows: dict[Key, list[float]] = {}
        for (source, destination, rail), figure in figures.items():
            rows.setdefault((source, "out", rail), []).append(figure)
            rows.setdefault((destination, "in", rail), []).append(figure)
        bests = {side: max(of) for side, of in rows.items()}
        usual: dict[str, list[float]] = {}
        for (_, _, rail), best in bests.items():
            usual.setdefault(rail, []).append(best)
        bounds = {rail: WEAK * median(of) for rail, of in usual.items()}
        strong: dict[Pair, list[float]] = {}
        self.weak: dict[int, dict[int, list[float]]] = {}
        """For nodes that are weak on some rail: paces to each other node, relative to their own
        best."""
        for (source, destination, rail), figure in figures.items():
            ends = [
                (at[source], bests[source, "out", rail]),
                (at[destination], bests[destination, "in", rail]),
            ]
            weak = [(place, best) for place, best in ends if best < bounds[rail]]
            one, other = sorted(place for place, _ in ends)
            if not weak:
                best = min(best for _, best in ends)
                strong.setdefault((one, other), []).append(figure / best)
            elif len(weak) == 1:
                ((place, best),) = weak
                to = other if place == one else one
                self.weak.setdefault(place, {}).setdefault(to, []).append(figure / best)
        self.paces = {pair: _low(of) for pair, of in strong.items()}


def _low(figures: Sequence[float]) -> float:
    """The pace of a pair at its worst: the lower quartile of its measurements.

    An uplink that no other pair uses in a round may be as fast as a leaf: only its worst rate
    counts.
    """
    return sorted(figures)[(len(figures) - 1) // 4]


def _best(count: int, table: _Table) -> _Clusters | None:
    tried = [
        clusters
        for bound in _bounds(count, table.paces)
        if (clusters := _clusters(count, table.paces, bound)) is not None
    ]
    best = max(tried, key=lambda one: (len(one.of) * one.consistent, one.margin), default=None)
    if best is None:
        return None
    of = {**best.of, **_places_of_weak(table.weak, best.of)}
    return replace(best, of=of) if len(of) >= PLACED * count else None


def _bounds(count: int, paces: Mapping[Pair, float]) -> list[float]:
    ordered = sorted(paces.values())
    least = max(1, count // 4)
    most = min(BOUNDS, max(3, MOST_WORK // max(1, len(paces))))
    gaps = [
        (high / low, math.sqrt(low * high))
        for low, high in zip(
            ordered[least - 1 :], ordered[least : len(ordered) - least + 1], strict=False
        )
        if high > low
    ]
    return [bound for _, bound in sorted(gaps, reverse=True)[:most]]


def _clusters(count: int, paces: Mapping[Pair, float], bound: float) -> _Clusters | None:
    seen: list[set[int]] = [set() for _ in range(count)]
    quick: list[set[int]] = [{place} for place in range(count)]
    for (one, other), pace in paces.items():
        seen[one].add(other)
        seen[other].add(one)
        if pace > bound:
            quick[one].add(other)
            quick[other].add(one)
    of = _joined(
        count, [pair for pair, pace in paces.items() if pace > bound and _agree(seen, quick, *pair)]
    )
    of = _settled(of, seen, quick)
    sure = _sure(of, seen, quick)
    sizes, left = Counter(of.values()), Counter(sure.values())
    # A cluster that has lost many nodes may have been two.
    good = {cluster for cluster in left if left[cluster] > max(1, WHOLE * sizes[cluster])}
    of = {place: cluster for place, cluster in sure.items() if cluster in good}
    return _judged(of, paces, bound)


def _agree(seen: Sequence[set[int]], quick: Sequence[set[int]], one: int, other: int) -> bool:
    """Whether two nodes are fast to the same third nodes, of those that both were probed with."""
    both = seen[one] & seen[other]
    either = both & (quick[one] | quick[other])
    return 2 * len(either & quick[one] & quick[other]) >= len(either)


def _joined(count: int, pairs: Iterable[Pair]) -> dict[int, int]:
    """The cluster of each position: the lowest position that it is joined with."""
    root = list(range(count))

    def top(place: int) -> int:
        while root[place] != place:
            root[place] = root[root[place]]
            place = root[place]
        return place

    for one, other in pairs:
        low, high = sorted((top(one), top(other)))
        root[high] = low
    return {place: top(place) for place in range(count)}


def _settled(
    of: Mapping[int, int], seen: Sequence[set[int]], quick: Sequence[set[int]]
) -> dict[int, int]:
    """Moves each node to the cluster with the largest fast fraction, if that is over a half."""
    settled = dict(of)
    for place, met in enumerate(seen):
        probed = Counter(settled[other] for other in met)
        good = Counter(settled[other] for other in met & quick[place])
        shares = {cluster: good[cluster] / probed[cluster] for cluster in good}
        best = max(shares, key=lambda one: (shares[one], good[one], -one), default=None)
        if best is not None and shares[best] > max(0.5, shares.get(settled[place], 0.0)):
            settled[place] = best
    return settled


def _sure(
    of: Mapping[int, int], seen: Sequence[set[int]], quick: Sequence[set[int]]
) -> dict[int, int]:
    """Nodes whose own paths agree with their cluster, and more with it than with others.

    A node that is fast to one node of its cluster and to one elsewhere may belong to either.
    """
    sure = {}
    for place, cluster in of.items():
        mine = {other for other in seen[place] if of[other] == cluster}
        good = len(mine & quick[place])
        if good >= AGREE * len(mine) and 2 * len(seen[place] & quick[place] - mine) <= good:
            sure[place] = cluster
    return sure


def _judged(of: Mapping[int, int], paces: Mapping[Pair, float], bound: float) -> _Clusters | None:
    inside: list[float] = []
    between: list[float] = []
    apart: set[Pair] = set()
    for (one, other), pace in paces.items():
        if one not in of or other not in of:
            continue
        low, high = sorted((of[one], of[other]))
        (inside if low == high else between).append(pace)
        if low != high:
            apart.add((low, high))
    names = sorted(set(of.values()))
    if len(names) < 2 or any(pair not in apart for pair in combinations(names, 2)):
        return None
    true = min(
        sum(pace > bound for pace in inside) / len(inside),
        sum(pace <= bound for pace in between) / len(between),
    )
    times = median(inside) / median(between)
    margin = sorted(inside)[len(inside) // 10] / sorted(between)[-1 - len(between) // 10]
    needed = SEPARATE if len(of) >= FEW else SEPARATE_FEW
    is_told = true >= CONSISTENT and times >= needed and margin >= MARGIN
    return _Clusters(of, true, margin, times) if is_told else None


def _places_of_weak(
    weak: Mapping[int, Mapping[int, Sequence[float]]], of: Mapping[int, int]
) -> dict[int, int]:
    """Clusters of slow nodes that are still faster to one cluster than to all others."""
    found = {}
    for place, paces in weak.items():
        if place in of:
            continue
        by_cluster = {
            cluster: [_low(some) for other, some in paces.items() if of.get(other) == cluster]
            for cluster in set(of.values())
        }
        ranked = sorted(
            ((median(some), cluster) for cluster, some in by_cluster.items() if some), reverse=True
        )
        if len(ranked) > 1 and ranked[0][0] >= SEPARATE_FEW * ranked[1][0]:
            found[place] = ranked[0][1]
    return found


def _named(nodes: Sequence[str], clusters: _Clusters, what: str) -> LeafSwitches:
    names: dict[int, str] = {}
    of = {}
    for place, node in enumerate(nodes):
        if place in clusters.of:
            of[node] = names.setdefault(clusters.of[place], f"leaf{len(names)}")
    words = (
        f"By {what} of the probes, {len(of)} of {len(nodes)} nodes hang on {len(names)} leaf "
        f"switches: roads inside a leaf are {clusters.times:.1f} times as quick as others."
    )
    return LeafSwitches(of, "probes", words=words)
