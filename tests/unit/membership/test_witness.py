"""The agent's view of the witness: a confirmation counts from the time of the request.

Witness rules: each number belongs to one proposer, and a leader with a valid lease keeps it.
"""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from ftrun.membership.events import WitnessAnswered, WitnessRegister
from ftrun.membership.witness import WitnessDecision, WitnessView, rule
from ftrun.recovery.commands import Command, JournalEntry, QueryWitness, WitnessOperation
from ftrun.wire.cluster.generation import GenerationPlan, NodeCard
from tests.unit.recovery.made import card, plan

A = card("a")
HELD = WitnessRegister(7, 4, A.identity, plan(4, "ab"))


def says(
    made: WitnessView,
    operation: WitnessOperation = WitnessOperation.RENEW,
    *,
    asked_s: float,
    now_s: float,
    granted: bool = True,
    register: WitnessRegister | None = HELD,
) -> list[Command]:
    answered = WitnessAnswered(QueryWitness(operation, asked_s), True, granted, register, A)
    return made.answered(answered, now_s=now_s)


def answer_unreachable(made: WitnessView, *, asked_s: float, now_s: float) -> list[Command]:
    answered = WitnessAnswered(
        QueryWitness(WitnessOperation.RENEW, asked_s), is_reached=False, reason="etcd is down"
    )
    return made.answered(answered, now_s=now_s)


def test_run_without_one_asks_nothing() -> None:
    made = WitnessView()
    assert made.ask(WitnessOperation.CLAIM, now_s=1.0) == []
    assert (made.is_reached, made.life) == (False, 0)
    assert not made.has_been_away(0.0, now_s=1e6)


def test_the_leader_reports_its_plan_once_and_then_keeps_its_lease() -> None:
    made = WitnessView(is_used=True)
    mine = plan(4, "ab")
    assert made.record_leader(mine, now_s=1.0) == [
        QueryWitness(WitnessOperation.RECORD, 1.0, 4, mine)
    ]
    says(made, asked_s=1.0, now_s=1.1, register=WitnessRegister(7, 4, A.identity))
    assert made.record_leader(mine, now_s=1.5) == [
        QueryWitness(WitnessOperation.RECORD, 1.5, 4, mine)
    ]
    says(made, asked_s=1.5, now_s=1.6)
    assert made.record_leader(mine, now_s=2.0) == [QueryWitness(WitnessOperation.RENEW, 2.0, 4)]
    voter_revision = plan(4, "ab", voter_revision=1)
    assert made.record_leader(voter_revision, now_s=2.5) == [
        QueryWitness(WitnessOperation.RECORD, 2.5, 4, voter_revision)
    ]


def test_what_it_confirms_counts_from_when_it_was_asked() -> None:
    made = WitnessView(is_used=True)
    assert not made.holds(7, 2.0, now_s=0.0)
    says(made, asked_s=10.0, now_s=11.4)
    assert made.holds(7, 2.0, now_s=11.9)
    assert not made.holds(7, 2.0, now_s=12.0)
    assert not made.holds(8, 2.0, now_s=11.9)
    says(made, asked_s=11.0, now_s=11.5, granted=False)
    says(made, WitnessOperation.READ, asked_s=11.2, now_s=11.6)
    assert not made.holds(7, 2.0, now_s=12.0)


def test_going_and_coming_are_reported_once_and_timed() -> None:
    made = WitnessView(is_used=True)
    assert says(made, asked_s=1.0, now_s=1.1) == []
    assert made.has_been_there(5.0, now_s=6.1)
    assert not made.has_been_there(5.1, now_s=6.1)
    (lost,) = answer_unreachable(made, asked_s=10.0, now_s=11.0)
    assert isinstance(lost, JournalEntry)
    assert (lost.record.kind, lost.announce) == ("witness_unreachable", True)
    assert lost.record.text.startswith("etcd is down; training continues")
    assert answer_unreachable(made, asked_s=12.0, now_s=13.0) == []
    assert (made.is_reached, made.reason) == (False, "etcd is down")
    assert made.has_been_away(2.0, now_s=13.0)
    assert not made.has_been_away(2.1, now_s=13.0)
    assert not made.has_been_there(0.0, now_s=13.0)
    (back,) = says(made, asked_s=14.0, now_s=14.5)
    assert isinstance(back, JournalEntry)
    assert back.record.text == "the witness is reachable again after 3.5 s"
    assert not made.has_been_away(0.0, now_s=14.5)


def test_a_witness_that_is_unreachable_from_the_start_is_reported() -> None:
    assert answer_unreachable(WitnessView(is_used=True), asked_s=1.0, now_s=2.0) != []


def test_older_answer_than_the_newest_reports_nothing_of_now() -> None:
    made = WitnessView(is_used=True)
    says(made, asked_s=5.0, now_s=5.1)
    assert answer_unreachable(made, asked_s=4.0, now_s=5.5) == []
    assert made.is_reached


A_OF_RULES, B = card("a"), card("b")
REPORTED = plan(4, "ab", witness=7)


def ask(
    me: NodeCard,
    operation: WitnessOperation,
    generation: int = -1,
    *,
    register: WitnessRegister | None = None,
    leader: NodeCard | None = None,
    plan: GenerationPlan | None = None,
    begins: bool = False,
) -> WitnessDecision:
    asked = QueryWitness(operation, 0.0, generation, plan, begins)
    return rule(asked, me, register, leader, new_life=99)


def held(
    promised: int = 4, proposer: NodeCard = A_OF_RULES, plan: GenerationPlan | None = None
) -> WitnessRegister:
    return WitnessRegister(7, promised, proposer.identity, plan)


def test_look_changes_nothing() -> None:
    for leader in (None, A_OF_RULES, B):
        assert ask(
            A_OF_RULES, WitnessOperation.READ, register=held(), leader=leader
        ) == WitnessDecision(False, held(), leader)


def test_first_to_claim_has_it_for_as_long_as_it_renews_its_claim() -> None:
    assert ask(A_OF_RULES, WitnessOperation.CLAIM) == WitnessDecision(True, None, A_OF_RULES)
    assert ask(A_OF_RULES, WitnessOperation.CLAIM, leader=A_OF_RULES) == WitnessDecision(
        True, None, A_OF_RULES
    )
    assert ask(B, WitnessOperation.CLAIM, leader=A_OF_RULES) == WitnessDecision(
        False, None, A_OF_RULES
    )
    assert ask(card("a", 2), WitnessOperation.CLAIM, leader=A_OF_RULES) == WitnessDecision(
        False, None, A_OF_RULES
    )


@pytest.mark.parametrize(
    "operation", [one for one in WitnessOperation if one is not WitnessOperation.ACCEPT]
)
def test_no_other_gets_anything_while_a_lease_lives(operation: WitnessOperation) -> None:
    found = ask(B, operation, 9, register=held(), leader=A_OF_RULES, plan=plan(9, "b"))
    assert found == WitnessDecision(False, held(), A_OF_RULES)


def test_a_leader_may_continue_until_another_has_a_later_number() -> None:
    assert ask(A_OF_RULES, WitnessOperation.RENEW, 4) == WitnessDecision(True, None, A_OF_RULES)
    assert ask(A_OF_RULES, WitnessOperation.RENEW, 4, register=held(4, B)).granted
    assert ask(A_OF_RULES, WitnessOperation.RENEW, 4, register=held(5, A_OF_RULES)).granted
    assert ask(A_OF_RULES, WitnessOperation.RENEW, 4, register=held(5, B)) == WitnessDecision(
        False, held(5, B), None
    )


def test_promise_of_a_register_that_there_is_not_begins_one() -> None:
    assert ask(A_OF_RULES, WitnessOperation.PROMISE, 4) == WitnessDecision(
        True, WitnessRegister(99, 4, A_OF_RULES.identity), A_OF_RULES
    )


def test_run_that_restarts_is_not_bound_by_the_last_one_and_has_another_life() -> None:
    old = held(4, B, REPORTED)
    found = ask(A_OF_RULES, WitnessOperation.PROMISE, 0, register=old, begins=True)
    assert found == WitnessDecision(True, WitnessRegister(99, 0, A_OF_RULES.identity), A_OF_RULES)
    again = ask(
        A_OF_RULES,
        WitnessOperation.PROMISE,
        1,
        register=found.register,
        leader=A_OF_RULES,
        begins=True,
    )
    assert again == WitnessDecision(True, WitnessRegister(99, 1, A_OF_RULES.identity), A_OF_RULES)


@pytest.mark.parametrize(
    ("generation", "proposer", "granted"),
    [
        (3, A_OF_RULES, False),
        (3, B, False),
        (4, A_OF_RULES, True),
        (4, B, False),
        (5, A_OF_RULES, True),
        (5, B, True),
    ],
)
def test_number_is_promised_to_one_and_never_a_lower_one(
    generation: int, proposer: NodeCard, granted: bool
) -> None:
    found = ask(
        proposer, WitnessOperation.PROMISE, generation, register=held(4, A_OF_RULES, REPORTED)
    )
    promised = WitnessRegister(
        7, max(4, generation), (proposer if granted else A_OF_RULES).identity, REPORTED
    )
    assert found == WitnessDecision(granted, promised, proposer if granted else None)


def test_plan_is_accepted_by_the_promise_it_was_given_whichever_node_has_the_lease() -> None:
    wanted = plan(4, "ab")
    for leader in (None, A_OF_RULES, B):
        found = ask(
            A_OF_RULES, WitnessOperation.ACCEPT, 4, register=held(), leader=leader, plan=wanted
        )
        assert found == WitnessDecision(True, held(plan=wanted), leader or A_OF_RULES)
    for register in (None, held(5, B), held(4, B), held(3, A_OF_RULES)):
        for leader in (None, B):
            found = ask(
                A_OF_RULES,
                WitnessOperation.ACCEPT,
                4,
                register=register,
                leader=leader,
                plan=wanted,
            )
            assert found == WitnessDecision(False, register, leader)
    assert not ask(A_OF_RULES, WitnessOperation.ACCEPT, 4, register=held()).granted


def test_a_chosen_plan_is_kept_unless_another_has_a_later_number() -> None:
    assert ask(A_OF_RULES, WitnessOperation.RECORD, 4, plan=REPORTED).register == WitnessRegister(
        99, 4, A_OF_RULES.identity, REPORTED
    )
    older = held(3, B, plan(3, "ab"))
    assert ask(
        A_OF_RULES, WitnessOperation.RECORD, 4, register=older, plan=REPORTED
    ).register == held(4, A_OF_RULES, REPORTED)
    later = held(5, B)
    assert ask(
        A_OF_RULES, WitnessOperation.RECORD, 4, register=later, plan=REPORTED
    ) == WitnessDecision(False, later, None)
    own = held(5, A_OF_RULES)
    assert ask(
        A_OF_RULES, WitnessOperation.RECORD, 4, register=own, plan=REPORTED
    ) == WitnessDecision(True, own, A_OF_RULES)
    voter_revision = plan(4, "ab", voter_revision=1)
    known = held(4, A_OF_RULES, REPORTED)
    assert ask(
        A_OF_RULES, WitnessOperation.RECORD, 4, register=known, plan=voter_revision
    ).register == held(4, A_OF_RULES, voter_revision)
    assert (
        ask(A_OF_RULES, WitnessOperation.RECORD, 4, register=known, plan=REPORTED).register == known
    )
    assert ask(
        A_OF_RULES, WitnessOperation.RECORD, 4, register=held(4, A_OF_RULES)
    ).register == held(4, A_OF_RULES)


def test_run_that_is_over_is_forgotten_by_its_leader_only() -> None:
    assert ask(
        A_OF_RULES, WitnessOperation.CLEAR, register=held(), leader=A_OF_RULES
    ) == WitnessDecision(True, None, None)
    assert ask(A_OF_RULES, WitnessOperation.CLEAR, register=held()) == WitnessDecision(
        False, held(), None
    )


questions = st.tuples(
    st.sampled_from("abc"),
    st.sampled_from([one for one in WitnessOperation if one is not WitnessOperation.CLEAR]),
    st.integers(0, 6),
    st.booleans(),
)


@effort(max_examples=300, deadline=None)
@given(st.lists(questions, max_size=30))
def test_counter_only_goes_up_and_each_number_is_taken_once(
    asked: list[tuple[str, WitnessOperation, int, bool]],
) -> None:
    register: WitnessRegister | None = None
    leader: NodeCard | None = None
    took: Counter[tuple[int, int]] = Counter()
    for node_id, operation, generation, lease_ends in asked:
        leader = None if lease_ends else leader
        before = register.promised if register is not None else -1
        wanted = plan(generation, node_id)
        found = ask(
            card(node_id), operation, generation, register=register, leader=leader, plan=wanted
        )
        if not found.granted:
            assert (found.register, found.leader) == (register, leader)
            continue
        register, leader = found.register, found.leader
        if register is None:
            continue
        assert register.promised >= before
        if operation is WitnessOperation.PROMISE and register.promised > before:
            took[register.life, register.promised] += 1
    assert all(count == 1 for count in took.values())
