"""Decides at which step boundaries a snapshot is due.

Runs in:  worker, training thread.
Takes in: the profile's `snapshot.every`, the command page, the measured cost of snapshots.
Gives:    whether a snapshot is due; the interval that this rank requests.

All ranks must take snapshots at the same steps, otherwise no version is committed. The ranks do not
communicate about it. Therefore `auto` uses only values that are equal on all ranks: the agent
writes an interval to the command page that applies to steps after one that no rank has reached.
Each rank publishes the interval that its own measurements suggest, and the agent chooses.

The cost of a snapshot is the extra time of all turns from its copy to its commit, compared with
turns without snapshot activity. This includes encoding and sending, because they need CPUs too.
"""

import math
from enum import Enum, auto

from ftrun.config.profile import SnapshotConfig
from ftrun.wire.shared_memory.pages import CommandField, HeartbeatField, SharedPage

_LONGEST = 10_000
_WEIGHT = 0.1


class StepActivity(Enum):
    """Snapshot activity during one turn, between two step boundaries."""

    QUIET = auto()
    COPY = auto()
    """A snapshot was copied lazily."""
    PROTECT = auto()
    """The last snapshot was being sent to other nodes, or awaited its commit."""


class _Mean:
    """Mean of the first 10 values; after that, an exponential average with weight 0.1."""

    def __init__(self) -> None:
        self.count = 0
        self.value = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += max(_WEIGHT, 1 / self.count) * (value - self.value)


class SnapshotSchedule:
    """Snapshot interval of one rank, and the measured cost of a snapshot."""

    def __init__(self, settings: SnapshotConfig, page: SharedPage, commands: SharedPage) -> None:
        self._settings = settings
        self._page = page
        self._commands = commands
        self._every = settings.every if isinstance(settings.every, int) else 1
        self._quiet_s = _Mean()
        self._added_s = _Mean()
        """Time in seconds that one snapshot adds to all its turns together."""
        self._turns_s: list[float] = []
        """Durations of the turns of the last snapshot, beginning with the turn of its copy."""

    def is_due(self, step: int) -> bool:
        """Whether this step is a multiple of the interval, and not before TAKE_FROM.

        The leader sets TAKE_FROM; from this step on, all nodes take the same steps.
        """
        if not isinstance(self._settings.every, int):
            every = self._commands.get(CommandField.SNAPSHOT_EVERY)
            if every > 0 and step > self._commands.get(CommandField.EVERY_FROM_STEP):
                self._every = every
        return step % max(1, self._every) == 0 and step >= self._commands.get(
            CommandField.TAKE_FROM
        )

    def learn(self, turn: StepActivity, *, step_s: float, copy_s: float, blocked_s: float) -> None:
        """Record the duration of one turn, and publish the interval that this rank requests.

        Args:
            turn: snapshot activity during the turn.
            step_s: seconds from the last boundary to this one.
            copy_s: duration of the last copy in the copy thread.
            blocked_s: time for which snapshots blocked the training thread in this turn.
        """
        if turn is StepActivity.QUIET:
            self._quiet_s.add(step_s)
        if turn is not StepActivity.PROTECT and self._turns_s:
            self._close()
        if turn is not StepActivity.QUIET:
            self._turns_s.append(step_s)
        if self._quiet_s.count:
            plain_s, added_s = self._quiet_s.value, self._added_s.value
        else:
            # Without a quiet turn to compare with, assume that no part of the copy is hidden.
            first_s = self._turns_s[0]
            plain_s, added_s = max(first_s - copy_s, 0.1 * first_s), copy_s
        wish = math.ceil(max(added_s, blocked_s) / (self._settings.overhead_budget * plain_s))
        if not self._quiet_s.count:
            wish = max(wish, 2 * len(self._turns_s))  # leaves quiet turns to compare with
        self._page.set(HeartbeatField.WISHED_EVERY, min(max(wish, 1), _LONGEST))

    def _close(self) -> None:
        """Add the cost of the last snapshot, after its last turn."""
        turns_s, self._turns_s = self._turns_s, []
        if self._quiet_s.count:
            self._added_s.add(sum(turns_s) - len(turns_s) * self._quiet_s.value)
