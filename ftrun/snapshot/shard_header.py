"""What must be known of a shard before its bytes are read: layout and digests.

Runs in:  worker, and whoever else reads shards of other ranks. Pure.
Takes in: a layout, where its data start in the image, the digest table.
Gives:    which pieces lie under a run of bytes, and what can be said of an entry's content
          without reading it.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

from ftrun.snapshot.layout import Layout, LayoutEntry

Fingerprint = tuple[int, int, tuple[int, ...]]


@dataclass(frozen=True)
class ShardHeader:
    """One shard without its data.

    Args:
        layout: of the shard.
        start: length of the header; data offsets count from there.
        digests: u64 for each piece of the layout.
    """

    layout: Layout
    start: int
    digests: memoryview

    @cached_property
    def entries(self) -> dict[str, LayoutEntry]:
        return {entry.name: entry for entry in self.layout.entries}

    def pieces_under(self, offset: int, num_bytes: int) -> range:
        """Indices of the pieces that hold any of these bytes."""
        if num_bytes <= 0:
            return range(0)
        return range(self._piece_at(offset), self._piece_at(offset + num_bytes - 1) + 1)

    def bytes_of(self, pieces: range) -> tuple[int, int]:
        """Offset and length of a run of pieces."""
        found = self.layout.pieces
        offset = found[pieces[0]].offset
        last = found[pieces[-1]]
        return offset, last.offset + last.num_bytes - offset

    def fingerprint(self, entry: LayoutEntry) -> Fingerprint:
        """Equal for two entries of equal shape: so are their bytes.

        Where they differ, a small entry's bytes may be equal all the same: its neighbours, which
        are hashed with it, may be the ones that differ.
        """
        pieces = self.pieces_under(entry.offset, entry.num_bytes)
        if not pieces:
            return (0, 0, ())
        offset, num_bytes = self.bytes_of(pieces)
        return (entry.offset - offset, num_bytes, tuple(self.digests[index] for index in pieces))

    @cached_property
    def _offsets(self) -> list[int]:
        # An empty piece shares its offset with the next one, which is the one that is found.
        return [piece.offset for piece in self.layout.pieces]

    def _piece_at(self, offset: int) -> int:
        return bisect_right(self._offsets, offset) - 1
