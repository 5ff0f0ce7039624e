"""Copies slots that are being written, just before they are overwritten.

Runs in:  the SMP, in its disk lane's thread.
Takes in: the slots of all ranks that are being written, memory for copies.
Gives:    copies of the bytes not yet written, as late as is safe; `SlotOverwritten` if a copy came
          too late.

A slot is overwritten by the second capture after its own, which starts only after the first one is
committed. Nothing is therefore copied until a later version is sealed. If a checkpoint is written
in less time than the snapshot interval, nothing is copied at all. The copy was most of a
checkpoint's cost to the training (scripts/bench_persist.py).
"""

from collections.abc import Sequence

from ftrun import clock
from ftrun.ids import Version
from ftrun.smp.checkpoint.slot_reader import SealedSlot, SlotOverwritten, copy_where_it_fits
from ftrun.smp.checkpoint.storage.copy_room import CopyBuffers

OFTEN_S = 1.0
"""If snapshots are more frequent than this, the next one cannot be detected in time."""
_GAPS = 4
_LOOK_S = 0.01


class CopyBeforeOverwrite:
    """Monitors the slots of one version while they are written.

    Args:
        version: the version in the slots.
        shards: the slots of all ranks that this node writes.
        room: memory for copies.
        gap_s: seconds that may pass without a read, while the bytes read before are being written.
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
        """True if the slots may be overwritten between two polls."""
        least_s = max(OFTEN_S, _GAPS * self._gap_s)
        return any(shard.since_last_s < least_s for shard in self._shards)

    def look(self) -> None:
        """Copy the rest if a later version is sealed; called before each read.

        Raises:
            SlotOverwritten: a slot was overwritten already.
        """
        now_s = clock.now_s()
        if now_s >= self._look_s:
            self._look_s = now_s + _LOOK_S
            if any(shard.has_later() for shard in self._shards):
                self.copy()

    def copy(self) -> None:
        """Copy the rest now.

        Raises:
            SlotOverwritten: a slot was overwritten already.
        """
        for shard in self._shards:
            shard.before_read = None
        if not copy_where_it_fits(self._shards, self._room):
            raise SlotOverwritten(self._version)
