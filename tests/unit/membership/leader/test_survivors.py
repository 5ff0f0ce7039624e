"""Which ranks keep their processes: all parked ones, or none and the reason."""

from typing import Any

import pytest

from ftrun.membership.leader.survivors import notes_of_survivors, with_survivors
from ftrun.wire.cluster.generation import FailureHistory, GenerationPlan
from ftrun.wire.cluster.membership import ParkedRank, Promise
from tests.unit.recovery.made import card, cards, fields, plan, promise

PREVIOUS = plan(4, "abc")
NEXT = plan(5, "abc", restore=(4, 20), restore_world_size=3)


def parked(node: str, *ranks: ParkedRank, **changes: object) -> Promise:
    return promise(5, node, parked=ranks, **{"parked_in": 4, **changes})


def decided(*promises: Promise, following: GenerationPlan = NEXT, **changes: Any) -> GenerationPlan:
    known = {one.card.node_id: one for one in promises}
    given = {"max_renewals": 16, "previous": PREVIOUS, **changes}
    previous = given.pop("previous")
    return with_survivors(following, previous, known, **given)


def of_three(**changes: object) -> list[Promise]:
    """The rank of node b has ended."""
    return [
        parked("a", ParkedRank(0, 18, 2)),
        parked("b"),
        parked("c", ParkedRank(2, 20, 0), **changes),
    ]


def test_the_parked_ranks_stay_and_the_others_start_anew() -> None:
    found = decided(*of_three())
    assert (found.staying, found.not_staying) == ([0, 2], "")
    (entry,) = notes_of_survivors(found)
    assert fields(entry) == {
        "kind": "ranks_stayed",
        "text": "generation 5: 2 of 3 ranks stay",
        "generation": 5,
        "staying": [0, 2],
        "started": [1],
    }
    assert not entry.announce


def test_the_ranks_of_a_lost_node_may_be_on_another_node() -> None:
    a, c = parked("a", ParkedRank(0, 18, 2)), parked("c", ParkedRank(2, 20, 0))
    following = plan(5, ["a", card("d"), "c"], restore=(4, 20), restore_world_size=3)
    assert decided(a, promise(5, "d"), c, following=following).staying == [0, 2]


@pytest.mark.parametrize(
    ("reason", "changes", "following"),
    [
        ("no version to resume from", {}, {"restore": None}),
        ("has 4 ranks now", {}, {"members": "abcd"}),
        ("has 3 ranks now, and had another", {}, {"restore_world_size": 4}),
        ("numerical anomaly", {}, {"history": FailureHistory(bad_version=(4, 22))}),
        ("numerical anomaly", {}, {"skip_batches": 2}),
        ("on node c rank 2 has made no step", {"stay_problem": "rank 2 has made no step"}, {}),
        ("node c gets other ranks", {}, {"members": "cba"}),
        ("of node c have run generation 3", {"parked_in": 3}, {}),
        ("rank 2 can go to steps 21 to 40, and step 20 is restored",
         {"parked": (ParkedRank(2, 21, 0, 40),)}, {}),
        ("steps 0 to 19", {"parked": (ParkedRank(2, 0, 0, 19),)}, {}),
        ("rank 2 has stayed 16 times", {"parked": (ParkedRank(2, 20, 16),)}, {}),
    ],
)  # fmt: skip
def test_one_reason_starts_all_ranks_anew(
    reason: str, changes: dict[str, Any], following: dict[str, Any]
) -> None:
    promises = of_three(**{key: value for key, value in changes.items() if key != "parked"})
    if "parked" in changes:
        promises[2] = parked("c", *changes["parked"])
    members = following.pop("members", "abc")
    new = plan(5, members, **{"restore": (4, 20), "restore_world_size": 3, **following})
    found = decided(*promises, promise(5, "d"), following=new)
    assert found.staying == []
    assert reason in found.not_staying
    (entry,) = notes_of_survivors(found)
    assert entry.announce
    assert fields(entry)["text"] == f"generation 5: no rank stays, because {found.not_staying}"


def test_without_a_parked_rank_or_an_earlier_generation_none_stays() -> None:
    nodes = [promise(5, one) for one in cards("abc")]
    assert decided(*nodes).not_staying == "no rank is parked"
    first = decided(*nodes, previous=None)
    assert first == NEXT
    assert notes_of_survivors(first) == []
