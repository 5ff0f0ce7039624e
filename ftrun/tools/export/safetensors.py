"""Writes whole tensors to files of the safetensors format, in a directory that transformers reads.

The public library writes a file from tensors that are all in memory. This writer needs only the
header beforehand, and several threads fill the file. The tests read the files with the library.

Source: the format of huggingface/safetensors (README, "Format"), the index and the file names of
huggingface/transformers. A tied tensor is stored once, and `__metadata__` maps its other names to
it, as the library's `save_model` does.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ftrun.cli.screen.text import listed
from ftrun.errors import CheckpointError
from ftrun.snapshot.layout import ITEM_BYTES, public_shape
from ftrun.tools.export.selection import ExportOutline, natural
from ftrun.tools.export.source import ExportSource
from ftrun.tools.export.tensor_writer import (
    TensorPlacement,
    create_files,
    dtype_out,
    write_at,
    write_tensors,
)
from ftrun.wire.messages.checkpoint import ExportJob

UNKNOWN = ("C128",)
"""Dtypes of a snapshot that the public format does not have; a reader refuses the whole file."""
INDEX_NAME = "model.safetensors.index.json"
_ALIGN_BYTES = 8
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """A tensor as it is written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One file: its header including the length, and the offset of each tensor in the file."""

    name: str
    header: bytes
    places: Mapping[str, int]
    num_bytes: int


def plan_files(
    tensors: Sequence[TensorDescription], *, limit_bytes: int, tied: Mapping[str, str]
) -> list[PlannedFile]:
    """Plans files of at most `limit_bytes` of data, except for single tensors that are larger.

    The result does not depend on the order of the tensors. `tied` maps other names to names of
    tensors.
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
    # Wide items first, so that each tensor is aligned to its items.
    ordered = sorted(group, key=lambda one: -ITEM_BYTES[one.dtype])
    names = {one.name for one in ordered}
    header = header_of(ordered, {other: name for other, name in tied.items() if name in names})
    places: dict[str, int] = {}
    end = len(header)
    for one in ordered:
        places[one.name] = end
        end += one.num_bytes
    return PlannedFile(file_name, header, places, end)


def header_of(tensors: Sequence[TensorDescription], tied: Mapping[str, str] | None = None) -> bytes:
    """The header with its length, of tensors that follow one another in this order."""
    described: dict[str, object] = {"__metadata__": {"format": "pt", **(tied or {})}}
    end = 0
    for one in tensors:
        offsets = [end, end + one.num_bytes]
        shape = public_shape(one.dtype, one.shape)
        described[one.name] = {"dtype": one.dtype, "shape": shape, "data_offsets": offsets}
        end += one.num_bytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN_BYTES)
    return len(text).to_bytes(8, "little") + text


def write_safetensors(
    folder: Path, outline: ExportOutline, world: ExportSource, order: ExportJob
) -> int:
    """Fills a new folder; returns the number of tensors."""
    names, tied = outline.flat()
    if not names:
        raise CheckpointError(
            "there is no tensor of a module to write; other state needs --format dcp or state_dict"
        )
    tensors = {name: world.whole(saved) for name, saved in names.items()}
    dtypes = {name: dtype_out(tensor, order.dtype) for name, tensor in tensors.items()}
    if unknown := [names[name] for name in names if dtypes[name] in UNKNOWN]:
        raise CheckpointError(
            f"{listed(unknown, _SHOWN)} cannot be written: safetensors files have no complex128. "
            "Leave it out with --only, or use --format dcp or state_dict"
        )
    described = [TensorDescription(name, dtypes[name], one.shape) for name, one in tensors.items()]
    files = plan_files(described, limit_bytes=order.file_bytes, tied=tied)
    for other, name in tied.items():
        world.note(f"{other} is tied to {name}; it is written once, under that name")
    folder.mkdir()
    create_files({folder / file.name: file.num_bytes for file in files})
    for file in files:
        with (folder / file.name).open("r+b", buffering=0) as opened:
            write_at(opened.fileno(), file.header, 0)
    placed = [
        TensorPlacement(tensors[name], folder / file.name, at, dtypes[name])
        for file in files
        for name, at in file.places.items()
    ]
    write_tensors(placed, world, num_writers=order.num_writers)
    (folder / INDEX_NAME).write_bytes(index_of(files))
    return len(names)
