"""A leader: lost nodes and new nodes, and the consequences for the run."""

from collections.abc import Iterable

import msgspec
import pytest

from ftrun.config.cluster import ClusterSize
from ftrun.errors import ExitCode
from ftrun.events import ExitKind, WorkerExit
from ftrun.ids import Rank
from ftrun.membership.events import (
    ConnectionClosed,
    ConnectionOpened,
    GenerationInstalled,
    MessageReceived,
)
from ftrun.membership.leader.failure_detector import AWAIT_UNRESPONSIVE_S
from ftrun.membership.leader.pausing import GONE_S
from ftrun.recovery.commands import (
    CommitSnapshot,
    Connect,
    EndRun,
    JournalEntry,
    KillWorkers,
    RequestFinalSnapshot,
    Send,
    SignalWorkers,
    StartRanks,
)
from ftrun.wire.cluster.membership import (
    Accepted,
    Heartbeat,
    Join,
    LeaderInfo,
    ParkedRank,
    Prepare,
)
from ftrun.wire.cluster.messages import AnyClusterMessage, JournalLines
from ftrun.wire.messages.smp import Inventory
from tests.unit.membership.agents import Agents
from tests.unit.recovery.made import card, offer, part, promise, settings


def started(node_ids: str, **changes: object) -> Agents:
    """A run of these nodes, led by a, that has begun; its size includes all nodes."""
    cluster_size = {
        "cluster_size": ClusterSize(2, len(node_ids), 0),
        "last_call_timeout_s": 5.0,
        **changes,
    }
    made = Agents(node_ids, settings(**cluster_size))
    made.passes(10.0)
    assert made.leader() == "a"
    assert made.running()
    return made


def with_spares(node_ids: str = "abcd", **changes: object) -> Agents:
    """Three members; the other nodes are spares."""
    return started(node_ids, cluster_size=ClusterSize(2, 3, len(node_ids) - 3), **changes)


def notes(made: Agents, node_id: str, kind: str) -> list[str]:
    return [
        one.record.text for one in made[node_id].reported(JournalEntry) if one.record.kind == kind
    ]


def works(made: Agents, step: int, node_ids: Iterable[str] = "abc", **changes: object) -> None:
    """The ranks of these nodes are at a step."""
    for one in node_ids:
        found = Heartbeat(
            generation=made[one].runs, state="running", attached=True, step=step, steps_here=step
        )
        made.here_is(one, msgspec.structs.replace(found, **changes))


def hold(made: Agents, step: int, node_ids: str, generation: int = 0) -> None:
    """All nodes of a generation hold and protect a version of it; it is committed."""
    at = (generation, step)
    for rank, one in enumerate(node_ids):
        parts = [part(one, at, node_ids, is_committed=True)]
        made[one].holdings = Inventory([offer(rank, at, len(node_ids))], parts)
    works(made, step, node_ids, ready=at)
    made.passes(1.0)


def exited(rank: int, kind: ExitKind, code: int) -> WorkerExit:
    return WorkerExit(Rank(rank), kind, code, f"rank {rank}: {kind.value}", "", "mark")


# --- losses -----------------------------------------------------------------------------------


def test_a_spare_takes_the_place_of_a_dead_node_at_once() -> None:
    made = with_spares()
    made.kill("b")
    made.passes(0.25)
    assert made.running() == {"a": 1, "c": 1, "d": 1}
    assert [node.node_id for node in made.plan("a").members] == ["a", "d", "c"]
    assert notes(made, "a", "node_lost") == ["node b is lost: the connection is refused"]


def with_parked_ranks() -> Agents:
    """The ranks of a, b and c can go back to step 5, and step 8 is committed; two spares."""
    made = with_spares("abcde", survivors="on")
    hold(made, 8, "abc")
    for rank, one in enumerate("abc"):
        made[one].parked = (ParkedRank(rank, 5, 0),)
    return made


def test_the_ranks_of_other_nodes_keep_their_processes() -> None:
    made = with_parked_ranks()
    made.kill("b")
    made.passes(0.25)
    plan = made.plan("a")
    assert ([node.node_id for node in plan.members], plan.staying) == (["a", "d", "c"], [0, 2])
    assert notes(made, "a", "ranks_stayed") == ["generation 1: 2 of 3 ranks stay"]


def test_after_the_leader_is_lost_the_ranks_of_other_nodes_stay_too() -> None:
    made = with_parked_ranks()
    made.kill("a")
    made.passes(6.0)
    assert made.plan("b").staying == [1, 2]


def test_a_rank_at_fault_does_not_stay() -> None:
    made = with_parked_ranks()
    works(made, 9, "b", exits=(exited(1, ExitKind.HUNG, 1),))
    made.passes(2.0)
    assert made.plan("a").staying == [0, 2]


def test_after_a_rank_could_not_join_no_rank_stays_under_any_leader() -> None:
    made = with_parked_ranks()
    works(made, 9, "b", exits=(exited(1, ExitKind.JOIN_REFUSED, 1),))
    made.passes(2.0)
    plan = made.plan("a")
    assert (plan.generation, plan.staying) == (1, [])
    assert plan.history.join_problem == "rank 1: join refused"
    assert plan.history.spent_ages_s == []
    hold(made, 12, "abc", generation=1)
    made.kill("a")
    made.passes(6.0)
    plan = made.plan("b")
    assert (plan.generation, plan.staying, plan.not_staying) == (2, [], "")


def test_a_node_that_is_lost_after_the_plan_was_sent_costs_all_processes() -> None:
    made = with_parked_ranks()
    made.reads["d"] = None
    made.kill("b")
    made.passes(0.25)
    assert made.running() == {}, "d does not answer"
    made.reads.clear()
    made.kill("d")
    made.passes(4.0)
    assert made.running() == {"a": 2, "c": 2, "e": 2}
    assert made.plan("a").staying == []
    assert notes(made, "a", "ranks_stayed") == [
        "generation 2: no rank stays, because the ranks of node a have run generation 0"
    ]


def test_a_member_that_is_lost_in_a_ballot_without_survivors_does_not_change_that() -> None:
    """Other nodes may have missed the first ballot, and the ranks hold wrong values."""
    made = with_parked_ranks()
    made.reads["b"] = None
    works(made, 9, "b", exits=(exited(1, ExitKind.NUMERICAL_ANOMALY, 1),))
    made.passes(1.0)
    assert made.running() == {}, "b does not answer"
    made.kill("b")
    made.passes(1.0)
    assert made.running() == {"a": 2, "c": 2, "d": 2}
    sent = [one.message for one in made["a"].sent if isinstance(one, Send)]
    asked = {(one.generation, one.stay) for one in sent if isinstance(one, Prepare)}
    assert {(1, False), (2, False)} <= asked
    assert (2, True) not in asked


def test_an_unresponsive_node_is_lost_after_the_deadline() -> None:
    made = with_spares()
    made.cut("b")
    made.passes(2.0)
    assert set(made.running().values()) == {0}
    made.passes(4.0)
    assert [made[one].runs for one in "acd"] == [1, 1, 1]
    assert "no heartbeat for" in notes(made, "a", "node_lost")[0]


def test_the_loss_of_a_spare_is_no_reason_for_a_new_generation() -> None:
    made = with_spares()
    made.kill("d")
    made.passes(5.0)
    assert made.running() == {"a": 0, "b": 0, "c": 0}
    assert len(notes(made, "a", "node_lost")) == 1


def test_a_member_whose_agent_was_started_again_is_lost_and_comes_back() -> None:
    made = started("abc")
    made.start_again("c")
    made.passes(15.0)
    assert set(made.running()) == set("abc")
    assert min(made.running().values()) >= 1
    assert made.plan("a").members[2].card.incarnation == 2


def test_a_node_that_is_lost_during_a_ballot_is_left_out_of_it() -> None:
    made = started("abcde")
    made["e"].is_frozen = True
    made.kill("d")
    assert made.running() == {"e": 0}, "e is received first"
    made.kill("e")
    assert made.running() == {"a": 1, "b": 1, "c": 1}


def test_a_node_that_has_returned_joins_at_a_step_boundary() -> None:
    made = started("abc")
    works(made, 5)
    made.cut("c")
    made.passes(6.0)
    assert [made[one].runs for one in "ab"] == [1, 1]
    made.heal()
    works(made, 7, "ab")
    made.passes(8.0)
    (asked,) = made["a"].reported(RequestFinalSnapshot)
    assert asked.reason == "grows from 2 to 3 nodes"
    hold(made, asked.after_step, "ab", generation=1)
    works(made, asked.after_step, "ab", at_boundary=True, ready=(1, asked.after_step))
    made.passes(2.0)
    assert made.plan("c").restore == (1, asked.after_step)
    assert made.running() == {"a": 2, "b": 2, "c": 2}


def test_a_node_that_is_back_votes_in_place_of_one_that_is_lost() -> None:
    made = with_spares("abcde")
    made.kill("d")
    made.kill("e")
    made.passes(2.0)
    made.start("d", 2)
    made.start("e", 2)
    made.passes(12.0)
    assert made.running() == {"a": 0, "b": 0, "c": 0}
    assert [(one.node_id, one.incarnation) for one in made.plan("a").spares] == [("d", 2), ("e", 2)]
    assert all(made.plan(one) == made.plan("a") for one in "bcde")
    # From now on two of the five may be lost.
    made.kill("b")
    made.kill("c")
    made.passes(8.0)
    assert set(made.running()) == set("ade")


def test_another_process_of_a_member_that_joins_takes_its_place() -> None:
    made = started("abc")
    made.happens("a", ConnectionOpened("z", 1))
    join = Join(card("c", 2), "2:3+0")
    made.happens("a", MessageReceived("c", join))
    assert notes(made, "a", "node_lost") == ["node c is lost: its agent was restarted"]


@pytest.mark.parametrize("by", ["join", "proposer", "known proposer"])
def test_a_run_that_is_about_to_begin_gives_way_to_one_that_another_node_knows(by: str) -> None:
    made = Agents("a", settings(cluster_size=ClusterSize(1, 2, 0), last_call_timeout_s=1.0))
    made.reads["a"] = None  # it is reading a checkpoint
    made.passes(6.0)
    leader = made["a"].member.leader
    assert leader is not None
    assert leader.ballot is not None
    assert leader.ballot.plan is not None
    made.happens("a", ConnectionOpened("z", 1))
    if by == "known proposer":
        made.happens("a", MessageReceived("z", LeaderInfo(card("z"), -1, False)))
        assert leader.ballot.generation == 0
    joins = Join(card("z"), "1:2+0", knows=5)
    made.happens(
        "a", MessageReceived("z", joins if by == "join" else LeaderInfo(card("z"), 5, False))
    )
    assert leader.ballot.generation == 6
    assert notes(made, "a", "ballot_started")[-1] == "node z has the plan of a run"


def test_a_connection_of_a_node_that_has_not_joined_or_is_lost_is_not_missed() -> None:
    made = started("abc")
    made.happens("a", ConnectionOpened("z", 1))
    assert made.answers("a", ConnectionClosed("z")) == []
    made.cut("c")
    made.passes(6.0)
    assert notes(made, "a", "node_lost")
    assert made.answers("a", ConnectionClosed("c")) == []


def test_another_proposer_counts_whichever_it_is() -> None:
    made = started("abc")
    made.cut("a", "b", "c")
    made.passes(6.0)
    assert made["a"].member.leader is not None
    assert made["a"].member.leader.ballot is not None
    made.start("z")
    made.happens("a", MessageReceived("z", LeaderInfo(card("z"), 0, False)))
    assert Connect("z.local", 29400, "z") in made["a"].sent


def test_late_answers_change_nothing() -> None:
    made = started("abc")
    late: list[AnyClusterMessage] = [
        promise(0, "b"),
        Accepted(0, None),
        Accepted(0, None, voter_revision=1),
        JournalLines(["{}"]),
        Heartbeat(generation=0, number=0, exits=(exited(1, ExitKind.SIGNAL, -9),)),
    ]
    for body in late:
        assert made.answers("a", MessageReceived("b", body)) == []
    made["c"].is_frozen = True
    made.kill("b")
    assert made.answers("a", MessageReceived("c", Accepted(0, None, voter_revision=1))) == []
    assert made["a"].member.leader is not None


def test_a_member_that_has_promised_another_a_later_generation_leads_to_a_ballot() -> None:
    made = started("abc")
    found = Heartbeat(generation=-1, number=99, promised=7)
    made.happens("a", MessageReceived("c", found))
    made.passes(10.0)
    assert made.running() == {"a": 8, "b": 8, "c": 8}


def test_what_a_spare_has_promised_another_disturbs_no_node() -> None:
    made = with_spares()
    made.happens("a", MessageReceived("d", Heartbeat(generation=-1, number=99, promised=7)))
    made.passes(5.0)
    assert made.running() == {"a": 0, "b": 0, "c": 0}


def test_lost_nodes_use_up_the_budget_of_restarts() -> None:
    made = with_spares("abcdefghij")
    for losses in range(6):
        assert made["a"].reported(EndRun) == []
        assert made["a"].runs == losses
        works(made, 5 * losses + 5, [node.node_id for node in made.plan("a").members])
        made.kill(made.plan("a").members[1].node_id)
        made.passes(1.0)
    made.passes(8.0)
    (end,) = made["a"].reported(EndRun)
    assert "budget" in end.advice


@pytest.mark.parametrize(("limit", "members"), [(2, "abc"), (1, "ac")])
def test_a_node_that_was_lost_too_often_runs_no_ranks(limit: int, members: str) -> None:
    made = with_spares("abcd", max_failures_per_hour=limit)
    made.kill("b")
    made.start("b", 2)
    made.passes(10.0)
    assert made.running() == {"a": 1, "c": 1, "d": 1}
    made.kill("d")
    made.passes(3.0)
    assert "".join(sorted(made.running())) == members


def test_a_spare_takes_over_from_all_before_it_and_waits_for_one_that_ran() -> None:
    made = with_spares("abcdefghi")
    c = made["c"]
    made.kill("a", "b", "c", "d")
    made.passes(8.0)
    assert made.leader() == "e"
    assert "no present node has the memory of generation 0" in notes(made, "e", "run_paused")[0]
    made.all["c"] = c
    made.start_again("c")
    made.passes(20.0)
    assert set(made.running()) == {"c", "e", "f"}


def test_a_member_that_is_slow_to_get_ready_is_waited_for_by_name() -> None:
    """It reads a checkpoint: another ballot would make it read the checkpoint again."""
    made = started("abc", answer_s=10.0, failure_timeout_s=60.0)
    made.reads["c"] = None
    made.here_is(
        "b", Heartbeat(generation=0, exits=(exited(1, ExitKind.SIGNAL, -9),), steps_here=1)
    )
    made.passes(40.0)
    assert made["a"].runs == -1
    (answered,) = notes(made, "a", "waiting_for_nodes")
    assert "generation 1 waits for c, which may be reading a checkpoint" in answered
    made.happens("c", GenerationInstalled(1, None))
    made.passes(1.0)
    assert made.running() == {"a": 1, "b": 1, "c": 1}


def test_without_enough_acceptances_of_spares_it_restarts() -> None:
    made = started("abc", cluster_size=ClusterSize(1, 1, 2), answer_s=10.0, failure_timeout_s=60.0)
    made.reads |= {"b": None, "c": None}
    made.here_is(
        "a", Heartbeat(generation=0, exits=(exited(0, ExitKind.SIGNAL, -9),), steps_here=1)
    )
    made.passes(5.0)
    assert made["a"].runs == -1
    made.reads.clear()
    made.passes(20.0)
    assert made["a"].runs > 1


def test_a_leader_that_may_be_replaced_for_long_begins_a_ballot() -> None:
    """Its spares alone send no heartbeat, so that no loss of a member causes one."""
    made = started("abc", cluster_size=ClusterSize(1, 1, 2))
    assert made.running() == {"a": 0}
    made.cut("a")
    made.passes(12.0)
    assert made["a"].runs == -1
    assert "too few of the voters (3 nodes)" in notes(made, "a", "run_paused")[0]
    assert "no present node has the memory of generation 0" in notes(made, "b", "run_paused")[0]
    made.heal()
    made.passes(30.0)
    assert made.leader()
    assert [generation > 0 for generation in made.running().values()] == [True]


def test_a_leader_with_a_slow_heartbeat_finds_the_same_losses() -> None:
    made = with_spares(heartbeat_interval_s=1.0)
    made.cut("b")
    made.passes(7.0)
    assert [made[one].runs for one in "acd"] == [1, 1, 1]


# --- pauses -----------------------------------------------------------------------------------


def test_a_run_of_too_few_voters_pauses_and_reports_missing_nodes() -> None:
    made = started("abc")
    made.cut("b")
    made.cut("c")
    made.passes(10.0)
    assert made["a"].runs == -1
    (text,) = notes(made, "a", "run_paused")
    assert "too few of the voters (3 nodes) are present; missing: b, c" in text
    made.heal()
    made.passes(20.0)
    assert set(made.running()) == set("abc")
    assert made.leader()


def test_a_pause_is_over_once_enough_are_here_again() -> None:
    made = started("abc")
    c = made["c"]
    made.kill("b")
    made.kill("c")
    made.passes(10.0)
    made.all["c"] = c
    made.start_again("c")
    made.passes(20.0)
    assert set(made.running()) == {"a", "c"}


def test_a_pause_ends_the_run_after_its_limit() -> None:
    made = started("abc", pause_timeout_s=20.0)
    made.kill("b")
    made.kill("c")
    made.passes(19.0)
    assert made["a"].reported(EndRun) == []
    made.passes(2.0)
    end = made["a"].reported(EndRun)[0]
    assert end.exit_code == ExitCode.NOT_ENOUGH_NODES
    assert "too few of the voters (2 nodes) are present; missing: c, for 20 s" in end.reason


def test_fewer_nodes_than_the_run_may_have_pause_it() -> None:
    made = started("abc", cluster_size=ClusterSize(3, 3, 0))
    made.kill("c")
    made.passes(3.0)
    assert "2 of at least 3 nodes are present" in notes(made, "a", "run_paused")[0]


def test_two_nodes_without_a_spare_are_warned() -> None:
    assert "two nodes and no spare" in notes(started("ab"), "a", "two_voters_warning")[0]
    assert notes(started("abc"), "a", "two_voters_warning") == []


# --- the state of the run ---------------------------------------------------------------------


def test_a_commit_is_sent_to_all_and_continued_from() -> None:
    made = started("abcd")
    hold(made, 8, "abcd")
    assert all(len(made[one].reported(CommitSnapshot)) == 1 for one in "abcd")
    made.kill("d")
    made.passes(3.0)
    assert made.plan("a").restore == (0, 8)
    assert made.running() == {"a": 1, "b": 1, "c": 1}


def test_nothing_is_committed_while_a_member_misses_heartbeats() -> None:
    """The commit would free the version before it, which may be the only one that survives."""
    made = started("abcd")
    works(made, 8, "cd", ready=(0, 8))
    made.passes(1.0)
    made.cut("d")
    made.passes(1.5)
    works(made, 8, "ab", ready=(0, 8))
    made.passes(0.5)
    assert not made["a"].reported(CommitSnapshot)
    made.heal()
    made.passes(1.5)
    assert all(len(made[one].reported(CommitSnapshot)) == 1 for one in "abcd")


def test_where_the_commit_cannot_be_had_the_run_waits_for_nodes_that_may_hold_it() -> None:
    made = started("abcde")
    hold(made, 8, "abcde")
    lost = {one: made[one] for one in "de"}
    for one in lost:
        made.kill(one)
    made.passes(5.0)
    assert made["a"].runs == -1
    assert "d, e may hold it and cannot be reached" in notes(made, "a", "run_paused")[-1]
    made.all["e"] = lost["e"]
    made.start_again("e")
    made.passes(30.0)
    assert made.plan("a").restore == (0, 8)
    assert set(made.running()) == set("abce")


def test_if_no_node_can_hold_the_commit_the_run_ends() -> None:
    made = started("abc")
    hold(made, 8, "abc")
    for one in "abc":
        made[one].holdings = Inventory([])
    made.here_is(
        "b", Heartbeat(generation=0, exits=(exited(1, ExitKind.SIGNAL, -9),), steps_here=1)
    )
    made.passes(20.0)
    for one in "abc":
        (end,) = made[one].reported(EndRun)
        assert end.exit_code == ExitCode.STATE_LOST


# --- failures, the end ------------------------------------------------------------------------


def test_a_killed_rank_leads_to_a_new_generation_on_the_same_nodes() -> None:
    made = started("abc")
    works(made, 5)
    failed = (exited(1, ExitKind.SIGNAL, -9),)
    made.here_is("b", Heartbeat(generation=0, state="running", attached=True, step=5, exits=failed))
    made.passes(1.0)
    assert made.running() == {"a": 1, "b": 1, "c": 1}
    assert made.plan("c").reason == "rank 1: signal"


def test_an_exception_waits_for_a_node_that_does_not_respond_just_now() -> None:
    """The failure may be a consequence of that node's end, which is detected later."""
    made = started("abc")
    works(made, 5)
    made.cut("c")
    made.passes(1.5)
    failed = (exited(1, ExitKind.EXCEPTION, 1),)
    made.here_is("b", Heartbeat(generation=0, attached=True, step=5, steps_here=5, exits=failed))
    made.passes(1.0)
    assert made.running() == {"a": 0, "b": 0, "c": 0}
    made.passes(4.0)
    assert made.plan("a").generation == 1
    assert made.plan("a").reason.startswith("node c is lost: no heartbeat for")


def test_an_exception_before_the_first_step_ends_the_run_everywhere() -> None:
    made = started("abc")
    made.here_is(
        "b", Heartbeat(generation=0, attached=True, exits=(exited(1, ExitKind.EXCEPTION, 3),))
    )
    made.passes(2.0)
    for one in "abc":
        (end,) = made[one].reported(EndRun)
        assert (end.exit_code, end.reason) == (3, "rank 1: exception")
    # The others end at once. The leader waits until they have received the end; its ranks do not.
    assert made["a"].reported(KillWorkers) == [KillWorkers("rank 1: exception")]


def test_a_run_whose_ranks_have_finished_ends_with_0_and_the_leader_last() -> None:
    made = started("abc")
    works(made, 5)
    made.cut("c")
    for rank, one in enumerate("abc"):
        done = (exited(rank, ExitKind.FINISHED, 0),)
        made.here_is(one, Heartbeat(generation=0, state="running", attached=True, exits=done))
    made.heal()
    made.passes(0.5)
    made.cut("c")
    made.passes(0.5)
    assert made["b"].reported(EndRun)
    made.heal()
    made.passes(2.0)
    for one in "abc":
        assert [end.exit_code for end in made[one].reported(EndRun)] == [0]
        assert made[one].reported(KillWorkers) == []


def test_the_leader_does_not_wait_for_ever_for_nodes_that_do_not_receive_the_end() -> None:
    made = started("abc", failure_timeout_s=3.0)
    made.here_is(
        "b", Heartbeat(generation=0, attached=True, exits=(exited(1, ExitKind.EXCEPTION, 3),))
    )
    made["c"].is_frozen = True
    made.passes(1.0)
    assert made["b"].reported(EndRun)
    made.kill("b")
    made.passes(0.5)
    assert notes(made, "a", "node_lost") == [], "it left on command"
    made.passes(8.0)
    assert made["a"].reported(EndRun)


def test_a_finished_run_waits_for_an_agent_that_is_being_started_again() -> None:
    made = with_spares()
    works(made, 5)
    made.kill("d")
    made.passes(1.0)
    for rank, one in enumerate("abc"):
        works(made, 7, one, exits=(exited(rank, ExitKind.FINISHED, 0),))
    made.passes(1.0)
    assert made["b"].reported(EndRun)
    assert not made["a"].reported(EndRun)
    made.start("d", incarnation=2)
    made.passes(2.0)
    assert [end.exit_code for one in "ad" for end in made[one].reported(EndRun)] == [0, 0]


def finished_without_d() -> Agents:
    """The ranks have finished while a spare was cut off."""
    made = with_spares()
    works(made, 5)
    made.cut("d")
    made.passes(5.0)
    assert "no heartbeat" in notes(made, "a", "node_lost")[0]
    for rank, one in enumerate("abc"):
        works(made, 7, one, exits=(exited(rank, ExitKind.FINISHED, 0),))
    made.passes(1.0)
    assert made["b"].reported(EndRun)
    return made


def test_a_finished_run_waits_for_a_node_that_stopped_responding_shortly_before() -> None:
    made = finished_without_d()
    made.passes(AWAIT_UNRESPONSIVE_S - 6.0)
    assert not made["a"].reported(EndRun)
    made.kill("b", "c")
    made.heal()
    made.passes(4.0)
    assert [end.exit_code for one in "ad" for end in made[one].reported(EndRun)] == [0, 0]


def test_a_finished_run_does_not_wait_long_for_an_unresponsive_node() -> None:
    made = finished_without_d()
    made.passes(AWAIT_UNRESPONSIVE_S)
    assert [end.exit_code for end in made["a"].reported(EndRun)] == [0]


def test_a_stop_takes_a_last_snapshot_and_signals_all_ranks() -> None:
    made = started("abc")
    works(made, 5)
    made.here_is("b", Heartbeat(generation=0, attached=True, step=5, stops=1, stop_signal=2))
    for one in "abc":
        assert len(made[one].reported(RequestFinalSnapshot)) == 1
    works(made, 7, at_boundary=True, stops=1)
    for one in "abc":
        assert [reported.signal for reported in made[one].reported(SignalWorkers)] == [2]
    for rank, one in enumerate("abc"):
        works(made, 7, one, exits=(exited(rank, ExitKind.FINISHED, 0),), stops=1)
    made.passes(1.0)
    assert [end.exit_code for one in "abc" for end in made[one].reported(EndRun)] == [130] * 3


def test_a_node_that_is_lost_while_the_run_stops_is_not_replaced() -> None:
    made = with_spares()
    works(made, 5)
    made.here_is("a", Heartbeat(generation=0, attached=True, step=5, stops=1))
    made.kill("c")
    for rank, one in enumerate("ab"):
        works(made, 7, one, exits=(exited(rank, ExitKind.FINISHED, 0),), stops=1)
    made.passes(8.0)
    assert [end.exit_code for one in "ab" for end in made[one].reported(EndRun)] == [143] * 2


def test_a_stop_during_a_pause_ends_the_run() -> None:
    made = started("abc")
    made.kill("b")
    made.kill("c")
    made.passes(5.0)
    made.here_is("a", Heartbeat(generation=-1, stops=1, stop_signal=2))
    made.passes(1.0)
    assert [end.exit_code for end in made["a"].reported(EndRun)] == [130]


def test_a_stop_during_a_ballot_ends_the_run() -> None:
    made = started("abc", failure_timeout_s=3.0)
    made["c"].is_frozen = True
    made.here_is(
        "b", Heartbeat(generation=0, exits=(exited(1, ExitKind.SIGNAL, -9),), steps_here=1)
    )
    made.passes(1.0)
    made.here_is("a", Heartbeat(generation=-1, stops=1))
    made.passes(10.0)
    assert [end.exit_code for end in made["a"].reported(EndRun)] == [143]


@pytest.mark.parametrize("by", ["problem", "difference"])
def test_a_checkpoint_that_too_few_nodes_can_read_ends_the_run(by: str) -> None:
    made = Agents("abc", settings(cluster_size=ClusterSize(3, 3, 0), has_checkpoints=True))
    made.reads["b"] = (None, "/saved: stale handle") if by == "problem" else ((0, 4), "")
    made.passes(10.0)
    (end,) = made["a"].reported(EndRun)
    assert end.exit_code == ExitCode.STATE_LOST
    wanted = {
        "problem": "b: /saved: stale handle",
        "difference": "have loaded different checkpoints",
    }
    assert wanted[by] in end.reason


@pytest.mark.parametrize(
    "cluster_size", [ClusterSize(2, 3, 0), ClusterSize(2, 2, 1)], ids=["shrinks", "spare"]
)
def test_the_run_continues_without_a_node_that_alone_can_read_no_checkpoint(
    cluster_size: ClusterSize,
) -> None:
    made = Agents("abc", settings(cluster_size=cluster_size, has_checkpoints=True))
    made.reads["b"] = (None, "/saved: stale handle")
    made.passes(10.0)
    assert not made["a"].reported(EndRun)
    plan = made["a"].reported(StartRanks)[-1].plan
    assert [node.node_id for node in plan.members] == ["a", "c"]
    assert [card.node_id for card in plan.spares] == ["b"]
    (text,) = [text for text in notes(made, "a", "node_unfit") if "stale handle" in text]
    assert text.startswith("node b may not run ranks for an hour: it cannot load the checkpoint")


@pytest.mark.parametrize(
    "cluster_size", [ClusterSize(2, 3, 0), ClusterSize(2, 2, 1)], ids=["shrinks", "spare"]
)
def test_a_node_without_any_checkpoint_takes_none_from_the_others(
    cluster_size: ClusterSize,
) -> None:
    """It rejects the only checkpoint, which the others can load."""
    made = from_disk(cluster_size, a={9: ""}, b={9: "damaged"}, c={9: ""})
    assert not made["a"].reported(EndRun)
    plan = made["a"].reported(StartRanks)[-1].plan
    assert [node.node_id for node in plan.members] == ["a", "c"]
    assert made.read_disk("c", plan).restored == (-1, 9)
    assert not plan.history.bad_checkpoints


def test_the_only_checkpoint_is_lost_if_no_node_can_be_spared() -> None:
    made = from_disk(ClusterSize(3, 3, 0), a={9: ""}, b={9: "damaged"}, c={9: ""})
    assert [end.exit_code for end in made["a"].reported(EndRun)] == [ExitCode.STATE_LOST]


def test_a_directory_that_is_taken_ends_the_run_though_others_could_read_it() -> None:
    made = Agents("abc", settings(cluster_size=ClusterSize(2, 3, 0), has_checkpoints=True))
    made.reads["a"] = (None, "it belongs to run other", "", {}, int(ExitCode.USAGE))
    made.passes(10.0)
    (end,) = made["b"].reported(EndRun)
    assert end.exit_code == ExitCode.USAGE


def test_a_directory_that_cannot_be_read_for_a_moment_costs_one_more_ballot() -> None:
    """The node names the directory itself."""
    made = from_disk(a={6: ""}, b={6: ""}, c={6: ""}, at_first={"b": "/saved: stale handle"})
    assert not made["a"].reported(EndRun)
    plan = made["b"].reported(StartRanks)[-1].plan
    assert [node.node_id for node in plan.members] == ["a", "b", "c"]
    assert made.read_disk("b", plan).restored == (-1, 6)
    assert plan.history.bad_checkpoints == {"/saved": "b: /saved: stale handle"}


def from_disk(
    cluster_size: ClusterSize | None = None,
    *,
    at_first: dict[str, str] | None = None,
    **disks: dict[int, str],
) -> Agents:
    cluster_size = cluster_size or ClusterSize(2, 3, 0)
    made = Agents("abc", settings(cluster_size=cluster_size, has_checkpoints=True))
    made.disks |= disks
    made.stalls |= at_first or {}
    made.passes(10.0)
    return made


@pytest.mark.parametrize(
    ("of_b", "of_c"),
    [
        ({9: "rank 1 is damaged", 6: ""}, {9: "", 6: ""}),
        ({9: "damaged", 6: "", 3: ""}, {9: "", 6: "damaged", 3: ""}),
        ({6: ""}, {9: "", 6: ""}),
        ({9: "damaged"}, {9: "damaged"}),
    ],
    ids=["one is damaged", "one each", "not seen yet", "none is left"],
)
def test_all_nodes_start_from_the_newest_checkpoint_that_none_has_rejected(
    of_b: dict[int, str], of_c: dict[int, str]
) -> None:
    of_a = dict.fromkeys((9, 6, 3), "")
    made = from_disk(a=of_a, b=of_b, c=of_c)
    usable = [step for step in of_a if all(one.get(step) == "" for one in (of_b, of_c))]
    ends = made["a"].reported(EndRun)
    if not usable:
        assert [end.exit_code for end in ends] == [ExitCode.STATE_LOST]
        return
    assert not ends
    for node_id in "abc":
        plan = made[node_id].reported(StartRanks)[-1].plan
        loaded = made.read_disk(node_id, plan)
        assert loaded.restored == (-1, usable[0])
    bad = plan.history.bad_checkpoints
    assert set(bad) == {f"step-{step}" for step in of_a if step > usable[0]}
    if of_b.get(9):
        assert bad["step-9"] == f"b: {of_b[9]}", "which node, and why"


# --- the others have ended --------------------------------------------------------------------


def test_an_agent_that_comes_back_when_none_is_left_ends_after_a_minute() -> None:
    made = started("abc", pause_timeout_s=900.0)
    made.kill("a", "b")
    again = made.start_again("c")
    made.passes(GONE_S - 2.0)
    assert not again.reported(EndRun)
    made.passes(15.0)
    (end,) = again.reported(EndRun)
    assert end.exit_code == ExitCode.TRY_AGAIN
    assert "no other node of this run is left" in end.reason


def test_a_node_that_has_been_with_the_others_waits_for_them() -> None:
    made = started("abc", pause_timeout_s=900.0)
    made.kill("a", "b")
    made.passes(2 * GONE_S)
    assert not made["c"].reported(EndRun)


def test_an_unresponsive_machine_may_yet_be_part_of_the_run() -> None:
    made = started("abc", pause_timeout_s=900.0)
    made.kill("a")
    made.cut("b")
    again = made.start_again("c")
    made.cut("b")
    made.passes(2 * GONE_S)
    assert not again.reported(EndRun)


def test_agents_that_are_all_started_again_find_each_other() -> None:
    made = started("abc", pause_timeout_s=900.0)
    old = {one: made[one] for one in "ab"}
    made.kill("a", "b")
    made.start_again("c")
    made.passes(GONE_S / 2)
    for one, agent in old.items():
        made.all[one] = agent
        made.start_again(one)
    made.passes(2 * GONE_S)
    assert set(made.running()) == set("abc")


def test_a_successor_does_not_know_a_leader_that_had_no_vote() -> None:
    """For example one that has drained with an etcd as witness."""
    made = with_spares()
    works(made, 5)
    leader = made["a"].member.leader
    assert leader is not None
    leader.succeed({"gone"}, "the leader is lost", made.now_s, now_s=made.now_s)
    assert [one.card.node_id for one in leader.monitor.past.gone] == []
    assert leader.ballot is not None
    assert leader.ballot.reason == "the leader is lost"
