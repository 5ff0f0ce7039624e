"""Decides when a missing step is a hang, and detects what is slow while steps are made.

Source:   the design's monitor section: suspect and name early, act at once on positive evidence,
          and late on everything else. A false restart is worse than a slow one.

Rule 1: before its last deadline, a verdict is acted on only with positive evidence, and only if
        two consecutive observations give the same verdict.
Rule 2: after an action the generation is not observed any more: its ranks are about to be killed.
Rule 3: links are judged before ranks, because a slow link makes ranks late that are not its cause.
Rule 4: slowness triggers no action here: a slow rank costs time, a wrong verdict costs a restart.
Rule 5: the age of a slowness counts only time with new measurements of steps in which it was found.
        It starts again at 0 after a gap, such as an evaluation or a debugger, while any rank does
        not train, and if possible evidence becomes likely.
"""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from statistics import median

import msgspec

from ftrun.config.profile import HangConfig
from ftrun.monitor.hang_detector import find_hang
from ftrun.monitor.page_values import decode_groups
from ftrun.monitor.slow.delay_matrix import NodeTraffic
from ftrun.monitor.slow.links import DelayTableCell, LinkProbeReading, SlowLinkDetector
from ftrun.monitor.slow.memory_trend import MemoryTrend
from ftrun.monitor.slow.samples import ClockOffset, NodeSample
from ftrun.monitor.slow.skipped_collectives import CollectiveCounts
from ftrun.monitor.slow.stragglers import RankObservation, StragglerDetector
from ftrun.monitor.verdicts import (
    COMPUTES,
    Confidence,
    RankView,
    Verdict,
    VerdictKind,
    nodes_of,
    ranks_text,
)
from ftrun.monitor.wait_graph import HangDeadlines
from ftrun.recovery.commands import Send
from ftrun.recovery.lost_links import Pair, lost_links, with_lost_links
from ftrun.wire.cluster.generation import GenerationPlan
from ftrun.wire.cluster.membership import Heartbeat
from ftrun.wire.cluster.messages import ProbeLinkRequest, ProbeLinkResult


@dataclass(frozen=True, slots=True)
class HangFinding:
    """The result of one observation."""

    unresponsive_s: float
    deadline_s: float
    verdict: Verdict | None = None
    """None: a hang is only suspected."""
    views: tuple[RankView, ...] = ()
    acts: bool = False


class HangSuspicions:
    """The suspected hang of one generation."""

    def __init__(self, settings: HangConfig) -> None:
        self._settings = settings
        self._is_over = True
        self._reported: Verdict | None = None
        self._before: Verdict | None = None
        self._now: Verdict | None = None
        """The verdict of the newest observation; `_before` is that of the one before it."""
        self._seen: tuple[object, ...] = ()
        self.is_suspicious = False
        """Ranks have made no step for longer than `suspect_after_s`."""
        self.is_unresponsive = False
        """Ranks have made no step for `sample_s`, so their stacks are taken."""

    def begin(self) -> None:
        self._is_over = self.is_unresponsive = False
        self._forget()

    def _forget(self) -> None:
        self._reported = self._before = self._now = None
        self._seen = ()
        self.is_suspicious = False

    def poll(
        self,
        heartbeats: Mapping[str, Heartbeat],
        plan: GenerationPlan,
        *,
        cut: Collection[Pair] = (),
        can_replace: bool = False,
    ) -> HangFinding | None:
        """Judges the newest heartbeats; returns a finding only if it is new.

        Args:
            cut: pairs of which neither end can connect to the other.
            can_replace: another node can replace one end of a lost link. If not, a restart would
                meet the same link, so the link is given time.
        """
        if self._is_over:
            return None
        own = [heartbeats[one.node_id] for one in plan.members if one.node_id in heartbeats]
        current = [heartbeat for heartbeat in own if heartbeat.generation == plan.generation]
        views = {view.rank: view for heartbeat in current for view in heartbeat.views}
        p99_s = max((heartbeat.p99_s for heartbeat in current), default=0.0)
        deadlines = HangDeadlines.of(p99_s, self._settings)
        unresponsive_s = max((_no_progress(view) for view in views.values()), default=0.0)
        self.is_unresponsive = unresponsive_s >= deadlines.sample_s
        if unresponsive_s < deadlines.suspect_after_s:
            self._forget()
            return None
        verdict = find_hang(views, plan.node_of, self._settings, limit_s=deadlines.sample_s)
        lost = lost_links(heartbeats, plan, cut)
        if verdict is not None and lost is None and not self.is_suspicious:
            until_s = _quiet_until(verdict, views, deadlines)
            if unresponsive_s < until_s:
                return None
        may_take_long = verdict is not None and verdict.may_take_long
        if lost is not None and not may_take_long:
            late = [rank for rank, view in sorted(views.items()) if _no_progress(view)]
            verdict = with_lost_links(verdict, lost, late)
        is_link = verdict is not None and verdict.kind is VerdictKind.HANG_IN_COMMUNICATION
        if verdict is not None and is_link and not can_replace:
            verdict = msgspec.structs.replace(verdict, act_immediately=False)
        is_due = unresponsive_s >= (deadlines.leave_s if may_take_long else deadlines.kill_s)
        if verdict is None and is_due and not _make_steps(views, deadlines.sample_s):
            verdict = _unknown(views, unresponsive_s)
        if _samples(views) != self._seen:
            self._seen, self._before, self._now = _samples(views), self._now, verdict
        acts = verdict is not None and (
            is_due or (unresponsive_s >= deadlines.act_s and self._is_positive_again(verdict))
        )
        return self._news(verdict, views, unresponsive_s, deadlines, acts=acts)

    def _is_positive_again(self, verdict: Verdict) -> bool:
        # The summaries contain `act_immediately`.
        before = self._before
        is_same = before is not None and _summary(before) == _summary(verdict)
        return is_same and verdict.act_immediately

    def _news(
        self,
        verdict: Verdict | None,
        views: Mapping[int, RankView],
        unresponsive_s: float,
        deadlines: HangDeadlines,
        *,
        acts: bool,
    ) -> HangFinding | None:
        shown = tuple(view for _, view in sorted(views.items()))
        last = self._reported
        is_new = verdict is not None and (last is None or _summary(verdict) != _summary(last))
        is_news = acts or is_new or not self.is_suspicious
        self.is_suspicious = True
        if not is_news:
            return None
        self._reported = verdict
        acts = acts and self._settings.action != "report"
        self._is_over = acts
        return HangFinding(unresponsive_s, deadlines.act_s, verdict, shown, acts)


def _no_progress(view: RankView) -> float:
    return view.unresponsive_s if view.has_stepped and not view.is_finished else 0.0


def _quiet_until(
    verdict: Verdict, views: Mapping[int, RankView], deadlines: HangDeadlines
) -> float:
    """The time without a step before which this is no news; 0: it is news now."""
    if verdict.act_immediately or not verdict.may_take_long or not verdict.culprits:
        return 0.0
    culprits = [views[rank] for rank in verdict.culprits]
    if all(view.has_reported for view in culprits):
        return deadlines.leave_s  # a phase that the script declares
    is_busy = all(view.cpu >= COMPUTES for view in culprits)
    # All late ranks compute, and none waits: for example an evaluation that is not declared.
    is_own_work = is_busy and not verdict.victims
    return deadlines.kill_s if is_own_work else 0.0


def _make_steps(views: Mapping[int, RankView], limit_s: float) -> bool:
    """Whether some ranks make steps: ranks that wait for them will continue."""
    going = (view for view in views.values() if view.has_stepped and not view.is_finished)
    return any(view.unresponsive_s < limit_s for view in going)


def _samples(views: Mapping[int, RankView]) -> tuple[object, ...]:
    """A value that changes when any rank is observed again."""
    return tuple((rank, view.unresponsive_s) for rank, view in sorted(views.items()))


def _summary(verdict: Verdict) -> tuple[object, ...]:
    """What two results must have in common before an action."""
    return (verdict.kind, verdict.culprits, verdict.nodes, verdict.act_immediately)


def _unknown(views: Mapping[int, RankView], unresponsive_s: float) -> Verdict:
    ranks = tuple(sorted(rank for rank, view in views.items() if _no_progress(view)))
    return Verdict(
        kind=VerdictKind.HANG_IN_COMPUTATION,
        culprits=(),
        victims=ranks,
        text=f"no step for {unresponsive_s:.0f} s on {ranks_text(ranks)}; the cause is unknown",
        counter_evidence=("some ranks that they wait for were not observed",),
        confidence=Confidence.POSSIBLE,
        fingerprint="silence",
    )


POLL_EVERY_S = 0.5
GAP_S = 5.0
"""Time without new evidence that ends a slowness, or `GAP_INTERVALS` usual intervals if longer."""
GAP_INTERVALS = 3
_Mark = tuple[int, ...]
"""Counts of measurements. Evidence is new if all of them have changed."""


@dataclass
class _Persistence:
    """The time for which new measurements gave one verdict."""

    mark: _Mark
    at_s: float
    total_s: float = 0.0
    intervals_s: deque[float] = field(default_factory=lambda: deque(maxlen=8))

    def add(self, mark: _Mark, now_s: float) -> None:
        if any(new == old for new, old in zip(mark, self.mark, strict=True)):
            return
        interval_s = now_s - self.at_s
        self.total_s = 0.0 if self.is_interrupted(now_s) else self.total_s + interval_s
        self.intervals_s.append(interval_s)
        self.mark, self.at_s = mark, now_s

    def is_interrupted(self, now_s: float) -> bool:
        usual_s = median(self.intervals_s) if self.intervals_s else 0.0
        return now_s - self.at_s > max(GAP_S, GAP_INTERVALS * usual_s)


class SlowSuspicions:
    """The slowness of one generation."""

    def __init__(self) -> None:
        self.lateness_s: dict[int, float] = {}
        """Lateness of each rank, in seconds per step; for status."""
        self.clocks: Mapping[str, ClockOffset] = {}
        """Clock offsets of the nodes that answer this leader's heartbeats, by node id."""
        self._due_s = 0.0
        self._probes = 0
        self._asked: dict[int, tuple[str, str]] = {}
        self._forget()

    def _forget(self) -> None:
        self._links, self._stragglers = SlowLinkDetector(), StragglerDetector()
        self._counts, self._memory = CollectiveCounts(), MemoryTrend()
        self._seen: dict[str, int] = {}
        self._reported: dict[str, Verdict] = {}
        self._persistence: dict[tuple[str, bool], _Persistence] = {}
        """By fingerprint, and whether the evidence is more than possible."""
        self._steps: dict[int, int] = {}
        """Completed steps of each rank that trains, by its newest sample."""
        self._groups: dict[str, tuple[int, ...]] = {}
        self.lateness_s = {}

    def begin(self) -> None:
        """Forget the last generation, except for the clock offsets."""
        self._forget()
        self._due_s = 0.0

    def _offset(self, node_id: str, me: str, now_s: float) -> tuple[float, float] | None:
        if node_id == me:
            return 0.0, 0.0
        clock = self.clocks.get(node_id)
        return clock.at(now_s) if clock is not None and clock.is_known else None

    # --- verdicts -----------------------------------------------------------------------------

    def poll(
        self, heartbeats: Mapping[str, Heartbeat], plan: GenerationPlan, me: str, *, now_s: float
    ) -> list[Verdict]:
        if now_s < self._due_s:
            return []
        self._due_s = now_s + POLL_EVERY_S
        members = {node.node_id for node in plan.members}
        new = {
            node_id: sample
            for node_id, heartbeat in heartbeats.items()
            if node_id in members and heartbeat.generation == plan.generation
            if (sample := heartbeat.sample) is not None
            if self._seen.get(node_id) != sample.number
        }
        if not new:
            return []
        self._seen |= {node_id: sample.number for node_id, sample in new.items()}
        return self._judge(new, plan, me, now_s)

    def _judge(
        self, new: Mapping[str, NodeSample], plan: GenerationPlan, me: str, now_s: float
    ) -> list[Verdict]:
        node_of = plan.node_of
        for sample in new.values():
            for rank in sample.ranks:
                self._groups |= decode_groups(rank.groups)
        timed = [(node, one) for node, one in new.items() if one.span_s]
        samples = [NodeTraffic(node, one.span_s, one.links) for node, one in timed]
        hosts = {node.card.host: node.node_id for node in plan.members}
        hosts |= {rail.host: node.node_id for node in plan.members for rail in node.card.rails}
        link = self._links.poll(samples, hosts, now_s=now_s) if len(plan.members) > 1 else None
        ranks: list[RankObservation] = []
        for node, one in new.items():
            ranks += self._rank_samples(node, one, me, now_s)
        slow = self._stragglers.poll(
            ranks,
            self._groups,
            is_link_slow=link is not None,
            may_name=not self._links.is_suspicious,
        )
        late = self._stragglers.lateness()
        self.lateness_s = {rank: round(one.now_s, 4) for rank, one in late.items()}
        reported = [(rank.rank, rank.calls) for one in new.values() for rank in one.ranks]
        skipped = self._counts.poll(reported, plan.world_size, node_of)
        memory = self._memory.poll(new.items())
        found = [
            msgspec.structs.replace(one, nodes=one.nodes or nodes_of(one.culprits, node_of))
            for one in (link, slow)
            if one is not None
        ]
        new_verdicts = [one for one in found if one.fingerprint not in self._reported]
        self._reported = {one.fingerprint: one for one in found}
        self._note_persistence(new.values(), plan.world_size, now_s)
        return [*new_verdicts, *(one for one in (skipped, memory) if one is not None)]

    def _note_persistence(self, new: Collection[NodeSample], world_size: int, now_s: float) -> None:
        for one in (rank for sample in new for rank in sample.ranks):
            self._steps[one.rank] = one.step
            if not one.is_training:
                del self._steps[one.rank]
        if len(self._steps) < world_size:
            self._persistence = {}
            return
        known, self._persistence = self._persistence, {}
        for verdict in self._reported.values():
            mark: _Mark = (min(self._steps.values()),)
            if verdict.kind is VerdictKind.SLOW_COMPUTATION:
                mark = (*mark, self._stragglers.num_windows)
            key = _key(verdict)
            self._persistence[key] = known.get(key) or _Persistence(mark, now_s)
            self._persistence[key].add(mark, now_s)

    def _rank_samples(
        self, node: str, sample: NodeSample, me: str, now_s: float
    ) -> list[RankObservation]:
        clock = self._offset(node, me, now_s)
        if clock is None:
            return []
        offset_s, error_s = clock
        return [
            RankObservation(
                rank=one.rank,
                node=node,
                at_s=sample.at_s - offset_s,
                step=one.step,
                entered=[(group, seq, at_s - offset_s) for group, seq, at_s in one.entered],
                clock_error_s=error_s,
                waited_s=one.waited_s,
                boundary=one.boundary,
            )
            for one in sample.ranks
            if one.is_training
        ]

    @property
    def verdicts(self) -> list[Verdict]:
        return [*self._reported.values()]

    def persistent(self, for_s: float, *, now_s: float) -> list[Verdict]:
        """Verdicts that new measurements have given for this time without a gap."""
        found = [(self._persistence.get(_key(one)), one) for one in self.verdicts]
        return [
            one
            for known, one in found
            if known is not None and known.total_s >= for_s and not known.is_interrupted(now_s)
        ]

    def matrix(self) -> list[DelayTableCell]:
        return self._links.table()

    # --- probes -------------------------------------------------------------------------------

    def probes(self, plan: GenerationPlan, me: str, *, now_s: float) -> list[Send]:
        """Probe requests for suspect links; never to the leader's own node."""
        cards = {node.node_id: node.card for node in plan.members}
        found = []
        for pair in self._links.suspect_pairs(now_s=now_s):
            asked, other = pair if pair[0] != me else (pair[1], pair[0])
            self._probes += 1
            self._asked[self._probes] = (asked, other)
            card = cards[other]
            found.append(Send(asked, ProbeLinkRequest(self._probes, other, card.host, card.port)))
        return found

    def probed(self, body: ProbeLinkResult, *, now_s: float) -> None:
        pair = self._asked.pop(body.number, None)
        if pair is None or body.problem:
            return
        asked, other = pair
        self._links.probed(LinkProbeReading(asked, other, now_s, body.rtt_s, body.to_bytes_per_s))
        self._links.probed(LinkProbeReading(other, asked, now_s, body.rtt_s, body.from_bytes_per_s))


def _key(verdict: Verdict) -> tuple[str, bool]:
    return verdict.fingerprint, verdict.confidence is not Confidence.POSSIBLE
