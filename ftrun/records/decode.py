"""Decodes lines of a journal.

Rule: a line that is torn, of an unknown kind, or without one of its fields is skipped here. No
      reader checks a field itself.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, Generic, TypeVar

import msgspec

from ftrun import events
from ftrun.events import Record
from ftrun.records import faults, incidents, membership, recovery, run, snapshots

R = TypeVar("R", bound=Record)
R_co = TypeVar("R_co", bound=Record, covariant=True)

_MAX_LINE_BYTES = 2_000_000
_FAR_S = 7 * 86_400.0  # two times of one line are less than this apart


@dataclass(frozen=True, slots=True)
class JournalLine(Generic[R_co]):
    """One line of a journal."""

    t_s: float  # wall time; a report corrects it by the monotonic clock of the node
    node: str  # empty in a run on one node
    monotonic_s: float
    record: R_co

    def at(self, monotonic_s: float | None) -> float | None:
        """A time of the node's monotonic clock as wall time; None: not known, or not plausible."""
        if monotonic_s is None or abs(monotonic_s - self.monotonic_s) >= _FAR_S:
            return None
        return self.t_s + monotonic_s - self.monotonic_s


class _Header(msgspec.Struct):
    time: float
    monotonic_s: float
    node: str = ""


def kinds() -> dict[str, type[Record]]:
    modules = (events, faults, incidents, membership, recovery, run, snapshots)
    found: dict[str, type[Record]] = {}
    for one in (one for module in modules for one in vars(module).values()):
        if isinstance(one, type) and issubclass(one, Record):
            found[str(one.__struct_config__.tag)] = one
    return {tag: one for tag, one in found.items() if tag != one.__name__}  # not a base class


_HEADER = msgspec.json.Decoder(_Header)
_RECORD: msgspec.json.Decoder[Any] = msgspec.json.Decoder(reduce(or_, kinds().values()))


def decode(line: bytes) -> JournalLine[Record] | None:
    """Decodes a line; None if it is to be skipped."""
    if len(line) > _MAX_LINE_BYTES:
        return None
    try:
        header, record = _HEADER.decode(line), _RECORD.decode(line)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return JournalLine(header.time, header.node, header.monotonic_s, record)


def of_kinds(lines: Iterable[JournalLine[Record]], *kinds: type[R]) -> list[JournalLine[R]]:
    return [line for line in lines if isinstance(line.record, kinds)]  # type: ignore[misc]
