"""Messages between an agent and its SMP: generations, commits, restore points, handover."""

import msgspec

from ftrun.wire.checkpoint_owner import CheckpointClaim
from ftrun.wire.cluster.generation import Rail
from ftrun.wire.messages.message import Message, VersionMessage


class NodeAddress(msgspec.Struct, frozen=True):
    """A node of a group with its SMP; a port of 0: it is unreachable."""

    node_id: str
    incarnation: int
    host: str
    smp_port: int
    ranks: list[int]
    rails: list[Rail] = []  # over which it is reachable, the best first; empty: `host` only


class PreviousGroup(msgspec.Struct, frozen=True):
    """The group that protects a version to be fetched, with its nodes in their order then."""

    nodes: list[NodeAddress]  # with the ranks that each held then, and its SMP's current address
    parity: int
    generation: int  # in which the version was protected, see `ProtectionPart.protected_in`
    is_ring: bool = False  # each node had a copy of the state of the node before it


class ShardOffer(msgspec.Struct, frozen=True):
    """One sealed slot."""

    rank: int
    generation: int
    step: int
    world_size: int
    image_bytes: int


class GroupMember(msgspec.Struct, frozen=True):
    """A node of a protection group, and the ranks whose state it contributed."""

    node_id: str
    ranks: list[int]


class ProtectionPart(msgspec.Struct, frozen=True):
    """This node's part in the protection of one version by one group."""

    generation: int
    step: int
    world_size: int
    protected_in: int
    """Generation in which the group has protected it. Together with the version and the members it
    identifies the protection: parts with equal identity belong together."""
    members: list[GroupMember]  # in the group's order; the position in it is that in each stripe
    parity: int
    node_id: str
    mirrors: list[str]  # nodes whose small state is here; without any, a node cannot be rebuilt
    is_complete: bool  # all mirrors and parity that belong here are stored
    is_committed: bool  # the version was committed with this protection
    is_ring: bool = False  # a copy of the state of the node before this one is here; parity is 1


class ListenForPeers(Message, frozen=True, tag="ListenForPeers"):
    """Agent -> SMP: open a TCP port for the SMPs of other nodes. Reply: ListeningForPeers.

    A memfd of 32 bytes with the run's secret accompanies the message, if the run has a secret. A
    repeated request with the same hosts and secret gets the same port.
    """

    host: str
    others: list[str] = []  # further own addresses; listens on the same port of each where it can


class ListeningForPeers(Message, frozen=True, tag="ListeningForPeers"):
    """SMP -> agent: peers reach it at this port."""

    port: int


class BeginGeneration(Message, frozen=True, tag="BeginGeneration"):
    """Agent -> SMP, with the command page: members of the generation. Reply: Done, at once.

    A repeated message for the same generation means that the page or the addresses of the group
    have changed, because an SMP was restarted. Transfers between the SMPs then restart.
    """

    generation: int
    world_size: int
    local_ranks: list[int]
    group: list[NodeAddress] = []
    """Protection group of this node in its fixed order, this node included. Empty: the SMP decides
    alone, which is permitted only if all ranks of the world are local."""
    node_id: str = ""  # of this node
    parity: int = 0  # m, how many nodes of the group may be lost; below the number of nodes
    is_ring: bool = False  # each node stores a copy of the state of the node before it
    small_state_bytes: int = 1 << 20  # a rank's unique state up to this size is mirrored, not coded
    restored: tuple[int, int] | None = None
    """Generation and step of the version that all ranks start from. If the generation is running:
    the newest committed version."""
    protected_in: int = -1
    """Generation whose protection the restore relies on. It is retained until the version is
    committed again. -1: the newest committed one."""
    restore_from: list[PreviousGroup] = []  # of that version, for local ranks without a slot of it
    read_from: list[PreviousGroup] = []
    """Sources from which workers read other ranks' shards of it, if the world size is the same.
    Nodes of this generation are included, with the ranks that they run."""
    restored_world_size: int = 0
    """Number of ranks that took it; 0: as many as start now. A version of another world size is
    read from where it is stored, and not protected again. `restore_from` then names all groups that
    held it."""
    timeout_s: float = 10.0  # an SMP that accepts no data or pauses in a frame longer is dropped
    pace_bytes_s: float = 0.0  # limit of protection traffic to all peers together; 0: no limit
    own: NodeAddress | None = None
    """Address of a node without a group. A node that runs no ranks now sends their state to the
    nodes that run them. A node that runs all ranks fetches it."""
    claim: CheckpointClaim | None = None  # of the checkpoint directory, on the node of rank 0
    memory_limit_bytes: int = 0  # limit of the profile for snapshots on this node; 0: none


class VersionReady(VersionMessage, frozen=True, tag="VersionReady"):
    """SMP -> agent, unsolicited: this node has completed its work for this version.

    All local ranks have sealed it (or hold it, if it is the restored version), and the group
    protects it. Never sent without a group. `survives` is the number of nodes of the group that may
    be lost: m, or 0 if it cannot be protected, for the reason `reason`.
    """

    survives: int
    reason: str = ""


class CommitVersion(VersionMessage, frozen=True, tag="CommitVersion"):
    """Agent -> SMP: all nodes have sent VersionReady. No reply, but VersionCommitted follows."""


class AbandonVersion(VersionMessage, frozen=True, tag="AbandonVersion"):
    """Both ways: uncommitted versions of this generation up to this step are never committed.

    SMP -> agent, unsolicited: a local rank has no seal of this step and never will. Agent -> SMP,
    no reply: the same holds for a rank elsewhere. It must not overtake a CommitVersion.
    """


class RestoreReady(VersionMessage, frozen=True, tag="RestoreReady"):
    """SMP -> agent, unsolicited: all local ranks have the restored version in an arena."""


class RestoreFailed(Message, frozen=True, tag="RestoreFailed"):
    """SMP -> agent, unsolicited: the version cannot be fetched; `reason` names what is missing."""

    generation: int  # the one that was begun, not the version's
    reason: str
    is_link: bool = False  # connections to nodes of the plan were lost; a later fetch may succeed


class ParityRegionCreated(Message, frozen=True, tag="ParityRegionCreated"):
    """SMP -> agent, unsolicited, with a memfd: retain a duplicate of a parity region.

    It replaces the last duplicate of this slot. The memory contains what this node stores for
    others: mirrors and parity. Like the arenas, it is passed to the next SMP.
    """

    slot: int


class ParityRegionFreed(Message, frozen=True, tag="ParityRegionFreed"):
    """SMP -> agent, unsolicited: close the duplicate of this slot, because its memory is free."""

    slot: int


class SmpNotice(Message, frozen=True, tag="SmpNotice"):
    """SMP -> agent, unsolicited: an entry for the journal that requires no action."""

    kind: str  # a key of `ftrun.records.snapshots.OF_NOTICE`
    reason: str
    nodes: list[str] = []  # nodes that the notice concerns
    ranks: list[int] = []  # ranks that the notice concerns, if known


class MemoryNeeded(Message, frozen=True, tag="MemoryNeeded"):
    """SMP -> agent, unsolicited: bytes for snapshots, when the requests of the ranks change.

    `arena_bytes` is what the ranks requested and do not have yet, including refused requests.
    `parity_bytes` is the upper bound of what this node stores for other nodes, allocated or not.
    `pool_bytes` is the size of all capture pools, once every rank here has one; 0: ranks capture
    into arenas. When `num_freed` grows, the agent closes its duplicates of arenas that the SMP has
    freed before a commit replaced them.
    """

    arena_bytes: int
    parity_bytes: int = 0
    pool_bytes: int = 0
    num_freed: int = 0


class PeersUnreachable(Message, frozen=True, tag="PeersUnreachable"):
    """SMP -> agent, unsolicited: nodes of the group that are unreachable now."""

    nodes: list[str]


class InventoryRequest(Message, frozen=True, tag="InventoryRequest"):
    """Agent -> SMP: report what can be restored. Reply: Inventory."""

    freeze_versions: bool = False  # until a generation begins, which is planned from the reply


class Inventory(Message, frozen=True, tag="Inventory"):
    """SMP -> agent: sealed slots (`offers`), and everything stored for other nodes (`protected`).

    Incomplete parts are included. `excluded` describes slots that are corrupt and not offered.
    """

    offers: list[ShardOffer]
    protected: list[ProtectionPart] = []
    excluded: list[str] = []


class VoidAfter(VersionMessage, frozen=True, tag="VoidAfter"):
    """Agent -> SMP: void later versions and their parity for good; (-1, -1): all. Reply: Done."""


class HandOverMemory(Message, frozen=True, tag="HandOverMemory"):
    """Agent -> SMP: send duplicates of all memory. Reply: MemoryHandedOver."""


class MemoryHandedOver(Message, frozen=True, tag="MemoryHandedOver"):
    """SMP -> agent, with one memfd per entry of `ranks`, in that order.

    A rank appears twice while a new arena has not replaced the old one; the old one comes first. A
    memfd for each of `parity_slots` follows: the parity regions.
    """

    ranks: list[int]
    run_state: bytes
    parity_slots: list[int] = []


class AdoptMemory(Message, frozen=True, tag="AdoptMemory"):
    """Agent -> new SMP, with one memfd per entry: memory that outlived the previous SMP.

    Sent before BeginGeneration. A rank appears twice if it has an old and a new arena, the old one
    first. Parity regions follow the arenas, each for the slot that it had. Reply: Done, or Refused.
    Refused names the descriptors that are not arenas; the others are adopted.
    """

    ranks: list[int]
    parity_slots: list[int] = []


class PersistRunState(Message, frozen=True, tag="PersistRunState"):
    """Agent -> SMP: store what the next agent must know if this one dies. Reply: Done."""

    run_state: bytes


class VersionCommitted(VersionMessage, frozen=True, tag="VersionCommitted"):
    """SMP -> agent, unsolicited: this version is committed, and visible on the command page."""


class Shutdown(Message, frozen=True, tag="Shutdown"):
    """Agent or cli -> SMP: free all memory and end. Reply: Done."""


SmpMessage = (
    AbandonVersion | AdoptMemory | BeginGeneration | CommitVersion | HandOverMemory | Inventory
    | InventoryRequest | ListenForPeers | ListeningForPeers | MemoryHandedOver | MemoryNeeded
    | ParityRegionCreated | ParityRegionFreed | PeersUnreachable | PersistRunState | RestoreFailed
    | RestoreReady | Shutdown | SmpNotice | VersionCommitted | VersionReady | VoidAfter
)  # fmt: skip
