"""What is on the screen of this node about the generation to come: each cause once.

Runs in:  agent, main thread.
Takes in: causes, as the leader names them; the reason of a generation, which holds the cause again.
Gives:    the lines to print.
"""

from collections import deque


class Announcements:
    """The causes since the last generation began."""

    def __init__(self) -> None:
        self._said: deque[str] = deque(maxlen=20)

    def is_new(self, cause: str) -> bool:
        """Whether this cause is still to be printed; it counts as printed then."""
        if cause in self._said:
            return False
        self._said.append(cause)
        return True

    def clear(self) -> None:
        """A generation has begun without ranks here: the same failure again is news."""
        self._said.clear()

    def beginning(self, reason: str, generation: int, start: str) -> str:
        """What begins now, behind that part of its reason that is not printed."""
        said = next((one for one in self._said if reason.startswith(one)), "")
        self._said.clear()
        rest = reason.removeprefix(said).lstrip("; ")
        return "; ".join(
            [*([rest] if rest else []), f"generation {generation} starts from {start}"]
        )
