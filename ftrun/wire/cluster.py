"""Every message between agents, with its direction.

Runs in:  every agent. Pure.
Takes in: what a node knows of itself.
Gives:    structs; `ClusterEnvelope` is what a frame between agents holds.

Rule 1: `Beat` and `LeadBeat` say how things are, not what has changed. One that is lost, late or
        repeated does no harm: the next one says it all again.
Rule 2: the messages of a ballot are repeated until they are answered, and answering one twice
        changes nothing.
"""

import msgspec

from ftrun.events import WorkerExit
from ftrun.monitor.evidence import RankView
from ftrun.monitor.fitness import Fitness
from ftrun.monitor.samples import NodeSample
from ftrun.wire.fault_messages import FaultAnswer, FaultOrdered
from ftrun.wire.messages import Inventory, Message

VersionPair = tuple[int, int]
"""(generation, step)."""

Identity = tuple[str, int]
"""Node id and incarnation."""


Edition = tuple[int, int]
"""Generation, and which roster of it: who votes may change while its ranks run."""


class NodeCard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One agent: who it is, and where it is found."""

    node_id: str
    incarnation: int
    """Drawn anew by each agent process."""
    host: str
    port: int
    num_ranks: int
    node_rank: int = -1
    """As the user has given it; -1 where not."""
    domain: str = ""
    """Fault domain, such as a rack."""
    endpoint: bool = False
    """It listens at the rendezvous endpoint."""


class PlanNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A member of a generation with the ranks it runs."""

    card: NodeCard
    first_rank: int

    @property
    def node_id(self) -> str:
        return self.card.node_id

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.card.num_ranks)


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The group in which the restored version was protected, for shards that must be fetched.

    Parity 0 and generation -1: no protection is relied on, the shards lie in these nodes' slots.
    """

    node_ids: list[str]
    ranks: list[list[int]]
    """Those that each of them ran then."""
    parity: int
    generation: int


class Voters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who decides about the successor of a generation."""

    generation: int
    """-1: none has been yet."""
    who: list[Identity]
    roster: int = 0

    @property
    def edition(self) -> Edition:
        return (self.generation, self.roster)


class History(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the next lead must know to be as strict as this one; ages in seconds."""

    restarts: int = 0
    spent_ages_s: list[float] = []
    same_cause: str = ""
    same_cause_count: int = 0
    without_progress: int = 0
    best_step: int = -1
    steps_seen: bool = False
    node_failures: dict[str, list[float]] = {}
    """How long ago each node was lost, by node id."""
    incidents: int = 0
    """So many have been opened."""
    spoiled: VersionPair | None = None
    """This version and later ones hold bad numbers, and are not gone on from."""
    skip_to: int = -1
    """The batches up to this step are left out on the way back; -1: all come again."""


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One generation: who takes part, in which ranks, from which version."""

    generation: int
    lead: str
    why: str
    members: list[PlanNode]
    spares: list[NodeCard]
    restore: VersionPair | None
    restore_why: str
    store_host: str
    store_port: int
    groups: list[list[str]] = []
    """Node ids, each list in the order of its protection group."""
    parity: int = 0
    skip_batches: int = 0
    """So many of each rank are left out after the restored version."""
    restore_world_size: int = 0
    """Ranks that took the restored version."""
    sources: list[Source] = []
    smp_ports: dict[str, int] = {}
    """Where the SMPs listen for each other, of every node that is here."""
    history: History = History()
    decided_by: list[Voters] = []
    """Whose majorities it needs: those of the last generation, and of each later one that may
    have taken effect."""
    committed: VersionPair | None = None
    """The newest version that is known to be committed."""
    ancestry: list[VersionPair] = []
    """Which versions of earlier generations this one has come from: of each the last step."""
    roster: int = 0
    """Counts how often other spares were taken in while this generation ran."""

    @property
    def edition(self) -> Edition:
        return (self.generation, self.roster)

    def is_of(self, other: "Plan") -> bool:
        """Whether both are the same generation, whoever its spares are."""
        same = self.generation == other.generation and self.lead == other.lead
        return same and self.members == other.members

    @property
    def world_size(self) -> int:
        return sum(node.card.num_ranks for node in self.members)

    @property
    def is_alone(self) -> bool:
        """There is one voter."""
        return len(self.members) + len(self.spares) == 1

    @property
    def voters(self) -> list[NodeCard]:
        """Who decides about the next generation, in the order of succession."""
        return [node.card for node in self.members] + self.spares

    @property
    def is_resized(self) -> bool:
        """The restored version is of another number of ranks than this generation has."""
        return self.restore is not None and self.restore_world_size not in (0, self.world_size)

    def protected_in(self, node_id: str) -> int:
        """The generation whose protection of the restored version this node is to keep.

        -1: it has no part in any.
        """
        relied = (one.generation for one in self.sources if node_id in one.node_ids)
        return next(relied, -1)

    def member(self, node_id: str) -> PlanNode | None:
        return next((node for node in self.members if node.node_id == node_id), None)

    def card(self, node_id: str) -> NodeCard | None:
        return next((card for card in self.voters if card.node_id == node_id), None)


# --- finding each other ---------------------------------------------------------------------


class Join(Message, frozen=True):
    """Anyone -> whoever it has reached: take me in, or tell me who leads."""

    card: NodeCard
    nnodes: str
    """`MIN:MAX+SPARES`: all must say the same."""
    knows: int = -1
    """The newest generation it knows of."""
    number: int = 0
    """Comes back in the answer."""


class Gathering(Message, frozen=True):
    """Endpoint -> newcomer: wait, these are here."""

    here: list[str]
    needed: int


class LeadIs(Message, frozen=True):
    """Anyone -> newcomer: go there. Also lead -> whoever hosts the endpoint now."""

    card: NodeCard
    generation: int
    is_settled: bool = True
    """It leads a generation that has taken effect; else it tries to bring one about."""


class Current(Message, frozen=True):
    """Lead -> newcomer: you are with us; you take part from the next generation on."""

    plan: Plan
    number: int = 0
    """Of the `Join` that this answers."""


class TurnedAway(Message, frozen=True):
    """Anyone -> newcomer: no, and why, in words for the user."""

    why: str


# --- a ballot -------------------------------------------------------------------------------


class Prepare(Message, frozen=True):
    """Proposer -> everyone: end your ranks, promise me this generation, say what you hold."""

    generation: int
    card: NodeCard
    why: str
    knows: Edition
    """The newest that the proposer knows to have taken effect."""


class Promise(Message, frozen=True):
    """Voter -> proposer."""

    generation: int
    card: NodeCard
    effective: Plan | None
    """The newest generation it knows to have taken effect, where that is newer than `knows`."""
    accepted: Plan | None
    """A newer one that it (or its predecessor) has accepted, of which it does not know that."""
    knows: int
    """The newest generation that it or its predecessors have accepted; -1: none, or its memory
    was lost."""
    committed: VersionPair | None
    """The newest commit it has heard of."""
    holdings: Inventory
    store_port: int
    smp_port: int
    fitness: Fitness | None = None
    """Of its newest check; None: it makes none."""


class NotPromised(Message, frozen=True):
    """Voter -> proposer: no."""

    generation: int
    promised: int
    """The highest number it has promised anyone."""
    lead: NodeCard | None
    """Who leads, where it hears somebody who does."""
    lead_generation: int = -1


class Announce(Message, frozen=True):
    """Proposer -> everyone: this is the generation I was promised; or its lead: its new roster."""

    plan: Plan


class Accepted(Message, frozen=True):
    """Voter -> proposer: it is kept, everything later is void, the SMP knows."""

    generation: int
    restored: VersionPair | None
    """What this node will start from; differs from the plan's only after a checkpoint was read."""
    problem: str = ""
    roster: int = 0


# --- what is repeated ----------------------------------------------------------------------


class RankReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank, for status."""

    rank: int
    pid: int
    state: str
    step: int
    age_s: float
    phase: str = ""
    loss: float | None = None
    """As the script reports it."""
    bad_step: int = 0
    """The first step after which a parameter was not finite; 0: none."""
    p50_s: float = 0.0
    """Half of its steps took no longer; 0: it has made none."""
    p99_s: float = 0.0


class Beat(Message, frozen=True):
    """Member -> lead: how things are here. Every heartbeat, and at once when something changes."""

    generation: int
    """The one whose ranks run here; -1: none."""
    number: int = 0
    """Counted by each agent: one with a lower number is late."""
    heard: int = 0
    """Number of the newest heartbeat of this lead."""
    promised: int = -1
    """The highest number that this agent has promised anyone."""
    state: str = "idle"
    """`idle`, `running`, `held` or `ended`."""
    step: int = 0
    steps_here: int = 0
    attached: bool = False
    exits: tuple[WorkerExit, ...] = ()
    ready: VersionPair | None = None
    abandoned_step: int = -1
    at_boundary: bool = False
    wished_every: int = 0
    stops: int = 0
    """Signals that asked for the end of the run, on this node."""
    stop_signal: int = 0
    smp_port: int = 0
    """Where this node's SMP listens; another one than before where it was started again."""
    survives: int = 0
    """So many nodes of this node's group may go without loss of `ready`."""
    problem: str = ""
    """Why this generation cannot go on here, such as a fetch that failed."""
    unprotected: str = ""
    ranks: tuple[RankReport, ...] = ()
    p99_s: float = 0.0
    """Of the steps of this node's slowest rank; 0: not known yet."""
    views: tuple[RankView, ...] = ()
    """Looks at the ranks here, while one of them is silent for too long."""
    troubles: tuple[str, ...] = ()
    """What network cards and GPUs of this node have counted lately."""
    differs: str = ""
    """Replicas are not equal any more, in words; of this generation."""
    differing_ranks: tuple[int, ...] = ()
    """Nodes whose replicas are not those of the most."""
    sample: NodeSample | None = None
    """The newest; the lead tells by its number whether it is news."""
    heard_s: float = 0.0
    """When the heartbeat `heard` was heard, on this node's monotonic clock."""
    sent_s: float = 0.0
    """When this one was sent."""
    fitness: Fitness | None = None
    """Of the newest check of this node; None: it makes none."""


def beat(here: Beat, **added: object) -> Beat:
    """What a node's hands say of it, with what its membership has to add."""
    return msgspec.structs.replace(here, **added)


def with_state(beat: Beat, state: str) -> Beat:
    """The same with another state."""
    return msgspec.structs.replace(beat, state=state)


class LeadBeat(Message, frozen=True):
    """Lead -> everyone: how things are, and what is to be done in this generation."""

    generation: int
    """The newest one that has taken effect."""
    roster: int = 0
    """Of that generation; the newest one that has."""
    number: int = 0
    """Counted by each lead: one with a lower number is late."""
    is_held: bool = False
    """This lead may have been replaced without knowing it: ranks are to wait."""
    committed: VersionPair | None = None
    abandoned_step: int = -1
    take_from: int = -1
    """No snapshot is taken before this step."""
    every: int = 0
    every_from_step: int = 0
    stop_after_step: int = -1
    signal: int = 0
    signal_count: int = 0
    checkpoint: VersionPair | None = None
    """Every node writes its part of this version to disk."""
    moved: dict[str, int] = {}
    """SMPs that listen elsewhere than the plan says, by node id."""
    examine: bool = False
    """Ranks have failed, perhaps because of others: every node says what its own called last."""
    killed: bool = False
    """The ranks of this generation are to be dead."""
    checks: dict[str, int] = {}
    """Nodes beside the generation that are to check themselves, by node id: up to this number."""
    incidents: int = 0
    """So many have been opened; whoever leads next counts on."""
    ended: bool = False
    exit_code: int = 0
    why: str = ""
    advice: str = ""
    cause: WorkerExit | None = None


# --- beside it -----------------------------------------------------------------------------


class JournalLines(Message, frozen=True):
    """Member -> lead: lines of its journal, for the merged one."""

    lines: list[str]


class AskClusterStatus(Message, frozen=True):
    """Member -> lead, for an operator on its node. Answer: ClusterStatus."""

    number: int


class ClusterStatus(Message, frozen=True):
    """Lead -> member: a JSON document."""

    number: int
    document: bytes


class AskProbe(Message, frozen=True):
    """Lead -> member: measure the way from you to that node. Answer: ProbeFound."""

    number: int
    receiver: str
    host: str
    port: int


class ProbeFound(Message, frozen=True):
    """Member -> lead: what a probe of a link has found. A figure that is 0 is not known."""

    number: int
    receiver: str
    rtt_s: float = 0.0
    """The shortest of some."""
    to_bytes_per_s: float = 0.0
    from_bytes_per_s: float = 0.0
    problem: str = ""


AnyClusterMessage = (
    Join
    | Gathering
    | LeadIs
    | Current
    | TurnedAway
    | Prepare
    | Promise
    | NotPromised
    | Announce
    | Accepted
    | Beat
    | LeadBeat
    | JournalLines
    | AskClusterStatus
    | ClusterStatus
    | FaultOrdered
    | FaultAnswer
    | AskProbe
    | ProbeFound
)


class ClusterEnvelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message between agents, with its fencing tokens."""

    run_id: str
    generation: int
    incarnation: int
    body: AnyClusterMessage
