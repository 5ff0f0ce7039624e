"""From which step on the ranks of all nodes take the next snapshot, so that all take the same.

Runs in:  the agent that leads. Pure.
Takes in: the largest step that any rank has passed, each commit, each step that was skipped.
Gives:    a step that no rank has reached yet, for the lead's heartbeat.

A commit or an abandoned step frees the ranks for the next snapshot, but the nodes hear of it one
after the other, and in between the ranks may have gone on by a step. So the lead names the step
along with it. How far ahead that must be depends on the network and on the steps: it is learned.

Rule 1: it is only ever raised. Ranks that hear of it too late skip it, and say so; the others
        then let go of what they have taken, and all begin again further ahead.
Rule 2: the distance grows by half with each step that was named and skipped. A report may take
        longer than hundreds of short steps, and tells of none that came after it.
"""

_NEARER_AFTER = 4
"""Commits without a step skipped."""


class SnapshotAlignment:
    """How far ahead the next snapshot must be named."""

    def __init__(self) -> None:
        self._ahead = 1
        self._num_good = 0

    def after_commit(self, take_from: int, step: int) -> int:
        """The step from which on the next snapshot is taken.

        Args:
            take_from: the one that was named last, or -1.
            step: the largest step that any rank has passed.
        """
        self._num_good += 1
        if self._num_good % _NEARER_AFTER == 0:
            self._ahead -= self._ahead // 3
        return max(take_from, step + self._ahead)

    def after_skip(self, take_from: int, skipped: int, step: int) -> int:
        """The same, when a rank has taken none at step `skipped`."""
        if skipped < take_from:
            return take_from  # before that nobody takes any: it was skipped before it was heard
        self._num_good = 0
        self._ahead = max(self._ahead + 1, self._ahead * 3 // 2, 2 * (step - skipped))
        return max(take_from, max(step, skipped) + self._ahead)
