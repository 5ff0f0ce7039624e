"""Whether the loss continues after a recovery as it did before.

Takes the loss that the script reports, with its step, about once per heartbeat. The result is
`continuous`, `jumped`, or `not reported`.
"""

import math
from collections import deque
from statistics import median

KEPT = 64
ENOUGH = 4
_SPREADS = 8.0
"""A loss is a jump at more than this number of typical distances from the median."""

_SLACK = 0.1
"""Relative to the loss itself: the limit for losses that hardly change."""


class LossContinuity:
    """The last losses of one run."""

    def __init__(self) -> None:
        self._found: deque[tuple[int, float]] = deque(maxlen=KEPT)

    def add(self, step: int, loss: float) -> None:
        """Records one report; a repeated step counts once."""
        if not self._found or self._found[-1][0] != step:
            self._found.append((step, loss))

    def judge(self, loss: float | None) -> str:
        if loss is None:
            return "not reported"
        if not math.isfinite(loss):
            return "jumped"
        before = [one for _, one in self._found if math.isfinite(one)]
        if len(before) < ENOUGH:
            return "not reported"
        middle = median(before)
        spread = median(abs(one - middle) for one in before)
        limit = max(_SPREADS * spread, _SLACK * abs(middle))
        return "continuous" if abs(loss - middle) <= limit else "jumped"
