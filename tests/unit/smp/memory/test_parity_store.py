"""The parity region that must be retained is never the one that is filled next."""

import os
from collections.abc import Iterator

import pytest
import xxhash

from ftrun.errors import LayoutUnknown
from ftrun.ids import version
from ftrun.smp.memory.parity_store import ParityStore, allocate_parity_region
from ftrun.snapshot.redundancy import NodeRedundancy
from ftrun.wire.messages.smp import GroupMember
from ftrun.wire.shared_memory.parity_region import ParityRecord, ParityRegion, ParityRegionState


def record(step: int, protected_in: int = 0) -> ParityRecord:
    return ParityRecord(
        generation=0,
        step=step,
        world_size=3,
        protected_in=protected_in,
        members=[GroupMember(f"n{at}", [at]) for at in range(3)],
        parity=1,
        position=0,
        block_bytes=4096,
        coded_bytes=[10, 20, 30],
        own=NodeRedundancy([], 0, 0),
        holders=[],
        mirrors=[(2, 100)],
        num_rows=1,
    )


@pytest.fixture
def parity_store() -> Iterator[ParityStore]:
    made = ParityStore()
    yield made
    made.free()


def fill(
    parity_store: ParityStore, step: int, state: ParityRegionState, protected_in: int = 0
) -> int:
    """Fill a region as an exchange does; return its slot."""
    wanted = record(step, protected_in)
    slot = parity_store.free_slot()
    region = parity_store.take(slot, wanted)
    if region is None:
        region = allocate_parity_region(wanted)
        parity_store.put(slot, region)
    region.begin(wanted)
    region.mark(state)
    return slot


def held(parity_store: ParityStore) -> set[tuple[int, int]]:
    return {(part.step, part.protected_in) for part in parity_store.parts()}


def test_two_parity_regions_change_places_at_each_commit(parity_store: ParityStore) -> None:
    slots = []
    for step in range(1, 6):
        slots.append(fill(parity_store, step, ParityRegionState.COMPLETE))
        assert parity_store.commit(version(0, step), 0) == []
    assert slots == [0, 1, 0, 1, 0]
    assert held(parity_store) == {(5, 0), (4, 0)}


def test_a_version_that_is_not_committed_does_not_cost_the_committed_one(
    parity_store: ParityStore,
) -> None:
    """A generation starts from step 22; an unreachable node has a part of step 20 only."""
    fill(parity_store, 20, ParityRegionState.COMPLETE)
    parity_store.commit(version(0, 20), 0)
    fill(parity_store, 22, ParityRegionState.COMPLETE)
    parity_store.keep(version(0, 22), 0)
    assert fill(parity_store, 22, ParityRegionState.FILLING, protected_in=1) == 2
    assert {(20, 0), (22, 0)} <= held(parity_store)
    assert fill(parity_store, 22, ParityRegionState.COMPLETE, protected_in=1) == 2, (
        "another attempt"
    )
    assert len(parity_store.commit(version(0, 22), 1)) == 1
    assert (22, 1) in held(parity_store)
    assert len(parity_store.fds) == 2, "the third is freed"


def test_a_restored_version_without_a_part_here_does_not_cost_the_committed_one(
    parity_store: ParityStore,
) -> None:
    fill(parity_store, 20, ParityRegionState.COMPLETE)
    parity_store.commit(version(0, 20), 0)
    fill(parity_store, 22, ParityRegionState.FILLING)
    parity_store.keep(version(0, 22), -1)
    fill(parity_store, 22, ParityRegionState.COMPLETE, protected_in=1)
    assert (20, 0) in held(parity_store)


@pytest.mark.parametrize("committed", [20, 21])
def test_a_part_of_the_committed_version_is_kept_also_if_it_is_not_marked_here(
    parity_store: ParityStore, committed: int
) -> None:
    """The agent ended after other nodes had committed step 20, and before this one."""
    fill(parity_store, 20, ParityRegionState.COMPLETE)
    parity_store.keep(version(0, 22), -1, version(0, committed))
    fill(parity_store, 22, ParityRegionState.COMPLETE, protected_in=1)
    assert ((20, 0) in held(parity_store)) == (committed == 20)


def test_without_memory_for_a_third_the_committed_one_is_overwritten(
    parity_store: ParityStore,
) -> None:
    fill(parity_store, 20, ParityRegionState.COMPLETE)
    parity_store.commit(version(0, 20), 0)
    fill(parity_store, 22, ParityRegionState.COMPLETE)
    parity_store.keep(version(0, 22), 0)
    assert parity_store.give_up_committed()
    assert not parity_store.give_up_committed()
    fill(parity_store, 22, ParityRegionState.FILLING, protected_in=1)
    assert held(parity_store) == {(22, 0), (22, 1)}


def test_parity_regions_keep_their_slots_when_another_smp_takes_over(
    parity_store: ParityStore,
) -> None:
    """The agent has duplicates by slot: with another number it would close the wrong one."""
    fill(parity_store, 20, ParityRegionState.COMPLETE)
    parity_store.commit(version(0, 20), 0)
    fill(parity_store, 22, ParityRegionState.COMPLETE)
    parity_store.keep(version(0, 22), 0)
    fill(parity_store, 22, ParityRegionState.COMPLETE, protected_in=1)
    parity_store.commit(version(0, 22), 1)
    assert parity_store.slots == [1, 2]
    other = ParityStore()
    for slot, fd in zip(parity_store.slots, parity_store.fds, strict=True):
        other.adopt(os.dup(fd), slot)
    assert other.slots == parity_store.slots
    with pytest.raises(LayoutUnknown, match="slot 2 is not free"):
        other.adopt(allocate_parity_region(record(1)).fd, 2)
    other.free()


def test_memory_that_was_made_twice_for_a_slot_is_not_leaked(parity_store: ParityStore) -> None:
    """A lost connection ends an attempt during its allocation, and another attempt begins."""
    slot, wanted = parity_store.free_slot(), record(1)
    first, second = allocate_parity_region(wanted), allocate_parity_region(wanted)
    parity_store.put(slot, first)
    parity_store.put(slot, second)
    assert parity_store.fds == [second.fd]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(first.fd)


def test_a_node_without_a_part_frees_what_is_over(parity_store: ParityStore) -> None:
    fill(parity_store, 20, ParityRegionState.COMPLETE)
    parity_store.commit(version(0, 20), 0)
    assert parity_store.commit(version(0, 30), 3) == [0]
    assert parity_store.fds == []


def test_a_damaged_mirror_is_offered_no_more_and_its_parity_stays(
    parity_store: ParityStore,
) -> None:
    """If the inventory still named it, the leader would choose the same restore forever."""
    region = parity_regions_with_a_mirror(parity_store)
    region.mirror_space(2)[3] ^= 1
    parity_store.drop_damaged_mirror(version(0, 1), 0, 2)
    assert [(part.mirrors, part.is_complete) for part in parity_store.parts()] == [([], True)]


def test_a_whole_mirror_stays(parity_store: ParityStore) -> None:
    """A request may refer to a region that is filled again, or that has no such mirror."""
    parity_regions_with_a_mirror(parity_store)
    parity_store.drop_damaged_mirror(version(0, 1), 0, 2)
    parity_store.drop_damaged_mirror(version(0, 1), 0, 0)
    parity_store.drop_damaged_mirror(version(0, 1), 1, 2)
    assert [part.mirrors for part in parity_store.parts()] == [["n2"]]


def test_a_damaged_part_counts_as_missing_until_it_is_filled_again(
    parity_store: ParityStore,
) -> None:
    fill(parity_store, 1, ParityRegionState.COMPLETE)
    parity_store.note_damage(version(0, 1), 0)
    parity_store.note_damage(version(0, 2), 0)
    assert [part.is_complete for part in parity_store.parts()] == [False]
    assert parity_store.find(version(0, 1), 0) is not None, "the complete part is still served"
    fill(parity_store, 1, ParityRegionState.COMPLETE, protected_in=1)
    assert [part.is_complete for part in parity_store.parts()] == [True]


def parity_regions_with_a_mirror(parity_store: ParityStore) -> ParityRegion:
    fill(parity_store, 1, ParityRegionState.COMPLETE)
    region = parity_store.find(version(0, 1), 0)
    assert region is not None
    region.mirror_space(2)[:8] = b"mirrored"
    region.store_mirror(2, 8, xxhash.xxh3_64_intdigest(b"mirrored"))
    return region
