"""Restores what decides a step's last bits: random states, and the order of DDP's buckets.

Runs in:  worker, training thread. numpy and devices are accessed only if the script has loaded
          them, because a first access takes time, or makes a later fork unsafe.

DDP rebuilds its buckets after its first backward, in the order in which gradients became ready. The
first step of a restored run would therefore sum gradients in other buckets than the step it
repeats, and floating-point sums of more than two terms depend on the order. To prevent that, one
backward without the user's model runs through DDP. It is a chain of functions, each of which makes
one parameter's gradient ready, in the recorded order.

Source: measured with torch 2.13 and 4 gloo ranks; with two ranks the order of a sum has no effect.
"""

import gc
import logging
import random
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ftrun.sharding.rank_values import DERIVED, derived_seed
from ftrun.worker.state.module_state import unwrapped


def take_all() -> dict[str, Any]:
    taken: dict[str, Any] = {
        "python": random.getstate(),
        "torch": generator_bytes(torch.default_generator),
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        taken["numpy"] = _short(numpy.random.get_state(legacy=False))
    if (module := _device_module()) is not None and module.is_initialized():
        taken[_device_type()] = [_to_bytes(state) for state in module.get_rng_state_all()]
    return taken


def put_back(taken: dict[str, Any]) -> None:
    taken = resolved(taken)
    version, words, gauss = taken["python"]
    random.setstate((version, tuple(words), gauss))
    set_generator(torch.default_generator, taken["torch"])
    if "numpy" in taken:
        import numpy

        if isinstance(taken["numpy"], dict):  # the script has set another bit generator
            numpy.random.set_state(_bytes_as_arrays(taken["numpy"]))
        else:
            name, raw, *rest = taken["numpy"]
            numpy.random.set_state((name, numpy.frombuffer(raw, numpy.uint32), *rest))
    if (states := taken.get(_device_type())) and (module := _device_module()) is not None:
        _set_devices(module, [_from_bytes(state) for state in states])


def _device_type() -> str:
    """Type of the accelerator, such as `cuda`; it names the states of its devices. Empty: none."""
    found = torch.accelerator.current_accelerator()
    return "" if found is None else found.type


def _device_module() -> Any:
    """Torch's module for the accelerator; None if it has no random states of its devices."""
    kind = _device_type()
    module = torch.get_device_module(kind) if kind else None
    return module if hasattr(module, "get_rng_state_all") else None


def _set_devices(module: Any, states: list[torch.Tensor]) -> None:
    """Set the states by index; a device that was not saved gets a state derived from the first.

    Before the device is initialised, torch queues calls, and runs those of `manual_seed` last. The
    states must come after them.
    """
    later = getattr(module, "_lazy_call", None)
    if later is not None and not module.is_initialized():
        later(partial(_set_in_initialization, module, states), seed_all=True)
    else:
        for index in range(module.device_count()):
            module.set_rng_state(_state_of(index, states), index)


def _set_in_initialization(module: Any, states: list[torch.Tensor]) -> None:
    # Torch holds a lock that its own set_rng_state() takes too.
    for index, generator in enumerate(module.default_generators):
        generator.set_state(_state_of(index, states))


def _state_of(index: int, states: list[torch.Tensor]) -> torch.Tensor:
    if index < len(states):
        return states[index].clone()
    seed = derived_seed([_to_bytes(states[0])], index)
    return torch.Generator(f"{_device_type()}:{index}").manual_seed(seed).get_state()


def generator_bytes(generator: torch.Generator) -> bytes:
    return _to_bytes(generator.get_state())


def is_generator(thing: object) -> bool:
    if isinstance(thing, torch.Generator | random.Random):
        return not isinstance(thing, random.SystemRandom)
    return isinstance(thing, _numpy_kinds())


def generator_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator_bytes(generator)
    if isinstance(generator, random.Random):
        return generator.getstate()
    return _arrays_as_bytes(_numpy_dict(generator))


def set_generator(generator: Any, state: Any) -> None:
    """Set a generator to a state from `generator_state`, or seed it if the state is an int."""
    if isinstance(generator, torch.Generator):
        if isinstance(state, int):
            generator.manual_seed(state)
        else:
            generator.set_state(_from_bytes(state))
    elif not isinstance(generator, random.Random):
        _set_numpy_dict(generator, state)
    elif isinstance(state, int):
        generator.seed(state)
    else:
        kind, words, gauss = state
        generator.setstate((kind, tuple(words), gauss))


def _numpy_kinds() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return ()
    return (numpy.random.Generator, numpy.random.BitGenerator, numpy.random.RandomState)


def _numpy_dict(generator: Any) -> Any:
    if hasattr(generator, "get_state"):  # a RandomState
        return generator.get_state(legacy=False)
    return getattr(generator, "bit_generator", generator).state


def _set_numpy_dict(generator: Any, state: Any) -> None:
    if hasattr(generator, "set_state"):
        if isinstance(state, int):
            generator.seed(state % (1 << 32))
        else:
            generator.set_state(_bytes_as_arrays(state))
        return
    bits = getattr(generator, "bit_generator", generator)
    bits.state = type(bits)(state).state if isinstance(state, int) else _bytes_as_arrays(state)


def _arrays_as_bytes(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _arrays_as_bytes(item) for key, item in value.items()}
    return (value.dtype.str, value.tobytes()) if hasattr(value, "tobytes") else value


def _bytes_as_arrays(value: Any) -> Any:
    import numpy

    if isinstance(value, dict):
        return {key: _bytes_as_arrays(item) for key, item in value.items()}
    return numpy.frombuffer(value[1], value[0]).copy() if isinstance(value, tuple) else value


def _short(state: dict[str, Any]) -> Any:
    """The state of numpy's usual bit generator in the form of `_numpy_state`."""
    if state["bit_generator"] != "MT19937":
        return _arrays_as_bytes(state)
    words = state["state"]
    return ("MT19937", words["key"].tobytes(), words["pos"], state["has_gauss"], state["gauss"])


def _numpy_state(state: Any) -> tuple[Any, ...]:
    name, words, *rest = state
    return (name, words.tobytes(), *rest)


def _to_bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _from_bytes(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def resolved(taken: dict[str, Any]) -> dict[str, Any]:
    if DERIVED not in taken:
        return taken
    base = resolved(taken[DERIVED])
    return {**derive(base, taken["number"]), **{name: base[name] for name in taken["kept"]}}


def derive(taken: dict[str, Any], number: int) -> dict[str, Any]:
    """Random states with the streams of `taken` (see `take_all`), others for each number."""
    made: dict[str, Any] = {}
    for stream, state in taken.items():
        if isinstance(state, dict):
            made[stream] = state  # numpy cannot seed that bit generator without changing it
            continue
        seed = derived_seed(state, number)
        if stream == "python":
            made[stream] = random.Random(seed).getstate()
        elif stream == "numpy":
            import numpy

            made[stream] = _numpy_state(numpy.random.RandomState(seed % (1 << 32)).get_state())
        elif stream == "torch":
            made[stream] = seeded(seed)
        elif stream == _device_type() and (module := _device_module()) is not None:
            present = range(min(len(state), module.device_count()))
            made[stream] = [
                generator_bytes(torch.Generator(f"{stream}:{at}").manual_seed(seed))
                for at in present
            ]
    return made


def seeded(seed: int) -> bytes:
    return generator_bytes(torch.Generator().manual_seed(seed))


# --- gradient buckets ---------------------------------------------------------------------------

_MATTERS_FROM = 3

_log = logging.getLogger(__name__)


class DdpWrapperTracker:
    """Tracks the DDP instances that wrap a module, including later ones."""

    def __init__(self) -> None:
        self._seen: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._original: Callable[..., None] = DistributedDataParallel.__init__
        seen, original = self._seen, self._original

        def noting(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            original(ddp, *args, **kwargs)
            seen.add(ddp)

        DistributedDataParallel.__init__ = noting  # type: ignore[method-assign, assignment]

    def close(self) -> None:
        DistributedDataParallel.__init__ = self._original  # type: ignore[method-assign]

    def find_older(self) -> None:
        """Find instances created before; takes 15 ms, so only for an attached bare module."""
        self._seen.update(o for o in gc.get_objects() if type(o) is DistributedDataParallel)

    def wrappers_of(self, modules: dict[str, nn.Module]) -> dict[str, DistributedDataParallel]:
        found = {}
        for name, module in modules.items():
            candidates = [module, *getattr(module, "_modules", {}).values(), *self._seen]
            for one in candidates:
                if isinstance(one, DistributedDataParallel) and unwrapped(one) is unwrapped(module):
                    found[name] = one
        return found


def ready_order(ddp: DistributedDataParallel) -> tuple[list[int] | None, bool]:
    """Indices of DDP's parameters in the order of its buckets, and whether that order is final.

    The order is None while it is unknown, and always if DDP never rebuilds its buckets.
    """
    if ddp.static_graph:
        return None, True
    reported = ddp._get_ddp_logging_data().get(  # type: ignore[no-untyped-call]
        "rebuilt_per_bucket_param_indices"
    )
    if reported:
        return [int(index) for index in str(reported).replace(",", " ").split()], True
    # Before the buckets are rebuilt, only the times of the first backward give the order.
    times = list(ddp.reducer.get_backward_stats())
    return (sorted(range(len(times)), key=times.__getitem__) if any(times) else None), False


def is_needed(ddp: DistributedDataParallel, *, may_stay: bool = False) -> bool:
    """Whether the order of gradients is recorded.

    With `may_stay`, also for 2 ranks: a rank that stays must have the buckets of a new rank.
    """
    world_size = torch.distributed.get_world_size(ddp.process_group)
    return world_size >= (2 if may_stay else _MATTERS_FROM) and not ddp.find_unused_parameters


def warm_buckets(ddp: DistributedDataParallel, order: list[int]) -> None:
    """Run one backward through DDP in which gradients become ready in this order.

    A collective call: every rank of DDP's process group makes it. Gradients are None afterwards.
    """
    learned = [p for p in ddp.module.parameters() if p.requires_grad]
    if sorted(order) != list(range(len(learned))):
        _log.warning("not bitwise: the recorded order of gradients is of another model")
        return
    in_order = [learned[index] for index in order]
    # In place of the forward inside DDP, so that the module and its hooks do not run.
    ddp.__dict__["_run_ddp_forward"] = lambda *_, **__: _chain(in_order)
    try:
        ddp().backward()
    finally:
        del ddp.__dict__["_run_ddp_forward"]
    for parameter in learned:
        parameter.grad = None


class _MakeReady(torch.autograd.Function):
    """Returns its scalar unchanged; its backward gives the parameter a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, scalar: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        ctx.parameter = parameter.detach()
        return scalar.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grads[0], torch.zeros_like(ctx.parameter)


def _chain(in_order: list[torch.Tensor]) -> torch.Tensor:
    # The last function's backward runs first.
    scalar = torch.zeros((), device=in_order[0].device, requires_grad=True)
    for parameter in reversed(in_order):
        scalar = _MakeReady.apply(scalar, parameter)  # type: ignore[no-untyped-call]
    return scalar
