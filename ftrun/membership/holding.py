"""Suspends and resumes the ranks of a node.

Runs in:  every agent. Pure.
Takes in: this agent's state as a voter, the reasons to wait.
Gives:    `SuspendRanks` and `ResumeRanks`, each once; the lease of the ranks.

Rule 1: only ranks of a generation that is chosen here are suspended; a ballot ends them anyway.
Rule 2: the lease of the ranks ends before other ranks can replace them, even if this agent pauses
        from now on. The leader counts a node as lost `deadline_s` after the newest heartbeat that
        it has received and sent; that one is at most two heartbeat periods older than the moment
        at which the agent pauses. With the default times a lease ends 1 s after that moment, and
        no successor starts within 2 s.
"""

from ftrun.config.cluster import MembershipSettings
from ftrun.membership.fencing import SelfFencing
from ftrun.membership.leader.leader import Leader
from ftrun.membership.voter import Voter
from ftrun.recovery.commands import Command, JournalEntry, ResumeRanks, SuspendRanks


class RankSuspension:
    """Whether the ranks of one node are suspended."""

    def __init__(self, follower: Voter, settings: MembershipSettings) -> None:
        self.is_on = False
        self.lease_s: float | None = None
        """Time until which the ranks may step; None: no ranks can replace them."""
        self._follower = follower
        self._settings = settings

    def look(self, lead: Leader | None, waiting: SelfFencing, *, now_s: float) -> list[Command]:
        """Suspends or resumes the ranks of this node, and renews their lease.

        Args:
            lead: this agent's own leadership, if it leads.
            waiting: its reasons to wait, if it follows.
            now_s: the time.
        """
        found = self._look(lead, waiting, now_s)
        self.lease_s = self._lease_s(lead, waiting, now_s)
        return found

    def _lease_s(self, lead: Leader | None, waiting: SelfFencing, now_s: float) -> float | None:
        follower, limit_s = self._follower, self._settings.times.stop_cut_off_s
        if follower.is_in_ballot or self.is_on:
            return 0.0
        if follower.plan is None or follower.plan.is_alone:
            return None
        until_s = now_s + limit_s / 2
        return until_s if lead is not None else min(until_s, waiting.heard_s + limit_s)

    def _look(self, lead: Leader | None, waiting: SelfFencing, now_s: float) -> list[Command]:
        follower, plan = self._follower, self._follower.plan
        if not follower.is_member or plan is None or follower.is_in_ballot:
            return []
        why = "" if plan.is_alone else _why(lead, waiting, now_s)
        if why and not self.is_on:
            self.is_on = True
            return [
                SuspendRanks(why),
                JournalEntry("Held", f"the ranks of this node wait: {why}", say=True),
            ]
        if self.is_on and not why:
            self.is_on = False
            return [ResumeRanks("the lead is heard again")]
        return []


def _why(lead: Leader | None, waiting: SelfFencing, now_s: float) -> str:
    if lead is not None:
        return "too few of the other nodes are heard" if lead.is_doubtful else ""
    return waiting.why(now_s=now_s)
