"""Nodes that load together read each piece once, in about equal shares."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrun.snapshot.load_shares import MOST_NODES, LoadShare, load_group_of, ranks_at, share_of

SIZE = {digest: 1 + digest * 7 % 13 for digest in range(40)}
"""Equal digests are equal bytes, so of one size."""

TABLES = st.lists(st.lists(st.integers(0, 39), max_size=30), min_size=1, max_size=6)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Nodes with the ranks that each loads, and the tables of all."""
    tables = dict(enumerate(draw(TABLES)))
    at = draw(st.lists(st.integers(0, 3), min_size=len(tables), max_size=len(tables)))
    ranks = {node: [rank for rank in tables if at[rank] == node] for node in range(4)}
    return ranks, tables


def shares(ranks: dict[int, list[int]], tables: dict[int, list[int]]) -> dict[int, LoadShare]:
    """The share of each node, computed with the sizes of its own pieces only."""
    return {
        node: share_of(
            node, ranks, tables, {rank: [SIZE[one] for one in tables[rank]] for rank in some}
        )
        for node, some in ranks.items()
    }


@given(worlds())
def test_every_piece_is_read_once_and_comes_to_all_that_need_it(
    world: tuple[dict[int, list[int]], dict[int, list[int]]],
) -> None:
    ranks, tables = world
    found = shares(ranks, tables)
    read_by = {
        tables[rank][index]: node for node, share in found.items() for rank, index in share.own
    }
    read = Counter(tables[r][i] for share in found.values() for r, i in share.own)
    assert set(read) == {digest for table in tables.values() for digest in table}
    assert set(read.values()) <= {1}
    for node, share in found.items():
        for (rank, index), reader in share.others:
            assert reader == read_by[tables[rank][index]] != node
        for (rank, index), (other, at) in share.twins:
            assert tables[rank][index] == tables[other][at]
        places = [*share.own, *(at for at, _ in share.others), *(at for at, _ in share.twins)]
        needed = [(rank, index) for rank in ranks[node] for index in range(len(tables[rank]))]
        assert sorted(places) == needed
        sources = {*share.own, *(at for at, _ in share.others)}
        assert all(position in sources for _, position in share.twins)


@given(st.integers(1, 8), st.lists(st.integers(1, 100), min_size=1, max_size=60))
def test_replicas_read_equal_parts_in_one_run_each(nodes: int, sizes: list[int]) -> None:
    ranks = {node: [node] for node in range(nodes)}
    tables = {node: list(range(len(sizes))) for node in ranks}
    for node in ranks:
        own = share_of(node, ranks, tables, {node: sizes}).own
        indices = [index for _, index in own]
        assert indices == list(range(indices[0], indices[-1] + 1)) if indices else True
        assert abs(sum(sizes[index] for index in indices) - sum(sizes) / nodes) <= max(sizes)


def test_pieces_of_no_bytes_have_a_reader() -> None:
    ranks, tables = {0: [0], 1: [1]}, {0: [7, 8], 1: [7, 8]}
    for sizes in ([0, 0], [5, 0]):
        found = [share_of(node, ranks, tables, {node: sizes}) for node in ranks]
        assert sum(len(share.own) for share in found) == 2


@pytest.mark.parametrize(("num_nodes", "world_size"), [(1, 4), (2, 3), (3, 2), (4, 8), (16, 1)])
def test_each_old_rank_is_loaded_by_one_node(num_nodes: int, world_size: int) -> None:
    dealt = [ranks_at(node, num_nodes, world_size) for node in range(num_nodes)]
    assert [rank for some in dealt for rank in some] == list(range(world_size))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_a_company_is_bounded() -> None:
    num_nodes = 2 * MOST_NODES + 3
    for node in range(num_nodes):
        others = load_group_of(node, num_nodes)
        assert node in others
        assert len(others) <= MOST_NODES
        assert all(load_group_of(other, num_nodes) == others for other in others)
