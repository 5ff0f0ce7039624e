"""The position of each tensor in the image of a shard.

A `Layout` holds the safetensors header, the offset of each entry, and the pieces that are hashed
one by one.

The image is one safetensors file (header length, JSON header, data). A checkpoint is therefore a
copy of it, and the public library opens a snapshot. Entries have a fixed order: small and then
large entries that are copied at the step boundary, then small and large entries that are copied
lazily. The packed plain values are last; their capacity exceeds their use.

Neighbouring small entries form one piece, because a call per tensor costs more than its bytes.
Large entries are cut into pieces that stay in the processor's cache between copy and digest.
"""

import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

from ftrun.errors import LayoutUnknown
from ftrun.snapshot.boxes import Box, Shape, TensorPart, parse_part, whole

PLAIN_NAME = "ftrun.plain"
"""The entry that holds everything that is not a tensor: u64 length, then msgpack."""

SMALL_BYTES = 1 << 18
"""Entries smaller than this are packed into shared pieces."""

PIECE_BYTES = 1 << 18
"""Bytes copied and hashed at once: 128 to 512 KiB measured best (2 MiB L2 cache, 2026-11)."""

DEVICE_PIECE_BYTES = 1 << 22
"""The same for state on devices. Each piece costs two calls that release the interpreter lock, and
smaller pieces slow a training thread of small operations."""

PLAIN_BYTES = 1 << 15
"""Least capacity for plain values; `PLAIN_SHARE` of the tensors' bytes if that is more, up to
`PIECE_BYTES`. Values that outgrow their capacity need a new arena."""

PLAIN_SHARE = 1 / 1024
_PLAIN_GROWTH = 4

ALIGN_BYTES = 64
PAGE_BYTES = 4096

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1,
    "U16": 2, "U32": 4, "U64": 8, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "C64": 8,
    "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1, "C128": 16, "F4": 1,
}  # fmt: skip
"""Bytes of one item, by the safetensors name of the dtype. An item of F4 holds two values, as in
torch; only the header counts single values, as safetensors does (`public_shape`)."""


def public_shape(dtype: str, shape: Sequence[int]) -> list[int]:
    """A shape as a safetensors header has it; one of F4 has at least one dimension."""
    return [*shape[:-1], 2 * shape[-1]] if dtype == "F4" else list(shape)


def _own_shape(dtype: str, public: Sequence[int]) -> tuple[int, ...]:
    if dtype != "F4":
        return tuple(public)
    pairs, rest = divmod(public[-1], 2)
    if rest:
        raise ValueError(f"rows of {public[-1]} values of F4, which are no whole bytes")
    return (*public[:-1], pairs)


class CopyTiming(Enum):
    """When an entry is copied."""

    BOUNDARY = "boundary"
    LAZY = "lazy"


@dataclass(frozen=True, slots=True)
class LayoutEntry:
    """One tensor of a shard. `offset` counts from the start of the data, after the header.

    `part` is the position in a whole tensor; without it the entry is a whole tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    when: CopyTiming
    offset: int = 0
    part: TensorPart | None = None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def is_small(self) -> bool:
        return self.num_bytes < SMALL_BYTES

    @property
    def whole_shape(self) -> Shape:
        return self.shape if self.part is None else self.part.shape

    @property
    def box(self) -> Box | None:
        """Its box in the whole tensor; None if it is not a single box of it."""
        if self.part is None:
            return whole(self.shape)
        return None if self.part.offsets is None else Box(self.part.offsets, self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of bytes with a digest of its own; `offset` counts from the start of the data."""

    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Layout:
    """Entries in their final order, with offsets; see the module docstring.

    Args:
        knows_parts: the header states which part of which tensor each entry is; False for ftrun
            before 0.2.
        piece_bytes: largest piece of a large entry.
    """

    entries: tuple[LayoutEntry, ...]
    plain_capacity: int
    metadata: dict[str, str] = field(default_factory=dict)
    knows_parts: bool = True
    piece_bytes: int = PIECE_BYTES

    @cached_property
    def data_bytes(self) -> int:
        last = self.entries[-1]
        return last.offset + last.num_bytes

    @cached_property
    def header(self) -> bytes:
        """The safetensors header after its length, padded so that the data start aligned."""
        ours = {"ftrun.when": "".join(entry.when.value[0] for entry in self.entries)}
        if self.knows_parts:
            # About ten bytes for each part, one for each other entry, none after the last part.
            texts = ("" if entry.part is None else str(entry.part) for entry in self.entries)
            ours["ftrun.parts"] = ";".join(texts).rstrip(";")
        if self.piece_bytes != PIECE_BYTES:
            ours["ftrun.piece_bytes"] = str(self.piece_bytes)
        described: dict[str, object] = {"__metadata__": {**self.metadata, **ours}}
        for entry in self.entries:
            described[entry.name] = {
                "dtype": entry.dtype,
                "shape": public_shape(entry.dtype, entry.shape),
                "data_offsets": [entry.offset, entry.offset + entry.num_bytes],
            }
        text = json.dumps(described, separators=(",", ":")).encode()
        padding = -(8 + len(text)) % PAGE_BYTES
        text += b" " * padding
        return len(text).to_bytes(8, "little") + text

    @property
    def image_bytes(self) -> int:
        return len(self.header) + self.data_bytes

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The data in pieces that are hashed at once; without gaps, in order of offset."""
        found: list[Piece] = []
        pack_start: int | None = None
        pack_when = CopyTiming.BOUNDARY
        for entry in self.entries:
            joins = entry.is_small and entry.name != PLAIN_NAME
            if pack_start is not None and not (joins and entry.when is pack_when):
                found.append(Piece(pack_start, entry.offset - pack_start))
                pack_start = None
            if joins:
                if pack_start is None:
                    pack_start, pack_when = entry.offset, entry.when
            else:
                found.extend(cut(entry.offset, entry.num_bytes, self.piece_bytes))
        return tuple(found)

    def pieces_of(self, entry: LayoutEntry) -> range:
        return self.pieces_between(entry.offset, entry.offset + entry.num_bytes)

    def pieces_between(self, start: int, end: int) -> range:
        # An empty piece has the offset of the next piece, and the search finds the next one.
        return range(bisect_right(self._starts, start) - 1, bisect_left(self._starts, end))

    @cached_property
    def _starts(self) -> list[int]:
        return [piece.offset for piece in self.pieces]


def cut(offset: int, num_bytes: int, piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    return [
        Piece(offset + at, min(piece_bytes, num_bytes - at))
        for at in range(0, num_bytes, piece_bytes)
    ]


def make_layout(
    entries: Sequence[LayoutEntry],
    *,
    plain_bytes: int,
    metadata: dict[str, str] | None = None,
    plain_capacity: int = 0,
    piece_bytes: int = PIECE_BYTES,
) -> Layout:
    """Orders the entries, assigns their offsets, and adds capacity for the plain values.

    Args:
        plain_bytes: present size of the plain values. At least four times that is reserved,
            because they grow during a run.
        plain_capacity: capacity for plain values in bytes; 0: chosen here.
        piece_bytes: largest piece of a large entry.
    """
    # Items of wide dtypes first, so that every item in a pack is aligned to its own size.
    ordered = sorted(
        entries, key=lambda e: (e.when is CopyTiming.LAZY, not e.is_small, -ITEM_BYTES[e.dtype])
    )
    tensor_bytes = sum(entry.num_bytes for entry in entries)
    room = max(PLAIN_BYTES, min(int(tensor_bytes * PLAIN_SHARE), PIECE_BYTES))
    room = max(room, _PLAIN_GROWTH * plain_bytes)
    capacity = plain_capacity or 1 << (room - 1).bit_length()
    placed: list[LayoutEntry] = []
    offset = 0
    for entry in ordered:
        starts_pack = bool(placed) and entry.when is not placed[-1].when
        if (starts_pack or not entry.is_small) and offset % ALIGN_BYTES:
            # Safetensors allows no holes between entries, so the padding is an entry too.
            pad = -offset % ALIGN_BYTES
            placed.append(LayoutEntry(f"ftrun.pad.{offset}", "U8", (pad,), placed[-1].when, offset))
            offset += pad
        placed.append(replace(entry, offset=offset))
        offset += entry.num_bytes
    placed.append(LayoutEntry(PLAIN_NAME, "U8", (capacity,), CopyTiming.BOUNDARY, offset))
    return Layout(tuple(placed), capacity, metadata or {}, piece_bytes=piece_bytes)


def parse_header(image: memoryview, *, image_bytes: int | None = None) -> tuple[Layout, int]:
    """The layout of a shard, and the offset of its data.

    Raises LayoutUnknown if these are not the bytes of a shard. If `image` is only the header,
    `image_bytes` is the size of the whole shard.
    """
    if len(image) < 8:
        raise LayoutUnknown(f"{len(image)} bytes are too few for a shard")
    length = int.from_bytes(image[:8], "little")
    if not 2 <= length <= len(image) - 8:
        raise LayoutUnknown(f"a header of {length} bytes does not fit a shard of {len(image)}")
    try:
        described = json.loads(bytes(image[8 : 8 + length]))
        metadata = described.pop("__metadata__")
        when = metadata.pop("ftrun.when")
        reported = metadata.pop("ftrun.parts", None)
        parts = _parse_parts(reported or "", len(when))
        piece_bytes = _piece_bytes(metadata.pop("ftrun.piece_bytes", PIECE_BYTES))
        entries = tuple(
            LayoutEntry(
                name,
                entry["dtype"],
                _own_shape(entry["dtype"], entry["shape"]),
                CopyTiming.LAZY if mark == "l" else CopyTiming.BOUNDARY,
                entry["data_offsets"][0],
                part,
            )
            for (name, entry), mark, part in zip(described.items(), when, parts, strict=True)
        )
        layout = Layout(entries, entries[-1].num_bytes, metadata, reported is not None, piece_bytes)
        _check_parts(entries)
        fits = 8 + length + layout.data_bytes <= (image_bytes or len(image))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise LayoutUnknown(f"cannot read the header of a shard: {error!r}") from error
    if not fits or entries[-1].name != PLAIN_NAME:
        raise LayoutUnknown("the header of a shard does not describe the bytes behind it")
    return layout, 8 + length


def _parse_parts(text: str, count: int) -> list[TensorPart | None]:
    found = [parse_part(one) if one else None for one in text.split(";")]
    return found + [None] * (count - len(found))


def _piece_bytes(text: str | int) -> int:
    found = int(text)
    if found < 1:
        raise ValueError(f"pieces of {found} bytes")
    return found


def _check_parts(entries: Sequence[LayoutEntry]) -> None:
    for entry in entries:
        if entry.part is None:
            continue
        offsets = entry.part.offsets or (0,) * len(entry.shape)
        reach = (at + size for at, size in zip(offsets, entry.shape, strict=True))
        inside = (end <= size for end, size in zip(reach, entry.part.shape, strict=True))
        if not all(inside) or min(offsets, default=0) < 0:
            raise ValueError(
                f"{entry.name} of {list(entry.shape)} does not fit the part {entry.part}"
            )
