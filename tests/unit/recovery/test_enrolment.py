"""Enrolment: who votes while a generation runs."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from ftrun.config.cluster import ClusterSize
from ftrun.membership.ballots import electorate
from ftrun.membership.leader.failure_detector import FailureDetector
from ftrun.membership.leader.reconfiguration import VoterReconfiguration
from ftrun.recovery.commands import Command, Send
from ftrun.wire.cluster.generation import FailureHistory, GenerationPlan, VoterSet
from ftrun.wire.cluster.membership import Accept, Accepted
from tests.unit.recovery.made import card, meet, plan, settings

SETTINGS = settings(heartbeat_s=0.5, settle_s=5.0, wishes=ClusterSize(1, 4, 9))
HISTORY = FailureHistory(restarts=2)


class Lead:
    """a leads a generation; who of it is here, and who has come beside it."""

    def __init__(self, of: GenerationPlan, here: str) -> None:
        self.plan = of
        self.peers = FailureDetector(card("a"), SETTINGS)
        self.enrolment = VoterReconfiguration(SETTINGS)
        for one in here:
            self.come(one)

    def come(self, node_id: str, *, now_s: float = 0.0, incarnation: int = 1) -> None:
        meet(self.peers, card(node_id, incarnation), now_s=now_s, linked=True)

    def lose(self, node_id: str) -> None:
        peer = self.peers.get(node_id)
        assert peer is not None
        peer.lost, peer.linked = "silent", False

    def look(self, now_s: float = 10.0) -> list[Command]:
        return self.enrolment.look(self.plan, self.peers, HISTORY, now_s=now_s)

    def accept(self, node_ids: str, roster: int | None = None) -> list[GenerationPlan | None]:
        wanted = self.enrolment.wanted
        assert wanted is not None
        body = Accepted(wanted.generation, None, roster=wanted.roster if roster is None else roster)
        return [self.enrolment.accepted(card(one), body, self.plan, self.peers) for one in node_ids]

    @property
    def spares(self) -> str:
        """Those of the roster that is wanted."""
        wanted = self.enrolment.wanted
        return "" if wanted is None else "".join(one.node_id for one in wanted.spares)


def asked(commands: list[Command]) -> str:
    return "".join(sorted(one.node_id for one in commands if isinstance(one, Send)))


def lost_voter() -> Lead:
    """Of three voters c is lost, and d has come."""
    made = Lead(plan(4, "ab", spares="c"), "abcd")
    made.lose("c")
    return made


def test_a_node_that_has_come_votes_in_place_of_one_that_is_lost() -> None:
    made = lost_voter()
    found = made.look()
    wanted = made.enrolment.wanted
    assert wanted is not None
    assert (wanted.edition, made.spares) == ((4, 1), "d")
    assert wanted.is_of(made.plan)
    assert wanted.decided_by == [VoterSet(4, [("a", 1), ("b", 1), ("c", 1)], roster=0)]
    assert wanted.history == HISTORY
    assert found == [Send(one, Accept(wanted)) for one in "abd"]


def test_a_plan_that_takes_effect_is_given_once() -> None:
    made = lost_voter()
    made.look()
    wanted = made.enrolment.wanted
    assert made.accept("a") == [None]
    assert made.accept("b") == [wanted]
    assert made.enrolment.wanted is None
    late = Accepted(4, None, roster=1)
    assert made.enrolment.accepted(card("d"), late, made.plan, made.peers) is None


def test_a_majority_of_those_before_is_not_enough() -> None:
    made = Lead(plan(4, "abc"), "abcdefgh")
    made.look()
    wanted = made.enrolment.wanted
    assert made.accept("abcd") == [None] * 4
    assert made.accept("e") == [wanted]


def test_a_majority_of_those_after_is_not_enough() -> None:
    made = Lead(plan(4, "ab", spares="cde"), "abcfghi")
    made.lose("c")
    made.look()
    assert made.spares == "fghi"
    wanted = made.enrolment.wanted
    assert made.accept("afghib") == [None] * 6
    # c has heard of it before it was lost.
    assert (
        made.enrolment.accepted(card("c"), Accepted(4, None, roster=1), made.plan, made.peers)
        == wanted
    )


@pytest.mark.parametrize(("generation", "roster"), [(4, 0), (4, 2), (3, 1), (5, 1)])
def test_an_acceptance_of_something_else_does_not_count(generation: int, roster: int) -> None:
    made = lost_voter()
    made.look()
    other = Accepted(generation, None, roster=roster)
    for one in "abd":
        assert made.enrolment.accepted(card(one), other, made.plan, made.peers) is None
    assert made.accept("a") == [None]


# --- rule 1: what is worth it -----------------------------------------------------------------


def losses(voters: str, here: str) -> int:
    """So many of those who are here may go, whoever they are; -1: they are too few already."""
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
    made = Lead(plan(4, members, sorted(spares)), after)
    made.look()
    is_better = losses(after, after) > losses(before, after)
    assert (made.enrolment.wanted is not None) is is_better
    if is_better:
        assert set(made.spares) == here


def test_a_spare_that_is_lost_votes_no_more() -> None:
    """Of four voters three are needed, of which none could be missed; of three two are."""
    made = Lead(plan(4, "abc", spares="d"), "abcd")
    made.look()
    assert made.enrolment.wanted is None
    made.lose("d")
    made.look(20.0)
    assert made.enrolment.wanted is not None
    assert made.spares == ""


def test_no_more_stand_by_with_a_vote_than_were_wished_for() -> None:
    """Else strangers could outvote the members, and their loss would pause a healthy run."""
    made = Lead(plan(4, "ab", spares="c"), "abdefg")
    made.enrolment = VoterReconfiguration(settings(wishes=ClusterSize(2, 2, 1)))
    made.look()
    assert made.spares == "d"


def test_of_two_voters_the_successor_of_one_is_proof_that_it_votes_no_more() -> None:
    made = Lead(plan(4, "a", spares="b"), "a")
    made.come("b", incarnation=2)
    made.come("c")
    made.look()
    assert made.spares == "bc"
    assert made.accept("a") == [None]
    wanted = made.enrolment.wanted
    assert wanted is not None
    body = Accepted(4, None, roster=1)
    assert made.enrolment.accepted(card("b", 2), body, made.plan, made.peers) == wanted


def test_what_was_announced_and_given_up_is_void() -> None:
    made = lost_voter()
    made.look()
    made.enrolment.reset()
    assert made.enrolment.void == {(4, 1)}


def test_an_agent_that_was_started_again_is_another_voter() -> None:
    made = Lead(plan(4, "ab", spares="c"), "ab")
    made.come("c", incarnation=2)
    made.look()
    wanted = made.enrolment.wanted
    assert wanted is not None
    assert electorate(wanted.voters) == {("a", 1), ("b", 1), ("c", 2)}


def test_the_spares_of_now_come_first_and_in_their_order() -> None:
    made = Lead(plan(4, "a", spares="zy"), "ayzxwv")
    made.look()
    assert made.spares == "zyvwx"


# --- rule 2: who is taken in ------------------------------------------------------------------


def test_only_who_has_stayed_for_a_while_is_taken_in() -> None:
    made = Lead(plan(4, "ab", spares="c"), "ab")
    made.come("d", now_s=10.0)
    made.look(14.75)
    assert made.enrolment.wanted is None
    made.look(15.0)
    assert made.spares == "d"


def test_it_looks_twice_a_heartbeat() -> None:
    made = Lead(plan(4, "ab", spares="c"), "ab")
    made.look(10.0)
    made.come("d")
    assert made.look(10.2) == []
    assert asked(made.look(10.25)) == "abd"


@pytest.mark.parametrize("how", ["bound to another", "lost", "not connected"])
def test_who_is_bound_to_another_or_not_there_is_not_taken_in(how: str) -> None:
    made = lost_voter()
    peer = made.peers.get("d")
    assert peer is not None
    match how:
        case "bound to another":
            peer.promised = 5
        case "lost":
            peer.lost = "silent"
        case _:
            peer.linked = False
    made.look()
    assert made.spares == ""
    peer.promised, peer.lost, peer.linked = 4, "", True
    made.look(20.0)
    assert made.spares == "d"


# --- rule 3: until it takes effect ------------------------------------------------------------


def test_it_asks_again_all_who_have_not_accepted() -> None:
    made = lost_voter()
    c = made.peers.get("c")
    assert c is not None
    assert asked(made.look(10.0)) == "abd"
    made.accept("a")
    assert made.look(10.2) == []
    assert made.look(10.5) == [], "a moment ago it was asked"
    c.linked = True
    assert asked(made.look(11.0)) == "bcd", "c is of those before"
    assert made.enrolment.wanted is not None
    assert made.enrolment.wanted.roster == 1
    assert asked(made.look(11.5)) == ""
    assert asked(made.look(12.0)) == "bcd"


def test_where_others_are_here_now_another_roster_is_wanted_and_accepted_anew() -> None:
    made = lost_voter()
    made.look(10.0)
    made.accept("a")
    for one in "ef":
        made.come(one, now_s=0.0)
    assert asked(made.look(11.0)) == "abdef"
    wanted = made.enrolment.wanted
    assert wanted is not None
    assert (wanted.roster, made.spares) == (2, "def")
    # a has accepted another one.
    assert made.accept("de") == [None] * 2
    assert made.accept("b") == [None]
    assert made.accept("a") == [wanted]


def test_the_next_change_counts_from_the_roster_in_effect() -> None:
    made = Lead(plan(4, "ab", spares="c", roster=7), "abd")
    made.look()
    wanted = made.enrolment.wanted
    assert wanted is not None
    assert wanted.edition == (4, 8)
    assert wanted.decided_by[0].edition == (4, 7)


def test_a_ballot_ends_it() -> None:
    made = lost_voter()
    made.look()
    made.enrolment.reset()
    late = Accepted(4, None, roster=1)
    for one in "abd":
        assert made.enrolment.accepted(card(one), late, made.plan, made.peers) is None


def test_where_nothing_is_wanted_nobody_is_asked() -> None:
    assert Lead(plan(4, "ab", spares="c"), "abc").look() == []
