"""A checkpoint is whole, or it is rejected and the one before it is used."""

import fcntl
import gc
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from ftrun.errors import CheckpointError, MemoryTooSmall, NoneOfThisRun
from ftrun.ids import Rank, RunId, version
from ftrun.smp.checkpoint import slot_reader
from ftrun.smp.checkpoint.index import parse_index
from ftrun.smp.checkpoint.load import LoadedCheckpoint, LoadJob, load_checkpoint
from ftrun.smp.checkpoint.shared_load import LoadGroup
from ftrun.smp.checkpoint.slot_reader import CopyBeforeOverwrite, SlotOverwritten, find_shards
from ftrun.smp.checkpoint.storage.direct_file import CopyBuffers, Throttle
from ftrun.smp.checkpoint.storage.local import LocalStorage
from ftrun.smp.checkpoint.storage.storage import Retention, remove_all, to_prune
from ftrun.smp.checkpoint.write_job import TRIES, WriteJob, WriterContext
from ftrun.smp.checkpoint.writer import CheckpointWriter
from ftrun.snapshot.layout import PAGE_BYTES, CopyTiming, LayoutEntry, make_layout
from ftrun.wire.messages.checkpoint import INDEX_NAME
from ftrun.wire.shared_memory.arena import (
    Arena,
    ArenaShape,
    SlotHeader,
    SlotState,
    create_memfd,
    read_shape,
    table_digest,
    verify,
)

LAYOUT = make_layout([LayoutEntry("weight", "F32", (150_000,), CopyTiming.LAZY)], plain_bytes=10)
RANKS = [Rank(0), Rank(1)]


class Arenas:
    """The arenas of two ranks, filled by hand."""

    pace = 1
    """Nanoseconds between two steps."""

    def __init__(self) -> None:
        self.fds = {
            rank: [
                create_memfd(ArenaShape(rank, 2, LAYOUT.image_bytes, len(LAYOUT.pieces), 9 + rank))
            ]
            for rank in RANKS
        }

    def seal(self, step: int, *, generation: int = 0, slot: int = 0) -> None:
        for rank in RANKS:
            self.seal_one(rank, step, generation=generation, slot=slot)

    def seal_one(self, rank: Rank, step: int, *, generation: int = 0, slot: int = 0) -> None:
        arena = Arena(self.fds[rank][0], writable=True)
        image = arena.image(slot)
        start = len(LAYOUT.header)
        image[:] = LAYOUT.header + bytes([step * 10 + rank]) * (len(image) - start)
        table = arena.table(slot)
        for index, piece in enumerate(LAYOUT.pieces):
            at = start + piece.offset
            table[index] = xxhash.xxh3_64_intdigest(image[at : at + piece.num_bytes])
        size = len(image)
        arena.write_header(
            slot,
            SlotHeader(
                SlotState.SEALED, generation, step, size, table_digest(table), step * self.pace
            ),
        )
        del image, table
        arena.close()


@pytest.fixture
def arenas() -> Iterator[Arenas]:
    gc.collect()  # what other tests have left is not counted
    before = len(os.listdir("/proc/self/fd"))
    found = Arenas()
    yield found
    for some in found.fds.values():
        for fd in some:
            os.close(fd)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def writer(*, free_bytes: int = 1 << 40, stop: bool = False) -> CheckpointWriter:
    event = threading.Event()
    if stop:
        event.set()
    return CheckpointWriter(
        WriterContext(RunId("run"), CopyBuffers(lambda: free_bytes), Throttle(event))
    )


def write(
    arenas: Arenas, directory: Path, *, keep: int = 3, free_bytes: int = 1 << 40, life: str = ""
) -> Path:
    wanted = replace(order(directory, keep), life=life)
    return Path(writer(free_bytes=free_bytes).write(arenas.fds, wanted).path)


def order(directory: Path, keep: int = 3) -> WriteJob:
    return WriteJob(str(directory), tuple(RANKS), 2, Retention(keep))


def load(directory: Path, world_size: int = 2, life: str = "") -> LoadedCheckpoint | None:
    wanted = LoadJob(world_size, RANKS, lambda needed_bytes: None, life=life)
    return load_checkpoint(str(directory), wanted, threading.Event())


def check(loaded: LoadedCheckpoint | None, step: int) -> list[str]:
    """It is this step, bit for bit; the notes."""
    assert loaded is not None
    assert loaded.version == version(-1, step)
    for rank, fd in zip(RANKS, loaded.fds, strict=True):
        arena = Arena(fd, writable=False)
        assert arena.shape.layout_id == 9 + rank
        slot = arena.find(version(-1, step))
        assert slot == 0
        _, data = verify(arena, slot, what="test")
        assert bytes(data) == bytes([step * 10 + rank]) * len(data)
        del data
        arena.close()
        os.close(fd)
    return list(loaded.rejected.values())


@pytest.mark.parametrize("free_bytes", [1 << 40, 0], ids=["copied first", "piece by piece"])
def test_what_was_sealed_comes_back(arenas: Arenas, tmp_path: Path, free_bytes: int) -> None:
    arenas.seal(4)
    path = write(arenas, tmp_path, free_bytes=free_bytes)
    assert check(load(tmp_path), 4) == []
    index = parse_index((path / INDEX_NAME).read_bytes(), what="it")
    assert (index.run_id, index.generation, index.step, index.world_size) == ("run", 0, 4, 2)
    assert (path / "rank-00001.safetensors").stat().st_size == LAYOUT.image_bytes
    assert (path / "rank-00000.safetensors").read_bytes()[: len(LAYOUT.header)] == LAYOUT.header


def test_only_a_version_of_all_ranks_is_written(arenas: Arenas, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        write(arenas, tmp_path)
    arenas.seal(4)
    arenas.seal_one(Rank(0), 5, slot=1)
    assert write(arenas, tmp_path).name == "step-00000004-g0"


def corrupt(path: Path, at: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("rank-00001.safetensors", PAGE_BYTES + 540_000),
        ("rank-00000.safetensors", 60),
        ("rank-00000.safetensors", 0),
        ("rank-00001.digests", 3),
        ("index.json", 300),
        ("index.json", 20),
    ],
)
def test_one_flipped_bit_rejects_a_checkpoint_for_the_one_before(
    arenas: Arenas, tmp_path: Path, name: str, at: int
) -> None:
    arenas.seal(4)
    write(arenas, tmp_path)
    arenas.seal(5)
    newest = write(arenas, tmp_path)
    corrupt(newest / name, at)
    notes = check(load(tmp_path), 4)
    assert notes
    assert all(str(newest) in note for note in notes)


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00000.digests", "index.json"])
@pytest.mark.parametrize("cut", [False, True], ids=["missing", "cut short"])
def test_an_incomplete_checkpoint_is_excluded(
    arenas: Arenas, tmp_path: Path, name: str, cut: bool
) -> None:
    arenas.seal(4)
    write(arenas, tmp_path)
    arenas.seal(5)
    newest = write(arenas, tmp_path)
    if cut:
        os.truncate(newest / name, 5)
    else:
        (newest / name).unlink()
    assert check(load(tmp_path), 4)


@pytest.mark.parametrize("life", ["", "own"])
@pytest.mark.parametrize("name", ["rank-00001.safetensors", "index.json", ".", "latest"])
def test_what_cannot_be_read_for_a_moment_is_read_again(
    arenas: Arenas, tmp_path: Path, name: str, life: str
) -> None:
    """It cannot be read until the first attempt has failed."""
    directory = tmp_path / "saved"
    arenas.seal(4)
    folder = write(arenas, directory, life=life)
    paths = {".": directory, "latest": directory / "latest"}
    path = paths.get(name, folder / name)
    excluded = tmp_path / "aside"
    path.rename(excluded)
    path.symlink_to(path)  # a loop: ELOOP
    failed = threading.Event()

    def heal() -> None:
        failed.wait(20)
        path.unlink()
        excluded.rename(path)

    class Noticed(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            failed.set()

    handler = Noticed()
    logging.getLogger("ftrun.smp.checkpoint.load").addHandler(handler)
    reverter = threading.Thread(target=heal)
    reverter.start()
    try:
        assert check(load(directory, life=life), 4) == []
    finally:
        failed.set()
        reverter.join()
        logging.getLogger("ftrun.smp.checkpoint.load").removeHandler(handler)


def test_a_directory_that_cannot_be_read_at_all_is_no_empty_one(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for life in ("", "own"):
        with pytest.raises(OSError, match="symbolic links"):
            load(loop, life=life)


def test_what_cannot_be_read_may_be_of_this_run(arenas: Arenas, tmp_path: Path) -> None:
    """With --resume never, a node that cannot read the newest one reports it to the leader."""
    for step in (3, 4):
        arenas.seal(step)
        path = write(arenas, tmp_path, life="own")
    corrupt(path / "index.json", 100)
    (note,) = check(load(tmp_path, life="own"), 3)
    assert "is damaged" in note or "is not valid" in note
    with pytest.raises(NoneOfThisRun) as raised:
        load(tmp_path, life="another")
    assert list(raised.value.rejected) == [path.name]
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("step-00000099-g0")
    with pytest.raises(NoneOfThisRun):
        load(tmp_path, life="another")


def test_without_latest_the_one_written_last_is_used(arenas: Arenas, tmp_path: Path) -> None:
    arenas.seal(9)
    write(arenas, tmp_path)
    arenas.seal(4, generation=1)
    write(arenas, tmp_path)
    (tmp_path / "latest").unlink()
    check(load(tmp_path), 4)


def test_a_link_to_nothing_is_noted(arenas: Arenas, tmp_path: Path) -> None:
    arenas.seal(4)
    write(arenas, tmp_path)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("step-00000099-g0")
    assert check(load(tmp_path), 4)


def test_when_none_can_be_used_the_error_reports_why(arenas: Arenas, tmp_path: Path) -> None:
    arenas.seal(4)
    path = write(arenas, tmp_path)
    corrupt(path / "rank-00000.safetensors", PAGE_BYTES + 5)
    with pytest.raises(CheckpointError):
        load(tmp_path)
    assert load(tmp_path / "elsewhere") is None


def test_of_another_world_size_all_ranks_are_loaded(arenas: Arenas, tmp_path: Path) -> None:
    arenas.seal(4)
    write(arenas, tmp_path)
    found = load(tmp_path, world_size=5)
    assert found is not None
    assert found.world_size == 2
    check(found, 4)


def test_a_checkpoint_is_not_pruned_while_it_is_loaded(arenas: Arenas, tmp_path: Path) -> None:
    arenas.seal(4)
    path = write(arenas, tmp_path)
    storage = LocalStorage(tmp_path, threading.Event())
    seen = []

    def note(_: int = 0) -> None:
        with storage.without_readers(path.name) as has_none:
            seen.append(has_none)

    check(load_checkpoint(str(tmp_path), LoadJob(2, RANKS, note), threading.Event()), 4)
    note()
    assert seen == [False, True]


@pytest.mark.parametrize("free_bytes", [1 << 40, 0], ids=["copied first", "piece by piece"])
def test_several_writers_of_one_node(arenas: Arenas, tmp_path: Path, free_bytes: int) -> None:
    arenas.seal(4)
    job = replace(order(tmp_path), num_writers=3)
    path = Path(writer(free_bytes=free_bytes).write(arenas.fds, job).path)
    sizes = [one.stat().st_size for one in path.glob("*.pieces")]
    assert len(sizes) == 3
    assert sum(sizes) == 2 * LAYOUT.image_bytes
    assert check(load(tmp_path), 4) == []


def test_too_little_memory_is_an_error_on_several_nodes_and_needs_none_on_one(
    arenas: Arenas, tmp_path: Path
) -> None:
    """The ranks of one node are restored from files without a name, of one slot each."""
    arenas.seal(4)
    write(arenas, tmp_path)
    before = sorted(tmp_path.iterdir())

    def refuse(needed_bytes: int) -> None:
        raise MemoryTooSmall(needed_bytes=needed_bytes, available_bytes=1, limit="test")

    of_two_nodes = LoadJob(2, RANKS[:1], refuse, group=LoadGroup([RANKS[:1], RANKS[1:]], 0))
    with pytest.raises(MemoryTooSmall):
        load_checkpoint(str(tmp_path), of_two_nodes, threading.Event())
    num_open = len(os.listdir("/proc/self/fd"))
    loaded = load_checkpoint(str(tmp_path), LoadJob(2, RANKS, refuse), threading.Event())
    assert loaded is not None
    for fd in loaded.fds:
        assert read_shape(fd).num_slots == 1
        assert os.readlink(f"/proc/self/fd/{fd}").startswith(str(tmp_path))
        assert os.fstat(fd).st_nlink == 0
    assert check(loaded, 4) == []
    assert len(os.listdir("/proc/self/fd")) == num_open
    assert sorted(tmp_path.iterdir()) == before


def test_old_checkpoints_and_what_a_killed_writer_left_are_removed(
    arenas: Arenas, tmp_path: Path
) -> None:
    (tmp_path / ".tmp-1-step-9").mkdir()
    (tmp_path / ".tmp-1-step-9" / "rank-00000.safetensors").touch()
    (tmp_path / ".tmp-1-latest").symlink_to("nothing")
    (tmp_path / "notes of the user").touch()
    for step in (1, 2, 3, 4):
        arenas.seal(step)
        write(arenas, tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest",
        "notes of the user",
        "step-00000003-g0",
        "step-00000004-g0",
    ]


def test_those_that_are_too_old_go_but_never_the_newest(arenas: Arenas, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        arenas.seal(step)
        write(arenas, tmp_path, keep=9)
    hour_ago_s = time.time() - 3600
    for step in (1, 3):
        os.utime(tmp_path / f"step-0000000{step}-g0" / "index.json", (hour_ago_s, hour_ago_s))
    storage = LocalStorage(tmp_path, threading.Event())
    found, newest = storage.checkpoints(), "step-00000003-g0"
    assert to_prune(found, Retention(9, 7200.0), newest=newest) == []
    assert to_prune(found, Retention(9, 600.0), newest=newest) == ["step-00000001-g0"]
    remove_all(storage, to_prune(found, Retention(9, 600.0), newest=newest))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest",
        "step-00000002-g0",
        "step-00000003-g0",
    ]


def test_a_name_that_is_taken_is_not_written_over(arenas: Arenas, tmp_path: Path) -> None:
    arenas.seal(4)
    first = write(arenas, tmp_path, life="first")
    corrupt(first / "rank-00000.safetensors", PAGE_BYTES + 5)
    second = write(arenas, tmp_path, life="second")
    assert (first.name, second.name) == ("step-00000004-g0", "step-00000004-g0.2")
    assert (tmp_path / "latest").resolve() == second
    assert check(load(tmp_path), 4) == []


def test_what_this_life_has_written_is_not_written_again(arenas: Arenas, tmp_path: Path) -> None:
    arenas.seal(4)
    first = write(arenas, tmp_path, life="own")
    (tmp_path / "latest").unlink()
    again = writer().write(arenas.fds, replace(order(tmp_path), life="own"))
    assert (Path(again.path), again.total_bytes) == (first, 0)
    assert (tmp_path / "latest").resolve() == first
    os.truncate(first / "rank-00001.safetensors", 100)
    assert write(arenas, tmp_path, life="own") != first, "it is not whole"


def test_a_corrupted_slot_is_never_written(arenas: Arenas, tmp_path: Path) -> None:
    arenas.seal(4)
    arena = Arena(arenas.fds[Rank(1)][0], writable=True)
    image = arena.image(0)
    image[-1] ^= 1
    del image
    arena.close()
    with pytest.raises(CheckpointError):
        write(arenas, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("free_bytes", [1 << 40, 0], ids=["copied first", "piece by piece"])
def test_a_slot_that_is_overwritten_again_and_again_is_given_up(
    arenas: Arenas, tmp_path: Path, free_bytes: int
) -> None:
    arenas.seal(1)
    steps = iter(range(2, 20))

    class Busy(CopyBuffers):
        """The training continues between the choice of the slots and their reading."""

        def lend(self, sizes: Sequence[int]) -> list[memoryview] | None:
            arenas.seal(next(steps))
            return super().lend(sizes)

    throttle = Throttle(threading.Event())
    busy = CheckpointWriter(WriterContext(RunId("run"), Busy(lambda: free_bytes), throttle))
    with pytest.raises(CheckpointError) as caught:
        busy.write(arenas.fds, order(tmp_path))
    assert "overwritten" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    assert next(steps) == 2 + TRIES


class Reading:
    """A version that is read while the training continues, and the count of memory requests."""

    def __init__(self, arenas: Arenas, step: int, *, gap_s: float = 0.0) -> None:
        self.version = version(0, step)
        self.shards = find_shards(arenas.fds, self.version, 2)
        self.images = [bytearray(LAYOUT.image_bytes) for _ in self.shards]
        self.num_copies = 0
        self.late = CopyBeforeOverwrite(
            self.version, self.shards, CopyBuffers(self._free_bytes), gap_s=gap_s
        )

    def read(self, begin: int, end: int) -> None:
        for shard, image in zip(self.shards, self.images, strict=True):
            shard.read_into(memoryview(image)[begin:end], begin)

    def _free_bytes(self) -> int:
        self.num_copies += 1
        return 1 << 40


HALF = LAYOUT.image_bytes // 2 // PAGE_BYTES * PAGE_BYTES
SECOND = 10**9


@pytest.fixture
def reading(arenas: Arenas, monkeypatch: pytest.MonkeyPatch) -> Reading:
    monkeypatch.setattr(slot_reader, "_POLL_S", 0.0)
    arenas.pace = SECOND
    arenas.seal(3, slot=1)
    arenas.seal(4)
    return Reading(arenas, 4)


def test_a_slot_that_none_is_about_to_overwrite_is_not_copied(
    arenas: Arenas, reading: Reading
) -> None:
    expected = [bytes(Arena(arenas.fds[rank][0], writable=False).image(0)) for rank in RANKS]
    reading.read(0, HALF)
    reading.read(HALF, LAYOUT.image_bytes)
    assert [bytes(image) for image in reading.images] == expected
    assert (reading.num_copies, reading.late.is_tight) == (0, False)
    assert all(shard.is_sound for shard in reading.shards)


def test_what_is_left_of_a_slot_is_copied_when_the_next_version_is_sealed(
    arenas: Arenas, reading: Reading
) -> None:
    expected = [bytes(Arena(arenas.fds[rank][0], writable=False).image(0)) for rank in RANKS]
    layout = reading.shards[0].layout()
    reading.read(0, HALF)
    arenas.seal_one(Rank(1), 5, slot=1)
    reading.read(HALF, HALF + PAGE_BYTES)
    assert reading.num_copies == 1
    arenas.seal(6)
    reading.read(HALF + PAGE_BYTES, LAYOUT.image_bytes)
    assert [bytes(image) for image in reading.images] == expected
    assert reading.num_copies == 1
    assert all(shard.is_sound for shard in reading.shards)
    assert reading.shards[0].layout() == layout


def test_a_slot_that_is_overwritten_before_it_is_copied_is_not_read_on(
    arenas: Arenas, reading: Reading
) -> None:
    reading.read(0, HALF)
    arenas.seal(5, slot=1)
    arenas.seal(6)
    with pytest.raises(SlotOverwritten):
        reading.read(HALF, LAYOUT.image_bytes)


def test_where_snapshots_come_often_there_is_no_time_to_look(arenas: Arenas) -> None:
    arenas.seal(4)
    assert Reading(arenas, 4).late.is_tight, "it is the first one"
    arenas.pace = SECOND // 2
    arenas.seal(5, slot=1)
    arenas.seal(6)
    assert Reading(arenas, 6).late.is_tight
    arenas.pace = 10 * SECOND
    arenas.seal(7, slot=1)
    arenas.seal(8)
    assert not Reading(arenas, 8, gap_s=2).late.is_tight
    assert Reading(arenas, 8, gap_s=3).late.is_tight, "reading waits for writing"


def test_another_run_in_the_same_directory_is_refused(arenas: Arenas, tmp_path: Path) -> None:
    arenas.seal(4)
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError):
            write(arenas, tmp_path)
    finally:
        os.close(fd)
    with pytest.raises(CheckpointError):
        write(arenas, Path("relative"))


def test_a_write_is_given_up_when_the_run_is_stopped(arenas: Arenas, tmp_path: Path) -> None:
    arenas.seal(4)
    with pytest.raises(CheckpointError):
        writer(stop=True).write(arenas.fds, order(tmp_path))
    assert list(tmp_path.iterdir()) == []
