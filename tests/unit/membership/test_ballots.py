"""Ballots: of two chosen generations, the proposer of the later one knows the earlier one."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from ftrun.membership.ballots import Ballot, VoterState, carries, electorate, electorate_of
from ftrun.wire.cluster.generation import ConfigurationId, GenerationPlan, Identity, VoterSet
from ftrun.wire.cluster.membership import Accepted
from ftrun.wire.messages.smp import Inventory
from tests.unit.recovery.made import card, cards, offer, part, plan, promise

FATES = ("for", "against", "unresponsive", "dead", "gone")


def voters_of(node_ids: str) -> frozenset[Identity]:
    return electorate(cards(node_ids))


def sorted_by(fates: Sequence[str]) -> dict[str, frozenset[Identity]]:
    """Voters `n0`, `n1`, ... by their fates."""
    return {
        fate: frozenset((f"n{at}", 1) for at, one in enumerate(fates) if one == fate)
        for fate in FATES
    }


some_fates = st.lists(st.sampled_from(FATES), min_size=1, max_size=7)


# --- votes that decide ----------------------------------------------------------------------


@effort(max_examples=200, deadline=None)
@given(some_fates)
def test_two_sides_never_decide_at_the_same_time(fates: list[str]) -> None:
    found = sorted_by(fates)
    voters = frozenset().union(*found.values())
    dead, gone = found["dead"], found["gone"]
    is_for = bool(found["for"]) and carries(voters, found["for"], dead=dead, gone=gone)
    is_against = bool(found["against"]) and carries(voters, found["against"], dead=dead, gone=gone)
    assert not (is_for and is_against)


@effort(max_examples=200, deadline=None)
@given(some_fates)
def test_a_deciding_node_knows_each_decision_of_a_majority(fates: list[str]) -> None:
    """Rules 2, 3 and 5: a node of each earlier majority agrees now, or has left its memory."""
    found = sorted_by(fates)
    voters = frozenset().union(*found.values())
    if not carries(voters, found["for"], dead=found["dead"], gone=found["gone"]):
        return
    known = found["for"] | found["dead"]
    for majority in combinations(sorted(voters), len(voters) // 2 + 1):
        assert known & set(majority)


@effort(deadline=None)
@given(some_fates)
def test_one_voter_more_for_it_never_undoes_it(fates: list[str]) -> None:
    found = sorted_by(fates)
    voters = frozenset().union(*found.values())
    dead, gone = found["dead"], found["gone"]
    if carries(voters, found["for"], dead=dead, gone=gone):
        for one in found["unresponsive"]:
            assert carries(voters, found["for"] | {one}, dead=dead, gone=gone)


@pytest.mark.parametrize(
    ("agreed", "dead", "gone", "may"),
    [
        ("ab", "", "", False),
        ("abc", "", "", True),
        ("ab", "", "cd", True),  # no node is left that could decide otherwise
        ("ab", "", "c", False),  # d is left
        ("a", "b", "cd", True),  # half of the memory is here
        ("a", "", "bcd", False),  # b, c and d may have decided what no node here knows
        ("", "abcd", "", True),  # all memory is here, and no node is left
        ("", "ab", "cd", False),  # no node agrees
        ("a", "bcd", "", True),
        ("abz", "", "", False),  # z has no vote
    ],
)
def test_without_a_majority_all_voters_must_be_accounted_for(
    agreed: str, dead: str, gone: str, may: bool
) -> None:
    assert (
        carries(voters_of("abcd"), voters_of(agreed), dead=voters_of(dead), gone=voters_of(gone))
        is may
    )


def test_another_incarnation_of_a_voter_has_no_vote() -> None:
    later = electorate(card(one, 2) for one in "abc")
    assert not carries(voters_of("abc"), later)


# --- what a voter promises ------------------------------------------------------------------


@effort(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from("ab"))))
def test_each_number_is_promised_to_one_and_never_a_lower_one_after_a_higher(
    asked: list[tuple[int, str]],
) -> None:
    vote = VoterState()
    given_: dict[int, str] = {}
    for number, name in asked:
        if not vote.may_promise(number, (name, 1)):
            assert given_, "the first promise has no conflict"
            assert number <= max(given_)
            assert (number, name) != (max(given_), given_[max(given_)])
            continue
        vote.promise(number, (name, 1))
        assert number >= max(given_, default=number)
        assert given_.setdefault(number, name) == name
        assert (vote.promised, vote.proposer) == (number, (name, 1))


def test_a_promise_that_came_twice_changes_nothing() -> None:
    vote = VoterState()
    vote.promise(3, ("a", 1))
    vote.promise(3, ("b", 1))
    vote.promise(2, ("b", 1))
    assert (vote.promised, vote.proposer) == (3, ("a", 1))


def test_only_what_was_promised_is_accepted() -> None:
    vote = VoterState()
    vote.promise(3, ("a", 1))
    assert not vote.accept(plan(2, "ab"), ("a", 1))
    assert not vote.accept(plan(3, "ba"), ("b", 1))
    assert not vote.accept(plan(3, "ab"), ("a", 2))
    assert vote.accepted is None
    assert vote.accept(plan(3, "ab"), ("a", 1))
    assert vote.accepted == plan(3, "ab")


# --- voter revisions (rule 4) -----------------------------------------------------------------

RUNS = plan(3, "abc")


def with_spares(spares: str, voter_revision: int) -> GenerationPlan:
    return plan(
        3,
        "abc",
        spares,
        voter_revision=voter_revision,
        decided_by=[VoterSet(3, sorted(voters_of("abc")))],
    )


def test_the_leader_of_a_generation_may_change_its_voters_repeatedly() -> None:
    vote = VoterState(3, ("a", 1), RUNS)
    for voter_revision in (1, 2, 5):
        assert vote.adopt_voters(with_spares("d" * (voter_revision % 2), voter_revision), ("a", 1))
        assert vote.accepted is not None
        assert vote.accepted.voter_revision == voter_revision
    assert vote.promised == 3


def test_a_voter_revision_that_came_twice_is_accepted_and_an_older_one_or_another_is_not() -> None:
    vote = VoterState(3, ("a", 1), RUNS)
    vote.adopt_voters(with_spares("d", 2), ("a", 1))
    assert vote.adopt_voters(with_spares("d", 2), ("a", 1))
    assert not vote.adopt_voters(with_spares("e", 2), ("a", 1))
    assert not vote.adopt_voters(with_spares("e", 1), ("a", 1))
    assert vote.accepted == with_spares("d", 2)


def test_a_node_that_has_promised_a_later_generation_accepts_no_voter_revision_of_this_one() -> (
    None
):
    for vote in (
        VoterState(4, ("b", 1), RUNS),
        VoterState(3, ("b", 1)),
        VoterState(3, ("a", 2)),
        VoterState(4),
    ):
        before = vote.accepted
        assert not vote.adopt_voters(with_spares("d", 1), ("a", 1))
        assert vote.accepted == before


def test_the_successor_of_one_that_has_promised_this_generation_may_vote_in_it() -> None:
    vote = VoterState(promised=3)
    assert vote.adopt_voters(with_spares("d", 1), ("a", 1))
    assert vote.proposer == ("a", 1)


def test_a_node_that_votes_for_the_first_time_is_bound_by_it() -> None:
    vote = VoterState()
    assert vote.adopt_voters(with_spares("d", 1), ("a", 1))
    assert (vote.promised, vote.proposer) == (3, ("a", 1))
    assert not vote.may_promise(3, ("b", 1))


def test_a_voter_revision_counts_like_a_generation() -> None:
    made = ballot(9, RUNS)
    made.take_promise(promise(9, "a", accepted=with_spares("de", 1)))
    assert made.needs == {(3, 0): voters_of("abc"), (3, 1): voters_of("abcde")}
    assert made.newest_plan() == with_spares("de", 1)
    made.take_promise(promise(9, "b", effective=with_spares("d", 2)))
    assert (made.base, made.needs) == ((3, 2), {(3, 2): voters_of("abcd")})
    assert made.decided_by() == [VoterSet(3, sorted(voters_of("abcd")), voter_revision=2)]
    made.announce(plan(9, "ab", decided_by=made.decided_by()))
    assert made.needs == {(3, 2): voters_of("abcd")}


# --- one ballot -----------------------------------------------------------------------------


def ballot(generation: int, base: GenerationPlan | None) -> Ballot:
    if base is None:
        return Ballot(generation, "a test", (-1, 0), {})
    return Ballot(
        generation,
        "a test",
        base.configuration_id,
        {base.configuration_id: electorate(base.voters)},
    )


def test_a_promise_that_brings_a_newer_generation_makes_its_voters_decide() -> None:
    made = ballot(9, plan(1, "abc"))
    made.take_promise(promise(9, "d", effective=plan(4, "def")))
    assert made.base == (4, 0)
    assert made.needs == {(4, 0): voters_of("def")}
    made.take_promise(promise(9, "a", effective=plan(1, "abc")))
    assert made.needs == {(4, 0): voters_of("def")}


def test_a_plan_that_may_have_taken_effect_has_its_voters_asked_too() -> None:
    """Rule 2, with all that the plan itself needed."""
    between = plan(
        3,
        "bcd",
        decided_by=[VoterSet(1, sorted(voters_of("abc"))), VoterSet(2, sorted(voters_of("d")))],
    )
    made = ballot(9, plan(1, "abc"))
    made.take_promise(promise(9, "b", accepted=between))
    assert made.needs == {
        (1, 0): voters_of("abc"),
        (2, 0): voters_of("d"),
        (3, 0): voters_of("bcd"),
    }
    for one in "bc":
        made.take_promise(promise(9, one))
    assert not made.is_promised()
    made.take_promise(promise(9, "d"))
    assert made.is_promised()


def test_what_came_before_a_generation_that_took_effect_is_not_asked() -> None:
    made = ballot(9, plan(1, "abc"))
    made.mind(plan(2, "efg"))
    made.take_promise(promise(9, "b", effective=plan(3, "bcd")))
    assert made.needs == {(3, 0): voters_of("bcd")}


def test_the_newest_plan_that_anybody_brings_counts() -> None:
    made = ballot(9, plan(1, "abc"))
    assert made.newest_plan() is None
    made.take_promise(promise(9, "a", effective=plan(2, "abc")))
    made.take_promise(promise(9, "b", accepted=plan(4, "abd")))
    made.take_promise(promise(9, "c", accepted=plan(3, "abe")))
    assert made.newest_plan() == plan(4, "abd")


def test_a_plan_stays_known_if_the_node_that_reported_it_is_lost() -> None:
    """The others have omitted it, because they were asked after this node had answered."""
    made = ballot(9, plan(1, "abc"))
    made.take_promise(promise(9, "a", effective=plan(2, "abc")))
    del made.promises["a"]
    for one in "bc":
        made.take_promise(promise(9, one))
    assert made.newest_plan(plan(1, "abc")) == plan(2, "abc")


FIRST, SECOND = plan(1, "ab", life="first"), plan(3, "cd", life="second")


def holding(rank: int, at: tuple[int, int]) -> Inventory:
    return Inventory([offer(rank, at, 2)])


@pytest.mark.parametrize(
    ("first", "second", "follows"),
    [
        ({"holdings": holding(0, (1, 4))}, {}, FIRST),
        ({"committed": (1, 4)}, {}, FIRST),
        ({"holdings": Inventory([], [part("b", (1, 4), "ab")])}, {}, FIRST),
        # A checkpoint that the second run has loaded is no version of a generation.
        ({"committed": (1, 4)}, {"holdings": holding(0, (-1, 9))}, FIRST),
        ({}, {}, SECOND),
        ({"committed": (-1, 9)}, {}, SECOND),
        # The second run has received heartbeats of the first one.
        ({"committed": (1, 4)}, {"committed": (1, 4)}, FIRST),
        ({"holdings": holding(0, (1, 4))}, {"holdings": holding(0, (3, 1))}, SECOND),
    ],
)
def test_a_second_run_that_has_made_no_version_is_given_up(
    first: dict[str, object], second: dict[str, object], follows: GenerationPlan
) -> None:
    """Rule 7, whether the proposer knows the first run itself or by a promise."""
    for known in (True, False):
        made = ballot(9, FIRST if known else None)
        made.take_promise(promise(9, "b", effective=None if known else FIRST, knows=1, **first))
        made.take_promise(promise(9, "c", accepted=SECOND, knows=3, **second))
        assert made.newest_plan(FIRST if known else None) == follows


@pytest.mark.parametrize("known", [True, False])
def test_a_second_run_with_the_number_of_the_base_does_not_replace_its_voters(known: bool) -> None:
    """Nodes without memory have accepted their own generation 1."""
    made = ballot(9, FIRST if known else None)
    made.take_promise(promise(9, "c", accepted=plan(1, "cde", life="second"), knows=1))
    made.take_promise(promise(9, "b", effective=None if known else FIRST, committed=(1, 4)))
    assert (made.needs, made.concurrent) == ({(1, 0): voters_of("ab")}, set())
    assert made.newest_plan(FIRST if known else None) == FIRST
    assert not made.is_promised()
    made.take_promise(promise(9, "a"))
    assert made.is_promised()


def test_of_two_plans_with_one_number_each_may_have_been_chosen() -> None:
    """Both majorities are needed while no newer plan is known to be chosen."""
    made = ballot(9, None)
    made.take_promise(promise(9, "b", accepted=FIRST, knows=1))
    made.take_promise(promise(9, "c", accepted=plan(1, "cde", life="second"), knows=1))
    made.take_promise(promise(9, "a"))
    assert not made.is_promised()
    made.take_promise(promise(9, "d"))
    assert made.is_promised()
    made.announce(plan(9, "ab", decided_by=made.decided_by()))
    assert [voters.generation for voters in made.decided_by()] == [1, 1]
    made.take_promise(promise(9, "b", effective=plan(2, "ab")))
    assert (set(made.needs), made.concurrent) == ({(2, 0)}, set())


def test_a_second_run_whose_members_are_missing_is_followed() -> None:
    """They may hold what it has committed."""
    made = ballot(9, FIRST)
    made.take_promise(promise(9, "b", knows=1, holdings=holding(0, (1, 4))))
    made.take_promise(promise(9, "e", accepted=SECOND, knows=3))
    assert made.newest_plan(FIRST) == SECOND


def test_a_second_run_that_is_known_to_be_chosen_is_followed() -> None:
    made = ballot(9, FIRST)
    made.take_promise(promise(9, "b", knows=1, committed=(1, 4)))
    made.take_promise(promise(9, "c", effective=SECOND, knows=3))
    assert made.newest_plan(FIRST) == SECOND


def test_a_plan_reports_its_deciders() -> None:
    made = ballot(9, plan(1, "ba"))
    made.mind(plan(3, "c"))
    assert made.decided_by() == [
        VoterSet(1, [("a", 1), ("b", 1)]),
        VoterSet(3, [("c", 1)]),
    ]


def test_of_the_first_generation_nodes_that_are_here_are_the_voters() -> None:
    made = ballot(0, None)
    made.take_promise(promise(0, "b"))
    made.take_promise(promise(0, "a"))
    assert made.is_promised()
    assert made.decided_by() == [VoterSet(-1, [("a", 1), ("b", 1)])]
    made.announce(plan(0, "ab", decided_by=made.decided_by()))
    made.accepted["a"] = Accepted(0, None)
    assert not made.is_accepted()
    made.accepted["b"] = Accepted(0, None)
    assert made.is_accepted()


def test_a_generation_is_chosen_only_with_all_of_its_members() -> None:
    made = ballot(2, plan(1, "abc"))
    for one in "abc":
        made.take_promise(promise(2, one))
    assert not made.is_accepted(), "nothing was announced"
    made.announce(plan(2, "abc", decided_by=made.decided_by()))
    made.accepted |= {"a": Accepted(2, None), "b": Accepted(2, None)}
    assert not made.is_accepted()
    made.accepted["c"] = Accepted(2, None)
    assert made.is_accepted()


def test_a_generation_is_chosen_only_with_a_majority_of_the_last_one() -> None:
    made = ballot(2, plan(1, "a", spares="bc"))
    for one in "abc":
        made.take_promise(promise(2, one))
    made.announce(plan(2, "a", spares="bc", decided_by=made.decided_by()))
    made.accepted["a"] = Accepted(2, None)
    assert not made.is_accepted()
    made.accepted["b"] = Accepted(2, None)
    assert made.is_accepted()


def test_after_the_announcement_the_voters_of_the_plan_decide() -> None:
    made = ballot(2, plan(1, "abc"))
    made.announce(plan(2, "a", decided_by=[VoterSet(1, [("d", 1)])]))
    assert made.needs == {(1, 0): voters_of("d")}


# --- restarted agents (rules 3 and 5) ---------------------------------------------------------


@pytest.mark.parametrize(("knows", "may"), [(4, True), (5, True), (3, False), (-1, False)])
def test_a_successor_with_its_memory_counts_for_what_the_first_had_accepted(
    knows: int, may: bool
) -> None:
    """Where c has lost its memory, b's makes out half of what is known, or a is alone."""
    made = ballot(9, plan(4, "ab", spares="c"))
    made.take_promise(promise(9, "a"))
    assert not made.is_promised()
    made.take_promise(promise(9, card("b", 2), knows=knows))
    assert not made.is_promised(), "c does not answer, and may have accepted something else"
    made.take_promise(promise(9, card("c", 2), knows=-1))
    assert made.is_promised() is may


@pytest.mark.parametrize(("life", "may"), [("first", True), ("second", False)])
def test_a_successor_that_has_joined_a_second_run_does_not_know_the_first(
    life: str, may: bool
) -> None:
    """Seed 1151443: three of four nodes lose their memory and begin a second run."""
    base = plan(0, "ab", spares="cd", life="first")
    made = ballot(1, base)
    made.lives[electorate(base.voters)] = base.life
    made.take_promise(promise(1, "a", knows=0, life="first"))
    for one in "bcd":
        made.take_promise(promise(1, card(one, 2), knows=0, life=life))
    assert made.is_promised() is may


def test_a_run_whose_agents_were_all_started_again_continues_from_their_memory() -> None:
    made = ballot(9, plan(4, "abc"))
    for one in "ab":
        made.take_promise(promise(9, card(one, 2), knows=4))
    assert not made.is_promised(), "c may have accepted something else"
    made.take_promise(promise(9, card("c", 2), knows=4))
    assert made.is_promised()


def test_a_node_that_has_no_memory_counts_for_nothing_of_the_first_generation() -> None:
    made = Ballot(1, "a test", (-1, 0), {(-1, 0): voters_of("ab")})
    made.take_promise(promise(1, card("a", 2), knows=-1))
    made.take_promise(promise(1, card("b", 2), knows=-1))
    assert not made.is_promised()
    made.take_promise(promise(1, card("a", 2), knows=0))
    made.take_promise(promise(1, card("b", 2), knows=0))
    assert made.is_promised()


def test_missing_nodes_are_reported_or_that_their_memory_is() -> None:
    made = ballot(9, plan(4, "abc"))
    made.take_promise(promise(9, "b"))
    assert made.shortage() == "too few of the voters (3 nodes) are present; missing: a, c"
    for one in "abc":
        made.take_promise(promise(9, card(one, 2)))
    assert not made.is_promised()
    lost = "too many of the voters (3 nodes) were restarted without the plan of the run"
    assert made.shortage() == lost


@pytest.mark.parametrize("voters", ["ab", "abcd"])
def test_half_of_the_voters_decide_only_with_the_successors_of_the_others(voters: str) -> None:
    half = len(voters) // 2
    made = ballot(2, plan(1, voters))
    for one in voters[:half]:
        made.take_promise(promise(2, one))
    assert not made.is_promised()
    for one in voters[half:]:
        made.take_promise(promise(2, card(one, 2)))
    assert made.is_promised()


# --- any order of events ----------------------------------------------------------------------

IDS = "abcde"


@dataclass
class Voter:
    """An agent with its vote and the newest plan that it knows was chosen."""

    vote: VoterState
    plan: GenerationPlan


@dataclass
class World:
    """Voters, ballots and changes of voters; a message is lost by not being drawn."""

    voters: dict[str, Voter]
    ballots: dict[str, Ballot] = field(default_factory=dict)
    is_chosen: list[tuple[GenerationPlan, set[ConfigurationId]]] = field(default_factory=list)
    """With the generations whose voters were asked."""
    highest: int = 0
    voter_revisions: int = 0

    def begin(self, node_id: str) -> None:
        voter = self.voters[node_id]
        self.highest += 1
        made = ballot(self.highest, voter.plan)
        accepted = voter.vote.accepted
        if accepted is not None and accepted.configuration_id > voter.plan.configuration_id:
            made.mind(accepted)
        self.ballots[node_id] = made

    def ask(self, proposer: str, node_id: str) -> None:
        made, voter = self.ballots.get(proposer), self.voters[node_id]
        if made is None or made.plan is not None:
            return
        if not voter.vote.may_promise(made.generation, (proposer, 1)):
            return
        voter.vote.promise(made.generation, (proposer, 1))
        accepted, known = voter.vote.accepted, voter.plan
        is_unsure = accepted is not None and accepted.configuration_id > known.configuration_id
        brought = accepted if is_unsure else None
        made.take_promise(promise(made.generation, node_id, effective=known, accepted=brought))

    def announce(self, proposer: str, members: set[str]) -> None:
        made = self.ballots.get(proposer)
        if made is None or made.plan is not None or not made.is_promised():
            return
        chosen = sorted(members & made.promises.keys())
        spares = sorted(made.promises.keys() - members)
        if chosen:
            decided_by = made.decided_by()
            made.announce(
                plan(made.generation, chosen, spares, leader=proposer, decided_by=decided_by)
            )

    def accept(self, proposer: str, node_id: str) -> None:
        made = self.ballots.get(proposer)
        if made is None or made.plan is None or node_id not in made.promises:
            return
        if self.voters[node_id].vote.accept(made.plan, (proposer, 1)):
            made.accepted[node_id] = Accepted(made.generation, None)
        if made.is_accepted():
            self.is_chosen.append((made.plan, set(made.needs)))
            self.voters[proposer].plan = made.plan
            del self.ballots[proposer]

    def adopt_voters(self, leader: str, spares: set[str], received: set[str]) -> None:
        """The leader requests these spares, and these nodes receive the request."""
        before = self.voters[leader].plan
        if before.leader != leader or leader in self.ballots:
            return
        self.voter_revisions += 1
        members = {node.node_id for node in before.members}
        voters = sorted(electorate(before.voters))
        wanted = msgspec.structs.replace(
            before,
            spares=cards(sorted(spares - members)),
            voter_revision=self.voter_revisions,
            decided_by=[VoterSet(before.generation, voters, before.voter_revision)],
        )
        agreed = {
            (one, 1)
            for one in sorted(received)
            if self.voters[one].vote.adopt_voters(wanted, (leader, 1))
        }
        sides = (electorate(before.voters), electorate(wanted.voters))
        if all(carries(side, agreed) for side in sides):
            self.is_chosen.append((wanted, {before.configuration_id}))
            self.voters[leader].plan = wanted

    def learn(self, node_id: str) -> None:
        """The leader reports that the plan that it has accepted is chosen."""
        voter = self.voters[node_id]
        accepted = voter.vote.accepted
        if accepted is not None and accepted in [one for one, _ in self.is_chosen]:
            voter.plan = max(voter.plan, accepted, key=lambda one: one.configuration_id)


names = st.sampled_from(IDS)
groups = st.sets(names)
acts = st.one_of(
    st.tuples(st.just("begin"), names),
    st.tuples(st.just("ask"), names, names),
    st.tuples(st.just("announce"), names, groups),
    st.tuples(st.just("accept"), names, names),
    st.tuples(st.just("adopt_voters"), names, groups, groups),
    st.tuples(st.just("learn"), names),
    st.tuples(st.just("round"), names, groups, groups, groups),
)


def act(world: World, what: tuple[object, ...]) -> None:
    """Do one thing, or a ballot as far as these voters agree."""
    match what:
        case ("round", str(proposer), set(asked), set(members), set(received)):
            world.begin(proposer)
            for node_id in sorted(asked):
                world.ask(proposer, node_id)
            world.announce(proposer, members)
            for node_id in sorted(received):
                world.accept(proposer, node_id)
        case (str(name), *words):
            getattr(world, name)(*words)
        case _:
            raise AssertionError(what)


@effort(max_examples=150, deadline=None)
@given(st.lists(acts, max_size=30))
def test_each_chosen_plan_is_known_to_the_next_chosen_one(
    found: list[tuple[object, ...]],
) -> None:
    first = plan(0, "abc", spares="d")
    world = World({one: Voter(VoterState(0, ("a", 1)), first) for one in IDS})
    for what in found:
        act(world, what)
    effective = sorted(world.is_chosen, key=lambda one: one[0].configuration_id)
    for (earlier, _), (later, asked) in pairwise(effective):
        assert earlier.configuration_id in asked, (
            f"{later.configuration_id} does not know of {earlier.configuration_id}"
        )


def test_an_identity_is_a_node_and_its_process() -> None:
    assert card("a", 7).identity == ("a", 7)


def test_a_voter_revision_that_only_its_own_leader_could_bring_about_is_not_asked_by_it() -> None:
    base = plan(3, "ab", "c")
    made = ballot(4, base)
    made.void = frozenset({(3, 1)})
    before = [VoterSet(3, sorted(electorate(base.voters)))]
    given_up = plan(3, "ab", "defgh", voter_revision=1, decided_by=before)
    made.take_promise(promise(4, "d", accepted=given_up))
    assert set(made.needs) == {(3, 0)}


# --- the outside witness ----------------------------------------------------------------------


def witnessed(base: GenerationPlan, generation: int = 5) -> Ballot:
    return Ballot(
        generation, "a test", base.configuration_id, {base.configuration_id: electorate_of(base)}
    )


def test_the_witness_is_one_of_three_next_to_two_nodes() -> None:
    ballot = witnessed(plan(4, "ab", witness=7))
    ballot.take_promise(promise(5, "a"))
    assert not ballot.is_promised()
    assert ballot.shortage() == (
        "too few of the voters (2 nodes and the witness) are present; missing: b, the witness"
    )
    ballot.take_witness(7, None)
    assert ballot.is_promised()
    ballot.announce(plan(5, "a", decided_by=ballot.decided_by()))
    ballot.accepted["a"] = Accepted(5, None)
    assert not ballot.is_accepted()
    ballot.is_witnessed = True
    assert ballot.is_accepted()


def test_another_life_of_the_witness_is_another_voter() -> None:
    ballot = witnessed(plan(4, "ab", witness=7))
    ballot.take_promise(promise(5, "a"))
    ballot.take_witness(8, None)
    assert not ballot.is_promised()


def test_witness_without_a_vote_decides_nothing() -> None:
    ballot = witnessed(plan(4, "abc"))
    ballot.take_promise(promise(5, "a"))
    ballot.take_witness(7, None)
    assert not ballot.is_promised()
    assert "missing: b, c" in ballot.shortage()


def test_what_the_witness_remembers_may_have_taken_effect() -> None:
    ballot = witnessed(plan(4, "ab", witness=7), generation=6)
    ballot.take_promise(promise(6, "b"))
    ballot.take_witness(7, plan(5, "a", decided_by=[VoterSet(4, sorted(voters_of("ab")))]))
    assert not ballot.is_promised(), "a may continue alone in generation 5"
    newest = ballot.newest_plan()
    assert newest is not None
    assert newest.generation == 5
    ballot.take_promise(promise(6, "a"))
    assert ballot.is_promised()


def test_what_came_before_the_generation_that_is_known_decides_no_more() -> None:
    ballot = witnessed(plan(4, "ab", witness=7))
    ballot.take_witness(
        7, plan(4, "ab", witness=7, decided_by=[VoterSet(3, sorted(voters_of("cd")))])
    )
    assert ballot.needs == {(4, 0): electorate_of(plan(4, "ab", witness=7))}


def test_a_first_generation_that_needs_the_witness_waits_for_it() -> None:
    ballot = Ballot(0, "a test", (-1, 0), {}, needs_witness=True)
    ballot.take_promise(promise(0, "a"))
    assert not ballot.is_promised()
    assert ballot.shortage() == "the witness has not answered, and no run starts without it"
    ballot.take_witness(7, None)
    assert ballot.is_promised()
