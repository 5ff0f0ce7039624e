"""Whether a lead may have been replaced without knowing it.

Runs in:  the agent that leads. Pure.
Takes in: who answers its heartbeats.
Gives:    the wish to have all ranks wait; after a while, to begin a ballot.

Rule 1: it doubts before anybody could have replaced it, and decides nothing meanwhile.
Rule 2: where the doubt stays, only a ballot ends it: nodes do not come back, or their agents were
        started again and cannot say what the ones before them have promised.
"""

from ftrun.membership.leader.failure_detector import FailureDetector
from ftrun.recovery.settings import MembershipSettings
from ftrun.wire.cluster.generation import GenerationPlan


class LeadershipLease:
    """One lead's doubt about itself."""

    def __init__(self, settings: MembershipSettings) -> None:
        self.is_on = False
        self._settings = settings
        self._since_s = 0.0

    def look(self, plan: GenerationPlan | None, peers: FailureDetector, *, now_s: float) -> bool:
        """Whether there is news.

        Args:
            plan: in effect; None where there is nothing to be replaced.
            peers: who is there.
            now_s: the time.
        """
        is_on = plan is not None and peers.may_decide_without_me(plan, now_s=now_s)
        if is_on == self.is_on:
            return False
        self.is_on, self._since_s = is_on, now_s
        return True

    def stays(self, *, now_s: float) -> bool:
        """It has lasted for so long that waiting does not end it."""
        return self.is_on and now_s - self._since_s >= self._settings.deadline_s
