"""Detects that a rank has become late, from its lateness in consecutive windows.

Source:   GREYHOUND's 10 % for fail-slow, against the rank's own past; the other limits by
          simulation (tests/unit/monitor/slow_world.py).
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from math import sqrt
from statistics import fmean, median

from ftrun.monitor.verdicts import Confidence

SHARE_OF_STEP = 0.10
"""A lateness below this share of a step is not reported."""
STANDING_SHARE = 0.25
"""The same for a rank that was never less late."""
NOISE = 2.5
"""Minimum ratio of a lateness to the standard deviation of the noise."""

STEADY = 2.0
"""The same for the noise of the judged windows, because the lateness is a median of seven."""

WINDOWS = 7
"""Number of windows that are judged."""
MOST = 6
"""Number of them that must be late to name a rank."""
ENOUGH = 4
"""The same for a rank that is named already."""
LEFT_OUT = 2
"""Windows ignored at the start, because memory is allocated and kernels are chosen."""
LEARNT = 10
"""Number of windows that form a past."""
OLD = 48
"""Number of windows that determine the noise, in addition to the first ones."""
STANDING = 16
"""Number of windows for a rank without any other past."""


@dataclass(frozen=True, slots=True)
class Lateness:
    """Lateness of a rank, in seconds per step."""

    now_s: float
    before_s: float | None
    """Lateness in the first windows; None: not known yet."""
    noise_s: float
    """Standard deviation of a window."""

    @property
    def more_s(self) -> float:
        return self.now_s - (self.before_s or 0.0)


@dataclass
class LatenessSeries:
    """The newest and the first windows of one rank."""

    may_stand: bool = True
    """A rank that was late from the start can be named."""
    values_s: deque[float] = field(default_factory=lambda: deque(maxlen=STANDING))
    first_s: list[float] = field(default_factory=list)
    old_s: deque[float] = field(default_factory=lambda: deque(maxlen=OLD))
    """Windows that are no longer judged, and in which no rank was named."""
    noise_s: float = 0.0
    """As known so far."""
    count: int = 0
    named: Confidence | None = None
    """Result of the last `judge`."""
    named_s: float = 0.0
    """Increase of the lateness over its past when the rank was named."""

    def add(self, value_s: float) -> None:
        self.count += 1
        if len(self.values_s) >= WINDOWS and self.named is None:
            self.old_s.append(self.values_s[-WINDOWS])
        self.values_s.append(value_s)
        if self.count > LEFT_OUT and len(self.first_s) < LEARNT:
            self.first_s.append(value_s)
        self.noise_s = max(_deviation(self.first_s), _deviation(self.old_s))

    def restart(self) -> None:
        """Discard everything, because the past is no longer a valid reference."""
        self.values_s.clear()
        self.first_s.clear()
        self.old_s.clear()
        self.noise_s, self.count, self.named = 0.0, 0, None

    def forget_newest(self) -> None:
        """Discard the judged windows, because they have another cause; the past is retained."""
        self.values_s.clear()
        self.named = None

    @property
    def is_known(self) -> bool:
        return len(self.values_s) >= WINDOWS

    def lateness(self) -> Lateness:
        has_past = len(self.first_s) >= LEARNT
        before_s = max(0.0, median(self.first_s)) if has_past else None
        return Lateness(median(self._newest()), before_s, self.noise_s)

    def judge(
        self, step_s: float, floor_s: float, noise_s: float, *, may_name: bool
    ) -> Confidence | None:
        """Judge whether the rank is late, with a confidence; stores the result as `named`.

        Args:
            step_s: duration of a step.
            floor_s: lateness that is never reported, because of clocks and scheduler.
            noise_s: noise of ranks that do the same work; the rank's own noise counts if it is
                higher.
            may_name: if false, only a rank that is named already can stay named.
        """
        if not self.is_known:
            self.named = None
        elif self.named is None:
            self.named = self._judge_again(step_s, floor_s, noise_s) if may_name else None
            self.named_s = self.lateness().more_s
        elif not self._is_late_still(step_s, floor_s):
            self.named = None
            # Windows before the end of a lateness are no evidence for a new one.
            self.values_s = deque(self._newest(), maxlen=STANDING)
        return self.named

    def _judge_again(self, step_s: float, floor_s: float, noise_s: float) -> Confidence | None:
        late = self.lateness()
        limit_s = max(SHARE_OF_STEP * step_s, floor_s)
        if late.before_s is not None:
            is_steady = _count(self._newest(), late.before_s + limit_s / 2) >= MOST
            by_chance_s = NOISE * max(noise_s, late.noise_s)
            # The past may have had less noise than the present.
            by_chance_s = max(by_chance_s, STEADY * _deviation(self._newest()))
            if is_steady and late.more_s > max(limit_s, by_chance_s):
                return Confidence.LIKELY
        limit_s = max(STANDING_SHARE * step_s, floor_s)
        is_long = self.may_stand and len(self.values_s) == STANDING
        if is_long and _count(self.values_s, limit_s / 2) >= STANDING - 1:
            by_chance_s = max(noise_s, _deviation(self.values_s))
            if median(self.values_s) > max(limit_s, by_chance_s):
                return Confidence.POSSIBLE
        return None

    def _is_late_still(self, step_s: float, floor_s: float) -> bool:
        """Whether a named rank is still late; the limits are lower than those for a new name."""
        limit_s = max(SHARE_OF_STEP * step_s, floor_s)
        before_s = self.lateness().before_s or 0.0
        # A lateness within the noise does not count; otherwise chance would keep the name forever.
        above_s = max(limit_s / 2, min(self.noise_s, self.named_s / 2))
        if self.named is Confidence.LIKELY:
            above_s += before_s
        return _count(self._newest(), above_s) >= ENOUGH

    def _newest(self) -> list[float]:
        return list(self.values_s)[-WINDOWS:]


def _count(values: Collection[float], above: float) -> int:
    return sum(value > above for value in values)


def _deviation(values: Collection[float]) -> float:
    """Standard deviation without the most extreme tenth; 0 without values.

    A deviation from values near the median would not do. If one of two ranks is always the later
    one, values form two clusters and are rarely near their median.
    """
    if not values:
        return 0.0
    middle = median(values)
    tame = sorted(values, key=lambda value: abs(value - middle))[: -(len(values) // 10) or None]
    mean = fmean(tame)
    return sqrt(fmean((value - mean) ** 2 for value in tame))
