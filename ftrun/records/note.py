"""What the lines of the journal have in common.

A class has the name of its kind; `Record` follows if another class has that name. `reason` says why
something was done, `text` says in one sentence what happened. A time of a field ends in `_s`; times
of day are only in the time of the line, all others are on the monotonic clock of its node.
"""

from typing import Annotated

from msgspec import Meta

from ftrun.events import Record

Seconds = Annotated[float, Meta(ge=-1e15, le=1e15)]
Whole = Annotated[int, Meta(ge=-(10**15), le=10**15)]


class Note(Record, frozen=True):
    """A record that says in one sentence what happened."""

    text: str


class ReasonRecord(Record, frozen=True):
    """A record that says why something was done, or has failed."""

    reason: str
