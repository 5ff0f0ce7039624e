"""The memory of one node: slots of its ranks, and protected parts of other nodes.

The SMP's own code decides what is retained, overwritten and voided; only the bytes are simulated. A
shard is one number, the state of the whole world at that step: all shards of one version are equal.
A digest is that number as it was sealed. The parity store retains whole shards instead of parity.
"""

from collections.abc import Callable, Iterable
from random import Random

import xxhash

from ftrun.errors import LayoutUnknown, SnapshotCorrupt
from ftrun.ids import Generation, Rank, Version
from ftrun.smp.memory.arenas import ArenaStore, SmpArena
from ftrun.smp.memory.parity_store import ParityStore
from ftrun.snapshot.manifest import NodeManifest, RankManifest, Section
from ftrun.wire.cluster.generation import GenerationPlan
from ftrun.wire.shared_memory.arena import ArenaShape, SlotHeader, SlotState
from ftrun.wire.shared_memory.parity_region import ParityRecord, ParityRegionState

STATE_BYTES = 8
BLOCK_BYTES = 4096
BLOCKS_PER_RANK = 2
"""Length of a shard, and the number of blocks from which it is rebuilt; each block holds the state.
"""

_WHOLE = (ParityRegionState.COMPLETE, ParityRegionState.COMMITTED)

Removed = Callable[[Version], None]


class Slot:
    """One sealed slot of one rank."""

    __slots__ = ("digest", "header", "rank", "state", "version")

    def __init__(self, rank: int, version: Version, state: int) -> None:
        self.rank = rank
        self.version = version
        self.state = self.digest = state
        self.header = SlotHeader(
            SlotState.SEALED, version.generation, version.step, STATE_BYTES, state, 0
        )

    @property
    def is_whole(self) -> bool:
        return self.state == self.digest

    def overwrite(self) -> None:
        """A worker writes here: a concurrent reader then finds other bytes."""
        self.state = ~self.digest

    def corrupt(self, random: Random) -> None:
        self.state ^= 1 << random.randrange(60)


class Arena:
    """The memory of one rank; it also acts as its own descriptor."""

    def __init__(self, rank: int, world_size: int, removed: Removed) -> None:
        self.rank = rank
        self.world_size = world_size
        self.shape = ArenaShape(rank, world_size, STATE_BYTES, 1, rank + 1)
        self.slots: list[Slot | None] = [None, None]
        self._removed = removed

    def find(self, version: Version | None) -> Slot | None:
        first, second = self.slots
        if first is not None and first.version == version:
            return first
        return second if second is not None and second.version == version else None

    @property
    def sealed(self) -> list[Slot]:
        return [slot for slot in self.slots if slot is not None]

    def position_of(self, version: Version | None) -> int | None:
        slot = self.find(version)
        return self.slots.index(slot) if slot is not None else None

    def seal(self, version: Version, state: int, at: int = 0) -> None:
        self.slots[at] = Slot(self.rank, version, state)

    def empty(self, at: int) -> None:
        """The content of this slot no longer exists."""
        slot, self.slots[at] = self.slots[at], None
        if slot is not None:
            slot.overwrite()
            self._removed(slot.version)

    def void(self, chosen: Callable[[Version], bool]) -> int:
        found = [at for at, slot in enumerate(self.slots) if slot and chosen(slot.version)]
        for at in found:
            self.empty(at)
        return len(found)


class HeldHere(SmpArena):
    """An arena as the SMP's code sees it."""

    __slots__ = ()

    def slots(self) -> list[SlotHeader]:
        return self.sealed()

    def sealed(self) -> list[SlotHeader]:
        return [slot.header for slot in self.fd.sealed]

    def holds(self, version: Version) -> bool:
        return self.fd.find(version) is not None

    def void(self, chosen: Callable[[Version], bool]) -> int:
        return self.fd.void(chosen)

    def close(self) -> None:
        self.fd.void(lambda _: True)


class Arenas(ArenaStore):
    """The SMP's view of the arenas of its node."""

    def __init__(self, memory: "Memory") -> None:
        super().__init__()
        self._node_memory = memory

    def _held(self, fd: Arena, generation: Generation) -> SmpArena:
        if fd not in self._node_memory.arenas:
            self._node_memory.arenas.append(fd)
        return HeldHere(fd, fd.shape, generation)

    def _free(self, arena: SmpArena) -> None:
        super()._free(arena)
        self._node_memory.arenas.remove(arena.fd)

    def discard(self, fd: Arena) -> None:
        fd.void(lambda _: True)


class HeldShards:
    """The slots of one version, as an exchange and other readers see them."""

    def __init__(self, version: Version, slots: Iterable[Slot]) -> None:
        self.version = version
        self.slots = {slot.rank: slot for slot in slots}

    def state(self, ranks: Iterable[int]) -> int:
        """The state that all of them hold.

        Raises:
            LayoutUnknown: a slot is not on this node.
            SnapshotCorrupt: a slot differs from what was sealed.
        """
        found = 0
        for rank in ranks:
            slot = self.slots.get(rank)
            if slot is None:
                raise LayoutUnknown(f"rank {rank} has no slot with {self.version} here")
            if not is_good(slot.state, slot.digest):
                what = f"rank {rank}, {self.version}"
                raise SnapshotCorrupt(what=what, piece=0, pieces=1, rank=rank)
            found = slot.state
        return found

    def manifest(self, ranks: Iterable[int]) -> NodeManifest:
        found = []
        for rank in sorted(ranks):
            slot = self.slots.get(rank)
            if slot is None:
                raise LayoutUnknown(f"rank {rank} has no slot with {self.version} here")
            found.append(_manifest(rank, slot.digest))
        return NodeManifest(found)


class ArenaMaps:
    """As in `ftrun.smp.memory.sealed_shards`."""

    def keep_only(self, fds: Iterable[Arena]) -> None:
        pass

    def hold(self, fds: dict[Rank, list[Arena]], version: Version) -> HeldShards:
        slots = (arena.find(version) for arenas in fds.values() for arena in arenas)
        return HeldShards(version, [slot for slot in slots if slot is not None])


class FakeParityRegion:
    """Data of one version that a node stores for its group; also acts as its own descriptor."""

    def __init__(self, memory: "Memory") -> None:
        self.size = 1 << 40
        self.state = ParityRegionState.EMPTY
        self.record: ParityRecord | None = None
        self.given: dict[str, int] = {}
        """State that each node has sent."""
        self.digests: dict[str, int] = {}
        self.mirrored: set[int] = set()
        """Positions of nodes whose small state is stored here."""
        self.is_damaged = False
        self.is_mapped = True
        """The SMP has opened it; it outlives the SMP if the agent has a duplicate."""
        self._memory = memory

    @property
    def fd(self) -> "FakeParityRegion":
        return self

    @property
    def version(self) -> Version:
        assert self.record is not None
        return self.record.version

    @property
    def name(self) -> tuple[object, ...]:
        """Parts with the same name belong together."""
        record = self.record
        assert record is not None
        members = tuple((one.node_id, tuple(one.ranks)) for one in record.members)
        return record.protected_in, record.parity, record.is_ring, members

    @property
    def is_complete(self) -> bool:
        return self.state in _WHOLE

    @property
    def is_whole(self) -> bool:
        return self.is_complete and self.given == self.digests

    @property
    def holds_something(self) -> bool:
        return self.record is not None and self.state not in (
            ParityRegionState.EMPTY,
            ParityRegionState.VOID,
        )

    def begin(self, record: ParityRecord) -> None:
        self._lose()
        self.record, self.state = record, ParityRegionState.FILLING
        self.given, self.digests, self.mirrored = {}, {}, set()
        self.is_damaged = False

    def mark(self, state: ParityRegionState) -> None:
        if state in (ParityRegionState.VOID, ParityRegionState.EMPTY):
            self._lose()
        self.state = state

    def mirrored_positions(self) -> list[int]:
        return sorted(self.mirrored)

    def mirrors(self) -> list[str]:
        """Nodes whose small state is stored here and equals what they sent."""
        assert self.record is not None
        names = [self.record.members[position].node_id for position in self.mirrored]
        return [one for one in names if self.given.get(one) == self.digests.get(one)]

    def mirror(self, position: int) -> int | None:
        """The state that a node has sent, or None if it is missing or damaged."""
        assert self.record is not None
        name = self.record.members[position].node_id
        return self.digests[name] if position in self.mirrored and name in self.mirrors() else None

    def store_mirror(self, position: int, num_bytes: int, _: int) -> None:
        assert not num_bytes, "a complete mirror comes with an exchange"
        self.mirrored.discard(position)

    def close(self) -> None:
        self.is_mapped = False
        if self not in self._memory.parity_regions.values():
            self._lose()

    def corrupt(self, random: Random) -> None:
        if self.given:
            self.given[random.choice(sorted(self.given))] ^= 1 << random.randrange(60)

    def _lose(self) -> None:
        if self.is_complete:
            self._memory.removed(self.version)


class Memory:
    """The memory of a node, which exists as long as some process on the node holds it.

    The stub keeps arenas. Protected parts exist as long as the SMP or the agent does.

    Args:
        removed: called with each version of which a slot or part was removed.
    """

    def __init__(self, removed: Removed) -> None:
        self.removed = removed
        self.arenas: list[Arena] = []
        self.parity_regions: dict[int, FakeParityRegion] = {}
        """The agent's duplicates, by the slot number that the SMP has named."""
        self.kept: tuple[GenerationPlan, bool] | None = None
        """Memory of the last agent: the plan it accepted, and whether that plan was chosen."""
        self._mapped = ParityStore()

    def map_parity_regions(self, parity_regions: ParityStore) -> None:
        """A new SMP starts and receives the agent's descriptors."""
        self._mapped = parity_regions
        for slot, region in sorted(self.parity_regions.items()):
            region.is_mapped = True
            parity_regions.put(slot, region)

    def hand_over(self) -> None:
        """A new agent starts and receives the SMP's descriptors."""
        self.parity_regions = dict(zip(self._mapped.slots, self._mapped.fds, strict=True))

    def agent_died(self) -> None:
        self._drop([*self.parity_regions])

    def smp_died(self) -> None:
        mapped, self._mapped = self._mapped.fds, ParityStore()
        for region in mapped:
            region.close()

    def retain_parity_region(self, slot: int, region: FakeParityRegion) -> None:
        self._drop([slot])
        self.parity_regions[slot] = region

    def drop_parity_region(self, slot: int) -> None:
        self._drop([slot])

    def _drop(self, slots: list[int]) -> None:
        for slot in slots:
            region = self.parity_regions.pop(slot, None)
            if region is not None and not region.is_mapped:
                region.close()

    # --- queries for faults and invariants ----------------------------------------------------

    @property
    def slots(self) -> list[Slot]:
        return [slot for arena in self.arenas for slot in arena.slots if slot is not None]

    @property
    def parts(self) -> list[FakeParityRegion]:
        """Protected parts that are not empty."""
        found = [*self._mapped.fds, *self.parity_regions.values()]
        return [region for region in dict.fromkeys(found) if region.holds_something]

    def arena_of(self, rank: int, version: Version) -> Arena | None:
        return next((a for a in self.arenas if a.rank == rank and a.find(version)), None)

    def holds(self, rank: int, version: Version) -> bool:
        """As in the agent's `RetainedMemory`."""
        return self.arena_of(rank, version) is not None


def is_good(state: int, digest: int) -> bool:
    return state == digest


def _manifest(rank: int, digest: int) -> RankManifest:
    key = xxhash.xxh3_64_intdigest(b"%d" % rank)
    sections = [Section(key, 0, 1, BLOCKS_PER_RANK * BLOCK_BYTES, False)]
    content = (digest & (1 << 64) - 1).to_bytes(8, "little")
    return RankManifest(rank, 0, STATE_BYTES, 1, rank + 1, 8, rank + 1, 0, sections, content)


def can_have(version: Version, memories: dict[str, Memory]) -> bool:
    """Whether these nodes' memory can restore every rank of a version; counts bit flips."""
    held: dict[int, dict[int, set[str]]] = {}
    for node_id, memory in memories.items():
        for arena in memory.arenas:
            slot = arena.find(version)
            if slot is not None and slot.is_whole:
                ranks = held.setdefault(arena.world_size, {})
                ranks.setdefault(arena.rank, set()).add(node_id)
    parts = [
        (node_id, part)
        for node_id, memory in memories.items()
        for part in memory.parts
        if part.is_complete and part.version == version
    ]
    sizes = {*held, *(part.record.world_size for _, part in parts if part.record is not None)}
    return any(_can_have(size, held.get(size, {}), parts) for size in sizes)


def _can_have(
    world_size: int, held: dict[int, set[str]], parts: list[tuple[str, FakeParityRegion]]
) -> bool:
    lost = [rank for rank in range(world_size) if rank not in held]
    if not lost:
        return True
    groups: dict[tuple[object, ...], tuple[ParityRecord, set[str], set[str]]] = {}
    for node_id, part in parts:
        record = part.record
        assert record is not None
        if record.world_size == world_size:
            _, whole, mirrors = groups.setdefault(part.name, (record, set(), set()))
            mirrors.update(part.mirrors())
            if part.is_whole:
                whole.add(node_id)
    return all(any(_rebuilds(rank, held, *group) for group in groups.values()) for rank in lost)


def _rebuilds(
    rank: int, held: dict[int, set[str]], record: ParityRecord, whole: set[str], mirrors: set[str]
) -> bool:
    owner = next((one.node_id for one in record.members if rank in one.ranks), None)
    missing = [
        one.node_id not in whole
        or not all(one.node_id in held.get(local, ()) for local in one.ranks)
        for one in record.members
    ]
    is_tolerated = tolerates(missing, record.parity, is_ring=record.is_ring)
    return owner is not None and owner in mirrors and is_tolerated


def tolerates(missing: list[bool], parity: int, *, is_ring: bool) -> bool:
    """Whether a group can rebuild the state of the nodes that are missing, by position."""
    if is_ring:
        return not any(one and missing[at - 1] for at, one in enumerate(missing))
    return sum(missing) <= parity
