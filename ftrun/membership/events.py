"""Events that one agent's membership handles: from the network, its own node, and the clock."""

from dataclasses import dataclass, field

import msgspec

from ftrun.errors import ExitCode
from ftrun.monitor.node_fitness import NodeFitness
from ftrun.recovery.commands import QueryWitness
from ftrun.wire.cluster.generation import (
    ConfigurationId,
    GenerationPlan,
    Identity,
    NodeCard,
    VersionPair,
)
from ftrun.wire.cluster.membership import Heartbeat, ParkedRank
from ftrun.wire.cluster.messages import AnyClusterMessage
from ftrun.wire.messages.smp import Inventory


@dataclass(frozen=True, slots=True)
class ConnectionOpened:
    """A connection to this node is open; it replaces an older one."""

    node_id: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class ConnectionClosed:
    """The connection to this node is closed. That alone proves nothing."""

    node_id: str


@dataclass(frozen=True, slots=True)
class ConnectFailed:
    """A dial failed."""

    host: str
    port: int
    node_id: str
    refused: bool
    """The kernel refused because no process listens, or a firewall refused in its place."""
    reason: str
    final: bool = False
    """The two agents do not match (secret, version, name): another dial is useless."""


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A message arrived from another agent."""

    node_id: str
    message: AnyClusterMessage


@dataclass(frozen=True, slots=True)
class Quiesced:
    """The workers of this node are dead or parked; `holdings` is what the node holds."""

    generation: int
    holdings: Inventory
    store_port: int
    smp_port: int
    parked: tuple[ParkedRank, ...] = ()
    parked_in: int = -1
    """The generation that they have run."""
    stay_problem: str = ""
    """Why none of them may stay; empty: there is no such reason."""


@dataclass(frozen=True, slots=True)
class GenerationInstalled:
    """This node is ready for the announced generation."""

    generation: int
    restored: VersionPair | None
    problem: str = ""
    checkpoint: str = ""
    """Name of the loaded checkpoint; empty: none."""
    rejected: dict[str, str] = field(default_factory=dict)
    """Reasons why this node cannot use a checkpoint, by checkpoint name."""
    code: int = int(ExitCode.STATE_LOST)
    """Exit code of the run, if the problem ends it."""


@dataclass(frozen=True, slots=True)
class PlanPersisted:
    """A voter revision is persisted: the next agent of this node will read it."""

    configuration_id: ConfigurationId


@dataclass(frozen=True, slots=True)
class NodeReported:
    """The state of this node; it is sent to the leader with the next heartbeat."""

    heartbeat: Heartbeat
    is_urgent: bool = True
    """It is sent at once."""


@dataclass(frozen=True, slots=True)
class NodeChecked:
    """This node has checked whether it is fit to run ranks."""

    fitness: NodeFitness


@dataclass(frozen=True, slots=True)
class RanksStuck:
    """Ranks of this node do not die of SIGKILL: the node is unfit until they have ended."""

    reason: str
    """Empty: they have ended."""


class WitnessRegister(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the witness remembers of a run."""

    life: int
    """Incarnation: a random number drawn when the register is created."""
    promised: int
    """The counter of generations."""
    proposer: Identity
    """The proposer that has the promise of that number."""
    plan: GenerationPlan | None = None
    """The newest plan that was accepted, or reported as chosen."""


@dataclass(frozen=True, slots=True)
class WitnessAnswered:
    """An answer of the witness, or that it did not answer."""

    asked: QueryWitness
    is_reached: bool
    granted: bool = False
    register: WitnessRegister | None = None
    """The register after the answer; None: it holds no run of this id."""
    leader: NodeCard | None = None
    """The agent whose lease is valid."""
    reason: str = ""
    """Why the witness is unreachable; if `is_final`, why this node cannot join."""
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class RunFinished:
    """The record next to the checkpoints says that the run ended well; `reason` says when."""

    reason: str


@dataclass(frozen=True, slots=True)
class ClockTick:
    """Time has passed."""


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
    | ClockTick
)
