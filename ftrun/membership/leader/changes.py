"""Changes of the nodes of a run at a step boundary: growth, eviction, departure. No step is lost.

Runs in:  the agent that leads. Pure.
Takes in: the nodes outside the generation, the reports of its members, verdicts on slow nodes.
Gives:    the request for a snapshot at a common boundary; then the reason to begin a ballot.
Source:   TRANSOM (arXiv 2310.10046) replaces a node by a spare; GREYHOUND's stragglers are worth
          a restart only if they persist, so a node that is slow for a moment is left alone.

Rule 1: only an undisturbed run changes, and it grows only with nodes connected for `settle_s`.
Rule 2: it resumes from the snapshot of the boundary once that is committed. If that does not
        happen in time, it resumes from the newest committed version.
Rule 3: a slow node is evicted only if the user requests it (`slow.action`), and only while a spare
        is present.
Rule 4: a node that was asked to leave trains until it is clear that the run does not stop, see
        draining.py. The boundary's snapshot is written to disk too, if there is a checkpoint
        directory, because the whole run may still be asked to stop.
"""

from collections.abc import Collection

from ftrun.config.cluster import MembershipSettings
from ftrun.membership.leader.failure_detector import FailureDetector, PeerState
from ftrun.monitor.verdicts import Confidence, Verdict, VerdictKind
from ftrun.recovery.generation_monitor import GenerationMonitor
from ftrun.wire.cluster.generation import GenerationPlan


class BoundaryReconfiguration:
    """One leader's pending change: nodes to add, to evict or to drain."""

    def __init__(self, settings: MembershipSettings) -> None:
        self._settings = settings
        self._boundary = -1
        self._asked_s = 0.0
        self._look_s = 0.0
        self._out: Verdict | None = None
        """The verdict on the node that is about to be evicted."""
        self.wish = ""
        """Why the same nodes need a restart, such as for another rail; empty: they do not."""
        self._wished = ""
        """The value of `wish` for which the boundary was requested."""

    def reset(self) -> None:
        self._boundary = -1
        self._out = None
        self.wish = self._wished = ""

    def look(
        self,
        plan: GenerationPlan,
        peers: FailureDetector,
        aside: Collection[str],
        oversight: GenerationMonitor,
        *,
        now_s: float,
    ) -> str:
        """Why to begin a ballot now; empty if there is no reason."""
        if now_s < self._look_s:
            return ""
        self._look_s = now_s + self._settings.times.heartbeat_s / 2
        newcomers = [peer for peer in peers if _is_newcomer(peer, plan, aside)]
        oversight.num_spares = len(newcomers)
        if self._boundary >= 0:
            return self._at_boundary(plan, newcomers, oversight, now_s)
        if not oversight.is_steady:
            return ""
        why = _departure(plan, oversight) or self._wish_to_grow(plan, newcomers, now_s)
        if not why:
            self._out = self._to_evict(plan, newcomers, oversight, now_s)
            why = _eviction(self._out, plan) if self._out is not None else ""
        if not why:
            why = self._wished = self.wish
        if not why:
            return ""
        if oversight.awaits_notices:
            return ""
        if not oversight.progress().attached:
            return self._go(why, plan, oversight, now_s)
        self._boundary = oversight.stop_at_boundary(why)
        self._asked_s = now_s
        return ""

    def _at_boundary(
        self,
        plan: GenerationPlan,
        newcomers: list[PeerState],
        oversight: GenerationMonitor,
        now_s: float,
    ) -> str:
        if oversight.is_stopping or oversight.awaits_notices:
            return ""
        limit_s = self._settings.answer_s
        if departure := _departure(plan, oversight):
            why, limit_s = departure, self._settings.leave_s
        elif self._out is None:
            why = self._wished or self._growth(plan, newcomers)
        elif newcomers:
            why = _eviction(self._out, plan)
        else:
            # The spare is gone. The ranks wait at the boundary, so they are restarted here.
            why, self._out = "nobody stands by any more for the node that was to be evicted", None
        committed = oversight.orders.committed
        # A single node stops at its own boundary, which may be later.
        is_safe = committed is not None and committed >= (plan.generation, self._boundary)
        if oversight.reports.all_at_boundary and is_safe:
            return self._go(why, plan, oversight, now_s)
        if now_s - self._asked_s < limit_s:
            return ""
        why = f"{why}, without a snapshot at step {self._boundary}"
        return self._go(why, plan, oversight, now_s)

    def _go(
        self, why: str, plan: GenerationPlan, oversight: GenerationMonitor, now_s: float
    ) -> str:
        if self._out is not None:
            oversight.evict(self._out, _node_out(self._out, plan), why, now_s=now_s)
        if _departure(plan, oversight):
            oversight.name_checkpoint(now_s=now_s)
        return why

    # --- growth -------------------------------------------------------------------------------

    def _wish_to_grow(self, plan: GenerationPlan, newcomers: list[PeerState], now_s: float) -> str:
        if len(plan.members) >= self._settings.wishes.max_nodes or not newcomers:
            return ""
        has_settled = (
            now_s - max(peer.here_s for peer in newcomers) >= self._settings.times.settle_s
        )
        return self._growth(plan, newcomers) if has_settled else ""

    def _growth(self, plan: GenerationPlan, newcomers: list[PeerState]) -> str:
        count = min(self._settings.wishes.max_nodes, len(plan.members) + len(newcomers))
        return f"grows from {len(plan.members)} to {count} nodes"

    # --- eviction -----------------------------------------------------------------------------

    def _to_evict(
        self,
        plan: GenerationPlan,
        newcomers: list[PeerState],
        oversight: GenerationMonitor,
        now_s: float,
    ) -> Verdict | None:
        """The verdict on a node that was slow for `evict_after_s`, if a spare is present."""
        slow = self._settings.profile.slow
        if slow.action != "evict" or not newcomers:
            return None
        lasting = oversight.watching.slow.lasting(slow.evict_after_s, now_s=now_s)
        kinds = (VerdictKind.SLOW_COMPUTATION, VerdictKind.SLOW_COMMUNICATION)
        found = [
            one for one in lasting if one.kind in kinds and one.sure is not Confidence.POSSIBLE
        ]
        return next((one for one in found if _node_out(one, plan)), None)


def _is_newcomer(peer: PeerState, plan: GenerationPlan, aside: Collection[str]) -> bool:
    if peer.lost or peer.is_mute or not peer.linked or peer.card.node_id in aside:
        return False
    node = plan.member(peer.card.node_id)
    return node is None or node.card.identity != peer.card.identity


def _departure(plan: GenerationPlan, oversight: GenerationMonitor) -> str:
    nodes = [one for one in sorted(oversight.asked_to_leave) if plan.member(one) is not None]
    if not nodes:
        return ""
    return f"node{'s' if nodes[1:] else ''} {', '.join(nodes)} asked to leave"


def _node_out(verdict: Verdict, plan: GenerationPlan) -> str:
    """The node to evict.

    For a slow link it is the second end. If the first end was the cause, the next verdict finds it.
    """
    members = [one for one in verdict.nodes if plan.member(one) is not None]
    is_one = len(members) == 1
    is_link = verdict.kind is VerdictKind.SLOW_COMMUNICATION and len(members) == 2
    return members[-1] if is_one or is_link else ""


def _eviction(verdict: Verdict, plan: GenerationPlan) -> str:
    return f"node {_node_out(verdict, plan)} is evicted: {verdict.text}"
