"""Status fields for incidents, lifecycle state, lateness and last collectives.

Runs in:  agent, the thread of the control loop.
Takes in: the control loop of the leader.
Gives:    plain values for a JSON document; docs/operations.md describes it.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from ftrun.agent.cluster.control_loop import ControlLoop
from ftrun.monitor.verdicts import RankView
from ftrun.recovery.incidents import Incident

SHOWN = 5
"""Number of closed incidents in the status, in addition to the open one."""


def incidents_of(brain: ControlLoop, *, now_s: float) -> list[dict[str, Any]]:
    """The open incident, then the last closed ones, newest first."""
    known = brain.oversight.incidents
    closed = list(known.closed)[-SHOWN:][::-1]
    found = [_closed(at_s, fields, now_s) for at_s, fields in closed]
    incident = known.open
    if incident is not None:
        found.insert(0, _open(incident, known.life.state.value, now_s))
    return found


def life_of(brain: ControlLoop) -> str:
    return brain.oversight.incidents.life.state.value


def lateness_of(brain: ControlLoop) -> Mapping[int, float]:
    """Seconds by which each rank enters the collectives of a step late, for ranks with data."""
    return brain.oversight.watching.slow.lateness_s


def last_collectives(views: Iterable[RankView]) -> dict[int, str]:
    """Last collective call by rank, such as `all_reduce #41,207`; known only during a suspicion."""
    found: dict[int, str] = {}
    for view in views:
        entered = [group for group in view.groups if group.calls]
        group = next((one for one in entered if one.waits_seq), entered[-1] if entered else None)
        if group is not None:
            call = group.call(group.waits_seq) or group.calls[-1]
            found[view.rank] = f"{call.op} #{call.seq:,}"
    return found


def _open(incident: Incident, life: str, now_s: float) -> dict[str, Any]:
    verdict = incident.verdict
    return {
        "incident": incident.number,
        "state": life,
        "age_s": max(0.0, now_s - incident.began_s),
        "text": incident.text,
        "verdict_kind": verdict.kind.value if verdict is not None else None,
        "sure": verdict.sure.value if verdict is not None else None,
        "culprits": list(verdict.culprits) if verdict is not None else [],
        "victims": list(verdict.victims) if verdict is not None else [],
        "nodes": list(verdict.nodes) if verdict is not None else [],
        "actions": list(incident.actions),
        "detected_s": incident.detected_s,
        "recovered_s": None,
        "steps_lost": None,
    }


def _closed(at_s: float, fields: Mapping[str, Any], now_s: float) -> dict[str, Any]:
    return {
        "incident": fields.get("incident"),
        "state": "closed",
        "age_s": max(0.0, now_s - at_s),
        "text": fields.get("text"),
        "verdict_kind": fields.get("verdict_kind"),
        "sure": None,
        "culprits": fields.get("culprits") or [],
        "victims": [],
        "nodes": fields.get("nodes") or [],
        "actions": fields.get("actions") or [],
        "detected_s": fields.get("detected_s"),
        "recovered_s": fields.get("recovered_s"),
        "steps_lost": fields.get("steps_lost"),
    }
