"""The witness as an agent sees it: what it has confirmed counts from when it was asked."""

from ftrun.membership.events import WitnessAnswered, WitnessRegister
from ftrun.membership.witness import WitnessView
from ftrun.recovery.commands import Command, JournalEntry, QueryWitness, WitnessOperation
from tests.unit.recovery.made import card, plan

A = card("a")
HELD = WitnessRegister(7, 4, A.identity, plan(4, "ab"))


def says(
    made: WitnessView,
    wish: WitnessOperation = WitnessOperation.KEEP,
    *,
    asked_s: float,
    now_s: float,
    granted: bool = True,
    register: WitnessRegister | None = HELD,
) -> list[Command]:
    said = WitnessAnswered(QueryWitness(wish, asked_s), True, granted, register, A)
    return made.said(said, now_s=now_s)


def is_away(made: WitnessView, *, asked_s: float, now_s: float) -> list[Command]:
    said = WitnessAnswered(
        QueryWitness(WitnessOperation.KEEP, asked_s), is_reached=False, why="etcd is away"
    )
    return made.said(said, now_s=now_s)


def test_run_without_one_asks_nothing() -> None:
    made = WitnessView()
    assert made.ask(WitnessOperation.CLAIM, now_s=1.0) == []
    assert (made.is_reached, made.life) == (False, 0)
    assert not made.has_been_away(0.0, now_s=1e6)


def test_who_leads_tells_its_plan_once_and_then_keeps_its_lease() -> None:
    made = WitnessView(is_used=True)
    mine = plan(4, "ab")
    assert made.say_who_leads(mine, now_s=1.0) == [
        QueryWitness(WitnessOperation.TELL, 1.0, 4, mine)
    ]
    says(made, asked_s=1.0, now_s=1.1, register=WitnessRegister(7, 4, A.identity))
    assert made.say_who_leads(mine, now_s=1.5) == [
        QueryWitness(WitnessOperation.TELL, 1.5, 4, mine)
    ]
    says(made, asked_s=1.5, now_s=1.6)
    assert made.say_who_leads(mine, now_s=2.0) == [QueryWitness(WitnessOperation.KEEP, 2.0, 4)]
    roster = plan(4, "ab", roster=1)
    assert made.say_who_leads(roster, now_s=2.5) == [
        QueryWitness(WitnessOperation.TELL, 2.5, 4, roster)
    ]


def test_what_it_confirms_counts_from_when_it_was_asked() -> None:
    made = WitnessView(is_used=True)
    assert not made.holds(7, 2.0, now_s=0.0)
    says(made, asked_s=10.0, now_s=11.4)
    assert made.holds(7, 2.0, now_s=11.9)
    assert not made.holds(7, 2.0, now_s=12.0)
    assert not made.holds(8, 2.0, now_s=11.9)
    says(made, asked_s=11.0, now_s=11.5, granted=False)
    says(made, WitnessOperation.LOOK, asked_s=11.2, now_s=11.6)
    assert not made.holds(7, 2.0, now_s=12.0)


def test_going_and_coming_are_told_once_and_timed() -> None:
    made = WitnessView(is_used=True)
    assert says(made, asked_s=1.0, now_s=1.1) == []
    assert made.has_been_there(5.0, now_s=6.1)
    assert not made.has_been_there(5.1, now_s=6.1)
    (lost,) = is_away(made, asked_s=10.0, now_s=11.0)
    assert isinstance(lost, JournalEntry)
    assert (lost.kind, lost.say) == ("WitnessLost", True)
    assert lost.text.startswith("etcd is away; training goes on")
    assert is_away(made, asked_s=12.0, now_s=13.0) == []
    assert (made.is_reached, made.why) == (False, "etcd is away")
    assert made.has_been_away(2.0, now_s=13.0)
    assert not made.has_been_away(2.1, now_s=13.0)
    assert not made.has_been_there(0.0, now_s=13.0)
    (back,) = says(made, asked_s=14.0, now_s=14.5)
    assert isinstance(back, JournalEntry)
    assert back.text == "the witness is reached again, after 3.5 s"
    assert not made.has_been_away(0.0, now_s=14.5)


def test_one_that_is_away_from_the_start_is_told() -> None:
    assert is_away(WitnessView(is_used=True), asked_s=1.0, now_s=2.0) != []


def test_older_answer_than_the_newest_says_nothing_of_now() -> None:
    made = WitnessView(is_used=True)
    says(made, asked_s=5.0, now_s=5.1)
    assert is_away(made, asked_s=4.0, now_s=5.5) == []
    assert made.is_reached
