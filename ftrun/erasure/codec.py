"""Computes parity from data blocks, and lost blocks from the remaining ones; chooses the library.

Runs in:  the SMP, on any of its threads. Pure.
Takes in: k data blocks and m parity blocks of a stripe, in place, in the order of the stripe: index
          0 to k-1 are data, k to k+m-1 parity.
Gives:    parity; lost blocks of either kind from any k of the k+m.
Source:   Reed-Solomon over GF(2^8) with the polynomial 0x11d and a Cauchy matrix: the factor of
          data block i in parity block j is 1 / ((k + j) xor i). Any k rows of it are independent.
          The usual Vandermonde matrix of the same library does not guarantee that for m > 4.

Rule 1: a codec does not check content. A flipped bit in an input block causes flipped bits in the
        rebuilt ones; see fragments.py and rebuild.py.
Rule 2: lengths, read-only targets and overlaps are checked before any library call.
Rule 3: both codecs give the same parity, byte for byte, so nodes may use different ones.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from ftrun.erasure.pinned_buffers import Buffer as Buffer
from ftrun.errors import InternalError, NotSupportedHere

MAX_DATA, MAX_PARITY = 32, 16
"""pyeclib allows 32 of each; a group never needs more than 16 parity blocks."""


class Codec(Protocol):
    """An erasure code for one (k, m). Any method may run in several threads at once."""

    k: int
    m: int
    name: str

    def encode(self, data: Sequence[Buffer], parity: Sequence[Buffer]) -> None:
        """Writes all parity blocks of a stripe.

        Args:
            data: k blocks of one length, which are read in place.
            parity: m writable blocks of the same length; their content is overwritten.
        """
        ...

    def update(
        self, position: int, data: Buffer, parity_index: int, parity: Buffer, *, first: bool
    ) -> None:
        """Adds one data block to one parity block.

        The blocks of a stripe may be added in any order. A block that is never added counts as
        zeros, and so do the missing bytes of a block that is shorter than the parity.

        Args:
            position: of the data block in its stripe, 0 <= position < k.
            data: at most as long as `parity`.
            parity_index: 0 <= parity_index < m.
            parity: writable.
            first: this is the first block of its stripe, so the old content is overwritten.
        """
        ...

    def rebuild(self, have: Mapping[int, Buffer], want: Mapping[int, Buffer]) -> None:
        """Writes the wanted blocks of a stripe, both data and parity.

        Args:
            have: at least k blocks of one length, by index; k of them are used.
            want: writable blocks of the same length, by index; none of those in `have`.
        """
        ...


def choose_codec(k: int, m: int) -> Codec:
    """Returns the ISA-L codec, which works in place, or else pyeclib's, which copies.

    Raises:
        NotSupportedHere: neither library can be loaded.
    """
    from ftrun.erasure.isal import IsalCodec
    from ftrun.erasure.pyeclib_codec import PyeclibCodec

    try:
        return IsalCodec(k, m)
    except NotSupportedHere as first:
        try:
            return PyeclibCodec(k, m)
        except NotSupportedHere as second:
            raise NotSupportedHere(
                f"no erasure code can be computed here: {first}; {second}. Install pyeclib 1.8 "
                "or newer for this Python, or give --erasure none"
            ) from second


def check_shape(k: int, m: int) -> None:
    if not (1 <= k <= MAX_DATA and 1 <= m <= MAX_PARITY):
        raise InternalError(
            f"{k} data and {m} parity blocks; 1 to {MAX_DATA} and 1 to {MAX_PARITY} can be"
        )


def check_counts(codec: Codec, data: Sequence[Buffer], parity: Sequence[Buffer]) -> None:
    if (len(data), len(parity)) != (codec.k, codec.m):
        raise InternalError(
            f"{len(data)} data and {len(parity)} parity blocks for a stripe of "
            f"{codec.k} and {codec.m}"
        )


def check_place(codec: Codec, position: int, parity_index: int) -> None:
    if not (0 <= position < codec.k and 0 <= parity_index < codec.m):
        raise InternalError(
            f"data block {position} in parity block {parity_index}, in a stripe of "
            f"{codec.k} and {codec.m}"
        )


def sources_of(codec: Codec, have: Mapping[int, object], want: Mapping[int, object]) -> list[int]:
    """The k indexes to rebuild from. Data blocks come first, because their rows cost the least."""
    places = range(codec.k + codec.m)
    wrong = {*have.keys() & want.keys(), *(i for i in (*have, *want) if i not in places)}
    if wrong:
        raise InternalError(
            f"blocks {sorted(wrong)} are both there and wanted, or not in a stripe of "
            f"{codec.k} and {codec.m}"
        )
    if len(have) < codec.k:
        raise InternalError(f"{len(have)} blocks of a stripe are there and {codec.k} are needed")
    return sorted(have)[: codec.k]
