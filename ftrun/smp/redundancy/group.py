"""The protection group of this node: members, records of parity regions, and notices.

Runs in:  the SMP, in the server thread.
Takes in: the agent's BeginGeneration; the problems that `Protector` finds.
Gives:    a `LocalGroup`; the record of a version's parity region on this node; an SmpNotice
          for the agent's journal when protection fails or is delayed, one for each change.
"""

import logging
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import msgspec
import xxhash

from ftrun.erasure.groups import ProtectionGroup
from ftrun.erasure.stripes import Stripes
from ftrun.errors import ProtocolError
from ftrun.ids import Generation, Version
from ftrun.smp.redundancy.mirror import mirror_space
from ftrun.snapshot.manifest import NodeManifest
from ftrun.snapshot.redundancy import RedundancyPlan
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.messages.smp import GroupMember, NodeAddress, ProtectionPart
from ftrun.wire.shared_memory.parity_region import ParityRecord

MAX_REASONS = 3
"""Limit of the reasons reported per lost node and generation."""

SendToAgent = Callable[..., None]
_log = logging.getLogger(__name__)

_FIGURES = re.compile(r"(?<![\w-])\d[\d.,]*")
"""Not those of names, such as gpu-3."""


@dataclass(frozen=True)
class LocalGroup:
    """The protection group of this node in one generation; m is `parity`.

    Args:
        position: the position of this node.
        number: digest of the other fields except `position` and `timeout_s`; identifies the session
            of the SMPs.
    """

    generation: Generation
    world_size: int
    nodes: tuple[NodeAddress, ...]
    position: int
    parity: int
    small_state_bytes: int
    timeout_s: float
    number: int
    is_ring: bool = False

    @property
    def is_possible(self) -> bool:
        return self.protection.is_protected

    @property
    def protection(self) -> ProtectionGroup:
        names = tuple(node.node_id for node in self.nodes)
        return ProtectionGroup(names, self.parity, self.is_ring)

    @property
    def members(self) -> list[GroupMember]:
        return [GroupMember(node.node_id, list(node.ranks)) for node in self.nodes]

    @property
    def others(self) -> list[NodeAddress]:
        return [node for at, node in enumerate(self.nodes) if at != self.position]

    def position_of(self, node_id: str) -> int | None:
        return next((at for at, one in enumerate(self.nodes) if one.node_id == node_id), None)

    def parity_positions(self, gatherer: int) -> list[int]:
        """Parity nodes of what a node gathers, without this node, whose region is ready."""
        count = len(self.nodes)
        places = [(gatherer + j) % count for j in range(self.parity)]
        return [position for position in places if position != self.position]

    @property
    def mirrored_here(self) -> list[int]:
        """Positions of the nodes whose small state this node stores: the m positions before it."""
        count = len(self.nodes)
        return [(self.position - back) % count for back in range(1, self.parity + 1)]

    @property
    def mirrors_at(self) -> list[int]:
        """Positions of the nodes that store this node's small state: the m positions after it."""
        count = len(self.nodes)
        return [(self.position + ahead) % count for ahead in range(1, self.parity + 1)]

    def whole_part(self, wanted: Version, parts: Iterable[ProtectionPart]) -> int:
        """Return the generation of the newest complete protection of a version, or -1."""
        mirrors = {self.nodes[at].node_id for at in self.mirrored_here}
        found = [
            part.protected_in
            for part in parts
            if (part.generation, part.step) == (wanted.generation, wanted.step)
            and part.is_complete
            and (part.members, part.parity) == (self.members, self.parity)
            and part.is_ring == self.is_ring
            and set(part.mirrors) == mirrors
        ]
        return max(found, default=-1)


def protecting_of(body: smp_messages.BeginGeneration) -> LocalGroup | None:
    """None without a group; raises ProtocolError if this node is not in its group exactly once."""
    if not body.group:
        return None
    places = [at for at, node in enumerate(body.group) if node.node_id == body.node_id]
    if len(places) != 1:
        names = ", ".join(node.node_id for node in body.group)
        raise ProtocolError(f"node {body.node_id} must be in its group exactly once: {names}")
    code = (body.parity, body.is_ring)
    reported = (body.generation, body.world_size, code, body.small_state_bytes, body.group)
    return LocalGroup(
        generation=Generation(body.generation),
        world_size=body.world_size,
        nodes=tuple(body.group),
        position=places[0],
        parity=body.parity,
        small_state_bytes=body.small_state_bytes,
        timeout_s=body.timeout_s,
        number=xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(reported)),
        is_ring=body.is_ring,
    )


def parity_share(group: LocalGroup | None) -> float:
    """Upper bound of the parity bytes that a node stores per byte of its own state: m/k."""
    if group is None or not group.is_possible:
        return 0.0
    return group.parity / group.protection.data


def rooms_for(
    plan: RedundancyPlan, manifests: dict[int, NodeManifest], group: LocalGroup
) -> dict[int, int]:
    count = len(group.nodes)
    return {
        position: mirror_space(plan, position, manifests[position], count)
        for position in group.mirrored_here
    }


def record_of(
    version: Version, plan: RedundancyPlan, rooms: dict[int, int], group: LocalGroup
) -> ParityRecord:
    stripes = group.protection.stripes(plan.block_bytes)
    return ParityRecord(
        generation=version.generation,
        step=version.step,
        world_size=group.world_size,
        protected_in=group.generation,
        members=group.members,
        parity=group.parity,
        position=group.position,
        block_bytes=plan.block_bytes,
        coded_bytes=plan.coded_bytes,
        own=plan.nodes[group.position],
        holders=plan.holders,
        mirrors=[(position, rooms[position]) for position in group.mirrored_here],
        num_rows=stripes.num_rows(group.position, plan.coded_bytes),
        is_ring=group.is_ring,
    )


def stripes_of(record: ParityRecord) -> Stripes:
    return group_of(record).stripes(record.block_bytes)


def num_stripes_of(record: ParityRecord) -> int:
    return stripes_of(record).num_stripes(max(record.coded_bytes))


def group_of(record: ParityRecord) -> ProtectionGroup:
    names = tuple(member.node_id for member in record.members)
    return ProtectionGroup(names, record.parity, record.is_ring)


class GroupNotices:
    """The notices of one group."""

    def __init__(self, send_to_agent: SendToAgent) -> None:
        self._send_to_agent = send_to_agent
        self._lost: dict[str, set[str]] = {}
        """The reasons reported, by node."""
        self._unprotected = ""

    def clear(self) -> None:
        """Reset for another group, or for other positions in it."""
        self._lost.clear()

    def replicas_differ(
        self, at: Version, group: LocalGroup, holders: Collection[tuple[int, int]]
    ) -> None:
        """Report replicas that are no longer equal; `holders` are (position, rank) pairs."""
        nodes = [
            group.nodes[position].node_id
            for position in sorted({position for position, _ in holders})
        ]
        self._send(
            "replicas_differ",
            f"{at}: replicas on several nodes are no longer equal; different on "
            f"{', '.join(nodes)}. They are erasure-coded from now on",
            nodes,
            sorted(rank for _, rank in holders),
        )

    def damaged(self, reason: str, node_id: str) -> None:
        self._send("source_set_aside", reason, [node_id])

    def lost(self, node_id: str, reason: str) -> None:
        """Report that a link to or from a node is lost: each reason once, up to `MAX_REASONS`.

        A peer in a newer generation accepts each connection and closes it. An agent that imports
        torch does not read for many seconds. The first reason, a closed connection, may therefore
        not be the one that the operator needs.
        """
        reported = self._lost.setdefault(node_id, set())
        if reason not in reported and len(reported) < MAX_REASONS:
            reported.add(reason)
            self._send("peer_lost", f"node {node_id}: {reason}", [node_id])

    def stalled(self, at: Version, group: LocalGroup, stored: Collection[int]) -> None:
        late = [node.node_id for position, node in enumerate(group.nodes) if position not in stored]
        reason = f"{at}: no progress for {group.timeout_s:.0f} s; waiting for {', '.join(late)}"
        self._send("stalled", reason, late)

    def unprotected(self, at: Version, reason: str) -> None:
        # The free memory is another one at each snapshot, and no news.
        known = _FIGURES.sub("", reason)
        if known != self._unprotected:
            self._unprotected = known
            _log.warning("%s is not protected: %s", at, reason)
            self._send("unprotected", f"{at}: {reason}", [])

    def protected(self) -> None:
        self._unprotected = ""

    def _send(self, kind: str, reason: str, nodes: list[str], ranks: Sequence[int] = ()) -> None:
        self._send_to_agent(smp_messages.SmpNotice(kind, reason, nodes, list(ranks)))
