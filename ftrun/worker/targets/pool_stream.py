"""Writes a rank's image into its capture pool, in the order of the file.

Runs in:  worker: the training thread up to the last byte that must be copied at the boundary, then
          the copy thread.
Takes in: the state of a boundary; room in the pool, as the SMP reads it.
Gives:    the image, its digest table, and the seal; or `CaptureGivenUp`.
Survives: the SMP. The capture is given up, and the training continues.

The pool is smaller than the image, so nothing can be copied out of order. Entries are in the order
of the layout: those that no optimizer owns are first, and the plain values, which do not change,
are last. The training thread therefore waits at the boundary only if more than the pool must be
copied there, and before the optimizer steps if the rest is not copied yet.

Rule: a lazy entry must not change before it is copied. Samples and version counters show a change
      (lazy_check.py). In a verified capture, the training thread hashes all lazy tensors at the
      boundary, and the digests of the copied pieces must equal these.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property

import numpy as np
import torch
import xxhash

from ftrun import clock
from ftrun.snapshot.layout import PLAIN_NAME, Layout, LayoutEntry
from ftrun.wire.crash_points import crash_point
from ftrun.wire.shared_memory.pool import CapturePool, PoolField
from ftrun.worker.capture.copying import names_at_boundary
from ftrun.worker.capture.device_copies import synchronize
from ftrun.worker.capture.device_sources import DeviceCopies
from ftrun.worker.capture.lazy_check import LazySamples, LazyTensor
from ftrun.worker.state.providers import ProviderState
from ftrun.worker.state.state_tree import BoundaryState
from ftrun.worker.state.tensors import byte_view, can_be_cut, copyable

_CHUNK_BYTES = 1 << 18
"""Copied and hashed at once, so that it is in the CPU cache in between."""

_PART_BYTES = 1 << 22
"""Largest part of a tensor that is not contiguous, or on a device, in one copy of it."""

_POLL_S = 0.0005

Content = torch.Tensor | ProviderState | bytes


class CaptureGivenUp(Exception):
    """The pool is not read any more, or another rank has no snapshot of this step."""


class PieceDigests:
    """Digests the pieces of an image from its bytes in order.

    Args:
        table: receives the digest of each piece.
        position: of the first byte, from the start of the data. A piece that begins before it is
            left out.
    """

    def __init__(self, layout: Layout, table: memoryview, position: int = 0) -> None:
        self._sizes = [piece.num_bytes for piece in layout.pieces]
        self._table = table
        self.first = next(
            (at for at, piece in enumerate(layout.pieces) if piece.offset >= position),
            len(self._sizes),
        )
        at_first = layout.pieces[self.first].offset if self.first < len(self._sizes) else position
        self._skipped = at_first - position
        self._index = self.first
        self._filled = 0
        self._digest = xxhash.xxh3_64()
        self._end_whole()

    def feed(self, data: np.ndarray) -> None:
        skipped = min(self._skipped, len(data))
        self._skipped -= skipped
        at = skipped
        while at < len(data) and self._index < len(self._sizes):
            part = data[at : at + self._sizes[self._index] - self._filled]
            self._digest.update(part.data)
            at, self._filled = at + len(part), self._filled + len(part)
            self._end_whole()

    def _end_whole(self) -> None:
        """End the piece if it is whole, and empty pieces behind it."""
        while self._index < len(self._sizes) and self._filled == self._sizes[self._index]:
            if self._skipped:
                return
            self._table[self._index] = self._digest.intdigest()
            self._digest.reset()
            self._index, self._filled = self._index + 1, 0


class RingWriter:
    """Writes bytes into a pool, and waits for room.

    Args:
        obstacle: returns why the capture must be given up, empty if it need not.
        show_life: called while it waits in the training thread.
    """

    def __init__(
        self, pool: CapturePool, obstacle: Callable[[], str], show_life: Callable[[], None]
    ) -> None:
        self._pool = pool
        self._obstacle = obstacle
        self._show_life = show_life
        self.is_waited_for = False
        """The training thread writes, so its waits are shown."""

    def write(self, data: np.ndarray, digests: PieceDigests | None = None) -> None:
        """[num_bytes] uint8; raises CaptureGivenUp."""
        at = 0
        while at < len(data):
            room = self._room(min(_CHUNK_BYTES, len(data) - at))
            target = np.frombuffer(room, np.uint8)
            np.copyto(target, data[at : at + len(target)])
            if digests is not None:
                digests.feed(target)
            self._pool.add_written(len(target))
            at += len(target)

    def _room(self, most_bytes: int) -> memoryview:
        while not (room := self._pool.room(most_bytes)):
            if reason := self._obstacle():
                raise CaptureGivenUp(reason)
            if self.is_waited_for:
                self._show_life()
            clock.sleep(_POLL_S)
        crash_point("worker.pool.room_found")
        return room

    @property
    def position(self) -> int:
        return self._pool.get(PoolField.WRITTEN)


class PooledCopy:
    """The copies of one snapshot into a pool; has the methods of a `SlotCopy`."""

    def __init__(
        self,
        layout: Layout,
        state: BoundaryState,
        at_boundary: Collection[str],
        writer: RingWriter,
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.layout = layout
        self.on_devices = DeviceCopies(())
        self.provided = list(state.provided)
        self._writer = writer
        self._waiting = waiting
        persistent = state.persistent.sources
        now = names_at_boundary(persistent, at_boundary, boundary_bytes=0)
        self._contents: dict[str, Content] = {PLAIN_NAME: state.plain}
        self._contents |= {one.name: copyable(one.tensor) for one in (*persistent, *state.fresh)}
        self._contents |= {one.name: one for one in state.provided}
        now |= {one.name for one in state.fresh}
        now |= {one.name for one in state.provided if one.name in at_boundary}
        last = max((i for i, e in enumerate(layout.entries) if e.name in now and e.num_bytes),
                   default=-1)  # fmt: skip
        self._num_now = last + 1
        """Entries that are written at the boundary; in the order of the file."""
        self._lazy = layout.entries[self._num_now :]
        self.table = memoryview(bytearray(8 * len(layout.pieces))).cast("Q")
        self._digests = PieceDigests(layout, self.table)
        self._verified: tuple[memoryview, int] | None = None

    @cached_property
    def samples(self) -> LazySamples:
        lazy = [(one.name, self._contents.get(one.name)) for one in self._lazy]
        return LazySamples(
            [
                LazyTensor(name, tensor, tensor)
                for name, tensor in lazy
                if isinstance(tensor, torch.Tensor) and tensor.numel()
            ]
        )

    def synchronize(self) -> None:
        synchronize(one for one in self._contents.values() if isinstance(one, torch.Tensor))

    def copy_boundary(self, *, is_staged: bool = False, gb_s: float = 0.0) -> None:
        """Write all that must be copied at the boundary, and wait for room; raises CaptureGivenUp.

        The arguments are those of a copy into a slot; what a device holds is copied in parts.
        """
        self.synchronize()  # the copy thread reads devices in a stream of its own
        with self._waiting():
            self._writer.is_waited_for = True
            self._writer.write(np.frombuffer(self.layout.header, np.uint8))
            for entry in self.layout.entries[: self._num_now]:
                self._write(entry)
            self._writer.is_waited_for = False

    def verify(self) -> None:
        """Hash the lazy tensors now, so that `copy_lazy` finds each change."""
        table = memoryview(bytearray(self.table.nbytes)).cast("Q")
        position = self._lazy[0].offset if self._lazy else self.layout.data_bytes
        digests = PieceDigests(self.layout, table, position)
        for entry in self._lazy:
            content = self._contents.get(entry.name)
            if isinstance(content, ProviderState):
                digests.feed(np.zeros(entry.num_bytes, np.uint8))
            else:
                for chunk in _chunks(entry, content):
                    digests.feed(chunk)
        self._verified = table, digests.first

    def copy_lazy(self, table: memoryview) -> None:
        """Write the rest; raises CaptureGivenUp or ProviderFailed. `table` is the own one."""
        for entry in self._lazy:
            self._write(entry)

    def write_table(self) -> None:
        """Raises CaptureGivenUp."""
        self._writer.write(np.frombuffer(self.table.cast("B"), np.uint8))

    def _write(self, entry: LayoutEntry) -> None:
        for chunk in _chunks(entry, self._contents.get(entry.name)):
            self._writer.write(chunk, self._digests)

    def changed(self) -> list[str]:
        """Names of lazy tensors whose copies differ from the boundary, after a `verify`."""
        if self._verified is None:
            return []
        found: set[str] = set()
        before, first = self._verified
        for index in range(first, len(self.table)):
            if before[index] != self.table[index]:
                piece = self.layout.pieces[index]
                found |= {
                    one.name
                    for one in self._lazy
                    if one.offset < piece.offset + piece.num_bytes
                    and piece.offset < one.offset + one.num_bytes
                }
        providers = {one.name for one in self.provided}
        return sorted(name for name in found - providers if name in self._contents)


def _chunks(entry: LayoutEntry, content: Content | None) -> Iterator[np.ndarray]:
    """The bytes of an entry in order; [num_bytes] uint8 each. Raises ProviderFailed."""
    if content is None:  # padding
        yield np.zeros(entry.num_bytes, np.uint8)
    elif isinstance(content, bytes):
        yield np.frombuffer(len(content).to_bytes(8, "little") + content, np.uint8)
        yield np.zeros(entry.num_bytes - 8 - len(content), np.uint8)
    elif isinstance(content, ProviderState):
        written = np.empty(content.capacity_bytes, np.uint8)
        content.write(written)
        yield written
    elif can_be_cut(content):
        yield byte_view(content).numpy()
    else:
        for part in _parts(content):
            yield byte_view(part.cpu().contiguous()).numpy()


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Parts in row-major order, of at most `_PART_BYTES` if its rows are not larger."""
    if not tensor.numel():
        return ()
    if tensor.is_contiguous():
        return torch.split(tensor.view(-1), max(1, _PART_BYTES // tensor.itemsize))
    row_bytes = tensor.nbytes // len(tensor)
    return torch.split(tensor, max(1, _PART_BYTES // row_bytes))
