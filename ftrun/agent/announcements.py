"""Causes of the next generation that this node has printed, so that each is printed once.

Runs in:  agent, main thread.
Takes in: causes as the leader names them; the reason of a generation, which contains the cause.
Gives:    the lines to print.
"""

import logging
from collections import deque

from ftrun.recovery.commands import JournalEntry

_log = logging.getLogger(__name__)

_CAUSES = ("NodeLost", "Verdict")
"""Kinds of journal entries that may repeat one failure. The reason of the next generation may
repeat it too."""


class Announcements:
    """The causes since the last generation started."""

    def __init__(self) -> None:
        self._said: deque[str] = deque(maxlen=20)

    def is_new(self, cause: str) -> bool:
        """Return whether this cause is not printed yet, and count it as printed."""
        if cause in self._said:
            return False
        self._said.append(cause)
        return True

    def show(self, entry: JournalEntry, *, has_ranks: bool) -> None:
        """Print an entry, unless it names a cause that is printed already.

        Args:
            entry: from the leader.
            has_ranks: this node runs ranks. If not, no ranks start here, and the entry for the new
                generation clears the causes instead.
        """
        if entry.kind == "Generation" and not has_ranks:
            self._said.clear()
        if entry.say and (entry.kind not in _CAUSES or self.is_new(entry.text)):
            _log.warning("%s", entry.text)

    def beginning(self, reason: str, generation: int, start: str) -> str:
        """The line for a new generation, without the part of its reason that is already printed."""
        said = next((one for one in self._said if reason.startswith(one)), "")
        self._said.clear()
        rest = reason.removeprefix(said).lstrip("; ")
        return "; ".join(
            [*([rest] if rest else []), f"generation {generation} starts from {start}"]
        )
