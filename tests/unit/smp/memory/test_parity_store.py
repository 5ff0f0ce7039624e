"""The parity region that must be retained is never the one that is filled next."""

import os
from collections.abc import Iterator

import pytest
import xxhash

from ftrun.errors import LayoutUnknown
from ftrun.ids import version
from ftrun.smp.memory.parity_store import ParityStore, make_vault
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
        place=0,
        block_bytes=4096,
        coded_bytes=[10, 20, 30],
        own=NodeRedundancy([], 0, 0),
        holders=[],
        mirrors=[(2, 100)],
        num_rows=1,
    )


@pytest.fixture
def vaults() -> Iterator[ParityStore]:
    made = ParityStore()
    yield made
    made.free()


def fill(vaults: ParityStore, step: int, state: ParityRegionState, protected_in: int = 0) -> int:
    """Fill a region as an exchange does; return its slot."""
    wanted = record(step, protected_in)
    slot = vaults.free_slot()
    vault = vaults.take(slot, wanted)
    if vault is None:
        vault = make_vault(wanted)
        vaults.put(slot, vault)
    vault.begin(wanted)
    vault.mark(state)
    return slot


def held(vaults: ParityStore) -> set[tuple[int, int]]:
    return {(part.step, part.protected_in) for part in vaults.parts()}


def test_two_vaults_change_places_at_each_commit(vaults: ParityStore) -> None:
    slots = []
    for step in range(1, 6):
        slots.append(fill(vaults, step, ParityRegionState.COMPLETE))
        assert vaults.commit(version(0, step), 0) == []
    assert slots == [0, 1, 0, 1, 0]
    assert held(vaults) == {(5, 0), (4, 0)}


def test_a_version_that_is_not_committed_does_not_cost_the_committed_one(
    vaults: ParityStore,
) -> None:
    """A generation starts from step 22; an unreachable node has a part of step 20 only."""
    fill(vaults, 20, ParityRegionState.COMPLETE)
    vaults.commit(version(0, 20), 0)
    fill(vaults, 22, ParityRegionState.COMPLETE)
    vaults.keep(version(0, 22), 0)
    assert fill(vaults, 22, ParityRegionState.FILLING, protected_in=1) == 2
    assert {(20, 0), (22, 0)} <= held(vaults)
    assert fill(vaults, 22, ParityRegionState.COMPLETE, protected_in=1) == 2, "another attempt"
    assert len(vaults.commit(version(0, 22), 1)) == 1
    assert (22, 1) in held(vaults)
    assert len(vaults.fds) == 2, "the third is freed"


def test_a_restored_version_without_a_part_here_does_not_cost_the_committed_one(
    vaults: ParityStore,
) -> None:
    fill(vaults, 20, ParityRegionState.COMPLETE)
    vaults.commit(version(0, 20), 0)
    fill(vaults, 22, ParityRegionState.FILLING)
    vaults.keep(version(0, 22), -1)
    fill(vaults, 22, ParityRegionState.COMPLETE, protected_in=1)
    assert (20, 0) in held(vaults)


def test_without_memory_for_a_third_the_committed_one_is_overwritten(vaults: ParityStore) -> None:
    fill(vaults, 20, ParityRegionState.COMPLETE)
    vaults.commit(version(0, 20), 0)
    fill(vaults, 22, ParityRegionState.COMPLETE)
    vaults.keep(version(0, 22), 0)
    assert vaults.give_up_committed()
    assert not vaults.give_up_committed()
    fill(vaults, 22, ParityRegionState.FILLING, protected_in=1)
    assert held(vaults) == {(22, 0), (22, 1)}


def test_vaults_keep_their_slots_when_another_smp_takes_over(vaults: ParityStore) -> None:
    """The agent has duplicates by slot: with another number it would close the wrong one."""
    fill(vaults, 20, ParityRegionState.COMPLETE)
    vaults.commit(version(0, 20), 0)
    fill(vaults, 22, ParityRegionState.COMPLETE)
    vaults.keep(version(0, 22), 0)
    fill(vaults, 22, ParityRegionState.COMPLETE, protected_in=1)
    vaults.commit(version(0, 22), 1)
    assert vaults.slots == [1, 2]
    other = ParityStore()
    for slot, fd in zip(vaults.slots, vaults.fds, strict=True):
        other.adopt(os.dup(fd), slot)
    assert other.slots == vaults.slots
    with pytest.raises(LayoutUnknown, match="slot 2 is not free"):
        other.adopt(make_vault(record(1)).fd, 2)
    other.free()


def test_memory_that_was_made_twice_for_a_slot_is_not_leaked(vaults: ParityStore) -> None:
    """A lost connection ends an attempt during its allocation, and another attempt begins."""
    slot, wanted = vaults.free_slot(), record(1)
    first, second = make_vault(wanted), make_vault(wanted)
    vaults.put(slot, first)
    vaults.put(slot, second)
    assert vaults.fds == [second.fd]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(first.fd)


def test_a_node_without_a_part_frees_what_is_over(vaults: ParityStore) -> None:
    fill(vaults, 20, ParityRegionState.COMPLETE)
    vaults.commit(version(0, 20), 0)
    assert vaults.commit(version(0, 30), 3) == [0]
    assert vaults.fds == []


def test_a_damaged_mirror_is_offered_no_more_and_its_parity_stays(vaults: ParityStore) -> None:
    """If the inventory still named it, the leader would choose the same restore forever."""
    vault = vaults_with_a_mirror(vaults)
    vault.mirror_room(2)[3] ^= 1
    vaults.drop_damaged_mirror(version(0, 1), 0, 2)
    assert [(part.mirrors, part.is_complete) for part in vaults.parts()] == [([], True)]


def test_a_whole_mirror_stays(vaults: ParityStore) -> None:
    """A request may refer to a region that is filled again, or that has no such mirror."""
    vaults_with_a_mirror(vaults)
    vaults.drop_damaged_mirror(version(0, 1), 0, 2)
    vaults.drop_damaged_mirror(version(0, 1), 0, 0)
    vaults.drop_damaged_mirror(version(0, 1), 1, 2)
    assert [part.mirrors for part in vaults.parts()] == [["n2"]]


def test_a_damaged_part_counts_as_missing_until_it_is_filled_again(vaults: ParityStore) -> None:
    fill(vaults, 1, ParityRegionState.COMPLETE)
    vaults.note_damage(version(0, 1), 0)
    vaults.note_damage(version(0, 2), 0)
    assert [part.is_complete for part in vaults.parts()] == [False]
    assert vaults.find(version(0, 1), 0) is not None, "what is whole is still served"
    fill(vaults, 1, ParityRegionState.COMPLETE, protected_in=1)
    assert [part.is_complete for part in vaults.parts()] == [True]


def vaults_with_a_mirror(vaults: ParityStore) -> ParityRegion:
    fill(vaults, 1, ParityRegionState.COMPLETE)
    vault = vaults.find(version(0, 1), 0)
    assert vault is not None
    vault.mirror_room(2)[:8] = b"mirrored"
    vault.keep_mirror(2, 8, xxhash.xxh3_64_intdigest(b"mirrored"))
    return vault
