"""Checks that ranks which should hold equal parts of a tensor do so.

Large tensors are compared by digest. Small ones are compared by content if the digests differ,
because a digest covers their neighbours too. Padding is ignored.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, product
from typing import Protocol

from ftrun.sharding.partition import StoredRegion
from ftrun.sharding.world_layout import PlacedEntry, WorldLayout
from ftrun.snapshot.layout import ITEM_BYTES
from ftrun.snapshot.shard_header import ShardHeader


class Shards(Protocol):
    """The shards of a version."""

    @property
    def heads(self) -> Sequence[ShardHeader]:
        """Headers of all ranks, in order of rank."""
        ...

    def read(self, rank: int, name: str, first_byte: int, num_bytes: int) -> memoryview: ...


def differing(shards: Shards, world: WorldLayout) -> list[str]:
    """A line for each tensor of which a rank's part differs from the part that should be equal."""
    found = []
    for name, whole in world.wholes.items():
        alike: dict[int, list[int]] = {}
        for rank, entries in enumerate(world.entries):
            if name in entries:
                alike.setdefault(id(entries[name]), []).append(rank)
        pairs = chain.from_iterable(((first, o) for o in rest) for first, *rest in alike.values())
        other = next((pair for pair in pairs if not _is_same(shards, world, name, *pair)), None)
        if other is not None:
            found.append(
                f"{name} is {whole.dtype}{list(whole.shape)} by {world.sharing[name].rule}, and "
                f"ranks {other[0]} and {other[1]}, which should have the same, do not: say own or "
                "average, or along which axis it is cut"
            )
    return found


def _is_same(shards: Shards, world: WorldLayout, name: str, one: int, other: int) -> bool:
    ranks = (one, other)
    names = {rank: world.own_name(rank, name) for rank in ranks}
    heads = {rank: shards.heads[rank] for rank in ranks}
    entry = heads[one].entries[names[one]]
    prints = [heads[rank].fingerprint(heads[rank].entries[names[rank]]) for rank in ranks]
    if prints[0] == prints[1]:
        return True
    if entry.is_small:
        data = [shards.read(rank, names[rank], 0, entry.num_bytes) for rank in ranks]
        if data[0] == data[1]:
            return True
    placed = world.entries[one][name]
    if sum(patch.box.num_items for patch in placed.patches) == placed.num_items:
        return False
    runs = _runs(placed)
    return all(
        shards.read(one, names[one], *run) == shards.read(other, names[other], *run) for run in runs
    )


def _runs(placed: PlacedEntry) -> Iterator[tuple[int, int]]:
    """First byte and number of bytes of each run of an entry that is not padding."""
    item_bytes = ITEM_BYTES[placed.dtype]
    for patch in placed.patches:
        for first, count in _item_runs(patch):
            yield first * item_bytes, count * item_bytes


def _item_runs(patch: StoredRegion) -> Iterator[tuple[int, int]]:
    """Contiguous runs of items of a region, because the stride of the last dimension is 1."""
    *outer, count = patch.box.shape
    *steps, _ = patch.strides
    for at in product(*map(range, outer)):
        yield patch.first + sum(i * step for i, step in zip(at, steps, strict=True)), count
