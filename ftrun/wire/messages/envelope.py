"""What a frame on a node may hold: the envelope, and messages that every process knows.

Runs in: every process. Pure.

An `Envelope` says for which run, from which generation and from which life of the sender. A
receiver drops what is older than what it knows. Descriptors travel beside a message
(SCM_RIGHTS); `Envelope.num_fds` says how many.
"""

import msgspec

from ftrun.wire.messages.checkpoint import (
    CheckpointLoaded,
    CheckpointRefused,
    CheckpointWritten,
    EndCheckpoints,
    HurryCheckpoint,
    LoadCheckpoint,
    WriteCheckpoint,
)
from ftrun.wire.messages.faults import FaultTaken, InjectFault
from ftrun.wire.messages.message import Message
from ftrun.wire.messages.smp import (
    AbandonVersion,
    Adopt,
    BeginGeneration,
    CommitVersion,
    HandedOver,
    HandOver,
    Inventory,
    KeepRunState,
    ListenForPeers,
    ListeningForPeers,
    PeersUnreachable,
    RestoreFailed,
    RestoreReady,
    Shutdown,
    SmpNotice,
    TakeInventory,
    VaultFreed,
    VaultMade,
    VersionCommitted,
    VersionReady,
    VoidAfter,
)
from ftrun.wire.messages.worker import (
    ArenaGranted,
    AwaitRestored,
    FetchHeads,
    FetchPieces,
    HeadsFetched,
    ImagesOpened,
    MemoryRefused,
    OpenImages,
    PiecesFetched,
    RequestArena,
    ReserveMemory,
    ShardSealed,
    ShardSkipped,
    WithdrawShard,
)

PROTOCOL_VERSION = 1


class Hello(Message, frozen=True, tag="Hello"):
    """Anyone -> SMP or agent, first on each connection."""

    role: str  # "worker", "agent" or "cli"
    pid: int
    rank: int = -1
    protocol: int = PROTOCOL_VERSION


class Done(Message, frozen=True, tag="Done"):
    """Answer: it is done."""


class Refused(Message, frozen=True, tag="Refused"):
    """Answer: it is not done, and why, in words for the user."""

    why: str


# --- cli -> agent or orphaned SMP -------------------------------------------------------------


class AskStatus(Message, frozen=True, tag="AskStatus"):
    """Cli -> agent or SMP. Answer: Status."""


class Status(Message, frozen=True, tag="Status"):
    """Agent or SMP -> cli: a JSON document, see docs/operations.md."""

    document: bytes


class StopRun(Message, frozen=True, tag="StopRun"):
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
    | VaultFreed
    | PeersUnreachable
    | SmpNotice
    | TakeInventory
    | Inventory
    | VoidAfter
    | HandOver
    | HandedOver
    | Adopt
    | KeepRunState
    | WriteCheckpoint
    | HurryCheckpoint
    | CheckpointWritten
    | CheckpointRefused
    | LoadCheckpoint
    | EndCheckpoints
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
    question: int = 0
    """Its number on this connection, in a question and in the answer to it; 0: it is neither."""
