"""A snapshot is written during its capture, and counts only if it is sealed as it was written.

The test acts as the worker: it copies piece by piece, with any speed and any errors.
"""

import contextlib
import gc
import os
import random
import select
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash

from ftrun.errors import CheckpointError, PeerError
from ftrun.ids import Generation, Rank, RunId, Version, version
from ftrun.smp.checkpoint import live_capture as checkpoint_stream
from ftrun.smp.checkpoint.live_capture import CaptureFilter, LiveSlot
from ftrun.smp.checkpoint.load import LoadJob, load_checkpoint
from ftrun.smp.checkpoint.slot_reader import newest_version
from ftrun.smp.checkpoint.storage.direct_file import CopyBuffers, Throttle
from ftrun.smp.checkpoint.storage.storage import Retention
from ftrun.smp.checkpoint.write_job import WriteJob, WriterContext, WriteResult
from ftrun.smp.checkpoint.writer import CheckpointWriter
from ftrun.snapshot.layout import CopyTiming, LayoutEntry, make_layout
from ftrun.wire.messages import checkpoint as checkpoint_messages
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.shared_memory.arena import (
    Arena,
    ArenaShape,
    SlotHeader,
    SlotState,
    create_memfd,
    table_digest,
    void_slots,
)
from tests.integration.test_checkpoint_nodes import WORLD, Make, Node, check_files, image_of, make

__all__ = ["make"]

LAYOUT = make_layout([LayoutEntry("weight", "F32", (6_000_000,), CopyTiming.LAZY)], plain_bytes=10)
NUM_PIECES, RANKS = len(LAYOUT.pieces), [Rank(0), Rank(1)]
HALF = NUM_PIECES * 3 // 4
"""18 MB: more than a file or an upload buffers before it writes."""
TIMEOUT_S = 60.0


class Worker:
    """Captures one rank by hand."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        shape = ArenaShape(rank, 2, LAYOUT.image_bytes, NUM_PIECES, 9 + rank)
        self.fd = create_memfd(shape)
        self.arena = Arena(self.fd, writable=True)

    def begin(self, at: Version, slot: int) -> None:
        self.arena.begin_copy(slot, self._header(SlotState.COPYING, at, 0))
        self.arena.image(slot)[: len(LAYOUT.header)] = LAYOUT.header

    def copy(self, at: Version, slot: int, first: int, last: int) -> None:
        """Copy these pieces; the digest of each follows its bytes."""
        image, table = self.arena.image(slot), self.arena.table(slot)
        for index in range(first, last):
            piece = LAYOUT.pieces[index]
            start = len(LAYOUT.header) + piece.offset
            data = stamp(self.rank, at, index, piece.num_bytes)
            image[start : start + piece.num_bytes] = data
            table[index] = xxhash.xxh3_64_intdigest(data)

    def seal(self, at: Version, slot: int) -> None:
        digest = table_digest(self.arena.table(slot))
        self.arena.write_header(slot, self._header(SlotState.SEALED, at, digest))

    def whole(self, at: Version, slot: int) -> None:
        self.begin(at, slot)
        self.copy(at, slot, 0, NUM_PIECES)
        self.seal(at, slot)

    def close(self) -> None:
        self.arena.close()
        os.close(self.fd)

    def _header(self, state: SlotState, at: Version, digest: int) -> SlotHeader:
        now_ns = time.monotonic_ns()
        return SlotHeader(state, at.generation, at.step, LAYOUT.image_bytes, digest, now_ns)


def stamp(rank: int, at: Version, index: int, num_bytes: int) -> bytes:
    """Bytes of exactly this piece of this version."""
    seed = xxhash.xxh3_128_digest(f"{rank} {at} {index}".encode())
    return (seed * (num_bytes // len(seed) + 1))[:num_bytes]


class Writing:
    """A checkpoint that is written in another thread."""

    def __init__(self, workers: list[Worker], folder: Path) -> None:
        self.folder = folder
        self.is_over = False
        self.hurries = False
        self.is_committed: bool | None = True
        self.free_bytes = 1 << 40
        self.throttle = Throttle(threading.Event())
        self.workers = workers
        means = WriterContext(RunId("run"), CopyBuffers(lambda: self.free_bytes), self.throttle)
        self._writer = CheckpointWriter(means)
        self._pool = ThreadPoolExecutor(1)

    def order(self, where: str, *, wait_s: float, generation: int) -> WriteJob:
        newest = newest_version({one.rank: [one.fd] for one in self.workers}, 2)
        follow = CaptureFilter(
            Generation(generation),
            is_over=lambda: self.is_over,
            hurries=lambda: self.hurries,
            wait_s=wait_s,
            is_committed=lambda _: self.is_committed,
            from_step=newest.step + 1 if newest is not None else 0,
        )
        is_live = follow if wait_s else None
        return WriteJob(where, tuple(RANKS), 2, Retention(3), follow=is_live)

    def begin(
        self, where: str = "", *, wait_s: float = 5.0, generation: int = 0
    ) -> "Future[WriteResult]":
        where = where or str(self.folder)
        fds = {one.rank: [one.fd] for one in self.workers}
        order = self.order(where, wait_s=wait_s, generation=generation)
        return self._pool.submit(self._writer.write, fds, order)

    def num_written(self) -> int:
        """Bytes in files that are not published."""
        files = [*self.folder.glob(".tmp-*/.rank*"), *self.folder.glob("step-*/rank-*")]
        return sum(path.stat().st_blocks * 512 for path in files)

    def close(self) -> None:
        self.throttle.stop.set()
        self._pool.shutdown()


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    gc.collect()  # what other tests have left is not counted
    before = len(os.listdir("/proc/self/fd"))
    found = [Worker(rank) for rank in RANKS]
    yield found
    for one in found:
        one.close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def writing(workers: list[Worker], tmp_path: Path) -> Iterator[Writing]:
    found = Writing(workers, tmp_path / "checkpoints")
    yield found
    found.close()


def wait_until(claim: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not claim():
        assert time.monotonic() < end, f"not within {TIMEOUT_S} s: {what}"
        select.select([], [], [], 0.002)


def loaded_step(where: str) -> int:
    """Of the newest usable checkpoint, which must equal the captured state, bit for bit."""
    order = LoadJob(2, RANKS, lambda needed_bytes: None)
    loaded = load_checkpoint(where, order, threading.Event())
    assert loaded is not None
    assert loaded.rejected == {}
    step = loaded.version.step
    generation = int(str(loaded.path).partition(f"step-{step:08d}-g")[2].partition("-")[0])
    for rank, fd in zip(RANKS, loaded.fds, strict=True):
        arena = Arena(fd, writable=False)
        image = arena.image(0)
        for index, piece in enumerate(LAYOUT.pieces):
            start = len(LAYOUT.header) + piece.offset
            data = stamp(rank, version(generation, step), index, piece.num_bytes)
            assert image[start : start + piece.num_bytes] == data, (rank, index)
        del image
        arena.close()
        os.close(fd)
    return step


def begin_all(workers: list[Worker], at: Version, slot: int, num_pieces: int) -> None:
    for worker in workers:
        worker.begin(at, slot)
        worker.copy(at, slot, 0, num_pieces)


def end_all(workers: list[Worker], at: Version, slot: int, done: int) -> None:
    for worker in workers:
        worker.copy(at, slot, done, NUM_PIECES)
        worker.seal(at, slot)


@pytest.mark.parametrize("kind", ["directory", "url"])
@pytest.mark.parametrize("free_bytes", [1 << 40, 0], ids=["copied", "not copied"])
def test_the_first_byte_is_written_before_the_last_is_copied(
    workers: list[Worker], writing: Writing, kind: str, free_bytes: int
) -> None:
    where = str(writing.folder) if kind == "directory" else f"file://{writing.folder}"
    writing.free_bytes = free_bytes
    first, second = version(0, 1), version(0, 2)
    for worker in workers:
        worker.whole(first, 0)
    assert writing.begin(where, wait_s=0.0).result(TIMEOUT_S).version == first
    published = writing.num_written()
    begin_all(workers, second, 1, HALF)
    future = writing.begin(where)
    wait_until(lambda: writing.num_written() > published, "something of it is on disk")
    assert loaded_step(where) == 1, "nothing of it counts"
    end_all(workers, second, 1, HALF)
    written = future.result(TIMEOUT_S)
    assert written.version == second
    assert written.ahead_s > 0
    assert loaded_step(where) == 2


def test_nothing_is_published_before_the_last_rank_has_sealed(
    workers: list[Worker], writing: Writing
) -> None:
    at = version(0, 1)
    begin_all(workers, at, 0, HALF)
    future = writing.begin()
    workers[0].copy(at, 0, HALF, NUM_PIECES)
    workers[0].seal(at, 0)
    wait_until(lambda: len(list(writing.folder.glob(".tmp-*/rank*.digests"))) == 1, "one is whole")
    workers[1].copy(at, 0, HALF, NUM_PIECES)
    time.sleep(0.05)
    assert not future.done()
    assert not list(writing.folder.glob("step-*"))
    workers[1].seal(at, 0)
    assert future.result(TIMEOUT_S).version == at


def report_seals(node: Node) -> None:
    """Connect as the workers: the SMP counts what they have sealed."""
    for rank in node.ranks:
        node.connect("worker", rank)


def give_back(workers: list[Worker], writing: Writing) -> None:
    """The first rank withdraws its seal while the second still copies."""
    workers[0].copy(version(0, 2), 1, HALF, NUM_PIECES)
    workers[0].seal(version(0, 2), 1)
    select.select([], [], [], 0.05)
    void_slots(workers[0].fd, lambda found: found == version(0, 2))
    workers[1].copy(version(0, 2), 1, HALF, NUM_PIECES)
    workers[1].seal(version(0, 2), 1)


def begin_another(workers: list[Worker], writing: Writing) -> None:
    """The capture was discarded, and the next one goes into the same slot."""
    workers[0].begin(version(0, 3), 1)


def end_generation(workers: list[Worker], writing: Writing) -> None:
    """A rank has died in the middle; its generation is over."""
    writing.is_over = True


def end_run(workers: list[Worker], writing: Writing) -> None:
    """The same, and the run ends."""
    writing.hurries = True


def give_up_waiting(workers: list[Worker], writing: Writing) -> None:
    """The same, and no message reports it."""
    checkpoint_stream.TIMEOUT_S = 0.1


@pytest.mark.parametrize(
    "happens", [give_back, begin_another, end_generation, end_run, give_up_waiting]
)
def test_a_capture_that_comes_to_nothing_leaves_nothing(
    workers: list[Worker],
    writing: Writing,
    monkeypatch: pytest.MonkeyPatch,
    happens: Callable[[list[Worker], Writing], None],
) -> None:
    """The newest version that all ranks hold is written in its place."""
    monkeypatch.setattr(checkpoint_stream, "TIMEOUT_S", 30.0)  # put back at the end
    for worker in workers:
        worker.whole(version(0, 1), 0)
    begin_all(workers, version(0, 2), 1, HALF)
    future = writing.begin()
    wait_until(lambda: writing.num_written() > 0, "something of it is on disk")
    happens(workers, writing)
    written = future.result(TIMEOUT_S)
    assert (written.version, written.ahead_s) == (version(0, 1), 0.0)
    assert loaded_step(str(writing.folder)) == 1
    assert [path.name for path in writing.folder.glob(".tmp*")] == []


def test_what_was_read_too_early_is_found_at_the_seal(
    workers: list[Worker], writing: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table says that a piece is there, and it is not: the table is only a hint."""
    at = version(0, 1)
    begin_all(workers, at, 0, HALF)
    table = workers[0].arena.table(0)
    for index in range(HALF, NUM_PIECES):
        table[index] = 1
    is_read, found = threading.Event(), LiveSlot.found

    def noted(self: LiveSlot, index: int, digest: int) -> None:
        found(self, index, digest)
        if index == NUM_PIECES - 1:
            is_read.set()

    monkeypatch.setattr(LiveSlot, "found", noted)
    future = writing.begin()
    wait_until(lambda: writing.num_written() >= 16 << 20, "all but the last buffer is on disk")
    assert is_read.wait(TIMEOUT_S)
    # The last possible detection: then there is a version of all ranks to write in its place.
    end_all(workers[::-1], at, 0, HALF)
    written = future.result(TIMEOUT_S)
    assert (written.version, written.ahead_s) == (at, 0.0)
    assert loaded_step(str(writing.folder)) == 1


def test_what_is_sealed_and_not_committed_is_not_published(
    workers: list[Worker], writing: Writing
) -> None:
    for worker in workers:
        worker.whole(version(0, 1), 0)
    begin_all(workers, version(0, 2), 1, HALF)
    writing.is_committed = None
    future = writing.begin()
    end_all(workers, version(0, 2), 1, HALF)
    wait_until(lambda: len(list(writing.folder.glob(".tmp-*/rank*.digests"))) == 2, "all is whole")
    time.sleep(0.05)
    assert not future.done()
    assert not list(writing.folder.glob("step-*"))
    writing.is_committed = False
    written = future.result(TIMEOUT_S)
    # The test's slots still have it; a real SMP has voided it, or abandoned it.
    assert written.ahead_s == 0.0


def test_captures_of_other_generations_are_not_followed(
    workers: list[Worker], writing: Writing
) -> None:
    begin_all(workers, version(0, 7), 0, HALF)
    with pytest.raises(CheckpointError, match="nothing to write"):
        writing.begin(wait_s=0.05, generation=1).result(TIMEOUT_S)


def test_a_write_that_is_given_up_leaves_nothing(workers: list[Worker], writing: Writing) -> None:
    begin_all(workers, version(0, 1), 0, HALF)
    future = writing.begin()
    wait_until(lambda: writing.num_written() > 0, "something of it is on disk")
    writing.throttle.stop.set()
    with pytest.raises(CheckpointError):
        future.result(TIMEOUT_S)
    assert list(writing.folder.iterdir()) == []


@pytest.mark.parametrize("free_bytes", [1 << 40, 0], ids=["copied", "not copied"])
def test_a_worker_that_never_waits_spoils_no_checkpoint(
    workers: list[Worker], writing: Writing, free_bytes: int
) -> None:
    """It captures without pause, discards some, and overwrites the slot that is being written."""
    writing.free_bytes = free_bytes
    ends, has_sealed = threading.Event(), threading.Event()
    chance = random.Random(5)

    def train() -> None:
        step, kept = 0, 1
        while not ends.is_set():
            step, slot = step + 1, 1 - kept  # the version that all ranks hold is never touched
            at = version(0, step)
            for worker in workers:
                worker.begin(at, slot)
            is_given_up = chance.random() < 0.2
            last = chance.randrange(NUM_PIECES) if is_given_up else NUM_PIECES
            for worker in workers:
                worker.copy(at, slot, 0, last)
                if not is_given_up:
                    worker.seal(at, slot)
            if not is_given_up:
                kept = slot
                has_sealed.set()
            select.select([], [], [], chance.choice([0.0, 0.0, 0.05, 0.2]))

    training = threading.Thread(target=train)
    training.start()
    try:
        steps = []
        assert has_sealed.wait(TIMEOUT_S)
        for _ in range(8):
            try:
                steps.append(writing.begin(wait_s=1.0).result(TIMEOUT_S).version.step)
            except CheckpointError as error:
                if "overwritten" not in str(error):
                    raise
                continue
            assert loaded_step(str(writing.folder)) == steps[-1]
    finally:
        ends.set()
        training.join(TIMEOUT_S)
    assert steps == sorted(steps)
    assert steps


@pytest.mark.parametrize(
    "point",
    ["started", "shard_written", "index_written", "synced", "renamed", "link_made", "latest"],
)
def test_an_smp_killed_while_it_follows_leaves_one_that_loads(
    make: Make, tmp_path: Path, point: str
) -> None:
    """SIGKILL at each point of a write that has begun before the seal."""
    directory, second = tmp_path / "checkpoints", version(0, 2)
    node = make(*range(WORLD))
    passed_before = WORLD if point == "shard_written" else 1
    node.ready(crash_at=f"smp.checkpoint.{point}:{passed_before + 1}")
    body = checkpoint_messages.WriteCheckpoint(
        str(directory), 2, live_capture_timeout_s=5.0, capture_from=(0, 2)
    )
    first = node.ask(checkpoint_messages.WriteCheckpoint(str(directory), 2))
    assert isinstance(first, checkpoint_messages.CheckpointWritten)
    for rank in node.ranks:
        arena = Arena(node.arenas[rank], writable=True)
        arena.begin_copy(1, SlotHeader(SlotState.COPYING, 0, 2, arena.shape.image_bytes, 0, 0))
        arena.close()
    node.send(body)
    select.select([], [], [], 0.1)
    assert not list(directory.glob("step-00000002*"))
    node.seal(second, slot=1)
    with contextlib.suppress(PeerError):  # it may be dead already
        report_seals(node)
    with pytest.raises(PeerError):
        node.answer()
    node.lose()
    node.start()
    answer = node.load(directory)
    assert isinstance(answer, checkpoint_messages.CheckpointLoaded)
    # After the rename it is whole, and another one is `latest` until the link is changed.
    assert answer.step == (2 if point == "latest" else 1)
    assert sorted(node.granted) == node.ranks
    for rank, fd in node.granted.items():
        arena = Arena(fd, writable=False)
        slot = arena.find(version(-1, answer.step))
        assert slot == 0
        assert bytes(arena.image(slot)) == image_of(rank, version(0, answer.step))
        arena.close()


CAPTURED = version(0, 3)


def begin_capture(node: Node, at: Version, *, slot: int = 1) -> None:
    for rank in node.ranks:
        arena = Arena(node.arenas[rank], writable=True)
        header = SlotHeader(
            SlotState.COPYING, at.generation, at.step, arena.shape.image_bytes, 0, 0
        )
        arena.begin_copy(slot, header)
        arena.close()


@pytest.fixture
def captured(make: Make, tmp_path: Path) -> list[Node]:
    """Two nodes that have written the files of a capture, which all ranks have sealed.

    The request was there before the capture, and names a step before it.
    """
    nodes = [make(0, 1), make(2, 3)]
    body = checkpoint_messages.WriteCheckpoint(
        str(tmp_path), 2, token="token", capture_from=(0, 2), live_capture_timeout_s=TIMEOUT_S
    )
    for node in nodes:
        node.ready()
        node.send(body)
    for node in nodes:
        begin_capture(node, CAPTURED)
    wait_until(lambda: len(list(tmp_path.glob(".tmp-*"))) == 1, "one folder for all nodes")
    for node in nodes:
        node.seal(CAPTURED, slot=1)
    tables = lambda: len(list(tmp_path.glob(".tmp-*/rank*.digests")))  # noqa: E731
    wait_until(lambda: tables() == WORLD, "the files of all ranks are whole")
    time.sleep(0.05)
    assert not list(tmp_path.glob(".tmp-*/part-*")), "no part of it exists before the commit"
    return nodes


def written(node: Node) -> checkpoint_messages.CheckpointWritten:
    answer = node.answer()
    assert isinstance(answer, checkpoint_messages.CheckpointWritten), answer
    return answer


def test_nodes_publish_what_they_have_captured_once_it_is_committed(
    captured: list[Node], tmp_path: Path
) -> None:
    first, second = captured
    first.send(smp_messages.CommitVersion(0, 3))
    assert written(first).missing_ranks == [2, 3]
    assert not list(tmp_path.glob("step-*"))
    second.send(smp_messages.CommitVersion(0, 3))
    check_files(Path(written(second).path), CAPTURED)


@pytest.mark.parametrize("is_abandoned", [True, False], ids=["abandoned", "its generation is over"])
def test_nodes_publish_nothing_that_is_not_committed(
    captured: list[Node], tmp_path: Path, is_abandoned: bool
) -> None:
    for node in captured:
        if is_abandoned:
            node.send(smp_messages.AbandonVersion(0, 3))
        else:
            node.begin(generation=1)
    for node in captured:
        answer = node.answer()
        assert isinstance(answer, checkpoint_messages.CheckpointFailed)
    assert not list(tmp_path.glob("step-*"))
    assert not list(tmp_path.glob(".tmp-*/part-*"))


def test_a_node_lost_before_the_commit_leaves_no_checkpoint(
    captured: list[Node], make: Make, tmp_path: Path
) -> None:
    """Those that continue write their own, and remove the rest of this one."""
    first, second = captured
    second.lose()
    first.send(smp_messages.CommitVersion(0, 3))
    assert written(first).missing_ranks == [2, 3]
    another = make(*range(WORLD))
    another.ready(version(0, 4))
    another.send(checkpoint_messages.WriteCheckpoint(str(tmp_path), 2, (0, 4), "another"))
    check_files(Path(written(another).path), version(0, 4))
    assert len(list(tmp_path.glob("step-*"))) == 1
    assert not list(tmp_path.glob(".tmp-*"))


def test_two_versions_are_written_while_the_next_one_is_captured(
    make: Make, tmp_path: Path
) -> None:
    """The storage is slow; the third capture overwrites the slot of the first version."""
    node = make(*range(WORLD))
    node.ready()

    def order(step: int) -> checkpoint_messages.WriteCheckpoint:
        return checkpoint_messages.WriteCheckpoint(
            str(tmp_path), 3, (0, step), "token", bytes_per_s=600_000.0
        )

    def num_files(step: int) -> int:
        return len(list(tmp_path.glob(f".tmp-step-{step:08d}-*/rank*")))

    node.send(order(1))
    wait_until(lambda: num_files(1) > 0, "the first version is being written")
    node.seal(version(0, 2), slot=1)
    node.send(order(2))
    wait_until(lambda: num_files(1) * num_files(2) > 0, "both versions are being written")
    begin_capture(node, version(0, 3), slot=0)
    assert num_files(1) * num_files(2) > 0
    node.seal(version(0, 3), slot=0)
    for step in (1, 2):
        folder = Path(written(node).path)
        for rank in node.ranks:
            data = (folder / f"rank-{rank:05d}.safetensors").read_bytes()
            assert data == image_of(rank, version(0, step))
    check_files(folder, version(0, 2))


def test_an_order_for_a_capture_that_another_order_awaits_is_answered_at_once(
    make: Make, tmp_path: Path
) -> None:
    node = make(*range(WORLD))
    node.ready()
    for step in (2, 3):  # the leader repeats a request whose step was abandoned
        node.send(
            checkpoint_messages.WriteCheckpoint(
                str(tmp_path), 2, token="token", capture_from=(0, step), live_capture_timeout_s=30.0
            )
        )
    answer = node.answer()
    assert isinstance(answer, checkpoint_messages.CheckpointFailed)
    assert answer.is_superseded
    node.seal(CAPTURED, slot=1)
    report_seals(node)
    check_files(Path(written(node).path), CAPTURED)


def test_a_capture_that_does_not_begin_is_reported_by_a_node_of_several(
    make: Make, tmp_path: Path
) -> None:
    """It does not know which version the others write instead."""
    node = make(0, 1)
    node.ready()
    body = checkpoint_messages.WriteCheckpoint(
        str(tmp_path / "x"), 2, token="token", capture_from=(0, 2), live_capture_timeout_s=0.1
    )
    answer = node.ask(body)
    assert isinstance(answer, checkpoint_messages.CheckpointFailed)
    assert "no snapshot from step 2 on" in answer.reason
