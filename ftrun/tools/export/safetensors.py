"""Whole tensors in files of the safetensors format: which tensor lies at which bytes of which file.

Runs in:  worker-side process of `ftrun snapshots export`. Pure.
Takes in: names, dtypes, shapes; how large a file may be; the other names of tied tensors.
Gives:    `PlannedFile`s with their headers, and the index that names the file of each tensor.

The public library writes a file from tensors that are all in memory at once. Here the header is
all that is needed beforehand, so a file of any size is filled from several places at a time; the
format is eight bytes of length, a JSON header, and the data. The tests read it with the library.

Source: the format of huggingface/safetensors (README, "Format"), the index and the file names of
huggingface/transformers; a tied tensor is there once, and `__metadata__` says under its other
names where, as the library's own `save_model` has it.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ftrun.snapshot.layout import ITEM_BYTES
from ftrun.tools.export.selection import natural

INDEX_NAME = "model.safetensors.index.json"
_ALIGN_BYTES = 8


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """A tensor as it goes out."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One file.

    Args:
        name: of the file.
        header: the bytes in front of the data, their length included.
        places: names of the tensors, and where in the file each begins.
        num_bytes: of the whole file.
    """

    name: str
    header: bytes
    places: Mapping[str, int]
    num_bytes: int


def plan_files(
    tensors: Sequence[TensorDescription], *, limit_bytes: int, tied: Mapping[str, str]
) -> list[PlannedFile]:
    """Files of at most so many bytes of data, but for single tensors that are larger.

    Args:
        tensors: in whatever order; the result is the same.
        limit_bytes: at least 1.
        tied: other names, with the names that are among the tensors.
    """
    groups: list[list[TensorDescription]] = []
    room = 0
    for one in sorted(tensors, key=lambda tensor: natural(tensor.name)):
        if not groups or one.num_bytes > room:
            groups.append([])
            room = limit_bytes
        groups[-1].append(one)
        room -= one.num_bytes
    return [
        _planned(f"model-{at:05d}-of-{len(groups):05d}.safetensors", group, tied)
        for at, group in enumerate(groups, start=1)
    ]


def index_of(files: Sequence[PlannedFile]) -> bytes:
    """The file that names the file of each tensor."""
    weight_map = {name: file.name for file in files for name in file.places}
    total = sum(file.num_bytes - len(file.header) for file in files)
    found = {
        "metadata": {"total_size": total},
        "weight_map": {name: weight_map[name] for name in sorted(weight_map, key=natural)},
    }
    return json.dumps(found, indent=2).encode() + b"\n"


def _planned(
    file_name: str, group: Sequence[TensorDescription], tied: Mapping[str, str]
) -> PlannedFile:
    # Wide items first, so that each tensor is aligned to its own items.
    ordered = sorted(group, key=lambda one: -ITEM_BYTES[one.dtype])
    names = {one.name for one in ordered}
    others = {other: name for other, name in tied.items() if name in names}
    described: dict[str, object] = {"__metadata__": {"format": "pt", **others}}
    offsets: dict[str, int] = {}
    end = 0
    for one in ordered:
        offsets[one.name] = end
        end += one.num_bytes
        described[one.name] = {
            "dtype": one.dtype,
            "shape": list(one.shape),
            "data_offsets": [offsets[one.name], end],
        }
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN_BYTES)
    header = len(text).to_bytes(8, "little") + text
    places = {name: len(header) + at for name, at in offsets.items()}
    return PlannedFile(file_name, header, places, len(header) + end)
