"""Reads shards that are not on this node through the SMP, in windows of bounded size.

Runs in:  worker, inside `attach`, when a version is restored into another number of ranks.
Takes in: the connection to the SMP, the ranks whose shards are on other nodes; announced reads.
Gives:    a `ShardSource` of them; and one that joins local and remote shards.

Pieces are fetched in the announced order. One fetch gets as many as fit `WINDOW_BYTES`, and the
next fetch replaces them. At most one window is therefore in memory.
"""

import mmap
import os
from collections import deque
from collections.abc import Mapping, Sequence

from ftrun.ids import Rank, Version
from ftrun.sharding.source_index import ByteRange, ShardSource
from ftrun.snapshot.shard_header import ShardHeader
from ftrun.wire.shard_heads import unpack_head
from ftrun.wire.shared_memory.arena import SlotHeader, SlotState
from ftrun.worker.reshard.source import make_head
from ftrun.worker.smp_client import WorkerSmpClient

WINDOW_BYTES = 32 << 20
_HEADS_AT_ONCE = 100
_MOST_RANGES = 4096  # a message has at most 1 MiB


class RemoteShards:
    """Shards on other nodes, or of lost ones.

    Args:
        link: to the SMP, which requests them from the other SMPs.
        wanted: the version.
        ranks: of the previous world.
    """

    def __init__(self, link: WorkerSmpClient, wanted: Version, ranks: Sequence[Rank]) -> None:
        self._link = link
        self._wanted = wanted
        self._ranks = list(ranks)
        self._heads: dict[Rank, ShardHeader] = {}
        self._expected: deque[ByteRange] = deque()
        self._window: dict[ByteRange, memoryview] = {}

    def headers(self) -> Mapping[Rank, ShardHeader]:
        for at in range(len(self._heads), len(self._ranks), _HEADS_AT_ONCE):
            ranks = self._ranks[at : at + _HEADS_AT_ONCE]
            fds = self._link.fetch_heads(self._wanted, ranks)
            for rank, fd in zip(ranks, fds, strict=True):
                self._heads[rank] = self._head(rank, _mapped(fd))
        return self._heads

    def expect(self, ranges: Sequence[ByteRange]) -> None:
        self._expected = deque(ranges)

    def read(self, rank: Rank, offset: int, num_bytes: int) -> memoryview:
        wanted = ByteRange(rank, offset, num_bytes)
        if wanted not in self._window:
            self._fetch(wanted)
        return self._window[wanted]

    def close(self) -> None:
        self._heads.clear()
        self._window.clear()
        self._expected.clear()

    def _head(self, rank: Rank, raw: memoryview) -> ShardHeader:
        packed = unpack_head(raw)
        generation, step = self._wanted.generation, self._wanted.step
        sealed = SlotHeader(
            SlotState.SEALED, generation, step, packed.image_bytes, packed.table_digest, 0
        )
        return make_head(
            packed.header,
            packed.table,
            layout_id=packed.layout_id,
            sealed=sealed,
            what=f"{self._wanted} of rank {rank}",
            rank=rank,
        )

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
        pieces = self._heads[one.rank].pieces_under(one.offset, one.num_bytes)
        return (one.rank, pieces[0], len(pieces))


class JoinedShards:
    """Shards of two sources, as one.

    Args:
        here: preferred for ranks that both have.
        elsewhere: has the other ranks.
    """

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


def _mapped(fd: int) -> memoryview:
    """Map the bytes behind a descriptor and close it; the mapping lives as long as its views."""
    try:
        mapping = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
    finally:
        os.close(fd)
    return memoryview(mapping)
