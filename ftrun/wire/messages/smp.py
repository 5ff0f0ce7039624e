"""Messages between an agent and its SMP: generations, commits, restore points, handing over.

Runs in: agent and SMP. Pure.
"""

from ftrun.wire.checkpoint_owner import CheckpointClaim
from ftrun.wire.messages.message import Message
from ftrun.wire.messages.protected import NodeAddress, PreviousGroup, ProtectionPart, ShardOffer


class ListenForPeers(Message, frozen=True, tag="ListenForPeers"):
    """Agent -> SMP: open a TCP port for the SMPs of other nodes. Answer: ListeningForPeers.

    The run's secret comes beside it as a memfd of 32 bytes, or nothing where the run has none.
    Asked again with the same hosts and secret, the answer is the same port.
    """

    host: str
    others: list[str] = []
    """Further addresses of this node: the same port is listened at on each that can be had."""


class ListeningForPeers(Message, frozen=True, tag="ListeningForPeers"):
    """SMP -> agent: peers reach it at this port."""

    port: int


class BeginGeneration(Message, frozen=True, tag="BeginGeneration"):
    """Agent -> SMP, with the command page: who takes part from now on. Answer: Done, at once.

    Again with the same generation: the page or the places of the group have changed (an SMP was
    started anew); what is under way among the SMPs begins again.

    Args:
        group: the protection group of this node in its fixed order, this node included. Empty:
            the SMP decides alone, which it may only where all ranks of the world are local.
        node_id: this node's own.
        parity: m, so many nodes of the group may go; below the number of nodes.
        small_state_bytes: unique state of a rank up to so much is mirrored, not coded.
        restored: generation and step of the version that all ranks start from. In the middle of
            a generation: the newest that is committed.
        restored_world_size: how many ranks took it. Where it is another number than starts now,
            it is read where it lies and not protected again; `restore_from` names all the groups
            that held it. 0: as many as start now.
        protected_in: the generation whose protection of it the restore relies on; kept until the
            version is committed again. -1: the newest one that was committed.
        restore_from: where that version comes from for local ranks that have no slot of it.
        read_from: where workers read what other ranks have saved of it, where as many ranks start
            as took it; nodes of this generation are among them with the ranks they run.
        patience_s: so long an SMP may take nothing, or stop within a frame, before others give
            it up.
        pace_bytes_s: so many bytes per second this node sends at most to protect a version, to
            all others together; 0: as fast as it goes.
        own: of a node without a group: its place. A node that runs no ranks now gives their state
            to the nodes that run them; one that runs all ranks fetches it.
        claim: the directory of checkpoints, on the node of rank 0; None elsewhere, or without one.
    """

    generation: int
    world_size: int
    local_ranks: list[int]
    group: list[NodeAddress] = []
    node_id: str = ""
    parity: int = 0
    small_state_bytes: int = 1 << 20
    restored: tuple[int, int] | None = None
    protected_in: int = -1
    restore_from: list[PreviousGroup] = []
    read_from: list[PreviousGroup] = []
    restored_world_size: int = 0
    patience_s: float = 10.0
    pace_bytes_s: float = 0.0
    own: NodeAddress | None = None
    claim: CheckpointClaim | None = None


class VersionReady(Message, frozen=True, tag="VersionReady"):
    """SMP -> agent, unasked: all there is to do for this version on this node is done.

    Every local rank has sealed it (or holds it, where it is the restored one) and the group
    protects it. Never sent without a group.

    Args:
        generation: of the version.
        step: of the version.
        survives: so many nodes of the group may go: m, or 0 where it cannot be protected.
        why: where it is 0, in words.
    """

    generation: int
    step: int
    survives: int
    why: str = ""


class CommitVersion(Message, frozen=True, tag="CommitVersion"):
    """Agent -> SMP: every node of the run has said VersionReady. No answer; VersionCommitted."""

    generation: int
    step: int


class AbandonVersion(Message, frozen=True, tag="AbandonVersion"):
    """Both ways: uncommitted versions of this generation up to this step are never committed.

    SMP -> agent, unasked: a rank here has no seal of this step and never will. Agent -> SMP, no
    answer: the same is true of a rank elsewhere. Must not overtake a CommitVersion.
    """

    generation: int
    step: int


class RestoreReady(Message, frozen=True, tag="RestoreReady"):
    """SMP -> agent, unasked: every local rank has the restored version in an arena."""

    generation: int
    step: int


class RestoreFailed(Message, frozen=True, tag="RestoreFailed"):
    """SMP -> agent, unasked: it cannot be fetched; `why` names what is missing.

    Args:
        generation: the one that was begun, not the version's.
        why: rank, version, nodes, and how many of k are there.
        is_link: connections to nodes of the plan were lost; the same fetch may succeed later.
    """

    generation: int
    why: str
    is_link: bool = False


class ParityRegionCreated(Message, frozen=True, tag="VaultMade"):
    """SMP -> agent, unasked, with a memfd: keep a duplicate, in place of the last of this slot.

    It holds what this node keeps for others: mirrors and parity. Like the arenas it is handed to
    the next SMP.
    """

    slot: int


class VaultFreed(Message, frozen=True, tag="VaultFreed"):
    """SMP -> agent, unasked: close the duplicate of this slot, its memory is not needed."""

    slot: int


class SmpNotice(Message, frozen=True, tag="SmpNotice"):
    """SMP -> agent, unasked: something for the journal that asks for no act.

    Args:
        kind: "replicas_differ", "peer_lost", "stalled", "source_set_aside", "unprotected",
            "memory" or "restore".
        why: in words.
        nodes: whom it is about.
        ranks: the same, where it is known.
    """

    kind: str
    why: str
    nodes: list[str] = []
    ranks: list[int] = []


class PeersUnreachable(Message, frozen=True, tag="PeersUnreachable"):
    """SMP -> agent, unasked: the nodes of the group that it cannot reach now."""

    nodes: list[str]


class InventoryRequest(Message, frozen=True, tag="TakeInventory"):
    """Agent -> SMP: what can be restored? Answer: Inventory."""

    stand_still: bool = False
    """A generation is planned from the answer: keep all of it as it is until one begins."""


class Inventory(Message, frozen=True, tag="Inventory"):
    """SMP -> agent: every sealed slot it holds, and what it keeps for others.

    Args:
        offers: sealed slots.
        protected: whole parts of protections; what is incomplete is named too.
        set_aside: in words, what was found corrupt and is offered no more.
    """

    offers: list[ShardOffer]
    protected: list[ProtectionPart] = []
    set_aside: list[str] = []


class VoidAfter(Message, frozen=True, tag="VoidAfter"):
    """Agent -> SMP: versions later than this one never come back. Answer: Done.

    (-1, -1) voids everything. Mirrors and parity of later versions are void as well.
    """

    generation: int
    step: int


class HandOverMemory(Message, frozen=True, tag="HandOver"):
    """Agent -> SMP: give me duplicates of all your memory. Answer: HandedOver."""


class MemoryHandedOver(Message, frozen=True, tag="HandedOver"):
    """SMP -> agent, with one memfd per entry of `ranks`, in that order.

    A rank stands twice while a new arena has not replaced the old one, the old one first. After
    those comes a memfd for each of `vault_slots`: what is kept for other nodes.
    """

    ranks: list[int]
    run_state: bytes
    vault_slots: list[int] = []


class AdoptMemory(Message, frozen=True, tag="Adopt"):
    """Agent -> a new SMP, with one memfd per entry: memory that outlived the last SMP.

    Before BeginGeneration. A rank stands twice where it has an old and a new arena, the old one
    first. Vaults come after the arenas, each for the slot that it had. Answer: Done, or Refused,
    which names what is no arena; the others are kept.
    """

    ranks: list[int]
    vault_slots: list[int] = []


class PersistRunState(Message, frozen=True, tag="KeepRunState"):
    """Agent -> SMP: what the next agent must know if this one dies. Answer: Done."""

    run_state: bytes


class VersionCommitted(Message, frozen=True, tag="VersionCommitted"):
    """SMP -> agent, unasked: this version is committed, and shown on the command page."""

    generation: int
    step: int


class Shutdown(Message, frozen=True, tag="Shutdown"):
    """Agent or cli -> SMP: free everything and end. Answer: Done."""
