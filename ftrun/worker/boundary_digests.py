"""What a worker notes at each step boundary, so that a repeated step can be compared.

Runs in:  worker, training thread.
Takes in: the reported loss, and a few bytes of some parameters.
Gives:    boundary records in the heartbeat page; the agent compares them, see repeat_check.py.
Survives: the worker: the agent reads the page of a dead one.

Rule 1: nothing waits for a device. Parameters on a device are not read.
Rule 2: an error of this module costs the comparison, never the step.
"""

import logging
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from ftrun.errors import ValueNotStorable
from ftrun.wire.pages import MAX_SAMPLES, Page
from ftrun.worker.attached import Attached, every_name
from ftrun.worker.tensors import is_sharded, local_tensor

SLICE_BYTES = 64
STAYS = 32
"""Steps for which the slice of a parameter stays at its position."""

_GOLDEN = 0x9E3779B1
_ALIGN = 8
_WEIGHTS = (np.arange(1, SLICE_BYTES // 4 + 1, dtype=np.uint32) * np.uint32(_GOLDEN)) | 1
"""Odd, so that a change of one word always changes the sum."""

_FLOAT = struct.Struct("<d")
_WORD = struct.Struct("<q")

_log = logging.getLogger(__name__)


class BoundaryDigests:
    """Writes the boundary records of one worker."""

    def __init__(self, page: Page, attached: Attached) -> None:
        self._page = page
        self._attached = attached
        self._samples = _Samples(())
        self._num_groups = -1
        self._loss: tuple[int, int] | None = None
        """Step and bits of the loss of the step that is being done."""
        self._last: tuple[int, int | None, int, bytes] | None = None
        """The newest record, as it was written."""
        self._has_failed = False

    def take_loss(self, step: int, loss: float) -> None:
        """A loss that was reported while this step was done; a device's comes a step later."""
        (bits,) = _WORD.unpack(_FLOAT.pack(loss))
        if self._last is not None and self._last[0] == step:
            _, _, has_digest, digests = self._last
            self._write(step, bits, has_digest, digests)
        else:
            self._loss = (step, bits)

    def boundary(self, step: int) -> None:
        """Note the state after this step."""
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
        digests = self._samples.digests(step)
        self._write(step, bits, self._samples.readable, digests)

    def _write(self, step: int, loss: int | None, has_digest: int, digests: bytes) -> None:
        self._last = (step, loss, has_digest, digests)
        self._page.write_record(step, loss, has_digest, digests)

    def _choose(self) -> None:
        """Sample evenly, the first and the last parameter included; equal in every generation."""
        known = [one for one in _named_parameters(self._attached) if _has_bytes(one[1])]
        last = len(known) - 1
        num = min(len(known), MAX_SAMPLES)
        chosen = [known[at * last // max(1, num - 1)] for at in range(num)]
        self._samples = _Samples(chosen)
        self._page.samples = self._samples.names


def _named_parameters(attached: Attached) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters that are trained: those of the optimizers, or without one those of the modules."""
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
    """Slices of some parameters. Their views are kept for as long as no address changes."""

    def __init__(self, chosen: Sequence[tuple[str, torch.Tensor]]) -> None:
        self.readable = 0
        """Bit i is set if parameter i can be read."""
        self._plain: list[Any] = [one for _, one in chosen if not is_sharded(one)]
        self._sharded: list[Any] = [one for _, one in chosen if is_sharded(one)]
        ordered = sorted(chosen, key=lambda one: is_sharded(one[1]))
        self.names = [name for name, _ in ordered]
        self._seeds = [xxhash.xxh32_intdigest(name.encode()) for name in self.names]
        self._addresses: list[int] = []
        self._memory: list[torch.Tensor] = []
        self._pieces: list[torch.Tensor] = []
        """Of each parameter its slice, and zeros if that is shorter than `SLICE_BYTES`."""
        self._piece_of: list[int] = []
        self._zeros = _bytes(SLICE_BYTES)
        self._copy = _bytes(len(chosen) * SLICE_BYTES)
        self._words = self._copy.numpy().view(np.uint32).reshape(-1, _WEIGHTS.size)
        self._step = -1

    def digests(self, step: int) -> bytes:
        """4 bytes for each parameter."""
        addresses = [one.data_ptr() for one in self._plain]
        addresses += [one._local_tensor.data_ptr() for one in self._sharded]
        if addresses != self._addresses:
            self._addresses = addresses
            self._look()
        if not self.readable:
            return b""
        num = len(addresses)
        moved = range(-step % STAYS, num, STAYS) if step == self._step + 1 else range(num)
        for at in moved:
            self._place(at, (step + at) // STAYS)
        self._step = step
        torch.cat(self._pieces, out=self._copy)
        return (self._words @ _WEIGHTS).tobytes()

    def _look(self) -> None:
        """Find the memory of each parameter."""
        parts = [*self._plain, *(one._local_tensor for one in self._sharded)]
        found = [_bytes_of(one) for one in parts]
        self.readable = sum(1 << at for at, one in enumerate(found) if one is not None)
        self._memory = [self._zeros if one is None else one for one in found]
        self._pieces, self._piece_of = [], []
        for memory in self._memory:
            self._piece_of.append(len(self._pieces))
            self._pieces.append(memory)
            if memory.numel() < SLICE_BYTES:
                self._pieces.append(self._zeros[memory.numel() :])
        self._step = -1

    def _place(self, at: int, turn: int) -> None:
        """Choose the slice of a parameter; it depends on name and step only."""
        memory = self._memory[at]
        span = max(1, memory.numel() - SLICE_BYTES)
        begin = (self._seeds[at] + turn * _GOLDEN) % span & -_ALIGN
        self._pieces[self._piece_of[at]] = memory[begin : begin + SLICE_BYTES]


def _has_bytes(parameter: torch.Tensor) -> bool:
    try:
        local_tensor(parameter, "")
    except ValueNotStorable:
        return False
    return True


def _bytes_of(local: torch.Tensor) -> torch.Tensor | None:
    """The memory of a CPU tensor, in its own order; None if there is none that is only its."""
    if not local.is_cpu or not local.data_ptr():
        return None
    plain = local.detach()
    if not torch.ops.aten.is_non_overlapping_and_dense(plain):
        return None
    start, size = plain.storage_offset() * plain.element_size(), plain.nbytes
    # Not by numpy(): that forbids the script to resize the storage.
    return _bytes(0).set_(plain.untyped_storage(), start, (size,), (1,))


def _bytes(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8, device="cpu")
