"""Stores the arenas of this node's ranks, and accounts for their memory.

Runs in:  the SMP: all of it in the server's thread, except `create`, which a job may run.
Takes in: requests of workers, and the memory limits.
Gives:    descriptors, offers, and errors with sizes in bytes.
Survives: the worker; the SMP's own death if the agent holds duplicates of the descriptors.

A rank may have two arenas for a while. When its layout changes, the new arena replaces the old one
at the first commit of a version in the new one. Until then both can be restored from, both are
offered and handed over, and both count as used memory.

Rule: the requests of all ranks of this node are counted together, including refused ones. A version
      needs all ranks, so memory for only some of them would be spent without protection.
"""

import fcntl
import logging
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from ftrun.config.profile import MEMORY_LIMIT
from ftrun.errors import LayoutUnknown, MemoryTooSmall
from ftrun.ids import Generation, Rank, Version
from ftrun.linux import AvailableMemory, available_memory
from ftrun.snapshot.layout import PIECE_BYTES
from ftrun.wire.crash_points import crash_point
from ftrun.wire.messages.smp import ShardOffer
from ftrun.wire.shared_memory.arena import (
    NUM_SLOTS,
    ArenaShape,
    SlotHeader,
    SlotState,
    arena_bytes,
    create_memfd,
    divide,
    read_shape,
    read_slot_headers,
    void_slots,
)

_SPARE_PIECES = 64
_WRITE_BYTES = 32 << 20
"""Memory of the SMP while it writes a checkpoint: buffers of the file, and threads."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SmpArena:
    """One arena, and the generation in which it was granted last."""

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
        return void_slots(self.fd, chosen)

    def close(self) -> None:
        os.close(self.fd)


@dataclass(slots=True)
class Allocation:
    """Progress of an arena's allocation; its job writes `num_bytes`."""

    total_bytes: int
    num_bytes: int = 0


class ArenaStore:
    """Arenas by rank, the newest last."""

    def __init__(self, available: Callable[[], AvailableMemory] = available_memory) -> None:
        self._available = available
        self._arenas: dict[Rank, list[SmpArena]] = {}
        self._wanted: dict[Rank, int] = {}
        """Bytes that a rank requested and does not have yet, granted or refused."""
        self._making: dict[Rank, Allocation] = {}
        self._prepared: dict[Rank, tuple[int, ArenaShape]] = {}
        """Descriptors of memory for layouts that are not known yet."""
        self.limit_bytes = 0
        """Limit of the profile for snapshots on this node; 0: none."""
        self.pool_bytes = 0
        """Bytes of capture pools, which count against the limit."""
        self.num_freed = 0
        """Arenas that were freed for capture pools."""
        self.after_add: Callable[[SmpArena], None] = lambda _: None
        self.give_back: Callable[[], bool] = lambda: False
        """Called before memory is refused; frees what is not needed, if there is any."""
        self.after_free: Callable[[], None] = lambda: None
        """Called when arenas were freed for capture pools."""

    @property
    def ranks(self) -> list[Rank]:
        return sorted(self._arenas)

    @property
    def allocated_bytes(self) -> int:
        return sum(arena.shape.total_bytes for arena in self.all()) + self._prepared_bytes

    @property
    def _prepared_bytes(self) -> int:
        return sum(shape.total_bytes for _, shape in self._prepared.values())

    def available(self) -> AvailableMemory:
        """Free memory, or what the limit of the profile leaves, if that is less."""
        found = self._available()
        if not self.limit_bytes:
            return found
        making = sum(one.num_bytes for one in self._making.values())
        left = max(0, self.limit_bytes - self.allocated_bytes - self.pool_bytes - making)
        return min(found, AvailableMemory(left, MEMORY_LIMIT), key=lambda one: one.num_bytes)

    def pool_room(self, least_bytes: int, state_bytes: int) -> int:
        """Bytes that capture pools may take together; raises MemoryTooSmall if they are too few."""
        half = self._available()
        half = replace(half, num_bytes=max(0, half.num_bytes - _WRITE_BYTES) // 2)
        room = min(self.available(), half, key=lambda one: one.num_bytes)
        room.check(least_bytes, state_bytes=state_bytes)
        return room.num_bytes

    def all(self) -> list[SmpArena]:
        """Every arena, by rank, the older first: the order of MemoryHandedOver and AdoptMemory."""
        return [arena for rank in self.ranks for arena in self._arenas[rank]]

    def of(self, rank: Rank) -> list[SmpArena]:
        return self._arenas.get(rank, [])

    def fds(self, ranks: Iterable[Rank]) -> dict[Rank, list[int]]:
        return {rank: [arena.fd for arena in self.of(rank)] for rank in ranks}

    def promise(self, rank: Rank, total_bytes: int, *, image_bytes: int) -> None:
        """Replace the rank's request; raises MemoryTooSmall if all requests do not fit together."""
        self._wanted[rank] = total_bytes
        # Read before `_needed_bytes`, because jobs allocate concurrently. In the other order, bytes
        # allocated between the two reads would count twice: as needed and as no longer available.
        available = self.available()
        if self._needed_bytes > available.num_bytes and self.give_back():
            available = self.available()
        num_ranks = len({one for one, wanted in self._wanted.items() if wanted} | {*self._prepared})
        available.check(self._needed_bytes, state_bytes=image_bytes, num_ranks=num_ranks)

    @property
    def known_ranks(self) -> set[Rank]:
        return {*self._arenas, *self._wanted, *self._prepared}

    @property
    def wanted_bytes(self) -> int:
        """Bytes that ranks requested and do not have yet, granted or refused."""
        return sum(self._wanted.values())

    @property
    def unused_bytes(self) -> int:
        """Bytes for snapshots that are in no arena yet: requested, granted, refused or prepared."""
        return self.wanted_bytes + self._prepared_bytes

    @property
    def planned_bytes(self) -> int:
        newest = sum(arenas[-1].shape.total_bytes for arenas in self._arenas.values())
        return newest + self.unused_bytes

    @property
    def _needed_bytes(self) -> int:
        needed = dict(self._wanted)
        for rank, making in self._making.items():
            needed[rank] = max(needed.get(rank, 0), making.total_bytes) - making.num_bytes
        return sum(needed.values())

    def check(self, more_bytes: int) -> None:
        self.available().check(self._needed_bytes + more_bytes)

    def reserve(self, rank: Rank, image_bytes: int, *, world_size: int) -> None:
        """Reserve two slots, less the rank's arena of this world size; raises MemoryTooSmall."""
        total = arena_bytes(image_bytes, image_bytes // PIECE_BYTES + _SPARE_PIECES)
        # Arenas of another world size do not count: they are read until the first commit.
        shapes = [arena.shape for arena in self.of(rank)]
        if rank in self._prepared:
            shapes.append(self._prepared[rank][1])
        own = (shape for shape in shapes if shape.world_size == world_size)
        sizes = (shape.total_bytes for shape in own if shape.num_slots == NUM_SLOTS)
        has = max(sizes, default=0)
        self.promise(rank, max(0, total - has), image_bytes=image_bytes)

    def begin_making(self, shape: ArenaShape) -> Allocation:
        found = self._making[Rank(shape.rank)] = Allocation(shape.total_bytes)
        return found

    def end_making(self, rank: Rank) -> None:
        self._making.pop(rank, None)

    def forget_promise(self, rank: Rank) -> bool:
        """Whether there was one."""
        return self._wanted.pop(rank, None) is not None

    def forget_requests(self) -> None:
        """The ranks that have requested memory have ended."""
        self._wanted.clear()
        for fd, _ in self._prepared.values():
            os.close(fd)
        self._prepared.clear()

    def add_prepared(self, fd: int, shape: ArenaShape) -> None:
        self._prepared[Rank(shape.rank)] = fd, shape
        self.forget_promise(Rank(shape.rank))

    def prepared(self, shape: ArenaShape) -> int | None:
        """The descriptor of memory that was prepared in exactly this shape."""
        fd, has = self._prepared.get(Rank(shape.rank), (-1, None))
        return fd if has == shape else None

    def divide_prepared(self, shape: ArenaShape, generation: Generation) -> SmpArena | None:
        """Make an arena of the memory that was prepared for the rank; None if it has none.

        Memory that is too small is freed. Raises MemoryTooSmall, and frees it, if the requests of
        the other ranks do not fit.
        """
        fd, _ = self._prepared.pop(Rank(shape.rank), (None, None))
        if fd is None:
            return None
        try:
            self.promise(Rank(shape.rank), 0, image_bytes=shape.image_bytes)
            divide(fd, shape)
        except MemoryTooSmall:
            os.close(fd)
            raise
        except OSError as error:
            _log.info("rank %d: freed memory that was prepared: %s", shape.rank, error)
            os.close(fd)
            return None
        return self.add(fd, generation)

    def grant_again(self, shape: ArenaShape, generation: Generation) -> SmpArena | None:
        """An existing arena of exactly this shape; it becomes the newest of its rank."""
        arenas = self.of(Rank(shape.rank))
        for arena in arenas:
            if arena.shape == shape:
                arenas.remove(arena)
                arenas.append(replace(arena, granted_in=generation))
                return arenas[-1]
        return None

    def add(self, fd: int, generation: Generation) -> SmpArena:
        """Store an allocated or adopted arena, and take ownership of its descriptor."""
        arena = self._held(fd, generation)
        self._arenas.setdefault(Rank(arena.shape.rank), []).append(arena)
        self.forget_promise(Rank(arena.shape.rank))
        self.after_add(arena)
        return arena

    def discard(self, fd: int) -> None:
        os.close(fd)

    def _held(self, fd: int, generation: Generation) -> SmpArena:
        return SmpArena(fd, read_shape(fd), generation)

    def adopt(self, fd: int, *, rank: int, generation: Generation) -> None:
        """Own an arena of an earlier SMP, or close the descriptor if that arena is here already.

        After LayoutUnknown the caller owns the descriptor.
        """
        try:
            shape = read_shape(fd)
            # A file of `create_on_disk` has no seals, and no other process has a name for it.
            is_file = shape.num_slots < NUM_SLOTS and not os.fstat(fd).st_nlink
            sealed = is_file or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        except OSError as error:
            raise LayoutUnknown(
                f"the descriptor for rank {rank} is not sealed memory: {error}"
            ) from error
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
        found: dict[Rank, set[Version]] = {}
        for arena in self.all():
            if arena.shape.world_size == world_size:
                versions = found.setdefault(Rank(arena.shape.rank), set())
                versions.update(header.version for header in arena.sealed())
        return found

    def void_after(self, newest: Version) -> int:
        return sum(arena.void(lambda found: found > newest) for arena in self.all())

    def void(self, rank: Rank, version: Version) -> None:
        for arena in self.of(rank):
            arena.void(lambda found: found == version)

    def free_replaced(
        self, committed: Version, *, ranks: Collection[Rank], generation: Generation
    ) -> None:
        """After a commit, free the arenas that neither hold the version nor are being filled."""
        for rank in self.ranks:
            for arena in list(self._arenas[rank]):
                is_filling = (
                    arena is self._arenas[rank][-1]
                    and arena.granted_in == generation
                    and rank in ranks
                )
                if not is_filling and not arena.holds(committed):
                    self._free(arena)

    def free_unless_committed(self, committed: Version | None) -> int:
        """Free the arenas that are of no use to ranks with capture pools; return how many.

        Arenas with two slots and the committed version stay.
        """
        return self._free_for_pools(
            [
                arena
                for arena in self.all()
                if arena.shape.num_slots < NUM_SLOTS
                or committed is None
                or not arena.holds(committed)
            ]
        )

    def free_older(self, newest: Version) -> int:
        """Free the arenas without a later version than this one; return how many."""
        is_older = lambda arena: all(one.version <= newest for one in arena.sealed())  # noqa: E731
        return self._free_for_pools(list(filter(is_older, self.all())))

    def _free_for_pools(self, freed: list[SmpArena]) -> int:
        for arena in freed:
            self._free(arena)
        self.num_freed += len(freed)
        if freed:
            self.after_free()
        return len(freed)

    def put_instead(self, fds: Collection[int], generation: Generation) -> None:
        self.free()
        for fd in fds:
            self.add(fd, generation)

    def free(self) -> None:
        """Close all arenas; the kernel frees the memory when no process holds a descriptor."""
        for arena in self.all():
            self._free(arena)
        self.forget_requests()

    def _free(self, arena: SmpArena) -> None:
        rank = Rank(arena.shape.rank)
        self._arenas[rank].remove(arena)
        if not self._arenas[rank]:
            del self._arenas[rank]
        arena.close()
        _log.debug("rank %d: freed an arena of %d bytes", rank, arena.shape.total_bytes)


def create(shape: ArenaShape, allocated: Callable[[int], object] | None = None) -> int:
    """Allocate a new arena and return its descriptor; `allocated` is as in `create_memfd`.

    Raises MemoryTooSmall if the kernel refuses the memory, whatever the limits allow. The kernel
    clears a page at its first access, which happens in the worker. Touching the pages here as well
    made the total slower (1 GiB: fallocate 0.15 s, populate 0.33 s, a second mapping 0.13 s more,
    2026-11).
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
