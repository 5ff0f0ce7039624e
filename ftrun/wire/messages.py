"""Every message there is, with its direction.

Runs in: every process. Pure.

An `Envelope` says for which run, from which generation and from which life of the sender. A
receiver drops what is older than what it knows. Descriptors travel beside a message
(SCM_RIGHTS); `Envelope.num_fds` says how many.
"""

import msgspec

from ftrun.wire.checkpoint_messages import CheckpointLoaded as CheckpointLoaded
from ftrun.wire.checkpoint_messages import CheckpointRefused as CheckpointRefused
from ftrun.wire.checkpoint_messages import CheckpointWritten as CheckpointWritten
from ftrun.wire.checkpoint_messages import LoadCheckpoint as LoadCheckpoint
from ftrun.wire.checkpoint_messages import WriteCheckpoint as WriteCheckpoint
from ftrun.wire.fault_messages import FaultTaken as FaultTaken
from ftrun.wire.fault_messages import InjectFault as InjectFault
from ftrun.wire.message import Message as Message
from ftrun.wire.protected import GroupMember as GroupMember
from ftrun.wire.protected import NodePlace as NodePlace
from ftrun.wire.protected import OldGroup as OldGroup
from ftrun.wire.protected import Protected as Protected
from ftrun.wire.protected import ShardOffer as ShardOffer

PROTOCOL_VERSION = 1


class Hello(Message, frozen=True):
    """Anyone -> SMP or agent, first on each connection."""

    role: str  # "worker", "agent" or "cli"
    pid: int
    rank: int = -1
    protocol: int = PROTOCOL_VERSION


class Done(Message, frozen=True):
    """Answer: it is done."""


class Refused(Message, frozen=True):
    """Answer: it is not done, and why, in words for the user."""

    why: str


# --- worker -> SMP --------------------------------------------------------------------------


class ReserveMemory(Message, frozen=True):
    """Worker -> SMP, at attach: will two slots of this size fit? Done or MemoryRefused."""

    rank: int
    image_bytes: int


class MemoryRefused(Message, frozen=True):
    """SMP -> worker: two slots for every rank of the node do not fit."""

    needed_bytes: int
    available_bytes: int
    limit: str


class RequestArena(Message, frozen=True):
    """Worker -> SMP: memory for a layout. ArenaGranted with one descriptor, or MemoryRefused."""

    rank: int
    world_size: int
    image_bytes: int
    num_pieces: int
    layout_id: int


class ArenaGranted(Message, frozen=True):
    """SMP -> worker, with the memfd; also SMP -> agent, which keeps a duplicate."""

    rank: int
    layout_id: int


class ShardSealed(Message, frozen=True):
    """Worker -> SMP: this rank's shard of a version is sealed. No answer."""

    rank: int
    generation: int
    step: int
    layout_id: int


class WithdrawShard(Message, frozen=True):
    """Worker -> SMP: forget my seal of this version, I am about to overwrite it.

    A rank that skipped or discarded a version which the others have sealed would stop them for
    good: theirs is never committed, and what is not committed is not overwritten. Answer: Done,
    it will never be committed; Refused, it is committed, or about to be.
    """

    rank: int
    generation: int
    step: int


class ShardSkipped(Message, frozen=True):
    """Worker -> SMP: a snapshot of this step fell due and I have taken none. No answer.

    Whoever has seen the last commit a moment earlier may have taken it, and waits for the rest.
    """

    rank: int
    generation: int
    step: int


class AwaitRestored(Message, frozen=True):
    """Worker -> SMP: the arena with this version, which is still on its way from other nodes.

    Answer, when it has come: ArenaGranted with the descriptor; or Refused, where it cannot come.
    """

    rank: int
    generation: int
    step: int


class OpenImages(Message, frozen=True):
    """Worker -> SMP: every shard of a version that another number of ranks has taken.

    Answer: ImagesOpened with a read-only descriptor for each rank, or Refused.
    """

    rank: int
    generation: int
    step: int
    world_size: int


class ImagesOpened(Message, frozen=True):
    """SMP -> worker, with one memfd per entry: arenas in which the version is sealed.

    Args:
        ranks: of the old world, in the order of the descriptors; those that are here.
    """

    ranks: list[int]


class FetchHeads(Message, frozen=True):
    """Worker -> SMP: heads of shards of a version that are on other nodes, or were on lost ones.

    Answer: HeadsFetched with a memfd for each of them (see wire/shard_heads.py), or Refused.

    Args:
        ranks: of the old world.
    """

    rank: int
    generation: int
    step: int
    ranks: list[int]


class HeadsFetched(Message, frozen=True):
    """SMP -> worker, with one memfd per entry."""

    ranks: list[int]


class FetchPieces(Message, frozen=True):
    """Worker -> SMP: pieces of such shards, after their heads; no more than 64 MiB in all.

    Answer: PiecesFetched with a memfd that holds them one after the other, or Refused. The
    worker compares each with its digest.

    Args:
        wanted: (old rank, first piece, how many).
    """

    rank: int
    generation: int
    step: int
    wanted: list[tuple[int, int, int]]


class PiecesFetched(Message, frozen=True):
    """SMP -> worker, with one memfd."""

    num_bytes: int


# --- agent -> SMP ---------------------------------------------------------------------------


class ListenForPeers(Message, frozen=True):
    """Agent -> SMP: open a TCP port for the SMPs of other nodes. Answer: ListeningForPeers.

    The run's secret comes beside it as a memfd of 32 bytes, or nothing where the run has none.
    Asked again with the same host and secret, the answer is the same port.
    """

    host: str


class ListeningForPeers(Message, frozen=True):
    """SMP -> agent: peers reach it at this port."""

    port: int


class BeginGeneration(Message, frozen=True):
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
        patience_s: so long an SMP may take nothing, or stop within a frame, before others give
            it up.
        pace_bytes_s: so many bytes per second this node sends at most to protect a version; 0: as
            fast as it goes.
    """

    generation: int
    world_size: int
    local_ranks: list[int]
    group: list[NodePlace] = []
    node_id: str = ""
    parity: int = 0
    small_state_bytes: int = 1 << 20
    restored: tuple[int, int] | None = None
    protected_in: int = -1
    restore_from: list[OldGroup] = []
    restored_world_size: int = 0
    patience_s: float = 10.0
    pace_bytes_s: float = 0.0


class VersionReady(Message, frozen=True):
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


class CommitVersion(Message, frozen=True):
    """Agent -> SMP: every node of the run has said VersionReady. No answer; VersionCommitted."""

    generation: int
    step: int


class AbandonVersion(Message, frozen=True):
    """Both ways: uncommitted versions of this generation up to this step are never committed.

    SMP -> agent, unasked: a rank here has no seal of this step and never will. Agent -> SMP, no
    answer: the same is true of a rank elsewhere. Must not overtake a CommitVersion.
    """

    generation: int
    step: int


class RestoreReady(Message, frozen=True):
    """SMP -> agent, unasked: every local rank has the restored version in an arena."""

    generation: int
    step: int


class RestoreFailed(Message, frozen=True):
    """SMP -> agent, unasked: it cannot be fetched; `why` names what is missing.

    Args:
        generation: the one that was begun, not the version's.
        why: rank, version, nodes, and how many of k are there.
    """

    generation: int
    why: str


class VaultMade(Message, frozen=True):
    """SMP -> agent, unasked, with a memfd: keep a duplicate, in place of the last of this slot.

    It holds what this node keeps for others: mirrors and parity. Like the arenas it is handed to
    the next SMP.
    """

    slot: int


class SmpNotice(Message, frozen=True):
    """SMP -> agent, unasked: something for the journal that asks for no act.

    Args:
        kind: "replicas_differ", "peer_lost", "stalled", "source_set_aside", "unprotected" or
            "restore".
        why: in words.
        nodes: whom it is about.
        ranks: the same, where it is known.
    """

    kind: str
    why: str
    nodes: list[str] = []
    ranks: list[int] = []


class TakeInventory(Message, frozen=True):
    """Agent -> SMP: what can be restored? Answer: Inventory."""

    stand_still: bool = False
    """A generation is planned from the answer: keep all of it as it is until one begins."""


class Inventory(Message, frozen=True):
    """SMP -> agent: every sealed slot it holds, and what it keeps for others.

    Args:
        offers: sealed slots.
        protected: whole parts of protections; what is incomplete is named too.
        set_aside: in words, what was found corrupt and is offered no more.
    """

    offers: list[ShardOffer]
    protected: list[Protected] = []
    set_aside: list[str] = []


class VoidAfter(Message, frozen=True):
    """Agent -> SMP: versions later than this one never come back. Answer: Done.

    (-1, -1) voids everything. Mirrors and parity of later versions are void as well.
    """

    generation: int
    step: int


class HandOver(Message, frozen=True):
    """Agent -> SMP: give me duplicates of all your memory. Answer: HandedOver."""


class HandedOver(Message, frozen=True):
    """SMP -> agent, with one memfd per entry of `ranks`, in that order.

    A rank stands twice while a new arena has not replaced the old one, the old one first. After
    those come `num_vaults` memfds more: what is kept for other nodes.
    """

    ranks: list[int]
    run_state: bytes
    num_vaults: int = 0


class Adopt(Message, frozen=True):
    """Agent -> a new SMP, with one memfd per entry: memory that outlived the last SMP.

    Before BeginGeneration. A rank stands twice where it has an old and a new arena, the old one
    first. Vaults come after the arenas. Answer: Done, or Refused, which names what is no arena;
    the others are kept.
    """

    ranks: list[int]
    num_vaults: int = 0


class KeepRunState(Message, frozen=True):
    """Agent -> SMP: what the next agent must know if this one dies. Answer: Done."""

    run_state: bytes


class VersionCommitted(Message, frozen=True):
    """SMP -> agent, unasked: this version is committed, and shown on the command page."""

    generation: int
    step: int


class Shutdown(Message, frozen=True):
    """Agent or cli -> SMP: free everything and end. Answer: Done."""


# --- cli -> agent or orphaned SMP -------------------------------------------------------------


class AskStatus(Message, frozen=True):
    """Cli -> agent or SMP. Answer: Status."""


class Status(Message, frozen=True):
    """Agent or SMP -> cli: a JSON document, see docs/operations.md."""

    document: bytes


class StopRun(Message, frozen=True):
    """Cli -> agent: stop as on SIGTERM. Answer: Done, before the stop has ended."""


AnyMessage = (
    Hello
    | Done
    | Refused
    | ReserveMemory
    | MemoryRefused
    | RequestArena
    | ArenaGranted
    | ShardSealed
    | WithdrawShard
    | ShardSkipped
    | AwaitRestored
    | OpenImages
    | ImagesOpened
    | FetchHeads
    | HeadsFetched
    | FetchPieces
    | PiecesFetched
    | ListenForPeers
    | ListeningForPeers
    | BeginGeneration
    | VersionReady
    | CommitVersion
    | AbandonVersion
    | RestoreReady
    | RestoreFailed
    | VaultMade
    | SmpNotice
    | TakeInventory
    | Inventory
    | VoidAfter
    | HandOver
    | HandedOver
    | Adopt
    | KeepRunState
    | WriteCheckpoint
    | CheckpointWritten
    | CheckpointRefused
    | LoadCheckpoint
    | CheckpointLoaded
    | VersionCommitted
    | Shutdown
    | AskStatus
    | Status
    | StopRun
    | InjectFault
    | FaultTaken
)


class Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message with its fencing tokens."""

    run_id: str
    generation: int
    incarnation: int
    body: AnyMessage
    num_fds: int = 0
