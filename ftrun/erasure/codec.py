"""What turns data blocks into parity and back, and which library does it.

Runs in:  the SMP, on any of its threads. Pure.
Takes in: k data blocks and m parity blocks of a stripe, in place, in the order of the stripe:
          index 0 to k-1 are data, k to k+m-1 parity.
Gives:    parity; lost blocks of either kind from any k of the k+m.
Source:   Reed-Solomon over GF(2^8) with the polynomial 0x11d and a Cauchy matrix: the factor of
          data block i in parity block j is 1 / ((k + j) xor i). Any k rows of it are independent,
          which the usual Vandermonde matrix of the same library does not promise for m > 4.

Rule 1: bytes are not checked here. A flipped bit among the blocks that are there comes out as
        flipped bits in the rebuilt ones; see fragments.py and rebuild.py.
Rule 2: lengths, read-only targets and overlaps are checked, before any library is called.
Rule 3: both codecs give the same parity, byte for byte, so nodes may differ in which they use.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from ftrun.erasure.pinned_buffers import Buffer as Buffer
from ftrun.errors import InternalError, NotSupportedHere

MAX_DATA, MAX_PARITY = 32, 16
"""pyeclib allows 32 of each; half of that parity is more than any group of ours can use."""


class Codec(Protocol):
    """Parity and back, for one (k, m). Every method may be called from several threads at once."""

    k: int
    m: int
    name: str

    def encode(self, data: Sequence[Buffer], parity: Sequence[Buffer]) -> None:
        """Write all parity blocks of a stripe.

        Args:
            data: k blocks of one length, which are read in place.
            parity: m writable blocks of the same length; what they held is lost.

        Raises:
            InternalError: number, length or kind of a block is wrong.
        """
        ...

    def update(
        self, position: int, data: Buffer, parity_index: int, parity: Buffer, *, first: bool
    ) -> None:
        """Add one data block to one parity block.

        The order in which a stripe's blocks come does not matter; a block that never comes
        counts as zeros, and so does what a block shorter than the parity lacks at its end.

        Args:
            position: of the data block in its stripe, 0 <= position < k.
            data: at most as long as `parity`.
            parity_index: 0 <= parity_index < m.
            parity: writable.
            first: it is the first one of its stripe, so what the parity held is overwritten.

        Raises:
            InternalError: an index, length or kind is wrong.
        """
        ...

    def rebuild(self, have: Mapping[int, Buffer], want: Mapping[int, Buffer]) -> None:
        """Write the wanted blocks of a stripe, data and parity alike.

        Args:
            have: at least k blocks of one length, by index; k of them are used.
            want: writable blocks of the same length, by index; none of those in `have`.

        Raises:
            InternalError: number, index, length or kind of a block is wrong.
        """
        ...


def choose_codec(k: int, m: int) -> Codec:
    """ISA-L in place where its library is found, else pyeclib, which copies.

    Raises:
        InternalError: k or m is out of range.
        NotSupportedHere: neither can be loaded.
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
    """Raises: InternalError: there is no code with k data and m parity blocks."""
    if not (1 <= k <= MAX_DATA and 1 <= m <= MAX_PARITY):
        raise InternalError(f"{k} data and {m} parity blocks; 1 to {MAX_DATA} of each can be")


def check_counts(codec: Codec, data: Sequence[Buffer], parity: Sequence[Buffer]) -> None:
    """Raises: InternalError: these are not all blocks of a stripe."""
    if (len(data), len(parity)) != (codec.k, codec.m):
        raise InternalError(
            f"{len(data)} data and {len(parity)} parity blocks for a stripe of "
            f"{codec.k} and {codec.m}"
        )


def check_place(codec: Codec, position: int, parity_index: int) -> None:
    """Raises: InternalError: the stripe has no such data or parity block."""
    if not (0 <= position < codec.k and 0 <= parity_index < codec.m):
        raise InternalError(
            f"data block {position} in parity block {parity_index}, in a stripe of "
            f"{codec.k} and {codec.m}"
        )


def sources_of(codec: Codec, have: Mapping[int, object], want: Mapping[int, object]) -> list[int]:
    """The k indexes to rebuild from: data first, whose rows are the cheapest.

    Raises:
        InternalError: an index is out of range or on both sides, or fewer than k are there.
    """
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
