"""Writes what several nodes hold equally once: in the files of one of them, cut by equal bytes.

Runs in:  the SMP of each node, in its disk lane's thread.
Takes in: the slots of this node's ranks; the folder of a checkpoint that all nodes write to.
Gives:    for each rank here, the bytes that files of other ranks will have; files without them.
Survives: a node that makes no offer, or a late one: this node then writes its images whole.

    offer-00002    digest of the rest | NodeOffer, in msgpack

A node puts its offer into the folder and waits for the others. The index records which file has
which bytes of an image (`ShardFile.extents`), and the checkpoint is not published before these
files are there.

Rule 1: a node relies only on nodes whose offers it has read, and only if it has those of all ranks.
        Such a node makes the same division when it has all offers too, and writes more if not.
Rule 2: the slots may be overwritten while a node waits, as while it writes, so it polls them. If a
        later version is sealed and there is no copy, the node writes at once and whole.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import xxhash

from ftrun import clock
from ftrun.errors import CheckpointError
from ftrun.smp.checkpoint.index import CheckpointPart, ShardFile, offer_name, offer_names
from ftrun.smp.checkpoint.slot_reader import (
    SealedSlot,
    append,
    put_table,
    shard_file,
    write_shard,
)
from ftrun.smp.checkpoint.storage.direct_file import Pace
from ftrun.smp.checkpoint.storage.storage import FileSink, Storage
from ftrun.smp.checkpoint.write_job import WriteJob, WriterContext
from ftrun.snapshot.write_shares import (
    MOST_RANKS,
    BorrowedBytes,
    FileExtent,
    RankOffer,
    borrowed_bytes,
    hold_equal,
    offer_of,
    own_ranges,
)
from ftrun.wire.shared_memory.arena import SlotState

HURRIED_S = 2.0
"""Longest wait for other nodes when the run ends."""

LOOK_S = 1e-3
"""A wait that only reads the offers that exist already."""

_NAP_S, _MOST_NAP_S = 0.02, 0.5

Borrowed = dict[int, list[BorrowedBytes]]


class NodeOffer(msgspec.Struct, frozen=True):
    """What one node can write of a checkpoint; `key` as in its part."""

    key: tuple[str, str, int, int, int]
    shards: list[RankOffer]


def divided(
    storage: Storage,
    folder: str,
    shards: Sequence[SealedSlot],
    job: WriteJob,
    blank: CheckpointPart,
    context: WriterContext,
) -> Borrowed:
    """What files of other ranks will have of these shards.

    Empty if not all nodes offer in time, or if no two ranks hold equal bytes, on any nodes.
    The digests of a slot that is still being filled are not known, so it is written whole.
    Raises SnapshotCorrupt, SlotOverwritten or CheckpointError.
    """
    if not job.share_wait_s or any(one.header.state is not SlotState.SEALED for one in shards):
        return {}
    offers = {int(shard.shape.rank): _offer_of(shard) for shard in shards}
    blocks = {rank // MOST_RANKS for rank in job.ranks}
    wanted = {rank for rank in range(job.world_size) if rank // MOST_RANKS in blocks}
    storage.put(f"{folder}/{offer_name(job.ranks)}", _packed(blank, list(offers.values())))
    started_s, seen = clock.now_s(), {offer_name(job.ranks)}
    look_s, pause_s = started_s, _NAP_S if storage.is_local else _MOST_NAP_S
    while True:
        if clock.now_s() >= look_s:
            for name in set(offer_names(storage.names(folder))) - seen:
                seen.add(name)
                offers |= {one.rank: one for one in _read(storage, f"{folder}/{name}", blank)}
                started_s = clock.now_s()  # of many nodes, one after the other gets the lock
            look_s, pause_s = clock.now_s() + pause_s, min(2 * pause_s, _MOST_NAP_S)
        if wanted <= offers.keys():
            break
        limit_s = min(job.share_wait_s, HURRIED_S) if job.hurries() else job.share_wait_s
        if job.is_over() or clock.now_s() - started_s > limit_s or _must_hurry(shards):
            return {}
        if context.throttle.stop.wait(_NAP_S):
            raise CheckpointError("the checkpoint is cancelled: the run is being stopped")
    found: Borrowed = {}
    for block in blocks:
        some = [one for rank, one in offers.items() if rank // MOST_RANKS == block]
        if hold_equal(some):
            own = [rank for rank in job.ranks if rank // MOST_RANKS == block]
            found |= borrowed_bytes(some, own)
    return found


def _must_hurry(shards: Sequence[SealedSlot]) -> bool:
    """True if a slot may be overwritten soon and does not fit into memory (rule 2)."""
    for shard in shards:
        if shard.before_read is not None:
            shard.before_read()
    return any(not shard.is_copied and shard.has_later() for shard in shards)


def write_files(
    storage: Storage,
    folder: str,
    shards: Sequence[SealedSlot],
    borrowed: Borrowed,
    pace: Pace,
    *,
    num_writers: int,
) -> list[ShardFile]:
    """Write these shards without what they borrow, and their tables. Raises as `write_shard`.

    `num_writers`: number of files of equal size that are written at once; 0: a file for each rank,
    one after the other.
    """
    if not num_writers:
        return [
            _write_own(storage, folder, shard, borrowed.get(shard.shape.rank, []), pace)
            for shard in shards
        ]
    opened = [_OpenShard(shard) for shard in shards]
    lock = threading.Lock()
    for shard in shards:
        shard.shared_lock = lock
    files = _evenly(opened, borrowed, num_writers)
    with ThreadPoolExecutor(num_writers if storage.is_local else 1) as pool:
        list(pool.map(lambda one: one.write(storage, folder, pace), files))
    return [one.finish(storage, folder, files, borrowed.get(one.rank, [])) for one in opened]


def _write_own(
    storage: Storage, folder: str, shard: SealedSlot, borrowed: list[BorrowedBytes], pace: Pace
) -> ShardFile:
    if not borrowed:
        return write_shard(storage, folder, shard, pace)
    opened = _OpenShard(shard)
    file = _PartsFile(f"rank-{opened.rank:05d}", list(opened.cuts(borrowed)))
    file.write(storage, folder, pace)
    return opened.finish(storage, folder, [file], borrowed)


class _OpenShard:
    """A slot with its layout; several threads may write parts of it."""

    def __init__(self, shard: SealedSlot) -> None:
        shard.begin()
        self.shard = shard
        self.rank = int(shard.shape.rank)
        self._layout, self._start = shard.layout()
        self._header_digest = ""

    def cuts(self, borrowed: Sequence[BorrowedBytes]) -> Iterator["_Cut"]:
        """The header and each piece that is not borrowed."""
        for first, size in own_ranges(self.shard.shape.image_bytes, borrowed):
            if first == 0:
                yield _Cut(self, -1, 0, self._start)
            at, end = max(first, self._start) - self._start, first + size - self._start
            for index in self._layout.pieces_between(at, end) if at < end else ():
                piece = self._layout.pieces[index]
                yield _Cut(self, index, self._start + piece.offset, piece.num_bytes)

    def append(self, file: FileSink, cut: "_Cut") -> None:
        """Write these bytes, and compare their digest with that of the capture."""
        digest = append(file, self.shard, cut.first, cut.num_bytes)
        if cut.index < 0:
            self._header_digest = digest.hexdigest()
        else:
            self.shard.found(cut.index, digest.intdigest())

    def finish(
        self,
        storage: Storage,
        folder: str,
        files: Sequence["_PartsFile"],
        borrowed: list[BorrowedBytes],
    ) -> ShardFile:
        put_table(storage, folder, self.shard)
        extents = [one for file in files for one in file.extents(self)]
        return msgspec.structs.replace(
            shard_file(self.shard, self._header_digest),
            file=extents[0].file,
            extents=extents,
            borrowed=borrowed,
        )


@dataclass(frozen=True, slots=True)
class _Cut:
    """Bytes of an image that are hashed at once; index of the piece, -1: the header."""

    shard: _OpenShard
    index: int
    first: int
    num_bytes: int


class _PartsFile:
    """A file with parts of images, one after the other."""

    def __init__(self, name: str, cuts: Sequence[_Cut]) -> None:
        text = repr([(one.shard.rank, one.first, one.num_bytes) for one in cuts])
        self._cuts = cuts
        self._name = f"{name}.{xxhash.xxh32_hexdigest(text.encode())}.pieces"

    def write(self, storage: Storage, folder: str, pace: Pace) -> None:
        num_bytes = sum(one.num_bytes for one in self._cuts)
        with storage.stream(f"{folder}/{self._name}", num_bytes, pace) as file:
            for cut in self._cuts:
                cut.shard.append(file, cut)

    def extents(self, shard: _OpenShard) -> list[FileExtent]:
        found: list[FileExtent] = []
        at = 0
        for cut in self._cuts:
            if cut.shard is shard:
                last = found[-1] if found else None
                if last is not None and last.first + last.num_bytes == cut.first:
                    size = last.num_bytes + cut.num_bytes
                    found[-1] = msgspec.structs.replace(last, num_bytes=size)
                else:
                    found.append(FileExtent(cut.first, cut.num_bytes, self._name, at))
            at += cut.num_bytes
        return found


def _evenly(shards: Sequence[_OpenShard], borrowed: Borrowed, num_writers: int) -> list[_PartsFile]:
    """Files of about equal size; fewer if there are fewer pieces."""
    cuts = [cut for one in shards for cut in one.cuts(borrowed.get(one.rank, []))]
    total, before = max(1, sum(one.num_bytes for one in cuts)), 0
    found: list[list[_Cut]] = [[] for _ in range(num_writers)]
    for cut in cuts:
        middle = before + cut.num_bytes // 2
        found[min(middle * num_writers // total, num_writers - 1)].append(cut)
        before += cut.num_bytes
    first = shards[0].rank
    return [_PartsFile(f"rank-{first:05d}-w{at}", some) for at, some in enumerate(found) if some]


def _offer_of(shard: SealedSlot) -> RankOffer:
    shard.begin()
    layout, start = shard.layout()
    digest = f"{shard.header.table_digest:016x}"
    return offer_of(int(shard.shape.rank), layout, start, shard.table(), digest)


def _packed(blank: CheckpointPart, shards: list[RankOffer]) -> bytes:
    text = msgspec.msgpack.encode(NodeOffer(blank.key, shards))
    return xxhash.xxh3_64_digest(text) + text


def _read(storage: Storage, name: str, blank: CheckpointPart) -> list[RankOffer]:
    """Nothing if it is damaged, or of another checkpoint."""
    data = storage.read(name) or b""
    text = data[8:]
    if xxhash.xxh3_64_digest(text) != data[:8]:
        return []
    try:
        found = msgspec.msgpack.decode(text, type=NodeOffer)
    except msgspec.MsgspecError:
        return []
    return found.shards if found.key == blank.key else []
