"""Both storages follow the same rules: names, order, abandoned checkpoints, and retention."""

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from ftrun.errors import CheckpointError
from ftrun.ids import version
from ftrun.smp.checkpoint.index import (
    FORMAT,
    STALE_S,
    CheckpointIndex,
    CheckpointPart,
    ShardFile,
    StoredCheckpoint,
    is_whole,
    seal,
    stored_bytes,
    with_places,
)
from ftrun.smp.checkpoint.storage import local
from ftrun.smp.checkpoint.storage.direct_file import no_pace
from ftrun.smp.checkpoint.storage.fsspec import BLOCK_BYTES, block_bytes
from ftrun.smp.checkpoint.storage.local import LOCK_NAME
from ftrun.smp.checkpoint.storage.storage import (
    Retention,
    Storage,
    earlier_of_run,
    next_serial,
    open_storage,
    prune,
    sweep_finished,
    sweep_run,
    sweep_started,
    to_prune,
)
from ftrun.snapshot.write_shares import FileExtent

NEVER = threading.Event()
SHARD = ShardFile(0, "rank-00000.safetensors", "rank-00000.digests", 5, 1, "0", "0", "0")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


@pytest.fixture(params=["", "file://"], ids=["directory", "url"])
def storage(request: pytest.FixtureRequest, root: Path) -> Iterator[Storage]:
    with open_storage(f"{request.param}{root}", NEVER) as found:
        yield found


def key(step: int, *, run_id: str = "run", token: str = "t", generation: int = 0) -> CheckpointPart:
    return CheckpointPart(FORMAT, run_id, token, generation, step, 2, [])


def begin(storage: Storage, step: int, *, run_id: str = "run", token: str = "t") -> str:
    """An incomplete checkpoint with one file."""
    name = storage.pending_name(key(step, run_id=run_id, token=token), is_alone=False)
    storage.make(name)
    storage.put(f"{name}/rank-00000.digests", b"x")
    return name


def finish(storage: Storage, step: int, serial: int, *, run_id: str = "run") -> str:
    name = begin(storage, step, run_id=run_id, token=str(serial))
    index = CheckpointIndex(FORMAT, serial, run_id, 0, step, 2, [], written_s=time.time())
    storage.put(f"{name}/index.json", seal(index))
    storage.sync(name)
    final = storage.publish(name, version(0, step))
    storage.point_latest(final)
    return final


def incomplete(storage: Storage) -> list[str]:
    return [one.name for one in storage.checkpoints() if one.is_incomplete]


def names(storage: Storage) -> list[str]:
    return [one.name for one in storage.checkpoints() if one.index is not None]


def sweep(storage: Storage, step: int, name: str, *, is_alone: bool) -> None:
    found = storage.checkpoints()
    left = sweep_started(storage, found, "run", version(0, step), name, is_alone=is_alone)
    assert [one.name for one in left] == [one.name for one in storage.checkpoints()]


# --- names ------------------------------------------------------------------------------------


def test_the_name_of_a_begun_checkpoint_depends_on_what_may_be_merged(storage: Storage) -> None:
    prefix = ".tmp-" if storage.is_local else ""
    name = storage.pending_name(key(42, generation=3), is_alone=False)
    assert name.startswith(f"{prefix}step-00000042-g3-14180cf1-")
    others = [key(42, token="other"), key(42, run_id="other"), key(43), key(42, generation=4)]
    pending = {storage.pending_name(one, is_alone=False) for one in others}
    assert len(pending - {name}) == 4
    loaded = storage.pending_name(key(42, generation=-1), is_alone=False)
    assert loaded.startswith(f"{prefix}step-00000042-g{-1 if storage.is_local else 0}-")


def test_a_place_that_does_not_exist_has_no_checkpoints(tmp_path: Path) -> None:
    for scheme in ("", "file://"):
        with open_storage(f"{scheme}{tmp_path / 'none'}", NEVER) as storage:
            assert storage.checkpoints() == []
            assert storage.latest_name() == ""
            assert storage.sizes("step-1") == {}
            assert storage.changed_s("step-1") is None
            assert storage.describe("step-1").problem


def test_the_last_written_checkpoint_is_the_first(storage: Storage) -> None:
    written = [finish(storage, step, serial) for serial, step in enumerate((9, 4, 7), start=1)]
    started = begin(storage, 99)
    assert names(storage) == written[::-1]
    found = storage.checkpoints()
    assert [one.version.step for one in found] == [7, 4, 9, 99]
    assert incomplete(storage) == [started]
    assert storage.latest_name() == written[-1]
    assert next_serial(found, besides=started) == 4
    assert next_serial(found, besides=written[-1]) == 3


def test_a_published_name_is_never_used_twice(root: Path) -> None:
    with open_storage(str(root), NEVER) as storage:
        assert [finish(storage, 4, serial) for serial in (1, 2, 3)] == [
            "step-00000004-g0",
            "step-00000004-g0.2",
            "step-00000004-g0.3",
        ]


def test_a_damaged_index_is_a_problem_and_not_an_incomplete_checkpoint(
    storage: Storage, root: Path
) -> None:
    name = finish(storage, 1, 1)
    (root / name / "index.json").write_bytes(b"{}")
    (one,) = storage.checkpoints()
    assert (one.index, one.is_incomplete, one.may_pass) == (None, False, False)
    assert "its index is not valid" in one.problem
    assert storage.describe(name).problem == one.problem


def test_a_copy_with_another_name_is_only_found_by_its_name(storage: Storage, root: Path) -> None:
    name = finish(storage, 1, 1)
    (root / name).rename(root / "step-best")
    assert storage.checkpoints() == []
    copy = storage.describe("step-best")
    assert copy.index is not None
    assert (copy.version.step, copy.problem) == (1, "")
    assert "step-best" in storage.folders()


# --- files ------------------------------------------------------------------------------------


def test_files_come_back(storage: Storage) -> None:
    storage.make("folder")
    storage.put("folder/small", b"abc")
    with storage.stream("folder/large", 7, no_pace) as file:
        room = file.room()
        room[:7] = b"0123456"
        file.take(7)
        room.release()
    assert storage.sizes("folder") == {"small": 3, "large": 7}
    assert storage.read("folder/small") == b"abc"
    assert storage.read("folder/none") is None
    with storage.again() as other, other.open("folder/large") as found:
        target = bytearray(4)
        assert (found.size, found.read(5, 9)) == (7, b"56")
        assert found.read_into(memoryview(target), 2) == 4
        assert bytes(target) == b"2345"
    storage.discard("folder")
    assert storage.sizes("folder") == {}


def test_a_file_that_fails_in_the_middle_is_not_there(storage: Storage) -> None:
    storage.make("folder")
    with suppress(ZeroDivisionError), storage.stream("folder/one", 9, no_pace):
        raise ZeroDivisionError
    assert storage.sizes("folder").get("one") in (None, 0)


def test_a_shard_is_whole_if_both_files_have_their_sizes() -> None:
    assert is_whole(SHARD, {SHARD.file: 5, SHARD.digests: 8})
    assert is_whole(SHARD, {SHARD.file: None, SHARD.digests: 8}), "the storage reports no size"
    assert not is_whole(SHARD, {SHARD.file: 4, SHARD.digests: 8})
    assert not is_whole(SHARD, {SHARD.file: 5})


def test_an_index_is_parsed_again_only_if_it_has_changed(storage: Storage, root: Path) -> None:
    """That of a large world takes long, and each node lists all under a lock."""
    name = finish(storage, 1, 1)
    first, second = storage.describe(name).index, storage.describe(name).index
    assert first is not None
    assert first is second
    changed = seal(msgspec.structs.replace(first, life="other"))
    (root / name / "index.json").write_bytes(changed)
    third = storage.describe(name).index
    assert third is not None
    assert third.life == "other"


def test_images_must_be_in_files_from_the_first_to_the_last_byte_once() -> None:
    def found(*extents: tuple[int, int]) -> list[ShardFile]:
        some = [FileExtent(first, size, "a.pieces", first) for first, size in extents]
        return with_places({0: msgspec.structs.replace(SHARD, extents=some)})

    assert found((0, 2), (2, 3))[0].extents[1].first == 2
    assert with_places({0: SHARD}) == [SHARD]
    for extents in ([(0, 2), (3, 2)], [(0, 3), (2, 3)], [(0, 4)], [(0, 6)], [(1, 4)]):
        with pytest.raises(CheckpointError, match="rank 0 has 5 bytes, and its files do not have"):
            found(*extents)


@pytest.mark.parametrize("num_bytes", [0, 1, BLOCK_BYTES, 10**9, 10**11, 10**12])
def test_no_object_has_too_many_blocks(num_bytes: int) -> None:
    size = block_bytes(num_bytes)
    assert size >= BLOCK_BYTES
    assert size % (1 << 20) == 0
    assert num_bytes / size <= 8_000


# --- abandoned checkpoints --------------------------------------------------------------------


def test_a_single_node_removes_all_that_its_run_has_begun(storage: Storage) -> None:
    other = begin(storage, 1, run_id="another")
    for step in (1, 2, 9):
        begin(storage, step)
    sweep(storage, 5, "", is_alone=True)
    assert incomplete(storage) == [other]


def test_several_nodes_leave_the_newest_of_the_earlier_ones(storage: Storage) -> None:
    started = {step: begin(storage, step) for step in (1, 2, 3, 5, 8)}
    sweep(storage, 5, started[5], is_alone=False)
    assert incomplete(storage) == [started[8], started[5], started[3]]
    found = storage.checkpoints()
    assert [one.name for one in earlier_of_run(found, "run", version(0, 8))] == [
        started[5],
        started[3],
    ]
    sweep_finished(storage, found, "run", version(0, 5), started[5])
    assert incomplete(storage) == [started[8], started[5]]
    sweep_run(storage, "run")
    assert incomplete(storage) == []


@pytest.mark.parametrize("is_alone", [False, True])
def test_stale_checkpoints_of_another_run_are_removed(
    storage: Storage, root: Path, is_alone: bool
) -> None:
    fresh, stale = (begin(storage, 1, run_id=run_id) for run_id in ("fresh", "stale"))
    long_ago_s = time.time() - STALE_S - 60
    for path in ((root / stale), *(root / stale).iterdir()):
        os.utime(path, (long_ago_s, long_ago_s))
    sweep(storage, 5, "", is_alone=is_alone)
    assert incomplete(storage) == [fresh]


@pytest.mark.parametrize("is_alone", [False, True])
def test_what_killed_writers_have_left_in_a_directory_goes(root: Path, is_alone: bool) -> None:
    for name in (".tmp-gone-12ab-step-00000001-g0", ".tmp-12ab-step-7"):
        (root / name).mkdir()
        (root / name / "rank-00000.digests").touch()
    (root / ".tmp-12ab-latest").symlink_to("nothing")
    (root / "notes").touch()
    with open_storage(str(root), NEVER) as storage:
        sweep(storage, 5, "", is_alone=is_alone)
    left = {"notes"} if is_alone else {"notes", ".tmp-12ab-step-7"}
    assert set(os.listdir(root)) == left, "a node that writes alone may be another one"


def test_a_removal_that_fails_is_only_logged(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begin(storage, 1)

    def fail(name: str) -> None:
        raise CheckpointError("denied")

    monkeypatch.setattr(storage, "remove", fail)
    sweep_run(storage, "run")
    assert "cannot remove" in caplog.text
    assert "denied" in caplog.text


# --- retention --------------------------------------------------------------------------------


def stored(step: int, *, run_id: str = "run", age_s: float = 0.0) -> StoredCheckpoint:
    index = CheckpointIndex(FORMAT, step, run_id, 0, step, 2, [])
    written_s = time.time() - age_s if age_s else 0.0
    return StoredCheckpoint(str(step), version(0, step), index=index, written_s=written_s)


@pytest.mark.parametrize(
    ("retention", "newest", "removed"),
    [
        (Retention(1), "5", ["4", "3", "2"]),
        (Retention(3), "5", ["2"]),
        (Retention(3), "6", ["3", "2"]),
        (Retention(9), "5", []),
        (Retention(9, 250.0), "5", ["2"]),
        (Retention(3, 150.0), "5", ["2", "3"]),
        (Retention(1, runs=frozenset(["another"])), "5", []),
    ],
)
def test_retention(retention: Retention, newest: str, removed: list[str]) -> None:
    found = [stored(5), stored(4), stored(3, age_s=200.0), stored(2, age_s=300.0)]
    assert to_prune(found, retention, newest=newest) == removed


@pytest.mark.parametrize(
    ("retention", "newest", "removed"),
    [
        (Retention(9, keep_bytes=52), "5", []),
        (Retention(9, keep_bytes=51), "5", ["2"]),
        (Retention(9, keep_bytes=39), "5", ["2"]),
        (Retention(9, keep_bytes=38), "5", ["2", "3"]),
        (Retention(9, keep_bytes=1), "5", ["2", "3", "4"]),
        (Retention(9, keep_bytes=1), "3", ["2", "4", "5"]),
        (Retention(2, keep_bytes=26), "5", ["3", "2"]),
        (Retention(2, keep_bytes=25), "5", ["3", "2", "4"]),
        (Retention(9, keep_bytes=1, runs=frozenset(["another"])), "5", []),
    ],
)
def test_the_oldest_go_while_all_have_too_many_bytes(
    retention: Retention, newest: str, removed: list[str]
) -> None:
    """Each has 5 bytes and a table of 8."""
    found = [with_bytes(stored(step)) for step in (5, 4, 3, 2)]
    assert to_prune(found, retention, newest=newest) == removed


def with_bytes(one: StoredCheckpoint) -> StoredCheckpoint:
    assert one.index is not None
    index = msgspec.structs.replace(one.index, shards=[SHARD])
    assert stored_bytes(index) == 13
    return replace(one, index=index)


def test_bytes_of_other_runs_do_not_count_because_they_remain() -> None:
    found = [with_bytes(stored(step)) for step in (5, 4)]
    found.insert(1, with_bytes(stored(9, run_id="another")))
    retention = Retention(9, keep_bytes=26, runs=frozenset(["run"]))
    assert to_prune(found, retention, newest="5") == []
    assert to_prune(found, replace(retention, keep_bytes=25), newest="5") == ["4"]


def test_a_checkpoint_that_is_read_is_pruned_later(root: Path) -> None:
    with open_storage(str(root), NEVER) as storage, open_storage(str(root), NEVER) as reader:
        first, last = finish(storage, 1, 1), finish(storage, 2, 2)
        for retention in (Retention(1), Retention(9, keep_bytes=1)):
            found = [
                replace(one, index=msgspec.structs.replace(one.index, shards=[SHARD]))
                for one in storage.checkpoints()
                if one.index is not None
            ]
            old = to_prune(found, retention, newest=last)
            with reader.reading(first), reader.reading(first):
                assert prune(storage, old, storage.remove) == ([], [first])
            assert prune(storage, old, lambda _: None) == ([first], [])
        assert names(storage) == [last, first]
        assert prune(storage, old, storage.remove) == ([first], [])
        assert names(storage) == [last]


def test_no_reader_begins_while_a_checkpoint_is_removed(root: Path) -> None:
    """A reader that opened the index before waits for the removal, and reports it."""
    with open_storage(str(root), NEVER) as storage, open_storage(str(root), NEVER) as reader:
        first = finish(storage, 1, 1)
        begun, found = threading.Event(), list[str]()

        def read() -> None:
            begun.set()
            try:
                with reader.reading(first):
                    found.append("read")
            except CheckpointError as error:
                found.append(str(error))

        thread = threading.Thread(target=read)

        def remove(name: str) -> None:
            thread.start()
            begun.wait()
            time.sleep(0.2)
            assert found == []
            storage.remove(name)

        assert prune(storage, [first], remove) == ([first], [])
        thread.join()
    assert found == [f"{root / first} was removed by another process"]


def test_a_lock_that_is_never_released_does_not_stop_a_reader(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(local, "READ_LOCK_TIMEOUT_S", 0.05)
    with open_storage(str(root), NEVER) as storage, open_storage(str(root), NEVER) as reader:
        first = finish(storage, 1, 1)
        with storage.without_readers(first) as has_none, reader.reading(first):
            assert has_none
    assert "without a lock" in caplog.text


def test_a_checkpoint_that_is_missing_or_at_a_url_is_not_being_read(
    storage: Storage, root: Path
) -> None:
    with storage.reading("nothing"), storage.without_readers("nothing") as has_none:
        assert has_none
    name = finish(storage, 1, 1)
    with storage.reading(name), storage.without_readers(name) as has_none:
        assert has_none != storage.is_local


def test_a_removed_checkpoint_is_never_offered_while_it_is_incomplete(
    storage: Storage, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = finish(storage, 1, 1)
    seen: list[list[str]] = []
    unlink = os.unlink

    def noted(path: str, *args: object, **kwargs: object) -> None:
        if not str(path).endswith("index.json"):
            seen.append([str(one) for one in root.glob("step-*/index.json")])
        unlink(path)

    monkeypatch.setattr(os, "unlink", noted)
    monkeypatch.setattr(os, "remove", noted)
    storage.remove(name)
    assert seen
    assert not any(seen)
    assert not list(root.glob("step-*"))


# --- locks ------------------------------------------------------------------------------------


def test_a_node_that_writes_alone_excludes_all_others(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "OTHER_WRITER_S", 0.1)
    with open_storage(str(root), NEVER) as first, open_storage(str(root), NEVER) as second:
        with first.exclusive(), first.lock():
            assert not (root / LOCK_NAME).exists()
            for attempt in (second.exclusive, second.lock):
                with pytest.raises(CheckpointError, match="another run"), attempt():
                    pass
        with second.lock():
            assert (root / LOCK_NAME).exists()


def test_files_are_removed_after_the_lock_is_released(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The removal of large files takes minutes, and a training may write a checkpoint then."""
    remove, seen = local._remove, list[Path]()

    def noted(path: Path) -> None:
        with open_storage(str(root), NEVER) as other, other.exclusive():
            seen.append(path)
        remove(path)

    monkeypatch.setattr(local, "_remove", noted)
    with open_storage(str(root), NEVER) as storage:
        name = finish(storage, 4, 1)
        with storage.lock():
            storage.remove(name)
            assert not list(root.glob("step-*"))
    assert len(seen) == 1
    assert not seen[0].exists()


def test_what_was_begun_is_not_completed_by_others_while_it_is_removed(root: Path) -> None:
    with open_storage(str(root), NEVER) as storage:
        name = begin(storage, 1)
        with storage.lock():
            storage.remove(name)
            storage.sweep_rest(is_alone=False)
            assert not (root / name).exists()
            (gone,) = root.glob(".tmp-gone-*")
            assert list(gone.iterdir()), "its files are removed after the lock"
        assert not gone.exists()


def test_a_writer_waits_for_a_removal(root: Path) -> None:
    with open_storage(str(root), NEVER) as first, open_storage(str(root), NEVER) as second:
        locked, ended = threading.Event(), threading.Event()

        def hold() -> None:
            with first.lock():
                locked.set()
                ended.wait(0.3)

        thread = threading.Thread(target=hold)
        thread.start()
        locked.wait()
        with second.exclusive():
            pass
        thread.join()


def test_a_file_system_without_links_has_no_latest(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, target: str) -> None:
        raise PermissionError(errno.EPERM, "not supported", str(path))

    monkeypatch.setattr(Path, "symlink_to", refused)
    with open_storage(str(root), NEVER) as storage:
        name = finish(storage, 4, 1)
        storage.point_latest(name)
        assert storage.latest_name() == ""
        assert [one.name for one in storage.checkpoints()] == [name]


def test_a_lock_that_is_held_is_awaited_until_the_run_stops(root: Path) -> None:
    stop = threading.Event()
    stop.set()
    with open_storage(str(root), NEVER) as first, open_storage(str(root), stop) as second:
        with first.lock(), pytest.raises(CheckpointError, match="is held"), second.lock():
            pass
        with second.lock():
            pass
