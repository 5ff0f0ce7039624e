"""Monitors a running generation: hangs, numerical anomalies, slowness; and decides what follows.

Rule 1: a problem that only costs time is reported. A problem that makes a run worthless, or stops
        it, is acted on through a failure like any other: one budget, one count of causes, one way
        to restart.
"""

from collections.abc import Sequence

import msgspec

from ftrun.config.cluster import MembershipSettings
from ftrun.errors import ExitCode
from ftrun.events import ExitKind, Progress, WorkerExit
from ftrun.ids import Rank
from ftrun.monitor.numerics import NumericsDetector, RankNumerics
from ftrun.monitor.slow.host_pressure import HostPressure
from ftrun.monitor.verdicts import Confidence, RankView, Verdict, VerdictKind, ranks_text
from ftrun.monitor.worker_exits import first_cause, hidden_cause
from ftrun.recovery.commands import Send
from ftrun.recovery.incidents import IncidentLog
from ftrun.recovery.lost_links import HungLinks, PairFinder
from ftrun.recovery.snapshot_coordination import MemberReports
from ftrun.recovery.suspicions import HangSuspicions, SlowSuspicions
from ftrun.wire.cluster.generation import GenerationPlan, VersionPair

_BACK = (
    ". It is only reported: numerics.policy=rollback would resume from a version before it; "
    "skip-data would also skip the data"
)
_STOP = ". It is only reported: numerics.policy=stop would end the run"


class HealthMonitor:
    """The health of one run, as one leader sees it."""

    def __init__(
        self, settings: MembershipSettings, me: str, pairs: PairFinder, reports: MemberReports
    ) -> None:
        self.incidents = IncidentLog()
        self.slow = SlowSuspicions()
        self.bad_version: VersionPair | None = None
        """This version and later ones hold numerical anomalies; reset with the next generation."""
        self.skip_to = -1
        """Last step of the data that led to the anomaly, if the data must be skipped; else -1."""
        self.unwanted = ""
        """The node to replace for a hang: see `HungLinks`, and `hang.action: evict`."""
        self.can_replace = False
        """The run could continue without one of its nodes."""
        self.hung = HungLinks(settings.profile.hang)
        self.pairs = pairs
        self._first_step_s = settings.profile.hang.suspect_after_s
        self._evicts_hung = settings.profile.hang.action == "evict"
        self._numerics_policy = settings.profile.numerics.policy
        self._me = me
        self._reports = reports
        self._hangs = HangSuspicions(settings.profile.hang)
        self._numbers = NumericsDetector()
        self._is_blind = self._has_reported_replicas = self._is_stuck = False
        self._due_s = 0.0
        self._every_s = settings.times.heartbeat_interval_s / 2

    def begin(self, plan: GenerationPlan) -> None:
        self.bad_version = None
        self.skip_to = -1
        self.unwanted = ""
        self._is_blind = self._has_reported_replicas = self._is_stuck = False
        self._hangs.begin()
        self.hung.begin()
        self.pairs.begin()
        self._numbers.begin()
        self.slow.begin()
        self.incidents.generation_begins(plan)

    def poll(self, plan: GenerationPlan, *, now_s: float) -> list[WorkerExit]:
        if now_s < self._due_s or self._is_blind:
            return []
        self._due_s = now_s + self._every_s
        reports = self._reports
        self.incidents.progress(reports.current, reports.progress, now_s=now_s)
        found = self._check_numbers(plan, now_s)
        if found:
            return found
        self._check_replicas(plan, now_s)
        for verdict in self.slow.poll(reports.heartbeats, plan, self._me, now_s=now_s):
            known, matrix = self._with_troubles(verdict), self.slow.matrix()
            self.incidents.reported(known, reports.progress, matrix=matrix, now_s=now_s)
        return self._check_first_step(plan, now_s) or self._check_progress(plan, now_s)

    def went_wrong(self, error: Exception) -> None:
        """Stop the monitoring of this generation."""
        if not self._is_blind:
            self._is_blind = True
            self.incidents.report_bug(f"{type(error).__name__}: {error}")

    def probes(self, plan: GenerationPlan, *, now_s: float) -> list[Send]:
        """Probes of slow links, and of all links between members while ranks make no steps."""
        return [
            *self.slow.probes(plan, self._me, now_s=now_s),
            *(self.pairs.poll(plan, now_s=now_s) if self._is_stuck else []),
        ]

    def _check_first_step(self, plan: GenerationPlan, now_s: float) -> list[WorkerExit]:
        reports, cut, can_replace = self._reports, self.pairs.cut, self.can_replace
        verdict = self.hung.poll(plan, reports, cut=cut, can_replace=can_replace, now_s=now_s)
        if verdict is None:
            return []
        self.incidents.found(verdict, (), reports.progress, now_s=now_s)
        self.unwanted = self.hung.node_out(verdict, plan, reports, cut)
        return [_hung(verdict, ())]

    def _check_progress(self, plan: GenerationPlan, now_s: float) -> list[WorkerExit]:
        reports, cut, progress = self._reports, self.pairs.cut, self._reports.progress
        finding = self._hangs.poll(reports.heartbeats, plan, cut=cut, can_replace=self.can_replace)
        self._check_stuck(progress, now_s)
        if finding is None:
            if not self._hangs.is_suspicious:
                self.incidents.cleared(progress, now_s=now_s)
            return []
        if not self.incidents.is_suspected:
            self.incidents.suspected(finding, progress, now_s=now_s)
        if finding.verdict is None:
            return []
        verdict = self._with_troubles(finding.verdict)
        self.incidents.named(verdict, finding.views, now_s=now_s)
        if not finding.acts:
            return []
        if self._evicts_hung and len(verdict.nodes) == 1:
            self.unwanted = verdict.nodes[0]
        if verdict.kind is VerdictKind.HANG_IN_COMMUNICATION:
            self.unwanted = self.hung.node_out(verdict, plan, reports, cut) or self.unwanted
        return [_hung(verdict, finding.views)]

    def _check_stuck(self, progress: Progress, now_s: float) -> None:
        makes_steps = progress.attached or bool(self.hung.nodes)
        has_none = makes_steps and progress.steps_here == 0
        is_late = has_none and self.hung.for_s(now_s=now_s) >= self._first_step_s
        was_stuck, self._is_stuck = self._is_stuck, self._hangs.is_unresponsive or is_late
        if was_stuck and not self._is_stuck:
            self.pairs.begin()

    def _check_numbers(self, plan: GenerationPlan, now_s: float) -> list[WorkerExit]:
        reports = self._reports
        ranks = [
            RankNumerics(one.rank, one.step, one.loss, one.loss_step, one.bad_step)
            for heartbeat in reports.current
            for one in heartbeat.ranks
        ]
        verdict = self._numbers.poll(ranks, plan.node_of, now_s=now_s)
        if verdict is None:
            return []
        if self._numerics_policy == "report" or not verdict.act_immediately:
            remedy = _BACK if reports.progress.attached else _STOP
            reported = verdict.text + (remedy if verdict.act_immediately else "")
            verdict = msgspec.structs.replace(verdict, text=reported)
            self.incidents.reported(verdict, reports.progress, now_s=now_s)
            return []
        self.incidents.found(verdict, (), reports.progress, now_s=now_s)
        # Only one place was checked, and anomalies spread per step: one more step is given up.
        first = max(0, self._numbers.bad_since - 1)
        has_come_along = plan.restore is not None and first <= plan.restore[1]
        self.bad_version = plan.restore if has_come_along else (plan.generation, first)
        self.skip_to = self._numbers.bad_since if self._numerics_policy == "skip-data" else -1
        rank = Rank((*verdict.culprits, *verdict.victims, 0)[0])
        text, of = f"{verdict.kind.value}: {verdict.text}", verdict.fingerprint
        kind, code = ExitKind.NUMERICAL_ANOMALY, ExitCode.DO_NOT_RESTART
        return [WorkerExit(rank, kind, code, text, fingerprint=of)]

    def _check_replicas(self, plan: GenerationPlan, now_s: float) -> None:
        reported = next((one for one in self._reports.current if one.differs), None)
        if reported is None or self._has_reported_replicas:
            return
        self._has_reported_replicas = True
        ranks, places = reported.differing_ranks, plan.node_of
        nodes = tuple(sorted({places[rank] for rank in ranks if rank in places}))
        is_vote = 0 < len(ranks) < plan.world_size / 2
        subject = f"the replicas on {ranks_text(ranks)} on {', '.join(nodes)} differ"
        unknown = f"{subject}; which of them is correct is unknown"
        verdict = Verdict(
            kind=VerdictKind.REPLICAS_DIFFER,
            culprits=ranks if is_vote else (),
            victims=() if is_vote else ranks,
            nodes=nodes if is_vote else (),
            text=f"{subject} from those of the other ranks" if is_vote else unknown,
            evidence=(reported.differs,),
            counter_evidence=("ranks that train different values by design have the same effect",),
            confidence=Confidence.LIKELY if is_vote else Confidence.POSSIBLE,
            fingerprint=f"replicas {' '.join(map(str, ranks))}",
        )
        self.incidents.reported(verdict, self._reports.progress, now_s=now_s)

    # --- ranks that have ended ----------------------------------------------------------------

    def with_hidden_cause(
        self,
        waiting: Sequence[WorkerExit],
        ended: Sequence[WorkerExit],
        plan: GenerationPlan,
        *,
        now_s: float,
    ) -> tuple[WorkerExit, ...]:
        """`waiting`, with the hidden cause if none of them is the cause; `ended` are all exits."""
        views = {one.rank: one for heartbeat in self._reports.current for one in heartbeat.views}
        hidden = hidden_cause(ended, views, plan.node_of)
        if hidden is None:
            return tuple(waiting)
        cause, verdict = hidden
        if verdict is not None:
            progress = self._reports.progress
            self.incidents.found(verdict, list(views.values()), progress, now_s=now_s)
        return (*(one for one in waiting if one.rank != cause.rank), cause)

    def failed(self, exits: Sequence[WorkerExit], plan: GenerationPlan, *, now_s: float) -> None:
        failed = [one for one in exits if one.kind is not ExitKind.FINISHED]
        if failed:
            cause = first_cause(failed)
            nodes = [node.node_id for node in plan.members if cause.rank in node.ranks]
            progress, known = self._reports.progress, self._of_nodes(nodes)
            self.incidents.failed(cause, nodes, progress, of_nodes=known, now_s=now_s)

    def _with_troubles(self, verdict: Verdict) -> Verdict:
        found = (*verdict.evidence, *self._of_nodes(verdict.nodes))
        return msgspec.structs.replace(verdict, evidence=found)

    def _of_nodes(self, nodes: Sequence[str]) -> list[str]:
        """Recent error counts of network cards and GPUs, and the pressure, of these nodes."""
        known = [(node, self._reports.heartbeats.get(node)) for node in nodes]
        return [
            f"{node}: {text}"
            for node, heartbeat in known
            if heartbeat is not None
            for text in (*heartbeat.troubles, *(heartbeat.pressure or HostPressure()).texts)
        ]


def _hung(verdict: Verdict, views: Sequence[RankView]) -> WorkerExit:
    ended = {view.rank for view in views if view.is_finished}
    candidates = [rank for rank in (*verdict.culprits, *verdict.victims) if rank not in ended]
    rank = (*candidates, 0)[0]
    stack = next((view.stack for view in views if view.rank == rank), ())
    return WorkerExit(
        Rank(rank),
        ExitKind.HUNG,
        ExitCode.TRY_AGAIN,
        f"{verdict.kind.value}: {verdict.text}",
        detail="\n".join(f"  {frame}" for frame in stack),
        fingerprint=verdict.fingerprint,
    )
