"""Checks that replicas of a tensor are equal on all ranks of the previous world.

Runs in:  worker, training thread, inside `attach`.
Takes in: tensors of the previous world with the holders of each chunk, digests, shards.
Gives:    nothing, or an error that names the tensor and two ranks.

Comparing the digest tables reads no data and proves that equal entries at equal positions match. A
small entry is hashed together with its neighbours. If a neighbour is part of a sharded tensor, the
digest differs from rank to rank. The bytes of the small entry are then compared with those of one
other holder. One comparison is enough, because a tensor that differs by mistake (sharded by hand,
or on a rank that trained separately) differs on all holders.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import xxhash

from ftrun.errors import RanksDiffer
from ftrun.sharding.source_index import Chunk, Holder, WholeTensor
from ftrun.snapshot.boxes import Box, overlap
from ftrun.snapshot.shard_header import Fingerprint
from ftrun.worker.reshard.source import ByteRange, CheckedShards
from ftrun.worker.state.parts import box_of


@dataclass(frozen=True, slots=True)
class _Pair:
    name: str
    one: Holder
    other: Holder


def check_replicas(
    saved: Mapping[str, WholeTensor], wanted: Mapping[str, torch.Tensor], images: CheckedShards
) -> None:
    """Compare the holders of all chunks that this rank is about to read.

    Args:
        saved: tensors of the previous world, by name.
        wanted: the tensors to fill, by name; only chunks that overlap this rank's box are compared.
        images: the shards to read from.

    Raises:
        RanksDiffer: two ranks hold different content.
        SnapshotCorrupt: a piece does not match its digest.
    """
    pairs: list[_Pair] = []
    for name, tensor in saved.items():
        box = box_of(wanted[name])
        for chunk in tensor.chunks if tensor.is_shared and box is not None else ():
            if len(chunk.holders) > 1 and _touch(chunk.box, box):
                pairs += _doubtful(name, chunk, images)
    _compare(pairs, images)


def _touch(one: Box, other: Box | None) -> bool:
    return other is not None and overlap(one, other) is not None


def _doubtful(name: str, chunk: Chunk, images: CheckedShards) -> list[_Pair]:
    """Return the pair of holders to compare; none if the digests prove that all are equal.

    Raises:
        RanksDiffer: the digests prove that two holders differ.
    """
    first, *others = chunk.holders
    known = _fingerprint(first, images)
    differing = [holder for holder in others if _fingerprint(holder, images) != known]
    if not differing:
        return []
    pair = _Pair(name, first, differing[0])
    if not first.entry.is_small:
        raise _difference(pair)
    return [pair]


def _fingerprint(holder: Holder, images: CheckedShards) -> Fingerprint:
    return images.heads[holder.rank].fingerprint(holder.entry)


def _compare(pairs: list[_Pair], images: CheckedShards) -> None:
    ranges = {_range(holder) for pair in pairs for holder in (pair.one, pair.other)}
    in_order = sorted(ranges, key=lambda one: (one.rank, one.offset))
    images.expect(in_order)
    digests = {
        one: xxhash.xxh3_64_intdigest(images.read(one.rank, one.offset, one.num_bytes))
        for one in in_order
    }
    for pair in pairs:
        if digests[_range(pair.one)] != digests[_range(pair.other)]:
            raise _difference(pair)


def _range(holder: Holder) -> ByteRange:
    return ByteRange(holder.rank, holder.entry.offset, holder.entry.num_bytes)


def _difference(pair: _Pair) -> RanksDiffer:
    return RanksDiffer(
        key=pair.name,
        ranks=(pair.one.rank, pair.other.rank),
        values=(str(pair.one.entry), "of other content"),
    )
