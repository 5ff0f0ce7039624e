"""Values that a worker encodes for a shared page: a histogram of step times, and process groups.

The width of a bucket is between an eighth and a quarter of the durations in it, so a quantile is at
most 25 % too high. Buckets cover 64 us to more than a day. Shorter and longer durations fall into
the first and the last bucket. All counts are halved from time to time, so that a quantile covers
about the last thousand steps.

Groups are one line of text: `0=0-7 12=0-6:2 15=0,3`: name, then ranges, with a step if it is not 1.
A group that does not fit is omitted. Its collectives are still observed, but no rank is named for
missing one of them.

Backends are one line of text too: `cpu:gloo cuda:nccl 0,1,-,4`: the backend of each device, with a
`*` if it is not torch's own class of that name; then, for each group of the other line, the number
by which torch's recorder of device collectives knows it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

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
    exponent, quarter = divmod(bucket, 4)
    return float(1 << (exponent + _FIRST_EXPONENT)) * (1 + (quarter + 1) / 4) / 1e6


def quantile_s(counts: Sequence[int], part: float) -> float:
    """Upper bound of this quantile of the step times; 0 if no step is counted."""
    total = sum(counts)
    if total == 0:
        return 0.0
    wanted, seen = part * total, 0
    for bucket, count in enumerate(counts):
        seen += count
        if seen >= wanted:
            return upper_edge_s(bucket)
    return upper_edge_s(NUM_BUCKETS - 1)


def encode_groups(groups: Mapping[str, Sequence[int]], limit_bytes: int) -> str:
    found, size = [], 0
    for name, ranks in groups.items():
        text = f"{_plain(name)}={encode_ranks(ranks)}"
        size += len(text.encode()) + 1
        if size > limit_bytes:
            break
        found.append(text)
    return " ".join(found)


def decode_groups(text: str) -> dict[str, tuple[int, ...]]:
    """Decode the groups of a line; torn or malformed entries are skipped."""
    found = {}
    for word in text.split():
        name, equals, ranks = word.rpartition("=")
        if equals:
            try:
                found[name] = decode_ranks(ranks)
            except ValueError:
                continue
    return found


@dataclass(frozen=True, slots=True)
class Backends:
    """Backends of one rank's process groups."""

    by_device: Mapping[str, str] = field(default_factory=dict)
    """`{"cpu": "gloo", "cuda": "nccl"}`"""
    ids: tuple[int | None, ...] = ()
    """Number of each group in the recorder of device collectives, in the order of the groups; None:
    the group has no such backend."""

    @property
    def device_backend(self) -> str:
        """Backend of the collectives on devices; empty if all run on the CPU."""
        others = (one for device, one in self.by_device.items() if device != "cpu")
        return next((one for one in others if one != "gloo"), "")


def encode_backends(backends: Backends, limit_bytes: int) -> str:
    """Without the numbers if they do not fit."""
    words = [f"{_plain(device)}:{_plain(name)}" for device, name in backends.by_device.items()]
    if any(one is not None for one in backends.ids):
        words.append(",".join("-" if one is None else str(one) for one in backends.ids))
    while len(" ".join(words).encode()) > limit_bytes:
        words.pop()
    return " ".join(words)


def decode_backends(text: str) -> Backends:
    """Decode a line; malformed words are skipped."""
    by_device: dict[str, str] = {}
    ids: tuple[int | None, ...] = ()
    for word in text.split():
        device, colon, name = word.partition(":")
        if colon:
            by_device[device] = name
            continue
        try:
            ids = tuple(None if one == "-" else int(one) for one in word.split(","))
        except ValueError:
            continue
    return Backends(by_device, ids)


def encode_ranks(ranks: Iterable[int]) -> str:
    """`0-7`, `0-6:2`, `0,3`: ranges of equal distance."""
    parts: list[str] = []
    all_ranks = sorted(ranks)
    first = 0
    while first < len(all_ranks):
        last = min(first + 1, len(all_ranks) - 1)
        step = all_ranks[last] - all_ranks[first] if last > first else 1
        while last + 1 < len(all_ranks) and all_ranks[last + 1] - all_ranks[last] == step:
            last += 1
        if last == first or (last == first + 1 and step > 1):
            parts.append(str(all_ranks[first]))
            first += 1
            continue
        span = f"{all_ranks[first]}-{all_ranks[last]}"
        parts.append(span + (f":{step}" if step > 1 else ""))
        first = last + 1
    return ",".join(parts)


def decode_ranks(text: str) -> tuple[int, ...]:
    """Raises: ValueError: the text is malformed."""
    found: list[int] = []
    for part in text.split(","):
        span, _, step = part.partition(":")
        first, dash, last = span.partition("-")
        found += range(int(first), int(last if dash else first) + 1, int(step or 1))
    return tuple(found)


def _plain(name: str) -> str:
    return "".join(one for one in name if not one.isspace())
