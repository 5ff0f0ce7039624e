"""Restore point: the newest version that is completely available and was not abandoned."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from ftrun.ids import version
from ftrun.recovery.restore_point import ancestry, choose, is_valid
from ftrun.wire.cluster.generation import GenerationPlan, RestoreSource, VersionPair
from ftrun.wire.messages.smp import Inventory, ProtectionPart
from tests.unit.recovery.made import offer, part, plan

Holdings = dict[str, Inventory]


def held(at: VersionPair, here: str, group: str, *, parity: int = 1, **changes: object) -> Holdings:
    """A version that a group of nodes with one rank each holds, if they are present."""
    return {
        one: Inventory(
            [offer(group.index(one), at, len(group))],
            [msgspec.structs.replace(part(one, at, group, parity=parity), **changes)],
        )
        for one in here
    }


def both(*several: Holdings) -> Holdings:
    """The versions that the nodes hold."""
    found: Holdings = {}
    for holdings in several:
        for node_id, one in holdings.items():
            before = found.get(node_id, Inventory([]))
            found[node_id] = Inventory(
                [*before.offers, *one.offers], [*before.protected, *one.protected]
            )
    return found


def bare(at: VersionPair, here: str, group: str) -> Holdings:
    """The same without any protection."""
    return {
        node_id: msgspec.structs.replace(one, protected=[])
        for node_id, one in held(at, here, group).items()
    }


def with_part(holdings: Holdings, node_id: str, **changes: object) -> Holdings:
    """Changes the parts of one node."""
    one = holdings[node_id]
    parts = [msgspec.structs.replace(found, **changes) for found in one.protected]
    return holdings | {node_id: msgspec.structs.replace(one, protected=parts)}


def source(
    group: str, *, parity: int = 1, generation: int = 0, first_rank: int = 0
) -> RestoreSource:
    ranks = [[rank] for rank, _ in enumerate(group, first_rank)]
    return RestoreSource(list(group), ranks, parity, generation)


# --- losses that m tolerates ------------------------------------------------------------------


@effort(deadline=None)
@given(st.integers(2, 6), st.data())
def test_a_version_survives_the_loss_of_any_m_nodes_and_no_more(
    num_nodes: int, data: st.DataObject
) -> None:
    group = "abcdef"[:num_nodes]
    parity = data.draw(st.integers(1, num_nodes - 1))
    lost = data.draw(st.sets(st.sampled_from(group), max_size=num_nodes))
    here = "".join(one for one in group if one not in lost)
    found = choose(held((0, 8), here, group, parity=parity), None)
    if len(lost) <= parity:
        assert found.version == version(0, 8)
        assert found.world_size == num_nodes
        assert found.sources == (source(group, parity=parity),)
        assert found.survives == parity - len(lost)
    else:
        assert found.version is None
        assert not found.sources
        if here:
            assert found.holders == lost
            assert f"at most {parity} may be missing" in found.reason
            assert all(one in found.reason for one in lost)


@effort(deadline=None)
@given(st.sets(st.sampled_from("abcd")), st.sets(st.sampled_from("efgh")))
def test_each_group_bears_its_own_losses(lost: set[str], lost_too: set[str]) -> None:
    holdings: Holdings = {}
    for group, first_rank in (("abcd", 0), ("efgh", 4)):
        for rank, one in enumerate(group, first_rank):
            found = part(one, (0, 8), group, first_rank=first_rank, world_size=8)
            if one not in lost | lost_too:
                holdings[one] = Inventory([offer(rank, (0, 8), 8)], [found])
    chosen = choose(holdings, None)
    if len(lost) <= 1 and len(lost_too) <= 1:
        assert chosen.version == version(0, 8)
        wanted = [source("abcd"), source("efgh", first_rank=4)]
        assert sorted(chosen.sources, key=lambda one: one.node_ids) == wanted
    else:
        assert chosen.version is None


def test_without_protection_the_slots_themselves_must_be_here() -> None:
    found = choose(bare((0, 8), "ab", "ab"), None)
    assert found.version == version(0, 8)
    assert found.sources == (RestoreSource(["a"], [[0]], 0, -1), RestoreSource(["b"], [[1]], 0, -1))
    assert found.survives == 0
    lost = choose(bare((0, 8), "a", "ab"), None)
    assert lost.version is None
    assert "no present node holds rank 1, which is not protected" in lost.reason


def test_several_ranks_that_are_missing_are_named_in_the_plural() -> None:
    lost = choose(bare((0, 8), "a", "abc"), None)
    assert "no present node holds ranks 1, 2, which are not protected" in lost.reason
    gone = choose(held((0, 8), "ab", "abcd"), None)
    assert "ranks 2, 3 cannot be rebuilt: missing of the group a, b, c, d: c, d" in gone.reason


def test_slots_that_lie_on_two_nodes_are_taken_from_one() -> None:
    holdings = both(bare((0, 8), "ab", "ab"), {"c": Inventory([offer(1, (0, 8), 2)])})
    assert [one.node_ids for one in choose(holdings, None).sources] == [["a"], ["b"]]


def test_where_nothing_is_here_is_reported() -> None:
    found = choose({}, None)
    assert (found.version, found.reason) == (None, "no node holds a snapshot")


def test_without_its_mirror_a_lost_rank_cannot_be_rebuilt() -> None:
    holdings = held((0, 8), "abd", "abcd")
    corrupted = with_part(holdings, "d", mirrors=["x"])
    found = choose(corrupted, None)
    assert found.version is None
    assert "rank 2 cannot be rebuilt: not all nodes have protected this version" in found.reason
    # Without a loss the same version needs no mirror.
    assert choose(with_part(held((0, 8), "abcd", "abcd"), "d", mirrors=[]), None).version


def test_a_part_that_is_not_complete_counts_as_missing() -> None:
    holdings = with_part(held((0, 8), "abd", "abcd"), "a", is_complete=False)
    found = choose(holdings, None)
    assert found.version is None
    assert "missing of the group a, b, c, d: a, c; at most 1 may be missing" in found.reason


@pytest.mark.parametrize("is_filled_first", [False, True])
def test_a_refilled_part_does_not_hide_the_complete_one(is_filled_first: bool) -> None:
    whole = held((0, 8), "abd", "abcd")
    filling = held((0, 8), "abd", "abcd", is_complete=False, mirrors=[])
    holdings = both(filling, whole) if is_filled_first else both(whole, filling)
    assert choose(holdings, None).version == version(0, 8)


def test_a_node_without_its_slot_counts_as_missing() -> None:
    holdings = held((0, 8), "abd", "abcd")
    holdings["a"] = msgspec.structs.replace(holdings["a"], offers=[])
    assert choose(holdings, None).version is None


def test_a_version_of_which_not_all_ranks_are_protected_is_not_rebuilt() -> None:
    """One of two groups has protected it."""
    holdings = {
        one: Inventory([offer(rank, (0, 8), 4)], [part(one, (0, 8), "ab", world_size=4)])
        for rank, one in enumerate("ab")
    }
    holdings |= {one: Inventory([offer(at, (0, 8), 4)]) for at, one in ((2, "c"), (3, "d"))}
    found = choose(holdings, None)
    assert [one.parity for one in found.sources] == [0] * 4, "all slots are present"
    del holdings["a"]
    found = choose(holdings, None)
    assert found.version is None
    assert "rank 0 cannot be rebuilt: not all nodes have protected this version" in found.reason


# --- of several versions ----------------------------------------------------------------------


def test_the_newest_version_that_can_be_had_is_taken() -> None:
    holdings = both(held((0, 8), "abc", "abc"), held((0, 9), "abc", "abc"))
    assert choose(holdings, None).version == version(0, 9)
    older = both(held((0, 8), "abc", "abc"), bare((0, 9), "ab", "abc"))
    assert choose(older, None).version == version(0, 8)


def test_a_later_generation_counts_as_newer_whatever_its_step() -> None:
    holdings = both(held((0, 9), "abc", "abc"), held((1, 2), "abc", "abc"))
    assert choose(holdings, None).version == version(1, 2)


def test_of_a_version_in_two_worlds_the_one_that_bears_more_is_taken() -> None:
    """After a change of the number of nodes."""
    weak = bare((0, 8), "abcd", "abcd")
    strong = held((0, 8), "ab", "ab", protected_in=1)
    found = choose(both(weak, strong), None)
    assert (found.world_size, found.sources) == (2, (source("ab", generation=1),))
    strong = held((0, 8), "abcd", "abcd", protected_in=1)
    found = choose(both(bare((0, 8), "ab", "ab"), strong), None)
    assert found.world_size == 4


def test_of_a_version_in_two_worlds_that_bear_the_same_what_was_protected_last_is_taken() -> None:
    for last, wanted in ((2, 2), (0, 4)):
        four = held((0, 8), "abcd", "abcd", protected_in=1)
        two = held((0, 8), "ab", "ab", protected_in=last)
        assert choose(both(four, two), None).world_size == wanted


def test_of_a_version_in_two_worlds_that_bear_the_same_the_committed_one_is_taken() -> None:
    committed = held((0, 8), "abc", "abcd", protected_in=1, is_committed=True)
    newer = held((0, 8), "ab", "abe", protected_in=2)
    assert choose(both(committed, newer), None).world_size == 4
    newer = held((0, 8), "ab", "abe", protected_in=2, is_committed=True)
    assert choose(both(committed, newer), None).world_size == 3


# --- rule 2: abandoned versions ---------------------------------------------------------------


@st.composite
def histories(draw: st.DrawFn) -> list[GenerationPlan]:
    """Generations; each starts from the beginning or from a valid version of the last one."""
    plans: list[GenerationPlan] = []
    for generation in range(draw(st.integers(1, 9))):
        previous = plans[-1] if plans else None
        offered = [version(at, step) for at in range(generation) for step in range(4)]
        valid = [one for one in offered if is_valid(one, previous)]
        restored = draw(st.sampled_from([None, *valid]))
        pairs = ancestry(restored, previous)
        restore = None if restored is None else (int(restored.generation), int(restored.step))
        plans.append(plan(generation, "ab", restore=restore, ancestry=pairs))
    return plans


@effort(max_examples=100, deadline=None)
@given(histories(), st.integers(0, 9), st.integers(0, 4))
def test_a_version_counts_only_where_the_newest_generation_came_from_it(
    plans: list[GenerationPlan], generation: int, step: int
) -> None:
    newest = plans[-1]
    is_ancestor = generation >= newest.generation
    at = newest.restore
    while at is not None:
        is_ancestor |= at[0] == generation and step <= at[1]
        at = plans[at[0]].restore
    assert is_valid(version(generation, step), newest) is is_ancestor


def test_before_the_first_generation_every_version_counts() -> None:
    assert is_valid(version(0, 8), None)


def test_an_ancestry_ends_where_no_slot_holds_a_version() -> None:
    previous = plan(40, "ab", ancestry=[(at, at) for at in range(40)])
    found = ancestry(version(39, 7), previous)
    assert found == [*((at, at) for at in range(24, 39)), (39, 7)]


def test_what_a_later_generation_left_behind_never_comes_back() -> None:
    newest = plan(2, "abc", restore=(1, 5), ancestry=[(0, 9), (1, 5)])
    for at, wanted in (((1, 6), None), ((1, 5), (1, 5)), ((0, 9), (0, 9)), ((0, 10), None)):
        found = choose(held(at, "abc", "abc"), newest).version
        assert found == (version(*wanted) if wanted is not None else None)


# --- rule 3: parts that fit together ----------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        {"protected_in": 1},
        {"parity": 0},
        {"members": part("c", (0, 8), "acb").members},
        {"step": 9},
        {"generation": 1},
    ],
    ids=lambda one: next(iter(one)),
)
def test_parts_of_another_protection_do_not_fit(other: dict[str, object]) -> None:
    fits = held((0, 8), "ac", "abc")
    assert choose(fits, None).version == version(0, 8)
    found = choose(with_part(fits, "c", **other), None)
    assert found.version is None


# --- rule 4: uncommitted versions -------------------------------------------------------------


def test_a_version_that_is_protected_less_than_the_commit_is_not_rebuilt() -> None:
    committed = held((0, 8), "abc", "abcd", parity=2, is_committed=True)
    weaker = held((0, 9), "abc", "abcd", parity=1)
    assert choose(both(committed, weaker), None).version == version(0, 8)
    # With the commit, or without a loss, it counts.
    equal = held((0, 9), "abc", "abcd", parity=2)
    assert choose(both(committed, equal), None).version == version(0, 9)
    whole = both(
        held((0, 8), "abcd", "abcd", parity=2, is_committed=True),
        held((0, 9), "abcd", "abcd", parity=1),
    )
    found = choose(whole, None)
    assert found.version == version(0, 9)
    assert [one.parity for one in found.sources] == [0] * 4, "and its protection is not relied on"


def test_what_was_committed_itself_is_rebuilt_however_it_is_protected() -> None:
    holdings = both(
        held((0, 8), "abc", "abcd", parity=2, is_committed=True),
        held((0, 9), "abc", "abcd", parity=1, is_committed=True),
    )
    assert choose(holdings, None).version == version(0, 9)


def test_the_commit_of_the_version_in_the_world_that_bears_most_is_the_measure() -> None:
    committed = both(
        held((0, 8), "abc", "abcd", parity=2, is_committed=True),
        bare((0, 8), "ab", "ab"),
    )
    weaker = held((0, 9), "abc", "abcd", parity=1)
    assert choose(both(committed, weaker), None).version == version(0, 8)


# --- rule 5: several protections of one version -----------------------------------------------


@effort(deadline=None)
@given(st.permutations([(1, True), (2, True), (3, False)]))
def test_of_several_protections_the_one_that_bears_most_is_relied_on(
    order: list[tuple[int, bool]],
) -> None:
    """The third has lost a part, so the second is used, the newest complete one."""
    holdings: Holdings = {}
    for generation, is_whole in order:
        one = held((0, 8), "abc", "abc", protected_in=generation)
        holdings = both(holdings, one if is_whole else with_part(one, "b", is_complete=False))
    assert choose(holdings, None).sources == (source("abc", generation=2),)


def test_a_protection_that_bears_more_comes_before_a_newer_one() -> None:
    holdings = both(
        held((0, 8), "abc", "abc", parity=2, protected_in=1),
        held((0, 8), "abc", "abc", parity=1, protected_in=2),
    )
    assert choose(holdings, None).sources == (source("abc", parity=2, generation=1),)


def test_of_equal_protections_the_newest_that_was_committed_is_relied_on() -> None:
    """An unreachable node has a part of the committed one; its part of the newest is unknown."""
    older = held((0, 8), "abc", "abcd", protected_in=0, is_committed=True)
    committed = held((0, 8), "abc", "abcd", protected_in=1, is_committed=True)
    newest = held((0, 8), "abc", "abcd", protected_in=2)
    assert choose(both(older, newest), None).sources == (source("abcd", generation=0),)
    found = choose(both(older, committed, newest), None)
    assert found.sources == (source("abcd", generation=1),)
    # A lost part counts for more.
    lost = with_part(committed, "b", is_complete=False)
    assert choose(both(lost, newest), None).sources == (source("abcd", generation=2),)


def test_a_protection_without_the_mirror_of_a_lost_rank_comes_after_an_older_one_with_it() -> None:
    """`d` took the place of `a`, and its mirror of `b` is damaged; `a` is here as a spare."""
    holdings = both(
        held((0, 8), "a", "ab", protected_in=0),
        held((0, 8), "d", "db", protected_in=1, is_committed=True, mirrors=[]),
    )
    assert choose(holdings, None).sources == (source("ab", generation=0),)
    # Without a loss the newest committed one is relied on.
    here = both(holdings, bare((0, 8), "b", "ab"))
    whole = both(here, held((0, 8), "b", "db", protected_in=1, is_committed=True))
    assert choose(whole, None).sources == (source("db", generation=1),)


# --- known commits ----------------------------------------------------------------------------


def test_where_the_commit_is_lost_the_older_version_is_named_as_such() -> None:
    holdings = both(held((0, 8), "abc", "abc"), bare((0, 9), "bc", "abc"))
    found = choose(holdings, None, committed=[(0, 9), (0, 7)])
    assert found.version == found.committed == version(0, 8)
    assert found.wanted == version(0, 9)
    assert "step 9 (generation 0) was committed and is lost: " in found.reason
    assert "no present node holds rank 0" in found.reason


def test_where_nothing_can_be_had_the_commit_is_named() -> None:
    found = choose(held((0, 9), "c", "abc"), None, committed=[(0, 9)])
    assert (found.version, found.wanted) == (None, version(0, 9))
    assert found.holders == {"a", "b"}


@pytest.mark.parametrize("how", ["received", "planned", "kept"])
def test_a_commit_is_known_from_any_node_that_reports_it(how: str) -> None:
    newest = plan(0, "abc", committed=(0, 8) if how == "planned" else None)
    holdings = held((0, 8), "abc", "abc", is_committed=how == "kept")
    found = choose(holdings, newest, committed=[(0, 8)] if how == "received" else [])
    assert (found.version, found.committed, found.wanted) == (version(0, 8), version(0, 8), None)


def test_a_version_beyond_the_commit_is_no_loss() -> None:
    found = choose(held((0, 9), "abc", "abc"), None, committed=[(0, 8)])
    assert (found.version, found.wanted) == (version(0, 9), None)
    assert found.committed == version(0, 8)


def test_a_version_that_may_have_been_committed_is_missed_like_a_commit() -> None:
    older, newer = held((0, 8), "abc", "abc"), held((0, 9), "c", "abc")
    here = {one: both(older, newer)[one] for one in "bc"}
    found = choose(here, None, committed=[(0, 8)])
    assert (found.version, found.committed) == (version(0, 8), version(0, 8))
    assert (found.wanted, found.holders) == (version(0, 9), {"a"})
    assert "step 9 (generation 0) may have been committed and is lost: " in found.reason
    # Without an older version, and with a commit that is older than both.
    nothing = choose(newer, None, committed=[(0, 7)])
    assert (nothing.version, nothing.wanted) == (None, version(0, 9))
    assert nothing.committed == version(0, 7)


@pytest.mark.parametrize(
    "refusal_reason", ["a part is not complete", "all nodes are present", "no part"]
)
def test_a_version_that_cannot_have_been_committed_is_not_missed(refusal_reason: str) -> None:
    newer = held((0, 9), "bc", "abcd")
    if refusal_reason == "a part is not complete":
        newer = with_part(newer, "b", is_complete=False)
    elif refusal_reason == "no part":
        newer = bare((0, 9), "bc", "abcd")
    here = both(held((0, 8), "abc", "abcd"), newer)
    if refusal_reason == "all nodes are present":
        here["d"] = Inventory([])
    found = choose(here, None, committed=[(0, 8)])
    assert (found.version, found.wanted) == (version(0, 8), None)


def test_one_protection_that_is_complete_may_be_the_committed_one() -> None:
    newer = held((0, 9), "bc", "abcd")
    again = held((0, 9), "bc", "abcd", protected_in=1, is_complete=False)
    found = choose(both(newer, again), None)
    assert (found.version, found.wanted) == (None, version(0, 9))


def test_a_commit_that_was_left_behind_is_not_wanted() -> None:
    newest = plan(2, "abc", restore=(0, 8), ancestry=[(0, 8)], committed=(1, 3))
    found = choose(held((0, 8), "abc", "abc"), newest, committed=[(0, 9)])
    assert (found.version, found.wanted, found.committed) == (version(0, 8), None, None)


def test_members_of_the_newest_generation_may_hold_what_is_missing() -> None:
    found = choose({"a": Inventory([])}, plan(1, "abz"))
    assert found.holders == {"b", "z"}


def test_nodes_outside_the_generation_may_hold_what_it_was_restored_from() -> None:
    """A node that left when the world shrank, and that has a group of its own."""
    sources = [RestoreSource(["a", "c"], [[0], [2]], 1, 0), RestoreSource(["b"], [[1]], 1, 0)]
    newest = plan(1, "ab", restore=(0, 8), ancestry=[(0, 8)], committed=(0, 8), sources=sources)
    found = choose({"b": Inventory([offer(1, (0, 8), 3)])}, newest)
    assert (found.version, found.wanted, found.holders) == (None, version(0, 8), {"a", "c"})


def test_parts_without_any_slot_are_something_that_is_held() -> None:
    parts: list[ProtectionPart] = [part("a", (0, 8), "abc")]
    found = choose({"a": Inventory([], parts)}, None)
    assert found.version is None
    assert found.holders == {"b", "c"}
    assert "missing of the group a, b, c: a, b, c" in found.reason


# --- a ring -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("here", "margin"),
    [("abcd", 1), ("abc", 0), ("ac", 0), ("bd", 0), ("ab", -1), ("ad", -1), ("a", -1)],
)
def test_a_ring_survives_losses_that_are_not_neighbours(here: str, margin: int) -> None:
    found = choose(held((0, 9), here, "abcd", is_ring=True), plan(0, "abcd"))
    assert (found.version is not None) == (margin >= 0)
    if found.version is None:
        assert found.reason.endswith("so no two neighbours may be missing")
    else:
        (one,) = found.sources
        assert one == msgspec.structs.replace(source("abcd"), is_ring=True)


def test_a_ring_and_a_code_of_the_same_nodes_are_different_protections() -> None:
    ring = held((0, 9), "ac", "abcd", is_ring=True)
    coded = held((0, 9), "ac", "abcd")
    assert choose(both(ring, coded), plan(0, "abcd")).version == version(0, 9)
    assert choose(coded, plan(0, "abcd")).version is None
