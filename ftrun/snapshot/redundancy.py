"""Which bytes of which rank are safe by what: replicas, mirrors or parity.

Runs in:  the SMP of every node of a group. Pure: all of them make the same plan of the same
          manifests, and know it by its digest.
Takes in: the manifests of all nodes of the group, in its order.
Gives:    a `RedundancyPlan`; and, version by version, the digests by which nodes see that their
          replicas
          are replicas still.

Rule 1: a section that more than m nodes hold with equal content needs no byte on the network:
        whichever m nodes go, one that has it stays. Only what belongs to an optimizer counts;
        buffers and plain values are each rank's own, however equal they look.
Rule 2: what only some ranks have, up to a limit, is mirrored whole to the m next nodes, with all
        that is needed to rebuild the rest: header, digest table, and the plan itself.
Rule 3: all else is erasure-coded. A node's coded runs, rank after rank, are one row of bytes
        that is cut into blocks (`stripe_space.py`).
Rule 4: what has been found to differ once is coded as long as the generation lasts.

Source: natural replicas that need no parity are those of ARC; see docs/papers.md.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from functools import cached_property

import msgspec
import xxhash

from ftrun.snapshot.manifest import NodeManifest, RankManifest

MAX_BLOCK_BYTES = 1 << 20
_MIN_BLOCK_BYTES = 1 << 12
_MIN_BLOCKS = 20
"""Blocks of a node in each of its k places of a stripe: fewer would waste parity memory."""


class PieceRun(msgspec.Struct, frozen=True, array_like=True):
    """Neighbouring pieces of one rank."""

    first: int
    count: int


class ReplicatedPieces(msgspec.Struct, frozen=True, array_like=True):
    """Pieces of one rank that other nodes hold too.

    Args:
        holders: index into `RedundancyPlan.holders`.
        runs: which pieces.
    """

    holders: int
    runs: list[PieceRun]


class RankRedundancy(msgspec.Struct, frozen=True, array_like=True):
    """How each piece of one rank is safe."""

    rank: int
    mirrored: list[PieceRun]
    coded: list[PieceRun]
    replicated: list[ReplicatedPieces]


class NodeRedundancy(msgspec.Struct, frozen=True, array_like=True):
    """One node's part: its ranks, and how many bytes of them are mirrored and coded."""

    ranks: list[RankRedundancy]
    mirrored_bytes: int
    coded_bytes: int


class RedundancyPlan(msgspec.Struct, frozen=True, dict=True):
    """What is safe by what, for all nodes of a group.

    Args:
        parity: m.
        block_bytes: length of a block of a stripe.
        nodes: by place in the group.
        holders: sets of nodes, by place, that hold the same sections.
    """

    parity: int
    block_bytes: int
    nodes: list[NodeRedundancy]
    holders: list[list[int]]

    @cached_property
    def id(self) -> int:
        """Digest of the plan: equal on all nodes that made it of the same manifests."""
        return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(self))

    @property
    def coded_bytes(self) -> list[int]:
        return [node.coded_bytes for node in self.nodes]


class ReplicaSet(msgspec.Struct, frozen=True):
    """Sections that a set of ranks holds with equal content.

    Args:
        holders: (place, rank) of each.
        keys: of the sections, in order.
    """

    holders: tuple[tuple[int, int], ...]
    keys: tuple[int, ...]


Groups = tuple[ReplicaSet, ...]


def make_plan(
    manifests: Sequence[NodeManifest],
    *,
    parity: int,
    small_state_bytes: int,
    distrusted: Collection[int] = (),
) -> tuple[RedundancyPlan, Groups]:
    """The plan, and the replicas it relies on.

    Args:
        manifests: of one version, by place in the group; more than `parity` of them.
        parity: m; 1 or more.
        small_state_bytes: unique state of a rank up to so much is mirrored.
        distrusted: keys of sections that are coded whatever their content.
    """
    groups = _replicas(manifests, parity, frozenset(distrusted))
    sets: list[list[int]] = []
    homes: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    for group in groups:
        places = sorted({place for place, _ in group.holders})
        if places not in sets:
            sets.append(places)
        for holder in group.holders:
            homes[holder].update(dict.fromkeys(group.keys, sets.index(places)))
    nodes = [
        _node_plan([(rank, homes[place, rank.rank]) for rank in node.ranks], small_state_bytes)
        for place, node in enumerate(manifests)
    ]
    longest = max(node.coded_bytes for node in nodes)
    return RedundancyPlan(parity, block_bytes(longest, len(nodes) - parity), nodes, sets), groups


def block_bytes(longest_bytes: int, k: int) -> int:
    """Length of a block: shorter than 1 MiB where a node would have but few of them."""
    wanted = -(-longest_bytes // (_MIN_BLOCKS * k))
    rounded = -(-wanted // _MIN_BLOCK_BYTES) * _MIN_BLOCK_BYTES
    return min(MAX_BLOCK_BYTES, max(_MIN_BLOCK_BYTES, rounded))


def replica_digests(
    groups: Groups, place: int, manifests: NodeManifest
) -> list[list[tuple[int, int]]]:
    """What a node says of its replicas in a later version: (rank, digest), group by group.

    Args:
        groups: of the plan.
        place: the node's in the group.
        manifests: its own, of that version; of the same layouts as the plan's.
    """
    by_rank = {rank.rank: rank for rank in manifests.ranks}
    content = {
        rank: {section.key: at for at, section in enumerate(manifest.sections)}
        for rank, manifest in by_rank.items()
    }
    found = []
    for group in groups:
        told = []
        for holder, rank in group.holders:
            if holder == place:
                at = content[rank]
                digests = by_rank[rank].digests
                joined = b"".join(digests[8 * at[key] : 8 * at[key] + 8] for key in group.keys)
                told.append((rank, xxhash.xxh3_64_intdigest(joined)))
        found.append(told)
    return found


def differing(
    groups: Groups, told: Sequence[Sequence[Sequence[tuple[int, int]]]]
) -> set[tuple[int, int]]:
    """Whose replicas are not what most others have: (place, rank); all, where no content has most.

    Args:
        groups: of the plan.
        told: what each node has said, by place.
    """
    found: set[tuple[int, int]] = set()
    for at, group in enumerate(groups):
        said = [((place, r), digest) for place, node in enumerate(told) for r, digest in node[at]]
        count = Counter(digest for _, digest in said)
        right, times = count.most_common(1)[0]
        has_most = 2 * times > len(said)
        if len(count) > 1 or len(said) != len(group.holders):
            found |= {holder for holder, digest in said if digest != right or not has_most}
    return found


def changed_keys(groups: Groups, manifests: Sequence[NodeManifest]) -> set[int]:
    """Sections of a plan's replicas that are none in this version."""
    content: dict[tuple[int, int], dict[int, int]] = {
        (place, rank.rank): {s.key: rank.digest_of(at) for at, s in enumerate(rank.sections)}
        for place, node in enumerate(manifests)
        for rank in node.ranks
    }
    return {
        key
        for group in groups
        for key in group.keys
        if len({content.get(holder, {}).get(key) for holder in group.holders}) > 1
    }


def _replicas(manifests: Sequence[NodeManifest], parity: int, distrusted: frozenset[int]) -> Groups:
    holders: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for place, node in enumerate(manifests):
        for rank in node.ranks:
            for index, section in enumerate(rank.sections):
                if section.may_repeat and section.key not in distrusted:
                    holders[section.key, rank.digest_of(index)].append((place, rank.rank))
    grouped: dict[tuple[tuple[int, int], ...], list[int]] = defaultdict(list)
    for (key, _), held_by in holders.items():
        if len({place for place, _ in held_by}) > parity:
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
        fixed = sum(section.num_bytes for section in own if not section.may_repeat)
        is_all_small = sum(section.num_bytes for section in own) <= small_state_bytes
        mirrored = [
            section
            for section in own
            if is_all_small or (fixed <= small_state_bytes and not section.may_repeat)
        ]
        kept = {section.key for section in mirrored}
        coded = [section for section in own if section.key not in kept]
        mirrored_bytes += sum(section.num_bytes for section in mirrored)
        coded_bytes += sum(section.num_bytes for section in coded)
        replicated: dict[int, list[PieceRun]] = defaultdict(list)
        for section in manifest.sections:
            if section.key in homes:
                replicated[homes[section.key]].append(PieceRun(section.first, section.count))
        plans.append(
            RankRedundancy(
                rank=manifest.rank,
                mirrored=_joined([PieceRun(s.first, s.count) for s in mirrored]),
                coded=_joined([PieceRun(s.first, s.count) for s in coded]),
                replicated=[
                    ReplicatedPieces(at, _joined(runs)) for at, runs in sorted(replicated.items())
                ],
            )
        )
    return NodeRedundancy(plans, mirrored_bytes, coded_bytes)


def _joined(runs: Sequence[PieceRun]) -> list[PieceRun]:
    """Neighbours as one."""
    found: list[PieceRun] = []
    for run in runs:
        if found and found[-1].first + found[-1].count == run.first:
            found[-1] = PieceRun(found[-1].first, found[-1].count + run.count)
        else:
            found.append(run)
    return found
