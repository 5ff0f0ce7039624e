"""Reads the shards of all ranks of a version.

Runs in:  worker, inside `attach`, when a version is restored into another number of ranks; for a
          checkpoint on disk, any thread of ftrun.tools.export.__main__.
Takes in: descriptors of arenas from the SMP; the ranks whose shards are on other nodes; announced
          reads; file locations with the digests from the checkpoint's index.
Gives:    bytes of any rank's shard; each piece is compared with its digest before it is used.

Rule 1: only requested bytes are read. A digest covers a piece, so the pieces that contain the
        requested bytes are read whole.
Rule 2: a reader that knows its reads announces them first (`expect`), in their order. Pieces on
        other nodes are fetched in the announced order. One fetch gets as many as fit
        `WINDOW_BYTES`, and the next fetch replaces them. At most one window is therefore in memory.
Rule 3: a reader of a checkpoint on disk opens all files at once, because a run may remove the
        checkpoint during an export. It does not import torch.
"""

import mmap
import os
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import xxhash

from ftrun.errors import CheckpointError, LayoutUnknown, SnapshotCorrupt
from ftrun.ids import Rank, Version
from ftrun.linux import allow_files
from ftrun.sharding.source_index import ByteRange, ShardSource
from ftrun.snapshot.layout import parse_header
from ftrun.snapshot.shard_header import ShardHeader, unpack_header
from ftrun.snapshot.write_shares import FileExtent, located
from ftrun.wire.messages.checkpoint import ShardFileLocation
from ftrun.wire.shared_memory.arena import Arena, table_digest
from ftrun.worker.smp_client import WorkerSmpClient

WINDOW_BYTES = 32 << 20
_HEADERS_AT_ONCE = 100
_MOST_RANGES = 4096  # a message has at most 1 MiB


class LocalShards:
    """Shards in arenas of this node; the constructor closes the descriptors."""

    def __init__(self, fds: Mapping[Rank, int], wanted: Version) -> None:
        self._wanted = wanted
        self._arenas: dict[Rank, Arena] = {}
        self._slots: dict[Rank, int] = {}
        self._headers: dict[Rank, ShardHeader] = {}
        try:
            for rank, fd in fds.items():
                self._arenas[rank] = Arena(fd, writable=False)
        finally:
            for fd in fds.values():
                os.close(fd)

    def headers(self) -> Mapping[Rank, ShardHeader]:
        for rank, arena in self._arenas.items():
            if rank not in self._headers:
                slot = arena.find(self._wanted)
                if slot is None:
                    raise LayoutUnknown(f"the arena of rank {rank} does not hold {self._wanted}")
                self._slots[rank] = slot
                sealed = arena.header(slot)
                self._headers[rank] = make_header(
                    arena.image(slot),
                    arena.table(slot),
                    layout_id=arena.shape.layout_id,
                    image_bytes=sealed.image_bytes,
                    sealed_digest=sealed.table_digest,
                    what=f"{self._wanted} of rank {rank}",
                    rank=rank,
                )
        return self._headers

    def expect(self, ranges: Sequence[ByteRange]) -> None:
        """Nothing to do: the shards are on this node."""

    def read(self, rank: Rank, offset: int, num_bytes: int) -> memoryview:
        start = self._headers[rank].start + offset
        return self._arenas[rank].image(self._slots[rank])[start : start + num_bytes]

    def close(self) -> None:
        self._headers.clear()
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()


def make_header(
    image: memoryview,
    table: memoryview,
    *,
    layout_id: int,
    image_bytes: int,
    sealed_digest: int,
    what: str,
    rank: Rank,
) -> ShardHeader:
    """Parse a shard's header, and compare it with the sealed digests.

    Args:
        image: the shard, or only its header.
        table: u64 per piece.
        layout_id: digest of the header.
        image_bytes: size of the whole shard.
        sealed_digest: of the table.
        what: name of the shard, for errors.
        rank: owner of the shard.

    Raises:
        SnapshotCorrupt: header or digest table differs from the sealed one.
        LayoutUnknown: the header is intact, but of another version of ftrun.
    """
    count = len(table)
    end = 8 + int.from_bytes(image[:8], "little")
    if end > len(image) or xxhash.xxh3_64_intdigest(image[:end]) != layout_id:
        raise SnapshotCorrupt(what=f"{what}, header", piece=0, pieces=count, rank=rank)
    layout, start = parse_header(image, image_bytes=image_bytes)
    if count != len(layout.pieces) or table_digest(table) != sealed_digest:
        raise SnapshotCorrupt(what=f"{what}, digest table", piece=0, pieces=count, rank=rank)
    return ShardHeader(layout, start, table)


class RemoteShards:
    """Shards on other nodes, or of lost ones."""

    def __init__(self, link: WorkerSmpClient, wanted: Version, ranks: Sequence[Rank]) -> None:
        self._link = link
        self._wanted = wanted
        self._ranks = list(ranks)
        self._headers: dict[Rank, ShardHeader] = {}
        self._expected: deque[ByteRange] = deque()
        self._window: dict[ByteRange, memoryview] = {}

    def headers(self) -> Mapping[Rank, ShardHeader]:
        for at in range(len(self._headers), len(self._ranks), _HEADERS_AT_ONCE):
            ranks = self._ranks[at : at + _HEADERS_AT_ONCE]
            fds = self._link.fetch_headers(self._wanted, ranks)
            for rank, fd in zip(ranks, fds, strict=True):
                packed = unpack_header(_mapped(fd))
                self._headers[rank] = make_header(
                    packed.header,
                    packed.table,
                    layout_id=packed.layout_id,
                    image_bytes=packed.image_bytes,
                    sealed_digest=packed.table_digest,
                    what=f"{self._wanted} of rank {rank}",
                    rank=rank,
                )
        return self._headers

    def expect(self, ranges: Sequence[ByteRange]) -> None:
        self._expected = deque(ranges)

    def read(self, rank: Rank, offset: int, num_bytes: int) -> memoryview:
        wanted = ByteRange(rank, offset, num_bytes)
        if wanted not in self._window:
            self._fetch(wanted)
        return self._window[wanted]

    def close(self) -> None:
        self._headers.clear()
        self._window.clear()
        self._expected.clear()

    def _fetch(self, first: ByteRange) -> None:
        if first in self._expected:
            while self._expected.popleft() != first:
                pass  # ranges before it were read already, or are not needed any more
        ranges = [first]
        size = first.num_bytes
        while self._expected and len(ranges) < _MOST_RANGES:
            size += self._expected[0].num_bytes
            if size > WINDOW_BYTES:
                break
            ranges.append(self._expected.popleft())
        ranges = list(dict.fromkeys(ranges))
        self._window.clear()
        raw = _mapped(self._link.fetch_pieces(self._wanted, [self._pieces(r) for r in ranges]))
        at = 0
        for one in ranges:
            self._window[one] = raw[at : at + one.num_bytes]
            at += one.num_bytes

    def _pieces(self, one: ByteRange) -> tuple[int, int, int]:
        pieces = self._headers[one.rank].pieces_under(one.offset, one.num_bytes)
        return (one.rank, pieces[0], len(pieces))


class JoinedShards:
    """Shards of two sources, as one."""

    def __init__(self, here: ShardSource, elsewhere: ShardSource) -> None:
        self._here = here
        self._elsewhere = elsewhere
        self._ranks_here: set[Rank] = set()

    def headers(self) -> Mapping[Rank, ShardHeader]:
        here = self._here.headers()
        self._ranks_here = set(here)
        return {**self._elsewhere.headers(), **here}

    def expect(self, ranges: Sequence[ByteRange]) -> None:
        self._elsewhere.expect([one for one in ranges if one.rank not in self._ranks_here])

    def read(self, rank: Rank, offset: int, num_bytes: int) -> memoryview:
        source = self._here if rank in self._ranks_here else self._elsewhere
        return source.read(rank, offset, num_bytes)

    def close(self) -> None:
        self._here.close()
        self._elsewhere.close()


def open_shards(
    fds: Mapping[Rank, int], ranks: Iterable[Rank], wanted: Version, link: WorkerSmpClient
) -> ShardSource:
    """The shards of these ranks: those of `fds` in place, others fetched when they are read."""
    here = LocalShards(fds, wanted)
    elsewhere = [rank for rank in ranks if rank not in fds]
    return JoinedShards(here, RemoteShards(link, wanted, elsewhere)) if elsewhere else here


def _mapped(fd: int) -> memoryview:
    """Map the bytes behind a descriptor and close it; the mapping lives as long as its views."""
    try:
        mapping = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
    finally:
        os.close(fd)
    return memoryview(mapping)


class CheckedShards:
    """Reads from a source, and returns only bytes that match their digests.

    `right`: pieces that were compared before, as (rank, index).
    """

    def __init__(
        self, source: ShardSource, what: str, right: Collection[tuple[Rank, int]] = ()
    ) -> None:
        self._source = source
        self._what = what
        self._right = right
        self.headers = dict(source.headers())
        self._last: tuple[Rank, range, memoryview] | None = None

    def expect(self, ranges: Sequence[ByteRange]) -> None:
        """Announce the next reads in their order; each piece is announced once."""
        found: list[ByteRange] = []
        for one in ranges:
            head = self.headers[one.rank]
            pieces = head.pieces_under(one.offset, one.num_bytes)
            if pieces:
                made = ByteRange(one.rank, *head.bytes_of(pieces))
                if not found or found[-1] != made:
                    found.append(made)
        self._source.expect(found)

    def read(self, rank: Rank, offset: int, num_bytes: int) -> memoryview:
        """Bytes of a shard's data; SnapshotCorrupt if a piece that contains them differs."""
        head = self.headers[rank]
        pieces = head.pieces_under(offset, num_bytes)
        if not pieces:
            return memoryview(b"")
        start, length = head.bytes_of(pieces)
        # Small entries share a piece and are read consecutively.
        if self._last is None or self._last[:2] != (rank, pieces):
            data = self._source.read(rank, start, length)
            self._check(rank, pieces, start, data)
            self._last = (rank, pieces, data)
        data = self._last[2]
        return data[offset - start : offset - start + num_bytes]

    def close(self) -> None:
        self._last = None
        self.headers.clear()
        self._source.close()

    def _check(self, rank: Rank, pieces: range, start: int, data: memoryview) -> None:
        head = self.headers[rank]
        for index in pieces:
            if (rank, index) in self._right:
                continue
            piece = head.layout.pieces[index]
            at = piece.offset - start
            if xxhash.xxh3_64_intdigest(data[at : at + piece.num_bytes]) != head.digests[index]:
                what, count = f"{self._what} of rank {rank}", len(head.digests)
                raise SnapshotCorrupt(what=what, piece=index, pieces=count, rank=rank)


_LENGTH_BYTES = 8
_LONGEST_HEADER = 1 << 30


class DiskImages:
    """Shards of one checkpoint. Raises CheckpointError if a file is missing, or is another one."""

    def __init__(self, places: Sequence[ShardFileLocation]) -> None:
        self._places = {Rank(place.rank): place for place in places}
        self._fds: dict[str, int] = {}
        self._headers: dict[Rank, ShardHeader] = {}
        paths = {one.file for place in places for one in _extents(place)}
        allow_files(len(paths))
        try:
            for path in sorted(paths):
                self._fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            for rank, place in self._places.items():
                self._headers[rank] = self._head(place)
        except OSError as error:
            self.close()
            raise CheckpointError(f"{error.filename} is not readable: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    def path_of(self, rank: Rank, piece: int = -1) -> str:
        """The file of a rank, or the one that has this piece of its image."""
        place = self._places[rank]
        if piece < 0 or not place.extents:
            return place.path
        head = self._headers[rank]
        return next(located(place.extents, head.start + head.layout.pieces[piece].offset, 1)).file

    def headers(self) -> Mapping[Rank, ShardHeader]:
        return self._headers

    def expect(self, ranges: Sequence[ByteRange]) -> None:
        """Do nothing, because `read` reads on demand."""

    def read(self, rank: Rank, offset: int, num_bytes: int) -> memoryview:
        path, at = self.path_of(rank), self._headers[rank].start + offset
        try:
            return memoryview(self._image(self._places[rank], at, num_bytes))
        except OSError as error:
            raise CheckpointError(f"{path} is not readable: {error.strerror}") from error

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _image(self, place: ShardFileLocation, at: int, num_bytes: int) -> bytes:
        try:
            found = list(located(_extents(place), at, num_bytes))
        except ValueError as error:
            raise CheckpointError(f"{place.path}: {error}") from error
        parts = [_read(self._fds[one.file], one.at, one.num_bytes, one.file) for one in found]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _head(self, place: ShardFileLocation) -> ShardHeader:
        size = os.fstat(self._fds[place.path]).st_size
        if size != place.num_bytes and not place.extents:
            raise CheckpointError(f"{place.path} has {size:,} bytes of {place.num_bytes:,}")
        length = int.from_bytes(self._image(place, 0, _LENGTH_BYTES), "little")
        num_bytes = _LENGTH_BYTES + min(length, place.num_bytes - _LENGTH_BYTES, _LONGEST_HEADER)
        header = self._image(place, 0, num_bytes)
        table = Path(place.digests_path).read_bytes()
        try:
            return make_header(
                memoryview(header),
                memoryview(table[: len(table) // 8 * 8]).cast("Q"),
                layout_id=int(place.header_digest, 16),
                image_bytes=place.num_bytes,
                sealed_digest=int(place.table_digest, 16),
                what=place.path,
                rank=Rank(place.rank),
            )
        except SnapshotCorrupt as error:
            path, what = place.path, "its header is"
            if error.what.endswith("digest table"):
                path, what = place.digests_path, "these are"
            raise CheckpointError(f"{path} is damaged: {what} not what was written") from error
        except LayoutUnknown as error:
            raise CheckpointError(f"{place.path}: {error}") from error


def _extents(place: ShardFileLocation) -> list[FileExtent]:
    return place.extents or [FileExtent(0, place.num_bytes, place.path, 0)]


def _read(fd: int, at: int, num_bytes: int, path: str) -> bytes:
    parts = []
    while num_bytes:
        part = os.pread(fd, num_bytes, at)
        if not part:
            raise CheckpointError(f"{path} ends after {at:,} bytes")
        parts.append(part)
        at += len(part)
        num_bytes -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
