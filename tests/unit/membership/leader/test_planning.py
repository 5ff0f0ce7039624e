"""Planning: the promises of a ballot yield a generation, or the report of missing state."""

import pytest

from ftrun.config.cluster import MembershipSettings
from ftrun.errors import ExitCode
from ftrun.membership.ballots import Ballot, electorate
from ftrun.membership.leader import planning
from ftrun.membership.leader.planning import RestoreStateMissing, make_plan
from ftrun.membership.leader.rank_assignment import RankAssignment
from ftrun.recovery.commands import EndRun
from ftrun.wire.cluster.generation import (
    FailureHistory,
    GenerationPlan,
    NetworkPlan,
    Rail,
    RestoreSource,
    VersionPair,
    VoterSet,
)
from ftrun.wire.cluster.membership import Promise
from ftrun.wire.messages.smp import Inventory
from tests.unit.recovery.made import SETTINGS, card, cards, offer, part, plan, promise, settings

WITH_CHECKPOINTS = settings(has_checkpoints=True, failure_timeout_s=3.0, last_call_timeout_s=5.0)


def ballot(promises: list[Promise], base: GenerationPlan | None = None) -> Ballot:
    needs = {base.configuration_id: electorate(base.voters)} if base is not None else {}
    at = base.configuration_id if base is not None else (-1, 0)
    made = Ballot(promises[0].generation, "b was lost", at, needs)
    for one in promises:
        made.take_promise(one)
    return made


def planned(
    promises: list[Promise],
    members: str,
    previous: GenerationPlan | None = None,
    cluster_size: MembershipSettings = SETTINGS,
    *,
    waited_s: float = 0.0,
    bad_version: VersionPair | None = None,
    skip_to: int = -1,
) -> GenerationPlan | RestoreStateMissing | EndRun:
    here = {one.card.node_id: one.card for one in promises}
    chosen, spares = [here.pop(one) for one in members], list(here.values())
    return make_plan(
        ballot(promises, previous),
        RankAssignment(tuple(chosen), tuple(spares)),
        previous,
        cluster_size,
        leader="a",
        history=FailureHistory(restarts=3, bad_version=bad_version, skip_to=skip_to),
        waited_s=waited_s,
    )


def holding(
    generation: int, node_id: str, at: VersionPair, group: str, **changes: object
) -> Promise:
    """A member that holds its shard of a version, and its part in the protection."""
    inventory = Inventory([offer(group.index(node_id), at, len(group))], [part(node_id, at, group)])
    given = {"holdings": inventory, "knows": generation - 1, **changes}
    return promise(generation, node_id, **given)


# --- a plan -----------------------------------------------------------------------------------


def test_a_first_generation_begins_with_nothing() -> None:
    promises = [
        promise(0, card("b", num_ranks=2), store_port=7, smp_port=8),
        promise(0, card("a", num_ranks=4), store_port=9, smp_port=10),
        promise(0, "c"),
    ]
    found = planned(promises, "ba")
    assert isinstance(found, GenerationPlan)
    assert (found.generation, found.leader, found.reason) == (0, "a", "b was lost")
    assert [(node.node_id, list(node.ranks)) for node in found.members] == [
        ("b", [0, 1]),
        ("a", [2, 3, 4, 5]),
    ]
    assert [one.node_id for one in found.spares] == ["c"]
    # The first member hosts the store.
    assert (found.store_host, found.store_port) == ("b.local", 7)
    assert found.smp_ports == {"a": 10, "b": 8, "c": 2000}
    assert found.history == FailureHistory(restarts=3)
    assert (found.restore, found.committed, found.ancestry) == (None, None, [])
    assert found.restore_reason == "no node holds a snapshot"
    assert found.decided_by == [VoterSet(-1, [("a", 1), ("b", 1), ("c", 1)])]


def test_the_newest_version_is_continued_from() -> None:
    previous = plan(1, "abc", ancestry=[(0, 4)])
    promises = [holding(2, one, (1, 8), "abc", committed=(1, 7)) for one in "ac"]
    found = planned(promises, "ac", previous)
    assert isinstance(found, GenerationPlan)
    assert found.restore == (1, 8)
    assert found.restore_world_size == 3
    assert found.is_resized
    assert found.sources == [RestoreSource(["a", "b", "c"], [[0], [1], [2]], 1, 1)]
    assert found.committed == (1, 7)
    assert found.ancestry == [(0, 4), (1, 8)]
    assert found.decided_by == [VoterSet(1, [("a", 1), ("b", 1), ("c", 1)])]


def test_an_unprotected_slot_of_a_spare_is_not_fetched() -> None:
    """The newest version of rank 1 is only on c; if c has no ranks, the older version is used."""
    promises = []
    for one, held in (("a", [(0, 7), (0, 8)]), ("b", [(1, 7)]), ("c", [(1, 8)])):
        has = Inventory([offer(rank, (1, step), 2) for rank, step in held], [])
        promises.append(promise(2, one, holdings=has, knows=1, committed=(1, 7)))
    with_c = planned(promises, "ac", plan(1, "ac"))
    without_c = planned(promises, "ab", plan(1, "ab"))
    assert isinstance(with_c, GenerationPlan)
    assert with_c.restore == (1, 8)
    assert isinstance(without_c, GenerationPlan)
    assert without_c.restore == (1, 7)


# --- protection groups ------------------------------------------------------------------------


def groups(
    members: str,
    previous: GenerationPlan | None = None,
    cluster_size: MembershipSettings = SETTINGS,
) -> tuple[list[list[str]], int]:
    found = planned([promise(2, one, knows=1) for one in members], members, previous, cluster_size)
    assert isinstance(found, GenerationPlan)
    return found.groups, found.parity


def test_a_node_alone_is_protected_by_none() -> None:
    assert groups("a") == ([], 0)


def test_parity_is_chosen_by_the_number_of_nodes_or_by_the_user() -> None:
    assert groups("abcd") == ([["a", "b", "c", "d"]], 1)
    assert groups("abcdefgh") == ([list("abcdefgh")], 2)
    assert groups("abcd", cluster_size=settings(erasure_parity=2)) == ([["a", "b", "c", "d"]], 2)
    # The number of other nodes limits it.
    assert groups("ab", cluster_size=settings(erasure_parity=3)) == ([["a", "b"]], 1)
    assert groups("abcd", cluster_size=settings(erasure_parity=0))[1] == 0


def test_the_user_may_choose_how_large_groups_are() -> None:
    cluster_size = settings(erasure_data=1, erasure_parity=1)
    assert groups("abcd", cluster_size=cluster_size) == ([["a", "c"], ["b", "d"]], 1)


def test_a_ring_has_all_nodes_of_a_small_run_in_the_order_of_their_ranks() -> None:
    mirror = settings(erasure_ring=True, erasure_parity=1)
    found = planned([promise(2, one, knows=1) for one in "abcd"], "abcd", None, mirror)
    assert isinstance(found, GenerationPlan)
    assert (found.groups, found.parity, found.is_ring) == ([list("abcd")], 1, True)
    previous = plan(1, "abcd", groups=[list("abcd")], parity=1, is_ring=True)
    after = planned([promise(2, one, knows=1) for one in "axcd"], "axcd", previous, mirror)
    assert isinstance(after, GenerationPlan)
    assert (after.groups, after.is_ring) == ([list("axcd")], True)
    alone = planned([promise(2, "a", knows=1)], "a", None, mirror)
    assert isinstance(alone, GenerationPlan)
    assert (alone.groups, alone.is_ring) == ([], False)


def test_a_replacement_takes_the_place_of_the_node_whose_ranks_it_runs() -> None:
    previous = plan(1, "abcd", groups=[["a", "d"], ["c", "b"]], parity=1)
    assert groups("axcd", previous) == ([["a", "d"], ["c", "x"]], 1)


def test_groups_are_recreated_where_the_number_of_nodes_changes() -> None:
    previous = plan(1, "abcd", groups=[["a", "d"], ["c", "b"]], parity=1)
    assert groups("abc", previous) == ([["a", "b", "c"]], 1)


def test_the_nodes_of_a_rack_are_spread_over_the_groups() -> None:
    racks = {"a": "r1", "b": "r2", "c": "r1", "d": "r2"}
    here = [promise(0, card(one, domain=rack)) for one, rack in racks.items()]
    found = planned(here, "abcd", cluster_size=settings(erasure_data=1, erasure_parity=1))
    assert isinstance(found, GenerationPlan)
    for group in found.groups:
        assert {racks[one] for one in group} == {"r1", "r2"}


# --- state that is lost -----------------------------------------------------------------------

RAN = plan(1, "abc")


def test_nodes_that_may_hold_what_was_committed_are_waited_for() -> None:
    found = planned([holding(2, "a", (1, 8), "abc", committed=(1, 8))], "a", RAN)
    assert isinstance(found, RestoreStateMissing)
    assert "step 8 (generation 1) was committed and is lost" in found.reason
    assert found.reason.endswith("b, c may hold it and cannot be reached")
    assert found.end.exit_code == ExitCode.STATE_LOST
    assert "--checkpoint-dir" in found.end.advice


def test_an_older_version_is_taken_only_where_the_nodes_that_hold_the_newer_do_not_return() -> None:
    promises = [holding(2, one, (1, 8), "abc", committed=(1, 9)) for one in "ab"]
    found = planned(promises, "ab", RAN, waited_s=888.9)
    assert isinstance(found, RestoreStateMissing)
    assert "c may hold it" in found.reason
    assert found.reason.endswith("; without them the run resumes from step 8 (generation 1)")
    # 11 s before the pause of 900 s would end the run.
    found = planned(promises, "ab", RAN, waited_s=889.0)
    assert isinstance(found, GenerationPlan)
    assert (found.restore, found.committed) == ((1, 8), (1, 8))
    assert "step 9 (generation 1) was committed and is lost" in found.restore_reason
    short = settings(pause_timeout_s=20.0)
    assert isinstance(planned(promises, "ab", RAN, short, waited_s=10.9), RestoreStateMissing)
    assert isinstance(planned(promises, "ab", RAN, short, waited_s=11.0), GenerationPlan)


def test_the_first_version_is_required_if_the_leader_may_have_committed_it() -> None:
    """The leader commits and is cut off before a node receives it; more than m nodes are lost."""
    promises = [holding(2, one, (1, 8), "abcd") for one in "bc"]
    promises.append(promise(2, "d", knows=1))
    found = planned(promises, "bcd", plan(1, "abcd"))
    assert isinstance(found, RestoreStateMissing)
    assert "step 8 (generation 1) may have been committed and is lost" in found.reason
    words = "a may hold it and cannot be reached; without them the run resumes from the beginning"
    assert found.reason.endswith(words)
    found = planned(promises, "bcd", plan(1, "abcd"), waited_s=889.0)
    assert isinstance(found, GenerationPlan)
    assert (found.restore, found.committed) == (None, None)
    assert "may have been committed and is lost" in found.restore_reason


def test_where_all_that_may_hold_it_are_here_the_older_version_is_continued_from() -> None:
    promises = [holding(2, one, (1, 8), "abc", committed=(1, 9)) for one in "abc"]
    found = planned(promises, "abc", RAN)
    assert isinstance(found, GenerationPlan)
    assert (found.restore, found.committed) == ((1, 8), (1, 8))
    assert "was committed and is lost" in found.restore_reason


def test_what_numerical_anomalies_have_spoiled_is_not_continued_from() -> None:
    promises = [
        promise(
            2,
            one,
            committed=(1, 9),
            knows=1,
            holdings=Inventory([offer("abc".index(one), at, 3) for at in ((1, 8), (1, 9))]),
        )
        for one in "abc"
    ]
    found = planned(promises, "abc", RAN, bad_version=(1, 9))
    assert isinstance(found, GenerationPlan)
    assert (found.restore, found.committed) == ((1, 8), None)
    assert found.skip_batches == 0
    without = planned(promises, "abc", RAN, bad_version=(1, 9), skip_to=10)
    assert isinstance(without, GenerationPlan)
    assert without.skip_batches == 2, "of steps 9 and 10"
    nothing = planned(promises, "abc", RAN, bad_version=(1, 8))
    assert isinstance(nothing, EndRun)
    assert nothing.exit_code == ExitCode.DO_NOT_RESTART
    assert "no version before step 8 (generation 1) is left" in nothing.reason


def test_batches_stay_left_out_until_a_later_version_is_continued_from() -> None:
    def promises(generation: int, at: VersionPair) -> list[Promise]:
        offers = [Inventory([offer("abc".index(one), at, 3)]) for one in "abc"]
        return [
            promise(generation, one, committed=at, knows=generation - 1, holdings=held)
            for one, held in zip("abc", offers, strict=True)
        ]

    before = planned(promises(2, (1, 8)), "abc", RAN, bad_version=(1, 9), skip_to=10)
    assert isinstance(before, GenerationPlan)
    again = planned(promises(3, (1, 8)), "abc", before)
    assert isinstance(again, GenerationPlan)
    assert (again.restore, again.skip_batches) == ((1, 8), 2)
    later = planned(promises(3, (2, 12)), "abc", before)
    assert isinstance(later, GenerationPlan)
    assert (later.restore, later.skip_batches) == ((2, 12), 0)


def test_if_no_node_holds_it_the_run_ends() -> None:
    here = [promise(2, one, committed=(1, 8), knows=1) for one in "abc"]
    found = planned(here, "abc", RAN)
    assert isinstance(found, EndRun)
    assert found.exit_code == ExitCode.STATE_LOST
    assert found.reason.startswith("the state of the run is lost: step 8 (generation 1)")


def test_with_checkpoints_the_others_have_a_limited_time_to_return() -> None:
    here = [promise(2, "a", committed=(1, 8), knows=1)]
    before = planned(here, "a", RAN, WITH_CHECKPOINTS, waited_s=10.9)
    assert isinstance(before, RestoreStateMissing)
    found = planned(here, "a", RAN, WITH_CHECKPOINTS, waited_s=11.0)
    assert isinstance(found, GenerationPlan)
    assert (found.restore, found.committed) == (None, None)
    assert "was committed and is lost" in found.restore_reason
    # Without a checkpoint the run has nothing else to resume from, for any waiting time.
    assert isinstance(planned(here, "a", RAN, waited_s=1e6), RestoreStateMissing)


def test_what_was_committed_is_unknown_where_none_is_here_that_ran_and_remembers() -> None:
    """A spare has no memory of it, nor has a member's process that restarted without memory."""
    previous = plan(1, "ab", spares="s")
    here = [promise(2, "s", knows=1), promise(2, "a", knows=-1)]
    found = planned(here, "sa", previous)
    assert isinstance(found, RestoreStateMissing)
    assert found.reason.startswith("no present node has the memory of generation 1")
    assert found.reason.endswith("b may hold it and cannot be reached")
    remembers = [promise(2, "s", knows=1), promise(2, "a", knows=0)]
    assert isinstance(planned(remembers, "sa", previous), GenerationPlan)


def test_a_node_that_left_may_have_an_older_version_than_the_lost_members() -> None:
    """A lone member commits by itself, and no other node knows of it: seed 1225085."""
    previous = plan(1, "b", spares="ac", restore=(0, 9), ancestry=[(0, 9)])
    kept = promise(2, "a", knows=1, committed=(0, 9), holdings=Inventory([offer(0, (0, 9), 1)]))
    found = planned([kept, promise(2, "c", knows=1)], "ca", previous)
    assert isinstance(found, GenerationPlan)
    assert found.restore == (0, 9)
    assert found.restore_reason.endswith(
        "no present node has the memory of generation 1, and its steps are lost"
    )
    returns = promise(2, "b", knows=1, committed=(0, 9))
    found = planned([kept, returns], "ba", previous)
    assert isinstance(found, GenerationPlan)
    assert "lost" not in found.restore_reason


def test_a_version_that_is_here_is_continued_from_whichever_node_remembers() -> None:
    previous = plan(1, "ab")
    found = planned([holding(2, one, (1, 8), "ab", knows=-1) for one in "ab"], "ab", previous)
    assert isinstance(found, GenerationPlan)
    assert found.restore == (1, 8)
    assert "lost" not in found.restore_reason


def test_a_run_without_a_commit_begins_where_the_last_generation_began() -> None:
    previous = plan(1, "ab", restore_reason="a checkpoint was read")
    found = planned([promise(2, one, knows=1) for one in "ab"], "ab", previous)
    assert isinstance(found, GenerationPlan)
    assert (found.restore, found.restore_reason) == (None, "a checkpoint was read")


def test_where_the_last_generation_began_elsewhere_it_reports_why_it_does_not() -> None:
    previous = plan(1, "ab", restore=(0, 4), restore_reason="step 4")
    found = planned([promise(2, one, knows=1) for one in "ab"], "ab", previous)
    assert isinstance(found, GenerationPlan)
    assert (found.restore, found.restore_reason) == (None, "no node holds a snapshot")


def test_cards_of_the_promises_are_those_of_the_plan() -> None:
    here = [promise(2, one, knows=1) for one in cards([card("a", 5), card("b", 6)])]
    found = planned(here, "ab", plan(1, "ab"))
    assert isinstance(found, GenerationPlan)
    assert [node.card.incarnation for node in found.members] == [5, 6]


def test_ranks_meet_on_the_first_rail_of_the_plan_where_the_node_has_it() -> None:
    rails = [Rail("eth0", "10.0.0.1", 24), Rail("eth1", "10.1.0.1", 24)]
    others = [Rail("eth0", "10.0.0.2", 24), Rail("eth1", "10.1.0.2", 24)]
    here = [card("a", rails=rails), card("b", rails=others)]
    for chosen, host in ((["eth1", "eth0"], "10.1.0.1"), (["ib9"], "a.local"), ([], "a.local")):
        places = RankAssignment(tuple(here), (), NetworkPlan(order=["a", "b"], rails=chosen))
        found = make_plan(
            ballot([promise(0, one) for one in here]),
            places,
            None,
            SETTINGS,
            leader="a",
            history=FailureHistory(),
            waited_s=0.0,
        )
        assert isinstance(found, GenerationPlan)
        assert found.store_host == host
        assert found.paths == places.paths


def test_a_bug_in_what_is_known_of_rails_does_not_end_the_leader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def breaks(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(planning, "match_rails", breaks)
    places = RankAssignment((card("a"), card("b")), (), paths=NetworkPlan(rails=["eth0"]))
    assert planning._store_host(places) == "a.local"
