"""Witness rules: each number is one proposer's, and who leads by a lease is not deserted."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from ftrun.membership.events import WitnessRegister
from ftrun.membership.witness import WitnessDecision, rule
from ftrun.recovery.commands import QueryWitness, WitnessOperation
from ftrun.wire.cluster.generation import GenerationPlan, NodeCard
from tests.unit.recovery.made import card, plan

A, B = card("a"), card("b")
TOLD = plan(4, "ab", witness=7)


def ask(
    me: NodeCard,
    wish: WitnessOperation,
    generation: int = -1,
    *,
    register: WitnessRegister | None = None,
    lead: NodeCard | None = None,
    plan: GenerationPlan | None = None,
    begins: bool = False,
) -> WitnessDecision:
    asked = QueryWitness(wish, 0.0, generation, plan, begins)
    return rule(asked, me, register, lead, new_life=99)


def held(
    promised: int = 4, proposer: NodeCard = A, plan: GenerationPlan | None = None
) -> WitnessRegister:
    return WitnessRegister(7, promised, proposer.identity, plan)


def test_look_changes_nothing() -> None:
    for lead in (None, A, B):
        assert ask(A, WitnessOperation.LOOK, register=held(), lead=lead) == WitnessDecision(
            False, held(), lead
        )


def test_first_to_claim_has_it_for_as_long_as_it_renews_its_claim() -> None:
    assert ask(A, WitnessOperation.CLAIM) == WitnessDecision(True, None, A)
    assert ask(A, WitnessOperation.CLAIM, lead=A) == WitnessDecision(True, None, A)
    assert ask(B, WitnessOperation.CLAIM, lead=A) == WitnessDecision(False, None, A)
    assert ask(card("a", 2), WitnessOperation.CLAIM, lead=A) == WitnessDecision(False, None, A)


@pytest.mark.parametrize(
    "wish", [one for one in WitnessOperation if one is not WitnessOperation.ACCEPT]
)
def test_nobody_else_gets_anything_while_a_lease_lives(wish: WitnessOperation) -> None:
    found = ask(B, wish, 9, register=held(), lead=A, plan=plan(9, "b"))
    assert found == WitnessDecision(False, held(), A)


def test_lead_may_go_on_until_a_later_number_is_anothers() -> None:
    assert ask(A, WitnessOperation.KEEP, 4) == WitnessDecision(True, None, A)
    assert ask(A, WitnessOperation.KEEP, 4, register=held(4, B)).granted
    assert ask(A, WitnessOperation.KEEP, 4, register=held(5, A)).granted
    assert ask(A, WitnessOperation.KEEP, 4, register=held(5, B)) == WitnessDecision(
        False, held(5, B), None
    )


def test_promise_of_a_register_that_there_is_not_begins_one() -> None:
    assert ask(A, WitnessOperation.PROMISE, 4) == WitnessDecision(
        True, WitnessRegister(99, 4, A.identity), A
    )


def test_run_that_begins_anew_is_not_bound_by_the_last_one_and_has_another_life() -> None:
    old = held(4, B, TOLD)
    found = ask(A, WitnessOperation.PROMISE, 0, register=old, begins=True)
    assert found == WitnessDecision(True, WitnessRegister(99, 0, A.identity), A)
    again = ask(A, WitnessOperation.PROMISE, 1, register=found.register, lead=A, begins=True)
    assert again == WitnessDecision(True, WitnessRegister(99, 1, A.identity), A)


@pytest.mark.parametrize(
    ("generation", "proposer", "granted"),
    [(3, A, False), (3, B, False), (4, A, True), (4, B, False), (5, A, True), (5, B, True)],
)
def test_number_is_promised_to_one_and_never_a_lower_one(
    generation: int, proposer: NodeCard, granted: bool
) -> None:
    found = ask(proposer, WitnessOperation.PROMISE, generation, register=held(4, A, TOLD))
    promised = WitnessRegister(7, max(4, generation), (proposer if granted else A).identity, TOLD)
    assert found == WitnessDecision(granted, promised, proposer if granted else None)


def test_plan_is_accepted_by_the_promise_it_was_given_whoever_has_the_lease() -> None:
    wanted = plan(4, "ab")
    for lead in (None, A, B):
        found = ask(A, WitnessOperation.ACCEPT, 4, register=held(), lead=lead, plan=wanted)
        assert found == WitnessDecision(True, held(plan=wanted), lead or A)
    for register in (None, held(5, B), held(4, B), held(3, A)):
        for lead in (None, B):
            found = ask(A, WitnessOperation.ACCEPT, 4, register=register, lead=lead, plan=wanted)
            assert found == WitnessDecision(False, register, lead)
    assert not ask(A, WitnessOperation.ACCEPT, 4, register=held()).granted


def test_what_is_in_effect_is_remembered_unless_a_later_number_is_anothers() -> None:
    assert ask(A, WitnessOperation.TELL, 4, plan=TOLD).register == WitnessRegister(
        99, 4, A.identity, TOLD
    )
    older = held(3, B, plan(3, "ab"))
    assert ask(A, WitnessOperation.TELL, 4, register=older, plan=TOLD).register == held(4, A, TOLD)
    later = held(5, B)
    assert ask(A, WitnessOperation.TELL, 4, register=later, plan=TOLD) == WitnessDecision(
        False, later, None
    )
    own = held(5, A)
    assert ask(A, WitnessOperation.TELL, 4, register=own, plan=TOLD) == WitnessDecision(
        True, own, A
    )
    roster = plan(4, "ab", roster=1)
    known = held(4, A, TOLD)
    assert ask(A, WitnessOperation.TELL, 4, register=known, plan=roster).register == held(
        4, A, roster
    )
    assert ask(A, WitnessOperation.TELL, 4, register=known, plan=TOLD).register == known
    assert ask(A, WitnessOperation.TELL, 4, register=held(4, A)).register == held(4, A)


def test_run_that_is_over_is_forgotten_by_its_lead_only() -> None:
    assert ask(A, WitnessOperation.FORGET, register=held(), lead=A) == WitnessDecision(
        True, None, None
    )
    assert ask(A, WitnessOperation.FORGET, register=held()) == WitnessDecision(False, held(), None)


questions = st.tuples(
    st.sampled_from("abc"),
    st.sampled_from([one for one in WitnessOperation if one is not WitnessOperation.FORGET]),
    st.integers(0, 6),
    st.booleans(),
)


@effort(max_examples=300, deadline=None)
@given(st.lists(questions, max_size=30))
def test_counter_only_goes_up_and_each_number_is_taken_once(
    asked: list[tuple[str, WitnessOperation, int, bool]],
) -> None:
    register: WitnessRegister | None = None
    lead: NodeCard | None = None
    took: Counter[tuple[int, int]] = Counter()
    for node_id, wish, generation, lease_ends in asked:
        lead = None if lease_ends else lead
        before = register.promised if register is not None else -1
        wanted = plan(generation, node_id)
        found = ask(card(node_id), wish, generation, register=register, lead=lead, plan=wanted)
        if not found.granted:
            assert (found.register, found.lead) == (register, lead)
            continue
        register, lead = found.register, found.lead
        if register is None:
            continue
        assert register.promised >= before
        if wish is WitnessOperation.PROMISE and register.promised > before:
            took[register.life, register.promised] += 1
    assert all(count == 1 for count in took.values())
