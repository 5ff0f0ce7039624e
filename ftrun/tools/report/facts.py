"""What a report says, as values: one run, and each of its incidents.

Times named `_s` within an incident count from the fault's first sign, `began_t_s` and other
`_t_s` are wall times. None means not known: a journal may be of an older version, of one node
only, or torn.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

RESTARTS = ("kill", "respawn", "evict", "rollback")
"""Actions that stop ranks and start them again."""

REPORTED = "reported; nothing was stopped"


@dataclass(frozen=True, slots=True)
class TimelineBar:
    """One stretch of a timeline."""

    name: str
    begin_s: float
    end_s: float
    style: str
    """What it is drawn as: `training`, `hung`, `waiting`, `dead`, `starting`, `restoring`."""
    note: str = ""

    @property
    def took_s(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True)
class RankRow:
    """Ranks that did the same at the same times."""

    label: str
    ranks: tuple[int, ...]
    role: str
    """`culprit`, `victim` or nothing."""
    bars: tuple[TimelineBar, ...]


@dataclass(frozen=True, slots=True)
class StackView:
    """Where a rank was."""

    title: str
    about: str
    frames: tuple[str, ...]
    """The innermost first."""
    own: str = ""
    """The innermost that is the user's own."""


@dataclass(frozen=True, slots=True)
class DelayView:
    """Transfers between ranks, and their duration."""

    senders: tuple[str, ...]
    receivers: tuple[str, ...]
    cells_s: tuple[tuple[float | None, ...], ...]
    """A row for each sender; seconds per megabyte, or of a round trip."""
    title: str
    hot: tuple[tuple[int, int], ...] = ()
    """Cells that the detector has found too slow: number of the row, number of the column."""


@dataclass(frozen=True, slots=True)
class IncidentCost:
    """What an incident has cost, and what a restart from a checkpoint would have."""

    stood_still_s: float | None
    redone_s: float | None
    ranks: int | None
    checkpoint_s: float | None
    checkpoint_how: tuple[str, ...]
    """The numbers that it is the sum of, and what was taken for granted."""

    @property
    def total_s(self) -> float | None:
        if self.stood_still_s is None:
            return None
        return self.stood_still_s + (self.redone_s or 0.0)


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """A line of the journal, for people."""

    t_s: float
    node: str
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class IncidentFacts:
    """One incident, from its first sign until the ranks were training again."""

    number: int
    kind: str
    sentence: str
    began_t_s: float
    noticed_s: float
    recovered_s: float | None
    """Until the first step of every rank; None: not, or not known."""
    outcome: str
    is_planned: bool = False
    is_open: bool = False
    confidence: str = ""
    error_class: str = ""
    """Of the lines that the culprit wrote."""
    culprits: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    victims: tuple[int, ...] = ()
    world_size: int | None = None
    generation: int | None = None
    """The one that failed."""
    step: int | None = None
    steps_lost: int | None = None
    restored: str = ""
    repeated: tuple[str, ...] = ()
    """What the comparison of repeated steps has shown, of each node."""
    action: str = ""
    verified: tuple[str, ...] = ()
    bars: tuple[TimelineBar, ...] = ()
    rows: tuple[RankRow, ...] = ()
    stacks: tuple[StackView, ...] = ()
    delays: DelayView | None = None
    evidence: tuple[str, ...] = ()
    counter_evidence: tuple[str, ...] = ()
    cost: IncidentCost | None = None
    drill: str = ""
    drill_note: str = ""
    injected: str = ""
    """The injected fault that caused this, if any."""
    events: tuple[TimelineEvent, ...] = ()
    paused_s: float = 0.0
    protected_s: float | None = None
    """When the first version of the new generation was committed."""
    log_title: str = ""
    log_lines: tuple[str, ...] = ()
    dumps: str = ""
    """Command that analyses the dumps of the ranks' flight recorders; empty: there are none."""

    @property
    def is_reported(self) -> bool:
        """Nothing was stopped because of it."""
        return self.outcome == REPORTED


@dataclass(frozen=True, slots=True)
class LostTime:
    """A class of time that was not training."""

    name: str
    seconds: float
    about: str


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What happened on one node."""

    name: str
    ranks: tuple[int, ...]
    starts: int
    """Generations that it took part in."""
    blamed: int
    """Incidents of which it, or a rank of it, was the culprit."""


@dataclass(frozen=True, slots=True)
class SnapshotTotals:
    """What the snapshots of a run have cost; counted by its pulses."""

    blocked_s: float
    taken: int
    skipped: int
    discarded: int


@dataclass(frozen=True, slots=True)
class RunFacts:
    """A whole run."""

    run_id: str
    script: str
    torch: str
    state: str
    """`finished`, `failed`, `stopped`, `running`, or `no end in the journal`."""
    verdict: str
    began_t_s: float
    ended_t_s: float
    wall_s: float
    exit_code: int | None = None
    why: str = ""
    world_size: int | None = None
    step: int | None = None
    step_s: float | None = None
    """The median of a step's durations."""
    loss: float | None = None
    goodput: float | None = None
    useful_s: float | None = None
    losses: tuple[LostTime, ...] = ()
    notes: tuple[str, ...] = ()
    """What these figures leave out."""
    failures: int = 0
    mtbf: str = ""
    incidents: tuple[IncidentFacts, ...] = ()
    nodes: tuple[NodeFacts, ...] = ()
    snapshots: SnapshotTotals | None = None
    checkpoints: int = 0
    progress: tuple[tuple[float, int], ...] = ()
    """(wall time, furthest step), in the order of time; falls where steps are done again."""
    marks: tuple[tuple[float, str], ...] = ()
    other_deaths: tuple[str, ...] = ()
    unreadable: int = 0
    launches: int = 1
    left_out: int = 0
    generations: int = 0
    logs: Mapping[str, str] = field(default_factory=dict)
    """Of each node, the folder of its ranks' logs."""
