"""A layout has no holes and no overlaps, and is equal when parsed from its own bytes."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from ftrun.errors import LayoutUnknown
from ftrun.snapshot.boxes import Box, TensorPart
from ftrun.snapshot.layout import (
    ALIGN_BYTES,
    DEVICE_PIECE_BYTES,
    ITEM_BYTES,
    PAGE_BYTES,
    PIECE_BYTES,
    PLAIN_BYTES,
    PLAIN_NAME,
    SMALL_BYTES,
    CopyTiming,
    Layout,
    LayoutEntry,
    Piece,
    cut,
    make_layout,
    parse_header,
)

shapes = st.lists(st.integers(0, 300), max_size=2).map(tuple) | st.sampled_from(
    [(SMALL_BYTES,), (SMALL_BYTES + 3, 3), (SMALL_BYTES // 8 + 1, 8)]
)
described = st.tuples(st.sampled_from(sorted(ITEM_BYTES)), shapes, st.sampled_from(CopyTiming))
entries = st.lists(described.filter(lambda one: one[0] != "F4" or one[1]), max_size=12).map(
    lambda found: [LayoutEntry(f"t{at}", *one) for at, one in enumerate(found)]
)


@settings(deadline=None, max_examples=60)
@given(entries, st.integers(0, 100_000))
def test_entries_lie_end_to_end_and_large_ones_are_aligned(
    given_entries: list[LayoutEntry], plain_bytes: int
) -> None:
    layout = make_layout(given_entries, plain_bytes=plain_bytes)
    at = 0
    for entry in layout.entries:
        assert entry.offset == at
        assert at % ITEM_BYTES[entry.dtype] == 0 or entry.num_bytes == 0
        at += entry.num_bytes
        if not entry.is_small and entry.name != PLAIN_NAME:
            assert entry.offset % ALIGN_BYTES == 0
    assert at == layout.data_bytes
    assert layout.entries[-1].name == PLAIN_NAME
    assert layout.plain_capacity >= 4 * plain_bytes
    names = {entry.name for entry in given_entries}
    assert names <= {entry.name for entry in layout.entries}
    check_pieces(layout)


def check_pieces(layout: Layout) -> None:
    """They cover the data without a gap."""
    at = 0
    for piece in layout.pieces:
        assert piece.offset == at
        at += piece.num_bytes
    assert at == layout.data_bytes
    for entry in layout.entries:
        over = [layout.pieces[index] for index in layout.pieces_of(entry)]
        end = entry.offset + entry.num_bytes
        assert over == [
            one
            for one in layout.pieces
            if one.offset < end and one.offset + one.num_bytes > entry.offset
        ]


def test_plain_values_that_grow_by_a_little_need_other_layouts_seldom() -> None:
    weight = [LayoutEntry("weight", "F32", (1 << 20,), CopyTiming.LAZY)]
    capacity, num_layouts = 0, 0
    for plain_bytes in range(12_000, 4_000_000, 9):  # a number for each step, in a list
        if plain_bytes > capacity:
            capacity = make_layout(weight, plain_bytes=plain_bytes).plain_capacity
            num_layouts += 1
    assert num_layouts <= 5


def test_large_tensors_leave_more_room_for_plain_values() -> None:
    weight = [LayoutEntry("weight", "F32", (1 << 28,), CopyTiming.LAZY)]
    assert make_layout(weight, plain_bytes=10).plain_capacity == PIECE_BYTES
    assert make_layout([], plain_bytes=10).plain_capacity == PLAIN_BYTES
    assert make_layout(weight, plain_bytes=10, plain_capacity=64).plain_capacity == 64


@settings(deadline=None, max_examples=60)
@given(entries)
def test_a_layout_reads_back_from_its_own_bytes(given_entries: list[LayoutEntry]) -> None:
    layout = make_layout(given_entries, plain_bytes=10, metadata={"step": "4"})
    assert len(layout.header) % PAGE_BYTES == 0
    image = memoryview(layout.header + bytes(layout.data_bytes))
    assert len(image) == layout.image_bytes
    found, start = parse_header(image)
    assert (found, start) == (layout, len(layout.header))
    assert found.pieces == layout.pieces


def test_small_neighbours_of_one_time_form_one_piece() -> None:
    small = [LayoutEntry(f"s{at}", "F32", (10,), CopyTiming.LAZY) for at in range(5)]
    layout = make_layout(
        [*small, LayoutEntry("b", "F32", (10,), CopyTiming.BOUNDARY)], plain_bytes=1
    )
    plain = layout.entries[-1]
    assert layout.pieces[:2] == (Piece(0, ALIGN_BYTES), Piece(ALIGN_BYTES, 200))
    assert layout.pieces[2].offset == plain.offset


def test_large_entries_are_cut() -> None:
    assert cut(64, 2 * PIECE_BYTES + 1) == [
        Piece(64, PIECE_BYTES),
        Piece(64 + PIECE_BYTES, PIECE_BYTES),
        Piece(64 + 2 * PIECE_BYTES, 1),
    ]


def test_an_entry_is_written_as_dtype_and_shape() -> None:
    assert str(LayoutEntry("w", "BF16", (3, 4), CopyTiming.LAZY)) == "BF16[3, 4]"


def header_of(described: object) -> bytes:
    text = json.dumps(described).encode()
    return len(text).to_bytes(8, "little") + text


def whole(**changes: object) -> dict[str, object]:
    plain = {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]}
    return {"__metadata__": {"ftrun.when": "b"}, PLAIN_NAME: plain, **changes}


@pytest.mark.parametrize(
    "image",
    [
        b"1234567",
        (1).to_bytes(8, "little") + b"{",
        (100).to_bytes(8, "little") + b"{}",
        (5).to_bytes(8, "little") + b"nojsn",
        header_of([1]),
        header_of({"__metadata__": {}}),
        header_of(whole(__metadata__={"ftrun.when": "bb"})),
        header_of(whole(__metadata__={"ftrun.when": ""})),
        header_of(whole()),
        header_of({"__metadata__": {"ftrun.when": ""}}),
        header_of({"__metadata__": {"ftrun.when": "b"}, "w": whole()[PLAIN_NAME]}) + bytes(16),
    ],
)
def test_other_bytes_are_refused(image: bytes) -> None:
    with pytest.raises(LayoutUnknown):
        parse_header(memoryview(image))


def test_the_shortest_good_header_is_read() -> None:
    layout, start = parse_header(memoryview(header_of(whole()) + bytes(16)))
    entries = (LayoutEntry(PLAIN_NAME, "U8", (16,), CopyTiming.BOUNDARY, 0),)
    assert layout == Layout(entries, 16, {}, knows_parts=False)
    assert start == len(header_of(whole()))


def test_parts_come_back_from_the_header_and_whole_tensors_cost_next_to_nothing() -> None:
    parted = [
        LayoutEntry("a", "F32", (2, 4), CopyTiming.LAZY, part=TensorPart((8, 4), (4, 0))),
        LayoutEntry("b", "F32", (0, 4), CopyTiming.LAZY, part=TensorPart((8, 4), (8, 0))),
        LayoutEntry("c", "F32", (), CopyTiming.LAZY),
        LayoutEntry("d", "F32", (3,), CopyTiming.BOUNDARY, part=TensorPart((12,), None)),
    ]
    layout = make_layout(parted, plain_bytes=1)
    found, _ = parse_header(memoryview(layout.header + bytes(layout.data_bytes)))
    assert found == layout
    assert {e.name for e in found.entries if e.part} == {"a", "b", "d"}
    boxes = {entry.name: entry.box for entry in found.entries}
    assert (boxes["a"], boxes["c"], boxes["d"]) == (Box((4, 0), (2, 4)), Box((), ()), None)
    many = make_layout(
        [LayoutEntry(f"t{at}", "F32", (9,), CopyTiming.LAZY) for at in range(100)], plain_bytes=1
    )
    assert b'"ftrun.parts":""' in many.header


@pytest.mark.parametrize("text", ["8", "8@x", "8@5", "8,8@0,0", "8@-1", "3@?"])
def test_a_part_that_is_none_makes_the_header_unreadable(text: str) -> None:
    header = whole() | {"t": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}
    header[PLAIN_NAME] = {"dtype": "U8", "shape": [16], "data_offsets": [4, 20]}
    header = {name: header[name] for name in ("__metadata__", "t", PLAIN_NAME)}
    header["__metadata__"] = {"ftrun.when": "lb", "ftrun.parts": text}
    with pytest.raises(LayoutUnknown):
        parse_header(memoryview(header_of(header) + bytes(20)))


def test_the_public_library_reads_two_values_per_byte(tmp_path: Path) -> None:
    made = make_layout([LayoutEntry("w", "F4", (2, 3), CopyTiming.LAZY)], plain_bytes=1)
    values = bytes(range(1, 7))
    image = made.header + values + bytes(made.data_bytes - len(values))
    (tmp_path / "image").write_bytes(image)
    with safe_open(tmp_path / "image", "pt") as opened:
        tensor = opened.get_tensor("w")
    assert (tensor.dtype, tuple(tensor.shape)) == (torch.float4_e2m1fn_x2, (2, 3))
    assert bytes(tensor.view(torch.uint8).flatten().tolist()) == values
    found, _ = parse_header(memoryview(image))
    assert found.entries[0].shape == (2, 3)
    odd = image.replace(b'"shape":[2,6]', b'"shape":[4,3]', 1)
    assert odd != image
    with pytest.raises(LayoutUnknown, match="rows of 3 values of F4"):
        parse_header(memoryview(odd))


def test_a_layout_of_unknown_parts_reports_nothing_of_them() -> None:
    made = make_layout([LayoutEntry("w", "F32", (4,), CopyTiming.LAZY)], plain_bytes=1)
    unknown = Layout(made.entries, made.plain_capacity, knows_parts=False)
    assert b"ftrun.parts" in made.header
    assert b"ftrun.parts" not in unknown.header


def test_larger_pieces_are_read_from_the_header() -> None:
    """State on devices has them; an image without the key has pieces of the usual size."""
    entry = LayoutEntry("w", "U8", (DEVICE_PIECE_BYTES + 5,), CopyTiming.LAZY)
    usual = make_layout([entry], plain_bytes=8)
    large = make_layout([entry], plain_bytes=8, piece_bytes=DEVICE_PIECE_BYTES)
    sizes = [piece.num_bytes for piece in large.pieces]
    assert sizes[:2] == [DEVICE_PIECE_BYTES, 5]
    assert b"piece_bytes" not in usual.header
    image = large.header + bytes(large.data_bytes)
    found, _ = parse_header(memoryview(image))
    assert found.pieces == large.pieces
    assert found.metadata == large.metadata
    broken = image.replace(str(DEVICE_PIECE_BYTES).encode() + b'"', b'-100000"', 1)
    with pytest.raises(LayoutUnknown, match="pieces of -100000 bytes"):
        parse_header(memoryview(broken))
