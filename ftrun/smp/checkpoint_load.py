"""A checkpoint, back into arenas.

Runs in:  the SMP, in its disk lane's thread.
Takes in: a directory that `checkpoint` has written to.
Gives:    a `Loaded` with one fresh arena per rank, or a `CheckpointError` in words.

`latest` is tried first, then every other whole checkpoint, the one written last first; what is
set aside on the way is noted, and nothing whose digests do not match is ever offered. The loaded
version has generation -1: older than anything that generation 0 of the new run will take.

A node loads its own ranks only. Of another world size it loads all ranks there were, as arenas of
the old world: nobody can tell yet which parts its workers will read.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import xxhash

from ftrun import clock
from ftrun.errors import CheckpointError, LayoutUnknown, SnapshotCorrupt
from ftrun.ids import Rank, Version, version
from ftrun.smp.checkpoint_files import LATEST_NAME
from ftrun.smp.checkpoint_index import Index, ShardFile, read_index, read_indexes
from ftrun.smp.memory import create
from ftrun.wire.arena import Arena, ArenaShape, SlotHeader, SlotState, verify
from ftrun.wire.crash_points import crash_point

LOADED_GENERATION = -1
_READ_BYTES = 1 << 22
Check = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Loaded:
    """Arenas filled from a checkpoint; the descriptors are the caller's to close."""

    version: Version
    path: Path | str
    fds: list[int]
    notes: list[str]
    world_size: int


class Source(Protocol):
    """One checkpoint that can be read, wherever it is."""

    @property
    def path(self) -> Path | str:
        """Where, for messages; its last part is its name."""

    def index(self) -> Index:
        """Raises: CheckpointError: it is not there, or not as it was written."""

    def size(self, name: str) -> int:
        """Of one of its files, in bytes."""

    def read_into(self, name: str, target: memoryview) -> int:
        """Fill it from the beginning of a file; how many bytes there were."""


@dataclass(frozen=True, slots=True)
class FolderSource:
    """A checkpoint in a directory."""

    path: Path

    def index(self) -> Index:
        return read_index(self.path)

    def size(self, name: str) -> int:
        return (self.path / name).stat().st_size

    def read_into(self, name: str, target: memoryview) -> int:
        at = 0
        with (self.path / name).open("rb", buffering=0) as file:
            while at < len(target) and (got := file.readinto(target[at : at + _READ_BYTES])):
                at += got
        return at


def load_checkpoint(
    directory: Path,
    *,
    world_size: int,
    ranks: Sequence[Rank],
    check: Check,
    only: str = "",
    life: str = "",
) -> Loaded | None:
    """Fill arenas from the newest usable checkpoint; None where there is none at all.

    Args:
        directory: need not exist.
        world_size: of this run.
        ranks: the node's own.
        check: raises MemoryTooSmall where so many bytes do not fit.
        only: name of the one checkpoint that may be used; empty: any.
        life: of the run that must have written it; empty: any. See `Plan.life`.

    Raises:
        CheckpointError: there are checkpoints, and none of them can be used.
        MemoryTooSmall: the arenas do not fit.
    """
    notes: list[str] = []
    candidates = _candidates(directory, notes)
    if only:
        candidates = [directory / only]
    if life:
        notes.clear()
    sources = [FolderSource(folder) for folder in candidates]
    return load_first(
        sources,
        notes,
        where=str(directory),
        world_size=world_size,
        ranks=ranks,
        check=check,
        life=life,
    )


def load_first(
    sources: Sequence[Source],
    notes: list[str],
    *,
    where: str,
    world_size: int,
    ranks: Sequence[Rank],
    check: Check,
    life: str,
) -> Loaded | None:
    """Fill arenas from the first that can be used; None where there is none at all.

    Args:
        sources: in the order in which they are tried.
        notes: what was set aside already; more is added.
        where: they are, for the message.
        world_size: as the rest, see `load_checkpoint`.
        ranks: the node's own.
        check: raises MemoryTooSmall where so many bytes do not fit.
        life: of the run that must have written it; empty: any.

    Raises:
        CheckpointError: there are checkpoints, and none of them can be used.
        MemoryTooSmall: the arenas do not fit.
    """
    for source in sources:
        if life and _life_of(source) != life:
            continue
        try:
            index = source.index()
            wanted = ranks
            if index.world_size != world_size:
                wanted = [Rank(rank) for rank in range(index.world_size)]
            fds = _load(source, index, wanted, check)
        except (CheckpointError, SnapshotCorrupt, LayoutUnknown) as error:
            notes.append(str(error))
            continue
        except OSError as error:
            notes.append(f"{source.path} is not readable: {error.strerror or error}")
            continue
        at = version(LOADED_GENERATION, index.step)
        return Loaded(at, source.path, fds, notes, index.world_size)
    if not notes:
        return None
    raise CheckpointError(
        f"no checkpoint in {where} can be used: {'; '.join(notes)}. Name another "
        "--checkpoint-dir, or start from the beginning with --resume never"
    )


def _candidates(directory: Path, notes: list[str]) -> list[Path]:
    if not directory.is_dir():
        return []
    found = [folder for folder, _ in read_indexes(directory)]
    link = directory / LATEST_NAME
    if link.is_symlink():
        latest = directory / os.readlink(link)
        if latest in found:
            found.remove(latest)
        found.insert(0, latest)
    # A crash between the two renames of a write leaves a whole checkpoint and no link.
    # A folder without a readable index is not listed by read_indexes, so it is named here.
    for folder in sorted(directory.glob("step-*")):
        if folder not in found:
            with suppress(OSError):
                _note_unreadable(folder, notes)
    return found


def _life_of(source: Source) -> str | None:
    """None: it cannot be read, so it is nobody's."""
    try:
        return source.index().life
    except (CheckpointError, OSError):
        return None


def _note_unreadable(folder: Path, notes: list[str]) -> None:
    try:
        read_index(folder)
    except CheckpointError as error:
        notes.append(str(error))


def _load(source: Source, index: Index, ranks: Sequence[Rank], check: Check) -> list[int]:
    shards = {shard.rank: shard for shard in index.shards}
    missing = [rank for rank in ranks if rank not in shards]
    if missing:
        raise CheckpointError(f"{source.path}: its index has no rank {missing[0]}")
    shapes = [_shape(shards[rank], index.world_size) for rank in ranks]
    for shape in shapes:
        size = source.size(shards[shape.rank].file)
        if size != shape.image_bytes:
            raise CheckpointError(
                f"{source.path}: rank {shape.rank} has {size} bytes of {shape.image_bytes}"
            )
    check(sum(shape.total_bytes for shape in shapes))
    fds: list[int] = []
    try:
        for shape in shapes:
            fds.append(create(shape))
            _fill(fds[-1], source, shards[shape.rank], index.step)
            crash_point("smp.checkpoint.shard_loaded")
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return fds


def _shape(shard: ShardFile, world_size: int) -> ArenaShape:
    return ArenaShape(
        rank=shard.rank,
        world_size=world_size,
        image_bytes=shard.num_bytes,
        num_pieces=shard.num_pieces,
        layout_id=int(shard.layout_id, 16),
    )


def _fill(fd: int, source: Source, shard: ShardFile, step: int) -> None:
    """Read one shard into slot 0, check every digest, seal it."""
    what = f"{source.path}, rank {shard.rank}"
    arena = Arena(fd, writable=True)
    try:
        _read_into(source, shard.file, arena.image(0), what)
        _read_into(source, shard.digests, arena.table(0).cast("B"), what)
        header = SlotHeader(
            SlotState.COPYING,
            LOADED_GENERATION,
            step,
            shard.num_bytes,
            int(shard.table_digest, 16),
            clock.now_ns(),
        )
        arena.write_header(0, header)
        _check_header(arena.image(0), shard, what)
        verify(arena, 0, what=what)
        arena.write_header(0, replace(header, state=SlotState.SEALED))
    finally:
        arena.close()


def _check_header(image: memoryview, shard: ShardFile, what: str) -> None:
    """The digest table covers the data only; the index covers what describes them."""
    end = 8 + int.from_bytes(image[:8], "little")
    if end > len(image) or xxhash.xxh3_64_hexdigest(image[:end]) != shard.header_digest:
        raise SnapshotCorrupt(what=f"{what}, header", piece=0, pieces=shard.num_pieces)


def _read_into(source: Source, name: str, target: memoryview, what: str) -> None:
    got = source.read_into(name, target)
    if got < len(target):
        raise CheckpointError(f"{what}: {name} ends after {got} bytes")
