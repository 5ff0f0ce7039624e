"""What the roads of a survey say together: of each rail, each node, and which are bad.

Runs in:  cli. Pure.
Takes in: the part `network` of a status document.
Gives:    values for tables and pictures; no words.

What is bad, and whose fault it is, is `ftrun.network.detect.findings`' to say: here it is counted.
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
from ftrun.tools.network_view.network_part import NetworkStatus
from ftrun.wire.cluster.generation import PathMeasurement, Rail


class PathState(IntEnum):
    """Of a road, or of a node's rail in one direction; the larger, the worse."""

    UNKNOWN = 0
    GOOD = 1
    SLOW = 2
    DEAD = 3


@dataclass(frozen=True, slots=True)
class RailSummary:
    """One rail of the run. A figure that is 0 is not known."""

    name: str
    nodes: int
    network: str
    """Such as 10.0.0.0/24; empty where nodes lie in several, or none is known."""
    speeds_mbit: tuple[int, ...]
    duplexes: tuple[str, ...]
    roads: int
    dead: int
    slow: int
    usual_per_s: float
    """Median inside of leaves; of all roads where no leaf is known."""
    between_per_s: float
    """Median between leaves."""
    slowest_per_s: float
    median_rtt_s: float


@dataclass(frozen=True, slots=True)
class NodeRailSummary:
    """What a node does over one rail.

    Rates are medians over its roads inside of its leaf, where it has some: what leaves share is
    not its own. Nor is what the other end does wrong. 0: not known.
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
        """Of what it sends and receives; 0: not known."""
        return min((one for one in (self.sends_per_s, self.receives_per_s) if one > 0), default=0.0)


@dataclass(slots=True)
class NetworkFacts:
    """All that is shown."""

    nodes: list[str]
    """In the order that was chosen, then by name."""
    rails: list[str]
    """Those of training, best first, then the others."""
    leaves: Mapping[str, list[str]]
    """Nodes of each leaf switch, as the ring passes them; empty where none is known."""
    leaf_of: Mapping[str, str]
    by_road: Mapping[NetworkPath, PathMeasurement]
    judged: NetworkFindings
    dropped: Mapping[str, str]
    """Rails that training does not use, with the reason."""
    num_ordered: int
    """So many of the nodes, from the first, have a place in the chosen order."""
    rail_facts: list[RailSummary] = field(default_factory=list)
    node_rails: Mapping[tuple[str, str], NodeRailSummary] = field(default_factory=dict)

    @property
    def ring(self) -> list[str]:
        """The nodes of the chosen order; all of them where there is none."""
        return self.nodes[: self.num_ordered or None]

    def state_of(self, road: NetworkPath) -> PathState:
        if road in self.judged.dead:
            return PathState.DEAD
        pace = self.judged.paces.get(road)
        if pace is None:
            return PathState.UNKNOWN
        is_bad = road in self.judged.late or is_slow(road, pace, self.leaf_of)
        return PathState.SLOW if is_bad else PathState.GOOD

    def usual_of(self, road: NetworkPath) -> float:
        """What roads alike do, in bytes per second; 0: not known."""
        is_near = is_inside(road, self.leaf_of)
        return (self.judged.usual if is_near else self.judged.usual_between).get(road.rail, 0.0)

    def count(self, state: PathState) -> int:
        return sum(self.state_of(road) is state for road in self.by_road)

    def single(self) -> list[NetworkPath]:
        """Bad roads that no node's rail, and no whole rail, is the reason of; dead ones first."""
        found = (
            NetworkPath(*one.nodes, one.rail) for one in self.judged.found if len(one.nodes) == 2
        )
        return sorted(found, key=lambda road: (-self.state_of(road), road))


def network_facts(part: NetworkStatus) -> NetworkFacts:
    """All that follows from one part."""
    leaf_of = part.chosen.leaves
    judged = judge(part.rails, part.roads, leaf_of)
    nodes = _nodes(part)
    leaves: dict[str, list[str]] = {}
    for node in _from_a_border(nodes, len(part.chosen.order), leaf_of) if leaf_of else ():
        leaves.setdefault(leaf_of.get(node, ""), []).append(node)
    facts = NetworkFacts(
        nodes=nodes,
        rails=_rails(part, judged),
        leaves=leaves,
        leaf_of=leaf_of,
        by_road={NetworkPath.of(one): one for one in part.roads},
        judged=judged,
        dropped=part.chosen.dropped,
        num_ordered=len(part.chosen.order),
    )
    by_rail: dict[str, list[PathMeasurement]] = {rail: [] for rail in facts.rails}
    for road in part.roads:
        by_rail[road.rail].append(road)
    facts.rail_facts = [_rail(name, facts, by_rail[name]) for name in facts.rails]
    facts.node_rails = _node_rails(facts, by_rail)
    return facts


def between_leaves(facts: NetworkFacts) -> dict[str, float]:
    """Of each leaf, the median of its nodes' roads to other leaves and back, the lower one.

    Over the rails of training, in bytes per second; dead roads count as 0.
    """
    sent: dict[str, list[float]] = {}
    received: dict[str, list[float]] = {}
    for road, found in facts.by_road.items():
        if road.rail in facts.dropped or is_inside(road, facts.leaf_of):
            continue
        sent.setdefault(facts.leaf_of.get(road.source, ""), []).append(found.bytes_per_s)
        received.setdefault(facts.leaf_of.get(road.destination, ""), []).append(found.bytes_per_s)
    return {
        leaf: min(median(sent[leaf]), median(received[leaf]))
        for leaf in facts.leaves
        if leaf in sent and leaf in received
    }


def _nodes(part: NetworkStatus) -> list[str]:
    ends = {end for road in part.roads for end in (road.source, road.destination)}
    known = ends | set(part.rails) | set(part.chosen.order)
    return [*part.chosen.order, *sorted(known - set(part.chosen.order), key=by_number)]


def _from_a_border(nodes: Sequence[str], ordered: int, leaf_of: Mapping[str, str]) -> list[str]:
    """The ring begun where it enters the leaf of the first node; then those without a place."""
    ring = list(nodes[:ordered])
    back = 0
    while back < len(ring) and leaf_of.get(ring[-1 - back], "") == leaf_of.get(ring[0], ""):
        back += 1
    begin = len(ring) - back
    return [*ring[begin:], *ring[:begin], *nodes[ordered:]]


def _rails(part: NetworkStatus, judged: NetworkFindings) -> list[str]:
    seen = sorted({road.rail for road in part.roads}, key=by_number)
    return list(dict.fromkeys([*part.chosen.rails, *part.chosen.dropped, *judged.rails, *seen]))


def _rail(name: str, facts: NetworkFacts, roads: Sequence[PathMeasurement]) -> RailSummary:
    cards = list(facts.judged.rails.get(name, {}).values())
    rates = [road.bytes_per_s for road in roads if road.bytes_per_s > 0]
    trips = [road.rtt_s for road in roads if road.rtt_s > 0]
    networks = {_network(card) for card in cards}
    states = [facts.state_of(NetworkPath.of(road)) for road in roads]
    return RailSummary(
        name=name,
        nodes=len(cards),
        network=networks.pop() if len(networks) == 1 else "",
        speeds_mbit=tuple(sorted({card.speed_mbit for card in cards if card.speed_mbit})),
        duplexes=tuple(sorted({card.duplex for card in cards if card.duplex})),
        roads=len(roads),
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
    blamed = _blamed(facts.judged)
    for rail, roads in by_rail.items():
        sent: dict[str, list[PathMeasurement]] = {}
        received: dict[str, list[PathMeasurement]] = {}
        for road in roads:
            sent.setdefault(road.source, []).append(road)
            received.setdefault(road.destination, []).append(road)
        whole = blamed.get(("", rail, ""), PathState.GOOD)
        for node in sorted(set(sent) | set(received), key=by_number):
            out, back = sent.get(node, []), received.get(node, [])
            states = [facts.state_of(NetworkPath.of(road)) for road in (*out, *back)]
            # What the other end of a road does wrong is not this node's.
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


def _blamed(judged: NetworkFindings) -> dict[tuple[str, str, str], PathState]:
    """By node, rail and `out` or `in`: what is dead or slow; a whole rail has no node, no way."""
    found: dict[tuple[str, str, str], PathState] = {}
    for one in judged.found:
        state = _state_told(one)
        if len(one.nodes) > 1 or state is PathState.GOOD:
            continue
        ways = ("out", "in") if not one.direction else (one.direction,)
        places = [(one.nodes[0], one.rail, way) for way in ways] if one.nodes else []
        for place in places or [("", one.rail, "")]:
            found[place] = max(state, found.get(place, PathState.GOOD))
    return found


def _state_told(one: NetworkFinding) -> PathState:
    if one.kind is NetworkFindingKind.DEAD:
        return PathState.DEAD
    is_bad = one.kind in (NetworkFindingKind.SLOW, NetworkFindingKind.SPEED) and one.pace < SLOW
    return PathState.SLOW if is_bad else PathState.GOOD


def _median_rate(roads: Iterable[PathMeasurement], leaf_of: Mapping[str, str]) -> float:
    """Inside of the leaf, where that is known."""
    known = [road for road in roads if road.bytes_per_s > 0]
    inside = [road.bytes_per_s for road in known if is_inside(NetworkPath.of(road), leaf_of)]
    rates = inside or [road.bytes_per_s for road in known]
    return median(rates) if rates else 0.0
