"""Arenas of several ranks are allocated concurrently, at most one for each rank."""

import contextlib
import os
import select
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ftrun.ids import Generation, Rank
from ftrun.linux import AvailableMemory
from ftrun.smp.jobs import JobLanes
from ftrun.smp.memory import arena_requests
from ftrun.smp.memory.arena_requests import ArenaRequests
from ftrun.smp.memory.arenas import ArenaStore, create
from ftrun.snapshot.commit_tracker import CommitTracker
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.messages import worker as worker_messages
from ftrun.wire.shared_memory.arena import NO_LAYOUT, arena_bytes
from tests.exhausted import no_threads

TIMEOUT_S = 60.0
MB = 10**6


class Worker:
    """Records the answers that are sent."""

    def __init__(self) -> None:
        self.reported: list[tuple[messages.AnyMessage, tuple[int, ...]]] = []

    def send(self, body: messages.AnyMessage, *, fds: tuple[int, ...] = ()) -> None:
        self.reported.append((body, fds))

    @property
    def answer(self) -> messages.AnyMessage:
        ((body, _),) = self.reported
        return body


class Node:
    """The arenas of an SMP, which are allocated when the test permits it."""

    def __init__(self) -> None:
        self.jobs, self.tracker = JobLanes(), CommitTracker()
        self.free_bytes = 10**10
        self.memory = ArenaStore(lambda: AvailableMemory(self.free_bytes, "a limit"))
        self.agent: list[Any] = []
        self.needed: list[tuple[int, int]] = []
        """Bytes for arenas and for parity, as the agent is informed."""
        self.num_short = self.parity_region_bytes = 0
        self.requests = ArenaRequests(
            self.memory,
            self.jobs,
            tracker=self.tracker,
            send_to_agent=self.send_to_agent,
            is_short=self.be_short,
            parity_region_bytes=lambda: self.parity_region_bytes,
            show_pooled=lambda _: None,
        )
        self.may_go_on = threading.Event()
        self.allocating: list[int] = []
        self.num_others = num_arenas()
        self.begin(0)

    def send_to_agent(self, body: Any, *, fds: tuple[int, ...] = ()) -> None:
        if isinstance(body, smp_messages.MemoryNeeded):
            self.needed.append((body.arena_bytes, body.parity_bytes))
        else:
            self.agent.append(body)

    def reserve(self, rank: int, image_bytes: int) -> messages.AnyMessage:
        asked = Worker()
        body = worker_messages.ReserveMemory(rank, image_bytes)
        self.requests.reserve(asked, body)  # type: ignore[arg-type]
        return asked.answer

    def be_short(self) -> None:
        self.num_short += 1

    def begin(self, generation: int) -> None:
        ranks = [Rank(rank) for rank in range(2)]
        self.tracker.begin_generation(Generation(generation), ranks, 2, {}, decides_alone=True)
        self.memory.forget_requests()

    def allocate(self, shape: Any, allocated: Any) -> int:
        """As `create`, when the test permits it."""
        self.allocating.append(shape.rank)
        assert self.may_go_on.wait(TIMEOUT_S)
        return create(shape, allocated)

    def ask(self, rank: int = 0, *, layout_id: int = 1, image_bytes: int = MB) -> Worker:
        worker = Worker()
        body = worker_messages.RequestArena(rank, 2, image_bytes, 4, layout_id)
        self.requests.request(worker, body)  # type: ignore[arg-type]
        return worker

    def prepare(self, rank: int = 0, *, image_bytes: int = MB) -> Worker:
        worker = Worker()
        body = worker_messages.PrepareArena(rank, 2, image_bytes, 4)
        self.requests.prepare(worker, body)  # type: ignore[arg-type]
        return worker

    def finish(self, *workers: Worker) -> None:
        """Run the results of jobs until these workers have an answer."""
        while not all(worker.reported for worker in workers):
            assert select.select([self.jobs], [], [], TIMEOUT_S)[0]
            self.jobs.finish()

    def layouts(self, rank: int = 0) -> list[int]:
        return [arena.shape.layout_id for arena in self.memory.of(Rank(rank))]


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    made = Node()
    monkeypatch.setattr(arena_requests, "create", made.allocate)
    yield made
    made.may_go_on.set()
    made.memory.free()


def num_arenas() -> int:
    """Descriptors of arenas that this process holds."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += "memfd:ftrun-rank" in os.readlink(f"/proc/self/fd/{fd}")
    return found


def test_arenas_of_two_ranks_are_made_at_the_same_time(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = threading.Barrier(2)

    def allocate(shape: Any, allocated: Any) -> int:
        meeting.wait(TIMEOUT_S)
        return create(shape, allocated)

    monkeypatch.setattr(arena_requests, "create", allocate)
    workers = [node.ask(0), node.ask(1)]
    node.finish(*workers)
    assert all(isinstance(one.answer, worker_messages.ArenaGranted) for one in workers)
    assert node.layouts(0) == node.layouts(1) == [1]


def test_a_request_that_is_repeated_joins_the_one_in_the_making(node: Node) -> None:
    workers = [node.ask(), node.ask()]
    node.may_go_on.set()
    node.finish(*workers)
    assert node.allocating == [0]
    (one, first), (two, second) = (worker.reported[0] for worker in workers)
    assert one == two
    assert first == second == (node.memory.of(Rank(0))[0].fd,)
    assert node.layouts() == [1]
    again = node.ask()
    assert again.reported == [(one, first)]


def test_prepared_memory_becomes_the_arena_of_the_next_request(node: Node) -> None:
    node.may_go_on.set()
    prepared = node.prepare(image_bytes=2 * MB)
    node.finish(prepared)
    assert prepared.answer == worker_messages.ArenaGranted(0, NO_LAYOUT)
    assert node.agent == []
    assert node.memory.allocated_bytes == arena_bytes(2 * MB, 4)
    inode = os.fstat(prepared.reported[0][1][0]).st_ino
    assert node.prepare(image_bytes=2 * MB).reported == prepared.reported
    asked = node.ask(image_bytes=MB)
    assert asked.answer == worker_messages.ArenaGranted(0, 1)
    assert node.agent == [asked.answer]
    assert node.allocating == [0]
    (arena,) = node.memory.of(Rank(0))
    has = os.fstat(arena.fd)
    assert (has.st_ino, has.st_size) == (inode, arena_bytes(MB, 4))
    assert node.memory.allocated_bytes == arena.shape.total_bytes == has.st_size
    assert isinstance(node.prepare(image_bytes=2 * MB).answer, messages.Refused)
    assert node.needed[-1] == (0, 0)


def test_prepared_memory_that_is_too_small_or_of_an_ended_generation_is_freed(node: Node) -> None:
    node.may_go_on.set()
    prepared = node.prepare()
    node.finish(prepared)
    asked = node.ask(image_bytes=2 * MB)
    node.finish(asked)
    assert node.layouts() == [1]
    assert num_arenas() - node.num_others == 1
    other = node.prepare(1)
    node.finish(other)
    assert num_arenas() - node.num_others == 2
    node.begin(1)
    assert num_arenas() - node.num_others == 1


def test_a_request_that_comes_while_memory_is_prepared_gets_it(node: Node) -> None:
    prepared, asked = node.prepare(), node.ask()
    node.may_go_on.set()
    node.finish(prepared, asked)
    assert asked.answer == worker_messages.ArenaGranted(0, 1)
    assert node.allocating == [0]


def test_prepared_memory_counts_once_as_needed(node: Node) -> None:
    node.may_go_on.set()
    assert node.reserve(0, MB) == messages.Done()
    prepared = node.prepare()
    node.finish(prepared)
    node.free_bytes = 100  # less than an arena: what is prepared needs no more
    assert node.reserve(0, MB // 2) == messages.Done()
    assert isinstance(node.reserve(1, MB), worker_messages.MemoryRefused)


def test_prepared_memory_is_not_granted_while_the_requests_of_others_do_not_fit(node: Node) -> None:
    node.may_go_on.set()
    prepared = node.prepare(0)
    node.finish(prepared)
    node.free_bytes = 100
    refused = node.reserve(1, MB)
    assert isinstance(refused, worker_messages.MemoryRefused)
    assert refused.num_ranks == 2
    asked = node.ask(0)
    assert isinstance(asked.answer, worker_messages.MemoryRefused)
    assert num_arenas() == node.num_others
    node.free_bytes = 10**10
    again = node.ask(0)
    node.finish(again)
    assert node.layouts() == [1]


def test_a_request_without_a_thread_is_refused_and_the_next_one_is_granted(node: Node) -> None:
    with no_threads():
        refused = node.ask()
    node.finish(refused)
    assert isinstance(refused.answer, messages.Refused)
    node.may_go_on.set()
    second = node.ask(layout_id=2)
    node.finish(second)
    assert isinstance(second.answer, worker_messages.ArenaGranted)


def test_another_layout_waits_and_the_arena_that_is_not_wanted_is_freed(node: Node) -> None:
    late, worker = node.ask(layout_id=1), node.ask(layout_id=2)
    node.may_go_on.set()
    node.finish(late, worker)
    assert isinstance(late.answer, messages.Refused)
    assert worker.answer == worker_messages.ArenaGranted(0, 2)
    assert node.layouts() == [2]
    assert node.agent == [worker.answer]
    assert num_arenas() == node.num_others + 1


def test_an_arena_that_the_next_generation_asks_for_too_is_made_once(node: Node) -> None:
    dead = node.ask()
    node.begin(1)
    worker = node.ask()
    node.may_go_on.set()
    node.finish(dead, worker)
    assert node.allocating == [0]
    assert isinstance(worker.answer, worker_messages.ArenaGranted)
    assert node.memory.of(Rank(0))[0].granted_in == 1


def test_an_arena_that_no_rank_of_the_next_generation_asks_for_is_freed(node: Node) -> None:
    dead = node.ask()
    node.begin(1)
    node.may_go_on.set()
    node.finish(dead)
    assert isinstance(dead.answer, messages.Refused)
    assert node.memory.all() == []
    assert num_arenas() == node.num_others
    assert node.agent == []
    node.free_bytes = 3 * MB  # for one arena: the freed one is not counted any more
    worker = node.ask()
    node.finish(worker)
    assert isinstance(worker.answer, worker_messages.ArenaGranted)


def test_a_refusal_has_numbers_and_asks_for_memory_back(node: Node) -> None:
    node.free_bytes = MB
    answer = node.ask().answer
    assert isinstance(answer, worker_messages.MemoryRefused)
    assert answer.needed_bytes >= 2 * MB
    assert (answer.state_bytes, answer.num_ranks, answer.parity_bytes) == (MB, 1, 0)
    assert node.num_short == 1
    assert node.allocating == []


def test_parity_that_may_not_fit_is_reported_once_all_ranks_are_known(node: Node) -> None:
    node.requests.begin(0.5)
    node.free_bytes = 5 * MB
    for rank in (0, 1, 1):
        assert node.reserve(rank, MB) == messages.Done()
        assert len(node.agent) == (rank == 1)
    (notice,) = node.agent
    assert isinstance(notice, smp_messages.SmpNotice)
    assert notice.kind == "memory"
    assert "--erasure" in notice.reason
    node.free_bytes = MB
    answer = node.ask().answer
    assert isinstance(answer, worker_messages.MemoryRefused)
    assert 2 * MB <= answer.parity_bytes < 3 * MB


def test_the_agent_knows_what_is_needed_before_there_is_an_arena(node: Node) -> None:
    node.requests.begin(0.5)
    assert node.needed == [(0, 0)]
    for rank in (0, 1):
        assert node.reserve(rank, MB) == messages.Done()
    both, parity = node.needed[-1]
    assert 4 * MB <= both < 5 * MB
    assert parity == both // 2
    node.may_go_on.set()
    node.finish(node.ask(0))
    one, same_parity = node.needed[-1]
    assert one == both // 2
    assert parity - MB < same_parity <= parity  # the exact size of one arena is known now
    node.finish(node.ask(1))
    assert node.needed[-1][0] == 0
    assert node.needed[-1][1] > 0


def test_the_agent_knows_what_is_needed_of_memory_that_is_refused(node: Node) -> None:
    node.free_bytes = MB
    assert isinstance(node.reserve(0, MB), worker_messages.MemoryRefused)
    assert node.needed[-1][0] >= 2 * MB
    assert isinstance(node.ask(1, image_bytes=3 * MB).answer, worker_messages.MemoryRefused)
    assert node.needed[-1][0] >= 8 * MB
    node.begin(1)
    node.requests.begin(0.0)
    assert node.needed[-1] == (0, 0)


def test_an_arena_that_is_granted_again_is_not_needed_any_more(node: Node) -> None:
    node.may_go_on.set()
    node.finish(node.ask())
    assert node.reserve(0, 3 * MB) == messages.Done()
    assert node.needed[-1][0] > 0
    node.finish(node.ask())
    assert node.needed[-1][0] == 0


def test_a_rank_that_seals_needs_no_more(node: Node) -> None:
    node.may_go_on.set()
    node.finish(node.ask())
    before = len(node.needed)
    node.requests.sealed(Rank(0))
    assert len(node.needed) == before, "nothing has changed"
    node.free_bytes = MB
    assert isinstance(node.ask(image_bytes=3 * MB).answer, worker_messages.MemoryRefused)
    assert node.needed[-1][0] > 0
    node.requests.sealed(Rank(0))
    assert node.needed[-1][0] == 0
