"""Messages by which agents join a run and agree on the next generation.

Runs in:  every agent. Pure.
Gives:    structs for `ftrun.wire.cluster.messages.ClusterEnvelope`.

Rule 1: A message is repeated until it is answered. Answering it twice changes nothing.
"""

from ftrun.errors import ExitCode
from ftrun.monitor.node_fitness import NodeFitness
from ftrun.wire.cluster.generation import Edition, GenerationPlan, NodeCard, VersionPair
from ftrun.wire.messages.message import Message
from ftrun.wire.messages.smp import Inventory


class Join(Message, frozen=True, tag="Join"):
    """Newcomer -> any reachable agent: request to join, or to learn the leader."""

    card: NodeCard
    nnodes: str
    """`MIN:MAX+SPARES`; must be equal on all nodes."""
    knows: int = -1
    """Newest generation in the newcomer's state."""
    number: int = 0
    """Returned in the reply."""


class JoinPending(Message, frozen=True, tag="Gathering"):
    """Endpoint -> newcomer: wait; these nodes are present."""

    here: list[str]
    needed: int


class LeaderInfo(Message, frozen=True, tag="LeadIs"):
    """Any agent -> newcomer: contact this leader.

    Also leader -> the current host of the endpoint.
    """

    card: NodeCard
    generation: int
    is_settled: bool = True
    """Its generation is chosen; otherwise it proposes one."""


class JoinAccepted(Message, frozen=True, tag="Current"):
    """Leader -> newcomer: accepted; the node takes part from the next generation on."""

    plan: GenerationPlan
    number: int = 0
    """Of the `Join` that this answers."""
    lead: NodeCard | None = None
    """The leader, if it drains and therefore has no vote; None: the plan names it."""


class JoinRejected(Message, frozen=True, tag="TurnedAway"):
    """Any agent -> newcomer: rejected; the reason is in words for the user."""

    why: str


# --- a ballot -------------------------------------------------------------------------------


class Prepare(Message, frozen=True, tag="Prepare"):
    """Proposer -> all nodes: stop your ranks, promise this ballot, and report what you hold."""

    generation: int
    card: NodeCard
    why: str
    knows: Edition
    """Newest configuration id that is chosen in the proposer's state."""


class Promise(Message, frozen=True, tag="Promise"):
    """Voter -> proposer: promise of this ballot."""

    generation: int
    card: NodeCard
    effective: GenerationPlan | None
    """Newest chosen generation in the voter's state, if it is newer than `knows`."""
    accepted: GenerationPlan | None
    """Newer generation that the voter or its predecessor has accepted; not known to be chosen."""
    knows: int
    """Newest generation that the voter or its predecessors have accepted; -1: none, or its memory
    was lost."""
    committed: VersionPair | None
    """Newest committed version in the voter's state."""
    holdings: Inventory
    store_port: int
    smp_port: int
    fitness: NodeFitness | None = None
    """Result of its newest check; None: it makes no checks."""


class PrepareRejected(Message, frozen=True, tag="NotPromised"):
    """Voter -> proposer: no promise."""

    generation: int
    promised: int
    """Highest generation number that the voter has promised to any proposer."""
    lead: NodeCard | None
    """The leader from which the voter receives heartbeats, if there is one."""
    lead_generation: int = -1


class Accept(Message, frozen=True, tag="Announce"):
    """Proposer -> all nodes: accept this plan. Leader -> all nodes: a new voter revision."""

    plan: GenerationPlan


class Accepted(Message, frozen=True, tag="Accepted"):
    """Voter -> proposer: the plan is persisted, and later versions are void.

    The SMP has been informed of the plan.
    """

    generation: int
    restored: VersionPair | None
    """Version that this node starts from. It differs from the plan's only after a checkpoint
    load."""
    problem: str = ""
    roster: int = 0
    checkpoint: str = ""
    """Name of the loaded checkpoint; empty: none was loaded."""
    rejected: dict[str, str] = {}
    """Checkpoints that this node cannot use: names and reasons."""
    code: int = int(ExitCode.STATE_LOST)
    """Exit code of the run, if the problem ends it."""
