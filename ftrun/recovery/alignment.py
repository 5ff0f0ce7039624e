"""The step from which the ranks of all nodes take the next snapshot, so that all take the same one.

Runs in:  the agent that leads. Pure.
Takes in: the largest step that any rank has passed, each commit, each skipped step.
Gives:    a step that no rank has reached yet, for the leader's heartbeat.

A commit or an abandoned step allows the ranks to take the next snapshot. The nodes receive it one
after the other, and ranks may make a step in between. The leader therefore names the step together
with it. How far ahead that must be depends on the network and on the steps: the distance is
learned.

Rule 1: the step only increases. Ranks that receive it too late skip it and report that. The others
        then discard their snapshot, and all start again further ahead.
Rule 2: the distance grows by half with each step that was named and skipped. A report may take
        longer than hundreds of short steps, and does not cover later steps.
"""

_NEARER_AFTER = 4
"""Commits without a skipped step after which the distance shrinks."""


class SnapshotAlignment:
    """How many steps ahead the next snapshot must be named."""

    def __init__(self) -> None:
        self._ahead = 1
        self._num_good = 0

    def after_commit(self, take_from: int, step: int) -> int:
        """The step from which the next snapshot is taken, after a commit.

        Args:
            take_from: the one that was named last, or -1.
            step: the largest step that any rank has passed.
        """
        self._num_good += 1
        if self._num_good % _NEARER_AFTER == 0:
            self._ahead -= self._ahead // 3
        return max(take_from, step + self._ahead)

    def after_skip(self, take_from: int, skipped: int, step: int) -> int:
        """The step from which the next one is taken, after a rank took none at `skipped`."""
        if skipped < take_from:
            return take_from  # an older step: no rank takes a snapshot before take_from
        self._num_good = 0
        self._ahead = max(self._ahead + 1, self._ahead * 3 // 2, 2 * (step - skipped))
        return max(take_from, max(step, skipped) + self._ahead)
