"""Both codecs compute and refuse the same, for all kinds of memory.

A codec that is wrong in one place is detected before it is used.
"""

import mmap
import sys
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from math import comb
from random import Random

import pytest

from ftrun.erasure import isal
from ftrun.erasure.codec import (
    MAX_DATA,
    MAX_PARITY,
    MAX_SURVIVOR_SETS,
    Buffer,
    Codec,
    _nth_set,
    choose_codec,
    self_test,
    survivor_sets,
)
from ftrun.erasure.isal import IsalCodec, find_isal, load_isal
from ftrun.erasure.pinned_buffers import MAX_BLOCK_BYTES, PinnedBuffers
from ftrun.erasure.pyeclib_codec import PyeclibCodec
from ftrun.errors import InternalError, NotSupportedHere

SHAPES = [(1, 1), (2, 1), (3, 1), (4, 2), (6, 2)]
LENGTHS = [*range(1, 70), 127, 128, 129, 255, 511, 1023, 4095, 4097, 32767, 65535, 65536, 65549]
KINDS = [IsalCodec, PyeclibCodec]

each_codec = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
each_shape = pytest.mark.parametrize(("k", "m"), SHAPES)


def noise(*seed: int, length: int) -> bytes:
    return Random(repr(seed)).randbytes(length)


def stripe(k: int, m: int, length: int) -> tuple[list[bytes], list[bytearray]]:
    """Data, and parity memory with old content."""
    data = [noise(k, m, length, i, length=length) for i in range(k)]
    return data, [bytearray(noise(99, i, length=length)) for i in range(m)]


def whole_stripe(codec: Codec, length: int) -> list[bytes]:
    data, parity = stripe(codec.k, codec.m, length)
    codec.encode(data, parity)
    return [*data, *map(bytes, parity)]


@each_shape
def test_both_codecs_give_the_same_parity(k: int, m: int) -> None:
    one, other = IsalCodec(k, m), PyeclibCodec(k, m)
    for length in LENGTHS:
        assert whole_stripe(one, length) == whole_stripe(other, length), length


@each_codec
@each_shape
@pytest.mark.parametrize("length", [1, 33, 4097])
def test_any_k_blocks_give_all_others(kind: type[Codec], k: int, m: int, length: int) -> None:
    codec = kind(k, m)
    blocks = whole_stripe(codec, length)
    for survivors in combinations(range(k + m), k):
        lost = {i: bytearray(length) for i in range(k + m) if i not in survivors}
        codec.rebuild({i: blocks[i] for i in survivors}, lost)
        assert all(found == blocks[i] for i, found in lost.items())


@each_codec
def test_more_than_k_blocks_may_be_there_and_few_be_wanted(kind: type[Codec]) -> None:
    codec = kind(4, 2)
    blocks = whole_stripe(codec, 100)
    for wanted in range(6):
        found = bytearray(100)
        codec.rebuild({i: one for i, one in enumerate(blocks) if i != wanted}, {wanted: found})
        assert found == blocks[wanted]


@each_codec
@each_shape
def test_blocks_may_be_added_one_by_one_in_any_order(kind: type[Codec], k: int, m: int) -> None:
    codec = kind(k, m)
    for length in (1, 31, 65, 65549):
        blocks = whole_stripe(codec, length)
        for j in range(m):
            order = Random(length).sample(range(k), k)
            parity = bytearray(noise(5, length=length))
            for count, position in enumerate(order):
                codec.update(position, blocks[position], j, parity, first=count == 0)
            assert parity == blocks[k + j]


@each_codec
@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_short_block_counts_as_if_it_ended_in_zeros(kind: type[Codec], first: int) -> None:
    codec = kind(3, 1)
    data, (expected,) = stripe(3, 1, 500)
    data[1] = data[1][:77] + bytes(423)
    codec.encode(data, [expected])
    data[1] = data[1][:77]
    found = bytearray(noise(6, length=500))
    for count in range(3):
        position = (first + count) % 3
        codec.update(position, data[position], 0, found, first=count == 0)
    assert found == expected


@each_codec
def test_a_block_that_never_comes_counts_as_zeros(kind: type[Codec]) -> None:
    codec = kind(3, 1)
    data, (expected,) = stripe(3, 1, 64)
    codec.encode([data[0], bytes(64), data[2]], [expected])
    found = bytearray(64)
    codec.update(2, data[2], 0, found, first=True)
    codec.update(0, data[0], 0, found, first=False)
    assert found == expected


def in_mmap(block: bytes) -> Buffer:
    memory = mmap.mmap(-1, len(block))
    memory[:] = block
    return memory


def as_text(block: bytes) -> Buffer:
    return array("Q", block)


def in_the_middle(block: bytes) -> Buffer:
    return memoryview(bytearray(b"abc" + block + b"xyz"))[3:-3]


@each_codec
@pytest.mark.parametrize("lay", [bytearray, in_mmap, as_text, in_the_middle])
def test_memory_of_every_kind_is_used_in_place(
    kind: type[Codec], lay: Callable[[bytes], Buffer]
) -> None:
    codec = kind(2, 1)
    blocks = whole_stripe(codec, 4096)
    data, target = [lay(one) for one in blocks[:2]], lay(bytes(4096))
    codec.encode(data, [target])
    assert bytes(memoryview(target)) == blocks[2]
    codec.update(0, data[0], 0, target, first=True)
    codec.update(1, data[1], 0, target, first=False)
    assert bytes(memoryview(target)) == blocks[2]
    found = lay(bytes(4096))
    codec.rebuild({0: data[0], 2: target}, {1: found})
    assert bytes(memoryview(found)) == blocks[1]


@each_codec
def test_a_wrong_length_is_refused_before_anything_is_written(kind: type[Codec]) -> None:
    codec = kind(2, 1)
    good, short, target = bytes(10), bytes(9), bytearray(b"?" * 10)
    refused: list[Callable[[], object]] = [
        lambda: codec.encode([good, short], [target]),
        lambda: codec.encode([short, short], [target]),
        lambda: codec.encode([good, good], [target, target]),
        lambda: kind(1, 2).encode([good], [target, bytearray(9)]),
        lambda: codec.encode([good], [target]),
        lambda: codec.update(0, bytes(11), 0, target, first=True),
        lambda: codec.rebuild({0: good, 1: short}, {2: target}),
        lambda: codec.rebuild({1: good, 2: good}, {0: bytearray(11)}),
        lambda: codec.encode([b"", b""], [bytearray()]),
        lambda: PinnedBuffers([good], []),
    ]
    for call in refused:
        with pytest.raises(InternalError):
            call()
    assert target == b"?" * 10


@each_codec
def test_what_cannot_be_written_is_refused(kind: type[Codec]) -> None:
    codec = kind(2, 1)
    data = [bytes(8), bytes(8)]
    mapping = mmap.mmap(-1, 8, access=mmap.ACCESS_READ)
    for target in (bytes(8), memoryview(bytearray(8)).toreadonly(), mapping):
        with pytest.raises(InternalError):
            codec.encode(data, [target])
        with pytest.raises(InternalError):
            codec.update(0, data[0], 0, target, first=False)
        with pytest.raises(InternalError):
            codec.rebuild({0: data[0], 1: data[1]}, {2: target})


MEMORY = memoryview(bytearray(100))


@each_codec
@pytest.mark.parametrize(
    ("data", "parity"),
    [
        ([memoryview(bytes(16))[::2]], [bytearray(8)]),
        ([bytes(8)], [memoryview(bytearray(16))[::2]]),
        (["12345678"], [bytearray(8)]),
        ([MEMORY[:10]], [MEMORY[9:19]]),
        ([bytes(10)], [MEMORY[:10], MEMORY[5:15]]),
    ],
)
def test_what_is_no_memory_or_has_gaps_or_overlaps_is_refused(
    kind: type[Codec], data: list[Buffer], parity: list[Buffer]
) -> None:
    with pytest.raises(InternalError):
        kind(1, len(parity)).encode(data, parity)


@each_codec
def test_one_block_may_be_given_twice(kind: type[Codec]) -> None:
    kind(2, 2).encode([MEMORY[:10], MEMORY[:10]], [MEMORY[10:20], MEMORY[20:30]])


@each_codec
def test_a_place_that_is_not_in_the_stripe_is_refused(kind: type[Codec]) -> None:
    codec = kind(2, 1)
    block, target = bytes(4), bytearray(4)
    for position, parity_index in ((2, 0), (-1, 0), (0, 1), (0, -1)):
        with pytest.raises(InternalError):
            codec.update(position, block, parity_index, target, first=True)
    for have, want in (((0, 3), 2), ((0, 1), 3), ((0, -1), 2), ((0, 1), 0), ((0,), 1)):
        with pytest.raises(InternalError):
            codec.rebuild(dict.fromkeys(have, block), {want: target})


@each_codec
def test_a_block_beyond_the_limit_is_refused(kind: type[Codec]) -> None:
    # Never touched, so it takes no memory.
    memory = mmap.mmap(-1, MAX_BLOCK_BYTES + 1)
    with pytest.raises(InternalError):
        kind(1, 1).encode([memory], [mmap.mmap(-1, MAX_BLOCK_BYTES + 1)])


@each_codec
@pytest.mark.parametrize(("k", "m"), [(0, 1), (1, 0), (MAX_DATA + 1, 1), (1, MAX_PARITY + 1)])
def test_a_shape_out_of_range_is_refused(kind: type[Codec], k: int, m: int) -> None:
    with pytest.raises(InternalError):
        kind(k, m)


@each_codec
def test_memory_is_released_after_success_and_refusal(kind: type[Codec]) -> None:
    codec = kind(1, 1)
    memory = bytearray(8)
    codec.encode([bytes(8)], [memory])
    with pytest.raises(InternalError):
        codec.encode([bytes(9)], [memory])
    memory.extend(b"more")  # a BufferError while a view of it exists


@each_codec
def test_several_threads_may_use_one_codec(kind: type[Codec]) -> None:
    codec = kind(4, 2)
    lengths = (1000, 2000, 3000)
    expected = {length: whole_stripe(codec, length) for length in lengths}
    wrong: list[int] = []

    def work(length: int) -> None:
        for survivors in combinations(range(6), 4):
            blocks = expected[length]
            lost = {i: bytearray(length) for i in range(6) if i not in survivors}
            codec.rebuild({i: blocks[i] for i in survivors}, lost)
            wrong.extend(i for i, found in lost.items() if found != blocks[i])

    threads = [threading.Thread(target=work, args=(length,)) for length in lengths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_matrix_that_cannot_be_inverted_is_an_error_and_no_bytes() -> None:
    codec = IsalCodec(2, 1)
    codec._rows[2] = codec._rows[0]
    target = bytearray(b"?" * 8)
    with pytest.raises(InternalError):
        codec.rebuild({0: bytes(8), 2: bytes(8)}, {1: target})
    assert target == b"?" * 8


def test_tables_of_many_sets_are_not_kept_for_ever() -> None:
    codec = IsalCodec(10, 3)
    blocks = whole_stripe(codec, 8)
    for survivors in combinations(range(13), 10):
        lost = {i: bytearray(8) for i in range(13) if i not in survivors}
        codec.rebuild({i: blocks[i] for i in survivors}, lost)
        assert all(found == blocks[i] for i, found in lost.items())
    assert len(codec._kept) <= isal._MAX_KEPT


# --- the choice of the codec ------------------------------------------------------------------


def test_the_codec_in_place_is_chosen() -> None:
    assert choose_codec(3, 1).name == "isa-l"


@pytest.fixture
def no_isal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isal, "find_isal", lambda: None)


@pytest.mark.usefixtures("no_isal")
def test_the_other_one_is_chosen_where_the_library_is_not_found() -> None:
    codec = choose_codec(3, 1)
    assert (codec.k, codec.m, codec.name) == (3, 1, "pyeclib")


@pytest.mark.usefixtures("no_isal")
def test_without_either_the_message_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyeclib.ec_iface", None)
    with pytest.raises(NotSupportedHere) as caught:
        choose_codec(3, 1)
    assert "ISA-L" in str(caught.value)
    assert "pyeclib" in str(caught.value)


def test_pyeclib_without_its_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyeclib import ec_iface

    def no_backend(**_words: object) -> None:
        raise ec_iface.ECBackendNotSupported("isa_l_rs_cauchy is not there")

    monkeypatch.setattr(ec_iface, "ECDriver", no_backend)
    with pytest.raises(NotSupportedHere):
        PyeclibCodec(2, 1)


@pytest.mark.parametrize("path", [None, "/nowhere/libisal.so.2", "libc.so.6"])
def test_a_library_that_is_not_isal_is_refused(path: str | None) -> None:
    with pytest.raises(NotSupportedHere):
        load_isal(path)


def test_the_library_is_found_in_the_wheel_or_by_its_name() -> None:
    found = find_isal()
    assert found is not None
    assert "libisal" in found
    by_name = find_isal("a-distribution-that-is-not-there")
    assert by_name is None or "isal" in by_name
    assert find_isal("pytest") == by_name


@each_codec
@pytest.mark.parametrize(("k", "m"), [(1, 1), (1, 2), (2, 1), (3, 1), (4, 2), (6, 2), (8, 4)])
def test_all_survivor_sets_are_tried(kind: type[Codec], k: int, m: int) -> None:
    assert self_test(kind(k, m)) == comb(k + m, k)


def test_of_very_many_sets_a_sample_is_tried() -> None:
    sets = list(survivor_sets(12, 6))
    assert len(sets) == len({*sets}) == MAX_SURVIVOR_SETS < comb(18, 6)
    assert sets[0] == tuple(range(12))
    assert sets[-1] == tuple(range(6, 18))
    assert sets == list(survivor_sets(12, 6))


@pytest.mark.parametrize(("n", "k"), [(5, 1), (7, 3), (9, 8), (6, 6)])
def test_a_set_is_found_by_its_number(n: int, k: int) -> None:
    found = [_nth_set(rank, n, k) for rank in range(comb(n, k))]
    assert found == list(combinations(range(n), k))


class Faulty(IsalCodec):
    """A codec with one wrong bit in one of its methods."""

    def __init__(self, where: str) -> None:
        super().__init__(3, 2)
        self._where = where

    def encode(self, data: Sequence[Buffer], parity: Sequence[Buffer]) -> None:
        super().encode(data, parity)
        self._break("encode", parity[1])

    def update(
        self, position: int, data: Buffer, parity_index: int, parity: Buffer, *, first: bool
    ) -> None:
        super().update(position, data, parity_index, parity, first=first)
        self._break("update", parity)

    def rebuild(self, have: Mapping[int, Buffer], want: Mapping[int, Buffer]) -> None:
        super().rebuild(have, want)
        if set(have) == {0, 3, 4}:
            self._break("rebuild", want[2])

    def _break(self, where: str, block: Buffer) -> None:
        if where == self._where:
            memoryview(block)[-1] ^= 64


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("encode", "parity block 1 is"),
        ("update", "parity block 0, made block by block, is"),
        ("rebuild", r"block 2, rebuilt from blocks \[0, 3, 4\], is"),
    ],
)
def test_a_wrong_block_is_found_and_named(where: str, reason: str) -> None:
    with pytest.raises(InternalError, match=reason):
        self_test(Faulty(where))


def test_the_parity_of_one_data_block_is_a_copy() -> None:
    """What a mirror stores, see RingStripes."""
    codec, block, copy = choose_codec(1, 1), bytes(range(256)) * 5, bytearray(1280)
    codec.update(0, block, 0, copy, first=True)
    assert copy == block
