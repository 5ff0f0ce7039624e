"""Aggregates the paths of a survey: for each rail, each node, and all bad paths.

It counts the faults that `ftrun.network.detect.findings` localized, and makes no text.
"""

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from statistics import median

from ftrun.cli.screen.text import by_number
from ftrun.network.detect.findings import NetworkFinding, NetworkFindingKind, NetworkFindings, judge
from ftrun.network.detect.localization import SLOW, is_inside, is_slow
from ftrun.network.detect.probe_schedule import NetworkPath
from ftrun.wire.cluster.generation import PathMeasurement, Rail
from ftrun.wire.messages.status import NetworkStatus


@dataclass(frozen=True, slots=True)
class NetworkReport:
    """The network status of a run, and the run or the file that it is from, for messages."""

    run_id: str
    part: NetworkStatus
    is_live: bool
    source: str


class PathState(IntEnum):
    """State of a path, or of a node's rail in one direction; a larger value is worse."""

    UNKNOWN = 0
    GOOD = 1
    SLOW = 2
    DEAD = 3


@dataclass(frozen=True, slots=True)
class RailSummary:
    """One rail of the run. A value of 0 is not known."""

    name: str
    network: str
    """Such as 10.0.0.0/24; empty if the nodes are in several networks, or none is known."""
    speeds_mbit: tuple[int, ...]
    duplexes: tuple[str, ...]
    paths: int
    dead: int
    slow: int
    usual_per_s: float
    """Median of the paths within leaf switches; of all paths if no leaf switch is known."""
    between_per_s: float
    """Median of the paths between leaf switches."""
    slowest_per_s: float
    median_rtt_s: float


@dataclass(frozen=True, slots=True)
class NodeRailSummary:
    """One rail of one node.

    Rates are medians over its paths within its leaf switch, if it has any, because the links
    between leaf switches are shared. Paths to a node with its own fault are excluded. A value of 0
    is not known.
    """

    node: str
    rail: str
    sends_per_s: float
    receives_per_s: float
    dead: int
    slow: int
    sends: PathState
    receives: PathState

    @property
    def state(self) -> PathState:
        return max(self.sends, self.receives)

    @property
    def lower_per_s(self) -> float:
        """The lower rate of both directions; 0: not known."""
        return min((one for one in (self.sends_per_s, self.receives_per_s) if one > 0), default=0.0)


@dataclass(slots=True)
class NetworkFacts:
    """All values that text, page and picture show."""

    nodes: list[str]
    """In the order of the plan, then by name."""
    rails: list[str]
    """Rails of training, best first, then the others."""
    leaves: Mapping[str, list[str]]
    """Nodes of each leaf switch in ring order; empty if none is known."""
    leaf_of: Mapping[str, str]
    by_path: Mapping[NetworkPath, PathMeasurement]
    judged: NetworkFindings
    dropped: Mapping[str, str]
    """Rails that training does not use, with the reason."""
    num_ordered: int
    """Number of the first nodes that have a position in the order of the plan."""
    rail_facts: list[RailSummary] = field(default_factory=list)
    node_rails: Mapping[tuple[str, str], NodeRailSummary] = field(default_factory=dict)

    @property
    def ring(self) -> list[str]:
        """The nodes in the order of the plan; all nodes if there is no order."""
        return self.nodes[: self.num_ordered or None]

    def state_of(self, path: NetworkPath) -> PathState:
        if path in self.judged.dead:
            return PathState.DEAD
        pace = self.judged.paces.get(path)
        if pace is None:
            return PathState.UNKNOWN
        is_bad = path in self.judged.late or is_slow(path, pace, self.leaf_of)
        return PathState.SLOW if is_bad else PathState.GOOD

    def usual_of(self, path: NetworkPath) -> float:
        """Usual rate of similar paths, in bytes per second; 0: not known."""
        is_near = is_inside(path, self.leaf_of)
        return (self.judged.usual if is_near else self.judged.usual_between).get(path.rail, 0.0)

    def count(self, state: PathState) -> int:
        return sum(self.state_of(path) is state for path in self.by_path)

    def single(self) -> list[NetworkPath]:
        """Bad paths that no bad node rail and no bad rail explains; dead paths first."""
        found = (
            NetworkPath(*one.nodes, one.rail) for one in self.judged.found if len(one.nodes) == 2
        )
        return sorted(found, key=lambda path: (-self.state_of(path), path))


def network_facts(part: NetworkStatus) -> NetworkFacts:
    leaf_of = part.chosen.leaf_switches
    judged = judge(part.rails, part.paths, leaf_of)
    nodes = _nodes(part)
    leaves: dict[str, list[str]] = {}
    for node in _from_a_border(nodes, len(part.chosen.order), leaf_of) if leaf_of else ():
        leaves.setdefault(leaf_of.get(node, ""), []).append(node)
    facts = NetworkFacts(
        nodes=nodes,
        rails=_rails(part, judged),
        leaves=leaves,
        leaf_of=leaf_of,
        by_path={NetworkPath.of(one): one for one in part.paths},
        judged=judged,
        dropped=part.chosen.dropped,
        num_ordered=len(part.chosen.order),
    )
    by_rail: dict[str, list[PathMeasurement]] = {rail: [] for rail in facts.rails}
    for path in part.paths:
        by_rail[path.rail].append(path)
    facts.rail_facts = [_rail(name, facts, by_rail[name]) for name in facts.rails]
    facts.node_rails = _node_rails(facts, by_rail)
    return facts


def between_leaves(facts: NetworkFacts) -> dict[str, float]:
    """Median rate of the paths from and to each leaf switch; the lower one of both directions.

    Over the rails of training, in bytes per second; dead paths count as 0.
    """
    sent: dict[str, list[float]] = {}
    received: dict[str, list[float]] = {}
    for path, found in facts.by_path.items():
        if path.rail in facts.dropped or is_inside(path, facts.leaf_of):
            continue
        sent.setdefault(facts.leaf_of.get(path.source, ""), []).append(found.bytes_per_s)
        received.setdefault(facts.leaf_of.get(path.destination, ""), []).append(found.bytes_per_s)
    return {
        leaf: min(median(sent[leaf]), median(received[leaf]))
        for leaf in facts.leaves
        if leaf in sent and leaf in received
    }


def _nodes(part: NetworkStatus) -> list[str]:
    ends = {end for path in part.paths for end in (path.source, path.destination)}
    known = ends | set(part.rails) | set(part.chosen.order)
    return [*part.chosen.order, *sorted(known - set(part.chosen.order), key=by_number)]


def _from_a_border(nodes: Sequence[str], ordered: int, leaf_of: Mapping[str, str]) -> list[str]:
    """The ring, rotated to the border of the first node's leaf; then nodes without a position."""
    ring = list(nodes[:ordered])
    back = 0
    while back < len(ring) and leaf_of.get(ring[-1 - back], "") == leaf_of.get(ring[0], ""):
        back += 1
    begin = len(ring) - back
    return [*ring[begin:], *ring[:begin], *nodes[ordered:]]


def _rails(part: NetworkStatus, judged: NetworkFindings) -> list[str]:
    seen = sorted({path.rail for path in part.paths}, key=by_number)
    return list(dict.fromkeys([*part.chosen.rails, *part.chosen.dropped, *judged.rails, *seen]))


def _rail(name: str, facts: NetworkFacts, paths: Sequence[PathMeasurement]) -> RailSummary:
    cards = list(facts.judged.rails.get(name, {}).values())
    rates = [path.bytes_per_s for path in paths if path.bytes_per_s > 0]
    trips = [path.rtt_s for path in paths if path.rtt_s > 0]
    networks = {_network(card) for card in cards}
    states = [facts.state_of(NetworkPath.of(path)) for path in paths]
    return RailSummary(
        name=name,
        network=networks.pop() if len(networks) == 1 else "",
        speeds_mbit=tuple(sorted({card.speed_mbit for card in cards if card.speed_mbit})),
        duplexes=tuple(sorted({card.duplex for card in cards if card.duplex})),
        paths=len(paths),
        dead=states.count(PathState.DEAD),
        slow=states.count(PathState.SLOW),
        usual_per_s=facts.judged.usual.get(name, 0.0),
        between_per_s=facts.judged.usual_between.get(name, 0.0),
        slowest_per_s=min(rates, default=0.0),
        median_rtt_s=median(trips) if trips else 0.0,
    )


def _network(card: Rail) -> str:
    try:
        network = ipaddress.ip_network(f"{card.host}/{card.prefix_bits}", strict=False)
    except ValueError:
        return ""
    return str(network) if card.prefix_bits else ""


def _node_rails(
    facts: NetworkFacts, by_rail: Mapping[str, Sequence[PathMeasurement]]
) -> dict[tuple[str, str], NodeRailSummary]:
    found: dict[tuple[str, str], NodeRailSummary] = {}
    blamed = _culprit_paths(facts.judged)
    for rail, paths in by_rail.items():
        sent: dict[str, list[PathMeasurement]] = {}
        received: dict[str, list[PathMeasurement]] = {}
        for path in paths:
            sent.setdefault(path.source, []).append(path)
            received.setdefault(path.destination, []).append(path)
        whole = blamed.get(("", rail, ""), PathState.GOOD)
        for node in sorted(set(sent) | set(received), key=by_number):
            out, back = sent.get(node, []), received.get(node, [])
            states = [facts.state_of(NetworkPath.of(path)) for path in (*out, *back)]
            # A fault of the other end is not a fault of this node.
            own_out = [one for one in out if (one.destination, rail, "in") not in blamed]
            own_back = [one for one in back if (one.source, rail, "out") not in blamed]
            found[node, rail] = NodeRailSummary(
                node=node,
                rail=rail,
                sends_per_s=_median_rate(own_out or out, facts.leaf_of),
                receives_per_s=_median_rate(own_back or back, facts.leaf_of),
                dead=states.count(PathState.DEAD),
                slow=states.count(PathState.SLOW),
                sends=max(whole, blamed.get((node, rail, "out"), PathState.GOOD)),
                receives=max(whole, blamed.get((node, rail, "in"), PathState.GOOD)),
            )
    return found


def _culprit_paths(judged: NetworkFindings) -> dict[tuple[str, str, str], PathState]:
    """Dead and slow places by node, rail and `out` or `in`; a whole rail has no node."""
    found: dict[tuple[str, str, str], PathState] = {}
    for one in judged.found:
        state = _state_of(one)
        if len(one.nodes) > 1 or state is PathState.GOOD:
            continue
        ways = ("out", "in") if not one.direction else (one.direction,)
        places = [(one.nodes[0], one.rail, way) for way in ways] if one.nodes else []
        for place in places or [("", one.rail, "")]:
            found[place] = max(state, found.get(place, PathState.GOOD))
    return found


def _state_of(one: NetworkFinding) -> PathState:
    if one.kind is NetworkFindingKind.DEAD:
        return PathState.DEAD
    is_bad = one.kind in (NetworkFindingKind.SLOW, NetworkFindingKind.SPEED) and one.pace < SLOW
    return PathState.SLOW if is_bad else PathState.GOOD


def _median_rate(paths: Iterable[PathMeasurement], leaf_of: Mapping[str, str]) -> float:
    """Median of the paths within the leaf switch if there are any, else of all paths."""
    known = [path for path in paths if path.bytes_per_s > 0]
    inside = [path.bytes_per_s for path in known if is_inside(NetworkPath.of(path), leaf_of)]
    rates = inside or [path.bytes_per_s for path in known]
    return median(rates) if rates else 0.0
