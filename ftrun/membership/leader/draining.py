"""Nodes that received SIGTERM: whether the run ends, or continues without them.

Runs in:  the agent that leads. Pure.
Takes in: heartbeats of nodes that received SIGTERM, the present nodes, time.
Gives:    the stop of the run, or the mark on draining nodes; which of them may end now.
Survives: nothing, and need not: a draining node repeats its notice to every later leader.

A scheduler asks one node to leave (its machine is drained, its pod preempted) with the same signal
with which it asks them all to stop (a job is cancelled or deleted). The set of nodes that received
the signal distinguishes the two.

Rule 1: if every node is asked, or too few would be left, the run stops at once. During a ballot,
        and shortly after a loss, too few may be left only because an agent is being restarted: then
        the run stops if this lasts for `LIMIT_S`.
Rule 2: otherwise the nodes drain after `NOTICE_S` without another notice; the ranks train in that
        time. Notices that keep coming for `LIMIT_S` are those of a job that is deleted, node by
        node.
Rule 3: both begin in the same way, with a snapshot at a common boundary. A departure can therefore
        still become a stop, and no step is lost by that.
Rule 4: a draining node may end when the run no longer needs its state: other nodes have its ranks,
        and protect the version they started from. It may also end when its time is over.
Rule 5: this holds only for the generation in which it was found, because a ballot may need the
        state of a draining node. It is determined again after each ballot. Protection has read
        every byte. If a node's state has no protection, only a step shows that its ranks have
        read it, and that it is whole.
Rule 6: a draining node may end only after the leader had time to change the voters, and while no
        voter misses heartbeats: that voter may be lost, and the voters must change again. The vote
        of the draining node may be needed for that. Without it, the run can be left with half of
        its voters.
Rule 7: a leader that drains proposes no generation, which would end with it. At the boundary it
        resigns in favour of the first voter that stays, so the ranks are restarted once.
"""

from collections.abc import Collection

import msgspec

from ftrun.config.cluster import MembershipSettings
from ftrun.membership.leader.failure_detector import FailureDetector
from ftrun.membership.leader.reconfiguration import VoterReconfiguration
from ftrun.records.membership import NodesDraining
from ftrun.recovery.commands import JournalEntry, SupervisorCommand
from ftrun.recovery.generation_monitor import GenerationMonitor
from ftrun.wire.cluster.generation import GenerationPlan, Identity, NodeCard
from ftrun.wire.cluster.membership import Heartbeat, LeaderHeartbeat, LeaderResigned

NOTICE_S = 2.0
"""Seconds without another notice. Schedulers signal all nodes of a job within less: `scancel` does
so at once, Kubernetes deletes some twenty pods of a Job in a second."""

LIMIT_S = 10.0
_SIGTERM = 15


class NodeDraining:
    """One leader's view of the nodes that received SIGTERM."""

    def __init__(
        self,
        settings: MembershipSettings,
        peers: FailureDetector,
        monitor: GenerationMonitor,
        reconfiguration: VoterReconfiguration,
    ) -> None:
        self._settings = settings
        self._peers = peers
        self._monitor = monitor
        self._reconfiguration = reconfiguration
        self._asked_s: dict[Identity, float] = {}
        self._leaving: frozenset[Identity] = frozenset()
        """Nodes in `_asked_s` that drain; the run continues without them."""
        self._last_s = 0.0
        self._safe_s: float | None = None
        """Time since which the run does not need the state of the draining nodes."""
        self._freed: frozenset[Identity] = frozenset()
        self._is_stop = False
        self._short_s: float | None = None
        """Time since which too few nodes are left, while lost ones may return."""

    @property
    def is_under_way(self) -> bool:
        return bool(self._leaving)

    def reset(self) -> None:
        self._safe_s, self._freed = None, frozenset()

    def resignation(self, plan: GenerationPlan, me: NodeCard, reason: str) -> LeaderResigned | None:
        """Rule 7: the order of a leader that drains; None: it does not, or no voter can follow it.

        A witness promises no other proposer before the end of this leader's lease.
        """
        if me.identity not in self._leaving or self._peers.witness.is_used:
            return None
        for card in plan.voters:
            peer = self._peers.get(card.node_id)
            if peer is None or peer.card.identity != card.identity or peer.is_unresponsive:
                continue
            if peer.linked and not peer.lost and card.identity not in self._asked_s:
                return LeaderResigned(plan.generation, card, reason, sorted(self._leaving))
        return None

    def inherit(self, leaving: Collection[Identity], *, now_s: float) -> None:
        """Continues the drains of a leader that has resigned."""
        self._asked_s |= dict.fromkeys(leaving, now_s - NOTICE_S)
        self._leaving |= frozenset(leaving)
        for peer in self._peers:
            peer.is_leaving |= peer.card.identity in self._leaving
        self._update_monitor()

    def note(self, card: NodeCard, heartbeat: Heartbeat, *, now_s: float) -> None:
        """Records that this agent received SIGTERM; each of its heartbeats repeats it."""
        if heartbeat.leaves and card.identity not in self._asked_s:
            self._asked_s[card.identity] = self._last_s = now_s
            self._update_monitor()

    def poll(
        self, plan: GenerationPlan | None, unfit: set[str], *, is_settled: bool, now_s: float
    ) -> tuple[list[JournalEntry], list[SupervisorCommand]]:
        """Decides between draining and stopping; a stop waits for a settled generation (Rule 1)."""
        here = {peer.card.identity for peer in self._peers if not peer.lost}
        self._asked_s = {one: at_s for one, at_s in self._asked_s.items() if one in here}
        asked = frozenset(self._asked_s)
        self._leaving &= asked
        notes: list[JournalEntry] = []
        new = asked - self._leaving
        reason = shortage = self._stop_reason(here, unfit) if asked else ""
        if not reason and new and now_s - self._last_s >= NOTICE_S:
            self._leaving = asked
            self._safe_s = None  # Rule 6: a draining node votes until the voters change
            names = ", ".join(sorted(node_id for node_id, _ in new))
            text = f"draining {names}; the run continues without them"
            notes.append(JournalEntry(NodesDraining(text), announce=True))
        elif new and now_s - min(self._asked_s[identity] for identity in new) >= LIMIT_S:
            reason = reason or "the nodes receive SIGTERM one after the other"
        for peer in self._peers:
            peer.is_leaving = peer.card.identity in self._leaving
            if peer.is_leaving:
                self._monitor.past.leaves(peer.card, now_s=now_s)
        self._let_go(plan, now_s, is_settled=is_settled)
        may_wait = bool(shortage) and not here <= asked
        may_wait = may_wait and (not is_settled or self._may_return(here, unfit, now_s))
        is_due = bool(reason) and self._is_due(may_wait=may_wait, now_s=now_s)
        self._short_s = self._short_s if reason else None
        self._is_stop = is_due
        self._update_monitor()
        if not is_due or self._monitor.is_stopping:
            return notes, []
        if not is_settled:
            self._monitor.stop_signal = _SIGTERM
            return notes, []
        return notes, self._monitor.stop(_SIGTERM, reason, now_s=now_s)

    def _is_due(self, *, may_wait: bool, now_s: float) -> bool:
        if not may_wait:
            return True
        self._short_s = now_s if self._short_s is None else self._short_s
        return now_s - self._short_s >= LIMIT_S

    def _may_return(self, here: set[Identity], unfit: set[str], now_s: float) -> bool:
        """Whether enough nodes would be left with those that were lost in the last moments."""
        asked = {node_id for node_id, _ in self._asked_s}
        lost = self._monitor.failures.lately_lost(LIMIT_S, now_s=now_s)
        left = ({node_id for node_id, _ in here} | lost) - asked - unfit
        return len(left) >= self._settings.cluster_size.min_nodes

    def add_drained(self, body: LeaderHeartbeat) -> LeaderHeartbeat:
        """Adds the draining nodes that may end now to a heartbeat."""
        # A drained node may have returned: its new agent is not draining.
        here = self._freed & {peer.card.identity for peer in self._peers}
        leave = tuple(sorted(node_id for node_id, _ in here))
        return msgspec.structs.replace(body, leave=leave) if leave else body

    def _stop_reason(self, here: set[Identity], unfit: set[str]) -> str:
        asked, cluster_size = self._asked_s.keys(), self._settings.cluster_size
        if here <= asked:
            return "every node has received SIGTERM"
        names = ", ".join(sorted(node_id for node_id, _ in asked))
        left = sum(1 for identity in here - asked if identity[0] not in unfit)
        if left < cluster_size.min_nodes:
            return f"draining {names} would leave {left} of at least {cluster_size.min_nodes} nodes"
        return ""

    def _let_go(self, plan: GenerationPlan | None, now_s: float, *, is_settled: bool) -> None:
        is_safe = is_settled and plan is not None and self._is_safe(plan, now_s)
        if not is_safe or self._reconfiguration.wanted is not None:
            self._safe_s = None
        elif self._safe_s is None:
            self._safe_s = now_s
        # Rule 6: the voters are re-evaluated twice per heartbeat period.
        safe_for_s = 0.0 if self._safe_s is None else now_s - self._safe_s
        has_settled = safe_for_s >= self._settings.times.heartbeat_interval_s
        limit_s = now_s - self._settings.let_go_s
        free = [one for one in self._leaving if has_settled or self._asked_s[one] <= limit_s]
        members = {node.node_id for node in plan.members} if plan is not None else set()
        self._freed = frozenset(one for one in free if one[0] not in members)

    def _is_safe(self, plan: GenerationPlan, now_s: float) -> bool:
        """Whether no voter may soon be lost, and the members hold, whole, a version to resume from.

        A member that has restored keeps the shards of its ranks. After a change of the world size
        its ranks read parts of other shards, and the draining node may hold the only copy of these
        until a version of the new world is committed.
        """
        if self._peers.has_unresponsive((one.node_id for one in plan.voters), now_s=now_s):
            return False  # Rule 6
        reports, committed = self._monitor.reports, self._monitor.orders.committed
        has_stepped = reports.steps_here > 0
        if committed is None:
            return has_stepped and not reports.attached
        if plan.is_resized and committed[0] < plan.generation:
            return False
        return has_stepped or reports.are_protected()

    def _update_monitor(self) -> None:
        asked = self._asked_s.keys()
        self._monitor.drain_requested = frozenset(node_id for node_id, _ in asked)
        self._monitor.awaits_notices = bool(asked - self._leaving) and not self._is_stop
