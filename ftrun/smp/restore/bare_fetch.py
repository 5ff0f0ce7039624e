"""Fetches whole slots of a version from the nodes that hold them, without using parity.

Runs in:  the SMP, in the thread that fetches.
Takes in: the nodes, and the ranks whose slots are requested.
Gives:    a sealed arena for each rank. Every piece is compared with the slot's digest table.
"""

import os
from collections.abc import Sequence

import xxhash

from ftrun import clock
from ftrun.errors import FetchFailed
from ftrun.ids import Rank, Version
from ftrun.smp.memory.arenas import create
from ftrun.smp.restore.previous_world import PreviousWorldShards
from ftrun.snapshot.layout import Piece
from ftrun.wire.shared_memory.arena import Arena, ArenaShape, SlotHeader, SlotState

_SLOT = 0
_BATCH = 64


def shape_of(shards: PreviousWorldShards, rank: Rank, world_size: int) -> ArenaShape:
    head = shards.head(rank)
    return ArenaShape(rank, world_size, head.image_bytes, len(head.table), head.layout_id)


def fetch_slot(shards: PreviousWorldShards, rank: Rank, wanted: Version, shape: ArenaShape) -> int:
    """Return the descriptor of an arena whose slot holds the version; the caller closes it.

    Raises:
        LayoutUnknown: no node has a piece.
        FetchFailed: a piece differs from what was captured.
    """
    fd = create(shape)
    arena = Arena(fd, writable=True)
    try:
        _fill(shards, rank, wanted, arena)
    except BaseException:
        os.close(fd)
        raise
    finally:
        arena.close()
    return fd


def _fill(shards: PreviousWorldShards, rank: Rank, wanted: Version, arena: Arena) -> None:
    head, pieces = shards.head(rank), shards.layout(rank).pieces
    at = (wanted.generation, wanted.step, head.image_bytes, head.table_digest)
    arena.write_header(_SLOT, SlotHeader(SlotState.COPYING, *at, 0))
    start = len(head.header)
    image, table = arena.image(_SLOT), arena.table(_SLOT)
    image[:start] = head.header
    table[:] = head.table
    data = image[start:]
    for batch in _batches(pieces):
        end = pieces[batch[-1]].offset + pieces[batch[-1]].num_bytes
        shards.read([(rank, index) for index in batch], data[pieces[batch[0]].offset : end])
    for index, piece in enumerate(pieces):
        found = xxhash.xxh3_64_intdigest(data[piece.offset : piece.offset + piece.num_bytes])
        if found != head.table[index]:
            raise FetchFailed(f"piece {index} of rank {rank}, {wanted}: not what was captured")
    arena.write_header(_SLOT, SlotHeader(SlotState.SEALED, *at, clock.now_ns()))


def _batches(pieces: Sequence[Piece]) -> list[list[int]]:
    found: list[list[int]] = []
    for index, piece in enumerate(pieces):
        before = pieces[index - 1]
        follows = index > 0 and before.offset + before.num_bytes == piece.offset
        if follows and len(found[-1]) < _BATCH:
            found[-1].append(index)
        else:
            found.append([index])
    return found
