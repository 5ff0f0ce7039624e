"""Heartbeats between agents: how things are on a member, and what the lead wants of all.

Runs in:  every agent. Pure.
Gives:    structs for `ftrun.wire.cluster.messages.ClusterEnvelope`.

Rule 1: they say how things are, not what has changed. One that is lost, late or repeated does no
        harm: the next one says it all again.
"""

import msgspec

from ftrun.events import WorkerExit
from ftrun.monitor.evidence import RankView
from ftrun.monitor.node_fitness import NodeFitness
from ftrun.monitor.slow.samples import NodeSample
from ftrun.wire.cluster.generation import VersionPair
from ftrun.wire.messages.message import Message


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


class RestartTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The restart that began this generation, known once every rank here has completed a step."""

    stepped_age_s: float
    """Since the last of them completed its first step."""
    total_s: float
    """From the stop of the ranks to that step."""
    restore_s: float
    first_step_s: float


class Heartbeat(Message, frozen=True, tag="Beat"):
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
    sealed: tuple[int, int] | None = None
    """Steps of the newest seal of each rank here, in this generation: the smallest, the largest."""
    committed: VersionPair | None = None
    """The newest version that the ranks here know to be committed."""
    at_boundary: bool = False
    wished_every: int = 0
    stops: int = 0
    """Signals that asked for the end of the run, on this node."""
    stop_signal: int = 0
    leaves: bool = False
    """This node alone was asked to end, as far as it knows: SIGTERM, once."""
    smp_port: int = 0
    """Where this node's SMP listens; another one than before where it was started again."""
    survives: int = 0
    """So many nodes of this node's group may go without loss of `ready`."""
    problem: str = ""
    """Why this generation cannot go on here, such as a fetch that failed."""
    problem_is_link: bool = False
    """It failed because connections to other nodes were lost."""
    unreachable: tuple[str, ...] = ()
    """Nodes that this node's SMP cannot reach now."""
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
    fitness: NodeFitness | None = None
    """Of the newest check of this node; None: it makes none."""
    repeat_warning: str = ""
    """Steps that this node's ranks repeated after a restart differ; in words."""
    restart: RestartTimes | None = None


def beat(here: Heartbeat, **added: object) -> Heartbeat:
    """What a node's hands say of it, with what its membership has to add."""
    return msgspec.structs.replace(here, **added)


def with_state(beat: Heartbeat, state: str) -> Heartbeat:
    """The same with another state."""
    return msgspec.structs.replace(beat, state=state)


class LeaderHeartbeat(Message, frozen=True, tag="LeadBeat"):
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
    leave: tuple[str, ...] = ()
    """Nodes that were asked to leave, and may: nothing of the run is theirs any more."""
    incidents: int = 0
    """So many have been opened; whoever leads next counts on."""
    ended: bool = False
    exit_code: int = 0
    why: str = ""
    advice: str = ""
    cause: WorkerExit | None = None
