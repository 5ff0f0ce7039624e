"""Which node of a ring is named for a wrong or slow hop."""

import msgspec
import pytest

from ftrun.monitor.slow.collective_check import (
    MAX_EARLIER,
    MAX_NODES,
    MIN_PIECES,
    PIECE_BYTES,
    CollectiveResult,
    HopResult,
    NodeIdentity,
    WrongSum,
    factor,
    lane_value,
    slow_nodes,
    slowest_rate,
    sum_factor,
    wrong_hops,
    wrong_nodes,
)

A, B, C, D = NODES = [(name, at) for at, name in enumerate("abcd")]
Rates = dict[tuple[NodeIdentity, NodeIdentity], float]


def wrong(*, received: int = 1, off: int = 0, is_as_sent: bool = True) -> WrongSum:
    right = lane_value(7) * sum_factor(4, 3, 2, 2)
    return WrongSum(3, 2, 2, 7, right + received, right + off, is_as_sent)


def ring(found: dict[tuple[NodeIdentity, NodeIdentity], WrongSum]) -> dict[NodeIdentity, str]:
    """What is found in a ring of four; keys are sender and receiver of a wrong hop."""
    return wrong_nodes(wrong_hops(results(found, "x")))


def results(
    found: dict[tuple[NodeIdentity, NodeIdentity], WrongSum], check: str
) -> dict[NodeIdentity, CollectiveResult]:
    return {
        node: CollectiveResult(check, 4, tuple(hop(sender, node, found) for sender in around(at)))
        for at, node in enumerate(NODES)
    }


def around(at: int) -> list[NodeIdentity]:
    return [NODES[at - 1], NODES[(at + 1) % len(NODES)]]


def hop(
    sender: NodeIdentity,
    receiver: NodeIdentity,
    found: dict[tuple[NodeIdentity, NodeIdentity], WrongSum],
) -> HopResult:
    return HopResult(sender, wrong=found.get((sender, receiver)))


def test_without_a_wrong_hop_no_node_is_named() -> None:
    assert ring({}) == {}


def test_sums_have_no_carry_between_lanes() -> None:
    most = max(lane_value(lane) for lane in range(1 << 15))
    for number in range(50):
        for chunk in range(MAX_NODES):
            assert most * sum_factor(MAX_NODES, number, chunk, MAX_NODES) < 1 << 64
    assert sum_factor(4, 3, 2, 3) == factor(2, 3, 2) + factor(3, 3, 2) + factor(0, 3, 2)


def test_the_sender_of_the_first_wrong_value_is_named() -> None:
    found = ring({(B, C): wrong(), (B, A): wrong(received=5)})
    assert list(found) == [B]
    right = lane_value(7) * sum_factor(4, 3, 2, 2)
    values = f"(round 3, 2 nodes: {right + 5} instead of {right})"
    assert found[B] == f"it computed a wrong sum, found by a {values}"


def test_one_of_two_neighbours_is_not_enough() -> None:
    assert ring({(B, C): wrong()}) == {}
    evidence = WrongSum(1, 0, 1, 0, 1, lane_value(0) * sum_factor(2, 1, 0, 1), is_as_sent=True)
    two = {B: CollectiveResult("x", 2, (HopResult(A, wrong=evidence), HopResult(A)))}
    assert list(wrong_nodes(wrong_hops(two))) == [A], "of two nodes, there is one neighbour"


def test_several_named_nodes_of_one_check_are_no_verdict() -> None:
    both = {(B, C): wrong(), (B, A): wrong()}
    assert ring({**both, (D, A): wrong()}) == {}, "the orders of the nodes may differ"
    changed = wrong(is_as_sent=False)
    assert ring({**both, (D, C): changed, (D, A): changed}) == {}
    one, other = results({**both}, "x"), results({(D, C): wrong(), (D, A): wrong()}, "y")
    hops = wrong_hops(one) + wrong_hops(other)
    assert list(wrong_nodes(hops)) == [B, D], "one in each check"


def test_a_node_keeps_what_it_has_found_before() -> None:
    first = CollectiveResult("1", 4, (hop(B, A, {(B, A): wrong()}), HopResult(D)))
    kept = CollectiveResult("2", 4).after(first)
    assert kept.after(None) == kept
    assert [one.check for one in kept.earlier] == ["1"]
    assert len(kept.earlier[0].hops) == 1
    other = CollectiveResult("1", 4, (hop(B, C, {(B, C): wrong()}),))
    now = {A: CollectiveResult("3", 3).after(kept), C: CollectiveResult("3", 3).after(other)}
    assert list(wrong_nodes(wrong_hops(now))) == [B]
    found = first
    for _ in range(9):
        found = first.after(found)
    assert len(found.earlier) == MAX_EARLIER
    assert all(not one.earlier for one in found.earlier)


@pytest.mark.parametrize("evidence", [wrong(off=1), wrong(received=0)])
def test_a_node_that_compares_wrongly_is_named_itself(evidence: WrongSum) -> None:
    found = ring({(B, C): evidence, (D, C): evidence})
    assert list(found) == [C]
    assert ring({(B, C): evidence}) == {}
    assert found[C].startswith("it compares wrongly")


def test_bytes_that_change_on_the_way_name_the_link_and_no_node() -> None:
    changed = wrong(is_as_sent=False)
    assert ring({(B, C): changed}) == {}
    (found,) = wrong_hops({C: CollectiveResult("x", 4, (HopResult(B, wrong=changed),))})
    assert found.nodes == (B, C)
    assert found.text.startswith("bytes have changed between b and c (")


def test_a_node_whose_links_both_change_bytes_is_named() -> None:
    changed = wrong(is_as_sent=False)
    assert ring({(B, C): changed, (B, A): changed}) == {B: "bytes change between it and a and c"}
    assert ring({(B, C): changed, (C, D): changed, (D, A): changed}) == {}  # two could be it


def rated(rates: Rates, nodes: list[NodeIdentity] = NODES) -> dict[NodeIdentity, CollectiveResult]:
    count = len(nodes)
    return {
        node: CollectiveResult(
            "x",
            count,
            tuple(
                HopResult(sender, MIN_PIECES * PIECE_BYTES, rates.get((sender, node), 1e9))
                for sender in dict.fromkeys([nodes[at - 1], nodes[(at + 1) % count]])
            ),
            wait_share=0.0,
        )
        for at, node in enumerate(nodes)
    }


@pytest.mark.parametrize(
    "rates", [{(B, A): 9e6, (B, C): 8e6}, {(A, B): 9e6, (C, B): 8e6}], ids=["sends", "receives"]
)
def test_a_node_is_slow_if_all_links_in_one_direction_are(rates: Rates) -> None:
    assert slow_nodes(rated(rates)) == {B: "9.0 MB/s in the collective check (others 1000)"}
    assert slowest_rate(rated(rates)) == 8e6


def test_one_slow_link_and_a_moderate_rate_name_no_node() -> None:
    assert slow_nodes(rated({(B, C): 1e6})) == {}
    assert slow_nodes(rated({(B, A): 2e8, (B, C): 2e8})) == {}


def test_two_nodes_cannot_show_which_of_them_is_slow() -> None:
    assert slow_nodes(rated({(A, B): 1e6}, [A, B])) == {}


@pytest.mark.parametrize("share", [0.5, None])
def test_a_rate_of_a_node_that_waits_for_a_processor_is_not_used(share: float | None) -> None:
    found = rated({(B, A): 9e6, (B, C): 8e6})
    assert list(slow_nodes(found)) == [B]
    busy = msgspec.structs.replace(found[B], wait_share=share)
    assert slow_nodes({**found, B: busy}) == {}
    unknown = CollectiveResult("x", 4, problem="b has ended the check")
    assert slow_nodes({**found, B: unknown}) == {}
    assert slowest_rate({B: unknown}) == 0.0


def test_a_rate_of_few_pieces_is_not_used() -> None:
    found = rated({(B, A): 9e6, (B, C): 8e6})
    hops = tuple(msgspec.structs.replace(one, num_bytes=PIECE_BYTES) for one in found[A].hops)
    assert slow_nodes({**found, A: msgspec.structs.replace(found[A], hops=hops)}) == {
        B: "8.0 MB/s in the collective check (others 1000)"
    }
    few = {one: msgspec.structs.replace(has, hops=hops) for one, has in found.items()}
    assert slow_nodes(few) == {}
