"""The submodules of a module, and their state in addition to parameters and buffers.

Runs in:  worker, training thread: at each step boundary, and inside `attach`.
Gives:    submodules by path; training flags, extra state, and keys that a module adds to its own
          `state_dict()`; restores them.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn

from ftrun.errors import ShapeChanged, StateDictFailed, ValueNotStorable
from ftrun.snapshot.plain_values import Skips, TensorRef, encode, join
from ftrun.worker.state.tensors import byte_view, copyable, described, local_tensor

EXTRA_STATE = "._extra_state"
"""Suffix of a module's path for the result of `get_extra_state`, as in `state_dict()`."""

OWN_KEYS = ".state_dict()"
"""Suffix of a module's path for the keys of its `state_dict()` that are neither parameters nor
buffers."""

Submodules = Sequence[tuple[str, nn.Module]]
"""As `named_parts` yields them; a wrapper precedes the module it wraps, under the same path."""


# --- submodules -------------------------------------------------------------------------------


def every_name(module: nn.Module, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Like `held_by`, with each name that a tied tensor has in `state_dict()`."""
    for key, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and key not in module._non_persistent_buffers_set:
            yield f"{path}.{key}", tensor
    inner = wrapped_key(module)
    for key, child in module._modules.items():
        if child is not None:
            yield from every_name(child, path if key == inner else f"{path}.{key}")


def named_parts(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Every submodule once, without wrappers (DDP, torch.compile) in the names."""
    seen: set[int] = set()
    waiting = [(path, module)]
    while waiting:
        path, part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield path, part
        inner = wrapped_key(part)
        waiting += [
            (path if key == inner else f"{path}.{key}", child)
            for key, child in reversed(part._modules.items())
            if child is not None
        ]


def wrapped_key(module: nn.Module) -> str | None:
    if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return "module"
    return "_orig_mod" if "_orig_mod" in module._modules else None


def unwrapped(module: nn.Module) -> nn.Module:
    while (key := wrapped_key(module)) is not None:
        inner = module._modules[key]
        assert inner is not None
        module = inner
    return module


# --- training flags ----------------------------------------------------------------------------


def training_flags(submodules: Submodules) -> dict[str, bool]:
    """`training` of each root, and of each submodule where it differs from its parent's."""
    flags = {path: part.training for path, part in submodules}
    return {path: flag for path, flag in flags.items() if flag != flags.get(_parent(path))}


def put_back_training_flags(saved: Mapping[str, bool], submodules: Submodules) -> None:
    """Set the attribute itself, because a script's own `train()` may leave modules out."""
    flags: dict[str, bool] = {}
    for path, part in submodules:
        flag = saved.get(path, flags.get(_parent(path), part.training))
        flags[path] = part.training = flag


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def reshard(submodules: Submodules) -> None:
    # FSDP2 puts whole parameters into the module between forward and backward. Those of the root
    # module stay there after a forward without gradients.
    for _, part in submodules:
        if callable(reshard := getattr(part, "reshard", None)):
            reshard()


# --- extra state, and keys that a module adds ---------------------------------------------------


def extra_states(submodules: Submodules) -> dict[str, object]:
    return {
        path: given_by(part.get_extra_state, path)
        for path, part in submodules
        if type(part).get_extra_state is not nn.Module.get_extra_state
    }


def with_own_code(submodules: Submodules) -> Submodules:
    """The submodules whose `state_dict()` may have additional keys, now or later.

    Children come before parents.
    """
    inner = dict(submodules)
    return [(path, part) for path, part in reversed(inner.items()) if _may_have_own_keys(part)]


def own_keys(part: nn.Module, path: str, known: Collection[int]) -> dict[str, object]:
    """Entries of a module's `state_dict()` that are no parameter, buffer or extra state.

    `known`: ids of all parameters and buffers. A hook may give them other names.
    """
    standard = set(_standard_keys(part))
    return {
        key: value.detach() if isinstance(value, torch.Tensor) else value
        for key, value in given_by(partial(_state_dict, part), path).items()
        if key not in standard and id(value) not in known
    }


def takes_own_keys(part: nn.Module) -> bool:
    kind = type(part)
    return (
        kind._load_from_state_dict is not nn.Module._load_from_state_dict
        or kind.load_state_dict is not nn.Module.load_state_dict
        or "load_state_dict" in part.__dict__
        or bool(part._load_state_dict_pre_hooks or part._load_state_dict_post_hooks)
    )


def put_back_own_keys(
    saved: Mapping[str, Mapping[str, Any]],
    submodules: Submodules,
    completed: Callable[[Any, Any, str], Any],
) -> None:
    """Call `load_state_dict()` of each module whose additional keys differ from the saved ones."""
    parts = dict(submodules)
    for path, values in saved.items():
        part = parts.get(path)
        if part is None:
            continue  # another pipeline stage has it
        present = _state_dict(part)
        values = {
            key: completed(value, present.get(key), join(path + OWN_KEYS, key))
            for key, value in values.items()
        }
        if _differing(part, values, unknown=True):
            _load(part, {**present, **values})
        if differing := _differing(part, values, unknown=False):
            raise ShapeChanged(
                key=f"{path}.{differing[0]}",
                saved="a key of the module's own state_dict()",
                present="one that its load_state_dict() does not take back",
            )


def given_by(method: Callable[[], Any], name: str) -> Any:
    """Call a method of an attached object; its exception is the cause of a StateDictFailed."""
    try:
        return method()
    except Exception as error:
        what = getattr(method, "__qualname__", "state_dict")
        raise StateDictFailed(name=name, method=what, error=error) from error


def _may_have_own_keys(part: nn.Module) -> bool:
    kind = type(part)
    if "_fsdp_wrapped_module" in part._modules:
        return False  # its hooks gather parameters from all ranks
    return (
        kind._save_to_state_dict is not nn.Module._save_to_state_dict
        or kind.state_dict is not nn.Module.state_dict
        or "state_dict" in part.__dict__
        or bool(part._state_dict_hooks)
    )


def _standard_keys(part: nn.Module) -> Iterator[str]:
    for path, one in part.named_modules(remove_duplicate=False):
        leader = f"{path}." if path else ""
        for key in (*one._parameters, *one._buffers, "_extra_state"):
            yield leader + key


def _state_dict(part: nn.Module) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = part.state_dict(keep_vars=True)
    except TypeError:  # the script's own method, without torch's arguments
        found = part.state_dict()
    return found


def _load(part: nn.Module, state: Mapping[str, Any]) -> None:
    try:
        part.load_state_dict(state, strict=False)
    except TypeError:
        part.load_state_dict(state)


def _differing(part: nn.Module, saved: Mapping[str, Any], *, unknown: bool) -> list[str]:
    """Keys whose values differ from the saved ones; `unknown` is the result for skipped values."""
    present = _state_dict(part)

    def differs(key: str) -> bool:
        try:
            return key not in present or content(saved[key]) != content(present[key])
        except ValueNotStorable:
            return unknown

    return list(filter(differs, saved))


def content(value: object, path: str = "", skip: Skips | None = None) -> bytes:
    """Bytes that are equal for bitwise equal values, tensors included.

    Raises ValueNotStorable for a value that is neither a tensor nor plain; its key begins with the
    path.
    """

    def refer(leaf: object, _: str) -> TensorRef | None:
        if isinstance(leaf, np.ndarray):
            leaf = torch.from_numpy(leaf.copy())
        if not isinstance(leaf, torch.Tensor):
            return None
        local = local_tensor(leaf, "a tensor").cpu()
        digest = xxhash.xxh3_128_hexdigest(byte_view(copyable(local).contiguous()).numpy().data)
        return TensorRef(f"{described(local)} {digest}")

    return encode(value, root=path, refer=refer, skip=skip)
