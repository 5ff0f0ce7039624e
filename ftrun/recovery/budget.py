"""How often something may be started again.

Runs in:  agent, inside `Supervisor`. Pure.
Takes in: the times of restarts.
Gives:    whether one more is allowed.

Source: the restart intensity of Erlang/OTP supervisors (so many in so long a time), which a
burst of failures uses up and a quiet week does not.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class RestartBudget:
    """At most `limit` restarts in any `window_s`; without a window, `limit` in all.

    Any thread may ask; only `spend` and `forget` change anything, and they replace it whole.
    """

    limit: int
    window_s: float | None
    _spent_s: tuple[float, ...] = ()

    def used(self, *, now_s: float) -> int:
        return len(self._counted_s(now_s))

    def is_spent(self, *, now_s: float) -> bool:
        return self.used(now_s=now_s) >= self.limit

    def spend(self, *, now_s: float) -> None:
        self._spent_s = (*self._counted_s(now_s), now_s)

    def forget(self) -> None:
        """Begin anew."""
        self._spent_s = ()

    def ages_s(self, *, now_s: float) -> list[float]:
        """How long ago each counted restart was; `spend` at those times makes an equal budget."""
        return [now_s - spent_s for spent_s in self._counted_s(now_s)]

    def _counted_s(self, now_s: float) -> tuple[float, ...]:
        if self.window_s is None:
            return self._spent_s
        return tuple(spent_s for spent_s in self._spent_s if now_s - spent_s <= self.window_s)

    def __str__(self) -> str:
        if self.window_s is None:
            return f"{self.limit} restarts"
        return f"{self.limit} restarts in {self.window_s:.0f} s"
