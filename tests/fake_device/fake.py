"""The fake device in this process: `load()`, then the device type is `fake`.

`lazy` runs an operation when a thread waits for it, and is deterministic. `threads` runs each
stream in a thread, with pauses that the seed decides. `eager` runs at the call, as a processor
does. A process has to load it before its first backward, and keeps it.
"""

import atexit
import contextlib
import ctypes
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from fake_device.device_build import library

MODES = {"eager": 0, "lazy": 1, "threads": 2}
MODE_VARIABLE = "FAKE_DEVICE_MODE"
PINNED_VARIABLE = "FAKE_DEVICE_PINNED_BYTES"
_UNLIMITED = (1 << 64) - 1

_CALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)
_lib: ctypes.CDLL | None = None
_calls: dict[int, Callable[[], None]] = {}
"""Functions that streams have not reached yet."""


def load() -> None:
    """Register the device with torch; a second call has no effect."""
    global _lib
    if _lib is not None:
        return
    path = library()
    torch.utils.rename_privateuse1_backend("fake")
    _lib = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    _declare(_lib)
    module = _device_module()
    torch._register_device_module("fake", module)
    sys.modules["torch.fake"] = module
    torch.utils.generate_methods_for_privateuse1_backend()
    atexit.register(_shut_down)
    set_mode(os.environ.get(MODE_VARIABLE, "lazy"))
    set_pinned_limit(int(os.environ.get(PINNED_VARIABLE, _UNLIMITED)))


def set_mode(mode: str, seed: int = 1, max_pause_us: int = 1000) -> None:
    """Change the mode, after all that is queued has run."""
    _check(_device().fake_set_mode(MODES[mode], seed, max_pause_us))


def num_pending() -> int:
    return int(_device().fake_num_pending())


def bytes_in_use(device: int = 0) -> int:
    return int(_device().fake_bytes_in_use(device))


def contexts() -> list[int]:
    """Devices that were made the current one since `forget_contexts`: CUDA has a context there."""
    count = torch.accelerator.device_count()
    return [device for device in range(count) if _device().fake_has_context(device)]


def forget_contexts() -> None:
    _device().fake_forget_contexts()


def set_memory_limit(num_bytes: int, device: int = 0) -> None:
    _device().fake_set_memory_limit(device, num_bytes)


def set_pinned_limit(num_bytes: int = _UNLIMITED) -> None:
    """Page-locked memory that the process may have in all; more is refused."""
    _device().fake_set_pinned_limit(num_bytes)


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as the device uses it; only for functions in a stream."""
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    start = _device().fake_backing(tensor.data_ptr())
    memory = (ctypes.c_char * num_bytes).from_address(start)
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


def call_in_stream(device: torch.device, function: Callable[[], None]) -> None:
    """Call the function when the current stream of the device reaches it.

    It may not use the device. An exception fails every later use of the device.
    """
    number = id(function)
    _calls[number] = function
    index = device.index if device.index is not None else torch.accelerator.current_device_index()
    _check(_device().fake_call_in_stream(index, _called, number))


class Graph:
    """Captures and replays where torch has no `torch.accelerator.Graph` (before 2.12)."""

    def __init__(self) -> None:
        self._graph = ctypes.c_void_p(_device().fake_graph_new())

    def __del__(self) -> None:
        _device().fake_graph_delete(self._graph)

    def capture_begin(self) -> None:
        _check(_device().fake_graph_begin(self._graph, 0))

    def capture_end(self) -> None:
        _check(_device().fake_graph_end(self._graph))

    def replay(self) -> None:
        _check(_device().fake_graph_replay(self._graph))

    def __enter__(self) -> "Graph":
        self.capture_begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.capture_end()


@_CALL
def _called(number: int) -> int:
    try:
        _calls.pop(number)()
    except BaseException as error:  # noqa: BLE001 - the caller is C++
        print(f"fake device: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def _device() -> ctypes.CDLL:
    assert _lib is not None, "the fake device is not loaded"
    return _lib


def _check(result: int) -> None:
    if result != 0:
        raise RuntimeError(_device().fake_last_error().decode())


def _declare(lib: ctypes.CDLL) -> None:
    number, pointer = ctypes.c_uint64, ctypes.c_void_p
    lib.fake_last_error.restype = ctypes.c_char_p
    lib.fake_set_mode.argtypes = [ctypes.c_int, number, ctypes.c_uint]
    for name in ("num_pending", "bytes_in_use", "memory_limit", "backing"):
        getattr(lib, f"fake_{name}").restype = number
    lib.fake_backing.argtypes = [number]
    lib.fake_set_memory_limit.argtypes = [ctypes.c_int, number]
    lib.fake_set_pinned_limit.argtypes = [number]
    lib.fake_set_random_state.argtypes = [ctypes.c_int, number, number]
    lib.fake_call_in_stream.argtypes = [ctypes.c_int, _CALL, number]
    lib.fake_graph_new.restype = pointer
    for name, rest in (("delete", []), ("begin", [ctypes.c_int]), ("end", []), ("replay", [])):
        getattr(lib, f"fake_graph_{name}").argtypes = [pointer, *rest]


def _shut_down() -> None:
    # Other processes may wait for what this one has queued.
    if _device().fake_is_initialised() and not _device().fake_is_forked():
        with contextlib.suppress(RuntimeError):
            for device in range(_device().fake_num_devices()):
                torch.accelerator.synchronize(device)
    _device().fake_shut_down()


def _device_module() -> Any:
    """What `torch.cuda` is for CUDA."""
    module: Any = types.ModuleType("torch.fake")
    module.is_available = lambda: True
    module.is_initialized = lambda: bool(_device().fake_is_initialised())
    module._is_in_bad_fork = lambda: bool(_device().fake_is_forked())
    module._lazy_init = lambda: None
    module.device_count = lambda: int(_device().fake_num_devices())
    module.current_device = torch.accelerator.current_device_index
    module.set_device = torch.accelerator.set_device_index
    module.device = torch.accelerator.device_index
    module.current_stream = torch.accelerator.current_stream
    module.set_stream = torch.accelerator.set_stream
    module.stream = _stream
    module.synchronize = torch.accelerator.synchronize
    module.Stream, module.Event = torch.Stream, torch.Event
    module.Graph = Graph
    module.is_current_stream_capturing = lambda: bool(_device().fake_is_capturing())
    module.memory_allocated = lambda device=None: bytes_in_use(_index(device))
    module.mem_get_info = _mem_get_info
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.get_rng_state, module.set_rng_state = _get_rng_state, _set_rng_state
    module.get_rng_state_all = lambda: [_get_rng_state(at) for at in range(module.device_count())]
    module.set_rng_state_all = lambda states: [
        _set_rng_state(state, at) for at, state in enumerate(states)
    ]
    module.manual_seed = _manual_seed
    module.manual_seed_all = lambda seed: [
        _manual_seed(seed, at) for at in range(module.device_count())
    ]
    return module


def _index(device: Any) -> int:
    if device is None:
        return torch.accelerator.current_device_index()
    index = device if isinstance(device, int) else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


@contextlib.contextmanager
def _stream(stream: torch.Stream | None) -> Iterator[None]:
    with stream or contextlib.nullcontext():
        yield


def _mem_get_info(device: Any = None) -> tuple[int, int]:
    index = _index(device)
    limit = int(_device().fake_memory_limit(index))
    return limit - bytes_in_use(index), limit


def _get_rng_state(device: Any = None) -> torch.Tensor:
    words = (ctypes.c_uint64 * 2)()
    _check(_device().fake_get_random_state(_index(device), words))
    return torch.frombuffer(bytearray(bytes(words)), dtype=torch.uint8)


def _set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    seed, offset = memoryview(bytes(state.tolist())).cast("Q")
    _check(_device().fake_set_random_state(_index(device), seed, offset))


def _manual_seed(seed: int, device: Any = None) -> None:
    _check(_device().fake_set_random_state(_index(device), seed % (1 << 64), 0))
