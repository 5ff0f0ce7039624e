"""Messages that no flight recorder has: what a rank waits for, its counts, and its order."""

from ftrun.monitor.order.messages import (
    ANY,
    RecordedMessage,
    call_of,
    group_key,
    left_order,
    message_counts,
    waits_before,
    with_waited,
)
from ftrun.monitor.verdicts import CollectiveCall, MessageCount, OpenMessage, ProcessGroupView

GROUPS = {"0": (0, 1, 2, 3), "5": (1, 2)}
STEP = (("recv", 0, 0), ("send", 2, 0), ("recv", 2, 0), ("send", 0, 0))
"""The messages of a stage in one step: operation, peer, tag."""

Calls = tuple[tuple[str, int, int], ...]


def recorded(*steps: Calls, first: int = 1, group: str = "0") -> list[RecordedMessage]:
    found: list[RecordedMessage] = []
    for step, calls in enumerate(steps):
        for op, peer, tag in calls:
            number, is_send = first + len(found), op == "send"
            count = 1 + sum((one.is_send, one.peer) == (is_send, peer) for one in found)
            at_ns = number * 10**9
            found.append(
                RecordedMessage(
                    number, step, at_ns, at_ns, at_ns + 5 * 10**8, number * 5 * 10**8,
                    group_key(group), tag, count, peer, is_send,
                )
            )  # fmt: skip
    return found


def test_counts_are_those_of_the_newest_call_of_each_kind() -> None:
    counts = message_counts(recorded(STEP, STEP), GROUPS)
    assert set(counts) == {
        MessageCount("0", "recv", 0, 0, 2),
        MessageCount("0", "send", 2, 0, 2),
        MessageCount("0", "recv", 2, 0, 2),
        MessageCount("0", "send", 0, 0, 2),
    }
    unknown = message_counts(recorded(STEP, group="9"), GROUPS)
    assert {one.group for one in unknown} == {""}


def test_the_waited_message_is_in_its_group() -> None:
    (one,) = recorded((("recv", 2, 7),))
    (group,) = with_waited((), one, GROUPS, now_ns=3 * 10**9)
    assert group.messages == (OpenMessage("recv", 2, 1, 2.0, tag=7, is_counted=True),)
    assert (group.name, group.ranks, group.is_waiting) == ("0", (0, 1, 2, 3), True)
    assert call_of(group) == "recv from rank 2 with tag 7 of the default group"

    known = ProcessGroupView("5", "pp", (1, 2), (CollectiveCall(3, "all_reduce"),), 0)
    (one,) = recorded((("recv", ANY, 0),), group="5")
    (shown,) = with_waited((known,), one, GROUPS, now_ns=3 * 10**9)
    assert (shown.desc, shown.calls) == ("pp", known.calls)
    assert call_of(shown) == "recv from any rank of group pp"
    other = with_waited((known,), recorded(STEP)[0], GROUPS, now_ns=3 * 10**9)
    assert [group.name for group in other] == ["5", "0"]


def test_without_a_message_or_its_group_nothing_is_added() -> None:
    known = (ProcessGroupView("0", "", (0, 1), (), 0),)
    assert with_waited(known, None, GROUPS, now_ns=0) == known
    (one,) = recorded((("recv", 2, 0),), group="9")
    assert with_waited(known, one, GROUPS, now_ns=0) == known


def test_a_rank_that_does_as_before_has_not_left_its_order() -> None:
    assert left_order([], 0) == ""
    for now in ((), STEP[:1], STEP):
        assert left_order(recorded(STEP, STEP, now), 2) == ""


def test_another_message_than_before() -> None:
    tag = (STEP[0], ("send", 2, 7))
    assert left_order(recorded(STEP, STEP, tag), 2) == (
        "message 2 of step 3 is send to rank 2 with tag 7, which was send to rank 2 in the two "
        "steps before"
    )
    skipped = (STEP[0], STEP[2])
    assert "message 2 of step 3 is recv from rank 2, which was send to rank 2" in left_order(
        recorded(STEP, STEP, skipped), 2
    )
    more = (*STEP, ("send", 3, 0))
    assert left_order(recorded(STEP, STEP, more), 2) == (
        "message 5 of step 3 is send to rank 3; the two steps before had 4"
    )


def test_a_message_that_the_last_complete_step_did_not_have() -> None:
    messages = recorded(STEP, STEP, STEP[:3], STEP[:1])
    assert left_order(messages, 3) == (
        "message 4 of step 3 is missing, which was send to rank 0 in the two steps before"
    )
    assert left_order(messages, 2) == "", "the step is not complete"


def test_a_schedule_that_changes_proves_nothing() -> None:
    other = (("recv", 0, 1),)
    assert left_order(recorded(STEP, other, STEP, other), 3) == ""
    assert left_order(recorded(STEP, other), 1) == "", "two steps are needed"
    # The first message of step 0 is not in the ring any more.
    cut = recorded(STEP, STEP, other)[1:]
    assert left_order(cut, 2) == ""


def test_the_waits_before_a_collective() -> None:
    messages = recorded(STEP)  # they end at 1.5, 2.5, 3.5 and 4.5 s, after 0.5 s each
    entered = [("1", 1, 1.2), ("1", 2, 2.5), ("1", 3, 9.0)]
    assert waits_before(entered, messages) == (tuple(entered), (0.0, 1.0, 2.0))
    assert waits_before(entered, messages[1:]) == (tuple(entered[1:]), (1.0, 2.0))
    assert waits_before(entered, ()) == ((), ())
