"""Messages by which agents join a run, agree on the next generation, and report their state.

Rule 1: A message is repeated until it is answered. Answering it twice changes nothing.
Rule 2: A heartbeat contains the full state, not changes. A lost, late or repeated heartbeat does no
        harm, because the next one repeats everything.
"""

from hashlib import sha256

import msgspec

from ftrun.errors import ExitCode
from ftrun.events import WorkerExit
from ftrun.monitor.node_fitness import NodeFitness
from ftrun.monitor.slow.host_pressure import HostPressure
from ftrun.monitor.slow.samples import NodeSample
from ftrun.monitor.verdicts import RankView
from ftrun.wire.cluster.generation import (
    ConfigurationId,
    GenerationPlan,
    Identity,
    NodeCard,
    VersionPair,
)
from ftrun.wire.messages.message import Message
from ftrun.wire.messages.smp import Inventory


class Join(Message, frozen=True, tag="Join"):
    """Newcomer -> any reachable agent: request to join, or to learn the leader."""

    card: NodeCard
    nnodes: str  # `MIN:MAX+SPARES`; must be equal on all nodes
    knows: int = -1  # newest generation in the newcomer's state
    number: int = 0  # returned in the reply


class JoinPending(Message, frozen=True, tag="JoinPending"):
    """Endpoint -> newcomer: wait; these nodes are present."""

    here: list[str]
    needed: int


class LeaderInfo(Message, frozen=True, tag="LeaderInfo"):
    """Any agent -> newcomer, or leader -> host of the endpoint: contact this leader."""

    card: NodeCard
    generation: int
    is_settled: bool = True  # its generation is chosen; otherwise it proposes one


class JoinAccepted(Message, frozen=True, tag="JoinAccepted"):
    """Leader -> newcomer: accepted; the node takes part from the next generation on."""

    plan: GenerationPlan
    number: int = 0  # of the `Join` that this answers
    leader: NodeCard | None = None  # if it drains, and thus has no vote; None: the plan names it


class JoinRejected(Message, frozen=True, tag="JoinRejected"):
    """Any agent -> newcomer: rejected; the reason is in words for the user."""

    reason: str


# --- a ballot -------------------------------------------------------------------------------


class Prepare(Message, frozen=True, tag="Prepare"):
    """Proposer -> all nodes: stop your ranks, promise this ballot, and report what you hold."""

    generation: int
    card: NodeCard
    reason: str
    knows: ConfigurationId  # newest configuration id that is chosen in the proposer's state
    stay: bool = False  # park the ranks that may stay, and kill only the others
    failed: tuple[int, ...] = ()  # ranks that are at fault, and are killed with `stay` too


class ParkedRank(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A process that is parked: it may run the same rank in the next generation."""

    rank: int
    first_step: int  # the oldest step that it can go back to
    renewals: int  # generations that this process has joined after its first one
    last_step: int = 2**62  # the newest step that it can go to


class Promise(Message, frozen=True, tag="Promise"):
    """Voter -> proposer: promise of this ballot."""

    generation: int
    card: NodeCard
    effective: GenerationPlan | None  # newest chosen in the voter's state, if newer than `knows`
    accepted: GenerationPlan | None  # newer, accepted by it or its predecessor; may not be chosen
    knows: int  # newest that it or its predecessors accepted; -1: none, or memory was lost
    committed: VersionPair | None  # newest committed version in the voter's state
    holdings: Inventory
    store_port: int
    smp_port: int
    fitness: NodeFitness | None = None  # result of its newest check; None: it makes no checks
    life: str = ""  # the run of the generation in `knows`; see `GenerationPlan.life`
    parked: tuple[ParkedRank, ...] = ()  # ranks of this node that may stay
    parked_in: int = -1  # the generation that they have run
    stay_problem: str = ""  # why no rank of this node may stay; empty: there is no such reason


class PrepareRejected(Message, frozen=True, tag="PrepareRejected"):
    """Voter -> proposer: no promise."""

    generation: int
    promised: int  # highest generation number that the voter has promised to any proposer
    leader: NodeCard | None  # the leader from which the voter receives heartbeats, if there is one
    leader_generation: int = -1


class Accept(Message, frozen=True, tag="Accept"):
    """Proposer -> all nodes: accept this plan. Leader -> all nodes: a new voter revision."""

    plan: GenerationPlan


class Accepted(Message, frozen=True, tag="Accepted"):
    """Voter -> proposer: the plan is stored, the SMP has it, and later versions are void."""

    generation: int
    restored: VersionPair | None  # differs from the plan's only after a checkpoint load
    problem: str = ""
    voter_revision: int = 0
    checkpoint: str = ""  # name of the loaded checkpoint; empty: none was loaded
    rejected: dict[str, str] = {}  # checkpoints that this node cannot use: names and reasons
    code: int = int(ExitCode.STATE_LOST)  # exit code of the run, if the problem ends it


class RankReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """State of one rank, for status."""

    rank: int
    pid: int
    state: str
    step: int
    age_s: float
    phase: str = ""
    loss: float | None = None  # as reported by the script
    loss_step: int = 0  # the step of the loss, from 1
    bad_step: int = 0  # first step after which a parameter was not finite; 0: none
    p50_s: float = 0.0  # median duration of its steps; 0: it has completed none
    p99_s: float = 0.0


class HeldVersion(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One version in the memory of a node, for status."""

    generation: int
    step: int
    state: str  # `capturing`, `sealed` or `void`; sealed: by all ranks of the node
    age_s: float | None = None  # seconds since its last seal on this node; None: no rank sealed it
    num_bytes: int = 0  # of its images on this node


class RestartTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Phases of the last restart, known once every local rank has completed a step."""

    stepped_age_s: float  # seconds since the last local rank completed its first step
    total_s: float  # from the stop of the ranks to that step
    restore_s: float
    first_step_s: float


class Heartbeat(Message, frozen=True, tag="Heartbeat"):
    """Member -> leader: state of this node. Sent periodically, and at once after a change."""

    generation: int  # generation whose ranks run here; -1: none
    number: int = 0  # counted by each agent. A lower number than that of the last one is late
    received: int = 0  # number of the last heartbeat received from this leader
    promised: int = -1  # highest generation number that this agent has promised to any proposer
    state: str = "idle"  # `idle`, `running`, `held` (suspended) or `ended`
    step: int = 0
    steps_here: int = 0
    attached: bool = False
    exits: tuple[WorkerExit, ...] = ()
    ready: VersionPair | None = None
    abandoned_step: int = -1
    sealed: tuple[int, int] | None = None  # lowest and highest newest seal, this generation
    committed: VersionPair | None = None  # newest on the local ranks' command page
    at_boundary: bool = False
    requested_every: int = 0
    stops: int = 0  # number of signals on this node that asked for the end of the run
    stop_signal: int = 0
    leaves: bool = False  # only this node was asked to end, as far as is known here: one SIGTERM
    smp_port: int = 0  # port of this node's SMP; it changes when the SMP is restarted
    survives: int = 0  # nodes of its group that may be lost without loss of `ready`
    problem: str = ""  # why this generation cannot continue here, such as a failed fetch
    problem_is_link: bool = False  # the problem is that connections to other nodes were lost
    unreachable: tuple[str, ...] = ()  # nodes that this node's SMP cannot reach now
    unprotected: str = ""
    ranks: tuple[RankReport, ...] = ()
    p99_s: float = 0.0  # of step durations of this node's slowest rank; 0: not known yet
    views: tuple[RankView, ...] = ()  # of the local ranks, while one makes no progress for too long
    troubles: tuple[str, ...] = ()  # recent error counts of this node's network cards and GPUs
    fault: str = ""  # a hardware fault of this node's GPUs, until its agent ends; empty: none
    differs: str = ""  # replicas of this generation have diverged; description in words
    differing_ranks: tuple[int, ...] = ()  # ranks whose replicas differ from the majority's
    sample: NodeSample | None = None  # newest; its number shows the leader whether it is new
    received_s: float = 0.0  # when the heartbeat `received` arrived, on this node's monotonic clock
    sent_s: float = 0.0  # when this heartbeat was sent, on the same clock
    fitness: NodeFitness | None = None  # of its newest check; None: it makes no checks
    repeat_warning: str = ""  # how repeated steps of the local ranks differ, in words
    restart: RestartTimes | None = None
    capture_warning: str = ""  # why local ranks copy from devices slowly, and what to do
    checkpoint: VersionPair | None = None  # newest order of a checkpoint that was executed here
    num_writes: int = 0  # checkpoints that this node is writing
    pressure: HostPressure | None = None  # on this node; None: its kernel reports none
    versions: tuple[HeldVersion, ...] = ()  # in the memory of this node
    file_warning: str = ""  # which files of ftrun.save cannot be written here, and why
    persisted: VersionPair | None = None  # newest checkpoint that this node has completed
    persist_step: int = 0  # a local rank waits for a checkpoint of this step; 0: none waits
    stay_problem: str = ""  # with survivors on: why a local rank could not stay; empty: all can


class CollectiveRing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Order to check sums and links by an all-reduce among these nodes, in this order."""

    number: int  # counted by each leader
    nodes: list[NodeCard]
    num_bytes: int
    leader: Identity = ("", 0)
    generation: int = -1  # in which the leader has given this order

    @property
    def check(self) -> str:
        """Digest of the whole order: two nodes with the same one have the same order."""
        return sha256(msgspec.msgpack.encode(self)).hexdigest()


class LeaderHeartbeat(Message, frozen=True, tag="LeaderHeartbeat"):
    """Leader -> all nodes: state of the run, and orders for this generation."""

    generation: int  # newest chosen generation
    voter_revision: int = 0  # newest chosen voter revision of that generation
    number: int = 0  # counted by each leader. A lower number than that of the last one is late
    is_suspended: bool = False  # its lease has expired, so it may have been replaced
    committed: VersionPair | None = None
    abandoned_step: int = -1
    take_from: int = -1  # no snapshot is taken before this step
    every: int = 0
    every_from_step: int = 0
    stop_after_step: int = -1
    signal: int = 0
    signal_count: int = 0
    checkpoint: VersionPair | None = None  # every node writes its part of this version to disk
    capture_from: int = -1  # from this step on ranks take a snapshot, which all nodes write
    moved: dict[str, int] = {}  # new ports of SMPs that do not listen on the plan's, by node id
    examine: bool = False  # ranks failed: every node reports its ranks' last collectives
    killed: bool = False  # all ranks of this generation must be killed
    checks: dict[str, int] = {}  # nodes outside the generation: number of the check to reach
    leave: tuple[str, ...] = ()  # draining nodes that may leave: nothing on them is needed any more
    incidents: int = 0  # number of incidents opened so far; the next leader continues this count
    collective: CollectiveRing | None = None  # the collective check that is under way
    ended: bool = False
    exit_code: int = 0
    reason: str = ""
    advice: str = ""
    cause: WorkerExit | None = None
    protected: VersionPair | None = None  # newest version that survives the loss of any member
    persisted: VersionPair | None = None  # newest version of which a checkpoint is complete


MembershipMessage = (
    Accept | Accepted | Heartbeat | Join | JoinAccepted | JoinPending | JoinRejected
    | LeaderHeartbeat | LeaderInfo | Prepare | PrepareRejected | Promise
)  # fmt: skip
