"""How long steps take: a histogram small enough for a page of shared memory.

Runs in:  worker (counts), agent (reads). Pure.
Takes in: durations in nanoseconds.
Gives:    quantiles in seconds, at most a quarter too large.

Buckets grow by an eighth to a quarter, from 64 us to more than a day; what is shorter or longer
falls into the first or the last one. Old steps are forgotten by halving all counts now and then,
so that a quantile is that of the last thousand steps or so.
"""

from collections.abc import Sequence

NUM_BUCKETS = 128
FORGET_AT = 1024
"""So many steps counted: all counts are halved."""

_FIRST_EXPONENT = 6  # of the microseconds: 64 us


def bucket_of(duration_ns: int) -> int:
    """The bucket of a duration."""
    micros = max(1, duration_ns // 1000)
    exponent = micros.bit_length() - 1
    quarter = (micros >> (exponent - 2)) & 3 if exponent >= 2 else 0
    return min(NUM_BUCKETS - 1, max(0, 4 * (exponent - _FIRST_EXPONENT) + quarter))


def upper_edge_s(bucket: int) -> float:
    """No duration in this bucket is longer."""
    exponent, quarter = divmod(bucket, 4)
    return float(1 << (exponent + _FIRST_EXPONENT)) * (1 + (quarter + 1) / 4) / 1e6


def quantile_s(counts: Sequence[int], part: float) -> float:
    """So long at most took this part of the steps; 0 where none is counted.

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
