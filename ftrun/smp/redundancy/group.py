"""The group of a node, and the record of the vault that belongs to a version there.

Runs in:  the SMP, in the server's thread. Values only.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import xxhash

from ftrun.erasure.groups import ProtectionGroup
from ftrun.erasure.stripes import Stripes
from ftrun.errors import ProtocolError
from ftrun.ids import Generation, Version
from ftrun.smp.redundancy.mirror import mirror_room
from ftrun.snapshot.manifest import NodeManifest
from ftrun.snapshot.redundancy import RedundancyPlan
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.messages.protected import GroupMember, NodeAddress, ProtectionPart
from ftrun.wire.shared_memory.parity_region import ParityRecord


@dataclass(frozen=True)
class LocalGroup:
    """The group of this node in this generation.

    Args:
        nodes: in the group's order.
        place: this node's.
        parity: m.
        number: digest of all this: of the session among the SMPs.
    """

    generation: Generation
    world_size: int
    nodes: tuple[NodeAddress, ...]
    place: int
    parity: int
    small_state_bytes: int
    patience_s: float
    number: int

    @property
    def is_possible(self) -> bool:
        """There are nodes enough to protect one another."""
        return 1 <= self.parity < len(self.nodes)

    @property
    def members(self) -> list[GroupMember]:
        return [GroupMember(node.node_id, list(node.ranks)) for node in self.nodes]

    @property
    def group_id(self) -> int:
        return ProtectionGroup(tuple(node.node_id for node in self.nodes), self.parity).id

    @property
    def others(self) -> list[NodeAddress]:
        return [node for at, node in enumerate(self.nodes) if at != self.place]

    def place_of(self, node_id: str) -> int | None:
        return next((at for at, one in enumerate(self.nodes) if one.node_id == node_id), None)

    def parity_places(self, gatherer: int) -> list[int]:
        """Other nodes with parity of the stripes that one gathers; our own vault is ready."""
        count = len(self.nodes)
        places = [(gatherer + j) % count for j in range(self.parity)]
        return [place for place in places if place != self.place]

    @property
    def mirrored_here(self) -> list[int]:
        """Places whose small state comes here: the m before this one."""
        count = len(self.nodes)
        return [(self.place - back) % count for back in range(1, self.parity + 1)]

    @property
    def mirrors_at(self) -> list[int]:
        """Places to which our small state goes: the m after this one."""
        count = len(self.nodes)
        return [(self.place + ahead) % count for ahead in range(1, self.parity + 1)]

    def whole_part(self, wanted: Version, parts: Iterable[ProtectionPart]) -> int:
        """The generation of the newest whole part of this group's protection of a version, or -1.

        Args:
            wanted: the version.
            parts: what is in the vaults of this node.
        """
        mirrors = {self.nodes[at].node_id for at in self.mirrored_here}
        found = [
            part.protected_in
            for part in parts
            if (part.generation, part.step) == (wanted.generation, wanted.step)
            and part.is_complete
            and (part.members, part.parity) == (self.members, self.parity)
            and set(part.mirrors) == mirrors
        ]
        return max(found, default=-1)


def protecting_of(body: smp_messages.BeginGeneration) -> LocalGroup | None:
    """The group that a generation begins with; None where this node is alone.

    Raises:
        ProtocolError: this node is not in its group.
    """
    if not body.group:
        return None
    places = [at for at, node in enumerate(body.group) if node.node_id == body.node_id]
    if len(places) != 1:
        names = ", ".join(node.node_id for node in body.group)
        raise ProtocolError(f"node {body.node_id} is not once in its group of {names}")
    told = (body.generation, body.world_size, body.parity, body.small_state_bytes, body.group)
    return LocalGroup(
        generation=Generation(body.generation),
        world_size=body.world_size,
        nodes=tuple(body.group),
        place=places[0],
        parity=body.parity,
        small_state_bytes=body.small_state_bytes,
        patience_s=body.patience_s,
        number=xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(told)),
    )


def parity_share(group: LocalGroup | None) -> float:
    """Bytes of parity that a node keeps for each byte of its own state, at most: m/k."""
    if group is None or not group.is_possible:
        return 0.0
    return group.parity / (len(group.nodes) - group.parity)


def rooms_for(
    plan: RedundancyPlan, manifests: dict[int, NodeManifest], group: LocalGroup
) -> dict[int, int]:
    """Bytes to set aside for the mirrors that come here, by place."""
    count = len(group.nodes)
    return {
        place: mirror_room(plan, place, manifests[place], count) for place in group.mirrored_here
    }


def record_of(
    version: Version, plan: RedundancyPlan, rooms: dict[int, int], group: LocalGroup
) -> ParityRecord:
    """What the vault of this version will hold."""
    stripes = Stripes(len(group.nodes), group.parity, plan.block_bytes)
    num_stripes = stripes.num_stripes(max(plan.coded_bytes))
    return ParityRecord(
        generation=version.generation,
        step=version.step,
        world_size=group.world_size,
        protected_in=group.generation,
        members=group.members,
        parity=group.parity,
        place=group.place,
        block_bytes=plan.block_bytes,
        coded_bytes=plan.coded_bytes,
        own=plan.nodes[group.place],
        holders=plan.holders,
        mirrors=[(place, rooms[place]) for place in group.mirrored_here],
        num_rows=stripes.num_parity_blocks(group.place, num_stripes),
    )
