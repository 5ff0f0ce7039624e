"""Each node has one group, sizes and domains are balanced, and remaining nodes keep their place."""

from collections import Counter
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrun.erasure.codec import MAX_DATA, MAX_PARITY
from ftrun.erasure.groups import ProtectionGroup, default_parity, make_groups, next_groups
from ftrun.errors import InternalError

counts = st.integers(1, 200)
parities = st.integers(0, MAX_PARITY)
chosen_data = st.none() | st.integers(1, MAX_DATA)


def names(count: int) -> list[str]:
    return [f"n{i}" for i in range(count)]


@given(counts, chosen_data, parities)
def test_every_node_is_in_one_group_and_groups_are_even(
    count: int, data: int | None, parity: int
) -> None:
    nodes = names(count)
    groups = make_groups(nodes, data=data, parity=parity)
    assert sorted(node for group in groups for node in group.nodes) == sorted(nodes)
    sizes = [len(group.nodes) for group in groups]
    assert max(sizes) - min(sizes) <= 1
    assert all(group.parity == parity for group in groups)
    assert all(group.data <= MAX_DATA for group in groups)


@given(counts, chosen_data, st.integers(1, MAX_PARITY))
def test_all_groups_are_protected_while_there_are_nodes_enough(
    count: int, data: int | None, parity: int
) -> None:
    groups = make_groups(names(count), data=data, parity=parity)
    assert all(group.is_protected == (count > parity) for group in groups)


@given(counts, st.integers(1, 16), st.integers(1, 4))
def test_as_few_groups_as_were_asked_for(count: int, data: int, parity: int) -> None:
    groups = make_groups(names(count), data=data, parity=parity)
    asked = ceil(count / (data + parity))
    assert len(groups) <= asked
    if count // asked > parity:
        assert len(groups) == asked


@given(st.integers(4, 200), st.integers(1, 2))
def test_without_a_request_a_group_has_four_to_eight_nodes(count: int, parity: int) -> None:
    groups = make_groups(names(count), data=None, parity=parity)
    assert all(4 <= len(group.nodes) <= 8 for group in groups)


@pytest.mark.parametrize(
    ("count", "data", "parity", "sizes"),
    [
        (4, 3, 1, [4]),
        (8, None, 2, [8]),
        (9, None, 2, [5, 4]),
        (17, None, 2, [6, 6, 5]),
        (30, None, 4, [15, 15]),
        (3, 1, 1, [3]),
        (5, 1, 1, [3, 2]),
        (2, None, 1, [2]),
        (1, None, 1, [1]),
        (2, None, 2, [2]),
    ],
)
def test_sizes_of_groups(count: int, data: int | None, parity: int, sizes: list[int]) -> None:
    groups = make_groups(names(count), data=data, parity=parity)
    assert [len(group.nodes) for group in groups] == sizes


def test_parity_that_is_chosen() -> None:
    assert [default_parity(count) for count in (1, 2, 7, 8, 100)] == [1, 1, 1, 2, 2]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.integers(1, 8), st.integers(1, 3))
def test_the_nodes_of_a_domain_are_spread_as_evenly_as_can_be(
    racks: list[int], data: int, parity: int
) -> None:
    domains = {f"n{i}": f"rack{rack}" for i, rack in enumerate(racks)}
    groups = make_groups(list(domains), data=data, parity=parity, domains=domains)
    sizes = Counter(domains.values())
    for group in groups:
        for rack, count in Counter(domains[node] for node in group.nodes).items():
            assert count <= ceil(sizes[rack] / len(groups))


@given(st.permutations(names(9)))
def test_nodes_are_shown_in_the_order_of_their_ranks(nodes: list[str]) -> None:
    groups = make_groups(nodes, data=3, parity=1)
    assert groups == make_groups(list(nodes), data=3, parity=1)
    for group in groups:
        assert [nodes.index(node) for node in group.nodes] == sorted(map(nodes.index, group.nodes))


def test_no_nodes_are_no_groups() -> None:
    assert make_groups([], data=None, parity=1) == []


@pytest.mark.parametrize(
    ("nodes", "data", "parity"),
    [
        (["a", "a"], None, 1),
        (["a"], 0, 1),
        (["a"], MAX_DATA + 1, 1),
        (["a"], None, -1),
        (["a"], None, MAX_PARITY + 1),
    ],
)
def test_what_cannot_be_grouped_is_refused(nodes: list[str], data: int | None, parity: int) -> None:
    with pytest.raises(InternalError):
        make_groups(nodes, data=data, parity=parity)


# --- reported properties of a group -----------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "parity", "data"), [("ab", 2, 0), ("a", 1, 0), ("ab", 0, 2), ("abcd", 1, 3)]
)
def test_a_group_as_small_as_its_parity_is_not_protected(
    nodes: str, parity: int, data: int
) -> None:
    group = ProtectionGroup(tuple(nodes), parity)
    assert (group.data, group.is_protected) == (data, nodes == "abcd")


def test_groups_are_distinguished_by_nodes_order_and_parity() -> None:
    groups = [
        ProtectionGroup(("a", "b", "c"), 1),
        ProtectionGroup(("a", "c", "b"), 1),
        ProtectionGroup(("a", "b", "c"), 2),
        ProtectionGroup(("ab", "c"), 1),
        ProtectionGroup(("a", "bc"), 1),
        ProtectionGroup(("a", "b"), 1),
    ]
    assert len({group.id for group in groups}) == len(groups)
    assert all(0 <= group.id < 1 << 64 for group in groups)
    assert groups[0].id == ProtectionGroup(("a", "b", "c"), 1).id


# --- from generation to generation --------------------------------------------------------------


@given(st.integers(2, 40), st.data())
def test_a_node_that_stays_keeps_its_place_and_a_replacement_takes_the_lost_ones(
    count: int, data: st.DataObject
) -> None:
    nodes = names(count)
    before = make_groups(nodes, data=3, parity=1)
    lost = data.draw(st.sets(st.sampled_from(nodes), max_size=count), label="lost")
    replaced = {node: f"spare-{node}" for node in lost}
    now = [replaced.get(node, node) for node in nodes]
    after = next_groups(before, now, replaced=replaced, data=3, parity=1)
    for old, new in zip(before, after, strict=True):
        assert new.parity == old.parity
        assert new.nodes == tuple(replaced.get(node, node) for node in old.nodes)
    assert next_groups(after, now, replaced={}, data=3, parity=1) == after


def test_the_order_of_ranks_does_not_move_a_node_that_stays() -> None:
    before = make_groups(names(8), data=3, parity=1)
    assert next_groups(before, names(8)[::-1], replaced={}, data=3, parity=1) == before
    moved = dict(zip(names(8), names(8)[::-1], strict=True))
    assert next_groups(before, names(8)[::-1], replaced=moved, data=3, parity=1) == before


@pytest.mark.parametrize(
    ("nodes", "replaced", "parity"),
    [
        (names(7), {}, 1),  # fewer
        (names(9), {}, 1),  # more
        (names(8), {}, 2),  # other parity
        ([*names(7), "x"], {}, 1),  # another node, without the name of the node that it replaces
        ([*names(8)[1:7], "x", "y"], {"n7": "x", "n0": "x"}, 1),  # one node replaces two
    ],
)
def test_what_does_not_fit_is_grouped_again(
    nodes: list[str], replaced: dict[str, str], parity: int
) -> None:
    before = make_groups(names(8), data=3, parity=1)
    after = next_groups(before, nodes, replaced=replaced, data=3, parity=parity)
    assert after == make_groups(nodes, data=3, parity=parity)


def test_a_replacement_of_a_node_in_no_group_is_not_ours() -> None:
    before = make_groups(names(4), data=3, parity=1)
    after = next_groups(before, names(4), replaced={"spare": "other"}, data=3, parity=1)
    assert after == before


def test_the_first_generation_has_new_groups() -> None:
    made = next_groups([], names(4), replaced={}, data=None, parity=1)
    assert made == make_groups(names(4), data=None, parity=1)


@given(counts)
def test_rings_have_one_data_node_in_a_stripe(count: int) -> None:
    rings = make_groups(names(count), data=None, parity=1, is_ring=True)
    assert [one.nodes for one in rings] == [
        one.nodes for one in make_groups(names(count), data=None, parity=1)
    ]
    for ring in rings:
        assert (ring.data, ring.is_protected) == (1, count > 1)
        if count > 1:
            stripes = ring.stripes(10)
            assert (stripes.n, stripes.k, stripes.m) == (len(ring.nodes), 1, 1)
    other = make_groups(names(4), data=None, parity=1)[0]
    assert other.stripes(10).k == 3
    assert other.id != make_groups(names(4), data=None, parity=1, is_ring=True)[0].id


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=8))
def test_neighbours_in_a_ring_are_of_different_domains(domains: list[str]) -> None:
    of = {str(at): domain for at, domain in enumerate(domains)}
    (made,) = make_groups(list(of), data=None, parity=1, domains=of, is_ring=True)
    assert sorted(made.nodes) == sorted(of)
    if max(Counter(domains).values()) <= len(domains) // 2:
        pairs = zip(made.nodes, (*made.nodes[1:], made.nodes[0]), strict=True)
        assert all(of[one] != of[other] for one, other in pairs)


def test_a_ring_whose_neighbours_differ_has_the_order_of_the_ranks() -> None:
    of = dict(zip("0123", "abab", strict=True))
    (made,) = make_groups(list(of), data=None, parity=1, domains=of, is_ring=True)
    assert made.nodes == ("0", "1", "2", "3")


def test_a_ring_is_kept_only_as_a_ring() -> None:
    nodes = names(4)
    rings = make_groups(nodes, data=None, parity=1, is_ring=True)
    replaced = {"n1": "n9"}
    after = [replaced.get(one, one) for one in nodes]
    kept = next_groups(rings, after, replaced=replaced, data=None, parity=1, is_ring=True)
    assert kept[0].nodes == ("n0", "n9", "n2", "n3")
    assert kept[0].is_ring
    coded = next_groups(rings, after, replaced=replaced, data=None, parity=1)
    assert not coded[0].is_ring
