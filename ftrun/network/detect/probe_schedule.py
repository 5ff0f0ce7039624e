"""Which roads are probed when: rounds in which no node is in two probes.

Runs in:  the agent that leads. Pure; the same rounds for the same nodes.
Takes in: the nodes, which of them lie on which rail, and how many rounds there may be.
Gives:    a `ProbeSchedule`: rounds of roads, and how much of all roads they cover.

Few nodes are probed whole, as in a tournament: n - 1 pairings of n nodes (n where n is odd), each
once per rail and direction, so 8 nodes with 2 rails take 7 x 2 x 2 = 28 rounds. A node sends or
receives in a round, never both, and over one rail: two probes would share its memory, its
processor, and on half-duplex links the wire.

Many nodes are sampled: pairings of neighbours at distances 1, 2, 4 ... in the order of their
ranks, where rings and trees run, then pairings of random nodes. Each pairing has nearly all nodes
in it, so every node's rail is seen both sending and receiving, however few rounds there are: a
fault of a node's rail is found for certain, one of a single road with the chance that `coverage`
says.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from ftrun.wire.cluster.rails import PathMeasurement

MOST_ROUNDS = 120
"""Without a wish: at a tenth of a second each they take 12 s."""


Pairing = list[tuple[str, str]]

MOST_PAIRS = 20_000
"""Pairs of nodes that are looked at to probe some nodes' roads; of more, partners are drawn."""


class NetworkPath(NamedTuple):
    """One way between two nodes, in one direction, over one rail."""

    source: str
    destination: str
    rail: str
    """As the run calls it."""

    @classmethod
    def of(cls, found: PathMeasurement) -> "NetworkPath":
        return cls(found.source, found.destination, found.rail)


@dataclass(frozen=True, slots=True)
class ProbeSchedule:
    """Rounds of probes."""

    rounds: tuple[tuple[NetworkPath, ...], ...]
    coverage: float
    """Roads in these rounds by all roads there are; 1 where there is none."""
    words: str
    """How many, in a sentence."""

    def round_s(self, within_s: float) -> float:
        """What a round may take for all of them to end in this time."""
        return within_s / max(1, len(self.rounds))


def schedule(
    nodes: Sequence[str],
    rails: Mapping[str, Collection[str]],
    *,
    most_rounds: int = MOST_ROUNDS,
    seed: int = 0,
) -> ProbeSchedule:
    """Rounds that probe every road where they fit, else a sample of them.

    Args:
        nodes: in the order of their ranks, each once.
        rails: the nodes on each rail of the run; `RunRails` fits.
        most_rounds: at least two for each rail are made, whatever this says.
        seed: another one samples other roads.
    """
    members = {rail: set(on) for rail, on in rails.items()}
    total = sum(_num_roads(nodes, on) for on in members.values())
    most = max(1, most_rounds // max(1, 2 * len(rails)))
    by_rail = [_pairings(nodes, most, seed, number) for number in range(len(rails))]
    rounds: list[tuple[NetworkPath, ...]] = []
    for pairings in zip(*by_rail, strict=True):
        for (rail, on), pairing in zip(members.items(), pairings, strict=True):
            there = [pair for pair in pairing if pair[0] in on and pair[1] in on]
            rounds.append(tuple(NetworkPath(one, other, rail) for one, other in there))
            rounds.append(tuple(NetworkPath(other, one, rail) for one, other in there))
    return _said([one for one in rounds if one], total, len(nodes), len(rails))


def schedule_for(
    some: Collection[str],
    nodes: Sequence[str],
    rails: Mapping[str, Collection[str]],
    *,
    most_rounds: int = MOST_ROUNDS,
    seed: int = 0,
) -> ProbeSchedule:
    """Rounds for the roads to and from some nodes: those that join, or are suspected.

    Args:
        some: whose roads; those that are not among `nodes` are left out.
        nodes: all nodes, in the order of their ranks.
        rails: as for `schedule`.
        most_rounds: so many probes a node of `some` has, where its roads are more; partners are
            drawn, and have some more where another one would have
            none. To keep no node in two probes of a round there can be some more rounds.
        seed: likewise.
    """
    members = {rail: set(on) for rail, on in rails.items()}
    some = set(some)
    mine = [node for node in nodes if node in some]
    total = sum(_num_roads(nodes, on) - _num_roads(nodes, on - some) for on in members.values())
    most = max(1, most_rounds // max(1, 2 * len(rails)))
    left = dict.fromkeys(mine, most)
    pairs = _pairs_of(mine, nodes, most, seed)
    roads: list[NetworkPath] = []
    for pair in pairs:
        limited = [node for node in pair if node in left]
        if all(left[node] > 0 for node in limited) or any(left[node] == most for node in limited):
            for node in limited:
                left[node] -= 1
            there = [rail for rail, on in members.items() if on.issuperset(pair)]
            roads += [NetworkPath(*ends, rail) for rail in there for ends in (pair, pair[::-1])]
    return _said(pack(roads), total, len(nodes), len(rails))


def _pairs_of(mine: Sequence[str], nodes: Sequence[str], most: int, seed: int) -> Pairing:
    """Pairs with one of these nodes in them, in a drawn order; of very many a part is drawn."""
    some = set(mine)
    if len(mine) * len(nodes) <= MOST_PAIRS:
        pairs = [(one, other) for one in mine for other in nodes if other not in some]
        pairs += itertools.combinations(mine, 2)
        return sorted(pairs, key=lambda pair: _drawn(seed, *pair))
    drawn: dict[frozenset[str], tuple[str, str]] = {}
    # Twice as many as are wanted: partners may have enough of their own.
    for number in range(2 * most):
        for one in mine:
            other = nodes[_drawn(seed, one, str(number)) % len(nodes)]
            if one != other:
                drawn.setdefault(frozenset((one, other)), (one, other))
    return list(drawn.values())


def pack(roads: Iterable[NetworkPath]) -> list[tuple[NetworkPath, ...]]:
    """Any roads in rounds, each in the first one in which both its nodes are free."""
    rounds: list[list[NetworkPath]] = []
    busy: dict[str, int] = {}
    """Rounds in which a node has a probe, a bit for each."""
    for road in roads:
        taken = busy.get(road.source, 0) | busy.get(road.destination, 0)
        place = (~taken & (taken + 1)).bit_length() - 1
        if place == len(rounds):
            rounds.append([])
        rounds[place].append(road)
        for node in (road.source, road.destination):
            busy[node] = busy.get(node, 0) | 1 << place
    return [tuple(one) for one in rounds]


def _said(
    rounds: list[tuple[NetworkPath, ...]], total: int, nodes: int, rails: int
) -> ProbeSchedule:
    probed = sum(map(len, rounds))
    coverage = probed / total if total else 1.0
    words = (
        f"{probed:,} of {total:,} roads between {nodes:,} nodes over {rails} rail(s) "
        f"are probed in {len(rounds)} rounds"
    )
    if coverage < 1:
        words += f": {100 * coverage:.2g} % of them, drawn"
    return ProbeSchedule(tuple(rounds), coverage, words)


def _num_roads(nodes: Sequence[str], on: Collection[str]) -> int:
    there = len(set(nodes).intersection(on))
    return there * (there - 1)


def _pairings(nodes: Sequence[str], most: int, seed: int, rail: int) -> Iterator[Pairing]:
    """All pairings of a tournament where they fit, else so many of rings and of random nodes."""
    if len(nodes) < 2:
        return
    if len(nodes) - 1 + len(nodes) % 2 <= most:
        yield from _tournament(nodes, _mixed(len(nodes), seed, rail))
        return
    seen: set[frozenset[str]] = set()
    for pairing in itertools.islice(_sampled(nodes, seed, rail), most):
        new = [pair for pair in pairing if frozenset(pair) not in seen]
        seen.update(map(frozenset, new))
        yield new


def _mixed(count: int, seed: int, *numbers: int) -> list[int]:
    """Places in a drawn order: the same for as many nodes, whatever they are called."""
    return sorted(range(count), key=lambda place: _drawn(seed, *map(str, (*numbers, place))))


def _tournament(nodes: Sequence[str], places: Sequence[int]) -> Iterator[Pairing]:
    """Each with each once: one stays, the others go round; an odd one has a round off.

    Each rail has its own order of places, so two nodes meet in other company: who shares an uplink
    with others in one round may have it alone in the next, and only the worst of its rates tells.
    """
    circle: list[int | None] = [*places] if len(places) % 2 == 0 else [*places, None]
    half = len(circle) // 2
    for _ in range(len(circle) - 1):
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        there = [sorted((a, b)) for a, b in pairs if a is not None and b is not None]
        yield [(nodes[low], nodes[high]) for low, high in there]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def _sampled(nodes: Sequence[str], seed: int, rail: int) -> Iterator[Pairing]:
    """Rings at distances 1, 2, 4 ..., two pairings each; then random nodes without end."""
    distance = 1
    while distance <= len(nodes) // 2:
        yield from _ring(nodes, distance)
        distance *= 2
    number = 0
    while True:
        drawn = [nodes[place] for place in _mixed(len(nodes), seed, rail, number)]
        yield list(zip(drawn[0::2], drawn[1::2], strict=False))
        number += 1


def _ring(nodes: Sequence[str], distance: int) -> Iterator[Pairing]:
    """Each with the one so far on, every other one of them; then those between."""
    count = len(nodes)
    for first in (0, 1):
        pairing: Pairing = []
        busy: set[int] = set()
        for start in range(distance):
            at = (start + first * distance) % count
            to = (at + distance) % count
            while at not in busy and to not in busy:
                busy |= {at, to}
                pairing.append((nodes[at], nodes[to]))
                at = (to + distance) % count
                to = (at + distance) % count
        yield pairing


def _drawn(seed: int, *words: str) -> int:
    return xxhash.xxh3_64_intdigest("\0".join(words).encode(), seed=seed)
