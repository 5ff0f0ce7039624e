"""A voter: its promises, the plans it accepts, and the leader it obeys."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from ftrun.ids import version
from ftrun.membership.events import GenerationInstalled, PlanPersisted, Quiesced
from ftrun.membership.voter import Voter
from ftrun.recovery.commands import (
    AbandonStep,
    Command,
    CommitSnapshot,
    EndRun,
    InspectRanks,
    InstallGeneration,
    KillWorkers,
    PersistPlan,
    Quiesce,
    RequestFinalSnapshot,
    Send,
    SetFirstSnapshotStep,
    SetSnapshotInterval,
    ShowLevels,
    SignalWorkers,
    StartRanks,
    UpdatePeerPorts,
    WithdrawFinalSnapshot,
    WriteCapture,
    WriteCheckpointPart,
)
from ftrun.wire.cluster.generation import ConfigurationId, GenerationPlan
from ftrun.wire.cluster.membership import (
    Accept,
    Accepted,
    LeaderHeartbeat,
    ParkedRank,
    Prepare,
    PrepareRejected,
    Promise,
)
from ftrun.wire.messages.smp import Inventory
from tests.unit.recovery.made import card, offer, plan

ME = card("b")
HOLDS = Inventory([offer(1, (4, 8), 3)])
RUNS = plan(4, "abc")


def prepare(generation: int, proposer: str = "a", knows: ConfigurationId = (-1, 0)) -> Prepare:
    return Prepare(generation, card(proposer), "c was lost", knows)


def asked(
    made: Voter, generation: int, proposer: str = "a", *, has_leader: bool = False
) -> list[Command]:
    body = prepare(generation, proposer)
    return made.prepare(proposer, body, card("l"), has_leader=has_leader)


def quiesced(made: Voter, generation: int) -> list[Command]:
    return made.quiesced(Quiesced(generation, HOLDS, 1000, 2000))


def promised(made: Voter, generation: int, proposer: str = "a") -> Promise:
    """Handles events up to the promise."""
    assert asked(made, generation, proposer) == [Quiesce(generation, "c was lost")]
    (found,) = quiesced(made, generation)
    assert isinstance(found, Send)
    assert found.node_id == proposer
    assert isinstance(found.message, Promise)
    return found.message


def test_a_promise_names_the_parked_ranks() -> None:
    made = follower()
    body = msgspec.structs.replace(prepare(5), stay=True, failed=(2,))
    found = made.prepare("a", body, card("a"), has_leader=False)
    assert found == [Quiesce(5, "c was lost", stay=True, failed=(2,))]
    parked = (ParkedRank(1, 8, 0),)
    (sent,) = made.quiesced(Quiesced(5, HOLDS, 1000, 2000, parked, 4, "a reason"))
    assert isinstance(sent, Send)
    assert isinstance(sent.message, Promise)
    assert (sent.message.parked, sent.message.parked_in) == (parked, 4)
    assert sent.message.stay_problem == "a reason"


def follower(of: GenerationPlan | None = RUNS) -> Voter:
    """A voter with ranks of a generation that was chosen."""
    made = Voter(ME, None, is_chosen=False)
    if of is None:
        return made
    promised(made, of.generation, of.leader)
    made.announce(of.leader, Accept(of), (of.leader, 1))
    made.adopted(GenerationInstalled(of.generation, of.restore))
    assert made.apply_heartbeat(of.leader, LeaderHeartbeat(generation=of.generation, number=1)) == [
        StartRanks(of)
    ]
    return made


def heartbeat(number: int, **changes: object) -> LeaderHeartbeat:
    return msgspec.structs.replace(LeaderHeartbeat(generation=4, number=number), **changes)


# --- rule 1: the promise follows the death of the workers -------------------------------------


def test_a_promise_is_given_once_this_nodes_workers_are_dead() -> None:
    made = follower()
    assert asked(made, 5) == [Quiesce(5, "c was lost")]
    assert made.is_in_ballot
    assert asked(made, 5) == [], "they are being killed"
    assert quiesced(made, 4) == [], "that was for another one"
    answer = Promise(
        generation=5,
        card=ME,
        effective=RUNS,
        accepted=None,
        knows=4,
        committed=None,
        holdings=HOLDS,
        store_port=1000,
        smp_port=2000,
    )
    assert quiesced(made, 5) == [Send("a", answer)]
    # The proposer has not received it.
    assert asked(made, 5) == [Send("a", answer)]


def test_a_higher_number_needs_the_workers_dead_again() -> None:
    made = follower()
    promised(made, 5)
    assert asked(made, 6, "c") == [Quiesce(6, "c was lost")]
    assert asked(made, 6, "c") == []


def test_that_workers_are_dead_is_no_promise_to_anybody() -> None:
    made = Voter(ME, plan(3, "abc"), is_chosen=False)
    assert quiesced(made, 3) == []
    assert made.adopted(GenerationInstalled(3, None)) == []


def refusal(commands: list[Command]) -> PrepareRejected:
    (found,) = commands
    assert isinstance(found, Send)
    assert isinstance(found.message, PrepareRejected)
    return found.message


def test_no_number_is_promised_twice_nor_a_lower_one() -> None:
    made = follower()
    promised(made, 6)
    assert refusal(asked(made, 6, "c")) == PrepareRejected(6, 6, None, 4)
    assert refusal(asked(made, 5, "c")) == PrepareRejected(5, 6, None, 4)


def test_no_number_is_promised_that_has_taken_effect() -> None:
    made = Voter(ME, None, is_chosen=False)
    made.take_current(plan(7, "acd"))
    assert refusal(asked(made, 7)) == PrepareRejected(7, 7, None, 7)
    assert refusal(asked(made, 6)) == PrepareRejected(6, 7, None, 7)


# --- rule 2: no other promise while heartbeats of the leader arrive ---------------------------


def test_a_node_that_receives_from_its_leader_is_reported_and_continues() -> None:
    made = follower()
    assert refusal(asked(made, 5, "c", has_leader=True)) == PrepareRejected(5, 4, card("l"), 4)
    assert not made.is_in_ballot


# --- the content of a promise (rule 4) --------------------------------------------------------


def test_a_plan_as_old_as_the_proposer_knows_is_not_sent() -> None:
    for knows, effective in (((4, 0), None), ((3, 9), RUNS)):
        made = follower()
        made.prepare("a", prepare(5, knows=knows), None, has_leader=False)
        (found,) = quiesced(made, 5)
        assert isinstance(found, Send)
        assert isinstance(found.message, Promise)
        assert found.message.effective == effective


def test_what_was_accepted_and_may_have_taken_effect_is_reported() -> None:
    made = follower()
    promised(made, 5)
    wanted = plan(5, "abd")
    assert made.announce("a", Accept(wanted), ("a", 1)) == [InstallGeneration(wanted)]
    found = promised(made, 6, "c")
    assert (found.effective, found.accepted, found.knows) == (RUNS, wanted, 5)


def test_what_was_only_reported_proves_nothing_of_what_was_accepted() -> None:
    made = Voter(ME, None, is_chosen=False)
    made.take_current(plan(7, "acd"))
    found = promised(made, 8)
    assert (found.effective, found.accepted, found.knows) == (plan(7, "acd"), None, -1)


@pytest.mark.parametrize("is_chosen", [False, True])
def test_an_agent_that_was_started_again_has_its_predecessors_memory(is_chosen: bool) -> None:
    made = Voter(card("b", 2), RUNS, is_chosen=is_chosen)
    assert not made.is_member, "its ranks ended for the first one"
    assert made.newest_plan == RUNS
    # It does not know what the first one promised of that number, or of those below.
    assert refusal(asked(made, 4)).promised == 4
    found = promised(made, 5)
    wanted = (RUNS, None) if is_chosen else (None, RUNS)
    assert (found.effective, found.accepted, found.knows) == (*wanted, 4)


def test_without_memory_it_knows_of_nothing() -> None:
    made = Voter(ME, None, is_chosen=False)
    assert (made.newest_plan, made.configuration_id) == (None, (-1, 0))
    assert not made.is_in_ballot
    found = promised(made, 0)
    assert (found.effective, found.accepted, found.knows, found.life) == (None, None, -1, "")


def test_a_promise_names_the_run_of_the_newest_accepted_plan() -> None:
    made = Voter(card("b", 2), msgspec.structs.replace(RUNS, life="first"), is_chosen=True)
    assert promised(made, 5).life == "first"


def test_the_newest_commit_is_reported() -> None:
    made = follower()
    made.apply_heartbeat("a", heartbeat(2, committed=(4, 8)))
    made.apply_heartbeat("a", heartbeat(3))
    assert made.committed == (4, 8)
    assert promised(made, 5).committed == (4, 8)


# --- a plan -----------------------------------------------------------------------------------


def test_a_plan_is_accepted_once_this_node_is_ready_for_it() -> None:
    made = follower()
    promised(made, 5)
    wanted = Accept(plan(5, "abd"))
    assert made.announce("a", wanted, ("a", 1)) == [InstallGeneration(wanted.plan)]
    assert made.announce("a", wanted, ("a", 1)) == [], "it is being adopted"
    answer = Send("a", Accepted(5, (4, 8), "disk full"))
    assert made.adopted(GenerationInstalled(4, None)) == []
    assert made.adopted(GenerationInstalled(5, (4, 8), "disk full")) == [answer]
    assert made.announce("a", wanted, ("a", 1)) == [answer], "it was not received"


def test_a_plan_that_was_not_promised_is_not_accepted() -> None:
    made = follower()
    promised(made, 6)
    assert made.announce("a", Accept(plan(5, "ab")), ("a", 1)) == []
    assert made.announce("c", Accept(plan(6, "cb")), ("c", 1)) == []
    assert made.newest_plan == RUNS


def test_what_is_over_is_not_accepted() -> None:
    made = follower()
    promised(made, 5)
    made.take_current(plan(6, "abc"))
    assert made.announce("a", Accept(plan(5, "ab")), ("a", 1)) == []


# --- chosen plans -----------------------------------------------------------------------------


def test_a_generation_runs_once_its_leader_reports_that_it_has_taken_effect() -> None:
    made = follower()
    promised(made, 5)
    wanted = plan(5, "abd")
    made.announce("a", Accept(wanted), ("a", 1))
    made.adopted(GenerationInstalled(5, None))
    assert made.apply_heartbeat("a", heartbeat(2)) == []
    made.start_following()
    assert made.apply_heartbeat("c", heartbeat(1, generation=5)) == [], "c wants another one"
    made.start_following()
    assert made.apply_heartbeat("a", heartbeat(1, generation=5)) == [StartRanks(wanted)]
    assert (made.generation, made.is_member) == (5, True)
    assert not made.is_in_ballot


def test_a_spare_runs_nothing() -> None:
    made = Voter(ME, None, is_chosen=False)
    promised(made, 4)
    made.announce("a", Accept(plan(4, "ac", spares="b")), ("a", 1))
    made.adopted(GenerationInstalled(4, None))
    assert made.apply_heartbeat("a", heartbeat(1)) == []
    assert (made.generation, made.is_member) == (4, False)
    # It also ignores orders for members.
    assert made.apply_heartbeat("a", heartbeat(2, committed=(4, 8), killed=True)) == []
    assert made.committed == (4, 8)


def test_a_node_that_has_promised_a_later_one_starts_no_ranks_of_the_earlier() -> None:
    made = follower(None)
    promised(made, 4)
    made.announce("a", Accept(RUNS), ("a", 1))
    made.adopted(GenerationInstalled(4, None))
    asked(made, 5, "c")
    assert made.apply_heartbeat("a", heartbeat(1)) == []
    assert made.generation == 4
    assert made.is_in_ballot


def test_a_generation_that_continues_without_this_node_ends_its_ranks() -> None:
    made = follower()
    gone_on = plan(6, "acd")
    assert made.take_current(gone_on) == [KillWorkers("generation 6 has started without this node")]
    assert (made.plan, made.is_member) == (gone_on, False)
    assert made.take_current(gone_on) == []
    assert made.take_current(plan(5, "ab")) == []
    assert made.take_current(plan(7, "acd")) == [], "nothing runs here"


def test_a_generation_that_was_accepted_here_runs_when_a_leader_reports_it() -> None:
    made = follower()
    promised(made, 5)
    wanted = plan(5, "abd")
    made.announce("a", Accept(wanted), ("a", 1))
    assert made.take_current(wanted) == [StartRanks(wanted)]


def test_another_process_of_a_member_is_no_member() -> None:
    made = Voter(card("b", 2), None, is_chosen=False)
    made.take_current(RUNS)
    assert not made.is_member


# --- new voters -------------------------------------------------------------------------------


def with_spares(spares: str, voter_revision: int, **changes: object) -> GenerationPlan:
    return plan(4, "abc", spares, voter_revision=voter_revision, **changes)


def test_a_voter_revision_is_accepted_once_it_is_kept() -> None:
    made = follower()
    wanted = with_spares("d", 1)
    assert made.adopt_voters("a", wanted, ("a", 1)) == [PersistPlan(wanted, is_chosen=False)]
    answer = Send("a", Accepted(4, None, voter_revision=1))
    assert made.plan_persisted(PlanPersisted((4, 0))) == []
    assert made.plan_persisted(PlanPersisted((4, 1))) == [answer]
    assert made.adopt_voters("a", wanted, ("a", 1)) == [answer], "it was not received"
    assert made.configuration_id == (4, 0), "it is not chosen"
    assert not made.is_in_ballot


def test_that_the_first_plan_is_kept_is_no_voter_revision() -> None:
    made = follower()
    assert made.plan_persisted(PlanPersisted((4, 0))) == []
    assert Voter(ME, None, is_chosen=False).plan_persisted(PlanPersisted((-1, 0))) == []


@pytest.mark.parametrize(
    "wanted",
    [
        plan(4, "abc", "d", voter_revision=0),
        plan(5, "abc", "d", voter_revision=1),
        plan(4, "abd", "c", voter_revision=1),
        plan(4, "abc", "d", voter_revision=1, leader="c"),
    ],
    ids=["no newer", "of another generation", "with other members", "of another leader"],
)
def test_a_voter_revision_of_something_else_is_not_accepted(wanted: GenerationPlan) -> None:
    made = follower()
    assert made.adopt_voters("a", wanted, ("a", 1)) == []
    assert made.newest_plan == RUNS


def test_a_node_that_is_in_no_generation_or_in_a_ballot_accepts_no_voter_revision() -> None:
    other_node = Voter(ME, None, is_chosen=False)
    assert other_node.adopt_voters("a", with_spares("d", 1), ("a", 1)) == []
    made = follower()
    promised(made, 5, "c")
    assert made.adopt_voters("a", with_spares("d", 1), ("a", 1)) == []


def test_a_voter_revision_is_chosen_without_a_message_to_the_ranks() -> None:
    made = follower()
    wanted = with_spares("d", 1)
    made.adopt_voters("a", wanted, ("a", 1))
    made.plan_persisted(PlanPersisted((4, 1)))
    assert made.apply_heartbeat("a", heartbeat(2)) == []
    assert made.apply_heartbeat("a", heartbeat(3, voter_revision=1)) == [
        PersistPlan(wanted, is_chosen=True)
    ]
    assert (made.plan, made.is_member) == (wanted, True)
    assert made.apply_heartbeat("a", heartbeat(4, voter_revision=1, committed=(4, 8))) == [
        CommitSnapshot(version(4, 8))
    ]


def test_another_voter_revision_than_the_accepted_one_is_not_taken_for_it() -> None:
    made = follower()
    made.adopt_voters("a", with_spares("d", 1), ("a", 1))
    assert made.apply_heartbeat("a", heartbeat(2, voter_revision=2)) == []
    assert made.configuration_id == (4, 0)
    reported = with_spares("e", 2)
    assert made.take_current(reported) == [PersistPlan(reported, is_chosen=True)]
    assert made.configuration_id == (4, 2)


def test_a_voter_revision_that_was_accepted_is_reported_to_the_next_proposer() -> None:
    made = follower()
    wanted = with_spares("d", 1)
    made.adopt_voters("a", wanted, ("a", 1))
    found = promised(made, 5, "c")
    assert (found.effective, found.accepted) == (RUNS, wanted)


@pytest.mark.parametrize(
    ("reported", "is_known"),
    [((3, 9), True), ((4, 0), True), ((4, 1), True), ((4, 2), False), ((5, 0), False)],
)
def test_it_knows_chosen_and_accepted_plans(reported: ConfigurationId, is_known: bool) -> None:
    made = follower()
    made.adopt_voters("a", with_spares("d", 1), ("a", 1))
    assert (
        made.knows_of(LeaderHeartbeat(generation=reported[0], voter_revision=reported[1]))
        is is_known
    )
    other_node = Voter(ME, None, is_chosen=False)
    assert not other_node.knows_of(
        LeaderHeartbeat(generation=reported[0], voter_revision=reported[1])
    )


# --- rule 3: orders ---------------------------------------------------------------------------


ORDERS: list[tuple[dict[str, object], Command]] = [
    ({"committed": (4, 8)}, CommitSnapshot(version(4, 8))),
    ({"checkpoint": (4, 8)}, WriteCheckpointPart(version(4, 8))),
    ({"capture_from": 9}, WriteCapture(9)),
    ({"protected": (4, 8), "persisted": (4, 6)}, ShowLevels((4, 8), (4, 6))),
    ({"abandoned_step": 3}, AbandonStep(3)),
    ({"take_from": 12}, SetFirstSnapshotStep(12)),
    ({"every": 5, "every_from_step": 70}, SetSnapshotInterval(5, 70)),
    ({"stop_after_step": 0, "reason": "grows"}, RequestFinalSnapshot("grows", 0)),
    ({"signal": 15, "signal_count": 1, "reason": "now"}, SignalWorkers(15, "now")),
    ({"moved": {"c": 7}}, UpdatePeerPorts({"c": 7})),
    ({"examine": True}, InspectRanks()),
    ({"killed": True, "reason": "failed"}, KillWorkers("failed")),
]


def test_an_order_to_stop_at_a_boundary_is_withdrawn_once() -> None:
    made = follower()
    made.apply_heartbeat("a", heartbeat(2, stop_after_step=9, reason="slow"))
    withdrawn = heartbeat(3, reason="it is not slow any more")
    assert made.apply_heartbeat("a", withdrawn) == [
        WithdrawFinalSnapshot("it is not slow any more")
    ]
    assert made.apply_heartbeat("a", heartbeat(4)) == []
    (again,) = made.apply_heartbeat("a", heartbeat(5, stop_after_step=20))
    assert again == RequestFinalSnapshot("", 20)


@pytest.mark.parametrize(("orders", "wanted"), ORDERS, ids=lambda one: type(one).__name__)
def test_an_order_is_obeyed_once(orders: dict[str, object], wanted: Command) -> None:
    made = follower()
    assert made.apply_heartbeat("a", heartbeat(2)) == []
    assert made.apply_heartbeat("a", heartbeat(3, **orders)) == [wanted]
    assert made.apply_heartbeat("a", heartbeat(4, **orders)) == []


@pytest.mark.parametrize(("orders", "wanted"), ORDERS, ids=lambda one: type(one).__name__)
def test_orders_for_another_generation_are_not_obeyed(
    orders: dict[str, object], wanted: Command
) -> None:
    made = follower()
    for number, generation in ((2, 3), (3, 5)):
        assert made.apply_heartbeat("a", heartbeat(number, generation=generation, **orders)) == []
    assert made.committed is None
    assert made.apply_heartbeat("a", heartbeat(4, **orders)) == [wanted]


@pytest.mark.parametrize(("orders", "wanted"), ORDERS, ids=lambda one: type(one).__name__)
def test_a_node_that_has_promised_a_later_generation_obeys_no_orders(
    orders: dict[str, object], wanted: Command
) -> None:
    made = follower()
    promised(made, 5, "c")
    assert made.apply_heartbeat("a", heartbeat(2, **orders)) == []
    assert made.committed == orders.get("committed"), "but it remembers a commit"
    assert wanted not in made.take_current(plan(6, "abc"))


def test_what_was_obeyed_in_one_generation_is_obeyed_again_in_the_next() -> None:
    made = follower()
    made.apply_heartbeat("a", heartbeat(2, killed=True, signal=15, signal_count=1))
    promised(made, 5)
    made.announce("a", Accept(plan(5, "abd")), ("a", 1))
    made.apply_heartbeat("a", heartbeat(3, generation=5))
    found = made.apply_heartbeat(
        "a", heartbeat(4, generation=5, killed=True, signal=2, signal_count=1)
    )
    assert found == [SignalWorkers(2, ""), KillWorkers("")]


def test_an_interval_is_new_where_only_its_beginning_is() -> None:
    made = follower()
    made.apply_heartbeat("a", heartbeat(2, every=5, every_from_step=70))
    assert made.apply_heartbeat("a", heartbeat(3, every=5, every_from_step=90)) == [
        SetSnapshotInterval(5, 90)
    ]
    assert made.apply_heartbeat("a", heartbeat(4)) == [], "a missing interval is no order"


def test_each_signal_and_each_later_abandoned_step_is_passed_on() -> None:
    made = follower()
    made.apply_heartbeat("a", heartbeat(2, signal=15, signal_count=1, abandoned_step=5))
    found = made.apply_heartbeat("a", heartbeat(3, signal=15, signal_count=2, abandoned_step=7))
    assert found == [AbandonStep(7), SignalWorkers(15, "")]


some_orders = st.builds(
    lambda parts, voter_revision: (
        {"voter_revision": voter_revision} | {key: one[key] for one in parts for key in one}
    ),
    st.lists(st.sampled_from([orders for orders, _ in ORDERS]), max_size=3),
    st.just(0),
)


@effort(deadline=None)
@given(st.lists(some_orders, max_size=6), st.randoms(use_true_random=False))
def test_a_heartbeat_that_is_late_or_comes_twice_changes_nothing(
    answered: list[dict[str, object]], order: object
) -> None:
    heartbeats = [heartbeat(number, **orders) for number, orders in enumerate(answered, 2)]
    plain, disturbed = follower(), follower()
    for at, one in enumerate(heartbeats):
        wanted = plain.apply_heartbeat("a", one)
        assert disturbed.apply_heartbeat("a", one) == wanted
        late = heartbeats[order.randrange(at + 1)]  # type: ignore[attr-defined]
        assert disturbed.apply_heartbeat("a", late) == []
        assert disturbed.committed == plain.committed


def test_another_leader_counts_from_zero() -> None:
    made = follower()
    made.apply_heartbeat("a", heartbeat(9))
    assert made.apply_heartbeat("c", heartbeat(1, committed=(4, 8))) == []
    made.start_following()
    assert made.apply_heartbeat("c", heartbeat(1, committed=(4, 8))) == [
        CommitSnapshot(version(4, 8))
    ]


# --- the end ----------------------------------------------------------------------------------


def test_the_end_is_obeyed_once_whatever_generation_it_names() -> None:
    made = follower()
    over = heartbeat(
        2, generation=9, ended=True, exit_code=3, reason="over", committed=(9, 1), advice="x"
    )
    assert made.apply_heartbeat("a", over) == [EndRun(3, "over", None, "x")]
    assert made.is_ended
    assert made.apply_heartbeat("a", msgspec.structs.replace(over, number=3)) == []


def test_the_last_commit_comes_before_the_end() -> None:
    made = follower()
    over = heartbeat(2, ended=True, committed=(4, 9), reason="done")
    assert made.apply_heartbeat("a", over) == [CommitSnapshot(version(4, 9)), EndRun(0, "done")]


@pytest.mark.parametrize("committed", [None, (4, 9)])
def test_a_node_without_ranks_has_nothing_to_commit_at_the_end(
    committed: tuple[int, int] | None,
) -> None:
    other_node = Voter(ME, None, is_chosen=False)
    other_node.take_current(plan(4, "ac"))
    assert other_node.apply_heartbeat("a", heartbeat(1, ended=True, committed=committed)) == [
        EndRun(0, "")
    ]
    member = follower()
    found = member.apply_heartbeat("a", heartbeat(2, ended=True, committed=committed))
    assert len(found) == (1 if committed is None else 2)


# --- rule 4 and voter revisions ---------------------------------------------------------------


def test_what_was_accepted_later_stays_kept_when_an_older_voter_revision_is_reported() -> None:
    """Its successor on this node uses it to prove what was accepted here."""
    made = Voter(ME, RUNS, is_chosen=True)
    newer = msgspec.structs.replace(RUNS, voter_revision=2)
    assert made.adopt_voters("a", newer, ("a", 1)) == [PersistPlan(newer, is_chosen=False)]
    older = msgspec.structs.replace(RUNS, voter_revision=1)
    assert made.take_current(older) == []
    assert made.configuration_id == (4, 1)
    assert made.newest_plan == newer
    assert made.take_current(newer) == [PersistPlan(newer, is_chosen=True)]
