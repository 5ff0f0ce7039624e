"""Captures and restores parameter groups and state of optimizers, and which gradients exist.

Runs in:  worker, training thread: at each step boundary, and inside `attach`.

The values of gradients are no part of a snapshot. No snapshot is taken inside an accumulation, so
the script sets gradients to zero or None before it adds to them. Their existence matters: an
optimizer skips a parameter without a gradient, and changes one with a zero gradient by momentum and
decay.
"""

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ftrun.errors import ShapeChanged, ValueNotStorable
from ftrun.worker.state.attached import AttachedState, Skip
from ftrun.worker.state.tensors import PACKED, LocalPart

Groups = list[dict[str, Any]]

_NOTHING = "nothing"

_STANDARD = frozenset({"state", "param_groups"})
"""Keys of the `state_dict()` of each optimizer."""

_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes})

_IDENTITIES = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type,
    functools.partial, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_DISTRIBUTED = frozenset({"ProcessGroup", "DeviceMesh"})


# --- at a boundary -----------------------------------------------------------------------------


class GroupReader:
    """Reads parameter groups, and checks that a rebuilt script has the unstorable values.

    A process group, a mesh, a function or a dtype in a group is part of the script and not a value.
    It is left out, and a restore keeps the one that the new optimizer has under the same key.
    """

    def __init__(self) -> None:
        self._at_attach: dict[tuple[str, int, str], object] | None = None

    def read(
        self,
        optimizers: Mapping[str, torch.optim.Optimizer],
        names: Mapping[int, str],
        skip: Callable[[str], bool],
    ) -> dict[str, Groups]:
        """The groups of all optimizers, with names instead of parameters.

        Raises ValueNotStorable if a value that is left out differs from the one at `attach`.
        """
        left_out: dict[tuple[str, int, str], object] = {}
        found: dict[str, Groups] = {}
        for name, optimizer in optimizers.items():
            found[name] = []
            for at, group in enumerate(optimizer.param_groups):
                kept = {}
                for key, value in group.items():
                    if key == "params":
                        kept[key] = [names[id(parameter)] for parameter in value]
                    elif type(value) not in _SCALARS and is_identity(value):
                        if not skip(f"{name}[{at}].{key}"):
                            left_out[name, at, key] = value
                    else:
                        kept[key] = value
                found[name].append(kept)
        if self._at_attach is None:
            self._at_attach = left_out
        elif left_out:
            self._check(left_out, optimizers)
        return found

    def _check(
        self,
        left_out: Mapping[tuple[str, int, str], object],
        optimizers: Mapping[str, torch.optim.Optimizer],
    ) -> None:
        assert self._at_attach is not None
        for (name, at, key), value in left_out.items():
            # The default is for groups that were added after attach.
            default = getattr(optimizers[name], "defaults", {}).get(key)
            if value != self._at_attach.get((name, at, key), default):
                raise ValueNotStorable(
                    key=f"{name}[{at}].{key}",
                    kind=f"{type(value).__qualname__} that is not the one there at attach",
                )


def is_identity(value: object) -> bool:
    """Whether it is part of the script and not a value: a function, a process group, a dtype."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(is_identity, value))
    return isinstance(value, _IDENTITIES) or any(
        kind.__name__ in _DISTRIBUTED for kind in type(value).__mro__
    )


def state_of(
    name: str,
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    skip: Callable[[str], bool],
) -> dict[str, Any]:
    """The state, by name of the parameter. Other keys belong to the optimizer as a whole."""
    found: dict[Any, Any] = {}
    key: Any
    for key, state in optimizer.state.items():
        if isinstance(key, torch.Tensor) and id(key) not in names:
            path = f"{name}.state[a tensor of shape {list(key.shape)}]"
            if skip(path):
                continue
            raise ValueNotStorable(
                key=path,
                kind="state of a tensor that is in no parameter group and no attached module",
            )
        found[names.get(id(key), key)] = state
    return {"state": found}


def state_values(optimizer: torch.optim.Optimizer) -> list[object]:
    """All values in the state; the same objects as before if only tensors changed in place.

    Numbers are new objects after each step. An optimizer with numbers in its state is therefore
    walked at each boundary; torch's own optimizers keep only tensors.
    """
    found: list[object] = []
    for state in optimizer.state.values():
        if type(state) is dict:
            found += state.values()
        else:
            found.append(state)
    if _ORDINARY.issuperset(map(type, found)):
        return found
    return [leaf for value in found for leaf in _leaves(value)]


def own_keys(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Keys that the class of an optimizer adds to its `state_dict()`, such as a count of steps.

    Only those with numbers, texts and None. Empty if the method fails: ZeroRedundancyOptimizer has
    no result before the script collects the state of all ranks.
    """
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        return {}
    try:
        saved = optimizer.state_dict()
    except Exception:  # noqa: BLE001 - it is the script's code
        return {}
    return {k: value for k, value in saved.items() if k not in _STANDARD and _is_plain(value)}


def _is_plain(value: object) -> bool:
    if type(value) is dict:
        return all(_is_plain(one) for pair in value.items() for one in pair)
    if isinstance(value, list | tuple) and type(value) in (list, tuple):  # no namedtuple
        return all(map(_is_plain, value))
    return type(value) in _SCALARS


_ORDINARY = _SCALARS | {torch.Tensor, torch.nn.Parameter}


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, Mapping):
        yield len(value)
        for key, one in value.items():
            yield key
            yield from _leaves(one)
    elif isinstance(value, (list, tuple)):
        yield len(value)
        for one in value:
            yield from _leaves(one)
    elif isinstance(value, torch.Tensor) or type(value) in _SCALARS:
        yield value
    else:
        yield object()  # an array or a set may change in place undetected


# --- at a restore ------------------------------------------------------------------------------


def load_optimizer(
    name: str,
    attached: AttachedState,
    groups: Mapping[str, Groups],
    states: Mapping[str, Mapping[Any, Any]],
    keys: Mapping[str, Mapping[str, Any]],
    *,
    names: Mapping[int, str],
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """Load groups, state and additional keys of one optimizer, from those of all.

    Args:
        name: under which it is attached.
        attached: holds it.
        groups: with names in place of parameters.
        states: by name of the parameter, or by any other key.
        keys: that its class adds to `state_dict()`.
        names: of parameters, by id.
        dtypes: saved dtypes of parameters, by name.
    """
    optimizer, skip = attached.optimizers[name], attached.skip
    if name not in groups:
        raise ShapeChanged(key=name, saved=_NOTHING, present=type(optimizer).__name__)
    saved = groups[name]
    parameters = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    index = {one: at for at, one in enumerate(parameters)}
    ordered = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    _check_groups(name, saved, ordered)
    state = {k: _sharded_like(parameters.get(k), value) for k, value in states[name].items()}
    # A key that is no parameter belongs to the optimizer as a whole, but torch treats an int key as
    # a parameter.
    later = {k: values for k, values in state.items() if k not in index and isinstance(k, int)}
    present_groups = optimizer.param_groups
    before = [dict(group) for group in present_groups]
    state_before = dict(optimizer.state) if skip else {}
    optimizer.load_state_dict(
        {
            **keys.get(name, {}),
            "state": {
                index.get(k, k): _castable(values) for k, values in state.items() if k not in later
            },
            "param_groups": [
                {**group, "params": [index[one] for one in present]}
                for group, present in zip(saved, ordered, strict=True)
            ],
        }
    )
    _put_back_groups(name, optimizer, before, saved, skip)
    _keep_groups(optimizer, present_groups, before)
    for key, values in state.items():
        parameter = parameters.get(key)
        where = key if parameter is None else parameter
        if key in later:
            optimizer.state[key] = values
        elif where in optimizer.state:
            follows = dtypes.get(key, parameter.dtype) if parameter is not None else None
            optimizer.state[where] = _exact(values, optimizer.state[where], follows)
    _keep_skipped(name, optimizer, state_before, names, skip)


def load_wrapper(
    wrapper: torch.optim.Optimizer,
    keys: Mapping[str, Any],
    optimizers: Iterable[torch.optim.Optimizer],
) -> None:
    """Load the keys that a wrapper adds; groups and states of `optimizers` stay as they are."""
    before = [
        (one, dict(one.state), one.param_groups, [dict(group) for group in one.param_groups])
        for one in optimizers
    ]
    wrapper.load_state_dict({**wrapper.state_dict(), **keys})
    for one, state, groups, values in before:
        one.state.clear()
        one.state.update(state)
        for group, its in zip(groups, values, strict=True):
            group.clear()
            group.update(its)
        if one.param_groups is not groups:
            one.param_groups = groups


def _put_back_groups(
    name: str, optimizer: torch.optim.Optimizer, before: Groups, groups: Groups, skip: Skip
) -> None:
    trios = zip(optimizer.param_groups, before, groups, strict=True)
    for at, (group, old, saved) in enumerate(trios):
        for key, value in old.items():
            if key == "params":
                continue
            its = saved.get(key, value)
            if skip:
                its = skip.completed(its, value, f"{name}[{at}].{key}")
            group[key] = into(value, its) if key in saved else value


def _keep_groups(optimizer: torch.optim.Optimizer, present: Groups, before: Groups) -> None:
    """Give the loaded values to the groups from before, to which a script holds references."""
    loaded = [dict(group) for group in optimizer.param_groups]
    for group, old, its in zip(present, before, loaded, strict=True):
        group.clear()
        group.update(its, params=old["params"])
    optimizer.param_groups = present


def _keep_skipped(
    name: str,
    optimizer: torch.optim.Optimizer,
    before: Mapping[Any, Any],
    names: Mapping[int, str],
    skip: Skip,
) -> None:
    for where, values in before.items():
        path = f"{name}.state.{names.get(id(where), where)}"
        if skip(path):
            optimizer.state[where] = values
        elif where in optimizer.state:
            optimizer.state[where] = skip.completed(optimizer.state[where], values, path)


def _check_groups(name: str, saved: Groups, ordered: list[list[str]]) -> None:
    for at, (group, present) in enumerate(zip(saved, ordered, strict=False)):
        # Their order does not matter: state is matched by name, and other stages may order them
        # otherwise.
        if sorted(group["params"]) != sorted(present):
            raise ShapeChanged(
                key=f"{name}.param_groups[{at}]",
                saved=f"{len(group['params'])} parameters ({_first(group['params'])})",
                present=f"{len(present)} parameters ({_first(present)})",
            )
    if len(saved) != len(ordered):
        raise ShapeChanged(
            key=f"{name}.param_groups",
            saved=f"{len(saved)} groups",
            present=f"{len(ordered)} groups",
        )


def _sharded_like(parameter: torch.Tensor | None, values: Any) -> Any:
    return mapped(values, lambda one: one.like(parameter) if isinstance(one, LocalPart) else one)


def mapped(values: Any, leaf: Callable[[Any], Any]) -> Any:
    """The same tree of dicts, lists and tuples, with other leaves."""
    if isinstance(values, dict):
        return {key: mapped(value, leaf) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(mapped(value, leaf) for value in values)
    return leaf(values)


_TAKEN_APART = (str, bytes, set, frozenset, np.ndarray)
"""Types that torch's `load_state_dict` treats as a list to cast item by item."""


def _castable(values: Any) -> Any:
    """Replace the values that torch's `load_state_dict` cannot cast by None; see `_exact`."""
    return mapped(values, lambda one: None if _has_no_cast(one) else one)


def _has_no_cast(value: Any) -> bool:
    is_packed = isinstance(value, torch.Tensor) and value.dtype is PACKED
    return is_packed or isinstance(value, _TAKEN_APART)


def _exact(saved: Any, loaded: Any, follows: torch.dtype | None) -> Any:
    """The loaded value in the dtypes that were saved; the saved one if it has no cast.

    `load_state_dict` casts state to the parameter's dtype: with parameters in bf16, an fp32
    `exp_avg` would lose its lower half.

    Both may be trees. `follows`: saved dtype of the parameter; state of it keeps the cast.
    """
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        is_cast = loaded.dtype != saved.dtype and saved.dtype != follows
        return saved.to(loaded.device) if is_cast else loaded
    if isinstance(saved, dict) and isinstance(loaded, dict):
        for key in saved.keys() & loaded.keys():
            loaded[key] = _exact(saved[key], loaded[key], follows)
        return loaded
    if isinstance(saved, list | tuple) and isinstance(loaded, list | tuple):
        if len(saved) != len(loaded):
            return loaded
        pairs = zip(saved, loaded, strict=True)
        return type(loaded)(_exact(one, other, follows) for one, other in pairs)
    return saved if loaded is None and _has_no_cast(saved) else loaded


def into(present: Any, saved: Any) -> Any:
    """A value of a group; tensors are copied into the present ones.

    Other objects may share their memory, such as views of one buffer, or hold references to them.
    """
    if isinstance(saved, torch.Tensor) and isinstance(present, torch.Tensor):
        if (present.shape, present.dtype) == (saved.shape, saved.dtype):
            with torch.no_grad():
                present.copy_(saved)
            return present
    elif isinstance(saved, dict) and isinstance(present, dict):
        return {key: into(present.get(key), value) for key, value in saved.items()}
    elif isinstance(saved, list | tuple) and isinstance(present, list | tuple):
        present = [*present, *[None] * len(saved)][: len(saved)]
        pairs = zip(present, saved, strict=True)
        return type(saved)(into(one, other) for one, other in pairs)
    return saved


def _first(names: list[str]) -> str:
    return f"{names[0]} ..." if names else _NOTHING


# --- gradients ----------------------------------------------------------------------------------


def present_gradients(
    parameters: Iterable[torch.Tensor], names: Mapping[int, str]
) -> dict[str, Any]:
    """Whether trainable parameters usually have gradients, and the names of the exceptions."""
    have = [(parameter, _has_gradient(parameter)) for parameter in parameters]
    learned = [has for parameter, has in have if parameter.requires_grad]
    usual = sum(learned) * 2 > len(learned)
    except_ = [names[id(p)] for p, has in have if has != (usual and p.requires_grad)]
    return {"usual": usual, "except": except_}


def put_back_gradients(
    saved: Mapping[str, Any], parameters: Iterable[torch.Tensor], names: Mapping[int, str]
) -> None:
    """Set a zero gradient, in the parameter's layout, where one was saved and none is present.

    A present gradient may be a view of a DDP bucket and stays unchanged.
    """
    except_ = set(saved["except"])
    for parameter in parameters:
        usual = saved["usual"] and parameter.requires_grad
        if parameter.grad is None and usual != (names[id(parameter)] in except_):
            parameter.grad = torch.zeros_like(parameter)


def _has_gradient(parameter: torch.Tensor) -> bool:
    # Zeros cannot replace a sparse gradient, because the next backward would make it dense.
    gradient = parameter.grad
    return gradient is not None and gradient.layout is torch.strided
