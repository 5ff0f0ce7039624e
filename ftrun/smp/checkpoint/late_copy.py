"""Slots that are being written, copied when they are about to be overwritten.

Runs in:  the SMP, in its disk lane's thread.
Takes in: the slots of all ranks that are being written, memory for copies.
Gives:    copies of what is not written yet, as late as is safe; `SlotOverwritten` where that was
          late.

A slot is overwritten by the second capture after its own, and the first has to be committed
before. So nothing is copied until a later version is sealed, and of a checkpoint that is written
in less time than lies between two snapshots, nothing ever is: the copy was most of what a
checkpoint cost the training (scripts/bench_persist.py).
"""

from collections.abc import Sequence

from ftrun import clock
from ftrun.ids import Version
from ftrun.smp.checkpoint.slot_reader import SealedSlot, SlotOverwritten, copy_where_it_fits
from ftrun.smp.checkpoint.storage.copy_room import CopyBuffers

OFTEN_S = 1.0
"""Where snapshots come more often than this, there is no time to see the next one coming."""
_GAPS = 4
_LOOK_S = 0.01


class CopyBeforeOverwrite:
    """Watches the slots of one version while they are written.

    Args:
        version: theirs.
        shards: of all ranks that are written here.
        room: memory for copies.
        gap_s: so long nothing is read at times, because what was read is still being written.
    """

    def __init__(
        self,
        version: Version,
        shards: Sequence[SealedSlot],
        room: CopyBuffers,
        *,
        gap_s: float,
    ) -> None:
        self._version = version
        self._shards = shards
        self._room = room
        self._gap_s = gap_s
        self._look_s = 0.0
        for shard in shards:
            shard.before_read = self.look

    @property
    def is_tight(self) -> bool:
        """The slots may be overwritten before anybody looks."""
        least_s = max(OFTEN_S, _GAPS * self._gap_s)
        return any(shard.since_last_s < least_s for shard in self._shards)

    def look(self) -> None:
        """Copy what is left, if a later version is sealed; called before each read.

        Raises:
            Overwritten: a slot was already.
        """
        now_s = clock.now_s()
        if now_s >= self._look_s:
            self._look_s = now_s + _LOOK_S
            if any(shard.has_later() for shard in self._shards):
                self.copy()

    def copy(self) -> None:
        """Copy what is left now.

        Raises:
            Overwritten: a slot was already.
        """
        for shard in self._shards:
            shard.before_read = None
        if not copy_where_it_fits(self._shards, self._room):
            raise SlotOverwritten(self._version)
