"""Rows of each member; groups after equal versions; ranks whose checks differ."""

import pytest
import xxhash

from ftrun.errors import LayoutUnknown
from ftrun.ids import Rank, Version, version
from ftrun.snapshot.boxes import TensorPart, first_hole, whole
from ftrun.snapshot.layout import CopyTiming, Layout, LayoutEntry, make_layout
from ftrun.snapshot.replica_shares import (
    MEMBERS,
    MIN_AGREED,
    NUM_PHASES,
    ReplicaCheck,
    ReplicaContent,
    SealChecks,
    ShareAgreement,
    are_local,
    is_shareable,
    key_of,
    members_of,
    part_of,
    replica_content,
    shares_of,
    whole_key,
    written,
)


def entry(name: str, *shape: int, when: CopyTiming = CopyTiming.LAZY) -> LayoutEntry:
    return LayoutEntry(name, "F32", shape, when)


LARGE = [
    entry("wide", 3, 100_000),
    entry("tall", 100_001),
    entry("bias", 8),
    entry("mean", 70_000, when=CopyTiming.BOUNDARY),
    entry("row", 1, 1, 90_002),
    entry("deep", 2, 3, 40_000),
]


@pytest.mark.parametrize("num_members", [2, 4, 7])
def test_the_shares_of_all_members_are_the_whole_tensor(num_members: int) -> None:
    shares = shares_of(LARGE, num_members)
    for one in LARGE:
        boxes = [rows[one.name].of(one).box for rows in shares if one.name in rows]
        assert len(boxes) == (num_members if is_shareable(one) else 0)
        if boxes:
            assert first_hole(whole(one.shape), [box for box in boxes if box is not None]) is None
            assert sum(box.num_items for box in boxes if box is not None) == one.num_bytes // 4
    assert not {"bias", "mean"} & shares[0].keys()


def test_all_members_cut_alike_whatever_the_order_of_their_entries() -> None:
    assert shares_of(LARGE, 3) == shares_of(LARGE[::-1], 3)


def test_members_store_equally_many_bytes() -> None:
    entries = [entry(f"layer.{at}", 5, 50_000 + at) for at in range(40)]
    sizes = [
        sum(rows[one.name].of(one).num_bytes for one in entries) for rows in shares_of(entries, 4)
    ]
    assert max(sizes) < 1.05 * sum(sizes) / 4


def test_a_share_is_contiguous() -> None:
    for rows in shares_of(LARGE, 2):
        share = rows["row"].of(LARGE[4])
        assert share.part is not None
        assert (share.shape[:2], share.part.shape) == ((1, 1), (1, 1, 90_002))


def test_the_members_are_in_the_header_of_a_shard() -> None:
    members = (Rank(0), Rank(2), Rank(5))
    assert members_of(written(members)) == members
    assert members_of(written(())) == ()
    with pytest.raises(LayoutUnknown, match=r"ftrun\.members of a shard is '1,x'"):
        members_of({MEMBERS: "1,x"})


# --- agreement ---------------------------------------------------------------------------------


def content_of(layout: Layout, seed: int) -> ReplicaContent | None:
    digests = [xxhash.xxh3_64_intdigest(f"{seed} {p.offset}".encode()) for p in layout.pieces]
    table = memoryview(b"".join(one.to_bytes(8, "little") for one in digests)).cast("Q")
    return replica_content(layout, table)


def test_content_depends_on_the_bytes_of_shareable_entries_only() -> None:
    layout = make_layout(LARGE, plain_bytes=10)
    more = make_layout(
        [*LARGE, entry("extra", 80_000, when=CopyTiming.BOUNDARY)], plain_bytes=10**6
    )
    one, other = content_of(layout, 1), content_of(layout, 2)
    assert one is not None
    assert other is not None
    assert (one.key, one.digest) != (one.key, other.digest)
    found = content_of(more, 1)
    assert found is not None
    assert found.key == one.key


def test_shares_have_the_key_of_the_whole_tensors() -> None:
    shares = [
        rows[one.name].of(one) if one.name in rows else one
        for rows in shares_of(LARGE, 3)[1:2]
        for one in LARGE
    ]
    assert whole_key(shares) == key_of(LARGE) != 0


def test_parts_of_tensors_and_small_tensors_are_not_shared() -> None:
    part = LayoutEntry("part", "F32", (8,), CopyTiming.LAZY, part=TensorPart((16,), (0,)))
    assert content_of(make_layout([*LARGE, part], plain_bytes=10), 1) is None
    assert content_of(make_layout([entry("bias", 8)], plain_bytes=10), 1) is None
    assert key_of([entry("bias", 8)]) == 0


A, B, OTHER = ReplicaContent(1, 10), ReplicaContent(1, 11), ReplicaContent(2, 12)


def polled(*versions: list[ReplicaContent | None]) -> list[tuple[tuple[int, ...], ...]]:
    made = ShareAgreement()
    return [made.poll({Rank(at): one for at, one in enumerate(ranks)}) for ranks in versions]


def test_ranks_are_a_group_after_three_equal_versions() -> None:
    *before, last = polled(*[[A, A, B, None, B]] * MIN_AGREED)
    assert not any(before)
    assert last == ((0, 1), (2, 4))


def test_another_layout_or_another_group_restarts_the_count() -> None:
    assert not any(polled([A, A], [A, A], [OTHER, OTHER], [OTHER, OTHER]))
    assert not any(polled([A, A, B], [A, A, A], [A, A, B], [A, A, A]))


def test_versions_without_equal_ranks_settle_too() -> None:
    made = ShareAgreement()
    for _ in range(MIN_AGREED):
        assert not made.is_settled
        assert made.poll({Rank(0): A, Rank(1): B}) == ()
    assert made.is_settled


# --- seals -------------------------------------------------------------------------------------

AT = version(0, 7)


def differing(*checks: tuple[int, int] | None, at: Version = AT) -> set[Rank]:
    """Ranks with these phases and digests."""
    made = SealChecks()
    made.add(Rank(0), version(0, 6), ReplicaCheck([0, 1, 2], 1, 99))
    members = list(range(len(checks)))
    for rank, check in enumerate(checks):
        made.add(Rank(rank), AT, None if check is None else ReplicaCheck(members, *check))
    return made.differing(at)


def test_the_minority_differs() -> None:
    assert differing((1, 5), (1, 5), (1, 5)) == set()
    assert differing((1, 5), (1, 6), (1, 5)) == {1}
    assert differing((1, 5), (1, 6)) == {0, 1}


def test_a_member_with_whole_tensors_is_compared_too() -> None:
    made = SealChecks()
    made.add(Rank(0), AT, ReplicaCheck([0, 1], 3, 5))
    made.add(Rank(1), AT, ReplicaCheck([], 3, 6))
    made.add(Rank(2), AT, ReplicaCheck([], 3, 7))
    assert made.differing(AT) == {0, 1}


def test_only_equal_phases_of_one_version_are_compared() -> None:
    assert differing((1, 5), (2, 6), None) == set()
    assert differing((1, 5), (1, 6), at=version(0, 8)) == set()


def test_a_late_seal_of_an_older_version_removes_no_check() -> None:
    made = SealChecks()
    made.add(Rank(0), AT, ReplicaCheck([0, 1], 3, 5))
    made.add(Rank(1), version(0, 6), ReplicaCheck([0, 1], 2, 9))
    made.add(Rank(1), version(-1, 9), None)
    made.add(Rank(1), AT, ReplicaCheck([0, 1], 3, 6))
    assert made.differing(AT) == {0, 1}


@pytest.mark.parametrize(
    ("checks", "is_proven"),
    [
        ([None, None], True),
        ([([], 1), None], True),
        ([([0, 1], 1), ([0, 1], 1)], True),
        ([([0, 1], 1), ([], 1)], True),
        ([([0, 1], 1), None], False),
        ([([0, 1], 1), ([0, 1], 2)], False),
        ([([0, 1], -1), ([0, 1], -1)], False),
        ([([0, 1, 2], 1), ([0, 1], 1), ([0, 1], 1)], False),
        ([([0, 1, 2], 1), ([1, 0, 2], 1), ([], 1)], False),
        ([([0, 1], 1), ([0, 1], 1), ([2, 3], 9), ([2, 3], 9)], True),
        ([([0, 1], 1), ([0, 1], 1), ([2, 3], 9), ([], 17)], False),
    ],
)
def test_a_version_of_shares_is_proven_by_checks_of_one_part_of_all_members(
    checks: list[tuple[list[int], int] | None], is_proven: bool
) -> None:
    made = SealChecks()
    for rank, check in enumerate(checks):
        made.add(Rank(rank), AT, None if check is None else ReplicaCheck(*check, 5))
    assert made.is_proven(AT) == is_proven


def test_members_must_be_on_the_node() -> None:
    assert are_local([Rank(0), Rank(2)], [Rank(0), Rank(1), Rank(2)])
    assert not are_local([Rank(0), Rank(3)], [Rank(0), Rank(1), Rank(2)])
    assert not are_local([Rank(0)], [Rank(0)])


def test_a_part_is_named_by_its_phase_and_by_what_is_left_out() -> None:
    assert part_of(3, []) == 3
    assert part_of(3, ["a", "b"]) == part_of(3, ["b", "a"]) != part_of(4, ["a", "b"])
    assert part_of(3, ["a"]) >= NUM_PHASES
