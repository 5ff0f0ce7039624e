"""Checks that this codec, on this machine, rebuilds the blocks that it was given.

Runs in:  the SMP, once, before the first snapshot is protected. Pure.
Takes in: a `Codec`.
Gives:    nothing, or an InternalError that names the blocks.

A wrongly built library, or a processor that computes wrong results, would otherwise be found only
after the loss of a node. Every set of k survivors is therefore tried on small blocks. If there are
more than 2,000 sets, a sample is tried. The parity is compared with separate arithmetic, because
nodes with different libraries must agree on the matrix.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations, islice
from math import comb

import xxhash

from ftrun.erasure.codec import Codec
from ftrun.errors import InternalError

MAX_SURVIVOR_SETS = 2000

_BLOCK_BYTES = 97
"""One vector of the widest kind, one of the narrowest, and one byte outside any vector."""

_POLYNOMIAL = 0x11D


def self_test(codec: Codec) -> int:
    """Tries all survivor sets, or 2,000 of them; returns their number.

    Raises:
        InternalError: a parity or a rebuilt block is wrong; the codec must not be used.
    """
    data = [_noise(i) for i in range(codec.k)]
    parity = _parity_by_hand(data, codec.m)
    _check_encode(codec, data, parity)
    _check_update(codec, data, parity)
    count = 0
    for survivors in survivor_sets(codec.k, codec.m):
        _check_rebuild(codec, [*data, *parity], survivors)
        count += 1
    return count


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


def _check_encode(codec: Codec, data: list[bytes], expected: list[bytes]) -> None:
    made = [_dirty() for _ in range(codec.m)]
    codec.encode(data, made)
    for j, (found, right) in enumerate(zip(made, expected, strict=True)):
        _compare(codec, f"parity block {j}", found, right)


def _check_update(codec: Codec, data: list[bytes], expected: list[bytes]) -> None:
    for j, right in enumerate(expected):
        found = _dirty()
        for count, position in enumerate(reversed(range(codec.k))):
            codec.update(position, data[position], j, found, first=count == 0)
        _compare(codec, f"parity block {j}, made block by block,", found, right)


def _check_rebuild(codec: Codec, stripe: list[bytes], survivors: tuple[int, ...]) -> None:
    lost = {i: _dirty() for i in range(codec.k + codec.m) if i not in survivors}
    codec.rebuild({i: stripe[i] for i in survivors}, lost)
    for i, found in lost.items():
        _compare(codec, f"block {i}, rebuilt from blocks {list(survivors)},", found, stripe[i])


def _compare(codec: Codec, what: str, found: bytearray, right: bytes) -> None:
    if found != right:
        raise InternalError(
            f"{what} is wrong with {codec.name} for {codec.k} data and {codec.m} parity blocks. "
            "Its library or this processor cannot be trusted with a snapshot: replace pyeclib, "
            "take the node out, or give --erasure none"
        )


def _noise(seed: int) -> bytes:
    words = (xxhash.xxh3_64_digest(b"ftrun", seed=(seed << 16) + at) for at in range(_BLOCK_BYTES))
    return b"".join(islice(words, _BLOCK_BYTES // 8 + 1))[:_BLOCK_BYTES]


def _dirty() -> bytearray:
    """A target with old content, as parity memory has from the last snapshot."""
    return bytearray(b"\xa5" * _BLOCK_BYTES)


# --- the same without a library -----------------------------------------------------------------


def _parity_by_hand(data: Sequence[bytes], m: int) -> list[bytes]:
    """Parity by the definition in codec.py, bit by bit."""
    k = len(data)
    return [
        _sum([_scaled(_inverse((k + j) ^ i), block) for i, block in enumerate(data)])
        for j in range(m)
    ]


def _sum(blocks: Sequence[bytes]) -> bytes:
    total = bytearray(_BLOCK_BYTES)
    for block in blocks:
        for at, value in enumerate(block):
            total[at] ^= value
    return bytes(total)


def _scaled(factor: int, block: bytes) -> bytes:
    return block.translate(bytes(_times(factor, value) for value in range(256)))


def _inverse(value: int) -> int:
    return next(other for other in range(1, 256) if _times(value, other) == 1)


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
