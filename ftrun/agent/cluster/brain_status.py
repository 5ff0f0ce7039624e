"""The status that the control loop of an agent publishes, as one immutable value.

Runs in:  agent, the thread of the control loop.
Takes in: the control loop.
Gives:    a `BrainStatus` for other threads.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ftrun import clock
from ftrun.agent.cluster.control_loop import ControlLoop
from ftrun.agent.publish.cluster_status import cluster_status
from ftrun.agent.publish.incident_status import incidents_of, lateness_of, life_of
from ftrun.recovery.supervisor import SupervisorState


@dataclass(frozen=True, slots=True)
class BrainStatus:
    """Decisions and incidents, and on several nodes the whole run, at one moment."""

    leads: bool
    lead_id: str
    """The leader, if this node has found one; else empty."""
    lead_host: str
    state: SupervisorState
    lateness_s: Mapping[int, float]
    """Lateness in seconds, by rank."""
    suspicion: tuple[float, str] | None
    """Seconds without a step, and the description of the suspected hang; None: no hang is
    suspected."""
    document: bytes
    """JSON: the fields of the status that the control loop owns."""
    cluster: bytes
    """JSON: the field `cluster` of the status; `null` in a run on one node."""


def brain_status(brain: ControlLoop, *, is_alone: bool) -> BrainStatus:
    """Build the status; only in the control loop's own thread."""
    now_s = clock.now_s()
    leads, lead = brain.leads, brain.member.lead_card
    supervisor, incidents = brain.oversight.supervisor, brain.oversight.incidents
    suspected = incidents.open if leads and incidents.is_suspected else None
    budget = supervisor.budget
    fields = {
        "life": life_of(brain) if leads else None,
        "restart_budget": {
            "used": budget.used(now_s=now_s),
            "limit": budget.limit,
            "window_s": budget.window_s,
        },
        "incidents": incidents_of(brain, now_s=now_s) if leads else [],
    }
    return BrainStatus(
        leads=leads,
        lead_id=lead.node_id if lead is not None else "",
        lead_host=lead.host if lead is not None else "",
        state=supervisor.state,
        lateness_s=MappingProxyType(dict(lateness_of(brain))),
        suspicion=None
        if suspected is None
        else (max(0.0, now_s - suspected.began_s), suspected.text),
        document=json.dumps(fields).encode(),
        cluster=b"null" if is_alone else json.dumps(cluster_status(brain)).encode(),
    )
