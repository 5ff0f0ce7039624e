"""Captures and restores random states: Python's, numpy's, torch's, and each CUDA device's.

Runs in: worker. numpy and CUDA are accessed only if the script has loaded them, because a first
         access takes time, or makes a later fork unsafe.
"""

import random
import sys
from typing import Any

import torch

from ftrun.sharding.rank_values import DERIVED, derived_seed


def take_all() -> dict[str, Any]:
    taken: dict[str, Any] = {
        "python": random.getstate(),
        "torch": generator_bytes(torch.default_generator),
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        taken["numpy"] = _numpy_state(numpy.random.get_state())
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        taken["cuda"] = [_to_bytes(state) for state in torch.cuda.get_rng_state_all()]
    return taken


def put_back(taken: dict[str, Any]) -> None:
    """Restore every random state of `taken`; derived states are computed first."""
    taken = settled(taken)
    version, words, gauss = taken["python"]
    random.setstate((version, tuple(words), gauss))
    set_generator(torch.default_generator, taken["torch"])
    if "numpy" in taken:
        import numpy

        name, raw, *rest = taken["numpy"]
        numpy.random.set_state((name, numpy.frombuffer(raw, numpy.uint32), *rest))
    if "cuda" in taken and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([_from_bytes(state) for state in taken["cuda"]])


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


def _numpy_state(state: Any) -> tuple[Any, ...]:
    name, words, *rest = state
    return (name, words.tobytes(), *rest)


def _to_bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _from_bytes(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def settled(taken: dict[str, Any]) -> dict[str, Any]:
    """Compute derived random states; see `rank_values.streams`."""
    if DERIVED not in taken:
        return taken
    base = settled(taken[DERIVED])
    return {**derive(base, taken["number"]), **{name: base[name] for name in taken["kept"]}}


def derive(taken: dict[str, Any], number: int) -> dict[str, Any]:
    """Random states that are determined by `taken` and a number, and differ from both.

    Args:
        taken: from `take_all`; the result has the same streams.
        number: each number gives another result.
    """
    made: dict[str, Any] = {}
    for stream, state in taken.items():
        seed = derived_seed(state, number)
        if stream == "python":
            made[stream] = random.Random(seed).getstate()
        elif stream == "numpy":
            import numpy

            made[stream] = _numpy_state(numpy.random.RandomState(seed % (1 << 32)).get_state())
        elif stream == "torch":
            made[stream] = seeded(seed)
        elif torch.cuda.is_available():
            made[stream] = [
                generator_bytes(torch.Generator(f"cuda:{at}").manual_seed(seed))
                for at in range(len(state))
            ]
    return made


def seeded(seed: int) -> bytes:
    return generator_bytes(torch.Generator().manual_seed(seed))
