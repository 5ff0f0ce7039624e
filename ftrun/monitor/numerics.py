"""Detects values that are not finite, and jumps of the loss; compares it after a recovery.

Source:   the design's monitor section. A spike is detected by its distance from earlier losses in
          units of their MAD, because losses are heavy-tailed.

Rule 1: A value that is not finite spreads with the next all-reduce. The rank that had it first is
        the culprit. If all ranks had it at the same step, there is no culprit.
"""

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ftrun.monitor.verdicts import Confidence, Verdict, VerdictKind, nodes_of, ranks_text

SETTLE_S = 1.5
"""Longer than two heartbeats, so that all ranks have reported their step."""

KEPT = 128
ENOUGH = 16
_SPREADS = 20.0
_AT_LEAST = 1.5
"""Minimum ratio of a spike to the losses before it, because smaller jumps are common."""

_IN_A_ROW = 2


@dataclass(frozen=True, slots=True)
class RankNumerics:
    """Last report of one rank."""

    rank: int
    step: int
    loss: float | None
    loss_step: int
    """Step of the loss; it stays until the next report."""
    bad_step: int
    """First step after which a parameter was not finite; 0: all are finite, as far as known."""


class NumericsDetector:
    """State of one generation; the losses of the previous one are retained."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=KEPT)
        self.begin()

    def begin(self) -> None:
        self.bad_since = 0
        """First step after which a value was not finite; 0: none was."""
        self._seen_s: float | None = None
        self._bad_loss: dict[int, int] = {}
        """Step at which each rank first reported a bad loss."""
        self._last_step = -1
        self._high: deque[float] = deque(maxlen=4)
        self._is_spike_reported = False

    def poll(
        self, ranks: Sequence[RankNumerics], node_of: Mapping[int, str], *, now_s: float
    ) -> Verdict | None:
        """Judge the newest reports of all ranks. A problem is returned only once."""
        bad = [one for one in ranks if self._is_bad_for_long(one)]
        if not bad:
            self._seen_s = None
            return self._spike(ranks)
        if self.bad_since:
            return None
        since = min(self._since(one) for one in bad)
        self._seen_s = now_s if self._seen_s is None else self._seen_s
        # Reports of several nodes are not of one moment: a rank without a problem may only be late
        # to report it.
        others = [one for one in ranks if one not in bad]
        is_reported = all(one.step > since for one in others)
        if not is_reported and now_s - self._seen_s < SETTLE_S:
            return None
        self.bad_since = since
        steps = {one.rank: self._since(one) for one in bad}
        return _not_finite(bad, steps, len(ranks), node_of, is_reported=is_reported)

    def _is_bad_for_long(self, one: RankNumerics) -> bool:
        """A parameter counts at once; a loss at two steps, as a scaler skips an overflow."""
        if one.bad_step:
            return True
        if not _is_bad(one.loss):
            self._bad_loss.pop(one.rank, None)
            return False
        return one.loss_step > self._bad_loss.setdefault(one.rank, one.loss_step)

    def _since(self, one: RankNumerics) -> int:
        return one.bad_step or self._bad_loss[one.rank]

    def _spike(self, ranks: Sequence[RankNumerics]) -> Verdict | None:
        reported = [one for one in ranks if finite(one.loss) is not None]
        if not reported:
            return None
        step = max(one.loss_step for one in reported)
        loss = max(one.loss or 0.0 for one in reported if one.loss_step == step)
        if step <= self._last_step:
            return None
        self._last_step = step
        if not self._is_high(loss):
            self._high.clear()
            self._losses.append(loss)
            self._is_spike_reported = False
            return None
        self._high.append(loss)
        if len(self._high) < _IN_A_ROW or self._is_spike_reported:
            return None
        self._is_spike_reported = True
        usual = median(self._losses)
        return Verdict(
            kind=VerdictKind.NUMERICAL_ANOMALY,
            culprits=(),
            text=f"the loss has jumped from about {usual:.4g} to {loss:.4g} by step {step:,}",
            evidence=(
                f"the last {len(self._losses)} losses before it: {min(self._losses):.4g} to "
                f"{max(self._losses):.4g}",
                f"since then: {', '.join(f'{one:.4g}' for one in self._high)}",
            ),
            counter_evidence=("a change of the data or of the learning rate has the same effect",),
            confidence=Confidence.POSSIBLE,
            fingerprint="loss spike",
        )

    def _is_high(self, loss: float) -> bool:
        if len(self._losses) < ENOUGH:
            return False
        middle, spread = _middle_and_spread(self._losses)
        is_far = loss - middle > _SPREADS * spread
        return is_far and loss > middle + (_AT_LEAST - 1) * abs(middle)


def finite(value: float | None) -> float | None:
    """The number, or None if it is not finite, because JSON cannot represent it."""
    return None if _is_bad(value) else value


def _middle_and_spread(losses: Collection[float]) -> tuple[float, float]:
    middle = median(losses)
    return middle, median(abs(one - middle) for one in losses)


def _is_bad(loss: float | None) -> bool:
    return loss is not None and not math.isfinite(loss)


def _not_finite(
    bad: Sequence[RankNumerics],
    since: Mapping[int, int],
    num_ranks: int,
    node_of: Mapping[int, str],
    *,
    is_reported: bool,
) -> Verdict:
    first = min(since.values())
    ranks = tuple(sorted(rank for rank, step in since.items() if step == first))
    is_one = len(ranks) < num_ranks and is_reported
    subject = ranks_text(ranks) if is_one else "all ranks"
    verb = "has" if len(ranks) == 1 and is_one else "have"
    evidence = []
    for one in sorted(bad, key=lambda one: since[one.rank])[:4]:
        if one.bad_step:
            evidence.append(f"a parameter of rank {one.rank} is NaN or infinite since step "
                            f"{one.bad_step:,}")  # fmt: skip
        if _is_bad(one.loss):
            step = one.loss_step
            evidence.append(f"rank {one.rank} reports a loss of {one.loss} at step {step:,}")
    return Verdict(
        kind=VerdictKind.NUMERICAL_ANOMALY,
        culprits=ranks if is_one else (),
        nodes=nodes_of(ranks, node_of) if is_one else (),
        victims=tuple(sorted(set(since) - set(ranks))) if is_one else tuple(sorted(since)),
        text=f"{subject} {verb} computed NaN or infinity at step {first:,}",
        evidence=tuple(evidence),
        counter_evidence=()
        if is_one
        else ("all have it since the same step, so the first rank is not known",),
        confidence=Confidence.CERTAIN if is_one else Confidence.LIKELY,
        act_immediately=True,
        fingerprint="not finite",
    )


_KEPT_LOSSES = 64
_ENOUGH_LOSSES = 4
_JUMP_SPREADS = 8.0
"""A loss is a jump at more than this number of typical distances from the median."""

_JUMP_SLACK = 0.1
"""Relative to the loss itself: the limit for losses that hardly change."""


class LossContinuity:
    """The last losses of one run: whether the loss continues after a recovery as before."""

    def __init__(self) -> None:
        self._found: deque[tuple[int, float]] = deque(maxlen=_KEPT_LOSSES)

    def add(self, step: int, loss: float) -> None:
        """Records one report; a repeated step counts once."""
        if not self._found or self._found[-1][0] != step:
            self._found.append((step, loss))

    @property
    def _before(self) -> list[float]:
        return [one for _, one in self._found if math.isfinite(one)]

    @property
    def usual(self) -> float:
        return median(self._before) if self._before else math.nan

    def judge(self, loss: float | None) -> str:
        """`continuous`, `jumped`, or `not reported`."""
        if loss is None:
            return "not reported"
        if not math.isfinite(loss):
            return "jumped"
        before = self._before
        if len(before) < _ENOUGH_LOSSES:
            return "not reported"
        middle, spread = _middle_and_spread(before)
        limit = max(_JUMP_SPREADS * spread, _JUMP_SLACK * abs(middle))
        return "continuous" if abs(loss - middle) <= limit else "jumped"
