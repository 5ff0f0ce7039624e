"""Every loss of up to m nodes with every kind of damage: exact bytes or an explicit refusal.

A refusal is right only if fewer than k good fragments are left, and then it is required.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, product
from random import Random

import pytest

from ftrun.erasure.codec import Codec, choose_codec
from ftrun.erasure.fragments import (
    HEADER_BYTES,
    Fragment,
    FragmentHeader,
    StripeId,
    block_digest,
    pack,
    run_digest,
)
from ftrun.erasure.pyeclib_codec import PyeclibCodec
from ftrun.erasure.rebuild import StripeFacts, StripeWork
from ftrun.ids import Generation, RunId, version

BLOCK_BYTES = 1000
OF = StripeId(run_digest(RunId("run")), version(4, 100), 9, 2)


class World:
    """A stripe of this generation, and the same stripe one snapshot earlier."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.n = codec.k + codec.m
        self.blocks = self._stripe(1)
        self.previous_blocks = self._stripe(2)
        self.facts = StripeFacts(OF, tuple(f"n{i}" for i in range(self.n)), Generation(4))

    def _stripe(self, seed: int) -> list[bytes]:
        data = [Random(f"{seed} {i}").randbytes(BLOCK_BYTES) for i in range(self.codec.k)]
        parity = [bytearray(BLOCK_BYTES) for _ in range(self.codec.m)]
        self.codec.encode(data, parity)
        return [*data, *map(bytes, parity)]

    def fragment(self, index: int) -> Fragment:
        header = FragmentHeader(OF, Generation(4), index, block_digest(self.blocks[index]))
        return Fragment(f"n{index}", index, pack(header), self.blocks[index])


def flipped_bit(world: World, index: int) -> Fragment:
    damaged = bytearray(world.blocks[index])
    damaged[index * 97 % BLOCK_BYTES] ^= 1 << index % 8
    return replace(world.fragment(index), payload=bytes(damaged))


def flipped_bit_of_the_header(world: World, index: int) -> Fragment:
    damaged = bytearray(world.fragment(index).header)
    damaged[index * 13 % HEADER_BYTES] ^= 1 << index % 8
    return replace(world.fragment(index), header=bytes(damaged))


def truncated(world: World, index: int) -> Fragment:
    return replace(world.fragment(index), payload=world.blocks[index][: BLOCK_BYTES // 2])


def duplicate_index(world: World, index: int) -> Fragment:
    """The node sends the valid fragment of its neighbour."""
    other = world.fragment((index + 1) % world.n)
    return replace(other, sender=f"n{index}", index=index)


def other_generation(world: World, index: int) -> Fragment:
    """A valid fragment, made now, of another generation's snapshot of the same step."""
    block = world.previous_blocks[index]
    of = replace(OF, version=version(3, 100))
    header = FragmentHeader(of, Generation(4), index, block_digest(block))
    return Fragment(f"n{index}", index, pack(header), block)


def protected_by_another_generation(world: World, index: int) -> Fragment:
    """A fragment of this version that an earlier generation made."""
    block = world.previous_blocks[index]
    header = FragmentHeader(OF, Generation(3), index, block_digest(block))
    return Fragment(f"n{index}", index, pack(header), block)


def zero_fill(world: World, index: int) -> Fragment:
    return replace(world.fragment(index), header=bytes(HEADER_BYTES), payload=bytes(BLOCK_BYTES))


def zeroed_payload(world: World, index: int) -> Fragment:
    return replace(world.fragment(index), payload=bytes(BLOCK_BYTES))


DAMAGES = [
    flipped_bit,
    flipped_bit_of_the_header,
    truncated,
    duplicate_index,
    other_generation,
    protected_by_another_generation,
    zero_fill,
    zeroed_payload,
]


def cases(world: World) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every loss of up to m nodes, with every set of damaged survivors."""
    places = range(world.n)
    for num_lost in range(world.codec.m + 1):
        for lost in combinations(places, num_lost):
            left = [position for position in places if position not in lost]
            for num_damaged in range(len(left) + 1):
                for damaged in combinations(left, num_damaged):
                    yield lost, damaged


@pytest.mark.parametrize("kind", [choose_codec, PyeclibCodec], ids=["isa-l", "pyeclib"])
@pytest.mark.parametrize(("k", "m"), [(2, 1), (3, 1), (4, 2)])
@pytest.mark.parametrize("damage", DAMAGES)
def test_exact_bytes_or_an_explicit_refusal(
    damage: Callable[[World, int], Fragment], k: int, m: int, kind: Callable[[int, int], Codec]
) -> None:
    counted = {"exact": 0, "refused": 0}
    world = World(kind(k, m))
    for step, (lost, damaged) in product((1, -1), cases(world)):
        fragments = [
            damage(world, position) if position in damaged else world.fragment(position)
            for position in range(world.n)
            if position not in lost
        ]
        found = {position: bytearray(BLOCK_BYTES) for position in (*lost, *damaged)}
        if not found:
            continue
        num_good = world.n - len(lost) - len(damaged)
        work = StripeWork(world.codec, world.facts, found)
        if any(map(work.take, fragments[::step])):
            assert num_good >= k, (lost, damaged)
            assert all(found[i] == world.blocks[i] for i in found), (lost, damaged)
            counted["exact"] += 1
        else:
            refusal = work.refusal()
            assert num_good < k, (lost, damaged)
            assert len(refusal.have) == num_good
            assert all(f"n{position}" in str(refusal) for position in (*lost, *damaged))
            counted["refused"] += 1
    assert counted["exact"]
    assert counted["refused"]
