"""Replaces the names of tensors in parts of a rank's plain values."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from ftrun.snapshot.plain_values import TensorRef

Plain = dict[str, Any]


class RenameParameter(Protocol):
    """`RankNames.whole` or `RankNames.own`."""

    def __call__(self, name: str, *, of: str | None = None) -> str: ...


def groups_renamed(
    groups: Mapping[str, Sequence[Plain]], rename: RenameParameter
) -> dict[str, list[Plain]]:
    return {
        name: [{**group, "params": [rename(one) for one in group["params"]]} for group in some]
        for name, some in groups.items()
    }


def states_renamed(states: Plain, rename: RenameParameter) -> Plain:
    """Renames state of optimizers; a key that is not a string belongs to the whole optimizer."""
    return {
        name: {
            "state": dict(
                _state_renamed(key, values, rename) for key, values in optimizer["state"].items()
            )
        }
        for name, optimizer in states.items()
    }


def _state_renamed(key: object, values: Any, rename: RenameParameter) -> tuple[object, Any]:
    if not isinstance(key, str):
        return key, _renamed(values, rename)
    return rename(key), _renamed(values, partial(rename, of=key))


def modules_renamed(modules: Plain, rename: RenameParameter) -> Plain:
    """Renames extra state of modules, by their paths."""
    return {
        rename(f"{path}.").removesuffix("."): _renamed(values, rename)
        for path, values in modules.items()
    }


def _renamed(values: Any, rename: RenameParameter) -> Any:
    if isinstance(values, TensorRef):
        return replace(values, name=rename(values.name))
    if isinstance(values, dict):
        return {key: _renamed(value, rename) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(_renamed(value, rename) for value in values)
    return values
