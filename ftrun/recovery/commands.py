"""What recovery wants done. Every command says why, in words an operator can act on.

Runs in: agent. Pure.

Those of the supervisor are about a whole run; the lead's part of recovery turns them into
ballots and into what is said to every node. Those of a member are about one node: its hands
carry them out.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from ftrun.events import WorkerExit
from ftrun.ids import Version
from ftrun.wire.cluster.generation import GenerationPlan
from ftrun.wire.cluster.messages import AnyClusterMessage, ProbePathRequest

# --- a whole run: the supervisor's ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KillWorkers:
    """End every worker of this generation at once."""

    journal_kind: ClassVar[str] = "KillWorkers"

    why: str


@dataclass(frozen=True, slots=True)
class StartGeneration:
    """Start all workers again, from the newest restore point."""

    why: str


@dataclass(frozen=True, slots=True)
class RequestFinalSnapshot:
    """Have every rank take a snapshot at one and the same next boundary, and wait there."""

    journal_kind: ClassVar[str] = "AskLastSnapshot"

    why: str
    after_step: int = -1
    """The boundary; -1: the next that no rank of this node has passed."""


@dataclass(frozen=True, slots=True)
class SignalWorkers:
    """Pass a signal to every worker's process group."""

    journal_kind: ClassVar[str] = "SignalWorkers"

    signal: int
    why: str


@dataclass(frozen=True, slots=True)
class EndRun:
    """It is over."""

    journal_kind: ClassVar[str] = "EndRun"

    exit_code: int
    why: str
    cause: WorkerExit | None = None
    advice: str = ""
    goes_on: bool = False
    """It is over on this node alone: the node was asked to leave, or the others have finished."""


# --- one node's own parts ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RespawnSmp:
    """Start another SMP and hand it the memory."""

    journal_kind: ClassVar[str] = "RespawnSmp"

    why: str


@dataclass(frozen=True, slots=True)
class RespawnZygote:
    """Start another warm process."""

    journal_kind: ClassVar[str] = "RespawnZygote"

    why: str


@dataclass(frozen=True, slots=True)
class DisableComponent:
    """Do without a part that keeps dying: `smp` or `zygote`."""

    journal_kind: ClassVar[str] = "GoOnWithout"

    part: str
    why: str


# --- one node: a member's ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Quiesce:
    """End this node's workers and say what it holds: `Quiesced` is the answer."""

    generation: int
    why: str


@dataclass(frozen=True, slots=True)
class InstallGeneration:
    """Prepare this generation: void later ones, inform the SMP. Answer: `GenerationInstalled`."""

    plan: GenerationPlan


@dataclass(frozen=True, slots=True)
class PersistPlan:
    """Keep the plan of the running generation with its new roster. Answer: `PlanPersisted`."""

    plan: GenerationPlan
    took_effect: bool


@dataclass(frozen=True, slots=True)
class StartRanks:
    """It has taken effect: start this node's ranks, where it has any."""

    plan: GenerationPlan
    committed: Version | None = None


@dataclass(frozen=True, slots=True)
class SuspendRanks:
    """Stop this node's ranks where they stand (SIGSTOP), until it is clear who leads."""

    journal_kind: ClassVar[str] = "HoldRanks"

    why: str


@dataclass(frozen=True, slots=True)
class ResumeRanks:
    """Let them go on."""

    journal_kind: ClassVar[str] = "ReleaseRanks"

    why: str


@dataclass(frozen=True, slots=True)
class CommitSnapshot:
    """Every node holds and protects this version."""

    version: Version


@dataclass(frozen=True, slots=True)
class WriteCheckpointPart:
    """Write this node's part of this version to disk."""

    version: Version


@dataclass(frozen=True, slots=True)
class AbandonStep:
    """Some rank has no seal of this step and never will."""

    step: int


@dataclass(frozen=True, slots=True)
class SetFirstSnapshotStep:
    """No snapshot is taken before this step; it comes before the word that frees the ranks."""

    step: int


@dataclass(frozen=True, slots=True)
class SetSnapshotInterval:
    """Snapshots every so many steps, from this step on."""

    every: int
    from_step: int


@dataclass(frozen=True, slots=True)
class UpdatePeerPorts:
    """SMPs were started again and listen elsewhere: new ports by node id."""

    journal_kind: ClassVar[str] = "MovePeers"

    ports: dict[str, int]


@dataclass(frozen=True, slots=True)
class InspectRanks:
    """Some rank has failed: look quickly at what those of this node have called last."""


@dataclass(frozen=True, slots=True)
class RepeatNodeCheck:
    """Check whether this node is fit to run ranks. `NodeChecked` is the answer."""

    number: int
    """Of that check, at least."""


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """A line for the journal; `say` where the operator should see it at once."""

    kind: str
    text: str
    fields: dict[str, object] = field(default_factory=dict)
    say: bool = False


# --- the network ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connect:
    """Connect; `Opened` or `ConnectFailed` is the answer. No node id: whoever is there."""

    host: str
    port: int
    node_id: str = ""


@dataclass(frozen=True, slots=True)
class Send:
    """Send to a node there is a connection to; without one it is dropped."""

    node_id: str
    message: AnyClusterMessage


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the connection to a node, after what was sent to it."""

    node_id: str


@dataclass(frozen=True, slots=True)
class ProbePath:
    """Probe a path from this node. Answer: `MessageReceived` of a `ProbePathResult`."""

    asks: str
    """The lead's node."""
    order: ProbePathRequest


# --- the outside witness ----------------------------------------------------------------------


class WitnessOperation(Enum):
    """What the outside witness is asked for; witness_rules.py says what it answers."""

    LOOK = "look"
    """Who leads, and what is remembered?"""
    CLAIM = "claim"
    """Let me be the one that the others come to, unless there is one."""
    KEEP = "keep"
    """I lead this generation: promise nobody else anything for the time of a lease."""
    PROMISE = "promise"
    """A ballot: this number."""
    ACCEPT = "accept"
    """A ballot: this plan."""
    TELL = "tell"
    """This plan is in effect."""
    FORGET = "forget"
    """The run is over."""


@dataclass(frozen=True, slots=True)
class QueryWitness:
    """Ask the outside witness; `WitnessAnswered` is the answer, also where it is out of reach."""

    wish: WitnessOperation
    asked_s: float
    """When; a lease counts from then."""
    generation: int = -1
    plan: GenerationPlan | None = None
    begins: bool = False
    """Of a promise: no run is known to go on from."""


SupervisorCommand = KillWorkers | StartGeneration | RequestFinalSnapshot | SignalWorkers | EndRun
PartCommand = RespawnSmp | RespawnZygote | DisableComponent
NetworkCommand = Connect | Send | Disconnect
SnapshotCommand = (
    CommitSnapshot
    | WriteCheckpointPart
    | AbandonStep
    | SetFirstSnapshotStep
    | SetSnapshotInterval
    | UpdatePeerPorts
)
NodeCommand = (
    SnapshotCommand
    | Quiesce
    | InstallGeneration
    | PersistPlan
    | StartRanks
    | SuspendRanks
    | ResumeRanks
    | InspectRanks
    | KillWorkers
    | RequestFinalSnapshot
    | SignalWorkers
    | EndRun
    | JournalEntry
)
Command = NetworkCommand | NodeCommand | RepeatNodeCheck | ProbePath | QueryWitness
"""A check is made in a thread of its own, a road is tried and the witness is asked in one: none of
them is an order for the hands."""
