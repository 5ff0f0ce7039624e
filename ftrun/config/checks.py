"""Checks plain values, as YAML gives them, against a msgspec struct, and lists every problem.

`Meta.extra` of a field may hold:
    wanted:   text for the allowed values, if the type does not describe them well.
    read:     converts a value before the check; raises ValueError.
    problems: finds problems that the type cannot express, in a value of the right type that is
              neither a list nor a struct.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import msgspec
from msgspec import Meta

Path = tuple[str | int, ...]


class Problem(NamedTuple):
    """One thing that is wrong, and its place in the checked value."""

    path: Path
    text: str

    def __str__(self) -> str:
        keys = (f"[{one}]" if isinstance(one, int) else f".{one}" for one in self.path)
        place = "".join(keys).removeprefix(".")
        return f"{place}: {self.text}" if place else self.text


@dataclass(frozen=True, slots=True)
class _FieldType:
    """A type without `Annotated` and `| None`, and the content of these."""

    base: Any
    is_optional: bool
    metas: tuple[Meta, ...]

    @staticmethod
    def of(wanted: Any) -> "_FieldType":
        metas: list[Meta] = []
        is_optional = False
        while True:
            origin, args = get_origin(wanted), get_args(wanted)
            if origin is Annotated:
                metas += [one for one in args[1:] if isinstance(one, Meta)]
                wanted = args[0]
            elif origin in (Union, UnionType) and NoneType in args:
                is_optional = True
                wanted = Union[tuple(one for one in args if one is not NoneType)]  # noqa: UP007
            else:
                return _FieldType(wanted, is_optional, tuple(metas))

    def extra(self, name: str) -> Any:
        return next(
            (one.extra[name] for one in self.metas if one.extra and name in one.extra), None
        )

    def limit(self, name: str) -> Any:
        return next(
            (found for one in self.metas if (found := getattr(one, name)) is not None), None
        )


def is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


@cache
def fields_of(struct: Any) -> Mapping[str, msgspec.structs.FieldInfo]:
    """Returns the fields of a struct by the names that a file gives them."""
    return {one.encode_name: one for one in msgspec.structs.fields(struct)}


def description_of(wanted: Any) -> str:
    return _FieldType.of(wanted).limit("description") or ""


def check(value: object, wanted: Any, found: list[Problem], path: Path = ()) -> object:
    """Appends every problem to `found`; returns the value as `read` has converted it."""
    kind = _FieldType.of(wanted)
    if value is None and kind.is_optional:
        return None
    given = value
    if read := kind.extra("read"):
        try:
            value = read(value)
        except ValueError as error:
            found.append(Problem(path, str(error)))
            return given
    if is_struct(kind.base) and isinstance(value, Mapping):
        return _check_struct(value, kind.base, found, path)
    if get_origin(kind.base) is list and isinstance(value, list):
        (item,) = get_args(kind.base)
        return [check(one, item, found, (*path, at)) for at, one in enumerate(value)]
    try:
        msgspec.convert(value, wanted)
    except msgspec.ValidationError:
        hint = suggestion(str(given), choices_of(wanted))
        found.append(Problem(path, f"should be {allowed(wanted)}, and is {given!r}{hint}"))
        return value
    if problems := kind.extra("problems"):
        found += [Problem(path, text) for text in problems(value)]
    return value


def _check_struct(
    value: Mapping[Any, object], struct: Any, found: list[Problem], path: Path
) -> dict[Any, object]:
    fields = fields_of(struct)
    checked = {}
    for key, one in value.items():
        if key in fields:
            checked[key] = check(one, fields[key].type, found, (*path, key))
        else:
            found.append(Problem((*path, str(key)), unknown_key(key, struct)))
    missing = [name for name, one in fields.items() if one.required and name not in value]
    found += [Problem(path, f"{name} is missing") for name in missing]
    return checked


def unknown_key(key: object, struct: Any) -> str:
    fields = fields_of(struct)
    noun = "section" if all(is_struct(one.type) for one in fields.values()) else "key"
    hint = suggestion(str(key), list(fields)) or f"; there are {', '.join(fields)}"
    return f"there is no such {noun}{hint}"


def suggestion(text: str, names: list[str]) -> str:
    near = difflib.get_close_matches(text, names, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def choices_of(wanted: Any) -> list[str]:
    """Returns the words that a type allows; empty if it allows other values too."""
    base = _FieldType.of(wanted).base
    if get_origin(base) is Literal:
        return [str(one) for one in get_args(base)]
    if isinstance(base, type) and issubclass(base, Enum):
        return [str(one.value) for one in base]
    return []


def is_text(wanted: Any) -> bool:
    """Whether a type holds only text, so that a flag's value is not read as YAML."""
    return _FieldType.of(wanted).base is str or bool(choices_of(wanted))


_NOUNS: Mapping[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
}


def allowed(wanted: Any) -> str:
    kind = _FieldType.of(wanted)
    if words := kind.extra("wanted"):
        return str(words)
    if choices := choices_of(wanted):
        return f"one of {', '.join(choices)}"
    noun = _NOUNS.get(get_origin(kind.base) or kind.base, "keys with values")
    return " ".join([noun, *_limits(kind)])


def _limits(kind: _FieldType) -> Iterator[str]:
    lowest, above, highest = (kind.limit(name) for name in ("ge", "gt", "le"))
    if lowest is not None and highest is not None:
        yield f"from {lowest:g} to {highest:g}"
    elif lowest is not None:
        yield f"of at least {lowest:g}"
    elif above is not None:
        yield f"above {above:g}"
        if highest is not None:
            yield f"and at most {highest:g}"
    elif highest is not None:
        yield f"of at most {highest:g}"
    if kind.limit("min_length"):
        yield "that is not empty"
