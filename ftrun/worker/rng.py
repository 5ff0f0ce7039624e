"""The random states of a process: Python's, numpy's, torch's, and each CUDA device's.

Runs in:  worker.
Takes in: nothing.
Gives:    plain values, and puts them back.

numpy and CUDA are asked only where the script has loaded them: a first touch of either would
cost time, or poison a fork.
"""

import random
import sys
from typing import Any

import torch


def take_all() -> dict[str, Any]:
    """Every random state there is now, as plain values."""
    taken: dict[str, Any] = {
        "python": random.getstate(),
        "torch": generator_bytes(torch.default_generator),
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        name, words, *rest = numpy.random.get_state()
        taken["numpy"] = (name, words.tobytes(), *rest)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        taken["cuda"] = [_to_bytes(state) for state in torch.cuda.get_rng_state_all()]
    return taken


def put_back(taken: dict[str, Any]) -> None:
    """Every random state as it was when `taken` was taken."""
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


def set_generator(generator: torch.Generator, state: bytes) -> None:
    generator.set_state(_from_bytes(state))


def _to_bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _from_bytes(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
