"""The restart budget: how often something may be restarted.

Source: the restart intensity of Erlang/OTP supervisors (a number of restarts in a time window),
which a burst of failures exhausts and a quiet week does not.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class RestartBudget:
    """At most `limit` restarts in any `window_s`; without a window, `limit` in total.

    Any thread may read it. Only `spend` and `forget` modify it, and they replace the tuple as a
    whole.
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
        self._spent_s = ()

    def ages_s(self, *, now_s: float) -> list[float]:
        """Seconds since each counted restart; `spend` at those times makes an equal budget."""
        return [now_s - spent_s for spent_s in self._counted_s(now_s)]

    def _counted_s(self, now_s: float) -> tuple[float, ...]:
        if self.window_s is None:
            return self._spent_s
        return tuple(spent_s for spent_s in self._spent_s if now_s - spent_s <= self.window_s)

    def __str__(self) -> str:
        if self.window_s is None:
            return f"{self.limit} restarts"
        return f"{self.limit} restarts in {self.window_s:.0f} s"
