"""What one agent's membership is told: by the network, by its own node, by the clock.

Runs in:  every agent. Pure.
"""

from dataclasses import dataclass, field

from ftrun.errors import ExitCode
from ftrun.membership.witness import WitnessRegister
from ftrun.monitor.node_fitness import NodeFitness
from ftrun.recovery.commands import QueryWitness
from ftrun.wire.cluster.generation import Edition, NodeCard, VersionPair
from ftrun.wire.cluster.heartbeats import Heartbeat
from ftrun.wire.cluster.messages import AnyClusterMessage
from ftrun.wire.messages.smp import Inventory


@dataclass(frozen=True, slots=True)
class ConnectionOpened:
    """There is a connection to this node now; it takes the place of an older one."""

    node_id: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class ConnectionClosed:
    """The connection to this node is gone. That alone proves nothing."""

    node_id: str


@dataclass(frozen=True, slots=True)
class ConnectFailed:
    """A connection could not be made."""

    host: str
    port: int
    node_id: str
    refused: bool
    """Its kernel answers and nobody listens, or a firewall refuses in its place."""
    why: str
    final: bool = False
    """The two do not belong together (secret, version, name): trying again is no use."""


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A message."""

    node_id: str
    message: AnyClusterMessage


@dataclass(frozen=True, slots=True)
class Quiesced:
    """This node's workers are dead; this is what it holds."""

    generation: int
    holdings: Inventory
    store_port: int
    smp_port: int


@dataclass(frozen=True, slots=True)
class GenerationInstalled:
    """This node is ready for the generation that was announced."""

    generation: int
    restored: VersionPair | None
    problem: str = ""
    checkpoint: str = ""
    """The name of the checkpoint that was loaded; empty: none was."""
    rejected: dict[str, str] = field(default_factory=dict)
    """Checkpoints that this node cannot use: the name of each, and the reason."""
    code: int = int(ExitCode.STATE_LOST)
    """The run's exit code, if the problem ends it."""


@dataclass(frozen=True, slots=True)
class PlanPersisted:
    """The next agent of this node will know of this roster."""

    edition: Edition


@dataclass(frozen=True, slots=True)
class NodeReported:
    """How things are on this node; goes to the lead with the next heartbeat."""

    beat: Heartbeat
    is_urgent: bool = True
    """It goes at once."""


@dataclass(frozen=True, slots=True)
class NodeChecked:
    """This node has checked whether it is fit to run ranks."""

    fitness: NodeFitness


@dataclass(frozen=True, slots=True)
class RanksStuck:
    """Ranks of this node do not die of SIGKILL: it is not fit until they have."""

    reason: str
    """Empty: they have ended."""


@dataclass(frozen=True, slots=True)
class WitnessAnswered:
    """What the outside witness has answered; or that it did not."""

    asked: QueryWitness
    is_reached: bool
    granted: bool = False
    register: WitnessRegister | None = None
    """What it remembers after its answer; None: of no run of this id."""
    lead: NodeCard | None = None
    """Whose lease lives."""
    why: str = ""
    """It is out of reach: why. Or, where `is_final`, why this node has no place here."""
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class RunFinished:
    """The record beside the checkpoints says that the run has ended well: when, in words."""

    why: str


@dataclass(frozen=True, slots=True)
class Passing:
    """Time goes by."""


Happening = (
    ConnectionOpened
    | ConnectionClosed
    | ConnectFailed
    | MessageReceived
    | Quiesced
    | GenerationInstalled
    | PlanPersisted
    | NodeReported
    | NodeChecked
    | RanksStuck
    | WitnessAnswered
    | RunFinished
    | Passing
)
