"""Bytes that several ranks hold are in the file of one of them, in equal numbers of bytes."""

from collections import Counter

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ftrun.snapshot.layout import CopyTiming, Layout, LayoutEntry, make_layout
from ftrun.snapshot.write_shares import (
    LEAST_BYTES,
    MOST_WRITERS,
    BorrowedBytes,
    FileExtent,
    OfferedSection,
    RankOffer,
    borrowed_bytes,
    hold_equal,
    located,
    offer_of,
    own_ranges,
)

CUT = 10
"""Bytes of a piece."""


def content_of(section: OfferedSection) -> list[tuple[int, int, int]]:
    """The bytes of a section, which its key and digest determine."""
    return [(section.key, section.digest, at) for at in range(section.num_bytes)]


def image_of(offer: RankOffer) -> list[object]:
    """The bytes of an image; those outside of sections are of its own."""
    found: list[object] = [(offer.rank, at) for at in range(offer.image_bytes)]
    for section in offer.sections:
        found[section.first : section.first + section.num_bytes] = content_of(section)
    return found


@st.composite
def worlds(draw: st.DrawFn) -> list[RankOffer]:
    """Ranks that hold some of a few sections, each behind bytes of its own."""
    sizes = draw(st.lists(st.integers(1, 60), min_size=1, max_size=5))
    packed = draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    found = []
    for rank in range(draw(st.integers(1, 5))):
        sections, at = [], draw(st.integers(0, 30))
        for key, size in enumerate(sizes):
            if draw(st.booleans()):
                digest = draw(st.integers(0, 1))
                cut = size if packed[key] else CUT
                sections.append(OfferedSection(key, digest, at, size, cut))
                at += size + draw(st.integers(0, 3))
        found.append(RankOffer(rank, at + 1, f"table {rank}", sections))
    return found


@given(worlds())
def test_every_byte_is_in_one_file_and_every_image_is_whole(offers: list[RankOffer]) -> None:
    images = {offer.rank: image_of(offer) for offer in offers}
    borrowed = borrowed_bytes(offers, images.keys())
    assert hold_equal(offers) == any(borrowed.values())
    written: Counter[object] = Counter()
    own: dict[int, set[int]] = {}
    for rank, image in images.items():
        ranges = own_ranges(len(image), borrowed[rank])
        own[rank] = {at for first, size in ranges for at in range(first, first + size)}
        written.update(image[at] for at in own[rank])
    assert set(written.values()) == {1}
    assert set(written) == {one for image in images.values() for one in image}
    for rank, image in images.items():
        assert own[rank].isdisjoint(range_of for one in borrowed[rank] for range_of in span(one))
        for one in borrowed[rank]:
            assert one.table_digest == f"table {one.rank}"
            lent = range(one.at, one.at + one.num_bytes)
            assert own[one.rank].issuperset(lent)
            assert [images[one.rank][at] for at in lent] == [image[at] for at in span(one)]
        assert len(own[rank]) + sum(one.num_bytes for one in borrowed[rank]) == len(image)


def span(one: BorrowedBytes) -> range:
    return range(one.first, one.first + one.num_bytes)


@given(worlds())
def test_sections_are_cut_at_the_borders_of_their_pieces(offers: list[RankOffer]) -> None:
    borrowed = borrowed_bytes(offers, [offer.rank for offer in offers])
    for offer in offers:
        borders = set()
        for section in offer.sections:
            end = section.first + section.num_bytes
            borders.update({*range(section.first, end, section.cut_bytes), end})
        for one in borrowed[offer.rank]:
            assert {one.first, one.first + one.num_bytes} <= borders


def test_only_the_ranks_that_are_asked_for_are_returned() -> None:
    offers = replicas([0, 0, 0])
    whole = borrowed_bytes(offers, [0, 1, 2])
    assert borrowed_bytes(offers, [1]) == {1: whole[1]}
    assert borrowed_bytes(offers[::-1], [0, 1, 2]) == whole, "the order of the offers is the same"


def replicas(own_bytes: list[int], shared_bytes: int = 9_990) -> list[RankOffer]:
    """Ranks that share one section, next to bytes of their own."""
    return [
        RankOffer(rank, own + shared_bytes, "", [OfferedSection(1, 2, own, shared_bytes, CUT)])
        for rank, own in enumerate(own_bytes)
    ]


@pytest.mark.parametrize("own_bytes", [[0] * 64, [0, 500, 1000], [5, 3000, 70, 300], [9, 8]])
def test_uneven_shards_end_as_files_of_equal_size(own_bytes: list[int]) -> None:
    offers = replicas(own_bytes)
    sizes = sizes_of(offers)
    assert sum(sizes) == sum(own_bytes) + 9_990
    assert max(sizes) - min(sizes) <= 2 * CUT


def test_a_large_group_has_few_writers_on_all_nodes() -> None:
    """512 ranks with 8 a node: 64 nodes write, and the index has few extents of each rank."""
    borrowed = borrowed_bytes(replicas([0] * 512, 512 * CUT), range(512))
    writers = {one.rank for some in borrowed.values() for one in some}
    assert len(writers) == MOST_WRITERS
    assert {rank // 8 for rank in writers} == set(range(64))
    assert max(map(len, borrowed.values())) == MOST_WRITERS
    assert min(map(len, borrowed.values())) == MOST_WRITERS - 1


def test_the_writers_of_a_large_group_have_the_smallest_loads() -> None:
    """Differences below the size of a part do not matter: else neighbours would write all."""
    own = [1 << 28 if rank < 256 else rank for rank in range(512)]
    borrowed = borrowed_bytes(replicas(own, 512_000 * CUT), range(512))
    writers = {one.rank for some in borrowed.values() for one in some}
    assert len(writers) == MOST_WRITERS
    assert {rank // 4 for rank in writers} == set(range(64, 128))


def test_a_rank_with_more_bytes_of_its_own_than_the_mean_writes_nothing_else() -> None:
    sizes = sizes_of(replicas([50_000, 0, 10]))
    assert sizes[0] == 50_000
    assert abs(sizes[1] - sizes[2]) <= 2 * CUT


def test_groups_of_different_ranks_are_balanced_together() -> None:
    """Two pairs of ranks have replicas of their own, and all four have one in common."""
    offers = [
        RankOffer(
            rank,
            6_000,
            "",
            [OfferedSection(1, rank // 2, 0, 2_000, CUT), OfferedSection(2, 0, 2_000, 4_000, CUT)],
        )
        for rank in range(4)
    ]
    sizes = sizes_of(offers)
    assert sum(sizes) == 2 * 2_000 + 4_000
    assert max(sizes) <= 1.05 * sum(sizes) / 4


def sizes_of(offers: list[RankOffer]) -> list[int]:
    borrowed = borrowed_bytes(offers, [offer.rank for offer in offers])
    return [
        sum(size for _, size in own_ranges(offer.image_bytes, borrowed[offer.rank]))
        for offer in offers
    ]


def test_two_equal_sections_of_one_rank_stay_its_own() -> None:
    """Their keys do not tell them apart, so no file could be named for each."""
    twice = [OfferedSection(1, 2, 0, 100, CUT), OfferedSection(1, 2, 100, 100, CUT)]
    offers = [RankOffer(0, 200, "", twice), RankOffer(1, 100, "", twice[:1])]
    assert borrowed_bytes(offers, [0, 1]) == {0: [], 1: []}


def test_an_image_is_found_in_the_files_that_have_it() -> None:
    extents = [FileExtent(0, 10, "a", 0), FileExtent(10, 5, "b", 100), FileExtent(15, 5, "a", 10)]
    assert list(located(extents, 8, 9)) == [
        FileExtent(8, 2, "a", 8), FileExtent(10, 5, "b", 100), FileExtent(15, 2, "a", 10)
    ]  # fmt: skip
    assert list(located(extents, 12, 1)) == [FileExtent(12, 1, "b", 102)]
    assert list(located(extents, 20, 0)) == []


@pytest.mark.parametrize(("first", "num_bytes"), [(19, 2), (25, 1), (8, 4), (0, 1)])
def test_bytes_that_no_file_has_are_an_error(first: int, num_bytes: int) -> None:
    extents = [FileExtent(1, 8, "a", 0), FileExtent(11, 9, "a", 8)]
    with pytest.raises(ValueError, match="in no file"):
        list(located(extents, first, num_bytes))
    with pytest.raises(ValueError, match="in no file"):
        list(located([], first, num_bytes))


def layout() -> Layout:
    return make_layout(
        [
            LayoutEntry("weight", "F32", (300_000,), CopyTiming.LAZY),
            LayoutEntry("mean", "F32", (40_000,), CopyTiming.BOUNDARY),
            LayoutEntry("small", "F32", (10,), CopyTiming.LAZY),
        ],
        plain_bytes=1 << 20,
    )


def test_a_rank_offers_what_is_large_and_not_its_plain_values() -> None:
    made = layout()
    start = len(made.header)
    table = memoryview(bytearray(8 * len(made.pieces))).cast("Q")
    offer = offer_of(3, made, start, table, "digest of the table")
    assert (offer.rank, offer.image_bytes) == (3, made.image_bytes)
    assert offer.table_digest == "digest of the table"
    entries = {entry.name: entry for entry in made.entries}
    assert [(one.first, one.num_bytes, one.cut_bytes) for one in offer.sections] == [
        (start + entries["mean"].offset, 160_000, 160_000),
        (start + entries["weight"].offset, 1_200_000, made.piece_bytes),
    ]
    assert entries["small"].num_bytes < LEAST_BYTES


def test_equal_bytes_of_equal_tensors_have_equal_keys_and_digests() -> None:
    made, image = layout(), b"x" * layout().data_bytes
    table = memoryview(bytearray(8 * len(made.pieces))).cast("Q")
    for index, piece in enumerate(made.pieces):
        table[index] = xxhash.xxh3_64_intdigest(
            image[piece.offset : piece.offset + piece.num_bytes]
        )
    one, other = (offer_of(rank, made, 0, table, "") for rank in (0, 1))
    assert one.sections == other.sections
    table[0] ^= 1
    changed = offer_of(1, made, 0, table, "")
    assert [a == b for a, b in zip(one.sections, changed.sections, strict=True)] == [False, True]


def test_neighbouring_bytes_of_one_writer_are_one_run() -> None:
    sections = [OfferedSection(key, 0, 100 * key, 100, CUT) for key in range(8)]
    offers = [RankOffer(rank, 800, "t", sections) for rank in range(2)]
    assert borrowed_bytes(offers, [0, 1]) == {
        0: [BorrowedBytes(400, 400, 1, 400, "t")],
        1: [BorrowedBytes(0, 400, 0, 0, "t")],
    }
    moved = [OfferedSection(key, 0, 110 * key, 100, CUT) for key in range(8)]
    offers[1] = RankOffer(1, 880, "t", moved)
    assert len(borrowed_bytes(offers, [0])[0]) == 4, "they are no neighbours in the other image"
