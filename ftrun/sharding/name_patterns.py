"""Patterns over the names of tensors, such as `model.layers.*.weight` and `model.layers.{n}.*`.

A pattern matches a whole name. `*` matches any run of characters, including dots. `{word}` matches
a number with all its digits. Every other character matches itself, so names with brackets need no
escape.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

_SPECIAL = re.compile(r"\*|\{([A-Za-z_]\w*)\}")


@dataclass(frozen=True)
class NamePattern:
    """One pattern."""

    text: str

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The words of its numbers."""
        return tuple(match[1] for match in _SPECIAL.finditer(self.text) if match[1])

    def match(self, name: str) -> dict[str, int] | None:
        """The numbers in a name, by word; None if it does not match."""
        found = self._regex.fullmatch(name)
        if found is None:
            return None
        return {word: int(number) for word, number in found.groupdict().items()}

    def with_numbers(self, name: str, numbers: Mapping[str, int]) -> str:
        """A matching name, with these numbers in place of its own."""
        found = self._regex.fullmatch(name)
        assert found is not None, name
        made, at = "", 0
        for word in self.words:
            made += f"{name[at : found.start(word)]}{numbers[word]}"
            at = found.end(word)
        return made + name[at:]

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        made, at = "", 0
        for match in _SPECIAL.finditer(self.text):
            made += re.escape(self.text[at : match.start()])
            made += f"(?P<{match[1]}>(?<![0-9])[0-9]+(?![0-9]))" if match[1] else "(?s:.*)"
            at = match.end()
        return re.compile(made + re.escape(self.text[at:]))

    def __str__(self) -> str:
        return self.text
