"""Reads checkpoints: any bytes of the files on any storage, and checked entries for a conversion.

Runs in:  the SMP, in its disk lane's thread and in the thread that fetches the rest of a shared
          load; the process that converts checkpoints, in several threads.
Takes in: a storage, or the folder of a checkpoint.
Gives:    the index; bytes of files; headers of all shards, plain values, and bytes of entries. Each
          piece that overlaps an entry is compared with its digest before any of it is used.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ftrun.errors import CheckpointError, LayoutUnknown, SnapshotCorrupt
from ftrun.linux import allow_files
from ftrun.smp.checkpoint.index import (
    CheckpointIndex,
    ShardFile,
    StoredCheckpoint,
    file_sizes,
    is_size,
)
from ftrun.smp.checkpoint.storage.local import LocalStorage
from ftrun.smp.checkpoint.storage.storage import OpenFile, Storage
from ftrun.snapshot.layout import Layout, LayoutEntry, parse_header
from ftrun.snapshot.plain_values import plain_bytes
from ftrun.snapshot.shard_header import ShardHeader
from ftrun.snapshot.write_shares import FileExtent, located
from ftrun.wire.shared_memory.arena import table_digest

_LONGEST_HEADER = 1 << 30


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
        """Raises CheckpointError if it is missing, or differs from what was written."""
        if self.stored.index is None:
            raise CheckpointError(self.stored.problem or f"{self.path} has no index")
        return self.stored.index

    def opened(self, name: str) -> AbstractContextManager[OpenFile]:
        """Raise OSError or CheckpointError if the file is missing or unreadable."""
        return self.storage.open(f"{self.stored.name}/{name}")

    @contextmanager
    def image(self, shard: ShardFile) -> Iterator["ShardImage"]:
        with closing(OpenFiles(self)) as files:
            yield ShardImage(shard, files)

    @contextmanager
    def again(self) -> Iterator["CheckpointFiles"]:
        """Yield the same checkpoint, usable also after its original storage is closed."""
        with self.storage.again() as storage:
            yield CheckpointFiles(storage, self.stored)


class OpenFiles:
    """Files of a checkpoint; each is opened once, when it is first read. Usable by threads."""

    def __init__(self, source: CheckpointFiles) -> None:
        self._source = source
        self._found: dict[str, OpenFile] = {}
        self._ends = ExitStack()
        self._lock = threading.Lock()

    def get(self, name: str) -> OpenFile:
        """Raises as `CheckpointFiles.opened`."""
        with self._lock:
            if name not in self._found:
                self._found[name] = self._ends.enter_context(self._source.opened(name))
            return self._found[name]

    def close(self) -> None:
        self._ends.close()


def parts_of(shard: ShardFile, at: int, num_bytes: int) -> list[FileExtent]:
    """The places of bytes of an image; raises CheckpointError if the index does not have them."""
    try:
        return list(located(shard.places, at, num_bytes))
    except ValueError as error:
        raise CheckpointError(f"the index is not valid: {error}") from error


class ShardImage:
    """The image of one rank, read as one file from all files that have parts of it.

    Raises as `CheckpointFiles.opened` and `parts_of`.
    """

    def __init__(self, shard: ShardFile, files: OpenFiles) -> None:
        self._shard = shard
        self._files = files

    def read(self, at: int, num_bytes: int) -> bytes:
        """Read `num_bytes` from offset `at`, or fewer if a file ends too early."""
        found = [self._files.get(part.file).read(part.at, part.num_bytes)
                 for part in parts_of(self._shard, at, num_bytes)]  # fmt: skip
        return found[0] if len(found) == 1 else b"".join(found)

    def read_into(self, target: memoryview, at: int = 0) -> int:
        """Fill `target` from offset `at`; return the bytes read, which may be fewer."""
        done = 0
        for part in parts_of(self._shard, at, len(target)):
            into = target[done : done + part.num_bytes]
            got = self._files.get(part.file).read_into(into, part.at)
            done += got
            if got < part.num_bytes:
                break
        return done


def read_table(source: CheckpointFiles, shard: ShardFile) -> memoryview:
    what = f"{source.path}/{shard.digests}"
    table = memoryview(bytearray(8 * shard.num_pieces))
    with source.opened(shard.digests) as file:
        check_length(file.read_into(table), table, what)
    if table_digest(table) != int(shard.table_digest, 16):
        raise SnapshotCorrupt(what=f"{what}, digest table", piece=0, pieces=shard.num_pieces)
    return table.cast("Q")


def read_head(source: CheckpointFiles, shard: ShardFile) -> tuple[memoryview, memoryview, Layout]:
    """Return header, digest table and layout of a shard, compared with the index.

    Raises CheckpointError, SnapshotCorrupt, LayoutUnknown or OSError.
    """
    what = f"{source.path}/{shard.file}"
    table = read_table(source, shard)
    with source.image(shard) as file:
        start = memoryview(bytearray(min(8, shard.num_bytes)))
        check_length(file.read_into(start), start, what)
        end = 8 + int.from_bytes(start, "little")
        header = memoryview(bytearray(end if end <= min(shard.num_bytes, _LONGEST_HEADER) else 0))
        check_length(file.read_into(header), header, what)
    # The digest table covers only the data, so the digest of the header is in the index.
    if xxhash.xxh3_64_hexdigest(header) != shard.header_digest:
        raise SnapshotCorrupt(what=f"{what}, header", piece=0, pieces=shard.num_pieces)
    layout, _ = parse_header(header, image_bytes=shard.num_bytes)
    if len(layout.pieces) != shard.num_pieces:
        raise SnapshotCorrupt(what=f"{what}, digest table", piece=0, pieces=shard.num_pieces)
    return header, table, layout


def check_sizes(source: CheckpointFiles, shards: Iterable[ShardFile]) -> None:
    """Raises CheckpointError if a data file is missing or too short."""
    sizes = source.storage.sizes(source.stored.name)
    for shard in shards:
        for name, wanted in file_sizes([shard]).items():
            if name not in sizes:
                raise CheckpointError(f"{source.path}/{name} does not exist")
            size = sizes[name]
            if not is_size(shard, size, wanted):
                raise CheckpointError(f"{source.path}/{name} has {size:,} bytes of {wanted:,}")


def check_length(got: int, target: memoryview, what: str) -> None:
    if got < len(target):
        raise CheckpointError(f"{what} ends too early: {len(target) - got} bytes are missing")


class SourceShard:
    """The bytes of one rank; the caller closes `files`.

    Raises SnapshotCorrupt, LayoutUnknown or CheckpointError if it differs from what was written,
    OSError if it cannot be read.
    """

    def __init__(self, source: CheckpointFiles, shard: ShardFile, files: OpenFiles) -> None:
        self._what = f"{source.path}, rank {shard.rank}"
        header, table, layout = read_head(source, shard)
        self.head = ShardHeader(layout, len(header), table)
        self._file = ShardImage(shard, files)
        self._last: tuple[range, memoryview] | None = None
        self._lock = threading.Lock()

    def read(self, offset: int, num_bytes: int) -> memoryview:
        """Return data of the shard; raises SnapshotCorrupt if a piece under it has changed."""
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

    def _read(self, at: int, size: int) -> memoryview:
        data = memoryview(bytearray(size))
        check_length(self._file.read_into(data, at), data, self._what)
        return data

    def _check(self, pieces: range, start: int, data: memoryview) -> None:
        digests = self.head.digests
        for index in pieces:
            piece = self.head.layout.pieces[index]
            at = piece.offset - start
            if xxhash.xxh3_64_intdigest(data[at : at + piece.num_bytes]) != digests[index]:
                raise SnapshotCorrupt(what=self._what, piece=index, pieces=len(digests))


class CheckpointReader:
    """All shards of one checkpoint; raises CheckpointError if it cannot be used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        storage = LocalStorage(folder.parent, threading.Event())
        source = CheckpointFiles(storage, storage.describe(folder.name))
        self.index: CheckpointIndex = source.index()
        shards = {shard.rank: shard for shard in self.index.shards}
        missing = [rank for rank in range(self.index.world_size) if rank not in shards]
        if missing:
            raise CheckpointError(f"{folder}: its index has no rank {missing[0]}")
        self._files = [shards[rank].file for rank in range(self.index.world_size)]
        allow_files(len({name for shard in shards.values() for name in shard.data_names}))
        with ExitStack() as ends:
            ends.enter_context(storage.reading(folder.name))
            files = ends.enter_context(closing(OpenFiles(source)))
            self.shards: list[SourceShard] = []
            self.parts: list[dict[str, bytes]] = []
            try:
                check_sizes(source, shards.values())
                for rank in range(self.index.world_size):
                    shard = SourceShard(source, shards[rank], files)
                    self.shards.append(shard)
                    self.parts.append(plain_bytes(shard.head, shard.read))
            except (SnapshotCorrupt, LayoutUnknown) as error:
                raise CheckpointError(f"{folder} cannot be converted: {error}") from error
            except OSError as error:
                raise self._unreadable(len(self.parts), error) from error
            self._ends = ends.pop_all()

    @property
    def headers(self) -> Sequence[ShardHeader]:
        return [shard.head for shard in self.shards]

    def entry(self, rank: int, name: str) -> LayoutEntry:
        return self.shards[rank].head.entries[name]

    def read(self, rank: int, name: str, first_byte: int, num_bytes: int) -> memoryview:
        """Return bytes of an entry; raises CheckpointError if they differ from what was written."""
        try:
            return self.shards[rank].read(self.entry(rank, name).offset + first_byte, num_bytes)
        except SnapshotCorrupt as error:
            raise CheckpointError(f"{self.folder} cannot be converted: {error}") from error
        except OSError as error:
            raise self._unreadable(rank, error) from error

    def _unreadable(self, rank: int, error: OSError) -> CheckpointError:
        # An error of a read names no file.
        path = error.filename or self.folder / self._files[rank]
        return CheckpointError(f"{path} is not readable: {error.strerror}")

    def close(self) -> None:
        self._ends.close()
