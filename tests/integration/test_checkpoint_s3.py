"""Checkpoints in an object store that speaks S3: no folders, no rename, no append.

The store is moto's server, a real HTTP server in a process of its own; the client is s3fs. Both are
optional: without them these tests are skipped.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from ftrun.errors import CheckpointError
from ftrun.ids import Rank, RunId, version
from ftrun.smp.checkpoint.load import LoadedCheckpoint, LoadJob, load_checkpoint
from ftrun.smp.checkpoint.storage.direct_file import CopyBuffers, Throttle
from ftrun.smp.checkpoint.storage.storage import Retention
from ftrun.smp.checkpoint.write_job import WriteJob, WriterContext, WriteResult
from ftrun.smp.checkpoint.writer import CheckpointWriter
from ftrun.snapshot.layout import CopyTiming, LayoutEntry, make_layout
from ftrun.wire.shared_memory.arena import (
    Arena,
    ArenaShape,
    SlotHeader,
    SlotState,
    create_memfd,
    table_digest,
    verify,
)

for name in ("s3fs", "moto", "flask"):
    pytest.importorskip(name, reason="needs s3fs and moto[server]")

pytestmark = [pytest.mark.full, pytest.mark.slow]

LAYOUT = make_layout([LayoutEntry("weight", "F32", (6_000_000,), CopyTiming.LAZY)], plain_bytes=10)
"""24 MB: an upload in two parts."""

RANKS = [Rank(0), Rank(1)]
BUCKET = "runs"


class Store:
    """The server and its objects."""

    def __init__(self, port: int) -> None:
        import s3fs

        self.endpoint = f"http://127.0.0.1:{port}"
        self.fs: Any = s3fs.S3FileSystem(endpoint_url=self.endpoint, skip_instance_cache=True)
        self.url = f"s3://{BUCKET}/run"

    def names(self) -> list[str]:
        self.fs.invalidate_cache()
        return [name.removeprefix(f"{BUCKET}/run/") for name in self.fs.find(f"{BUCKET}/run")]

    def unfinished_uploads(self) -> list[Any]:
        return list(self.fs.call_s3("list_multipart_uploads", Bucket=BUCKET).get("Uploads", []))


@pytest.fixture(scope="module")
def variables() -> Iterator[dict[str, str]]:
    """Variables of s3fs; the endpoint comes from botocore's own variable."""
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stderr is not None
        try:
            line = next(line for line in server.stderr if "Running on" in line)
            drain = threading.Thread(target=lambda: list(server.stderr or ()), daemon=True)
            drain.start()
            yield {
                "AWS_ENDPOINT_URL": line.split("Running on")[1].strip().rstrip("/"),
                "AWS_ACCESS_KEY_ID": "nobody",
                "AWS_SECRET_ACCESS_KEY": "nothing",
                "AWS_DEFAULT_REGION": "us-east-1",
            }
        finally:
            server.kill()


@pytest.fixture
def store(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    found = Store(int(variables["AWS_ENDPOINT_URL"].rpartition(":")[2]))
    found.fs.mkdir(BUCKET)
    yield found
    found.fs.rm(BUCKET, recursive=True)


class Arenas:
    """Two ranks, filled by hand."""

    def __init__(self) -> None:
        self.fds = {
            rank: [
                create_memfd(ArenaShape(rank, 2, LAYOUT.image_bytes, len(LAYOUT.pieces), 9 + rank))
            ]
            for rank in RANKS
        }

    def seal(self, step: int) -> None:
        for rank, (fd,) in self.fds.items():
            arena = Arena(fd, writable=True)
            image, table = arena.image(0), arena.table(0)
            image[:] = image_of(rank, step)
            for index, piece in enumerate(LAYOUT.pieces):
                start = len(LAYOUT.header) + piece.offset
                table[index] = xxhash.xxh3_64_intdigest(image[start : start + piece.num_bytes])
            digest = table_digest(table)
            header = SlotHeader(SlotState.SEALED, 0, step, len(image), digest, step)
            arena.write_header(0, header)
            del image, table
            arena.close()


def image_of(rank: int, step: int) -> bytes:
    seed = xxhash.xxh3_128_digest(f"{rank} {step}".encode()) + bytes(3)
    return LAYOUT.header + (seed * (LAYOUT.data_bytes // len(seed) + 1))[: LAYOUT.data_bytes]


@pytest.fixture
def arenas() -> Iterator[Arenas]:
    found = Arenas()
    yield found
    for fds in found.fds.values():
        for fd in fds:
            os.close(fd)


def writer(stop: threading.Event | None = None) -> CheckpointWriter:
    throttle = Throttle(stop or threading.Event())
    return CheckpointWriter(WriterContext(RunId("run"), CopyBuffers(lambda: 1 << 40), throttle))


def write(arenas: Arenas, url: str, by: CheckpointWriter, *, keep: int = 3) -> WriteResult:
    return by.write(arenas.fds, WriteJob(url, tuple(RANKS), 2, Retention(keep)))


def load(url: str) -> LoadedCheckpoint | None:
    return load_checkpoint(url, LoadJob(2, RANKS, lambda needed_bytes: None), threading.Event())


def check(loaded: LoadedCheckpoint | None, step: int) -> None:
    assert loaded is not None
    assert (loaded.version.step, loaded.rejected) == (step, {})
    for rank, fd in zip(RANKS, loaded.fds, strict=True):
        arena = Arena(fd, writable=False)
        verify(arena, 0, what="test")
        assert bytes(arena.image(0)) == image_of(rank, step)
        arena.close()
        os.close(fd)


def test_what_was_sealed_comes_back_and_old_ones_go(arenas: Arenas, store: Store) -> None:
    by = writer()
    assert load(store.url) is None
    for step in (1, 2, 3):
        arenas.seal(step)
        assert write(arenas, store.url, by, keep=2).total_bytes == 2 * LAYOUT.image_bytes
        check(load(store.url), step)
    indexes = [name for name in store.names() if name.endswith("index.json")]
    assert len(indexes) == 2
    assert store.unfinished_uploads() == []


def test_the_index_is_the_commit(arenas: Arenas, store: Store) -> None:
    """Two nodes: the part of one node does not count; the second one's index publishes both."""
    arenas.seal(1)
    write(arenas, store.url, writer())
    arenas.seal(2)
    nodes = [writer(), writer()]
    orders = [
        WriteJob(store.url, (rank,), 2, Retention(3), version(0, 2), "token") for rank in RANKS
    ]
    half = nodes[0].write({RANKS[0]: arenas.fds[RANKS[0]]}, orders[0])
    assert half.missing_ranks == (1,)
    check(load(store.url), 1)
    whole = nodes[1].write({RANKS[1]: arenas.fds[RANKS[1]]}, orders[1])
    assert whole.missing_ranks == ()
    check(load(store.url), 2)


def test_an_upload_that_is_given_up_leaves_no_object(arenas: Arenas, store: Store) -> None:
    arenas.seal(1)
    write(arenas, store.url, writer())
    before = store.names()
    arenas.seal(2)
    stop = threading.Event()
    by = writer(stop)
    stop.set()
    with pytest.raises(CheckpointError):
        write(arenas, store.url, by)
    assert [name for name in store.names() if "step-00000002" in name and "index" in name] == []
    assert set(before) <= set(store.names())
    check(load(store.url), 1)


def test_a_bucket_that_is_not_there_is_reported_as_text(arenas: Arenas, store: Store) -> None:
    arenas.seal(1)
    with pytest.raises(CheckpointError, match="bucket"):
        write(arenas, "s3://no-such-bucket/run", writer())


def test_the_command_line_lists_and_verifies(
    arenas: Arenas, store: Store, variables: dict[str, str], tmp_path: Path
) -> None:
    arenas.seal(7)
    write(arenas, store.url, writer())
    for words in (["list", store.url], ["verify", store.url], ["prune", store.url, "--keep", "1"]):
        done = subprocess.run(
            [sys.executable, "-m", "ftrun", "checkpoints", *words, "--json"],
            env={**os.environ, **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "step-00000007" in done.stdout
