"""Waits in counted messages: culprits, cycles, ranks that have left their order."""

from typing import Any

from unit.monitor.ranks import view

from ftrun.config.profile import HangConfig
from ftrun.monitor.hang_detector import find_hang
from ftrun.monitor.verdicts import (
    Confidence,
    MessageCount,
    OpenMessage,
    ProcessGroupView,
    RankView,
    Verdict,
    VerdictKind,
)
from ftrun.monitor.wait_graph import waits_of

RANKS = (0, 1, 2, 3)


def rank(
    number: int,
    wait: tuple[str, int] | None = None,
    *,
    count: int = 5,
    tag: int = 0,
    called: dict[tuple[str, int], int] | None = None,
    **more: Any,
) -> RankView:
    """A rank that waits in its message number `count`; `called` has the counts of others."""
    groups: tuple[ProcessGroupView, ...] = ()
    counts = [MessageCount("0", op, peer, 0, known) for (op, peer), known in (called or {}).items()]
    if wait is not None:
        message = OpenMessage(*wait, count, 5.0, tag=tag, is_counted=True)
        groups = (ProcessGroupView("0", "default_pg", RANKS, (), messages=(message,)),)
        counts.append(MessageCount("0", *wait, tag, count))
    return view(number, groups=groups, message_counts=tuple(counts), **more)


def judged(*views: RankView) -> Verdict:
    by_rank = {one.rank: one for one in views}
    found = find_hang(by_rank, dict.fromkeys(by_rank, "here"), HangConfig(), limit_s=8.5)
    assert found is not None
    return found


def pipeline(*, culprit: RankView) -> list[RankView]:
    """Stage 0 waits for its gradient, stages 2 and 3 for their activation."""
    others = [
        rank(0, ("recv", 1), called={("send", 1): 5}),
        rank(2, ("recv", 1), called={("send", 1): 4}),
        rank(3, ("recv", 2)),
    ]
    return [*others, culprit]


def test_a_rank_in_its_own_code_is_the_culprit() -> None:
    culprit = rank(1, called={("send", 2): 4, ("send", 0): 4, ("recv", 0): 5})
    found = judged(*pipeline(culprit=culprit))
    assert (found.kind, found.culprits, found.victims) == (
        VerdictKind.HANG_IN_COMPUTATION,
        (1,),
        (0, 2, 3),
    )
    assert "recv from rank 1 of the default group" in found.text


def test_a_stopped_rank_is_the_culprit_whatever_it_has_called() -> None:
    called = {("send", 2): 5, ("send", 0): 5, ("recv", 0): 5}
    found = judged(*pipeline(culprit=rank(1, called=called, process="T")))
    assert (found.kind, found.culprits) == (VerdictKind.FROZEN, (1,))


def test_of_a_cycle_the_rank_that_has_left_its_order_is_the_culprit() -> None:
    """Rank 1 has not sent to rank 2, and waits for the gradient of rank 2."""
    called = {("send", 2): 4, ("send", 0): 4, ("recv", 0): 5}
    left = "message 2 of step 8 is recv from rank 2, which was send to rank 2 in the two before"
    views = pipeline(culprit=rank(1, ("recv", 2), called=called, left_order=left))
    found = judged(*views)
    assert (found.kind, found.culprits, found.victims) == (VerdictKind.DEADLOCK, (1,), (0, 2, 3))
    assert (found.confidence, found.act_immediately) == (Confidence.CERTAIN, True)
    assert found.text == (
        "rank 1 has left the order of the messages of earlier steps at train.py:42 in step, and "
        f"ranks 0, 2 and 3 wait: {left}"
    )
    assert found.evidence[0] == f"rank 1: {left}"
    assert "rank 1 waits in recv from rank 2 of the default group for rank 2" in found.evidence


def test_two_that_have_left_their_order_are_named_together() -> None:
    called = {("send", 2): 4, ("send", 0): 4, ("recv", 0): 5}
    culprit = rank(1, ("recv", 2), called=called, left_order="a", stack=())
    views = pipeline(culprit=culprit)
    views[1] = rank(2, ("recv", 1), called={("send", 1): 4}, left_order="b")
    found = judged(*views)
    assert found.culprits == (1, 2)
    assert found.text.startswith("ranks 1 and 2 have left the order of the messages of earlier")


def test_without_it_all_of_the_cycle_are_named() -> None:
    called = {("send", 2): 4, ("send", 0): 4, ("recv", 0): 5}
    found = judged(*pipeline(culprit=rank(1, ("recv", 2), called=called)))
    assert (found.kind, found.culprits) == (VerdictKind.DEADLOCK, (1, 2))
    assert found.text == (
        "ranks 1 and 2 wait for one another: none of them has called the message that another "
        "waits for"
    )


def test_another_tag_is_another_message() -> None:
    sends = rank(1, ("send", 2), count=1, tag=7)
    assert waits_of({1: sends, 2: rank(2, ("recv", 1), count=1)}).edges == {1: {2}, 2: {1}}


def test_a_message_that_both_have_called_waits_for_the_connection() -> None:
    found = judged(rank(1, ("send", 2)), rank(2, ("recv", 1)))
    assert (found.kind, found.culprits) == (VerdictKind.HANG_IN_COMMUNICATION, ())
    assert found.text == "ranks 1 and 2 wait for messages that do not arrive"
    assert (found.confidence, found.counter_evidence) == (Confidence.LIKELY, ())
    assert (
        "rank 1 has entered send to rank 2 of the default group, which rank 2 has called too"
        in found.evidence
    )
    # Others wait for ranks of such a message.
    waiting = rank(0, ("recv", 1))
    assert judged(waiting, rank(1, ("send", 2)), rank(2, ("recv", 1))).culprits == ()


def test_a_send_is_met_by_a_receive_of_any_rank() -> None:
    sends = rank(1, ("send", 0), count=5)
    graph = waits_of({0: rank(0, ("recv", -1), count=5), 1: sends})
    assert (graph.edges, graph.undelivered) == ({}, {0: -1, 1: 0})
    # Its calls for the messages of other ranks do not meet this one.
    others = {2: rank(2, called={("send", 0): 9}), 1: sends}
    graph = waits_of({0: rank(0, called={("recv", -1): 13}), **others})
    assert (graph.edges, graph.undelivered) == ({1: {0}}, {})


def test_a_receive_of_any_rank_waits_for_all_that_have_sent_nothing_new() -> None:
    views = {0: rank(0, ("recv", -1), count=5)} | {
        one: rank(one, called={("send", 0): count}) for one, count in ((1, 2), (2, 2), (3, 0))
    }
    assert waits_of(views).edges == {0: {1, 2, 3}}
    views[3] = rank(3, called={("send", 0): 1})
    graph = waits_of(views)
    assert (graph.edges, graph.undelivered) == ({}, {0: -1})
