"""The incidents of a run, one after the other, each from its first sign to its end.

Survives: the leader: the next one continues the count, and opens its own incident.

Rule 1: one incident at a time. A failure before its verification belongs to it.
Rule 2: an incident is closed when all ranks are past the step they had reached, not when they run.
Rule 3: if the loss has jumped by then, the incident stays open for up to 20 more steps, or until a
        loss continues the earlier ones. Until then every failure belongs to it.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from ftrun.events import ExitKind, Progress, WorkerExit
from ftrun.ids import Step
from ftrun.monitor.numerics import LossContinuity
from ftrun.monitor.slow.links import DelayTableCell
from ftrun.monitor.verdicts import Confidence, RankView, Verdict, VerdictKind
from ftrun.records.incidents import (
    ActionTaken,
    AdditionalFinding,
    Downtime,
    IncidentClosed,
    IncidentVerification,
    LifecycleChanged,
    LifecycleChangeRejected,
    SuspicionRaised,
    VerdictRecord,
)
from ftrun.records.note import Note
from ftrun.records.recovery import DowntimeRecord
from ftrun.records.run import InternalErrorRecord
from ftrun.recovery.commands import JournalEntry
from ftrun.recovery.lifecycle import TABLE, LifecycleState, downtime
from ftrun.recovery.suspicions import HangFinding
from ftrun.wire.cluster.generation import GenerationPlan
from ftrun.wire.cluster.membership import Heartbeat, RestartTimes

KEPT = 20
"""Closed incidents that status still shows."""

MAX_UNVERIFIED_STEPS = 20
"""Steps for which a loss that has jumped keeps an incident open."""

_KINDS = {
    ExitKind.OUT_OF_MEMORY: VerdictKind.OUT_OF_MEMORY,
    ExitKind.NODE_LOST: VerdictKind.NODE_LOST,
    ExitKind.STOPPED: VerdictKind.FROZEN,
}


@dataclass(slots=True)
class Incident:
    """An open incident."""

    number: int
    started_s: float
    text: str
    detected_s: float | None = None
    """Seconds from its first sign to the verdict; None before a verdict."""
    verdict: Verdict | None = None
    actions: list[str] = field(default_factory=list)
    best_step: int = -1
    """The furthest step of any rank when it began."""
    restored_step: int | None = None
    generations: list[int] = field(default_factory=list)
    """Generations that were started because of it."""
    kind: str = "suspicion"
    """Shown if there is no verdict."""
    fault_s: float = 0.0
    known_s: float | None = None
    """When the verdict on the newest fault was reached."""
    downtime: Downtime | None = None
    """Known after every rank has completed a step since the newest fault."""
    jumped_step: int | None = None
    """The first verified step at which the loss was not as before; None if it was."""
    last_loss: float | None = None
    """The loss that was judged last."""
    downtime_before: Downtime | None = None
    """The sum for earlier faults of the same incident."""


class IncidentLog:
    """The incidents of one run, as one leader sees them."""

    def __init__(self) -> None:
        self.count = 0
        self.open: Incident | None = None
        self.closed: deque[tuple[float, IncidentClosed]] = deque(maxlen=KEPT)
        """The last ones, with the time of the end."""
        self.life = LifecycleState.LAUNCH
        self._losses = LossContinuity()
        self._notes: list[JournalEntry] = []
        self._attached = False
        self._sign_s: float | None = None
        self._awaited: frozenset[str] = frozenset()
        """Nodes whose ranks were restarted."""
        self._stepped: dict[str, tuple[float, RestartTimes]] = {}
        """When the last rank of each of these nodes completed its first step."""
        self._matrix: tuple[DelayTableCell, ...] = ()

    def drain_journal_entries(self) -> list[JournalEntry]:
        notes, self._notes = self._notes, []
        return notes

    def succeed(self, count: int) -> None:
        self.count = max(self.count, count)
        self.life = LifecycleState.RUN

    @property
    def is_suspected(self) -> bool:
        """Whether a suspicion was reported and is neither cleared nor acted on."""
        return self.life in (LifecycleState.SUSPECT, LifecycleState.DIAGNOSE)

    @property
    def has_stepped(self) -> bool:
        """Whether every rank has completed a step since the newest fault of the open incident."""
        return self.open is not None and self.open.downtime is not None

    @property
    def has_jumped(self) -> bool:
        """Whether ranks are past their earlier step, and the loss keeps the incident open."""
        return self.open is not None and self.open.jumped_step is not None

    # --- what happens -------------------------------------------------------------------------

    def sign(self, fault_s: float) -> None:
        """Records when a process or node ended; the incident that follows began then."""
        self._sign_s = fault_s if self._sign_s is None else min(self._sign_s, fault_s)

    def agent_lost(self, node_id: str, fault_s: float, *, now_s: float) -> None:
        """Opens an incident for the restart of the leader's own agent, which ended its ranks."""
        self.sign(fault_s)
        text = f"the agent of node {node_id} was restarted"
        incident = self._incident(text, Progress(Step(0), 0, attached=False), now_s=now_s)
        incident.kind, incident.best_step = "agent lost", -1
        incident.detected_s, incident.known_s = now_s - incident.started_s, now_s

    def generation_begins(self, plan: GenerationPlan) -> None:
        self._sign_s = None
        self._stepped = {}
        restarted = plan.members if plan.generation > 0 else ()
        self._awaited = frozenset(node.node_id for node in restarted)
        if self.life is LifecycleState.LAUNCH:
            self._go(LifecycleState.CHECK, f"ranks are starting; nodes: {len(plan.members)}")
            return
        self._go(LifecycleState.RECOVER, plan.reason)  # without a failure: a reconfiguration
        state = LifecycleState.VERIFY if self.open is not None else LifecycleState.CHECK
        self._go(state, f"generation {plan.generation} is starting")
        if self.open is not None:
            self.open.restored_step = plan.restore[1] if plan.restore is not None else 0
            self.open.generations.append(plan.generation)
            self.open.downtime = self.open.jumped_step = self.open.last_loss = None

    def suspected(self, finding: HangFinding, progress: Progress, *, now_s: float) -> None:
        ranks = tuple(sorted(view.rank for view in finding.views if view.has_stepped))
        text = (
            f"no step for {finding.unresponsive_s:.1f} s: a hang is suspected (limit "
            f"{finding.deadline_s:.1f} s, from the step times of this run)"
        )
        incident = self._incident(text, progress, now_s=now_s - finding.unresponsive_s)
        self._go(LifecycleState.SUSPECT, text)
        unresponsive_s, deadline_s = round(finding.unresponsive_s, 2), round(finding.deadline_s, 2)
        self._note(SuspicionRaised(text, incident.number, ranks, unresponsive_s, deadline_s))

    def named(self, verdict: Verdict, views: Sequence[RankView], *, now_s: float) -> None:
        incident = self.open
        if incident is None:
            return
        last = incident.verdict
        if last is None:
            incident.detected_s, incident.known_s = now_s - incident.started_s, now_s
        elif _summary(last) == _summary(verdict):
            return
        matrix, self._matrix = self._matrix, ()
        is_known = last is not None and last.text == verdict.text
        incident.verdict, incident.text = verdict, verdict.text
        self._go(LifecycleState.DIAGNOSE, verdict.text)
        step, ranks = max(incident.best_step, 0), tuple(_cut(view, verdict) for view in views)
        record = VerdictRecord(verdict.text, incident.number, verdict, step, ranks, matrix)
        self._note(record, announce=not is_known)

    def found(
        self, verdict: Verdict, views: Sequence[RankView], progress: Progress, *, now_s: float
    ) -> None:
        """Opens an incident with a verdict that had no suspicion before."""
        self._incident(verdict.text, progress, now_s=now_s)
        self.named(verdict, views, now_s=now_s)

    def cleared(self, progress: Progress, *, now_s: float) -> None:
        if self.is_suspected and self.open is not None:
            self.open.actions.append("report")
            self._go(LifecycleState.RUN, "ranks make steps again")
            self._close(None, progress, now_s=now_s)

    def reported(
        self,
        verdict: Verdict,
        progress: Progress,
        *,
        matrix: Sequence[DelayTableCell] = (),
        now_s: float,
    ) -> None:
        """Reports a verdict without an action; adds it to an open incident."""
        if self.open is not None:
            self._note(AdditionalFinding(verdict.text, self.open.number), announce=True)
            return
        self._matrix = tuple(matrix)
        self.found(verdict, (), progress, now_s=now_s)
        self._incident(verdict.text, progress, now_s=now_s).actions.append("report")
        self._go(LifecycleState.RUN, "it is only reported")
        self._close(None, progress, now_s=now_s)

    def failed(
        self,
        cause: WorkerExit,
        nodes: Sequence[str],
        progress: Progress,
        *,
        of_nodes: Sequence[str] = (),
        now_s: float,
    ) -> None:
        """`of_nodes`: what is known of the state of the nodes, for the evidence."""
        incident = self._incident(cause.text, progress, now_s=now_s)
        if incident.verdict is None:
            self.named(verdict_of(cause, nodes, of_nodes), (), now_s=now_s)
        elif cause.kind not in (ExitKind.HUNG, ExitKind.SKIPPED, ExitKind.NUMERICAL_ANOMALY):
            self._note(AdditionalFinding(cause.text, incident.number))

    def report_bug(self, text: str) -> None:
        words = f"ranks are not monitored until the next restart, by a bug in ftrun ({text})"
        self._note(InternalErrorRecord(words), announce=True)

    def acted(self, action: str, reason: str) -> None:
        if self.open is not None:
            self.open.actions.append(action)
            self._note(ActionTaken(reason, self.open.number, action))
        if action in ("respawn", "evict", "rollback"):
            self._go(LifecycleState.RECOVER, reason)

    def stepped(self, node_id: str, times: RestartTimes | None, *, now_s: float) -> float | None:
        """Records first steps after a restart; returns the downtime in seconds after the last."""
        if times is None or node_id not in self._awaited or node_id in self._stepped:
            return None
        self._stepped[node_id] = (now_s - times.stepped_age_s, times)
        if len(self._stepped) < len(self._awaited):
            return None
        stepped_s, last = max(self._stepped.values(), key=lambda one: one[0])
        incident = self.open
        if incident is None:  # a reconfiguration
            text = f"training again {last.total_s:.2f} s after the ranks were stopped"
            self._note(DowntimeRecord(text, None, round(last.total_s, 3)), announce=True)
            return last.total_s
        fault_s = incident.fault_s
        known_s = fault_s if incident.known_s is None else incident.known_s
        took = downtime(fault_s=fault_s, known_s=known_s, stepped_s=stepped_s, last=last)
        if incident.downtime_before is not None:
            took = incident.downtime_before.plus(took)
        incident.downtime = took
        parts = msgspec.structs.asdict(took.rounded())
        parts |= {"fault_s": fault_s, "stepped_s": stepped_s}
        self._note(DowntimeRecord(took.text, incident.number, **parts), announce=True)
        return took.total_s

    def progress(
        self, heartbeats: Sequence[Heartbeat], progress: Progress, *, now_s: float
    ) -> None:
        self._attached |= progress.attached
        reports = [report for heartbeat in heartbeats for report in heartbeat.ranks]
        if not reports or any(report.age_s < 0 for report in reports):
            return
        loss = next((one.loss for one in reports if one.loss is not None), None)
        step = min(report.step for report in reports)
        incident = self.open
        if self.life is LifecycleState.CHECK:
            self._go(LifecycleState.RUN, "every rank has made a step")
        elif self.life is LifecycleState.VERIFY and incident is not None:
            is_past = step > incident.best_step or not self._attached
            if is_past and incident.downtime is not None and not self._waits(loss, step):
                text = f"every rank is past step {max(incident.best_step, 0):,}"
                self._go(LifecycleState.RUN, text)
                self._close(loss, progress, now_s=now_s)
        elif self.life is LifecycleState.RUN and loss is not None:
            self._losses.add(step, loss)

    def ended(self, reason: str, progress: Progress, *, is_done: bool, now_s: float) -> None:
        self._go(LifecycleState.ENDED, reason)
        if self.open is not None:
            if not is_done:
                self.open.actions.append("stop")
            self._close(None, progress, now_s=now_s)

    # --- details ------------------------------------------------------------------------------

    def _waits(self, loss: float | None, step: int) -> bool:
        """Whether a loss that has jumped keeps the incident open; reports it once."""
        incident = self.open
        if incident is None or loss is None:
            return False
        incident.last_loss = loss
        if self._losses.judge(loss) != "jumped":
            return False
        if incident.jumped_step is None:
            incident.jumped_step = step
            text = (
                f"the loss has jumped from about {self._losses.usual:.4g} to {loss:.4g} after the "
                f"restart; the incident stays open for up to {MAX_UNVERIFIED_STEPS} more steps"
            )
            self._note(AdditionalFinding(text, incident.number), announce=True)
        return step < incident.jumped_step + MAX_UNVERIFIED_STEPS

    def _incident(self, text: str, progress: Progress, *, now_s: float) -> Incident:
        since_s = now_s if self._sign_s is None else min(self._sign_s, now_s)
        if self.open is None:
            self.count += 1
            self.open = Incident(self.count, since_s, text, best_step=progress.step,
                                 fault_s=since_s)  # fmt: skip
        elif self.open.downtime is not None:
            # Another fault before the incident was closed: ranks trained in between.
            self.open.downtime_before, self.open.downtime = self.open.downtime, None
            self.open.fault_s, self.open.known_s = since_s, now_s
        self.open.best_step = max(self.open.best_step, progress.step)
        return self.open

    def _close(self, loss: float | None, progress: Progress, *, now_s: float) -> None:
        incident, self.open = self.open, None
        assert incident is not None
        loss = incident.last_loss if loss is None else loss
        verdict, restored = incident.verdict, incident.restored_step
        is_past = progress.step > incident.best_step
        lost = None
        if restored is not None and self._attached and incident.best_step >= 0:
            lost = max(0, incident.best_step - restored)
        downtime = incident.downtime.rounded() if incident.downtime is not None else None
        closed = IncidentClosed(
            incident.text,
            incident.number,
            verdict_kind=verdict.kind.value if verdict is not None else incident.kind,
            error_class=verdict.error_class if verdict is not None else "",
            culprits=verdict.culprits if verdict is not None else (),
            nodes=verdict.nodes if verdict is not None else (),
            verified=IncidentVerification(is_past, self._losses.judge(loss)),
            action=incident.actions[-1] if incident.actions else "none",
            actions=tuple(incident.actions),
            open_s=round(now_s - incident.started_s, 3),
            detected_s=None if incident.detected_s is None else round(incident.detected_s, 3),
            recovered_s=None if downtime is None else downtime.total_s,
            downtime=downtime,
            steps_lost=lost,
            restored=restored,
            generations=tuple(incident.generations),
        )
        self._note(closed)
        self.closed.append((now_s, closed))

    def _go(self, new: LifecycleState, reason: str) -> None:
        if new is self.life:
            return
        number = self.open.number if self.open is not None else None
        is_allowed = new in TABLE[self.life]
        kind = LifecycleChanged if is_allowed else LifecycleChangeRejected
        self._note(kind(reason, number, self.life.value, new.value))
        if is_allowed:
            self.life = new

    def also(self, entries: Iterable[JournalEntry]) -> None:
        """Adds journal entries that belong to no incident."""
        self._notes += entries

    def _note(self, record: Note, *, announce: bool = False) -> None:
        self._notes.append(JournalEntry(record, announce=announce))


def verdict_of(cause: WorkerExit, nodes: Sequence[str], of_nodes: Sequence[str] = ()) -> Verdict:
    """The verdict on an ended rank: certain from the kernel's report, unless it left early."""
    kind = _KINDS.get(cause.kind, VerdictKind.CRASH)
    evidence = [cause.text]
    if cause.detail:
        evidence.append(cause.detail.strip().splitlines()[-1].strip())
    evidence += [one.text for one in cause.errors]
    is_node = cause.kind is ExitKind.NODE_LOST
    return Verdict(
        kind=kind,
        culprits=() if is_node else (cause.rank,),
        nodes=tuple(nodes),
        text=cause.text,
        evidence=(*evidence, *of_nodes),
        confidence=Confidence.LIKELY if cause.kind is ExitKind.LEFT_EARLY else Confidence.CERTAIN,
        act_immediately=True,
        fingerprint=cause.fingerprint,
        error_class=cause.errors[0].error_class if cause.errors else "",
    )


def _cut(view: RankView, verdict: Verdict) -> RankView:
    """A rank for the report; whole stacks only of culprits and of one victim.

    Of its connections, those that have stalled. Numbers of messages only of these ranks, too.
    """
    stalled = tuple(one for one in view.connections if one.stalled_s)
    view = msgspec.structs.replace(view, connections=stalled)
    if view.rank in (*verdict.culprits, *verdict.victims[:1]):
        return view
    return msgspec.structs.replace(view, stack=view.stack[:1], message_counts=())


def _summary(verdict: Verdict) -> tuple[object, ...]:
    return (verdict.kind, verdict.culprits, verdict.act_immediately, verdict.confidence)
