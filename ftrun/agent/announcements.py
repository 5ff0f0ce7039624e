"""Causes of the next generation that this node has printed, so that each is printed once.

Runs in:  agent, main thread.
Takes in: causes as the leader names them; the reason of a generation, which contains the cause.
Gives:    the lines to print.
"""

from collections import deque


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

    def clear(self) -> None:
        """Forget all causes, because a generation without local ranks has started.

        The same failure is then printed again.
        """
        self._said.clear()

    def beginning(self, reason: str, generation: int, start: str) -> str:
        """The line for a new generation, without the part of its reason that is already printed."""
        said = next((one for one in self._said if reason.startswith(one)), "")
        self._said.clear()
        rest = reason.removeprefix(said).lstrip("; ")
        return "; ".join(
            [*([rest] if rest else []), f"generation {generation} starts from {start}"]
        )
