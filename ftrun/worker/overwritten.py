"""What the script overwrites between a restore and its first step.

Runs in:  worker, training thread; made right after a restore.
Takes in: the restored tensors: identity, version counter, address, a few elements.
Gives:    the names of those that are other objects or hold other values now.

Moving a module to a device is no change: it leaves the version counter, and the new memory lies on
another device. Tensors are not kept alive by this.
"""

import weakref
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ftrun.snapshot.layout import When
from ftrun.worker.state_tree import Source, StateTree, address_of
from ftrun.worker.tensors import version_of

_SAMPLED = 16


@dataclass(frozen=True, slots=True)
class _Mark:
    original: "weakref.ref[torch.Tensor]"
    version: int
    address: int
    place: tuple[torch.device, torch.dtype]
    sample: torch.Tensor
    is_owned: bool


class Overwritten(NamedTuple):
    """Names of restored tensors."""

    touched: list[str]
    """Replaced or written to; the values may be the same."""
    changed: list[str]
    """Those among them whose values differ."""


class RestoredMarks:
    """What a restore has put in place."""

    def __init__(self, tree: StateTree) -> None:
        self._tree = tree
        self._marks = {
            source.name: _Mark(
                weakref.ref(original),
                version_of(original),
                address_of(original),
                _place(original),
                _sample(source.tensor),
                source.when is When.LAZY,
            )
            for source, original in self._now()
        }

    def compare(self, *, owned_only: bool = False) -> Overwritten:
        """What is not as it was.

        Args:
            owned_only: look only at what optimizers own, because a forward changes buffers.
        """
        now = {source.name: (source.tensor, original) for source, original in self._now()}
        found = Overwritten([], [])
        for name, mark in self._marks.items():
            if owned_only and not mark.is_owned:
                continue
            if name not in now:
                found.touched.append(name)
                found.changed.append(name)
                continue
            tensor, original = now[name]
            if _is_touched(mark, original):
                found.touched.append(name)
                if not torch.equal(_sample(tensor).cpu(), mark.sample.cpu()):
                    found.changed.append(name)
        return found

    @property
    def num_owned(self) -> int:
        return sum(mark.is_owned for mark in self._marks.values())

    def _now(self) -> "zip[tuple[Source, torch.Tensor]]":
        lasting = self._tree.lasting()
        return zip(lasting.sources, lasting.originals, strict=True)


def _is_touched(mark: _Mark, now: torch.Tensor) -> bool:
    if mark.original() is not now or version_of(now) != mark.version:
        return True
    return address_of(now) != mark.address and _place(now) == mark.place


def _place(tensor: torch.Tensor) -> tuple[torch.device, torch.dtype]:
    return tensor.device, tensor.dtype


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """A few elements, as a copy on the same device: this waits for no device."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLED)].clone()
