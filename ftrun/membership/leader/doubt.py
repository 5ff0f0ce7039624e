"""The leadership lease: whether a leader may have been replaced without knowing it.

Runs in:  the agent that leads. Pure.
Takes in: acknowledgements of its heartbeats.
Gives:    whether all ranks must be suspended; after a while, whether a ballot must begin.

Rule 1: the lease expires before any agent could have replaced this leader. Until the lease is
        valid again, the leader makes no decisions.
Rule 2: if the lease stays expired, only a ballot restores it: the nodes do not return, or their
        agents were restarted and cannot report what their predecessors promised.
"""

from ftrun.config.cluster import MembershipSettings
from ftrun.membership.leader.failure_detector import FailureDetector
from ftrun.wire.cluster.generation import GenerationPlan


class LeadershipLease:
    """The lease of one leader; `is_on` means expired."""

    def __init__(self, settings: MembershipSettings) -> None:
        self.is_on = False
        self._settings = settings
        self._since_s = 0.0

    def look(self, plan: GenerationPlan | None, peers: FailureDetector, *, now_s: float) -> bool:
        """Updates the lease; returns whether its state has changed.

        Args:
            plan: the active plan; None if there is no leadership that could be replaced.
            peers: the known agents.
            now_s: the time.
        """
        is_on = plan is not None and peers.may_decide_without_me(plan, now_s=now_s)
        if is_on == self.is_on:
            return False
        self.is_on, self._since_s = is_on, now_s
        return True

    def stays(self, *, now_s: float) -> bool:
        """Whether it has been expired for at least `deadline_s`."""
        return self.is_on and now_s - self._since_s >= self._settings.times.deadline_s
