"""The commands of recovery. Each gives its reason in words that an operator can act on.

Commands of the supervisor concern a whole run. The leader turns them into ballots and into orders
in its heartbeat. Commands of a member concern one node; its executor carries them out.
Commands that the journal holds are records.
"""

from dataclasses import dataclass
from enum import Enum

from ftrun.ids import Version
from ftrun.records.note import Note
from ftrun.records.recovery import DisableComponent as DisableComponent
from ftrun.records.recovery import EndRun as EndRun
from ftrun.records.recovery import KillWorkers as KillWorkers
from ftrun.records.recovery import RequestFinalSnapshot as RequestFinalSnapshot
from ftrun.records.recovery import RespawnSmp as RespawnSmp
from ftrun.records.recovery import RespawnZygote as RespawnZygote
from ftrun.records.recovery import ResumeRanks as ResumeRanks
from ftrun.records.recovery import SignalWorkers as SignalWorkers
from ftrun.records.recovery import SuspendRanks as SuspendRanks
from ftrun.records.recovery import UpdatePeerPorts as UpdatePeerPorts
from ftrun.records.recovery import WithdrawFinalSnapshot as WithdrawFinalSnapshot
from ftrun.wire.cluster.generation import GenerationPlan, VersionPair
from ftrun.wire.cluster.membership import CollectiveRing
from ftrun.wire.cluster.messages import AnyClusterMessage, ProbePathRequest

# --- a whole run: the supervisor's ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartGeneration:
    """Restart all workers from the newest restore point."""

    reason: str
    stay: bool = False
    """Ranks that may keep their processes do so."""
    failed: tuple[int, ...] = ()
    """Ranks that are at fault, and may be alive: they are killed."""


@dataclass(frozen=True, slots=True)
class ExcludeNode:
    """Run no ranks on this node for an hour; precedes a `StartGeneration`."""

    node_id: str
    reason: str
    is_fault: bool = False
    """The hardware of the node is at fault."""

    @property
    def text(self) -> str:
        return f"node {self.node_id} is excluded: {self.reason}"


# --- one node: a member's ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Quiesce:
    """Kill or park this node's workers, and report what it holds. Answer: `Quiesced`."""

    generation: int
    reason: str
    stay: bool = False
    """Ranks that may stay are parked."""
    failed: tuple[int, ...] = ()
    """Ranks that are killed with `stay` too."""


@dataclass(frozen=True, slots=True)
class InstallGeneration:
    """Prepare this generation: void later ones, inform the SMP. Answer: `GenerationInstalled`."""

    plan: GenerationPlan


@dataclass(frozen=True, slots=True)
class PersistPlan:
    """Persist the running generation's plan with its new voters. Answer: `PlanPersisted`."""

    plan: GenerationPlan
    is_chosen: bool


@dataclass(frozen=True, slots=True)
class StartRanks:
    """The generation is chosen: start this node's ranks, if it has any."""

    plan: GenerationPlan


@dataclass(frozen=True, slots=True)
class CommitSnapshot:
    """Commit this version: every node holds and protects it."""

    version: Version


@dataclass(frozen=True, slots=True)
class WriteCheckpointPart:
    """Write this node's part of this version to disk."""

    version: Version


@dataclass(frozen=True, slots=True)
class WriteCapture:
    """Have the ranks take a snapshot from this step on, and write it while it is captured."""

    from_step: int


@dataclass(frozen=True, slots=True)
class ShowLevels:
    """Show the ranks the newest version that any node may be lost with, and the newest on disk."""

    protected: VersionPair | None
    persisted: VersionPair | None


@dataclass(frozen=True, slots=True)
class AbandonStep:
    """Give up the snapshot of this step: some rank has no seal of it and never will."""

    step: int


@dataclass(frozen=True, slots=True)
class SetFirstSnapshotStep:
    """Take no snapshot before this step. Sent before the order that allows the next one."""

    step: int


@dataclass(frozen=True, slots=True)
class SetSnapshotInterval:
    """Take a snapshot every `every` steps, from `from_step` on."""

    every: int
    from_step: int


@dataclass(frozen=True, slots=True)
class InspectRanks:
    """A rank has failed: report the last calls of this node's ranks at once."""


@dataclass(frozen=True, slots=True)
class RunCollectiveCheck:
    """Take part in this check. Answer: `NodeChecked` with the result among its figures."""

    ring: CollectiveRing


@dataclass(frozen=True, slots=True)
class RepeatNodeCheck:
    """Check whether this node is fit to run ranks. Answer: `NodeChecked`."""

    number: int
    """Minimum number of that check."""


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """A line for the journal; with `announce` the operator sees it at once."""

    record: Note
    announce: bool = False


# --- the network ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connect:
    """Dial an agent.

    Answer: `ConnectionOpened` or `ConnectFailed`. An empty node id accepts any agent.
    """

    host: str
    port: int
    node_id: str = ""


@dataclass(frozen=True, slots=True)
class Send:
    """Send to a connected node; without a connection the message is dropped."""

    node_id: str
    message: AnyClusterMessage


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the connection to a node, after everything sent to it."""

    node_id: str


@dataclass(frozen=True, slots=True)
class ProbePath:
    """Probe a path from this node. Answer: `MessageReceived` of a `ProbePathResult`."""

    asks: str
    """The leader's node id."""
    order: ProbePathRequest


# --- the witness ------------------------------------------------------------------------------


class WitnessOperation(Enum):
    """Requests to the witness; witness.py defines its answers."""

    READ = "look"
    """Read the lease and the register."""
    CLAIM = "claim"
    """Become the agent that the others join, unless there is one."""
    RENEW = "keep"
    """As leader of this generation: promise no other proposer for the time of a lease."""
    PROMISE = "promise"
    """Prepare of a ballot: promise this number."""
    ACCEPT = "accept"
    """Accept of a ballot: accept this plan."""
    RECORD = "tell"
    """Store this chosen plan."""
    CLEAR = "forget"
    """Delete the register: the run is over."""


@dataclass(frozen=True, slots=True)
class QueryWitness:
    """Query the witness. Answer: `WitnessAnswered`, also if it is unreachable."""

    operation: WitnessOperation
    asked_s: float
    """Time of the request; a lease counts from then."""
    generation: int = -1
    plan: GenerationPlan | None = None
    begins: bool = False
    """For a promise: no run to resume is known."""


SupervisorCommand = (
    KillWorkers | ExcludeNode | StartGeneration | RequestFinalSnapshot | SignalWorkers | EndRun
)
PartCommand = RespawnSmp | RespawnZygote | DisableComponent
NetworkCommand = Connect | Send | Disconnect
SnapshotCommand = (
    CommitSnapshot
    | WriteCheckpointPart
    | WriteCapture
    | ShowLevels
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
    | WithdrawFinalSnapshot
    | SignalWorkers
    | EndRun
    | JournalEntry
)
CheckCommand = RepeatNodeCheck | RunCollectiveCheck
Command = NetworkCommand | NodeCommand | CheckCommand | ProbePath | QueryWitness
"""A node check runs in its own thread, as do path probes and witness queries: the executor runs
none of them."""
