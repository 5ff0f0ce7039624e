"""The vaults of this node: two, and for a while a third one.

Runs in:  the SMP: the server's thread, and a job where memory is made.
Takes in: what is to be kept for the group, and what must not be lost meanwhile.
Gives:    vaults to fill and to serve from; what they hold, for the inventory.
Survives: the SMP's death where the agent keeps duplicates.

Rule 1: one vault always keeps the protection that the run would be restored from; only another
        one is filled. They change places at the commit.
Rule 2: if that protection is not committed, the newest committed one is kept as well: nodes that
        are away hold their parts of the committed version, and may hold none of the newer one. A
        third vault is filled then. It is freed at the commit.
"""

import logging
import os

from ftrun.errors import LayoutUnknown, MemoryTooSmall
from ftrun.free_memory import available_memory
from ftrun.ids import Version
from ftrun.wire.messages.protected import ProtectionPart
from ftrun.wire.shared_memory.parity_region import (
    ParityRecord,
    ParityRegion,
    ParityRegionState,
    create_vault,
    vault_bytes,
)

NUM_VAULTS = 2
_MOST_VAULTS = 3
_log = logging.getLogger(__name__)


class ParityStore:
    """What is kept for other nodes."""

    def __init__(self) -> None:
        self._slots: list[ParityRegion | None] = [None] * _MOST_VAULTS
        self._kept: int | None = None
        self._committed: int | None = None
        """The newest committed protection, if the kept one is not committed."""

    @property
    def slots(self) -> list[int]:
        """Those that hold a vault, in the order of `fds`."""
        return [at for at, vault in enumerate(self._slots) if vault is not None]

    @property
    def fds(self) -> list[int]:
        return [vault.fd for vault in self._slots if vault is not None]

    @property
    def allocated_bytes(self) -> int:
        return sum(vault.size for vault in self._slots if vault is not None)

    @property
    def kept(self) -> ParityRegion | None:
        """The one that keeps what the run would be restored from."""
        return self._slots[self._kept] if self._kept is not None else None

    def adopt(self, fd: int, slot: int) -> None:
        """Keep a vault that outlived another SMP; the descriptor is ours from now on.

        It keeps its slot, because the agent names its duplicates by slots.

        Raises:
            LayoutUnknown: it is none, or the slot holds another one; the descriptor stays the
                caller's.
        """
        if any(vault and os.path.sameopenfile(fd, vault.fd) for vault in self._slots):
            os.close(fd)
            return
        if slot not in range(_MOST_VAULTS) or self._slots[slot] is not None:
            raise LayoutUnknown(f"there is no free slot {slot} for a vault here")
        self._slots[slot] = ParityRegion(fd)

    def keep(self, version: Version | None, protected_in: int) -> None:
        """Choose what must not be lost: the protection of a version.

        Args:
            version: that the run would be restored from.
            protected_in: the generation of its protection; -1: the newest that was committed, or
                else complete.
        """
        found: list[tuple[bool, bool, int, int]] = []
        for at, vault in enumerate(self._slots):
            record = vault.record if vault is not None else None
            if vault is None or record is None or record.version != version:
                continue
            if vault.state not in (ParityRegionState.COMPLETE, ParityRegionState.COMMITTED):
                continue
            is_named = record.protected_in == protected_in
            is_committed = vault.state is ParityRegionState.COMMITTED
            found.append((is_named, is_committed, record.protected_in, at))
        self._kept = max(found)[3] if found else None
        self._committed = None if found and max(found)[1] else self._newest_committed()

    def _newest_committed(self) -> int | None:
        found = [
            (vault.record.version, vault.record.protected_in, at)
            for at, vault in enumerate(self._slots)
            if vault is not None and vault.record and vault.state is ParityRegionState.COMMITTED
        ]
        return max(found)[2] if found else None

    def find(self, version: Version, protected_in: int) -> ParityRegion | None:
        """The vault with a whole part of this protection."""
        for vault in self._slots:
            record = vault.record if vault is not None else None
            if vault is None or record is None:
                continue
            is_whole = vault.state in (ParityRegionState.COMPLETE, ParityRegionState.COMMITTED)
            if is_whole and (record.version, record.protected_in) == (version, protected_in):
                return vault
        return None

    def free_slot(self) -> int:
        """The slot to fill next."""
        kept = {self._kept, self._committed}
        free = [at for at in range(_MOST_VAULTS) if at not in kept]
        # The third vault is memory that the node does not have most of the time.
        return min(free, key=lambda at: (self._slots[at] is None, at))

    def give_up_committed(self) -> bool:
        """Let the older committed protection be overwritten: there is no memory for a third vault.

        Returns:
            Whether there was one.
        """
        had, self._committed = self._committed is not None, None
        return had

    def take(self, slot: int, record: ParityRecord) -> ParityRegion | None:
        """The vault of a slot, if it is large enough for this record; else it is let go."""
        vault = self._slots[slot]
        if vault is not None and vault_bytes(record) <= vault.size:
            return vault
        if vault is not None:
            vault.close()
            self._slots[slot] = None
        return None

    def put(self, slot: int, vault: ParityRegion) -> None:
        """Keep a new vault; of two that were made for one slot at once, the later one."""
        self._free(slot)
        self._slots[slot] = vault

    def commit(self, version: Version, protected_in: int) -> list[int]:
        """This protection is what counts from now on; which slots were freed."""
        before = {at for at, one in enumerate(self._slots) if one is not None}
        vault = self.find(version, protected_in)
        if vault is not None:
            vault.mark(ParityRegionState.COMMITTED)
        self.keep(version, protected_in)
        if vault is None:
            # This node has no part in it, and what it has is of versions that are over.
            self._free_before(version)
        elif len(before) > NUM_VAULTS:
            self._free(next(at for at in sorted(before) if at != self._kept))
        return sorted(at for at in before if self._slots[at] is None)

    def _free_before(self, newest: Version) -> None:
        for slot, vault in enumerate(self._slots):
            if vault is not None and vault.record is not None and vault.record.version < newest:
                self._free(slot)

    def _free(self, slot: int) -> None:
        vault, self._slots[slot] = self._slots[slot], None
        if vault is not None:
            vault.close()

    def void_after(self, newest: Version) -> int:
        """Later versions never come back; how many there were."""
        count = 0
        for vault in self._slots:
            if vault is not None and vault.record is not None and vault.record.version > newest:
                vault.mark(ParityRegionState.VOID)
                count += 1
        return count

    def drop_damaged_mirror(self, version: Version, protected_in: int, place: int) -> None:
        """Take a damaged mirror out of the inventory. The parity beside it stays.

        If the inventory still named it, the leader would choose the same restore for ever.
        """
        vault = self.find(version, protected_in)
        if vault is None or place not in vault.mirrored_places() or vault.mirror(place) is not None:
            return
        vault.keep_mirror(place, 0, 0)

    def note_damage(self, version: Version, protected_in: int) -> None:
        """Count this node's part of a protection as missing. What is whole is still served."""
        vault = self.find(version, protected_in)
        if vault is not None:
            vault.is_damaged = True

    def parts(self) -> list[ProtectionPart]:
        """This node's part in each protection."""
        return [part for vault in self._slots if vault is not None for part in _part(vault)]

    def free(self) -> None:
        for vault in self._slots:
            if vault is not None:
                vault.close()
        self._slots = [None] * _MOST_VAULTS
        self._kept = self._committed = None


def make_vault(record: ParityRecord) -> ParityRegion:
    """A vault for this record, its memory touched.

    Raises:
        MemoryTooSmall: it does not fit.
    """
    needed = vault_bytes(record)
    available = available_memory()
    if needed > available.num_bytes:
        raise MemoryTooSmall(
            needed_bytes=needed, available_bytes=available.num_bytes, limit=available.limit
        )
    try:
        return ParityRegion(create_vault(needed))
    except (OSError, OverflowError) as error:
        raise MemoryTooSmall(
            needed_bytes=needed,
            available_bytes=available.num_bytes,
            limit=f"the kernel refused it: {error}",
        ) from error


def _part(vault: ParityRegion) -> list[ProtectionPart]:
    record = vault.record
    if record is None or vault.state in (ParityRegionState.EMPTY, ParityRegionState.VOID):
        return []
    return [
        ProtectionPart(
            generation=record.generation,
            step=record.step,
            world_size=record.world_size,
            protected_in=record.protected_in,
            members=record.members,
            parity=record.parity,
            node_id=record.members[record.place].node_id,
            mirrors=[record.members[place].node_id for place in vault.mirrored_places()],
            is_complete=vault.state in (ParityRegionState.COMPLETE, ParityRegionState.COMMITTED)
            and not vault.is_damaged,
            is_committed=vault.state is ParityRegionState.COMMITTED,
        )
    ]
