"""Writes YAML with a comment above each part that explains it.

Runs in:  cli. Pure.
Takes in: a tree of mappings, lists and plain values; any part may be a `Commented`.
Gives:    the YAML text.

Rule 1: A text is unquoted only if every YAML reader, 1.1 or 1.2, reads it as text. pyyaml breaks
this rule: it writes `1e-4` unquoted, and the reader of Kubernetes reads it as a number.
"""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias, TypeGuard

WIDTH = 100


@dataclass(frozen=True, slots=True)
class Commented:
    """A part of the tree, and an explanation of what happens without it."""

    why: str
    value: "Tree"


Plain: TypeAlias = bool | int | str
Tree: TypeAlias = "Plain | Commented | list[Tree] | dict[str, Tree]"

_SAFE = re.compile(r"[A-Za-z/]([A-Za-z0-9._/:-]*[A-Za-z0-9._/-])?")
_NOT_TEXT = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "none", "nan", "inf"}
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}


def to_yaml(documents: list[dict[str, Tree]], *, head: str = "") -> str:
    """Writes the documents; the comment `head` precedes the first."""
    above = "".join(f"{line}\n" for line in comment(head))
    parts = ["".join(f"{line}\n" for line in _block(document, 0)) for document in documents]
    return above + "---\n".join(parts)


def plain(tree: Tree) -> object:
    """Returns the tree without comments, as a YAML reader returns it."""
    match tree:
        case Commented(value=value):
            return plain(value)
        case dict():
            return {key: plain(value) for key, value in tree.items()}
        case list():
            return [plain(value) for value in tree]
        case _:
            return tree


def comment(text: str, indent: int = 0) -> Iterator[str]:
    """Yields comment lines of at most `WIDTH` characters; line breaks of the text are kept."""
    space = " " * indent
    for line in text.splitlines():
        for part in textwrap.wrap(line, WIDTH - indent - 2) or [""]:
            yield f"{space}# {part}".rstrip()


def _block(tree: Tree, indent: int) -> Iterator[str]:
    space = " " * indent
    if isinstance(tree, dict):
        for key, said in tree.items():
            why, value = _taken_apart(said)
            yield from comment(why, indent)
            name = f"{space}{scalar(key)}:"
            if (line := _one_line(value, WIDTH - len(name) - 1)) is not None:
                yield f"{name} {line}"
            else:
                yield name
                yield from _block(value, indent + (2 if isinstance(value, dict) else 0))
    elif isinstance(tree, list):
        for said in tree:
            why, value = _taken_apart(said)
            yield from comment(why, indent)
            yield from _element(value, indent)


def _element(value: Tree, indent: int) -> Iterator[str]:
    space, room = " " * indent, WIDTH - indent - 2
    line = _one_line(value, room)
    if line is None and isinstance(value, dict) and _are_plain(of := list(value.values())):
        pairs = zip(value, of, strict=True)
        line = f"{{{', '.join(f'{scalar(key)}: {scalar(one)}' for key, one in pairs)}}}"
        line = line if len(line) <= room else None
    if line is not None:
        yield f"{space}- {line}"
        return
    lines = list(_block(value, indent + 2))
    # A comment cannot follow the hyphen, so it precedes the hyphen.
    while lines[0].lstrip().startswith("#"):
        yield space + lines.pop(0).lstrip()
    yield f"{space}- {lines[0].lstrip()}"
    yield from lines[1:]


def _one_line(value: Tree, room: int) -> str | None:
    """Returns a plain value, or a list of them if it fits; None for all else."""
    match value:
        case Commented():
            return None
        case dict():
            return None if value else "{}"
        case list():
            if not _are_plain(value):
                return None
            line = f"[{', '.join(scalar(one) for one in value)}]"
            return line if len(line) <= room or not value else None
        case _:
            return scalar(value)


def _are_plain(values: list[Tree]) -> TypeGuard[list[Plain]]:
    return not any(isinstance(one, dict | list | Commented) for one in values)


def _taken_apart(tree: Tree) -> tuple[str, Tree]:
    return (tree.why, tree.value) if isinstance(tree, Commented) else ("", tree)


def scalar(value: Plain) -> str:
    """Formats one value so that every reader gets the same value back."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if _SAFE.fullmatch(value) and value.lower() not in _NOT_TEXT:
        return value
    return f'"{"".join(_escaped(letter) for letter in value)}"'


def _escaped(letter: str) -> str:
    if letter in _ESCAPES:
        return _ESCAPES[letter]
    if letter.isprintable():
        return letter
    code = ord(letter)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
