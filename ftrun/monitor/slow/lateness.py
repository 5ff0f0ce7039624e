"""Whether somebody has become late, by how late it was in one window after the other.

Runs in:  the agent that leads. Pure.
Takes in: a lateness in seconds for each window of some steps.
Gives:    a `Lateness`, and how sure it is that this is more than design and chance.
Source:   GREYHOUND's 10 % for fail-slow, against one's own past; the rest by simulation
          (tests/unit/monitor/slow_world.py).
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from math import sqrt
from statistics import fmean, median

from ftrun.monitor.verdicts import Confidence

SHARE_OF_STEP = 0.10
"""Less is not worth a name."""
STANDING_SHARE = 0.25
"""The same for who was no quicker before."""
NOISE = 2.5
"""So many deviations of the noise."""

STEADY = 2.0
"""The same for the windows that are judged: it is a median of seven."""

WINDOWS = 7
"""That are judged."""
MOST = 6
"""Of them must be late for a name."""
ENOUGH = 4
"""The same for who is named already."""
LEFT_OUT = 2
"""Windows at the beginning: memory is made, kernels are chosen."""
LEARNT = 10
"""Windows that make a past."""
OLD = 48
"""Windows that tell of the noise, beside the first ones."""
STANDING = 16
"""Windows for who has no other past."""


@dataclass(frozen=True, slots=True)
class Lateness:
    """How late somebody is, in seconds of each step."""

    now_s: float
    before_s: float | None
    """In the first windows; None: not known yet."""
    noise_s: float
    """Standard deviation of a window."""

    @property
    def more_s(self) -> float:
        return self.now_s - (self.before_s or 0.0)


@dataclass
class LatenessSeries:
    """Of one rank, the newest windows and the first ones."""

    may_stand: bool = True
    """Who was late from the beginning can be named."""
    values_s: deque[float] = field(default_factory=lambda: deque(maxlen=STANDING))
    first_s: list[float] = field(default_factory=list)
    old_s: deque[float] = field(default_factory=lambda: deque(maxlen=OLD))
    """Windows that are judged no more, and in which nobody was named."""
    noise_s: float = 0.0
    """By what is known until now."""
    count: int = 0
    named: Confidence | None = None
    """What the last `judge` has said."""
    named_s: float = 0.0
    """So much later than before it was when it was named."""

    def add(self, value_s: float) -> None:
        """One window more."""
        self.count += 1
        if len(self.values_s) >= WINDOWS and self.named is None:
            self.old_s.append(self.values_s[-WINDOWS])
        self.values_s.append(value_s)
        if self.count > LEFT_OUT and len(self.first_s) < LEARNT:
            self.first_s.append(value_s)
        self.noise_s = max(_deviation(self.first_s), _deviation(self.old_s))

    def begin_anew(self) -> None:
        """What was learnt is no past to judge by."""
        self.values_s.clear()
        self.first_s.clear()
        self.old_s.clear()
        self.noise_s, self.count, self.named = 0.0, 0, None

    def forget_newest(self) -> None:
        """What is judged was made by something else; the past stays."""
        self.values_s.clear()
        self.named = None

    @property
    def is_known(self) -> bool:
        return len(self.values_s) >= WINDOWS

    def lateness(self) -> Lateness:
        """For `is_known`."""
        has_past = len(self.first_s) >= LEARNT
        before_s = max(0.0, median(self.first_s)) if has_past else None
        return Lateness(median(self._newest()), before_s, self.noise_s)

    def judge(
        self, step_s: float, floor_s: float, noise_s: float, *, may_name: bool
    ) -> Confidence | None:
        """Whether it is late, and how sure that is; the answer is remembered as `named`.

        Args:
            step_s: what a step takes.
            floor_s: what is never worth a name, by clocks and scheduler.
            noise_s: of others that do the same; its own counts where it is more.
            may_name: else only who is named already can stay so.
        """
        if not self.is_known:
            self.named = None
        elif self.named is None:
            self.named = self._judge_anew(step_s, floor_s, noise_s) if may_name else None
            self.named_s = self.lateness().more_s
        elif not self._is_late_still(step_s, floor_s):
            self.named = None
            # What is over speaks for nothing new.
            self.values_s = deque(self._newest(), maxlen=STANDING)
        return self.named

    def _judge_anew(self, step_s: float, floor_s: float, noise_s: float) -> Confidence | None:
        late = self.lateness()
        limit_s = max(SHARE_OF_STEP * step_s, floor_s)
        if late.before_s is not None:
            is_steady = _count(self._newest(), late.before_s + limit_s / 2) >= MOST
            by_chance_s = NOISE * max(noise_s, late.noise_s)
            # The past may have been calmer than what there is now.
            by_chance_s = max(by_chance_s, STEADY * _deviation(self._newest()))
            if is_steady and late.more_s > max(limit_s, by_chance_s):
                return Confidence.LIKELY
        limit_s = max(STANDING_SHARE * step_s, floor_s)
        is_long = self.may_stand and len(self.values_s) == STANDING
        if is_long and _count(self.values_s, limit_s / 2) >= STANDING - 1:
            by_chance_s = max(noise_s, _deviation(self.values_s))
            return (
                Confidence.POSSIBLE if median(self.values_s) > max(limit_s, by_chance_s) else None
            )
        return None

    def _is_late_still(self, step_s: float, floor_s: float) -> bool:
        """What has been seen once is given up only when it is gone, not when it is less clear."""
        limit_s = max(SHARE_OF_STEP * step_s, floor_s)
        before_s = self.lateness().before_s or 0.0
        # What is no more than the noise is gone, or chance would keep the name for ever.
        above_s = max(limit_s / 2, min(self.noise_s, self.named_s / 2))
        if self.named is Confidence.LIKELY:
            above_s += before_s
        return _count(self._newest(), above_s) >= ENOUGH

    def _newest(self) -> list[float]:
        return list(self.values_s)[-WINDOWS:]


def _count(values: Collection[float], above: float) -> int:
    return sum(value > above for value in values)


def _deviation(values: Collection[float]) -> float:
    """The standard deviation without the wildest tenth; 0 of none.

    Not that of the median's neighbours: where one of two ranks is always the later one, values
    stand on two sides and hardly ever near their median.
    """
    if not values:
        return 0.0
    middle = median(values)
    tame = sorted(values, key=lambda value: abs(value - middle))[: -(len(values) // 10) or None]
    mean = fmean(tame)
    return sqrt(fmean((value - mean) ** 2 for value in tame))
