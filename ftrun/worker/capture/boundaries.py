"""At which step boundaries a snapshot falls due.

Runs in:  worker, training thread.
Takes in: the profile's `snapshot.every`, the command page, what snapshots have cost so far.
Gives:    due or not, and this rank's wish for the interval.

All ranks must take a snapshot at the same steps, or none is ever committed, and they do not
talk to each other about it. So `auto` uses only what every rank reads alike: an interval that
the agent puts on the command page for all steps beyond one that no rank has reached. Each rank
publishes what its own measurements ask for; the agent chooses.

What a snapshot costs is what all turns of the loop took longer, from its copy until it was
committed, than turns in which nothing went on: encoding and sending want processors too.
"""

import math
from enum import Enum, auto

from ftrun.wire.shared_memory.pages import CommandField, HeartbeatField, SharedPage
from ftrun.worker.context import SnapshotSettings

_LONGEST = 10_000
_WEIGHT = 0.1


class StepActivity(Enum):
    """What went on beside the script between two step boundaries."""

    QUIET = auto()
    COPY = auto()
    """A snapshot was copied behind it."""
    PROTECT = auto()
    """The last one was on its way to other nodes, or to its commit."""


class _Mean:
    """A mean that follows: of the first few all alike, later the newer ones more."""

    def __init__(self) -> None:
        self.count = 0
        self.value = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += max(_WEIGHT, 1 / self.count) * (value - self.value)


class SnapshotSchedule:
    """Due or not, and what it costs."""

    def __init__(self, settings: SnapshotSettings, page: SharedPage, commands: SharedPage) -> None:
        self._settings = settings
        self._page = page
        self._commands = commands
        self._every = settings.every if isinstance(settings.every, int) else 1
        self._quiet_s = _Mean()
        self._added_s = _Mean()
        """By one snapshot, to all its turns."""
        self._turns_s: list[float] = []
        """Those of the last snapshot, its copy's first."""

    def is_due(self, step: int) -> bool:
        """Whether the interval ends at this step; counts from step 0 on every rank.

        Not before the step that the lead has named, from which on all nodes take the same.
        """
        if not isinstance(self._settings.every, int):
            every = self._commands.get(CommandField.SNAPSHOT_EVERY)
            if every > 0 and step > self._commands.get(CommandField.EVERY_FROM_STEP):
                self._every = every
        return step % max(1, self._every) == 0 and step >= self._commands.get(
            CommandField.TAKE_FROM
        )

    def learn(self, turn: StepActivity, *, step_s: float, copy_s: float, blocked_s: float) -> None:
        """Take in what one turn of the loop took, and publish the interval that would suit.

        Args:
            turn: what went on beside it.
            step_s: from the last boundary to this one.
            copy_s: how long the last copy took in its thread.
            blocked_s: how long the training thread stood still for it.
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
            # Nothing to compare with: as if nothing of a copy were hidden.
            first_s = self._turns_s[0]
            plain_s, added_s = max(first_s - copy_s, 0.1 * first_s), copy_s
        wish = math.ceil(max(added_s, blocked_s) / (self._settings.overhead_budget * plain_s))
        if not self._quiet_s.count:
            wish = max(wish, 2 * len(self._turns_s))  # so that there is a turn to compare with
        self._page.set(HeartbeatField.WISHED_EVERY, min(max(wish, 1), _LONGEST))

    def _close(self) -> None:
        """All turns of the last snapshot are known."""
        turns_s, self._turns_s = self._turns_s, []
        if self._quiet_s.count:
            self._added_s.add(sum(turns_s) - len(turns_s) * self._quiet_s.value)
