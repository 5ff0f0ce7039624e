"""Orders of checkpoints through capture pools: each wait of a job has an end."""

import os
import select
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash

from ftrun import clock
from ftrun.ids import Generation, Rank, RunId, version
from ftrun.linux import AvailableMemory
from ftrun.smp.checkpoint import pool_reader
from ftrun.smp.checkpoint.service import CheckpointService
from ftrun.smp.jobs import JobLanes
from ftrun.smp.memory import pools
from ftrun.smp.memory.arenas import ArenaStore, create
from ftrun.smp.memory.commits import CommitCoordinator
from ftrun.smp.memory.pools import CapturePools
from ftrun.snapshot.layout import PAGE_BYTES, make_layout
from ftrun.wire.messages import checkpoint as checkpoint_messages
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import worker as worker_messages
from ftrun.wire.messages.smp import BeginGeneration
from ftrun.wire.shared_memory.arena import Arena, ArenaShape, SlotHeader, SlotState, table_digest
from ftrun.wire.shared_memory.pages import SharedPage, create_command_page
from ftrun.wire.shared_memory.pool import CapturePool, PooledHeader, PoolField
from ftrun.worker.targets import pool_capture
from tests.launch_requests import context_of

TIMEOUT_S = 60.0
MB = 1 << 20
RANKS = [Rank(0), Rank(1)]
LAYOUT = make_layout([], plain_bytes=10)


class RankWriter:
    """A rank with a pool that is larger than its image."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.answers: list[Any] = []

    def send(self, body: messages.AnyMessage, *, fds: tuple[int, ...] = ()) -> None:
        self.answers.append(body)
        for fd in fds:
            self.fd = os.dup(fd)
            self.pool = CapturePool(self.fd, is_writer=True)

    def show(self, step: int, state: SlotState, digest: int = 0) -> None:
        shape = ArenaShape(
            *(self.rank, len(RANKS), LAYOUT.image_bytes, len(LAYOUT.pieces)),
            xxhash.xxh3_64_intdigest(LAYOUT.header),
        )
        header = PooledHeader(state, 0, step, self.base, shape, digest, clock.now_ns())
        self.pool.write_header(header)

    def begin(self, step: int) -> None:
        self.base = self.pool.get(PoolField.WRITTEN)
        self.show(step, SlotState.COPYING)

    def capture(self, step: int) -> None:
        self.begin(step)
        data = bytes(LAYOUT.data_bytes)
        table = bytearray(8 * len(LAYOUT.pieces))
        for index, one in enumerate(LAYOUT.pieces):
            piece = data[one.offset : one.offset + one.num_bytes]
            memoryview(table).cast("Q")[index] = xxhash.xxh3_64_intdigest(piece)
        image = LAYOUT.header + data + table
        while image:
            room = self.pool.room(len(image))
            room[:], image = image[: len(room)], image[len(room) :]
            self.pool.add_written(len(room))
        self.show(step, SlotState.SEALED, table_digest(memoryview(table).cast("Q")))


class Node:
    """The part of an SMP that writes checkpoints, and two ranks with pools."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        fd = create_command_page()
        self.page = SharedPage(fd)
        os.close(fd)
        self.jobs = JobLanes()
        self.memory = ArenaStore(lambda: AvailableMemory(1 << 40, "a limit"))
        self.commits = CommitCoordinator(self.memory, lambda _: None)
        self.pools = CapturePools(
            self.memory,
            self.jobs,
            tracker=self.commits.tracker,
            show=self.commits.show_pooled,
            changed=lambda: None,
            refuse=lambda *_: None,
        )
        self.service = CheckpointService(
            *(RunId("pooled"), self.jobs, self.memory, self.commits, lambda _: None),
            *(lambda: True, lambda: self.pools),
        )
        self.begin(0)
        self.ranks = [RankWriter(rank) for rank in RANKS]
        for one in self.ranks:
            body = worker_messages.RequestPool(one.rank, 8 * LAYOUT.image_bytes)
            self.pools.request(one, body)  # type: ignore[arg-type]
        self.await_(lambda: self.pools.are_complete)

    def begin(self, generation: int) -> None:
        self.commits.begin(self.page, BeginGeneration(generation, len(RANKS), list(RANKS)))

    def await_(self, is_it: Callable[[], object]) -> None:
        give_up_s = clock.now_s() + TIMEOUT_S
        while not is_it():
            assert clock.now_s() < give_up_s
            if select.select([self.jobs], [], [], 0.01)[0]:
                self.jobs.finish()

    def order(self, step: int) -> list[Any]:
        """Order a checkpoint of a capture from this step on; return where its answer arrives."""
        answers: list[Any] = []
        body = checkpoint_messages.WriteCheckpoint(
            str(self.folder), 3, token="x", live_capture_timeout_s=1e9, capture_from=(0, step)
        )
        requester = SimpleNamespace(send=answers.append)
        self.service.write(requester, body, self.commits.world())  # type: ignore[arg-type]
        return answers

    def await_reader(self) -> None:
        self.await_(lambda: all(one.pool.get(PoolField.READER) for one in self.ranks))

    def await_superseded(self, answers: list[Any]) -> str:
        self.await_(lambda: answers)
        (failed,) = answers
        assert isinstance(failed, checkpoint_messages.CheckpointFailed)
        assert failed.is_superseded
        assert not any(one.pool.get(PoolField.READER) for one in self.ranks)
        return failed.reason

    def arena(self, step: int) -> None:
        """A version that rank 0 has in two slots."""
        fd = create(ArenaShape(0, 2, PAGE_BYTES, 1, 1))
        arena = Arena(fd, writable=True)
        arena.write_header(0, SlotHeader(SlotState.SEALED, 0, step, PAGE_BYTES, 1, 1))
        arena.close()
        self.memory.add(fd, Generation(0))

    def write(self, step: int) -> list[Any]:
        """Write a checkpoint; its job has ended, and the server has not handled its result."""
        answers = self.order(step)
        self.await_reader()
        for one in self.ranks:
            one.capture(step)
        assert select.select([self.jobs], [], [], TIMEOUT_S)[0]
        assert not answers
        return answers

    def written(self, answers: list[Any]) -> None:
        self.await_(lambda: answers)
        assert isinstance(answers[0], checkpoint_messages.CheckpointWritten), answers

    def close(self) -> None:
        self.service.stop()
        self.pools.free()
        self.memory.free()
        for one in self.ranks:
            one.pool.close()
            os.close(one.fd)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(pools, "_FREED_S", 0.0)
    made = Node(tmp_path)
    yield made
    made.close()


def test_a_job_that_waits_longer_than_a_stall_is_alive_when_the_capture_begins(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_capture, "_STALLED_S", 1.0)
    node.order(5)
    node.await_reader()
    clock.sleep(1.2)
    link = SimpleNamespace(is_lost=lambda: False)
    obstacle = partial(pool_capture._Obstacle, node.ranks[0].pool, context_of(), link, 5)
    assert not obstacle()()
    node.ranks[0].begin(5)  # and it waits for the other rank
    clock.sleep(1.2)
    assert not obstacle()()


def test_the_other_ranks_wait_longer_while_a_file_is_made_durable(node: Node) -> None:
    node.written(node.write(5))
    ahead_s = (node.ranks[1].pool.get(PoolField.READER_NS) - clock.now_ns()) / 1e9
    assert ahead_s > pool_reader._DURABLE_S - TIMEOUT_S


@pytest.mark.parametrize("way", ["reported", "given up", "in time"])
def test_a_rank_without_the_snapshot_ends_the_wait_and_the_next_order_is_written(
    node: Node, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    if way == "in time":
        monkeypatch.setattr(pool_reader, "_TOGETHER_S", 0.1)
    answers = node.order(5)
    node.await_reader()
    node.ranks[0].begin(5)
    if way == "reported":
        node.commits.skipped(version(0, 5))
    elif way == "given up":
        node.ranks[1].begin(5)
        node.ranks[1].show(5, SlotState.VOID)
    reason = node.await_superseded(answers)
    assert ("1 of 2 ranks" in reason) == (way == "in time")
    node.written(node.write(6))
    assert os.readlink(node.folder / "latest") == "step-00000006-g0"


def test_pools_that_are_left_end_the_awaited_job_and_free_the_memory(node: Node) -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    answers = node.order(5)
    node.await_reader()
    node.pools.leave()
    node.await_superseded(answers)
    assert len(os.listdir("/proc/self/fd")) < num_open
    node.order(6)
    assert not node.service._is_capture_awaited(1)
    assert node.service._is_capture_awaited(0)


def test_a_complete_checkpoint_frees_older_arenas_only(node: Node) -> None:
    node.arena(3)
    node.arena(7)
    node.written(node.write(5))
    (arena,) = node.memory.all()
    assert arena.holds(version(0, 7))


@pytest.mark.parametrize("event", ["generation", "pools left", "checkpoint loaded"])
def test_a_checkpoint_of_earlier_pools_frees_nothing(node: Node, event: str) -> None:
    """A rank was killed after its seal, or left its pool, while its file was made durable."""
    answers = node.write(5)
    if event == "generation":
        node.begin(1)
    elif event == "pools left":
        node.pools.leave()
    else:
        body = checkpoint_messages.LoadCheckpoint(str(node.folder / "none"), 2, [0, 1])
        node.service.load(SimpleNamespace(send=lambda _: None), body)  # type: ignore[arg-type]
    node.arena(3)
    node.written(answers)
    assert len(node.memory.all()) == 1
