"""Sections cover a shard, and identify their entries and content."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrun.snapshot.boxes import TensorPart
from ftrun.snapshot.layout import SMALL_BYTES, CopyTiming, Layout, LayoutEntry, make_layout
from ftrun.snapshot.manifest import RankManifest, Section, content_digests, sections_of

LARGE = SMALL_BYTES // 4
"""Number of float32 items from which an entry gets its own section."""


@st.composite
def entries(draw: st.DrawFn) -> list[LayoutEntry]:
    """Empty, small, large and very large ones; some are copied lazily."""
    items = st.sampled_from([0, 1, 7, LARGE - 1, LARGE, LARGE + 1, 3 * LARGE])
    found = draw(st.lists(st.tuples(items, st.sampled_from(CopyTiming)), max_size=8))
    return [
        LayoutEntry(f"entry {at}", "F32", (num_items,), when)
        for at, (num_items, when) in enumerate(found)
    ]


def layout_of(*found: LayoutEntry, **metadata: str) -> Layout:
    return make_layout(found, plain_bytes=10, metadata=metadata)


def keys(layout: Layout) -> list[int]:
    return [position.section.key for position in sections_of(layout)]


def lazy(name: str, num_items: int, *, dtype: str = "F32") -> LayoutEntry:
    return LayoutEntry(name, dtype, (num_items,), CopyTiming.LAZY)


@settings(max_examples=200)
@given(entries())
def test_sections_are_all_pieces_in_order_and_a_large_entry_has_its_own(
    given_: list[LayoutEntry],
) -> None:
    layout = layout_of(*given_)
    places = sections_of(layout)
    at = 0
    for position in places:
        section = position.section
        pieces = layout.pieces[section.first : section.first + section.count]
        assert section.first == at
        assert section.num_bytes == sum(piece.num_bytes for piece in pieces)
        assert position.offset == pieces[0].offset
        at += section.count
    assert at == len(layout.pieces)
    found = {one.offset: one.section for one in places if one.section.num_bytes}
    for entry in layout.entries:
        if not entry.is_small:
            assert found[entry.offset].num_bytes == entry.num_bytes
            assert found[entry.offset].may_repeat is (entry.when is CopyTiming.LAZY)


def test_only_what_belongs_to_an_optimizer_may_repeat() -> None:
    """Plain values belong to one rank, as does a pack that has anything else in it."""
    layout = layout_of(
        lazy("large", LARGE),
        lazy("small", 1),
        LayoutEntry("mean", "F32", (LARGE,), CopyTiming.BOUNDARY),
        LayoutEntry("count", "F32", (1,), CopyTiming.BOUNDARY),
    )
    names = {entry.offset: entry.name for entry in layout.entries}
    found = {
        names[position.offset]: position.section.may_repeat for position in sections_of(layout)
    }
    assert found == {
        "count": False,
        "mean": False,
        "small": True,
        "large": True,
        "ftrun.plain": False,
    }


def test_a_key_does_not_depend_on_the_rank_or_on_what_precedes() -> None:
    alone = layout_of(lazy("a", LARGE), rank="0")
    behind = layout_of(
        LayoutEntry("b", "F32", (7,), CopyTiming.BOUNDARY), lazy("a", LARGE), rank="1"
    )
    assert set(keys(alone)) < set(keys(behind))


@pytest.mark.parametrize("num_items", [12, 12 * LARGE])
@pytest.mark.parametrize(
    "change",
    [
        {"name": "other"},
        {"dtype": "I32"},
        {"shape": (3, 4)},
        {"part": TensorPart((24 * LARGE,), (12 * LARGE,))},
    ],
    ids=lambda one: next(iter(one)),
)
def test_a_key_reports_names_dtypes_shapes_and_parts(
    num_items: int, change: dict[str, object]
) -> None:
    entry = lazy("a", num_items)
    if "shape" in change:
        change = {"shape": (3, num_items // 3)}
    other = replace(entry, **change)  # type: ignore[arg-type]
    first, last = keys(layout_of(entry)), keys(layout_of(other))
    assert first[0] != last[0]
    assert first[1:] == last[1:]


def test_a_name_that_reads_like_two_entries_is_one() -> None:
    two = layout_of(lazy("a", 1), lazy("b", 1))
    one = layout_of(lazy("a F32 1 ;b", 1))
    assert keys(one)[0] != keys(two)[0]


@settings(max_examples=100)
@given(entries(), st.data())
def test_a_digest_changes_with_each_of_its_pieces_and_with_no_other(
    given_: list[LayoutEntry], data: st.DataObject
) -> None:
    layout = layout_of(*given_)
    places = sections_of(layout)
    raw = bytearray(8 * len(layout.pieces))
    table = memoryview(raw).cast("Q")
    for at in range(len(table)):
        table[at] = at + 1
    before = content_digests(places, table)
    changed = data.draw(st.integers(0, len(table) - 1))
    table[changed] = 1 << 63
    after = content_digests(places, table)
    for at, position in enumerate(places):
        is_in = position.section.first <= changed < position.section.first + position.section.count
        mine = slice(8 * at, 8 * at + 8)
        assert (before[mine] != after[mine]) is is_in


def test_digests_are_read_back_by_section() -> None:
    numbers = [1, 1 << 63, 77]
    digests = b"".join(one.to_bytes(8, "little") for one in numbers)
    sections = [Section(at, at, 1, 8, True) for at in range(3)]
    found = RankManifest(0, 1, 24, 3, 1, 8, 1, 1, sections, digests)
    assert [found.digest_of(at) for at in range(3)] == numbers
