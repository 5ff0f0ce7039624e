"""Every message there is, with its direction.

Runs in: every process. Pure.

An `Envelope` says for which run, from which generation and from which life of the sender. A
receiver drops what is older than what it knows. Descriptors travel beside a message
(SCM_RIGHTS); `Envelope.num_fds` says how many.
"""

import msgspec

PROTOCOL_VERSION = 1


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages; the tag on the wire is the name of the class."""


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


# --- agent -> SMP ---------------------------------------------------------------------------


class BeginGeneration(Message, frozen=True):
    """Agent -> SMP, with the command page: who takes part from now on. Answer: Done."""

    generation: int
    world_size: int
    local_ranks: list[int]


class TakeInventory(Message, frozen=True):
    """Agent -> SMP: what can be restored? Answer: Inventory."""


class ShardOffer(msgspec.Struct, frozen=True):
    """One sealed slot."""

    rank: int
    generation: int
    step: int
    world_size: int
    image_bytes: int


class Inventory(Message, frozen=True):
    """SMP -> agent: every sealed slot it holds."""

    offers: list[ShardOffer]


class VoidAfter(Message, frozen=True):
    """Agent -> SMP: versions later than this one never come back. Answer: Done.

    (-1, -1) voids everything.
    """

    generation: int
    step: int


class HandOver(Message, frozen=True):
    """Agent -> SMP: give me duplicates of all your memory. Answer: HandedOver."""


class HandedOver(Message, frozen=True):
    """SMP -> agent, with one memfd per entry of `ranks`, in that order.

    A rank stands twice while a new arena has not replaced the old one, the old one first.
    """

    ranks: list[int]
    run_state: bytes


class Adopt(Message, frozen=True):
    """Agent -> a new SMP, with one memfd per entry: memory that outlived the last SMP.

    Before BeginGeneration. A rank stands twice where it has an old and a new arena, the old one
    first. Answer: Done, or Refused, which names what is no arena; the others are kept.
    """

    ranks: list[int]


class KeepRunState(Message, frozen=True):
    """Agent -> SMP: what the next agent must know if this one dies. Answer: Done."""

    run_state: bytes


class WriteCheckpoint(Message, frozen=True):
    """Agent -> SMP: write the newest committed version there.

    Answer, when it is durable: CheckpointWritten, or CheckpointRefused.
    """

    directory: str
    keep: int


class CheckpointWritten(Message, frozen=True):
    """SMP -> agent."""

    generation: int
    step: int
    path: str
    total_bytes: int
    seconds: float


class CheckpointRefused(Message, frozen=True):
    """SMP -> agent: it is not written, and why. Not `Refused`: other answers may come first."""

    why: str


class LoadCheckpoint(Message, frozen=True):
    """Agent -> SMP: fill the arenas from a checkpoint. Answer: CheckpointLoaded or Refused."""

    directory: str
    world_size: int
    local_ranks: list[int]


class CheckpointLoaded(Message, frozen=True):
    """SMP -> agent: the arenas now hold this version; each came as an ArenaGranted before.

    Its generation is -1: older than all that this run will take. An empty `path` (step -1) means
    that the directory holds no checkpoint. `notes` name what was set aside, for the journal.
    """

    generation: int
    step: int
    path: str
    notes: list[str] = []


class VersionCommitted(Message, frozen=True):
    """SMP -> agent, unasked: every rank has sealed this version."""

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
    | BeginGeneration
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
)


class Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message with its fencing tokens."""

    run_id: str
    generation: int
    incarnation: int
    body: AnyMessage
    num_fds: int = 0
