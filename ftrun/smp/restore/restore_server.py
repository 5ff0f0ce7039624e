"""Serves the restored version of this node to other nodes.

Runs in:  the SMP. The server thread creates it when a generation begins; the threads of links call
          it.
Takes in: this node's slots and parity regions.
Gives:    mirrors, pieces and blocks, each compared with its digest before it is sent; or an error.

Nothing is read before the first request, because in most generations no node has to fetch.
"""

import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

import xxhash

from ftrun.erasure.fragments import BlockDigest, FragmentHeader, StripeId, pack
from ftrun.errors import LayoutUnknown, SnapshotCorrupt
from ftrun.ids import Generation, Rank, Version, version
from ftrun.smp.checkpoint.shared_load import SharedLoad
from ftrun.smp.memory.parity_store import ParityStore
from ftrun.smp.memory.sealed_shards import ArenaMappings, SealedShards
from ftrun.smp.redundancy.block_sender import LocalBlocks
from ftrun.smp.redundancy.group import group_of, stripes_of
from ftrun.smp.redundancy.mirror import mirror_parts
from ftrun.snapshot.shard_header import PackedShardHeader, pack_header
from ftrun.wire.cluster import transfer as t
from ftrun.wire.shared_memory.parity_region import ParityRecord, ParityRegion
from ftrun.wire.transport.bulk_socket import Bytes


class RestoreServer:
    """Serves one version. Duplicates of `fds` stay open until `close`; `load` may be partial."""

    def __init__(
        self,
        run: int,
        wanted: Version,
        *,
        maps: ArenaMappings,
        fds: Mapping[Rank, Sequence[int]],
        parity_store: ParityStore,
        load: SharedLoad | None = None,
    ) -> None:
        self.version = wanted
        self._load = load
        self._run = run
        self._maps = maps
        self._fds: dict[Rank, list[int]] = {}
        self._replace(fds)
        self._parity_store = parity_store
        self._lock = threading.Lock()
        self._held: SealedShards | None = None
        self._blocks: dict[int, LocalBlocks] = {}

    def close(self) -> None:
        with self._lock:
            self._replace({})

    def take_in(self, fds: Mapping[Rank, Sequence[int]]) -> None:
        """Replace the arenas when pending arenas have arrived; duplicates of `fds` stay open."""
        with self._lock:
            self._replace(fds)
            self._held = None

    def _replace(self, fds: Mapping[Rank, Sequence[int]]) -> None:
        for some in self._fds.values():
            for fd in some:
                os.close(fd)
        self._fds = {rank: [os.dup(fd) for fd in some] for rank, some in fds.items()}

    @property
    def shards(self) -> SealedShards:
        with self._lock:
            if self._held is None:
                self._held = self._maps.hold(self._fds, self.version)
            return self._held

    def piece(self, digest: int) -> memoryview:
        """Raises LayoutUnknown if this node has no such piece, SnapshotCorrupt if it changed."""
        if self._load is not None:
            with suppress(LayoutUnknown):
                return self._load.find(digest)
        return self.shards.find(digest)

    def region(self, ask: t.FetchRequest) -> tuple[ParityRegion, ParityRecord]:
        """Return the complete parity region of a version; raises LayoutUnknown if there is none."""
        found = self._parity_store.find(version(ask.generation, ask.step), ask.protected_in)
        record = found.record if found is not None else None
        if found is None or record is None or group_of(record).id != ask.group:
            raise LayoutUnknown(
                f"this node has no complete parity region of {version(ask.generation, ask.step)} "
                f"from generation {ask.protected_in}"
            )
        return found, record

    def mirror(self, ask: t.GetMirror) -> Sequence[Bytes]:
        """Small state of a node, or of this one; raises LayoutUnknown or SnapshotCorrupt."""
        region, record = self.region(ask)
        if ask.position == record.position:
            return mirror_parts(self.shards, record)
        if ask.position not in region.mirrored_positions():
            raise LayoutUnknown(f"this node has no mirror of place {ask.position}")
        found = region.mirror(ask.position)
        if found is None:
            what = f"mirror of place {ask.position}, {record.version}"
            raise SnapshotCorrupt(what=what, piece=0, pieces=1)
        return [found]

    def head(self, ask: t.GetShardHeader) -> Sequence[Bytes]:
        """Return header and digest table of a slot (snapshot/shard_header.py)."""
        shard = self.shards.shard(ask.rank)
        about = shard.manifest()
        header = shard.image[: shard.start]
        return pack_header(
            PackedShardHeader(
                header, shard.table, about.image_bytes, about.layout_id, about.table_digest
            )
        )

    def unit(self, ask: t.GetBlock) -> tuple[bytes, list[memoryview]]:
        """Return this node's block, with its header; raises LayoutUnknown, SnapshotCorrupt."""
        region, record = self.region(ask)
        stripes = stripes_of(record)
        block = stripes.block_of(record.position, ask.stripe)
        if block is None:
            return self.row(region, record, ask.stripe)
        blocks = self._own_blocks(record)
        if block >= blocks.space.num_blocks:
            raise LayoutUnknown(f"this node has no block in stripe {ask.stripe}")
        return blocks.read(block)

    def row(
        self, region: ParityRegion, record: ParityRecord, stripe: int
    ) -> tuple[bytes, list[memoryview]]:
        """Return this node's parity block of a stripe; raises as `unit`."""
        stripes = stripes_of(record)
        at = stripes.parity_block(record.position, stripe)
        if at is None or not 0 <= at < record.num_rows:
            raise LayoutUnknown(f"no parity of stripe {stripe} belongs here")
        row = region.row(at)
        digest = xxhash.xxh3_64_intdigest(row)
        if digest != region.row_digest(at):
            what = f"parity of stripe {stripe}, {record.version}"
            raise SnapshotCorrupt(what=what, piece=at, pieces=record.num_rows)
        header = FragmentHeader(
            StripeId(self._run, record.version, group_of(record).id, stripe),
            Generation(record.protected_in),
            stripes.index(stripe, record.position),
            BlockDigest(len(row), digest),
        )
        return pack(header), [row]

    def _own_blocks(self, record: ParityRecord) -> LocalBlocks:
        shards = self.shards
        with self._lock:
            if record.protected_in not in self._blocks:
                self._blocks[record.protected_in] = LocalBlocks(shards, record, self._run)
            return self._blocks[record.protected_in]
