"""The header of a block that is sent or stored, and the check that a block is the requested one.

Source:   the erasure code library detects neither flipped bits nor duplicates nor a mix of blocks
          of two versions, with or without its own checksums (tried, 2026-11). Each fragment
          therefore states what it belongs to and what its bytes are.

Rule 1: only fragments that have passed `check` are decoded: run, version, group, stripe, place,
        length, digest of the header, digest of the bytes.
Rule 2: a fragment counts for the place that its sender has in the stripe, and its header must
        agree. No node can fill the place of another.
"""

import struct
from dataclasses import dataclass

import xxhash

from ftrun.erasure.codec import Buffer
from ftrun.erasure.pinned_buffers import MAX_BLOCK_BYTES
from ftrun.errors import FragmentRefused
from ftrun.ids import Generation, RunId, Version, version

_MAGIC = 0x41524654_46303031
_FIELDS = struct.Struct("<QQqqqQQIIQ")
_CHECK = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECK.size
"""Length of a packed header: 80."""


@dataclass(frozen=True, slots=True)
class StripeId:
    """Identifies one stripe of one snapshot. Fragments of different stripes are never combined."""

    run: int
    version: Version
    group: int
    stripe: int

    def __str__(self) -> str:
        return f"stripe {self.stripe} of {self.version}"


@dataclass(frozen=True, slots=True)
class BlockDigest:
    """Length and xxh3 digest of the bytes of a block."""

    num_bytes: int
    digest: int


@dataclass(frozen=True, slots=True)
class FragmentHeader:
    """The header of a fragment.

    Attributes:
        generation: generation that made the fragment; later than the version's if a restored
            version was protected again.
        index: its place in the stripe: 0 to k-1 data, k to k+m-1 parity.
        block: length and digest of the bytes. Data may be shorter than a whole block; the missing
            bytes count as zeros.
    """

    of: StripeId
    generation: Generation
    index: int
    block: BlockDigest


@dataclass(frozen=True, slots=True)
class Fragment:
    """A received block with its header, both unchecked.

    `index` is the place of the sending node in the stripe, by the layout.
    """

    sender: str
    index: int
    header: Buffer
    payload: Buffer

    def name(self, of: StripeId) -> str:
        return f"the fragment of {self.sender} for {of} (place {self.index})"


def run_digest(run_id: RunId) -> int:
    return xxhash.xxh3_64_intdigest(run_id.encode())


def block_digest(payload: Buffer) -> BlockDigest:
    return BlockDigest(memoryview(payload).nbytes, xxhash.xxh3_64_intdigest(payload))


def pack(header: FragmentHeader) -> bytes:
    of = header.of
    fields = _FIELDS.pack(
        _MAGIC,
        of.run,
        header.generation,
        of.version.generation,
        of.version.step,
        of.group,
        of.stripe,
        header.index,
        header.block.num_bytes,
        header.block.digest,
    )
    return fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))


def unpack(raw: Buffer, *, what: str = "a fragment") -> FragmentHeader:
    """Raises FragmentRefused if the header is truncated, zeroed, changed, or of another format."""
    view = memoryview(raw).cast("B")
    if len(view) != HEADER_BYTES:
        raise FragmentRefused(
            what=what, reason=f"a header of {len(view)} bytes, not {HEADER_BYTES}"
        )
    fields = view[: _FIELDS.size]
    magic, *numbers = _FIELDS.unpack(fields)
    run, made_in, generation, step, group, stripe, index, num_bytes, digest = numbers
    if magic != _MAGIC:
        reason = "its header is all zeros" if not any(view) else "its header is not of this format"
        raise FragmentRefused(what=what, reason=reason)
    if _CHECK.unpack(view[_FIELDS.size :]) != (xxhash.xxh3_64_intdigest(fields),):
        raise FragmentRefused(what=what, reason="the digest of its header does not match")
    of = StripeId(run, version(generation, step), group, stripe)
    return FragmentHeader(of, Generation(made_in), index, BlockDigest(num_bytes, digest))


def check(fragment: Fragment, of: StripeId, *, generation: Generation) -> FragmentHeader:
    """Returns the header of a fragment; raises FragmentRefused if a check has failed.

    `generation` must have made it.
    """
    what = fragment.name(of)
    header = unpack(fragment.header, what=what)
    reason = _place_difference(header, fragment.index, of, generation)
    # Hashing the bytes costs the most, so it comes last.
    if reason := reason or _bytes_difference(header.block, fragment.payload):
        raise FragmentRefused(what=what, reason=reason)
    return header


def _place_difference(
    header: FragmentHeader, index: int, of: StripeId, generation: Generation
) -> str:
    mine = header.of
    if mine.run != of.run:
        return "it is of another run"
    if header.generation != generation:
        return f"it was made in generation {header.generation}, not {generation}"
    if mine.version != of.version:
        return f"it is of {mine.version}"
    if mine.group != of.group:
        return "it is of another group of nodes"
    if mine.stripe != of.stripe:
        return f"it is of stripe {mine.stripe}"
    return "" if header.index == index else f"it is of place {header.index}"


def _bytes_difference(block: BlockDigest, payload: Buffer) -> str:
    num_bytes = memoryview(payload).nbytes
    if num_bytes != block.num_bytes or not 0 < num_bytes <= MAX_BLOCK_BYTES:
        return f"it has {num_bytes} bytes, and its header says {block.num_bytes}"
    is_right = xxhash.xxh3_64_intdigest(payload) == block.digest
    return "" if is_right else "the digest of its bytes does not match"
