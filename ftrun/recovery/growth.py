"""When a run takes in more nodes: at a step boundary, so that no step is lost.

Runs in:  the agent that leads. Pure.
Takes in: who is here beside the generation, what its members report.
Gives:    the wish for a last snapshot at a common boundary; then the reason to begin a ballot.

Rule 1: only a run that goes on undisturbed grows, and only for nodes that have stayed a while.
Rule 2: it goes on from the snapshot of the boundary once that is committed; where that does not
        come to pass in time, from the newest one there is.
"""

from collections.abc import Collection

from ftrun.recovery.attendance import Peer, Peers
from ftrun.recovery.ballots import identity
from ftrun.recovery.oversight import Oversight
from ftrun.recovery.settings import ClusterSettings
from ftrun.wire.cluster import Plan


class Growth:
    """One lead's plans to take nodes in."""

    def __init__(self, settings: ClusterSettings) -> None:
        self._settings = settings
        self._boundary = -1
        self._asked_s = 0.0
        self._look_s = 0.0

    def reset(self) -> None:
        """Another generation is on its way."""
        self._boundary = -1

    def look(
        self,
        plan: Plan,
        peers: Peers,
        aside: Collection[str],
        oversight: Oversight,
        *,
        now_s: float,
    ) -> str:
        """Why to begin a ballot now; empty while there is no reason."""
        wishes = self._settings.wishes
        if len(plan.members) >= wishes.max_nodes or now_s < self._look_s:
            return ""
        self._look_s = now_s + self._settings.heartbeat_s / 2
        is_asked = self._boundary >= 0
        if not (oversight.is_steady if not is_asked else not oversight.is_stopping):
            return ""
        newcomers = [peer for peer in peers if self._is_newcomer(peer, plan, aside)]
        if not is_asked and not self._have_settled(newcomers, now_s):
            return ""
        count = min(wishes.max_nodes, len(plan.members) + len(newcomers))
        why = f"grows from {len(plan.members)} to {count} nodes"
        if not is_asked:
            if not oversight.progress().attached:
                return why
            self._boundary = oversight.stop_at_boundary(why)
            self._asked_s = now_s
            return ""
        committed = oversight.orders.committed
        # One node alone stops at a boundary of its own, which may be a later one.
        is_safe = committed is not None and committed >= (plan.generation, self._boundary)
        if oversight.reports.all_at_boundary and is_safe:
            return why
        is_late = now_s - self._asked_s >= self._settings.answer_s
        return f"{why}, without a snapshot at step {self._boundary}" if is_late else ""

    def _is_newcomer(self, peer: Peer, plan: Plan, aside: Collection[str]) -> bool:
        if peer.lost or peer.is_mute or not peer.linked or peer.card.node_id in aside:
            return False
        node = plan.member(peer.card.node_id)
        return node is None or identity(node.card) != identity(peer.card)

    def _have_settled(self, newcomers: list[Peer], now_s: float) -> bool:
        if not newcomers:
            return False
        return now_s - max(peer.met_s for peer in newcomers) >= self._settings.settle_s
