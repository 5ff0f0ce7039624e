"""Which tensor lies at which bytes of a shard.

Runs in: worker (which makes layouts) and SMP (which reads them back). Pure.
Takes in: names, dtypes and shapes.
Gives:    a `Layout`: the safetensors header, the offset of each entry, and the pieces that are
          hashed one by one.

A shard's bytes are one safetensors file (header length, JSON header, data), so a checkpoint is
a copy of them and the public library opens a snapshot. Entries stand in a fixed order: small
ones that are copied at the step boundary, the large ones that are, then the small and the large
ones that are copied lazily, and last the packed plain values, whose capacity exceeds their use.
Small neighbours form one piece together, because a call per tensor costs more than its bytes;
large entries are cut into pieces that stay in the processor's cache between copy and digest.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from ftrun.errors import LayoutUnknown

PLAIN_NAME = "ftrun.plain"
"""The entry that holds everything that is not a tensor: u64 length, then msgpack."""

SMALL_BYTES = 1 << 18
"""Entries below this are packed."""

PIECE_BYTES = 1 << 18
"""Copied and hashed in one go: measured best between 128 and 512 KiB (2 MiB L2, 2026-11)."""

ALIGN_BYTES = 64
PAGE_BYTES = 4096

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1,
    "U16": 2, "U32": 4, "U64": 8, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "C64": 8,
}  # fmt: skip
"""Bytes of one item, by safetensors' name of the dtype."""


class When(Enum):
    """When an entry is copied."""

    BOUNDARY = "boundary"
    LAZY = "lazy"


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a shard. `offset` counts from the start of the data, behind the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    when: When
    offset: int = 0

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def is_small(self) -> bool:
        return self.num_bytes < SMALL_BYTES

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of bytes with a digest of its own; offsets count from the start of the data."""

    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Layout:
    """Entries in their final order, with offsets; see the module docstring."""

    entries: tuple[Entry, ...]
    plain_capacity: int
    metadata: dict[str, str] = field(default_factory=dict)

    @cached_property
    def data_bytes(self) -> int:
        last = self.entries[-1]
        return last.offset + last.num_bytes

    @cached_property
    def header(self) -> bytes:
        """Safetensors' header with its length in front, padded so that data start aligned."""
        described: dict[str, object] = {"__metadata__": {**self.metadata, "ftrun.when": self._when}}
        for entry in self.entries:
            described[entry.name] = {
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "data_offsets": [entry.offset, entry.offset + entry.num_bytes],
            }
        text = json.dumps(described, separators=(",", ":")).encode()
        padding = -(8 + len(text)) % PAGE_BYTES
        text += b" " * padding
        return len(text).to_bytes(8, "little") + text

    @property
    def image_bytes(self) -> int:
        """Length of the whole safetensors file."""
        return len(self.header) + self.data_bytes

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The data, cut into what is hashed at once; without gaps, in order of offset."""
        found: list[Piece] = []
        pack_start: int | None = None
        pack_when = When.BOUNDARY
        for entry in self.entries:
            joins = entry.is_small and entry.name != PLAIN_NAME
            if pack_start is not None and not (joins and entry.when is pack_when):
                found.append(Piece(pack_start, entry.offset - pack_start))
                pack_start = None
            if joins:
                if pack_start is None:
                    pack_start, pack_when = entry.offset, entry.when
            else:
                found.extend(cut(entry.offset, entry.num_bytes))
        return tuple(found)

    @property
    def _when(self) -> str:
        return "".join(entry.when.value[0] for entry in self.entries)


def cut(offset: int, num_bytes: int) -> list[Piece]:
    """Pieces of at most `PIECE_BYTES`."""
    return [
        Piece(offset + at, min(PIECE_BYTES, num_bytes - at))
        for at in range(0, num_bytes, PIECE_BYTES)
    ]


def make_layout(
    entries: Sequence[Entry], *, plain_bytes: int, metadata: dict[str, str] | None = None
) -> Layout:
    """Order the entries, give them offsets, and add room for the plain values.

    Args:
        entries: at least none; their offsets are ignored.
        plain_bytes: how many bytes of plain values there are now. Twice as many, and at least
            16 KiB, are set aside, because numbers grow as a run goes on.
        metadata: goes into the header as it is.
    """
    # Wide items first, so that no item of a pack lies across its own size.
    ordered = sorted(
        entries, key=lambda e: (e.when is When.LAZY, not e.is_small, -ITEM_BYTES[e.dtype])
    )
    capacity = max(1 << 14, 1 << (2 * plain_bytes - 1).bit_length())
    placed: list[Entry] = []
    offset = 0
    for entry in ordered:
        starts_pack = bool(placed) and entry.when is not placed[-1].when
        if (starts_pack or not entry.is_small) and offset % ALIGN_BYTES:
            # Safetensors wants no holes between entries, so the padding is an entry too.
            pad = -offset % ALIGN_BYTES
            placed.append(Entry(f"ftrun.pad.{offset}", "U8", (pad,), placed[-1].when, offset))
            offset += pad
        placed.append(Entry(entry.name, entry.dtype, entry.shape, entry.when, offset))
        offset += entry.num_bytes
    placed.append(Entry(PLAIN_NAME, "U8", (capacity,), When.BOUNDARY, offset))
    return Layout(tuple(placed), capacity, metadata or {})


def parse_header(image: memoryview) -> tuple[Layout, int]:
    """The layout of a shard, and where its data start.

    Raises:
        LayoutUnknown: these are not the bytes of a shard.
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
        entries = tuple(
            Entry(
                name,
                entry["dtype"],
                tuple(entry["shape"]),
                When.LAZY if mark == "l" else When.BOUNDARY,
                entry["data_offsets"][0],
            )
            for (name, entry), mark in zip(described.items(), when, strict=True)
        )
        layout = Layout(entries, entries[-1].num_bytes, metadata)
        fits = 8 + length + layout.data_bytes <= len(image)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise LayoutUnknown(f"the header of a shard is not readable: {error!r}") from error
    if not fits or entries[-1].name != PLAIN_NAME:
        raise LayoutUnknown("the header of a shard does not describe the bytes behind it")
    return layout, 8 + length
