"""Whether this node's ranks must wait, because the run may continue without them.

Runs in:  every agent. Pure.
Takes in: when the leader was last received, its orders, pauses of this process.
Gives:    the reason to suspend the ranks, in words; empty if they may run.

Rule 1: an agent that does not receive from its leader suspends its ranks before other ranks may
        have replaced them.
Rule 2: an agent whose process was paused suspects itself, not the other agents. The time without
        a message counts from the end of the pause. Messages received then may be old, so the ranks
        wait for the answer to a question sent after the pause.
"""

from ftrun.config.cluster import MembershipSettings


class SelfFencing:
    """The reasons of one agent to suspend its ranks."""

    def __init__(self, settings: MembershipSettings, *, now_s: float) -> None:
        self.heard_s = now_s
        """Time of the last message of the leader."""
        self.lead_says_hold = False
        self.question = 0
        """Number of the question whose answer is awaited; 0: none."""
        self._settings = settings
        self._asked = 0
        self._last_s = self._awake_s = now_s

    def follow(self, *, now_s: float) -> None:
        self.heard_s = now_s
        self.lead_says_hold = False
        self.question = 0

    def stood_still_s(self, *, now_s: float) -> float:
        """Seconds for which this process was paused; 0 below two heartbeat periods.

        Must be called for each event.
        """
        gap_s = now_s - self._last_s
        self._last_s = now_s
        if gap_s < 2 * self._settings.times.heartbeat_s:
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

    def silent_s(self, *, now_s: float) -> float:
        """Seconds without a message of the leader, pauses of this process excluded."""
        return now_s - max(self.heard_s, self._awake_s)

    def is_cut_off(self, *, now_s: float) -> bool:
        return now_s - self.heard_s >= self._settings.times.stop_cut_off_s

    def why(self, *, now_s: float) -> str:
        if self.question:
            return "this node stood still, and asks whether the run has gone on without it"
        if self.lead_says_hold:
            return "the lead does not hear enough nodes"
        return "the lead is not heard" if self.is_cut_off(now_s=now_s) else ""
