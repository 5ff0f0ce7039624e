"""Elections: each present node is asked, and a request is repeated until it is answered."""

from itertools import pairwise

from ftrun.membership.events import WitnessAnswered, WitnessRegister
from ftrun.membership.leader.failure_detector import FailureDetector, PeerState
from ftrun.membership.leader.proposer import WITNESS_WAIT_S, BallotStage, Proposer
from ftrun.membership.witness import WitnessView
from ftrun.records.membership import BallotStarted
from ftrun.recovery.commands import (
    Command,
    Connect,
    JournalEntry,
    QueryWitness,
    Send,
    WitnessOperation,
)
from ftrun.wire.cluster.generation import GenerationPlan, NodeCard
from ftrun.wire.cluster.membership import Accept, Accepted, Prepare, PrepareRejected
from tests.unit.recovery.made import card, meet, plan, promise, settings

SETTINGS = settings(heartbeat_interval_s=0.5, redial_s=0.5, answer_s=30.0)
BASE = plan(4, "abc")


class OneProposer:
    """a, with a connection to b and c."""

    def __init__(self, linked: str = "abc", unlinked: str = "") -> None:
        self.peers = FailureDetector(card("a"), SETTINGS)
        for one in linked + unlinked:
            meet(self.peers, card(one), now_s=0.0, linked=one in linked)
        self.election = Proposer(card("a"), SETTINGS, self.peers)

    def peer(self, node_id: str) -> PeerState:
        found = self.peers.get(node_id)
        assert found is not None
        return found

    def begin(
        self,
        *,
        plan: GenerationPlan | None = BASE,
        unsure: GenerationPlan | None = None,
        now_s: float = 0.0,
    ) -> list[Command]:
        return self.election.begin("b was lost", plan=plan, unsure=unsure, now_s=now_s)

    def promise(self, node_ids: str) -> None:
        assert self.election.ballot is not None
        for one in node_ids:
            assert self.election.promised(promise(self.election.ballot.generation, one))

    def announce(self, members: str, spares: str = "", *, now_s: float = 0.0) -> list[Command]:
        ballot = self.election.ballot
        assert ballot is not None
        decided_by = ballot.decided_by()
        wanted = plan(ballot.generation, members, spares, decided_by=decided_by)
        return self.election.announce(wanted, now_s=now_s)

    def accept(self, node_ids: str) -> None:
        assert self.election.ballot is not None
        for one in node_ids:
            assert self.election.accepted(one, Accepted(self.election.ballot.generation, None))


def asked(commands: list[Command]) -> list[str]:
    """The nodes that the proposer asks, in order."""
    return [one.node_id for one in commands if isinstance(one, Send)]


# --- asking -----------------------------------------------------------------------------------


def test_a_ballot_asks_ranks_to_stay_only_with_survivors_and_so_does_the_next_one() -> None:
    made = OneProposer()
    made.election.begin("b was lost", BASE, None, stay=True, failed=(1,), now_s=0.0)
    assert made.election.ballot is not None
    assert not made.election.ballot.stay, "the option is off"

    made.election = Proposer(card("a"), settings(survivors="on"), made.peers)
    first = made.election.begin("b was lost", BASE, None, stay=True, failed=(1,), now_s=0.0)
    again = made.election.begin("c was lost", BASE, None, failed=(2,), now_s=1.0)
    last = made.election.begin("a resize", BASE, None, stay=False, now_s=2.0)
    asks = [
        [one.message for one in found if isinstance(one, Send) and one.node_id == "c"]
        for found in (first, again, last)
    ]
    assert asks == [
        [Prepare(5, card("a"), "b was lost", (4, 0), stay=True, failed=(1,))],
        [Prepare(6, card("a"), "c was lost", (4, 0), stay=True, failed=(1, 2))],
        [Prepare(7, card("a"), "a resize", (4, 0), stay=False, failed=(1, 2))],
    ]
    made.promise("abc")
    made.announce("abc")
    made.election.won()
    later = made.election.begin("b was lost", BASE, None, now_s=3.0)
    assert Send("c", Prepare(8, card("a"), "b was lost", (4, 0))) in later


def test_every_node_is_asked_for_a_promise_of_the_next_number() -> None:
    made = OneProposer(unlinked="d")
    found = made.begin()
    assert found == [
        JournalEntry(BallotStarted("b was lost", 5)),
        *(Send(one, Prepare(5, card("a"), "b was lost", (4, 0))) for one in "abc"),
        Connect("d.local", 29400, "d"),
    ]
    assert made.election.stage() is BallotStage.ASKED


def test_a_first_generation_needs_no_voters() -> None:
    made = OneProposer()
    made.begin(plan=None)
    assert made.election.ballot is not None
    assert (made.election.ballot.generation, made.election.ballot.needs) == (0, {})


def test_each_ballot_has_a_higher_number_than_anybody_has_promised() -> None:
    made = OneProposer()
    made.begin()
    made.begin()
    assert made.election.highest == 6
    made.election.not_promised(PrepareRejected(6, 11, None), 0, now_s=0.0)
    made.begin()
    assert made.election.highest == 12
    made.begin(unsure=plan(30, "abc"))
    assert made.election.highest == 31


def test_a_plan_that_may_be_chosen_is_kept_unless_it_is_older() -> None:
    made = OneProposer()
    made.begin(unsure=plan(3, "xyz"))
    assert made.election.ballot is not None
    assert set(made.election.ballot.needs) == {(4, 0)}
    made.begin(unsure=plan(4, "abc", spares="d", voter_revision=1))
    assert set(made.election.ballot.needs) == {(4, 0), (4, 1)}


def test_a_node_that_is_lost_is_not_waited_for() -> None:
    made = OneProposer()
    made.peer("c").lost = "no heartbeat"
    assert asked(made.begin()) == ["a", "b"]
    made.promise("ab")
    assert made.election.stage() is BallotStage.PROMISED


def test_what_was_asked_is_asked_again_until_it_is_answered() -> None:
    made = OneProposer()
    assert made.election.repeat(now_s=0.0) == []
    made.begin(now_s=10.0)
    made.promise("b")
    assert made.election.repeat(now_s=10.9) == []
    assert asked(made.election.repeat(now_s=11.0)) == ["a", "c"]
    assert made.election.repeat(now_s=11.5) == []
    assert asked(made.election.repeat(now_s=12.0)) == ["a", "c"]
    made.promise("ac")
    assert asked(made.announce("abc", now_s=13.0)) == ["b", "a", "c"]
    made.accept("b")
    found = made.election.repeat(now_s=14.0)
    assert asked(found) == ["a", "c"]
    assert all(isinstance(one, Send) and isinstance(one.message, Accept) for one in found)


def test_a_node_that_has_no_connection_is_dialled_and_not_asked() -> None:
    made = OneProposer()
    made.peer("c").linked = False
    assert made.begin()[-1] == Connect("c.local", 29400, "c")
    assert made.election.repeat(now_s=0.4) == [], "it was dialled a moment ago"
    made.promise("ab")
    assert made.election.stage() is BallotStage.ASKED, "c may hold what is to be restored"
    # The connection exists, and the node is asked.
    made.peer("c").linked = True
    assert asked(made.election.ask(made.peer("c"), now_s=0.5)) == ["c"]
    # A node that has answered is not asked again.
    assert made.election.ask(made.peer("b"), now_s=0.5) == []


def test_a_node_that_comes_while_a_ballot_asks_counts_too() -> None:
    made = OneProposer()
    early = meet(made.peers, "d")
    assert made.election.joined(early, now_s=0.0) == []
    made.begin()
    made.promise("abcd")
    late = meet(made.peers, "e")
    assert asked(made.election.joined(late, now_s=0.0)) == ["e"]
    assert made.election.stage() is BallotStage.ASKED
    made.promise("e")
    made.announce("abcd", "e")
    later = meet(made.peers, "f")
    assert made.election.joined(later, now_s=0.0) == []


def test_a_node_that_does_not_answer_is_not_waited_for_for_ever() -> None:
    made = OneProposer()
    made.begin(now_s=10.0)
    made.promise("ab")
    made.election.repeat(now_s=39.9)
    assert made.election.stage() is BallotStage.ASKED
    made.election.repeat(now_s=40.0)
    assert made.election.stage() is BallotStage.PROMISED


def test_a_node_that_answers_too_late_may_take_part_in_the_next_ballot() -> None:
    made = OneProposer()
    made.begin(now_s=10.0)
    made.promise("ab")
    made.election.repeat(now_s=40.0)
    made.announce("ab")
    assert made.peer("c").is_unresponsive
    assert not made.election.promised(promise(5, "c"))
    assert not made.peer("c").is_unresponsive
    assert not made.election.promised(promise(5, "x")), "no node knows it"


def test_its_own_node_is_always_waited_for() -> None:
    made = OneProposer()
    made.begin(now_s=10.0)
    made.promise("bc")
    made.election.repeat(now_s=1000.0)
    assert made.election.stage() is BallotStage.ASKED


def test_a_node_that_is_lost_but_connected_is_asked_as_it_may_be_there() -> None:
    made = OneProposer()
    made.peer("c").lost = "no heartbeat"
    made.begin(now_s=10.0)
    made.promise("ab")
    assert asked(made.election.repeat(now_s=10.0)) == ["c"]
    assert asked(made.election.repeat(now_s=10.5)) == []
    assert asked(made.election.repeat(now_s=11.0)) == ["c"]
    made.announce("ab", now_s=11.0)
    made.accept("ab")
    assert made.election.repeat(now_s=20.0) == []


# --- answers ----------------------------------------------------------------------------------


def test_promises_count_for_their_ballot_and_until_it_is_announced() -> None:
    made = OneProposer()
    assert not made.election.promised(promise(5, "b"))
    made.begin()
    assert not made.election.promised(promise(4, "b"))
    made.promise("abc")
    made.announce("abc")
    assert not made.election.promised(promise(5, "b"))


def test_promises_of_too_few_are_short() -> None:
    made = OneProposer("a")
    made.begin()
    made.promise("a")
    assert made.election.stage() is BallotStage.SHORT


def test_of_two_voters_one_that_refuses_connections_is_missing() -> None:
    made = OneProposer("ab")
    made.begin(plan=plan(4, "ab"))
    made.promise("a")
    made.peer("b").refused = True
    made.election.lost("b")
    assert made.election.stage() is BallotStage.SHORT


def test_acceptances_count_for_the_plan_that_was_announced_and_from_nodes_that_have_promised() -> (
    None
):
    made = OneProposer()
    assert not made.election.accepted("b", Accepted(5, None))
    made.begin()
    made.promise("ab")
    assert not made.election.accepted("b", Accepted(5, None))
    made.election.lost("c")
    made.announce("ab")
    assert not made.election.accepted("b", Accepted(4, None))
    assert not made.election.accepted("c", Accepted(5, None))
    made.accept("b")


def test_it_is_carried_with_all_members_and_a_majority() -> None:
    made = OneProposer("abcd")
    made.begin()
    made.promise("abcd")
    made.announce("ad", "bc")
    made.accept("ad")
    assert made.election.stage() is BallotStage.ANNOUNCED, "b or c is needed"
    made.accept("c")
    assert made.election.stage() is BallotStage.CARRIED
    won = made.election.won()
    assert [node.node_id for node in won.members] == ["a", "d"]
    assert made.election.ballot is None
    assert made.election.repeat(now_s=1000.0) == []


def test_it_is_not_carried_while_a_member_is_missing() -> None:
    made = OneProposer()
    made.begin(now_s=0.0)
    made.promise("abc")
    made.announce("abc")
    made.accept("ab")
    assert made.election.stage() is BallotStage.ANNOUNCED
    assert made.election.postpone(now_s=1.0) == []
    made.election.repeat(now_s=300.0)
    assert made.election.stage() is BallotStage.ANNOUNCED, "it may be reading a checkpoint"
    (answered,) = made.election.postpone(now_s=300.0)
    assert isinstance(answered, JournalEntry)
    assert answered.record.text.startswith("generation 5 waits for c, which may be reading")
    assert made.election.postpone(now_s=301.0) == []


def test_a_spare_that_does_not_accept_is_done_without() -> None:
    made = OneProposer()
    made.begin(now_s=0.0)
    made.promise("abc")
    made.announce("ab", spares="c")
    made.accept("a")
    made.election.repeat(now_s=30.0)
    assert made.election.stage() is BallotStage.ANNOUNCED
    made.accept("b")
    assert made.election.stage() is BallotStage.CARRIED
    assert made.peer("c").is_unresponsive


def test_a_spare_that_could_not_keep_the_plan_has_not_accepted_it() -> None:
    made = OneProposer()
    made.begin(now_s=0.0)
    made.promise("abc")
    made.announce("a", spares="bc")
    made.accept("a")
    assert made.election.ballot is not None
    refused = Accepted(made.election.ballot.generation, None, "no memory")
    assert not made.election.accepted("b", refused)
    assert made.election.stage() is BallotStage.ANNOUNCED


def test_a_node_that_is_lost_before_the_plan_has_promised_nothing() -> None:
    made = OneProposer()
    made.election.lost("c")
    made.begin()
    made.promise("bc")
    made.election.lost("c")
    made.promise("a")
    assert asked(made.announce("ab")) == ["b", "a"]
    assert made.election.is_member("b")
    assert not made.election.is_member("c")
    # Afterwards its acceptance may already be there.
    made.accept("b")
    made.election.lost("b")
    made.accept("a")
    assert made.election.stage() is BallotStage.CARRIED


def test_a_ballot_that_begins_a_run_asks_for_the_one_that_a_node_knows() -> None:
    proposer = OneProposer()
    assert not proposer.election.is_concurrent(3)
    proposer.begin(plan=None)
    assert not proposer.election.is_concurrent(-1)
    assert proposer.election.is_concurrent(3)
    proposer.begin(plan=None)
    assert proposer.election.ballot is not None
    assert proposer.election.ballot.generation == 4
    proposer.begin()
    assert not proposer.election.is_concurrent(9)


def test_members_of_a_plan_that_was_given_up_need_not_agree_to_the_next() -> None:
    """Two nodes have promised, and are dead before they accept."""
    proposer = OneProposer("abcde")
    proposer.begin()
    proposer.promise("abcde")
    given_up = proposer.announce("abde")
    assert given_up
    plan_of_it = proposer.election.ballot
    assert plan_of_it is not None
    accepted = plan_of_it.plan
    proposer.election.lost("d")
    proposer.election.lost("e")
    proposer.begin(unsure=accepted)
    ballot = proposer.election.ballot
    assert ballot is not None
    assert ballot.needs.keys() == {BASE.configuration_id}
    assert proposer.election.promised(promise(ballot.generation, "b", accepted=accepted))
    assert ballot.needs.keys() == {BASE.configuration_id}


def test_before_a_plan_none_is_a_member() -> None:
    made = OneProposer()
    assert not made.election.is_member("a")
    made.begin()
    assert not made.election.is_member("a")


# --- rule 3: time for the other proposer ------------------------------------------------------


def test_a_refusal_leads_to_another_ballot_a_little_later() -> None:
    made = OneProposer()
    made.begin()
    made.election.not_promised(PrepareRejected(4, 9, None), 0, now_s=10.0)
    assert made.election.again_s is None, "it is of an older ballot"
    assert made.election.highest == 9
    made.election.not_promised(PrepareRejected(5, 7, None), 0, now_s=10.0)
    assert made.election.again_s is not None
    assert made.election.again_s > 10.0
    assert made.election.retry_reason == "b was lost"
    assert made.election.highest == 9
    made.begin()
    assert made.election.again_s is None


def test_a_refusal_without_a_ballot_leads_to_nothing() -> None:
    made = OneProposer()
    made.election.not_promised(PrepareRejected(5, 9, None), 0, now_s=10.0)
    assert (made.election.again_s, made.election.highest) == (None, 9)


def waits(place: int, refusals: int) -> list[float]:
    made, found = OneProposer(), []
    for _ in range(refusals):
        made.begin()
        made.election.restart("x", place, now_s=0.0)
        made.election.restart("y", place, now_s=5.0)
        assert made.election.retry_reason == "x", "the first reason is kept"
        found.append(made.election.again_s or 0.0)
    return found


def test_two_proposers_wait_for_different_times_and_longer_each_time() -> None:
    first, second = waits(0, 8), waits(1, 8)
    assert all(mine < other for mine, other in zip(first, second, strict=True))
    for found in (first, second):
        grown = [later / earlier for earlier, later in pairwise(found)]
        assert grown == [2.0] * 4 + [1.0] * 3


def test_after_an_announcement_the_timeout_restarts() -> None:
    made = OneProposer()
    made.begin()
    made.election.restart("x", 0, now_s=0.0)
    first = made.election.again_s
    made.begin()
    made.promise("abc")
    made.announce("abc")
    made.begin()
    made.election.restart("x", 0, now_s=0.0)
    assert made.election.again_s == first


# --- the outside witness ----------------------------------------------------------------------

TWO = plan(4, "ab", witness=7)


class Witnessed(OneProposer):
    """The same with a witness, which has been reached."""

    def __init__(self, linked: str = "a") -> None:
        super().__init__(linked)
        self.peers.witness = WitnessView(is_used=True)
        self.says(WitnessOperation.RENEW, 4, granted=True)

    def says(
        self,
        operation: WitnessOperation,
        generation: int,
        *,
        granted: bool,
        promised: int = 4,
        now_s: float = 0.0,
    ) -> list[NodeCard]:
        register = WitnessRegister(7, promised, ("x", 1), TWO)
        leader = card("a") if granted else None
        asked = QueryWitness(operation, now_s, generation)
        answered = WitnessAnswered(asked, True, granted, register, leader)
        self.peers.witness.answered(answered, now_s=now_s)
        return self.election.witness_answered(answered, 0, now_s=now_s)

    def stage(self) -> BallotStage:
        return self.election.stage()


def questions(commands: list[Command]) -> list[tuple[WitnessOperation, int]]:
    return [(one.operation, one.generation) for one in commands if isinstance(one, QueryWitness)]


def test_the_witness_promises_and_accepts_as_a_node_does() -> None:
    made = Witnessed()
    assert questions(made.begin(plan=TWO)) == [(WitnessOperation.PROMISE, 5)]
    made.promise("a")
    assert made.stage() is BallotStage.ASKED
    assert made.says(WitnessOperation.PROMISE, 5, granted=True, promised=5) == [
        card("a"),
        *TWO.voters,
    ]
    assert made.stage() is BallotStage.PROMISED
    assert questions(made.announce("a")) == [(WitnessOperation.ACCEPT, 5)]
    made.accept("a")
    assert made.stage() is BallotStage.ANNOUNCED
    made.says(WitnessOperation.ACCEPT, 5, granted=True, promised=5)
    assert made.stage() is BallotStage.CARRIED
    assert questions(made.election.repeat(now_s=10.0)) == []
    made.election.won()
    assert made.says(WitnessOperation.RENEW, 5, granted=True) == []


def test_a_witness_that_does_not_answer_is_waited_for_once_and_asked_again() -> None:
    made = Witnessed()
    made.begin(plan=TWO)
    made.promise("a")
    again = [questions(made.election.repeat(now_s=0.25 * one)) for one in range(1, 8)]
    assert [one for one in again if one] == [[(WitnessOperation.PROMISE, 5)]]
    assert made.stage() is BallotStage.ASKED
    assert questions(made.election.repeat(now_s=WITNESS_WAIT_S)) == [(WitnessOperation.PROMISE, 5)]
    assert made.stage() is BallotStage.SHORT
    made.says(WitnessOperation.PROMISE, 5, granted=True, promised=5, now_s=3.0)
    assert made.stage() is BallotStage.PROMISED


def test_a_witness_that_has_promised_another_has_the_ballot_begin_again() -> None:
    made = Witnessed()
    made.begin(plan=TWO)
    made.says(WitnessOperation.PROMISE, 5, granted=False, promised=9)
    assert made.election.again_s is not None
    assert made.election.highest == 9


def test_acceptance_that_the_witness_refuses_breaks_the_ballot() -> None:
    made = Witnessed()
    made.begin(plan=TWO)
    made.promise("a")
    made.says(WitnessOperation.PROMISE, 5, granted=True, promised=5)
    made.announce("a")
    made.accept("a")
    made.says(WitnessOperation.ACCEPT, 5, granted=False, promised=6)
    assert made.stage() is BallotStage.BROKEN


def test_a_proposer_keeps_the_witness_from_others_once_it_has_the_votes() -> None:
    """Returning nodes then find the leader that waits for nodes."""
    made = Witnessed()
    assert made.election.renew_witness(None, now_s=1.0) == []
    assert questions(made.election.renew_witness(TWO, now_s=1.0)) == [(WitnessOperation.RENEW, 4)]
    made.begin(plan=TWO)
    assert made.election.renew_witness(None, now_s=1.0) == []
    made.says(WitnessOperation.PROMISE, 5, granted=True, promised=5)
    assert made.election.renew_witness(None, now_s=1.0) == [], "short of votes"
    made.promise("a")
    assert questions(made.election.renew_witness(None, now_s=1.0)) == [(WitnessOperation.RENEW, 5)]
    made.announce("a")
    assert questions(made.election.renew_witness(None, now_s=1.0)) == [(WitnessOperation.RENEW, 5)]


def test_a_member_of_an_announced_plan_that_is_bound_to_another_is_not_waited_for() -> None:
    """It has promised a later number to a proposer that died, and can never accept this one."""
    made = OneProposer()
    made.begin()
    made.promise("abc")
    made.announce("ab", "c")
    made.election.note_promise(made.peer("c"), 6, None, 0, now_s=1.0)
    made.election.note_promise(made.peer("b"), 5, None, 0, now_s=1.0)
    assert made.election.again_s is None, "a spare is not needed; b has promised this one"
    made.election.note_promise(made.peer("b"), 6, None, 0, now_s=1.0)
    assert made.election.again_s is not None
    assert made.election.retry_reason == "b was lost"
    made.begin()
    assert made.election.highest == 7
