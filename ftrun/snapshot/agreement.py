"""Compares what several ranks have saved, and describes the first difference.

The inputs are trees of plain values, with a `TensorContent` in place of each tensor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ftrun.snapshot.plain_values import join

_LONGEST = 80


@dataclass(frozen=True, slots=True)
class TensorContent:
    """A tensor as a description and a digest, so that it can be compared without its bytes."""

    described: str
    digest: int

    def __str__(self) -> str:
        return f"{self.described} with digest {self.digest:016x}"


@dataclass(frozen=True, slots=True)
class StateDifference:
    """The first path at which two trees differ."""

    path: str
    one: str
    other: str


def difference(one: object, other: object, path: str) -> StateDifference | None:
    """The first difference of two trees at `path`; None if they are equal."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return _of_mappings(one, other, path)
    if _is_sequence(one) and _is_sequence(other):
        return _of_sequences(one, other, path)  # type: ignore[arg-type]
    if type(one) is type(other) and (one == other or (one != one and other != other)):
        return None  # two NaN count as equal
    return StateDifference(path, _shown(one), _shown(other))


def _of_mappings(
    one: Mapping[object, object], other: Mapping[object, object], path: str
) -> StateDifference | None:
    for key, value in one.items():
        here = join(path, key)
        if key not in other:
            return StateDifference(here, _shown(value), "missing")
        if (found := difference(value, other[key], here)) is not None:
            return found
    extra = next((key for key in other if key not in one), None)
    if extra is not None or len(one) != len(other):
        return StateDifference(join(path, extra), "missing", _shown(other.get(extra)))
    return None


def _of_sequences(
    one: Sequence[object], other: Sequence[object], path: str
) -> StateDifference | None:
    if len(one) != len(other) or type(one) is not type(other):
        kinds = (f"a {type(s).__name__} of {len(s)}" for s in (one, other))
        return StateDifference(path, *kinds)
    for at, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        if (found := difference(mine, theirs, f"{path}[{at}]")) is not None:
            return found
    return None


def _is_sequence(value: object) -> bool:
    return isinstance(value, list | tuple)


def _shown(value: object) -> str:
    text = str(value) if isinstance(value, TensorContent) else repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
