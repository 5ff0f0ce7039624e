"""Pools are divided when every rank of the node has requested one, within the free memory."""

import os
import select
from collections.abc import Iterator
from typing import Any

import pytest

from ftrun.errors import MemoryTooSmall
from ftrun.ids import Generation, Rank, version
from ftrun.linux import AvailableMemory
from ftrun.smp.jobs import JobLanes
from ftrun.smp.memory import pools
from ftrun.smp.memory.arenas import ArenaStore, create
from ftrun.smp.memory.pools import CapturePools
from ftrun.snapshot.commit_tracker import CommitTracker
from ftrun.snapshot.layout import PAGE_BYTES
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import worker as worker_messages
from ftrun.wire.shared_memory.arena import Arena, ArenaShape, SlotHeader, SlotState
from ftrun.wire.shared_memory.pool import CapturePool

TIMEOUT_S = 60.0
MB = 1 << 20


class Worker:
    """Records the answers that are sent, and the capacity of its pool."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.capacity = 0

    def send(self, body: messages.AnyMessage, *, fds: tuple[int, ...] = ()) -> None:
        self.answers.append(body)
        for fd in fds:
            self.capacity = CapturePool(fd).capacity


class Node:
    """The pools of a node of two ranks."""

    def __init__(self) -> None:
        self.jobs, self.tracker = JobLanes(), CommitTracker()
        self.free_bytes = 1 << 40
        self.memory = ArenaStore(lambda: AvailableMemory(self.free_bytes, "a limit"))
        self.shown: list[bool] = []
        self.num_changes = 0
        self.pools = CapturePools(
            self.memory,
            self.jobs,
            tracker=self.tracker,
            show=self.shown.append,
            changed=self.change,
            refuse=self.refuse,
        )
        self.begin(0)

    def begin(self, generation: int) -> None:
        ranks = [Rank(0), Rank(1)]
        self.tracker.begin_generation(Generation(generation), ranks, 2, {})

    def change(self) -> None:
        self.num_changes += 1

    def refuse(self, requesters: list[Worker], error: MemoryTooSmall) -> None:
        for one in requesters:
            one.answers.append(error)

    def ask(self, rank: int, num_bytes: int = 8 * MB) -> Worker:
        made = Worker()
        self.pools.request(made, worker_messages.RequestPool(rank, num_bytes))  # type: ignore[arg-type]
        return made

    def finish(self) -> None:
        assert select.select([self.jobs], [], [], TIMEOUT_S)[0]
        self.jobs.finish()

    def arena(self, rank: int, step: int, num_slots: int = 2) -> None:
        fd = create(ArenaShape(rank, 2, MB, 4, 1, num_slots))
        arena = Arena(fd, writable=True)
        arena.write_header(0, SlotHeader(SlotState.SEALED, 0, step, MB, 1, 1))
        arena.close()
        self.memory.add(fd, Generation(0))


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(pools, "_FREED_S", 0.0)
    made = Node()
    yield made
    made.pools.free()
    made.memory.free()


def test_a_rank_waits_for_the_others_and_all_get_equal_shares(node: Node) -> None:
    node.free_bytes = 32 * MB + 12 * MB  # the write, and half of the rest for two ranks
    first = node.ask(0)
    assert not first.answers
    assert node.shown == [True]
    assert not node.pools.are_complete
    second = node.ask(1)
    node.finish()
    assert [first.capacity, second.capacity] == [3 * MB - PAGE_BYTES, 3 * MB - PAGE_BYTES]
    assert node.pools.are_complete
    assert node.memory.pool_bytes == 6 * MB
    again = node.ask(0)
    assert again.capacity == 3 * MB - PAGE_BYTES


def test_no_pool_is_larger_than_a_slot_and_a_limit_is_used_whole(node: Node) -> None:
    node.memory.limit_bytes = 5 * MB
    asked = [node.ask(0, 2 * MB), node.ask(1)]
    node.finish()
    assert [one.capacity for one in asked] == [2 * MB, 5 * MB // 2 - PAGE_BYTES]
    assert node.memory.available().num_bytes < MB


def test_too_little_memory_is_refused_with_numbers(node: Node) -> None:
    node.free_bytes = 32 * MB + 3 * MB
    asked = [node.ask(0), node.ask(1)]
    node.finish()
    for one in asked:
        (error,) = one.answers
        assert (error.needed_bytes, error.available_bytes) == (2 * MB, 3 * MB // 2)
    assert node.shown == [True, False]
    node.free_bytes = 1 << 40
    asked = [node.ask(0), node.ask(1)]
    node.finish()
    assert all(one.capacity == 8 * MB for one in asked)


def test_arenas_that_are_of_no_use_are_freed_first(node: Node) -> None:
    for rank in range(2):
        node.arena(rank, 4)
        node.arena(rank, 3)
        node.arena(rank, 4, num_slots=1)
    node.tracker.committed = version(0, 4)
    node.ask(0)
    assert len(node.memory.all()) == 6
    node.ask(1)
    assert [len(one.slots()) for one in node.memory.all()] == [2, 2]
    assert all(one.holds(version(0, 4)) for one in node.memory.all())
    node.finish()
    node.pools.written(version(1, 5))
    assert not node.memory.all()
    assert node.memory.num_freed == 6


def test_a_later_generation_gets_nothing_of_an_earlier_one(node: Node) -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    asked = [node.ask(0), node.ask(1)]
    node.begin(1)
    node.pools.free()
    node.finish()
    assert not node.pools.fds
    assert [type(one.answers[0]) for one in asked] == [messages.Refused, messages.Refused]
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_ranks_of_a_generation_that_begins_while_pools_are_made_get_theirs(node: Node) -> None:
    node.ask(0), node.ask(1)
    node.begin(1)
    node.pools.free()
    asked = [node.ask(0), node.ask(1)]
    node.finish()
    node.finish()
    assert all(one.capacity == 8 * MB for one in asked)


def test_an_arena_with_a_later_version_than_the_checkpoint_stays(node: Node) -> None:
    node.arena(0, 4)
    node.arena(1, 6)
    node.pools.written(version(0, 5))
    assert [one.shape.rank for one in node.memory.all()] == [1]


def test_pools_are_left_when_all_ranks_have_one(node: Node) -> None:
    node.ask(0)
    node.pools.leave()
    assert node.shown == [True]
    node.ask(1)
    node.finish()
    node.pools.leave()
    assert node.shown == [True, False]
    assert not node.pools.fds
    assert node.memory.pool_bytes == 0
