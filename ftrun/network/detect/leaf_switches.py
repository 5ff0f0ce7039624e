"""The leaf switch of each node: from configuration, else derived from the probes between nodes.

Paths within a leaf switch are fast, paths through narrow uplinks are slow. Bounds between fast and
slow are tried at the widest gaps of the measurements. For each bound, nodes that are fast to each
other and to the same third nodes form a cluster. Each node then moves to the cluster that most of
its fast paths lead to. A bound is rated by its clusters: nearly all paths inside them must be fast,
nearly all others slow. Rates are tried first; if they fail, round trips.

Rule 1: a rate is taken relative to the best rates of both ends, so a slow node does not look like
        its own leaf. A node that is equally slow to all others has no leaf that can be determined.
Rule 2: nothing is guessed. Measurements that differ by +-30 % are of one kind. Two clusters without
        a probe between them are not separated. A leaf with one node cannot be detected.

Source: Slurm's topology/tree plugin, topology.conf(5): SwitchName=.. Nodes=.. or Switches=..,
        with lists as n[1-4,07].
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from statistics import median

from ftrun.errors import UsageError
from ftrun.network.detect.probe_schedule import NetworkPath
from ftrun.wire.cluster.generation import PathMeasurement

MOST_NAMES = 1 << 16
"""Names that one list may expand to."""


@dataclass(frozen=True, slots=True)
class LeafSwitches:
    """The leaf switch of each node, if it is known."""

    of: Mapping[str, str] = field(default_factory=dict)
    """Leaf switch by node id; the switch of other nodes is unknown."""
    source: str = ""
    """`labels`, `file`, `slurm`, `probes`; empty: not known."""
    above: Mapping[str, str] = field(default_factory=dict)
    """The switch that a switch is attached to, if there is one."""
    words: str = ""
    """How they are known, or why not, in a sentence."""

    @property
    def is_known(self) -> bool:
        return bool(self.of)


def leaves_from_labels(labels: Mapping[str, str]) -> LeafSwitches:
    """The label of a node names its leaf switch; an empty label names none."""
    of = {node: label for node, label in labels.items() if label}
    if not of:
        return LeafSwitches(words="No node has a label.")
    return LeafSwitches(of, "labels", words=_count(of, len(labels), "labels of the nodes"))


def leaves_from_file(topology: object, nodes: Collection[str]) -> LeafSwitches:
    """Reads a topology file: switches, each with a list of nodes, or with the switches below it.

    Args:
        topology: as the YAML parser returns it.
        nodes: of the run; other nodes in the file are ignored.

    Raises:
        UsageError: it has another form, or names a node on two switches.
    """
    of: dict[str, str] = {}
    above: dict[str, str] = {}
    for switch, parent, node in _walk(topology, ""):
        if parent:
            _put(above, switch, parent, "switch")
        if node:
            _put(of, node, switch, "node")
    of = {node: of[node] for node in nodes if node in of}
    return LeafSwitches(
        of, "file" if of else "", above, _count(of, len(nodes), "the topology file")
    )


def leaves_from_slurm(text: str, hosts: Mapping[str, str]) -> LeafSwitches:
    """Reads Slurm's topology.conf.

    Args:
        hosts: Slurm's name of each node, by node id.

    Raises:
        UsageError: a list is invalid, or a node is on two switches.
    """
    on: dict[str, str] = {}
    above: dict[str, str] = {}
    for line in text.splitlines():
        words = dict(_PAIR.findall(line.partition("#")[0]))
        found = {key.lower(): value for key, value in words.items()}
        switch = found.get("switchname", "")
        if not switch:
            continue
        for host in names_of_list(found.get("nodes", "")):
            _put(on, host, switch, "node")
        for below in names_of_list(found.get("switches", "")):
            _put(above, below, switch, "switch")
    of = {node: on[host] for node, host in hosts.items() if host in on}
    return LeafSwitches(
        of, "slurm" if of else "", above, _count(of, len(hosts), "Slurm's topology")
    )


def group_domains(
    nodes: Sequence[str], labels: Mapping[str, str], leaves: Mapping[str, str]
) -> dict[str, str]:
    """The fault domain of each node, for `ftrun.erasure.groups`: its `domains`.

    The labels are used if each node has one and they are not all equal, because the user then
    declares the fault domains. Otherwise the leaf switches are used, if they are known.
    """
    labelled = {node: labels[node] for node in nodes if labels.get(node)}
    on_leaf = {node: leaves[node] for node in nodes if node in leaves}
    if len(set(labelled.values())) > 1 and len(labelled) == len(nodes):
        return labelled
    return on_leaf if len(set(on_leaf.values())) > 1 else labelled


def names_of_list(text: str) -> list[str]:
    """Expands a list of Slurm: `n[1-2,07],m3` is n1, n2, n07, m3.

    Raises:
        UsageError: it is not a list, or expands to more than `MOST_NAMES` names.
    """
    names: list[str] = []
    for part in _ITEM.findall(text):
        for name in _expanded(part):
            names.append(name)
            if len(names) > MOST_NAMES:
                raise UsageError(f"a list expands to more than {MOST_NAMES:,} names: {text[:80]}")
    return names


_PAIR = re.compile(r"(\w+)\s*=\s*(\S+)")
_ITEM = re.compile(r"(?:[^,\[\]]|\[[^\]]*\])+")
_BRACKET = re.compile(r"\[([^\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def _expanded(part: str) -> Iterator[str]:
    bracket = _BRACKET.search(part)
    if bracket is None:
        yield part
        return
    before, after = part[: bracket.start()], part[bracket.end() :]
    for one in bracket[1].split(","):
        span = _RANGE.fullmatch(one.strip())
        if span is None:
            raise UsageError(f"{part} is not a list of names: {one} is not a number or a range")
        low, high = span[1], span[2] or span[1]
        for number in range(int(low), int(high) + 1):
            for rest in _expanded(after):
                yield f"{before}{number:0{len(low)}d}{rest}"


def _walk(topology: object, parent: str) -> Iterator[tuple[str, str, str]]:
    """A switch, the switch above it if any, and a node on it or an empty string."""
    if not isinstance(topology, Mapping):
        raise UsageError("a topology file has switches, each with a list of nodes or with switches")
    for switch, below in topology.items():
        if isinstance(below, list | tuple):
            for node in below:
                yield str(switch), parent, str(node)
        else:
            yield str(switch), parent, ""
            yield from _walk(below, str(switch))


def _put(on: dict[str, str], what: str, switch: str, kind: str) -> None:
    if on.setdefault(what, switch) != switch:
        raise UsageError(f"{kind} {what} is attached to two switches: {on[what]} and {switch}")


def _count(of: Mapping[str, str], total: int, source: str) -> str:
    switches = len(set(of.values()))
    leaf_switches = "leaf switch" if switches == 1 else "leaf switches"
    return f"By {source}, {len(of)} of {total} nodes are attached to {switches} {leaf_switches}."


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
    at = {node: location for location, node in enumerate(nodes)}
    paths = [one for one in found if one.source in at and one.destination in at]
    met = {frozenset((one.source, one.destination)) for one in paths}
    if len(nodes) > MANY and 2 * len(met) < PARTNERS * len(nodes):
        return LeafSwitches(
            words=f"Leaf switches are not known: each of {len(nodes)} nodes was probed with too "
            "few others. Declare them by labels or a topology file."
        )
    by_path = [(NetworkPath.of(one), one) for one in paths]
    rates = {path: one.bytes_per_s for path, one in by_path if one.bytes_per_s > 0}
    rtts = {path: 1 / max(RTT_FLOOR_S, one.rtt_s) for path, one in by_path if one.rtt_s > 0}
    for what, figures in (("rates", rates), ("round trips", rtts)):
        best = _best(len(nodes), _Table(figures, at))
        if best is not None:
            return _named(nodes, best, what)
    return LeafSwitches(
        words=f"Leaf switches are not known: {len(paths):,} probes between {len(nodes)} nodes do "
        "not separate fast paths from slow ones."
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


class _Table:
    """The speed of each pair of nodes, relative to the best of both."""

    def __init__(self, figures: Mapping[NetworkPath, float], at: Mapping[str, int]) -> None:
        rows: dict[tuple[str, str, str], list[float]] = {}
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
            weak = [(location, best) for location, best in ends if best < bounds[rail]]
            one, other = sorted(location for location, _ in ends)
            if not weak:
                best = min(best for _, best in ends)
                strong.setdefault((one, other), []).append(figure / best)
            elif len(weak) == 1:
                ((location, best),) = weak
                to = other if location == one else one
                self.weak.setdefault(location, {}).setdefault(to, []).append(figure / best)
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
    pairs = zip(ordered[least - 1 :], ordered[least : len(ordered) - least + 1], strict=False)
    gaps = [(high / low, math.sqrt(low * high)) for low, high in pairs if high > low]
    return [bound for _, bound in sorted(gaps, reverse=True)[:most]]


def _clusters(count: int, paces: Mapping[Pair, float], bound: float) -> _Clusters | None:
    seen: list[set[int]] = [set() for _ in range(count)]
    quick: list[set[int]] = [{location} for location in range(count)]
    for (one, other), pace in paces.items():
        seen[one].add(other)
        seen[other].add(one)
        if pace > bound:
            quick[one].add(other)
            quick[other].add(one)
    of = _joined(
        count, [pair for pair, pace in paces.items() if pace > bound and _agree(seen, quick, *pair)]
    )
    of = _resolved(of, seen, quick)
    confidence = _sure(of, seen, quick)
    sizes, left = Counter(of.values()), Counter(confidence.values())
    # A cluster that has lost many nodes may have been two.
    good = {cluster for cluster in left if left[cluster] > max(1, WHOLE * sizes[cluster])}
    of = {location: cluster for location, cluster in confidence.items() if cluster in good}
    return _judged(of, paces, bound)


def _agree(seen: Sequence[set[int]], quick: Sequence[set[int]], one: int, other: int) -> bool:
    """Whether two nodes are fast to the same third nodes, of those that both were probed with."""
    both = seen[one] & seen[other]
    either = both & (quick[one] | quick[other])
    return 2 * len(either & quick[one] & quick[other]) >= len(either)


def _joined(count: int, pairs: Iterable[Pair]) -> dict[int, int]:
    """The cluster of each position: the lowest position that it is joined with."""
    root = list(range(count))

    def top(location: int) -> int:
        while root[location] != location:
            root[location] = root[root[location]]
            location = root[location]
        return location

    for one, other in pairs:
        low, high = sorted((top(one), top(other)))
        root[high] = low
    return {location: top(location) for location in range(count)}


def _resolved(
    of: Mapping[int, int], seen: Sequence[set[int]], quick: Sequence[set[int]]
) -> dict[int, int]:
    """Moves each node to the cluster with the largest fast fraction, if that is over a half."""
    resolved = dict(of)
    for location, met in enumerate(seen):
        probed = Counter(resolved[other] for other in met)
        good = Counter(resolved[other] for other in met & quick[location])
        shares = {cluster: good[cluster] / probed[cluster] for cluster in good}
        best = max(shares, key=lambda one: (shares[one], good[one], -one), default=None)
        if best is not None and shares[best] > max(0.5, shares.get(resolved[location], 0.0)):
            resolved[location] = best
    return resolved


def _sure(
    of: Mapping[int, int], seen: Sequence[set[int]], quick: Sequence[set[int]]
) -> dict[int, int]:
    """Nodes whose own paths agree with their cluster, and more with it than with others.

    A node that is fast to one node of its cluster and to one elsewhere may belong to either.
    """
    confidence = {}
    for location, cluster in of.items():
        mine = {other for other in seen[location] if of[other] == cluster}
        good = len(mine & quick[location])
        if good >= AGREE * len(mine) and 2 * len(seen[location] & quick[location] - mine) <= good:
            confidence[location] = cluster
    return confidence


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
    is_reported = true >= CONSISTENT and times >= needed and margin >= MARGIN
    return _Clusters(of, true, margin, times) if is_reported else None


def _places_of_weak(
    weak: Mapping[int, Mapping[int, Sequence[float]]], of: Mapping[int, int]
) -> dict[int, int]:
    """Clusters of slow nodes that are still faster to one cluster than to all others."""
    found = {}
    for location, paces in weak.items():
        if location in of:
            continue
        by_cluster = {
            cluster: [_low(some) for other, some in paces.items() if of.get(other) == cluster]
            for cluster in set(of.values())
        }
        ranked = sorted(
            ((median(some), cluster) for cluster, some in by_cluster.items() if some), reverse=True
        )
        if len(ranked) > 1 and ranked[0][0] >= SEPARATE_FEW * ranked[1][0]:
            found[location] = ranked[0][1]
    return found


def _named(nodes: Sequence[str], clusters: _Clusters, what: str) -> LeafSwitches:
    names: dict[int, str] = {}
    of = {}
    for location, node in enumerate(nodes):
        if location in clusters.of:
            of[node] = names.setdefault(clusters.of[location], f"leaf{len(names)}")
    words = (
        f"By {what} of the probes, {len(of)} of {len(nodes)} nodes are attached to {len(names)} "
        f"leaf switches: paths within a leaf switch are {clusters.times:.1f} times faster than "
        "others."
    )
    return LeafSwitches(of, "probes", words=words)
