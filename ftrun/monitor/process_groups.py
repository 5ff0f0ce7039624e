"""Encodes the ranks of process groups in a line of text that fits a shared page.

Runs in:  worker (writes), agent (reads). Pure.
Takes in: groups by torch's name for them, each with its ranks.
Gives:    `0=0-7 12=0-6:2 15=0,3`: name, then ranges, with a step if it is not 1.

A group that does not fit is omitted. Its collectives are still observed, but no rank is named for
missing one of them.
"""

from collections.abc import Iterable, Mapping, Sequence


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


def encode_ranks(ranks: Iterable[int]) -> str:
    """`0-7`, `0-6:2`, `0,3`: ranges of equal distance."""
    parts: list[str] = []
    run: list[int] = []
    for rank in sorted(ranks):
        if len(run) >= 2 and rank - run[-1] != run[1] - run[0]:
            run = _close(run, parts)
        run.append(rank)
    while run:
        run = _close(run, parts)
    return ",".join(parts)


def decode_ranks(text: str) -> tuple[int, ...]:
    """Raises: ValueError: the text is malformed."""
    found: list[int] = []
    for part in text.split(","):
        span, _, step = part.partition(":")
        first, dash, last = span.partition("-")
        found += range(int(first), int(last if dash else first) + 1, int(step or 1))
    return tuple(found)


def _close(run: list[int], parts: list[str]) -> list[int]:
    if len(run) == 1:
        parts.append(str(run[0]))
        return []
    step = run[1] - run[0]
    if len(run) == 2 and step > 1:
        parts.append(str(run[0]))
        return run[1:]
    parts.append(f"{run[0]}-{run[-1]}" + (f":{step}" if step > 1 else ""))
    return []


def _plain(name: str) -> str:
    return "".join(one for one in name if not one.isspace())
