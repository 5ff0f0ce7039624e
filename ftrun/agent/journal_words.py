"""Converts events and commands to journal fields.

Runs in:  agent. Pure.
"""

from dataclasses import fields
from typing import ClassVar, Protocol

from ftrun import events


class Journaled(Protocol):
    """A dataclass that is written to the journal field by field."""

    journal_kind: ClassVar[str]


def fields_of(value: object) -> dict[str, object]:
    """The fields of a value as the journal writes them; text if the field is not plain."""
    found: dict[str, object] = {}
    for field in fields(value):  # type: ignore[arg-type]
        content = getattr(value, field.name)
        plain = isinstance(content, str | int | float | bool) or content is None
        found[field.name] = content if plain else _in_words(content)
    return found


def _in_words(content: object) -> object:
    if isinstance(content, tuple):
        return [_in_words(part) for part in content]
    if isinstance(content, events.WorkerExit):
        return {"rank": content.rank, "kind": content.kind.value, "text": content.text}
    return str(content)
