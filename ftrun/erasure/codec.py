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
Rule 4: a codec is tested once, before the first snapshot is protected. A wrongly built library, or
        a processor that computes wrong results, would otherwise be found after the loss of a node.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, islice, product
from math import comb
from typing import Protocol

import xxhash

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
        """Writes all m parity blocks of a stripe from its k blocks of one length, in place."""
        ...

    def update(
        self, position: int, data: Buffer, parity_index: int, parity: Buffer, *, first: bool
    ) -> None:
        """Adds one data block to one parity block.

        The blocks of a stripe may be added in any order. A block that is never added counts as
        zeros, and so do the missing bytes of a block that is shorter than the parity. If it is the
        `first` block of its stripe, it overwrites the old content.
        """
        ...

    def rebuild(self, have: Mapping[int, Buffer], want: Mapping[int, Buffer]) -> None:
        """Writes the wanted blocks of a stripe, both data and parity, from any k of `have`.

        Blocks are by index and of one length; none of the wanted ones is in `have`.
        """
        ...


def choose_codec(k: int, m: int) -> Codec:
    """The ISA-L codec, or else pyeclib's; raises NotSupportedHere if neither can be loaded."""
    from ftrun.erasure.isal import IsalCodec
    from ftrun.erasure.pyeclib_codec import PyeclibCodec

    try:
        return IsalCodec(k, m)
    except NotSupportedHere as first:
        try:
            return PyeclibCodec(k, m)
        except NotSupportedHere as second:
            raise NotSupportedHere(
                f"no erasure code library is usable: {first}; {second}. Install pyeclib 1.8 "
                "or newer for this Python, or use --erasure none"
            ) from second


def check_shape(k: int, m: int) -> None:
    if not (1 <= k <= MAX_DATA and 1 <= m <= MAX_PARITY):
        raise InternalError(
            f"{k} data and {m} parity blocks; allowed are 1 to {MAX_DATA} and 1 to {MAX_PARITY}"
        )


def check_counts(codec: Codec, data: Sequence[Buffer], parity: Sequence[Buffer]) -> None:
    if (len(data), len(parity)) != (codec.k, codec.m):
        raise InternalError(
            f"{len(data)} data and {len(parity)} parity blocks for a stripe of "
            f"{codec.k} and {codec.m}"
        )


def check_position(codec: Codec, position: int, parity_index: int) -> None:
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
            f"blocks {sorted(wrong)} are both available and wanted, or not in a stripe of "
            f"{codec.k} and {codec.m}"
        )
    if len(have) < codec.k:
        raise InternalError(
            f"{len(have)} blocks of a stripe are available and {codec.k} are needed"
        )
    return sorted(have)[: codec.k]


MAX_SURVIVOR_SETS = 2000

_BLOCK_BYTES = 97
"""One vector of the widest kind, one of the narrowest, and one byte outside any vector."""

_POLYNOMIAL = 0x11D


def self_test(codec: Codec) -> int:
    """Tries all survivor sets on small blocks, or 2,000 of them; returns their number.

    Raises InternalError if a parity or a rebuilt block is wrong: the codec must not be used. The
    parity is compared with separate arithmetic, because nodes with different libraries must agree
    on the matrix.
    """
    data = [_noise(i) for i in range(codec.k)]
    parity = _parity_by_hand(data, codec.m)
    made = [_dirty() for _ in parity]
    codec.encode(data, made)
    for j, found in enumerate(made):
        _compare(codec, f"parity block {j}", found, parity[j])
    for j, right in enumerate(parity):
        found = _dirty()
        for count, position in enumerate(reversed(range(codec.k))):
            codec.update(position, data[position], j, found, first=count == 0)
        _compare(codec, f"parity block {j}, made block by block,", found, right)
    stripe: list[bytes | bytearray] = [*data, *parity]
    num_sets = 0
    for survivors in survivor_sets(codec.k, codec.m):
        lost = {i: _dirty() for i in range(codec.k + codec.m) if i not in survivors}
        codec.rebuild({i: stripe[i] for i in survivors}, lost)
        for i, found in lost.items():
            _compare(codec, f"block {i}, rebuilt from blocks {list(survivors)},", found, stripe[i])
        num_sets += 1
    return num_sets


def survivor_sets(k: int, m: int) -> Iterator[tuple[int, ...]]:
    """Every set of k of the k+m indexes, or 2,000 at equal distances; equal at each call."""
    total = comb(k + m, k)
    if total <= MAX_SURVIVOR_SETS:
        yield from combinations(range(k + m), k)
        return
    for sample in range(MAX_SURVIVOR_SETS):
        yield _nth_set(sample * (total - 1) // (MAX_SURVIVOR_SETS - 1), k + m, k)


def _nth_set(rank: int, n: int, k: int) -> tuple[int, ...]:
    """The set at index `rank` of `combinations(range(n), k)`, without enumerating them."""
    chosen: list[int] = []
    for i in range(n):
        if len(chosen) == k:
            break
        with_i = comb(n - i - 1, k - len(chosen) - 1)
        if rank < with_i:
            chosen.append(i)
        else:
            rank -= with_i
    return tuple(chosen)


def _compare(codec: Codec, what: str, found: bytearray, right: bytes | bytearray) -> None:
    if found != right:
        raise InternalError(
            f"{what} is wrong with {codec.name} for {codec.k} data and {codec.m} parity blocks. "
            "The library or this processor is faulty: replace pyeclib, remove the node, "
            "or use --erasure none"
        )


def _noise(seed: int) -> bytes:
    words = (xxhash.xxh3_64_digest(b"ftrun", seed=(seed << 16) + at) for at in range(_BLOCK_BYTES))
    return b"".join(islice(words, _BLOCK_BYTES // 8 + 1))[:_BLOCK_BYTES]


def _dirty() -> bytearray:
    """A target with old content, as parity memory has from the last snapshot."""
    return bytearray(b"\xa5" * _BLOCK_BYTES)


# --- the same without a library -----------------------------------------------------------------


def _parity_by_hand(data: Sequence[bytes], m: int) -> list[bytearray]:
    """Parity by the definition in the module's docstring, bit by bit."""
    k = len(data)
    parity = [bytearray(_BLOCK_BYTES) for _ in range(m)]
    for j, (i, block) in product(range(m), enumerate(data)):
        factor = next(one for one in range(1, 256) if _times((k + j) ^ i, one) == 1)
        for at, value in enumerate(block):
            parity[j][at] ^= _times(factor, value)
    return parity


def _times(one: int, other: int) -> int:
    """Product in GF(2^8)."""
    product = 0
    while other:
        if other & 1:
            product ^= one
        one <<= 1
        if one & 0x100:
            one ^= _POLYNOMIAL
        other >>= 1
    return product
