"""Digests of a rank's state, inputs and script variables, for `ftrun verify`.

Runs in:  worker, training thread, only in a run of `ftrun verify`.
Takes in: live objects. This module does not change them or draw a random number.
Gives:    `{key: xxh3}`. The first word of a key is its kind: tensor, strides, value, random,
          position, input, gradient, group, buffer, mode, attribute, local.
"""

import collections
import functools
import itertools
import random
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn

from ftrun.snapshot.plain_values import TensorRef, decode, encode
from ftrun.worker.state.attached import AttachedState
from ftrun.worker.state.module_state import named_parts
from ftrun.worker.state.state_tree import BoundaryState, PersistentSources
from ftrun.worker.state.tensors import copyable, is_sharded

_MAX_LOCAL_BYTES = 64 << 20
_MAX_ITEMS = 1000
_MAX_DEPTH = 4
_MAX_FRAMES = 8
_SHOWN_CHARS = 40
_FTRUN = __file__.rpartition("/worker/")[0]
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), _FTRUN, "<")
_POSITIONS = ("session", "loaders", "orders", "modules")
_REPRS = (itertools.count, itertools.repeat, range, slice)
_PLAIN = (type(None), bool, int, float, complex, str, bytes)

Digests = dict[str, str]


# --- state ---------------------------------------------------------------------------------------


def state_digests(state: BoundaryState) -> Digests:
    found: Digests = {}
    for source in (*state.persistent.sources, *state.fresh):
        found[f"tensor {source.name}"] = tensor_digest(source.tensor)
        if not source.tensor.is_contiguous():
            found[f"strides {source.name}"] = str(source.tensor.stride())
    for one in state.provided:
        found[f"tensor {one.name}"] = one.digest()
    for part, packed in decode(state.plain).items():
        word = {"rng": "random", "generators": "random"}.get(part, "value")
        word = "position" if part in _POSITIONS else word
        for path, leaf in _leaves(decode(packed), ""):
            found[f"{word} {part}{path}"] = xxhash.xxh3_64_hexdigest(encode(leaf))
    return found


def changed_parameters(persistent: PersistentSources, before: Digests) -> list[str]:
    """Names of the parameters whose values differ from `before`.

    The tensors are those of the last boundary, because snapshots copy these. The modules may hold
    others: FSDP2 puts whole parameters into them for a forward.
    """
    return [
        name
        for name, parameter in persistent.learned
        if name in before and tensor_digest(parameter) != before[name]
    ]


def module_digests(attached: AttachedState) -> Iterator[tuple[str, str]]:
    """Data of modules outside their state: flags, non-persistent buffers, plain attributes."""
    for name, module in attached.modules.items():
        for path, part in named_parts(module, name):
            yield f"mode {path}", "train" if part.training else "eval"
            for key in part._non_persistent_buffers_set:
                if (buffer := part._buffers.get(key)) is not None:
                    yield f"buffer {path}.{key}", tensor_digest(buffer)
            for key, value in vars(part).items():
                if not key.startswith("_") and key != "training" and isinstance(value, _PLAIN):
                    yield f"attribute {path}.{key}", repr(value)[:_SHOWN_CHARS]


def gradient_digests(names: Mapping[int, str], optimizer: Any) -> Digests:
    found: Digests = {}
    for at, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            name = names.get(id(parameter), f"params[{at}][{index}]")
            grad = parameter.grad
            found[f"gradient {name}"] = "none" if grad is None else tensor_digest(grad)
        for key, value in group.items():
            if key != "params":
                found[f"group {at}.{key}"] = digest(value) or ""
    return found


def optimizer_digests(optimizer: Any) -> Digests:
    found: Digests = {}
    kind = type(optimizer).__name__
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, parameter in enumerate(parameters):
        found[f"tensor {kind}.params[{index}]"] = tensor_digest(parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"tensor {kind}.state[{index}].{key}"] = digest(value) or ""
    return found


def input_digests(word: str, given: object) -> Digests:
    return {
        f"{word}{path}": found
        for path, leaf in _leaves(given, "")
        if (found := digest(leaf)) is not None
    }


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)) and len(value) <= _MAX_ITEMS and _is_nested(value):
        for at, item in enumerate(value):
            yield from _leaves(item, f"{path}[{at}]")
    elif not isinstance(value, TensorRef):
        yield path, value


def _is_nested(value: list[Any] | tuple[Any, ...]) -> bool:
    return any(isinstance(item, (Mapping, list, tuple, torch.Tensor, TensorRef)) for item in value)


# --- one value -----------------------------------------------------------------------------------


def tensor_digest(tensor: torch.Tensor) -> str:
    """Digest of dtype, shape and elements; strides are not included."""
    with torch.no_grad():
        local = tensor.detach()
        if is_sharded(local):
            local = local._local_tensor  # type: ignore[attr-defined]
        if local.layout is not torch.strided or local.is_meta:
            return "not comparable"
        flat = copyable(local.cpu().resolve_conj().resolve_neg()).contiguous().reshape(-1)
        head = f"{local.dtype}{tuple(local.shape)}"
        hasher = xxhash.xxh3_64(head.encode())
        hasher.update(flat.view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def digest(value: object) -> str | None:
    """Digest of any value; None if it cannot be compared."""
    hasher = xxhash.xxh3_64()
    try:
        is_known = _Folder(hasher.update).fold(value, 0)
    except Exception:  # noqa: BLE001 - objects of the script may do anything when they are read
        return None
    return hasher.hexdigest() if is_known else None


class _Folder:
    """Feeds a value to a hash; container items that cannot be compared are left out."""

    def __init__(self, update: Callable[[Any], object]) -> None:
        self._update = update

    def fold(self, value: object, depth: int) -> bool:
        if isinstance(value, (*_PLAIN, *_REPRS)):
            self._update(f"{type(value).__name__}{value!r}".encode())
            return True
        if isinstance(value, torch.Tensor):
            if value.nbytes <= _MAX_LOCAL_BYTES:
                self._update(tensor_digest(value).encode())
                return True
            return False
        if isinstance(value, np.generic | np.ndarray):
            return self._fold_array(np.asarray(value))
        if depth >= _MAX_DEPTH:
            return False
        return self._fold_nested(value, depth + 1)

    def _fold_array(self, array: np.ndarray) -> bool:
        if array.nbytes > _MAX_LOCAL_BYTES or isinstance(array, np.memmap) or array.dtype.hasobject:
            return False
        self._update(f"{array.dtype}{array.shape}".encode())
        self._update(np.ascontiguousarray(array).tobytes())
        return True

    def _fold_nested(self, value: object, depth: int) -> bool:
        if isinstance(value, (list, tuple, collections.deque)):
            return self._fold_items(type(value).__name__, value, depth)
        if isinstance(value, (set, frozenset)):
            self._update(repr(sorted(map(repr, value))).encode())
            return True
        if isinstance(value, Mapping):
            pairs = [x for key, item in value.items() for x in (repr(key), item)]
            return self._fold_items("dict", pairs, depth)
        state = _state_of(value)
        return state is not None and self.fold(state, depth)

    def _fold_items(self, name: str, items: Any, depth: int) -> bool:
        self._update(f"{name}{len(items)}".encode())
        known = [self.fold(item, depth) for item in itertools.islice(items, _MAX_ITEMS)]
        return any(known) or not known


def _state_of(value: object) -> object:
    """The state from which an object of a known kind continues; None: unknown."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return repr(value.getstate())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    if isinstance(value, torch.optim.Optimizer):
        return [optimizer_digests(value)]
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        return value.state_dict()
    if isinstance(value, types.GeneratorType):
        return _position_of(value)
    if (yielded := getattr(value, "_num_yielded", None)) is not None:  # a DataLoader's iterator
        return ["DataLoader iterator", yielded]
    return None


def _position_of(generator: "types.GeneratorType[Any, Any, Any]") -> object:
    """None if it has ended, or delegates to a loop of the session, whose position is restored."""
    innermost: object = generator
    while isinstance(innermost, types.GeneratorType):
        if innermost.gi_code.co_filename.startswith(_FTRUN):
            return None
        innermost = innermost.gi_yieldfrom
    frame = generator.gi_frame
    return None if frame is None else [frame.f_lineno, dict(frame.f_locals)]


# --- variables of the script ---------------------------------------------------------------------


def script_frame(frame: types.FrameType | None) -> types.FrameType | None:
    """The innermost frame that belongs neither to a library nor to ftrun."""
    while frame is not None and not is_of_script(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


@functools.cache
def is_of_script(filename: str) -> bool:
    is_installed = "/site-packages/" in filename or "/dist-packages/" in filename
    return not is_installed and not filename.startswith(_LIBRARIES)


def where(frame: types.FrameType | None) -> str:
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def local_variables(
    frame: types.FrameType | None, captured: set[int]
) -> Iterator[tuple[str, object]]:
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return
        code = frame.f_code
        place = f"local {code.co_filename}|{code.co_qualname}|{code.co_firstlineno}|"
        for name, value in list(frame.f_locals.items()):
            if name.startswith("__") or id(value) in captured or _is_fixed(value):
                continue
            if _is_object_of_script(value):
                for key, item in list(vars(value).items()):
                    if id(item) not in captured and not _is_fixed(item):
                        yield f"{place}{name}.{key}", item
            else:
                yield place + name, value
        frame = script_frame(frame.f_back)


def shown(value: object) -> str | None:
    """A short text of a number, a string or a tensor's shape; None for other values."""
    if isinstance(value, (bool, int, float, str, np.generic)):
        return repr(value.item() if isinstance(value, np.generic) else value)[:_SHOWN_CHARS]
    if isinstance(value, torch.Tensor):
        if value.numel() == 1 and not is_sharded(value):
            return repr(value.item())[:_SHOWN_CHARS]
        return f"tensor {list(value.shape)}"
    return None


def _is_fixed(value: object) -> bool:
    return isinstance(value, (type, types.ModuleType)) or (
        callable(value) and not isinstance(value, nn.Module)
    )


def _is_object_of_script(value: object) -> bool:
    kind = type(value)
    if isinstance(value, (nn.Module, torch.optim.Optimizer, torch.Tensor)) or not hasattr(
        value, "__dict__"
    ):
        return False
    if kind.__module__ == "__main__":
        return True
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    return file is not None and is_of_script(file)
