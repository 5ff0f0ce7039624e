"""The mirror: a node's small state and all that is needed to rebuild the rest of its state.

Runs in:  the SMP. The node itself builds it, the m next nodes store it, and the node that replaces
          the lost one reads it.
Takes in: the shards of a version and the plan of its group.
Gives:    the parts of a mirror, to be sent in place; and a `Mirror` parsed from such bytes.

    u32 length | header | for each rank: image header | digest table | mirrored pieces, in order
"""

import struct
from collections.abc import Iterator

import msgspec
import xxhash

from ftrun.errors import LayoutUnknown
from ftrun.ids import Rank, Version, version
from ftrun.smp.memory.sealed_shards import SealedShards
from ftrun.snapshot.layout import Layout, parse_header
from ftrun.snapshot.manifest import NodeManifest
from ftrun.snapshot.redundancy import NodeRedundancy, RankRedundancy, RedundancyPlan
from ftrun.wire.messages.smp import GroupMember
from ftrun.wire.shared_memory.arena import ArenaShape, table_digest
from ftrun.wire.shared_memory.parity_region import ParityRecord

_LENGTH = struct.Struct("<I")
_SLACK_BYTES = 4096
"""Encoded numbers of the header differ by a few bytes from version to version."""


class RankHeader(msgspec.Struct, frozen=True, array_like=True):
    """The facts needed to recreate the slot of one rank."""

    rank: int
    world_size: int
    image_bytes: int
    num_pieces: int
    layout_id: int
    header_bytes: int
    header_digest: int
    table_digest: int

    @property
    def shape(self) -> ArenaShape:
        return ArenaShape(
            self.rank, self.world_size, self.image_bytes, self.num_pieces, self.layout_id
        )


class MirrorHeader(msgspec.Struct, frozen=True, array_like=True):
    """What a mirror contains, and how to rebuild what it does not contain; see `ParityRecord`."""

    generation: int
    step: int
    protected_in: int
    members: list[GroupMember]
    parity: int
    position: int
    block_bytes: int
    coded_bytes: list[int]
    holders: list[list[int]]
    own: NodeRedundancy
    ranks: list[RankHeader]

    @property
    def version(self) -> Version:
        return version(self.generation, self.step)


_HEAD = msgspec.msgpack.Decoder(MirrorHeader)


class Mirror:
    """A received mirror: its header, and the bytes of each rank; raises LayoutUnknown."""

    def __init__(self, raw: memoryview) -> None:
        try:
            (length,) = _LENGTH.unpack_from(raw)
            at = _LENGTH.size + length
            self.head = _HEAD.decode(raw[_LENGTH.size : at])
        except (struct.error, msgspec.MsgspecError) as error:
            raise LayoutUnknown(
                f"a mirror of {len(raw)} bytes has no valid header: {error}"
            ) from error
        self.headers: dict[int, memoryview] = {}
        self.tables: dict[int, memoryview] = {}
        self.layouts: dict[int, Layout] = {}
        self._mirrored: dict[int, memoryview] = {}
        self._plans = {plan.rank: plan for plan in self.head.own.ranks}
        for rank in self.head.ranks:
            at = self._take(rank, raw, at)
        if at != len(raw):
            raise LayoutUnknown(f"a mirror of {len(raw)} bytes has {at} bytes of content")

    def plan_of(self, rank: int) -> RankRedundancy:
        return self._plans[rank]

    def mirrored(self, rank: int) -> Iterator[tuple[int, memoryview]]:
        left = self._mirrored[rank]
        for index in pieces_of(self._plans[rank]):
            size = self.layouts[rank].pieces[index].num_bytes
            yield index, left[:size]
            left = left[size:]

    def _take(self, rank: RankHeader, raw: memoryview, at: int) -> int:
        header = raw[at : at + rank.header_bytes]
        at += rank.header_bytes
        table = raw[at : at + 8 * rank.num_pieces]
        at += 8 * rank.num_pieces
        if len(table) != 8 * rank.num_pieces or rank.rank not in self._plans:
            raise LayoutUnknown(f"a mirror is truncated at rank {rank.rank}")
        if (
            xxhash.xxh3_64_intdigest(header) != rank.header_digest
            or table_digest(table) != rank.table_digest
        ):
            raise LayoutUnknown(f"the mirror of rank {rank.rank} does not match its digests")
        layout, _ = parse_header(header, image_bytes=rank.image_bytes)
        if len(layout.pieces) != rank.num_pieces:
            raise LayoutUnknown(f"the mirror of rank {rank.rank} has another layout")
        size = sum(layout.pieces[index].num_bytes for index in pieces_of(self._plans[rank.rank]))
        self.headers[rank.rank], self.tables[rank.rank] = header, table.cast("Q")
        self.layouts[rank.rank] = layout
        self._mirrored[rank.rank] = raw[at : at + size]
        return at + size


def mirror_parts(shards: SealedShards, record: ParityRecord) -> list[bytes | memoryview]:
    """Return the mirror of this node in parts, after checking its pieces; raises as `manifest`."""
    own = record.own
    manifest = shards.manifest([Rank(one.rank) for one in own.ranks])
    names = (name for name in MirrorHeader.__struct_fields__ if name != "ranks")
    shared = {name: getattr(record, name) for name in names}
    ranks = [
        RankHeader(**{name: getattr(rank, name) for name in RankHeader.__struct_fields__})
        for rank in manifest.ranks
    ]
    head = MirrorHeader(ranks=ranks, **shared)
    raw = msgspec.msgpack.encode(head)
    parts: list[bytes | memoryview] = [_LENGTH.pack(len(raw)) + raw]
    for rank_plan in own.ranks:
        shard = shards.shard(rank_plan.rank)
        parts += [shard.image[: shard.start], shard.table.cast("B")]
        parts += [shard.run(run) for run in rank_plan.mirrored]
    return parts


def mirror_space(
    plan: RedundancyPlan, position: int, manifest: NodeManifest, num_members: int
) -> int:
    """Return the bytes to reserve for a node's mirror, for this and later versions."""
    fixed = sum(rank.header_bytes + 8 * rank.num_pieces for rank in manifest.ranks)
    plans = len(msgspec.msgpack.encode((plan.nodes[position], plan.holders)))
    return fixed + plan.nodes[position].mirrored_bytes + plans + _SLACK_BYTES * (2 + num_members)


def pieces_of(plan: RankRedundancy) -> Iterator[int]:
    for run in plan.mirrored:
        yield from range(run.first, run.first + run.count)
