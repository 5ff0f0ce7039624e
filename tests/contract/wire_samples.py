"""One instance of each message, built from its declared types; equal in every run."""

import dataclasses
import enum
import types
import typing
from collections.abc import Callable
from typing import Any

import msgspec

from ftrun.wire.cluster.transfer import Transfer
from ftrun.wire.messages.message import Message


def messages() -> list[type[msgspec.Struct]]:
    """All tagged message classes, by tag."""
    found = [one for base in (Message, Transfer) for one in _subclasses(base)]
    tagged = [one for one in found if one.__struct_config__.tag is not None]
    return sorted(tagged, key=lambda one: (str(one.__struct_config__.tag), one.__module__))


def sample(kind: Any) -> Any:
    """A value of this type: no default is used, each container has one element."""
    return _Samples().of(kind, "value")


class _Samples:
    def __init__(self) -> None:
        self._count = 0
        self._open: list[type] = []

    def of(self, kind: Any, name: str) -> Any:
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if origin in (typing.Union, types.UnionType):
            return self._of_union(arguments, name)
        if origin is typing.Annotated:
            return self.of(arguments[0], name)
        if origin is typing.Literal:
            return arguments[0]
        if origin is not None:
            return self._of_container(origin, arguments, name)
        if isinstance(kind, typing.NewType):
            return kind(self.of(kind.__supertype__, name))
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return next(iter(kind))
        if isinstance(kind, type) and (
            issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind)
        ):
            return self._of_fields(kind)
        return self._plain(kind, name)

    def _of_union(self, kinds: tuple[Any, ...], name: str) -> Any:
        given = [one for one in kinds if one is not type(None) and one not in self._open]
        return self.of(given[0], name) if given else None

    def _of_container(self, origin: Any, kinds: tuple[Any, ...], name: str) -> Any:
        if origin is tuple and kinds and kinds[-1] is not Ellipsis:
            return tuple(self.of(one, name) for one in kinds)
        if any(one in self._open for one in kinds):
            return origin()
        if issubclass(origin, dict) or origin.__name__ == "Mapping":
            return {self.of(kinds[0], name): self.of(kinds[1], name)}
        made: Callable[[list[Any]], Any] = {"tuple": tuple, "frozenset": frozenset}.get(
            origin.__name__, list
        )
        return made([self.of(kinds[0], name)])

    def _of_fields(self, kind: type) -> Any:
        self._open.append(kind)
        hints = typing.get_type_hints(kind, include_extras=True)
        names = (
            dict(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))
            if issubclass(kind, msgspec.Struct)
            else {field.name: field.name for field in dataclasses.fields(kind)}
        )
        made = kind(**{name: self.of(hints[name], encoded) for name, encoded in names.items()})
        self._open.pop()
        return made

    def _plain(self, kind: Any, name: str) -> Any:
        self._count += 1
        values = {
            int: self._count,
            float: self._count + 0.5,
            str: f"{name} {self._count}",
            bytes: f"{name} {self._count}".encode(),
            bool: True,
            object: self._count,
            Any: self._count,
        }
        return values[kind]


def _subclasses(base: type) -> list[type]:
    direct = base.__subclasses__()
    return direct + [one for kind in direct for one in _subclasses(kind)]
