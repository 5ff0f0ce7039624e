"""The arenas of this node's ranks.

Runs in:  the SMP: all of it in the server's thread, except `create`, which a job may run.
Takes in: what workers ask for, and what the limits allow.
Gives:    descriptors, offers, and errors with numbers.
Survives: the worker; the SMP's own death where the agent keeps duplicates.

A rank may have two arenas for a while: when its layout changes, the new one replaces the old
one at the first commit that lies in the new one. Until then both can be restored from, both are
offered and handed over, and both count as used memory.

Rule: what the ranks of this node ask for is counted together, and what was refused still counts.
      A version needs all ranks, so memory for some of them would be spent without protection.
"""

import fcntl
import logging
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from ftrun.errors import LayoutUnknown, MemoryTooSmall
from ftrun.free_memory import AvailableMemory, available_memory
from ftrun.ids import Generation, Rank, Version
from ftrun.snapshot.layout import PIECE_BYTES
from ftrun.wire.crash_points import crash_point
from ftrun.wire.messages.protected import ShardOffer
from ftrun.wire.shared_memory.arena import (
    ArenaShape,
    SlotHeader,
    SlotState,
    arena_bytes,
    create_memfd,
    read_shape,
    read_slot_headers,
    void_slots,
)

_SPARE_PIECES = 64
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SmpArena:
    """One arena and since when it is here."""

    fd: int
    shape: ArenaShape
    granted_in: Generation

    def slots(self) -> list[SlotHeader]:
        return read_slot_headers(self.fd)

    def sealed(self) -> list[SlotHeader]:
        return [header for header in self.slots() if header.state is SlotState.SEALED]

    def holds(self, version: Version) -> bool:
        return any(header.version == version for header in self.sealed())

    def void(self, chosen: Callable[[Version], bool]) -> int:
        """Mark its sealed slots with such versions as void; how many there were."""
        return void_slots(self.fd, chosen)

    def close(self) -> None:
        os.close(self.fd)


@dataclass(slots=True)
class Allocation:
    """How far an arena in the making is; its job writes `num_bytes`."""

    total_bytes: int
    num_bytes: int = 0


class ArenaStore:
    """Arenas by rank, the newest last."""

    def __init__(self, available: Callable[[], AvailableMemory] = available_memory) -> None:
        self._available = available
        self._arenas: dict[Rank, list[SmpArena]] = {}
        self._wanted: dict[Rank, int] = {}
        """Bytes that a rank has asked for and has not got, granted or refused."""
        self._making: dict[Rank, Allocation] = {}

    @property
    def ranks(self) -> list[Rank]:
        return sorted(self._arenas)

    @property
    def allocated_bytes(self) -> int:
        return sum(arena.shape.total_bytes for arena in self.all())

    def all(self) -> list[SmpArena]:
        """Every arena, by rank, the older first: the order of HandOver and Adopt."""
        return [arena for rank in self.ranks for arena in self._arenas[rank]]

    def of(self, rank: Rank) -> list[SmpArena]:
        return self._arenas.get(rank, [])

    def promise(self, rank: Rank, total_bytes: int, *, image_bytes: int) -> None:
        """Set memory aside, besides what this rank has and what other ranks have asked for.

        Args:
            rank: that asks; this replaces what it has asked for before.
            total_bytes: of the memory to set aside.
            image_bytes: of one slot, for the error.

        Raises:
            MemoryTooSmall: what all ranks have asked for does not fit.
        """
        self._wanted[rank] = total_bytes
        # Before the bytes allocated meanwhile: the other order would count some of them twice.
        available = self._available()
        needed = self._needed_bytes
        if needed > available.num_bytes:
            raise MemoryTooSmall(
                needed_bytes=needed,
                available_bytes=available.num_bytes,
                limit=available.limit,
                state_bytes=image_bytes,
                num_ranks=sum(1 for wanted in self._wanted.values() if wanted),
            )

    @property
    def known_ranks(self) -> set[Rank]:
        """Ranks that have an arena or have asked for one."""
        return {*self._arenas, *self._wanted}

    @property
    def planned_bytes(self) -> int:
        """Of the newest arenas, with all that ranks have asked for."""
        newest = sum(arenas[-1].shape.total_bytes for arenas in self._arenas.values())
        return newest + sum(self._wanted.values())

    @property
    def _needed_bytes(self) -> int:
        needed = dict(self._wanted)
        for rank, making in self._making.items():
            needed[rank] = max(needed.get(rank, 0), making.total_bytes) - making.num_bytes
        return sum(needed.values())

    def check(self, more_bytes: int) -> None:
        """Raise MemoryTooSmall if this does not fit beside all that ranks have asked for."""
        available = self._available()
        needed = self._needed_bytes + more_bytes
        if needed > available.num_bytes:
            raise MemoryTooSmall(
                needed_bytes=needed, available_bytes=available.num_bytes, limit=available.limit
            )

    def reserve(self, rank: Rank, image_bytes: int, *, world_size: int) -> None:
        """Promise two slots of this size, less what the rank's arena has already.

        Arenas of another world size do not count: they are read from until the first commit.

        Raises:
            MemoryTooSmall: they do not fit.
        """
        total = arena_bytes(image_bytes, image_bytes // PIECE_BYTES + _SPARE_PIECES)
        shapes = [arena.shape for arena in self.of(rank) if arena.shape.world_size == world_size]
        has = max((shape.total_bytes for shape in shapes), default=0)
        self.promise(rank, max(0, total - has), image_bytes=image_bytes)

    def begin_making(self, shape: ArenaShape) -> Allocation:
        """Count an arena while its pages are allocated, until `end_making`."""
        found = self._making[Rank(shape.rank)] = Allocation(shape.total_bytes)
        return found

    def end_making(self, rank: Rank) -> None:
        self._making.pop(rank, None)

    def forget_promise(self, rank: Rank) -> None:
        """The rank needs no more than it has."""
        self._wanted.pop(rank, None)

    def forget_promises(self) -> None:
        """The ranks that have asked are dead."""
        self._wanted.clear()

    def grant_again(self, shape: ArenaShape, generation: Generation) -> SmpArena | None:
        """An arena of just this shape; it counts as the newest from now on."""
        arenas = self.of(Rank(shape.rank))
        for arena in arenas:
            if arena.shape == shape:
                arenas.remove(arena)
                arenas.append(replace(arena, granted_in=generation))
                return arenas[-1]
        return None

    def add(self, fd: int, generation: Generation) -> SmpArena:
        """Keep an arena that was made or adopted; the descriptor is ours from now on."""
        arena = self._held(fd, generation)
        self._arenas.setdefault(Rank(arena.shape.rank), []).append(arena)
        self.forget_promise(Rank(arena.shape.rank))
        return arena

    def discard(self, fd: int) -> None:
        """Close a descriptor that is not kept."""
        os.close(fd)

    def _held(self, fd: int, generation: Generation) -> SmpArena:
        return SmpArena(fd, read_shape(fd), generation)

    def adopt(self, fd: int, *, rank: int, generation: Generation) -> None:
        """Keep an arena that outlived another SMP; one that is here already is kept once.

        Raises:
            LayoutUnknown: it is none of this format; the descriptor stays the caller's.
        """
        try:
            shape = read_shape(fd)
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        except OSError as error:
            raise LayoutUnknown(f"what came for rank {rank} is no memory: {error}") from error
        if not sealed or os.fstat(fd).st_size < shape.total_bytes or shape.rank != rank:
            raise LayoutUnknown(
                f"the memory for rank {rank} is an arena of rank {shape.rank} of "
                f"{os.fstat(fd).st_size} bytes, {shape.total_bytes} are needed"
            )
        if any(os.path.sameopenfile(fd, arena.fd) for arena in self.of(Rank(rank))):
            os.close(fd)
            return
        self.add(fd, generation)

    def offers(self) -> list[ShardOffer]:
        """Every sealed slot."""
        return [
            ShardOffer(
                rank=arena.shape.rank,
                generation=header.generation,
                step=header.step,
                world_size=arena.shape.world_size,
                image_bytes=header.image_bytes,
            )
            for arena in self.all()
            for header in arena.sealed()
        ]

    def held(self, world_size: int) -> dict[Rank, set[Version]]:
        """Versions by rank, of arenas made for a world of this size."""
        found: dict[Rank, set[Version]] = {}
        for arena in self.all():
            if arena.shape.world_size == world_size:
                versions = found.setdefault(Rank(arena.shape.rank), set())
                versions.update(header.version for header in arena.sealed())
        return found

    def void_after(self, newest: Version) -> int:
        """Mark later versions as void, in all arenas; how many slots there were."""
        return sum(arena.void(lambda found: found > newest) for arena in self.all())

    def void(self, rank: Rank, version: Version) -> None:
        """Mark one rank's slot with this version as void."""
        for arena in self.of(rank):
            arena.void(lambda found: found == version)

    def free_replaced(
        self, committed: Version, *, ranks: Collection[Rank], generation: Generation
    ) -> None:
        """After a commit: free arenas that neither hold it nor are being filled."""
        for rank in self.ranks:
            for arena in list(self._arenas[rank]):
                is_filling = (
                    arena is self._arenas[rank][-1]
                    and arena.granted_in == generation
                    and rank in ranks
                )
                if not is_filling and not arena.holds(committed):
                    self._free(arena)

    def put_instead(self, fds: Collection[int], generation: Generation) -> None:
        """Free everything and keep these instead."""
        self.free()
        for fd in fds:
            self.add(fd, generation)

    def free(self) -> None:
        """Give all memory back; it is gone when nobody else holds a descriptor."""
        for arena in self.all():
            self._free(arena)
        self.forget_promises()

    def _free(self, arena: SmpArena) -> None:
        rank = Rank(arena.shape.rank)
        self._arenas[rank].remove(arena)
        if not self._arenas[rank]:
            del self._arenas[rank]
        arena.close()
        _log.debug("rank %d: freed an arena of %d bytes", rank, arena.shape.total_bytes)


def create(shape: ArenaShape, allocated: Callable[[int], object] | None = None) -> int:
    """A descriptor of a fresh arena, its pages allocated; arguments as of `create_memfd`.

    The kernel clears a page when it is first touched, which is in the worker: doing it here as
    well made the whole slower (1 GiB: fallocate 0.15 s, populate 0.33 s, a second mapping
    0.13 s more, 2026-11).

    Raises:
        MemoryTooSmall: the kernel has no such memory, whatever the limits say.
    """
    try:
        fd = create_memfd(shape, allocated)
    except (OSError, OverflowError) as error:
        raise MemoryTooSmall(
            needed_bytes=shape.total_bytes,
            available_bytes=available_memory().num_bytes,
            limit=f"the kernel refused it: {error}",
            state_bytes=shape.image_bytes,
            num_ranks=1,
        ) from error
    crash_point("smp.arena.created")
    return fd
