"""Reads checkpoints: any bytes of the files on any storage, and checked entries for a conversion.

Runs in:  the SMP, in its disk lane's thread and in the thread that fetches the rest of a shared
          load; the process that converts checkpoints, in several threads.
Takes in: a storage, or the folder of a checkpoint.
Gives:    the index; bytes of files; headers of all shards, plain values, and bytes of entries. Each
          piece that overlaps an entry is compared with its digest before any of it is used.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ftrun.errors import CheckpointError, LayoutUnknown, SnapshotCorrupt
from ftrun.sharding.source_index import plain_bytes
from ftrun.smp.checkpoint.index import CheckpointIndex, ShardFile, read_index
from ftrun.smp.checkpoint.storage.fsspec import FsspecStorage
from ftrun.smp.checkpoint.storage.local import LocalStorage, opened
from ftrun.smp.checkpoint.storage.storage import OpenFile, Storage, StoredCheckpoint
from ftrun.snapshot.layout import LayoutEntry, parse_header
from ftrun.snapshot.shard_header import ShardHeader
from ftrun.urls import is_url

_HEADER_LENGTH_BYTES = 8
_LONGEST_HEADER = 1 << 30


def open_storage(where: str, stop: threading.Event) -> AbstractContextManager[Storage]:
    """Open a directory or a URL.

    Args:
        where: need not exist.
        stop: when set, all waiting ends.

    Raises:
        CheckpointError: the store cannot be reached.
    """
    if is_url(where):
        return FsspecStorage(where, stop)
    return nullcontext(LocalStorage(Path(where), stop))


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """The files of one checkpoint in a storage."""

    storage: Storage
    stored: StoredCheckpoint

    @property
    def path(self) -> str:
        """The location, for messages; its last component is the name."""
        return self.storage.path_of(self.stored.name)

    def index(self) -> CheckpointIndex:
        """Raise CheckpointError if it is missing, or differs from what was written."""
        if self.stored.index is None:
            raise CheckpointError(self.stored.problem or f"{self.path} has no index")
        return self.stored.index

    def opened(self, name: str) -> AbstractContextManager[OpenFile]:
        """Raise OSError or CheckpointError if the file is missing or unreadable."""
        return self.storage.open(f"{self.stored.name}/{name}")

    @contextmanager
    def again(self) -> Iterator["CheckpointFiles"]:
        """Yield the same checkpoint, usable also after its original storage is closed."""
        with self.storage.again() as storage:
            yield CheckpointFiles(storage, self.stored)


class SourceShard:
    """The file of one rank.

    Args:
        folder: of the checkpoint.
        shard: its entry in the index.

    Raises:
        SnapshotCorrupt, LayoutUnknown, CheckpointError: it differs from what was written.
        OSError: it cannot be read.
    """

    def __init__(self, folder: Path, shard: ShardFile) -> None:
        self.rank = shard.rank
        self._what = f"{folder}, rank {shard.rank}"
        with ExitStack() as ends:
            self._file = ends.enter_context(opened(folder / shard.file))
            self.head = self._read_head(folder, shard)
            self._ends = ends.pop_all()
        self._last: tuple[range, memoryview] | None = None
        self._lock = threading.Lock()

    def read(self, offset: int, num_bytes: int) -> memoryview:
        """Return bytes of the shard's data.

        Raises:
            SnapshotCorrupt: a piece that overlaps them differs from what was written.
        """
        pieces = self.head.pieces_under(offset, num_bytes)
        if not pieces:
            return memoryview(b"")
        start, length = self.head.bytes_of(pieces)
        with self._lock:  # small entries share a piece and are read one after another
            last = self._last
        if last is None or last[0] != pieces:
            data = self._read(self.head.start + start, length)
            self._check(pieces, start, data)
            last = (pieces, data)
            with self._lock:
                self._last = last if len(pieces) == 1 else None
        return last[1][offset - start : offset - start + num_bytes]

    def close(self) -> None:
        self._ends.close()

    def _read_head(self, folder: Path, shard: ShardFile) -> ShardHeader:
        size = self._file.size
        if size != shard.num_bytes:
            raise CheckpointError(f"{self._what} has {size:,} bytes of {shard.num_bytes:,}")
        length = int.from_bytes(self._file.read(0, _HEADER_LENGTH_BYTES), "little")
        end = _HEADER_LENGTH_BYTES + min(length, size, _LONGEST_HEADER)
        header = bytes(self._read(0, min(end, size)))
        if xxhash.xxh3_64_hexdigest(header) != shard.header_digest:
            raise SnapshotCorrupt(what=f"{self._what}, header", piece=0, pieces=shard.num_pieces)
        layout, start = parse_header(memoryview(header), image_bytes=size)
        table = (folder / shard.digests).read_bytes()
        if xxhash.xxh3_64_hexdigest(table) != shard.table_digest:
            raise SnapshotCorrupt(what=f"{self._what}, digests", piece=0, pieces=shard.num_pieces)
        return ShardHeader(layout, start, memoryview(table).cast("Q"))

    def _read(self, at: int, size: int) -> memoryview:
        data = memoryview(bytearray(size))
        done = self._file.read_into(data, at)
        if done < size:
            raise CheckpointError(f"{self._what} ends after {at + done} bytes")
        return data

    def _check(self, pieces: range, start: int, data: memoryview) -> None:
        digests = self.head.digests
        for index in pieces:
            piece = self.head.layout.pieces[index]
            at = piece.offset - start
            if xxhash.xxh3_64_intdigest(data[at : at + piece.num_bytes]) != digests[index]:
                raise SnapshotCorrupt(what=self._what, piece=index, pieces=len(digests))


class CheckpointReader:
    """All shards of one checkpoint.

    Args:
        folder: of the checkpoint.

    Raises:
        CheckpointError: the checkpoint cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index: CheckpointIndex = read_index(folder)
        shards = {shard.rank: shard for shard in self.index.shards}
        missing = [rank for rank in range(self.index.world_size) if rank not in shards]
        if missing:
            raise CheckpointError(f"{folder}: its index has no rank {missing[0]}")
        with ExitStack() as ends:
            self.shards: list[SourceShard] = []
            try:
                for rank in range(self.index.world_size):
                    self.shards.append(SourceShard(folder, shards[rank]))
                    ends.callback(self.shards[-1].close)
                self.parts = [plain_bytes(shard.head, shard.read) for shard in self.shards]
            except (SnapshotCorrupt, LayoutUnknown) as error:
                raise CheckpointError(f"{folder} cannot be converted: {error}") from error
            except OSError as error:
                raise CheckpointError(
                    f"{error.filename or folder} is not readable: {error.strerror}"
                ) from error
            self._ends = ends.pop_all()

    @property
    def heads(self) -> Sequence[ShardHeader]:
        return [shard.head for shard in self.shards]

    def entry(self, rank: int, name: str) -> LayoutEntry:
        return self.shards[rank].head.entries[name]

    def read(self, rank: int, name: str, first_byte: int, num_bytes: int) -> memoryview:
        """Return bytes of an entry.

        Raises:
            CheckpointError: they differ from what was written.
        """
        try:
            return self.shards[rank].read(self.entry(rank, name).offset + first_byte, num_bytes)
        except SnapshotCorrupt as error:
            raise CheckpointError(f"{self.folder} cannot be converted: {error}") from error

    def close(self) -> None:
        self._ends.close()
