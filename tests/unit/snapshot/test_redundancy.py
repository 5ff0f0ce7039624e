"""Every byte of any m lost nodes of a group is stored elsewhere."""

from collections.abc import Sequence
from itertools import combinations

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrun.errors import LayoutUnknown
from ftrun.snapshot.layout import CopyTiming, LayoutEntry, Piece, make_layout
from ftrun.snapshot.manifest import NodeManifest, RankManifest, content_digests, sections_of
from ftrun.snapshot.redundancy import (
    MAX_BLOCK_BYTES,
    NodeRedundancy,
    PieceRun,
    RankRedundancy,
    RedundancyPlan,
    StripeSpace,
    block_bytes,
    changed_keys,
    differing,
    make_plan,
    replica_digests,
)
from ftrun.snapshot.replica_shares import shares_of

BIG = 1 << 18
"""Items of an entry that is cut into pieces: 1 MiB of float32."""


def manifest(rank: int, contents: dict[str, str], *, fixed: int = 8) -> RankManifest:
    """One rank with a lazy entry for each name; equal contents are equal bytes."""
    entries = [LayoutEntry(name, "F32", (BIG,), CopyTiming.LAZY) for name in contents]
    entries.append(LayoutEntry("mean", "F64", (fixed,), CopyTiming.BOUNDARY))
    layout = make_layout(entries, plain_bytes=10, metadata={"rank": str(rank)})
    table = memoryview(bytearray(8 * len(layout.pieces))).cast("Q")
    places = sections_of(layout)
    names = {entry.offset: entry.name for entry in layout.entries}
    for position in places:
        name = names[position.offset]
        content = contents.get(name, f"{name} of {rank}")
        for index in range(position.section.first, position.section.first + position.section.count):
            table[index] = xxhash.xxh3_64_intdigest(f"{content} {index}".encode())
    return RankManifest(
        rank=rank,
        world_size=8,
        image_bytes=layout.image_bytes,
        num_pieces=len(layout.pieces),
        layout_id=rank,
        header_bytes=len(layout.header),
        header_digest=xxhash.xxh3_64_intdigest(layout.header),
        table_digest=1,
        sections=[position.section for position in places],
        digests=content_digests(places, table),
    )


def nodes_of(contents: Sequence[dict[str, str]], *, fixed: int = 8) -> list[NodeManifest]:
    """A node for each rank."""
    return [NodeManifest([manifest(at, one, fixed=fixed)]) for at, one in enumerate(contents)]


def pieces(plan: RankRedundancy, kind: str) -> set[int]:
    runs = {
        "mirrored": plan.mirrored,
        "coded": plan.coded,
        "replicated": [run for one in plan.replicated for run in one.runs],
    }[kind]
    return {index for run in runs for index in range(run.first, run.first + run.count)}


def check_covers(plan: RedundancyPlan, manifests: Sequence[NodeManifest], parity: int) -> None:
    """Every piece is protected in exactly one way, and replicas are where the plan says."""
    for position, (node, manifest_) in enumerate(zip(plan.nodes, manifests, strict=True)):
        for rank_plan, rank in zip(node.ranks, manifest_.ranks, strict=True):
            kinds = [pieces(rank_plan, kind) for kind in ("mirrored", "coded", "replicated")]
            assert set.union(*kinds) == set(range(rank.num_pieces))
            assert sum(map(len, kinds)) == rank.num_pieces
            for one in rank_plan.replicated:
                assert position in plan.holders[one.holders]
                assert len(plan.holders[one.holders]) > parity


contents = st.dictionaries(st.sampled_from("abc"), st.sampled_from("xyz"), max_size=3)


@settings(max_examples=60, deadline=None)
@given(st.lists(contents, min_size=2, max_size=6), st.data())
def test_every_byte_survives_any_m_losses(
    given_: list[dict[str, str]], data: st.DataObject
) -> None:
    parity = data.draw(st.integers(1, len(given_) - 1))
    limit = data.draw(st.sampled_from([0, 1 << 15, 1 << 22]))
    manifests = nodes_of(given_)
    plan, groups = make_plan(manifests, parity=parity, small_state_bytes=limit)
    check_covers(plan, manifests, parity)
    for lost in combinations(range(len(given_)), parity):
        for group in groups:
            left = {position for position, _ in group.holders} - set(lost)
            assert left, "a replica is lost with m nodes"
        for position in lost:
            mirrors = {(position + ahead) % len(given_) for ahead in range(1, parity + 1)}
            assert mirrors - set(lost), "a mirror is lost with m nodes"
    again, _ = make_plan(manifests, parity=parity, small_state_bytes=limit)
    assert again.id == plan.id


def node_of_replicas(node: int, *, is_shared: bool) -> NodeManifest:
    """Two ranks with an equal tensor that no other node has; each stores its rows, or all."""
    weight = LayoutEntry("weight", "F32", (BIG,), CopyTiming.LAZY)
    shares = [rows["weight"].of(weight) for rows in shares_of([weight], 2)]
    found = []
    for at, share in enumerate(shares):
        layout = make_layout([share if is_shared else weight], plain_bytes=10)
        table = memoryview(bytearray(8 * len(layout.pieces))).cast("Q")
        first = at * len(table) if is_shared else 0
        for index in range(len(table)):
            table[index] = xxhash.xxh3_64_intdigest(f"{node} {first + index}".encode())
        places = sections_of(layout)
        sections, digests = [one.section for one in places], content_digests(places, table)
        found.append(
            RankManifest(2 * node + at, 6, layout.image_bytes, len(table), 0, 0, 0, 0, sections,
                         digests)
        )  # fmt: skip
    return NodeManifest(found)


@pytest.mark.parametrize(("is_shared", "copies"), [(True, 1), (False, 2)])
def test_replicas_that_the_ranks_of_a_node_share_are_encoded_once(
    is_shared: bool, copies: int
) -> None:
    manifests = [node_of_replicas(node, is_shared=is_shared) for node in range(3)]
    plan, groups = make_plan(manifests, parity=1, small_state_bytes=1 << 16)
    assert groups == ()
    assert plan.coded_bytes == [copies * 4 * BIG] * 3


def test_equal_state_of_more_than_m_nodes_costs_nothing() -> None:
    manifests = nodes_of([{"a": "x"}] * 4)
    plan, groups = make_plan(manifests, parity=2, small_state_bytes=1 << 20)
    assert plan.coded_bytes == [0, 0, 0, 0]
    assert plan.holders == [[0, 1, 2, 3]]
    assert [len(group.holders) for group in groups] == [4]
    assert all(node.mirrored_bytes < 1 << 16 for node in plan.nodes)


def test_equal_state_of_m_nodes_is_encoded() -> None:
    manifests = nodes_of([{"a": "x"}, {"a": "x"}, {"a": "y"}, {"a": "z"}])
    plan, groups = make_plan(manifests, parity=2, small_state_bytes=1 << 16)
    assert plan.coded_bytes == [4 * BIG] * 4
    assert groups == ()


def test_two_sets_of_replicas_stay_apart() -> None:
    manifests = nodes_of([{"a": "x"}, {"a": "y"}, {"a": "x"}, {"a": "y"}])
    plan, _ = make_plan(manifests, parity=1, small_state_bytes=1 << 16)
    assert sorted(plan.holders) == [[0, 2], [1, 3]]
    assert plan.coded_bytes == [0] * 4


def test_ranks_of_a_node_may_be_in_different_sets() -> None:
    manifests = [
        NodeManifest([manifest(2 * at, {"a": "x"}), manifest(2 * at + 1, {"a": "y"})])
        for at in range(3)
    ]
    plan, groups = make_plan(manifests, parity=1, small_state_bytes=1 << 16)
    assert plan.holders == [[0, 1, 2]]
    assert [group.holders for group in groups] == [
        ((0, 0), (1, 2), (2, 4)),
        ((0, 1), (1, 3), (2, 5)),
    ]
    check_covers(plan, manifests, 1)


def test_what_no_optimizer_owns_never_counts_as_a_replica() -> None:
    entries = [LayoutEntry("running_mean", "F32", (BIG,), CopyTiming.BOUNDARY)]
    layout = make_layout(entries, plain_bytes=10)
    assert not any(position.section.may_repeat for position in sections_of(layout))


@pytest.mark.parametrize(
    ("limit", "mirrored", "coded"),
    [(1 << 23, True, False), (1 << 16, False, True), (0, False, True)],
)
def test_unique_state_is_mirrored_up_to_a_limit(limit: int, mirrored: bool, coded: bool) -> None:
    manifests = nodes_of([{"a": "x"}, {"a": "y"}, {"a": "z"}])
    plan, _ = make_plan(manifests, parity=1, small_state_bytes=limit)
    for node in plan.nodes:
        assert (node.mirrored_bytes > 4 * BIG) is mirrored
        assert (node.coded_bytes > 0) is coded


def test_fixed_state_over_the_limit_is_encoded_too() -> None:
    manifests = nodes_of([{"a": "x"}, {"a": "y"}, {"a": "z"}], fixed=1 << 18)
    plan, _ = make_plan(manifests, parity=1, small_state_bytes=1 << 20)
    assert [node.mirrored_bytes for node in plan.nodes] == [0, 0, 0]
    assert all(node.coded_bytes > 4 * BIG + (1 << 21) for node in plan.nodes)


def test_distrusted_sections_are_encoded_however_equal() -> None:
    manifests = nodes_of([{"a": "x", "b": "x"}] * 3)
    key = next(s.key for s in manifests[0].ranks[0].sections if s.may_repeat)
    plan, _ = make_plan(manifests, parity=1, small_state_bytes=1 << 16, distrusted={key})
    assert plan.coded_bytes == [4 * BIG] * 3


def test_replicas_are_compared_by_one_digest_a_set() -> None:
    manifests = nodes_of([{"a": "x", "b": "y"}] * 3)
    _, groups = make_plan(manifests, parity=1, small_state_bytes=1 << 16)
    later = nodes_of([{"a": "x2", "b": "y2"}] * 3)
    reported = [replica_digests(groups, position, node) for position, node in enumerate(later)]
    assert [len(one) for one in reported] == [1, 1, 1]
    assert differing(groups, reported) == set()
    later[2] = nodes_of([{}, {}, {"a": "x2", "b": "other"}])[2]
    reported[2] = replica_digests(groups, 2, later[2])
    assert differing(groups, reported) == {(2, 2)}
    changed = changed_keys(groups, later)
    assert len(changed) == 1
    plan, _ = make_plan(later, parity=1, small_state_bytes=1 << 16, distrusted=changed)
    assert plan.coded_bytes == [4 * BIG] * 3


def test_of_two_that_differ_none_is_right() -> None:
    manifests = nodes_of([{"a": "x"}, {"a": "x"}])
    _, groups = make_plan(manifests, parity=1, small_state_bytes=1 << 16)
    later = nodes_of([{"a": "x"}, {"a": "y"}])
    reported = [replica_digests(groups, position, node) for position, node in enumerate(later)]
    assert differing(groups, reported) == {(0, 0), (1, 1)}


@given(st.integers(0, 1 << 40), st.integers(1, 30))
def test_blocks_waste_at_most_a_twentieth(longest: int, k: int) -> None:
    size = block_bytes(longest, k)
    assert size % 4096 == 0
    assert 4096 <= size <= MAX_BLOCK_BYTES
    blocks = -(-longest // size)
    turns = -(-blocks // k)
    assert turns * k * size <= longest * 1.05 + k * 8192


sizes = st.lists(st.integers(1, 50), min_size=1, max_size=12)


def pieces_of(lengths: list[int]) -> list[Piece]:
    found, at = [], 0
    for length in lengths:
        found.append(Piece(at, length))
        at += length
    return found


def space_of(
    ranks: dict[int, tuple[list[Piece], list[PieceRun]]], block_bytes: int
) -> tuple[StripeSpace, bytes, dict[int, bytes]]:
    """The space, its expected bytes, and each rank's data."""
    data = {
        rank: bytes((rank * 7 + at) % 251 for at in range(sum(p.num_bytes for p in pieces)))
        for rank, (pieces, _) in ranks.items()
    }
    row = b"".join(
        data[rank][pieces[at].offset : pieces[at].offset + pieces[at].num_bytes]
        for rank, (pieces, runs) in ranks.items()
        for run in runs
        for at in range(run.first, run.first + run.count)
    )
    plan = NodeRedundancy(
        [RankRedundancy(rank, [], runs, []) for rank, (_, runs) in ranks.items()], 0, len(row)
    )
    space = StripeSpace(plan, {rank: pieces for rank, (pieces, _) in ranks.items()}, block_bytes)
    return space, row, data


@st.composite
def a_rank(draw: st.DrawFn) -> tuple[list[Piece], list[PieceRun]]:
    pieces = pieces_of(draw(sizes))
    coded = draw(st.lists(st.booleans(), min_size=len(pieces), max_size=len(pieces)))
    runs: list[PieceRun] = []
    for at, is_coded in enumerate(coded):
        if is_coded and at and coded[at - 1]:
            runs[-1] = PieceRun(runs[-1].first, runs[-1].count + 1)
        elif is_coded:
            runs.append(PieceRun(at, 1))
    return pieces, runs


@settings(max_examples=200)
@given(st.lists(a_rank(), min_size=1, max_size=3), st.integers(1, 64))
def test_blocks_are_the_row_cut_up(
    given_: list[tuple[list[Piece], list[PieceRun]]], block_bytes: int
) -> None:
    ranks = dict(enumerate(given_))
    space, row, data = space_of(ranks, block_bytes)
    assert space.num_bytes == len(row)
    whole = b""
    for block in range(space.num_blocks):
        extents = space.extents(block)
        part = b"".join(data[e.rank][e.offset : e.offset + e.num_bytes] for e in extents)
        assert len(part) == min(block_bytes, len(row) - len(whole))
        touched = set(space.pieces_in(block))
        for rank, index in touched:
            assert block in space.blocks_with(rank, index)
            assert block in space.blocks_of(rank)
        assert {e.rank for e in extents} == {rank for rank, _ in touched}
        whole += part
    assert whole == row
    for rank, (pieces, runs) in ranks.items():
        coded = {at for run in runs for at in range(run.first, run.first + run.count)}
        for index in range(len(pieces)):
            assert bool(space.blocks_with(rank, index)) == (index in coded)


def test_a_run_without_bytes_is_passed_over() -> None:
    runs = [PieceRun(0, 1), PieceRun(1, 1), PieceRun(2, 1)]
    space, row, data = space_of({0: (pieces_of([10, 0, 6]), runs)}, 12)
    parts = [space.extents(block) for block in range(space.num_blocks)]
    assert [[(e.offset, e.num_bytes) for e in part] for part in parts] == [
        [(0, 10), (10, 2)],
        [(12, 4)],
    ]
    assert row == data[0]


def test_a_plan_of_another_layout_is_refused() -> None:
    plan = NodeRedundancy([RankRedundancy(0, [], [PieceRun(0, 3)], [])], 0, 30)
    with pytest.raises(LayoutUnknown):
        StripeSpace(plan, {0: pieces_of([10, 10])}, 16)
    with pytest.raises(LayoutUnknown):
        StripeSpace(plan, {0: pieces_of([10, 10, 11])}, 16)
    with pytest.raises(LayoutUnknown):
        StripeSpace(plan, {}, 16)


def lost_sets(count: int) -> list[set[int]]:
    """Every set of nodes of a ring of which no two are neighbours."""
    every = [set(one) for size in range(1, count) for one in combinations(range(count), size)]
    return [one for one in every if not any((at + 1) % count in one for at in one)]


@settings(max_examples=60, deadline=None)
@given(st.lists(contents, min_size=2, max_size=6), st.sampled_from([0, 1 << 15, 1 << 22]))
def test_in_a_ring_every_byte_survives_losses_that_are_not_neighbours(
    given_: list[dict[str, str]], limit: int
) -> None:
    manifests, count = nodes_of(given_), len(given_)
    plan, groups = make_plan(manifests, parity=1, small_state_bytes=limit, is_ring=True)
    check_covers(plan, manifests, 1)
    for lost in lost_sets(count):
        for group in groups:
            left = {position for position, _ in group.holders} - lost
            assert left, "a replica is lost with nodes that are no neighbours"
        assert all((position + 1) % count not in lost for position in lost)
    assert plan.block_bytes == block_bytes(max(plan.coded_bytes), 1)


def test_in_a_ring_nodes_that_are_no_neighbours_hold_no_replica() -> None:
    manifests = nodes_of([{"a": "x"}, {"a": "y"}, {"a": "x"}, {"a": "z"}])
    _, groups = make_plan(manifests, parity=1, small_state_bytes=1 << 16)
    assert [position for position, _ in groups[0].holders] == [0, 2]
    _, groups = make_plan(manifests, parity=1, small_state_bytes=1 << 16, is_ring=True)
    assert groups == ()
    beside = nodes_of([{"a": "x"}, {"a": "y"}, {"a": "z"}, {"a": "x"}])
    _, groups = make_plan(beside, parity=1, small_state_bytes=1 << 16, is_ring=True)
    assert [position for position, _ in groups[0].holders] == [0, 3]
