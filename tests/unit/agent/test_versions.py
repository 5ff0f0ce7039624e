"""The versions in memory, with their states, on one node and on several."""

from collections.abc import Iterator

import msgspec
import pytest

from ftrun import clock
from ftrun.agent.publish.versions import held_versions, run_versions
from ftrun.agent.snapshots.retained_memory import RetainedMemory
from ftrun.ids import Rank
from ftrun.wire.cluster.membership import HeldVersion
from ftrun.wire.messages.status import VersionState
from ftrun.wire.shared_memory.arena import (
    Arena,
    ArenaShape,
    SlotHeader,
    SlotState,
    create_memfd,
)

SIZE = 4096


@pytest.fixture
def memory() -> Iterator[RetainedMemory]:
    made = RetainedMemory()
    for rank in range(2):
        made.keep(Rank(rank), create_memfd(ArenaShape(rank, 2, SIZE, 1, 1)))
    yield made
    made.close()


def write(
    memory: RetainedMemory, rank: int, slot: int, state: SlotState, at: tuple[int, int]
) -> None:
    sealed_ns = clock.now_ns() - 5_000_000_000
    arena = Arena(memory.arenas[Rank(rank)][-1], writable=True)
    arena.write_header(slot, SlotHeader(state, *at, SIZE, 0, sealed_ns))
    arena.close()


def states(memory: RetainedMemory, generation: int = 1) -> dict[tuple[int, int], str]:
    found = held_versions(memory, generation)
    return {(one.generation, one.step): one.state for one in found}


def test_a_version_is_sealed_when_every_rank_has_sealed_it(memory: RetainedMemory) -> None:
    assert held_versions(memory, 1) == ()
    write(memory, 0, 0, SlotState.SEALED, (1, 8))
    write(memory, 0, 1, SlotState.COPYING, (1, 9))
    assert states(memory) == {(1, 9): "capturing", (1, 8): "capturing"}
    write(memory, 1, 0, SlotState.SEALED, (1, 8))
    newest, sealed = held_versions(memory, 1)
    assert (newest.state, newest.age_s, newest.num_bytes) == ("capturing", None, SIZE)
    assert (sealed.state, sealed.num_bytes) == ("sealed", 2 * SIZE)
    assert sealed.age_s == pytest.approx(5.0, abs=2.0)


def test_what_an_earlier_generation_left_incomplete_is_void(memory: RetainedMemory) -> None:
    write(memory, 0, 0, SlotState.COPYING, (0, 7))
    assert states(memory) == {(0, 7): "void"}
    write(memory, 0, 0, SlotState.SEALED, (1, 8))
    write(memory, 1, 0, SlotState.VOID, (1, 8))
    assert states(memory) == {(1, 8): "void"}


def test_an_arena_of_another_form_is_left_out(memory: RetainedMemory) -> None:
    write(memory, 0, 0, SlotState.SEALED, (1, 8))
    write(memory, 1, 0, SlotState.SEALED, (1, 8))
    arena = Arena(memory.arenas[Rank(1)][0], writable=True)
    arena.memory[:8] = bytes(8)
    arena.close()
    assert states(memory) == {(1, 8): "capturing"}


SEALED = HeldVersion(1, 8, "sealed", 4.0, 100)


def shown(**given: HeldVersion) -> tuple[tuple[VersionState, ...], dict[str, VersionState]]:
    (one,) = run_versions(
        {node: [held] for node, held in given.items()}, committed=(1, 6), protected=[(1, 8)]
    )
    return one.states, one.nodes


def test_the_states_of_a_run() -> None:
    capturing = HeldVersion(1, 8, "capturing")
    void = HeldVersion(1, 8, "void")
    both = ("sealed", "protected")
    assert shown(a=SEALED, b=SEALED) == (both, {})
    assert shown(a=SEALED, b=capturing) == (
        ("capturing", "protected"), {"a": "sealed", "b": "capturing"},
    )  # fmt: skip
    assert shown(a=void, b=void)[0][0] == "void"
    assert shown(a=SEALED, b=void)[0][0] == "capturing"


def test_age_and_size_are_of_all_nodes() -> None:
    older = replaced(SEALED, age_s=9.0)
    (one,) = run_versions({"a": [SEALED], "b": [older]}, committed=None)
    assert (one.age_s, one.num_bytes, one.states) == (4.0, 200, ("sealed",))


def test_versions_around_the_committed_one() -> None:
    every = [replaced(SEALED, step=step) for step in (9, 8, 7)]
    found = run_versions({"a": every}, committed=(1, 8), protected=[(1, 8)], persisted=[(1, 7)])
    assert [(one.step, one.states) for one in found] == [
        (9, ("sealed",)),
        (8, ("committed", "protected")),
        (7, ("obsolete", "persisted")),
    ]


def replaced(one: HeldVersion, **changes: object) -> HeldVersion:
    return msgspec.structs.replace(one, **changes)
