"""The schedule of probes: rounds in which no node takes part in two probes.

Few nodes are probed completely, as in a tournament: n - 1 pairings of n nodes (n if n is odd), each
once per rail and direction, so 8 nodes with 2 rails take 7 x 2 x 2 = 28 rounds. In a round, a node
either sends or receives, and over one rail. Two probes would share its memory, its processor, and
on half-duplex links the wire.

Many nodes are sampled: first pairings of neighbours at distances 1, 2, 4 ... in the order of their
ranks, which rings and trees use, then pairings of random nodes. Each pairing contains nearly all
nodes, so every node's rail is probed both sending and receiving, with any number of rounds. A fault
of a node's rail is always found. A fault of a single path is found with the probability `coverage`.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from ftrun.wire.cluster.generation import PathMeasurement

Pairing = list[tuple[str, str]]

MOST_PAIRS = 20_000
"""Pairs of nodes that are considered to probe the paths of some nodes; above this number, partners
are drawn at random."""


class NetworkPath(NamedTuple):
    """The connection between two nodes, in one direction, over one rail."""

    source: str
    destination: str
    rail: str
    """The run's name of the rail."""

    @classmethod
    def of(cls, found: PathMeasurement) -> "NetworkPath":
        return cls(found.source, found.destination, found.rail)


@dataclass(frozen=True, slots=True)
class ProbeSchedule:
    """Rounds of probes."""

    rounds: tuple[tuple[NetworkPath, ...], ...]
    coverage: float
    """Fraction of all paths that is in these rounds; 1 if there are no paths."""


def schedule(
    nodes: Sequence[str], rails: Mapping[str, Collection[str]], *, most_rounds: int
) -> ProbeSchedule:
    """Rounds that probe every path if they fit, else a sample of the paths.

    Args:
        nodes: in the order of their ranks, each once.
        rails: the nodes on each rail of the run; `RunRails` fits.
        most_rounds: limit; at least two rounds for each rail are made in any case.
    """
    members = {rail: set(on) for rail, on in rails.items()}
    total = sum(_num_paths(nodes, on) for on in members.values())
    most = max(1, most_rounds // max(1, 2 * len(rails)))
    by_rail = [_pairings(nodes, most, number) for number in range(len(rails))]
    rounds: list[tuple[NetworkPath, ...]] = []
    for pairings in zip(*by_rail, strict=True):
        for (rail, on), pairing in zip(members.items(), pairings, strict=True):
            there = [pair for pair in pairing if pair[0] in on and pair[1] in on]
            rounds.append(tuple(NetworkPath(one, other, rail) for one, other in there))
            rounds.append(tuple(NetworkPath(other, one, rail) for one, other in there))
    return _schedule_of([one for one in rounds if one], total)


def schedule_for(
    some: Collection[str],
    nodes: Sequence[str],
    rails: Mapping[str, Collection[str]],
    *,
    most_rounds: int,
) -> ProbeSchedule:
    """Rounds for the paths to and from some nodes: nodes that join, or are suspected.

    Args:
        some: nodes whose paths are probed; nodes that are not among `nodes` are ignored.
        nodes: all nodes, in the order of their ranks.
        rails: as for `schedule`.
        most_rounds: probes of each node of `some`, if it has more paths; partners are drawn, and
            take part in more probes if another node would have none. Rounds may exceed the limit,
            because no node is in two probes of a round.
    """
    members = {rail: set(on) for rail, on in rails.items()}
    some = set(some)
    mine = [node for node in nodes if node in some]
    total = sum(_num_paths(nodes, on) - _num_paths(nodes, on - some) for on in members.values())
    most = max(1, most_rounds // max(1, 2 * len(rails)))
    left = dict.fromkeys(mine, most)
    paths: list[NetworkPath] = []
    for pair in _pairs_of(mine, nodes, most):
        limited = [node for node in pair if node in left]
        if all(left[node] > 0 for node in limited) or any(left[node] == most for node in limited):
            for node in limited:
                left[node] -= 1
            there = [rail for rail, on in members.items() if on.issuperset(pair)]
            paths += [NetworkPath(*ends, rail) for rail in there for ends in (pair, pair[::-1])]
    return _schedule_of(pack(paths), total)


def _pairs_of(mine: Sequence[str], nodes: Sequence[str], most: int) -> Pairing:
    """Pairs that contain one of these nodes, in a random order; a sample if there are very many."""
    some = set(mine)
    if len(mine) * len(nodes) <= MOST_PAIRS:
        pairs = [(one, other) for one in mine for other in nodes if other not in some]
        pairs += itertools.combinations(mine, 2)
        return sorted(pairs, key=lambda pair: _drawn(*pair))
    drawn: dict[frozenset[str], tuple[str, str]] = {}
    # Twice the required number, because partners may have enough probes of their own.
    for number in range(2 * most):
        for one in mine:
            other = nodes[_drawn(one, str(number)) % len(nodes)]
            if one != other:
                drawn.setdefault(frozenset((one, other)), (one, other))
    return list(drawn.values())


def pack(paths: Iterable[NetworkPath]) -> list[tuple[NetworkPath, ...]]:
    """Rounds for any paths: each is in the first round in which both its nodes are free."""
    rounds: list[list[NetworkPath]] = []
    busy: dict[str, int] = {}
    """Rounds in which a node takes part in a probe, one bit for each."""
    for path in paths:
        taken = busy.get(path.source, 0) | busy.get(path.destination, 0)
        location = (~taken & (taken + 1)).bit_length() - 1
        if location == len(rounds):
            rounds.append([])
        rounds[location].append(path)
        for node in (path.source, path.destination):
            busy[node] = busy.get(node, 0) | 1 << location
    return [tuple(one) for one in rounds]


def _schedule_of(rounds: list[tuple[NetworkPath, ...]], total: int) -> ProbeSchedule:
    return ProbeSchedule(tuple(rounds), sum(map(len, rounds)) / total if total else 1.0)


def _num_paths(nodes: Sequence[str], on: Collection[str]) -> int:
    there = len(set(nodes).intersection(on))
    return there * (there - 1)


def _pairings(nodes: Sequence[str], most: int, rail: int) -> Iterator[Pairing]:
    if len(nodes) < 2:
        return
    if len(nodes) - 1 + len(nodes) % 2 <= most:
        yield from _tournament(nodes, _mixed(len(nodes), rail))
        return
    seen: set[frozenset[str]] = set()
    for pairing in itertools.islice(_sampled(nodes, rail), most):
        new = [pair for pair in pairing if frozenset(pair) not in seen]
        seen.update(map(frozenset, new))
        yield new


def _mixed(count: int, *numbers: int) -> list[int]:
    """A random permutation of positions that depends only on the count, not on node names."""
    return sorted(range(count), key=lambda location: _drawn(*map(str, (*numbers, location))))


def _tournament(nodes: Sequence[str], places: Sequence[int]) -> Iterator[Pairing]:
    """Pairs each node with each other once: one stays, the others rotate.

    With an odd number, one node pauses in each round. Each rail has its own order of positions, so
    the other pairs of a round differ between rails. A path that shares an uplink in one round may
    have it alone in the next, and only its worst rate counts.
    """
    circle: list[int | None] = [*places] if len(places) % 2 == 0 else [*places, None]
    half = len(circle) // 2
    for _ in range(len(circle) - 1):
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        there = [sorted((a, b)) for a, b in pairs if a is not None and b is not None]
        yield [(nodes[low], nodes[high]) for low, high in there]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def _sampled(nodes: Sequence[str], rail: int) -> Iterator[Pairing]:
    distance = 1
    while distance <= len(nodes) // 2:
        yield from _ring(nodes, distance)
        distance *= 2
    number = 0
    while True:
        drawn = [nodes[location] for location in _mixed(len(nodes), rail, number)]
        yield list(zip(drawn[0::2], drawn[1::2], strict=False))
        number += 1


def _ring(nodes: Sequence[str], distance: int) -> Iterator[Pairing]:
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


def _drawn(*words: str) -> int:
    return xxhash.xxh3_64_intdigest("\0".join(words).encode())
