"""Plain values of a rank with other names of tensors in them.

Runs in:  the process that converts checkpoints; worker, where rules are used at a restore. Pure.
Takes in: parts of the plain values, what gives another name.
Gives:    the same parts with these names.
"""

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
    """Parameter groups of optimizers."""
    return {
        name: [{**group, "params": [rename(one) for one in group["params"]]} for group in some]
        for name, some in groups.items()
    }


def states_renamed(states: Plain, rename: RenameParameter) -> Plain:
    """State of optimizers, by parameter; a key that is none belongs to the optimizer as a whole."""
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
    """What modules keep beside tensors, by their paths."""
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
