"""Writes a checkpoint as one file that torch.load reads.

torch writes the file with space for the tensors but without their bytes. Several threads fill them
in, so that no whole tensor is in memory. torch.load also shows which record of the archive belongs
to which tensor: it maps the file, and the order of the addresses is that of the records.

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
"""Linux has it; some Python versions do not name it."""

_LOCAL_CRC_AT, _LOCAL_NAME_AT, _LOCAL_BYTES = 14, 26, 30
_CENTRAL_CRC_AT, _CENTRAL_NAME_AT, _CENTRAL_BYTES = 16, 28, 46


class PlaceholderTensors:
    """Tensors with the right shapes and dtypes whose memory is never touched, one for each name."""

    def __init__(self) -> None:
        self._made: dict[str, torch.Tensor] = {}
        self.meant: dict[int, tuple[WholeTensor, str]] = {}
        """Source tensor and dtype by the id of the placeholder."""

    def make(self, name: str, tensor: WholeTensor, dtype: str) -> torch.Tensor:
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
    """Offset and size of a tensor in the archive, and the two offsets of its CRC-32."""

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
    """Writes a new file; the tensors of the tree are placeholders of `rooms`."""
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
    """Writes the file without the bytes of the tensors."""
    try:
        with torch.serialization.skip_data():
            torch.save(tree, path)
    except RuntimeError as error:
        # torch's writer in C++ hides the error of the file system.
        raise OSError(0, f"torch.save: {str(error).splitlines()[0]}", str(path)) from error


def _loaded(path: Path, world: ExportSource) -> object:
    """Loads the file with torch; adds a note if that needs `weights_only=False`."""
    try:
        return torch.load(path, mmap=True, weights_only=True)
    except UnpicklingError as error:
        reason = str(error).partition("Unsupported ")[2].partition("\n")[0] or "a Python object"
        world.note(f"torch.load needs weights_only=False to read it: {reason}")
        return torch.load(path, mmap=True, weights_only=False)


def _by_room(
    rooms: Iterator[torch.Tensor], loaded: Iterator[torch.Tensor], records: list[_Record]
) -> dict[int, _Record]:
    """Returns the record of each placeholder, by its id.

    `loaded` are the same tensors in the same order, mapped, so that addresses are in the order of
    the file, as `records` are.
    """
    addresses: dict[int, tuple[int, int]] = {}
    for room, found in zip(rooms, loaded, strict=True):
        if room.numel():
            addresses[id(room)] = (found.data_ptr(), found.nbytes)
    order = sorted(addresses, key=lambda room: addresses[room])
    sizes = [addresses[room][1] for room in order]
    if sizes != [record.num_bytes for record in records]:
        raise InternalError("the archive of torch.save has no space for the tensors")
    return dict(zip(order, records, strict=True))


def _records(path: Path) -> list[_Record]:
    """Returns the records of all tensors that have items, in the order of the file."""
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
    """Reads numbers of 16 bits."""
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
