"""Waits on devices: ranks that are behind, that have not started, and messages between ranks."""

import pytest
from msgspec.structs import replace
from unit.monitor.ranks import view

from ftrun.config.profile import HangConfig
from ftrun.monitor.hang_detector import find_hang
from ftrun.monitor.verdicts import (
    CollectiveCall,
    Confidence,
    OpenMessage,
    ProcessGroupView,
    RankView,
    Verdict,
    VerdictKind,
)
from ftrun.monitor.wait_graph import waits_of


def judged(views: dict[int, RankView]) -> Verdict:
    found = find_hang(views, dict.fromkeys(views, "here"), HangConfig(), limit_s=8.5)
    assert found is not None
    return found


def group(head: int, *, entered: int = 9, op: str = "all_reduce", **changes: object) -> (
    ProcessGroupView
):  # fmt: skip
    """A group of four ranks on devices; `head` 0: nothing is open."""
    calls = (CollectiveCall(head, op),) if head else ()
    known = {"waits_s": 5.0, "still_s": 6.0, "enqueued": entered, "is_on_device": True, **changes}
    return ProcessGroupView("0", "dp", (0, 1, 2, 3), calls, head, **known)  # type: ignore[arg-type]


def views_of(*groups: ProcessGroupView) -> dict[int, RankView]:
    return {rank: view(rank, groups=(one,)) for rank, one in enumerate(groups)}


def behind(op: str = "all_reduce", **changes: object) -> dict[int, RankView]:
    """The device of rank 2 has not completed what the others have."""
    views = views_of(group(7), group(7), group(5, op=op), group(7))
    return {**views, 2: view(2, groups=views[2].groups, **changes)}


SYNC = ("/v/torch/cuda/__init__.py:5 in synchronize", "/me/t.py:3 in f")


def test_a_device_that_has_not_completed_what_others_have_is_stuck() -> None:
    found = judged(behind(cpu=1.0, still_s=0.0, unmoved_s=6.0, stack=SYNC))
    assert (found.kind, found.culprits, found.victims) == (
        VerdictKind.DEVICE_STUCK,
        (2,),
        (0, 1, 3),
    )
    assert found.act_immediately
    assert found.text == (
        "rank 2 on here has a device that is stuck at t.py:3 in f, and ranks 0, 1 and 3 wait in "
        "all_reduce #7 of group dp"
    )
    assert "ranks 0, 1 and 3 have completed all_reduce #5 of group dp, and rank 2 has only " \
        "called it" in found.evidence  # fmt: skip


def test_the_time_since_the_others_have_completed_is_evidence_where_it_is_recorded() -> None:
    views = behind()
    own = tuple(replace(one, left_s=12.34) for one in views[3].groups)
    views[3] = replace(views[3], groups=own)
    assert "ranks 0, 1 and 3 have completed all_reduce #5 of group dp 12.3 s ago, and rank 2 has " \
        "only called it" in judged(views).evidence  # fmt: skip


@pytest.mark.parametrize(
    ("op", "host"), [("broadcast", {}), ("all_reduce", {"still_s": 0.0, "unmoved_s": 1.0})]
)
def test_a_long_kernel_or_a_host_that_moves_gets_time(op: str, host: dict[str, object]) -> None:
    found = judged(behind(op, **host))
    assert (found.kind, found.culprits) == (VerdictKind.DEVICE_STUCK, (2,))
    assert not found.act_immediately
    assert ("may run a long kernel" in " ".join(found.counter_evidence)) == (op == "broadcast")


def test_a_saving_host_does_not_excuse_its_device() -> None:
    saving = ("/x/site-packages/torch/serialization.py:1 in save", "/me/t.py:3 in f")
    found = judged(behind(stack=saving))
    assert (found.may_take_long, found.act_immediately) == (False, True)


def test_a_stopped_host_comes_before_its_device() -> None:
    assert judged(behind(process="T")).kind is VerdictKind.FROZEN


def test_all_others_may_be_done() -> None:
    views = views_of(group(0), group(0), group(9), group(0))
    assert judged(views).culprits == (2,)
    unproven = {**views, 2: view(2, groups=(replace(views[2].groups[0], calls=()),))}
    found = judged(unproven)
    assert (found.culprits, found.act_immediately) == ((2,), False)


def test_what_a_proven_device_waits_for_does_not_matter() -> None:
    message = OpenMessage("recv", 3, 1, 5.0)
    views = views_of(group(7), group(7), group(5, messages=(message,)), group(7))
    assert waits_of(views).edges[2] == {3}
    assert judged(views).culprits == (2,)


def test_without_a_device_the_connection_is_at_fault() -> None:
    views = views_of(*(group(head, is_on_device=False) for head in (7, 7, 5, 7)))
    found = judged(views)
    assert (found.kind, found.culprits) == (VerdictKind.HANG_IN_COMMUNICATION, ())
    assert "ranks 2 cannot" in found.text or "rank 2 cannot" in found.text


def test_a_host_that_has_not_called_it_is_no_stuck_device() -> None:
    found = judged(views_of(group(7), group(7), group(0, entered=6), group(7)))
    assert (found.kind, found.culprits) == (VerdictKind.HANG_IN_COMPUTATION, (2,))
    assert "rank 2 entered only #6 of that group" in found.evidence


def test_a_computing_host_does_not_release_its_device() -> None:
    """Rank 1 computes, and its device waits for rank 2, which has not called the collective."""
    views = views_of(group(7), group(7), group(0, entered=6), group(7))
    views[1] = replace(views[1], cpu=1.0, still_s=0.0)
    assert waits_of(views).edges == {0: {2}, 1: {2}, 3: {2}}


def test_the_one_that_has_not_started_is_named_and_gets_time() -> None:
    views = views_of(*(group(7, has_started=rank != 1) for rank in range(4)))
    found = judged(views)
    assert (found.kind, found.culprits, found.act_immediately) == (
        VerdictKind.DEVICE_STUCK,
        (1,),
        False,
    )
    assert any("have started all_reduce #7 of group dp, and rank 1 has only" in one
               for one in found.evidence)  # fmt: skip


@pytest.mark.parametrize("starts", [(True,) * 4, (True, False, None, True), (None,) * 4])
def test_if_all_have_started_or_starts_are_not_recorded(starts: tuple[bool | None, ...]) -> None:
    found = judged(views_of(*(group(7, has_started=one) for one in starts)))
    assert (found.kind, found.culprits) == (VerdictKind.HANG_IN_COMMUNICATION, ())


def messages(*own: tuple[str, int]) -> ProcessGroupView:
    return group(0, messages=tuple(OpenMessage(op, peer, 1, 5.0) for op, peer in own))


def test_a_chain_of_messages_ends_at_the_rank_without_a_counterpart() -> None:
    """Stage 0 sends to 1, which receives from 0 only after it has received from 2."""
    views = views_of(messages(("send", 1)), messages(("recv", 2)), messages(("recv", 3)), group(0))
    assert waits_of(views).edges == {0: {1}, 1: {2}, 2: {3}}
    found = judged(views)
    assert (found.kind, found.culprits) == (VerdictKind.HANG_IN_COMPUTATION, (3,))
    assert found.text.endswith("wait in recv from rank 3 of group dp")
    assert "rank 2 has entered recv from rank 3 of group dp and not left it for 5.0 s" in (
        found.evidence
    )


def test_a_message_with_an_open_counterpart_waits_for_no_rank() -> None:
    views = views_of(messages(("send", 1)), messages(("recv", 0)), group(0), group(0))
    assert waits_of(views).edges == {}


def test_an_unknown_or_incomplete_peer() -> None:
    views = views_of(messages(("send", 1)), group(0))
    assert waits_of({0: views[0]}).unknown == {1}
    silent = {**views, 1: view(1)}
    assert waits_of(silent).edges == {0: {1}}
    incomplete = {**views, 1: view(1, is_recorder_complete=False)}
    assert waits_of(incomplete).edges == {}
    absent = {0: view(0, groups=(group(7),)), **dict.fromkeys((1, 2, 3), incomplete[1])}
    assert waits_of(absent).edges == {}


def test_a_recorder_that_cannot_be_read_is_named_and_proves_nothing() -> None:
    """Ranks 0 and 1 wait, 2 has left, and whether 3 has entered is not known."""
    known = (group(7), group(7), group(0, entered=7))
    views = views_of(*(replace(one, is_on_device=False) for one in known))
    unread = view(3, is_recorder_complete=False, recorder_notes=("its recorder cannot be read",))
    found = judged({**views, 3: unread})
    assert (found.kind, found.culprits) == (VerdictKind.HANG_IN_COMMUNICATION, ())
    assert (found.confidence, found.act_immediately) == (Confidence.POSSIBLE, False)
    call = "all_reduce #7 of group dp"
    unknown = f"whether rank 3 entered {call} is not known"
    assert found.text == f"ranks 0 and 1 cannot leave {call}, and {unknown}"
    assert found.counter_evidence == (unknown,)
    assert found.evidence == (
        f"3 ranks of group dp have entered {call}",
        "ranks 0 and 1 have not left it for 5.0 s",
        "rank 2 has left it",
        "rank 3: its recorder cannot be read",
    )


def test_notes_of_a_recorder_are_evidence() -> None:
    note = "its recorder did not answer: its driver may hang"
    views = views_of(group(7), group(7), group(7))
    found = judged({**views, 3: view(3, recorder_notes=(note,))})
    assert found.culprits == (3,)
    assert f"rank 3: {note}" in found.evidence
