"""A checkpoint at a URL is whole or absent, after any failure of the store and of its writers.

The stores are real: fsspec's own file system of this machine, and a server that speaks FTP.
"""

import gc
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from ftrun.errors import CheckpointError
from ftrun.ids import Rank, RunId, version
from ftrun.smp.checkpoint.index import STALE_S
from ftrun.smp.checkpoint.load import LoadedCheckpoint, LoadJob, load_checkpoint
from ftrun.smp.checkpoint.storage.direct_file import CopyBuffers, Throttle, no_pace
from ftrun.smp.checkpoint.storage.fsspec import BLOCK_BYTES, FsspecStorage
from ftrun.smp.checkpoint.storage.storage import Retention
from ftrun.smp.checkpoint.write_job import WriteJob, WriterContext, WriteResult
from ftrun.smp.checkpoint.writer import CheckpointWriter
from tests.ftp_server import FtpServer, ftp_server
from tests.integration.test_checkpoint_files import LAYOUT, RANKS, Arenas, check, corrupt

NEVER = threading.Event()
TIMEOUT_S = 60.0
"""Half of the time that the writer waits for a store."""


@pytest.fixture
def arenas() -> Iterator[Arenas]:
    """The arenas of two ranks; afterwards no thread, connection or memory remains."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    found = Arenas()
    yield found
    for some in found.fds.values():
        for fd in some:
            os.close(fd)
    for thread in threading.enumerate():
        if thread.name == "ftrun-url":
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The content of the store, on its own machine."""
    return tmp_path / "store"


@pytest.fixture
def server(root: Path) -> Iterator[FtpServer]:
    with ftp_server(root) as found:
        yield found


@pytest.fixture(params=["file", pytest.param("ftp", marks=pytest.mark.full)])
def url(request: pytest.FixtureRequest, root: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{root}/run"
        return
    with ftp_server(root) as found:
        yield found.url()


def writer(
    run_id: str = "run", *, free_bytes: int = 1 << 40, stop: threading.Event = NEVER
) -> CheckpointWriter:
    return CheckpointWriter(
        WriterContext(RunId(run_id), CopyBuffers(lambda: free_bytes), Throttle(stop))
    )


def write(
    found: Arenas,
    url: str,
    by: CheckpointWriter,
    *,
    keep: int = 3,
    keep_s: float = 0.0,
    life: str = "",
) -> WriteResult:
    """Write with all ranks on this node."""
    order = WriteJob(url, tuple(RANKS), 2, Retention(keep, keep_s), life=life)
    return by.write(found.fds, order)


def write_part(
    found: Arenas, url: str, by: CheckpointWriter, rank: int, step: int, *, token: str = "5b6a"
) -> WriteResult:
    """Write the part of one of two nodes, with this rank."""
    order = WriteJob(url, (Rank(rank),), 2, Retention(3), version(0, step), token)
    return by.write({Rank(rank): found.fds[Rank(rank)]}, order)


def load(url: str, *, only: str = "", life: str = "") -> LoadedCheckpoint | None:
    order = LoadJob(2, RANKS, lambda needed_bytes: None, only, life)
    return load_checkpoint(url, order, NEVER)


def steps(root: Path) -> list[int]:
    """Of the whole checkpoints."""
    return sorted(int(path.parent.name.split("-")[1]) for path in root.glob("run/*/index.json"))


def halves(root: Path) -> list[str]:
    return [p.name for p in root.glob("run/step-*") if not (p / "index.json").exists()]


def newest(root: Path) -> Path:
    return root / "run" / (root / "run" / "latest").read_text().strip()


@pytest.mark.parametrize("free_bytes", [1 << 40, 0], ids=["copied first", "piece by piece"])
def test_what_was_sealed_comes_back(arenas: Arenas, url: str, root: Path, free_bytes: int) -> None:
    assert load(url) is None
    by = writer(free_bytes=free_bytes)
    for step in (1, 2, 3, 4):
        arenas.seal(step)
        done = write(arenas, url, by, keep=2)
        assert (done.version, done.missing_ranks) == (version(0, step), ())
        assert done.total_bytes == 2 * LAYOUT.image_bytes
        assert check(load(url), step) == []
    assert steps(root) == [3, 4]
    assert halves(root) == []
    assert str(done.path).endswith(f"/run/{newest(root).name}")
    assert write(arenas, url, by).total_bytes == 0, "what is there is not sent again"
    assert check(load(url, only="latest"), 4) == []
    (older,) = [path.parent.name for path in root.glob("run/step-00000003*/index.json")]
    assert check(load(url, only=older), 3) == []
    image = newest(root) / "rank-00000.safetensors"
    assert image.read_bytes()[: len(LAYOUT.header)] == LAYOUT.header


def test_what_was_loaded_is_not_sent_again(arenas: Arenas, url: str, root: Path) -> None:
    arenas.seal(4)
    write(arenas, url, writer())
    loaded = load(url)
    assert loaded is not None
    by = writer()
    fds = {rank: [fd] for rank, fd in zip(RANKS, loaded.fds, strict=True)}
    done = by.write(fds, WriteJob(url, tuple(RANKS), 2, Retention(1)))
    assert (done.version, done.total_bytes) == (version(-1, 4), 0)
    assert check(loaded, 4) == []
    assert steps(root) == [4]


def test_large_objects_go_and_come_in_blocks(url: str) -> None:
    """Of sizes that no block size divides; read from the beginning and from any offset."""
    size = 2 * BLOCK_BYTES + 12_345
    data = os.urandom(size)
    asked: list[int] = []
    with FsspecStorage(url, NEVER) as store:
        store.make("folder")
        with store.stream("folder/large", size, asked.append) as file:
            at = 0
            while at < size:
                room = file.room()[: min(999_983, size - at)]
                room[:] = data[at : at + len(room)]
                file.take(len(room))
                at += len(room)
        assert asked == [BLOCK_BYTES, BLOCK_BYTES, 12_345]
        assert store.sizes("folder") == {"large": size}
        back = bytearray(size)
        with store.open("folder/large") as found:
            assert found.size == size
            assert found.read_into(memoryview(back)) == size
            assert back == data
            for at in (BLOCK_BYTES + 1, 0, size - 7):
                assert found.read(at, 1_000) == data[at : at + 1_000]


def test_a_file_that_is_given_up_is_not_there(url: str) -> None:
    with FsspecStorage(url, NEVER) as store:
        store.make()
        with suppress(ZeroDivisionError), store.stream("one", 100, no_pace) as file:
            file.room()[:10] = bytes(10)
            file.take(10)
            raise ZeroDivisionError
        assert store.sizes("").get("one") in (None, 0)


# --- the store breaks -------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_killed_at_any_point_costs_one_checkpoint_at_most(
    arenas: Arenas, root: Path
) -> None:
    """It dies at each change of its files, in a write that also prunes."""
    died = 0
    while True:
        died += 1
        with ftp_server(root) as server:
            by = writer()
            for step in (1, 2):
                arenas.seal(step)
                write(arenas, server.url(), by, keep=2)
        arenas.seal(3)
        with ftp_server(root, die_at=died) as server:
            with suppress(CheckpointError):
                write(arenas, server.url(), by, keep=2)
            is_over = not server.is_dead
        with ftp_server(root) as server:
            loaded = load(server.url())
            assert loaded is not None
            notes = check(loaded, loaded.version.step)
            assert all("its index" in note for note in notes), "it died in the middle of that"
            assert loaded.version.step in ((3,) if is_over else (2, 3)), died
            arenas.seal(4)
            write(arenas, server.url(), writer(), keep=2)
            assert check(load(server.url()), 4) == []
        assert halves(root) == []
        assert steps(root)[-1] == 4
        assert len(steps(root)) == 2
        if is_over:
            break
        for path in sorted(root.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    assert died > 15


def test_a_full_store_keeps_the_one_before(arenas: Arenas, root: Path) -> None:
    by = writer()
    with ftp_server(root, quota_bytes=3 * LAYOUT.image_bytes) as server:
        arenas.seal(1)
        write(arenas, server.url(), by)
        for step in (2, 3):
            arenas.seal(step)
            with pytest.raises(CheckpointError, match=r"cannot write.*The previous one is kept"):
                write(arenas, server.url(), by)
            assert check(load(server.url()), 1) == []
            assert halves(root) == [], "a file without space is removed"
    with ftp_server(root) as server:
        assert write(arenas, server.url(), by).version == version(0, 3)
        assert check(load(server.url()), 3) == []


def test_a_store_that_hangs_is_reported_and_never_waited_for(
    arenas: Arenas, server: FtpServer
) -> None:
    arenas.seal(1)
    write(arenas, server.url(), writer())
    arenas.seal(2)
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        server.freeze()
        started_s = time.monotonic()
        writing = pool.submit(write, arenas, server.url(), writer(stop=stop))
        threading.Timer(0.3, stop.set).start()
        with pytest.raises(CheckpointError, match="being stopped"):
            writing.result(TIMEOUT_S)
        assert time.monotonic() - started_s < TIMEOUT_S
    with pytest.raises(CheckpointError, match="has not answered for 0 s"):
        FsspecStorage(server.url(), NEVER, answer_s=0.2)
    server.thaw()
    assert check(load(server.url()), 1) == []
    with FsspecStorage(server.url(), NEVER) as store:
        store._calls._answer_s = 0.2  # only now: a busy machine takes as long to log in
        server.freeze()
        for _ in range(2):
            with pytest.raises(CheckpointError, match="has not answered"):
                store.read("latest")
    server.thaw()


def test_what_is_wrong_with_a_store_is_reported_without_the_password(root: Path) -> None:
    with ftp_server(root) as server:
        url = server.url()
        with pytest.raises(CheckpointError, match="530") as wrong:
            load(url.replace("s3cret", "other"))
        assert "other" not in str(wrong.value)
    with pytest.raises(CheckpointError, match=r"me:\*\*\*@127.*refused") as gone:
        load(url)
    assert "s3cret" not in str(gone.value)
    with pytest.raises(CheckpointError, match="nope"):
        load("nope://somewhere/run")


# --- damaged checkpoints ----------------------------------------------------------------------


def test_a_damaged_checkpoint_is_excluded(arenas: Arenas, url: str, root: Path) -> None:
    by = writer()
    for step in (1, 2, 3):
        arenas.seal(step)
        write(arenas, url, by)
    corrupt(newest(root) / "rank-00001.safetensors", LAYOUT.image_bytes - 1)
    (note,) = check(load(url), 2)
    assert "rank-00001.safetensors" in note
    assert "digest of piece" in note
    (newest(root) / "index.json").write_bytes(b"{}")
    (note,) = check(load(url), 2)
    assert "its index" in note
    for index in root.glob("run/*/index.json"):
        index.write_bytes(index.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used"):
        load(url)


def test_latest_is_used_first_and_does_without(arenas: Arenas, url: str, root: Path) -> None:
    by = writer()
    for step in (1, 2, 3):
        arenas.seal(step)
        write(arenas, url, by)
    latest = root / "run" / "latest"
    (first,) = [path.parent.name for path in root.glob("run/step-00000001*/index.json")]
    latest.write_text(f"{first}\n")
    assert check(load(url), 1) == []
    for text in ("step-00000009-g0-00000000-00000000\n", "\0\xff", ""):
        latest.write_text(text)
        assert check(load(url), 3) == []
    latest.unlink()
    assert check(load(url), 3) == []
    with pytest.raises(CheckpointError, match="latest does not exist"):
        load(url, only="latest")


def test_only_what_this_life_has_written_counts_where_that_is_asked(
    arenas: Arenas, url: str
) -> None:
    arenas.seal(1)
    write(arenas, url, writer(), life="first")
    arenas.seal(2)
    write(arenas, url, writer(), life="second")
    assert check(load(url, life="first"), 1) == []
    assert check(load(url), 2) == []
    assert load(url, life="third") is None


# --- retention --------------------------------------------------------------------------------


def test_old_ones_go_by_their_age_but_never_the_newest(
    arenas: Arenas, url: str, root: Path
) -> None:
    by = writer()
    for step in (1, 2):
        arenas.seal(step)
        write(arenas, url, by, keep=9)
    time.sleep(0.05)
    arenas.seal(3)
    write(arenas, url, by, keep=9, keep_s=0.04)
    assert steps(root) == [3]
    write(arenas, url, by, keep=9, keep_s=1e-9)
    assert steps(root) == [3]


def test_halves_of_this_run_go_and_those_of_others_when_they_are_old(
    arenas: Arenas, url: str, root: Path
) -> None:
    arenas.seal(1)
    write(arenas, url, writer())
    arenas.seal(2)
    started: dict[str, str] = {}
    for run_id in ("run", "fresh", "stale"):
        write_part(arenas, url, writer(run_id), 0, 2)
        (started[run_id],) = set(halves(root)) - set(started.values())
    for path in (root / "run" / started["stale"]).iterdir():
        os.utime(path, (time.time() - STALE_S - 60,) * 2)
    assert check(load(url), 1) == [], "a half is never offered"
    arenas.seal(3)
    write(arenas, url, writer())
    assert halves(root) == [started["fresh"]]
    assert steps(root) == [1, 3]


def test_another_run_that_writes_there_is_noticed(arenas: Arenas, url: str, root: Path) -> None:
    first, second = writer("first"), writer("second")
    arenas.seal(1)
    write(arenas, url, first, life="a", keep=1)
    write(arenas, url, second, life="b", keep=5)
    arenas.seal(2)
    with pytest.raises(CheckpointError, match="another run, second, has written"):
        write(arenas, url, first, life="a", keep=1)
    write(arenas, url, second, life="b", keep=5)
    assert steps(root) == [1, 1, 2]


# --- several nodes ----------------------------------------------------------------------------


def test_the_last_to_come_finishes(arenas: Arenas, url: str, root: Path) -> None:
    nodes = [writer(), writer()]
    arenas.seal(1)
    part = write_part(arenas, url, nodes[0], 0, 1)
    assert part.missing_ranks == (1,)
    assert part.total_bytes == LAYOUT.image_bytes
    assert load(url) is None
    assert write_part(arenas, url, nodes[0], 0, 1).total_bytes == 0, "nothing is sent twice"
    assert write_part(arenas, url, nodes[1], 1, 1).missing_ranks == ()
    assert check(load(url), 1) == []
    done = write_part(arenas, url, nodes[0], 0, 1)
    assert (done.missing_ranks, done.total_bytes) == ((), 0), "asked again"
    assert write_part(arenas, url, nodes[0], 0, 1, token="other life").total_bytes == 0
    assert steps(root) == [1]


def test_a_part_counts_when_its_slots_are_overwritten(arenas: Arenas, url: str) -> None:
    nodes = [writer(), writer()]
    arenas.seal(1)
    write_part(arenas, url, nodes[0], 0, 1)
    arenas.seal_one(Rank(0), 2)
    assert write_part(arenas, url, nodes[0], 0, 1).missing_ranks == (1,)
    with pytest.raises(CheckpointError, match="no slot with step 1"):
        write_part(arenas, url, writer(), 0, 1, token="nobody's")
    assert write_part(arenas, url, nodes[1], 1, 1).missing_ranks == ()
    assert check(load(url), 1) == []


def test_a_node_that_publishes_writes_the_same(arenas: Arenas, url: str, root: Path) -> None:
    """A node that was killed between the index and `latest`, or both nodes see all parts."""
    nodes = [writer(), writer()]
    for step in (1, 2):
        arenas.seal(step)
        for rank, node in enumerate(nodes):
            write_part(arenas, url, node, rank, step)
    index = newest(root) / "index.json"
    first = index.read_bytes()
    for rank in (0, 1):
        index.unlink()
        (root / "run" / "latest").unlink()
        assert write_part(arenas, url, writer(), rank, 2).missing_ranks == ()
        assert index.read_bytes() == first
        assert newest(root) == index.parent


@pytest.mark.slow
def test_two_that_publish_at_once_make_one_checkpoint(arenas: Arenas, url: str, root: Path) -> None:
    nodes = [writer(), writer()]
    with ThreadPoolExecutor(2) as pool:
        for step in range(1, 9):
            arenas.seal(step)
            parts = [pool.submit(write_part, arenas, url, nodes[n], n, step) for n in (0, 1)]
            assert () in [part.result(60).missing_ranks for part in parts]
            assert check(load(url), step) == []
    with FsspecStorage(url, NEVER) as store:
        folders = store.checkpoints()
    assert [one.index.serial for one in folders if one.index] == [8, 7, 6]
    assert steps(root) == [6, 7, 8]


def test_a_damaged_part_is_not_in_the_way(arenas: Arenas, url: str, root: Path) -> None:
    arenas.seal(1)
    write_part(arenas, url, writer(), 0, 1)
    (folder,) = root.glob("run/step-*")
    (folder / "part-00000.json").write_bytes(b"{")
    (folder / "part-00007.json").write_bytes(b"")
    found = write_part(arenas, url, writer(), 1, 1)
    assert found.missing_ranks == (0,)
    assert "part-00000.json" in found.note
    done = write_part(arenas, url, writer(), 0, 1)
    assert (done.missing_ranks, "part-00007.json" in done.note) == ((), True)
    assert check(load(url), 1) == []


def test_parts_of_two_lives_are_never_put_together(arenas: Arenas, url: str, root: Path) -> None:
    """Not even if one finds the other's file in its own folder."""
    arenas.seal(1)
    write_part(arenas, url, writer(), 0, 1, token="one")
    (folder,) = root.glob("run/step-*")
    assert write_part(arenas, url, writer(), 1, 1, token="two").missing_ranks == (0,)
    (other,) = set(root.glob("run/step-*")) - {folder}
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    found = write_part(arenas, url, writer(), 1, 1, token="two")
    assert found.missing_ranks == (0,)
    assert "is ignored" in found.note
    assert load(url) is None
