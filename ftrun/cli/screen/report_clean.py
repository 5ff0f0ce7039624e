"""Reads untrusted values: numbers that are finite, and text that is safe to print.

Runs in: cli. Pure.
"""

import math
import re
import unicodedata

MAX_TEXT = 2000
_MAX_NUMBER = 1e15
_PLAIN = re.compile(r"[\x20-\x7e]*\Z")


def number(value: object) -> float | None:
    """Returns the value if it is a finite number of at most 1e15, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) and abs(found) <= _MAX_NUMBER else None


def whole(value: object) -> int | None:
    found = number(value)
    return None if found is None else int(found)


def texts(value: object, *, most: int = 200) -> tuple[str, ...]:
    if not isinstance(value, list):
        return ()
    return tuple(clean(one) for one in value[:most] if isinstance(one, str))


def numbers(value: object, *, most: int = 100_000) -> tuple[int, ...]:
    found = (whole(one) for one in (value[:most] if isinstance(value, list) else ()))
    return tuple(one for one in found if one is not None)


def clean(text: str, limit: int = MAX_TEXT) -> str:
    r"""Writes invisible characters and direction marks as escapes such as `\x1b`."""
    if len(text) > limit:
        text = f"{text[:limit]} ... ({len(text) - limit:,} more characters)"
    if _PLAIN.match(text):
        return text
    return "".join(one if _shows(one) else _escaped(one) for one in text)


def _shows(one: str) -> bool:
    return one in "\n\t" or unicodedata.category(one) not in ("Cc", "Cf", "Cs", "Co", "Cn")


def _escaped(one: str) -> str:
    code = ord(one)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
