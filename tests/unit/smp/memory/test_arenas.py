"""The requested memory of all ranks is counted together, and pending allocations only once."""

import os
from collections.abc import Iterator

import pytest

from ftrun.errors import MemoryTooSmall
from ftrun.ids import Generation, Rank
from ftrun.linux import AvailableMemory
from ftrun.smp.memory.arenas import ArenaStore, create
from ftrun.wire.shared_memory.arena import ArenaShape

MB = 10**6
SHAPES = [ArenaShape(rank, 3, MB, 4, 1) for rank in range(3)]
ARENA = SHAPES[0].total_bytes


class Node:
    """Free memory of a node, and its arenas."""

    def __init__(self) -> None:
        self.free_bytes = 0
        self.memory = ArenaStore(lambda: AvailableMemory(self.free_bytes, "a limit"))

    def promise(self, rank: int, total_bytes: int = ARENA) -> None:
        self.memory.promise(Rank(rank), total_bytes, image_bytes=MB)


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.memory.free()


def test_ranks_of_a_node_do_not_count_the_same_free_memory(node: Node) -> None:
    node.free_bytes = 2 * ARENA
    node.promise(0)
    node.promise(1)
    with pytest.raises(MemoryTooSmall) as caught:
        node.promise(2)
    error = caught.value
    assert (error.needed_bytes, error.available_bytes) == (3 * ARENA, 2 * ARENA)
    assert (error.num_ranks, error.state_bytes, error.limit) == (3, MB, "a limit")
    assert "each of 3 ranks" in str(error)
    assert "1 MB of state" in str(error)


def test_memory_is_not_spent_on_some_ranks_while_another_has_none(node: Node) -> None:
    node.free_bytes = 2 * ARENA
    for rank in (0, 1):
        node.promise(rank)
    for rank in (2, 0, 1):
        with pytest.raises(MemoryTooSmall):
            node.promise(rank)
    node.free_bytes = 3 * ARENA
    for rank in range(3):
        node.promise(rank)


def test_copies_that_can_be_freed_are_freed_before_memory_is_refused(node: Node) -> None:
    node.free_bytes, copies = ARENA, [2 * ARENA]

    def give_back() -> bool:
        node.free_bytes += sum(copies)
        found = bool(copies)
        copies.clear()
        return found

    node.memory.give_back = give_back
    node.promise(0)
    assert copies, "memory was free"
    node.promise(1)
    node.promise(2)
    with pytest.raises(MemoryTooSmall):
        node.promise(2, 2 * ARENA)


def test_a_rank_that_asks_again_is_counted_once(node: Node) -> None:
    node.free_bytes = ARENA
    with pytest.raises(MemoryTooSmall):
        node.promise(0, 10 * ARENA)
    node.promise(0)
    node.memory.forget_promise(Rank(0))
    node.promise(1)


def test_pages_of_an_arena_in_the_making_are_not_counted_twice(node: Node) -> None:
    node.free_bytes = 2 * ARENA
    node.promise(0)
    making = node.memory.begin_making(SHAPES[0])
    making.num_bytes = ARENA - 10
    node.free_bytes -= making.num_bytes
    node.promise(1)
    with pytest.raises(MemoryTooSmall):
        node.promise(1, ARENA + 1)


def test_an_arena_in_the_making_counts_after_its_generation(node: Node) -> None:
    node.free_bytes = ARENA
    node.promise(0)
    node.memory.begin_making(SHAPES[0])
    node.memory.forget_requests()
    with pytest.raises(MemoryTooSmall):
        node.promise(1)
    node.memory.end_making(Rank(0))
    node.promise(1)


def test_what_a_rank_has_is_not_reserved_again(node: Node) -> None:
    progress: list[int] = []
    node.memory.add(create(SHAPES[0], progress.append), Generation(0))
    assert progress[-1] == ARENA
    assert os.fstat(node.memory.of(Rank(0))[0].fd).st_blocks * 512 >= ARENA
    node.free_bytes = ARENA // 2
    node.memory.reserve(Rank(0), MB // 2, world_size=3)
    with pytest.raises(MemoryTooSmall):
        node.memory.reserve(Rank(0), 3 * MB, world_size=3)
