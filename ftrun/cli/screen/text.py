"""The formatters and parsers of numbers, durations, sizes and ranks of all commands and pages.

Pure. It also makes untrusted texts printable, and computes intervals of rates.
"""

import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from ftrun.errors import UsageError

NOT_KNOWN = "not known"
MAX_TEXT = 2000
_PLAIN = re.compile(r"[\x20-\x7e]*\Z")
_STEP = re.compile(r"\bstep (\d{4,15})\b")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGT]i?)?B?")
_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}i": 1 << 10 * (place + 1) for place, unit in enumerate("KMGT")}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_SPAN_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):(\d{2}):(\d{2})")


def duration(seconds: float | None) -> str:
    """Formats as `0.4 ms`, `64 ms`, `3.21 s`, `12.3 s`, `3 min 20 s`, `2 h 5 min`, `4 d 3 h`."""
    if seconds is None or not math.isfinite(seconds):
        return NOT_KNOWN
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 0.9995:
        milli = seconds * 1000
        return f"{milli:.0f} ms" if milli >= 9.95 or milli == 0 else f"{milli:.1f} ms"
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return _two(minutes, "min", rest, "s")
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return _two(hours, "h", minutes, "min")
    return _two(hours // 24, "d", hours % 24, "h")


def _two(large: int, unit: str, small: int, smaller: str) -> str:
    return f"{large:,} {unit} {small} {smaller}" if small else f"{large:,} {unit}"


def size_of(text: str, flag: str, *, such_as: str = "64Gi, 512Mi or 16G") -> int:
    """Parses `64Gi`, `16G`, `512MiB` or a number of bytes; rounds up to bytes."""
    match = _SIZE.fullmatch(text.strip())
    found = float(match[1]) * _UNITS.get(match[2] or "", 1) if match else 0.0
    if not 1 <= found < 1 << 60:
        raise UsageError(f"{flag} is a size such as {such_as}, not {text!r}")
    return math.ceil(found)


def seconds_of(text: str, flag: str, *, such_as: str = "90m, 24h, 7d or 12:00:00") -> int:
    """Parses `90m`, `24h`, `7d`, `HH:MM:SS` or `D-HH:MM:SS`; rounds up to seconds."""
    found = 0.0
    if match := _SPAN.fullmatch(text.strip()):
        found = float(match[1]) * _SPAN_S[match[2]]
    elif match := _CLOCK.fullmatch(text.strip()):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        found = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not 0 < found < 1 << 31:
        raise UsageError(f"{flag} is a time such as {such_as}, not {text!r}")
    return math.ceil(found)


def with_commas(text: str) -> str:
    """Rewrites `step 15915` as `step 15,915`."""
    return _STEP.sub(lambda seen: f"step {int(seen[1]):,}", text)


def size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def count(value: int, thing: str) -> str:
    """Formats as `1 step`, `2 steps`, `18,240 steps`."""
    plural = "" if value == 1 else "es" if thing.endswith("ch") else "s"
    return f"{value:,} {thing}{plural}"


def percent(part: float | None) -> str:
    """Formats as `97.2 %`; a part below 1 is never rounded to 100.0 %."""
    if part is None:
        return NOT_KNOWN
    shown = f"{100 * part:.1f}"
    if shown == "100.0" and part < 1:
        shown = f"{math.floor(1e5 * part) / 1e3:.3f}".rstrip("0")
    return f"{shown} %"


def when(t_s: float | None) -> str:
    if t_s is None:
        return NOT_KNOWN
    try:
        return f"{datetime.fromtimestamp(t_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):
        return NOT_KNOWN


def clock(t_s: float) -> str:
    text = when(t_s)
    return text if text == NOT_KNOWN else text[11:19]


def joined(words: Sequence[str]) -> str:
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def listed(words: Sequence[str], most: int) -> str:
    """Joins the first `most` words; of the others only the number follows."""
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def by_number(name: str) -> tuple[object, ...]:
    """Returns a sort key that places node10 after node9."""
    parts = re.split(r"(\d{1,15})", name)
    return tuple(int(one) if index % 2 else one for index, one in enumerate(parts))


def shares_to_write(numbers: Sequence[int]) -> str:
    """Formats as `shares 1, 3 are written`."""
    is_one = len(numbers) == 1
    return f"share{'' if is_one else 's'} {ranges(numbers)} {'is' if is_one else 'are'} written"


def ranges(values: Sequence[int], *, most: int = 8) -> str:
    """Formats as `0-2, 4, 6-511`; after `most` ranges, only the number of other values follows."""
    runs: list[list[int]] = []
    for value in sorted(set(values)):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    texts = [f"{a}" if a == b else (f"{a}, {b}" if b == a + 1 else f"{a}-{b}") for a, b in runs]
    if len(texts) <= most:
        return ", ".join(texts)
    left = sum(b - a + 1 for a, b in runs[most:])
    return f"{', '.join(texts[:most])} and {left} more"


def ranks(values: Sequence[int], *, most: int = 8) -> str:
    return f"{'rank' if len(set(values)) == 1 else 'ranks'} {ranges(values, most=most)}"


def likely_rates(events: int, over_s: float) -> tuple[float, float]:
    """Returns the exact (Garwood) 90 % interval, per second, of the rate of a Poisson process."""
    low = 0.0 if events == 0 else _solve(lambda mean: 1 - _poisson_cdf(events - 1, mean))
    high = _solve(lambda mean: 1 - _poisson_cdf(events, mean), wanted=0.95)
    return low / over_s, high / over_s


def _solve(rising: Callable[[float], float], wanted: float = 0.05) -> float:
    low, high = 0.0, 1.0
    while rising(high) < wanted:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < wanted else (low, middle)
    return high


def _poisson_cdf(most: int, mean: float) -> float:
    term = total = math.exp(-mean) if mean < 700 else 0.0
    for index in range(1, most + 1):
        term *= mean / index
        total += term
    return min(total, 1.0)


# --- untrusted texts --------------------------------------------------------------------------


def clean(text: str, limit: int = MAX_TEXT) -> str:
    r"""Writes invisible characters and direction marks as escapes such as `\x1b`."""
    if len(text) > limit:
        text = f"{text[:limit]} ... ({len(text) - limit:,} more characters)"
    if _PLAIN.match(text):
        return text
    return "".join(map(_printable, text))


def _printable(one: str) -> str:
    if one in "\n\t" or unicodedata.category(one) not in ("Cc", "Cf", "Cs", "Co", "Cn"):
        return one
    code = ord(one)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
