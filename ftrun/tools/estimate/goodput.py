"""The share of the time that is progress, when failures come by themselves and cost what they cost.

Runs in:  whoever asks (the cli). Pure.
Takes in: the time between failures, what a save costs, what each kind of failure costs.
Gives:    goodput, exact for failures that come independently of time (exponential), and the
          interval between saves for which it is highest.
Source:   Young 1974 and Daly 2006 for the first and the higher order interval. The formula itself
          is theirs, with the mean over kinds of failure in place of one dead time; it is derived
          in docs/estimate.md and compared with a simulation in tests/unit/estimate.

M is the mean time between failures, T the useful time between two saves, C what one save costs.
A life is what lies between two recoveries. It ends with a failure after a time t that is
exponential; it has then gained all saves that were complete, and the failure costs the time t and
the recovery. Goodput is the mean gain over the mean time (renewal reward):

    gain    T * E[exp(-L/M)] / (exp((T + C)/M) - 1)      L: how long a save is of no use yet
    time    M / E[exp(-X/M)]                             X: dead time; a failure in it begins anew

both means over the kinds of failure, by their shares. One kind without lag gives Daly's

    goodput = T / (M * exp(X/M) * (exp((T + C)/M) - 1))
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_HALVINGS = 200
_LARGEST = 700.0
"""exp of more is no float."""


@dataclass(frozen=True, slots=True)
class FailureKind:
    """A kind of failure, and what one of it costs.

    Args:
        share: of all failures, 0 to 1.
        dead_s: from the failure to the first step after it: to notice it, to start again.
        lag_s: a save counts only so long after it was made, for a failure of this kind.
    """

    share: float
    dead_s: float
    lag_s: float = 0.0


def goodput(
    *, interval_s: float, save_s: float, mtbf_s: float, kinds: Sequence[FailureKind]
) -> float:
    """Useful time over all time, in the long run.

    Args:
        interval_s: T, useful time between two saves; above 0.
        save_s: C, by which one save makes the run longer.
        mtbf_s: M, of the whole run; infinite where nothing fails.
        kinds: their shares add up to 1.

    Returns:
        0 to 1; 0 too where failures come so much faster than saves that no float can tell.
    """
    whole_s = interval_s + save_s
    if math.isinf(mtbf_s):
        return interval_s / whole_s
    if whole_s / mtbf_s > _LARGEST:
        return 0.0
    gain = interval_s * sum(kind.share * math.exp(-kind.lag_s / mtbf_s) for kind in kinds)
    alive = sum(kind.share * math.exp(-kind.dead_s / mtbf_s) for kind in kinds)
    # Shares that add up to the next float above 1 gain no more than all.
    return min(1.0, gain * alive / (mtbf_s * math.expm1(whole_s / mtbf_s)))


def best_interval_s(*, save_s: float, mtbf_s: float, longest_s: float) -> float:
    """The T for which goodput is highest, whatever a failure costs.

    It is where (1 - T/M) exp((T + C)/M) is 1; the left side falls from T = 0 to T = M. Dead time
    and lag are factors in which T does not occur, so they do not move it.

    Args:
        save_s: C; with 0 saves may be as frequent as they can, and the answer is 0.
        mtbf_s: M.
        longest_s: no longer than this, such as the whole run.
    """
    if save_s == 0.0:
        return 0.0
    if math.isinf(mtbf_s):
        return longest_s
    low, high = 0.0, min(mtbf_s, longest_s)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        # Logarithms: exp(C/M) has no float where a save takes far longer than failures let it.
        part = middle / mtbf_s
        is_short = part < 1.0 and math.log1p(-part) + part + save_s / mtbf_s > 0.0
        low, high = (middle, high) if is_short else (low, middle)
    return (low + high) / 2


def young_interval_s(*, save_s: float, mtbf_s: float) -> float:
    """The first approximation of the best interval; good where it is far below M."""
    return math.sqrt(2.0 * save_s * mtbf_s)


def daly_interval_s(*, save_s: float, mtbf_s: float) -> float:
    """The higher order one; M where a save takes 2 M or longer."""
    if save_s >= 2.0 * mtbf_s:
        return mtbf_s
    part = save_s / (2.0 * mtbf_s)
    young_s = young_interval_s(save_s=save_s, mtbf_s=mtbf_s)
    return young_s * (1.0 + math.sqrt(part) / 3.0 + part / 9.0) - save_s


def over_disk(
    memory_goodput: float,
    *,
    every_s: float,
    blocks_s: float,
    share: float,
    recovery_s: float,
) -> float:
    """Goodput where some failures have to go back to the last checkpoint on disk.

    Seen from the disk, the run is one that gains `memory_goodput` a second and fails, now and
    then, in a way that memory does not bear. Per second of progress that happens h times, and
    then all progress since the last checkpoint is lost: the same formula once more, over progress.

    Args:
        memory_goodput: without going back to the disk, but with the dead time of such failures.
        every_s: progress between two checkpoints on disk.
        blocks_s: by which writing one makes the run longer.
        share: of the failures, those that need it.
        recovery_s: mean time from one recovery to the next, see `life_s`.
    """
    gain_s = recovery_s * memory_goodput
    if gain_s <= 0.0:
        return 0.0
    lost = share / gain_s * every_s
    # Of tiny numbers the quotient may be the next float above 1.
    kept = 0.0 if lost > _LARGEST else min(1.0, lost / math.expm1(lost)) if lost else 1.0
    return memory_goodput * kept * (every_s / (every_s + blocks_s))


def life_s(*, mtbf_s: float, kinds: Sequence[FailureKind]) -> float:
    """Mean time from one recovery to the next, M / E[exp(-X/M)]."""
    if math.isinf(mtbf_s):
        return math.inf
    alive = sum(kind.share * math.exp(-kind.dead_s / mtbf_s) for kind in kinds)
    return mtbf_s / alive if alive > 0.0 else math.inf
