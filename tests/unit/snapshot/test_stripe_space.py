"""The blocks of a node are its coded bytes, each once and in order."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrun.errors import LayoutUnknown
from ftrun.snapshot.layout import Piece
from ftrun.snapshot.redundancy import NodeRedundancy, PieceRun, RankRedundancy
from ftrun.snapshot.stripe_space import StripeSpace

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
    """The space, its bytes as they should be, and each rank's data."""
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
