"""Objects that write their own bytes into a snapshot, such as replay buffers and sparse tables.

Runs in:  worker: `describe` in the training thread, `write` in the copy thread.
Gives:    one entry of bytes for each provider, and its reference among the plain values.

A tensor is copied while the next forward and backward run, because only an optimizer changes it.
Other objects are serialized by `state_dict()` at the boundary, in the training thread. A provider
splits that: `describe` names at the boundary what must not change, and `capture` makes the bytes
during training.

Rule 1: a provider writes into its own pieces of the slot, and only while `capture` runs. Its
        mistakes change no other state.
Rule 2: a verified snapshot captures twice, at the boundary and before the next optimizer step. If
        the bytes differ, the provider is captured at the boundary from then on, like a tensor.
Rule 3: an entry has room for more than the present bytes once they have grown, because a changed
        layout costs a new arena.

Source: state providers are from the successor of DataStates-LLM (arXiv 2601.16956).
"""

import threading
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import numpy as np
import xxhash

from ftrun.errors import ProviderFailed
from ftrun.snapshot.layout import PIECE_BYTES, CopyTiming, LayoutEntry
from ftrun.snapshot.plain_values import TensorRef, encode

_GROWTH = 1.25


class StateProvider(Protocol):
    """An object that writes and reads its own bytes; given to `ftrun.attach` by a name."""

    def describe(self) -> tuple[int, Any]:
        """Return the number of bytes now, and what `capture` needs to write them.

        Called at a step boundary, in the training thread. The second value must not change later: a
        copy, a tuple of objects that do not change, or an index up to which a log is complete. Not
        every call is followed by `capture`.
        """
        ...

    def capture(self, frozen: Any, into: memoryview) -> None:
        """Fill `into`, which has the described number of bytes.

        Called in another thread while training continues, sometimes twice for one `describe`. The
        memory is not valid after the return.
        """
        ...

    def restore(self, data: memoryview) -> None:
        """Read these bytes, and keep the memory if that helps; it is read-only.

        Called by `ftrun.attach`, possibly more than once.
        """
        ...


def is_provider(thing: object) -> TypeGuard[StateProvider]:
    return all(callable(getattr(thing, n, None)) for n in ("describe", "capture", "restore"))


@dataclass(frozen=True, slots=True)
class ProviderState:
    """One provider at one boundary; `capacity_bytes` is the size of its entry."""

    name: str
    provider: StateProvider
    frozen: Any
    num_bytes: int
    capacity_bytes: int

    @property
    def entry(self) -> LayoutEntry:
        # As all state that no optimizer owns, so that each rank has its own.
        return LayoutEntry(self.name, "U8", (self.capacity_bytes,), CopyTiming.BOUNDARY)

    def write(self, target: np.ndarray) -> None:
        """Fill the entry, [capacity] uint8. Raises ProviderFailed."""
        part = target[: self.num_bytes]
        into = part.data
        try:
            self.provider.capture(self.frozen, into)
            into.release()
        except BaseException as error:
            # In the main thread, this may be the end of the script or Ctrl-C.
            is_main = threading.current_thread() is threading.main_thread()
            if is_main and not isinstance(error, Exception):
                raise
            raise self._failed(f"capture(): {type(error).__name__}: {error}") from error
        # A view of `into` keeps a reference to its exporter, and could write to it later.
        exporter = weakref.ref(part)
        del part
        if exporter() is not None:
            raise self._failed("capture() keeps a view of its memory. Copy into it, and keep none")
        target[self.num_bytes :] = 0

    def _failed(self, reason: str) -> ProviderFailed:
        return ProviderFailed(self.name, reason)

    def differs_from(self, target: np.ndarray) -> bool:
        """Whether a second capture fails or gives other bytes."""
        again = np.empty(self.num_bytes, np.uint8)
        try:
            self.write(again)
        except ProviderFailed:
            return True
        return not np.array_equal(again, target[: self.num_bytes])

    def digest(self) -> str:
        content = np.empty(self.num_bytes, np.uint8)
        self.write(content)
        return xxhash.xxh3_64_hexdigest(content.data)


class ProviderSizes:
    """Describes all providers, and knows the size of their entries."""

    def __init__(self) -> None:
        self._capacities: dict[str, int] = {}

    def describe(self, providers: Mapping[str, StateProvider]) -> tuple[ProviderState, ...]:
        """Raises ProviderFailed."""
        return tuple(self._described(name, one) for name, one in providers.items())

    def restored(self, name: str, capacity_bytes: int) -> None:
        """Keep the size of a restored entry, so that its arena is used again."""
        self._capacities[name] = capacity_bytes

    def _described(self, name: str, provider: StateProvider) -> ProviderState:
        try:
            described: tuple[Any, Any] = provider.describe()
            num_bytes, frozen = described
        except Exception as error:
            raise ProviderFailed(name, f"describe(): {type(error).__name__}: {error}") from error
        if not isinstance(num_bytes, int) or num_bytes < 0:
            raise ProviderFailed(name, f"describe() returned {num_bytes!r} as the number of bytes")
        before = self._capacities.get(name, 0)
        if num_bytes > before or not before:
            wanted = int(num_bytes * _GROWTH) if before else num_bytes
            before = max(1, -(-wanted // PIECE_BYTES)) * PIECE_BYTES
            self._capacities[name] = before
        return ProviderState(name, provider, frozen, num_bytes, before)


def packed_sizes(states: Iterable[ProviderState]) -> bytes:
    """The part of the plain values that refers to the entries."""

    def refer(value: object, _: str) -> TensorRef | None:
        return TensorRef(value.name) if isinstance(value, ProviderState) else None

    part = {one.name: {"num_bytes": one.num_bytes, "content": one} for one in states}
    return encode(part, refer=refer)


def load_providers(
    saved: Mapping[str, Any], providers: Mapping[str, StateProvider], sizes: ProviderSizes
) -> None:
    """Give each provider its bytes; raises ProviderFailed."""
    for name, provider in providers.items():
        content = saved[name]["content"].numpy()
        sizes.restored(name, content.nbytes)
        data = memoryview(content)[: saved[name]["num_bytes"]].toreadonly()
        try:
            provider.restore(data)
        except Exception as error:
            reason = f"restore(): {type(error).__name__}: {error}"
            raise ProviderFailed(name, reason) from error
