"""At which step boundaries a snapshot falls due.

Runs in:  worker, training thread.
Takes in: the profile's `snapshot.every`, the command page, what snapshots have cost so far.
Gives:    due or not, and this rank's wish for the interval.

All ranks must take a snapshot at the same steps, or none is ever committed, and they do not
talk to each other about it. So `auto` uses only what every rank reads alike: an interval that
the agent puts on the command page for all steps beyond one that no rank has reached. Each rank
publishes what its own measurements ask for; the agent chooses.
"""

import math

from ftrun.wire.pages import Beat, Command, Page
from ftrun.worker.context import SnapshotSettings

_LONGEST = 10_000
_WEIGHT = 0.1


class Cadence:
    """Due or not, and what it costs."""

    def __init__(self, settings: SnapshotSettings, page: Page, commands: Page) -> None:
        self._settings = settings
        self._page = page
        self._commands = commands
        self._every = settings.every if isinstance(settings.every, int) else 1
        self._asked = commands.get(Command.SNAPSHOT_NOW)
        self._step_s: dict[bool, float] = {}

    def is_due(self, step: int) -> bool:
        """Whether the interval ends at this step; counts from step 0 on every rank."""
        if not isinstance(self._settings.every, int):
            every = self._commands.get(Command.SNAPSHOT_EVERY)
            if every > 0 and step > self._commands.get(Command.EVERY_FROM_STEP):
                self._every = every
        return step % max(1, self._every) == 0

    def was_asked(self) -> bool:
        """Whether the agent wants one now, beside the interval."""
        asked = self._commands.get(Command.SNAPSHOT_NOW)
        is_new = asked != self._asked
        self._asked = asked
        return is_new

    def learn(self, *, step_s: float, had_copy: bool, copy_s: float, blocked_s: float) -> None:
        """Take in what one turn of the loop took, and publish the interval that would suit.

        Args:
            step_s: from the last boundary to this one.
            had_copy: a snapshot was copied behind it.
            copy_s: how long the last copy took in its thread.
            blocked_s: how long the training thread stood still for it.
        """
        before = self._step_s.get(had_copy, step_s)
        self._step_s[had_copy] = before + _WEIGHT * (step_s - before)
        plain_s = self._step_s.get(False)
        if plain_s is None:
            # No turn without a copy to compare with: as if nothing of it were hidden.
            plain_s = max(self._step_s[True] - copy_s, 0.1 * self._step_s[True])
            added_s = max(copy_s, blocked_s)
        else:
            added_s = max(self._step_s.get(True, plain_s) - plain_s, blocked_s)
        wish = math.ceil(added_s / (self._settings.overhead_budget * plain_s))
        self._page.set(Beat.WISHED_EVERY, min(max(wish, 1), _LONGEST))
