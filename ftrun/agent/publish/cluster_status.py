"""Builds the status (docs/operations.md) from the control loop: the run, its nodes, its incidents.

Runs in the thread of the control loop; other threads get one immutable `ControlLoopStatus`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from ftrun import clock
from ftrun.agent.cluster.control_loop import ControlLoop
from ftrun.agent.publish.summary_line import (
    Activity,
    ProtectionSummary,
    activity_text,
    next_loss_text,
)
from ftrun.agent.publish.versions import earlier_protection, left_of_earlier, run_versions
from ftrun.ids import version
from ftrun.membership.ballots import electorate
from ftrun.membership.discovery import MemberRole
from ftrun.membership.leader.failure_detector import SHOWN_S, PeerState
from ftrun.membership.leader.leader import Leader
from ftrun.monitor.numerics import finite
from ftrun.monitor.verdicts import RankView
from ftrun.records.incidents import IncidentClosed
from ftrun.recovery.incidents import Incident
from ftrun.recovery.past import Departure
from ftrun.recovery.supervisor import SupervisorState
from ftrun.wire.cluster.generation import GenerationPlan
from ftrun.wire.cluster.membership import Heartbeat, RankReport
from ftrun.wire.messages.status import (
    CLOSED,
    ClusterStatus,
    ExclusionStatus,
    IncidentStatus,
    NodeStatus,
    RankStatus,
    RestartBudgetStatus,
    RestartStatus,
    VersionStatus,
    WitnessStatus,
)

WARNINGS_SHOWN = 3
INCIDENTS_SHOWN = 5
"""Number of closed incidents in the status, in addition to the open one."""


@dataclass(frozen=True, slots=True)
class ControlLoopStatus:
    """Decisions and incidents at one moment; on several nodes also the status of the whole run."""

    leads: bool
    leader_id: str
    """Node id of the leader; empty if this node has found no leader."""
    leader_host: str
    state: SupervisorState
    lateness_s: Mapping[int, float]
    suspicion: tuple[float, str] | None
    """Seconds without a step, and the description of the suspected hang; None: no hang is
    suspected."""
    lifecycle: str | None
    restart_budget: RestartBudgetStatus
    incidents: tuple[IncidentStatus, ...]
    cluster: ClusterStatus | None
    """None in a run on one node."""


def control_loop_status(control_loop: ControlLoop, *, is_alone: bool) -> ControlLoopStatus:
    now_s = clock.now_s()
    leads, leader = control_loop.leads, control_loop.member.leader_card
    supervisor = control_loop.monitor.supervisor
    incidents = control_loop.monitor.incidents
    suspected = incidents.open if leads and incidents.is_suspected else None
    budget = supervisor.budget
    return ControlLoopStatus(
        leads=leads,
        leader_id=leader.node_id if leader is not None else "",
        leader_host=leader.host if leader is not None else "",
        state=supervisor.state,
        lateness_s=MappingProxyType(dict(lateness_of(control_loop))),
        suspicion=None
        if suspected is None
        else (max(0.0, now_s - suspected.started_s), suspected.text),
        lifecycle=incidents.life.value if leads else None,
        restart_budget=RestartBudgetStatus(budget.used(now_s=now_s), budget.limit, budget.window_s),
        incidents=incidents_of(control_loop, now_s=now_s) if leads else (),
        cluster=None if is_alone else cluster_status(control_loop),
    )


def cluster_status(control_loop: ControlLoop) -> ClusterStatus:
    """Status of the run as known to this agent; complete only on the leader."""
    plan, leader, member = control_loop.plan, control_loop.member.leader, control_loop.member
    known: dict[str, Any] = {
        "leader": member.leader_card.node_id if member.leader_card else None,
        "answered_by": member.me.node_id,
        "role": member.role.value,
        "generation": plan.generation if plan is not None else None,
        "requested_size": str(control_loop.settings.cluster_size),
        "witness": _witness(control_loop, plan),
    }
    if leader is None:
        state = member.role.value
        return ClusterStatus(state=state, summary=_without_leader(control_loop), **known)
    heartbeats = dict(control_loop.monitor.reports.heartbeats)
    run = _LedRun(control_loop, leader, plan, heartbeats, clock.now_s())
    protection = run.protection()
    return ClusterStatus(
        **known,
        **protection,
        state=run.state,
        summary=run.summary(protection, known["witness"]),
        nodes=run.nodes(),
        lifecycle=control_loop.monitor.incidents.life.value,
        incidents=incidents_of(control_loop, now_s=run.now_s),
        restarts=tuple(
            RestartStatus(
                generation=one.generation,
                cause=one.cause,
                age_s=max(0.0, run.now_s - one.at_s),
                restored=str(version(*one.restored)) if one.restored is not None else None,
                downtime_s=one.downtime_s,
            )
            for one in control_loop.monitor.past.restarts
        ),
        warnings=_warnings(run.heartbeats),
        pause_reason=leader.pause.reason,
        exclusions=tuple(
            ExclusionStatus(node_id, reason, left_s if left_s is None else round(left_s, 1))
            for node_id, (left_s, reason) in sorted(
                control_loop.monitor.failures.excluded(now_s=run.now_s).items()
            )
        ),
        unfit=dict(leader.screening.reported),
        network=leader.paths.status(plan, now_s=run.now_s),
        versions=run.versions(),
    )


def lateness_of(control_loop: ControlLoop) -> Mapping[int, float]:
    """Seconds by which each rank enters the collectives of a step late; only ranks with data."""
    return control_loop.monitor.watching.slow.lateness_s


# --- incidents --------------------------------------------------------------------------------


def incidents_of(control_loop: ControlLoop, *, now_s: float) -> tuple[IncidentStatus, ...]:
    """The open incident, then the last closed incidents, newest first."""
    known = control_loop.monitor.incidents
    closed = list(known.closed)[-INCIDENTS_SHOWN:][::-1]
    found = tuple(_closed(at_s, one, now_s) for at_s, one in closed)
    if known.open is None:
        return found
    return (_open(known.open, known.life.value, now_s), *found)


def _open(incident: Incident, lifecycle: str, now_s: float) -> IncidentStatus:
    verdict = incident.verdict
    return IncidentStatus(
        number=incident.number,
        state=lifecycle,
        age_s=max(0.0, now_s - incident.started_s),
        text=incident.text,
        verdict_kind=verdict.kind.value if verdict is not None else None,
        confidence=verdict.confidence.value if verdict is not None else None,
        culprits=tuple(verdict.culprits) if verdict is not None else (),
        victims=tuple(verdict.victims) if verdict is not None else (),
        nodes=tuple(verdict.nodes) if verdict is not None else (),
        actions=tuple(incident.actions),
        generations=tuple(incident.generations),
        detected_s=incident.detected_s,
        error_class=verdict.error_class if verdict is not None else "",
    )


def _closed(at_s: float, closed: IncidentClosed, now_s: float) -> IncidentStatus:
    return IncidentStatus(
        number=closed.incident,
        state=CLOSED,
        age_s=max(0.0, now_s - at_s),
        text=closed.text,
        verdict_kind=closed.verdict_kind,
        culprits=closed.culprits,
        nodes=closed.nodes,
        actions=closed.actions,
        generations=closed.generations,
        detected_s=closed.detected_s,
        recovered_s=closed.recovered_s,
        steps_lost=closed.steps_lost,
        error_class=closed.error_class,
    )


# --- nodes ------------------------------------------------------------------------------------


def _node(
    peer: PeerState,
    plan: GenerationPlan | None,
    heartbeat: Heartbeat | None,
    lateness_s: Mapping[int, float],
    now_s: float,
) -> NodeStatus:
    found = NodeStatus(
        node_id=peer.card.node_id,
        host=peer.card.host,
        role=_role(peer, plan),
        failure_reason=peer.lost if not peer.has_left else "",
        last_heartbeat_age_s=round(max(0.0, now_s - peer.received_s), 2),
        domain=peer.card.domain,
        preflight=str(peer.fitness) if peer.fitness is not None else "",
    )
    if heartbeat is None:
        return found
    state = "suspended" if heartbeat.state == "held" else heartbeat.state
    return msgspec.structs.replace(
        found,
        state=state if not peer.lost else "unknown",
        step=heartbeat.step or None,
        ready=heartbeat.ready,
        unprotected_reason=heartbeat.unprotected,
        stay_problem=heartbeat.stay_problem,
        ranks=rank_statuses(heartbeat.ranks, heartbeat.views, lateness_s),
    )


def _role(peer: PeerState, plan: GenerationPlan | None) -> str:
    node_id = peer.card.node_id
    if peer.lost:
        return "left" if peer.has_left else "lost"
    if plan is not None and plan.member(node_id) is not None:
        return "member"
    is_spare = plan is not None and any(card.node_id == node_id for card in plan.spares)
    return "spare" if is_spare else "joining"


def rank_statuses(
    reports: Iterable[RankReport], views: Iterable[RankView], lateness_s: Mapping[int, float]
) -> tuple[RankStatus, ...]:
    calls = _last_collectives(views)
    return tuple(
        RankStatus(
            rank=rank.rank,
            pid=rank.pid,
            state=rank.state,
            step=rank.step if rank.age_s >= 0 else None,
            heartbeat_age_s=rank.age_s if rank.age_s >= 0 else None,
            phase=rank.phase,
            loss=finite(rank.loss),
            step_p50_s=rank.p50_s or None,
            step_p99_s=rank.p99_s or None,
            lateness_s=lateness_s.get(rank.rank),
            last_collective=calls.get(rank.rank),
        )
        for rank in reports
    )


def _last_collectives(views: Iterable[RankView]) -> dict[int, str]:
    """By rank, such as `all_reduce #41,207`; known only during a suspicion."""
    found: dict[int, str] = {}
    for view in views:
        entered = [group for group in view.groups if group.calls]
        group = next((one for one in entered if one.waits_seq), entered[-1] if entered else None)
        if group is not None:
            call = group.call(group.waits_seq) or group.calls[-1]
            found[view.rank] = f"{call.op} #{call.seq:,}"
    return found


def _gone(gone: Departure, now_s: float) -> NodeStatus:
    return NodeStatus(
        node_id=gone.card.node_id,
        host=gone.card.host,
        role="left" if gone.has_left else "lost",
        failure_reason="" if gone.has_left else gone.reason,
        last_heartbeat_age_s=round(max(0.0, now_s - gone.at_s), 2),
        domain=gone.card.domain,
    )


def _warnings(heartbeats: Mapping[str, Heartbeat]) -> tuple[str, ...]:
    """Those about wrong results come first."""
    found: list[str] = []
    for kind in ("repeat_warning", "file_warning", "capture_warning"):
        texts = ((node_id, getattr(one, kind)) for node_id, one in sorted(heartbeats.items()))
        found += _first([f"node {node_id}: {text}" for node_id, text in texts if text])
    return tuple(found)


def _first(warnings: list[str]) -> list[str]:
    """Other nodes usually report the same warnings."""
    more = len(warnings) - WARNINGS_SHOWN
    shown = warnings[:WARNINGS_SHOWN]
    return [*shown, f"{more:,} more nodes with such a warning"] if more > 0 else shown


def _witness(control_loop: ControlLoop, plan: GenerationPlan | None) -> WitnessStatus | None:
    """Connection of this agent to the witness; only a leader contacts it continuously."""
    witness = control_loop.member.witness
    if not witness.is_used:
        return None
    return WitnessStatus(
        reachable=witness.is_reached,
        since_s=round(clock.now_s() - witness.since_s, 1),
        reason=witness.reason,
        is_voter=plan is not None and plan.witness != 0,
        promised=witness.register.promised if witness.register is not None else None,
    )


# --- the run ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _LedRun:
    """The run as its leader knows it, at one moment."""

    control_loop: ControlLoop
    leader: Leader
    plan: GenerationPlan | None
    heartbeats: Mapping[str, Heartbeat]
    now_s: float

    @property
    def state(self) -> str:
        leader = self.leader
        if leader.shutdown.ending is not None:
            return "ending"
        if leader.pause.is_on:
            return "paused"
        if leader.ballot is not None or leader.plan is None:
            return "starting"
        return "stopping" if self.control_loop.monitor.is_stopping else "running"

    def nodes(self) -> tuple[NodeStatus, ...]:
        """Nodes in the order of ranks, then spares, other known nodes, and departed nodes."""
        plan, heartbeats, now_s = self.plan, self.heartbeats, self.now_s
        order = [card.node_id for card in plan.voters] if plan is not None else []

        def position(peer: PeerState) -> tuple[int, str]:
            node_id = peer.card.node_id
            return (order.index(node_id) if node_id in order else len(order), node_id)

        late_s = lateness_of(self.control_loop)
        peers = sorted(self.leader.known.shown(plan, now_s=now_s), key=position)
        wrong = self.control_loop.monitor.reports.wrong_sums
        found = []
        for peer in peers:
            one = _node(peer, plan, heartbeats.get(peer.card.node_id), late_s, now_s)
            preflight = wrong.get(one.node_id, one.preflight)
            found.append(msgspec.structs.replace(one, preflight=preflight))
        return (*found, *(_gone(one, now_s) for one in self._earlier_nodes()))

    def protection(self) -> dict[str, Any]:
        plan, committed = self.plan, self.control_loop.monitor.orders.committed
        if committed is None and plan is not None and plan.sources:
            committed = plan.restore
        members = (
            [] if plan is None else [self.heartbeats.get(node.node_id) for node in plan.members]
        )
        if plan is not None and self._earlier(plan) is not None:
            lost = {peer.card.node_id for peer in self.leader.known if peer.lost}
            survives = left_of_earlier(plan, lost)
        else:
            survives = min((one.survives if one is not None else 0 for one in members), default=0)
        reasons = [
            heartbeat.unprotected
            for heartbeat in members
            if heartbeat is not None and heartbeat.unprotected
        ]
        return {
            "committed_version": tuple(committed) if committed is not None else None,
            "tolerated_losses": survives if committed is not None else 0,
            "unprotected_reason": reasons[0] if reasons else "",
            "groups": tuple(map(tuple, plan.groups)) if plan is not None else (),
            "parity": plan.parity if plan is not None else 0,
            "is_mirrored": plan is not None and plan.is_ring,
        }

    def _earlier(self, plan: GenerationPlan) -> int | None:
        committed = self.control_loop.monitor.orders.committed
        return earlier_protection(plan, self.heartbeats, committed=committed)

    def versions(self) -> tuple[VersionStatus, ...]:
        plan, monitor = self.plan, self.control_loop.monitor
        committed = monitor.orders.committed or (plan.restore if plan is not None else None)
        protected = [committed] if committed and monitor.are_movable else []
        if monitor.reports.are_protected():
            protected += [one.ready for one in monitor.reports.current if one.ready is not None]
        by_node = {node_id: one.versions for node_id, one in self.heartbeats.items()}
        return run_versions(by_node, committed=committed, protected=protected)

    def summary(self, has: Mapping[str, Any], witness: WitnessStatus | None) -> str:
        leader, plan = self.leader, self.plan
        if leader.shutdown.ending is not None and plan is None:
            return f"ending: {leader.shutdown.ending.reason}"
        if leader.pause.is_on:
            return f"PAUSED: {leader.pause.reason}"
        if (ballot := leader.ballot) is not None or plan is None:
            return f"starting generation {ballot.generation if ballot is not None else 0}"
        num, spares = len(plan.members), self._usable_spares(plan)
        protection = ProtectionSummary(
            members=num,
            spares=spares,
            min_nodes=self.control_loop.settings.cluster_size.min_nodes,
            voters=len(plan.voters) + (plan.witness != 0),
            votes=self._living_votes(plan),
            survives=has["tolerated_losses"],
            groups=len(has["groups"]),
            committed=has["committed_version"][1] if has["committed_version"] is not None else None,
            unprotected=has["unprotected_reason"],
            earlier=self._earlier(plan),
        )
        nodes = f"{num} node" + ("s" if num > 1 else "")
        if spares > 0:
            nodes += f" and {spares} spare" + ("s" if spares > 1 else "")
        parts = [
            f"{activity_text(self._activity(plan), nodes)}, generation {plan.generation}",
            next_loss_text(protection),
        ]
        shown = leader.known.shown(plan, now_s=self.now_s)
        peers = [peer.card.node_id for peer in shown if peer.lost and not peer.has_left]
        if lost := peers + [one.card.node_id for one in self._earlier_nodes() if not one.has_left]:
            parts.append(f"lost: {', '.join(lost)}")
        if witness is not None and witness.reason:
            parts.append(f"{witness.reason}, for {witness.since_s:.0f} s")
        return "; ".join(parts)

    def _earlier_nodes(self) -> list[Departure]:
        """Nodes that were lost or have drained under an earlier leader and are not known now."""
        known = {peer.card.node_id for peer in self.leader.known}
        past = self.control_loop.monitor.past
        recent = [one for one in past.gone if self.now_s - one.at_s < SHOWN_S]
        return [one for one in recent if one.card.node_id not in known]

    def _living_votes(self, plan: GenerationPlan) -> int:
        """Number of voters that can promise now; a restarted agent has lost its vote."""
        here = {peer.card.identity for peer in self.leader.known if not peer.lost}
        is_witnessed = plan.witness != 0 and self.control_loop.member.witness.is_reached
        return len(electorate(plan.voters) & here) + is_witnessed

    def _usable_spares(self, plan: GenerationPlan) -> int:
        excluded = self.control_loop.monitor.excluded(now_s=self.now_s)
        return len(
            standing_by(self.leader.known, plan) - set(self.leader.screening.reported) - excluded
        )

    def _activity(self, plan: GenerationPlan) -> Activity:
        incidents = self.control_loop.monitor.incidents
        incident = incidents.open if incidents.is_suspected else None
        here = [
            self.heartbeats[node.node_id]
            for node in plan.members
            if node.node_id in self.heartbeats
        ]
        here = [heartbeat for heartbeat in here if heartbeat.generation == plan.generation]
        return Activity(
            step=max((heartbeat.step for heartbeat in here), default=0),
            start_step=plan.restore[1] if plan.restore is not None else 0,
            has_stepped=any(heartbeat.steps_here > 0 for heartbeat in here),
            unresponsive_s=max(0.0, self.now_s - incident.started_s)
            if incident is not None
            else None,
            hang=incident.text if incident is not None and incident.verdict is not None else "",
            end=self.state if self.state in ("stopping", "ending") else "",
        )


def standing_by(peers: Iterable[PeerState], plan: GenerationPlan) -> set[str]:
    """Connected nodes without ranks.

    Also a node that has no vote, because its vote would not increase the tolerated losses
    (membership/leader/reconfiguration.py).
    """
    members = {node.node_id for node in plan.members}
    spares = {card.node_id for card in plan.spares}
    others = [peer for peer in peers if not peer.lost and peer.card.node_id not in members]
    return {
        peer.card.node_id
        for peer in others
        if peer.card.node_id in spares
        or (peer.linked and not peer.is_unresponsive and not peer.is_leaving)
    }


def _without_leader(control_loop: ControlLoop) -> str:
    """Summary on an agent that does not lead: how it reaches, or elects, the leader."""
    member = control_loop.member
    card = member.leader_card
    if member.role is MemberRole.FOLLOWING and card is not None:
        return f"following {card.node_id}"
    role = "electing a new leader" if member.role is MemberRole.SEEKING else member.role.value
    return f"{role}: {member.discovery.reach if card is None else f'contacting {card.node_id}'}"
