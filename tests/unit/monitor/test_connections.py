"""Connections that carry no data: the pair and the direction, from the counters of both ends."""

from collections.abc import Mapping
from itertools import combinations

import pytest
from msgspec.structs import replace
from unit.monitor.ranks import view
from unit.monitor.test_hang_detector import SETTINGS, behind, waiting

from ftrun.monitor.connections import others_carry_data, stalled_connections, with_stalled
from ftrun.monitor.hang_detector import find_hang
from ftrun.monitor.verdicts import Confidence, RankConnection, RankView, Verdict, VerdictKind

NODES = {rank: f"node{rank}" for rank in range(4)}
LIMIT_S = 3.0
SENT = 100


def end(rank: int, peer: int) -> tuple[str, int]:
    """The address of this rank's end of the connection; the higher rank has accepted it."""
    return f"10.0.0.{rank}", 2000 + rank if rank > peer else 1000 + 10 * rank + peer


def connection(rank: int, peer: int, lost: frozenset[tuple[int, int]]) -> RankConnection:
    """The counters of an end after both ranks have sent 100 bytes; `lost`: (sender, receiver)."""
    arrives = (rank, peer) not in lost
    answered = arrives and (peer, rank) not in lost
    return RankConnection(
        end(rank, peer),
        end(peer, rank),
        stalled_s=0.0 if answered else 7.5,
        acked_bytes=SENT + (rank < peer) if answered else int(rank < peer),
        received_bytes=SENT if (peer, rank) not in lost else 0,
        retransmits=0 if answered else 6,
    )


def world(*lost: tuple[int, int], ranks: int = 4) -> dict[int, RankView]:
    """All ranks are in one collective; each has a connection to each other one."""
    gone = frozenset(lost)
    return {
        rank: waiting(
            rank,
            connections=tuple(
                connection(rank, peer, gone) for peer in range(ranks) if peer != rank
            ),
        )
        for rank in range(ranks)
    }


def judged(views: Mapping[int, RankView]) -> Verdict:
    found = find_hang(views, NODES, SETTINGS, limit_s=8.5)
    assert found is not None
    return found


def test_healthy_connections_name_no_pair() -> None:
    found = judged(world())
    assert found.nodes == ("node0", "node1", "node2", "node3")
    assert not found.act_immediately


@pytest.mark.parametrize(("sender", "receiver"), [(1, 2), (2, 1), (3, 0)])
def test_one_lost_direction_names_both_ranks(sender: int, receiver: int) -> None:
    found = judged(world((sender, receiver)))
    assert found.kind is VerdictKind.HANG_IN_COMMUNICATION
    assert found.culprits == ()
    assert found.victims == (0, 1, 2, 3)
    assert found.nodes == tuple(sorted((NODES[sender], NODES[receiver])))
    assert (found.confidence, found.act_immediately) == (Confidence.CERTAIN, True)
    assert found.text == (
        f"nothing that rank {sender} on node{sender} sends to rank {receiver} on node{receiver} "
        "arrives, and ranks 0 to 3 wait for it"
    )
    # Each end shows it: one has its data not received, the other its data not acknowledged.
    not_received = (
        f"rank {sender} on node{sender} has sent segments to rank {receiver}, which has not"
    )
    received = (
        f"rank {receiver} on node{receiver} has sent segments to rank {sender}, which has rec"
    )
    assert {True} == {any(one.startswith(text) for one in found.evidence)
                      for text in (not_received, received)}  # fmt: skip
    assert any("all 4 ranks of the default group have entered" in one for one in found.evidence)


def test_a_pair_without_data_in_both_directions() -> None:
    found = judged(world((1, 2), (2, 1)))
    assert found.text.startswith(
        "the connection between rank 1 on node1 and rank 2 on node2 carries no data"
    )


def test_acknowledgements_alone_that_are_lost_show_the_other_direction() -> None:
    """Only rank 2 has sent: its data arrives, and what rank 1 answers does not."""
    lost = connection(2, 1, frozenset({(1, 2)}))
    idle = replace(connection(1, 2, frozenset({(1, 2)})), stalled_s=0.0, acked_bytes=0)
    views = {
        0: waiting(0),
        1: waiting(1, connections=(idle,)),
        2: waiting(2, connections=(lost,)),
        3: waiting(3),
    }
    assert judged(views).text.startswith("nothing that rank 1 on node1 sends to rank 2 on node2")


def test_what_a_card_does_not_send_or_receive_names_its_node() -> None:
    sends = judged(world(*((1, other) for other in (0, 2, 3))))
    assert sends.nodes == ("node1",)
    assert sends.text.startswith("nothing that node node1 sends to nodes node0, node2, node3 arriv")
    receives = judged(world(*((other, 1) for other in (0, 2, 3))))
    assert receives.nodes == ("node1",)
    assert receives.text.startswith(
        "nothing that nodes node0, node2, node3 send to node node1 arrives"
    )
    both = judged(world(*((1, one) for one in (0, 2)), *((one, 1) for one in (0, 2))))
    assert both.nodes == ("node1",)
    assert both.text.startswith(
        "the connections between nodes node0 and node1, node1 and node2 carry no data"
    )


def test_many_pairs_are_counted() -> None:
    found = judged(
        world(*combinations(range(4), 2), *((b, a) for a, b in combinations(range(4), 2)))
    )
    assert found.nodes == ("node0", "node1", "node2", "node3")
    assert "node0 and node1, node0 and node2, node0 and node3 and 3 more carry" in found.text


def test_several_ranks_of_two_nodes_name_the_nodes() -> None:
    views = world((0, 2), (1, 2))
    found = find_hang(views, {0: "a", 1: "a", 2: "b", 3: "c"}, SETTINGS, limit_s=8.5)
    assert found is not None
    assert found.text.startswith("nothing that node a sends to node b arrives")


def test_one_end_alone_is_no_proof() -> None:
    """Of many connections only a part is reported: the other end shows its node, not its rank."""
    views = world((1, 2))
    shown = tuple(one for one in views[2].connections if one.remote[0] != "10.0.0.1")
    views[2] = replace(views[2], connections=shown)
    found = judged(views)
    assert found.text.startswith("nothing that node node1 sends to node node2 arrives")
    assert (found.confidence, found.act_immediately) == (Confidence.LIKELY, False)
    assert found.evidence[0].startswith("rank 1 on node1 has sent segments to node2 (10.0.0.1:")


def without(view: RankView, peer: int) -> RankView:
    """The view without its end of the connection with this rank."""
    shown = [one for one in view.connections if one.remote[0] != f"10.0.0.{peer}"]
    return replace(view, connections=tuple(shown))


@pytest.mark.parametrize("hidden", [0, 3])
def test_stalls_with_one_known_end_do_not_count_if_others_have_both(hidden: int) -> None:
    """Rank 2 accepts from ranks 0 and 1, and connects to rank 3."""
    views = world((2, 1), (2, hidden))
    views[hidden] = without(views[hidden], 2)
    (alone,) = stalled_connections(
        {**world((2, hidden)), hidden: views[hidden]}, NODES, limit_s=LIMIT_S
    )
    assert (alone.node, alone.peer_rank, alone.peer_node) == ("node2", None, f"node{hidden}")
    found = judged(views)
    assert found.nodes == ("node1", "node2")
    assert found.text.startswith("nothing that rank 2 on node2 sends to rank 1 on node1 arrives")
    assert not any(f"node{hidden}" in one for one in found.evidence)
    assert found.act_immediately


def test_a_stalled_connection_to_a_port_of_no_rank_is_left_out() -> None:
    """A file server on a node of the run, which is not a rank."""
    views = world()
    other = RankConnection(("10.0.0.1", 700), ("10.0.0.2", 2049), stalled_s=9.0, retransmits=4)
    views[1] = replace(views[1], connections=(other, *views[1].connections))
    assert stalled_connections(views, NODES, limit_s=LIMIT_S) == []


def test_there_is_no_proof_while_a_member_of_the_group_is_not_read() -> None:
    views = world((1, 2))
    views[3] = replace(views[3], groups=(), is_recorder_complete=False)
    found = judged(views)
    assert found.nodes == ("node1", "node2")
    assert (found.confidence, found.act_immediately) == (Confidence.LIKELY, False)
    assert "whether rank 3 entered all_reduce #5 of the default group is not known" in (
        found.counter_evidence
    )


@pytest.mark.parametrize(
    ("acked_s", "carries"), [(-1.0, False), (7.5, False), (6.6, False), (2.0, True), (0.0, True)]
)
def test_another_connection_between_the_same_addresses_shows_that_the_link_carries_data(
    acked_s: float, carries: bool
) -> None:
    views = world((1, 2))
    for remote, shown in ((("10.0.0.2", 9), carries), (("10.0.0.3", 9), False)):
        other = RankConnection(("10.0.0.1", 8), remote, acked_s=acked_s)
        with_other = {**views, 1: replace(views[1], connections=(*views[1].connections, other))}
        found = judged(with_other)
        assert found.act_immediately
        words = "other connections between the same addresses carry data"
        assert (words in found.evidence) is shown


def test_two_links_carry_data_only_if_others_of_both_do() -> None:
    views = world((1, 2), (1, 3))
    stalled = stalled_connections(views, NODES, limit_s=LIMIT_S)
    assert not others_carry_data(stalled, views)
    assert not others_carry_data([], views)
    for peer, carries in ((2, False), (3, True)):
        # The other end has sent: what it got acknowledged came through too.
        other = RankConnection((f"10.0.0.{peer}", 8), ("10.0.0.1", 9), acked_s=1.0)
        known = (*views[peer].connections, other)
        views[peer] = replace(views[peer], connections=known)
        assert others_carry_data(stalled, views) is carries


def test_a_short_stall_and_connections_to_others_are_left_out() -> None:
    one = connection(1, 2, frozenset({(1, 2)}))
    for changed in (
        replace(one, stalled_s=LIMIT_S - 0.1),
        replace(one, remote=("8.8.8.8", 443)),
        replace(one, remote=("10.0.0.1", 1)),
    ):
        views = world()
        views[1] = replace(views[1], connections=(changed,))
        assert stalled_connections(views, NODES, limit_s=LIMIT_S) == []


def test_a_node_that_drops_what_it_sends_could_send_nothing() -> None:
    views = world((1, 2))
    views[1] = replace(views[1], connections=tuple(
        replace(one, retransmits=0) for one in views[1].connections))  # fmt: skip
    found = judged(views)
    assert found.text.startswith("nothing that rank 1 on node1 sends to rank 2 on node2 arrives")
    assert "rank 1 on node1 could send nothing to rank 2 for 7.5 s (10.0.0.1:" in found.evidence[0]


def test_an_address_of_ipv6_is_written_in_brackets() -> None:
    views = {
        rank: waiting(rank, connections=(replace(
            connection(rank, 1 - rank, frozenset({(0, 1)})),
            local=(f"fd00::{rank}", 1), remote=(f"fd00::{1 - rank}", 1), retransmits=1),))
        for rank in (0, 1)
    }  # fmt: skip
    (one, _) = stalled_connections(views, NODES, limit_s=LIMIT_S)
    assert "([fd00::0]:1 to [fd00::1]:1)" in one.text
    assert one.text.endswith("segments were sent again once")


SEND = "/v/site-packages/torch/distributed/distributed_c10d.py:9 in send"


def test_a_rank_that_is_held_up_in_a_send_is_a_victim() -> None:
    views = world((1, 2))
    views[1] = behind(1, stack=(SEND, "/me/t.py:4 in step"), connections=views[1].connections)
    found = judged(views)
    assert (found.kind, found.culprits) == (VerdictKind.HANG_IN_COMMUNICATION, ())
    assert found.victims == (0, 1, 2, 3)


@pytest.mark.parametrize("changes", [{}, {"process": "T"}, {"holds_gil": True}])
def test_a_rank_that_is_elsewhere_stays_the_culprit(changes: dict[str, object]) -> None:
    views = world((1, 2))
    views[1] = behind(1, connections=views[1].connections, **changes)
    assert judged(views).culprits == (1,)


def test_without_a_stalled_connection_nothing_is_changed() -> None:
    verdict = judged(world())
    assert with_stalled(verdict, [], {0: view(0)}) is verdict
