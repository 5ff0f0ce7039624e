"""Renders a template, wraps its comments, and quotes words for YAML.

Rule 1: A text is unquoted only if every YAML reader, 1.1 or 1.2, reads it as text. pyyaml breaks
this rule: it writes `1e-4` unquoted, and the reader of Kubernetes reads it as a number.
"""

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

WIDTH = 100

_SAFE = re.compile(r"[A-Za-z/]([A-Za-z0-9._/:-]*[A-Za-z0-9._/-])?")
_NOT_TEXT = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "none", "nan", "inf"}
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}
_COMMENT = re.compile(r"( *)# (\S.*)")


def rendered(template: str, **values: object) -> list[str]:
    """Returns the lines of a file in `templates`; comments are wrapped at `WIDTH`.

    Values must not contain line breaks, except words that pass the filters `yaml` or `listing`.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=StrictUndefined,
        line_statement_prefix="%",
    )
    environment.filters |= {"yaml": scalar, "listing": listing}
    text = environment.get_template(template).render(values)
    return [line for one in text.split("\n") for line in wrapped(one)]


def wrapped(line: str) -> list[str]:
    """Wraps a comment that is one line; leaves all other lines as they are."""
    found = _COMMENT.fullmatch(line)
    if found is None:
        return [line]
    space = found[1]
    return [f"{space}# {part}" for part in textwrap.wrap(found[2], WIDTH - len(space) - 2)]


def listing(words: Sequence[str], indent: int, *, nested: int = 0) -> str:
    """Formats the value of a key: on its line if it fits, else as a list below.

    `indent` is that of the key in its macro, `nested` that of the macro's output.
    """
    texts = [scalar(word) for word in words]
    line = f" [{', '.join(texts)}]"
    if len(line) <= WIDTH - indent - nested - len("command:") or not words:
        return line
    return "".join(f"\n{' ' * indent}- {text}" for text in texts)


def scalar(value: bool | int | str) -> str:
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
