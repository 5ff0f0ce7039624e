"""The agent's duplicates of its SMP's memory, which it reads and voids without the SMP.

Runs in:  agent, main thread.
Takes in: descriptors of arenas and parity regions, from the SMP or the stub.
Gives:    the sealed versions in them; the arena to start a rank with.
Survives: the SMP: the next one receives them.
"""

import os
from collections.abc import Callable, Collection
from contextlib import suppress

from ftrun.errors import LayoutUnknown
from ftrun.ids import Rank, Version
from ftrun.wire.messages.smp import ShardOffer
from ftrun.wire.shared_memory.arena import SlotState, read_shape, read_slot_headers, void_slots


class RetainedMemory:
    """Descriptors of shared memory; this object owns and closes all of them."""

    def __init__(self) -> None:
        self.arenas: dict[Rank, list[int]] = {}
        """By rank, the newest layout last."""
        self.vaults: dict[int, int] = {}
        """Parity regions, which the SMP stores for other nodes, by slot."""

    @property
    def held(self) -> list[tuple[Rank, int]]:
        """Rank and descriptor of every arena; the oldest layout of each rank first."""
        return [(rank, fd) for rank, fds in sorted(self.arenas.items()) for fd in fds]

    @property
    def vault_fds(self) -> list[int]:
        return [fd for _, fd in sorted(self.vaults.items())]

    def keep(self, rank: Rank, fd: int) -> None:
        self.arenas.setdefault(rank, []).append(fd)

    def keep_vault(self, slot: int, fd: int) -> None:
        self.drop_vault(slot)
        self.vaults[slot] = fd

    def drop_vault(self, slot: int) -> None:
        old = self.vaults.pop(slot, None)
        if old is not None:
            os.close(old)

    def adopt(self, fds: list[int]) -> None:
        for fd in fds:
            try:
                self.keep(Rank(read_shape(fd).rank), fd)
            except LayoutUnknown:
                os.close(fd)

    def offers(self) -> list[ShardOffer]:
        """Every sealed slot on this node, read from the memory itself, with or without an SMP."""
        found: list[ShardOffer] = []
        for rank, fd in self.held:
            with suppress(LayoutUnknown):
                shape = read_shape(fd)
                found.extend(
                    ShardOffer(rank, at.generation, at.step, shape.world_size, shape.image_bytes)
                    for at in _sealed(fd)
                )
        return found

    def arena_for(self, rank: Rank, wanted: Version | None) -> int | None:
        fds = self.arenas.get(rank, [])
        newest = fds[-1] if fds else None
        return next((fd for fd in fds if wanted in _sealed(fd)), newest)

    def holds(self, rank: Rank, wanted: Version) -> bool:
        return any(wanted in _sealed(fd) for fd in self.arenas.get(rank, []))

    def whole_versions(self, ranks: Collection[Rank]) -> list[Version]:
        """Versions that all of these ranks have sealed, committed or not, the newest first."""
        sealed = {one for rank in ranks for fd in self.arenas.get(rank, []) for one in _sealed(fd)}
        whole = [one for one in sealed if all(self.holds(rank, one) for rank in ranks)]
        return sorted(whole, reverse=True)

    def void(self, chosen: Callable[[Version], bool]) -> int:
        """Void the chosen versions for good; return the number of slots.

        The workers must be dead.
        """
        return sum(void_slots(fd, chosen) for _, fd in self.held)

    def void_slot(self, rank: Rank, wanted: Version | None) -> None:
        for fd in self.arenas.get(rank, []):
            void_slots(fd, lambda found: found == wanted)

    def drop_other_ranks(self, ranks: Collection[Rank]) -> None:
        for rank in [rank for rank in self.arenas if rank not in ranks]:
            for fd in self.arenas.pop(rank):
                os.close(fd)

    def drop_old_layouts(self, committed: Version | None) -> None:
        """Close arenas older than the one that holds the commit.

        Every rank has sealed a committed version, so older layouts are not needed.
        """
        for fds in self.arenas.values():
            while len(fds) > 1 and committed in _sealed(fds[-1]):
                os.close(fds.pop(0))

    def close(self) -> None:
        for fd in (*(fd for _, fd in self.held), *self.vaults.values()):
            os.close(fd)
        self.arenas.clear()
        self.vaults.clear()


def _sealed(fd: int) -> list[Version]:
    headers = read_slot_headers(fd)
    return [header.version for header in headers if header.state is SlotState.SEALED]
