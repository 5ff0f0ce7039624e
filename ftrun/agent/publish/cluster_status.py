"""Builds the status of all nodes from the state of the leader.

Runs in:  agent, the thread of the control loop.
Takes in: the control loop of an agent.
Gives:    plain values for a JSON document; docs/operations.md describes it.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from ftrun import clock
from ftrun.agent.cluster.control_loop import ControlLoop
from ftrun.agent.publish.incident_status import incidents_of, last_collectives, lateness_of, life_of
from ftrun.agent.publish.summary_line import Activity, Protection, activity_words, next_loss_words
from ftrun.ids import version
from ftrun.membership.ballots import electorate
from ftrun.membership.leader.failure_detector import PeerState
from ftrun.membership.leader.leader import Leader
from ftrun.monitor.numerics import finite
from ftrun.recovery.past import Gone
from ftrun.wire.cluster.generation import GenerationPlan
from ftrun.wire.cluster.membership import Heartbeat

WARNINGS_SHOWN = 3


def cluster_status(brain: ControlLoop) -> dict[str, Any]:
    """Status of the run as this agent knows it; only the leader's document is complete."""
    plan, lead = brain.plan, brain.member.lead
    known: dict[str, Any] = {
        "lead": brain.member.lead_card.node_id if brain.member.lead_card else None,
        "asked": brain.member.me.node_id,
        "role": brain.member.role.value,
        "generation": plan.generation if plan is not None else None,
        "wanted": str(brain.settings.wishes),
        "witness": _witness(brain, plan),
    }
    if lead is None:
        return {**known, "state": brain.member.role.value, "verdict": _without_lead(brain)}
    beats = dict(brain.oversight.beats)
    now_s = clock.now_s()
    peers = sorted(lead.known, key=lambda peer: _place(peer, plan))
    late_s = lateness_of(brain)
    nodes = [_node(peer, plan, beats, late_s, now_s) for peer in peers]
    known_ids = {peer.card.node_id for peer in peers}
    past = brain.oversight.past
    nodes += [_gone(one, now_s) for one in past.gone if one.card.node_id not in known_ids]
    protection = _protection(brain, plan, beats)
    return {
        **known,
        "nodes": nodes,
        **protection,
        "state": _state(brain, lead),
        "life": life_of(brain),
        "incidents": incidents_of(brain, now_s=now_s),
        "restarts": [
            {
                "generation": one.generation,
                "cause": one.cause,
                "at_s_ago": max(0.0, now_s - one.at_s),
                "restored": str(version(*one.restored)) if one.restored is not None else None,
                "downtime_s": one.downtime_s,
            }
            for one in past.restarts
        ],
        "warnings": _warnings(beats),
        "paused": lead.pause.why,
        "set_aside": sorted(brain.oversight.set_aside(now_s=now_s)),
        "unfit": lead.screening.told,
        "network": lead.roads.status(plan, now_s=now_s),
        "verdict": _verdict(brain, lead, plan, beats, protection, now_s),
    }


def _warnings(beats: Mapping[str, Heartbeat]) -> list[str]:
    """Warnings of the first nodes, because other nodes usually report the same."""
    found = [
        f"node {node_id}: {beat.repeat_warning}"
        for node_id, beat in sorted(beats.items())
        if beat.repeat_warning
    ]
    if len(found) > WARNINGS_SHOWN:
        more = len(found) - WARNINGS_SHOWN
        found[WARNINGS_SHOWN:] = [f"{more:,} more nodes with such a warning"]
    return found


def _witness(brain: ControlLoop, plan: GenerationPlan | None) -> dict[str, Any] | None:
    """Connection of this agent to the witness; only a leader contacts it continuously."""
    witness = brain.member.witness
    if not witness.is_used:
        return None
    return {
        "reached": witness.is_reached,
        "for_s": round(clock.now_s() - witness.since_s, 1),
        "why": witness.why,
        "votes": plan is not None and plan.witness != 0,
        "promised": witness.register.promised if witness.register is not None else None,
    }


def _state(brain: ControlLoop, lead: Leader) -> str:
    if lead.ending is not None:
        return "ending"
    if lead.pause.is_on:
        return "paused"
    if lead.ballot is not None or lead.plan is None:
        return "starting"
    return "stopping" if brain.oversight.is_stopping else "running"


def _place(peer: PeerState, plan: GenerationPlan | None) -> tuple[int, str]:
    """Sort key: nodes in the order of ranks, then spares, then all others."""
    order = [card.node_id for card in plan.voters] if plan is not None else []
    node_id = peer.card.node_id
    return (order.index(node_id) if node_id in order else len(order), node_id)


def _node(
    peer: PeerState,
    plan: GenerationPlan | None,
    beats: dict[str, Heartbeat],
    lateness_s: Mapping[int, float],
    now_s: float,
) -> dict[str, Any]:
    node_id = peer.card.node_id
    member = plan.member(node_id) if plan is not None else None
    is_spare = plan is not None and any(card.node_id == node_id for card in plan.spares)
    beat = beats.get(node_id)
    calls = last_collectives(beat.views if beat is not None else ())
    place = "rank" if member is not None else "spare" if is_spare else "new"
    return {
        "node": node_id,
        "host": peer.card.host,
        "place": place if not peer.lost else "left" if peer.has_left else "lost",
        "why": peer.lost if not peer.has_left else "",
        "heard_s_ago": round(max(0.0, now_s - peer.heard_s), 2),
        "state": beat.state if beat is not None and not peer.lost else "unknown",
        "step": beat.step if beat is not None else None,
        "ready": list(beat.ready) if beat is not None and beat.ready else None,
        "unprotected": beat.unprotected if beat is not None else "",
        "domain": peer.card.domain,
        "check": str(peer.fitness) if peer.fitness is not None else "",
        "ranks": [
            {
                "rank": rank.rank,
                "pid": rank.pid,
                "state": rank.state,
                "step": rank.step,
                "age_s": rank.age_s,
                "phase": rank.phase,
                "loss": finite(rank.loss),
                "step_p50_s": rank.p50_s or None,
                "step_p99_s": rank.p99_s or None,
                "lateness_s": lateness_s.get(rank.rank),
                "last_collective": calls.get(rank.rank),
            }
            for rank in (beat.ranks if beat is not None else ())
        ],
    }


def _gone(gone: Gone, now_s: float) -> dict[str, Any]:
    """Entry of a node that was lost or left under an earlier leader."""
    return {
        "node": gone.card.node_id,
        "host": gone.card.host,
        "place": "left" if gone.has_left else "lost",
        "why": "" if gone.has_left else gone.reason,
        "heard_s_ago": round(max(0.0, now_s - gone.at_s), 2),
        "state": "unknown",
        "step": None,
        "ready": None,
        "unprotected": "",
        "domain": gone.card.domain,
        "check": "",
        "ranks": [],
    }


def _protection(
    brain: ControlLoop, plan: GenerationPlan | None, beats: dict[str, Heartbeat]
) -> dict[str, Any]:
    committed = brain.oversight.orders.committed
    members = [] if plan is None else [beats.get(node.node_id) for node in plan.members]
    survives = min((beat.survives if beat is not None else 0 for beat in members), default=0)
    whys = [beat.unprotected for beat in members if beat is not None and beat.unprotected]
    return {
        "committed": list(committed) if committed is not None else None,
        "survives": survives if committed is not None else 0,
        "unprotected": whys[0] if whys else "",
        "groups": plan.groups if plan is not None else [],
        "parity": plan.parity if plan is not None else 0,
    }


def _verdict(
    brain: ControlLoop,
    lead: Leader,
    plan: GenerationPlan | None,
    beats: dict[str, Heartbeat],
    has: dict[str, Any],
    now_s: float,
) -> str:
    if lead.ending is not None and plan is None:
        return f"ending: {lead.ending.why}"
    if lead.pause.is_on:
        return f"PAUSED: {lead.pause.why}"
    if (ballot := lead.ballot) is not None or plan is None:
        return f"starting generation {ballot.generation if ballot is not None else 0}"
    known = {peer.card.node_id: peer for peer in lead.known}
    lost = [node_id for node_id, peer in known.items() if peer.lost and not peer.has_left]
    lost += [
        one.card.node_id
        for one in brain.oversight.past.gone
        if not one.has_left and one.card.node_id not in known
    ]
    num = len(plan.members)
    nodes = f"{num} node" + ("s" if num > 1 else "")
    spares = _usable_spares(brain, lead, plan, now_s)
    if spares > 0:
        nodes += f" and {spares} spare" + ("s" if spares > 1 else "")
    protection = Protection(
        members=num,
        spares=spares,
        min_nodes=brain.settings.wishes.min_nodes,
        voters=len(plan.voters) + (plan.witness != 0),
        votes=_living_votes(brain, lead, plan),
        survives=has["survives"],
        groups=len(has["groups"]),
        committed=has["committed"][1] if has["committed"] is not None else None,
        unprotected=has["unprotected"],
    )
    now = _activity(brain, lead, plan, beats, now_s)
    text = f"{activity_words(now, nodes)}, generation {plan.generation}"
    text += f"; {next_loss_words(protection)}"
    witness = _witness(brain, plan)
    away = f"; {witness['why']}, for {witness['for_s']:.0f} s" if witness and witness["why"] else ""
    return text + (f"; lost: {', '.join(lost)}" if lost else "") + away


def _living_votes(brain: ControlLoop, lead: Leader, plan: GenerationPlan) -> int:
    """Number of voters that can promise now; a restarted agent has lost its vote."""
    here = {peer.card.identity for peer in lead.known if not peer.lost}
    is_witnessed = plan.witness != 0 and brain.member.witness.is_reached
    return len(electorate(plan.voters) & here) + is_witnessed


def _usable_spares(brain: ControlLoop, lead: Leader, plan: GenerationPlan, now_s: float) -> int:
    """Number of nodes that can replace a lost node now."""
    out = set(lead.screening.told) | brain.oversight.set_aside(now_s=now_s)
    return len(standing_by(lead.known, plan) - out)


def standing_by(peers: Iterable[PeerState], plan: GenerationPlan) -> set[str]:
    """Connected nodes without ranks.

    A node that joined after this generation began has no vote if its vote would not increase the
    tolerated losses (membership/leader/reconfiguration.py). The next generation still gives it
    ranks.
    """
    members = {node.node_id for node in plan.members}
    spares = {card.node_id for card in plan.spares}
    beside = [peer for peer in peers if not peer.lost and peer.card.node_id not in members]
    return {
        peer.card.node_id
        for peer in beside
        if peer.card.node_id in spares or (peer.linked and not peer.is_mute and not peer.is_leaving)
    }


def _activity(
    brain: ControlLoop,
    lead: Leader,
    plan: GenerationPlan,
    beats: dict[str, Heartbeat],
    now_s: float,
) -> Activity:
    incidents = brain.oversight.incidents
    incident = incidents.open if incidents.is_suspected else None
    here = [beats[node.node_id] for node in plan.members if node.node_id in beats]
    here = [beat for beat in here if beat.generation == plan.generation]
    return Activity(
        step=max((beat.step for beat in here), default=0),
        start_step=plan.restore[1] if plan.restore is not None else 0,
        has_stepped=any(beat.steps_here > 0 for beat in here),
        silent_s=max(0.0, now_s - incident.began_s) if incident is not None else None,
        hang=incident.text if incident is not None and incident.verdict is not None else "",
        end=state if (state := _state(brain, lead)) in ("stopping", "ending") else "",
    )


def _without_lead(brain: ControlLoop) -> str:
    member = brain.member
    if member.lead_card is not None:
        return f"{member.role.value} {member.lead_card.node_id}"
    return f"{member.role.value}: {member.reach}"
