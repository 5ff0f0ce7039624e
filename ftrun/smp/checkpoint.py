"""Checkpoints: the newest snapshot of all ranks, written to a directory.

Runs in:  the SMP, in its disk lane's thread.
Takes in: duplicates of the arenas' descriptors, a directory.
Gives:    a `Written`, or a `CheckpointError` in words; never a half-made checkpoint.
Survives: everything but the disk.

    DIR/step-00000042-g0/   rank-00000.safetensors  rank-00000.digests  ...  index.json
    DIR/latest -> step-00000042-g0

A file is the bytes of a slot as they are; the digests are the slot's table, and the index, which
has a digest itself, holds the digests of tables and headers. Everything is written and synced in
a `.tmp-` sibling and renamed when it is whole; `latest` is renamed last.

Training never waits for a disk, so a slot may be overwritten while it is read. Where memory
allows, all shards are copied first, which takes far less than a step and is repeated where it
took longer; otherwise they are written piece by piece and the headers are compared afterwards.
The digests are those of the bytes written, so a mixed checkpoint is impossible either way.
"""

import contextlib
import errno
import fcntl
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from ftrun import clock
from ftrun.errors import CheckpointError, LayoutUnknown, SnapshotCorrupt
from ftrun.ids import Rank, RunId, Version
from ftrun.snapshot.layout import PAGE_BYTES, parse_header
from ftrun.snapshot.versions import newest_common
from ftrun.wire.arena import (
    Arena,
    ArenaShape,
    SlotHeader,
    SlotState,
    read_shape,
    read_slot_headers,
    table_digest,
)
from ftrun.wire.crash_points import crash_point

INDEX_NAME = "index.json"
LATEST_NAME = "latest"
FORMAT = 1
TRIES = 5
_NAME = re.compile(r"step-\d{8,}-g\d+(\.\d+)?")
_READ_BYTES = 1 << 22
_log = logging.getLogger(__name__)

ArenaFds = Mapping[Rank, Sequence[int]]


class ShardFile(msgspec.Struct, frozen=True):
    """One rank's part of a checkpoint, as the index has it."""

    rank: int
    file: str
    digests: str
    num_bytes: int
    num_pieces: int
    layout_id: str  # hexadecimal, as the digests: 64 bits do not fit a JSON number everywhere
    table_digest: str
    header_digest: str


class Index(msgspec.Struct, frozen=True):
    """What a checkpoint is. `serial` grows with each one written to its directory."""

    format: int
    serial: int
    run_id: str
    generation: int
    step: int
    world_size: int
    shards: list[ShardFile]


class SealedIndex(msgspec.Struct, frozen=True):
    """The content of index.json: the index, and the xxh3 of its text."""

    digest: str
    index: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Written:
    """A checkpoint that is durable."""

    version: Version
    path: Path
    total_bytes: int
    seconds: float


class CheckpointWriter:
    """Writes checkpoints of one run into one directory at a time.

    Args:
        free_bytes: how much memory may be used for a copy of all shards, asked at each write.
        stop: when set, a write is given up.
    """

    def __init__(
        self, run_id: RunId, *, free_bytes: Callable[[], int], stop: threading.Event
    ) -> None:
        self._run_id = run_id
        self._free_bytes = free_bytes
        self._stop = stop
        self._last: tuple[Path, Version, Path] | None = None

    def remember(self, directory: Path, version: Version, path: Path) -> None:
        """This version is in this directory already: written by us, or loaded from it."""
        self._last = (directory, version, path)

    def write(self, fds: ArenaFds, *, world_size: int, directory: Path, keep: int) -> Written:
        """Write the newest version that all ranks hold.

        Raises:
            CheckpointError: why it was not written.
        """
        started_s = clock.now_s()
        try:
            with _locked(directory) as folder_fd:
                found = self._write(fds, world_size, directory, folder_fd)
                crash_point("smp.checkpoint.latest")
                _prune(directory, keep=keep, newest=found.path)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint in {directory} is not written: {error.strerror or error}. The "
                "snapshots in memory go on; make room or name another --checkpoint-dir"
            ) from error
        return Written(found.version, found.path, found.total_bytes, clock.now_s() - started_s)

    def _write(self, fds: ArenaFds, world_size: int, directory: Path, folder_fd: int) -> Written:
        _sweep(directory)
        for _ in range(TRIES):
            version = newest_version(fds, world_size)
            if version is None:
                raise CheckpointError("no version is sealed by every rank yet; nothing to write")
            if self._last is not None and self._last[:2] == (directory, version):
                path = self._last[2]
                if path.is_dir():
                    _point_latest(directory, path, folder_fd)
                    return Written(version, path, 0, 0.0)
            written = self._try(fds, version, world_size, directory)
            if written is None:
                continue
            temporary, total_bytes = written
            path = _free_name(directory, version)
            temporary.rename(path)
            crash_point("smp.checkpoint.renamed")
            _sync_folder(folder_fd)
            _point_latest(directory, path, folder_fd)
            self.remember(directory, version, path)
            return Written(version, path, total_bytes, 0.0)
        raise CheckpointError(
            f"the slots were overwritten {TRIES} times while they were read: snapshots are taken "
            "faster than memory is copied. Take them less often (--snapshot-every)"
        )

    def _try(
        self, fds: ArenaFds, version: Version, world_size: int, directory: Path
    ) -> tuple[Path, int] | None:
        """The temporary folder with everything in it, or None when a slot was overwritten."""
        shards = find_shards(fds, version)
        if sum(shard.shape.image_bytes for shard in shards) <= self._free_bytes():
            for shard in shards:
                shard.copy_now()
            if not all(shard.is_unchanged() for shard in shards):
                return None
        temporary = directory / f".tmp-{os.getpid()}-step-{version.step}"
        crash_point("smp.checkpoint.started")
        temporary.mkdir()
        try:
            total = self._fill(temporary, shards, version, world_size)
        except SnapshotCorrupt as error:
            _remove(temporary)
            if all(shard.is_unchanged() for shard in shards):
                raise CheckpointError(f"the checkpoint is not written: {error}") from error
            return None
        except BaseException:
            _remove(temporary)
            raise
        if not all(shard.is_copied or shard.is_unchanged() for shard in shards):
            _remove(temporary)
            return None
        return temporary, total

    def _fill(
        self, folder: Path, shards: Sequence["Shard"], version: Version, world_size: int
    ) -> int:
        files = []
        for shard in shards:
            files.append(self._write_shard(folder, shard))
            crash_point("smp.checkpoint.shard_written")
        index = Index(
            format=FORMAT,
            serial=1 + max((known.serial for _, known in read_indexes(folder.parent)), default=0),
            run_id=self._run_id,
            generation=max(0, version.generation),
            step=version.step,
            world_size=world_size,
            shards=files,
        )
        text = msgspec.json.format(msgspec.json.encode(index), indent=1)
        whole = SealedIndex(xxhash.xxh3_64_hexdigest(text), msgspec.Raw(text))
        with _durable(folder / INDEX_NAME) as write:
            write(msgspec.json.encode(whole))
        crash_point("smp.checkpoint.index_written")
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _sync_folder(fd)
        finally:
            os.close(fd)
        crash_point("smp.checkpoint.synced")
        return sum(shard.num_bytes for shard in files)

    def _write_shard(self, folder: Path, shard: "Shard") -> ShardFile:
        name = f"rank-{shard.shape.rank:05d}"
        table = shard.table()
        if table_digest(table) != shard.header.table_digest:
            raise SnapshotCorrupt(what=f"{shard.what}, digest table", piece=0, pieces=len(table))
        with _durable(folder / f"{name}.safetensors") as write:
            pieces = shard.pieces()
            header = next(pieces)
            write(header)
            for index, piece in enumerate(pieces):
                if self._stop.is_set():
                    raise CheckpointError("the checkpoint is given up: the run is being stopped")
                if index >= len(table) or xxhash.xxh3_64_intdigest(piece) != table[index]:
                    raise SnapshotCorrupt(what=shard.what, piece=index, pieces=len(table))
                write(piece)
        with _durable(folder / f"{name}.digests") as write:
            write(table)
        return ShardFile(
            rank=shard.shape.rank,
            file=f"{name}.safetensors",
            digests=f"{name}.digests",
            num_bytes=shard.shape.image_bytes,
            num_pieces=shard.shape.num_pieces,
            layout_id=f"{shard.shape.layout_id:016x}",
            table_digest=f"{shard.header.table_digest:016x}",
            header_digest=xxhash.xxh3_64_hexdigest(header),
        )


class Shard:
    """One sealed slot, read through its descriptor: without a mapping, without the GIL."""

    def __init__(self, fd: int, slot: int, header: SlotHeader, shape: ArenaShape) -> None:
        self.shape = shape
        self.header = header
        self.what = f"rank {shape.rank}, {header.version}"
        self._fd = fd
        self._slot = slot
        self._table_at = PAGE_BYTES + slot * shape.slot_bytes + PAGE_BYTES
        self._image_at = self._table_at + shape.table_bytes
        self._copy: memoryview | None = None
        self._table: bytes | None = None

    @property
    def is_copied(self) -> bool:
        return self._copy is not None

    def is_unchanged(self) -> bool:
        return read_slot_headers(self._fd)[self._slot] == self.header

    def copy_now(self) -> None:
        """Copy the image, so that what happens to the slot afterwards does not matter."""
        size = self.shape.image_bytes
        self._table = os.pread(self._fd, 8 * self.shape.num_pieces, self._table_at)
        copy = memoryview(bytearray(size))
        at = 0
        while at < size:
            at += os.preadv(self._fd, [copy[at : at + _READ_BYTES]], self._image_at + at)
        self._copy = copy

    def table(self) -> memoryview:
        """The digest of each piece: u64."""
        if self._table is None:
            self._table = os.pread(self._fd, 8 * self.shape.num_pieces, self._table_at)
        return memoryview(self._table).cast("Q")

    def pieces(self) -> Iterator[memoryview]:
        """The bytes of the image: first its header, then each piece of the layout.

        Raises:
            SnapshotCorrupt: the header is not readable.
        """
        arena = Arena(self._fd, writable=False)
        image = arena.image(self._slot) if self._copy is None else self._copy
        try:
            layout, start = parse_header(image)
        except LayoutUnknown as error:
            raise SnapshotCorrupt(
                what=f"{self.what}, header: {error}", piece=0, pieces=self.shape.num_pieces
            ) from error
        finally:
            del image
            arena.close()
        yield self._read(0, start)
        for piece in layout.pieces:
            yield self._read(start + piece.offset, piece.num_bytes)

    def _read(self, at: int, size: int) -> memoryview:
        if self._copy is not None:
            return self._copy[at : at + size]
        return memoryview(os.pread(self._fd, size, self._image_at + at))


def newest_version(fds: ArenaFds, world_size: int) -> Version | None:
    """The newest version that every rank of the world has sealed in one of its arenas."""
    held = {
        rank: [
            header.version
            for fd in some
            if read_shape(fd).world_size == world_size
            for header in read_slot_headers(fd)
            if header.state is SlotState.SEALED
        ]
        for rank, some in fds.items()
    }
    return newest_common(held, [Rank(rank) for rank in range(world_size)])


def find_shards(fds: ArenaFds, version: Version) -> list[Shard]:
    """The slots that hold this version, by rank."""
    found = {
        rank: Shard(fd, slot, header, read_shape(fd))
        for rank, some in sorted(fds.items())
        for fd in some
        for slot, header in enumerate(read_slot_headers(fd))
        if header.state is SlotState.SEALED and header.version == version
    }
    return list(found.values())


def read_index(folder: Path) -> Index:
    """The index of one checkpoint.

    Raises:
        CheckpointError: it is not there, or not as it was written.
    """
    try:
        sealed = msgspec.json.decode((folder / INDEX_NAME).read_bytes(), type=SealedIndex)
        if xxhash.xxh3_64_hexdigest(bytes(sealed.index)) != sealed.digest:
            raise CheckpointError(f"{folder}: the digest of its index does not match")
        index = msgspec.json.decode(sealed.index, type=Index)
    except OSError as error:
        raise CheckpointError(f"{folder}: its index is not readable: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{folder}: its index is not one: {error}") from error
    if index.format != FORMAT:
        raise CheckpointError(f"{folder}: format {index.format} is not known, only {FORMAT}")
    return index


def read_indexes(directory: Path) -> list[tuple[Path, Index]]:
    """All whole checkpoints in a directory, the one written last first."""
    found = []
    for folder in directory.iterdir():
        if _NAME.fullmatch(folder.name) and folder.is_dir():
            with contextlib.suppress(CheckpointError):
                found.append((folder, read_index(folder)))
    return sorted(found, key=lambda one: one[1].serial, reverse=True)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[int]:
    """The directory, made if need be, opened and locked against another run."""
    if not directory.is_absolute():
        raise CheckpointError(f"the checkpoint directory {directory} is not an absolute path")
    directory.mkdir(parents=True, exist_ok=True)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"another run writes its checkpoints to {directory}; name another --checkpoint-dir"
            ) from error
        except OSError as error:
            _log.debug("%s cannot be locked: %s", directory, error)
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _durable(path: Path) -> Iterator[Callable[[memoryview | bytes], None]]:
    """A new file, written by the function that is given, on disk at the end."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(data: memoryview | bytes) -> None:
        left = memoryview(data).cast("B")
        while left:
            left = left[os.write(fd, left) :]

    try:
        yield write
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_folder(fd: int) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems have no such thing
            raise


def _free_name(directory: Path, version: Version) -> Path:
    """Where this version goes: an earlier life of the run may have left one of that name."""
    name = f"step-{version.step:08d}-g{max(0, version.generation)}"
    path = directory / name
    again = 1
    while path.exists():
        again += 1
        path = directory / f"{name}.{again}"
    return path


def _point_latest(directory: Path, path: Path, folder_fd: int) -> None:
    temporary = directory / f".tmp-{os.getpid()}-{LATEST_NAME}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(path.name)
    crash_point("smp.checkpoint.link_made")
    temporary.replace(directory / LATEST_NAME)
    _sync_folder(folder_fd)


def _sweep(directory: Path) -> None:
    """Remove what a killed writer has left; the lock says that none is at work."""
    for path in directory.glob(".tmp-*"):
        if path.is_dir() and not path.is_symlink():
            _remove(path)
        else:
            path.unlink(missing_ok=True)


def _remove(folder: Path) -> None:
    """Delete one of our folders, as far as possible; importing shutil costs 3 ms."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def _prune(directory: Path, *, keep: int, newest: Path) -> None:
    others = [folder for folder, _ in read_indexes(directory) if folder != newest]
    for folder in others[max(0, keep - 1) :]:
        doomed = directory / f".tmp-{os.getpid()}-{folder.name}"
        folder.rename(doomed)
        crash_point("smp.checkpoint.pruning")
        _remove(doomed)
