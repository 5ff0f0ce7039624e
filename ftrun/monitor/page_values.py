"""Histogram of step times, small enough for a shared page.

Runs in:  worker (counts), agent (reads). Pure.
Takes in: durations in nanoseconds.
Gives:    quantiles in seconds, at most 25 % too high.

The width of a bucket is between an eighth and a quarter of the durations in it. Buckets cover 64 us
to more than a day. Shorter and longer durations fall into the first and the last bucket. All counts
are halved from time to time to forget old steps. A quantile therefore covers about the last
thousand steps.
"""

from collections.abc import Sequence

NUM_BUCKETS = 128
FORGET_AT = 1024
"""Number of counted steps at which all counts are halved."""

_FIRST_EXPONENT = 6  # of the microseconds: 64 us


def bucket_of(duration_ns: int) -> int:
    micros = max(1, duration_ns // 1000)
    exponent = micros.bit_length() - 1
    quarter = (micros >> (exponent - 2)) & 3 if exponent >= 2 else 0
    return min(NUM_BUCKETS - 1, max(0, 4 * (exponent - _FIRST_EXPONENT) + quarter))


def upper_edge_s(bucket: int) -> float:
    """Upper bound of the durations in this bucket."""
    exponent, quarter = divmod(bucket, 4)
    return float(1 << (exponent + _FIRST_EXPONENT)) * (1 + (quarter + 1) / 4) / 1e6


def quantile_s(counts: Sequence[int], part: float) -> float:
    """Upper bound of this quantile of the step times; 0 if no step is counted.

    Args:
        counts: of each bucket.
        part: 0.99 for the p99.
    """
    total = sum(counts)
    if total == 0:
        return 0.0
    wanted, seen = part * total, 0
    for bucket, count in enumerate(counts):
        seen += count
        if seen >= wanted:
            return upper_edge_s(bucket)
    return upper_edge_s(NUM_BUCKETS - 1)
