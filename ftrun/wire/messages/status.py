"""The status document of a run: one typed value from the agent to all readers.

Runs in:  agent, which builds it; the command line and the tools, which decode it. Pure.

The JSON form is what `ftrun status --json` prints; docs/operations.md describes each field. A field
that is None is not known.
"""

from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from ftrun.errors import ProtocolError
from ftrun.monitor.repeat_check import Repeat
from ftrun.wire.cluster.generation import NetworkPlan, PathMeasurement, Rail

STALE_S = 2.0  # if the status of a node is at least this old, the summary names its age
CLOSED = "closed"  # state of an incident that is over; an open one has that of the run


class RankStatus(msgspec.Struct, frozen=True):
    """One rank."""

    rank: int
    pid: int = 0
    state: str = ""  # `starting`, `running`, `stopped`, `parked`, `finished` or `ended`
    step: int | None = None
    heartbeat_age_s: float | None = None  # seconds since its last step
    phase: str = ""
    loss: float | None = None  # as reported by the script
    start: str | None = None  # `warm`, `fresh` or `stayed`; known on the node of the rank only
    step_p50_s: float | None = None
    step_p99_s: float | None = None
    lateness_s: float | None = None
    last_collective: str | None = None


class RestartStatus(msgspec.Struct, frozen=True):
    """One restart of the ranks."""

    generation: int
    cause: str = ""
    age_s: float = 0.0
    restored: str | None = None  # version; None: the ranks began at the script's beginning
    phases_s: dict[str, float] | None = None  # phases on this node
    repeated: Repeat | None = None
    downtime_s: float | None = None  # from the fault to the next step of every rank


class RestartBudgetStatus(msgspec.Struct, frozen=True):
    """Restarts within the sliding window, and their limit."""

    used: int
    limit: int
    window_s: float | None = None  # None: the limit applies to the whole run


class IncidentStatus(msgspec.Struct, frozen=True):
    """One incident, open or closed."""

    number: int
    state: str = CLOSED
    age_s: float = 0.0  # seconds since it began, or since it was closed
    text: str = ""
    verdict_kind: str | None = None
    confidence: str | None = None
    culprits: tuple[int, ...] = ()
    victims: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()
    generations: tuple[int, ...] = ()  # generations that were started because of it
    detected_s: float | None = None
    recovered_s: float | None = None
    steps_lost: int | None = None
    error_class: str = ""  # of the lines that the culprit wrote; empty: none

    @property
    def is_open(self) -> bool:
        return self.state != CLOSED


class SnapshotStatus(msgspec.Struct, frozen=True):
    """Snapshots on this node; the newest committed version is that of the run."""

    protected: bool = False
    unprotected_reason: str = ""
    note: str = ""  # last remark of a rank
    step: int | None = None
    generation: int | None = None  # of the newest committed version; -1: from a checkpoint
    age_s: float | None = None
    bytes_per_rank: int = 0
    memory_bytes: int = 0
    redundancy_bytes: int = 0  # part of `memory_bytes` that holds mirrors and parity of other nodes
    needed_bytes: int = 0  # upper bound of what is needed in addition to `memory_bytes`
    taken: int = 0
    skipped: int = 0
    discarded: int = 0
    blocked_s: float = 0.0
    every: int = 0  # steps between two snapshots; 0: a new interval is not used yet


class VersionState(StrEnum):
    """State of a version; terms as in docs/glossary.md."""

    CAPTURING = "capturing"
    """Not every rank has sealed it."""
    SEALED = "sealed"
    COMMITTED = "committed"
    OBSOLETE = "obsolete"
    """Older than the committed version: the next snapshot overwrites it."""
    VOID = "void"
    """It must not be restored."""
    PROTECTED = "protected"
    """Other nodes can rebuild the part of a lost node."""
    PERSISTED = "persisted"
    """There is a whole checkpoint of it."""


class VersionStatus(msgspec.Struct, frozen=True):
    """One version that memory or disk holds."""

    generation: int
    step: int
    states: tuple[VersionState, ...] = ()
    age_s: float | None = None  # seconds since it was sealed, or written
    num_bytes: int = 0  # of all its images, or of the files
    nodes: dict[str, VersionState] = {}  # its state on each node; empty: the same on all of them
    note: str = ""  # such as why a checkpoint cannot be used


class CheckpointStatus(msgspec.Struct, frozen=True):
    """The newest checkpoint that this agent has written."""

    directory: str
    step: int | None = None
    age_s: float | None = None
    last_error: str = ""  # why the checkpoint after it was not written
    num_writes: int = 0  # checkpoints that are being written
    skipped: int = 0  # due versions that the storage had no time for


class ProcessIds(msgspec.Struct, frozen=True):
    """Process ids on this node; None: no such child of this agent."""

    agent: int | None = None
    zygote: int | None = None
    smp: int | None = None


class NetworkFindingText(msgspec.Struct, frozen=True):
    """One finding of a survey."""

    kind: str = ""
    culprit: str = ""
    sentence: str = ""


class NetworkPlanStatus(msgspec.Struct, frozen=True):
    """Rails, node order and snapshot rail of the network plan; see `wire.cluster.rails`."""

    order: tuple[str, ...] = ()
    rails: tuple[str, ...] = ()
    dropped: dict[str, str] = {}
    snapshot_rail: str = ""
    snapshot_bytes_per_s: int = 0
    leaf_switches: dict[str, str] = {}
    leaf_source: str = ""
    reasons: tuple[str, ...] = ()


def plan_status(plan: NetworkPlan) -> NetworkPlanStatus:
    return NetworkPlanStatus(
        order=tuple(plan.order),
        rails=tuple(plan.rails),
        dropped=dict(plan.dropped),
        snapshot_rail=plan.snapshot_rail,
        snapshot_bytes_per_s=plan.snapshot_bytes_per_s,
        leaf_switches=dict(plan.leaves),
        leaf_source=plan.leaves_from,
        reasons=tuple(plan.words),
    )


class NetworkStatus(msgspec.Struct, frozen=True):
    """The paths between the nodes; docs/network.md describes it. Also kept as network.json."""

    mode: str = "report"
    probed_s: float = 0.0  # duration of the survey
    age_s: float | None = None  # seconds since the end of the survey
    coverage: float = 0.0  # share of all paths that was probed
    rails: dict[str, tuple[Rail, ...]] = {}  # rails of each node, by node id
    paths: tuple[PathMeasurement, ...] = ()  # the worst first; of a large number only the worst
    num_paths: int = 0  # number of measured paths, including those that are left out
    findings: tuple[NetworkFindingText, ...] = ()
    plan: NetworkPlanStatus | None = None
    is_applied: bool = False

    @property
    def chosen(self) -> NetworkPlanStatus:
        return self.plan or NetworkPlanStatus()


class WitnessStatus(msgspec.Struct, frozen=True):
    """Connection of an agent to the witness."""

    reachable: bool
    since_s: float = 0.0  # seconds since it became reachable or unreachable
    reason: str = ""
    is_voter: bool = False
    promised: int | None = None


class NodeStatus(msgspec.Struct, frozen=True):
    """One node, as the leader knows it."""

    node_id: str
    host: str = ""
    role: str = "member"  # `member`, `spare`, `joining`, `lost` or `left`
    failure_reason: str = ""
    last_heartbeat_age_s: float = 0.0  # of a node lost under an earlier leader: since the loss
    state: str = "unknown"  # `running`, `idle`, `suspended` or `unknown`
    step: int | None = None
    ready: tuple[int, int] | None = None  # newest version sealed by its ranks: generation, step
    unprotected_reason: str = ""
    domain: str = ""
    preflight: str = ""  # `fit`, or the problem; empty: not checked
    stay_problem: str = ""  # with survivors on: why a rank of it could not stay
    ranks: tuple[RankStatus, ...] = ()


class ExclusionStatus(msgspec.Struct, frozen=True):
    """A node that gets no ranks."""

    node_id: str
    reason: str = ""
    left_s: float | None = None  # seconds until it may run ranks; None: while it reports a fault


class ClusterStatus(msgspec.Struct, frozen=True):
    """The whole run; complete if the leader built it."""

    state: str
    summary: str
    leader: str | None = None
    answered_by: str = ""
    role: str = ""
    """Of the node that answered: `joining`, `bootstrapping`, `following`, `electing`, `leading`,
    `ended`."""
    generation: int | None = None
    requested_size: str = ""
    witness: WitnessStatus | None = None
    nodes: tuple[NodeStatus, ...] = ()
    committed_version: tuple[int, int] | None = None
    tolerated_losses: int | None = None  # number of nodes of each protection group that may be lost
    unprotected_reason: str = ""
    groups: tuple[tuple[str, ...], ...] = ()
    parity: int = 0
    is_mirrored: bool = False  # each node of a group has a copy of the state of the node before it
    lifecycle: str | None = None
    incidents: tuple[IncidentStatus, ...] = ()
    restarts: tuple[RestartStatus, ...] = ()
    warnings: tuple[str, ...] = ()
    pause_reason: str = ""
    exclusions: tuple[ExclusionStatus, ...] = ()
    unfit: dict[str, str] = {}
    network: NetworkStatus | None = None
    note: str = ""
    versions: tuple[VersionStatus, ...] = ()

    @property
    def is_protected(self) -> bool:
        return bool(self.tolerated_losses) and not self.unprotected_reason


class StatusView(msgspec.Struct, frozen=True):
    """The status of a run, as one node answers it."""

    run_id: str
    state: str  # `starting`, `running`, `restarting`, `stopping`, `ending`, `paused` or `orphaned`
    summary: str
    generation: int | None = None
    uptime_s: float | None = None  # seconds since this agent started; None: no agent answered
    age_s: float | None = None  # age of this node's part
    script: str = ""
    lifecycle: str | None = None
    restart_budget: RestartBudgetStatus | None = None
    incidents: tuple[IncidentStatus, ...] = ()
    restarts: tuple[RestartStatus, ...] = ()
    warnings: tuple[str, ...] = ()
    ranks: tuple[RankStatus, ...] = ()
    snapshots: SnapshotStatus | None = None
    checkpoint: CheckpointStatus | None = None
    processes: ProcessIds | None = None
    metrics: str | None = None  # address of /metrics
    journal: str = ""
    cluster: ClusterStatus | None = None
    authenticated: bool | None = None  # in a run over several nodes: the run has a secret
    smp: dict[str, Any] | None = None  # status of the SMP, if no agent answered
    versions: tuple[VersionStatus, ...] = ()  # in memory; with --versions also on disk
    survivors: str = ""  # whether ranks could stay after a failure: `yes`, or `no` and the reason

    @property
    def all_ranks(self) -> tuple[RankStatus, ...]:
        """Ranks of all nodes if they are known, otherwise those of this node."""
        nodes = self.cluster.nodes if self.cluster is not None else ()
        return tuple(rank for node in nodes for rank in node.ranks) if nodes else self.ranks


class SmpStatus(msgspec.Struct, frozen=True):
    """The fields of an SMP's status that other processes read."""

    pid: int | None = None
    bytes: int = 0
    committed: tuple[int, int] | None = None
    orphaned_for_s: float | None = None


T = TypeVar("T", StatusView, SmpStatus, ClusterStatus, NetworkStatus)


def decode_status(document: bytes, kind: type[T], *, source: str) -> T:
    """Raises ProtocolError for another form, such as that of another version of ftrun."""
    try:
        return msgspec.json.decode(document, type=kind)
    except msgspec.DecodeError as error:
        raise ProtocolError(
            f"the status of {source} has another form: {error}. Use the ftrun version that started "
            "the run"
        ) from error
