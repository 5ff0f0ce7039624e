"""Changes the voters while ranks run, and the members at a step boundary. No step is lost.

Runs in:  the agent that leads. Pure.
Takes in: the nodes outside the generation, acceptances, the reports of its members, verdicts on
          slow nodes.
Gives:    the plan with another voter revision; whether it is chosen. The request for a snapshot at
          a common boundary; then the reason to begin a ballot.
Survives: nothing: the next leader gets the newest voter revision from the voters that accepted it.
Source:   joint majorities as in Raft's change of membership (Ongaro, Ousterhout, 2014), but with
          one leader for the whole generation; see ballots.py, rule 4. TRANSOM (arXiv 2310.10046)
          replaces a node by a spare. GREYHOUND's stragglers are worth a restart only if they
          persist, so a node that is slow for a moment is left alone.

Without a change of voters, a returning node would have no vote until the next generation. The loss
of another node could then leave too few of the old voters, although a warm spare is present.

Rule 1: voters change only if more nodes may be lost afterwards than before. An even number of
        voters tolerates no more losses than the odd number below it, and has one more voter that
        can be missing. No more spares vote than were requested, so they cannot outvote the members.
Rule 2: only nodes that have been connected for `last_call_timeout_s`, and have promised no later
        ballot, get a vote.
Rule 3: the leader repeats a change until it is chosen or the next ballot begins. Ranks are not
        affected.
Rule 4: the witness has a vote if the number of voting nodes is even and it is reachable. After
        `last_call_timeout_s` out of reach it loses its vote, so that two nodes do not depend on it.
        It gets the vote back after it has been reachable for `last_call_timeout_s`.
Rule 5: only an undisturbed run changes, and it grows only with nodes connected for
        `last_call_timeout_s`.
Rule 6: it resumes from the snapshot of the boundary once that is committed. If that does not
        happen in time, it resumes from the newest committed version.
Rule 7: a slow node is evicted only while a spare is present, and if none of its slow ranks was
        slow on another node too. At the boundary the verdict must still hold; if not, or if the
        spare is lost, the ranks train again. With `slow.action: auto`, the only verdict must name
        one node without any evidence against it, and the state must be committed and protected;
        no spare may be far below the median of the nodes' figures.
        At most `MAX_SLOW_PER_HOUR` nodes are evicted within an hour, none without the snapshot of
        the boundary, and none for an hour after an eviction was withdrawn.
Rule 8: a node with a hardware fault is evicted before its ranks fail, if another one can run them
        or the run may shrink. It gets `FAULT_LIMIT_S` for the snapshot.
Rule 9: a draining node trains until it is clear that the run does not stop, see
        draining.py. The boundary's snapshot is written to disk too, if there is a checkpoint
        directory, because the whole run may still be asked to stop.
"""

from collections.abc import Collection

import msgspec

from ftrun.config.cluster import MembershipSettings
from ftrun.membership.ballots import carries, electorate, electorate_of
from ftrun.membership.leader.failure_detector import FailureDetector, PeerState
from ftrun.monitor.verdicts import Confidence, Verdict, VerdictKind
from ftrun.records.membership import VotersChanged
from ftrun.recovery.commands import Command, JournalEntry, Send
from ftrun.recovery.generation_monitor import GenerationMonitor
from ftrun.wire.cluster.generation import (
    WITNESS,
    ConfigurationId,
    FailureHistory,
    GenerationPlan,
    Identity,
    NodeCard,
    VoterSet,
)
from ftrun.wire.cluster.membership import Accept, Accepted

FAULT_LIMIT_S = 5.0
"""Time for a snapshot before a node with a hardware fault is replaced without one."""
MAX_SLOW_PER_HOUR = 1
_HOUR_S = 3600.0


class VoterReconfiguration:
    """The voter changes of one leader, one after the other."""

    def __init__(self, settings: MembershipSettings, peers: FailureDetector) -> None:
        self.wanted: GenerationPlan | None = None
        """The announced voter revision that is not chosen yet."""
        self._settings = settings
        self._peers = peers
        self.void: set[ConfigurationId] = set()
        """Announced voter revisions that were given up. No other agent could have them chosen."""
        self._agreed: set[Identity] = set()
        self._next_poll_s = 0.0
        self._asked_s = 0.0

    def reset(self) -> None:
        if self.wanted is not None:
            self.void.add(self.wanted.configuration_id)
            self.wanted = None

    def poll(
        self, plan: GenerationPlan, history: FailureHistory, *, grows: bool = False, now_s: float
    ) -> list[Command]:
        """Starts a change that tolerates more losses; repeats it.

        Args:
            grows: spares are about to run ranks, so they get no votes.
        """
        if now_s < self._next_poll_s:
            return []
        self._next_poll_s = now_s + self._settings.times.heartbeat_interval_s / 2
        spares = self._standing_by(plan, now_s)
        last = self.wanted.voter_revision if self.wanted is not None else plan.voter_revision
        witness = self._witness(plan, len(plan.members) + len(spares), now_s)
        before = VoterSet(plan.generation, sorted(electorate_of(plan)), plan.voter_revision)
        changed = msgspec.structs.replace(
            plan,
            spares=spares,
            witness=witness,
            voter_revision=last + 1,
            decided_by=[before],
            history=history,
        )
        voters = electorate_of(changed)
        is_same = self.wanted is not None and electorate_of(self.wanted) == voters
        alive = _alive(self._peers, plan)
        bears_more = _support(voters, voters) > _support(electorate_of(plan), alive)
        limit_s = self._settings.times.last_call_timeout_s
        is_bound = not witness and self._peers.witness.has_been_away(limit_s, now_s=now_s)
        is_other = voters != electorate_of(plan) and not is_same and not grows
        if is_other and (bears_more or (is_bound and plan.witness)):
            self._want(changed)
        return self._ask(now_s)

    def _want(self, changed: GenerationPlan) -> None:
        self.reset()
        self.wanted = changed
        self._agreed.clear()
        self._asked_s = -1e9

    def accepted(
        self, card: NodeCard, body: Accepted, plan: GenerationPlan
    ) -> GenerationPlan | None:
        """The plan that is chosen by this acceptance, if any."""
        wanted = self.wanted
        if wanted is None or (body.generation, body.voter_revision) != wanted.configuration_id:
            return None
        self._agreed.add(card.identity)
        before, after = electorate_of(plan), electorate_of(wanted)
        gone = {identity for identity in before if self._peers.has_successor(identity)}
        if not (carries(before, self._agreed, gone=gone) and carries(after, self._agreed)):
            return None
        self.wanted = None
        return wanted

    def _ask(self, now_s: float) -> list[Command]:
        wanted = self.wanted
        if wanted is None or now_s - self._asked_s < 2 * self._settings.times.heartbeat_interval_s:
            return []
        self._asked_s = now_s
        asked = electorate(wanted.voters) | {
            identity for voters in wanted.decided_by for identity in voters.identities
        }
        left = asked - self._agreed
        linked = [peer.card for peer in self._peers if peer.linked]
        return [Send(card.node_id, Accept(wanted)) for card in linked if card.identity in left]

    def _witness(self, plan: GenerationPlan, num_nodes: int, now_s: float) -> int:
        """Incarnation of the witness if it votes next to this number of nodes; else 0."""
        witness, for_s = self._peers.witness, self._settings.times.last_call_timeout_s
        if num_nodes % 2 or num_nodes < 2:
            return 0
        if plan.witness and plan.witness == witness.life:
            return 0 if witness.has_been_away(for_s, now_s=now_s) else plan.witness
        limit_s = self._settings.times.self_fencing_timeout_s
        holds = witness.holds(witness.life, limit_s, now_s=now_s)
        return witness.life if holds and witness.has_been_there(for_s, now_s=now_s) else 0

    def _standing_by(self, plan: GenerationPlan, now_s: float) -> list[NodeCard]:
        order = [card.node_id for card in plan.spares]
        members = {node.node_id for node in plan.members}
        outside = [peer for peer in self._peers if peer.card.node_id not in members]
        here = {one.card.node_id: one.card for one in outside if self._may_vote(one, plan, now_s)}
        found = dict.fromkeys([*(one for one in order if one in here), *sorted(here)])
        return [here[one] for one in found][: self._settings.cluster_size.spares]

    def _may_vote(self, peer: PeerState, plan: GenerationPlan, now_s: float) -> bool:
        if peer.lost or peer.is_unresponsive or peer.is_leaving or not peer.linked:
            return False
        has_stayed = now_s - peer.here_s >= self._settings.times.last_call_timeout_s
        return has_stayed and peer.promised <= plan.generation


def _alive(peers: FailureDetector, plan: GenerationPlan) -> set[Identity]:
    nodes = {peer.card.identity for peer in peers if not (peer.lost or peer.is_leaving)}
    is_there = plan.witness and plan.witness == peers.witness.life and not peers.witness.reason
    return nodes | ({(WITNESS, plan.witness)} if is_there else set())


def _support(voters: Collection[Identity], alive: Collection[Identity]) -> int:
    """How many more of these voters may be lost while the others can still decide."""
    return len(set(voters) & set(alive)) - len(voters) // 2 - 1


def note_of(plan: GenerationPlan) -> JournalEntry:
    spares = ", ".join(card.node_id for card in plan.spares)
    outside = f" and {WITNESS}" if plan.witness else ""
    text = f"voters of the next generation: {len(plan.voters)} nodes{outside}"
    text += f"; spares: {spares}" if spares else ""
    return JournalEntry(VotersChanged(text, plan.voter_revision))


class BoundaryReconfiguration:
    """One leader's pending change: nodes to add, to evict or to drain."""

    def __init__(
        self, settings: MembershipSettings, peers: FailureDetector, monitor: GenerationMonitor
    ) -> None:
        self._settings = settings
        self._peers = peers
        self._monitor = monitor
        self._boundary = -1
        self._asked_s = 0.0
        self._next_poll_s = 0.0
        self._out: Verdict | None = None
        """The verdict on the node that is about to be evicted."""
        self._withdrawn_s = -_HOUR_S
        """When an eviction was last withdrawn."""
        self.requested = ""
        """Why the same nodes need a restart, such as for another rail; empty: they do not."""
        self._requested = ""
        """The value of `requested` for which the boundary was requested."""

    def reset(self) -> None:
        self._boundary = -1
        self._out = None
        self.requested = self._requested = ""

    def poll(self, plan: GenerationPlan, excluded: Collection[str], *, now_s: float) -> str:
        """Why to begin a ballot now; empty if there is no reason."""
        monitor = self._monitor
        if now_s < self._next_poll_s:
            return ""
        self._next_poll_s = now_s + self._settings.times.heartbeat_interval_s / 2
        joining_nodes = [peer for peer in self._peers if _is_joining(peer, plan, excluded)]
        monitor.num_spares = len(joining_nodes)
        if self._boundary >= 0:
            return self._at_boundary(plan, joining_nodes, now_s)
        if not monitor.is_steady:
            return ""
        reason = _departure(plan, monitor) or self._request_growth(plan, joining_nodes, now_s)
        if not reason:
            self._out = self._faulty(plan, joining_nodes)
            self._out = self._out or self._to_evict(plan, joining_nodes, now_s)
            reason = _eviction(self._out, plan) if self._out is not None else ""
        if not reason:
            reason = self._requested = self.requested
        if not reason or monitor.awaits_notices:
            return ""
        if not monitor.reports.attached:
            return self._go(reason, plan, now_s)
        self._boundary = monitor.stop_at_boundary(reason)
        self._asked_s = now_s
        return ""

    def _at_boundary(
        self, plan: GenerationPlan, joining_nodes: list[PeerState], now_s: float
    ) -> str:
        monitor = self._monitor
        if monitor.is_stopping or monitor.awaits_notices:
            return ""
        limit_s, out = self._settings.answer_s, self._out
        is_slow = out is not None and out.kind is not VerdictKind.FAILING_NODE
        if departure := _departure(plan, monitor):
            reason, limit_s = departure, self._settings.leave_s
            self._out = None if is_slow else out  # the node that drains needs the spare
        elif out is None:
            reason = self._requested or self._growth(plan, joining_nodes)
        elif is_slow and (why := self._obstacle(out, joining_nodes)):
            return self._withdraw(why, now_s)
        elif joining_nodes or self._may_shrink(plan, out):
            reason = _eviction(out, plan)
            limit_s = limit_s if is_slow else FAULT_LIMIT_S
        else:
            # The spare is lost. The ranks wait at the boundary, so they are restarted here.
            reason = self._requested = f"no spare is left to replace {out.nodes[-1]}"
            self._out = None
        committed = monitor.orders.committed
        # A single node stops at its own boundary, which may be later.
        is_safe = committed is not None and committed >= (plan.generation, self._boundary)
        is_auto = self._settings.profile.slow.action == "auto" and is_slow and not departure
        is_safe = is_safe and (not is_auto or monitor.are_movable)
        if monitor.reports.all_at_boundary and is_safe:
            return self._go(reason, plan, now_s)
        if now_s - self._asked_s < limit_s:
            return ""
        if is_auto:
            return self._withdraw(f"no snapshot of step {self._boundary} is protected", now_s)
        reason = f"{reason}, without a snapshot at step {self._boundary}"
        return self._go(reason, plan, now_s)

    def _go(self, reason: str, plan: GenerationPlan, now_s: float) -> str:
        if self._out is not None:
            node_id, ranks = _node_out(self._out, plan), _slow_ranks(self._out, plan)
            self._monitor.failures.evict(self._out, node_id, ranks, now_s=now_s)
            self._monitor.evicted(self._out, reason, now_s=now_s)
        if _departure(plan, self._monitor):
            self._monitor.name_checkpoint(now_s=now_s)
        return reason

    def _obstacle(self, out: Verdict, joining_nodes: list[PeerState]) -> str:
        """Why a slow node is not evicted at the boundary; empty: it is."""
        verdicts = self._monitor.watching.slow.verdicts
        known = {one.fingerprint: one.confidence for one in verdicts}
        is_slow = known.get(out.fingerprint, Confidence.POSSIBLE) is not Confidence.POSSIBLE
        # Ranks that wait at the boundary have no traffic and make no steps: no new evidence.
        if not is_slow and not self._monitor.reports.all_at_boundary:
            return "it is not slow any more"
        return "" if joining_nodes else "no spare is left"

    def _withdraw(self, why: str, now_s: float) -> str:
        assert self._out is not None
        subject = f"the eviction for slowness is withdrawn: {why} ({self._out.text})"
        self._monitor.withdraw_boundary(subject)
        self._boundary, self._out, self._withdrawn_s = -1, None, now_s
        return ""

    # --- growth -------------------------------------------------------------------------------

    def _request_growth(
        self, plan: GenerationPlan, joining_nodes: list[PeerState], now_s: float
    ) -> str:
        if len(plan.members) >= self._settings.cluster_size.max_nodes or not joining_nodes:
            return ""
        for_s = now_s - max(peer.here_s for peer in joining_nodes)
        has_settled = for_s >= self._settings.times.last_call_timeout_s
        return self._growth(plan, joining_nodes) if has_settled else ""

    def _growth(self, plan: GenerationPlan, joining_nodes: list[PeerState]) -> str:
        count = min(self._settings.cluster_size.max_nodes, len(plan.members) + len(joining_nodes))
        return f"grows from {len(plan.members)} to {count} nodes"

    # --- eviction -----------------------------------------------------------------------------

    def _faulty(self, plan: GenerationPlan, joining_nodes: list[PeerState]) -> Verdict | None:
        """The verdict on a member with a hardware fault, if the run can continue without it."""
        faults = self._monitor.reports.faults
        node_id = next((one.node_id for one in plan.members if one.node_id in faults), "")
        if not node_id or not self._monitor.are_movable:
            return None
        verdict = Verdict(
            kind=VerdictKind.FAILING_NODE,
            culprits=(),
            nodes=(node_id,),
            text=f"node {node_id} has a hardware fault: {faults[node_id]}",
            evidence=(faults[node_id],),
            confidence=Confidence.CERTAIN,
            act_immediately=True,
            fingerprint=f"{VerdictKind.FAILING_NODE.value} {node_id}",
        )
        return verdict if joining_nodes or self._may_shrink(plan, verdict) else None

    def _may_shrink(self, plan: GenerationPlan, verdict: Verdict) -> bool:
        is_fault = verdict.kind is VerdictKind.FAILING_NODE
        return is_fault and len(plan.members) > self._settings.cluster_size.min_nodes

    def _to_evict(
        self, plan: GenerationPlan, joining_nodes: list[PeerState], now_s: float
    ) -> Verdict | None:
        """The verdict on a node that was slow for `evict_after_s`, if a spare is present."""
        slow, monitor = self._settings.profile.slow, self._monitor
        if slow.action == "report" or not joining_nodes:
            return None
        persistent = monitor.watching.slow.persistent(slow.evict_after_s, now_s=now_s)
        found = [
            one
            for one in persistent
            if one.confidence is not Confidence.POSSIBLE
            if (node_id := _node_out(one, plan))
            if not monitor.failures.follows(node_id, _slow_ranks(one, plan))
        ]
        if slow.action == "auto":
            # Rule 7: what a wrong verdict may cost is limited.
            is_safe = monitor.orders.committed is not None and monitor.are_movable
            is_safe = is_safe and not any(peer.is_below_median for peer in joining_nodes)
            has_room = monitor.failures.num_slow(now_s=now_s) < MAX_SLOW_PER_HOUR
            is_free = has_room and now_s - self._withdrawn_s >= _HOUR_S
            is_clear = is_safe and is_free and len(monitor.watching.slow.verdicts) == 1
            found = [one for one in found if is_clear and _names_one_node(one)]
        return next(iter(found), None)


def _is_joining(peer: PeerState, plan: GenerationPlan, excluded: Collection[str]) -> bool:
    if peer.lost or peer.is_unresponsive or not peer.linked or peer.card.node_id in excluded:
        return False
    node = plan.member(peer.card.node_id)
    return node is None or node.card.identity != peer.card.identity


def _departure(plan: GenerationPlan, monitor: GenerationMonitor) -> str:
    nodes = [one for one in sorted(monitor.drain_requested) if plan.member(one) is not None]
    return f"draining {', '.join(nodes)}" if nodes else ""


def _node_out(verdict: Verdict, plan: GenerationPlan) -> str:
    """The node to evict; of a slow link the second end: the next verdict would find the first."""
    members = [one for one in verdict.nodes if plan.member(one) is not None]
    is_one = len(members) == 1
    is_link = verdict.kind is VerdictKind.SLOW_COMMUNICATION and len(members) == 2
    return members[-1] if is_one or is_link else ""


def _names_one_node(verdict: Verdict) -> bool:
    return len(verdict.nodes) == 1 and not verdict.counter_evidence


def _slow_ranks(verdict: Verdict, plan: GenerationPlan) -> tuple[int, ...]:
    """The ranks that a verdict on one node concerns; of a link with two ends none."""
    node = plan.member(verdict.nodes[0]) if len(verdict.nodes) == 1 else None
    return verdict.culprits or (tuple(node.ranks) if node is not None else ())


def _eviction(verdict: Verdict, plan: GenerationPlan) -> str:
    return f"node {_node_out(verdict, plan)} is evicted: {verdict.text}"
