"""What one node keeps in memory: sealed slots, and its parts in the protection of other nodes.

The bytes of a shard are one number, the state of the whole world at that step: shards of one
version have the same. A digest is that number as it was sealed.
"""

from dataclasses import dataclass, field
from random import Random

from ftrun.ids import Version
from ftrun.wire.plan import Plan
from ftrun.wire.protected import GroupMember, Protected, ShardOffer
from ftrun.wire.smp_messages import Inventory

Arena = tuple[int, tuple[int, ...]]
"""World size and local ranks: what a pair of slots is laid out for."""


@dataclass
class Slot:
    """One sealed slot of all ranks of a node."""

    version: Version
    arena: Arena
    state: int
    digest: int

    @property
    def is_whole(self) -> bool:
        return self.state == self.digest

    def holds(self, rank: int) -> bool:
        return rank in self.arena[1]

    def spoil(self, random: Random) -> None:
        """Flip a bit of it."""
        self.state ^= 1 << random.randrange(60)


@dataclass
class Part:
    """What a node keeps for its group: mirrors and parity of one version."""

    version: Version
    world_size: int
    protected_in: int
    members: list[GroupMember]
    parity: int
    given: dict[str, int] = field(default_factory=dict)
    """State that each node has brought in."""
    digests: dict[str, int] = field(default_factory=dict)
    is_committed: bool = False

    @property
    def key(self) -> tuple[Version, int]:
        return (self.version, self.protected_in)

    def is_complete(self, node_id: str) -> bool:
        return all(one.node_id in self.given for one in self.members if one.node_id != node_id)

    def is_whole(self, node_id: str) -> bool:
        return self.given == self.digests and self.is_complete(node_id)

    def spoil(self, random: Random) -> None:
        """Flip a bit of something in it."""
        if self.given:
            self.given[random.choice(sorted(self.given))] ^= 1 << random.randrange(60)


class Memory:
    """It lasts as long as the stub, the agent or the SMP of its node does."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.parts: list[Part] = []
        self.kept: tuple[Plan, bool] | None = None
        """What the last agent knew: the plan it accepted, and whether that took effect."""

    def slot(self, version: Version, arena: Arena) -> Slot | None:
        for slot in self.slots:
            if slot.version == version and slot.arena == arena:
                return slot
        return None

    def part(self, version: Version, protected_in: int) -> Part | None:
        for part in self.parts:
            if part.key == (version, protected_in):
                return part
        return None

    def inventory(self, node_id: str) -> Inventory:
        offers = [
            ShardOffer(rank, slot.version.generation, slot.version.step, slot.arena[0], 1)
            for slot in self.slots
            for rank in slot.arena[1]
        ]
        return Inventory(offers, [self._protected(part, node_id) for part in self.parts])

    def void_after(self, newest: Version | None) -> list[Version]:
        """Versions later than this never come back; which ones those were."""
        things = [*self.slots, *self.parts]
        voided = [one.version for one in things if newest is None or one.version > newest]
        self.slots = [one for one in self.slots if newest is not None and one.version <= newest]
        self.parts = [one for one in self.parts if newest is not None and one.version <= newest]
        return voided

    @staticmethod
    def _protected(part: Part, node_id: str) -> Protected:
        return Protected(
            generation=part.version.generation,
            step=part.version.step,
            world_size=part.world_size,
            protected_in=part.protected_in,
            members=part.members,
            parity=part.parity,
            node_id=node_id,
            mirrors=sorted(part.given),
            is_complete=part.is_complete(node_id),
            is_committed=part.is_committed,
        )


def can_have(version: Version, memories: dict[str, Memory]) -> bool:
    """Whether every rank of a version can be had from these nodes' memory, bit flips counted."""
    slots = [
        (node_id, slot)
        for node_id, memory in memories.items()
        for slot in memory.slots
        if slot.version == version and slot.is_whole
    ]
    parts = [
        (node_id, part)
        for node_id, memory in memories.items()
        for part in memory.parts
        if part.version == version
    ]
    sizes = {slot.arena[0] for _, slot in slots} | {part.world_size for _, part in parts}
    return any(_can_have(size, slots, parts) for size in sizes)


def _can_have(
    world_size: int, slots: list[tuple[str, Slot]], parts: list[tuple[str, Part]]
) -> bool:
    held: dict[int, set[str]] = {}
    for node_id, slot in slots:
        if slot.arena[0] == world_size:
            for rank in slot.arena[1]:
                held.setdefault(rank, set()).add(node_id)
    groups: dict[str, tuple[Part, set[str], set[str]]] = {}
    for node_id, part in parts:
        if part.world_size != world_size:
            continue
        name = f"{part.protected_in} {part.parity} {part.members}"
        _, whole, mirrors = groups.setdefault(name, (part, set(), set()))
        if part.is_whole(node_id):
            whole.add(node_id)
        mirrors |= {one for one, state in part.given.items() if state == part.digests[one]}
    for rank in range(world_size):
        if rank not in held and not any(
            _rebuilds(rank, part, whole, mirrors, held) for part, whole, mirrors in groups.values()
        ):
            return False
    return True


def _rebuilds(
    rank: int, part: Part, whole: set[str], mirrors: set[str], held: dict[int, set[str]]
) -> bool:
    owner = next((one.node_id for one in part.members if rank in one.ranks), None)
    missing = sum(
        one.node_id not in whole
        or not all(one.node_id in held.get(local, ()) for local in one.ranks)
        for one in part.members
    )
    return owner is not None and owner in mirrors and missing <= part.parity
