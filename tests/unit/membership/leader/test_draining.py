"""A draining node leaves without loss; if all nodes drain, the run stops."""

from collections.abc import Iterable

import msgspec
import pytest

from ftrun.config.cluster import ClusterSize
from ftrun.events import ExitKind
from ftrun.ids import version
from ftrun.membership.discovery import MemberRole
from ftrun.membership.events import ConnectFailed, MessageReceived, NodeReported
from ftrun.membership.leader.draining import LIMIT_S, NOTICE_S
from ftrun.recovery.commands import (
    EndRun,
    RequestFinalSnapshot,
    Send,
    SignalWorkers,
    WriteCheckpointPart,
)
from ftrun.wire.cluster.generation import VersionPair
from ftrun.wire.cluster.membership import Heartbeat, LeaderHeartbeat, LeaderResigned
from ftrun.wire.messages.smp import Inventory
from tests.unit.membership.agents import STEP_S, Agent, Agents
from tests.unit.membership.leader.test_leader import (
    exited,
    hold,
    notes,
    started,
    with_spares,
    works,
)
from tests.unit.recovery.made import settings

TERMINATED = 143


def ask(made: Agents, node_ids: str, step: int = 5, **more: object) -> None:
    """These nodes receive SIGTERM."""
    works(made, step, node_ids, leaves=True, **more)


def at_boundary(made: Agents, node_ids: str, asked: str) -> VersionPair:
    """All ranks reach the ordered boundary, and its snapshot is committed."""
    step = made["a"].reported(RequestFinalSnapshot)[0].after_step
    at = (made["a"].runs, step)
    hold(made, step, node_ids, at[0])
    for one in node_ids:
        works(made, step, one, at_boundary=True, ready=at, leaves=one in asked)
    return at


def without_c() -> tuple[Agents, VersionPair]:
    """Of three nodes c is draining, and the others continue from the boundary."""
    made = started("abc")
    works(made, 5)
    ask(made, "c")
    made.passes(NOTICE_S + 0.5)
    at = at_boundary(made, "abc", "c")
    made.passes(0.5)
    return made, at


def protected_again(made: Agents, node_ids: Iterable[str], at: VersionPair) -> None:
    """The restored version is protected among the members of the generation."""
    works(made, at[1], node_ids, ready=at)
    made.passes(3.0)


def commits(made: Agents, node_ids: str, step: int) -> None:
    """These nodes commit a version of the running generation."""
    at = (made[node_ids[0]].runs, step)
    works(made, step, node_ids, ready=at, steps_here=1)
    made.passes(3.0)


def ends(made: Agents, node_ids: str) -> list[tuple[int, bool]]:
    return [
        (int(end.exit_code), end.run_continues)
        for one in node_ids
        for end in made[one].reported(EndRun)
    ]


def test_a_spare_takes_the_ranks_of_a_node_that_leaves_and_no_step_is_lost() -> None:
    made = with_spares()
    works(made, 5)
    ask(made, "b")
    made.passes(NOTICE_S - 0.5)
    assert not made["a"].reported(RequestFinalSnapshot), (
        "other nodes may still drain; the ranks continue"
    )
    made.passes(1.0)
    at = at_boundary(made, "abc", "b")
    made.passes(0.5)
    assert made.running() == {"a": 1, "c": 1, "d": 1}
    assert made.plan("a").reason == "draining b"
    assert made.plan("a").restore == at
    assert ends(made, "b") == [], "its snapshot is needed"
    protected_again(made, "adc", at)
    assert ends(made, "b") == [(TERMINATED, True)]
    assert notes(made, "a", "nodes_draining") == ["draining b; the run continues without them"]
    assert notes(made, "a", "node_unfit") == ["node b may not run ranks: it is draining"]
    made.kill("b")
    made.passes(5.0)
    assert made.running() == {"a": 1, "c": 1, "d": 1}
    assert ends(made, "acd") == []
    made.start("b", incarnation=2)
    made.passes(10.0)
    assert made.role("b") is MemberRole.FOLLOWING
    assert not made["a"].member.leader.screening.reported, "it may run ranks again"


def test_if_every_node_drains_the_run_stops_at_once() -> None:
    made = with_spares()
    works(made, 5)
    for one in "abcd":
        ask(made, one) if one != "d" else made.here_is("d", Heartbeat(generation=-1, leaves=True))
    made.passes(0.5)
    works(made, 7, at_boundary=True)
    for one in "abc":
        assert [reported.signal for reported in made[one].reported(SignalWorkers)] == [15]
    for rank, one in enumerate("abc"):
        works(made, 7, one, exits=(exited(rank, ExitKind.FINISHED, 0),))
    made.passes(1.0)
    assert ends(made, "abcd") == [(TERMINATED, False)] * 4
    assert notes(made, "a", "nodes_draining") == []


def test_if_too_few_nodes_would_be_left_the_run_stops_at_once() -> None:
    made = started("abc", cluster_size=ClusterSize(3, 3, 0))
    works(made, 5)
    ask(made, "c")
    made.passes(0.5)
    (asked,) = made["a"].reported(RequestFinalSnapshot)
    assert asked.reason == "draining c would leave 2 of at least 3 nodes"
    works(made, asked.after_step, at_boundary=True)
    assert made["b"].reported(SignalWorkers)


def test_a_spare_whose_agent_is_being_restarted_is_waited_for() -> None:
    made = started("abcd", cluster_size=ClusterSize(3, 3, 1))
    works(made, 5)
    made.kill("d")
    made.passes(0.5)
    ask(made, "b")
    made.passes(NOTICE_S + 0.5)
    assert not made["a"].reported(RequestFinalSnapshot), "the run may continue with d"
    made.start("d", incarnation=2)
    made.passes(NOTICE_S + 3.0)
    assert made["a"].reported(RequestFinalSnapshot)[0].reason == "draining b"
    at_boundary(made, "abc", "b")
    made.passes(1.0)
    assert set(made.running()) == set("acd")


def test_a_spare_that_does_not_come_back_is_not_waited_for_longer() -> None:
    made = started("abcd", cluster_size=ClusterSize(3, 3, 1))
    works(made, 5)
    made.kill("d")
    made.passes(0.5)
    ask(made, "b")
    made.passes(LIMIT_S)
    (asked,) = made["a"].reported(RequestFinalSnapshot)
    assert asked.reason == "draining b would leave 2 of at least 3 nodes"


def test_without_a_spare_the_run_shrinks_where_it_may() -> None:
    made, at = without_c()
    assert made.running() == {"a": 1, "b": 1}
    protected_again(made, "ab", at)
    works(made, at[1] + 1, "ab", ready=at, steps_here=1)
    made.passes(3.0)
    assert ends(made, "c") == [], "its shards are needed until a version of two ranks is committed"
    commits(made, "ab", at[1] + 2)
    assert ends(made, "c") == [(TERMINATED, True)]


def test_of_two_voters_the_one_that_stays_decides_alone_afterwards() -> None:
    made = started("ab", cluster_size=ClusterSize(1, 2, 0))
    works(made, 5, "ab")
    ask(made, "b")
    made.passes(NOTICE_S + 0.5)
    at = at_boundary(made, "ab", "b")
    made.passes(0.5)
    assert made.running() == {"a": 1}
    made.here_is("a", Heartbeat(generation=1, attached=True, step=at[1], ready=at))
    made.passes(3.0)
    assert ends(made, "b") == [], "a may still find that its own state is damaged"
    commits(made, "a", at[1] + 1)
    assert [card.node_id for card in made.plan("a").voters] == ["a"]
    assert ends(made, "b") == [(TERMINATED, True)]


def continues_alone(made: Agents) -> VersionPair:
    """Of a and b, b drains; a runs a generation alone, which starts from the returned version."""
    works(made, 5, "ab")
    ask(made, "b")
    made.passes(NOTICE_S + 0.5)
    at = at_boundary(made, "ab", "b")
    while made.running() != {"a": 1}:
        made.passes(STEP_S)
    return at


def reported_leaves(agent: Agent) -> list[tuple[str, ...]]:
    """The nodes that may leave, in each heartbeat that the agent has sent as leader."""
    found = [sent.message for sent in agent.sent if isinstance(sent, Send)]
    return [message.leave for message in found if isinstance(message, LeaderHeartbeat)]


def test_what_was_found_in_one_generation_releases_no_node_in_the_next() -> None:
    made = started("ab", cluster_size=ClusterSize(1, 2, 0))
    at = continues_alone(made)
    # Its SMP considers the slot valid and has no node to send it to; the digest check finds it.
    reason = "step 6 does not match its digest"
    made["a"].holdings = Inventory([])
    made["b"].is_frozen = True
    made.here_is("a", Heartbeat(generation=1, attached=True, step=at[1], ready=at, problem=reason))
    made.passes(1.0)
    made.thaw("b")
    made.passes(1.0)
    assert made.running() == {"a": 2}
    assert made.plan("a").restore == at, "from b"
    assert ends(made, "b") == []
    made.passes(3.0)
    made.here_is("a", Heartbeat(generation=2, attached=True, step=at[1]))
    made.passes(3.0)
    assert ends(made, "b") == [], "a does not have it yet"
    commits(made, "a", at[1] + 1)
    assert ends(made, "b") == [(TERMINATED, True)]


def test_a_draining_node_stays_if_another_ballot_begins() -> None:
    made = started("ab", cluster_size=ClusterSize(1, 2, 0))
    at = continues_alone(made)
    made["b"].is_frozen = True
    assert at < (1, 7)
    made.here_is("a", Heartbeat(generation=1, attached=True, step=7, steps_here=1, ready=(1, 7)))
    made.passes(1.5)
    assert reported_leaves(made["a"])[-1] == ("b",)
    made.here_is(
        "a", Heartbeat(generation=1, attached=True, step=7, steps_here=1, problem="a test")
    )
    before = len(reported_leaves(made["a"]))
    made.passes(1.0)
    assert set(reported_leaves(made["a"])[before:]) == {()}


def test_what_is_protected_without_a_leaver_needs_no_step_more() -> None:
    made = with_spares()
    works(made, 5)
    ask(made, "b")
    made.passes(NOTICE_S + 0.5)
    at = at_boundary(made, "abc", "b")
    made.passes(0.5)
    works(made, at[1], "ac", ready=at, steps_here=0, survives=1)
    works(made, at[1], "d", ready=at, steps_here=0)
    made.passes(2.0)
    assert ends(made, "b") == [], "d does not report protection"
    works(made, at[1], "d", ready=at, steps_here=0, survives=1)
    made.passes(2.0)
    assert ends(made, "b") == [(TERMINATED, True)]


def test_a_leader_of_two_nodes_leaves_the_other_one_to_decide_alone() -> None:
    made = started("ab", cluster_size=ClusterSize(1, 2, 0))
    works(made, 5, "ab")
    ask(made, "a")
    made.passes(NOTICE_S + 0.5)
    at = at_boundary(made, "ab", "a")
    made.passes(0.5)
    assert made.running() == {"b": 1}
    commits(made, "b", at[1] + 1)
    assert ends(made, "a") == [(TERMINATED, True)]
    assert [card.node_id for card in made.plan("b").voters] == ["b"]
    made.kill("a")
    made.passes(5.0)
    assert made.leader() == "b"
    assert ends(made, "b") == []


def test_a_leader_does_not_leave_while_another_voter_may_be_lost() -> None:
    """With both gone, the last of three voters could not decide: seed 1213339."""
    made = started("abc", cluster_size=ClusterSize(1, 1, 2))
    works(made, 5, "a")
    ask(made, "a")
    made.passes(NOTICE_S + 0.5)
    at = at_boundary(made, "a", "a")
    made.passes(0.5)
    assert made.running() == {"b": 1}
    made.cut("c")
    made.passes(4 * STEP_S)
    works(made, at[1] + 1, "b", ready=(made["b"].runs, at[1] + 1), steps_here=1)
    made.passes(2.0)
    assert ends(made, "a") == [], "c has missed heartbeats"
    made.passes(3.0)
    assert ends(made, "a") == [(TERMINATED, True)]
    assert [card.node_id for card in made.plan("b").voters] == ["b"]


def test_a_leader_that_leaves_has_the_next_voter_lead_and_the_ranks_are_restarted_once() -> None:
    made = with_spares()
    works(made, 5)
    ask(made, "a")
    made.passes(NOTICE_S + 0.5)
    at = at_boundary(made, "abc", "a")
    made.passes(0.5)
    assert made.leader() == "b"
    assert made.running() == {"b": 1, "c": 1, "d": 1}
    assert made.plan("b").restore == at
    assert made.plan("b").reason == "draining a"
    protected_again(made, "bcd", at)
    assert ends(made, "a") == [(TERMINATED, True)]
    made.kill("a")
    made.passes(5.0)
    assert made.leader() == "b"
    assert made.running() == {"b": 1, "c": 1, "d": 1}
    assert ends(made, "bcd") == []


def test_if_the_successor_ends_as_it_is_named_another_node_leads() -> None:
    made = with_spares()
    works(made, 5)
    ask(made, "a")
    made.passes(NOTICE_S + 0.5)
    made["b"].is_frozen = True
    at_boundary(made, "abc", "a")
    made.passes(0.5)
    made.kill("b")
    made.passes(8.0)
    assert made.leader() in {"a", "c", "d"}
    assert {"c", "d"} <= made.running().keys()


def test_a_leader_that_is_asked_for_a_restart_by_an_old_order_ignores_it() -> None:
    """The order to succeed counts for its generation only, and from the leader only."""
    made = with_spares()
    works(made, 5)
    resigned = LeaderResigned(7, made["b"].card, "draining a", [("a", 1)])
    made.happens("b", MessageReceived("a", resigned))
    made.happens("b", MessageReceived("c", msgspec.structs.replace(resigned, generation=0)))
    made.passes(1.0)
    assert made.leader() == "a"
    assert made.running() == {"a": 0, "b": 0, "c": 0}


def test_with_a_witness_a_leader_that_leaves_leads_until_its_end() -> None:
    """The witness promises no other proposer before the end of the lease."""
    made = with_spares()
    works(made, 5)
    leader = made["a"].member.leader
    assert leader is not None
    ask(made, "a")
    made.passes(NOTICE_S + 0.5)
    leader.known.witness.is_used = True
    assert leader.draining.resignation(made.plan("a"), made["a"].card, "draining a") is None
    leader.known.witness.is_used = False
    assert leader.draining.resignation(made.plan("a"), made["b"].card, "draining b") is None
    found = leader.draining.resignation(made.plan("a"), made["a"].card, "draining a")
    assert found is not None
    assert (found.successor, found.leaving) == (made["b"].card, [made["a"].card.identity])
    for peer in leader.known:
        peer.linked = False
    assert leader.draining.resignation(made.plan("a"), made["a"].card, "draining a") is None
    for peer in leader.known:
        peer.is_unresponsive = True
    assert leader.draining.resignation(made.plan("a"), made["a"].card, "draining a") is None


def test_a_node_that_has_left_and_is_back_is_not_released_again() -> None:
    made, at = without_c()
    commits(made, "ab", at[1] + 1)
    assert ends(made, "c") == [(TERMINATED, True)]
    made.kill("c")
    made.start("c", incarnation=2)
    made.passes(STEP_S)
    assert made.role("c") is MemberRole.FOLLOWING
    assert made["a"].member.leader is not None
    for answered in made["a"].member.leader.heartbeat(now_s=made.now_s):
        made.happens("c", MessageReceived("a", answered.message))
    assert ends(made, "c") == []


def test_the_others_may_be_asked_while_a_node_leaves() -> None:
    made = with_spares(orders_checkpoints=True)
    works(made, 5)
    ask(made, "b")
    made.passes(NOTICE_S + 0.5)
    at = at_boundary(made, "abc", "b")
    made.passes(0.5)
    assert [one.version for one in made["c"].reported(WriteCheckpointPart)] == [version(*at)], (
        "if all nodes drain in the end"
    )
    assert set(made.running()) == set("acd")
    for one in "acd":
        ask(made, one, at[1])
    made.passes(0.5)
    works(made, at[1] + 2, "acd", at_boundary=True)
    assert made["d"].reported(SignalWorkers)


def test_notices_that_keep_coming_are_those_of_a_job_that_is_deleted() -> None:
    made = started("abcdefghijkl", cluster_size=ClusterSize(1, 12, 0))
    works(made, 5, "abcdefghijkl")
    for one in "lkjihg":
        ask(made, one)
        made.passes(NOTICE_S - 0.25)
    assert set(made.running().values()) == {0}
    assert 6 * (NOTICE_S - 0.25) > LIMIT_S
    (reason,) = {reported.reason for reported in made["a"].reported(RequestFinalSnapshot)}
    assert reason == "the nodes receive SIGTERM one after the other"
    works(made, 99, "abcdefghijkl", at_boundary=True)
    assert made["b"].reported(SignalWorkers)


def test_ranks_that_end_before_it_is_clear_are_not_started_again() -> None:
    """Slurm signals every process of a step, ranks too; the notice to a node may come earlier."""
    made = with_spares()
    works(made, 5)
    ended = exited(1, ExitKind.SIGNAL, -15)
    ask(made, "b", exits=(ended,))
    made.passes(1.0)
    assert set(made.running().values()) == {0}
    ask(made, "a", exits=(exited(0, ExitKind.SIGNAL, -15),))
    ask(made, "c", exits=(exited(2, ExitKind.SIGNAL, -15),))
    made.here_is("d", Heartbeat(generation=-1, leaves=True))
    made.passes(1.0)
    assert ends(made, "abcd") == [(TERMINATED, False)] * 4


def test_a_node_whose_ranks_have_ended_leaves_too() -> None:
    made = with_spares()
    works(made, 5)
    ask(made, "b", exits=(exited(1, ExitKind.SIGNAL, -15),))
    made.passes(NOTICE_S + 2.0)
    assert set(made.running()) == set("acd")


def test_a_script_without_snapshots_is_left_at_once() -> None:
    made = with_spares()
    for one in "abc":
        made.here_is(one, Heartbeat(generation=0, step=5, steps_here=5, leaves=one == "b"))
    made.passes(1.0)
    assert set(made.running()) == set("abc")
    made.passes(NOTICE_S)
    assert set(made.running()) == set("acd")
    assert not made["a"].reported(RequestFinalSnapshot)
    assert ends(made, "b") == []
    for one in "acd":
        made.here_is(one, Heartbeat(generation=1, step=1, steps_here=1))
    made.passes(2.0)
    assert ends(made, "b") == [(TERMINATED, True)]


def test_a_boundary_that_does_not_come_is_not_waited_for_longer_than_a_node_has_time() -> None:
    made = with_spares(grace_s=10.0)
    works(made, 5)
    hold(made, 4, "abc")
    ask(made, "b")
    made.passes(4.0)
    assert set(made.running()) == set("abc")
    made.passes(3.0)
    assert set(made.running()) == set("acd")
    assert made.plan("a").reason.endswith("without a snapshot at step 6")
    made.passes(5.0)
    assert ends(made, "b") == [(TERMINATED, True)], "its grace period is over, protected or not"


def test_after_that_wait_a_node_has_time_to_give_what_it_holds() -> None:
    made = with_spares(grace_s=12.0)
    works(made, 5)
    hold(made, 4, "abc")
    ask(made, "b")
    while set(made.running()) == set("abc"):
        made.passes(0.5)
    assert set(made.running()) == set("acd")
    made.passes(1.0)
    assert ends(made, "b") == [], "the new generation has fetched nothing yet"
    made.passes(4.0)
    assert ends(made, "b") == [(TERMINATED, True)]


def test_a_spare_that_leaves_votes_for_the_voters_without_it() -> None:
    made = with_spares()
    works(made, 5)
    hold(made, 4, "abc")
    made.passes(3.0)
    made.here_is("d", Heartbeat(generation=-1, leaves=True))
    for _ in range(40):
        if ends(made, "d"):
            break
        made.passes(0.1)
    assert ends(made, "d") == [(TERMINATED, True)]
    assert [card.node_id for card in made.plan("a").voters] == ["a", "b", "c"]


def test_a_spare_that_leaves_is_no_reason_for_a_boundary() -> None:
    made = with_spares()
    works(made, 5)
    hold(made, 4, "abc")
    made.here_is("d", Heartbeat(generation=-1, leaves=True))
    made.passes(NOTICE_S + 2.0)
    assert ends(made, "d") == [(TERMINATED, True)]
    assert set(made.running().values()) == {0}
    assert not made["a"].reported(RequestFinalSnapshot)


def test_a_node_that_is_lost_need_not_be_asked() -> None:
    made = with_spares()
    works(made, 5)
    ask(made, "b")
    made.kill("b")
    made.passes(NOTICE_S + 1.0)
    assert set(made.running()) == set("acd")
    assert notes(made, "a", "nodes_draining") == []


def test_a_paused_run_whose_last_nodes_are_asked_ends() -> None:
    made = started("abc", cluster_size=ClusterSize(3, 3, 0))
    works(made, 5)
    made.kill("c")
    made.passes(2.0)
    made.here_is("b", Heartbeat(generation=-1, leaves=True))
    made.passes(LIMIT_S - 1.0)
    assert ends(made, "ab") == [], "c may return"
    made.passes(2.0)
    assert ends(made, "ab") == [(TERMINATED, False)] * 2


def test_an_agent_that_is_restarted_while_a_node_leaves_does_not_end_the_run() -> None:
    """Seed 1138442: for a moment, one of three voters is neither draining nor lost."""
    made = started("abc", cluster_size=ClusterSize(1, 1, 2))
    works(made, 5, "a")
    ask(made, "a")
    made.passes(NOTICE_S + 0.5)
    made["c"].is_frozen = True
    at_boundary(made, "a", "a")
    made.passes(STEP_S)
    assert not made.running(), "the ballot waits for c"
    before = made["b"]
    made.kill("b")
    made.passes(0.5)
    made.all["b"] = before
    made.start_again("b")
    made["c"].is_frozen = False
    made.passes(8.0)
    assert ends(made, "abc") == []
    assert made.running(), "a leads again, and drains later"


def test_a_second_signal_stops_the_run() -> None:
    made = with_spares()
    works(made, 5)
    ask(made, "b")
    ask(made, "b", stops=1, stop_signal=15)
    made.passes(1.0)
    works(made, 9, at_boundary=True, stops=1)
    assert made["a"].reported(SignalWorkers)


def test_a_departure_replaces_growth_in_progress() -> None:
    made = started("abc", cluster_size=ClusterSize(2, 4, 0))
    works(made, 5)
    made.start("d")
    made.passes(6.0)
    assert made["a"].reported(RequestFinalSnapshot)[0].reason == "grows from 3 to 4 nodes"
    ask(made, "c")
    made.passes(NOTICE_S + 0.5)
    at = at_boundary(made, "abc", "c")
    made.passes(0.5)
    assert made.plan("a").reason == "draining c"
    assert made.plan("a").restore == at
    assert set(made.running()) == set("abd")


@pytest.mark.parametrize("node_id", ["a", "b"])
def test_a_node_that_is_asked_before_the_run_has_begun_ends(node_id: str) -> None:
    made = Agents("ab", settings(cluster_size=ClusterSize(3, 3, 0)))
    made.happens(node_id, NodeReported(Heartbeat(generation=-1, leaves=True)))
    assert ends(made, node_id) == [(TERMINATED, False)]


def test_a_node_that_has_lost_its_leader_leaves_by_the_next_leader_s_order() -> None:
    made = with_spares()
    works(made, 5)
    hold(made, 4, "abc")
    made["b"].is_frozen = True
    made.kill("a")
    made.happens("d", ConnectFailed("a.local", 29400, "a", True, "refused"))
    assert made.role("d") is MemberRole.SEEKING
    made.here_is("d", Heartbeat(generation=-1, leaves=True))
    assert ends(made, "d") == []
