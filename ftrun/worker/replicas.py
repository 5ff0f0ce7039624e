"""Whether old ranks that should hold the same do so.

Runs in:  worker, training thread, inside `attach`.
Takes in: tensors of the old world with the holders of each chunk, digests, shards.
Gives:    nothing, or an error that names the tensor and two ranks.

Digests in the tables cost nothing and tell of equal entries at equal places. A small entry is
hashed with its neighbours, and where those are parts of sharded tensors the digest differs from
rank to rank. Then its bytes are compared with those of one other holder: what is each rank's own
by mistake (a tensor sharded by hand, a rank that trained for itself) differs on all of them.
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
    """Two holders of one chunk whose bytes must be compared."""

    name: str
    one: Holder
    other: Holder


def check_replicas(
    saved: Mapping[str, WholeTensor], wanted: Mapping[str, torch.Tensor], images: CheckedShards
) -> None:
    """Compare the holders of all chunks that are about to be read.

    Args:
        saved: by name.
        wanted: the tensors to fill; chunks beside what this rank holds of them are not looked at.
        images: the shards.

    Raises:
        RanksDiffer: two ranks hold different things.
        SnapshotCorrupt: a piece is not what was captured.
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
    """The pair of holders to compare; none where the digests tell that all are equal.

    Raises:
        RanksDiffer: the digests tell that two are not.
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
