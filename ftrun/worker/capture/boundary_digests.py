"""Records digests at each step boundary, so that a repeated step can be compared.

Runs in:  worker, training thread.
Gives:    boundary records in the heartbeat page; the agent compares them (monitor/repeat_check.py).
Survives: the worker; the agent reads the page of a dead worker.

Rule 1: nothing waits for a device. Copies of parameter bytes from a device are queued after
        the step, and written to the record of their step when they have arrived.
Rule 2: an error in this module costs the comparison, never the step.
"""

import logging
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import xxhash

from ftrun.errors import ValueNotStorable
from ftrun.monitor.repeat_check import LATE_STEPS
from ftrun.wire.shared_memory.pages import MAX_SAMPLES, SharedPage
from ftrun.worker.state.attached import AttachedState
from ftrun.worker.state.module_state import every_name
from ftrun.worker.state.tensors import HostCopy, is_accelerator, is_sharded, local_tensor

SLICE_BYTES = 64
STAYS = 32
"""Number of steps after which the slice of a parameter moves to another position."""

_GOLDEN = 0x9E3779B1
_ALIGN = 8
_WEIGHTS = (np.arange(1, SLICE_BYTES // 4 + 1, dtype=np.uint32) * np.uint32(_GOLDEN)) | 1
"""Odd weights, so that a change of one word always changes the weighted sum."""

_FLOAT = struct.Struct("<d")
_WORD = struct.Struct("<q")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Taken:
    """The slices of one boundary; copies from a device may be pending."""

    count: int
    readable: int
    """Bit i is set if parameter i could be read."""
    copies: Sequence[tuple[Sequence[int], HostCopy]]
    """For each device, the indices of its parameters and their concatenated slices."""

    @property
    def has_arrived(self) -> bool:
        return all(copy.has_arrived for _, copy in self.copies)

    @cached_property
    def digests(self) -> bytes:
        """4 bytes for each parameter; valid only if `has_arrived`."""
        found = np.zeros(self.count, dtype=np.uint32)
        for indices, copy in self.copies:
            words = copy.tensor.numpy().view(np.uint32).reshape(-1, _WEIGHTS.size)
            found[indices] = words @ _WEIGHTS
        return found.tobytes()


@dataclass
class _Record:
    step: int
    loss: int | None
    """Bits of the loss as a 64-bit float."""
    taken: _Taken
    is_whole: bool = False
    """Whether the digests are on the page."""


class BoundaryDigests:
    """Writes the boundary records of one worker."""

    def __init__(self, page: SharedPage, attached: AttachedState) -> None:
        self._page = page
        self._attached = attached
        self._samples = _Samples(())
        self._num_groups = -1
        self._loss: tuple[int, int] | None = None
        """Step and bits of the loss reported for the current step."""
        self._recent: deque[_Record] = deque(maxlen=LATE_STEPS)
        self._has_failed = False

    def take_loss(self, step: int, loss: float) -> None:
        """Record the loss reported in this step; a loss from a device arrives some steps later."""
        (bits,) = _WORD.unpack(_FLOAT.pack(loss))
        record = next((one for one in self._recent if one.step == step), None)
        if record is None:
            self._loss = (step, bits)
        else:
            record.loss = bits
            self._write(record)

    def start_again(self) -> None:
        """Write to another page from here on."""
        self._num_groups = -1
        self._loss = None

    def boundary(self, step: int) -> None:
        if self._has_failed:
            return
        try:
            self._note(step)
        except Exception:  # noqa: BLE001 - Rule 2
            self._has_failed = True
            _log.exception("from here on repeated steps are not compared")

    def _note(self, step: int) -> None:
        optimizers = self._attached.optimizers.values()
        num_groups = sum(len(one.param_groups) for one in optimizers)
        if num_groups != self._num_groups:
            self._num_groups = num_groups
            self._choose()
        loss, self._loss = self._loss, None
        bits = loss[1] if loss is not None and loss[0] == step else None
        newest = _Record(step, bits, self._samples.take(step))
        self._recent.append(newest)
        for record in self._recent:
            if record is newest or not record.is_whole:
                self._write(record)

    def _write(self, record: _Record) -> None:
        taken = record.taken
        record.is_whole = taken.has_arrived
        known = (taken.readable, taken.digests) if record.is_whole else (0, b"")
        self._page.write_record(record.step, record.loss, *known)

    def _choose(self) -> None:
        """Choose evenly spaced parameters, first and last included; equal in every generation."""
        known = [one for one in _named_parameters(self._attached) if _has_bytes(one[1])]
        last = len(known) - 1
        num = min(len(known), MAX_SAMPLES)
        chosen = [known[at * last // max(1, num - 1)] for at in range(num)]
        self._samples = _Samples(chosen)
        self._page.samples = self._samples.names
        self._recent.clear()  # their digests are of other parameters


def _named_parameters(attached: AttachedState) -> Iterator[tuple[str, torch.Tensor]]:
    """Trained parameters: those of the optimizers; without an optimizer, those of the modules."""
    names: dict[int, str] = {}
    for prefix, module in attached.modules.items():
        for name, tensor in every_name(module, prefix):
            names.setdefault(id(tensor), name)
            if not attached.optimizers and tensor.requires_grad:
                yield name, tensor
    for prefix, optimizer in attached.optimizers.items():
        for i, group in enumerate(optimizer.param_groups):
            for j, parameter in enumerate(group["params"]):
                if parameter.requires_grad:
                    name = names.get(id(parameter), f"{prefix}.param_groups.{i}.params.{j}")
                    yield name, parameter


class _Samples:
    """Slices of some parameters; the views are reused until an address changes."""

    def __init__(self, chosen: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._plain: list[Any] = [one for _, one in chosen if not is_sharded(one)]
        self._sharded: list[Any] = [one for _, one in chosen if is_sharded(one)]
        ordered = sorted(chosen, key=lambda one: is_sharded(one[1]))
        self.names = [name for name, _ in ordered]
        self._seeds = [xxhash.xxh32_intdigest(name.encode()) for name in self.names]
        self._addresses: list[int] = []
        self._memory: list[torch.Tensor] = []
        self._readable = 0
        self._of_device: list[tuple[list[int], list[torch.Tensor]]] = []
        """Indices and slices of the parameters of each device; zeros pad a short slice."""
        self._place_of: list[tuple[list[torch.Tensor], int]] = []
        """List and index that hold the slice of each parameter."""
        self._step = -1

    def take(self, step: int) -> _Taken:
        """Read the slices; on a device, queue the read after the step."""
        addresses = [one.data_ptr() for one in self._plain]
        addresses += [one._local_tensor.data_ptr() for one in self._sharded]
        if addresses != self._addresses:
            self._addresses = addresses
            self._poll()
        num = len(addresses)
        moved = range(-step % STAYS, num, STAYS) if step == self._step + 1 else range(num)
        for at in moved:
            self._place(at, (step + at) // STAYS)
        self._step = step
        copies = [(indices, HostCopy(torch.cat(pieces))) for indices, pieces in self._of_device]
        return _Taken(num, self._readable, copies)

    def _poll(self) -> None:
        parts = [*self._plain, *(one._local_tensor for one in self._sharded)]
        found = [_bytes_of(one) for one in parts]
        self._readable = sum(1 << at for at, one in enumerate(found) if one is not None)
        self._memory = [_bytes(0) if one is None else one for one in found]
        self._place_of = []
        of_device: dict[torch.device, tuple[list[int], list[torch.Tensor]]] = {}
        for at, one in enumerate(found):
            if one is None:
                self._place_of.append(([_bytes(0)], 0))
                continue
            indices, pieces = of_device.setdefault(one.device, ([], []))
            indices.append(at)
            self._place_of.append((pieces, len(pieces)))
            pieces.append(one)
            if one.numel() < SLICE_BYTES:
                pieces.append(_bytes(SLICE_BYTES - one.numel(), one.device))
        self._of_device = list(of_device.values())
        self._step = -1

    def _place(self, at: int, turn: int) -> None:
        """Choose the slice of a parameter; the position depends only on name and step."""
        memory = self._memory[at]
        span = max(1, memory.numel() - SLICE_BYTES)
        begin = (self._seeds[at] + turn * _GOLDEN) % span & -_ALIGN
        pieces, place = self._place_of[at]
        pieces[place] = memory[begin : begin + SLICE_BYTES]


def _has_bytes(parameter: torch.Tensor) -> bool:
    try:
        local_tensor(parameter, "")
    except ValueNotStorable:
        return False
    return True


def _bytes_of(local: torch.Tensor) -> torch.Tensor | None:
    """Memory of a dense tensor as bytes, in storage order; None if it cannot be read."""
    if not (local.is_cpu or is_accelerator(local.device)) or not local.data_ptr():
        return None
    plain = local.detach()
    if not torch.ops.aten.is_non_overlapping_and_dense(plain):
        return None
    start, size = plain.storage_offset() * plain.element_size(), plain.nbytes
    # Not through numpy(), because that prevents the script from resizing the storage.
    return _bytes(0, plain.device).set_(plain.untyped_storage(), start, (size,), (1,))


def _bytes(count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8, device=device)
