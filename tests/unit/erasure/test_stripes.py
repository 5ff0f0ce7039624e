"""Every block is in one stripe, every stripe on all nodes, and the load is balanced."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrun.erasure.stripes import BLOCK_BYTES, RingStripes, Stripes
from ftrun.errors import InternalError

SHAPES = [(n, m) for n in range(2, 10) for m in (1, 2, 3) if m < n]

each_shape = pytest.mark.parametrize(("n", "m"), SHAPES)
rings = st.integers(2, 9).map(lambda n: RingStripes(n, block_bytes=10))
layouts = rings | st.sampled_from(SHAPES).map(lambda shape: Stripes(*shape, block_bytes=10))


@each_shape
def test_a_stripe_is_spread_over_all_nodes(n: int, m: int) -> None:
    layout = Stripes(n, m)
    assert (layout.k, layout.block_bytes) == (n - m, BLOCK_BYTES)
    for stripe in range(3 * n):
        data, parity = layout.data_nodes(stripe), layout.parity_nodes(stripe)
        assert (len(data), len(parity)) == (n - m, m)
        assert sorted((*data, *parity)) == list(range(n))
        assert [layout.index(stripe, node) for node in (*data, *parity)] == list(range(n))
        assert [layout.node_at(stripe, index) for index in range(n)] == [*data, *parity]
        assert all(layout.parity_block(node, stripe) is None for node in data)
        assert all(layout.block_of(node, stripe) is None for node in parity)


@each_shape
def test_every_block_of_a_node_is_in_one_stripe_of_its_own(n: int, m: int) -> None:
    layout = Stripes(n, m)
    for node in range(n):
        stripes = [layout.stripe_of(node, block) for block in range(4 * n)]
        assert stripes == sorted(set(stripes))
        assert [layout.block_of(node, stripe) for stripe in stripes] == list(range(4 * n))
        used = {layout.block_of(node, stripe) for stripe in range(4 * n)} - {None}
        assert used == set(range(4 * (n - m)))


@each_shape
def test_parity_memory_has_no_holes(n: int, m: int) -> None:
    layout = Stripes(n, m)
    for node in range(n):
        for num_stripes in range(4 * n):
            mine = [s for s in range(num_stripes) if node in layout.parity_nodes(s)]
            assert [layout.parity_block(node, stripe) for stripe in mine] == list(range(len(mine)))
            assert [layout.parity_stripe(node, at) for at in range(len(mine))] == mine
            assert layout.num_parity_blocks(node, num_stripes) == len(mine)


@each_shape
def test_parity_is_spread_evenly(n: int, m: int) -> None:
    layout = Stripes(n, m)
    for num_stripes in range(5 * n):
        held = [layout.num_parity_blocks(node, num_stripes) for node in range(n)]
        assert sum(held) == m * num_stripes
        # The loads differ by at most m blocks; after n stripes they are equal.
        assert max(held) - min(held) <= (m if num_stripes % n else 0)


@each_shape
def test_the_stripes_reach_as_far_as_the_last_block(n: int, m: int) -> None:
    layout = Stripes(n, m, block_bytes=10)
    for num_blocks in range(5 * n):
        last = max(
            (layout.stripe_of(node, b) for node in range(n) for b in range(num_blocks)), default=-1
        )
        for num_bytes in {10 * num_blocks, max(0, 10 * num_blocks - 9)}:
            assert layout.num_stripes(num_bytes) == last + 1
            assert layout.num_blocks(num_bytes) == num_blocks


@given(layouts, st.data())
def test_senders_of_the_blocks_of_a_stripe(layout: Stripes, data: st.DataObject) -> None:
    sizes = data.draw(
        st.lists(st.integers(0, 200), min_size=layout.n, max_size=layout.n), label="sizes"
    )
    sent: dict[int, list[int]] = {node: [] for node in range(layout.n)}
    for stripe in range(layout.num_stripes(max(sizes))):
        senders = layout.senders(stripe, sizes)
        positions = [layout.index(stripe, node) for node in senders]
        assert all(position < layout.k for position in positions)
        assert positions == sorted(positions)
        for node in senders:
            block = layout.block_of(node, stripe)
            assert block is not None
            sent[node].append(block)
    assert sent == {node: list(range(layout.num_blocks(size))) for node, size in enumerate(sizes)}


@given(layouts, st.integers(0, 500))
def test_blocks_cover_the_state_without_a_gap(layout: Stripes, num_bytes: int) -> None:
    spans = [layout.span(block, num_bytes) for block in range(layout.num_blocks(num_bytes))]
    end = 0
    for start, length in spans:
        assert (start, 0 < length <= layout.block_bytes) == (end, True)
        end = start + length
    assert end == num_bytes
    assert layout.span(len(spans), num_bytes)[1] == 0


@settings(max_examples=200)
@given(layouts, st.integers(0, 10**9))
def test_far_stripes_are_found_by_division(layout: Stripes, block: int) -> None:
    for node in range(layout.n):
        stripe = layout.stripe_of(node, block)
        assert layout.block_of(node, stripe) == block
        held = layout.num_parity_blocks(node, stripe)
        assert abs(held * layout.n - stripe * layout.m) <= layout.m * layout.n


def test_two_nodes_are_a_mirror() -> None:
    layout = Stripes(2, 1)
    for stripe in range(10):
        assert layout.parity_nodes(stripe) == (stripe % 2,)
        assert layout.data_nodes(stripe) == (1 - stripe % 2,)
        assert layout.parity_block(stripe % 2, stripe) == stripe // 2
        assert layout.block_of(1 - stripe % 2, stripe) == stripe // 2


@pytest.mark.parametrize(("n", "m", "block_bytes"), [(1, 1, 1), (3, 3, 1), (3, 0, 1), (3, 1, 0)])
def test_a_group_that_cannot_be_is_refused(n: int, m: int, block_bytes: int) -> None:
    with pytest.raises(InternalError):
        Stripes(n, m, block_bytes)


@pytest.mark.parametrize("n", range(2, 9))
def test_in_a_ring_each_block_has_a_copy_on_the_next_node(n: int) -> None:
    layout = RingStripes(n, block_bytes=10)
    assert (layout.k, layout.m) == (1, 1)
    for node in range(n):
        after = (node + 1) % n
        stripes = [layout.stripe_of(node, block) for block in range(5)]
        for block, stripe in enumerate(stripes):
            assert layout.data_nodes(stripe) == (node,)
            assert layout.parity_nodes(stripe) == (after,)
            assert [layout.index(stripe, one) for one in (node, after)] == [0, 1]
            assert [layout.node_at(stripe, index) for index in (0, 1)] == [node, after]
            assert layout.block_of(node, stripe) == layout.parity_block(after, stripe) == block
            assert layout.parity_stripe(after, block) == stripe
            others = {*range(n)} - {node, after}
            assert all(layout.block_of(one, stripe) is None for one in others | {after})
            assert all(layout.parity_block(one, stripe) is None for one in others | {node})
    for num_blocks in range(4):
        num_stripes = layout.num_stripes(10 * num_blocks)
        assert num_stripes == num_blocks * n
        assert {layout.num_parity_blocks(node, num_stripes) for node in range(n)} == {num_blocks}


@given(layouts, st.data())
def test_a_node_has_room_for_the_parity_of_every_block(
    layout: Stripes, data: st.DataObject
) -> None:
    sizes = data.draw(st.lists(st.integers(0, 100), min_size=layout.n, max_size=layout.n))
    stripes = range(layout.num_stripes(max(sizes)))
    for node in range(layout.n):
        used = [
            layout.parity_block(node, stripe)
            for stripe in stripes
            if node in layout.parity_nodes(stripe) and layout.senders(stripe, sizes)
        ]
        rows = layout.num_rows(node, sizes)
        assert all(row is not None and row < rows for row in used)
        if isinstance(layout, RingStripes):
            assert rows == len(used) == layout.num_blocks(sizes[node - 1]), "its neighbour's size"
