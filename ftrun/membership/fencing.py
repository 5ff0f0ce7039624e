"""Suspends the ranks of a node, because the run may continue without them.

Rule 1: an agent that does not receive from its leader suspends its ranks before other ranks may
        have replaced them.
Rule 2: an agent whose process was paused suspects itself, not the other agents. The time without
        a message counts from the end of the pause. Messages received then may be old, so the ranks
        wait for the answer to a question sent after the pause.
Rule 3: only ranks of a generation that is chosen here are suspended; a ballot ends them anyway.
Rule 4: the lease of the ranks ends before other ranks can replace them, even if this agent pauses
        from now on. The leader counts a node as lost `failure_timeout_s` after the newest heartbeat
        that the node has both received and sent. That heartbeat is at most two heartbeat intervals
        older than the start of the pause. With the default times, a lease ends 1 s after the start
        of the pause, and no successor starts within 2 s.
"""

import math

from ftrun.config.cluster import MembershipSettings
from ftrun.membership.voter import Voter
from ftrun.recovery.commands import Command, ResumeRanks, SuspendRanks


class SelfFencing:
    """The reasons of one agent to suspend its ranks."""

    def __init__(self, settings: MembershipSettings, *, now_s: float) -> None:
        self.received_s = now_s
        """Time of the last message of the leader."""
        self.leader_suspends = False
        self.question = 0
        """Number of the question whose answer is awaited; 0: none."""
        self._settings = settings
        self._asked = 0
        self._last_s = self._awake_s = now_s

    def follow(self, *, now_s: float) -> None:
        self.received_s = now_s
        self.leader_suspends = False
        self.question = 0

    def paused_s(self, *, now_s: float) -> float:
        """Seconds of a pause of this process; 0 below two heartbeats. Call it for each event."""
        gap_s = now_s - self._last_s
        self._last_s = now_s
        if gap_s < 2 * self._settings.times.heartbeat_interval_s:
            return 0.0
        self._awake_s = now_s
        return gap_s

    def ask(self) -> int:
        """Returns the number that the awaited answer must carry."""
        self._asked += 1
        self.question = self._asked
        return self.question

    def answered(self, number: int) -> None:
        if number >= self.question:
            self.question = 0

    def unresponsive_s(self, *, now_s: float) -> float:
        """Seconds without a message of the leader, pauses of this process excluded."""
        return now_s - max(self.received_s, self._awake_s)

    def is_cut_off(self, *, now_s: float) -> bool:
        return now_s - self.received_s >= self._settings.times.self_fencing_timeout_s

    def reason(self, *, now_s: float) -> str:
        if self.question:
            return "this node was paused, and the run may have continued without it"
        if self.leader_suspends:
            return "the leader receives from too few nodes"
        return "no heartbeat from the leader" if self.is_cut_off(now_s=now_s) else ""


class RankSuspension:
    """Whether the ranks of one node are suspended."""

    def __init__(self, follower: Voter, settings: MembershipSettings) -> None:
        self.is_on = False
        self.lease_s: float | None = None
        """Time until which the ranks may step; None: no ranks can replace them."""
        self._follower = follower
        self._settings = settings

    def poll(
        self, waiting: SelfFencing, *, is_lease_expired: bool | None, now_s: float
    ) -> list[Command]:
        """Suspends or resumes the ranks of this node, and renews their lease.

        Args:
            is_lease_expired: whether this agent's own lease has expired; None if it does not lead.
        """
        found = self._poll(waiting, is_lease_expired, now_s)
        until_s = waiting.received_s + self._settings.times.self_fencing_timeout_s
        self.lease_s = self._lease_s(until_s if is_lease_expired is None else math.inf, now_s)
        return found

    def _lease_s(self, until_s: float, now_s: float) -> float | None:
        if self._follower.is_in_ballot or self.is_on:
            return 0.0
        if self._follower.plan is None or self._follower.plan.is_alone:
            return None
        return min(until_s, now_s + self._settings.times.self_fencing_timeout_s / 2)

    def _poll(
        self, waiting: SelfFencing, is_lease_expired: bool | None, now_s: float
    ) -> list[Command]:
        follower, plan = self._follower, self._follower.plan
        if not follower.is_member or plan is None or follower.is_in_ballot:
            return []
        if plan.is_alone:
            reason = ""
        elif is_lease_expired is None:
            reason = waiting.reason(now_s=now_s)
        else:
            reason = "heartbeats from too few of the other nodes" if is_lease_expired else ""
        if reason and not self.is_on:
            self.is_on = True
            return [SuspendRanks(reason)]
        if self.is_on and not reason:
            self.is_on = False
            return [ResumeRanks("the leader is reachable again")]
        return []
