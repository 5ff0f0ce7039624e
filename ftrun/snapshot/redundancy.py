"""Plans which bytes of which rank are safe by replicas, by mirrors or by parity.

Runs in:  the SMP of every node of a group. Pure: all of them make the same plan from the same
          manifests, and identify it by its digest.
Takes in: the manifests of all nodes of the group, in group order.
Gives:    a `RedundancyPlan`; and, for each version, the digests by which nodes check that their
          replicas are still equal.

Rule 1: a section that more than m nodes hold with equal content needs no byte on the network,
        because at least one holder survives the loss of any m nodes. Only sections of optimizers
        count. Buffers and plain values are each rank's own, even if they are equal.
Rule 2: the unique state of a rank, up to a limit, is mirrored whole to the next m nodes. The mirror
        includes what a rebuild of the rest needs: header, digest table, and the plan.
Rule 3: everything else is erasure-coded. A node's coded runs, rank after rank, form one row of
        bytes that is cut into blocks (`StripeSpace`).
Rule 4: a section that has differed once is coded for the rest of the generation.
Rule 5: in a ring (parity 1, each node has a copy of the state of the node before it), a section
        counts as a replica only if two neighbours hold it. It then survives each loss of nodes
        that the copies survive.

Source: natural replicas that need no parity are from ARC; see docs/papers.md.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import xxhash

from ftrun.errors import LayoutUnknown
from ftrun.snapshot.layout import Piece
from ftrun.snapshot.manifest import NodeManifest, RankManifest, Section
from ftrun.snapshot.replica_shares import minority

MAX_BLOCK_BYTES = 1 << 20
_MIN_BLOCK_BYTES = 1 << 12
_MIN_BLOCKS = 20
"""Blocks of a node in each of its k positions of a stripe; fewer would waste parity memory."""


class PieceRun(msgspec.Struct, frozen=True, array_like=True):
    """Neighbouring pieces of one rank."""

    first: int
    count: int


class ReplicatedPieces(msgspec.Struct, frozen=True, array_like=True):
    """Pieces of one rank that other nodes hold too; `holders` indexes `RedundancyPlan.holders`."""

    holders: int
    runs: list[PieceRun]


class RankRedundancy(msgspec.Struct, frozen=True, array_like=True):
    """How each piece of one rank is protected."""

    rank: int
    mirrored: list[PieceRun]
    coded: list[PieceRun]
    replicated: list[ReplicatedPieces]


class NodeRedundancy(msgspec.Struct, frozen=True, array_like=True):
    """One node's ranks, and the number of their mirrored and coded bytes."""

    ranks: list[RankRedundancy]
    mirrored_bytes: int
    coded_bytes: int


class RedundancyPlan(msgspec.Struct, frozen=True, dict=True):
    """The protection of all nodes of a group, by position in it.

    Args:
        holders: sets of nodes, by position, that hold the same sections.
    """

    parity: int
    block_bytes: int
    nodes: list[NodeRedundancy]
    holders: list[list[int]]

    @cached_property
    def id(self) -> int:
        """Digest of the plan: equal on all nodes that made it from the same manifests."""
        return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(self))

    @property
    def coded_bytes(self) -> list[int]:
        return [node.coded_bytes for node in self.nodes]


class ReplicaSet(msgspec.Struct, frozen=True):
    """Sections that a set of ranks holds with equal content; holders are (position, rank)."""

    holders: tuple[tuple[int, int], ...]
    keys: tuple[int, ...]


Groups = tuple[ReplicaSet, ...]


def make_plan(
    manifests: Sequence[NodeManifest],
    *,
    parity: int,
    small_state_bytes: int,
    distrusted: Collection[int] = (),
    is_ring: bool = False,
) -> tuple[RedundancyPlan, Groups]:
    """The plan, and the replicas that it relies on.

    Args:
        manifests: of one version, by position in the group; more than `parity` of them.
        small_state_bytes: largest unique state of a rank that is mirrored.
        distrusted: keys of sections that are coded whatever their content.
        is_ring: the nodes are a ring (rule 5).
    """
    count = len(manifests)

    def are_enough(places: Collection[int]) -> bool:
        if is_ring:
            return any((one + 1) % count in places for one in places)
        return len(places) > parity

    groups = _replicas(manifests, are_enough, frozenset(distrusted))
    sets: list[list[int]] = []
    homes: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    for group in groups:
        places = sorted({position for position, _ in group.holders})
        if places not in sets:
            sets.append(places)
        for holder in group.holders:
            homes[holder].update(dict.fromkeys(group.keys, sets.index(places)))
    nodes = [
        _node_plan([(rank, homes[position, rank.rank]) for rank in node.ranks], small_state_bytes)
        for position, node in enumerate(manifests)
    ]
    longest = max(node.coded_bytes for node in nodes)
    k = 1 if is_ring else count - parity
    return RedundancyPlan(parity, block_bytes(longest, k), nodes, sets), groups


def block_bytes(longest_bytes: int, k: int) -> int:
    """Length of a block: below 1 MiB if a node would otherwise have only a few blocks."""
    wanted = -(-longest_bytes // (_MIN_BLOCKS * k))
    rounded = -(-wanted // _MIN_BLOCK_BYTES) * _MIN_BLOCK_BYTES
    return min(MAX_BLOCK_BYTES, max(_MIN_BLOCK_BYTES, rounded))


def replica_digests(
    groups: Groups, position: int, manifests: NodeManifest
) -> list[list[tuple[int, int]]]:
    """A node's (rank, digest) of its replicas in a later version, for each replica set."""
    content = {rank.rank: rank.content() for rank in manifests.ranks}
    found = []
    for group in groups:
        reported = []
        for holder, rank in group.holders:
            if holder == position:
                digests = (content[rank][key] for key in group.keys)
                joined = b"".join(digest.to_bytes(8, "little") for digest in digests)
                reported.append((rank, xxhash.xxh3_64_intdigest(joined)))
        found.append(reported)
    return found


def differing(
    groups: Groups, reported: Sequence[Sequence[Sequence[tuple[int, int]]]]
) -> set[tuple[int, int]]:
    """(position, rank) of replicas that differ from the majority; all if there is no majority."""
    found: set[tuple[int, int]] = set()
    for at in range(len(groups)):
        nodes = enumerate(reported)
        found |= minority({(place, r): digest for place, node in nodes for r, digest in node[at]})
    return found


def changed_keys(groups: Groups, manifests: Sequence[NodeManifest]) -> set[int]:
    """Replicated sections of a plan whose holders are not equal in this version."""
    content = {
        (position, rank.rank): rank.content()
        for position, node in enumerate(manifests)
        for rank in node.ranks
    }
    return {
        key
        for group in groups
        for key in group.keys
        if len({content.get(holder, {}).get(key) for holder in group.holders}) > 1
    }


def _replicas(
    manifests: Sequence[NodeManifest],
    are_enough: Callable[[Collection[int]], bool],
    distrusted: frozenset[int],
) -> Groups:
    holders: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for position, node in enumerate(manifests):
        for rank in node.ranks:
            for index, section in enumerate(rank.sections):
                if section.may_repeat and section.key not in distrusted:
                    holders[section.key, rank.digest_of(index)].append((position, rank.rank))
    grouped: dict[tuple[tuple[int, int], ...], list[int]] = defaultdict(list)
    for (key, _), held_by in holders.items():
        if are_enough({position for position, _ in held_by}):
            grouped[tuple(sorted(held_by))].append(key)
    return tuple(
        ReplicaSet(held_by, tuple(sorted(keys))) for held_by, keys in sorted(grouped.items())
    )


def _node_plan(
    ranks: Sequence[tuple[RankManifest, dict[int, int]]], small_state_bytes: int
) -> NodeRedundancy:
    plans = []
    mirrored_bytes = coded_bytes = 0
    for manifest, homes in ranks:
        own = [section for section in manifest.sections if section.key not in homes]
        fixed = [section for section in own if not section.may_repeat]
        mirrored: list[Section] = []
        if _num_bytes(own) <= small_state_bytes:
            mirrored = own
        elif _num_bytes(fixed) <= small_state_bytes:
            mirrored = fixed
        kept = {section.key for section in mirrored}
        coded = [section for section in own if section.key not in kept]
        mirrored_bytes += _num_bytes(mirrored)
        coded_bytes += _num_bytes(coded)
        replicated: dict[int, list[Section]] = defaultdict(list)
        for section in manifest.sections:
            if section.key in homes:
                replicated[homes[section.key]].append(section)
        pieces = [ReplicatedPieces(at, _runs(some)) for at, some in sorted(replicated.items())]
        plans.append(RankRedundancy(manifest.rank, _runs(mirrored), _runs(coded), pieces))
    return NodeRedundancy(plans, mirrored_bytes, coded_bytes)


def _runs(sections: Iterable[Section]) -> list[PieceRun]:
    """The pieces of sections in order; neighbours form one run."""
    found: list[PieceRun] = []
    for one in sections:
        if found and found[-1].first + found[-1].count == one.first:
            found[-1] = PieceRun(found[-1].first, found[-1].count + one.count)
        else:
            found.append(PieceRun(one.first, one.count))
    return found


def _num_bytes(sections: Iterable[Section]) -> int:
    return sum(section.num_bytes for section in sections)


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of one rank's image; `offset` counts from the start of its data."""

    rank: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Neighbouring coded pieces of one rank, and their start in the row."""

    start: int
    rank: int
    first: int
    count: int
    offset: int
    num_bytes: int


class StripeSpace:
    """The row of a node's coded bytes. Raises LayoutUnknown if plan and layouts do not match."""

    def __init__(
        self, plan: NodeRedundancy, pieces: Mapping[int, Sequence[Piece]], block_bytes: int
    ) -> None:
        self.block_bytes = block_bytes
        self._pieces = pieces
        self._stretches: list[_Stretch] = []
        start = 0
        for rank in plan.ranks:
            for run in rank.coded:
                stretch = self._stretch(start, rank.rank, run)
                self._stretches.append(stretch)
                start += stretch.num_bytes
        self.num_bytes = start
        self._starts = [stretch.start for stretch in self._stretches]
        if start != plan.coded_bytes:
            raise LayoutUnknown(f"{start} bytes are coded, but the plan has {plan.coded_bytes}")

    @property
    def num_blocks(self) -> int:
        return -(-self.num_bytes // self.block_bytes)

    def extents(self, block: int) -> list[Extent]:
        return [Extent(s.rank, s.offset + at - s.start, size) for s, at, size in self._parts(block)]

    def pieces_in(self, block: int) -> list[tuple[int, int]]:
        """(rank, piece) of each piece that has bytes in a block."""
        found = []
        for stretch, at, size in self._parts(block):
            begin = stretch.offset + at - stretch.start
            pieces = self._pieces[stretch.rank]
            first, end = stretch.first, stretch.first + stretch.count
            index = bisect_right(pieces, begin, first + 1, end, key=lambda one: one.offset) - 1
            while index < end and pieces[index].offset < begin + size:
                found.append((stretch.rank, index))
                index += 1
        return found

    def blocks_of(self, rank: int) -> list[int]:
        found: set[int] = set()
        for stretch in self._stretches:
            if stretch.rank == rank and stretch.num_bytes:
                last = stretch.start + stretch.num_bytes - 1
                found.update(range(stretch.start // self.block_bytes, last // self.block_bytes + 1))
        return sorted(found)

    def blocks_with(self, rank: int, piece: int) -> list[int]:
        """The blocks with bytes of one piece; empty if it is not coded."""
        for stretch in self._stretches:
            if stretch.rank == rank and 0 <= piece - stretch.first < stretch.count:
                found = self._pieces[rank][piece]
                start = stretch.start + found.offset - stretch.offset
                last = start + max(found.num_bytes, 1) - 1
                return list(range(start // self.block_bytes, last // self.block_bytes + 1))
        return []

    def _stretch(self, start: int, rank: int, run: PieceRun) -> _Stretch:
        pieces = self._pieces.get(rank, ())
        if not 0 < run.count <= len(pieces) - run.first:
            raise LayoutUnknown(f"rank {rank} has {len(pieces)} pieces, but the plan has {run}")
        offset = pieces[run.first].offset
        last = pieces[run.first + run.count - 1]
        size = last.offset + last.num_bytes - offset
        return _Stretch(start, rank, run.first, run.count, offset, size)

    def _parts(self, block: int) -> Iterable[tuple[_Stretch, int, int]]:
        """Stretches of a block: stretch, offset in the row, number of bytes."""
        at = block * self.block_bytes
        end = min(at + self.block_bytes, self.num_bytes)
        index = bisect_right(self._starts, at) - 1
        while at < end:
            stretch = self._stretches[index]
            size = min(end, stretch.start + stretch.num_bytes) - at
            if size > 0:
                yield stretch, at, size
                at += size
            index += 1
