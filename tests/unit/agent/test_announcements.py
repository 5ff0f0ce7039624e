"""One failure is announced once, however many notes it leads to."""

import pytest

from ftrun.agent.announcements import Announcements
from ftrun.recovery.commands import JournalEntry

KILLED = "rank 1 (pid 7) was killed by SIGKILL"


def test_a_cause_is_printed_once_until_the_next_generation_begins() -> None:
    made = Announcements()
    assert [made.is_new(KILLED), made.is_new(KILLED)] == [True, False]
    assert made.beginning(KILLED, 1, "step 3") == "generation 1 starts from step 3"
    assert made.is_new(KILLED), "the same failure again is news"


def test_what_is_not_printed_yet_stands_before_what_begins() -> None:
    made = Announcements()
    begins = "generation 2 starts from the beginning"
    assert made.beginning(KILLED, 2, "the beginning") == f"{KILLED}; {begins}"
    made.is_new(KILLED)
    more = f"{KILLED}; the script does not call ftrun.attach"
    assert made.beginning(more, 2, "the beginning") == (
        f"the script does not call ftrun.attach; {begins}"
    )


@pytest.mark.parametrize(("is_member", "count"), [(False, 2), (True, 1)])
def test_a_leader_without_ranks_prints_the_same_loss_again_in_the_next_generation(
    caplog: pytest.LogCaptureFixture, is_member: bool, count: int
) -> None:
    """A member prints the cause in front of what begins, which is when it forgets it."""
    lost = JournalEntry("NodeLost", "node b is lost: the connection is refused", say=True)
    began = JournalEntry("Generation", "generation 3: 2 nodes, 2 ranks")
    announcements = Announcements()
    for one in (lost, lost, began, lost):
        announcements.show(one, has_ranks=is_member)
    assert caplog.messages == [lost.text] * count
