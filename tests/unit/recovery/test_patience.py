"""Patience: a wait that says what it waits for, and ends with what to check."""

import pytest

from ftrun.errors import ExitCode
from ftrun.membership.patience import SAY_EVERY_S, JoinTimeout
from ftrun.recovery.commands import EndRun, JournalEntry
from tests.unit.recovery.made import settings

SETTINGS = settings(join_wait_s=100.0)


def test_it_says_now_and_then_what_is_waited_for() -> None:
    made = JoinTimeout(SETTINGS, now_s=50.0)
    said_s = []
    for now_s in range(50, 100):
        found = made.wait(now_s - 50.0, "a is here", gathers=True, now_s=float(now_s))
        if found:
            assert found == [
                JournalEntry("Waiting", f"waiting for {now_s - 50} s: a is here", say=True)
            ]
            said_s.append(now_s - 50)
    assert said_s == [SAY_EVERY_S, 2 * SAY_EVERY_S, 3 * SAY_EVERY_S]


def test_a_wait_that_has_just_begun_says_nothing() -> None:
    made = JoinTimeout(SETTINGS, now_s=50.0)
    assert made.wait(0.0, "4 of 4 nodes are here", gathers=True, now_s=200.0) == []


@pytest.mark.parametrize(
    ("gathers", "code", "advice"),
    [
        (True, ExitCode.NOT_ENOUGH_NODES, "port 29400 of this node is open"),
        (False, ExitCode.TRY_AGAIN, "runs on a.local"),
    ],
)
def test_it_gives_up_after_the_limit_with_what_to_check(
    gathers: bool, code: ExitCode, advice: str
) -> None:
    made = JoinTimeout(SETTINGS, now_s=0.0)
    before = made.wait(99.9, "nobody", gathers=gathers, now_s=99.9)
    assert not any(isinstance(one, EndRun) for one in before)
    (end,) = made.wait(100.0, "nobody", gathers=gathers, now_s=100.0)
    assert isinstance(end, EndRun)
    assert end.exit_code == code
    assert "within 100 s: nobody" in end.why
    assert advice in end.why


@pytest.mark.parametrize("gathers", [True, False])
def test_where_they_meet_at_a_witness_that_is_what_to_check(gathers: bool) -> None:
    made = JoinTimeout(settings(join_wait_s=100.0, etcd=["etcd:2379"]), now_s=0.0)
    (end,) = made.wait(100.0, "nobody", gathers=gathers, now_s=100.0)
    assert isinstance(end, EndRun)
    assert (
        "within 100 s: nobody. Check that ftrun runs on the others, with the same etcd" in end.why
    )
