"""Whether this node's ranks must wait: the run may go on without them.

Runs in:  every agent. Pure.
Takes in: when the lead was heard, what it says, whether this process has stood still.
Gives:    the reason to hold the ranks, in words; empty where they may go on.

Rule 1: an agent that does not hear its lead stops its ranks before it may have been replaced.
Rule 2: an agent that has stood still doubts itself, not the others: silence counts from when it
        could hear again. What it hears then may be old, so its ranks wait for an answer to a
        question that it asks now.
"""

from ftrun.recovery.settings import MembershipSettings


class SelfFencing:
    """One agent's reasons to hold its ranks."""

    def __init__(self, settings: MembershipSettings, *, now_s: float) -> None:
        self.heard_s = now_s
        """When the lead was heard."""
        self.lead_says_hold = False
        self.question = 0
        """Number of the question that waits for its answer; 0 while none does."""
        self._settings = settings
        self._asked = 0
        self._last_s = self._awake_s = now_s

    def follow(self, *, now_s: float) -> None:
        """There is another lead."""
        self.heard_s = now_s
        self.lead_says_hold = False
        self.question = 0

    def stood_still_s(self, *, now_s: float) -> float:
        """For how long this process could do nothing; 0 if it could. Asked at each happening."""
        gap_s = now_s - self._last_s
        self._last_s = now_s
        if gap_s < 2 * self._settings.heartbeat_s:
            return 0.0
        self._awake_s = now_s
        return gap_s

    def ask(self) -> int:
        """Wait for an answer from now on; the number that it must bear."""
        self._asked += 1
        self.question = self._asked
        return self.question

    def answered(self, number: int) -> None:
        if number >= self.question:
            self.question = 0

    def silent_s(self, *, now_s: float) -> float:
        """For how long the lead was not heard although it could have been."""
        return now_s - max(self.heard_s, self._awake_s)

    def is_cut_off(self, *, now_s: float) -> bool:
        return now_s - self.heard_s >= self._settings.cut_off_s

    def why(self, *, now_s: float) -> str:
        if self.question:
            return "this node stood still, and asks whether the run has gone on without it"
        if self.lead_says_hold:
            return "the lead does not hear enough nodes"
        return "the lead is not heard" if self.is_cut_off(now_s=now_s) else ""
