"""Records of incidents and of the life cycle, which only the leader writes."""

import msgspec

from ftrun.monitor.slow.links import DelayTableCell
from ftrun.monitor.verdicts import RankView, Verdict
from ftrun.records.note import Note, Seconds, Whole


class IncidentNote(Note, frozen=True):
    """A record of one incident."""

    incident: Whole


class SuspicionRaised(IncidentNote, frozen=True, tag="suspicion_raised"):
    """No rank makes a step, and stacks are being read."""

    ranks: tuple[int, ...]
    unresponsive_s: Seconds
    deadline_s: Seconds


class VerdictRecord(IncidentNote, frozen=True, tag="verdict"):
    """A diagnosis, or a changed one."""

    verdict: Verdict
    step: Whole | None = None  # furthest step of any rank, as known to the leader
    ranks: tuple[RankView, ...] = ()  # with whole stacks of the culprits and of one victim
    matrix: tuple[DelayTableCell, ...] = ()


class AdditionalFinding(IncidentNote, frozen=True, tag="additional_finding"):
    """Another finding during an open incident."""


class ActionTaken(IncidentNote, frozen=True, tag="action_taken"):
    """What was done, and why."""

    action: str


class Downtime(msgspec.Struct, frozen=True):
    """The downtime of an incident in seconds, and its four parts, which add up to the total.

    It begins with the fault: the end of a process as the kernel reports it, or the last sign of
    life of a process that then became unresponsive. It ends when every rank has completed its next
    step, whether that step is new or repeated.
    """

    total_s: float
    detection_s: float  # from the fault to the verdict
    restart_s: float  # stop the ranks, choose what to restore, start, connect, set up the script
    restore_s: float
    first_step_s: float

    def rounded(self) -> "Downtime":
        return Downtime(*(round(value, 3) for value in msgspec.structs.astuple(self)))

    def plus(self, other: "Downtime") -> "Downtime":
        parts = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return Downtime(*(one + another for one, another in parts))

    @property
    def text(self) -> str:
        one = self.rounded()  # as in the journal: 0.1749 s must not be 0.17 here and 0.18 there
        return (
            f"training again {one.total_s:.2f} s after the fault (detection "
            f"{one.detection_s:.2f} s, restart {one.restart_s:.2f} s, restore "
            f"{one.restore_s:.2f} s, first step {one.first_step_s:.2f} s)"
        )


class IncidentVerification(msgspec.Struct, frozen=True):
    """Whether the run is as before the incident."""

    progress: bool
    loss: str


class IncidentClosed(IncidentNote, frozen=True, tag="incident_closed"):
    """All ranks are past the step they had reached, or the run has ended."""

    verdict_kind: str
    culprits: tuple[int, ...]
    nodes: tuple[str, ...]
    verified: IncidentVerification
    action: str  # the last one
    actions: tuple[str, ...]
    open_s: Seconds
    detected_s: Seconds | None = None
    recovered_s: Seconds | None = None  # the downtime
    downtime: Downtime | None = None
    steps_lost: Whole | None = None
    restored: Whole | None = None  # step from which the ranks began again
    generations: tuple[int, ...] = ()  # generations that were started because of it
    error_class: str = ""  # of the lines that the culprit wrote; empty: none


class LifecycleChanged(Note, frozen=True, tag="lifecycle_changed"):
    """The run is in another state of its life cycle."""

    incident: Whole | None
    old: str
    new: str


class LifecycleChangeRejected(LifecycleChanged, frozen=True, tag="lifecycle_change_rejected"):
    """A transition that the table does not have: a bug of ftrun."""
