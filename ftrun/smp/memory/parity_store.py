"""Stores the parity regions of this node: two, and temporarily a third region.

Runs in:  the SMP: the server's thread, and a job that allocates memory.
Takes in: mirrors and parity of the group, and the protection that must not be overwritten.
Gives:    regions to fill and to serve from; their contents, for the inventory.
Survives: the SMP's death if the agent holds duplicates of the descriptors.

Rule 1: one region retains the protection from which the run would be restored. Only other regions
        are filled. At the commit, the filled region becomes the retained region.
Rule 2: if the retained protection is not committed, the newest committed one is retained too.
        Unreachable nodes hold their parts of the committed version, but may have no part of the
        newer version. In this case a third region is filled. One region is freed at the commit.
"""

import os
from collections.abc import Iterator

from ftrun.errors import LayoutUnknown, MemoryTooSmall
from ftrun.ids import Version
from ftrun.linux import available_memory
from ftrun.wire.messages.smp import ProtectionPart
from ftrun.wire.shared_memory.parity_region import (
    ParityRecord,
    ParityRegion,
    ParityRegionState,
    create_parity_region,
    parity_region_bytes,
)

NUM_PARITY_REGIONS = 2
_MAX_PARITY_REGIONS = 3
_WHOLE = (ParityRegionState.COMPLETE, ParityRegionState.COMMITTED)


class ParityStore:
    """The parity regions of this node, by slot."""

    def __init__(self) -> None:
        self._slots: list[ParityRegion | None] = [None] * _MAX_PARITY_REGIONS
        self._kept: int | None = None
        self._committed: int | None = None
        """Slot of the newest committed protection, if the one in `_kept` is not committed."""

    @property
    def slots(self) -> list[int]:
        """Slots that hold a region, in the order of `fds`."""
        return [at for at, region in enumerate(self._slots) if region is not None]

    @property
    def fds(self) -> list[int]:
        return [region.fd for region in self._slots if region is not None]

    @property
    def allocated_bytes(self) -> int:
        return sum(region.size for region in self._slots if region is not None)

    @property
    def kept(self) -> ParityRegion | None:
        return self._slots[self._kept] if self._kept is not None else None

    def adopt(self, fd: int, slot: int) -> None:
        """Own a region of an earlier SMP; after LayoutUnknown the caller owns the descriptor.

        The region keeps its slot, because the agent names its duplicates by slots.
        """
        if any(region and os.path.sameopenfile(fd, region.fd) for region in self._slots):
            os.close(fd)
            return
        if slot not in range(_MAX_PARITY_REGIONS) or self._slots[slot] is not None:
            raise LayoutUnknown(f"slot {slot} is not free for a parity region")
        self._slots[slot] = ParityRegion(fd)

    def keep(
        self, version: Version | None, protected_in: int, committed: Version | None = None
    ) -> None:
        """Select the protection that must not be overwritten.

        Args:
            version: the version from which the run would be restored.
            protected_in: the generation of its protection; -1: of its newest committed protection,
                or of the newest complete protection if none is committed.
            committed: newest version that the run has committed. The part on this node may lack
                the mark for that, because the agent may end between the commits of two nodes.
        """
        found: list[tuple[bool, bool, int, int]] = []
        for at, region, record in self._with_records():
            if record.version == version and region.state in _WHOLE:
                is_named = record.protected_in == protected_in
                is_committed = region.state is ParityRegionState.COMMITTED
                found.append((is_named, is_committed, record.protected_in, at))
        self._kept = max(found)[3] if found else None
        self._committed = None if found and max(found)[1] else self._newest_committed(committed)

    def _newest_committed(self, committed: Version | None) -> int | None:
        found: list[tuple[Version, bool, int, int]] = []
        for at, region, record in self._with_records():
            is_marked = region.state is ParityRegionState.COMMITTED
            is_whole = region.state is ParityRegionState.COMPLETE and record.version == committed
            if is_marked or is_whole:
                found.append((record.version, is_marked, record.protected_in, at))
        return max(found)[3] if found else None

    def find(self, version: Version, protected_in: int) -> ParityRegion | None:
        for _, region, record in self._with_records():
            is_it = (record.version, record.protected_in) == (version, protected_in)
            if is_it and region.state in _WHOLE:
                return region
        return None

    def _with_records(self) -> Iterator[tuple[int, ParityRegion, ParityRecord]]:
        for at, region in enumerate(self._slots):
            record = region.record if region is not None else None
            if region is not None and record is not None:
                yield at, region, record

    def free_slot(self) -> int:
        kept = {self._kept, self._committed}
        free = [at for at in range(_MAX_PARITY_REGIONS) if at not in kept]
        # Prefer a slot that has a region, because the node may lack memory for a third region.
        return min(free, key=lambda at: (self._slots[at] is None, at))

    def give_up_committed(self) -> bool:
        """Stop retaining the older committed protection; return whether there was one."""
        had, self._committed = self._committed is not None, None
        return had

    def take(self, slot: int, record: ParityRecord) -> ParityRegion | None:
        """Return the region of a slot; if it is too small for the record, free it, return None."""
        region = self._slots[slot]
        if region is not None and parity_region_bytes(record) <= region.size:
            return region
        self._free(slot)
        return None

    def put(self, slot: int, region: ParityRegion) -> None:
        """Store a new region in a slot, and free the previous one, even if that is new too."""
        self._free(slot)
        self._slots[slot] = region

    def commit(self, version: Version, protected_in: int) -> list[int]:
        """Mark a protection as committed and retain it; return the slots that were freed."""
        before = {at for at, one in enumerate(self._slots) if one is not None}
        region = self.find(version, protected_in)
        if region is not None:
            region.mark(ParityRegionState.COMMITTED)
        self.keep(version, protected_in)
        if region is None:
            # This node has no part of this protection. Its other regions hold superseded versions.
            for slot, _, record in self._with_records():
                if record.version < version:
                    self._free(slot)
        elif len(before) > NUM_PARITY_REGIONS:
            self._free(next(at for at in sorted(before) if at != self._kept))
        return sorted(at for at in before if self._slots[at] is None)

    def _free(self, slot: int) -> None:
        region, self._slots[slot] = self._slots[slot], None
        if region is not None:
            region.close()

    def void_after(self, newest: Version) -> int:
        count = 0
        for _, region, record in self._with_records():
            if record.version > newest:
                region.mark(ParityRegionState.VOID)
                count += 1
        return count

    def drop_damaged_mirror(self, version: Version, protected_in: int, position: int) -> None:
        """Drop a damaged mirror, so that no restore repeats it; the parity of the region stays."""
        region = self.find(version, protected_in)
        if (
            region is None
            or position not in region.mirrored_positions()
            or region.mirror(position) is not None
        ):
            return
        region.store_mirror(position, 0, 0)

    def note_damage(self, version: Version, protected_in: int) -> None:
        """Report this node's part of a protection as incomplete; intact blocks are still served."""
        region = self.find(version, protected_in)
        if region is not None:
            region.is_damaged = True

    def parts(self) -> list[ProtectionPart]:
        return [
            _part(region, record)
            for _, region, record in self._with_records()
            if region.state not in (ParityRegionState.EMPTY, ParityRegionState.VOID)
        ]

    def free(self) -> None:
        for slot in range(_MAX_PARITY_REGIONS):
            self._free(slot)
        self._kept = self._committed = None


def allocate_parity_region(record: ParityRecord) -> ParityRegion:
    """Allocate a region for this record and touch its pages; raises MemoryTooSmall."""
    needed = parity_region_bytes(record)
    available = available_memory()
    available.check(needed)
    try:
        return ParityRegion(create_parity_region(needed))
    except (OSError, OverflowError) as error:
        raise MemoryTooSmall(
            needed_bytes=needed,
            available_bytes=available.num_bytes,
            limit=f"the kernel refused it: {error}",
        ) from error


def _part(region: ParityRegion, record: ParityRecord) -> ProtectionPart:
    return ProtectionPart(
        generation=record.generation,
        step=record.step,
        world_size=record.world_size,
        protected_in=record.protected_in,
        members=record.members,
        parity=record.parity,
        node_id=record.members[record.position].node_id,
        mirrors=[record.members[position].node_id for position in region.mirrored_positions()],
        is_complete=region.state in _WHOLE and not region.is_damaged,
        is_committed=region.state is ParityRegionState.COMMITTED,
        is_ring=record.is_ring,
    )
