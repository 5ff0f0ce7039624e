"""A checkpoint as one file that torch.load reads.

Runs in:  the process of ftrun.tools.export.__main__. Loads torch.
Takes in: the checkpoint, the tree of what is wanted.
Gives:    one file of `torch.save`; whether `torch.load` reads it with `weights_only=True`.

torch writes the file without the bytes of the tensors, but with room for them. They are filled in
afterwards, from several places at once, so no tensor is ever whole in memory. Which record of the
archive is which tensor is told by torch as well: it maps the file, and the order of the addresses
is that of the records.

Source: `torch.serialization.skip_data` (since 2.6, "prototype"; read in 2.13); the fields of a zip
archive (PKWARE APPNOTE 4.3.7 and 4.3.12), whose CRCs are set once the bytes are known.
"""

import mmap
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError  # noqa: TID251 - what torch.load refuses, nothing is read
from typing import Any

import torch

from ftrun.errors import InternalError
from ftrun.sharding.source_index import WholeTensor
from ftrun.tools.export.source import ExportSource
from ftrun.tools.export.tensor_writer import TensorPlacement, write_at, write_tensors
from ftrun.worker.state.tensors import DTYPES

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Of Linux; not every Python names it."""

_LOCAL_CRC_AT, _LOCAL_NAME_AT, _LOCAL_BYTES = 14, 26, 30
_CENTRAL_CRC_AT, _CENTRAL_NAME_AT, _CENTRAL_BYTES = 16, 28, 46


class PlaceholderTensors:
    """Tensors of the right kind whose memory is never touched, one for each name."""

    def __init__(self) -> None:
        self._made: dict[str, torch.Tensor] = {}
        self.meant: dict[int, tuple[WholeTensor, str]] = {}
        """What is to be put where, by id of the tensor, and in which dtype."""

    def make(self, name: str, tensor: WholeTensor, dtype: str) -> torch.Tensor:
        """What stands for a tensor that is written in this dtype."""
        if name not in self._made:
            kind = DTYPES[dtype]
            made = torch.empty(0, dtype=kind)
            if 0 not in tensor.shape:
                num_bytes = torch.Size(tensor.shape).numel() * kind.itemsize
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
                made = torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=kind)
            made = made.view(tensor.shape)
            self._made[name] = made
            self.meant[id(made)] = (tensor, dtype)
        return self._made[name]


@dataclass(frozen=True, slots=True)
class _Record:
    """The bytes of one tensor in the archive.

    Args:
        at: of the first byte.
        num_bytes: of the tensor.
        crcs_at: where the archive has its CRC-32, twice.
    """

    at: int
    num_bytes: int
    crcs_at: tuple[int, int]


def write_state_dict(
    path: Path,
    tree: dict[str, Any],
    rooms: PlaceholderTensors,
    world: ExportSource,
    *,
    num_writers: int,
) -> None:
    """Write a new file.

    Args:
        path: of the file.
        tree: with tensors that `rooms` has made.
        rooms: what they stand for.
        world: the checkpoint.
        num_writers: threads.

    Raises:
        CheckpointError: a tensor is damaged.
        OSError: there is no room.
    """
    _write_rooms(path, tree)
    records = _by_room(_tensors_in(tree), _tensors_in(_loaded(path, world)), _records(path))
    placed = []
    for room, record in records.items():
        tensor, dtype = rooms.meant[room]
        placed.append(TensorPlacement(tensor, path, record.at, dtype))
    crcs = write_tensors(placed, world, num_writers=num_writers, wants_crc=True)
    with path.open("r+b", buffering=0) as file:
        for record, crc in zip(records.values(), crcs, strict=True):
            for at in record.crcs_at:
                write_at(file.fileno(), struct.pack("<I", crc), at)


def _write_rooms(path: Path, tree: dict[str, Any]) -> None:
    """All of the file but the bytes of the tensors."""
    try:
        with torch.serialization.skip_data():
            torch.save(tree, path)
    except RuntimeError as error:
        # torch's writer in C++ does not say what the file system has said.
        raise OSError(0, f"torch.save: {str(error).splitlines()[0]}", str(path)) from error


def _loaded(path: Path, world: ExportSource) -> object:
    """The file as torch reads it; noted where it does so only without `weights_only`."""
    try:
        return torch.load(path, mmap=True, weights_only=True)
    except UnpicklingError as error:
        reason = str(error).partition("Unsupported ")[2].partition("\n")[0] or "a Python object"
        world.tell(f"torch.load needs weights_only=False to read it: {reason}")
        return torch.load(path, mmap=True, weights_only=False)


def _by_room(
    rooms: Iterator[torch.Tensor], loaded: Iterator[torch.Tensor], records: list[_Record]
) -> dict[int, _Record]:
    """The record of each tensor, by its id.

    Args:
        rooms: what was saved.
        loaded: the same in the same order, mapped, so that addresses are in the file's order.
        records: in the file's order.
    """
    addresses: dict[int, tuple[int, int]] = {}
    for room, found in zip(rooms, loaded, strict=True):
        if room.numel():
            addresses[id(room)] = (found.data_ptr(), found.nbytes)
    order = sorted(addresses, key=lambda room: addresses[room])
    sizes = [addresses[room][1] for room in order]
    if sizes != [record.num_bytes for record in records]:
        raise InternalError("the archive that torch.save has made is not one with room for tensors")
    return dict(zip(order, records, strict=True))


def _records(path: Path) -> list[_Record]:
    """The records of all tensors that have items, in the file's order."""
    found = []
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        central_at = archive.start_dir
        for info in archive.infolist():
            crcs_at = (info.header_offset + _LOCAL_CRC_AT, central_at + _CENTRAL_CRC_AT)
            data_at = info.header_offset + _LOCAL_BYTES
            data_at += sum(_numbers(file, info.header_offset + _LOCAL_NAME_AT, 2))
            central_at += _CENTRAL_BYTES + sum(_numbers(file, central_at + _CENTRAL_NAME_AT, 3))
            if info.filename.split("/")[1:2] == ["data"] and info.file_size:
                found.append(_Record(data_at, info.file_size, crcs_at))
    return sorted(found, key=lambda record: record.at)


def _numbers(file: Any, at: int, count: int) -> tuple[int, ...]:
    """Numbers of 16 bits."""
    file.seek(at)
    return struct.unpack(f"<{count}H", file.read(2 * count))


def _tensors_in(tree: object) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors_in(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _tensors_in(value)
