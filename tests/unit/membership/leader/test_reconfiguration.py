"""Voter reconfiguration: the voters of a running generation.

Growth and eviction: at a step boundary, so that no step is lost.

A straggler is replaced on request: at a boundary, or at once if it hangs.
"""

from collections.abc import Callable
from itertools import combinations
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st
from made_settings import changed
from unit.recovery.test_health import heartbeat, reported, sample, slow_link
from unit.recovery.test_suspicions import hang

from ftrun.config.cluster import ClusterSize, MembershipSettings
from ftrun.config.profile import HangConfig, SlowConfig
from ftrun.membership.ballots import electorate
from ftrun.membership.leader.failure_detector import FailureDetector
from ftrun.membership.leader.reconfiguration import BoundaryReconfiguration, VoterReconfiguration
from ftrun.monitor.slow.delay_matrix import LinkSample
from ftrun.monitor.slow.samples import ClockOffset, NodeSample, RankSample
from ftrun.monitor.verdicts import Confidence, Verdict
from ftrun.network.failover.pair_check import PairCheck
from ftrun.recovery.commands import Command, Send
from ftrun.recovery.generation_monitor import GenerationMonitor
from ftrun.wire.cluster.generation import FailureHistory, GenerationPlan, VoterSet
from ftrun.wire.cluster.membership import Accept, Accepted, Heartbeat, RestartTimes
from ftrun.wire.cluster.messages import ProbeLinkRequest, ProbeLinkResult
from tests.unit.recovery.made import card, meet, plan, settings

SETTINGS = settings(
    heartbeat_interval_s=0.5, last_call_timeout_s=5.0, cluster_size=ClusterSize(1, 4, 9)
)
HISTORY = FailureHistory(restarts=2)


class FakeLeader:
    """a leads a generation; the present nodes of the plan, and new nodes."""

    def __init__(self, of: GenerationPlan, here: str) -> None:
        self.plan = of
        self.peers = FailureDetector(card("a"), SETTINGS)
        self.reconfiguration = VoterReconfiguration(SETTINGS, self.peers)
        for one in here:
            self.come(one)

    def come(self, node_id: str, *, now_s: float = 0.0, incarnation: int = 1) -> None:
        meet(self.peers, card(node_id, incarnation), now_s=now_s, linked=True)

    def lose(self, node_id: str) -> None:
        peer = self.peers.get(node_id)
        assert peer is not None
        peer.lost, peer.linked = "no heartbeat", False

    def poll(self, now_s: float = 10.0) -> list[Command]:
        return self.reconfiguration.poll(self.plan, HISTORY, now_s=now_s)

    def accept(
        self, node_ids: str, voter_revision: int | None = None
    ) -> list[GenerationPlan | None]:
        wanted = self.reconfiguration.wanted
        assert wanted is not None
        body = Accepted(
            wanted.generation,
            None,
            voter_revision=wanted.voter_revision if voter_revision is None else voter_revision,
        )
        return [self.reconfiguration.accepted(card(one), body, self.plan) for one in node_ids]

    @property
    def spares(self) -> str:
        """The spares of the requested voters."""
        wanted = self.reconfiguration.wanted
        return "" if wanted is None else "".join(one.node_id for one in wanted.spares)


def asked(commands: list[Command]) -> str:
    return "".join(sorted(one.node_id for one in commands if isinstance(one, Send)))


def lost_voter() -> FakeLeader:
    """Of three voters c is lost, and d has connected."""
    made = FakeLeader(plan(4, "ab", spares="c"), "abcd")
    made.lose("c")
    return made


def test_a_node_that_has_come_votes_in_place_of_one_that_is_lost() -> None:
    made = lost_voter()
    found = made.poll()
    wanted = made.reconfiguration.wanted
    assert wanted is not None
    assert (wanted.configuration_id, made.spares) == ((4, 1), "d")
    assert wanted.is_of(made.plan)
    assert wanted.decided_by == [VoterSet(4, [("a", 1), ("b", 1), ("c", 1)], voter_revision=0)]
    assert wanted.history == HISTORY
    assert found == [Send(one, Accept(wanted)) for one in "abd"]


def test_a_chosen_plan_is_returned_once() -> None:
    made = lost_voter()
    made.poll()
    wanted = made.reconfiguration.wanted
    assert made.accept("a") == [None]
    assert made.accept("b") == [wanted]
    assert made.reconfiguration.wanted is None
    late = Accepted(4, None, voter_revision=1)
    assert made.reconfiguration.accepted(card("d"), late, made.plan) is None


def test_a_majority_of_those_before_is_not_enough() -> None:
    made = FakeLeader(plan(4, "abc"), "abcdefgh")
    made.poll()
    wanted = made.reconfiguration.wanted
    assert made.accept("abcd") == [None] * 4
    assert made.accept("e") == [wanted]


def test_a_majority_of_those_after_is_not_enough() -> None:
    made = FakeLeader(plan(4, "ab", spares="cde"), "abcfghi")
    made.lose("c")
    made.poll()
    assert made.spares == "fghi"
    wanted = made.reconfiguration.wanted
    assert made.accept("afghib") == [None] * 6
    # c received it before it was lost.
    assert (
        made.reconfiguration.accepted(card("c"), Accepted(4, None, voter_revision=1), made.plan)
        == wanted
    )


@pytest.mark.parametrize(("generation", "voter_revision"), [(4, 0), (4, 2), (3, 1), (5, 1)])
def test_an_acceptance_of_something_else_does_not_count(
    generation: int, voter_revision: int
) -> None:
    made = lost_voter()
    made.poll()
    other = Accepted(generation, None, voter_revision=voter_revision)
    for one in "abd":
        assert made.reconfiguration.accepted(card(one), other, made.plan) is None
    assert made.accept("a") == [None]


# --- rule 1: the change is worth it -----------------------------------------------------------


def losses(voters: str, here: str) -> int:
    """Number of present nodes that may be lost, in any choice; -1: they are already too few."""
    left = sorted(set(voters) & set(here))
    for count in range(len(left), -1, -1):
        rests = (set(left) - set(gone) for gone in combinations(left, count))
        if all(2 * len(rest) > len(voters) for rest in rests):
            return count
    return -1


@effort(deadline=None)
@given(st.integers(1, 4), st.sets(st.sampled_from("pqrs")), st.sets(st.sampled_from("pqrstuvw")))
def test_voters_change_only_where_more_may_be_lost_afterwards(
    num_members: int, spares: set[str], here: set[str]
) -> None:
    members = "abcd"[:num_members]
    before = members + "".join(sorted(spares))
    after = members + "".join(sorted(here))
    made = FakeLeader(plan(4, members, sorted(spares)), after)
    made.poll()
    is_better = losses(after, after) > losses(before, after)
    assert (made.reconfiguration.wanted is not None) is is_better
    if is_better:
        assert set(made.spares) == here


def test_a_lost_spare_has_no_vote() -> None:
    """Of four voters three are needed, and only three are left; of three voters two are needed."""
    made = FakeLeader(plan(4, "abc", spares="d"), "abcd")
    made.poll()
    assert made.reconfiguration.wanted is None
    made.lose("d")
    made.poll(20.0)
    assert made.reconfiguration.wanted is not None
    assert made.spares == ""


def test_no_more_are_standby_with_a_vote_than_were_requested() -> None:
    """Otherwise new nodes could outvote the members, and their loss would pause a healthy run."""
    made = FakeLeader(plan(4, "ab", spares="c"), "abdefg")
    size = settings(cluster_size=ClusterSize(2, 2, 1))
    made.reconfiguration = VoterReconfiguration(size, made.peers)
    made.poll()
    assert made.spares == "d"


def test_of_two_voters_the_successor_of_one_proves_that_it_has_no_vote() -> None:
    made = FakeLeader(plan(4, "a", spares="b"), "a")
    made.come("b", incarnation=2)
    made.come("c")
    made.poll()
    assert made.spares == "bc"
    assert made.accept("a") == [None]
    wanted = made.reconfiguration.wanted
    assert wanted is not None
    body = Accepted(4, None, voter_revision=1)
    assert made.reconfiguration.accepted(card("b", 2), body, made.plan) == wanted


def test_what_was_announced_and_given_up_is_void() -> None:
    made = lost_voter()
    made.poll()
    made.reconfiguration.reset()
    assert made.reconfiguration.void == {(4, 1)}


def test_an_agent_that_was_started_again_is_another_voter() -> None:
    made = FakeLeader(plan(4, "ab", spares="c"), "ab")
    made.come("c", incarnation=2)
    made.poll()
    wanted = made.reconfiguration.wanted
    assert wanted is not None
    assert electorate(wanted.voters) == {("a", 1), ("b", 1), ("c", 2)}


def test_the_spares_of_now_come_first_and_in_their_order() -> None:
    made = FakeLeader(plan(4, "a", spares="zy"), "ayzxwv")
    made.poll()
    assert made.spares == "zyvwx"


# --- rule 2: new voters -----------------------------------------------------------------------


def test_only_a_node_that_has_been_present_for_a_while_joins() -> None:
    made = FakeLeader(plan(4, "ab", spares="c"), "ab")
    made.come("d", now_s=10.0)
    made.poll(14.75)
    assert made.reconfiguration.wanted is None
    made.poll(15.0)
    assert made.spares == "d"


def test_it_polls_twice_per_heartbeat() -> None:
    made = FakeLeader(plan(4, "ab", spares="c"), "ab")
    made.poll(10.0)
    made.come("d")
    assert made.poll(10.2) == []
    assert asked(made.poll(10.25)) == "abd"


@pytest.mark.parametrize("how", ["bound to another", "lost", "not connected"])
def test_a_node_with_another_promise_or_without_a_connection_does_not_join(how: str) -> None:
    made = lost_voter()
    peer = made.peers.get("d")
    assert peer is not None
    match how:
        case "bound to another":
            peer.promised = 5
        case "lost":
            peer.lost = "no heartbeat"
        case _:
            peer.linked = False
    made.poll()
    assert made.spares == ""
    peer.promised, peer.lost, peer.linked = 4, "", True
    made.poll(20.0)
    assert made.spares == "d"


# --- rule 3: until it is chosen ---------------------------------------------------------------


def test_it_asks_again_all_that_have_not_accepted() -> None:
    made = lost_voter()
    c = made.peers.get("c")
    assert c is not None
    assert asked(made.poll(10.0)) == "abd"
    made.accept("a")
    assert made.poll(10.2) == []
    assert made.poll(10.5) == [], "it was asked a moment ago"
    c.linked = True
    assert asked(made.poll(11.0)) == "bcd", "c is one of the previous voters"
    assert made.reconfiguration.wanted is not None
    assert made.reconfiguration.wanted.voter_revision == 1
    assert asked(made.poll(11.5)) == ""
    assert asked(made.poll(12.0)) == "bcd"


def test_if_other_nodes_are_present_another_voter_revision_is_requested() -> None:
    made = lost_voter()
    made.poll(10.0)
    made.accept("a")
    for one in "ef":
        made.come(one, now_s=0.0)
    assert asked(made.poll(11.0)) == "abdef"
    wanted = made.reconfiguration.wanted
    assert wanted is not None
    assert (wanted.voter_revision, made.spares) == (2, "def")
    # a has accepted another one.
    assert made.accept("de") == [None] * 2
    assert made.accept("b") == [None]
    assert made.accept("a") == [wanted]


def test_the_next_change_counts_from_the_voter_revision_in_effect() -> None:
    made = FakeLeader(plan(4, "ab", spares="c", voter_revision=7), "abd")
    made.poll()
    wanted = made.reconfiguration.wanted
    assert wanted is not None
    assert wanted.configuration_id == (4, 8)
    assert wanted.decided_by[0].configuration_id == (4, 7)


def test_a_ballot_ends_it() -> None:
    made = lost_voter()
    made.poll()
    made.reconfiguration.reset()
    late = Accepted(4, None, voter_revision=1)
    for one in "abd":
        assert made.reconfiguration.accepted(card(one), late, made.plan) is None


def test_where_nothing_is_wanted_none_is_asked() -> None:
    assert FakeLeader(plan(4, "ab", spares="c"), "abc").poll() == []


SETTINGS_AT_BOUNDARY = settings(
    cluster_size=ClusterSize(2, 4, 0),
    heartbeat_interval_s=0.5,
    last_call_timeout_s=5.0,
    answer_s=30.0,
)
PLAN = plan(1, "ab")


class Run:
    """Two members that run steadily, and the other connected nodes."""

    def __init__(
        self, settings: MembershipSettings = SETTINGS_AT_BOUNDARY, *, attached: bool = True
    ) -> None:
        self.peers = FailureDetector(card("a"), settings)
        self.monitor = GenerationMonitor(settings, pairs=PairCheck())
        self.changes = BoundaryReconfiguration(settings, self.peers, self.monitor)
        self.monitor.begin(PLAN, now_s=0.0)
        for one in "ab":
            meet(self.peers, card(one), now_s=0.0, linked=True)
            self.heartbeat(one, step=7, attached=attached)

    def come(self, node_id: str, *, now_s: float = 0.0, incarnation: int = 1) -> None:
        meet(self.peers, card(node_id, incarnation), now_s=now_s, linked=True)

    def heartbeat(
        self, node_id: str, *, step: int = 7, attached: bool = True, **more: object
    ) -> None:
        found = Heartbeat(generation=1, step=step, steps_here=step, attached=attached, **more)  # type: ignore[arg-type]
        self.monitor.heartbeat_received(node_id, found, now_s=0.0)

    def poll(self, now_s: float, *, excluded: str = "", of: GenerationPlan = PLAN) -> str:
        return self.changes.poll(of, set(excluded), now_s=now_s)

    @property
    def boundary(self) -> int:
        return self.monitor.orders.stop_after_step


def test_it_asks_for_a_boundary_and_grows_once_its_snapshot_is_committed() -> None:
    run = Run()
    run.come("c")
    assert run.poll(10.0) == ""
    assert run.boundary == 8
    assert run.monitor.orders.reason == "grows from 2 to 3 nodes"
    for one in "ab":
        run.heartbeat(one, step=8, at_boundary=True)
    assert run.poll(20.0) == "", "it is not committed"
    for one in "ab":
        run.heartbeat(one, step=8, at_boundary=True, ready=(1, 8))
    assert run.poll(21.0) == "grows from 2 to 3 nodes"


def test_ranks_that_have_not_come_to_the_boundary_are_waited_for() -> None:
    run = Run()
    run.come("c")
    run.poll(10.0)
    for one in "ab":
        run.heartbeat(one, step=8, ready=(1, 8))
    assert run.poll(20.0) == ""


def test_where_the_snapshot_does_not_come_in_time_it_grows_without() -> None:
    run = Run()
    run.come("c")
    run.poll(10.0)
    assert run.poll(39.7) == ""
    assert run.poll(40.0) == "grows from 2 to 3 nodes, without a snapshot at step 8"


def test_a_script_that_takes_no_snapshots_grows_at_once() -> None:
    run = Run(attached=False)
    run.come("c")
    assert run.poll(10.0) == "grows from 2 to 3 nodes"
    assert run.boundary == -1


def test_only_a_run_that_continues_undisturbed_grows() -> None:
    run = Run()
    run.come("c")
    run.monitor.note_failure("b", now_s=1.0)
    assert run.poll(10.0) == ""
    assert run.boundary == -1
    run.heartbeat("b")
    run.poll(11.0)
    assert run.boundary >= 0


def test_a_stopping_run_does_not_grow() -> None:
    run = Run()
    run.come("c")
    run.poll(10.0)
    run.heartbeat("a", stops=1)
    assert run.poll(60.0) == ""


def test_only_nodes_that_have_been_present_for_a_while_join() -> None:
    run = Run()
    assert run.poll(100.0) == ""
    run.come("c", now_s=100.0)
    run.come("d", now_s=102.0)
    run.poll(106.7)
    assert run.boundary == -1, "d has just come"
    run.poll(107.0)
    assert run.monitor.orders.reason == "grows from 2 to 4 nodes"


def test_a_node_that_is_lost_or_excluded_or_not_connected_is_no_joining_node() -> None:
    run = Run()
    for one in "cde":
        run.come(one)
    lost, unlinked = run.peers.get("c"), run.peers.get("d")
    assert lost is not None
    assert unlinked is not None
    lost.lost, unlinked.linked = "no heartbeat", False
    assert run.poll(100.0, excluded="e") == ""
    assert run.boundary == -1


def test_a_member_that_was_started_again_is_a_joining_node() -> None:
    run = Run()
    run.come("b", incarnation=2)
    run.poll(100.0)
    assert run.monitor.orders.reason == "grows from 2 to 3 nodes"


def test_no_run_grows_beyond_what_was_requested() -> None:
    run = Run()
    for one in "cde":
        run.come(one)
    run.poll(100.0)
    assert run.monitor.orders.reason == "grows from 2 to 4 nodes"
    full = Run(settings(cluster_size=ClusterSize(2, 2, 1), last_call_timeout_s=5.0), attached=False)
    full.come("c")
    assert full.poll(100.0) == ""


def test_it_polls_twice_per_heartbeat_at_a_boundary() -> None:
    run = Run(attached=False)
    assert run.poll(100.0) == ""
    run.come("c")
    assert run.poll(100.2) == ""
    assert run.poll(100.25)


def test_a_commit_of_before_the_boundary_is_not_the_one_that_is_waited_for() -> None:
    run = Run()
    run.come("c")
    run.poll(10.0)
    for one in "ab":
        run.heartbeat(one, step=8, at_boundary=True, ready=(1, 7))
    assert run.poll(20.0) == ""
    # A single node stops at a boundary of its own, which may be a later one.
    for one in "ab":
        run.heartbeat(one, step=9, at_boundary=True, ready=(1, 9))
    assert run.poll(21.0) == "grows from 2 to 3 nodes"


def test_a_node_that_leaves_again_does_not_leave_the_ranks_at_the_boundary() -> None:
    run = Run()
    run.come("c")
    run.poll(10.0)
    c = run.peers.get("c")
    assert c is not None
    c.lost = "no heartbeat"
    for one in "ab":
        run.heartbeat(one, step=8, at_boundary=True, ready=(1, 8))
    assert run.poll(20.0) == "grows from 2 to 2 nodes"


def test_another_generation_forgets_the_boundary() -> None:
    run = Run()
    run.come("c")
    run.poll(10.0)
    run.changes.reset()
    run.monitor.begin(PLAN, now_s=20.0)
    for one in "ab":
        run.heartbeat(one, step=30)
    assert run.poll(100.0) == ""
    assert run.boundary == 31


def test_the_same_nodes_continue_otherwise_from_a_boundary_on_request() -> None:
    run = Run()
    run.changes.requested = "the run leaves rail eth0"
    assert run.poll(10.0) == ""
    assert run.boundary == 8
    for one in "ab":
        run.heartbeat(one, step=8, at_boundary=True, ready=(1, 8))
    assert run.poll(11.0) == "the run leaves rail eth0"
    run.changes.reset()
    assert run.poll(12.0) == ""


def test_without_snapshots_a_request_is_met_at_once() -> None:
    run = Run(attached=False)
    run.changes.requested = "the run leaves rail eth0"
    assert run.poll(10.0) == "the run leaves rail eth0"


PLAN_OF_EVICTION = plan(1, [card("a", num_ranks=2), card("b", num_ranks=2)], spares="s")
EVICT = settings(
    cluster_size=ClusterSize(2, 2, 1),
    heartbeat_interval_s=0.5,
    answer_s=30.0,
    slow=SlowConfig(action="evict", evict_after_s=20.0),
)


class RunOfEviction:
    """Two nodes of two ranks, and a spare; rank 2 on b is late from step 30 on."""

    def __init__(
        self,
        settings: MembershipSettings = EVICT,
        *,
        spare: bool = True,
        of: GenerationPlan = PLAN_OF_EVICTION,
    ) -> None:
        self.plan = of
        self.peers = FailureDetector(card("a"), settings)
        self.monitor = GenerationMonitor(settings, "a", pairs=PairCheck())
        self.changes = BoundaryReconfiguration(settings, self.peers, self.monitor)
        self.monitor.begin(of, now_s=0.0)
        clock = ClockOffset()
        clock.add(10**9, 10**9, 10**9, 10**9)
        self.monitor.watching.slow.clocks = {"b": clock}
        for one in [node.card for node in of.members] + ([card("s")] if spare else []):
            meet(self.peers, one, now_s=0.0, linked=True)
        self.reasons: list[str] = []

    def go(self, first: int, last: int, late_s: float, **more: object) -> None:
        for number in range(first, last):
            for node in "ab":
                one = sample(node, number, late_s)
                self.heartbeat(node, number, sample=one, **more)
            self.poll(float(number))
            if self.boundary >= 0 or self.reasons:
                return

    def heartbeat(self, node: str, number: int, **more: object) -> None:
        self.monitor.heartbeat_received(node, heartbeat(node, number, **more), now_s=float(number))

    def poll(self, now_s: float, *, excluded: str = "") -> str:
        self.monitor.tick(now_s=now_s)
        found = self.changes.poll(self.plan, set(excluded), now_s=now_s)
        self.reasons += [found] if found else []
        return found

    @property
    def boundary(self) -> int:
        return self.monitor.orders.stop_after_step

    def is_excluded(self, now_s: float) -> set[str]:
        return self.monitor.excluded(now_s=now_s)


def slow_run(settings: MembershipSettings = EVICT, *, spare: bool = True) -> RunOfEviction:
    run = RunOfEviction(settings, spare=spare)
    run.go(1, 30, 0.0)
    run.go(30, 90, 0.08)
    return run


def at_the_boundary(run: RunOfEviction, **more: object) -> None:
    for node in "ab":
        run.heartbeat(node, run.boundary, at_boundary=True, **more)


def test_the_node_of_a_rank_that_stays_slow_is_evicted_at_a_boundary() -> None:
    run = slow_run()
    assert run.boundary > 50
    assert run.monitor.orders.reason.startswith("node b is evicted: ")
    assert run.reasons == []
    assert run.is_excluded(90.0) == set()
    at_the_boundary(run, ready=(1, run.boundary))
    assert run.poll(70.0).startswith("node b is evicted: ")
    assert run.is_excluded(70.0) == {"b"}
    assert run.monitor.history(now_s=91.0).barred == {"b": 21.0}, "the next leader knows it too"
    run.monitor.begin(plan(2, [card("a", num_ranks=2), card("s", num_ranks=2)]), now_s=92.0)
    for node in "as":
        ranks = heartbeat("a" if node == "a" else "b", 200).ranks
        body = Heartbeat(generation=2, attached=True, step=200, steps_here=9, ranks=ranks,
                    restart=RestartTimes(0.1, 0.5, 0.1, 0.1))  # fmt: skip
        run.monitor.heartbeat_received(node, body, now_s=93.0)
    run.monitor.tick(now_s=94.0)
    assert [one["actions"] for one in reported(run.monitor, "incident_closed")] == [
        ["report"],
        ["evict"],
    ]


AUTO = changed(EVICT, slow=SlowConfig(evict_after_s=20.0))


def protected(run: RunOfEviction, first: int, last: int, late_s: float) -> None:
    run.go(first, last, late_s, ready=(1, 1), survives=1)


def auto_run(*, spare: bool = True) -> RunOfEviction:
    run = RunOfEviction(AUTO, spare=spare)
    protected(run, 1, 30, 0.0)
    protected(run, 30, 90, 0.08)
    return run


def test_if_it_must_not_be_evicted_it_is_only_reported() -> None:
    run = slow_run(changed(EVICT, slow=SlowConfig(action="report", evict_after_s=20.0)))
    assert run.boundary == -1
    assert len(reported(run.monitor, "verdict")) == 1


def test_by_default_a_free_spare_takes_the_place_of_a_slow_node() -> None:
    run = auto_run()
    assert run.boundary > 50
    assert run.monitor.orders.reason.startswith("node b is evicted: ")
    assert auto_run(spare=False).boundary == -1, "none is free"


def test_by_default_a_node_whose_state_is_not_protected_stays() -> None:
    run = RunOfEviction(AUTO)
    run.go(1, 30, 0.0, ready=(1, 1), survives=0)
    run.go(30, 90, 0.08, ready=(1, 1), survives=0)
    assert run.boundary == -1


def test_by_default_a_spare_far_below_the_median_replaces_none() -> None:
    run = RunOfEviction(AUTO)
    spare = run.peers.get("s")
    assert spare is not None
    spare.is_below_median = True
    protected(run, 1, 30, 0.0)
    protected(run, 30, 90, 0.08)
    assert run.boundary == -1


def test_by_default_a_script_without_snapshots_is_not_restarted() -> None:
    assert slow_run(AUTO).boundary == -1
    run = RunOfEviction(AUTO)
    run.go(1, 30, 0.0, attached=False)
    run.go(30, 90, 0.08, attached=False)
    assert run.reasons == []


def evicted_before(run: RunOfEviction, node_id: str, rank: int, now_s: float) -> None:
    """That node was evicted for the slowness of this rank."""
    (verdict,) = auto_run().monitor.watching.slow.verdicts
    run.monitor.failures.evict(verdict, node_id, (rank,), now_s=now_s)


@pytest.mark.parametrize(("ago_s", "is_evicted"), [(3000.0, False), (3600.0, True)])
def test_by_default_one_node_is_evicted_within_an_hour(ago_s: float, *, is_evicted: bool) -> None:
    run = RunOfEviction(AUTO)
    evicted_before(run, "x", 0, -ago_s)
    protected(run, 3, 30, 0.0)
    protected(run, 30, 90, 0.08)
    assert (run.boundary > 0) == is_evicted
    assert len(reported(run.monitor, "verdict")) == 1


def test_exclusions_for_failures_and_for_slowness_do_not_use_up_each_others_limit() -> None:
    run = RunOfEviction(AUTO)
    for number in range(3):
        run.monitor.failures.bar(f"n{number}", "a failure", now_s=0.0)
    protected(run, 1, 30, 0.0)
    protected(run, 30, 90, 0.08)
    assert run.boundary > 50
    at_the_boundary(run, ready=(1, run.boundary), survives=1)
    assert run.poll(90.0)
    run.monitor.failures.bar("h", "it was replaced after a hang", is_slow=True, now_s=90.0)
    assert run.is_excluded(90.0) == {"b", "h", "n0", "n1", "n2"}
    assert run.monitor.failures.num_excluded(now_s=90.0) == 3


@pytest.mark.parametrize(("before", "is_evicted"), [("x", False), ("b", True)])
@pytest.mark.parametrize("made", [AUTO, EVICT], ids=["auto", "evict"])
def test_a_rank_that_was_slow_on_another_node_too_evicts_none(
    made: MembershipSettings, before: str, *, is_evicted: bool
) -> None:
    run = RunOfEviction(made)
    evicted_before(run, before, 2, -7200.0)
    history = run.monitor.history(now_s=0.0)
    run = RunOfEviction(made)
    run.monitor.succeed(history, now_s=0.0, known_s=0.0)  # the next leader knows it too
    protected(run, 1, 30, 0.0)
    protected(run, 30, 90, 0.08)
    assert (run.boundary > 0) == is_evicted


def test_by_default_a_rank_that_was_late_from_the_start_stays() -> None:
    """Its work may be uneven by design: the evidence is possible only."""
    run = RunOfEviction(AUTO)
    protected(run, 1, 120, 0.4)
    assert run.boundary == -1


def test_where_no_node_is_standby_it_is_only_reported() -> None:
    assert slow_run(spare=False).boundary == -1


def test_what_passes_is_left_alone() -> None:
    run = RunOfEviction(changed(EVICT, slow=SlowConfig(action="evict", evict_after_s=60.0)))
    run.go(1, 30, 0.0)
    run.go(30, 60, 0.08)
    run.go(60, 150, 0.0)
    assert run.boundary == -1


def test_a_spare_may_be_lost_at_the_boundary() -> None:
    run = slow_run()
    spare = run.peers.get("s")
    assert spare is not None
    spare.lost = "no heartbeat"
    at_the_boundary(run, ready=(1, run.boundary))
    assert run.poll(70.0) == ""
    assert_withdrawn(run, "no spare is left")


def assert_withdrawn(run: RunOfEviction, why: str) -> None:
    assert run.boundary == -1
    assert run.monitor.orders.reason.startswith(f"the eviction for slowness is withdrawn: {why}")
    assert run.is_excluded(90.0) == set()
    assert run.reasons == []


def test_the_verdict_must_still_hold_at_the_boundary() -> None:
    run = auto_run()
    first = run.boundary
    for number in range(first, first + 4):
        for node in "ab":
            body = heartbeat(node, number, sample=sample(node, number, 0.0))
            run.monitor.heartbeat_received(node, body, now_s=float(number))
        run.poll(float(number))
    assert_withdrawn(run, "it is not slow any more")
    run.go(first + 4, first + 20, 0.0, ready=(1, 1), survives=1)
    run.go(first + 20, first + 90, 0.08, ready=(1, 1), survives=1)
    assert run.boundary == -1, "the run is not stopped repeatedly"


def test_by_default_no_node_is_evicted_without_the_snapshot_of_the_boundary() -> None:
    run = auto_run()
    at_the_boundary(run, ready=(1, 1), survives=1)
    assert run.poll(70.0) == ""
    assert run.boundary > 0
    run.poll(run.boundary + AUTO.answer_s + 30.0)
    assert_withdrawn(run, "no snapshot of step")


def test_by_default_the_snapshot_of_the_boundary_must_be_protected() -> None:
    run = auto_run()
    at_the_boundary(run, ready=(1, run.boundary), survives=0)
    assert run.poll(70.0) == ""
    run.poll(run.boundary + AUTO.answer_s + 30.0)
    assert_withdrawn(run, "no snapshot of step")


def test_if_requested_it_is_evicted_without_the_snapshot_of_the_boundary() -> None:
    run = slow_run()
    at_the_boundary(run, ready=(1, 1))
    assert "without a snapshot" in run.poll(run.boundary + EVICT.answer_s + 30.0)


def test_a_node_that_drains_at_the_boundary_gets_the_spare() -> None:
    run = auto_run()
    at_the_boundary(run, ready=(1, run.boundary), survives=1)
    run.monitor.drain_requested = frozenset("a")
    assert run.poll(70.0) == "draining a"
    assert run.is_excluded(70.0) == set()


def test_a_stop_after_a_withdrawn_boundary_waits_for_its_own_boundary() -> None:
    run = auto_run()
    at_the_boundary(run, ready=(1, 1), survives=1)
    withdrawn = run.boundary
    run.poll(run.boundary + AUTO.answer_s + 30.0)
    assert_withdrawn(run, "no snapshot of step")
    stops = run.monitor.stop(15, "a signal", now_s=140.0)
    assert run.monitor.order_all(stops) == []
    first = run.boundary
    assert first > 0
    late = heartbeat("b", withdrawn, at_boundary=True)  # sent before the withdrawal reached b
    assert run.monitor.heartbeat_received("b", late, now_s=140.0) == []
    at = [heartbeat(node, first, at_boundary=True) for node in "ab"]
    assert run.monitor.heartbeat_received("a", at[0], now_s=141.0) != []


def test_a_script_without_snapshots_is_restarted_at_once() -> None:
    run = RunOfEviction()
    run.go(1, 30, 0.0, attached=False)
    run.go(30, 90, 0.08, attached=False)
    assert run.reasons
    assert run.boundary == -1
    assert run.is_excluded(90.0) == {"b"}


def noise(random: Random, second: int) -> float:
    """Each collective is up to a third of a step late, by chance."""
    return random.expovariate(100.0)


def bursts(random: Random, second: int) -> float:
    """Up to 15 s of slowness in each minute, such as a checkpoint of another job."""
    return 0.08 if second % 60 < random.randint(5, 15) else 0.0


def often(random: Random, second: int) -> float:
    """For longer than the limit in total, and never without a pause."""
    return 0.08 if second % 30 >= 15 else 0.0


def uneven(random: Random, second: int) -> float:
    """More work from the first step on."""
    return 0.08 + random.expovariate(200.0)


@pytest.mark.parametrize("healthy", [noise, bursts, often, uneven])
def test_by_default_no_healthy_node_is_evicted(healthy: Callable[[Random, int], float]) -> None:
    run, random = RunOfEviction(AUTO), Random(1)
    for second in range(1, 240):
        protected(run, second, second + 1, healthy(random, second))
        assert run.boundary == -1, second


def test_by_default_work_that_grows_on_all_ranks_evicts_none() -> None:
    """Steps become six times as long in four minutes; each rank is late by up to a tenth."""
    run, random = RunOfEviction(AUTO), Random(2)
    at_s, step, step_s = 100.0, 0, 0.125
    for number in range(1, 240):
        ends: list[tuple[int, float]] = []
        while at_s < 100.0 + number:
            ends.append((step, at_s))
            step, at_s, step_s = step + 1, at_s + step_s, step_s + 0.7 / 240 * step_s
        for node in "ab":
            one, ranks = sample(node, number, 0.0), []
            for rank in one.ranks:
                entered = [("0", n, end + random.uniform(-0.1, 0.0) * step_s) for n, end in ends]
                new = msgspec.structs.replace(rank, step=step, entered=tuple(entered), calls=())
                ranks.append(new)
            body = msgspec.structs.replace(one, ranks=tuple(ranks))
            run.heartbeat(node, number, sample=body, ready=(1, 1), survives=1)
        run.poll(float(number))
        assert run.boundary == -1, number
    assert step_s > 6 * 0.125


def test_slowness_for_longer_than_the_limit_evicts() -> None:
    run = RunOfEviction(AUTO)
    protected(run, 1, 40, 0.0)
    protected(run, 40, 40 + 14, 0.08)
    assert run.boundary == -1
    protected(run, 40 + 14, 40 + 34, 0.08)
    assert run.boundary > 0


def no_sample(node: str, number: int) -> NodeSample | None:
    return None


def evaluates(node: str, number: int) -> NodeSample:
    one = sample(node, number, 0.08)
    ranks = [msgspec.structs.replace(rank, is_training=False) for rank in one.ranks]
    return msgspec.structs.replace(one, ranks=tuple(ranks))


def one_rank_evaluates(node: str, number: int) -> NodeSample:
    one = sample(node, number, 0.08)
    ranks = [msgspec.structs.replace(one.ranks[0], is_training=node == "b"), one.ranks[1]]
    return msgspec.structs.replace(one, ranks=tuple(ranks))


def no_step(node: str, number: int) -> NodeSample:
    """All ranks wait for a debugger, or for an evaluation that is not declared."""
    one = sample(node, number, 0.0)
    ranks = [msgspec.structs.replace(rank, step=8 * 45, entered=()) for rank in one.ranks]
    return msgspec.structs.replace(one, ranks=tuple(ranks))


def collectives_without_steps(node: str, number: int) -> NodeSample:
    """An evaluation that is not declared, with collectives in which rank 2 is late."""
    one = sample(node, number, 0.08)
    ranks = [msgspec.structs.replace(rank, step=8 * 45) for rank in one.ranks]
    return msgspec.structs.replace(one, ranks=tuple(ranks))


PAUSES = [no_sample, evaluates, one_rank_evaluates, no_step, collectives_without_steps]


@pytest.mark.parametrize("pause", PAUSES, ids=lambda one: one.__name__)
@pytest.mark.parametrize("made", [AUTO, EVICT], ids=["auto", "evict"])
def test_time_without_steps_is_no_evidence(
    pause: Callable[[str, int], NodeSample | None], made: MembershipSettings
) -> None:
    """After a burst, the verdict stays while nothing is measured."""
    run = RunOfEviction(made)
    protected(run, 1, 30, 0.0)
    protected(run, 30, 46, 0.08)
    assert [one.culprits for one in run.monitor.watching.slow.verdicts] == [(2,)]
    for number in range(46, 106):
        for node in "ab":
            one = pause(node, number)
            run.heartbeat(node, number, sample=one, ready=(1, 1), survives=1)
        run.poll(float(number))
        assert run.boundary == -1, number
    protected(run, 106, 112, 0.08)
    assert run.boundary == -1, "the time starts again at 0"
    protected(run, 112, 140, 0.0)
    assert run.boundary == -1


def many_small(number: int, late_s: float, alone_s: float) -> dict[str, NodeSample]:
    """Ten collectives a step; rank 2 enters each late by one time, and the last by another."""
    found = {}
    for node in "ab":
        one, ranks = sample(node, number, 0.0), []
        for rank in one.ranks:
            late = [late_s if rank.rank == 2 else 0.0] * 80
            if rank.rank == 2:
                late[9::10] = [alone_s or late_s] * 8
            at_s = [99.0 + number + n // 10 / 8 + n % 10 * 0.008 + late[n] for n in range(80)]
            entered = [("0", 80 * number + n, at_s[n]) for n in range(80)]
            ranks.append(msgspec.structs.replace(rank, entered=tuple(entered)))
        found[node] = msgspec.structs.replace(one, ranks=tuple(ranks))
    return found


def test_possible_evidence_does_not_age_for_likely_evidence() -> None:
    run = RunOfEviction(AUTO)
    known: set[Confidence] = set()

    def go(first: int, last: int, late_s: float, alone_s: float = 0.0) -> None:
        for number in range(first, last):
            for node, one in many_small(number, late_s, alone_s).items():
                run.heartbeat(node, number, sample=one, ready=(1, 1), survives=1)
            run.poll(float(number))
            known.update(one.confidence for one in run.monitor.watching.slow.verdicts)
            if run.boundary >= 0:
                return

    go(1, 40, 0.0)
    go(40, 100, 0.005)
    assert known == {Confidence.POSSIBLE}
    assert run.boundary == -1
    go(100, 118, 0.005, 0.04)
    assert Confidence.LIKELY in known
    assert run.boundary == -1
    go(118, 160, 0.005, 0.04)
    assert run.boundary > 0


def test_slowness_that_follows_its_ranks_evicts_no_other_node() -> None:
    run = auto_run()
    at_the_boundary(run, ready=(1, run.boundary), survives=1)
    assert run.poll(90.0).startswith("node b is evicted: ")
    # The spare takes the name of b here, so that the samples of its ranks are the same.
    run.monitor.begin(msgspec.structs.replace(PLAN_OF_EVICTION, generation=2), now_s=92.0)
    run.changes.reset()
    run.reasons.clear()
    run.go(100, 220, 0.08, ready=(2, 1), survives=1, generation=2)
    (found,) = run.monitor.watching.slow.persistent(20.0, now_s=220.0)
    assert (found.culprits, found.confidence) == ((2,), Confidence.POSSIBLE)
    assert run.boundary == -1


def test_of_a_slow_link_one_end_is_evicted_if_requested() -> None:
    assert after_a_slow_link(EVICT).monitor.orders.reason.startswith("node b is evicted: ")
    assert after_a_slow_link(AUTO).boundary == -1


def test_by_default_a_link_that_was_slow_from_the_start_evicts_none() -> None:
    """A probe confirms that it is slow; the network may be built this way."""
    for made, is_evicted in ((AUTO, False), (EVICT, True)):
        run = RunOfEviction(made, of=THREE)
        seen = slow_from_the_start(run)
        assert ("b",) in {one.nodes for one in seen}
        assert all(one.counter_evidence for one in seen)
        assert {one.confidence for one in seen} == {Confidence.LIKELY}
        assert (run.boundary > 0) == is_evicted


THREE = plan(1, [card(one, num_ranks=1) for one in "abc"], spares="s")


def slow_from_the_start(run: RunOfEviction) -> list[Verdict]:
    seen: list[Verdict] = []
    for number in range(1, 100):
        for node in "abc":
            links = tuple(
                LinkSample(f"{to}.local", 1 << 20, 0.9 if "b" in (node, to) else 0.06, 0.001, 0, 0)
                for to in "abc"
                if to != node
            )
            one = RankSample("abc".index(node), 8 * number, (), "0=0-2")
            body = NodeSample(number, 100.0 + number, 1.0, (one,), links, 1 << 40)
            run.heartbeat(node, number, sample=body, ready=(1, 1), survives=1)
        run.poll(float(number))
        for send in run.monitor.probes(now_s=float(number)):
            assert isinstance(send, Send)
            body_of = send.message
            assert isinstance(body_of, ProbeLinkRequest)
            is_slow = "b" in (send.node_id, body_of.receiver)
            rate = 1e5 if is_slow else 1e9
            found = ProbeLinkResult(body_of.number, body_of.receiver, 0.001, rate, rate)
            run.monitor.watching.slow.probed(found, now_s=float(number))
        seen += run.monitor.watching.slow.verdicts
        if run.boundary > 0:
            break
    return [one for one in seen if one.confidence is not Confidence.POSSIBLE]


def test_a_link_that_is_slow_in_an_evaluation_evicts_none() -> None:
    assert after_a_slow_link(EVICT, trains_until=40).boundary == -1


def after_a_slow_link(settings: MembershipSettings, *, trains_until: int = 100) -> RunOfEviction:
    run = RunOfEviction(settings)
    for number in range(1, 100):
        one = slow_link(number, is_slow=number > 30)
        first = msgspec.structs.replace(one.ranks[0], is_training=number < trains_until)
        one = msgspec.structs.replace(one, ranks=(first, *one.ranks[1:]))
        run.heartbeat("a", number, sample=one, ready=(1, 1), survives=1)
        run.heartbeat("b", number, sample=sample("b", number, 0.0), ready=(1, 1), survives=1)
        run.poll(float(number))
        for send in run.monitor.probes(now_s=float(number)):
            assert isinstance(send, Send)
            assert isinstance(send.message, ProbeLinkRequest)
            found = ProbeLinkResult(send.message.number, "a", 0.001, 1e9, 1e5)
            run.monitor.watching.slow.probed(found, now_s=float(number))
    return run


def test_a_node_whose_rank_hangs_is_evicted_if_requested_and_possible() -> None:
    for action, spare, excluded in (
        ("evict", True, {"a"}),
        ("evict", False, set()),
        ("restart", True, set()),
    ):
        run = RunOfEviction(changed(EVICT, hang=HangConfig(action=action)), spare=spare)
        run.go(1, 5, 0.0)
        for number in range(3):
            views = hang(12.0 + number)
            for node in PLAN_OF_EVICTION.members:
                own = tuple(views[rank] for rank in node.ranks)
                body = msgspec.structs.replace(heartbeat(node.node_id, 5), views=own)
                run.monitor.heartbeat_received(node.node_id, body, now_s=20.0 + number)
            run.poll(20.5 + number)
        assert run.is_excluded(23.0) == excluded, action
