"""Messages by which agents find each other, and agree on the next generation.

Runs in:  every agent. Pure.
Gives:    structs for `ftrun.wire.cluster.messages.ClusterEnvelope`.

Rule 1: they are repeated until they are answered, and answering one twice changes nothing.
"""

from ftrun.errors import ExitCode
from ftrun.monitor.node_fitness import NodeFitness
from ftrun.wire.cluster.generation import Edition, GenerationPlan, NodeCard, VersionPair
from ftrun.wire.messages.message import Message
from ftrun.wire.messages.smp import Inventory


class Join(Message, frozen=True, tag="Join"):
    """Anyone -> whoever it has reached: take me in, or tell me who leads."""

    card: NodeCard
    nnodes: str
    """`MIN:MAX+SPARES`: all must say the same."""
    knows: int = -1
    """The newest generation it knows of."""
    number: int = 0
    """Comes back in the answer."""


class JoinPending(Message, frozen=True, tag="Gathering"):
    """Endpoint -> newcomer: wait, these are here."""

    here: list[str]
    needed: int


class LeaderInfo(Message, frozen=True, tag="LeadIs"):
    """Anyone -> newcomer: go there. Also lead -> whoever hosts the endpoint now."""

    card: NodeCard
    generation: int
    is_settled: bool = True
    """It leads a generation that has taken effect; else it tries to bring one about."""


class JoinAccepted(Message, frozen=True, tag="Current"):
    """Lead -> newcomer: you are with us; you take part from the next generation on."""

    plan: GenerationPlan
    number: int = 0
    """Of the `Join` that this answers."""
    lead: NodeCard | None = None
    """The leader, where it has no vote any more because it leaves; None: the plan has it."""


class JoinRejected(Message, frozen=True, tag="TurnedAway"):
    """Anyone -> newcomer: no, and why, in words for the user."""

    why: str


# --- a ballot -------------------------------------------------------------------------------


class Prepare(Message, frozen=True, tag="Prepare"):
    """Proposer -> everyone: end your ranks, promise me this generation, say what you hold."""

    generation: int
    card: NodeCard
    why: str
    knows: Edition
    """The newest that the proposer knows to have taken effect."""


class Promise(Message, frozen=True, tag="Promise"):
    """Voter -> proposer."""

    generation: int
    card: NodeCard
    effective: GenerationPlan | None
    """The newest generation it knows to have taken effect, where that is newer than `knows`."""
    accepted: GenerationPlan | None
    """A newer one that it (or its predecessor) has accepted, of which it does not know that."""
    knows: int
    """The newest generation that it or its predecessors have accepted; -1: none, or its memory
    was lost."""
    committed: VersionPair | None
    """The newest commit it has heard of."""
    holdings: Inventory
    store_port: int
    smp_port: int
    fitness: NodeFitness | None = None
    """Of its newest check; None: it makes none."""


class PrepareRejected(Message, frozen=True, tag="NotPromised"):
    """Voter -> proposer: no."""

    generation: int
    promised: int
    """The highest number it has promised anyone."""
    lead: NodeCard | None
    """Who leads, where it hears somebody who does."""
    lead_generation: int = -1


class Accept(Message, frozen=True, tag="Announce"):
    """Proposer -> everyone: this is the generation I was promised; or its lead: its new roster."""

    plan: GenerationPlan


class Accepted(Message, frozen=True, tag="Accepted"):
    """Voter -> proposer: it is kept, everything later is void, the SMP knows."""

    generation: int
    restored: VersionPair | None
    """What this node will start from; differs from the plan's only after a checkpoint was read."""
    problem: str = ""
    roster: int = 0
    checkpoint: str = ""
    """The name of the checkpoint that was loaded; empty: none was."""
    rejected: dict[str, str] = {}
    """Checkpoints that this node cannot use: the name of each, and the reason."""
    code: int = int(ExitCode.STATE_LOST)
    """The run's exit code, if the problem ends it."""
