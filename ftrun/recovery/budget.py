"""How often something may be started again.

Runs in:  agent, inside `Supervisor`. Pure.
Takes in: the times of restarts.
Gives:    whether one more is allowed.

Source: the restart intensity of Erlang/OTP supervisors (so many in so long a time), which a
burst of failures uses up and a quiet week does not.
"""

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class RestartBudget:
    """At most `limit` restarts in any `window_s`; without a window, `limit` in all."""

    limit: int
    window_s: float | None
    _spent_s: deque[float] = field(default_factory=deque)

    def used(self, *, now_s: float) -> int:
        if self.window_s is not None:
            while self._spent_s and now_s - self._spent_s[0] > self.window_s:
                self._spent_s.popleft()
        return len(self._spent_s)

    def is_spent(self, *, now_s: float) -> bool:
        return self.used(now_s=now_s) >= self.limit

    def spend(self, *, now_s: float) -> None:
        self._spent_s.append(now_s)

    def forget(self) -> None:
        """Begin anew."""
        self._spent_s.clear()

    def ages_s(self, *, now_s: float) -> list[float]:
        """How long ago each counted restart was; `spend` at those times makes an equal budget."""
        self.used(now_s=now_s)
        return [now_s - spent_s for spent_s in self._spent_s]

    def __str__(self) -> str:
        if self.window_s is None:
            return f"{self.limit} restarts"
        return f"{self.limit} restarts in {self.window_s:.0f} s"
