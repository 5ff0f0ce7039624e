"""The log lines on the cause of a generation, and the variables that set the rails of ranks."""

import pytest

from ftrun.agent.launch import generation as generations
from ftrun.agent.launch.generation import Announcements
from ftrun.records.membership import GenerationChosen, NodeLost
from ftrun.recovery.commands import JournalEntry
from ftrun.wire.cluster.generation import NetworkPlan, Rail
from ftrun.wire.messages.worker import CONFIRM_S
from tests.launch_requests import launch_request
from tests.unit.recovery.made import card, plan

KILLED = "rank 1 (pid 7) was killed by SIGKILL"


def test_a_cause_is_printed_once_until_the_next_generation_begins() -> None:
    made = Announcements()
    assert [made.is_new(KILLED), made.is_new(KILLED)] == [True, False]
    assert made.beginning(KILLED, 1, "step 3") == "generation 1 starts from step 3"
    assert made.is_new(KILLED), "a repeated failure is reported again"


def test_what_is_not_printed_yet_precedes_what_begins() -> None:
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
    """A member prints the cause before the start of the generation, and then drops it."""
    text = "node b is lost: the connection is refused"
    lost = JournalEntry(NodeLost(text, "b", was_member=True), announce=True)
    began = JournalEntry(GenerationChosen("generation 3: 2 nodes, 2 ranks", text, 3, 2, None, ""))
    announcements = Announcements()
    for one in (lost, lost, began, lost):
        announcements.show(one, has_ranks=is_member)
    assert caplog.messages == [text] * count


def test_a_bug_costs_the_variables_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    rails = [Rail("eth7", "10.0.0.1", 24)], [Rail("eth7", "10.0.0.2", 24)]
    cards = [card(one, rails=of) for one, of in zip("ab", rails, strict=True)]
    running = plan(0, cards, paths=NetworkPlan(order=["a", "b"], rails=["eth7"]))
    assert generations._path_variables(running, "a")["GLOO_SOCKET_IFNAME"] == "eth7"
    monkeypatch.setattr(generations, "match_rails", breaks)
    assert generations._path_variables(running, "a") == {}


def test_a_rank_waits_longer_for_its_revocation_if_another_node_may_be_lost() -> None:
    assert generations.confirm_s(1, 3.0) == CONFIRM_S == launch_request().confirm_s
    assert generations.confirm_s(2, 30.0) == CONFIRM_S + 60.0
