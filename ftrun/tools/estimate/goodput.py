"""Computes goodput: useful time divided by wall time, with random failures of known cost.

It is exact for failures at exponentially distributed intervals.

Source: Young 1974 and Daly 2006. The formula is theirs, with the mean over kinds of failure in
place of one dead time. docs/estimate.md derives it; tests/unit/estimate compares it with a
simulation.

M is the mean time between failures, T the useful time between two saves, C the cost of one save. A
life is the time between two recoveries. It ends with a failure after an exponentially distributed
time t. The gain of a life is all saves that were complete. The failure costs the time t and the
recovery. Goodput is the mean gain divided by the mean time (renewal reward):

    gain    T * E[exp(-L/M)] / (exp((T + C)/M) - 1)      L: time until a save is usable
    time    M / E[exp(-X/M)]                             X: dead time; a failure restarts it

Both means are over the kinds of failure, weighted by their shares. One kind with L = 0 gives Daly's
formula:

    goodput = T / (M * exp(X/M) * (exp((T + C)/M) - 1))
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_HALVINGS = 200
_LARGEST = 700.0
"""exp of a larger number overflows a float."""


@dataclass(frozen=True, slots=True)
class FailureKind:
    """A kind of failure, and the cost of one failure.

    Args:
        share: share of all failures, 0 to 1.
        dead_s: from the failure to the next step: detection and restart.
        lag_s: time after which a save can be restored after a failure of this kind.
    """

    share: float
    dead_s: float
    lag_s: float = 0.0


def goodput(
    *, interval_s: float, save_s: float, mtbf_s: float, kinds: Sequence[FailureKind]
) -> float:
    """Returns useful time divided by wall time; 0 if failures are too frequent for a float.

    `interval_s` is T, `save_s` C, `mtbf_s` M; the shares of the kinds add up to 1.
    """
    whole_s = interval_s + save_s
    if math.isinf(mtbf_s):
        return interval_s / whole_s
    if whole_s / mtbf_s > _LARGEST:
        return 0.0
    gain = interval_s * sum(kind.share * math.exp(-kind.lag_s / mtbf_s) for kind in kinds)
    alive = sum(kind.share * math.exp(-kind.dead_s / mtbf_s) for kind in kinds)
    # The shares may add up to the next float above 1, which must not give more than 1.
    return min(1.0, gain * alive / (mtbf_s * math.expm1(whole_s / mtbf_s)))


def best_interval_s(*, save_s: float, mtbf_s: float, longest_s: float) -> float:
    """Returns the T with the highest goodput, at most `longest_s`; 0 if a save costs nothing.

    At this T, (1 - T/M) exp((T + C)/M) is 1; the left side falls from T = 0 to T = M. Dead time and
    lag are factors without T, so that they do not move the maximum.
    """
    if save_s == 0.0:
        return 0.0
    if math.isinf(mtbf_s):
        return longest_s
    low, high = 0.0, min(mtbf_s, longest_s)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        # Compare logarithms, because exp(C/M) overflows if a save takes far longer than M.
        part = middle / mtbf_s
        is_short = part < 1.0 and math.log1p(-part) + part + save_s / mtbf_s > 0.0
        low, high = (middle, high) if is_short else (low, middle)
    return (low + high) / 2


def over_disk(
    memory_goodput: float, *, every_s: float, blocks_s: float, share: float, recovery_s: float
) -> float:
    """Goodput if some failures must restore the last checkpoint on disk.

    For the disk, the run gains `memory_goodput` per second, and sometimes has a failure that
    snapshots in memory do not survive. Such failures have a rate per second of progress. Each loses
    all progress since the last checkpoint, so that the same formula applies to progress instead of
    time.

    Args:
        memory_goodput: goodput with the dead time of these failures, but without the lost progress.
        every_s: progress between two checkpoints on disk.
        blocks_s: time that writing one checkpoint adds to the run.
        share: share of failures that need the disk.
        recovery_s: mean time from one recovery to the next, see `life_s`.
    """
    gain_s = recovery_s * memory_goodput
    if gain_s <= 0.0:
        return 0.0
    lost = share / gain_s * every_s
    # For tiny numbers the quotient may be the next float above 1.
    kept = 0.0 if lost > _LARGEST else min(1.0, lost / math.expm1(lost)) if lost else 1.0
    return memory_goodput * kept * (every_s / (every_s + blocks_s))


def life_s(*, mtbf_s: float, kinds: Sequence[FailureKind]) -> float:
    """Mean time from one recovery to the next: M / E[exp(-X/M)]."""
    if math.isinf(mtbf_s):
        return math.inf
    alive = sum(kind.share * math.exp(-kind.dead_s / mtbf_s) for kind in kinds)
    return mtbf_s / alive if alive > 0.0 else math.inf
