"""A member: it finds the run, follows its leader, and leads if it is the next in order."""

import pytest
from made_settings import changed

from ftrun.config.cluster import ClusterSize
from ftrun.errors import ExitCode
from ftrun.membership.discovery import MemberRole
from ftrun.membership.events import (
    ConnectFailed,
    ConnectionOpened,
    MessageReceived,
    NodeReported,
    RunFinished,
)
from ftrun.membership.leader.pausing import GONE_S
from ftrun.recovery.commands import (
    Connect,
    EndRun,
    JournalEntry,
    KillWorkers,
    ResumeRanks,
    Send,
    StartRanks,
    SuspendRanks,
)
from ftrun.wire.cluster.membership import (
    Accept,
    Accepted,
    Heartbeat,
    Join,
    JoinAccepted,
    LeaderHeartbeat,
    LeaderInfo,
    Prepare,
    PrepareRejected,
)
from ftrun.wire.cluster.messages import ProbeLinkResult
from tests.unit.membership.agents import STEP_S, Agents
from tests.unit.recovery.made import card, settings

SETTINGS = settings(
    cluster_size=ClusterSize(2, 3, 0),
    last_call_timeout_s=5.0,
    blank_wait_s=2.0,
    pause_timeout_s=100.0,
)


def started(node_ids: str = "abc", **changes: object) -> Agents:
    """A run of these, led by a, that has begun."""
    cluster_size = settings(
        **{"cluster_size": ClusterSize(2, 3, 0), "last_call_timeout_s": 5.0, **changes}
    )
    made = Agents(node_ids, cluster_size)
    made.passes(10.0)
    assert made.leader() == "a"
    return made


def notes(made: Agents, node_id: str, kind: str) -> list[str]:
    return [
        one.record.text for one in made[node_id].reported(JournalEntry) if one.record.kind == kind
    ]


# --- finding the run --------------------------------------------------------------------------


def test_a_first_generation_begins_with_all_nodes() -> None:
    made = Agents("abc", SETTINGS)
    assert [agent.member.role for agent in made.all.values()] == [
        MemberRole.GATHERING,
        MemberRole.JOINING,
        MemberRole.JOINING,
    ]
    assert made["a"].member.discovery.reach == "a is present, and 2 nodes are needed"
    made.passes(1.75)
    assert made.running() == {}, "a leader may connect that looks for a"
    assert made["b"].member.discovery.reach == "3 of 3 nodes are present"
    made.passes(1.0)
    assert made.running() == {"a": 0, "b": 0, "c": 0}
    assert [agent.member.role for agent in made.all.values()] == [
        MemberRole.LEADING,
        MemberRole.FOLLOWING,
        MemberRole.FOLLOWING,
    ]


def test_a_run_on_one_node_needs_no_other_node() -> None:
    made = Agents("a", settings(cluster_size=ClusterSize(1, 1, 0)))
    made.passes(3.0)
    assert made.running() == {"a": 0}
    made.passes(100.0)
    assert made["a"].reported(SuspendRanks) == []


def test_a_pause_of_an_agent_without_a_run_is_no_wait_for_a_leader() -> None:
    """A leader that looks for it could not reach it during the pause."""
    made = Agents("a", settings(cluster_size=ClusterSize(1, 1, 0), blank_wait_s=2.0))
    made.passes(1.0)
    made["a"].is_frozen = True
    made.passes(10.0)
    made.thaw("a")
    made.passes(0.5)
    assert made.running() == {}
    made.passes(1.0)
    assert made.running() == {"a": 0}


def test_a_node_that_was_started_with_other_numbers_is_turned_away() -> None:
    made = Agents("ab", SETTINGS)
    made.start("c", cluster_size=ClusterSize(2, 4, 0))
    made.passes(1.0)
    (end,) = made["c"].reported(EndRun)
    assert end.exit_code == ExitCode.USAGE
    assert "--nnodes/--spares 2:4+0, and this run with 2:3+0" in end.reason
    assert made.role("c") is MemberRole.ENDED


def test_a_joining_node_at_any_agent_gets_the_leader() -> None:
    made = started(cluster_size=ClusterSize(2, 3, 1))
    made.start("d", endpoint_host="b.local")
    made.cut("d", "a")
    made.passes(1.0)
    assert Connect("a.local", 29400, "a") in made["d"].sent, "b has reported it"
    assert made.role("d") is MemberRole.JOINING
    made.heal()
    made.passes(3.0)
    assert (made.role("d"), made.leader()) == (MemberRole.FOLLOWING, "a")
    assert made["d"].runs == -1, "it is a member from the next generation on"


TWO_ENDPOINTS = changed(SETTINGS, more_endpoints=[("b.local", 29400)])


def test_a_run_with_several_endpoints_begins_at_the_first() -> None:
    """Also for a node that is linked to a node that was connected to another one earlier."""
    made = Agents("bc", TWO_ENDPOINTS)
    made.passes(3.0)
    assert made.running() == {}
    assert frozenset("bc") in made.links
    made.start("a")
    made.passes(5.0)
    assert made.running() == {"a": 0, "b": 0, "c": 0}


def test_a_joining_node_finds_the_run_at_another_endpoint_where_the_first_is_dead() -> None:
    made = started(more_endpoints=[("b.local", 29400)], cluster_size=ClusterSize(2, 4, 0))
    made.kill("a")
    made.passes(5.0)
    assert made.leader() == "b"
    made.start("d")
    made.passes(5.0)
    assert (made.role("d"), made.leader()) == (MemberRole.FOLLOWING, "b")


def test_the_leader_looks_for_joining_nodes_at_all_endpoints() -> None:
    made = started(more_endpoints=[("b.local", 29400)])
    made.passes(1.0)
    made["a"].sent.clear()
    made.passes(1.0)
    assert not [one for one in made["a"].sent if isinstance(one, Connect)]
    made.kill("b")
    made.passes(5.0)
    assert Connect("b.local", 29400) in made["a"].sent


def test_a_node_that_gathers_is_not_dialled_in_turn_with_others() -> None:
    made = Agents("ac", changed(TWO_ENDPOINTS, cluster_size=ClusterSize(3, 3, 0)))
    made.passes(3.0)
    made["c"].sent.clear()
    made.passes(3.0)
    assert Connect("b.local", 29400) not in made["c"].sent


def test_a_node_that_finds_no_node_gives_up_in_the_end() -> None:
    made = Agents("b", settings(join_timeout_s=60.0))
    made.passes(59.0)
    assert made["b"].reported(EndRun) == []
    assert notes(made, "b", "waiting_for_nodes")
    made.passes(1.5)
    (end,) = made["b"].reported(EndRun)
    assert end.exit_code == ExitCode.TRY_AGAIN
    assert "refused" in end.reason


def test_a_node_that_waits_for_too_few_gives_up_in_the_end() -> None:
    made = Agents("a", settings(join_timeout_s=60.0))
    made.passes(61.0)
    (end,) = made["a"].reported(EndRun)
    assert end.exit_code == ExitCode.NOT_ENOUGH_NODES


def test_a_node_that_does_not_belong_to_the_run_ends_at_once() -> None:
    made = Agents("b", SETTINGS)
    failed = ConnectFailed("a.local", 29400, "", False, "another secret", final=True)
    made.happens("b", failed)
    assert made["b"].reported(EndRun) == [EndRun(ExitCode.USAGE, "another secret")]


def test_once_in_the_run_a_dial_that_is_no_use_ends_nothing() -> None:
    made = started()
    made.happens("b", ConnectFailed("x.local", 29400, "", False, "another secret", final=True))
    assert made["b"].reported(EndRun) == []


@pytest.mark.parametrize(("given", "code"), [(2, 130), (0, 143)])
def test_a_stop_before_the_run_has_begun_ends_it_here(given: int, code: int) -> None:
    made = Agents("ab", SETTINGS)
    for one in "ab":
        made.happens(one, NodeReported(Heartbeat(generation=-1, stops=1, stop_signal=given)))
        assert [end.exit_code for end in made[one].reported(EndRun)] == [code]


def test_nothing_follows_the_end() -> None:
    made = Agents("b", SETTINGS)
    made.happens("b", NodeReported(Heartbeat(generation=-1, stops=1)))
    count = len(made["b"].done)
    made.passes(100.0)
    assert len(made["b"].done) == count


def test_what_is_not_urgent_goes_with_the_next_heartbeat() -> None:
    made = Agents("b", SETTINGS)
    made.happens("b", NodeReported(Heartbeat(generation=-1, stops=1), is_urgent=False))
    assert made["b"].reported(EndRun) == []


# --- the leader is lost -------------------------------------------------------------------------


def test_the_next_in_order_takes_over_at_once_if_the_leader_is_dead() -> None:
    made = started()
    made.kill("a")
    made.passes(1.0)
    assert made.leader() == "b"
    assert made.running() == {"b": 1, "c": 1}
    assert notes(made, "b", "leader_lost") == ["the leader is lost: a refuses the connection"]


def test_the_next_in_order_takes_over_after_the_deadline_if_the_leader_is_unresponsive() -> None:
    made = started()
    made["a"].is_frozen = True
    made.passes(2.0)
    assert made.running() == {"a": 0, "b": 0, "c": 0}
    made.passes(4.0)
    assert [made[one].runs for one in "bc"] == [1, 1]
    assert notes(made, "b", "leader_lost")


def test_if_the_next_one_is_lost_too_the_one_after_it_takes_over() -> None:
    made = started("abcde", cluster_size=ClusterSize(2, 5, 0))
    made.kill("a", "b")
    made.passes(2.0)
    assert made.leader() == "c"
    assert made.running() == {"c": 1, "d": 1, "e": 1}


def test_a_node_without_a_vote_looks_for_the_run_if_no_voter_is_left() -> None:
    """It then knows of a run that a blank agent at the endpoint does not know: it leads."""
    made = started()
    made.start("d")
    made.passes(2.0)
    assert made.role("d") is MemberRole.FOLLOWING
    made.kill("a", "b", "c")
    assert made.role("d") is MemberRole.JOINING
    made.start("a", 2)
    made.passes(20.0)
    assert made.role("d") is MemberRole.LEADING
    assert made.running() == {}, "no second run is begun"


def test_an_agent_at_the_endpoint_that_is_cut_off_does_not_dial_itself() -> None:
    """It would refuse itself as another node of its name, and end the run."""
    made = started(cluster_size=ClusterSize(2, 2, 1))
    made.kill("a")
    made.passes(5.0)
    made.start("a", 2)
    made.passes(5.0)
    assert (made.role("a"), made.leader()) == (MemberRole.FOLLOWING, "b")
    assert "a" not in {card.node_id for card in made["b"].member.follower.newest_plan.voters}
    made.cut("a")
    made.breaks("a", "b")
    made.breaks("a", "c")
    made.passes(20.0)
    assert made.role("a") in (MemberRole.SEEKING, MemberRole.JOINING)
    assert not [one for one in made["a"].sent if isinstance(one, Connect) and one.host == "a.local"]
    made.heal()
    made.passes(10.0)
    assert (made.role("a"), made.leader()) == (MemberRole.FOLLOWING, "b")


def test_a_restarted_leader_is_no_longer_the_leader() -> None:
    made = started()
    made.start_again("a")
    made.passes(10.0)
    assert made.leader() == "b"
    assert set(made.running()) >= {"b", "c"}


def test_ranks_wait_before_the_leader_may_have_been_replaced() -> None:
    made = started()
    made.cut("c")
    made.passes(1.5)
    assert made["c"].reported(SuspendRanks) == []
    made.passes(1.0)
    assert [one.reason for one in made["c"].reported(SuspendRanks)] == [
        "no heartbeat from the leader"
    ]
    assert made["c"].member.suspension.is_on
    assert made.running() == {"a": 0, "b": 0, "c": 0}, "no node has replaced it yet"


def test_a_short_gap_is_over_without_a_new_generation() -> None:
    made = started(failure_timeout_s=5.0)
    made.cut("c")
    made.passes(2.5)
    made.heal()
    made.passes(1.0)
    assert [one.reason for one in made["c"].reported(ResumeRanks)] == [
        "the leader is reachable again"
    ]
    assert not made["c"].member.suspension.is_on
    assert made.running() == {"a": 0, "b": 0, "c": 0}


def test_a_leader_that_is_cut_off_has_its_ranks_wait_and_comes_back_next_to_the_others() -> None:
    made = started()
    made.cut("a")
    made.passes(3.0)
    assert [one.reason for one in made["a"].reported(SuspendRanks)] == [
        "heartbeats from too few of the other nodes"
    ]
    made.passes(5.0)
    assert [made[one].runs for one in "bc"] == [1, 1]
    made.heal()
    made.passes(15.0)
    assert made.leader() == "b"
    assert made["a"].reported(KillWorkers) == [
        KillWorkers("generation 1 has started without this node")
    ]
    assert made.running() == {"a": 2, "b": 2, "c": 2}


def test_a_node_that_is_cut_off_alone_ends_no_healthy_generation() -> None:
    made = started()
    made.cut("c", "a")
    made.passes(20.0)
    assert made.leader() == "" or made.leader() == "a"
    assert made.role("a") is MemberRole.LEADING
    assert made["a"].runs == made["b"].runs
    made.heal()
    made.passes(20.0)
    assert made.leader() == "a"


# --- a paused process -------------------------------------------------------------------------


def test_an_agent_that_was_paused_checks_its_lease() -> None:
    made = started(failure_timeout_s=5.0)
    made["c"].is_frozen = True
    made.passes(2.5)
    made.cut("c")
    made.thaw("c")
    assert [one.reason for one in made["c"].reported(SuspendRanks)] == [
        "this node was paused, and the run may have continued without it"
    ]
    made.heal()
    made.passes(1.0)
    assert made["c"].reported(ResumeRanks)
    assert made.running() == {"a": 0, "b": 0, "c": 0}


def test_an_agent_that_was_paused_too_long_finds_the_run_continued() -> None:
    made = started()
    made["c"].is_frozen = True
    made.passes(10.0)
    assert [made[one].runs for one in "ab"] == [1, 1]
    made.thaw("c")
    made.passes(20.0)
    assert made["c"].member.follower.plan is not None
    assert made["c"].member.follower.generation >= 1
    assert made.leader() == "a"


# --- restarted agents -------------------------------------------------------------------------


def test_an_agent_that_was_started_again_finds_its_run() -> None:
    made = started()
    made.start_again("c")
    assert made.role("c") is MemberRole.SEEKING
    made.passes(20.0)
    assert made.leader() == "a"
    assert made.role("c") is MemberRole.FOLLOWING


def test_a_run_whose_agents_were_all_started_again_continues() -> None:
    made = started()
    for one in "abc":
        made.start_again(one)
    made.passes(20.0)
    assert made.leader()
    assert set(made.running()) == set("abc")
    assert min(made.running().values()) >= 1


def test_a_blank_agent_at_the_endpoint_begins_no_second_run() -> None:
    """Rule 1: it waits for the leader, which looks for it."""
    made = started()
    made.kill("a")
    made.passes(5.0)
    made.start("a", 2)
    made.passes(30.0)
    assert made.leader() == "b"
    assert made["a"].member.follower.generation >= 1


# --- connections ------------------------------------------------------------------------------


def test_a_connection_that_breaks_is_recreated_and_nothing_else_happens() -> None:
    made = started()
    made.breaks("a", "c")
    made.passes(5.0)
    made.breaks("b", "c")
    made.passes(1.0)
    assert made.running() == {"a": 0, "b": 0, "c": 0}
    assert made["c"].reported(SuspendRanks) == []


def test_a_leader_at_whose_place_another_agent_answers_is_lost() -> None:
    made = started()
    made.cut("c", "b")
    made.happens("c", ConnectionOpened("a", 2))
    assert notes(made, "c", "leader_lost") == ["the leader is lost: the agent of a was restarted"]


def test_a_dial_that_fails_with_a_connection_reports_nothing() -> None:
    made = started()
    assert made.answers("c", ConnectFailed("a.local", 29400, "a", True, "refused")) == []
    assert made.answers("c", ConnectFailed("b.local", 29400, "b", True, "refused")) == []
    assert made.role("c") is MemberRole.FOLLOWING


def test_a_node_that_leaves_before_the_run_begins_is_no_part_of_it() -> None:
    made = Agents("abc", SETTINGS)
    made.passes(1.0)
    made.kill("c")
    made.passes(8.0)
    assert [node.node_id for node in made.plan("a").members] == ["a", "b"]


# --- a firewall that refuses ------------------------------------------------------------------


def test_two_nodes_that_refuse_each_other_pause_and_continue_together() -> None:
    made = started("ab", cluster_size=ClusterSize(1, 2, 0))
    made.refuse("a")
    made.passes(8.0)
    assert made.running() == {}
    assert made["a"].reported(StartRanks)[1:] == made["b"].reported(StartRanks)[1:] == []
    assert any("PAUSED" in text for text in notes(made, "a", "run_paused"))
    made.heal()
    made.passes(15.0)
    assert set(made.running()) == {"a", "b"}
    assert len(set(made.running().values())) == 1


def test_a_member_whose_spares_all_refuse_it_holds_its_ranks_before_they_continue() -> None:
    made = started("abc", cluster_size=ClusterSize(1, 1, 2), has_checkpoints=True)
    assert made.running() == {"a": 0}
    made.refuse("a")
    while "b" not in made.running() and "c" not in made.running():
        made.passes(0.1)
        assert made.now_s < 1030.0
    assert made["a"].reported(SuspendRanks) or made["a"].runs == -1


# --- cut off while the others finish ----------------------------------------------------------


def apart() -> Agents:
    """A node that was cut off pauses; the others have ended in the meantime."""
    made = started("abc", pause_timeout_s=900.0)
    made.cut("c")
    made.passes(8.0)
    assert made["c"].runs == -1
    made.kill("a", "b")
    made.heal()
    return made


def test_a_node_that_was_cut_off_ends_with_the_result_that_the_run_has_left() -> None:
    made = apart()
    made.passes(5.0)
    assert made["c"].reported(EndRun) == []
    made.happens("c", RunFinished("it has finished"))
    assert made["c"].reported(EndRun) == [EndRun(0, "it has finished", run_continues=True)]


def test_a_node_whose_run_continues_does_not_end_by_an_older_result() -> None:
    made = started("abc")
    for one in "abc":
        made.happens(one, RunFinished("it has finished"))
        assert made[one].reported(EndRun) == []


def test_a_node_that_was_cut_off_from_several_ends_when_all_of_them_have_ended() -> None:
    made = apart()
    made.passes(GONE_S + 10.0)
    assert [end.exit_code for end in made["c"].reported(EndRun)] == [ExitCode.TRY_AGAIN]


def test_of_two_nodes_the_one_that_is_left_continues_waiting() -> None:
    made = started("ab", pause_timeout_s=900.0)
    made.kill("a")
    made.passes(GONE_S + 10.0)
    assert made["b"].reported(EndRun) == []


# --- two leaders ------------------------------------------------------------------------------


def test_a_node_that_receives_from_its_leader_reports_it_to_a_proposer_and_follows_no_other() -> (
    None
):
    made = started()
    made.happens("c", ConnectionOpened("b", 1))
    a = made["a"].card
    assert made.answers("c", MessageReceived("b", LeaderInfo(card("b"), 0, False))) == [
        Send("b", LeaderInfo(a, 0, True))
    ]
    assert made.answers("c", MessageReceived("b", LeaderInfo(card("b"), 0, True))) == []
    assert made.answers("c", MessageReceived("b", LeaderInfo(card("c"), 0, True))) == [], (
        "that is c itself"
    )
    assert made.answers("c", MessageReceived("b", LeaderInfo(a, 0, True))) == [], (
        "it already follows a"
    )
    assert made["c"].member.leader_card == a


def test_a_node_that_does_not_receive_from_its_leader_goes_to_a_settled_one_and_to_no_other() -> (
    None
):
    made = started()
    made.happens("c", ConnectionOpened("b", 1))
    made.cut("c", "a")
    made.passes(2.5)
    a = made["a"].card
    assert made.answers("c", MessageReceived("b", LeaderInfo(card("b"), 0, False))) == [
        Send("b", LeaderInfo(a, 0, False))
    ]
    found = made.answers("c", MessageReceived("b", LeaderInfo(card("b"), 1, True)))
    assert [type(one.message) for one in found if isinstance(one, Send)] == [Join]
    assert made.role("c") is MemberRole.JOINING


def test_a_proposer_gives_way_to_a_settled_leader_and_to_no_other_proposer() -> None:
    made = started()
    made.cut("a", "b")
    made.cut("a", "c")
    made.cut("b", "c")
    made.passes(8.0)
    assert made.role("b") is MemberRole.LEADING
    made.happens("b", ConnectionOpened("c", 1))
    made.happens("b", MessageReceived("c", LeaderInfo(card("c"), 0, False)))
    assert made.role("b") is MemberRole.LEADING
    made.happens("b", MessageReceived("c", LeaderInfo(card("c"), 7, True)))
    assert made.role("b") is MemberRole.JOINING
    assert notes(made, "b", "stepped_down") == ["node c leads"]


def test_a_proposer_whose_voter_receives_from_a_leader_steps_down() -> None:
    made = started()
    made.cut("a", "b")
    made.passes(5.0)
    assert made["c"].runs == made["a"].runs
    assert notes(made, "b", "stepped_down")
    assert made["c"].member.leader_card == made["a"].card


def test_an_agent_that_leads_again_continues_its_heartbeat_numbers() -> None:
    made = started()
    made.passes(5.0)
    received = made["c"].member.follower.received
    made["a"].member._become_leader(made.now_s)
    made.passes(5.0)
    assert made["c"].member.follower.received > received, (
        "c has followed no other leader in between"
    )
    assert notes(made, "a", "NodeLost") == []


def test_a_follower_that_its_leader_does_not_know_joins_it_again() -> None:
    """Its leader proposed itself, stepped down and leads again, and knows only the voters."""
    made = started("abcd")
    assert made.running() == {"a": 0, "b": 0, "c": 0}
    leader = made["a"].member.leader
    assert leader is not None
    del leader.known.by_id["d"]
    made.passes(1.5)
    assert leader.known.get("d") is not None
    assert notes(made, "d", "leader_lost") == []


def test_what_only_a_leader_is_reported_is_dropped_by_any_other_node() -> None:
    made = started()
    for body in (
        Heartbeat(generation=0, number=99),
        Accepted(0, None),
        PrepareRejected(1, 9, None),
        Accept(made.plan("a")),
        JoinAccepted(made.plan("a")),
        LeaderHeartbeat(generation=9, ended=True, number=99),
    ):
        made.happens("c", ConnectionOpened("b", 1))
        assert made.answers("c", MessageReceived("b", body)) == []
    assert made["c"].reported(EndRun) == []
    stray = MessageReceived("z", Heartbeat(generation=0, number=99))
    assert made.answers("a", stray) == [], "it has no connection"
    assert made.running() == {"a": 0, "b": 0, "c": 0}


def test_a_generation_older_than_ones_own_is_not_taken_part_in() -> None:
    made = started()
    first = made.plan("a")
    made.kill("b")
    made.passes(3.0)
    assert made["c"].runs == 1
    made.happens("c", MessageReceived("a", JoinAccepted(first)))
    assert made["c"].member.follower.plan == made.plan("a")
    assert made["c"].runs == 1


def test_a_stale_leader_does_not_take_back_a_node_that_has_promised_another() -> None:
    """The answer to an earlier request comes late; the proposer of the promise is alive."""
    made = started()
    first = made.plan("a")
    made.cut("c")
    made.passes(3.5)
    made.happens(
        "c", MessageReceived("b", Prepare(1, made["b"].card, "the leader is lost", (0, 0)))
    )
    assert made["c"].member.leader_card == made["b"].card
    made.happens("c", MessageReceived("a", JoinAccepted(first)))
    assert made["c"].member.leader_card == made["b"].card
    made.passes(2.25)
    made.happens("c", MessageReceived("a", JoinAccepted(first)))
    assert made["c"].member.leader_card == made["a"].card, "the proposer no longer sends heartbeats"


def minority_that_gives_up() -> Agents:
    """Nodes a and b were cut off from the others for too long; b has not yet received the end."""
    made = started("abcde", cluster_size=ClusterSize(2, 5, 0), pause_timeout_s=20.0)
    for one in "ab":
        made.cut(one, "c", "d", "e")
    made.passes(22.0)
    assert set(made.running()) == set("cde")
    made["b"].is_frozen = True
    while made["a"].member.leader is None or made["a"].member.leader.shutdown.ending is None:
        made.passes(0.25)
    assert made.role("a") is MemberRole.LEADING
    return made


def test_a_minority_that_gives_up_takes_no_node_of_the_majority_in() -> None:
    made = minority_that_gives_up()
    made.heal()
    found = made.answers("a", MessageReceived("c", Join(made["c"].card, "2:5+0", 1)))
    assert not any(isinstance(one, Send) and isinstance(one.message, JoinAccepted) for one in found)
    made.happens("a", ConnectionOpened("d", 1))
    made.passes(1.0)
    assert {one: made[one].reported(EndRun) for one in "cde"} == {"c": [], "d": [], "e": []}
    assert made.running() == {"c": 1, "d": 1, "e": 1}


def test_a_minority_that_gives_up_follows_a_majority_that_comes_back() -> None:
    made = minority_that_gives_up()
    made.heal()
    found = made.answers("a", MessageReceived("c", Prepare(9, made["c"].card, "a test", (1, 0))))
    assert not any(
        isinstance(one, Send) and isinstance(one.message, PrepareRejected) for one in found
    )
    assert made.role("a") is MemberRole.FOLLOWING
    assert made["a"].member.leader_card == made["c"].card


def test_a_minority_that_gives_up_ends_the_nodes_that_have_promised_it() -> None:
    made = minority_that_gives_up()
    made.thaw("b")
    made.passes(1.0)
    for one in "ab":
        assert [end.exit_code for end in made[one].reported(EndRun)] == [ExitCode.NOT_ENOUGH_NODES]


def test_a_leader_that_was_paused_has_its_ranks_wait_until_it_responds_again() -> None:
    made = started(failure_timeout_s=5.0)
    made["a"].is_frozen = True
    made.passes(3.0)
    made.cut("a")
    made.thaw("a")
    assert made["a"].reported(SuspendRanks)
    made.heal()
    made.passes(2.0)
    assert made["a"].reported(ResumeRanks)
    assert made.running() == {"a": 0, "b": 0, "c": 0}


def test_none_gets_a_message_without_a_connection() -> None:
    made = started()
    made.cut("c")
    made.breaks("a", "c")
    before = len(made["c"].sent)
    made.passes(1.5)
    assert [one for one in made["c"].sent[before:] if isinstance(one, Send)] == []


def test_what_a_probe_of_a_link_has_found_is_the_leads_to_judge() -> None:
    made = started()
    assert made.answers("a", MessageReceived("b", ProbeLinkResult(1, "a", 0.001, 1e9, 1e9))) == []


def test_an_agent_that_was_started_again_and_finds_no_node_leads_after_the_deadline() -> None:
    made = started()
    made.start_again("b")
    made.kill("a", "c")
    made.passes(2.0)
    assert made.role("b") is MemberRole.SEEKING
    made.passes(3.0)
    assert made.role("b") is MemberRole.LEADING
    assert made.running() == {}


def test_the_only_voter_that_was_started_again_leads_at_once() -> None:
    made = Agents("a", settings(cluster_size=ClusterSize(1, 1, 0)))
    made.passes(10.0)
    assert made.running() == {"a": 0}
    made.start_again("a")
    made.passes(STEP_S)
    assert made.running() == {"a": 1}


def test_a_killed_agent_is_an_incident_of_the_one_that_follows_and_leads() -> None:
    made = Agents("a", settings(cluster_size=ClusterSize(1, 1, 0)))
    made.passes(10.0)
    again = made.start_again("a")
    again.member.follower.agent_lost_s = made.now_s - 1.5
    made.passes(STEP_S)
    assert again.member.follower.agent_lost_s is None
    assert again.member.leader is not None
    incident = again.member.leader.monitor.incidents.open
    assert incident is not None
    assert made.now_s - incident.fault_s == pytest.approx(1.5, abs=2 * STEP_S)


def test_a_joining_node_that_is_sent_to_a_dead_leader_continues_looking() -> None:
    made = Agents("d", SETTINGS)
    made.happens("d", MessageReceived("x", LeaderInfo(card("y"), 0, True)))
    assert made["d"].sent[-1] == Connect("y.local", 29400, "y")
    assert made.role("d") is MemberRole.JOINING
    assert made["d"].reported(EndRun) == []
    made.start("a")
    made.passes(10.0)
    assert made.running() == {"a": 0, "d": 0}


def test_a_node_that_knows_a_dead_leader_accepts_only_a_settled_one() -> None:
    made = started()
    made.cut("c", "b")
    made.kill("a")
    assert made.role("c") is MemberRole.SEEKING
    assert made.answers("c", MessageReceived("z", LeaderInfo(card("a"), 0, False))) == []
    again = card("a", 2)
    found = made.answers("c", MessageReceived("z", LeaderInfo(again, 1, True)))
    assert found[0] == Connect("a.local", 29400, "a")


def test_a_node_that_receives_a_generation_that_it_does_not_know_asks_for_it() -> None:
    made = started()
    found = made.answers("c", MessageReceived("a", LeaderHeartbeat(generation=5, number=99)))
    assert [one.message for one in found if isinstance(one, Send)] == [
        Join(made["c"].card, "2:3+0", 0, 0)
    ]


def test_a_joining_node_that_was_paused_asks_nothing() -> None:
    made = Agents("b", SETTINGS)
    made["b"].is_frozen = True
    made.passes(5.0)
    made.thaw("b")
    assert made["b"].reported(SuspendRanks) == []


def test_the_question_of_a_node_that_was_paused_is_asked_again_on_a_new_connection() -> None:
    made = started(failure_timeout_s=5.0)
    made["c"].is_frozen = True
    made.passes(2.5)
    made.cut("c")
    made.thaw("c")
    made.breaks("a", "c")
    made.heal()
    found = made.answers("c", ConnectionOpened("a", 1))
    numbers = [
        one.message.number
        for one in found
        if isinstance(one, Send) and isinstance(one.message, Join)
    ]
    assert numbers == [1]


def test_a_joining_node_during_the_first_ballot_waits_for_its_end() -> None:
    made = Agents("abc", SETTINGS)
    made.passes(1.5)
    made["c"].is_frozen = True
    made.passes(1.0)
    assert made.role("a") is MemberRole.LEADING
    made.start("d")
    made.passes(1.0)
    assert made["d"].member.follower.plan is None
    assert made.running() == {}
    made.thaw("c")
    made.passes(10.0)
    assert set(made.running()) >= set("ab")
    assert made.leader() == "a"
