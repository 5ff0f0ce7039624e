"""Decides when a missing step is suspected as a hang, diagnosed, and acted on.

Runs in:  the agent that leads. Pure.
Takes in: the newest heartbeats; those of nodes with unresponsive ranks contain views of the ranks.
Gives:    `HangFinding`s: what to report, and finally whether to act.
Source:   the design's monitor section: suspect and name early, act at once on positive evidence,
          and late on everything else. A false restart is worse than a slow one.

Rule 1: before its last deadline, a verdict is acted on only with positive evidence, and only if
        two consecutive observations give the same verdict.
Rule 2: after an action the generation is not observed any more: its ranks are about to be killed.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec

from ftrun.config.profile import HangConfig
from ftrun.monitor.deadlines import HangDeadlines
from ftrun.monitor.evidence import RankView
from ftrun.monitor.hang_detector import find_hang
from ftrun.monitor.verdicts import Confidence, Verdict, VerdictKind, ranks_in_words
from ftrun.recovery.lost_links import Pair, lost_links, with_lost_links
from ftrun.wire.cluster.generation import GenerationPlan
from ftrun.wire.cluster.heartbeats import Heartbeat


@dataclass(frozen=True, slots=True)
class HangFinding:
    """The result of one observation."""

    silent_s: float
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
        self._told: Verdict | None = None
        self._before: Verdict | None = None
        self._now: Verdict | None = None
        """The verdict of the newest observation; `_before` is that of the one before it."""
        self._seen: tuple[object, ...] = ()
        self._is_suspected = False
        self.is_silent = False
        """Ranks have made no step for `look_s`, so their stacks are taken."""

    @property
    def is_suspicious(self) -> bool:
        """Whether ranks have made no step for longer than `suspect_s`."""
        return self._is_suspected

    def begin(self) -> None:
        self._is_over = self.is_silent = False
        self._forget()

    def _forget(self) -> None:
        self._told = self._before = self._now = None
        self._seen = ()
        self._is_suspected = False

    def look(
        self,
        beats: Mapping[str, Heartbeat],
        plan: GenerationPlan,
        *,
        cut: Collection[Pair] = (),
        can_replace: bool = False,
    ) -> HangFinding | None:
        """Judges the newest heartbeats; returns a finding only if it is new.

        Args:
            beats: the newest heartbeats.
            plan: the running generation.
            cut: pairs of which neither end can connect to the other.
            can_replace: another node can replace one end of a lost link. If not, a restart would
                meet the same link, so the link is given time.
        """
        if self._is_over:
            return None
        own = [(node, beats[node.node_id]) for node in plan.members if node.node_id in beats]
        current = [(node, beat) for node, beat in own if beat.generation == plan.generation]
        views = {view.rank: view for _, beat in current for view in beat.views}
        node_of = {rank: node.node_id for node in plan.members for rank in node.ranks}
        deadlines = HangDeadlines.of(
            max((beat.p99_s for _, beat in current), default=0.0), self._settings
        )
        silent_s = max((_silence(view) for view in views.values()), default=0.0)
        self.is_silent = silent_s >= deadlines.look_s
        if silent_s < deadlines.suspect_s:
            self._forget()
            return None
        verdict = find_hang(views, node_of, self._settings, limit_s=deadlines.look_s)
        lost = lost_links(beats, plan, cut)
        has_leave = verdict is not None and verdict.has_leave
        if lost is not None and not has_leave:
            late = [rank for rank, view in sorted(views.items()) if _silence(view)]
            verdict = with_lost_links(verdict, lost, late)
            if verdict.kind is VerdictKind.HANG_IN_COMMUNICATION and not can_replace:
                verdict = msgspec.structs.replace(verdict, acts_at_once=False)
        is_due = silent_s >= (deadlines.leave_s if has_leave else deadlines.kill_s)
        if verdict is None and is_due and not _make_steps(views, deadlines.look_s):
            verdict = _unknown(views, silent_s)
        if _looks(views) != self._seen:
            self._seen, self._before, self._now = _looks(views), self._now, verdict
        acts = verdict is not None and (
            is_due or (silent_s >= deadlines.act_s and self._is_positive_again(verdict))
        )
        return self._news(verdict, views, silent_s, deadlines, acts=acts)

    def _is_positive_again(self, verdict: Verdict) -> bool:
        before = self._before
        return (
            verdict.acts_at_once
            and before is not None
            and before.acts_at_once
            and _gist(before) == _gist(verdict)
        )

    def _news(
        self,
        verdict: Verdict | None,
        views: Mapping[int, RankView],
        silent_s: float,
        deadlines: HangDeadlines,
        *,
        acts: bool,
    ) -> HangFinding | None:
        shown = tuple(view for _, view in sorted(views.items()))
        is_same = verdict is None or (
            self._told is not None and _gist(verdict) == _gist(self._told)
        )
        is_news = acts or not is_same or not self._is_suspected
        self._is_suspected = True
        if not is_news:
            return None
        self._told = verdict
        acts = acts and self._settings.action != "report"
        self._is_over = acts
        return HangFinding(silent_s, deadlines.act_s, verdict, shown, acts)


def _silence(view: RankView) -> float:
    return view.silent_s if view.has_stepped and not view.is_finished else 0.0


def _make_steps(views: Mapping[int, RankView], limit_s: float) -> bool:
    """Whether some ranks make steps: ranks that wait for them will continue."""
    going = (view for view in views.values() if view.has_stepped and not view.is_finished)
    return any(view.silent_s < limit_s for view in going)


def _looks(views: Mapping[int, RankView]) -> tuple[object, ...]:
    """A value that changes when any rank is observed again."""
    return tuple((rank, view.silent_s) for rank, view in sorted(views.items()))


def _gist(verdict: Verdict) -> tuple[object, ...]:
    return (verdict.kind, verdict.culprits, verdict.nodes, verdict.acts_at_once)


def _unknown(views: Mapping[int, RankView], silent_s: float) -> Verdict:
    ranks = tuple(sorted(rank for rank, view in views.items() if _silence(view)))
    return Verdict(
        kind=VerdictKind.HANG_IN_COMPUTATION,
        culprits=(),
        victims=ranks,
        text=f"{ranks_in_words(ranks)} have made no step for {silent_s:.0f} s, and who holds them "
        "up cannot be told",
        against=("some ranks they wait for were not seen",),
        sure=Confidence.POSSIBLE,
        fingerprint="silence",
    )
