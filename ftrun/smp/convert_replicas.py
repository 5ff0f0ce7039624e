"""Whether ranks that should have the same tensor do.

Runs in:  the process that converts checkpoints.
Takes in: the old checkpoint, the world that took it.
Gives:    what differs, in words. Large tensors are compared by digest, small ones by content, as a
          digest covers their neighbours too; what lies in padding does not count.
"""

from itertools import chain

from ftrun.layouts.box_copies import BoxCopy
from ftrun.layouts.world_layout import Placed, WorldLayout
from ftrun.smp.convert_source import SourceCheckpoint
from ftrun.smp.convert_work import filled
from ftrun.snapshot.layout import ITEM_BYTES


def differing(source: SourceCheckpoint, world: WorldLayout) -> list[str]:
    """A line for each tensor that some rank has otherwise than the one it should be like."""
    found = []
    for name, whole in world.wholes.items():
        alike: dict[int, list[int]] = {}
        for rank, entries in enumerate(world.entries):
            if name in entries:
                alike.setdefault(id(entries[name]), []).append(rank)
        pairs = chain.from_iterable(((first, o) for o in rest) for first, *rest in alike.values())
        other = next((pair for pair in pairs if not _is_same(source, world, name, *pair)), None)
        if other is not None:
            found.append(
                f"{name} is {whole.dtype}{list(whole.shape)} by {world.sharing[name].rule}, and "
                f"ranks {other[0]} and {other[1]}, which should have the same, do not: say own or "
                "average, or along which axis it is cut"
            )
    return found


def _is_same(source: SourceCheckpoint, world: WorldLayout, name: str, one: int, other: int) -> bool:
    entries = [source.entry(rank, name) for rank in (one, other)]
    heads = [source.shards[rank].head for rank in (one, other)]
    prints = [head.fingerprint(entry) for head, entry in zip(heads, entries, strict=True)]
    if prints[0] == prints[1]:
        return True
    if entries[0].is_small:
        data = [source.read(rank, name, 0, entries[0].num_bytes) for rank in (one, other)]
        if data[0] == data[1]:
            return True
    placed = world.entries[one][name]
    if sum(patch.box.num_items for patch in placed.patches) == placed.num_items:
        return False
    kept = [_without_padding(source, placed, rank) for rank in (one, other)]
    return kept[0] == kept[1]


def _without_padding(source: SourceCheckpoint, placed: Placed, rank: int) -> bytes:
    """What lies in the patches of an entry, with 0 for all else."""
    copies = [
        BoxCopy(rank, placed.name, p.first, p.strides, p.first, p.strides, p.box.shape)
        for p in placed.patches
    ]
    return filled(source, copies, placed.num_items, ITEM_BYTES[placed.dtype]).tobytes()
